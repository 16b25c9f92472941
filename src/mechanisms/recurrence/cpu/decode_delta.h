// decode_delta: one token of the delta rule, with or without decays a, the state [I, J] in the caller's memory.
//
//   y = a S^T x,   z = a S^T w,   u = beta (v - y),   o = scale (z + (q . k) u)      first visit
//   S = keep S + (factor S + k u^T)                       second visit (state_factors in engine_chunk.h)
//
// x and w are k and q; with a decay per channel a k and a q, and a is 1.
//
// A head of 128 x 128 is 64 KB, twice the L1 of Zen 4, and rows 512 bytes apart share an eighth of its sets, so that no slice
// of columns fits either. A line takes 2.1 cycles from L2 and 1 cycle back; multiplications take one each, stores 2.4. So both
// products belong to the first visit (2 multiplications behind 2.1 cycles) and 2 are left for the second, which begins with the
// rows that the first one left in L1. It takes blocks of rows from the last to the first, rows within a block in order, and
// fetches the next head into L2 meanwhile, from its first row on: 4.5 cycles a line in all, an update in place 2.8.
#pragma once

#include "decode_gated.h"

namespace linnet::LINNET_ISA {

template <class T>
struct DeltaToken {
  const T *k, *x, *w;             // [I]
  DecodeGates<T> gates;           // no factor: no decays
  T decay, beta, product, scale;  // decay: a, where it is one for all rows, else 1; product: q . k
};

enum class Decay { none, weak, strong };  // keep and factor: 1 and 0, 1 and expm1(g), 0 and exp(g)

template <int N, bool kCut, Decay kDecay, class T, class V>
LINNET_INLINE void delta_row(int lanes, T* state, V factor, V k, const V (&us)[N]) {
  using X = Vec<T>;
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) {
    const bool cut = kCut && j == N - 1;
    const V before = in_register(load_lanes(state + j * X::W, cut, lanes));
    V after;
    if constexpr (kDecay == Decay::none) {
      after = fma(k, us[j], before);
    } else {
      after = fma(factor, before, k * us[j]);
      if constexpr (kDecay == Decay::weak) after = before + after;
    }
    store_lanes(state + j * X::W, after, cut, lanes);
  }
}

// N vectors wide, kCut: of the last one only `lanes` columns exist. next, if not null: the state that comes next.
template <int N, bool kCut, class T>
void decode_delta(int I, int lanes, T* state, int64_t pitch, const DeltaToken<T>& token, const T* v, T* o, const T* next) {
  using X = Vec<T>;
  using V = typename X::V;
  V us[N] = {}, os[N] = {};
  for (int i = 0; i < I; ++i) {
    const V x = X::broadcast(token.x[i]), w = X::broadcast(token.w[i]);
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) {
      const V s = in_register(load_lanes(state + i * pitch + j * X::W, kCut && j == N - 1, lanes));
      us[j] = fma(x, s, us[j]);
      os[j] = fma(w, s, os[j]);
    }
  }
  const V decay = X::broadcast(token.decay), beta = X::broadcast(token.beta), product = X::broadcast(token.product);
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) {
    const bool cut = kCut && j == N - 1;
    us[j] = beta * fma(-decay, us[j], load_lanes(v + j * X::W, cut, lanes));
    store_lanes(o + j * X::W, fma(product, us[j], decay * os[j]) * X::broadcast(token.scale), cut, lanes);
  }
  const auto row = [&]<Decay kDecay>(int i, V factor) {
    if (next != nullptr) {
      fetch_row<N>(next);
      next += pitch;
    }
    delta_row<N, kCut, kDecay>(lanes, state + i * pitch, factor, X::broadcast(token.k[i]), us);
  };
  constexpr int kBlock = 16;
  for (int end = I; end > 0;) {
    int i = (end - 1) / kBlock * kBlock;
    const int begin = i;
    if (token.gates.factor == nullptr) {
      for (; i < end; ++i) row.template operator()<Decay::none>(i, X::zero());
    } else if (token.gates.one) {
      const V factor = X::broadcast(token.gates.factor[0]);
      if (token.gates.keep[0] != 0) {
        for (; i < end; ++i) row.template operator()<Decay::weak>(i, factor);
      } else {
        for (; i < end; ++i) row.template operator()<Decay::strong>(i, factor);
      }
    } else {  // runs of rows of one kind
      while (i < end) {
        for (; i < end && token.gates.keep[i] != 0; ++i)
          row.template operator()<Decay::weak>(i, X::broadcast(token.gates.factor[i]));
        for (; i < end && token.gates.keep[i] == 0; ++i)
          row.template operator()<Decay::strong>(i, X::broadcast(token.gates.factor[i]));
      }
    }
    end = begin;
  }
}

// v: padded.
template <class T>
void decode_delta(int I, int J, T* state, int64_t pitch, const DeltaToken<T>& token, const T* v, T* o, const T* next) {
  decode_slices<T>(J, [&]<int N, bool kCut>(int at, int lanes) {
    decode_delta<N, kCut>(I, lanes, state + at, pitch, token, v + at, o + at, next != nullptr ? next + at : nullptr);
  });
}

}  // namespace linnet::LINNET_ISA
