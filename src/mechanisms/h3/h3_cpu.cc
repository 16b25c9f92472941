// H3 on the vector units in its chunked form (h3_chunk.h), linear in T; the forward's other form is in h3_fft_cpu.cc. A task is
// one sequence and as many heads as share a cache line; it walks windows of 1536 tokens, transposed to channel after channel.
//
// Backward: the states before every window are kept on the way up; on the way down each window's states are computed again,
// with the gradients of the states coming from the later windows. Sums over tokens run in T inside a window and in double
// beyond it; sequences are added up in at most 16 runs. What multiplies the taps of lags below 64 runs in double from the
// products kbar v and q dy on: dd is one such sum, and for tokens that repeat dlog_dt cancels to one of T parts of it.
#include "core/sequence.h"
#include "h3_fft_call.h"
#include "h3_totals.h"
#include "simd/finite.h"

namespace linnet::LINNET_ISA {
namespace {

constexpr int n = kH3Chunk;

// Scratch of one worker: the current window of a block of heads.
template <class T>
struct Window {
  int64_t C, P, R, Rp, Mp, heads, channels;  // channels: of the block
  int64_t h0;                                // its first head
  int count;                                 // heads in this block
  T *q, *v, *kbar, *y;                       // [channels, window]; y: [P, heads, window]
  T* k;                                      // [channels, Rp + window]: with the R - 1 keys before
  T* taps;                                   // [channels, R]
  T *u, *s, *inc;                            // [J, n], [J, n], [J, 2 Mp]
  T* states;                                 // [heads, P, P, 2 Mp]
  T* rows;                                   // [n, 2 Mp]
  double *sb, *sc, *sums, *power, *product;  // [R] x 3, [2 Mp] x 2
  H3Head head;
  H3Tables<T> tables[kH3Channels];

  static Window cut(Arena& arena, const H3Shape& shape, bool backward) {
    Window w;
    w.C = shape.C;
    w.P = shape.P;
    w.R = shape.R;
    w.Rp = round_up<T>(shape.R);
    w.Mp = round_up<T>(shape.M);
    w.heads = h3_heads_per_task(shape);
    w.channels = w.heads * w.P;
    w.q = arena.take<T>(w.channels * kH3Window);
    w.v = arena.take<T>(w.channels * kH3Window);
    w.kbar = arena.take<T>(w.channels * kH3Window);
    w.y = arena.take<T>(w.channels * kH3Window);
    w.k = arena.take<T>(w.channels * (w.Rp + kH3Window));
    w.taps = arena.take<T>(w.channels * w.R);
    w.u = arena.take<T>(kH3Window);
    w.s = arena.take<T>(kH3Window);
    w.inc = arena.take<T>(kH3Chunks * 2 * w.Mp);
    w.states = arena.take<T>(w.heads * w.P * w.P * 2 * w.Mp);
    w.rows = arena.take<T>(n * 2 * w.Mp);
    w.sb = arena.take<double>(w.R);
    w.sc = arena.take<double>(w.R);
    w.sums = arena.take<double>(w.R);
    w.power = arena.take<double>(2 * w.Mp);
    w.product = arena.take<double>(2 * w.Mp);
    w.head = H3Head::cut(arena, w.Mp);
    for (int64_t i = 0; i < w.heads; ++i) w.tables[i] = H3Tables<T>::cut(arena, w.Mp, backward);
    return w;
  }
  int64_t state_elements() const { return heads * P * P * 2 * Mp; }
  T* state(T* base, int64_t head_index, int64_t p, int64_t r) const { return base + ((head_index * P + p) * P + r) * 2 * Mp; }
  T* keys(int64_t channel) const { return k + channel * (Rp + kH3Window) + Rp; }  // at the window's first token

