// The selective scan on the vector units: channels in the lanes, the state of 64 channels in L1, 32 tokens at a time.
//
// Forward, per task (sequence, block of 64 channels): softplus and delta x of 32 tokens to scratch, then for each vector of
// channels token after token, state element after state element; the exponential is most of the work. In f32 the forward of
// more than 64 tokens carries what each step's sum loses into the next, the shorter keeps state and read in double. Backward:
// the states before every 32 tokens are kept on the way up; on the way down each span's states and factors are computed again
// into L2 and walked backward. Sums over channels (dB, dC) are left as one number per block and added in order; sums over
// tokens (dA, dD, ddt_bias) run in f32 inside a span and in double beyond it.
#include "selective_scan_step.h"

namespace linnet::LINNET_ISA {
namespace {

constexpr int kSpan = 32;
constexpr int64_t kShort = 64;
constexpr int kBlock = kScanBlock;

template <class T>
struct Block {
  int64_t b, first, group;
  int width, K;
  int64_t ldk;
  T *A, *h;          // [K, 64]
  T* low;            // [K, 64]: what h lost by rounding (forward of long sequences)
  double* wide;      // [K, 64]: h of short sequences in f32
  T *bias, *skip;    // [64]
  T *delta, *v, *y;  // [span, 64]: step, delta x, output
  T *in, *out;       // [span, ldk]: B, C

