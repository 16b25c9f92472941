// One step of SSD: per (batch row, head) and token one visit of the state in place (recurrence/decode_gated.h). A task is four
// heads, whose steps and decays are computed in one vector: their 200 cycles of latency would stand between any two states.
#include "mechanisms/recurrence/decode_gated.h"
#include "mechanisms/recurrence/engine_chunk.h"
#include "simd/math.h"
#include "simd/task.h"
#include "ssd.h"

namespace linnet::LINNET_ISA {
namespace {

constexpr int kHeads = 4;  // of a task

template <class T>
struct Rows {
  T *q, *k;                              // [ldk]
  T *x, *v, *o;                          // [ldv]
  T *rate, *bias, *delta, *step, *kept;  // [heads]: A, dt_bias, delta, the decay's factor and keep
  LINNET_INLINE static Rows cut(Arena& arena, int64_t K, int64_t V) {
    Rows r;
    for (T** row : {&r.q, &r.k}) *row = arena.take<T>(round_up<T>(K));
    for (T** row : {&r.x, &r.v, &r.o}) *row = arena.take<T>(round_up<T>(V));
    for (T** row : {&r.rate, &r.bias, &r.delta, &r.step, &r.kept}) *row = arena.take<T>(round_up<T>(kHeads));
    return r;
  }
};

template <class T>
LINNET_INLINE T number(const View& view, int64_t at) {
  return static_cast<T>(load_f64(view.data, view.dtype, at));
}

// delta, and what decays the state, of heads [h0, h0 + heads) at one token.
template <class T, class E>
LINNET_INLINE void decays(const SsdDecodeArgs& args, int64_t b, int64_t t, int64_t h0, int heads, const Rows<T>& r) {
  using X = Vec<T>;
  using V = typename X::V;
  const V low = X::broadcast(static_cast<T>(args.dt_min));
  const V high = X::broadcast(static_cast<T>(args.dt_max.value_or(__builtin_inf())));
  for (int i = 0; i < heads; i += X::W) {
    const V dt = args.dt.dtype == args.x.dtype ? X::load(args.dt.at<const E>(b, t, h0 + i), heads - i)
                                               : X::load(args.dt.at<const T>(b, t, h0 + i), heads - i);
    const V delta = min(high, max(low, softplus(dt + X::load(r.bias + i))));
    X::store(r.delta + i, delta);
    state_factors<T>(select(eq(delta, X::zero()), X::zero(), delta * X::load(r.rate + i)), r.step + i, r.kept + i);
  }
}

template <class T, class E>
void decode_head(const SsdDecodeArgs& args, const SsdDecodeOut& out, int64_t b, int64_t t, int64_t h, int i, const Rows<T>& r) {
  using X = Vec<T>;
  using V = typename X::V;
  const int K = static_cast<int>(args.B.size[3]), width = static_cast<int>(args.x.size[3]);
  const int64_t ldv = round_up<T>(width), group = h / (args.x.size[2] / args.B.size[2]);
  const T* q = decode_input<false>(args.C.at<const E>(b, t, group), K, r.q);
  const T* k = decode_input<false>(args.B.at<const E>(b, t, group), K, r.k);
  const T* x = decode_input<true>(args.x.at<const E>(b, t, h), width, r.x);
  for (int64_t j = 0; j < ldv; j += X::W) X::store(r.v + j, X::broadcast(r.delta[i]) * X::load(x + j));
  if (h + 1 < args.x.size[2]) {
    fetch_elements(args.x.at<const E>(b, t, h + 1), width);
    fetch_result(out.out.at<E>(b, t, h + 1), width);
  }
  decode_gated_step<T>(K, width, args.state.at<T>(b, h), args.state.stride[2], {r.step + i, r.kept + i, true}, k, q, r.v, r.o,
                       T(1));
  for (int j = 0; j < width; j += X::W) {
    V y = X::load(r.o + j);
    if (args.D.given()) {
      V skip;
      if (args.D.rank == 1) {
        skip = X::broadcast(number<T>(args.D, h * args.D.stride[0]));
      } else if (args.D.dtype == args.x.dtype) {
        skip = X::load(args.D.at<const E>(h, j), width - j);
      } else {
        skip = X::load(args.D.at<const T>(h, j), width - j);
      }
      y = fma(skip, X::load(x + j), y);
    }
    if (args.z.given()) {
      const V z = X::load(args.z.at<const E>(b, t, h, j), width - j);
      y = y * (z * sigmoid(z));
    }
    X::store(out.out.at<E>(b, t, h, j), y, width - j);
  }
}

template <class T>
int64_t worker_bytes(const SsdDecodeArgs& args) {
  Arena arena;
  Rows<T>::cut(arena, args.B.size[3], args.x.size[3]);
  return arena.used();
}

}  // namespace

void mamba_ssd_decode_forward(const SsdDecodeArgs& args, const SsdDecodeOut& out, const Launch& launch) {
  by_dtype(args.x.dtype, [&]<class T, class E>() {
    const int64_t bytes = worker_bytes<T>(args), H = args.x.size[2], blocks = (H + kHeads - 1) / kHeads;
    parallel_near(launch, args.x.size[0] * blocks, [&](int64_t task, int worker) {
      Arena arena(launch.workspace + worker * bytes);
      const Rows<T> r = Rows<T>::cut(arena, args.B.size[3], args.x.size[3]);
      const int64_t b = task / blocks, h0 = task % blocks * kHeads;
      const int heads = static_cast<int>(H - h0 < kHeads ? H - h0 : kHeads);
      for (int i = 0; i < heads; ++i) {
        r.rate[i] = number<T>(args.A, (h0 + i) * args.A.stride[0]);
        r.bias[i] = args.dt_bias.given() ? number<T>(args.dt_bias, (h0 + i) * args.dt_bias.stride[0]) : T(0);
      }
      for (int64_t t = 0; t < args.x.size[1]; ++t) {
        decays<T, E>(args, b, t, h0, heads, r);
        for (int i = 0; i < heads; ++i) decode_head<T, E>(args, out, b, t, h0 + i, i, r);
      }
    });
  });
}
int64_t mamba_ssd_decode_workspace(const SsdDecodeArgs& args, Pass, int workers) {
  return by_dtype(args.x.dtype, [&]<class T, class E>() { return workers * worker_bytes<T>(args); });
}

}  // namespace linnet::LINNET_ISA