  void begin(const H3Args& args, const H3Shape& shape, int64_t block) {
    h0 = block * heads;
    count = static_cast<int>(shape.H - h0 < heads ? shape.H - h0 : heads);
    for (int i = 0; i < count; ++i) {
      head.load(args, h0 + i, shape.M, Mp);
      tables[i].build(head, Mp, rows, power, product);
    }
    for (int64_t c = 0; c < count * P; ++c) h3_shift_taps(args, h0 * P + c, R, sb, sc, sums, taps + c * R);
  }
  // X [N, H, P, P, M, 2] of sequence i; gradient: Y = (dRe - i dIm) / 2.
  void load_states(const View& view, int64_t i, int64_t M, T* to, bool gradient) const {
    h3_clear(to, state_elements());
    for (int h = 0; view.given() && h < count; ++h) {
      for (int64_t p = 0; p < P; ++p) {
        for (int64_t r = 0; r < P; ++r) {
          const T* from = view.at<const T>(i, h0 + h, p, r, 0, 0);
          T* row = state(to, h, p, r);
          for (int64_t m = 0; m < M; ++m) {
            row[m] = from[m * view.stride[4]] * (gradient ? T(0.5) : T(1));
            row[Mp + m] = from[m * view.stride[4] + 1] * (gradient ? T(-0.5) : T(1));
          }
        }
      }
    }
  }
  void store_states(const View& view, int64_t i, int64_t M, T* from, bool gradient) const {
    for (int h = 0; view.given() && h < count; ++h) {
      for (int64_t p = 0; p < P; ++p) {
        for (int64_t r = 0; r < P; ++r) {
          T* to = view.at<T>(i, h0 + h, p, r, 0, 0);
          const T* row = state(from, h, p, r);
          for (int64_t m = 0; m < M; ++m) {
            to[m * view.stride[4]] = row[m] * (gradient ? T(2) : T(1));
            to[m * view.stride[4] + 1] = row[Mp + m] * (gradient ? T(-2) : T(1));
          }
        }
      }
    }
  }
};

LINNET_INLINE int window_tokens(int64_t t, int64_t end) { return end - t < kH3Window ? static_cast<int>(end - t) : kH3Window; }
LINNET_INLINE int chunks_of(int tokens) { return (tokens + n - 1) / n; }

// [tokens, channels] of memory to [channels, window], zeros behind the last token up to whole chunks.
template <class T, class E>
void load_rows(const View& view, int64_t b, int64_t t, int64_t first, int64_t channels, int tokens, T* to, int64_t ld) {
  load_tile_transposed<T>(view.at<const E>(b, t, first), view.stride[1], tokens, static_cast<int>(channels), to, ld);
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t i = round_up<T>(tokens); i < chunks_of(tokens) * n; ++i) to[c * ld + i] = 0;
  }
}

// q, k, v of the window that starts at token t of sequence i, with the keys before it, and kbar.
template <class T, class E>
void load_window(const H3Args& args, const Window<T>& w, const Sequence& at, int64_t i, int64_t t, int tokens) {
  const int64_t c0 = w.h0 * w.P, channels = w.count * w.P, ldk = w.Rp + kH3Window;
  load_rows<T, E>(args.q, at.b, at.begin + t, c0, channels, tokens, w.q, kH3Window);
  load_rows<T, E>(args.v, at.b, at.begin + t, c0, channels, tokens, w.v, kH3Window);
  load_rows<T, E>(args.k, at.b, at.begin + t, c0, channels, tokens, w.k + w.Rp, ldk);
  const int64_t known = t < w.R - 1 ? t : w.R - 1;  // keys before the window that count
  for (int64_t c = 0; c < channels; ++c) h3_clear(w.k + c * ldk, w.Rp);
  if (known > 0) {
    for (int64_t j = 0; j < known; ++j) {
      const E* from = args.k.at<const E>(at.b, at.begin + t - known + j, c0);
      T* to = w.k + w.Rp - known + j;
      for (int64_t c = 0; c < channels; ++c) to[c * ldk] = static_cast<T>(to_f64(from[c]));
    }
  }
  const int padded = chunks_of(tokens) * n;
  for (int64_t c = 0; c < channels; ++c) {
    T* kbar = w.kbar + c * kH3Window;
    h3_filter<T, false>(w.keys(c), w.taps + c * w.R, w.R, padded, kbar);
    if (args.initial_state_shift.given()) {  // x_0 moves on: token t reads sc[m + t + 1] x_0[m]
      const T* x0 = args.initial_state_shift.at<const T>(i, c0 + c, 0);
      for (int64_t j = t; j < t + tokens && j + 1 < w.R; ++j) {
        double sum_of = 0;
        for (int64_t m = 0; m + j + 1 < w.R; ++m) sum_of += element(args.sc, c0 + c, m + j + 1) * static_cast<double>(x0[m]);
        kbar[j - t] += static_cast<T>(sum_of);
      }
    }
    for (int j = tokens; j < padded; ++j) kbar[j] = 0;
  }
}

// The state after `tokens` < n tokens of a chunk: a^tokens X + sum_j bd a^{tokens-1-j} u_j.
template <class T>
void advance_part(const Window<T>& w, const H3Tables<T>& tables, const double* a, int tokens, const T* u, const T* before,
                  T* state) {
  one_row(w.Mp, w.power);
  for (int i = 0; i < tokens; ++i) multiply_rows(w.power, a, w.Mp, w.power);
  for (int64_t m = 0; m < 2 * w.Mp; ++m) w.product[m] = static_cast<double>(before[m]);
  multiply_rows(w.power, w.product, w.Mp, w.power);
  for (int j = 0; j < tokens; ++j) {
    const T* row = tables.win + (n - tokens + j) * 2 * w.Mp;
    for (int64_t m = 0; m < 2 * w.Mp; ++m) w.power[m] += static_cast<double>(u[j]) * static_cast<double>(row[m]);
  }
  for (int64_t m = 0; m < 2 * w.Mp; ++m) state[m] = static_cast<T>(w.power[m]);
}

