// One step of SSD: per (batch row, head) and token one visit of the state in place (recurrence/cpu/decode_gated.h). A task is
// four heads, whose steps and decays are computed in one vector; those of the next four between the last rows of these and
// their results: 200 cycles of latency, in which the rows would wait.
#include "mechanisms/recurrence/cpu/decode_gated.h"
#include "mechanisms/recurrence/cpu/engine_chunk.h"
#include "simd/math.h"
#include "simd/task.h"
#include "ssd.h"

namespace linnet::LINNET_ISA {
namespace {

constexpr int kHeads = 4;  // of a task

// [heads]: A, dt_bias, delta, the decay's factor and keep
template <class T>
struct Decays {
  T *rate, *bias, *delta, *step, *kept;
};

template <class T>
struct Rows {
  T *q, *k;             // [ldk]
  T *x, *v, *o;         // [ldv]
  Decays<T> decays[2];  // of these heads and the next ones
  LINNET_INLINE static Rows cut(Arena& arena, int64_t K, int64_t V) {
    Rows r;
    for (T** row : {&r.q, &r.k}) *row = arena.take<T>(round_up<T>(K));
    for (T** row : {&r.x, &r.v, &r.o}) *row = arena.take<T>(round_up<T>(V));
    for (Decays<T>& d : r.decays) {
      for (T** row : {&d.rate, &d.bias, &d.delta, &d.step, &d.kept}) *row = arena.take<T>(round_up<T>(kHeads));
    }
    return r;
  }
};

template <class T>
LINNET_INLINE T number(const View& view, int64_t at) {
  return static_cast<T>(load_f64(view.data, view.dtype, at));
}

struct Heads {
  int64_t b, first;
  int count;
};
LINNET_INLINE Heads heads_of(const SsdDecodeArgs& args, int64_t task) {
  const int64_t H = args.x.size[2], blocks = (H + kHeads - 1) / kHeads, first = task % blocks * kHeads;
  return {task / blocks, first, static_cast<int>(H - first < kHeads ? H - first : kHeads)};
}

// delta, and what decays the state, of the task's heads at one token.
template <class T, class E>
void decays(const SsdDecodeArgs& args, int64_t task, int64_t t, const Decays<T>& d) {
  using X = Vec<T>;
  using V = typename X::V;
  const Heads heads = heads_of(args, task);
  const V low = X::broadcast(static_cast<T>(args.dt_min));
  const V high = X::broadcast(static_cast<T>(args.dt_max.value_or(__builtin_inf())));
  for (int i = 0; i < heads.count; ++i) {
    d.rate[i] = number<T>(args.A, (heads.first + i) * args.A.stride[0]);
    d.bias[i] = args.dt_bias.given() ? number<T>(args.dt_bias, (heads.first + i) * args.dt_bias.stride[0]) : T(0);
  }
  for (int i = 0; i < heads.count; i += X::W) {
    const int lanes = heads.count - i;
    const V dt = args.dt.dtype == args.x.dtype ? X::load(args.dt.at<const E>(heads.b, t, heads.first + i), lanes)
                                               : X::load(args.dt.at<const T>(heads.b, t, heads.first + i), lanes);
    const V delta = min(high, max(low, softplus(dt + X::load(d.bias + i))));
    X::store(d.delta + i, delta);
    state_factors<T>(select(eq(delta, X::zero()), X::zero(), delta * X::load(d.rate + i)), d.step + i, d.kept + i);
  }
}

// The i-th head of d; after_rows() is called between the rows and the results.
template <class T, class E, class AfterRows>
LINNET_INLINE void decode_head(const SsdDecodeArgs& args, const SsdDecodeOut& out, int64_t b, int64_t t, int64_t h, int i,
                               const Decays<T>& d, const Rows<T>& r, const AfterRows& after_rows) {
  using X = Vec<T>;
  using V = typename X::V;
  const int K = static_cast<int>(args.B.size[3]), width = static_cast<int>(args.x.size[3]);
  const int64_t ldv = round_up<T>(width), group = h / (args.x.size[2] / args.B.size[2]);
  const T* q = decode_input<false>(args.C.at<const E>(b, t, group), K, r.q);
  const T* k = decode_input<false>(args.B.at<const E>(b, t, group), K, r.k);
  const T* x = decode_input<true>(args.x.at<const E>(b, t, h), width, r.x);
  for (int64_t j = 0; j < ldv; j += X::W) X::store(r.v + j, X::broadcast(d.delta[i]) * X::load(x + j));
  if (h + 1 < args.x.size[2]) {
    fetch_elements(args.x.at<const E>(b, t, h + 1), width);
    fetch_result(out.out.at<E>(b, t, h + 1), width);
  }
  decode_gated_step<T>(K, width, args.state.at<T>(b, h), args.state.stride[2], {d.step + i, d.kept + i, true}, k, q, r.v, r.o,
                       T(1));
  after_rows();
  const bool one_skip = args.D.given() && args.D.rank == 1;
  const V skip_all = X::broadcast(one_skip ? number<T>(args.D, h * args.D.stride[0]) : T(0));
  for (int j = 0; j < width; j += X::W) {
    V y = X::load(r.o + j);
    if (args.D.given()) {
      V skip = skip_all;
      if (!one_skip) {
        skip = args.D.dtype == args.x.dtype ? X::load(args.D.at<const E>(h, j), width - j)
                                            : X::load(args.D.at<const T>(h, j), width - j);
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

// ready: the decays of the first token are there; more: the next task follows.
template <class T, class E>
void decode_task(const SsdDecodeArgs& args, const SsdDecodeOut& out, int64_t task, bool ready, bool more, Rows<T>& r) {
  const Heads heads = heads_of(args, task);
  const int64_t tokens = args.x.size[1];
  if (!ready) decays<T, E>(args, task, 0, r.decays[0]);
  for (int64_t t = 0; t < tokens; ++t) {
    const Decays<T> now = r.decays[0];
    const bool last = t + 1 == tokens;
    for (int i = 0; i < heads.count; ++i) {
      decode_head<T, E>(args, out, heads.b, t, heads.first + i, i, now, r, [&] {
        if (i + 1 < heads.count || (last && !more)) return;
        decays<T, E>(args, last ? task + 1 : task, last ? 0 : t + 1, r.decays[1]);
        r.decays[0] = r.decays[1];
        r.decays[1] = now;
      });
    }
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
  if (args.x.size[1] == 0) return;
  const int64_t tasks = args.x.size[0] * ((args.x.size[2] + kHeads - 1) / kHeads);
  by_dtype(args.x.dtype, [&]<class T, class E>() {
    decode_ahead(
        launch, tasks, worker_bytes<T>(args), [&](Arena& arena) { return Rows<T>::cut(arena, args.B.size[3], args.x.size[3]); },
        [&](int64_t task, bool ready, bool more, Rows<T>& r) { decode_task<T, E>(args, out, task, ready, more, r); });
  });
}
int64_t mamba_ssd_decode_workspace(const SsdDecodeArgs& args, Pass, int workers) {
  return by_dtype(args.x.dtype, [&]<class T, class E>() { return workers * worker_bytes<T>(args); });
}

}  // namespace linnet::LINNET_ISA
