// fem_read for one instruction set; prior softmax here, the others in fem_scan_cpu.cc.
//
// Softmax: the values are widened once, [vc | x], and read by the tile engine of softmax as one read of width 2 V; then mean,
// free energy and gates, row by row. Channels with beta v >= -4 take x = expm1(beta v) / beta and F = log1p(beta y) / beta,
// which keeps its digits as beta -> 0; the others x = exp(beta v - M), F = (M + log z) / beta, M the middle of the channel's
// range. Without a cap a channel may span more than exp() can hold (kRange): its head is then read row by row in double, as the
// reference does.
//
// Backward: the backward of softmax on [dmu | d2], d2 the gradient of the widened read, with delta = sum_j (dmu mu + dF / beta)
// in closed form; dbeta needs no third read, since sum_i qpost v = sum_i v (second part of dv) / dF.
#include "fem_rows.h"

namespace linnet::LINNET_ISA {
namespace {

constexpr double kRange = 80, kSmall = -4, kLarge = 40;
constexpr int64_t kTokens = 16;

enum class Form : int32_t { small, log, wide };

template <class T>
struct Channel {
  T beta, limit, shift;
  Form form;
};

template <class T>
inline constexpr Dtype kDtype = sizeof(T) == 8 ? Dtype::f64 : Dtype::f32;

template <class T>
struct Widened {
  int64_t B, S, H, V, ldv;
  Channel<T>* channels;  // [B, H, V]
  bool* wide;            // [B, H]: a channel is
  View values, read, dread, dvalues, bias, lse, delta;
  double* dbeta;  // [B, H, V]
  char *workers, *slow;
  int64_t worker_bytes, slow_bytes, bytes;

  Widened(char* base, const FemReadArgs& args, Pass pass, int worker_count) {
    Arena arena(base);
    B = args.v.size[0];
    S = args.v.size[1];
    H = args.v.size[2];
    V = args.v.size[3];
    ldv = round_up<T>(V);
    const bool backward = pass == Pass::backward;
    const auto dense = [&](int64_t width) {
      const int64_t size[4] = {B, S, H, width};
      return View::dense(arena.take<T>(B * S * H * width), kDtype<T>, size, 4);
    };
    const auto numbers = [&] {
      const int64_t size[3] = {B, S, H};
      return View::dense(arena.take<T>(B * S * H), kDtype<T>, size, 3);
    };
    channels = arena.take<Channel<T>>(B * H * V);
    wide = arena.take<bool>(B * H);
    values = dense(2 * V);
    if (!backward) read = dense(2 * V);
    if (backward) {
      dread = dense(2 * V);
      dvalues = dense(2 * V);
      delta = numbers();
      dbeta = arena.take<double>(B * H * V);
    }
    lse = numbers();
    if (args.key_mask.given()) {  // as a bias, the same for every head and query
      const int64_t size[2] = {B, S};
      bias = View::dense(arena.take<T>(B * S), kDtype<T>, size, 2);
      bias.rank = 4;
      bias.size[1] = H;
      bias.size[2] = bias.size[3] = S;
      bias.stride[0] = S;
      bias.stride[1] = bias.stride[2] = 0;
      bias.stride[3] = 1;
    }
    Arena one;
    rows_of(one);
    worker_bytes = one.used();
    workers = arena.take<char>(worker_bytes * worker_count);
    slow_bytes = unbounded(args) ? ref::fem_read_workspace(head_of(args, 0, 0), pass, 1) : 0;
    slow = arena.take<char>(slow_bytes);
    bytes = arena.used();
  }
  static bool unbounded(const FemReadArgs& args) { return 2 * fem_cap(args.cap) > kRange; }
  static View slice(const View& x, int64_t b, int64_t h) {  // [B, T, H, ..] at (b, h)
    View part = x;
    if (!x.given()) return part;
    part.size[0] = part.size[2] = 1;
    part.data = static_cast<char*>(x.data) + (b * x.stride[0] + h * x.stride[2]) * dtype_size(x.dtype);
    return part;
  }
  static FemReadArgs head_of(const FemReadArgs& args, int64_t b, int64_t h) {
    FemReadArgs one = args;
    for (View FemReadArgs::*x : {&FemReadArgs::v, &FemReadArgs::lam, &FemReadArgs::q, &FemReadArgs::k, &FemReadArgs::g}) {
      one.*x = slice(args.*x, b, h);
    }
    one.beta.size[0] = 1;
    one.beta.data = static_cast<char*>(args.beta.data) + h * args.beta.stride[0] * dtype_size(args.beta.dtype);
    if (args.key_mask.given()) {
      one.key_mask.size[0] = 1;
      one.key_mask.data = static_cast<char*>(args.key_mask.data) + b * args.key_mask.stride[0];
    }
    return one;
  }