// States before each chunk into inc, and the state moved on. u must hold kbar v.
template <class T>
LINNET_INLINE void states_of(const Window<T>& w, const H3Tables<T>& tables, int chunks, T* state, T* inc) {
  const int width = static_cast<int>(2 * w.Mp);
  constexpr int kDepth = 16;  // short sums round less; equal tokens round alike
  gemm<T>(chunks, width, kDepth, as_is(w.u, n), tables.win, width, inc, width, Store{});
  for (int k = kDepth; k < n; k += kDepth) {
    gemm<T>(chunks, width, kDepth, as_is(w.u + k, n), tables.win + k * width, width, inc, width, Add{});
  }
  h3_scan(tables, w.Mp, state, inc, 0, chunks, 1);
}
template <class T>
LINNET_INLINE void read_states(const Window<T>& w, const H3Tables<T>& tables, int chunks, const T* inc) {
  const int width = static_cast<int>(2 * w.Mp);
  gemm<T>(chunks, n, width, as_is(inc, width), tables.out, n, w.s, n, Store{});
  if (rows_are_finite(w.u, n, chunks, n)) {
    gemm<T>(chunks, n, n, as_is(w.u, n), tables.taps, n, w.s, n, Add{}, DepthToLane{1});
    return;
  }
  for (int i = 0; i < chunks; ++i) {  // exactly the tokens that a token sees: a tap of 0 does not hide a NaN
    for (int t = 0; t < n; t += Vec<T>::W) {
      using X = Vec<T>;
      typename X::V sum = X::zero();
      for (int k = 0; k < n && k < t + X::W; ++k) {
        const typename X::V more = fma(X::broadcast(w.u[i * n + k]), X::load(tables.taps + k * n + t), sum);
        sum = select(X::prefix(k - t), sum, more);
      }
      X::store(w.s + i * n + t, X::load(w.s + i * n + t) + sum);
    }
  }
}

template <class T, class E>
struct Forward {
  static int64_t worker_bytes(const H3Shape& shape) {
    Arena arena;
    Window<T>::cut(arena, shape, false);
    return arena.used();
  }

  static void window(const H3Args& args, const H3Shape& shape, const View& out, Window<T>& w, const Sequence& at, int64_t i,
                     int64_t t, bool last) {
    const int tokens = window_tokens(t, at.length()), chunks = chunks_of(tokens), whole = tokens / n;
    load_window<T, E>(args, w, at, i, t, tokens);
    h3_clear(w.y, w.channels * kH3Window);
    for (int h = 0; h < w.count; ++h) {
      const H3Tables<T>& tables = w.tables[h];
      if (last && whole < chunks) w.head.load(args, w.h0 + h, shape.M, w.Mp);
      for (int64_t p = 0; p < w.P; ++p) {
        for (int64_t r = 0; r < w.P; ++r) {
          const int64_t cp = h * w.P + p, cr = h * w.P + r;
          T* state = w.state(w.states, h, p, r);
          h3_multiply<T, false>(w.kbar + cp * kH3Window, w.v + cr * kH3Window, chunks * n, w.u);
          states_of(w, tables, chunks, state, w.inc);
          read_states(w, tables, chunks, w.inc);
          h3_multiply<T, true>(w.q + cp * kH3Window, w.s, chunks * n, w.y + (r * w.heads + h) * kH3Window);
          if (last && whole < chunks) {
            advance_part(w, tables, w.head.a, tokens - whole * n, w.u + whole * n, w.inc + whole * 2 * w.Mp, state);
          }
        }
      }
    }
    for (int64_t r = 0; r < w.P; ++r) {
      store_tile_transposed<T>(w.y + r * w.heads * kH3Window, kH3Window, tokens, w.count,
                               out.at<E>(at.b, at.begin + t, r * shape.H + w.h0), out.stride[1]);
    }
  }

  // x after the last token: x_L[i] = sum_{l <= i, l < L} sb[i-l] k_{L-1-l} + x_0[i-L]
  static void store_shift(const H3Args& args, const View& state, const Window<T>& w, const Sequence& at, int64_t i) {
    const int64_t L = at.length();
    for (int64_t c = w.h0 * w.P; c < (w.h0 + w.count) * w.P; ++c) {
      for (int64_t j = 0; j < w.R; ++j) w.sums[j] = 0;
      for (int64_t j = 0; j < w.R; ++j) w.sb[j] = element(args.sb, c, j);
      for (int64_t l = 0; l < w.R && l < L; ++l) {
        const double k = to_f64(*args.k.at<const E>(at.b, at.end - 1 - l, c));
        for (int64_t j = l; j < w.R; ++j) w.sums[j] += w.sb[j - l] * k;
      }
      for (int64_t j = L; args.initial_state_shift.given() && j < w.R; ++j) {
        w.sums[j] += element(args.initial_state_shift, i, c, j - L);
      }
      for (int64_t j = 0; j < w.R; ++j) *state.at<T>(i, c, j) = static_cast<T>(w.sums[j]);
    }
  }

