// decode_gated: one token of a recurrence with decays and the delta rule, the state [I, J] in the caller's memory.
//
//   y = S^T x                                        x = a k: what the decayed state returns for the key
//   S = keep S + (factor S + k u^T),   o = S^T q     per row: expm1(g) and 1, or exp(g) and 0 (engine_chunk.h, state_factors)
//
// Row after row as in decode.h. With beta the state is visited twice, the second time while its head (64 KB at 128 x 128) lies
// in L2; both visits stream plain rows. L2 gives 32 bytes a cycle: on Zen 4 the first visit of a line takes 2.1 cycles and the
// second 2.8, an update in place 2.8. (Slices of columns do not stay in L1: rows 512 bytes apart share an eighth of its sets.)
// What L3 and memory add is hidden: the second visit fetches the next head (`ahead` elements further) into L2.
#pragma once

#include "decode.h"

namespace linnet::LINNET_ISA {

template <class T>
LINNET_INLINE typename Vec<T>::V load_lanes(const T* p, bool cut, int lanes) {
  using X = Vec<T>;
  return cut ? X::load_mask(p, X::prefix(lanes), lanes) : X::load(p);
}

// y [J, padded] = S^T x; N vectors wide, kCut: of the last one only `lanes` columns exist.
template <int N, bool kCut, class T>
void decode_read(int I, int lanes, const T* state, int64_t pitch, const T* x, T* y) {
  using X = Vec<T>;
  using V = typename X::V;
  V sums[N] = {};
  for (int i = 0; i < I; ++i, state += pitch) {
    const V xi = X::broadcast(x[i]);
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) {
      sums[j] = fma(xi, load_lanes(state + j * X::W, kCut && j == N - 1, lanes), sums[j]);
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) X::store(y + j * X::W, sums[j]);
}

// One row: s = keep s + (f s + k u), o += q s. A sum runs beside multiplications; a third one does not: keep is 1 or 0.
template <int N, bool kCut, bool kKeeps, class T, class V>
LINNET_INLINE void decode_row(int lanes, T* state, V f, V k, V q, const V (&us)[N], V (&os)[N]) {
  using X = Vec<T>;
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) {
    const bool cut = kCut && j == N - 1;
    const V before = load_lanes(state + j * X::W, cut, lanes);
    V after = fma(f, before, k * us[j]);
    if constexpr (kKeeps) after = before + after;
    os[j] = fma(q, after, os[j]);
    if (cut) {
      X::store_mask(state + j * X::W, after, X::prefix(lanes), lanes);
    } else {
      X::store(state + j * X::W, after);
    }
  }
}

// S = keep S + (factor S + k u^T), o = S^T q. kFetch: what lies `ahead` will be wanted next.
template <int N, bool kCut, bool kFetch, class T>
void decode_write(int I, int lanes, T* state, int64_t pitch, const T* factor, const T* keep, const T* k, const T* q, const T* u,
                  T* o, int64_t ahead) {
  using X = Vec<T>;
  using V = typename X::V;
  V us[N], os[N] = {};
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) us[j] = X::load(u + j * X::W);
  for (int i = 0; i < I; ++i, state += pitch) {
    const V ki = X::broadcast(k[i]), qi = X::broadcast(q[i]), f = X::broadcast(factor[i]);
    if constexpr (kFetch) fetch_row<N>(state + ahead);
    if (keep[i] != 0) {
      decode_row<N, kCut, true>(lanes, state, f, ki, qi, us, os);
    } else {
      decode_row<N, kCut, false>(lanes, state, f, ki, qi, us, os);
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) X::store(o + j * X::W, os[j]);
}

// Calls body<N, kCut>(first column, lanes of the last vector) for slices of at most kDecodeVectors vectors.
template <int N, class T, class Body>
LINNET_INLINE void decode_slice(int width, int at, const Body& body) {
  constexpr int W = Vec<T>::W;
  if constexpr (N > 1) {
    if (width <= (N - 1) * W) return decode_slice<N - 1, T>(width, at, body);
  }
  if (width == N * W) return body.template operator()<N, false>(at, W);
  body.template operator()<N, true>(at, width - (N - 1) * W);
}
template <class T, class Body>
LINNET_INLINE void decode_slices(int J, const Body& body) {
  constexpr int most = kDecodeVectors * Vec<T>::W;
  for (int at = 0; at < J; at += most) decode_slice<kDecodeVectors, T>(J - at < most ? J - at : most, at, body);
}

template <class T>
void decode_read(int I, int J, const T* state, int64_t pitch, const T* x, T* y) {
  decode_slices<T>(J,
                   [&]<int N, bool kCut>(int at, int lanes) { decode_read<N, kCut>(I, lanes, state + at, pitch, x, y + at); });
}
template <class T>
void decode_gated_step(int I, int J, T* state, int64_t pitch, const T* factor, const T* keep, const T* k, const T* q,
                       const T* u, T* o, int64_t ahead = 0) {
  decode_slices<T>(J, [&]<int N, bool kCut>(int at, int lanes) {
    if (ahead != 0) {
      decode_write<N, kCut, true>(I, lanes, state + at, pitch, factor, keep, k, q, u + at, o + at, ahead);
    } else {
      decode_write<N, kCut, false>(I, lanes, state + at, pitch, factor, keep, k, q, u + at, o + at, ahead);
    }
  });
}

}  // namespace linnet::LINNET_ISA
