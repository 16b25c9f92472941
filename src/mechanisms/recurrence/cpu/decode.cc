// recurrence_decode and its members on the vector units: per (batch row, head) and token one visit of the state in place, two
// with beta (decode_delta.h).
#include "decode_delta.h"
#include "engine_chunk.h"
#include "source.h"
#include "walk.h"

namespace linnet::LINNET_ISA {
namespace {

template <class T>
struct DecodeRows {
  T *q, *k, *g, *factor, *keep, *x, *w;  // [ldk]; x, w: key and query times the decays
  T *v, *o;                              // [ldv]
  LINNET_INLINE static DecodeRows cut(Arena& arena, const RecurrenceShape& s) {
    DecodeRows r;
    for (T** row : {&r.q, &r.k, &r.g, &r.factor, &r.keep, &r.x, &r.w}) *row = arena.take<T>(round_up<T>(s.K));
    for (T** row : {&r.v, &r.o}) *row = arena.take<T>(round_up<T>(s.V));
    return r;
  }
};

// The first token of a head that comes next, and where its result goes: stores wait in order.
template <class E>
LINNET_INLINE void fetch_token(const RecurrenceDecodeArgs& args, const RecurrenceDecodeOut& out, const RecurrenceShape& s,
                               int64_t b, int64_t h) {
  const int K = static_cast<int>(s.K), V = static_cast<int>(s.V);
  fetch_elements(args.q.at<const E>(b, 0, s.q_head(h)), K);
  fetch_elements(args.k.at<const E>(b, 0, s.k_head(h)), K);
  fetch_elements(args.v.at<const E>(b, 0, s.v_head(h)), V);
  fetch_result(out.out.at<E>(b, 0, h), V);
  if (s.per_channel) fetch_elements(element_address(args.g, b, 0, h), K * static_cast<int>(dtype_size(args.g.dtype)));
}

// One token of one head, as T.
template <class T>
struct DecodeToken {
  const T *q, *k, *v;  // [K], [K], [V, padded]
  T beta;
};

template <class T, class E>
LINNET_INLINE DecodeToken<T> decode_token(const RecurrenceDecodeArgs& args, const RecurrenceShape& s, int64_t b, int64_t t,
                                          int64_t h, const DecodeRows<T>& r) {
  DecodeToken<T> token;
  token.q = decode_input<false>(args.q.at<const E>(b, t, s.q_head(h)), s.K, r.q);
  token.k = decode_input<false>(args.k.at<const E>(b, t, s.k_head(h)), s.K, r.k);
  token.v = decode_input<true>(args.v.at<const E>(b, t, s.v_head(h)), s.V, r.v);
  if (args.l2_norm) {
    T unused;
    load_tile<T>(token.q, 0, 1, static_cast<int>(s.K), r.q, 0);
    load_tile<T>(token.k, 0, 1, static_cast<int>(s.K), r.k, 0);
    normalize_rows(1, round_up<T>(s.K), r.q, &unused);
    normalize_rows(1, round_up<T>(s.K), r.k, &unused);
    token.q = r.q;
    token.k = r.k;
  }
  if (args.beta.given()) token.beta = (args.double_beta ? 2 : 1) * scalar_element<T>(args.beta, b, t, h);
  return token;
}

// What the log decays of the channels do to their rows of the state, and with beta to key and query.
template <class T, class E>
void channel_gates(const RecurrenceDecodeArgs& args, int64_t b, int64_t t, int64_t h, int K, const DecodeToken<T>& token,
                   const DecodeRows<T>& r) {
  using X = Vec<T>;
  load_gate_rows<T, E>(args.g, element_address(args.g, b, t, h), 0, 1, K, r.g, 0);
  for (int c = 0; c < K; c += X::W) {
    const auto weak = state_factors<T>(X::load(r.g + c), r.factor + c, r.keep + c);
    if (!args.beta.given()) continue;
    const typename X::V factor = X::load(r.factor + c), decay = select(weak, factor + X::broadcast(T(1)), factor);
    X::store(r.x + c, decay * X::load(token.k + c, K - c));
    X::store(r.w + c, decay * X::load(token.q + c, K - c));
  }
}

// Both visits of the delta rule; next: the state of the next task, or null.
template <class T>
void delta_step(const RecurrenceShape& s, const DecodeToken<T>& token, const DecodeGates<T>& gates, T decay, T* state,
                int64_t pitch, const DecodeRows<T>& r, T* o, const T* next) {
  using X = Vec<T>;
  const int K = static_cast<int>(s.K), width = static_cast<int>(s.V);
  typename X::V products = X::zero();
  for (int c = 0; c < K; c += X::W) products = fma(X::load(token.q + c, K - c), X::load(token.k + c, K - c), products);
  const DeltaToken<T> delta = {.k = token.k,
                               .x = s.per_channel ? r.x : token.k,
                               .w = s.per_channel ? r.w : token.q,
                               .gates = gates,
                               .decay = decay,
                               .beta = token.beta,
                               .product = sum(products),
                               .scale = static_cast<T>(s.scale)};
  decode_delta<T>(K, width, state, pitch, delta, token.v, o, next);
}

template <class T, class E>
void decode_head(const RecurrenceDecodeArgs& args, const RecurrenceDecodeOut& out, const RecurrenceShape& s, int64_t b,
                 int64_t h, bool more, const DecodeRows<T>& r) {
  using X = Vec<T>;
  const int K = static_cast<int>(s.K), width = static_cast<int>(s.V);
  T* state = args.state.at<T>(b, h);
  const int64_t pitch = args.state.stride[2], ldv = round_up<T>(width);
  const T scale = static_cast<T>(s.scale);
  const bool delta = args.beta.given(), gated = args.g.given() || args.g_head.given();
  // From this state to that of the next task: h + 1, or head 0 of batch row b + 1.
  const int64_t next = h + 1 < s.H ? args.state.stride[1] : args.state.stride[0] - (s.H - 1) * args.state.stride[1];
  const DecodeGates<T> gates = {gated ? r.factor : nullptr, r.keep, !s.per_channel};
  for (int64_t t = 0; t < s.T; ++t) {
    const DecodeToken<T> token = decode_token<T, E>(args, s, b, t, h, r);
    T a = 1;
    if (s.per_channel) {
      channel_gates<T, E>(args, b, t, h, K, token, r);
    } else if (gated) {
      const T g = args.g.given() ? scalar_element<T>(args.g, b, t, h)
                                 : static_cast<T>(load_f64(args.g_head.data, args.g_head.dtype, h * args.g_head.stride[0]));
      state_factors<T>(X::broadcast(g), r.factor, r.keep);
      a = r.keep[0] + r.factor[0];
    }
    const bool last = more && t + 1 == s.T;
    if (last) fetch_token<E>(args, out, s, h + 1 < s.H ? b : b + 1, h + 1 < s.H ? h + 1 : 0);
    if (!delta && !gated) {
      decode_step<false>(K, width, state, pitch, state, 0, token.k, token.q, token.v, r.o);
      store_tile<T>(r.o, ldv, 1, width, out.out.at<E>(b, t, h), 0, &scale);
      continue;
    }
    T* o = r.o;
    if constexpr (sizeof(E) == sizeof(T)) o = out.out.at<E>(b, t, h);
    if (delta) {
      delta_step<T>(s, token, gates, a, state, pitch, r, o, last ? state + next : nullptr);
    } else {
      decode_gated_step<T>(K, width, state, pitch, gates, token.k, token.q, token.v, o, scale);
    }
    if constexpr (sizeof(E) != sizeof(T)) store_tile<T>(r.o, ldv, 1, width, out.out.at<E>(b, t, h), 0);
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
