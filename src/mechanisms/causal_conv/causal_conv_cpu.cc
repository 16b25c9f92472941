// The convolution on the vector units: channels in the lanes, tiles of 64 tokens x 256 channels.
//
// A tile's inputs, with the W-1 tokens before it, are copied to dense scratch (there 16-bit types are converted, and there the
// state or zeros stand in for what lies before a sequence); then each output is W multiply-adds. 4 tokens at a time share each
// tap. The sum of an output runs from the bias over the oldest tap to the newest in every path: packing, states and decoding
// give the same bits. dweight and dbias are summed per tile, then over the tiles in double.
#include "causal_conv.h"
#include "core/sequence.h"
#include "simd/in_register.h"
#include "simd/math.h"
#include "simd/task.h"
#include "simd/tile.h"

namespace linnet::LINNET_ISA {
namespace {

constexpr int kTokens = 64, kChannels = 256;

// e^-x in 1.3 + |x| ulp: the exponent is rounded.
template <class V>
LINNET_INLINE V exp_minus(V x) {
  return exp2(x * -Real<V>::kLog2e);
}
// x sigmoid(x); 0 below -88.7, where it is -3e-37.
template <class V>
LINNET_INLINE V silu(V x) {
  return x / (exp_minus(x) + typename Real<V>::T(1));
}

LINNET_INLINE int least(int64_t a, int64_t b) { return static_cast<int>(a < b ? a : b); }

// Four taps of each channel side by side, all channels dense: taps[j * ld + c] = weight[4 c + j]; whole vectors of channels,
// how many is returned. Vectors as they lie, so that piece p of vector q is channel q kPieces + p; one permutation puts them in
// order.
template <class T>
LINNET_INLINE int load_four_taps(const T* weight, int cols, T* taps, int64_t ld) {
  using X = Vec<T>;
  int c = 0;
  if constexpr (sizeof(T) == 4) {
    typename X::I order;
#pragma GCC unroll 16
    for (int l = 0; l < X::W; ++l) order[l] = 4 * (l % kPieces) + l / kPieces;
    for (; c + X::W <= cols; c += X::W) {
      typename X::V v[4];
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) v[q] = X::load(weight + 4 * c + q * X::W);
      transpose_pieces(v);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) X::store(taps + j * ld + c, shuffle(v[j], order));
    }
  }
  return c;
}

// The columns [c0, c0 + cols) of everything that one task works on.
template <class T>
struct Tile {
  int64_t c0;
  int cols, W;
  int64_t ld;
  T* taps;   // [W, ld]
  T* bias;   // [ld]
  T* state;  // [W-1, ld]
  T* x;      // [tokens + 2 (W-1), ld]: inputs, the oldest first
  T* y;      // [tokens + 2 (W-1), ld]: sums, or their gradients

  LINNET_INLINE static Tile cut(Arena& arena, int W, int tokens) {
    Tile r;
    r.W = W;
    r.ld = kChannels;
    r.taps = arena.take<T>(W * r.ld);
    r.bias = arena.take<T>(r.ld);
    r.state = arena.take<T>(W * r.ld);
    r.x = arena.take<T>((tokens + 2 * W) * r.ld);
    r.y = arena.take<T>((tokens + 2 * W) * r.ld);
    return r;
  }
  // Weights and bias of the columns, each in its own type.
  template <class Args>
  void begin(const Args& args, int64_t column, int64_t D) {
    c0 = column;
    cols = least(D - c0, kChannels);
    by_dtype(args.weight.dtype, [&]<class, class S>() {
      if constexpr (sizeof(S) <= sizeof(T) && (sizeof(T) == 4 || sizeof(S) == 8)) {
        const S* weight = args.weight.template at<const S>(c0, 0);
        const int64_t stride = args.weight.stride[0];
        int done = 0;
        if constexpr (sizeof(S) == sizeof(T)) {
          if (W == 4 && stride == 4) done = load_four_taps(weight, cols, taps, ld);
        }
        if (done < cols) load_tile_transposed<T>(weight + done * stride, stride, cols - done, W, taps + done, ld);
      }
    });
    if (!args.bias.given()) {
      for (int c = 0; c < cols; c += Vec<T>::W) Vec<T>::store(bias + c, Vec<T>::zero());
      return;
    }
    by_dtype(args.bias.dtype, [&]<class, class S>() {
      if constexpr (sizeof(S) <= sizeof(T) && (sizeof(T) == 4 || sizeof(S) == 8)) {
        load_tile<T>(args.bias.template at<const S>(c0), 0, 1, cols, bias, ld);
      }
    });
  }
};

