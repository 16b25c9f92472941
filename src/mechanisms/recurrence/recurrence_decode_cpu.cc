// recurrence_decode and its members on the vector units: per (batch row, head) and token one visit of the state in place, two
// with beta (decode_gated.h).
#include "decode_gated.h"
#include "engine_chunk.h"
#include "recurrence_source.h"
#include "walk.h"

namespace linnet::LINNET_ISA {
namespace {

template <class T>
struct DecodeRows {
  T *q, *k, *x, *g, *factor, *keep;  // [ldk]; x: the key times the decay
  T *v, *y, *o;                      // [ldv]
  LINNET_INLINE static DecodeRows cut(Arena& arena, const RecurrenceShape& s) {
    const int64_t ldk = round_up<T>(s.K), ldv = round_up<T>(s.V);
    DecodeRows r;
    r.q = arena.take<T>(ldk);
    r.k = arena.take<T>(ldk);
    r.x = arena.take<T>(ldk);
    r.g = arena.take<T>(ldk);
    r.factor = arena.take<T>(ldk);
    r.keep = arena.take<T>(ldk);
    r.v = arena.take<T>(ldv);
    r.y = arena.take<T>(ldv);
    r.o = arena.take<T>(ldv);
    return r;
  }
};

// The first token of a head that comes next.
template <class E>
LINNET_INLINE void fetch_inputs(const RecurrenceDecodeArgs& args, const RecurrenceShape& s, int64_t b, int64_t h) {
  const int K = static_cast<int>(s.K), V = static_cast<int>(s.V);
  fetch_elements(args.q.at<const E>(b, 0, s.q_head(h)), K);
  fetch_elements(args.k.at<const E>(b, 0, s.k_head(h)), K);
  fetch_elements(args.v.at<const E>(b, 0, s.v_head(h)), V);
  if (s.per_channel) fetch_elements(element_address(args.g, b, 0, h), K * static_cast<int>(dtype_size(args.g.dtype)));
}

template <class T, class E>
void decode_head(const RecurrenceDecodeArgs& args, const RecurrenceDecodeOut& out, const RecurrenceShape& s, int64_t b,
                 int64_t h, bool more, const DecodeRows<T>& r) {
  using X = Vec<T>;
  const int K = static_cast<int>(s.K), V = static_cast<int>(s.V);
  const int64_t ldk = round_up<T>(K), ldv = round_up<T>(V);
  T* state = args.state.at<T>(b, h);
  const int64_t pitch = args.state.stride[2];
  const T scale = static_cast<T>(s.scale);
  const bool gated = args.g.given() || args.g_head.given();
  // With beta, from this state to that of the next task: h + 1, or head 0 of batch row b + 1.
  const int64_t next = h + 1 < s.H ? args.state.stride[1] : args.state.stride[0] - (s.H - 1) * args.state.stride[1];
  for (int64_t t = 0; t < s.T; ++t) {
    load_tile<T>(args.q.at<const E>(b, t, s.q_head(h)), 0, 1, K, r.q, ldk);
    load_tile<T>(args.k.at<const E>(b, t, s.k_head(h)), 0, 1, K, r.k, ldk);
    load_tile<T>(args.v.at<const E>(b, t, s.v_head(h)), 0, 1, V, r.v, ldv);
    T unused;
    if (args.l2_norm) {
      normalize_rows(1, ldk, r.q, &unused);
      normalize_rows(1, ldk, r.k, &unused);
    }
    if (s.per_channel) {
      load_gate_rows<T, E>(args.g, element_address(args.g, b, t, h), 0, 1, K, r.g, ldk);
      for (int64_t c = 0; c < ldk; c += X::W) {
        const typename X::V g = X::load(r.g + c);
        state_factors<T>(g, r.factor + c, r.keep + c);
        if (args.beta.given()) X::store(r.x + c, exp(g) * X::load(r.k + c));
      }
    } else if (gated) {
      const T g = args.g.given() ? scalar_element<T>(args.g, b, t, h)
                                 : static_cast<T>(load_f64(args.g_head.data, args.g_head.dtype, h * args.g_head.stride[0]));
      state_factors<T>(X::broadcast(g), r.factor, r.keep);
      const typename X::V factor = X::load(r.factor), keep = X::load(r.keep), a = exp(X::broadcast(g));
      for (int64_t c = 0; c < ldk; c += X::W) {
        X::store(r.factor + c, factor);
        X::store(r.keep + c, keep);
        if (args.beta.given()) X::store(r.x + c, a * X::load(r.k + c));
      }
    }
    if (args.beta.given()) {
      const T beta = (args.double_beta ? 2 : 1) * scalar_element<T>(args.beta, b, t, h);
      decode_read<T>(K, V, state, pitch, gated ? r.x : r.k, r.y);
      for (int64_t j = 0; j < ldv; j += X::W) {
        X::store(r.v + j, X::broadcast(beta) * (X::load(r.v + j) - X::load(r.y + j)));
      }
    }
    const bool last = more && t + 1 == s.T;
    if (last) fetch_inputs<E>(args, s, h + 1 < s.H ? b : b + 1, h + 1 < s.H ? h + 1 : 0);
    const int64_t ahead = args.beta.given() && last ? next : 0;
    if (gated) {
      decode_gated_step<T>(K, V, state, pitch, r.factor, r.keep, r.k, r.q, r.v, r.o, ahead);
    } else {
      decode_step<false>(K, V, state, pitch, state, 0, r.k, r.q, r.v, r.o, ahead);
    }
    store_tile<T>(r.o, ldv, 1, V, out.out.at<E>(b, t, h), 0, &scale);
  }
}

template <class T>
int64_t worker_bytes(const RecurrenceShape& s) {
  Arena arena;
  DecodeRows<T>::cut(arena, s);
  return arena.used();
}

}  // namespace

void recurrence_decode_forward(const RecurrenceDecodeArgs& args, const RecurrenceDecodeOut& out, const Launch& launch) {
  by_dtype(args.q.dtype, [&]<class T, class E>() {
    const RecurrenceShape s = recurrence_shape(args);
    const int64_t bytes = worker_bytes<T>(s);
    parallel_near(launch, s.B * s.H, [&](int64_t task, int worker, bool more) {
      Arena arena(launch.workspace + worker * bytes);
      decode_head<T, E>(args, out, s, task / s.H, task % s.H, more, DecodeRows<T>::cut(arena, s));
    });
  });
}

int64_t recurrence_decode_workspace(const RecurrenceDecodeArgs& args, Pass, int workers) {
  return by_dtype(args.q.dtype, [&]<class T, class E>() { return workers * worker_bytes<T>(recurrence_shape(args)); });
}

}  // namespace linnet::LINNET_ISA
