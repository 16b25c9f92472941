// The scalars and the states of zero-sum attention, for one instruction set.
//
// Scalars: for every row the number n of keys it reads, ell = log mean exp(s) and mean(s), run in double: rounding them to
// float would cost 2e-7 in every weight of the row at once, while the output is what is left after the zeroth order cancels.
//
// Memory, after n keys (basis Rp; it holds 2e-6 where the basis with R1 taken out of Rp holds 1e-5, for logits of size 10):
//   R0 = (1/n) sum k v^T,   R1 = (1/n) sum (s - mean) k v^T,   Rp = sum p k v^T - R0
// Row t of the next chunk reads it with nu = n/n_t and lam = nu exp(ell_n - ell_t):
//   q Rp sh lam  +  q R1 (s1 - sh) nu  +  q R0 [ sh (lam - nu) + (s1 - sh) nu (mean_n - mean_t) + s0 nu ]
// and the chunk's own keys with r_ti directly. To the right edge N, lam and nu those of the edge, shift = mean_n - mean_N:
//   Rp' = lam Rp + (lam - nu) R0 + fresh(expm1(s - ell_N)/N),  R1' = nu R1 + nu shift R0 + fresh((s - mean_N)/N),
//   R0' = nu R0 + fresh(1/N)                                   fresh(w) = sum over the chunk of w_i k_i v_i^T
// Not causal: every edge and every row is the end, lam = nu = 1, and no chunk reads its own keys.
#pragma once

#include "mechanisms/softmax/softmax_problem.h"
#include "simd/gemm.h"
#include "zeros.h"

namespace linnet::LINNET_ISA {

inline constexpr int kZeros = 64;  // tokens of a chunk

struct Edge {  // what is known at one place: keys so far, log mean exp(s), mean(s)
  double n = 0, ell = 0, mean = 0;
};

// A sum of two floats: x - hi - lo keeps the digits that one float would lose.
template <class T>
struct Two {
  T hi, lo;
  LINNET_INLINE explicit Two(double x) : hi(static_cast<T>(x)), lo(static_cast<T>(x - static_cast<double>(hi))) {}
};

// The running scalars of one head, edges [T], token by token; not causal: all of them the last.
template <class T>
struct LogitScan {
  const ZerosArgs& args;
  int64_t b, h;
  Edge* edges;
  Edge edge;
  double top = 0, sum = 0;

  LINNET_INLINE LogitScan(const ZerosArgs& a, int64_t batch_row, int64_t head, Edge* to)
      : args(a), b(batch_row), h(head), edges(to) {}
  void begin(const Edge& from) {  // behind keys that an earlier call has seen
    edge = from;
    top = from.ell;
    sum = from.n;
  }
  void run(int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      if (!args.key_mask.given() || *args.key_mask.at<const uint8_t>(b, t) != 0) {
        const double s =
            static_cast<double>(element_at<T>(args.s, b * args.s.stride[0] + t * args.s.stride[1] + h * args.s.stride[2]));
        edge.n += 1;
        edge.mean += (s - edge.mean) / edge.n;
        if (edge.n == 1 || !(s <= top)) {
          sum = edge.n == 1 ? 1 : sum * __builtin_exp(top - s) + 1;
          top = s;
        } else {
          sum += __builtin_exp(s - top);
        }
        if (args.causal) edge.ell = top + __builtin_log(sum / edge.n);
      }
      edges[t] = edge;
    }
  }
  void run_all() {
    const int64_t tokens = args.s.size[1];
    run(0, tokens);
    if (args.causal) return;
    if (edge.n > 0) edge.ell = top + __builtin_log(sum / edge.n);
    for (int64_t t = 0; t < tokens; ++t) edges[t] = edge;
  }
};