// x rows = inputs at positions [first, first + count) of a sequence; position p < 0 reaches into the state [.., D, W-1].
template <class T, class E>
void load_inputs(const Tile<T>& r, const View& x, const Sequence& at, const View& state, int64_t n, int64_t first, int count) {
  int before = first < 0 ? least(-first, count) : 0;
  if (before > 0) {
    const int skipped = static_cast<int>(first + r.W - 1);  // entries of the state older than `first`
    if (state.given()) {
      load_tile_transposed<T>(state.at<const E>(n, r.c0, 0), state.stride[1], r.cols, r.W - 1, r.state, r.ld);
      load_tile<T>(r.state + skipped * r.ld, r.ld, before, r.cols, r.x, r.ld);
    } else {
      for (int64_t i = 0; i < before * r.ld; i += Vec<T>::W) Vec<T>::store(r.x + i, Vec<T>::zero());
    }
  }
  if (count == before) return;
  load_tile<T>(x.at<const E>(at.b, at.begin + first + before, r.c0), x.stride[1], count - before, r.cols, r.x + before * r.ld,
               r.ld);
}

// y rows [0, rows) = bias + taps over x rows [i, i + W)
template <class T, int R>
LINNET_INLINE void sum_rows(const Tile<T>& r, int i) {
  using X = Vec<T>;
  for (int c = 0; c < r.cols; c += X::W) {
    typename X::V total[R];
    const typename X::V bias = X::load(r.bias + c);
#pragma GCC unroll 4
    for (int k = 0; k < R; ++k) total[k] = bias;
    const T* x = r.x + i * r.ld + c;
    for (int j = 0; j < r.W; ++j, x += r.ld) {
      const typename X::V tap = X::load(r.taps + j * r.ld + c);
#pragma GCC unroll 4
      for (int k = 0; k < R; ++k) total[k] = fma(tap, X::load(x + k * r.ld), total[k]);
    }
#pragma GCC unroll 4
    for (int k = 0; k < R; ++k) X::store(r.y + (i + k) * r.ld + c, total[k]);
  }
}
template <class T>
void sums(const Tile<T>& r, int rows) {
  int i = 0;
  for (; i + 4 <= rows; i += 4) sum_rows<T, 4>(r, i);
  for (; i < rows; ++i) sum_rows<T, 1>(r, i);
}

template <class T, class E>
void store_outputs(const Tile<T>& r, ConvActivation activation, int rows, E* out, int64_t stride) {
  using X = Vec<T>;
  for (int i = 0; i < rows; ++i, out += stride) {
    for (int c = 0; c < r.cols; c += X::W) {
      typename X::V y = X::load(r.y + i * r.ld + c);
      if (activation == ConvActivation::silu) y = silu(y);
      X::store(out + c, y, r.cols - c);
    }
  }
}

// The state after the last token: inputs at the last W-1 positions.
template <class T, class E>
void store_state(const Tile<T>& r, const View& x, const Sequence& at, const View& before, const View& after, int64_t n) {
  if (r.W < 2) return;
  load_inputs<T, E>(r, x, at, before, n, at.length() - (r.W - 1), r.W - 1);
  store_tile_transposed<T>(r.x, r.ld, r.cols, r.W - 1, after.at<E>(n, r.c0, 0), after.stride[1]);
}

LINNET_INLINE int64_t blocks(int64_t n, int64_t size) { return (n + size - 1) / size; }

// Calls body(n, sequence, first, rows) for the parts of the token tile [t0, t1) of batch row b that lie in one sequence;
// `first` counts from the sequence's start.
template <class Body>
LINNET_INLINE void by_sequence(const CausalConvArgs& args, int64_t b, int64_t t0, int64_t t1, const Body& body) {
  int64_t n = sequence_at(args.cu_seqlens, b, t0);
  for (int64_t t = t0; t < t1; ++n) {
    const Sequence at = sequence_of(args.cu_seqlens, args.x.size[1], n);
    const int64_t end = at.end < t1 ? at.end : t1;
    if (end > t) body(n, at, t - at.begin, static_cast<int>(end - t));
    t = end > t ? end : t;
  }
}