  LINNET_INLINE static Block cut(Arena& arena, int64_t K) {
    Block r;
    r.K = static_cast<int>(K);
    r.ldk = round_up<T>(K);
    r.A = arena.take<T>(K * kBlock);
    r.h = arena.take<T>(K * kBlock);
    r.low = arena.take<T>(K * kBlock);
    r.wide = arena.take<double>(sizeof(T) == 4 ? K * kBlock : 0);
    r.bias = arena.take<T>(kBlock);
    r.skip = arena.take<T>(kBlock);
    r.delta = arena.take<T>(kSpan * kBlock);
    r.v = arena.take<T>(kSpan * kBlock);
    r.y = arena.take<T>(kSpan * kBlock);
    r.in = arena.take<T>(kSpan * r.ldk);
    r.out = arena.take<T>(kSpan * r.ldk);
    return r;
  }
  template <class E>
  void begin(const SelectiveScanArgs& args, const ScanBlocks& blocks, int64_t block) {
    first = blocks.first(block);
    width = blocks.width(block);
    group = blocks.group(block);
    for (int64_t i = 0; i < K * kBlock; ++i) A[i] = 0;
    load_tile_transposed<T>(args.A.at<const T>(first, 0), args.A.stride[0], width, K, A, kBlock);
    load_channels<T, E>(args.dt_bias, args.x.dtype, first, width, bias);
    load_channels<T, E>(args.D, args.x.dtype, first, width, skip);
  }
  // [K, 64] from and to a row n of a state [N, E, K]
  void load_state(const View& state, int64_t n, T* to) const {
    for (int64_t i = 0; i < K * kBlock; ++i) to[i] = 0;
    if (state.given()) load_tile_transposed<T>(state.at<const T>(n, first, 0), state.stride[1], width, K, to, kBlock);
  }
  void store_state(const View& state, int64_t n, const T* from) const {
    if (state.given()) store_tile_transposed<T>(from, kBlock, width, K, state.at<T>(n, first, 0), state.stride[1]);
  }
};

// delta, delta x, B and C of the tokens [t, t + rows).
template <class T, class E>
void load_span(const SelectiveScanArgs& args, const Block<T>& r, int64_t t, int rows) {
  using X = Vec<T>;
  for (int i = 0; i < rows; ++i) {
    const E* dt = args.dt.at<const E>(r.b, t + i, r.first);
    const E* x = args.x.at<const E>(r.b, t + i, r.first);
    for (int c = 0; c < kBlock; c += X::W) {
      const typename X::V delta = softplus(X::load(dt + c, r.width - c) + X::load(r.bias + c));
      X::store(r.delta + i * kBlock + c, delta);
      X::store(r.v + i * kBlock + c, delta * X::load(x + c, r.width - c));
    }
  }
  const View in = grouped(args.B), out = grouped(args.C);
  load_tile<T>(in.at<const E>(r.b, t, r.group), in.stride[1], rows, r.K, r.in, r.ldk);
  load_tile<T>(out.at<const E>(r.b, t, r.group), out.stride[1], rows, r.K, r.out, r.ldk);
}

// h over the span. kRead: y = C.h. kKeep: states before each token [span + 1, K, 64] and factors [span, K, 64]. kExact: what
// each sum h + (expm1(g) h + b) loses joins the next b, so that thousands of steps near 1 do not add up their roundings.
template <bool kRead, bool kKeep, bool kExact, class T>
void scan_span(const Block<T>& r, int rows, T* states, T* factors) {
  using X = Vec<T>;
  using V = typename X::V;
  const int64_t step = static_cast<int64_t>(r.K) * kBlock;
  for (int c = 0; c < r.width; c += X::W) {
    for (int i = 0; i < rows; ++i) {
      const V rate = exponents(X::load(r.delta + i * kBlock + c)), v = X::load(r.v + i * kBlock + c);
      const T* in = r.in + i * r.ldk;
      const T* out = r.out + i * r.ldk;
      V y[4] = {};  // four sums in turn: shorter ones round less
      for (int n = 0; n < r.K; ++n) {
        const int64_t at = n * kBlock + c;
        const Factor<V> f = factor_of(rate * X::load(r.A + at));
        V h = X::load(r.h + at);
        if constexpr (kKeep) {
          X::store(states + i * step + at, h);
          X::store(factors + i * step + at, f.value);
        }
        if constexpr (kExact) {
          const V base = select(f.near, h, X::zero()),
                  change = fma(f.value, h, fma(X::broadcast(in[n]), v, X::load(r.low + at)));
          h = base + change;
          X::store(r.low + at, change - (h - base));
        } else {
          h = advance(f, h, X::broadcast(in[n]) * v);
        }
        X::store(r.h + at, h);
        if constexpr (kRead) {
          const V next = fma(X::broadcast(out[n]), h, y[0]);
          y[0] = y[1], y[1] = y[2], y[2] = y[3], y[3] = next;
        }
      }
      if constexpr (kRead) X::store(r.y + i * kBlock + c, (y[0] + y[1]) + (y[2] + y[3]));
    }
    if constexpr (kKeep) {
      for (int n = 0; n < r.K; ++n) X::store(states + rows * step + n * kBlock + c, X::load(r.h + n * kBlock + c));
    }
  }
}

// The same for short sequences in f32, h and y in double: few tokens may all have a read C.h that cancels.
inline void scan_span_wide(const Block<float>& r, int rows) {
  using X = Vec<float>;
  for (int c = 0; c < r.width; c += X::W) {
    for (int i = 0; i < rows; ++i) {
      const vf rate = exponents(X::load(r.delta + i * kBlock + c));
      const Wide v = widen(X::load(r.v + i * kBlock + c));
      const float* in = r.in + i * r.ldk;
      const float* out = r.out + i * r.ldk;
      Wide y = {}, next_y = {};  // two sums in turn
      for (int n = 0; n < r.K; ++n) {
        const int64_t at = n * kBlock + c;
        const Wide factor = widen(factor_of(rate * X::load(r.A + at)));
        const vd b = Vec<double>::broadcast(static_cast<double>(in[n])),
                 o = Vec<double>::broadcast(static_cast<double>(out[n]));
        double* h = r.wide + at;
        const vd low = fma(factor.low, Vec<double>::load(h), b * v.low);
        const vd high = fma(factor.high, Vec<double>::load(h + X::W / 2), b * v.high);
        Vec<double>::store(h, low);
        Vec<double>::store(h + X::W / 2, high);
        const Wide sum_of = {fma(o, low, y.low), fma(o, high, y.high)};
        y = next_y;
        next_y = sum_of;
      }
      float* to = r.y + i * kBlock + c;
      const vd low = y.low + next_y.low, high = y.high + next_y.high;
      for (int l = 0; l < X::W / 2; ++l) {
        to[l] = static_cast<float>(low[l]);
        to[X::W / 2 + l] = static_cast<float>(high[l]);
      }
    }
  }
}

LINNET_INLINE int span_rows(int64_t t, int64_t end) { return end - t < kSpan ? static_cast<int>(end - t) : kSpan; }

template <class T, class E>
struct Forward {
  static int64_t worker_bytes(int64_t K) {
    Arena arena;
    Block<T>::cut(arena, K);
    return arena.used();
  }
  static void run(const SelectiveScanArgs& args, const SelectiveScanOut& out, const Launch& launch) {
    const int64_t N = sequence_count(args.cu_seqlens, args.x.size[0]), K = args.A.size[1];
    const ScanBlocks blocks(args.x.size[2], scan_groups(args.B));
    const int64_t bytes = worker_bytes(K);
    parallel(launch, N * blocks.count, [&](int64_t task, int worker) {
      Arena arena(launch.workspace + worker * bytes);
      Block<T> r = Block<T>::cut(arena, K);
      const int64_t n = task / blocks.count;
      const Sequence at = sequence_of(args.cu_seqlens, args.x.size[1], n);
      r.b = at.b;
      r.template begin<E>(args, blocks, task % blocks.count);
      r.load_state(args.initial_state, n, r.h);
      const bool wide = sizeof(T) == 4 && at.length() <= kShort;
      for (int64_t j = 0; j < K * kBlock; ++j) r.low[j] = 0;
      for (int64_t j = 0; wide && j < K * kBlock; ++j) r.wide[j] = static_cast<double>(r.h[j]);
      for (int64_t t = at.begin; t < at.end; t += kSpan) {
        const int rows = span_rows(t, at.end);
        load_span<T, E>(args, r, t, rows);
        if (wide) {
          if constexpr (sizeof(T) == 4) scan_span_wide(r, rows);
        } else {
          scan_span<true, false, sizeof(T) == 4, T>(r, rows, nullptr, nullptr);
        }
        for (int i = 0; i < rows; ++i) {
          store_output<T, E>(args, out.out, r.b, t + i, r.first, r.width, r.y + i * kBlock, r.skip);
        }
      }
      for (int64_t j = 0; wide && j < K * kBlock; ++j) r.h[j] = static_cast<T>(r.wide[j]);
      r.store_state(out.final_state, n, r.h);
    });
  }
};

// Scratch of the way down.
template <class T>
struct Reverse {
  T* kept;              // [spans, K, 64]: states before each span
  T *states, *factors;  // of the current span
  T *R, *next, *base;   // [K, 64]: gradient of h_{t+1}; exp(g_{t+1}) = base + next, base 1 where g is near 0
  T* dA;                // [K, 64] of a span
  T *dD, *dbias;        // [64] of a span
  T* dy;                // [span, 64]
  T *sum_in, *sum_out;  // [span, K, W]: dB, dC before the sum over the lanes
  double* total;        // [(K + 2), 64]: dA, dD, ddt_bias of the task