  static void run(const H3Args& args, const H3Out& out, const Launch& launch) {
    const H3Shape shape(args);
    const int64_t blocks = h3_blocks(shape), bytes = worker_bytes(shape), N = sequence_count(args.cu_seqlens, shape.B);
    parallel(launch, N * blocks, [&](int64_t task, int worker) {
      Arena arena(launch.workspace + worker * bytes);
      Window<T> w = Window<T>::cut(arena, shape, false);
      const int64_t i = task / blocks;
      const Sequence at = sequence_of(args.cu_seqlens, shape.T, i);
      w.begin(args, shape, task % blocks);
      w.load_states(args.initial_state_diag, i, shape.M, w.states, false);
      for (int64_t t = 0; t < at.length(); t += kH3Window) {
        window(args, shape, out.out, w, at, i, t, out.state_diag.given() && t + kH3Window >= at.length());
      }
      w.store_states(out.state_diag, i, shape.M, w.states, false);
      if (out.state_shift.given()) store_shift(args, out.state_shift, w, at, i);
    });
  }
  static void store_taps(const H3Args& args, const H3Out& out, const Launch& launch) {
    const H3Shape shape(args);
    const int64_t blocks = h3_blocks(shape), bytes = worker_bytes(shape);
    if (out.taps_shift.given() || out.taps_diag.given()) {
      parallel(launch, blocks, [&](int64_t block, int worker) {
        Arena arena(launch.workspace + worker * bytes);
        Window<T> w = Window<T>::cut(arena, shape, false);
        taps(args, out, shape, w, block * w.heads);
      });
    }
  }

  static void taps(const H3Args& args, const H3Out& out, const H3Shape& shape, const Window<T>& w, int64_t h0) {
    H3Head head = w.head;
    for (int64_t h = h0; h < h0 + w.heads && h < shape.H; ++h) {
      head.load(args, h, shape.M, w.Mp);
      multiply_rows(head.c, head.bd, w.Mp, w.power);
      for (int64_t l = 0; out.taps_diag.given() && l < shape.T; ++l) {
        double sum_of = 0;
        for (int64_t m = 0; m < w.Mp; ++m) sum_of += w.power[m];
        *out.taps_diag.at<T>(h, l) = static_cast<T>(2 * sum_of);
        multiply_rows(w.power, head.a, w.Mp, w.power);
      }
      for (int64_t c = h * shape.P; out.taps_shift.given() && c < (h + 1) * shape.P; ++c) {
        h3_shift_taps(args, c, shape.R, w.sb, w.sc, w.sums, w.taps);
        w.sums[0] -= element(args.sd, c);
        for (int64_t l = 0; l < shape.T; ++l) {
          *out.taps_shift.at<T>(c, l) = l < shape.R ? static_cast<T>(w.sums[l]) : T(0);
        }
      }
    }
  }
};

// Scratch of the way down, beside the window's.
template <class T>
struct Reverse {
  T* kept;                   // [windows, heads, P, P, 2 Mp]: states before each window
  T* Y;                      // [heads, P, P, 2 Mp]: gradients of the states after the window
  T *dy, *dq, *dv;           // [channels, window]; dy: [P, heads, window]
  T* dkbar;                  // [channels, window + Rp]: with the R - 1 that follow
  T *dk, *ds, *du;           // [window]
  T* Yrows;                  // [J, 2 Mp]
  T *G1, *G2, *G3;           // [n, 2 Mp], [n, 2 Mp], [2 Mp]: sums over the chunks of a window and head
  double *wide_u, *wide_ds;  // [window]: kbar v, q dy
  double* GG;                // [n, n]: sums of their products over the chunks of a window and head, columns j >= row
  double *F_a, *F_bd, *F_c;  // [heads, 2 Mp]
  double* dd;                // [heads]
  double* dks;               // [channels, R]
  double *dsb, *dsc, *dx0;   // [channels, R]: what the states add
  double *last, *row;        // [2 Mp]

  static Reverse cut(Arena& arena, const Window<T>& w, int64_t tokens) {
    Reverse r;
    const int64_t states = w.state_elements(), width = 2 * w.Mp;
    r.kept = arena.take<T>((tokens + kH3Window - 1) / kH3Window * states);
    r.Y = arena.take<T>(states);
    r.dy = arena.take<T>(w.channels * kH3Window);
    r.dq = arena.take<T>(w.channels * kH3Window);
    r.dv = arena.take<T>(w.channels * kH3Window);
    r.dkbar = arena.take<T>(w.channels * (kH3Window + w.Rp));
    r.dk = arena.take<T>(kH3Window);
    r.ds = arena.take<T>(kH3Window);
    r.du = arena.take<T>(kH3Window);
    r.Yrows = arena.take<T>(kH3Chunks * width);
    r.G1 = arena.take<T>(n * width);
    r.G2 = arena.take<T>(n * width);
    r.wide_u = arena.take<double>(kH3Window);
    r.wide_ds = arena.take<double>(kH3Window);
    r.GG = arena.take<double>(n * n);
    r.G3 = arena.take<T>(width);
    r.F_a = arena.take<double>(w.heads * width);
    r.F_bd = arena.take<double>(w.heads * width);
    r.F_c = arena.take<double>(w.heads * width);
    r.dd = arena.take<double>(w.heads);
    r.dks = arena.take<double>(w.channels * w.R);
    r.dsb = arena.take<double>(w.channels * w.R);
    r.dsc = arena.take<double>(w.channels * w.R);
    r.dx0 = arena.take<double>(w.channels * w.R);
    r.last = arena.take<double>(width);
    r.row = arena.take<double>(width);
    return r;
  }
};