template <class T, class E>
struct Forward {
  static int64_t worker_bytes(int W) {
    Arena arena;
    Tile<T>::cut(arena, W, kTokens);
    return arena.used();
  }
  static void run(const CausalConvArgs& args, const CausalConvOut& out, const Launch& launch) {
    const int64_t B = args.x.size[0], tokens = args.x.size[1], D = args.x.size[2], columns = blocks(D, kChannels);
    const int W = static_cast<int>(args.weight.size[1]);
    const int64_t tiles = B * blocks(tokens, kTokens) * columns, bytes = worker_bytes(W);
    const int64_t N = sequence_count(args.cu_seqlens, B), ends = out.final_state.given() ? N * columns : 0;
    parallel(launch, tiles + ends, [&](int64_t task, int worker) {
      Arena arena(launch.workspace + worker * bytes);
      Tile<T> r = Tile<T>::cut(arena, W, kTokens);
      if (task >= tiles) {
        task -= tiles;
        r.c0 = task % columns * kChannels;
        r.cols = least(D - r.c0, kChannels);
        const int64_t n = task / columns;
        store_state<T, E>(r, args.x, sequence_of(args.cu_seqlens, tokens, n), args.initial_state, out.final_state, n);
        return;
      }
      r.begin(args, task % columns * kChannels, D);
      const int64_t row = task / columns, b = row / blocks(tokens, kTokens), t0 = row % blocks(tokens, kTokens) * kTokens;
      by_sequence(args, b, t0, t0 + least(tokens - t0, kTokens), [&](int64_t n, const Sequence& at, int64_t first, int rows) {
        load_inputs<T, E>(r, args.x, at, args.initial_state, n, first - (W - 1), rows + W - 1);
        sums(r, rows);
        store_outputs<T>(r, args.activation, rows, out.out.at<E>(b, at.begin + first, r.c0), out.out.stride[1]);
      });
    });
  }
};

// y = dout act'(y), in place
template <class T, class E>
void sum_gradients(const Tile<T>& r, ConvActivation activation, int rows, const E* dout, int64_t stride) {
  using X = Vec<T>;
  const typename X::V one = X::broadcast(1);
  for (int i = 0; i < rows; ++i, dout += stride) {
    T* y = r.y + i * r.ld;
    for (int c = 0; c < r.cols; c += X::W) {
      typename X::V d = X::load(dout + c, r.cols - c);
      if (activation == ConvActivation::silu) {
        const typename X::V a = X::load(y + c), s = sigmoid(a);
        d = d * s * fma(a, one - s, one);
      }
      X::store(y + c, d);
    }
  }
}

// parts [W + 1, D], rows j < W: += sum_i y_i x_{i+j}; row W: += sum_i y_i
template <class T>
void add_weights(const Tile<T>& r, int rows, T* parts, int64_t D) {
  using X = Vec<T>;
  for (int j = 0; j <= r.W; ++j) {
    T* part = parts + j * D + r.c0;
    for (int c = 0; c < r.cols; c += X::W) {
      typename X::V total = X::load(part + c, r.cols - c);
      const T* x = r.x + j * r.ld + c;
      const T* y = r.y + c;
      if (j == r.W) {
        for (int i = 0; i < rows; ++i, y += r.ld) total += X::load(y);
      } else {
        for (int i = 0; i < rows; ++i, x += r.ld, y += r.ld) total = fma(X::load(y), X::load(x), total);
      }
      X::store(part + c, total, r.cols - c);
    }
  }
}

