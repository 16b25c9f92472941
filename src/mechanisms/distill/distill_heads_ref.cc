// Balancing, hybrids and statistics of heads, in double: the specification of `distill_balance` and `distill_window`.
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/launch.h"
#include "distill.h"
#include "distill_spectra.h"
#include "mechanisms/shared/ref_rows.h"

namespace linnet::ref {
namespace {

// ---- attention by pairs over a window of exact scores and features beyond it, in the log domain

struct Balance {
  int64_t B, T, H, K, V, M;
  double eta, root;
  double *q0, *k0;                       // [K]
  double *Sq, *Sk, *A, *inverse;         // [K, K]
  double *work, *vectors, *half, *back;  // [K, K] scratch: Sq^1/2, Sq^-1/2
  double* values;                        // [K]
  double *q, *k, *logw;                  // balanced, of one batch row: [T, K], [T, K], [T]
  double *lq, *lk;                       // [T, M]
  double *log_a, *o;                     // [T], [V]
};
Balance cut_balance(Arena& arena, const DistillBalanceArgs& args) {
  Balance r{};
  r.B = args.q.size[0];
  r.T = args.q.size[1];
  r.H = args.q.size[2];
  r.K = args.q.size[3];
  r.V = args.v.size[3];
  r.M = args.z.size[1];
  r.eta = 1 / std::sqrt(static_cast<double>(r.K));
  r.root = std::sqrt(std::sqrt(static_cast<double>(r.K)));
  for (double** row : {&r.q0, &r.k0, &r.values}) *row = arena.take<double>(r.K);
  for (double** m : {&r.Sq, &r.Sk, &r.A, &r.inverse, &r.work, &r.vectors, &r.half, &r.back}) *m = arena.take<double>(r.K * r.K);
  r.q = arena.take<double>(r.T * r.K);
  r.k = arena.take<double>(r.T * r.K);
  r.logw = arena.take<double>(r.T);
  r.lq = arena.take<double>(r.T * r.M);
  r.lk = arena.take<double>(r.T * r.M);
  r.log_a = arena.take<double>(r.T);
  r.o = arena.take<double>(r.V);
  return r;
}

// The eigenvalues and eigenvectors of the symmetric a, which is kept.
void decompose(const Balance& r, const double* a) {
  std::copy(a, a + r.K * r.K, r.work);
  symmetric_eigenvectors(r.K, r.work, r.values, r.vectors);
}
// to = f(a) of the matrix that was decomposed
template <class F>
void of_decomposed(const Balance& r, double* to, const F& f) {
  const int64_t n = r.K;
  std::fill(to, to + n * n, 0.0);
  for (int64_t e = 0; e < n; ++e) {
    const double value = f(std::max(r.values[e], 0.0));
    const double* v = r.vectors + e * n;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < n; ++j) to[i * n + j] += value * v[i] * v[j];
    }
  }
}
void product(int64_t n, const double* a, const double* b, double* c) {
  std::fill(c, c + n * n, 0.0);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t e = 0; e < n; ++e) {
      for (int64_t j = 0; j < n; ++j) c[i * n + j] += a[i * n + e] * b[e * n + j];
    }
  }
}