template <class T, class E>
struct Backward {
  using X = Vec<T>;

  const H3Args& args;
  const H3Grads& grads;
  H3Shape shape;
  int64_t N, runs, blocks, heads, channels, Mp;

  Backward(const H3Args& a, const H3Grads& g)
      : args(a),
        grads(g),
        shape(a),
        N(sequence_count(a.cu_seqlens, a.q.size[0])),
        runs(N < kH3Runs ? N : kH3Runs),
        blocks(h3_blocks(shape)),
        heads(h3_heads_per_task(shape)),
        channels(heads * shape.P),
        Mp(round_up<T>(shape.M)) {}

  H3Totals totals(double* memory) const { return {args, grads, shape, heads, Mp, runs, blocks, memory}; }
  struct Memory {
    double* totals;
    char* workers;
    int64_t worker_bytes;
  };
  Memory cut(Arena& arena, int workers) const {
    Arena own;
    const Window<T> w = Window<T>::cut(own, shape, true);
    Reverse<T>::cut(own, w, shape.T);
    Memory m;
    m.totals = arena.take<double>(totals(nullptr).elements());
    m.worker_bytes = own.used();
    m.workers = arena.take<char>(workers * m.worker_bytes);
    return m;
  }

  // The window's sums to F_a, F_bd, F_c (h3.h; the page's chunked gradients).
  void add_parameters(const Window<T>& w, const Reverse<T>& r, int h) const {
    const int64_t width = 2 * Mp;
    double g[n];
    for (int l = 0; l < n; ++l) {
      g[l] = 0;
      for (int j = 0; j + l < n; ++j) g[l] += r.GG[j * n + j + l];
    }
    r.dd[h] += g[0];
    double *F_a = r.F_a + h * width, *F_bd = r.F_bd + h * width, *F_c = r.F_c + h * width;
    double *power = w.power, *before = r.last, *row = r.row, *cbd = w.product;  // a^j, a^{j-1}
    multiply_rows(w.head.c, w.head.bd, Mp, cbd);
    one_row(Mp, power);
    for (int64_t m = 0; m < width; ++m) before[m] = 0;
    for (int j = 0; j < n; ++j) {
      const T* G1 = r.G1 + j * width;
      const T* G2 = r.G2 + (n - 1 - j) * width;
      add_product(g[j], power, w.head.bd, Mp, F_c);
      add_product(g[j], power, w.head.c, Mp, F_bd);
      add_product(j * g[j], before, cbd, Mp, F_a);
      add_product(1, G2, power, Mp, F_bd);
      multiply_rows(before, w.head.bd, Mp, row);
      add_product(j, G2, row, Mp, F_a);
      multiply_rows(power, w.head.c, Mp, row);
      add_product(j + 1, G1, row, Mp, F_a);
      if (j == n - 1) add_product(n, r.G3, power, Mp, F_a);
      for (int64_t m = 0; m < width; ++m) before[m] = power[m];
      multiply_rows(power, w.head.a, Mp, power);
      add_product(1, G1, power, Mp, F_c);
    }
  }

  // A last chunk of `tokens` < n tokens, whose state's gradient Y comes from the caller: what the products, which count n
  // tokens, leave out. du [n] +=; Y <- a^tokens Y + increment.
  void part_of_chunk(const Window<T>& w, const Reverse<T>& r, int h, int tokens, const T* u, const T* before,
                     const T* increment, T* Y, T* du) const {
    const int64_t width = 2 * Mp;
    double *F_a = r.F_a + h * width, *F_bd = r.F_bd + h * width;
    double *power = w.power, *last = r.last, *row = r.row;
    one_row(Mp, power);
    for (int64_t m = 0; m < width; ++m) last[m] = 0;
    for (int k = 0; k < tokens; ++k) {  // power = a^k, last = a^{k-1}; token tokens - 1 - k
      const int j = tokens - 1 - k;
      const double x = static_cast<double>(u[j]);
      multiply_rows(power, w.head.bd, Mp, row);
      double sum_of = 0;
      for (int64_t m = 0; m < Mp; ++m) {
        sum_of += row[m] * static_cast<double>(Y[m]) - row[Mp + m] * static_cast<double>(Y[Mp + m]);
      }
      du[j] += static_cast<T>(2 * sum_of);
      add_product(x, Y, power, Mp, F_bd);
      multiply_rows(last, w.head.bd, Mp, row);
      add_product(k * x, Y, row, Mp, F_a);
      for (int64_t m = 0; m < width; ++m) last[m] = power[m];
      multiply_rows(power, w.head.a, Mp, power);
    }
    for (int64_t m = 0; m < width; ++m) row[m] = 0;
    add_product(tokens, before, last, Mp, row);  // tokens a^{tokens-1} X
    add_product(1, Y, row, Mp, F_a);
    for (int64_t m = 0; m < width; ++m) row[m] = static_cast<double>(increment[m]);
    add_product(1, Y, power, Mp, row);
    for (int64_t m = 0; m < width; ++m) Y[m] = static_cast<T>(row[m]);
  }