template <class T, class E>
struct Backward {
  static int64_t worker_bytes(int W) {
    Arena arena;
    Tile<T>::cut(arena, W, kTokens);
    arena.take<T>(W * kChannels);
    return arena.used();
  }
  static int64_t parts(const CausalConvArgs& args) {
    return args.x.size[0] * blocks(args.x.size[1], kTokens) * (args.weight.size[1] + 1) * args.x.size[2];
  }
  // y = gradients of the sums at positions [first, first + rows), x = the inputs from W-1 before; zeros behind the sequence.
  static void gradients(const CausalConvArgs& args, const CausalConvGrads& grads, const Tile<T>& r, const Sequence& at,
                        int64_t n, int64_t first, int rows) {
    const int known = least(at.length() - first, rows);
    load_inputs<T, E>(r, args.x, at, args.initial_state, n, first - (r.W - 1), known + r.W - 1);
    if (grads.dout.given()) {
      if (args.activation == ConvActivation::silu) sums(r, known);
      sum_gradients<T>(r, args.activation, known, grads.dout.at<const E>(at.b, at.begin + first, r.c0), grads.dout.stride[1]);
    }
    const int zeros = grads.dout.given() ? known : 0;
    for (int64_t i = zeros * r.ld; i < rows * r.ld; i += Vec<T>::W) Vec<T>::store(r.y + i, Vec<T>::zero());
  }
  // The gradient of the input at row i of y, which is tap W-1-m of the sum at row i + m; sums before row 0 do not read it.
  static void input_gradient(const Tile<T>& r, int i, T* row) {
    using X = Vec<T>;
    for (int c = 0; c < r.cols; c += X::W) {
      typename X::V total = X::zero();
      for (int m = i < 0 ? -i : 0; m < r.W; ++m) {
        total = fma(X::load(r.taps + (r.W - 1 - m) * r.ld + c), X::load(r.y + (i + m) * r.ld + c), total);
      }
      X::store(row + c, total);
    }
  }
  // row += entry j of dfinal_state [N, D, W-1]
  static void add_final(const Tile<T>& r, const View& dfinal, int64_t n, int64_t j, T* row) {
    const E* from = dfinal.at<const E>(n, r.c0, j);
    for (int c = 0; c < r.cols; ++c) row[c] += static_cast<T>(to_f64(from[c * dfinal.stride[1]]));
  }

  static void run(const CausalConvArgs& args, const CausalConvGrads& grads, const Launch& launch) {
    const int64_t B = args.x.size[0], tokens = args.x.size[1], D = args.x.size[2], columns = blocks(D, kChannels);
    const int W = static_cast<int>(args.weight.size[1]);
    const int64_t rows_of_tiles = B * blocks(tokens, kTokens), tiles = rows_of_tiles * columns, bytes = worker_bytes(W);
    const int64_t N = sequence_count(args.cu_seqlens, B);
    const int64_t starts = grads.dinitial_state.given() && W > 1 ? N * columns : 0;
    T* parts = reinterpret_cast<T*>(launch.workspace + launch.workers * bytes);
    const int64_t part = (W + 1) * D;
    parallel(launch, tiles + starts, [&](int64_t task, int worker) {
      Arena arena(launch.workspace + worker * bytes);
      Tile<T> r = Tile<T>::cut(arena, W, kTokens);
      T* row = arena.take<T>(W * kChannels);
      const bool start = task >= tiles;
      if (start) task -= tiles;
      r.begin(args, task % columns * kChannels, D);
      if (start) return initial(args, grads, r, task / columns, row);
      T* sum = parts + task / columns * part;
      for (int j = 0; j <= W; ++j) {
        for (int c = 0; c < r.cols; ++c) sum[j * D + r.c0 + c] = 0;
      }
      const int64_t b = task / columns / blocks(tokens, kTokens), t0 = task / columns % blocks(tokens, kTokens) * kTokens;
      by_sequence(args, b, t0, t0 + least(tokens - t0, kTokens), [&](int64_t n, const Sequence& at, int64_t first, int rows) {
        gradients(args, grads, r, at, n, first, rows + W - 1);
        if (grads.dweight.given() || grads.dbias.given()) add_weights(r, rows, sum, D);
        for (int i = 0; grads.dx.given() && i < rows; ++i) {
          input_gradient(r, i, row);
          const int64_t kept = first + i - (at.length() - (W - 1));  // its place in the final state
          if (grads.dfinal_state.given() && kept >= 0) add_final(r, grads.dfinal_state, n, kept, row);
          store_tile<T>(row, r.ld, 1, r.cols, grads.dx.at<E>(b, at.begin + first + i, r.c0), 0);
        }
      });
    });
    if (!grads.dweight.given() && !grads.dbias.given()) return;
    parallel(launch, columns, [&](int64_t task, int) {
      for (int64_t d = task * kChannels; d < D && d < (task + 1) * kChannels; ++d) {
        for (int j = 0; j <= W; ++j) {
          double total = 0;
          for (int64_t i = 0; i < rows_of_tiles; ++i) total += static_cast<double>(parts[i * part + j * D + d]);
          if (j < W && grads.dweight.given()) {
            store_f64(grads.dweight.data, grads.dweight.dtype, d * grads.dweight.stride[0] + j, total);
          }
          if (j == W && grads.dbias.given()) store_f64(grads.dbias.data, grads.dbias.dtype, d * grads.dbias.stride[0], total);
        }
      }
    });
  }
  // dinitial_state of sequence n: entry j is the input at position j - (W-1).
  static void initial(const CausalConvArgs& args, const CausalConvGrads& grads, const Tile<T>& r, int64_t n, T* rows) {
    const Sequence at = sequence_of(args.cu_seqlens, args.x.size[1], n);
    gradients(args, grads, r, at, n, 0, r.W - 1);
    for (int j = 0; j < r.W - 1; ++j) {
      T* row = rows + j * r.ld;
      input_gradient(r, j - (r.W - 1), row);
      if (grads.dfinal_state.given() && j >= at.length()) add_final(r, grads.dfinal_state, n, j - at.length(), row);
    }
    store_tile_transposed<T>(rows, r.ld, r.cols, r.W - 1, grads.dinitial_state.at<E>(n, r.c0, 0),
                             grads.dinitial_state.stride[1]);
  }
};