// The factors of a state from one edge to the next, 1 taken out where they are near it: C = keep C + rest C.
template <class T>
struct Factor {
  T keep, rest;
  LINNET_INLINE explicit Factor(double x) : keep(x > 0.5 ? 1 : 0), rest(static_cast<T>(x - (x > 0.5 ? 1 : 0))) {}
};
struct Step {
  double lam = 0, nu = 0, gap = 0, shift = 0;  // gap = lam - nu
  LINNET_INLINE Step(const Edge& from, const Edge& to) {
    if (from.n == 0 || to.n == 0) return;
    nu = from.n / to.n;
    gap = nu * __builtin_expm1(from.ell - to.ell);
    lam = nu + gap;
    shift = from.mean - to.mean;
  }
};

// Three blocks of `block` rows or columns, whose factors and whose share of another block differ:
//   C_0 = f0 C_0 + a0 C_x + acc, ...   in ascending order, so that a block that others read must come after them.
template <class T, bool kColumns>
struct Blend {
  static constexpr bool kReadsC = true;
  T keep[3], rest[3], share[3], second[3];
  const T* base;            // C
  int64_t ld, block;        // kColumns: the blocks lie side by side in a row; else below each other
  int source[3], other[3];  // the block that each one takes `share` of, and `second` of
  template <class V>
  LINNET_INLINE V operator()(V acc, V c, int i, int j) const {
    using X = Vec<T>;
    const int64_t place = kColumns ? j : i;
    const int k = place < block ? 0 : place < 2 * block ? 1 : 2;
    const int64_t within = place - k * block;
    const auto load = [&](int from) {
      return kColumns ? X::load(base + i * ld + from * block + within) : X::load(base + (from * block + within) * ld + j);
    };
    V sum = fma(X::broadcast(rest[k]), c, acc);
    if (share[k] != 0) sum = fma(X::broadcast(share[k]), load(source[k]), sum);
    if (second[k] != 0) sum = fma(X::broadcast(second[k]), load(other[k]), sum);
    return fma(X::broadcast(keep[k]), c, sum);
  }
};
// Memory in the order Rp, R1, R0.
template <class T, bool kColumns>
LINNET_INLINE Blend<T, kColumns> blend_memory(const Step& step, const T* base, int64_t ld, int64_t block) {
  const Factor<T> lam(step.lam), nu(step.nu);
  return {{lam.keep, nu.keep, nu.keep},
          {lam.rest, nu.rest, nu.rest},
          {static_cast<T>(step.gap), static_cast<T>(step.nu * step.shift), T(0)},
          {T(0), T(0), T(0)},
          base,
          ld,
          block,
          {2, 2, 2},
          {2, 2, 2}};
}
// Its gradient in the order J0, J1, Jp: J0 = nu J0 + nu shift J1 + (lam - nu) Jp.
template <class T>
LINNET_INLINE Blend<T, true> blend_gradient(const Step& step, const T* base, int64_t ld, int64_t block) {
  const Factor<T> lam(step.lam), nu(step.nu);
  return {{nu.keep, nu.keep, lam.keep},
          {nu.rest, nu.rest, lam.rest},
          {static_cast<T>(step.nu * step.shift), T(0), T(0)},
          {static_cast<T>(step.gap), T(0), T(0)},
          base,
          ld,
          block,
          {1, 1, 1},
          {2, 2, 2}};
}

// The scalars of one chunk as vectors. [kZeros] each.
template <class T>
struct Row {
  T s[kZeros], valid[kZeros];                                                           // of the keys
  T ell_hi[kZeros], ell_lo[kZeros], mean_hi[kZeros], mean_lo[kZeros], inverse[kZeros];  // of the rows; inverse = 1/n, or 0
  T s1[kZeros], sh[kZeros], s0[kZeros];
  T lam[kZeros], nu[kZeros], gap[kZeros], drift[kZeros];  // lam - nu; mean_n - mean_t
  T cp[kZeros], c1[kZeros], c0[kZeros];                   // coefficients of q Rp, q R1, q R0
  T wp[kZeros], w1[kZeros], w0[kZeros];                   // weights of fresh
};

