// One step of MetaLA: per (batch row, head) and token one visit of the state in place, row after row (recurrence/decode.h). The
// tie k = 1 - exp(g) = -e makes a step of a weakly decaying row S + e (S - v), one multiplication less than any other decay's.
#include "mechanisms/recurrence/decode_gated.h"
#include "mechanisms/recurrence/engine_chunk.h"
#include "metala.h"
#include "simd/math.h"
#include "simd/task.h"

namespace linnet::LINNET_ISA {
namespace {

template <class T>
struct Rows {
  T *q, *k, *factor, *keep;  // [ldk]
  T *v, *o;                  // [ldv]
  LINNET_INLINE static Rows cut(Arena& arena, int64_t K, int64_t V) {
    Rows r;
    for (T** row : {&r.q, &r.k, &r.factor, &r.keep}) *row = arena.take<T>(round_up<T>(K));
    for (T** row : {&r.v, &r.o}) *row = arena.take<T>(round_up<T>(V));
    return r;
  }
};

// S = S + e (S - v), or factor S + k v where the decay is strong (keep 0): S - (S - v) would round v as S. o = S^T q.
template <int N, bool kCut, class T>
void mix_rows(int K, int lanes, T* state, int64_t pitch, const Rows<T>& r, const T* q, const T* v, T* o) {
  using X = Vec<T>;
  using V = typename X::V;
  V values[N], sums[N] = {};
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) values[j] = X::load(v + j * X::W);
  for (int i = 0; i < K; ++i, state += pitch) {
    const V f = X::broadcast(r.factor[i]), qi = X::broadcast(q[i]);
    if (r.keep[i] == 0) {
      decode_row<N, kCut, false>(lanes, state, f, X::broadcast(r.k[i]), qi, values, sums);
      continue;
    }
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) {
      const bool cut = kCut && j == N - 1;
      const V before = load_lanes(state + j * X::W, cut, lanes), after = fma(f, before - values[j], before);
      sums[j] = fma(qi, after, sums[j]);
      store_lanes(state + j * X::W, after, cut, lanes);
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) X::store(o + j * X::W, sums[j]);
}

// Decays and keys of all channels; returns the augmentation's u.
template <class T, class E>
T channel_gates(const MetalaMixerDecodeArgs& args, int64_t b, int64_t t, int64_t h, int K, const T* q, const Rows<T>& r) {
  using X = Vec<T>;
  using V = typename X::V;
  const bool skipped = metala_skipped(args, b, t);
  const V floor = X::broadcast(static_cast<T>(args.floor)), cooling = X::broadcast(static_cast<T>(1 / args.tau));
  V total = X::zero();
  for (int i = 0; i < K; i += X::W) {
    const V a = X::load(args.a.at<const E>(b, t, h, i), K - i);
    const V g = skipped ? X::zero() : max(floor, -softplus(-a) * cooling);
    const auto weak = state_factors<T>(g, r.factor + i, r.keep + i);
    const V factor = X::load(r.factor + i), k = select(weak, -factor, X::broadcast(T(1)) - factor);
    X::store(r.k + i, k);
    if (!args.w_aug.given()) continue;
    const V w = args.w_aug.dtype == args.q.dtype ? X::load(args.w_aug.at<const E>(h, i), K - i)
                                                 : X::load(args.w_aug.at<const T>(h, i), K - i);
    total = fma(X::load(q + i, K - i) * w, k, total);
  }
  return sum(total);
}

// The first token of a head that comes next, and where its result goes.
template <class E>
LINNET_INLINE void fetch_token(const MetalaMixerDecodeArgs& args, const MetalaMixerDecodeOut& out, int64_t b, int64_t h) {
  fetch_elements(args.q.at<const E>(b, 0, h), static_cast<int>(args.q.size[3]));
  fetch_elements(args.a.at<const E>(b, 0, h), static_cast<int>(args.q.size[3]));
  fetch_elements(args.v.at<const E>(b, 0, h), static_cast<int>(args.v.size[3]));
  fetch_result(out.out.at<E>(b, 0, h), static_cast<int>(args.v.size[3]));
}

template <class T, class E>
void decode_head(const MetalaMixerDecodeArgs& args, const MetalaMixerDecodeOut& out, int64_t b, int64_t h, bool more,
                 const Rows<T>& r) {
  using X = Vec<T>;
  using V = typename X::V;
  const int K = static_cast<int>(args.q.size[3]), width = static_cast<int>(args.v.size[3]);
  const T scale = static_cast<T>(args.scale.value_or(K == 0 ? 1 : 1 / __builtin_sqrt(static_cast<double>(K))));
  for (int64_t t = 0; t < args.q.size[1]; ++t) {
    const T* q = decode_input<false>(args.q.at<const E>(b, t, h), K, r.q);
    const T* v = decode_input<true>(args.v.at<const E>(b, t, h), width, r.v);
    if (metala_masked(args, b, t)) {
      for (int j = 0; j < width; j += X::W) X::store(r.v + j, X::zero());
      v = r.v;
    }
    if (more && t + 1 == args.q.size[1]) {
      const bool row_ends = h + 1 == args.q.size[2];
      fetch_token<E>(args, out, row_ends ? b + 1 : b, row_ends ? 0 : h + 1);
    }
    const V u = X::broadcast(channel_gates<T, E>(args, b, t, h, K, q, r));
    decode_slices<T>(width, [&]<int N, bool kCut>(int at, int lanes) {
      mix_rows<N, kCut>(K, lanes, args.state.at<T>(b, h, 0, at), args.state.stride[2], r, q, v + at, r.o + at);
    });
    for (int j = 0; j < width; j += X::W) {
      V y = X::load(r.o + j) * X::broadcast(scale);
      const V x = u * X::load(v + j);
      if (args.aug == MetalaAug::sigmoid) y = y + sigmoid(x);
      if (args.aug == MetalaAug::linear) y = y + x;
      X::store(out.out.at<E>(b, t, h, j), y, width - j);
    }
  }
}

template <class T>
int64_t worker_bytes(const MetalaMixerDecodeArgs& args) {
  Arena arena;
  Rows<T>::cut(arena, args.q.size[3], args.v.size[3]);
  return arena.used();
}

}  // namespace

void metala_mixer_decode_forward(const MetalaMixerDecodeArgs& args, const MetalaMixerDecodeOut& out, const Launch& launch) {
  by_dtype(args.q.dtype, [&]<class T, class E>() {
    const int64_t bytes = worker_bytes<T>(args), H = args.q.size[2];
    parallel_near(launch, args.q.size[0] * H, [&](int64_t task, int worker, bool more) {
      Arena arena(launch.workspace + worker * bytes);
      decode_head<T, E>(args, out, task / H, task % H, more, Rows<T>::cut(arena, args.q.size[3], args.v.size[3]));
    });
  });
}
int64_t metala_mixer_decode_workspace(const MetalaMixerDecodeArgs& args, Pass, int workers) {
  return by_dtype(args.q.dtype, [&]<class T, class E>() { return workers * worker_bytes<T>(args); });
}

}  // namespace linnet::LINNET_ISA