// Triples that lie side by side, three vectors of them: flat[3 l + j] is place j of lane l. W is no multiple of 3, so the W
// numbers of a place stand at W different positions of the three vectors: blends collect them (any of four pipes), and one
// permutation puts them in order.
template <class T>
struct Triples {
  using X = Vec<T>;
  using V = typename X::V;
  using I = typename X::I;
  static constexpr int W = X::W;
  V place[3];  // as they lie: position (3 l + j) % W of place j is lane l

  // Position p of the result: that of the vector (first + step p) % 3.
  LINNET_INLINE static V mix(V a, V b, V c, int first, int step) {
    I with_b, with_c;
#pragma GCC unroll 16
    for (int p = 0; p < W; ++p) {
      const int from = (first + step * p) % 3;
      with_b[p] = from == 1 ? W + p : p;
      with_c[p] = from == 2 ? W + p : p;
    }
    return shuffle(shuffle(a, b, with_b), c, with_c);
  }
  LINNET_INLINE static Triples split(V a, V b, V c) {
    // W v + p = j modulo 3; W is its own inverse
    Triples r;
#pragma GCC unroll 3
    for (int j = 0; j < 3; ++j) r.place[j] = mix(a, b, c, W * j, 2 * W);
    return r;
  }
  LINNET_INLINE V lanes(int j) const {
    I index;
#pragma GCC unroll 16
    for (int l = 0; l < W; ++l) index[l] = (3 * l + j) % W;
    return shuffle(place[j], index);
  }
  // Each place takes what the next one has, the last one `now`: all move by one position.
  LINNET_INLINE Triples next(V now) const {
    I turn, last;
#pragma GCC unroll 16
    for (int p = 0; p < W; ++p) turn[p] = (p + 1) % W;
#pragma GCC unroll 16
    for (int l = 0; l < W; ++l) last[(3 * l + 2) % W] = l;
    return {{shuffle(place[1], turn), shuffle(place[2], turn), shuffle(now, last)}};
  }
  // vector v of the three
  LINNET_INLINE V joined(int v) const { return mix(place[0], place[1], place[2], W * v, 1); }
};

