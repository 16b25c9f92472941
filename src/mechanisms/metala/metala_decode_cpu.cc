// One step of MetaLA: per (batch row, head) and token one visit of the state in place, row after row (recurrence/decode.h). The
// tie k = 1 - exp(g) = -e makes a step of a weakly decaying row S + e (S - v), one multiplication less than any other decay's:
// 2.8 cycles a vector on Zen 4, as an update in place. Gates and sigmoids of 64 and 128 channels take 300 cycles beside 1340 of
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
  T* factor;    // [ldk]
  T *k, *keep;  // [ldk], unless all rows are weak
  T u;          // of the augmentation
  bool weak;    // expm1(g) and 1 are factor and keep of all rows, -expm1(g) is k
};

template <class T>
struct Rows {
  Gates<T> gates[2];  // of this token and the next one, in turn
  int now;
  T* q;      // [ldk]
  T *v, *o;  // [ldv]
  LINNET_INLINE static Rows cut(Arena& arena, int64_t K, int64_t V) {
    Rows r;
    r.now = 0;
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
  const auto weak_row = [&](int i) {
    const V e = X::broadcast(gates.factor[i]), qi = X::broadcast(q[i]);
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) {
      const bool cut = kCut && j == N - 1;
      const V before = in_register(load_lanes(state + j * X::W, cut, lanes)), after = fma(e, before - values[j], before);
      sums[j] += in_register(qi * after);
      store_lanes(state + j * X::W, after, cut, lanes);
    }
  };
  if (gates.weak) {
    for (int i = 0; i < K; ++i, state += pitch) weak_row(i);
  } else {
    for (int i = 0; i < K; ++i, state += pitch) {
      if (gates.keep[i] != 0) {
        weak_row(i);
      } else {
        decode_row<N, kCut, false>(lanes, state, X::broadcast(gates.factor[i]), X::broadcast(gates.k[i]), X::broadcast(q[i]),
                                   values, sums);
      }
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) X::store(o + j * X::W, sums[j]);
}

constexpr int kAtOnce = 4;  // vectors side by side

// Decays and keys of all channels, and u.
template <class T, class E>
void channel_gates(const MetalaMixerDecodeArgs& args, int64_t b, int64_t t, int64_t h, Gates<T>* gates) {
  using S = Several<typename Vec<T>::V, kAtOnce>;
  constexpr int kStep = kAtOnce * Vec<T>::W;
  const int K = static_cast<int>(args.q.size[3]);
  const T floor = static_cast<T>(args.floor), cooling = static_cast<T>(-1 / args.tau);
  const E *a = args.a.at<const E>(b, t, h), *q = args.q.at<const E>(b, t, h);
  const bool skipped = metala_skipped(args, b, t), narrow = args.w_aug.dtype == args.q.dtype;
  const auto weights = [&](int i) {
    if (!args.w_aug.given()) return S{};
    return narrow ? load_several<T, kAtOnce>(args.w_aug.at<const E>(h, i), K - i)
                  : load_several<T, kAtOnce>(args.w_aug.at<const T>(h, i), K - i);
  };
  gates->weak = true;
  for (int i = 0; i < K; i += kStep) {
    const S g = skipped ? S{} : max(splat<S>(floor), softplus(-load_several<T, kAtOnce>(a + i, K - i)) * cooling);
    gates->weak &= !any(lt(g, splat<S>(T(-0.34))));  // above -ln 2 / 2
    store_several<T>(gates->factor + i, g, K - i);
  }
  S total = {};
  for (int i = 0; i < K; i += kStep) {
    const S g = load_several<T, kAtOnce>(gates->factor + i, K - i);
    S factor = expm1_near(g), k = -factor;
    if (!gates->weak) {
      const auto weak = gt(g, splat<S>(T(-0.69314718)));
      const S one = splat<S>(T(1)), keep = select(weak, one, S{});
      factor = decay_factor(g, keep);
      k = select(weak, S{}, one) - factor;
      store_several<T>(gates->keep + i, keep, K - i);
      store_several<T>(gates->k + i, k, K - i);
    }
    store_several<T>(gates->factor + i, factor, K - i);
    total = fma(load_several<T, kAtOnce>(q + i, K - i) * weights(i), k, total);
  }
  gates->u = sum(total);
}

// The gates of the next token are computed between the rows of this one and its sigmoids: so they are there when its rows
// begin. ready: those of the first token are; more: another head follows.
template <class T, class E>
void decode_head(const MetalaMixerDecodeArgs& args, const MetalaMixerDecodeOut& out, int64_t b, int64_t h, bool ready,
                 bool more, Rows<T>& r) {
  using X = Vec<T>;
  using S = Several<typename X::V, kAtOnce>;
  const int K = static_cast<int>(args.q.size[3]), width = static_cast<int>(args.v.size[3]);
  const int64_t tokens = args.q.size[1];
  const bool row_ends = h + 1 == args.q.size[2];
  const int64_t next_b = row_ends ? b + 1 : b, next_h = row_ends ? 0 : h + 1;
  const T scale = static_cast<T>(args.scale.value_or(K == 0 ? 1 : 1 / __builtin_sqrt(static_cast<double>(K))));
  if (!ready) channel_gates<T, E>(args, b, 0, h, &r.gates[r.now]);
  for (int64_t t = 0; t < tokens; ++t) {
    const bool last = t + 1 == tokens;
    const T* q = decode_input<false>(args.q.at<const E>(b, t, h), K, r.q);
    const T* v = decode_input<true>(args.v.at<const E>(b, t, h), width, r.v);
    if (metala_masked(args, b, t)) {
      for (int j = 0; j < width; j += X::W) X::store(r.v + j, X::zero());
      v = r.v;
    }
    const Gates<T>& gates = r.gates[r.now];
    decode_slices<T>(width, [&]<int N, bool kCut>(int at, int lanes) {
      mix_rows<N, kCut>(K, lanes, args.state.at<T>(b, h, 0, at), args.state.stride[2], gates, q, v + at, r.o + at);
    });
    if (more || !last) {
      r.now = 1 - r.now;
      channel_gates<T, E>(args, last ? next_b : b, last ? 0 : t + 1, last ? next_h : h, &r.gates[r.now]);
    }
    const bool curved = args.aug == MetalaAug::sigmoid;
    const T u = curved ? gates.u * Real<typename X::V>::kLog2e : gates.u;
    E* to = out.out.at<E>(b, t, h);
    for (int i = 0; i < width; i += kAtOnce * X::W) {
      S x = load_several<T, kAtOnce>(v + i, width - i) * u;
      if (curved) x = sigmoid2(x);
      if (args.aug == MetalaAug::none) x = S{};
      const S y = load_several<T, kAtOnce>(r.o + i, width - i);
      store_several<T>(to + i, fma(y, splat<S>(scale), x), width - i);
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
        [&args, &out, H](int64_t head, bool ready, bool more, Rows<T>& r) {
          decode_head<T, E>(args, out, head / H, head % H, ready, more, r);
        });
  });
}
int64_t metala_mixer_decode_workspace(const MetalaMixerDecodeArgs& args, Pass, int workers) {
  return by_dtype(args.q.dtype, [&]<class T, class E>() { return workers * worker_bytes<T>(args); });
}

}  // namespace linnet::LINNET_ISA