// q0, k0, A and its inverse of head h
void find_balance(const Balance& r, const DistillBalanceArgs& args, int64_t h) {
  const int64_t K = r.K, rows = r.B * r.T;
  const double count = static_cast<double>(std::max<int64_t>(1, rows));
  const auto moments = [&](const View& x, double* mean, double* S) {
    for (int64_t c = 0; c < K; ++c) mean[c] = 0;
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t c = 0; c < K; ++c) mean[c] += get(x, i / r.T, i % r.T, h, c) / count;
    }
    for (int64_t i = 0; i < K * K; ++i) S[i] = 0;
    for (int64_t i = 0; i < rows; ++i) {
      double* row = r.values;
      for (int64_t c = 0; c < K; ++c) row[c] = get(x, i / r.T, i % r.T, h, c) - mean[c];
      for (int64_t a = 0; a < K; ++a) {
        for (int64_t b = 0; b < K; ++b) S[a * K + b] += row[a] * row[b] / count;
      }
    }
    double trace = 0;
    for (int64_t c = 0; c < K; ++c) trace += S[c * K + c];
    for (int64_t c = 0; c < K; ++c) S[c * K + c] += args.ridge * trace / static_cast<double>(K);
  };
  moments(args.q, r.q0, r.Sq);
  moments(args.k, r.k0, r.Sk);
  const auto root_of = [](double x) { return std::sqrt(x); };
  const auto inverse_root = [](double x) { return x > 0 ? 1 / std::sqrt(x) : 0; };
  decompose(r, r.Sq);
  of_decomposed(r, r.half, root_of);
  of_decomposed(r, r.back, inverse_root);
  decompose(r, r.Sk);
  of_decomposed(r, r.A, root_of);
  // Sq^1/2 Sk Sq^1/2 = N^T N with N = Sk^1/2 Sq^1/2: its root from N itself, whose small values are the root's, not their
  // squares. Rows become sigma u, then sigma^1/2 u Sq^-1/2, which are B^T of A^2 = B B^T.
  product(K, r.A, r.half, r.inverse);
  orthogonal_rows(K, r.inverse);
  const auto length = [&](const double* row) {
    double sum = 0;
    for (int64_t c = 0; c < K; ++c) sum += row[c] * row[c];
    return std::sqrt(sum);
  };
  for (int64_t i = 0; i < K; ++i) {
    const double root = inverse_root(length(r.inverse + i * K));
    for (int64_t c = 0; c < K; ++c) r.inverse[i * K + c] *= root;
  }
  product(K, r.inverse, r.back, r.vectors);
  orthogonal_rows(K, r.vectors);
  for (int64_t e = 0; e < K; ++e) {
    double* row = r.vectors + e * K;
    r.values[e] = length(row);
    for (int64_t c = 0; c < K; ++c) row[c] = r.values[e] > 0 ? row[c] / r.values[e] : 0;
  }
  of_decomposed(r, r.A, [](double x) { return x; });
  of_decomposed(r, r.inverse, [](double x) { return x > 0 ? 1 / x : 0; });
}

double dot(const double* a, const double* b, int64_t n) {
  double sum = 0;
  for (int64_t c = 0; c < n; ++c) sum += a[c] * b[c];
  return sum;
}

// Log features of rows x [T, K] of head h
void log_features(const Balance& r, const DistillBalanceArgs& args, int64_t h, const double* x, double* l) {
  for (int64_t t = 0; t < r.T; ++t) {
    const double norm = dot(x + t * r.K, x + t * r.K, r.K) * r.eta / 2;
    for (int64_t m = 0; m < r.M; ++m) {
      double sum = 0;
      for (int64_t c = 0; c < r.K; ++c) sum += get(args.z, h, m, c) * x[t * r.K + c];
      l[t * r.M + m] = sum / r.root - norm + 0.5 * std::log(get(args.alpha, h, m) / static_cast<double>(r.M));
    }
  }
}

// out of row i from the log weights of its keys, which it overwrites
void mix(const Balance& r, const View& v, const View& out, int64_t b, int64_t h, int64_t i, int64_t keys) {
  double top = -HUGE_VAL, sum = 0;
  for (int64_t j = 0; j < keys; ++j) top = std::max(top, r.log_a[j]);
  for (int64_t j = 0; j < keys; ++j) sum += r.log_a[j] = std::exp(r.log_a[j] - top);
  for (int64_t c = 0; c < r.V; ++c) {
    double total = 0;
    for (int64_t j = 0; j < keys; ++j) total += r.log_a[j] * get(v, b, j, h, c);
    put(out, total / sum, b, i, h, c);
  }
}
double log_weight(const Balance& r, int64_t i, int64_t j) {
  const double* lq = r.lq + i * r.M;
  const double* lk = r.lk + j * r.M;
  double top = -HUGE_VAL, sum = 0;
  for (int64_t m = 0; m < r.M; ++m) top = std::max(top, lq[m] + lk[m]);
  for (int64_t m = 0; m < r.M; ++m) sum += std::exp(lq[m] + lk[m] - top);
  return top + std::log(sum);
}

}  // namespace

