// One step of MetaLA: per (batch row, head) and token one visit of the state in place (recurrence/decode_gated.h).
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
    decode_gated_step<T>(K, width, args.state.at<T>(b, h), args.state.stride[2], r.factor, r.keep, r.k, r.q, r.v, r.o);
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
