// One step of MetaLA: per (batch row, head) and token one visit of the state in place, row after row (recurrence/cpu/decode.h).
// The tie k = 1 - exp(g) = -e makes a step of a weakly decaying row S + e (S - v), a product and two sums: on Zen 4 a fused
// multiply-add and a store wait for each other, so only o takes one, and a vector takes 2.6 cycles (2.7 with S by a fused one).
//
// Gates and sigmoids of 64 and 128 channels are 400 instructions in long chains. Behind the rows they took 300 to 400 cycles,
// for which the state did not move. So they are cut in pieces of at most 10 instructions one behind the other, two rows of the
// state between each: those of a whole function would wait longer than the core looks ahead.
#include "mechanisms/recurrence/cpu/decode_gated.h"
#include "mechanisms/recurrence/cpu/engine_chunk.h"
#include "metala.h"
#include "simd/math.h"
#include "simd/task.h"

namespace linnet::LINNET_ISA {
namespace {

// What holds for all tokens of a call.
template <class T>
struct Settings {
  int K, width;
  int64_t tokens;
  T floor, cooling, scale;
  bool curved, none;  // aug sigmoid, aug none
  explicit Settings(const MetalaMixerDecodeArgs& args)
      : K(static_cast<int>(args.q.size[3])),
        width(static_cast<int>(args.v.size[3])),
        tokens(args.q.size[1]),
        floor(static_cast<T>(args.floor)),
        cooling(static_cast<T>(-1 / args.tau)),
        scale(static_cast<T>(args.scale.value_or(K == 0 ? 1 : 1 / __builtin_sqrt(static_cast<double>(K))))),
        curved(args.aug == MetalaAug::sigmoid),
        none(args.aug == MetalaAug::none) {}
};

// A token of a head: where its numbers lie, and what it does to the rows of the state.
template <class T, class E>
struct Token {
  int64_t b, t, h;
  const E *q, *a, *v;
  E* out;
  T* state;
  T* factor;    // [ldk]
  T *k, *keep;  // [ldk], unless all rows are weak
  T u;          // of the augmentation
  bool weak;    // expm1(g) and 1 are factor and keep of all rows, -expm1(g) is k