template <class T, class E>
struct Decode {
  static constexpr int kSteps = 16;        // tokens at a time; the state moves on between
  static constexpr int64_t kRows = 8;      // batch rows of a task
  static constexpr int64_t kAlone = 8192;  // elements: 5 us of one core
  using X = Vec<T>;
  using V = typename X::V;
  // Vectors side by side: from the state to silu's quotient are 100 cycles, more than the core looks ahead.
  static constexpr int kBeside = kVectorBytes == 64 ? 4 : 2;
  // Where two batch rows lie.
  struct Rows {
    const E* x;
    E *state, *out;
    int64_t x_row, state_row, out_row;
    int64_t x_ahead, state_ahead, out_ahead;  // so much behind them lies what the next tile works on
  };
  // One token of four taps: the state's three inputs of each channel read and written where they lie. N vectors of channels
  // (kCut: one, of which `lanes` are there) of R batch rows, which share the loads of the taps. All is loaded before anything
  // is stored: a load waits for a store in flight whose address has the same last 12 bits. kFetch: the next tile is asked for,
  // as rows of a tile, 3 KB, are too short for the prefetchers.
  template <int N, int R, bool kCut, bool kFetch>
  LINNET_INLINE static void step(const Tile<T>& r, const Rows& at, int c, int lanes, bool silu_follows) {
    // Three blends read each vector of state, and a load a blend is what the loop would wait for.
    const auto load = [&](const E* p, int n) { return in_register(kCut ? X::load(p, n) : X::load(p)); };
    const auto store = [&](E* p, V v, int n) { kCut ? X::store(p, v, n) : X::store(p, v); };
    V flat[N * R][3], in[N * R], y[N * R];
#pragma GCC unroll 4
    for (int i = 0; i < N * R; ++i) {
      const int64_t channel = c + i % N * X::W;
      const E* from = at.state + i / N * at.state_row + 3 * channel;
      in[i] = load(at.x + i / N * at.x_row + channel, lanes);
#pragma GCC unroll 3
      for (int v = 0; v < 3; ++v) flat[i][v] = load(from + v * X::W, 3 * lanes - v * X::W);
      y[i] = X::load(r.bias + channel);
      if constexpr (kFetch) {
#pragma GCC unroll 3
        for (int v = 0; v < 3; ++v) __builtin_prefetch(from + v * X::W + at.state_ahead, 0, 2);
        __builtin_prefetch(at.x + i / N * at.x_row + channel + at.x_ahead, 0, 2);
        __builtin_prefetch(at.out + i / N * at.out_row + channel + at.out_ahead, 0, 2);
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) {
      V tap[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) tap[j] = X::load(r.taps + j * r.ld + c + i * X::W);
#pragma GCC unroll 4
      for (int k = i; k < N * R; k += N) {
        const Triples<T> s = Triples<T>::split(flat[k][0], flat[k][1], flat[k][2]), next = s.next(in[k]);
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) y[k] = fma(tap[j], j < 3 ? s.lanes(j) : in[k], y[k]);
#pragma GCC unroll 3
        for (int v = 0; v < 3; ++v) flat[k][v] = next.joined(v);
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < N * R; ++i) {
      E* to = at.state + i / N * at.state_row + 3 * (c + i % N * X::W);
#pragma GCC unroll 3
      for (int v = 0; v < 3; ++v) store(to + v * X::W, flat[i][v], 3 * lanes - v * X::W);
    }
    if (silu_follows) {
      V e[N * R];
#pragma GCC unroll 4
      for (int i = 0; i < N * R; ++i) e[i] = exp_minus(y[i]);
#pragma GCC unroll 4
      for (int i = 0; i < N * R; ++i) y[i] = y[i] / (e[i] + T(1));
    }
#pragma GCC unroll 4
    for (int i = 0; i < N * R; ++i) store(at.out + i / N * at.out_row + c + i % N * X::W, y[i], lanes);
  }
  // rows: of the task, behind which lies what follows the last tile of columns.
  template <int R, bool kFetch>
  static void four_taps(const CausalConvDecodeArgs& args, const View& out, const Tile<T>& r, int64_t b, int64_t rows) {
    const auto ahead = [&](const View& view, int64_t each) {
      return r.c0 + r.cols < args.x.size[2] ? each * r.cols : rows * view.stride[0] - each * r.c0;
    };
    const Rows at{args.x.at<const E>(b, 0, r.c0),
                  args.state.at<E>(b, r.c0, 0),
                  out.at<E>(b, 0, r.c0),
                  args.x.stride[0],
                  args.state.stride[0],
                  out.stride[0],
                  ahead(args.x, 1),
                  ahead(args.state, 3),
                  ahead(out, 1)};
    const bool silu_follows = args.activation == ConvActivation::silu;
    constexpr int N = kBeside / R;
    int c = 0;
    for (; c + N * X::W <= r.cols; c += N * X::W) step<N, R, false, kFetch>(r, at, c, X::W, silu_follows);
    for (; c + X::W <= r.cols; c += X::W) step<1, R, false, kFetch>(r, at, c, X::W, silu_follows);
    if (c < r.cols) step<1, R, true, kFetch>(r, at, c, r.cols - c, silu_follows);
  }
  template <bool kFetch>
  static void four_taps_of_rows(const CausalConvDecodeArgs& args, const View& out, const Tile<T>& r, int64_t first,
                                int64_t end) {
    int64_t b = first;
    for (; b + 2 <= end; b += 2) four_taps<2, kFetch>(args, out, r, b, end - first);
    if (b < end) four_taps<1, kFetch>(args, out, r, b, end - first);
  }
  static int64_t worker_bytes(int W) {
    Arena arena;
    Tile<T>::cut(arena, W, kSteps);
    return arena.used();
  }
  static void run(const CausalConvDecodeArgs& args, const CausalConvDecodeOut& out, const Launch& launch) {
    const int64_t B = args.x.size[0], tokens = args.x.size[1], D = args.x.size[2], columns = blocks(D, kChannels);
    const int W = static_cast<int>(args.weight.size[1]);
    const int64_t bytes = worker_bytes(W);
    if (tokens == 0 || B == 0 || D == 0) return;
    if (tokens == 1 && W == 4 && args.state.stride[1] == 3) {
      // A task is a tile of columns of some batch rows, which share its taps. Threads part by rows: parted by columns two of
      // them take a third longer. Few channels are not worth a second thread.
      const int64_t rows = B * D <= kAlone ? B : B < 2 * kRows ? (B + 1) / 2 : kRows, groups = blocks(B, rows);
      const int64_t tasks = groups > 1 ? groups * columns : 1, step = groups > 1 ? columns : 1;
      const bool far = 5 * B * D * static_cast<int64_t>(sizeof(E)) > kBeyondCaches;  // state, inputs and results
      parallel_near(launch, tasks, [&](int64_t task, int worker) {
        Arena arena(launch.workspace + worker * bytes);
        Tile<T> r = Tile<T>::cut(arena, W, kSteps);
        const int64_t first = task / columns * rows, end = first + rows < B ? first + rows : B;
        for (int64_t column = task % columns; column < columns; column += step) {
          r.begin(args, column * kChannels, D);
          if (far) {
            four_taps_of_rows<true>(args, out.out, r, first, end);
          } else {
            four_taps_of_rows<false>(args, out.out, r, first, end);
          }
        }
      });
      return;
    }
    parallel(launch, B * columns, [&](int64_t task, int worker) {
      Arena arena(launch.workspace + worker * bytes);
      Tile<T> r = Tile<T>::cut(arena, W, kSteps);
      r.begin(args, task % columns * kChannels, D);
      const int64_t b = task / columns;
      const Sequence at{b, 0, tokens};
      for (int64_t t = 0; t < tokens; t += kSteps) {
        const int rows = least(tokens - t, kSteps);
        load_inputs<T, E>(r, args.x, at, args.state, b, t - (W - 1), rows + W - 1);
        sums(r, rows);
        store_outputs<T>(r, args.activation, rows, out.out.at<E>(b, t, r.c0), out.out.stride[1]);
      }
      store_state<T, E>(r, args.x, at, args.state, args.state, b);
    });
  }
};

}  // namespace

