// What the kernels of the selective scan share: the step's factor without drift, and the per-channel parameters of a block.
#pragma once

#include "core/sequence.h"
#include "selective_scan.h"
#include "simd/math.h"
#include "simd/task.h"
#include "simd/tile.h"

namespace linnet::LINNET_ISA {

// h -> exp(g) h + b. A decay near 1 rounded to f32 drifts with the memory's length, so there h + (expm1(g) h + b), the bracket
// first (recurrence.md section 2). Below |g| = 0.34 the range reduction of exp has nothing to reduce, and its polynomial is
// expm1: `factor` is that, elsewhere exp(g), and `near` tells which.
template <class V>
struct Factor {
  V value;
  decltype(lt(V{}, V{})) near;
};
template <class V>
LINNET_INLINE auto is_near(V g) {
  return lt(abs(g), splat<V>(typename Real<V>::T(0.34)));
}
template <class V>
LINNET_INLINE Factor<V> factor_of(V g) {
  using R = Real<V>;
  const V clamped = min(splat<V>(R::kExpHigh), max(splat<V>(R::kExpLow), g));
  V n;
  const V r = reduce_exp(clamped, &n), small = fma(r * r, exp_tail(r), r);
  const auto near = is_near(g);
  return {select(near, small, scale_by_power(small + typename R::T(1), n)), near};
}
template <class V>
LINNET_INLINE V advance(V factor, decltype(lt(V{}, V{})) near, V h, V b) {
  return select(near, h, V{}) + fma(factor, h, b);
}

// The halves of a vector in double.
struct Wide {
  vd low, high;
};
LINNET_INLINE Wide widen(vf v) {
  typedef float half __attribute__((vector_size(kVectorBytes / 2)));
#if defined(LINNET_ISA_avx512)
  const half low = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7);
  const half high = __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
#elif defined(LINNET_ISA_avx2)
  const half low = __builtin_shufflevector(v, v, 0, 1, 2, 3), high = __builtin_shufflevector(v, v, 4, 5, 6, 7);
#else
  const half low = __builtin_shufflevector(v, v, 0, 1), high = __builtin_shufflevector(v, v, 2, 3);
#endif
  return {__builtin_convertvector(low, vd), __builtin_convertvector(high, vd)};
}

// exp(g) itself in double: 1 + what is near 0.
LINNET_INLINE Wide widen(const Factor<vf>& f) {
  Wide r = widen(f.value);
#if defined(LINNET_ISA_avx512)
  const vd one = vd{} + 1.0;
  r.low = _mm512_mask_add_pd(r.low, static_cast<md>(f.near), r.low, one);
  r.high = _mm512_mask_add_pd(r.high, static_cast<md>(f.near >> 8), r.high, one);
#else
  const Wide base = widen(select(f.near, splat<vf>(1.0f), vf{}));
  r.low += base.low;
  r.high += base.high;
#endif
  return r;
}

inline constexpr int kScanBlock = 64;  // channels of one task: 256 bytes of each row

LINNET_INLINE int64_t scan_groups(const View& maps) { return grouped(maps).size[2]; }

// How the channels are cut: blocks of one group each.
struct ScanBlocks {
  int64_t per_group, in_group, count;  // channels of a group, blocks of a group, blocks
  LINNET_INLINE ScanBlocks(int64_t E, int64_t groups) {
    per_group = groups > 0 ? E / groups : 0;
    in_group = (per_group + kScanBlock - 1) / kScanBlock;
    count = in_group * groups;
  }
  LINNET_INLINE int64_t group(int64_t block) const { return block / in_group; }
  LINNET_INLINE int64_t first(int64_t block) const { return group(block) * per_group + block % in_group * kScanBlock; }
  LINNET_INLINE int width(int64_t block) const {
    const int64_t left = per_group - block % in_group * kScanBlock;
    return static_cast<int>(left < kScanBlock ? left : kScanBlock);
  }
};

// A parameter per channel, in its own type; zeros when absent.
template <class T>
LINNET_INLINE void load_channels(const View& view, int64_t first, int width, T* to) {
  for (int c = 0; c < kScanBlock; ++c) {
    const bool known = view.given() && c < width;
    to[c] = known ? static_cast<T>(load_f64(view.data, view.dtype, (first + c) * view.stride[0])) : T(0);
  }
}

// y + D x, times silu(z), to memory.
template <class T, class E, class Args>
LINNET_INLINE void store_output(const Args& args, const View& out, int64_t b, int64_t t, int64_t first, int width, const T* y,
                                const T* skip) {
  using X = Vec<T>;
  using V = typename X::V;
  for (int c = 0; c < width; c += X::W) {
    V row = X::load(y + c);
    if (args.D.given()) {
      row = fma(X::load(skip + c), X::load(args.x.template at<const E>(b, t, first + c), width - c), row);
    }
    if (args.z.given()) {
      const V z = X::load(args.z.template at<const E>(b, t, first + c), width - c);
      row = row * (z * sigmoid(z));
    }
    X::store(out.at<E>(b, t, first + c), row, width - c);
  }
}

}  // namespace linnet::LINNET_ISA