  LINNET_INLINE void place(const MetalaMixerDecodeArgs& args, const View& result, int64_t row, int64_t time, int64_t head) {
    b = row, t = time, h = head;
    q = args.q.at<const E>(b, t, h);
    a = args.a.at<const E>(b, t, h);
    v = args.v.at<const E>(b, t, h);
    out = result.at<E>(b, t, h);
    state = args.state.at<T>(b, h);
  }
};

template <class T, class E>
struct Rows {
  Settings<T> settings;
  Token<T, E> tokens[2];  // this one and the next, in turn
  int now;
  T* q;      // [ldk]
  T *v, *o;  // [ldv]
  LINNET_INLINE static Rows cut(Arena& arena, const MetalaMixerDecodeArgs& args) {
    Rows r = {.settings = Settings<T>(args)};
    for (Token<T, E>& token : r.tokens) {
      for (T** row : {&token.k, &token.factor, &token.keep}) *row = arena.take<T>(round_up<T>(r.settings.K));
    }
    r.q = arena.take<T>(round_up<T>(r.settings.K));
    for (T** row : {&r.v, &r.o}) *row = arena.take<T>(round_up<T>(r.settings.width));
    return r;
  }
};

// Decays and keys of all channels, and u; kAtOnce vectors side by side. between(): what else the core can do meanwhile.
template <int kAtOnce, class T, class E, class Between>
LINNET_INLINE void channel_gates(const MetalaMixerDecodeArgs& args, const Settings<T>& settings, Token<T, E>& token,
                                 const Between& between) {
  using S = Several<typename Vec<T>::V, kAtOnce>;
  constexpr int kStep = kAtOnce * Vec<T>::W;
  const int K = settings.K;
  const bool skipped = metala_skipped(args, token.b, token.t);
  const bool narrow = sizeof(T) == sizeof(E) || args.w_aug.dtype == args.q.dtype;
  const auto weights = [&](int i) {
    if (!args.w_aug.given()) return S{};
    return narrow ? load_several<T, kAtOnce>(args.w_aug.at<const E>(token.h, i), K - i)
                  : load_several<T, kAtOnce>(args.w_aug.at<const T>(token.h, i), K - i);
  };
  bool all_weak = true;
  for (int i = 0; i < K; i += kStep) {
    S g = {};
    if (!skipped) {
      g = max(splat<S>(settings.floor), softplus(-load_several<T, kAtOnce>(token.a + i, K - i), between) * settings.cooling);
    }
    all_weak &= !any(lt(g, splat<S>(T(-0.34))));  // above -ln 2 / 2
    store_several<T>(token.factor + i, g, K - i);
    between();
  }
  token.weak = all_weak;
  Several<typename Vec<T>::V, 2> total = {};  // in one order, whatever kAtOnce is
  for (int i = 0; i < K; i += kStep) {
    const S g = load_several<T, kAtOnce>(token.factor + i, K - i);
    S factor = expm1_near(g), k = -factor;
    if (!all_weak) {
      const auto weak = gt(g, splat<S>(T(-0.69314718)));
      const S one = splat<S>(T(1)), keep = select(weak, one, S{});
      factor = decay_factor(g, keep);
      k = select(weak, S{}, one) - factor;
      store_several<T>(token.keep + i, keep, K - i);
      store_several<T>(token.k + i, k, K - i);
    }
    store_several<T>(token.factor + i, factor, K - i);
    const S queries = load_several<T, kAtOnce>(token.q + i, K - i) * weights(i);
#pragma GCC unroll 4
    for (int j = 0; j < kAtOnce; ++j) total.at[j % 2] = fma(queries.at[j], k.at[j], total.at[j % 2]);
    between();
  }
  token.u = sum(total);
}

// What the augmentation adds to `count` results.
template <int kAtOnce, class T, class Between>
LINNET_INLINE void augmentation(const Settings<T>& settings, const T* v, T u, int count, T* result, const Between& between) {
  using V = typename Vec<T>::V;
  using S = Several<V, kAtOnce>;
  if (settings.curved) u *= Real<V>::kLog2e;
  for (int j = 0; j < count; j += kAtOnce * Vec<T>::W) {
    S x = load_several<T, kAtOnce>(v + j, count - j) * u;
    if (settings.curved) x = sigmoid2(x, between);
    if (settings.none) x = S{};
    store_several<T>(result + j, x, count - j);
    between();
  }
}

// One row, S = S + e (S - v), o = S^T q.
template <int N, bool kCut, class T, class V>
LINNET_INLINE void weak_row(int lanes, T* state, V e, V q, const V (&values)[N], V (&sums)[N]) {
  using X = Vec<T>;
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) {
    const bool cut = kCut && j == N - 1;
    const V before = in_register(load_lanes(state + j * X::W, cut, lanes));
    const V after = before + in_register(e * (before - values[j]));
    sums[j] = fma(q, after, sums[j]);
    store_lanes(state + j * X::W, after, cut, lanes);
  }
}

// All rows; factor S + k v where the decay is strong (keep 0): S - (S - v) would round v as S.
template <int N, bool kCut, class T, class E>
void mix_rows(int K, int lanes, T* state, int64_t pitch, const Token<T, E>& token, const T* q, const T* v, T* o) {
  using X = Vec<T>;
  using V = typename X::V;
  V values[N], sums[N] = {};
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) values[j] = X::load(v + j * X::W);
  for (int i = 0; i < K; ++i, state += pitch) {
    const V factor = X::broadcast(token.factor[i]), qi = X::broadcast(q[i]);
    if (token.weak || token.keep[i] != 0) {
      weak_row<N, kCut>(lanes, state, factor, qi, values, sums);
    } else {
      decode_row<N, kCut, false>(lanes, state, factor, X::broadcast(token.k[i]), qi, values, sums);
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) X::store(o + j * X::W, sums[j]);
}

// A token whose rows are all weak, in slices of N vectors: its augmentation and the gates of the next token are
// computed between its rows, a few instructions at a time.
template <int N, class T, class E>
void step_between(const MetalaMixerDecodeArgs& args, const Token<T, E>& token, Token<T, E>* next, const T* q, const T* v,
                  const Rows<T, E>& r) {
  using X = Vec<T>;
  using V = typename X::V;
  constexpr int kAtOnce = 2, kRows = 16 / N;
  const int64_t pitch = args.state.stride[2];
  const int K = r.settings.K;
  const T* factor = token.factor;
  for (int at = 0; at < r.settings.width; at += N * X::W) {
    V values[N], sums[N] = {};
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) values[j] = X::load(v + at + j * X::W);
    T* state = token.state + at;
    int i = 0;
    const auto rows = [&](int end) __attribute__((always_inline)) {
#pragma GCC unroll 1
      for (; i < end; ++i, state += pitch) {
        weak_row<N, false>(X::W, state, X::broadcast(factor[i]), X::broadcast(q[i]), values, sums);
      }
    };
    const auto between = [&]() __attribute__((always_inline)) { rows(i + kRows < K ? i + kRows : K); };
    augmentation<kAtOnce>(r.settings, v + at, token.u, N * X::W, r.o, between);
    if (at == 0 && next != nullptr) channel_gates<kAtOnce>(args, r.settings, *next, between);
    rows(K);
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) {
      X::store(token.out + at + j * X::W, fma(sums[j], X::broadcast(r.settings.scale), X::load(r.o + j * X::W)));
    }
  }
}