  LINNET_INLINE static Reverse cut(Arena& arena, int64_t K, int64_t tokens) {
    Reverse r;
    const int64_t step = K * kBlock;
    r.kept = arena.take<T>((tokens + kSpan - 1) / kSpan * step);
    r.states = arena.take<T>((kSpan + 1) * step);
    r.factors = arena.take<T>(kSpan * step);
    r.R = arena.take<T>(step);
    r.next = arena.take<T>(step);
    r.base = arena.take<T>(step);
    r.dA = arena.take<T>(step);
    r.dD = arena.take<T>(kBlock);
    r.dbias = arena.take<T>(kBlock);
    r.dy = arena.take<T>(kSpan * kBlock);
    r.sum_in = arena.take<T>(kSpan * K * Vec<T>::W);
    r.sum_out = arena.take<T>(kSpan * K * Vec<T>::W);
    r.total = arena.take<double>((K + 2) * kBlock);
    return r;
  }
};

template <class T>
LINNET_INLINE void clear(T* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = 0;
}

// total += x, what rounding takes goes to lost
template <class V>
LINNET_INLINE void add_exactly(V x, V* total, V* lost) {
  const V next = *total + x, part = next - *total;
  *lost += (*total - (next - part)) + (x - part);
  *total = next;
}

template <class T, class E>
struct Backward {
  using X = Vec<T>;
  using V = typename X::V;
  static constexpr int64_t kParts = 16;  // sequences are summed up in at most so many runs

