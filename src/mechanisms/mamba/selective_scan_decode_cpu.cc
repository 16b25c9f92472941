// One step of the selective scan: the state elements of a channel in the lanes, as the state [E, K] lies in memory, read and
// written once. K = W (16 in f32) is the common size: a channel is one vector. Four channels (two in f64) go side by side,
// since the 50 cycles from a channel's rate to its state are more than the core's scheduler looks ahead, and the reads C.h of W
// channels are folded together, W - 1 sums of two vectors for W sums over lanes.
//
// A vector of state on avx512: 10 instructions on the two multipliers (t, 6 of the polynomial, b, the step, C h) and 5 on the
// two adders that take 7 turns (the power's split and its scaling 2 each, which need no clamps, its rounding, the step, the
// fold).
#include "selective_scan_step.h"

namespace linnet::LINNET_ISA {
namespace {

constexpr int64_t kChannels = 512;  // of a task, at most
constexpr int64_t kAhead = 2048;    // elements of state, so far ahead memory is asked for

template <class T>
struct Scratch {
  T *bias, *skip;   // [channels]
  T *rate, *v, *y;  // [channels]; rate: delta log2(e)
  T *in, *out;      // [ldk]
  LINNET_INLINE static Scratch cut(Arena& arena, int64_t K) {
    Scratch r;
    for (T** row : {&r.bias, &r.skip, &r.rate, &r.v, &r.y}) *row = arena.take<T>(kChannels);
    r.in = arena.take<T>(round_up<T>(K));
    r.out = arena.take<T>(round_up<T>(K));
    return r;
  }
};

// One vector of state of N neighbours: h = 2^t h + in v, t = rate A, and y += read h. With t = n + f the power 2^n is exact, so
// with s = 2^n h it is s + ((2^f - 1) s + in v), the bracket first: a decay near 1 (n = 0) does not drift, and one of 0 is
// exact.
template <int N, bool kCut, class T, class V>
LINNET_INLINE void advance_rows(const T* A, int64_t ldA, T* state, int64_t lds, int lanes, const T* rate, const T* v, V in,
                                V read, V* y) {
  using X = Vec<T>;
  V t[N], h[N], b[N], rise[N];
  Split<V> at[N];
#pragma GCC unroll 4
  for (int j = 0; j < N; ++j) __builtin_prefetch(state + j * lds + kAhead, 0, 2);
#pragma GCC unroll 4
  for (int j = 0; j < N; ++j) t[j] = X::broadcast(rate[j]) * (kCut ? X::load(A + j * ldA, lanes) : X::load(A + j * ldA));
#pragma GCC unroll 4
  for (int j = 0; j < N; ++j) at[j] = split(t[j]);
#pragma GCC unroll 4
  for (int j = 0; j < N; ++j) {
    h[j] = scale_by_power(kCut ? X::load(state + j * lds, lanes) : X::load(state + j * lds), at[j].n);
  }
#pragma GCC unroll 4
  for (int j = 0; j < N; ++j) rise[j] = exp2_tail(at[j].f);
#pragma GCC unroll 4
  for (int j = 0; j < N; ++j) b[j] = in * X::broadcast(v[j]);
#pragma GCC unroll 4
  for (int j = 0; j < N; ++j) b[j] = fma(rise[j] * at[j].f, h[j], b[j]);
#pragma GCC unroll 4
  for (int j = 0; j < N; ++j) {
    h[j] = h[j] + b[j];
    if constexpr (kCut) {
      X::store(state + j * lds, h[j], lanes);
    } else {
      X::store(state + j * lds, h[j]);
    }
    y[j] = fma(read, h[j], y[j]);
  }
}
template <int N, class T, class V>
LINNET_INLINE void advance_channels(const T* A, int64_t ldA, T* state, int64_t lds, int K, const T* rate, const T* v,
                                    const T* in, const T* read, V* y) {
  using X = Vec<T>;
  int n = 0;
  for (; n + X::W <= K; n += X::W) {
    advance_rows<N, false>(A + n, ldA, state + n, lds, X::W, rate, v, X::load(in + n), X::load(read + n), y);
  }
  if (n < K) advance_rows<N, true>(A + n, ldA, state + n, lds, K - n, rate, v, X::load(in + n), X::load(read + n), y);
}

// What lies in 16 bytes of T, the sums over each piece of 16 bytes of as many vectors.
LINNET_INLINE vf fold_pieces(const vf (&y)[4]) {
  const vd a = reinterpret_cast<vd>(unpack_low(y[0], y[1]) + unpack_high(y[0], y[1]));
  const vd b = reinterpret_cast<vd>(unpack_low(y[2], y[3]) + unpack_high(y[2], y[3]));
  return reinterpret_cast<vf>(unpack_low(a, b)) + reinterpret_cast<vf>(unpack_high(a, b));
}
LINNET_INLINE vd fold_pieces(const vd (&y)[2]) { return unpack_low(y[0], y[1]) + unpack_high(y[0], y[1]); }

// Vectors of which each piece holds part of the same sums, joined until one vector holds them all, in order.
template <class T, int kCount>
LINNET_INLINE typename Vec<T>::V join_pieces(typename Vec<T>::V (&part)[kCount]) {
  using X = Vec<T>;
  constexpr int kEach = kLaneBytes / sizeof(T);
  typename X::I even, odd;  // pieces of a vector, then of the next
#pragma GCC unroll 16
  for (int l = 0; l < X::W; ++l) {
    even[l] = l / kEach * 2 * kEach + l % kEach;
    odd[l] = even[l] + kEach;
  }
#pragma GCC unroll 4
  for (int count = kCount / 2; count > 0; count /= 2) {
#pragma GCC unroll 4
    for (int i = 0; i < count; ++i) {
      part[i] = shuffle(part[2 * i], part[2 * i + 1], even) + shuffle(part[2 * i], part[2 * i + 1], odd);
    }
  }
  return part[0];
}

// A task is a block of channels of a batch row. Before the states and after them it walks over all of them: a softplus takes
// 120 cycles, which only its neighbours can fill. Blocks are long, and one follows the other in memory: states in memory come
// by asking far ahead, as the prefetchers of Zen 4 do not run ahead of 20 cycles of arithmetic a line.
template <class T, class E>
struct Decode {
  using X = Vec<T>;
  using V = typename X::V;
  static constexpr int kCommon = 16;  // K of the published models, known to the compiler

