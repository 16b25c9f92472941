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
void mix_rows(int K, int lanes, T* state, int64_t pitch, const Rows<T>& r, int at) {
  using X = Vec<T>;
  using V = typename X::V;
  V values[N], sums[N] = {};
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) values[j] = X::load(r.v + at + j * X::W);
  for (int i = 0; i < K; ++i, state += pitch) {
    const V f = X::broadcast(r.factor[i]), q = X::broadcast(r.q[i]), k = X::broadcast(r.k[i]);
    if (r.keep[i] == 0) {
      decode_row<N, kCut, false>(lanes, state + at, f, k, q, values, sums);
      continue;
    }
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) {
      const bool cut = kCut && j == N - 1;
      T* to = state + at + j * X::W;
      const V before = load_lanes(to, cut, lanes), after = fma(f, before - values[j], before);
      sums[j] = fma(q, after, sums[j]);
      if (cut) {
        X::store_mask(to, after, X::prefix(lanes), lanes);
      } else {
        X::store(to, after);
      }
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) X::store(r.o + at + j * X::W, sums[j]);
}

template <class T, class E>
void decode_head(const MetalaMixerDecodeArgs& args, const MetalaMixerDecodeOut& out, int64_t b, int64_t h, const Rows<T>& r) {
  using X = Vec<T>;
  using V = typename X::V;
  const int K = static_cast<int>(args.q.size[3]), width = static_cast<int>(args.v.size[3]);
  const int64_t ldk = round_up<T>(K), ldv = round_up<T>(width);
  const T scale = static_cast<T>(args.scale.value_or(K == 0 ? 1 : 1 / __builtin_sqrt(static_cast<double>(K))));
  const V floor = X::broadcast(static_cast<T>(args.floor)), cooling = X::broadcast(static_cast<T>(1 / args.tau));
  for (int64_t t = 0; t < args.q.size[1]; ++t) {
    load_tile<T>(args.q.at<const E>(b, t, h), 0, 1, K, r.q, ldk);
    load_tile<T>(args.v.at<const E>(b, t, h), 0, 1, width, r.v, ldv);
    const bool skipped = metala_skipped(args, b, t);
    for (int64_t j = 0; metala_masked(args, b, t) && j < ldv; j += X::W) X::store(r.v + j, X::zero());
    V total = X::zero();
    for (int i = 0; i < K; i += X::W) {
      const V a = X::load(args.a.at<const E>(b, t, h, i), K - i);
      const V g = skipped ? X::zero() : max(floor, -softplus(-a) * cooling), k = -expm1(g);
      state_factors<T>(g, r.factor + i, r.keep + i);
      X::store(r.k + i, k);
      if (!args.w_aug.given()) continue;
      const V w = args.w_aug.dtype == args.q.dtype ? X::load(args.w_aug.at<const E>(h, i), K - i)
                                                   : X::load(args.w_aug.at<const T>(h, i), K - i);
      total = fma(X::load(r.q + i) * w, k, total);
    }
    const V u = X::broadcast(sum(total));
    decode_slices<T>(width, [&]<int N, bool kCut>(int at, int lanes) {
      mix_rows<N, kCut>(K, lanes, args.state.at<T>(b, h), args.state.stride[2], r, at);
    });
    for (int j = 0; j < width; j += X::W) {
      V y = X::load(r.o + j) * X::broadcast(scale);
      const V x = u * X::load(r.v + j);
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
    parallel_near(launch, args.q.size[0] * H, [&](int64_t task, int worker) {
      Arena arena(launch.workspace + worker * bytes);
      decode_head<T, E>(args, out, task / H, task % H, Rows<T>::cut(arena, args.q.size[3], args.v.size[3]));
    });
  });
}
int64_t metala_mixer_decode_workspace(const MetalaMixerDecodeArgs& args, Pass, int workers) {
  return by_dtype(args.q.dtype, [&]<class T, class E>() { return workers * worker_bytes<T>(args); });
}

}  // namespace linnet::LINNET_ISA