  const SelectiveScanArgs& args;
  const SelectiveScanGrads& grads;
  const Launch& launch;
  int64_t rows, tokens, channels, K, N;
  ScanBlocks blocks;
  int64_t runs;

  Backward(const SelectiveScanArgs& a, const SelectiveScanGrads& g, const Launch& l)
      : args(a),
        grads(g),
        launch(l),
        rows(a.x.size[0] * a.x.size[1]),
        tokens(a.x.size[1]),
        channels(a.x.size[2]),
        K(a.A.size[1]),
        N(sequence_count(a.cu_seqlens, a.x.size[0])),
        blocks(channels, scan_groups(a.B)) {
    runs = N < kParts ? N : kParts;
  }

  struct Memory {
    double* totals;  // [runs, blocks, K + 2, 64]
    T *in, *out;     // [blocks, B T, K]: dB, dC of each block
    char* workers;
    int64_t worker_bytes;
  };
  Memory cut(Arena& arena, int workers) const {
    Memory m;
    m.totals = arena.take<double>(runs * blocks.count * (K + 2) * kBlock);
    m.in = arena.take<T>(blocks.count * rows * K);
    m.out = arena.take<T>(blocks.count * rows * K);
    Arena own;
    Block<T>::cut(own, K);
    Reverse<T>::cut(own, K, tokens);
    m.worker_bytes = own.used();
    m.workers = arena.take<char>(workers * m.worker_bytes);
    return m;
  }

  // dy = dout silu(z), dz; y must hold C.h of the span.
  void load_gradients(const Block<T>& r, const Reverse<T>& w, int64_t t, int count) const {
    const V one = X::broadcast(1);
    for (int i = 0; i < count; ++i) {
      for (int c = 0; c < kBlock; c += X::W) {
        const int lanes = r.width - c;
        V d = X::zero();
        if (grads.dout.given()) d = X::load(grads.dout.at<const E>(r.b, t + i, r.first + c), lanes);
        if (args.z.given()) {
          const V z = X::load(args.z.at<const E>(r.b, t + i, r.first + c), lanes), s = sigmoid(z);
          if (grads.dz.given()) {
            const V y = fma(X::load(r.skip + c), X::load(args.x.at<const E>(r.b, t + i, r.first + c), lanes),
                            X::load(r.y + i * kBlock + c));
            X::store(grads.dz.at<E>(r.b, t + i, r.first + c), d * y * (s * fma(z, one - s, one)), lanes);
          }
          d = d * (z * s);
        }
        X::store(w.dy + i * kBlock + c, d);
      }
    }
  }

  // The span's tokens from the last to the first, one vector of channels.
  void walk_down(const Block<T>& r, const Reverse<T>& w, int64_t t, int count, int c) const {
    const int64_t step = K * kBlock;
    const int lanes = r.width - c;
    V dD = X::zero(), dD_lost = X::zero(), dbias = X::zero(), dbias_lost = X::zero();
    for (int i = count - 1; i >= 0; --i) {
      const V delta = X::load(r.delta + i * kBlock + c), v = X::load(r.v + i * kBlock + c), dy = X::load(w.dy + i * kBlock + c);
      const T* in = r.in + i * r.ldk;
      const T* out = r.out + i * r.ldk;
      const T* before = w.states + i * step + c;
      const T* factors = w.factors + i * step + c;
      T* sum_in = w.sum_in + i * K * X::W;
      T* sum_out = w.sum_out + i * K * X::W;
      const V rate = exponents(delta);
      V read = X::zero(), rate_sum = X::zero();
      for (int n = 0; n < r.K; ++n) {
        const int64_t at = n * kBlock;
        const V A = X::load(r.A + at + c), f = X::load(factors + at), h = X::load(before + at);
        const V base = select(is_near(rate * A), X::broadcast(1), X::zero());
        V R = X::load(w.R + at + c);
        R = fma(X::load(w.base + at + c), R, fma(X::load(w.next + at + c), R, X::broadcast(out[n]) * dy));
        X::store(w.R + at + c, R);
        X::store(w.next + at + c, f);
        X::store(w.base + at + c, base);
        X::store(sum_out + n * X::W, fma(dy, X::load(before + step + at), X::load(sum_out + n * X::W)));
        X::store(sum_in + n * X::W, fma(v, R, X::load(sum_in + n * X::W)));
        read = fma(X::broadcast(in[n]), R, read);
        const V through = R * h * (f + base);
        rate_sum = fma(A, through, rate_sum);
        X::store(w.dA + at + c, fma(delta, through, X::load(w.dA + at + c)));
      }
      const V x = X::load(args.x.at<const E>(r.b, t + i, r.first + c), lanes);
      const V arg = X::load(args.dt.at<const E>(r.b, t + i, r.first + c), lanes) + X::load(r.bias + c);
      const V ddt = fma(x, read, rate_sum) * sigmoid(arg);
      const V product = dy * x;
      add_exactly(product, &dD, &dD_lost);
      dD_lost += fma(dy, x, -product);
      add_exactly(ddt, &dbias, &dbias_lost);
      if (grads.dx.given()) {
        X::store(grads.dx.at<E>(r.b, t + i, r.first + c), fma(delta, read, X::load(r.skip + c) * dy), lanes);
      }
      if (grads.ddt.given()) X::store(grads.ddt.at<E>(r.b, t + i, r.first + c), ddt, lanes);
    }
    X::store(w.dD + c, dD + dD_lost);
    X::store(w.dbias + c, dbias + dbias_lost);
  }

