// System: a mixer as the linear system of the Dynamical Systems Framework (Sieber et al., NeurIPS 2024, arXiv 2405.15731),
//
//   h_t = L_t h_{t-1} + B_t u_t,   y_t = C_t h_t + D_t u_t,   h_0 = 0
//
// Attention, state space models and gated recurrences have one form: `channels` independent systems of n states, whose L_t is a
// number, a diagonal or a small dense block, with a write vector b_t and a read vector c_t. Outer-product mixers share all of
// it between their channels (the value's coordinates); S6 and the LSTMs do not. An LRU mixes channels: it has constant
// matrices. State in value-major order: h[j n + a] is state a of channel j.
#pragma once

#include <complex>
#include <cstdint>
#include <string>
#include <vector>

#include "analysis/linalg.h"

namespace linnet::analysis {

using Complex = std::complex<double>;

enum class Form { scalar, diagonal, dense };

struct System {
  int64_t T = 0, n = 0, channels = 0;
  bool shared = true;    // every channel has the same L, b, c and d
  bool complex = false;  // y is the real part
  bool cache = false;    // softmax: the state is a cache that grows with T
  Form form = Form::scalar;
  // scalar: L_t = sign exp(log), and B's weight likewise: products over long spans stay sums of logarithms.
  std::vector<double> log_decay, decay_sign, log_weight, weight_sign;  // [T]
  std::vector<Complex> L;     // diagonal [T, S, n] or dense [T, n, n]; S is 1 when shared, else channels
  std::vector<Complex> b, c;  // [T, S, n]; b without the scalar form's weight
  std::vector<double> d;      // [T, S], or empty: no skip
  int64_t restarts = 0;       // steps whose normaliser was 0

  bool full = false;  // constant matrices: L = diag(lambda), B [n, Du], C [Dy, n], D [Dy, Du]
  std::vector<Complex> lambda, B, C;
  std::vector<double> D;
  int64_t Du = 0, Dy = 0;

  int64_t states() const { return full ? n : n * channels; }      // N
  int64_t reals() const { return states() * (complex ? 2 : 1); }  // a complex state counts twice
  int64_t inputs() const { return full ? Du : channels; }
  int64_t outputs() const { return full ? Dy : channels; }
  int64_t sets() const { return shared ? 1 : channels; }
};

// y [T, Dy] of u [T, Du] by the recurrence, token after token.
std::vector<double> run(const System& system, const std::vector<double>& u);

// m [T, T] of one channel: y_t = sum_i m[t, i] u_i + (the skip is in m[t, t]); real parts. Not for full systems.
Matrix channel_mixing(const System& system, int64_t channel);
// C lambda^lag B of a full system (real part, D added at lag 0), [Dy, Du].
Matrix lag_response(const System& system, int64_t lag);

// Eigenvalues of channel `set`'s block of L_t, n of them.
Status block_eigenvalues(const System& system, int64_t t, int64_t set, std::vector<Complex>* values);

// The matrices as they stand in the equations, for comparison: [T, N, N], [T, N, Du], [T, Dy, N], [T, Dy, Du] and the transfer
// G [T, T, Dy, Du], G[t, i] = C_t L_t ... L_{i+1} B_i + [t = i] D_t.
struct DenseSystem {
  std::vector<Complex> L, B, C;
  std::vector<double> D, transfer;
};
DenseSystem dense(const System& system);

}  // namespace linnet::analysis