void distill_balance_forward(const DistillBalanceArgs& args, const DistillBalanceOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  const Balance r = cut_balance(arena, args);
  const int64_t K = r.K;
  for (int64_t h = 0; h < r.H; ++h) {
    find_balance(r, args, h);
    for (int64_t c = 0; c < K; ++c) {
      if (out.q_mean.given()) put(out.q_mean, r.q0[c], h, c);
      if (out.k_mean.given()) put(out.k_mean, r.k0[c], h, c);
      for (int64_t d = 0; out.A.given() && d < K; ++d) put(out.A, r.A[c * K + d], h, c, d);
    }
    for (int64_t b = 0; b < r.B; ++b) {
      // Plain rows first: the teacher, and the features without balancing.
      for (int64_t t = 0; t < r.T; ++t) {
        for (int64_t c = 0; c < K; ++c) {
          r.q[t * K + c] = get(args.q, b, t, h, c);
          r.k[t * K + c] = get(args.k, b, t, h, c);
        }
      }
      const auto keys = [&](int64_t i) { return args.causal ? i + 1 : r.T; };
      for (int64_t i = 0; out.out_softmax.given() && i < r.T; ++i) {
        for (int64_t j = 0; j < keys(i); ++j) r.log_a[j] = r.eta * dot(r.q + i * K, r.k + j * K, K);
        mix(r, args.v, out.out_softmax, b, h, i, keys(i));
      }
      if (out.out_plain.given()) {
        log_features(r, args, h, r.q, r.lq);
        log_features(r, args, h, r.k, r.lk);
        for (int64_t i = 0; i < r.T; ++i) {
          for (int64_t j = 0; j < keys(i); ++j) r.log_a[j] = log_weight(r, i, j);
          mix(r, args.v, out.out_plain, b, h, i, keys(i));
        }
      }
      for (int64_t t = 0; t < r.T; ++t) {
        r.logw[t] = 0;
        for (int64_t c = 0; c < K; ++c) {
          double q = 0, k = 0;
          for (int64_t d = 0; d < K; ++d) {
            q += r.A[c * K + d] * (get(args.q, b, t, h, d) - r.q0[d]);
            k += r.inverse[c * K + d] * (get(args.k, b, t, h, d) - r.k0[d]);
          }
          r.q[t * K + c] = q;
          r.k[t * K + c] = k;
          r.logw[t] += r.eta * r.q0[c] * get(args.k, b, t, h, c);
          if (out.q_balanced.given()) put(out.q_balanced, q, b, t, h, c);
          if (out.k_balanced.given()) put(out.k_balanced, k, b, t, h, c);
        }
        if (out.key_logw.given()) put(out.key_logw, r.logw[t], b, t, h);
      }
      log_features(r, args, h, r.q, r.lq);
      log_features(r, args, h, r.k, r.lk);
      for (int64_t i = 0; out.out.given() && i < r.T; ++i) {
        for (int64_t j = 0; j < keys(i); ++j) r.log_a[j] = log_weight(r, i, j) + r.logw[j];
        mix(r, args.v, out.out, b, h, i, keys(i));
      }
      // hybrid-exact: the last `window` keys keep their score; older ones enter in the true scale, for which the query's own
      // factors count: eta q.k = eta q'.k' + eta q0.k + eta (q - q0).k0.
      for (int64_t i = 0; out.out_hybrid.given() && i < r.T; ++i) {
        double own = 0;
        for (int64_t c = 0; c < K; ++c) own += r.eta * (get(args.q, b, i, h, c) - r.q0[c]) * r.k0[c];
        for (int64_t j = 0; j <= i; ++j) {
          double score = 0;
          for (int64_t c = 0; c < K; ++c) score += r.eta * get(args.q, b, i, h, c) * get(args.k, b, j, h, c);
          r.log_a[j] = i - j < args.window ? score : log_weight(r, i, j) + r.logw[j] + own;
        }
        mix(r, args.v, out.out_hybrid, b, h, i, i + 1);
      }
    }
  }
}
int64_t distill_balance_workspace(const DistillBalanceArgs& args, Pass, int) {
  Arena arena;
  cut_balance(arena, args);
  return arena.used();
}

// ---- window hybrids and statistics