void causal_conv_forward(const CausalConvArgs& args, const CausalConvOut& out, const Launch& launch) {
  by_dtype(args.x.dtype, [&]<class T, class E>() { Forward<T, E>::run(args, out, launch); });
}
void causal_conv_backward(const CausalConvArgs& args, const CausalConvOut&, const CausalConvGrads& grads,
                          const Launch& launch) {
  by_dtype(args.x.dtype, [&]<class T, class E>() { Backward<T, E>::run(args, grads, launch); });
}
int64_t causal_conv_workspace(const CausalConvArgs& args, Pass pass, int workers) {
  const int W = static_cast<int>(args.weight.size[1]);
  return by_dtype(args.x.dtype, [&]<class T, class E>() -> int64_t {
    if (pass == Pass::forward) return workers * Forward<T, E>::worker_bytes(W);
    return workers * Backward<T, E>::worker_bytes(W) + Backward<T, E>::parts(args) * static_cast<int64_t>(sizeof(T));
  });
}

void causal_conv_decode_forward(const CausalConvDecodeArgs& args, const CausalConvDecodeOut& out, const Launch& launch) {
  by_dtype(args.x.dtype, [&]<class T, class E>() { Decode<T, E>::run(args, out, launch); });
}
int64_t causal_conv_decode_workspace(const CausalConvDecodeArgs& args, Pass, int workers) {
  const int W = static_cast<int>(args.weight.size[1]);
  return by_dtype(args.x.dtype, [&]<class T, class E>() { return workers * Decode<T, E>::worker_bytes(W); });
}

}  // namespace linnet::LINNET_ISA
