// decode_gated: one token of a recurrence with decays, the state [I, J] in the caller's memory.
//
//   S = keep S + (factor S + k u^T),   o = S^T q     per row: expm1(g) and 1, or exp(g) and 0 (engine_chunk.h, state_factors)
//
// Row after row as in decode.h: 3 multiplications a vector, 3.1 cycles on Zen 4, where an update in place takes 2.8.
#pragma once

#include "core/launch.h"
#include "decode.h"
#include "simd/task.h"

namespace linnet::LINNET_ISA {

// The factors of rows; `one`: the first ones hold for all.
template <class T>
struct DecodeGates {
  const T *factor, *keep;
  bool one;
};

// count elements as T: where they lie if they are T, else in scratch. kPadded: readable in whole vectors.
template <bool kPadded, class T, class E>
LINNET_INLINE const T* decode_input(const E* from, int64_t count, T* scratch) {
  if constexpr (sizeof(T) == sizeof(E)) {
    if (!kPadded || count % Vec<T>::W == 0) return from;
  }
  for (int64_t c = 0; c < count; c += Vec<T>::W) {
    Vec<T>::store(scratch + c, Vec<T>::load(from + c, static_cast<int>(count - c)));
  }
  return scratch;
}

template <class T>
LINNET_INLINE typename Vec<T>::V load_lanes(const T* p, bool cut, int lanes) {
  using X = Vec<T>;
  return cut ? X::load_mask(p, X::prefix(lanes), lanes) : X::load(p);
}
template <class T>
LINNET_INLINE void store_lanes(T* p, typename Vec<T>::V v, bool cut, int lanes) {
  using X = Vec<T>;
  if (cut) {
    X::store_mask(p, v, X::prefix(lanes), lanes);
  } else {
    X::store(p, v);
  }
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
    store_lanes(state + j * X::W, after, cut, lanes);
  }
}

// S = keep S + (factor S + k u^T), o = scale S^T q.
template <int N, bool kCut, class T>
void decode_write(int I, int lanes, T* state, int64_t pitch, const DecodeGates<T>& gates, const T* k, const T* q, const T* u,
                  T* o, T scale) {
  using X = Vec<T>;
  using V = typename X::V;
  V us[N], os[N] = {};
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) us[j] = load_lanes(u + j * X::W, kCut && j == N - 1, lanes);
  const auto row = [&]<bool kKeeps>(int i, V f) {
    decode_row<N, kCut, kKeeps>(lanes, state, f, X::broadcast(k[i]), X::broadcast(q[i]), us, os);
    state += pitch;
  };
  if (gates.one) {
    const V f = X::broadcast(gates.factor[0]);
    if (gates.keep[0] != 0) {
      for (int i = 0; i < I; ++i) row.template operator()<true>(i, f);
    } else {
      for (int i = 0; i < I; ++i) row.template operator()<false>(i, f);
    }
  } else {  // runs of rows of one kind: a choice in every row takes 0.05 to 0.15 ns a vector
    for (int i = 0; i < I;) {
      for (; i < I && gates.keep[i] != 0; ++i) row.template operator()<true>(i, X::broadcast(gates.factor[i]));
      for (; i < I && gates.keep[i] == 0; ++i) row.template operator()<false>(i, X::broadcast(gates.factor[i]));
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) store_lanes(o + j * X::W, os[j] * X::broadcast(scale), kCut && j == N - 1, lanes);
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
void decode_gated_step(int I, int J, T* state, int64_t pitch, const DecodeGates<T>& gates, const T* k, const T* q, const T* u,
                       T* o, T scale) {
  decode_slices<T>(J, [&]<int N, bool kCut>(int at, int lanes) {
    decode_write<N, kCut>(I, lanes, state + at, pitch, gates, k, q, u + at, o + at, scale);
  });
}

// Decoding whose gates are computed a task ahead, between the rows of a state and its results. cut(arena): a worker's rows,
// `bytes` of its workspace; body(task, ready, more, rows): ready: the rows hold the gates of this task; more: those of the next
// one are wanted.
template <class Cut, class Body>
void decode_ahead(const Launch& launch, int64_t tasks, int64_t bytes, const Cut& cut, const Body& body) {
  if (tasks <= 0) return;
  const int parts = NearTasks::parts(tasks, launch.workers);
  NearTasks near(tasks, parts);
  parallel(launch, parts, [&near, parts, cut, body, workspace = launch.workspace, bytes](int64_t, int worker) {
    Arena arena(workspace + worker * bytes);
    auto rows = cut(arena);
    int64_t ready = -1;
    near.take(parts, worker, [&](int64_t task, int, bool more) {
      body(task, ready == task, more, rows);
      ready = more ? task + 1 : -1;
    });
  });
}

}  // namespace linnet::LINNET_ISA