template <class T>
void fill_row(const ZerosArgs& args, int64_t b, int64_t h, int64_t at, int rows, const Edge* edges, const Edge& left,
              const Edge& right, Row<T>& row) {
  using X = Vec<T>;
  using V = typename X::V;
  const auto number = [&](const View& x, int64_t t) {
    return x.given() ? element_at<T>(x, b * x.stride[0] + t * x.stride[1] + h * x.stride[2]) : T(0);
  };
  T distance[kZeros];
  for (int r = 0; r < kZeros; ++r) {
    const bool inside = r < rows;
    const int64_t t = at + r;
    const Edge edge = inside ? edges[t] : Edge();
    const bool there = inside && (!args.key_mask.given() || *args.key_mask.at<const uint8_t>(b, t) != 0);
    const Two<T> ell(edge.ell), mean(edge.mean);
    row.s[r] = there ? number(args.s, t) : T(0);
    row.valid[r] = there ? T(1) : T(0);
    row.ell_hi[r] = ell.hi;
    row.ell_lo[r] = ell.lo;
    row.mean_hi[r] = mean.hi;
    row.mean_lo[r] = mean.lo;
    row.inverse[r] = edge.n > 0 ? static_cast<T>(1 / edge.n) : T(0);
    const bool reading = inside && edge.n > 0;  // a row that reads nothing is 0 whatever it holds
    row.s1[r] = reading ? number(args.s1, t) : T(0);
    row.sh[r] = reading ? number(args.sh, t) : T(0);
    row.s0[r] = reading ? number(args.s0, t) : T(0);
    const bool past = left.n > 0 && edge.n > 0;
    row.nu[r] = past ? static_cast<T>(left.n / edge.n) : T(0);
    row.drift[r] = past ? static_cast<T>(left.mean - edge.mean) : T(0);
    distance[r] = past ? static_cast<T>(left.ell - edge.ell) : T(0);
  }
  const Two<T> ell(right.ell), mean(right.mean);
  const V inverse = X::broadcast(right.n > 0 ? static_cast<T>(1 / right.n) : T(0));
  for (int r = 0; r < kZeros; r += X::W) {
    const V nu = X::load(row.nu + r), gap = nu * expm1(X::load(distance + r)), lam = nu + gap;
    const V s1 = X::load(row.s1 + r), sh = X::load(row.sh + r), s0 = X::load(row.s0 + r), drift = X::load(row.drift + r);
    X::store(row.gap + r, gap);
    X::store(row.lam + r, lam);
    X::store(row.cp + r, sh * lam);
    X::store(row.c1 + r, (s1 - sh) * nu);
    X::store(row.c0 + r, fma(sh, gap, nu * fma(s1 - sh, drift, s0)));
    const V s = X::load(row.s + r), valid = X::load(row.valid + r), weight = inverse * valid;
    const auto there = gt(valid, X::zero());
    X::store(row.wp + r, select(there, expm1((s - X::broadcast(ell.hi)) - X::broadcast(ell.lo)) * weight, X::zero()));
    X::store(row.w1 + r, select(there, ((s - X::broadcast(mean.hi)) - X::broadcast(mean.lo)) * weight, X::zero()));
    X::store(row.w0 + r, weight);
  }
}

// expm1(z_ti) = n p - 1 and delta_ti for keys i .. i+W of row t.
template <class T>
LINNET_INLINE void orders(const Row<T>& row, int t, int i, typename Vec<T>::V* excess, typename Vec<T>::V* delta) {
  using X = Vec<T>;
  const typename X::V s = X::load(row.s + i);
  *excess = expm1((s - X::broadcast(row.ell_hi[t])) - X::broadcast(row.ell_lo[t]));
  *delta = (s - X::broadcast(row.mean_hi[t])) - X::broadcast(row.mean_lo[t]);
}
// Which keys i .. i+W of the chunk row t reads.
template <class T>
LINNET_INLINE typename Vec<T>::M reads(const Row<T>& row, int t, int i) {
  using X = Vec<T>;
  return X::prefix(t + 1 - i) & gt(X::load(row.valid + i), X::zero());
}

}  // namespace linnet::LINNET_ISA