  void sequence(const Memory& m, const Block<T>& r, const Reverse<T>& w, int64_t n, int64_t block) const {
    const Sequence at = sequence_of(args.cu_seqlens, tokens, n);
    const int64_t step = K * kBlock, spans = (at.length() + kSpan - 1) / kSpan;
    r.load_state(args.initial_state, n, r.h);
    for (int64_t span = 0; span < spans; ++span) {
      const int64_t t = at.begin + span * kSpan;
      __builtin_memcpy(w.kept + span * step, r.h, static_cast<size_t>(step) * sizeof(T));
      if (span + 1 == spans) break;
      load_span<T, E>(args, r, t, kSpan);
      scan_span<false, false, false, T>(r, kSpan, nullptr, nullptr);
    }
    r.load_state(grads.dfinal_state, n, w.R);
    clear(w.next, step);
    for (int64_t i = 0; i < step; ++i) w.base[i] = 1;
    for (int64_t span = spans; span-- > 0;) {
      const int64_t t = at.begin + span * kSpan;
      const int count = span_rows(t, at.end);
      __builtin_memcpy(r.h, w.kept + span * step, static_cast<size_t>(step) * sizeof(T));
      load_span<T, E>(args, r, t, count);
      scan_span<true, true, false, T>(r, count, w.states, w.factors);
      load_gradients(r, w, t, count);
      clear(w.dA, step);
      clear(w.dD, kBlock);
      clear(w.dbias, kBlock);
      clear(w.sum_in, count * K * X::W);
      clear(w.sum_out, count * K * X::W);
      for (int c = 0; c < r.width; c += X::W) walk_down(r, w, t, count, c);
      for (int64_t i = 0; i < count * K; ++i) {
        const int64_t to = (block * rows + r.b * tokens + t) * K + i;
        m.in[to] = sum(X::load(w.sum_in + i * X::W));
        m.out[to] = sum(X::load(w.sum_out + i * X::W));
      }
      for (int64_t i = 0; i < step; ++i) w.total[i] += static_cast<double>(w.dA[i]);
      for (int64_t i = 0; i < kBlock; ++i) {
        w.total[step + i] += static_cast<double>(w.dD[i]);
        w.total[step + kBlock + i] += static_cast<double>(w.dbias[i]);
      }
    }
    if (!grads.dinitial_state.given()) return;
    for (int64_t i = 0; i < step; i += X::W) {  // exp(g_1) R_1
      X::store(w.R + i, fma(X::load(w.base + i), X::load(w.R + i), X::load(w.next + i) * X::load(w.R + i)));
    }
    r.store_state(grads.dinitial_state, n, w.R);
  }