namespace {

constexpr double kFloor = 1e-12;

struct Stats {
  int64_t B, T, H, K, V, F;
  double eta;
  double *fq, *fk;                // [T, 2 F]
  double *p, *gram, *values, *e;  // [T], [512, 512], [512]
  double* rows;                   // [512, 512]
  double *S, *n;                  // [2 F, V], [2 F]
  double *entropy, *distance;     // [H]
  double *dq, *dk, *dv;           // backward: [T, K], [T, K], [T, V] of one head
  double *dfq, *dfk;              // [T, 2 F]
  double *dy, *x, *g;             // [F], [K], [V]
  double *dwq, *dwk, *dfactor;    // [H, K, F], [H, K, F], [H]
};
Stats cut_stats(Arena& arena, const DistillWindowArgs& args, Pass pass) {
  Stats r{};
  r.B = args.q.size[0];
  r.T = args.q.size[1];
  r.H = args.q.size[2];
  r.K = args.q.size[3];
  r.V = args.v.size[3];
  r.F = args.wq.size[2];
  r.eta = r.K == 0 ? 1 : 1 / std::sqrt(static_cast<double>(r.K));
  r.fq = arena.take<double>(r.T * 2 * r.F);
  r.fk = arena.take<double>(r.T * 2 * r.F);
  r.p = arena.take<double>(r.T);
  const int64_t block = std::min(r.T, kDistillRankBlock);
  r.gram = arena.take<double>(block * block);
  r.rows = arena.take<double>(block * block);
  r.values = arena.take<double>(block);
  r.e = arena.take<double>(block);
  r.S = arena.take<double>(2 * r.F * r.V);
  r.n = arena.take<double>(2 * r.F);
  r.entropy = arena.take<double>(r.H);
  r.distance = arena.take<double>(r.H);
  if (pass == Pass::forward) return r;
  for (double** x : {&r.dq, &r.dk}) *x = arena.take<double>(r.T * r.K);
  for (double** x : {&r.dfq, &r.dfk}) *x = arena.take<double>(r.T * 2 * r.F);
  for (double** x : {&r.dwq, &r.dwk}) *x = arena.take<double>(r.H * r.K * r.F);
  r.dv = arena.take<double>(r.T * r.V);
  r.dy = arena.take<double>(r.F);
  r.x = arena.take<double>(r.K);
  r.g = arena.take<double>(r.V);
  r.dfactor = arena.take<double>(r.H);
  return r;
}

// f(x) = max([softmax(x w), softmax(-x w)], 1e-12)
void hedgehog(const Stats& r, const View& x, const View& w, int64_t b, int64_t t, int64_t h, double* f) {
  double high = -HUGE_VAL, low = -HUGE_VAL, up = 0, down = 0;
  for (int64_t c = 0; c < r.F; ++c) {
    double y = 0;
    for (int64_t k = 0; k < r.K; ++k) y += get(x, b, t, h, k) * get(w, h, k, c);
    f[c] = y;
    high = std::max(high, y);
    low = std::max(low, -y);
  }
  for (int64_t c = 0; c < r.F; ++c) {
    f[r.F + c] = std::exp(-f[c] - low);
    f[c] = std::exp(f[c] - high);
    up += f[c];
    down += f[r.F + c];
  }
  for (int64_t c = 0; c < r.F; ++c) {
    f[c] = std::max(f[c] / up, kFloor);
    f[r.F + c] = std::max(f[r.F + c] / down, kFloor);
  }
}
// Its gradient: dx [K] and dw [K, F] += theirs. The clamp passes nothing where it is active.
void hedgehog_backward(const Stats& r, const View& x, const View& w, int64_t b, int64_t t, int64_t h, const double* f,
                       const double* df, double* dx, double* dw) {
  for (int64_t c = 0; c < r.F; ++c) r.dy[c] = 0;
  for (const int64_t half : {int64_t{0}, r.F}) {
    double mean = 0;
    for (int64_t c = half; c < half + r.F; ++c) mean += f[c] > kFloor ? f[c] * df[c] : 0;
    for (int64_t c = half; c < half + r.F; ++c) {
      r.dy[c - half] += (half == 0 ? 1 : -1) * (f[c] > kFloor ? f[c] : 0) * ((f[c] > kFloor ? df[c] : 0) - mean);
    }
  }
  for (int64_t k = 0; k < r.K; ++k) {
    for (int64_t c = 0; c < r.F; ++c) {
      dx[k] += get(w, h, k, c) * r.dy[c];
      dw[k * r.F + c] += get(x, b, t, h, k) * r.dy[c];
    }
  }
}
double score(const Stats& r, const DistillWindowArgs& args, int64_t b, int64_t h, int64_t i, int64_t j) {
  double sum = 0;
  for (int64_t c = 0; c < r.K; ++c) sum += get(args.q, b, i, h, c) * get(args.k, b, j, h, c);
  return r.eta * sum;
}

// Keys of the window are near; those before it stand in the sums.
void hybrid(const Stats& r, const DistillWindowArgs& args, const View& out, int64_t b, int64_t h, bool terraced) {
  const double g = 1 / (1 + std::exp(-get(args.window_factor, h)));
  for (int64_t i = 0; i < 2 * r.F * r.V; ++i) r.S[i] = 0;
  for (int64_t i = 0; i < 2 * r.F; ++i) r.n[i] = 0;
  int64_t absorbed = 0;
  for (int64_t i = 0; i < r.T; ++i) {
    const int64_t begin = distill_window_begin(terraced, args.window, i);
    for (; absorbed < begin; ++absorbed) {
      for (int64_t f = 0; f < 2 * r.F; ++f) {
        const double x = r.fk[absorbed * 2 * r.F + f];
        r.n[f] += x;
        for (int64_t c = 0; c < r.V; ++c) r.S[f * r.V + c] += x * get(args.v, b, absorbed, h, c);
      }
    }
    double top = -HUGE_VAL, sum = 0;
    for (int64_t j = begin; j <= i; ++j) top = std::max(top, r.p[j] = score(r, args, b, h, i, j));
    for (int64_t j = begin; j <= i; ++j) sum += r.p[j] = g * std::exp(r.p[j] - top);
    for (int64_t f = 0; f < 2 * r.F; ++f) sum += r.fq[i * 2 * r.F + f] * r.n[f];
    for (int64_t c = 0; c < r.V; ++c) {
      double total = 0;
      for (int64_t j = begin; j <= i; ++j) total += r.p[j] * get(args.v, b, j, h, c);
      for (int64_t f = 0; f < 2 * r.F; ++f) total += r.fq[i * 2 * r.F + f] * r.S[f * r.V + c];
      put(out, sum == 0 ? 0 : total / sum, b, i, h, c);
    }
  }
}

// With a_ij the weight of key j in row i and den_i their sum, e_ij = dout_i.(v_j - out_i) / den_i is the gradient of a_ij. Near
// keys: a = g exp(s - top), so ds = a e; the largest score gets what the shift by it takes off all of them.
void hybrid_backward(const Stats& r, const DistillWindowArgs& args, const View& dout, int64_t b, int64_t h, bool terraced) {
  const double g = 1 / (1 + std::exp(-get(args.window_factor, h)));
  const int64_t F2 = 2 * r.F;
  for (int64_t i = 0; i < r.T; ++i) {
    const int64_t begin = distill_window_begin(terraced, args.window, i);
    double top = -HUGE_VAL, den = 0, total = 0;
    int64_t largest = begin;
    for (int64_t j = begin; j <= i; ++j) {
      r.p[j] = score(r, args, b, h, i, j);
      largest = r.p[j] > r.p[largest] ? j : largest;
    }
    top = r.p[largest];
    for (int64_t j = 0; j <= i; ++j) {
      if (j >= begin) {
        r.p[j] = g * std::exp(r.p[j] - top);
      } else {
        r.p[j] = 0;
        for (int64_t f = 0; f < F2; ++f) r.p[j] += r.fq[i * F2 + f] * r.fk[j * F2 + f];
      }
      den += r.p[j];
    }
    if (den == 0) continue;
    load_row(dout, b, i, h, r.g);
    for (int64_t c = 0; c < r.V; ++c) {
      double out = 0;
      for (int64_t j = 0; j <= i; ++j) out += r.p[j] / den * get(args.v, b, j, h, c);
      r.S[c] = out;
    }
    const auto add_score = [&](int64_t j, double ds) {
      for (int64_t c = 0; c < r.K; ++c) {
        r.dq[i * r.K + c] += r.eta * ds * get(args.k, b, j, h, c);
        r.dk[j * r.K + c] += r.eta * ds * get(args.q, b, i, h, c);
      }
    };
    for (int64_t j = 0; j <= i; ++j) {
      double e = 0;
      for (int64_t c = 0; c < r.V; ++c) {
        e += r.g[c] / den * (get(args.v, b, j, h, c) - r.S[c]);
        r.dv[j * r.V + c] += r.p[j] / den * r.g[c];
      }
      if (j >= begin) {
        add_score(j, r.p[j] * e);
        total += r.p[j] * e;
        continue;
      }
      for (int64_t f = 0; f < F2; ++f) {
        r.dfq[i * F2 + f] += e * r.fk[j * F2 + f];
        r.dfk[j * F2 + f] += e * r.fq[i * F2 + f];
      }
    }
    add_score(largest, -total);
    r.dfactor[h] += (1 - g) * total;
  }
}

void put_head(const View& view, double x, int64_t h) {
  if (view.given()) put(view, x, h);
}

// Weights of row i over keys begin .. i, to p
void weights(const Stats& r, const DistillWindowArgs& args, int64_t b, int64_t h, int64_t begin, int64_t i, double* p) {
  double top = -HUGE_VAL, sum = 0;
  for (int64_t j = begin; j <= i; ++j) top = std::max(top, p[j - begin] = score(r, args, b, h, i, j));
  for (int64_t j = begin; j <= i; ++j) sum += p[j - begin] = std::exp(p[j - begin] - top);
  for (int64_t j = begin; j <= i; ++j) p[j - begin] /= sum;
}

// Ranks of one block as a sequence of its own, by the eigenvalues of P P^T.
void ranks(const Stats& r, const DistillWindowArgs& args, int64_t b, int64_t h, int64_t begin, int64_t n, double* stable,
           double* effective) {
  for (int64_t i = 0; i < n; ++i) {
    double* row = r.rows + i * n;
    for (int64_t j = i + 1; j < n; ++j) row[j] = 0;
    weights(r, args, b, h, begin, begin + i, row);
  }
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j <= i; ++j) {
      double sum = 0;
      for (int64_t c = 0; c <= j; ++c) sum += r.rows[i * n + c] * r.rows[j * n + c];
      r.gram[i * n + j] = r.gram[j * n + i] = sum;
    }
  }
  double trace = 0, entropy = 0;
  for (int64_t i = 0; i < n; ++i) trace += r.gram[i * n + i];
  symmetric_eigenvalues(n, r.gram, r.values, r.e);
  for (int64_t i = 0; i < n; ++i) {
    const double share = r.values[i] / trace;
    if (share > 0) entropy -= share * std::log(share);
  }
  *stable += trace / r.values[0];
  *effective += std::exp(entropy);
}

}  // namespace

