// What the kernels of the selective scan share: the step's factor without drift, and the per-channel parameters of a block.
#pragma once

#include "core/sequence.h"
#include "selective_scan.h"
#include "simd/math.h"
#include "simd/task.h"
#include "simd/tile.h"
#include "simd/wide.h"

namespace linnet::LINNET_ISA {

// h -> 2^t h + b, t = g log2(e). A decay near 1 rounded to f32 drifts with the memory's length, so there h + ((2^t - 1) h + b),
// the bracket first. Up to |t| = 1/2 the range reduction has nothing to reduce, and its polynomial is
// 2^t - 1: `value` is that, elsewhere 2^t, and `near` tells which. An error of t costs t 2^t times as much.
template <class V>
struct Factor {
  V value;
  decltype(lt(V{}, V{})) near;
};
template <class V>
LINNET_INLINE V exponents(V delta) {
  return delta * Real<V>::kLog2e;
}
template <class V>
LINNET_INLINE auto is_near(V t) {
  return eq(round(t), V{});
}
template <class V>
LINNET_INLINE Factor<V> factor_of(V t) {
  using T = typename Real<V>::T;
  constexpr T edge = 2 * static_cast<T>(Real<V>::kBias);
  t = min(splat<V>(edge), max(splat<V>(-edge), t));  // in this order NaN stays
  const V n = round(t), f = t - n, small = f * exp2_tail(f);
  const auto near = eq(n, V{});
  return {select(near, small, scale_by_power(small + T(1), n)), near};
}
// a + b where m, elsewhere a
LINNET_INLINE vf add_where(mf m, vf a, vf b) {
#if defined(LINNET_ISA_avx512)
  return _mm512_mask_add_ps(a, m, a, b);
#else
  return a + select(m, b, vf{});
#endif
}
LINNET_INLINE vd add_where(md m, vd a, vd b) {
#if defined(LINNET_ISA_avx512)
  return _mm512_mask_add_pd(a, m, a, b);
#else
  return a + select(m, b, vd{});
#endif
}
template <class V>
LINNET_INLINE V advance(const Factor<V>& f, V h, V b) {
  return add_where(f.near, fma(f.value, h, b), h);
}

// exp(g) itself in double: 1 + what is near 0.
LINNET_INLINE Wide widen(const Factor<vf>& f) {
  Wide r = widen(f.value);
#if defined(LINNET_ISA_avx512)
  const vd one = vd{} + 1.0;
  r.low = add_where(static_cast<md>(f.near), r.low, one);
  r.high = add_where(static_cast<md>(f.near >> 8), r.high, one);
#else
  const Wide base = widen(select(f.near, splat<vf>(1.0f), vf{}));
  r.low += base.low;
  r.high += base.high;
#endif
  return r;
}

inline constexpr int kScanBlock = 64;  // channels of one task: 256 bytes of each row

LINNET_INLINE int64_t scan_groups(const View& maps) { return grouped(maps).size[2]; }

// How the channels are cut: blocks of one group each, `most` channels or fewer.
struct ScanBlocks {
  int64_t most, per_group, in_group, count;  // channels of a group, blocks of a group, blocks
  LINNET_INLINE ScanBlocks(int64_t E, int64_t groups, int64_t most_channels = kScanBlock) : most(most_channels) {
    per_group = groups > 0 ? E / groups : 0;
    in_group = (per_group + most - 1) / most;
    count = in_group * groups;
  }
  LINNET_INLINE int64_t group(int64_t block) const { return block / in_group; }
  LINNET_INLINE int64_t first(int64_t block) const { return group(block) * per_group + block % in_group * most; }
  LINNET_INLINE int width(int64_t block) const {
    const int64_t left = per_group - block % in_group * most;
    return static_cast<int>(left < most ? left : most);
  }
};

// A parameter per channel, of the call's type E or of T; zeros when absent, and behind them up to a whole block.
template <class T, class E>
LINNET_INLINE void load_channels(const View& view, Dtype io, int64_t first, int width, T* to) {
  for (int c = 0; c < width || c < kScanBlock; c += Vec<T>::W) Vec<T>::store(to + c, Vec<T>::zero());
  if (!view.given()) return;
  if (view.dtype == io) return load_tile<T>(view.at<const E>(first), 0, 1, width, to, 0);
  load_tile<T>(view.at<const T>(first), 0, 1, width, to, 0);
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
