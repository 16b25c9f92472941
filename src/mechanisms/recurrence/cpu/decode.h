// decode: one token of a recurrence, the state [I, J] read and written once, in the caller's memory.
//
//   S = S + k v^T,   o = S^T q
//
// Row after row from the first column to the last, so that the state streams through once in and once out, which is all that
// costs time. Up to kDecodeVectors vectors wide, o and v stay in registers (8 + 8 of avx512: 128 columns); wider, they stay in
// L1. On Zen 4 every fused multiply-add and every store takes a turn of one port, in 512 bits a cycle each: with S and o both
// by fused instructions a vector took 3.1 cycles, with o by a product and a sum 2.8, as an update in place, and S is rounded
// once. Slices of columns, or several rows at a time, lose half of the speed once the state lies in memory: the prefetchers of
// Zen 4 follow plain streams only.
#pragma once

#include "simd/in_register.h"

namespace linnet::LINNET_ISA {

#if defined(LINNET_ISA_avx512)
inline constexpr int kDecodeVectors = 8;
#else
inline constexpr int kDecodeVectors = 4;  // o and v in 8 of 16 registers
#endif

// N vectors of memory are wanted in L2 soon.
template <int N, class T>
LINNET_INLINE void fetch_row(const T* row) {
#pragma GCC unroll 8
  for (int j = 0; j < N * Vec<T>::W; j += 64 / static_cast<int>(sizeof(T))) __builtin_prefetch(row + j, 1, 2);
}

// `count` elements are wanted by the next head: with states of a megabyte and more its rows lie in L3, and a head would begin
// with waiting for them, 0.1 us.
template <class E>
LINNET_INLINE void fetch_elements(const E* row, int count) {
  for (int i = 0; i < count; i += 64 / static_cast<int>(sizeof(E))) __builtin_prefetch(row + i, 0, 2);
}

// The same for a row that will be written.
template <class E>
LINNET_INLINE void fetch_result(const E* row, int count) {
  for (int i = 0; i < count; i += 64 / static_cast<int>(sizeof(E))) __builtin_prefetch(row + i, 1, 2);
}

// One vector of a row: s += k v in place; returns s. kCompensated: `rest` holds what rounding took from the state, one more
// number per element; the product's own rounding error goes there too (two-product, two-sum).
template <bool kCut, bool kCompensated, class T, class V>
LINNET_INLINE V decode_vector(T* state, T* rest, V k, V v, int lanes) {
  using X = Vec<T>;
  const typename X::M mask = X::prefix(lanes);
  const V before = kCut ? X::load_mask(state, mask, lanes) : X::load(state);
  V after;
  if constexpr (kCompensated) {
    const V owed = kCut ? X::load_mask(rest, mask, lanes) : X::load(rest);
    const V product = k * v, lost = fma(k, v, -product);
    const V add = product + owed;
    const V add_lost = (product - (add - (add - product))) + (owed - (add - product));
    const V rough = before + add, part = rough - before;
    const V error = ((before - (rough - part)) + (add - part)) + (add_lost + lost);
    after = rough + error;  // the nearest number, so that `rest` is below half of its last place
    const V left = error - (after - rough);
    if constexpr (kCut) {
      X::store_mask(rest, left, mask, lanes);
    } else {
      X::store(rest, left);
    }
  } else {
    after = fma(k, v, before);
  }
  if constexpr (kCut) {
    X::store_mask(state, after, mask, lanes);
  } else {
    X::store(state, after);
  }
  return after;
}

// The whole state is N vectors wide; kCut: of the last one only `lanes` columns exist.
template <int N, bool kCut, bool kCompensated, class T>
void decode_narrow(int I, int lanes, T* state, int64_t pitch, T* rest, int64_t rest_pitch, const T* k, const T* q, const T* v,
                   T* o) {
  using X = Vec<T>;
  using V = typename X::V;
  V vs[N], os[N] = {};
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) vs[j] = X::load(v + j * X::W);
  for (int i = 0; i < I; ++i, state += pitch, rest += kCompensated ? rest_pitch : 0) {
    const V ki = X::broadcast(k[i]), qi = X::broadcast(q[i]);
#pragma GCC unroll 8
    for (int j = 0; j < N - (kCut ? 1 : 0); ++j) {
      os[j] += in_register(qi * decode_vector<false, kCompensated>(state + j * X::W, rest + j * X::W, ki, vs[j], X::W));
    }
    if constexpr (kCut) {
      constexpr int j = N - 1;
      os[j] += in_register(qi * decode_vector<true, kCompensated>(state + j * X::W, rest + j * X::W, ki, vs[j], lanes));
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) X::store(o + j * X::W, os[j]);
}

template <bool kCompensated, class T>
void decode_wide(int I, int J, T* state, int64_t pitch, T* rest, int64_t rest_pitch, const T* k, const T* q, const T* v, T* o) {
  using X = Vec<T>;
  using V = typename X::V;
  for (int j = 0; j < J; j += X::W) X::store(o + j, X::zero());
  for (int i = 0; i < I; ++i, state += pitch, rest += kCompensated ? rest_pitch : 0) {
    const V ki = X::broadcast(k[i]), qi = X::broadcast(q[i]);
    int j = 0;
    for (; j + X::W <= J; j += X::W) {
      X::store(o + j,
               fma(qi, decode_vector<false, kCompensated>(state + j, rest + j, ki, X::load(v + j), X::W), X::load(o + j)));
    }
    if (j < J) {
      X::store(o + j,
               fma(qi, decode_vector<true, kCompensated>(state + j, rest + j, ki, X::load(v + j), J - j), X::load(o + j)));
    }
  }
}

template <int N, bool kCompensated, class T>
void decode_by_width(int I, int J, T* state, int64_t pitch, T* rest, int64_t rest_pitch, const T* k, const T* q, const T* v,
                     T* o) {
  constexpr int W = Vec<T>::W;
  if (J == N * W) return decode_narrow<N, false, kCompensated>(I, W, state, pitch, rest, rest_pitch, k, q, v, o);
  if (J > (N - 1) * W) {
    return decode_narrow<N, true, kCompensated>(I, J - (N - 1) * W, state, pitch, rest, rest_pitch, k, q, v, o);
  }
  if constexpr (N > 1) return decode_by_width<N - 1, kCompensated>(I, J, state, pitch, rest, rest_pitch, k, q, v, o);
}

// v and o: scratch of J elements, padded to whole vectors. kCompensated: rest, rows rest_pitch apart; otherwise it is not read.
template <bool kCompensated, class T>
void decode_step(int I, int J, T* state, int64_t pitch, T* rest, int64_t rest_pitch, const T* k, const T* q, const T* v, T* o) {
  if (!kCompensated) rest = state;  // any valid address
  if (J > kDecodeVectors * Vec<T>::W) return decode_wide<kCompensated>(I, J, state, pitch, rest, rest_pitch, k, q, v, o);
  decode_by_width<kDecodeVectors, kCompensated>(I, J, state, pitch, rest, rest_pitch, k, q, v, o);
}

}  // namespace linnet::LINNET_ISA