// Any token: rows, the gates of the next one, its augmentation.
template <class T, class E>
[[gnu::noinline]] void step_apart(const MetalaMixerDecodeArgs& args, const Token<T, E>& token, Token<T, E>* next, const T* q,
                                  const T* v, const Rows<T, E>& r) {
  using X = Vec<T>;
  constexpr int kAtOnce = 4;
  const int K = r.settings.K, width = r.settings.width;
  decode_slices<T>(width, [&]<int N, bool kCut>(int at, int lanes) {
    mix_rows<N, kCut>(K, lanes, token.state + at, args.state.stride[2], token, q, v + at, r.o + at);
  });
  if (next != nullptr) channel_gates<kAtOnce>(args, r.settings, *next, Nothing());
  augmentation<kAtOnce>(r.settings, v, token.u, width, r.v, Nothing());
  for (int j = 0; j < width; j += X::W) {
    X::store(token.out + j, fma(X::load(r.o + j), X::broadcast(r.settings.scale), X::load(r.v + j)), width - j);
  }
}

// All tokens of a head. ready: the gates of the first one are there; more: another head follows.
template <class T, class E>
void decode_head(const MetalaMixerDecodeArgs& args, const View& out, int64_t head, bool ready, bool more, Rows<T, E>& r) {
  using X = Vec<T>;
  const int64_t H = args.q.size[2];
  const int K = r.settings.K, width = r.settings.width;
  if (!ready) {
    Token<T, E>& first = r.tokens[r.now];
    first.place(args, out, head / H, 0, head % H);
    channel_gates<4>(args, r.settings, first, Nothing());
  }
  for (bool last = false; !last; r.now = 1 - r.now) {
    Token<T, E>&token = r.tokens[r.now], *next = &r.tokens[1 - r.now];
    last = token.t + 1 == r.settings.tokens;
    if (!last) {
      next->place(args, out, token.b, token.t + 1, token.h);
    } else if (!more) {
      next = nullptr;
    } else if (token.h + 1 == H) {
      next->place(args, out, token.b + 1, 0, 0);
    } else {
      next->place(args, out, token.b, 0, token.h + 1);
    }
    const T* q = decode_input<false>(token.q, K, r.q);
    const T* v = decode_input<true>(token.v, width, r.v);
    if (metala_masked(args, token.b, token.t)) {
      for (int j = 0; j < width; j += X::W) X::store(r.v + j, X::zero());
      v = r.v;
    }
    if (token.weak && width % (kDecodeVectors * X::W) == 0) {
      step_between<kDecodeVectors>(args, token, next, q, v, r);
    } else if (token.weak && width == kDecodeVectors / 2 * X::W) {
      step_between<kDecodeVectors / 2>(args, token, next, q, v, r);
    } else {
      step_apart(args, token, next, q, v, r);
    }
  }
}

template <class T, class E>
int64_t worker_bytes(const MetalaMixerDecodeArgs& args) {
  Arena arena;
  Rows<T, E>::cut(arena, args);
  return arena.used();
}

}  // namespace

void metala_mixer_decode_forward(const MetalaMixerDecodeArgs& args, const MetalaMixerDecodeOut& out, const Launch& launch) {
  if (args.q.size[1] == 0) return;
  by_dtype(args.q.dtype, [&]<class T, class E>() {
    decode_ahead(
        launch, args.q.size[0] * args.q.size[2], worker_bytes<T, E>(args),
        [&](Arena& arena) { return Rows<T, E>::cut(arena, args); },
        [&args, &out](int64_t head, bool ready, bool more, Rows<T, E>& r) {
          decode_head<T, E>(args, out.out, head, ready, more, r);
        });
  });
}
int64_t metala_mixer_decode_workspace(const MetalaMixerDecodeArgs& args, Pass, int workers) {
  return by_dtype(args.q.dtype, [&]<class T, class E>() { return workers * worker_bytes<T, E>(args); });
}

}  // namespace linnet::LINNET_ISA
