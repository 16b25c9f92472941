// Balancing of heads in double without eigenproblems of K x K matrices that lose digits. With S_q = L L^T and S_k = R R^T,
//
//   A^2 = S_q^-1/2 (S_q^1/2 S_k S_q^1/2)^1/2 S_q^-1/2 = L^-T (L^T S_k L)^1/2 L^-1,      L^T S_k L = (L^T R) (L^T R)^T
//
// One-sided Jacobi on the columns of L^T R leaves sigma_i u_i in them, so that A^2 = B B^T with columns b_i = L^-T u_i
// sigma_i^1/2; on those of B it leaves omega_i p_i, the eigenvectors of A. Rotations keep small values to their last digits, as
// the Jacobi of the reference does. Moments and balanced rows are products in blocks. Attention by pairs (out, out_plain,
// out_softmax, out_hybrid), moments without an inverse and few rows for the channels, where the ridge alone gives one and no
// two ways agree in the last digits, stay with the reference.
#include "core/half.h"
#include "distill.h"
#include "mechanisms/recurrence/cpu/walk.h"
#include "mechanisms/shared/mapped.h"
#include "simd/gemm.h"
#include "simd/math.h"
#include "simd/tile.h"

namespace linnet::LINNET_ISA {
namespace {

using X = Vec<double>;

inline constexpr int64_t kRows = 128, kFew = 4;
inline constexpr int kMostSweeps = 60;
inline constexpr double kOrthogonal = 1e-15;
// Of a pivot, over the mean of the diagonal. In double two ways agree to the last digits only where it is not small.
inline constexpr double kLeastPivot = 1e-10, kLeastPivotF64 = 1e-3;

struct Head {
  int64_t K, ld;
  double *q0, *k0, *norms;        // [ld]
  double *L, *R, *G, *A, *other;  // [K, ld]; L, R: lower
  double *rows, *moved;           // [kRows, ld]
};
Head cut(Arena& arena, int64_t K) {
  Head r{};
  r.K = K;
  r.ld = round_up<double>(K);
  for (double** row : {&r.q0, &r.k0, &r.norms}) *row = arena.take<double>(r.ld);
  for (double** m : {&r.L, &r.R, &r.G, &r.A, &r.other}) *m = arena.take<double>(K * r.ld);
  r.rows = arena.take<double>(kRows * r.ld);
  r.moved = arena.take<double>(kRows * r.ld);
  return r;
}

double dot(const double* a, const double* b, int64_t n) {  // n: whole vectors
  vd sum = X::zero(), other = X::zero();
  int64_t c = 0;
  for (; c + 2 * X::W <= n; c += 2 * X::W) {
    sum += X::load(a + c) * X::load(b + c);
    other += X::load(a + c + X::W) * X::load(b + c + X::W);
  }
  for (; c < n; c += X::W) sum += X::load(a + c) * X::load(b + c);
  sum += other;
  double total = 0;
  for (int i = 0; i < X::W; ++i) total += sum[i];
  return total;
}

// Calls f(rows, first) with blocks of the B T rows of head h of x, less `mean`.
template <class F>
void each_block(const Head& r, const View& x, int64_t h, const double* mean, const F& f) {
  const int64_t T = x.size[1], count = x.size[0] * T;
  for (int64_t first = 0; first < count; first += kRows) {
    const int n = static_cast<int>(count - first < kRows ? count - first : kRows);
    for (int i = 0; i < n; ++i) {
      const int64_t b = (first + i) / T, t = (first + i) % T;
      double* to = r.rows + i * r.ld;
      load_rows<double>(x, b * x.stride[0] + t * x.stride[1] + h * x.stride[2], x.stride[1], 1, static_cast<int>(r.K), to,
                        r.ld);
      for (int64_t c = 0; c < r.K && mean != nullptr; ++c) to[c] -= mean[c];
      for (int64_t c = r.K; c < r.ld; ++c) to[c] = 0;
    }
    f(n, first);
  }
}

// The mean of head h of x and the second moments around it, with the ridge; gives the mean of their diagonal.
double moments(const Head& r, const View& x, int64_t h, double ridge, double* mean, double* S) {
  const int64_t K = r.K, ld = r.ld;
  const double count = static_cast<double>(x.size[0] * x.size[1]);
  for (int64_t c = 0; c < ld; ++c) mean[c] = 0;
  each_block(r, x, h, nullptr, [&](int n, int64_t) {
    for (int i = 0; i < n; ++i) {
      for (int64_t c = 0; c < ld; c += X::W) X::store(mean + c, X::load(mean + c) + X::load(r.rows + i * ld + c));
    }
  });
  for (int64_t c = 0; c < K; ++c) mean[c] /= count;
  for (int64_t i = 0; i < K * ld; ++i) S[i] = 0;
  each_block(r, x, h, mean, [&](int n, int64_t) {
    gemm<double>(static_cast<int>(K), static_cast<int>(K), n, transposed(static_cast<const double*>(r.rows), ld), r.rows, ld, S,
                 ld, Add{});
  });
  double trace = 0;
  for (int64_t i = 0; i < K * ld; ++i) S[i] /= count;
  for (int64_t c = 0; c < K; ++c) trace += S[c * ld + c];
  for (int64_t c = 0; c < K; ++c) S[c * ld + c] += ridge * trace / static_cast<double>(K);
  return trace / static_cast<double>(K);
}

// S becomes its lower Cholesky factor, zeros above; false where a pivot is lost in rounding.
bool factor(const Head& r, double* S, double least) {
  const int64_t ld = r.ld;
  for (int64_t i = 0; i < r.K; ++i) {
    double* row = S + i * ld;
    for (int64_t c = i + 1; c < ld; ++c) row[c] = 0;
    for (int64_t j = 0; j < i; ++j) {
      // Rows j < i are zero behind their diagonal: whole vectors of row i up to j would hold what is not yet final.
      double sum = row[j];
      const double* other = S + j * ld;
      const int64_t whole = j / X::W * X::W;
      sum -= dot(row, other, whole);
      for (int64_t c = whole; c < j; ++c) sum -= row[c] * other[c];
      row[j] = sum / other[j];
    }
    double pivot = row[i];
    for (int64_t c = 0; c < i; ++c) pivot -= row[c] * row[c];
    if (!(pivot > least)) return false;
    row[i] = __builtin_sqrt(pivot);
  }
  return true;
}

// Rotates the rows of g until they are orthogonal; their squares go to r.norms.
void orthogonalise(const Head& r, double* g) {
  const int64_t ld = r.ld;
  for (int sweep = 0; sweep < kMostSweeps; ++sweep) {
    for (int64_t i = 0; i < r.K; ++i) r.norms[i] = dot(g + i * ld, g + i * ld, ld);
    bool turned = false;
    for (int64_t i = 0; i + 1 < r.K; ++i) {
      int64_t longest = i;  // the longest first: fewer sweeps, and the short ones keep their digits
      for (int64_t j = i + 1; j < r.K; ++j) longest = r.norms[j] > r.norms[longest] ? j : longest;
      if (longest != i) {
        double *a = g + i * ld, *b = g + longest * ld;
        for (int64_t c = 0; c < ld; c += X::W) {
          const vd x = X::load(a + c);
          X::store(a + c, X::load(b + c));
          X::store(b + c, x);
        }
        const double norm = r.norms[i];
        r.norms[i] = r.norms[longest], r.norms[longest] = norm;
      }
      double* a = g + i * ld;
      for (int64_t j = i + 1; j < r.K; ++j) {
        double* b = g + j * ld;
        const double c = dot(a, b, ld), size = __builtin_sqrt(r.norms[i]) * __builtin_sqrt(r.norms[j]);
        if (!(__builtin_fabs(c) > kOrthogonal * static_cast<double>(r.K) * size)) continue;
        turned = true;
        const double zeta = (r.norms[j] - r.norms[i]) / (2 * c);
        const double t = __builtin_copysign(1 / (__builtin_fabs(zeta) + __builtin_sqrt(1 + zeta * zeta)), zeta);
        const double cosine = 1 / __builtin_sqrt(1 + t * t), sine = t * cosine;
        const vd vc = X::broadcast(cosine), vs = X::broadcast(sine);
        for (int64_t e = 0; e < ld; e += X::W) {
          const vd x = X::load(a + e), y = X::load(b + e);
          X::store(a + e, vc * x - vs * y);
          X::store(b + e, vs * x + vc * y);
        }
        r.norms[i] -= t * c;
        r.norms[j] += t * c;
      }
    }
    if (!turned) break;
  }
  for (int64_t i = 0; i < r.K; ++i) r.norms[i] = dot(g + i * ld, g + i * ld, ld);
}

// to = sum_i g_i g_i^T |g_i|^(-power): the matrix whose eigenvectors are the rows' directions. r.G and `scaled` differ.
void of_rows(const Head& r, const double* g, double power, double* scaled, double* to) {
  for (int64_t i = 0; i < r.K; ++i) {
    const vd factor = X::broadcast(__builtin_pow(r.norms[i], -power / 2));
    for (int64_t c = 0; c < r.ld; c += X::W) X::store(scaled + i * r.ld + c, X::load(g + i * r.ld + c) * factor);
  }
  const int K = static_cast<int>(r.K);
  gemm<double>(K, K, K, transposed(static_cast<const double*>(scaled), r.ld), g, r.ld, to, r.ld, Store{});
  for (int64_t i = 0; i < r.K; ++i) {
    for (int64_t j = 0; j < i; ++j) to[i * r.ld + j] = to[j * r.ld + i] = 0.5 * (to[i * r.ld + j] + to[j * r.ld + i]);
  }
}

// q0, k0, A (in r.A) and its inverse (in r.L); false where the moments have no inverse.
bool find_balance(const Head& r, const DistillBalanceArgs& args, int64_t h) {
  const int64_t K = r.K, ld = r.ld;
  const double size_q = moments(r, args.q, h, args.ridge, r.q0, r.L), size_k = moments(r, args.k, h, args.ridge, r.k0, r.R);
  const double least = args.q.dtype == Dtype::f64 ? kLeastPivotF64 : kLeastPivot;
  if (!factor(r, r.L, least * size_q) || !factor(r, r.R, least * size_k)) return false;
  const int n = static_cast<int>(K);
  gemm<double>(n, n, n, transposed(static_cast<const double*>(r.R), ld), r.L, ld, r.G, ld, Store{});
  orthogonalise(r, r.G);
  // Rows sigma u become sigma^1/2 u L^-1.
  for (int64_t i = 0; i < K; ++i) {
    double* x = r.G + i * ld;
    const double root = 1 / __builtin_sqrt(__builtin_sqrt(r.norms[i]));
    for (int64_t c = 0; c < K; ++c) x[c] *= root;
    for (int64_t j = K - 1; j >= 0; --j) {
      const double* row = r.L + j * ld;
      const double solved = x[j] / row[j];
      const vd factor = X::broadcast(solved);
      const int64_t whole = j / X::W * X::W;
      for (int64_t c = 0; c < whole; c += X::W) X::store(x + c, X::load(x + c) - factor * X::load(row + c));
      for (int64_t c = whole; c < j; ++c) x[c] -= solved * row[c];
      x[j] = solved;
    }
  }
  orthogonalise(r, r.G);
  of_rows(r, r.G, 1, r.R, r.A);
  of_rows(r, r.G, 3, r.R, r.L);
  return true;
}

// Rows of x less their mean, times a symmetric matrix.
void put_balanced(const Head& r, const View& x, int64_t h, const double* mean, const double* matrix, const View& to) {
  const int64_t T = x.size[1];
  if (!to.given()) return;
  each_block(r, x, h, mean, [&](int n, int64_t first) {
    const int K = static_cast<int>(r.K);
    gemm<double>(n, K, K, as_is(static_cast<const double*>(r.rows), r.ld), matrix, r.ld, r.moved, r.ld, Store{});
    for (int i = 0; i < n; ++i) {
      const int64_t at = (first + i) / T * to.stride[0] + (first + i) % T * to.stride[1] + h * to.stride[2];
      for (int64_t c = 0; c < r.K; ++c) store_f64(to.data, to.dtype, at + c * to.stride[3], r.moved[i * r.ld + c]);
    }
  });
}

}  // namespace

void distill_balance_forward(const DistillBalanceArgs& args, const DistillBalanceOut& out, const Launch& launch) {
  DistillBalanceOut pairs;
  pairs.out = out.out, pairs.out_plain = out.out_plain, pairs.out_softmax = out.out_softmax, pairs.out_hybrid = out.out_hybrid;
  const bool balance = out.q_mean.given() || out.k_mean.given() || out.A.given() || out.q_balanced.given() ||
                       out.k_balanced.given() || out.key_logw.given();
  if (!balance || args.q.size[0] * args.q.size[1] < kFew * args.q.size[3])
    return ref::distill_balance_forward(args, out, launch);
  if (pairs.out.given() || pairs.out_plain.given() || pairs.out_softmax.given() || pairs.out_hybrid.given())
    ref::distill_balance_forward(args, pairs, launch);
  const int64_t H = args.q.size[2], K = args.q.size[3], T = args.q.size[1];
  const double eta = 1 / __builtin_sqrt(static_cast<double>(K));
  Arena arena(launch.workspace), one;
  cut(one, K);
  char* workers = arena.take<char>(launch.workers * one.used());
  char* lost = arena.take<char>(H);  // a head without an inverse
  parallel(launch, H, [&](int64_t h, int worker) {
    Arena own(workers + worker * one.used());
    const Head r = cut(own, K);
    lost[h] = find_balance(r, args, h) ? 0 : 1;
    if (lost[h] != 0) return;
    for (int64_t c = 0; c < K; ++c) {
      if (out.q_mean.given())
        store_f64(out.q_mean.data, out.q_mean.dtype, h * out.q_mean.stride[0] + c * out.q_mean.stride[1], r.q0[c]);
      if (out.k_mean.given())
        store_f64(out.k_mean.data, out.k_mean.dtype, h * out.k_mean.stride[0] + c * out.k_mean.stride[1], r.k0[c]);
      for (int64_t d = 0; out.A.given() && d < K; ++d) {
        store_f64(out.A.data, out.A.dtype, h * out.A.stride[0] + c * out.A.stride[1] + d * out.A.stride[2], r.A[c * r.ld + d]);
      }
    }
    put_balanced(r, args.q, h, r.q0, r.A, out.q_balanced);
    put_balanced(r, args.k, h, r.k0, r.L, out.k_balanced);
    if (!out.key_logw.given()) return;
    each_block(r, args.k, h, nullptr, [&](int n, int64_t first) {
      for (int i = 0; i < n; ++i) {
        const int64_t b = (first + i) / T, t = (first + i) % T;
        store_f64(out.key_logw.data, out.key_logw.dtype,
                  b * out.key_logw.stride[0] + t * out.key_logw.stride[1] + h * out.key_logw.stride[2],
                  eta * dot(r.q0, r.rows + i * r.ld, r.ld));
      }
    });
  });
  bool any = false;
  for (int64_t h = 0; h < H; ++h) any |= lost[h] != 0;
  if (any) ref::distill_balance_forward(args, out, launch);
}
int64_t distill_balance_workspace(const DistillBalanceArgs& args, Pass pass, int workers) {
  Arena arena, one;
  cut(one, args.q.size[3]);
  arena.take<char>(workers * one.used());
  arena.take<char>(args.q.size[2]);
  const int64_t plain = ref::distill_balance_workspace(args, pass, workers);
  return arena.used() > plain ? arena.used() : plain;
}

}  // namespace linnet::LINNET_ISA
