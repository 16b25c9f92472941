// dsf: what a mixer can remember and how it mixes, from its system. Every quantity is defined in docs/understand.md.
//
//   SystemReport report;
//   LINNET_TRY(analyse("gla", inputs, {.window = 16}, &report));
//   report.recurrence_error;                         // system against the mixer's own output: below 1e-10, or something is
//   wrong
#pragma once

#include <string>
#include <vector>

#include "analysis/mixers.h"
#include "core/tolerance.h"

namespace linnet::analysis {

inline constexpr int64_t kMaxAnalysed = 2048;  // tokens: the singular values of T x T take T^3 operations
inline constexpr int64_t kEveryCut = 128;      // semiseparable ranks at every cut up to here, at three cuts beyond

struct SystemSetting {
  int64_t window = 16;  // of the local mass
  bool ranks = true;    // singular values
};

struct SystemReport {
  std::string mixer;
  System system;
  std::vector<double> out;                          // the mixer's own output [T, Dy]
  double recurrence_error = 0, transfer_error = 0;  // of max(1, max|out|)
  int64_t state_size = 0, cache_size = 0;           // reals; of a cache with its keys
  std::vector<double> eig_real, eig_imag;           // [T, sets, n]: of the blocks, each as often as `multiplicity`
  int64_t multiplicity = 1;
  std::vector<double> spectral_radius;                        // [T]
  double radius_low = 0, radius_middle = 0, radius_high = 0;  // quantiles 0.1, 0.5, 0.9 over t (from the second token on)
  double half_life = 0;                                       // of the middle radius: infinite at 1, 0 at 0, negative: growth
  bool growth = false;                                        // a radius above 1
  std::vector<int64_t> memory_length;                         // [T]
  std::string mixing_kind;                                    // scalar, channelwise, norms
  Matrix mixing;                                              // M [T, T], of channel 0 when channelwise
  std::vector<double> singular_values;
  int64_t rank = 0, semiseparable_rank = 0;
  double effective_rank = 0, stable_rank = 0;
  std::vector<double> row_sum, entropy, relative_entropy, mean_distance, local_mass, negative_mass;  // [T]
  int64_t zero_rows = 0;
  std::string row_class;  // convex, affine, zero-sum, signed, nonnegative

  bool ok() const { return recurrence_error <= kSystemError && transfer_error <= kSystemError; }
};

Status analyse(std::string_view mixer, const MixerInputs& inputs, const SystemSetting& setting, SystemReport* report);

// What a mixing matrix says by itself: everything from singular_values on.
void describe_mixing(const Matrix& mixing, const SystemSetting& setting, SystemReport* report);
int64_t semiseparable_rank(const Matrix& mixing);

// Scalar decay is normalisation: n_t = -sum log a_i, so that the mixer is normalised attention with keys exp(n_t) k_t. A
// sentence where that has no meaning: L is no number, or it is complex, 0 or negative (the first token's aside).
Status normaliser_of(const std::string& mixer, const System& system, std::vector<double>* n);

// Injectivity of query -> weights (softmax, linear, taylor): pairs of queries further apart than 1e-6 whose weights agree to
// 1e-6, the factors c in {0.5, 2, -1} for which c q has the weights of q for every query, and the rank of dw/dq.
struct Injectivity {
  int64_t pairs = 0, collisions = 0, jacobian_rank = 0;
  std::vector<double> same_factors;
};
Status injectivity(std::string_view mixer, const MixerInputs& inputs, Injectivity* result);

// Gradients of sum(out * dout) for normalised attention: dq, dk [T, K], dv [T, V], dn [T].
Status normalised_gradients(const MixerInputs& inputs, const std::vector<double>& dout, std::vector<double>* dq,
                            std::vector<double>* dk, std::vector<double>* dv, std::vector<double>* dn);

// {"mixer": ..., "state_size": ..., ...} under the names above.
std::string report_json(const std::vector<SystemReport>& reports, int indent = 2);
// The columns of the table that the command and the page show, and one row of it.
std::vector<std::string> report_heading();
std::vector<std::string> report_row(const SystemReport& report);
// What separates two mixers on the same tokens, a sentence each: state expansion, normalisation, recurrence.
std::vector<std::string> differences(const SystemReport& a, const SystemReport& b);
// One self-contained page: a table, the mixing matrices, spectra, eigenvalues in the plane, rows.
std::string report_page(const std::vector<SystemReport>& reports, const std::string& title);

}  // namespace linnet::analysis