void distill_window_forward(const DistillWindowArgs& args, const DistillWindowOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  const Stats r = cut_stats(arena, args, Pass::forward);
  const double rows = static_cast<double>(std::max<int64_t>(1, r.B * r.T));
  for (int64_t h = 0; h < r.H; ++h) {
    double entropy = 0, uniform = 0, distance = 0, sink = 0, stable = 0, effective = 0, blocks = 0;
    double mass[Sizes::kMax] = {};
    for (int64_t b = 0; b < r.B; ++b) {
      for (int64_t t = 0; t < r.T; ++t) {
        hedgehog(r, args.q, args.wq, b, t, h, r.fq + t * 2 * r.F);
        hedgehog(r, args.k, args.wk, b, t, h, r.fk + t * 2 * r.F);
        if (out.fq.given()) store_row(out.fq, b, t, h, r.fq + t * 2 * r.F);
        if (out.fk.given()) store_row(out.fk, b, t, h, r.fk + t * 2 * r.F);
      }
      if (out.out_sliding.given()) hybrid(r, args, out.out_sliding, b, h, false);
      if (out.out_terraced.given()) hybrid(r, args, out.out_terraced, b, h, true);
      for (int64_t i = 0; i < r.T; ++i) {
        weights(r, args, b, h, 0, i, r.p);
        uniform += std::log(static_cast<double>(i + 1)) / rows;
        double own = 0;  // the row's entropy: a sum of sums rounds less, and gates take differences of entropies
        for (int64_t j = 0; j <= i; ++j) {
          const double p = r.p[j] / rows;
          if (r.p[j] > 0) own -= p * std::log(r.p[j]);
          distance += p * static_cast<double>(i - j);
          if (j < args.sinks) sink += p;
          for (int64_t n = 0; n < args.windows.count; ++n) mass[n] += i - j < args.windows.value[n] ? p : 0;
        }
        entropy += own;
      }
      for (int64_t begin = 0; (out.stable_rank.given() || out.effective_rank.given()) && begin < r.T;
           begin += kDistillRankBlock) {
        ranks(r, args, b, h, begin, std::min(kDistillRankBlock, r.T - begin), &stable, &effective);
        blocks += 1;
      }
    }
    r.entropy[h] = entropy;
    r.distance[h] = distance;
    put_head(out.entropy, entropy, h);
    put_head(out.entropy_ratio, uniform == 0 ? 0 : entropy / uniform, h);
    put_head(out.distance, distance, h);
    put_head(out.sink_mass, sink, h);
    put_head(out.stable_rank, blocks == 0 ? 0 : stable / blocks, h);
    put_head(out.effective_rank, blocks == 0 ? 0 : effective / blocks, h);
    for (int64_t n = 0; out.window_mass.given() && n < args.windows.count; ++n) put(out.window_mass, mass[n], h, n);
  }
  distill_gates(out, r.H, r.entropy, r.distance);
}
void distill_window_backward(const DistillWindowArgs& args, const DistillWindowOut&, const DistillWindowGrads& grads,
                             const Launch& launch) {
  Arena arena(launch.workspace);
  const Stats r = cut_stats(arena, args, Pass::backward);
  const int64_t F2 = 2 * r.F, each = r.K * r.F;
  std::fill(r.dwq, r.dwq + r.H * each, 0.0);
  std::fill(r.dwk, r.dwk + r.H * each, 0.0);
  std::fill(r.dfactor, r.dfactor + r.H, 0.0);
  for (int64_t h = 0; h < r.H; ++h) {
    for (int64_t b = 0; b < r.B; ++b) {
      std::fill(r.dq, r.dq + r.T * r.K, 0.0);
      std::fill(r.dk, r.dk + r.T * r.K, 0.0);
      std::fill(r.dv, r.dv + r.T * r.V, 0.0);
      std::fill(r.dfq, r.dfq + r.T * F2, 0.0);
      std::fill(r.dfk, r.dfk + r.T * F2, 0.0);
      for (int64_t t = 0; t < r.T; ++t) {
        hedgehog(r, args.q, args.wq, b, t, h, r.fq + t * F2);
        hedgehog(r, args.k, args.wk, b, t, h, r.fk + t * F2);
      }
      if (grads.dout_sliding.given()) hybrid_backward(r, args, grads.dout_sliding, b, h, false);
      if (grads.dout_terraced.given()) hybrid_backward(r, args, grads.dout_terraced, b, h, true);
      for (int64_t t = 0; t < r.T; ++t) {
        hedgehog_backward(r, args.q, args.wq, b, t, h, r.fq + t * F2, r.dfq + t * F2, r.dq + t * r.K, r.dwq + h * each);
        hedgehog_backward(r, args.k, args.wk, b, t, h, r.fk + t * F2, r.dfk + t * F2, r.dk + t * r.K, r.dwk + h * each);
        if (grads.dq.given()) store_row(grads.dq, b, t, h, r.dq + t * r.K);
        if (grads.dk.given()) store_row(grads.dk, b, t, h, r.dk + t * r.K);
        if (grads.dv.given()) store_row(grads.dv, b, t, h, r.dv + t * r.V);
      }
    }
    for (int64_t i = 0; i < each; ++i) {
      if (grads.dwq.given()) put(grads.dwq, r.dwq[h * each + i], h, i / r.F, i % r.F);
      if (grads.dwk.given()) put(grads.dwk, r.dwk[h * each + i], h, i / r.F, i % r.F);
    }
    put_head(grads.dwindow_factor, r.dfactor[h], h);
  }
}
int64_t distill_window_workspace(const DistillWindowArgs& args, Pass pass, int) {
  Arena arena;
  cut_stats(arena, args, pass);
  return arena.used();
}