  struct Rows {
    T *v, *mu, *free, *dmu, *dfree, *wide, *more;
    FemGates<T> gates;
  };
  Rows rows_of(Arena& arena) const {
    T* p[7];
    for (int i = 0; i < 7; ++i) p[i] = arena.take<T>(2 * ldv);
    return {p[0], p[1], p[2], p[3], p[4], p[5], p[6], FemGates<T>(arena, V)};
  }
  Rows rows(int worker) const {
    Arena own(workers + worker * worker_bytes);
    return rows_of(own);
  }
  Problem problem(const FemReadArgs& args) const {
    Problem p;
    p.q = args.q;
    p.k = args.k;
    p.v = values;
    p.bias = bias;
    p.mask = make_mask(args.causal, {}, 0, 0);
    p.scale = 1 / __builtin_sqrt(static_cast<double>(args.q.size[3]));
    p.lse = lse;
    return p;
  }
};

// The channels of one head: how each is widened.
template <class T>
void choose_forms(const FemReadArgs& args, const Widened<T>& m, int64_t b, int64_t h, T* row) {
  Channel<T>* const channels = m.channels + (b * m.H + h) * m.V;
  T low[256], high[256];
  m.wide[b * m.H + h] = false;
  for (int64_t j0 = 0; j0 < m.V; j0 += 256) {
    const int64_t count = smaller(256, m.V - j0);
    for (int64_t j = 0; j < count; ++j) {
      Channel<T>& channel = channels[j0 + j];
      channel.beta =
          static_cast<T>(load_f64(args.beta.data, args.beta.dtype, h * args.beta.stride[0] + (j0 + j) * args.beta.stride[1]));
      channel.limit = static_cast<T>(fem_cap(args.cap) / static_cast<double>(channel.beta));
      low[j] = kInfinity<T>;
      high[j] = -kInfinity<T>;
    }
    for (int64_t t = 0; t < m.S; ++t) {
      if (!fem_present(args.key_mask, b, t)) continue;
      fem_load(args.v, fem_row(args.v, b, t, h) + j0, count, row);
      for (int64_t j = 0; j < count; ++j) {
        low[j] = row[j] < low[j] ? row[j] : low[j];
        high[j] = row[j] > high[j] ? row[j] : high[j];
      }
    }
    for (int64_t j = 0; j < count; ++j) {
      Channel<T>& channel = channels[j0 + j];
      const T lowest = channel.beta * (low[j] > -channel.limit ? low[j] : -channel.limit);
      const T highest_of = channel.beta * (high[j] < channel.limit ? high[j] : channel.limit);
      channel.form = lowest >= T(kSmall) && highest_of <= T(kLarge) ? Form::small
                     : highest_of - lowest <= T(kRange)             ? Form::log
                                                                    : Form::wide;
      const T middle = (lowest + highest_of) / 2;
      channel.shift = channel.form == Form::log && middle - middle == 0 ? middle : T(0);
      m.wide[b * m.H + h] = m.wide[b * m.H + h] || channel.form == Form::wide;
    }
  }
}

// f(b, t, worker) for every token.
template <class F>
void for_tokens(const Launch& launch, int64_t B, int64_t S, int64_t elements, const F& f) {
  const int64_t blocks = divide_up(S, kTokens);
  run_tasks(launch, B * blocks, static_cast<double>(elements) * 30, [&](int64_t task, int worker) {
    const int64_t b = task / blocks, begin = task % blocks * kTokens, end = smaller(begin + kTokens, S);
    for (int64_t t = begin; t < end; ++t) f(b, t, worker);
  });
}

// What the rows of one token need of its channels, one array per property, so that loops over channels are vectors.
template <class T>
struct Lanes {
  using X = Vec<T>;
  using V = typename X::V;
  V beta, limit, shift;
  typename X::M small;
  LINNET_INLINE Lanes(const Channel<T>* channels, int64_t count) {
    T b[X::W], l[X::W], s[X::W], f[X::W];
    for (int i = 0; i < X::W; ++i) {
      const bool inside = i < count;
      b[i] = inside ? channels[i].beta : T(1);
      l[i] = inside ? channels[i].limit : T(1);
      s[i] = inside ? channels[i].shift : T(0);
      f[i] = inside && channels[i].form == Form::small ? T(1) : T(0);
    }
    beta = X::load(b);
    limit = X::load(l);
    shift = X::load(s);
    small = gt(X::load(f), X::zero());
  }
  LINNET_INLINE V clip(V v) const { return max(-limit, min(limit, v)); }
  LINNET_INLINE V widened(V vc) const {
    const V x = beta * vc;
    return select(small, expm1(x) / beta, exp(x - shift));
  }
};

template <class T>
void widen_values(const FemReadArgs& args, const Widened<T>& m, const Launch& launch) {
  using X = Vec<T>;
  run_tasks(launch, m.B * m.H, static_cast<double>(args.v.elements()) * 4,
            [&](int64_t task, int worker) { choose_forms<T>(args, m, task / m.H, task % m.H, m.rows(worker).v); });
  for_tokens(launch, m.B, m.S, args.v.elements(), [&](int64_t b, int64_t t, int worker) {
    const typename Widened<T>::Rows rows = m.rows(worker);
    const bool there = fem_present(args.key_mask, b, t);
    if (args.key_mask.given()) static_cast<T*>(m.bias.data)[b * m.S + t] = there ? T(0) : -kInfinity<T>;
    for (int64_t h = 0; h < m.H; ++h) {
      T* const to = static_cast<T*>(m.values.data) + fem_row(m.values, b, t, h);
      if (there) fem_load(args.v, fem_row(args.v, b, t, h), m.V, rows.v);
      for (int64_t c = 0; c < m.V; c += X::W) {
        const int count = static_cast<int>(m.V - c);
        const Lanes<T> lanes(m.channels + (b * m.H + h) * m.V + c, count);
        const typename X::V vc = there ? lanes.clip(X::load(rows.v + c)) : X::zero();
        X::store(to + c, vc, count);
        X::store(to + m.V + c, there ? lanes.widened(vc) : X::zero(), count);
      }
    }
  });
}

template <class T>
void forward(const FemReadArgs& args, const FemReadOut& out, const Launch& launch) {
  using X = Vec<T>;
  using V = typename X::V;
  const Widened<T> m(launch.workspace, args, Pass::forward, launch.workers);
  Launch rest = launch;
  rest.workspace += m.bytes;
  widen_values(args, m, launch);
  Problem p = m.problem(args);
  p.out = m.read;
  attend(p, rest);
  for_tokens(launch, m.B, m.S, args.v.elements(), [&](int64_t b, int64_t t, int worker) {
    const typename Widened<T>::Rows rows = m.rows(worker);
    for (int64_t h = 0; h < m.H; ++h) {
      const T* const from = static_cast<const T*>(m.read.data) + fem_row(m.read, b, t, h);
      const T lse = static_cast<const T*>(m.lse.data)[fem_row(m.lse, b, t, h)];
      const bool empty = lse == -kInfinity<T>;
      if (out.norm.given()) static_cast<T*>(out.norm.data)[fem_row(out.norm, b, t, h)] = lse;
      for (int64_t c = 0; c < m.V; c += X::W) {
        const int count = static_cast<int>(m.V - c);
        const Lanes<T> lanes(m.channels + (b * m.H + h) * m.V + c, count);
        const V read = X::load(from + m.V + c, count),
                least = X::broadcast(static_cast<T>(sizeof(T) == 8 ? 0x1p-1022 : 0x1p-126));
        const V energy = select(lanes.small, log1p(lanes.beta * read), lanes.shift + log(max(read, least))) / lanes.beta;
        X::store(rows.mu + c, empty ? X::zero() : X::load(from + c, count));
        X::store(rows.free + c, empty ? X::zero() : energy);
      }
      rows.gates.forward(args, out, b, t, h, m.V, rows.mu, rows.free);
    }
  });
  for (int64_t i = 0; i < m.B * m.H; ++i) {
    if (!m.wide[i]) continue;
    const int64_t b = i / m.H, h = i % m.H;
    Launch slow = launch;
    slow.workspace = m.slow;
    FemReadOut one = out;
    for (View FemReadOut::*x : {&FemReadOut::out, &FemReadOut::mu, &FemReadOut::free, &FemReadOut::norm}) {
      one.*x = Widened<T>::slice(out.*x, b, h);
    }
    ref::fem_read_forward(Widened<T>::head_of(args, b, h), one, slow);
  }
}

template <class T>
void backward(const FemReadArgs& args, const FemReadOut& out, const FemReadGrads& grads, const Launch& launch) {
  using X = Vec<T>;
  using V = typename X::V;
  const Widened<T> m(launch.workspace, args, Pass::backward, launch.workers);
  Launch rest = launch;
  rest.workspace += m.bytes;
  widen_values(args, m, launch);
  // Gradients of the widened read, and -delta.
  for_tokens(launch, m.B, m.S, 2 * args.v.elements(), [&](int64_t b, int64_t t, int worker) {
    const typename Widened<T>::Rows rows = m.rows(worker);
    for (int64_t h = 0; h < m.H; ++h) {
      const T lse = static_cast<const T*>(out.norm.data)[fem_row(out.norm, b, t, h)];
      const bool empty = lse == -kInfinity<T>;
      static_cast<T*>(m.lse.data)[fem_row(m.lse, b, t, h)] = lse;
      fem_load(out.mu, fem_row(out.mu, b, t, h), m.V, rows.mu);
      fem_load(out.free, fem_row(out.free, b, t, h), m.V, rows.free);
      rows.gates.backward(args, grads, b, t, h, m.V, rows.mu, rows.free, rows.dmu, rows.dfree);
      T* const to = static_cast<T*>(m.dread.data) + fem_row(m.dread, b, t, h);
      V through = X::zero();
      for (int64_t c = 0; c < m.V; c += X::W) {
        const int count = static_cast<int>(m.V - c);
        const Lanes<T> lanes(m.channels + (b * m.H + h) * m.V + c, count);
        const V dmu = X::load(rows.dmu + c, count), dfree = X::load(rows.dfree + c, count),
                x = lanes.beta * X::load(rows.free + c, count);
        const V inner = exp(min(X::broadcast(T(kRange)), lanes.shift - x));  // 1/z, or 1/z e^M
        const V d2 = select(lanes.small, dfree * inner, dfree / lanes.beta * inner);
        const V share = select(lanes.small, d2 * (expm1(x) / lanes.beta), dfree / lanes.beta);
        X::store(to + c, empty ? X::zero() : dmu, count);
        X::store(to + m.V + c, empty ? X::zero() : d2, count);
        through = through + select(X::prefix(count), fma(dmu, X::load(rows.mu + c, count), share), X::zero());
      }
      static_cast<T*>(m.delta.data)[fem_row(m.delta, b, t, h)] = empty ? T(0) : -sum(through);
    }
  });
  Gradients g;
  g.dout = m.dread;
  g.dlse = m.delta;
  g.dq = grads.dq;
  g.dk = grads.dk;
  g.dv = m.dvalues;
  g.lse = m.lse;
  attend_backward(m.problem(args), g, rest);
  // dv, and dbeta of each head.
  run_tasks(launch, m.B * m.H, static_cast<double>(args.v.elements()) * 30, [&](int64_t task, int worker) {
    const int64_t b = task / m.H, h = task % m.H;
    const typename Widened<T>::Rows rows = m.rows(worker);
    double* const dbeta = m.dbeta + task * m.V;
    const Channel<T>* const channels = m.channels + task * m.V;
    for (int64_t j = 0; j < m.V; ++j) dbeta[j] = 0;
    for (int64_t t = 0; t < m.S; ++t) {
      const bool there = fem_present(args.key_mask, b, t);
      const T *const x = static_cast<const T*>(m.values.data) + fem_row(m.values, b, t, h), *const d =
                                                                                                static_cast<const T*>(
                                                                                                    m.dvalues.data) +
                                                                                                fem_row(m.dvalues, b, t, h);
      if (there) fem_load(args.v, fem_row(args.v, b, t, h), m.V, rows.v);
      fem_load(out.mu, fem_row(out.mu, b, t, h), m.V, rows.mu);
      fem_load(out.free, fem_row(out.free, b, t, h), m.V, rows.free);
      rows.gates.slopes(args, grads, b, t, h, m.V, rows.dfree);
      for (int64_t c = 0; c < m.V; c += X::W) {
        const int count = static_cast<int>(m.V - c);
        const Lanes<T> lanes(channels + c, count);
        const V vc = X::load(x + c, count), wide = X::load(x + m.V + c, count), v = there ? X::load(rows.v + c) : X::zero();
        const V slope = select(lanes.small, fma(lanes.beta, wide, X::broadcast(1)), lanes.beta * wide);
        const V second = there ? slope * X::load(d + m.V + c, count) : X::zero();
        const V whole = there ? X::load(d + c, count) + second : X::zero();
        const auto inside = le(abs(v), lanes.limit);
        X::store(rows.wide + c, select(inside, whole, X::zero()));
        // beta dbeta
        X::store(rows.more + c, vc * second - X::load(rows.dfree + c, count) * X::load(rows.free + c, count) -
                                    select(inside, X::zero(), whole * vc));
      }
      for (int64_t j = 0; j < m.V; ++j) dbeta[j] += static_cast<double>(rows.more[j]) / static_cast<double>(channels[j].beta);
      if (grads.dv.given()) fem_store(grads.dv, fem_row(grads.dv, b, t, h), m.V, rows.wide);
    }
  });
  for (int64_t i = 0; i < m.B * m.H; ++i) {
    if (!m.wide[i]) continue;
    const int64_t b = i / m.H, h = i % m.H;
    Launch slow = launch;
    slow.workspace = m.slow;
    FemReadGrads one = grads;
    for (View FemReadGrads::*x : {&FemReadGrads::dout, &FemReadGrads::dv, &FemReadGrads::dlam, &FemReadGrads::dq,
                                  &FemReadGrads::dk, &FemReadGrads::dg}) {
      one.*x = Widened<T>::slice(grads.*x, b, h);
    }
    const int64_t size[2] = {1, m.V};
    one.dbeta = View::dense(m.dbeta + i * m.V, Dtype::f64, size, 2);
    ref::fem_read_backward(Widened<T>::head_of(args, b, h), FemReadOut(), one, slow);
  }
  for (int64_t i = 0; grads.dbeta.given() && i < m.H * m.V; ++i) {
    double total = 0;
    for (int64_t b = 0; b < m.B; ++b) total += m.dbeta[b * m.H * m.V + i];
    store_f64(grads.dbeta.data, grads.dbeta.dtype, i / m.V * grads.dbeta.stride[0] + i % m.V * grads.dbeta.stride[1], total);
  }
}

}  // namespace

int64_t fem_read_workspace(const FemReadArgs& args, Pass pass, int workers) {
  if (args.prior != FemPrior::softmax) return fem_scan_workspace(args, pass, workers);
  const auto bytes = [&]<class T>() {
    const Widened<T> m(nullptr, args, pass, workers);
    const Problem p = m.problem(args);
    return m.bytes + (pass == Pass::forward ? attend_workspace(p, workers) : attend_backward_workspace(p, workers));
  };
  return args.v.dtype == Dtype::f64 ? bytes.template operator()<double>() : bytes.template operator()<float>();
}

void fem_read_forward(const FemReadArgs& args, const FemReadOut& out, const Launch& launch) {
  if (args.prior != FemPrior::softmax) return fem_scan_forward(args, out, launch);
  if (args.v.dtype == Dtype::f64) return forward<double>(args, out, launch);
  forward<float>(args, out, launch);
}

void fem_read_backward(const FemReadArgs& args, const FemReadOut& out, const FemReadGrads& grads, const Launch& launch) {
  if (args.prior != FemPrior::softmax) return fem_scan_backward(args, grads, launch);
  if (args.v.dtype == Dtype::f64) return backward<double>(args, out, grads, launch);
  backward<float>(args, out, grads, launch);
}

}  // namespace linnet::LINNET_ISA