  void run() const {
    Arena arena(launch.workspace);
    const Memory m = cut(arena, launch.workers);
    parallel(launch, runs * blocks.count, [&](int64_t task, int worker) {
      Arena own(m.workers + worker * m.worker_bytes);
      Block<T> r = Block<T>::cut(own, K);
      const Reverse<T> w = Reverse<T>::cut(own, K, tokens);
      const int64_t part = task / blocks.count, block = task % blocks.count;
      r.template begin<E>(args, blocks, block);
      clear(w.total, (K + 2) * kBlock);
      for (int64_t n = part * N / runs; n < (part + 1) * N / runs; ++n) {
        r.b = sequence_of(args.cu_seqlens, tokens, n).b;
        sequence(m, r, w, n, block);
      }
      __builtin_memcpy(m.totals + task * (K + 2) * kBlock, w.total, static_cast<size_t>((K + 2) * kBlock) * sizeof(double));
    });
    if (grads.dB.given() || grads.dC.given()) {
      constexpr int64_t kRows = 64;
      parallel(launch, (rows + kRows - 1) / kRows, [&](int64_t task, int) {
        for (int64_t row = task * kRows; row < rows && row < (task + 1) * kRows; ++row) {
          if (grads.dB.given()) add_blocks(grouped(grads.dB), row, m.in);
          if (grads.dC.given()) add_blocks(grouped(grads.dC), row, m.out);
        }
      });
    }
    parallel(launch, blocks.count, [&](int64_t block, int) { add_runs(m, block); });
  }

  // dB or dC of one token: the blocks of each group in order.
  void add_blocks(const View& view, int64_t row, const T* parts) const {
    for (int64_t g = 0; g < view.size[2]; ++g) {
      E* to = view.at<E>(row / tokens, row % tokens, g);
      for (int n = 0; n < K; n += X::W) {
        const int lanes = static_cast<int>(K) - n;
        V total = X::zero();
        for (int64_t block = g * blocks.in_group; block < (g + 1) * blocks.in_group; ++block) {
          total += X::load(parts + (block * rows + row) * K + n, lanes);
        }
        X::store(to + n, total, lanes);
      }
    }
  }

  void add_runs(const Memory& m, int64_t block) const {
    const int64_t step = (K + 2) * kBlock;
    const auto total = [&](int64_t i) {
      double sum_of = 0;
      for (int64_t part = 0; part < runs; ++part) sum_of += m.totals[(part * blocks.count + block) * step + i];
      return sum_of;
    };
    const auto put = [](const View& view, int64_t at, double x) {
      if (view.given()) store_f64(view.data, view.dtype, at, x);
    };
    for (int c = 0; c < blocks.width(block); ++c) {
      const int64_t e = blocks.first(block) + c;
      for (int64_t n = 0; grads.dA.given() && n < K; ++n) put(grads.dA, e * grads.dA.stride[0] + n, total(n * kBlock + c));
      put(grads.dD, e * grads.dD.stride[0], total(K * kBlock + c));
      put(grads.ddt_bias, e * grads.ddt_bias.stride[0], total((K + 1) * kBlock + c));
    }
  }
};

}  // namespace

void mamba_selective_scan_forward(const SelectiveScanArgs& args, const SelectiveScanOut& out, const Launch& launch) {
  by_dtype(args.x.dtype, [&]<class T, class E>() { Forward<T, E>::run(args, out, launch); });
}
void mamba_selective_scan_backward(const SelectiveScanArgs& args, const SelectiveScanOut&, const SelectiveScanGrads& grads,
                                   const Launch& launch) {
  by_dtype(args.x.dtype, [&]<class T, class E>() { Backward<T, E>(args, grads, launch).run(); });
}
int64_t mamba_selective_scan_workspace(const SelectiveScanArgs& args, Pass pass, int workers) {
  return by_dtype(args.x.dtype, [&]<class T, class E>() -> int64_t {
    if (pass == Pass::forward) return workers * Forward<T, E>::worker_bytes(args.A.size[1]);
    const SelectiveScanGrads grads;
    const Launch launch;
    Arena arena;
    Backward<T, E>(args, grads, launch).cut(arena, workers);
    return arena.used();
  });
}

}  // namespace linnet::LINNET_ISA