  const SelectiveScanDecodeArgs& args;
  const View &out, maps_in, maps_out;
  const ScanBlocks blocks;
  const int K;
  Decode(const SelectiveScanDecodeArgs& a, const View& o, int workers)
      : args(a),
        out(o),
        maps_in(grouped(a.B)),
        maps_out(grouped(a.C)),
        blocks(a.x.size[2], scan_groups(a.B), a.x.size[0] * a.x.size[2] < 6 * workers * kChannels ? kChannels / 4 : kChannels),
        K(static_cast<int>(a.A.size[1])) {}

  // rate and v
  LINNET_INLINE void begin(const Scratch<T>& r, int64_t b, int64_t t, int64_t first, int width) const {
    const E *dt = args.dt.at<const E>(b, t, first), *x = args.x.at<const E>(b, t, first);
    for (int c = 0; c < width; c += X::W) {
      const V delta = softplus(X::load(dt + c, width - c) + X::load(r.bias + c));
      X::store(r.rate + c, exponents(delta));
      X::store(r.v + c, delta * X::load(x + c, width - c));
    }
  }
  // y, of states of `size` elements
  LINNET_INLINE void advance(const Scratch<T>& r, const T* A, T* state, int width, int size) const {
    const int64_t ldA = args.A.stride[0], lds = args.state.stride[1];
    constexpr int kEach = kLaneBytes / sizeof(T);
    int c = 0;
    for (; c + X::W <= width; c += X::W) {
      V part[X::W / kEach];
#pragma GCC unroll 4
      for (int i = 0; i < X::W / kEach; ++i) {
        const int e = c + i * kEach;
        V each[kEach] = {};
        advance_channels<kEach>(A + e * ldA, ldA, state + e * lds, lds, size, r.rate + e, r.v + e, r.in, r.out, each);
        part[i] = fold_pieces(each);
      }
      X::store(r.y + c, join_pieces<T>(part));
    }
    for (; c < width; ++c) {
      V each = X::zero();
      advance_channels<1>(A + c * ldA, ldA, state + c * lds, lds, size, r.rate + c, r.v + c, r.in, r.out, &each);
      r.y[c] = sum(each);
    }
  }
  void token(const Scratch<T>& r, int64_t b, int64_t t, int64_t block) const {
    const int64_t first = blocks.first(block), group = blocks.group(block);
    const int width = blocks.width(block);
    begin(r, b, t, first, width);
    const E *in = maps_in.at<const E>(b, t, group), *read = maps_out.at<const E>(b, t, group);
    for (int n = 0; n < K; n += X::W) {
      X::store(r.in + n, X::load(in + n, K - n));
      X::store(r.out + n, X::load(read + n, K - n));
    }
    const T* A = args.A.at<const T>(first, 0);
    T* state = args.state.at<T>(b, first, 0);
    if (K == kCommon) {
      advance(r, A, state, width, kCommon);
    } else {
      advance(r, A, state, width, K);
    }
    store_output<T, E>(args, out, b, t, first, width, r.y, r.skip);
  }
  void run(const Launch& launch) const {
    const int64_t tokens = args.x.size[1];
    Arena need;
    Scratch<T>::cut(need, K);
    parallel_near(launch, args.x.size[0] * blocks.count, [&](int64_t task, int worker) {
      Arena arena(launch.workspace + worker * need.used());
      const Scratch<T> r = Scratch<T>::cut(arena, K);
      const int64_t block = task % blocks.count;
      load_channels<T, E>(args.dt_bias, args.x.dtype, blocks.first(block), blocks.width(block), r.bias);
      load_channels<T, E>(args.D, args.x.dtype, blocks.first(block), blocks.width(block), r.skip);
      for (int64_t t = 0; t < tokens; ++t) token(r, task / blocks.count, t, block);
    });
  }
};

}  // namespace

void mamba_selective_scan_decode_forward(const SelectiveScanDecodeArgs& args, const SelectiveScanDecodeOut& out,
                                         const Launch& launch) {
  by_dtype(args.x.dtype, [&]<class T, class E>() { Decode<T, E>(args, out.out, launch.workers).run(launch); });
}
int64_t mamba_selective_scan_decode_workspace(const SelectiveScanDecodeArgs& args, Pass, int workers) {
  return by_dtype(args.x.dtype, [&]<class T, class E>() {
    Arena arena;
    Scratch<T>::cut(arena, args.A.size[1]);
    return workers * arena.used();
  });
}

}  // namespace linnet::LINNET_ISA
