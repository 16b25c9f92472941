// What linear_cpu.cc and linear_decode_cpu.cc share: the weights of map t2r in the computing type.
#pragma once

#include "core/half.h"
#include "linear_shape.h"
#include "simd/task.h"
#include "simd/tile.h"

namespace linnet::LINNET_ISA {

// Elements of one head's weights: w [F, ldk], then its transpose [K, ldf].
template <class T>
LINNET_INLINE int64_t weight_elements(const LinearShape& s) {
  return s.F * round_up<T>(s.K) + s.K * round_up<T>(s.F);
}

// Map t2r: w [Hq, R, K] in T, each head's also transposed.
template <class T, class W>
void load_weights(const View& w, const LinearShape& s, T* to) {
  for (int64_t h = 0; h < s.Hq; ++h) {
    const W* from = w.at<const W>(h);
    load_tile<T>(from, w.stride[1], static_cast<int>(s.F), static_cast<int>(s.K), to, round_up<T>(s.K));
    to += s.F * round_up<T>(s.K);
    for (int64_t i = 0; i < s.K * round_up<T>(s.F); ++i) to[i] = 0;
    load_tile_transposed<T>(from, w.stride[1], static_cast<int>(s.F), static_cast<int>(s.K), to, round_up<T>(s.F));
    to += s.K * round_up<T>(s.F);
  }
}
template <class T, class E, class Args>
void load_weights_of(const Args& args, const LinearShape& s, T* to) {
  if (args.map != FeatureMap::t2r) return;
  if (args.w.dtype == args.q.dtype) return load_weights<T, E>(args.w, s, to);
  load_weights<T, T>(args.w, s, to);
}

}  // namespace linnet::LINNET_ISA