// Token by token: the keys of one row and head since its buffer began, those before the window in the sums.
void distill_window_decode_forward(const DistillWindowDecodeArgs& args, const DistillWindowDecodeOut& out, const Launch&) {
  const int64_t B = args.q.size[0], T = args.q.size[1], H = args.q.size[2], K = args.q.size[3], V = args.v.size[3];
  const int64_t F = args.wq.size[2], window = args.window, room = 2 * window;
  const bool terraced = args.form == DistillForm::terraced;
  const double eta = K == 0 ? 1 : 1 / std::sqrt(static_cast<double>(K));
  Stats r{};
  r.K = K;
  r.F = F;
  std::vector<double> features(static_cast<size_t>(2 * F)), p(static_cast<size_t>(room));
  const auto absorb = [&](int64_t b, int64_t h, int64_t j) {
    hedgehog(r, args.k_near, args.wk, b, j, h, features.data());
    for (int64_t f = 0; f < 2 * F; ++f) {
      const double x = features[static_cast<size_t>(f)];
      put(args.n, get(args.n, b, h, f) + x, b, h, f);
      for (int64_t c = 0; c < V; ++c) {
        put(args.state, get(args.state, b, h, f, c) + x * get(args.v_near, b, j, h, c), b, h, f, c);
      }
    }
  };
  for (int64_t b = 0; b < B; ++b) {
    const int64_t count = distill_held_rows(args.held, b);
    for (int64_t h = 0; h < H; ++h) {
      const double g = 1 / (1 + std::exp(-get(args.window_factor, h)));
      int64_t held = count, absorbed = held > 0 ? distill_window_begin(terraced, window, held - 1) : 0;
      for (int64_t t = 0; t < T; ++t) {
        if (held == room) {
          for (; absorbed < window; ++absorbed) absorb(b, h, absorbed);
          for (int64_t j = 0; j < window; ++j) {
            for (int64_t c = 0; c < K; ++c) put(args.k_near, get(args.k_near, b, window + j, h, c), b, j, h, c);
            for (int64_t c = 0; c < V; ++c) put(args.v_near, get(args.v_near, b, window + j, h, c), b, j, h, c);
          }
          held = window;
          absorbed = 0;
        }
        for (int64_t c = 0; c < K; ++c) put(args.k_near, get(args.k, b, t, h, c), b, held, h, c);
        for (int64_t c = 0; c < V; ++c) put(args.v_near, get(args.v, b, t, h, c), b, held, h, c);
        const int64_t begin = distill_window_begin(terraced, window, held);
        for (; absorbed < begin; ++absorbed) absorb(b, h, absorbed);
        double top = -HUGE_VAL, sum = 0;
        for (int64_t j = begin; j <= held; ++j) {
          double score = 0;
          for (int64_t c = 0; c < K; ++c) score += eta * get(args.q, b, t, h, c) * get(args.k_near, b, j, h, c);
          top = std::max(top, p[static_cast<size_t>(j)] = score);
        }
        for (int64_t j = begin; j <= held; ++j)
          sum += p[static_cast<size_t>(j)] = g * std::exp(p[static_cast<size_t>(j)] - top);
        hedgehog(r, args.q, args.wq, b, t, h, features.data());
        for (int64_t f = 0; f < 2 * F; ++f) sum += features[static_cast<size_t>(f)] * get(args.n, b, h, f);
        for (int64_t c = 0; c < V; ++c) {
          double total = 0;
          for (int64_t j = begin; j <= held; ++j) total += p[static_cast<size_t>(j)] * get(args.v_near, b, j, h, c);
          for (int64_t f = 0; f < 2 * F; ++f) total += features[static_cast<size_t>(f)] * get(args.state, b, h, f, c);
          put(out.out, sum == 0 ? 0 : total / sum, b, t, h, c);
        }
        ++held;
      }
    }
    distill_window_hold(args.held, b, distill_window_held(window, count + T));
  }
}
int64_t distill_window_decode_workspace(const DistillWindowDecodeArgs&, Pass, int) { return 0; }

}  // namespace linnet::ref

namespace linnet {

void distill_gates(const DistillWindowOut& out, int64_t H, const double* entropy, const double* distance) {
  double least = HUGE_VAL, most = -HUGE_VAL;
  for (int64_t h = 0; h < H; ++h) {
    least = std::min(least, entropy[h]);
    most = std::max(most, entropy[h]);
  }
  for (int64_t h = 0; h < H; ++h) {
    const double target = std::min(std::max(std::log(2.0) / std::max(distance[h], 0.5), 0.001), 5.0);
    const double beta = 0.3 + 0.4 * (1 - (entropy[h] - least) / std::max(most - least, 1e-3));
    ref::put_head(out.gate_dt_bias, target + std::log(-std::expm1(-target)), h);
    ref::put_head(out.gate_beta, beta, h);
    ref::put_head(out.gate_beta_logit, std::log(beta / (1 - beta)), h);
  }
}

}  // namespace linnet
