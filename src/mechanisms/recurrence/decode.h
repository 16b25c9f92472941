// decode: one token of a recurrence, the state [I, J] read and written once, in the caller's memory.
//
//   S = S + k v^T,   o = S^T q
//
// Whole rows, one pass: a row's columns stay in registers as o and v (8 + 8 vectors of avx512: 128 columns), so the state is
// streamed once in and once out, which is all that costs time. Wider or narrower states go in slices of columns.
#pragma once

#include "simd/vec.h"

namespace linnet::LINNET_ISA {

#if defined(LINNET_ISA_avx512)
inline constexpr int kDecodeVectors = 8;
#else
inline constexpr int kDecodeVectors = 4;  // o and v of 4 vectors, of 16 registers
#endif

// N vectors of columns; kMasked: of the last vector only `lanes` exist. kCompensated: `rest` holds what rounding took from the
// state, one more number per element; the product's own rounding error goes there too (two-product, two-sum).
template <int N, bool kMasked, bool kCompensated, class T>
void decode_slice(int I, int lanes, T* state, int64_t pitch, T* rest, int64_t rest_pitch, const T* k, const T* q, const T* v,
                  T* o) {
  using X = Vec<T>;
  using V = typename X::V;
  constexpr int W = X::W;
  const typename X::M mask = X::prefix(lanes);
  V vs[N], os[N];
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) {
    vs[j] = X::load(v + j * W);
    os[j] = X::zero();
  }
  for (int i = 0; i < I; ++i, state += pitch, rest += kCompensated ? rest_pitch : 0) {
    const V ki = X::broadcast(k[i]), qi = X::broadcast(q[i]);
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) {
      const bool cut = kMasked && j == N - 1;
      const V before = cut ? X::load_mask(state + j * W, mask, lanes) : X::load(state + j * W);
      V after;
      if constexpr (kCompensated) {
        const V owed = cut ? X::load_mask(rest + j * W, mask, lanes) : X::load(rest + j * W);
        const V product = ki * vs[j], lost = fma(ki, vs[j], -product);
        const V add = product + owed;
        const V add_lost = (product - (add - (add - product))) + (owed - (add - product));
        const V rough = before + add, part = rough - before;
        const V error = ((before - (rough - part)) + (add - part)) + (add_lost + lost);
        after = rough + error;  // the nearest number, so that `rest` is below half of its last place
        const V left = error - (after - rough);
        if (cut) {
          X::store_mask(rest + j * W, left, mask, lanes);
        } else {
          X::store(rest + j * W, left);
        }
      } else {
        after = fma(ki, vs[j], before);
      }
      if (cut) {
        X::store_mask(state + j * W, after, mask, lanes);
      } else {
        X::store(state + j * W, after);
      }
      os[j] = fma(qi, after, os[j]);
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) X::store(o + j * W, os[j]);
}

// v and o: scratch of J elements, padded to whole vectors. rest: null, or the compensation, rows rest_pitch apart.
template <bool kCompensated, class T>
void decode_columns(int I, int J, T* state, int64_t pitch, T* rest, int64_t rest_pitch, const T* k, const T* q, const T* v,
                    T* o) {
  constexpr int W = Vec<T>::W;
  int j = 0;
  const auto slice = [&]<int N, bool kMasked>(int lanes) {
    decode_slice<N, kMasked, kCompensated>(I, lanes, state + j, pitch, kCompensated ? rest + j : rest, rest_pitch, k, q, v + j,
                                           o + j);
    j += N * W;
  };
  while (j + kDecodeVectors * W <= J) slice.template operator()<kDecodeVectors, false>(W);
  if constexpr (kDecodeVectors > 4) {
    if (j + 4 * W <= J) slice.template operator()<4, false>(W);
  }
  if (j + 2 * W <= J) slice.template operator()<2, false>(W);
  if (j + W <= J) slice.template operator()<1, false>(W);
  if (j < J) slice.template operator()<1, true>(J - j);
}

template <class T>
void decode_step(int I, int J, T* state, int64_t pitch, T* rest, int64_t rest_pitch, const T* k, const T* q, const T* v, T* o) {
  if (rest == nullptr) return decode_columns<false>(I, J, state, pitch, rest, rest_pitch, k, q, v, o);
  decode_columns<true>(I, J, state, pitch, rest, rest_pitch, k, q, v, o);
}

}  // namespace linnet::LINNET_ISA
