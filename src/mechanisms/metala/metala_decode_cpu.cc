// One step of MetaLA: per (batch row, head) and token one visit of the state in place, row after row (recurrence/decode.h). The
// tie k = 1 - exp(g) = -e makes a step of a weakly decaying row S + e (S - v), one multiplication less than any other decay's:
// 2.8 cycles a vector on Zen 4, as an update in place. Gates and sigmoids of 64 and 128 channels take 440 cycles beside 1430 of
// the rows; given to the core a few vectors at a time between rows they took as long, and the rows longer.
#include "mechanisms/recurrence/decode_gated.h"
#include "mechanisms/recurrence/engine_chunk.h"
#include "metala.h"
#include "simd/math.h"
#include "simd/task.h"

namespace linnet::LINNET_ISA {
namespace {

// What a token does to the rows of its state.
template <class T>
struct Gates {
  T *k, *factor, *keep;  // [ldk]
  T u;                   // of the augmentation
};

template <class T>
struct Rows {
  Gates<T> gates[2];  // of this token and the next one
  T* q;               // [ldk]
  T *v, *o;           // [ldv]
  LINNET_INLINE static Rows cut(Arena& arena, int64_t K, int64_t V) {
    Rows r;
    for (Gates<T>& gates : r.gates) {
      for (T** row : {&gates.k, &gates.factor, &gates.keep}) *row = arena.take<T>(round_up<T>(K));
    }
    r.q = arena.take<T>(round_up<T>(K));
    for (T** row : {&r.v, &r.o}) *row = arena.take<T>(round_up<T>(V));
    return r;
  }
};

// S = S + e (S - v), or factor S + k v where the decay is strong (keep 0): S - (S - v) would round v as S. o = S^T q.
template <int N, bool kCut, class T>
void mix_rows(int K, int lanes, T* state, int64_t pitch, const Gates<T>& gates, const T* q, const T* v, T* o) {
  using X = Vec<T>;
  using V = typename X::V;
  V values[N], sums[N] = {};
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) values[j] = X::load(v + j * X::W);
  for (int i = 0; i < K; ++i, state += pitch) {
    const V f = X::broadcast(gates.factor[i]), qi = X::broadcast(q[i]);
    if (gates.keep[i] == 0) {
      decode_row<N, kCut, false>(lanes, state, f, X::broadcast(gates.k[i]), qi, values, sums);
      continue;
    }
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) {
      const bool cut = kCut && j == N - 1;
      const V before = in_register(load_lanes(state + j * X::W, cut, lanes)), after = fma(f, before - values[j], before);
      sums[j] += in_register(qi * after);
      store_lanes(state + j * X::W, after, cut, lanes);
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) X::store(o + j * X::W, sums[j]);
}

// Decays and keys of all channels, and u.
template <class T, class E>
void channel_gates(const MetalaMixerDecodeArgs& args, int64_t b, int64_t t, int64_t h, Gates<T>* gates) {
  using X = Vec<T>;
  using V = typename X::V;
  const bool skipped = metala_skipped(args, b, t);
  const V floor = X::broadcast(static_cast<T>(args.floor)), cooling = X::broadcast(static_cast<T>(1 / args.tau));
  const int K = static_cast<int>(args.q.size[3]);
  const E *a = args.a.at<const E>(b, t, h), *q = args.q.at<const E>(b, t, h);
  T* g = gates->factor;
  for (int i = 0; i < K; i += X::W) {  // two loops: four vectors of one fit into what a core looks ahead
    X::store(g + i, skipped ? X::zero() : max(floor, -softplus(-X::load(a + i, K - i)) * cooling));
  }
  V total = X::zero();
  for (int i = 0; i < K; i += X::W) {
    const auto weak = state_factors<T>(X::load(g + i), gates->factor + i, gates->keep + i);
    const V factor = X::load(gates->factor + i), k = select(weak, -factor, X::broadcast(T(1)) - factor);
    X::store(gates->k + i, k);
    if (!args.w_aug.given()) continue;
    const V w = args.w_aug.dtype == args.q.dtype ? X::load(args.w_aug.at<const E>(h, i), K - i)
                                                 : X::load(args.w_aug.at<const T>(h, i), K - i);
    total = fma(X::load(q + i, K - i) * w, k, total);
  }
  gates->u = sum(total);
}

// The first token of a head that comes next, and where its result goes.
template <class E>
LINNET_INLINE void fetch_token(const MetalaMixerDecodeArgs& args, const MetalaMixerDecodeOut& out, int64_t b, int64_t h) {
  fetch_elements(args.q.at<const E>(b, 0, h), static_cast<int>(args.q.size[3]));
  fetch_elements(args.a.at<const E>(b, 0, h), static_cast<int>(args.q.size[3]));
  fetch_elements(args.v.at<const E>(b, 0, h), static_cast<int>(args.v.size[3]));
  fetch_result(out.out.at<E>(b, 0, h), static_cast<int>(args.v.size[3]));
}

// The gates of the next token are computed between the rows of this one and its sigmoids: so they are there when its rows
// begin. ready: those of the first token are; more: another head follows.
template <class T, class E>
void decode_head(const MetalaMixerDecodeArgs& args, const MetalaMixerDecodeOut& out, int64_t b, int64_t h, bool ready,
                 bool more, Rows<T>& r) {
  using X = Vec<T>;
  using V = typename X::V;
  const int K = static_cast<int>(args.q.size[3]), width = static_cast<int>(args.v.size[3]);
  const int64_t tokens = args.q.size[1];
  const bool row_ends = h + 1 == args.q.size[2];
  const int64_t next_b = row_ends ? b + 1 : b, next_h = row_ends ? 0 : h + 1;
  const T scale = static_cast<T>(args.scale.value_or(K == 0 ? 1 : 1 / __builtin_sqrt(static_cast<double>(K))));
  if (!ready) channel_gates<T, E>(args, b, 0, h, &r.gates[0]);
  for (int64_t t = 0; t < tokens; ++t) {
    const bool last = t + 1 == tokens;
    const T* q = decode_input<false>(args.q.at<const E>(b, t, h), K, r.q);
    const T* v = decode_input<true>(args.v.at<const E>(b, t, h), width, r.v);
    if (metala_masked(args, b, t)) {
      for (int j = 0; j < width; j += X::W) X::store(r.v + j, X::zero());
      v = r.v;
    }
    if (more && last) fetch_token<E>(args, out, next_b, next_h);
    const Gates<T> gates = r.gates[0];
    decode_slices<T>(width, [&]<int N, bool kCut>(int at, int lanes) {
      mix_rows<N, kCut>(K, lanes, args.state.at<T>(b, h, 0, at), args.state.stride[2], gates, q, v + at, r.o + at);
    });
    if (more || !last) {
      channel_gates<T, E>(args, last ? next_b : b, last ? 0 : t + 1, last ? next_h : h, &r.gates[1]);
      r.gates[0] = r.gates[1];
      r.gates[1] = gates;
    }
    const V u = X::broadcast(gates.u);
    E* to = out.out.at<E>(b, t, h);
    for (int j = 0; j < width; j += X::W) {
      V y = X::load(r.o + j) * X::broadcast(scale);
      const V x = u * X::load(v + j);
      if (args.aug == MetalaAug::sigmoid) y = y + sigmoid(x);
      if (args.aug == MetalaAug::linear) y = y + x;
      X::store(to + j, y, width - j);
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
  if (args.q.size[1] == 0) return;
  const int64_t H = args.q.size[2];
  by_dtype(args.q.dtype, [&]<class T, class E>() {
    decode_ahead(
        launch, args.q.size[0] * H, worker_bytes<T>(args),
        [&](Arena& arena) { return Rows<T>::cut(arena, args.q.size[3], args.v.size[3]); },
        [&](int64_t head, bool ready, bool more, Rows<T>& r) {
          decode_head<T, E>(args, out, head / H, head % H, ready, more, r);
        });
  });
}
int64_t metala_mixer_decode_workspace(const MetalaMixerDecodeArgs& args, Pass, int workers) {
  return by_dtype(args.q.dtype, [&]<class T, class E>() { return workers * worker_bytes<T>(args); });
}

}  // namespace linnet::LINNET_ISA
