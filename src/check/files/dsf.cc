// dsf files: the matrices of a mixer's system, its transfer, and everything that is reported of it.
#include "analysis/dsf.h"

#include <algorithm>
#include <cmath>

#include "check/files/file_kind.h"

namespace linnet::check {
namespace {

using namespace analysis;

std::vector<double> part(const std::vector<Complex>& values, bool imaginary) {
  std::vector<double> out;
  for (const Complex& x : values) out.push_back(imaginary ? x.imag() : x.real());
  return out;
}

// A matrix under its name, or as NAME_real and NAME_imag.
Status expect_complex(Stored& stored, const std::string& name, const std::vector<Complex>& got,
                      const std::vector<int64_t>& shape, double gate) {
  if (stored.has(name)) return stored.expect(name, part(got, false), shape, gate);
  LINNET_TRY(stored.expect(name + "_real", part(got, false), shape, gate));
  return stored.expect(name + "_imag", part(got, true), shape, gate);
}

// Eigenvalues are compared as sets: ours are put in the order of the nearest stored ones.
Status expect_eigenvalues(Stored& stored, const SafetensorsFile& file, const SystemReport& r, double gate) {
  if (!file.has("eig_real") || !file.has("eig_imag")) return {};
  const System& s = r.system;
  const int64_t N = s.states(), own = N / r.multiplicity;
  std::vector<double> want_real, want_imag, real, imag;
  LINNET_TRY(file.read_f64("eig_real", want_real));
  LINNET_TRY(file.read_f64("eig_imag", want_imag));
  if (static_cast<int64_t>(want_real.size()) != s.T * N || want_imag.size() != want_real.size()) {
    return stored.error("eig_real and eig_imag have the wrong size, expected " + std::to_string(s.T) + " x " +
                        std::to_string(N));
  }
  for (int64_t t = 0; t < s.T; ++t) {
    std::vector<Complex> left;
    for (int64_t i = 0; i < N; ++i) {
      const auto from = static_cast<size_t>(t * own + i % own);
      left.emplace_back(r.eig_real[from], r.eig_imag[from]);
    }
    for (int64_t i = 0; i < N; ++i) {
      const Complex want(want_real[static_cast<size_t>(t * N + i)], want_imag[static_cast<size_t>(t * N + i)]);
      size_t best = 0;
      for (size_t j = 1; j < left.size(); ++j) {
        if (std::abs(left[j] - want) < std::abs(left[best] - want)) best = j;
      }
      real.push_back(left[best].real());
      imag.push_back(left[best].imag());
      left.erase(left.begin() + static_cast<std::ptrdiff_t>(best));
    }
  }
  LINNET_TRY(stored.expect("eig_real", real, {s.T, N}, gate));
  return stored.expect("eig_imag", imag, {s.T, N}, gate);
}

Status run(const SafetensorsFile& file, Dtype dtype, const Setting&, Result* result) {
  Stored stored(file, result);
  const double gate = rms_gate(dtype, Pass::forward, Against::vectors, false, 0);
  const double gradient_gate = rms_gate(dtype, Pass::backward, Against::vectors, false, 0);
  MixerInputs inputs;
  for (const char* name :
       {"q",   "k",       "v",       "n",         "log_alpha", "beta",   "alpha",  "delta",  "A",      "b",
        "c",   "d",       "nu_log",  "theta_log", "a_real",    "a_imag", "b_real", "b_imag", "c_real", "c_imag",
        "lam", "r_logit", "i_logit", "forget",    "inp",       "outp",   "u",      "dt"}) {
    if (!file.has(name)) continue;
    analysis::Array& array = inputs.tensors[name];
    LINNET_TRY(stored.numbers(name, &array.values, &array.shape));
  }
  for (const auto& [key, value] : file.metadata()) inputs.words[key] = value;
  const Mixer* mixer = guess_mixer(file.metadata("mixer"), inputs);
  if (mixer == nullptr) return stored.error("its mixer is '" + file.metadata("mixer") + "', which this build does not know");
  SystemSetting setting;
  LINNET_TRY(stored.integer("window", 1, 1'000'000, &setting.window));
  SystemReport r;
  if (const Status status = analyse(mixer->name, inputs, setting, &r); !status.ok()) return stored.error(status.message());
  if (!r.ok())
    result->faults.push_back("the system does not reproduce the mixer: " +
                             std::to_string(std::max(r.recurrence_error, r.transfer_error)));
  const System& s = r.system;
  const int64_t T = s.T, N = s.states(), Du = s.inputs(), Dy = s.outputs();
  LINNET_TRY(stored.expect("out", r.out, {T, Dy}, gate));
  const DenseSystem full = dense(s);
  LINNET_TRY(expect_complex(stored, "L", full.L, {T, N, N}, gate));
  LINNET_TRY(expect_complex(stored, "B", full.B, {T, N, Du}, gate));
  LINNET_TRY(expect_complex(stored, "C", full.C, {T, Dy, N}, gate));
  LINNET_TRY(stored.expect(file.has("D") ? "D" : "D_real", full.D, {T, Dy, Du}, gate));
  if (file.has("D_imag")) LINNET_TRY(stored.expect("D_imag", std::vector<double>(full.D.size(), 0), {T, Dy, Du}, gate));
  LINNET_TRY(stored.expect("transfer", full.transfer, {T, T, Dy, Du}, gate));
  LINNET_TRY(expect_eigenvalues(stored, file, r, gate));
  LINNET_TRY(stored.expect("spectral_radius", r.spectral_radius, {T}, gate));
  LINNET_TRY(stored.expect("memory_length", r.memory_length, {T}));
  LINNET_TRY(stored.expect("mixing", r.mixing.values, {T, T}, gate));
  LINNET_TRY(stored.expect("singular_values", r.singular_values, {T}, gate));
  LINNET_TRY(stored.expect("row_sum", r.row_sum, {T}, gate));
  LINNET_TRY(stored.expect("entropy", r.entropy, {T}, gate));
  LINNET_TRY(stored.expect("mean_distance", r.mean_distance, {T}, gate));
  LINNET_TRY(stored.expect("local_mass", r.local_mass, {T}, gate));
  LINNET_TRY(stored.expect("negative_mass", r.negative_mass, {T}, gate));
  if (file.has("dout") && mixer->name == "normalised") {
    std::vector<double> dout, dq, dk, dv, dn;
    LINNET_TRY(stored.numbers("dout", &dout));
    if (const Status status = normalised_gradients(inputs, dout, &dq, &dk, &dv, &dn); !status.ok())
      return stored.error(status.message());
    LINNET_TRY(stored.expect("dq", dq, {T, s.n}, gradient_gate, Pass::backward));
    LINNET_TRY(stored.expect("dk", dk, {T, s.n}, gradient_gate, Pass::backward));
    LINNET_TRY(stored.expect("dv", dv, {T, Dy}, gradient_gate, Pass::backward));
    LINNET_TRY(stored.expect("dn", dn, {T}, gradient_gate, Pass::backward));
  }
  LINNET_TRY(stored.expect_real("state_size", static_cast<double>(r.state_size), 0));
  LINNET_TRY(stored.expect_real("scalar_mixing", r.mixing_kind == "scalar" ? 1 : 0, 0));
  if (r.mixing_kind != "scalar") LINNET_TRY(stored.expect_real("channelwise", r.mixing_kind == "channelwise" ? 1 : 0, 0));
  LINNET_TRY(stored.expect_real("rank", static_cast<double>(r.rank), 0));
  LINNET_TRY(stored.expect_real("effective_rank", r.effective_rank, gate));
  LINNET_TRY(stored.expect_real("stable_rank", r.stable_rank, gate));
  LINNET_TRY(stored.expect_real("semiseparable_rank", static_cast<double>(r.semiseparable_rank), 0));
  stored.expect_text("class", r.row_class);
  return stored.finish();
}

}  // namespace

const FileKind& dsf_files() {
  static const FileKind kind = {
      .name = "dsf",
      .takes = [](std::string_view mechanism, std::string_view) { return mechanism == "dsf"; },
      .exact_only = true,
      .run = run,
  };
  return kind;
}

}  // namespace linnet::check