  static void wide_products(const T* a, const T* b, int count, double* to) {
    for (int i = 0; i < count; ++i) to[i] = static_cast<double>(a[i]) * static_cast<double>(b[i]);
  }

  // One (p, r) of a window.
  void pair(const Window<T>& w, const Reverse<T>& r, int h, int64_t p, int64_t slot, T* state, int tokens, bool part) const {
    const int chunks = chunks_of(tokens), width = static_cast<int>(2 * Mp), whole = tokens / n;
    const H3Tables<T>& tables = w.tables[h];
    const T* kbar = w.kbar + (h * w.P + p) * kH3Window;
    const T* v = w.v + (h * w.P + slot) * kH3Window;
    const T* dy = r.dy + (slot * w.heads + h) * kH3Window;
    h3_multiply<T, false>(kbar, v, chunks * n, w.u);
    h3_multiply<T, false>(w.q + (h * w.P + p) * kH3Window, dy, chunks * n, r.ds);
    states_of(w, tables, chunks, state, w.inc);
    read_states(w, tables, chunks, w.inc);
    h3_multiply<T, true>(w.s, dy, chunks * n, r.dq + (h * w.P + p) * kH3Window);
    // gradients of the states, from the last chunk to the first
    T* Y = w.state(r.Y, h, p, slot);
    gemm<T>(chunks, width, n, as_is(r.ds, n), tables.cin, width, r.Yrows, width, Store{});
    int rows = chunks;
    if (part) {
      h3_clear(r.du + whole * n, n);
      rows = whole;
      part_of_chunk(w, r, h, tokens - whole * n, w.u + whole * n, w.inc + whole * width, r.Yrows + whole * width, Y,
                    r.du + whole * n);
      h3_clear(r.Yrows + whole * width, width);
    }
    h3_scan(tables, Mp, Y, r.Yrows, rows - 1, -1, -1);
    T* extra = r.dk;  // what part_of_chunk gave
    if (part) {
      for (int j = 0; j < n; ++j) extra[j] = r.du[whole * n + j];
    }
    gemm<T>(chunks, n, width, as_is(r.Yrows, width), tables.wout, n, r.du, n, Store{});
    gemm<T>(chunks, n, n, as_is(r.ds, n), tables.tapst, n, r.du, n, Add{});
    for (int j = 0; part && j < n; ++j) r.du[whole * n + j] += extra[j];
    h3_multiply<T, true>(r.du, v, chunks * n, r.dkbar + (h * w.P + p) * (kH3Window + w.Rp));
    h3_multiply<T, true>(r.du, kbar, chunks * n, r.dv + (h * w.P + slot) * kH3Window);
    gemm<T>(n, width, chunks, transposed(r.ds, n), w.inc, width, r.G1, width, Add{});
    gemm<T>(n, width, chunks, transposed(w.u, n), r.Yrows, width, r.G2, width, Add{});
    wide_products(kbar, v, chunks * n, r.wide_u);
    wide_products(w.q + (h * w.P + p) * kH3Window, dy, chunks * n, r.wide_ds);
    gemm<double>(n, n, chunks, transposed(r.wide_u, n), r.wide_ds, n, r.GG, n, Add{}, ColumnsFrom{0});
    for (int64_t m = 0; m < Mp; m += X::W) {
      typename X::V re = X::load(r.G3 + m), im = X::load(r.G3 + Mp + m);
      for (int i = 0; i < chunks; ++i) {
        const typename X::V xr = X::load(w.inc + i * width + m), xi = X::load(w.inc + i * width + Mp + m);
        const typename X::V yr = X::load(r.Yrows + i * width + m), yi = X::load(r.Yrows + i * width + Mp + m);
        re = fma(xr, yr, fma(-xi, yi, re));
        im = fma(xr, yi, fma(xi, yr, im));
      }
      X::store(r.G3 + m, re);
      X::store(r.G3 + Mp + m, im);
    }
  }

  // The short filter of one channel over a window; dkbar holds the window and the R - 1 gradients after it.
  void shift(const Window<T>& w, const Reverse<T>& r, const Sequence& at, int64_t i, int64_t t, int tokens, int64_t c) const {
    const int64_t L = at.length(), channel = w.h0 * w.P + c, R = w.R;
    const int padded = chunks_of(tokens) * n;
    const T* dkbar = r.dkbar + c * (kH3Window + w.Rp);
    h3_filter<T, true>(dkbar, w.taps + c * R, R, padded, r.dk);
    const T* keys = w.keys(c);
    constexpr int kParts = 8;
    double parts[kParts] = {};  // lag 0 is dsd, one number: in double
    for (int j = 0; j < padded; j += kParts) {
      for (int l = 0; l < kParts; ++l) parts[l] += static_cast<double>(dkbar[j + l]) * static_cast<double>(keys[j + l]);
    }
    for (double part : parts) r.dks[c * R] += part;
    for (int64_t l = 1; l < R; ++l) {
      typename X::V total = X::zero();
      for (int j = 0; j < padded; j += X::W) total = fma(X::load(dkbar + j), X::load(keys + j - l), total);
      r.dks[c * R + l] += static_cast<double>(sum(total));
    }
    if (args.initial_state_shift.given()) {
      const T* x0 = args.initial_state_shift.at<const T>(i, channel, 0);
      for (int64_t j = t; j < t + tokens && j + 1 < R; ++j) {
        const double d = static_cast<double>(dkbar[j - t]);
        for (int64_t m = 0; m + j + 1 < R; ++m) {
          r.dx0[c * R + m] += element(args.sc, channel, m + j + 1) * d;
          r.dsc[c * R + m + j + 1] += static_cast<double>(x0[m]) * d;
        }
      }
    }
    if (grads.dstate_shift.given()) {  // x_L[i] = sum_l sb[i-l] k_{L-1-l} + x_0[i-L]
      for (int64_t j = 0; j < tokens; ++j) {
        const int64_t l = L - 1 - (t + j);
        if (l >= R) continue;
        const double k = static_cast<double>(keys[j]);
        double dk = 0;
        for (int64_t m = l; m < R; ++m) {
          const double d = element(grads.dstate_shift, i, channel, m);
          dk += element(args.sb, channel, m - l) * d;
          r.dsb[c * R + m - l] += d * k;
        }
        r.dk[j] += static_cast<T>(dk);
      }
    }
    T* to = r.dq;  // the caller stores dq first
    for (int j = 0; j < padded; ++j) to[c * kH3Window + j] = r.dk[j];
  }

  void sequence(Window<T>& w, const Reverse<T>& r, int64_t i) const {
    const Sequence at = sequence_of(args.cu_seqlens, shape.T, i);
    const int64_t L = at.length(), windows = (L + kH3Window - 1) / kH3Window, c0 = w.h0 * w.P, count = w.count * w.P;
    const int64_t ldd = kH3Window + w.Rp;
    w.load_states(args.initial_state_diag, i, shape.M, w.states, false);
    for (int64_t window = 0; window < windows; ++window) {
      __builtin_memcpy(r.kept + window * w.state_elements(), w.states, static_cast<size_t>(w.state_elements()) * sizeof(T));
      if (window + 1 == windows) break;
      load_window<T, E>(args, w, at, i, window * kH3Window, kH3Window);
      for (int h = 0; h < w.count; ++h) {
        for (int64_t p = 0; p < w.P; ++p) {
          for (int64_t slot = 0; slot < w.P; ++slot) {
            h3_multiply<T, false>(w.kbar + (h * w.P + p) * kH3Window, w.v + (h * w.P + slot) * kH3Window, kH3Window, w.u);
            states_of(w, w.tables[h], kH3Chunks, w.state(w.states, h, p, slot), w.inc);
          }
        }
      }
    }
    w.load_states(grads.dstate_diag, i, shape.M, r.Y, true);
    h3_clear(r.dkbar, w.channels * ldd);
    h3_clear(r.dx0, w.channels * w.R);
    for (int64_t window = windows; window-- > 0;) {
      const int64_t t = window * kH3Window;
      const int tokens = window_tokens(t, L);
      const bool part = window + 1 == windows && tokens % n != 0 && grads.dstate_diag.given();
      load_window<T, E>(args, w, at, i, t, tokens);
      __builtin_memcpy(w.states, r.kept + window * w.state_elements(), static_cast<size_t>(w.state_elements()) * sizeof(T));
      for (int64_t slot = 0; slot < w.P; ++slot) {
        T* dy = r.dy + slot * w.heads * kH3Window;
        if (grads.dout.given()) {
          load_rows<T, E>(grads.dout, at.b, at.begin + t, slot * shape.H + w.h0, w.count, tokens, dy, kH3Window);
        } else {
          h3_clear(dy, w.count * kH3Window);
        }
      }
      h3_clear(r.dq, w.channels * kH3Window);
      h3_clear(r.dv, w.channels * kH3Window);
      for (int64_t c = 0; c < count; ++c) {  // this window's first R gradients follow the window before
        T* row = r.dkbar + c * ldd;
        for (int64_t j = w.Rp; j-- > 0;) row[kH3Window + j] = row[j];
        h3_clear(row, kH3Window);
      }
      for (int h = 0; h < w.count; ++h) {
        w.head.load(args, w.h0 + h, shape.M, Mp);
        h3_clear(r.G1, n * 2 * Mp);
        h3_clear(r.G2, n * 2 * Mp);
        h3_clear(r.GG, n * n);
        h3_clear(r.G3, 2 * Mp);
        for (int64_t p = 0; p < w.P; ++p) {
          for (int64_t slot = 0; slot < w.P; ++slot) pair(w, r, h, p, slot, w.state(w.states, h, p, slot), tokens, part);
        }
        add_parameters(w, r, h);
      }
      if (tokens < kH3Window) {  // the last window: nothing follows its last token
        for (int64_t c = 0; c < count; ++c) {
          T* row = r.dkbar + c * ldd;
          for (int64_t j = tokens; j < ldd; ++j) row[j] = 0;
        }
      }
      store_channels(grads.dq, at, t, c0, count, tokens, r.dq);
      store_channels(grads.dv, at, t, c0, count, tokens, r.dv);
      for (int64_t c = 0; c < count; ++c) shift(w, r, at, i, t, tokens, c);
      store_channels(grads.dk, at, t, c0, count, tokens, r.dq);
    }
    w.store_states(grads.dinitial_state_diag, i, shape.M, r.Y, true);
    if (!grads.dinitial_state_shift.given()) return;
    for (int64_t c = 0; c < count; ++c) {
      for (int64_t m = 0; m < w.R; ++m) {
        double d = r.dx0[c * w.R + m];
        if (grads.dstate_shift.given() && m + L < w.R) d += element(grads.dstate_shift, i, c0 + c, m + L);
        *grads.dinitial_state_shift.at<T>(i, c0 + c, m) = static_cast<T>(d);
      }
    }
  }
  void store_channels(const View& view, const Sequence& at, int64_t t, int64_t c0, int64_t count, int tokens,
                      const T* rows) const {
    if (!view.given()) return;
    store_tile_transposed<T>(rows, kH3Window, tokens, static_cast<int>(count), view.at<E>(at.b, at.begin + t, c0),
                             view.stride[1]);
  }

  void run(const Launch& launch) const {
    Arena arena(launch.workspace);
    const Memory m = cut(arena, launch.workers);
    parallel(launch, runs * blocks, [&](int64_t task, int worker) {
      Arena own(m.workers + worker * m.worker_bytes);
      Window<T> w = Window<T>::cut(own, shape, true);
      const Reverse<T> r = Reverse<T>::cut(own, w, shape.T);
      const int64_t part = task / blocks;
      w.begin(args, shape, task % blocks);
      for (double* sums_of : {r.F_a, r.F_bd, r.F_c}) h3_clear(sums_of, heads * 2 * Mp);
      h3_clear(r.dd, heads);
      for (double* sums_of : {r.dks, r.dsb, r.dsc}) h3_clear(sums_of, channels * shape.R);
      for (int64_t i = part * N / runs; i < (part + 1) * N / runs; ++i) sequence(w, r, i);
      totals(m.totals).put(part, task % blocks, r.F_a, r.F_bd, r.F_c, r.dd, r.dks, r.dsb, r.dsc, w.sb, w.sc);
    });
    parallel(launch, blocks, [&](int64_t block, int) { totals(m.totals).finish(block); });
  }
};

}  // namespace

void h3_forward(const H3Args& args, const H3Out& out, const Launch& launch) {
  by_dtype(args.q.dtype, [&]<class T, class E>() {
    if (h3_wants_fft(args) && !out.state_shift.given() && !out.state_diag.given()) {
      h3_fft_forward(args, out, launch);
    } else {
      Forward<T, E>::run(args, out, launch);
    }
    Forward<T, E>::store_taps(args, out, launch);
  });
}

void h3_backward(const H3Args& args, const H3Out&, const H3Grads& grads, const Launch& launch) {
  by_dtype(args.q.dtype, [&]<class T, class E>() { Backward<T, E>(args, grads).run(launch); });
}
int64_t h3_workspace(const H3Args& args, Pass pass, int workers) {
  return by_dtype(args.q.dtype, [&]<class T, class E>() -> int64_t {
    if (pass == Pass::backward) {
      const H3Grads grads;
      Arena arena;
      Backward<T, E>(args, grads).cut(arena, workers);
      return arena.used();
    }
    const int64_t chunked = workers * Forward<T, E>::worker_bytes(H3Shape(args));
    const int64_t fft = h3_wants_fft(args) ? h3_fft_workspace(args, workers) : 0;
    return fft > chunked ? fft : chunked;
  });
}

}  // namespace linnet::LINNET_ISA
