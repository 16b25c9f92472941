// distill on the vector units: log features by products in double (their rounding is what the exponentials magnify), rounded
// once; sums by the kernels of `linear` (map exp, normalised, eps 0), which keep each feature in units of its running maximum
// and cut chunks where that grows; gradients of the features through the same products back.
#include "core/half.h"
#include "distill.h"
#include "mechanisms/linear/linear.h"
#include "mechanisms/recurrence/cpu/walk.h"
#include "mechanisms/shared/mapped.h"
#include "simd/gemm.h"
#include "simd/math.h"
#include "simd/tile.h"

namespace linnet::LINNET_ISA {
namespace {

template <class T>
inline constexpr Dtype kDtype = sizeof(T) == 8 ? Dtype::f64 : Dtype::f32;
template <class Body>
LINNET_INLINE auto by_type(Dtype dtype, const Body& body) {
  return dtype == Dtype::f64 ? body.template operator()<double>() : body.template operator()<float>();
}
LINNET_INLINE double entry(const View& view, int64_t i, int64_t j, int64_t k = 0) {
  return load_f64(view.data, view.dtype, i * view.stride[0] + j * view.stride[1] + k * view.stride[2]);
}

struct Shape {
  int64_t B, T, H, K, V, M, ldk, ldm;
  double root, factor;
};
template <class Args>
Shape shape_of(const Args& args) {
  Shape s;
  s.B = args.q.size[0];
  s.T = args.q.size[1];
  s.H = args.q.size[2];
  s.K = args.q.size[3];
  s.V = args.v.size[3];
  s.M = args.z.size[1];
  s.ldk = round_up<double>(s.K);
  s.ldm = round_up<double>(s.M);
  s.root = __builtin_sqrt(__builtin_sqrt(static_cast<double>(s.K)));
  s.factor = distill_scale(args.scale, s.K);
  return s;
}

// z both ways and (1/2) log(alpha / M), in double.
struct Features {
  double *in, *back, *bias;  // [H, K, ldm], [H, M, ldk], [H, ldm]
};
Features cut_features(Arena& arena, const Shape& s) {
  Features f;
  f.in = arena.take<double>(s.H * s.K * s.ldm);
  f.back = arena.take<double>(s.H * s.M * s.ldk);
  f.bias = arena.take<double>(s.H * s.ldm);
  return f;
}
template <class Args>
void load_features(const Args& args, const Shape& s, const Features& f) {
  for (int64_t i = 0; i < s.H * s.K * s.ldm; ++i) f.in[i] = 0;
  for (int64_t i = 0; i < s.H * s.M * s.ldk; ++i) f.back[i] = 0;
  for (int64_t h = 0; h < s.H; ++h) {
    for (int64_t m = 0; m < s.M; ++m) {
      f.bias[h * s.ldm + m] = 0.5 * __builtin_log(entry(args.alpha, h, m) / static_cast<double>(s.M));
      for (int64_t c = 0; c < s.K; ++c) {
        f.in[(h * s.K + c) * s.ldm + m] = f.back[(h * s.M + m) * s.ldk + c] = entry(args.z, h, m, c) / s.root;
      }
    }
  }
}
// l [rows, ldm] of rows x [rows, ldk] of head h
void log_features(const Shape& s, const Features& f, int64_t h, bool key, int rows, const double* x, const double* logw,
                  double* l) {
  gemm<double>(rows, static_cast<int>(s.M), static_cast<int>(s.K), as_is(x, s.ldk), f.in + h * s.K * s.ldm, s.ldm, l, s.ldm,
               Store{});
  for (int r = 0; r < rows; ++r) {
    double less = 0;
    for (int64_t c = 0; key && c < s.K; ++c) less += x[r * s.ldk + c] * x[r * s.ldk + c];
    less = key ? less / (2 * s.root * s.root) - (logw == nullptr ? 0 : logw[r]) : 0;
    const double factor = key ? 1 : s.factor;
    for (int64_t m = 0; m < s.M; ++m) l[r * s.ldm + m] = factor * l[r * s.ldm + m] + f.bias[h * s.ldm + m] - less;
  }
}

template <class T>
struct Work {
  Features f;
  T *lq, *lk, *v, *o, *den, *v0;  // [B, T, H, M] twice, [B, T, H, V] twice, [B, T, H], [B, H, V]
  T *dlq, *dlk, *dv;
  char* tiles;  // per worker: x [C, ldk], l [C, ldm], one row of V
  int64_t tile_bytes;
};
template <class T>
Work<T> cut(Arena& arena, const DistillArgs& args, const Shape& s, Pass pass, int workers) {
  Work<T> r{};
  const int64_t rows = s.B * s.T * s.H;
  r.f = cut_features(arena, s);
  r.lq = arena.take<T>(rows * s.M);
  r.lk = arena.take<T>(rows * s.M);
  r.v = arena.take<T>(rows * s.V);
  r.o = arena.take<T>(rows * s.V);
  r.den = arena.take<T>(rows);
  r.v0 = arena.take<T>(s.B * s.H * s.V);
  if (pass == Pass::backward) {
    r.dlq = arena.take<T>(rows * s.M);
    r.dlk = arena.take<T>(rows * s.M);
    r.dv = arena.take<T>(rows * s.V);
  }
  Arena tile;
  tile.take<double>(kChunk * s.ldk);
  tile.take<double>(kChunk * s.ldm);
  tile.take<double>(s.M * s.ldk);
  tile.take<T>(round_up<T>(s.V));
  r.tile_bytes = tile.used();
  r.tiles = arena.take<char>(workers * r.tile_bytes);
  (void)args;
  return r;
}
struct Tile {
  double *x, *l, *dz;
};
template <class T>
Tile tile_of(const Work<T>& r, const Shape& s, int worker) {
  Arena arena(r.tiles + worker * r.tile_bytes);
  Tile t;
  t.x = arena.take<double>(kChunk * s.ldk);
  t.l = arena.take<double>(kChunk * s.ldm);
  t.dz = arena.take<double>(s.M * s.ldk);
  return t;
}

template <class T>
LinearArgs linear_args(const DistillArgs& args, const Shape& s, const Work<T>& r) {
  LinearArgs linear;
  linear.q = View::dense(r.lq, kDtype<T>, {s.B, s.T, s.H, s.M});
  linear.k = View::dense(r.lk, kDtype<T>, {s.B, s.T, s.H, s.M});
  linear.v = View::dense(r.v, kDtype<T>, {s.B, s.T, s.H, s.V});
  linear.key_mask = args.key_mask;
  linear.map = FeatureMap::exp;
  linear.causal = args.causal;
  linear.normalize = true;
  linear.scale = 1;
  linear.eps = 0;
  return linear;
}
template <class T>
LinearOut linear_out(const Shape& s, const Work<T>& r) {
  LinearOut out;
  out.out = View::dense(r.o, kDtype<T>, {s.B, s.T, s.H, s.V});
  out.den = View::dense(r.den, kDtype<T>, {s.B, s.T, s.H});
  return out;
}

LINNET_INLINE bool masked(const View& mask, int64_t b, int64_t t) { return mask.given() && *mask.at<const uint8_t>(b, t) == 0; }
LINNET_INLINE int64_t row_of(const View& view, int64_t b, int64_t t, int64_t h) {
  return b * view.stride[0] + t * view.stride[1] + h * view.stride[2];
}

// Calls body(b, h, first token, rows, worker) for every chunk.
template <class Body>
void each_chunk(const Shape& s, const Launch& launch, const Body& body) {
  const int64_t chunks = (s.T + kChunk - 1) / kChunk;
  parallel(launch, s.B * s.H * chunks, [&](int64_t task, int worker) {
    const int64_t at = task % chunks * kChunk;
    body(task / chunks / s.H, task / chunks % s.H, at, chunk_rows(at, s.T), worker);
  });
}

template <class T>
void attend(const DistillArgs& args, const Shape& s, const Work<T>& r, const Launch& launch, const Launch& rest) {
  load_features(args, s, r.f);
  // v0, the first value that takes part, is taken off the values and added to the results: see shared/mapped.h.
  parallel(launch, s.B * s.H, [&](int64_t task, int) {
    const int64_t b = task / s.H, h = task % s.H;
    T* v0 = r.v0 + task * s.V;
    for (int64_t j = 0; j < s.V; ++j) v0[j] = 0;
    int64_t t = 0;
    while (t < s.T && masked(args.key_mask, b, t)) ++t;
    for (int64_t j = 0; t < s.T && j < s.V; ++j) {
      const T x = static_cast<T>(load_f64(args.v.data, args.v.dtype, row_of(args.v, b, t, h) + j));
      v0[j] = x - x == 0 ? x : T(0);
    }
  });
  each_chunk(s, launch, [&](int64_t b, int64_t h, int64_t at, int rows, int worker) {
    const Tile tile = tile_of(r, s, worker);
    for (const bool key : {false, true}) {
      const View& x = key ? args.k : args.q;
      double logw[kChunk];
      for (int i = 0; i < rows; ++i) {
        logw[i] = key && args.key_logw.given()
                      ? load_f64(args.key_logw.data, args.key_logw.dtype, row_of(args.key_logw, b, at + i, h))
                      : 0;
      }
      load_rows<double>(x, row_of(x, b, at, h), x.stride[1], rows, static_cast<int>(s.K), tile.x, s.ldk);
      log_features(s, r.f, h, key, rows, tile.x, logw, tile.l);
      for (int i = 0; i < rows; ++i) {
        T* to = (key ? r.lk : r.lq) + ((b * s.T + at + i) * s.H + h) * s.M;
        for (int64_t m = 0; m < s.M; ++m) to[m] = static_cast<T>(tile.l[i * s.ldm + m]);
      }
    }
    const T* v0 = r.v0 + (b * s.H + h) * s.V;
    for (int i = 0; i < rows; ++i) {
      T* to = r.v + ((b * s.T + at + i) * s.H + h) * s.V;
      const int64_t from = row_of(args.v, b, at + i, h);
      for (int64_t j = 0; j < s.V; ++j) to[j] = static_cast<T>(load_f64(args.v.data, args.v.dtype, from + j)) - v0[j];
    }
  });
  linear_forward(linear_args(args, s, r), linear_out(s, r), rest);
}

}  // namespace

void distill_forward(const DistillArgs& args, const DistillOut& out, const Launch& launch) {
  by_type(args.q.dtype, [&]<class T>() {
    const Shape s = shape_of(args);
    Arena arena(launch.workspace);
    const Work<T> r = cut<T>(arena, args, s, Pass::forward, launch.workers);
    attend(args, s, r, launch, after(launch, arena.used()));
    each_chunk(s, launch, [&](int64_t b, int64_t h, int64_t at, int rows, int) {
      const T* v0 = r.v0 + (b * s.H + h) * s.V;
      for (int i = 0; i < rows; ++i) {
        const int64_t row = (b * s.T + at + i) * s.H + h, to = row_of(out.out, b, at + i, h);
        const bool seen = r.den[row] != static_cast<T>(-__builtin_inf());
        for (int64_t j = 0; j < s.V; ++j) {
          store_f64(out.out.data, out.out.dtype, to + j, seen ? static_cast<double>(r.o[row * s.V + j] + v0[j]) : 0);
        }
      }
    });
    if (!distill_wants_losses(out)) return;
    const int64_t each = distill_loss_scratch(args);
    double* scratch = reinterpret_cast<double*>(launch.workspace);
    parallel(launch, s.H, [&](int64_t h, int worker) { distill_losses(args, out, h, scratch + worker * each); });
  });
}

void distill_backward(const DistillArgs& args, const DistillOut&, const DistillGrads& grads, const Launch& launch) {
  // In double whatever the type: dz and dalpha are sums of terms that nearly cancel, divided by alpha.
  by_type(Dtype::f64, [&]<class T>() {
    const Shape s = shape_of(args);
    Arena arena(launch.workspace);
    const Work<T> r = cut<T>(arena, args, s, Pass::backward, launch.workers);
    T* dout = arena.take<T>(s.B * s.T * s.H * s.V);
    const Launch rest = after(launch, arena.used());
    attend(args, s, r, launch, rest);
    LinearGrads inner;
    if (grads.dout.given()) {
      each_chunk(s, launch, [&](int64_t b, int64_t h, int64_t at, int rows, int) {
        for (int i = 0; i < rows; ++i) {
          T* to = dout + ((b * s.T + at + i) * s.H + h) * s.V;
          const int64_t from = row_of(grads.dout, b, at + i, h);
          for (int64_t j = 0; j < s.V; ++j) to[j] = static_cast<T>(load_f64(grads.dout.data, grads.dout.dtype, from + j));
        }
      });
      inner.dout = View::dense(dout, kDtype<T>, {s.B, s.T, s.H, s.V});
    }
    inner.dq = View::dense(r.dlq, kDtype<T>, {s.B, s.T, s.H, s.M});
    inner.dk = View::dense(r.dlk, kDtype<T>, {s.B, s.T, s.H, s.M});
    inner.dv = View::dense(r.dv, kDtype<T>, {s.B, s.T, s.H, s.V});
    linear_backward(linear_args(args, s, r), linear_out(s, r), inner, rest);
    for (int64_t h = 0; h < s.H; ++h) {
      if (!distill_one_feature(args.alpha, h)) continue;
      for (int64_t i = 0; i < s.B * s.T * s.M; ++i) r.dlq[(i / s.M * s.H + h) * s.M + i % s.M] = 0;
    }
    each_chunk(s, launch, [&](int64_t b, int64_t h, int64_t at, int rows, int worker) {
      const Tile tile = tile_of(r, s, worker);
      for (const bool key : {false, true}) {
        double totals[kChunk];
        for (int i = 0; i < rows; ++i) {
          const T* from = (key ? r.dlk : r.dlq) + ((b * s.T + at + i) * s.H + h) * s.M;
          totals[i] = 0;
          for (int64_t m = 0; m < s.M; ++m) totals[i] += tile.l[i * s.ldm + m] = static_cast<double>(from[m]);
          if (key && grads.dkey_logw.given()) {
            store_f64(grads.dkey_logw.data, grads.dkey_logw.dtype, row_of(grads.dkey_logw, b, at + i, h), totals[i]);
          }
        }
        const View& dx = key ? grads.dk : grads.dq;
        if (!dx.given()) continue;
        gemm<double>(rows, static_cast<int>(s.K), static_cast<int>(s.M), as_is(static_cast<const double*>(tile.l), s.ldm),
                     r.f.back + h * s.M * s.ldk, s.ldk, tile.x, s.ldk, Store{});
        for (int i = 0; i < rows; ++i) {
          const bool out = key && masked(args.key_mask, b, at + i);
          for (int64_t c = 0; c < s.K; ++c) {
            double& d = tile.x[i * s.ldk + c];
            if (!key) {
              d *= s.factor;
            } else if (out) {
              d = 0;
            } else {
              d -= totals[i] * load_f64(args.k.data, args.k.dtype, row_of(args.k, b, at + i, h) + c) / (s.root * s.root);
            }
          }
        }
        store_rows<double>(tile.x, s.ldk, rows, static_cast<int>(s.K), dx, row_of(dx, b, at, h), dx.stride[1], nullptr);
      }
      for (int i = 0; grads.dv.given() && i < rows; ++i) {
        const int64_t to = row_of(grads.dv, b, at + i, h), from = ((b * s.T + at + i) * s.H + h) * s.V;
        for (int64_t j = 0; j < s.V; ++j) store_f64(grads.dv.data, grads.dv.dtype, to + j, static_cast<double>(r.dv[from + j]));
      }
    });
    if (!grads.dz.given() && !grads.dalpha.given()) return;
    // Sums over all rows of a head, in order, in double.
    parallel(launch, s.H, [&](int64_t h, int worker) {
      const Tile tile = tile_of(r, s, worker);
      for (int64_t i = 0; i < s.M * s.ldk; ++i) tile.dz[i] = 0;
      for (int64_t m = 0; grads.dalpha.given() && m < s.M; ++m) {
        double sum = 0;
        for (int64_t i = 0; i < s.B * s.T; ++i) {
          sum += static_cast<double>(r.dlq[(i * s.H + h) * s.M + m]) + static_cast<double>(r.dlk[(i * s.H + h) * s.M + m]);
        }
        store_f64(grads.dalpha.data, grads.dalpha.dtype, h * grads.dalpha.stride[0] + m * grads.dalpha.stride[1],
                  0.5 * sum / entry(args.alpha, h, m));
      }
      if (!grads.dz.given()) return;
      for (int64_t b = 0; b < s.B; ++b) {
        for (int64_t at = 0; at < s.T; at += kChunk) {
          const int rows = chunk_rows(at, s.T);
          for (const bool key : {false, true}) {
            const View& x = key ? args.k : args.q;
            load_rows<double>(x, row_of(x, b, at, h), x.stride[1], rows, static_cast<int>(s.K), tile.x, s.ldk);
            for (int i = 0; i < rows; ++i) {
              const T* from = (key ? r.dlk : r.dlq) + ((b * s.T + at + i) * s.H + h) * s.M;
              for (int64_t m = 0; m < s.M; ++m)
                tile.l[i * s.ldm + m] = (key ? 1 : s.factor) / s.root * static_cast<double>(from[m]);
              for (int64_t c = 0; key && masked(args.key_mask, b, at + i) && c < s.ldk; ++c) tile.x[i * s.ldk + c] = 0;
            }
            gemm<double>(static_cast<int>(s.M), static_cast<int>(s.K), rows,
                         transposed(static_cast<const double*>(tile.l), s.ldm), tile.x, s.ldk, tile.dz, s.ldk, Add{});
          }
        }
      }
      for (int64_t m = 0; m < s.M; ++m) {
        for (int64_t c = 0; c < s.K; ++c) {
          store_f64(grads.dz.data, grads.dz.dtype, h * grads.dz.stride[0] + m * grads.dz.stride[1] + c, tile.dz[m * s.ldk + c]);
        }
      }
    });
  });
}

int64_t distill_workspace(const DistillArgs& args, Pass pass, int workers) {
  return by_type(pass == Pass::backward ? Dtype::f64 : args.q.dtype, [&]<class T>() {
    const Shape s = shape_of(args);
    Arena arena;
    const Work<T> r = cut<T>(arena, args, s, pass, workers);
    if (pass == Pass::backward) arena.take<T>(s.B * s.T * s.H * s.V);
    const LinearArgs linear = linear_args(args, s, r);
    int64_t bytes = linear_workspace(linear, Pass::forward, workers);
    if (pass == Pass::backward) {
      const int64_t more = linear_workspace(linear, Pass::backward, workers);
      bytes = more > bytes ? more : bytes;
    }
    bytes += arena.used();
    const int64_t losses =
        pass == Pass::forward ? workers * distill_loss_scratch(args) * static_cast<int64_t>(sizeof(double)) : 0;
    return bytes > losses ? bytes : losses;
  });
}

// ---- decode

namespace {
template <class T>
struct DecodeScratch {
  double *x, *l;
  T *f, *v, *o;
};
template <class T>
DecodeScratch<T> cut_decode(Arena& arena, const Shape& s) {
  DecodeScratch<T> r;
  r.x = arena.take<double>(s.ldk);
  r.l = arena.take<double>(s.ldm);
  r.f = arena.take<T>(round_up<T>(s.M));
  r.v = arena.take<T>(round_up<T>(s.V));
  r.o = arena.take<T>(round_up<T>(s.V));
  return r;
}

// A prompt behind a state: the tokens among themselves as in the forward, which gives the logarithm of each row's denominator;
// merged with the read of the state; then all keys enter the state at once.
inline constexpr int64_t kPrompt = 4;  // more tokens than this are a prompt

DistillArgs among_themselves(const DistillDecodeArgs& args) {
  DistillArgs to;
  to.q = args.q;
  to.k = args.k;
  to.v = args.v;
  to.z = args.z;
  to.alpha = args.alpha;
  to.key_logw = args.key_logw;
  to.scale = args.scale;
  to.causal = true;
  return to;
}
template <class T>
struct PromptScratch {
  T *S, *n, *c;  // [M, ldv], [M], [M]
  T *f, *v, *o;  // [C, ldf], [C, ldv], [C, ldv]
  int64_t ldv, ldf;
};
template <class T>
PromptScratch<T> cut_prompt(Arena& arena, const Shape& s) {
  PromptScratch<T> r;
  r.ldv = round_up<T>(s.V);
  r.ldf = round_up<T>(s.M);
  r.S = arena.take<T>(s.M * r.ldv);
  r.n = arena.take<T>(r.ldf);
  r.c = arena.take<T>(r.ldf);
  r.f = arena.take<T>(kChunk * r.ldf);
  r.v = arena.take<T>(kChunk * r.ldv);
  r.o = arena.take<T>(kChunk * r.ldv);
  return r;
}
// f = exp(l + more - peak), 0 where that is -inf; returns the sum of f times n.
template <class T>
T exponentials(const T* l, const T* more, T peak, const T* n, int64_t count, T* f) {
  using X = Vec<T>;
  const T none = static_cast<T>(-__builtin_inf());
  typename X::V sums = X::zero();
  for (int64_t m = 0; m < count; m += X::W) {
    const int left = static_cast<int>(count - m < X::W ? count - m : X::W);
    typename X::V e = X::load(l + m, left);
    if (more != nullptr) e = e + X::load(more + m, left);
    e = peak == none ? X::zero() : exp(e - X::broadcast(peak));
    X::store(f + m, e, left);
    if (n != nullptr) sums = fma(e, X::load(n + m, left), sums);
  }
  return sum(sums);
}

template <class T>
void continue_head(const DistillDecodeArgs& args, const DistillDecodeOut& out, const Shape& s, const Work<T>& w,
                   const PromptScratch<T>& r, int64_t b, int64_t h) {
  const T none = static_cast<T>(-__builtin_inf());
  const int width = static_cast<int>(s.V), features = static_cast<int>(s.M);
  bool past = false;
  for (int64_t m = 0; m < s.M; ++m) {
    __builtin_memcpy(r.S + m * r.ldv, args.state.at<const T>(b, h, m), static_cast<size_t>(s.V) * sizeof(T));
    r.n[m] = args.n.at<const T>(b, h)[m];
    r.c[m] = args.c.at<const T>(b, h)[m];
    past |= r.c[m] != none;
  }
  const T* v0 = w.v0 + (b * s.H + h) * s.V;
  const auto at_row = [&](int64_t t) { return (b * s.T + t) * s.H + h; };
  for (int64_t at = 0; at < s.T; at += kChunk) {
    const int rows = chunk_rows(at, s.T);
    T peaks[kChunk], totals[kChunk];
    for (int i = 0; past && i < rows; ++i) {
      const T* l = w.lq + at_row(at + i) * s.M;
      peaks[i] = none;
      for (int64_t m = 0; m < s.M; ++m) peaks[i] = l[m] + r.c[m] > peaks[i] ? l[m] + r.c[m] : peaks[i];
      totals[i] = exponentials<T>(l, r.c, peaks[i], r.n, s.M, r.f + i * r.ldf);
    }
    if (past) gemm<T>(rows, width, features, as_is(static_cast<const T*>(r.f), r.ldf), r.S, r.ldv, r.o, r.ldv, Store{});
    for (int i = 0; i < rows; ++i) {
      const int64_t row = at_row(at + i);
      const double own = static_cast<double>(w.den[row]);
      const double old = past && totals[i] > 0 ? static_cast<double>(peaks[i]) + __builtin_log(static_cast<double>(totals[i]))
                                               : -__builtin_inf();
      const double top = own > old ? own : old;
      const double mine = top == -__builtin_inf() ? 0 : __builtin_exp(own - top);
      const double theirs = top == -__builtin_inf() ? 0 : __builtin_exp(old - top);
      const double all = mine + theirs;
      for (int j = 0; j < width; ++j) {
        double x = all == 0 ? 0 : mine / all * static_cast<double>(w.o[row * s.V + j] + v0[j]);
        if (theirs > 0) x += theirs / all * static_cast<double>(r.o[i * r.ldv + j]) / static_cast<double>(totals[i]);
        store_f64(out.out.data, out.out.dtype, row_of(out.out, b, at + i, h) + j, x);
      }
    }
  }
  // The keys enter: units first.
  for (int64_t m = 0; m < s.M; ++m) {
    T top = r.c[m];
    for (int64_t t = 0; t < s.T; ++t) top = w.lk[at_row(t) * s.M + m] > top ? w.lk[at_row(t) * s.M + m] : top;
    const T less =
        r.c[m] == none ? T(0) : static_cast<T>(__builtin_exp(static_cast<double>(r.c[m]) - static_cast<double>(top)));
    for (int j = 0; j < width; ++j) r.S[m * r.ldv + j] = less == 0 ? T(0) : r.S[m * r.ldv + j] * less;
    r.n[m] = less == 0 ? T(0) : r.n[m] * less;
    r.c[m] = top;
  }
  for (int64_t at = 0; at < s.T; at += kChunk) {
    const int rows = chunk_rows(at, s.T);
    load_rows<T>(args.v, row_of(args.v, b, at, h), args.v.stride[1], rows, width, r.v, r.ldv);
    for (int i = 0; i < rows; ++i) {
      const T* l = w.lk + at_row(at + i) * s.M;
      T* f = r.f + i * r.ldf;
      for (int64_t m = 0; m < s.M; ++m) f[m] = l[m] == none ? none : l[m] - r.c[m];
      exponentials<T>(f, nullptr, T(0), nullptr, s.M, f);
      for (int64_t m = 0; m < s.M; ++m) r.n[m] += f[m];
    }
    gemm<T>(features, width, rows, transposed(static_cast<const T*>(r.f), r.ldf), r.v, r.ldv, r.S, r.ldv, Add{});
  }
  for (int64_t m = 0; m < s.M; ++m) {
    __builtin_memcpy(args.state.at<T>(b, h, m), r.S + m * r.ldv, static_cast<size_t>(s.V) * sizeof(T));
    args.n.at<T>(b, h)[m] = r.n[m];
    args.c.at<T>(b, h)[m] = r.c[m];
  }
}

template <class T>
void prompt(const DistillDecodeArgs& args, const DistillDecodeOut& out, const Launch& launch) {
  const DistillArgs tokens = among_themselves(args);
  const Shape s = shape_of(tokens);
  Arena arena(launch.workspace), each;
  const Work<T> w = cut<T>(arena, tokens, s, Pass::forward, launch.workers);
  cut_prompt<T>(each, s);
  attend(tokens, s, w, launch, after(launch, arena.used() + launch.workers * each.used()));
  parallel(launch, s.B * s.H, [&](int64_t task, int worker) {
    Arena own(launch.workspace + arena.used() + worker * each.used());
    continue_head(args, out, s, w, cut_prompt<T>(own, s), task / s.H, task % s.H);
  });
}
template <class T>
int64_t prompt_bytes(const DistillDecodeArgs& args, int workers) {
  const DistillArgs tokens = among_themselves(args);
  const Shape s = shape_of(tokens);
  Arena arena, each;
  const Work<T> w = cut<T>(arena, tokens, s, Pass::forward, workers);
  cut_prompt<T>(each, s);
  return arena.used() + workers * each.used() + linear_workspace(linear_args(tokens, s, w), Pass::forward, workers);
}

}  // namespace

void distill_decode_forward(const DistillDecodeArgs& args, const DistillDecodeOut& out, const Launch& launch) {
  by_type(args.q.dtype, [&]<class T>() {
    using X = Vec<T>;
    if (args.q.size[1] > kPrompt) return prompt<T>(args, out, launch);
    const Shape s = shape_of(args);
    Arena arena(launch.workspace), each;
    const Features f = cut_features(arena, s);
    cut_decode<T>(each, s);
    load_features(args, s, f);
    const int width = static_cast<int>(s.V);
    const T none = static_cast<T>(-__builtin_inf());
    parallel(launch, s.B * s.H, [&](int64_t task, int worker) {
      Arena own(launch.workspace + arena.used() + worker * each.used());
      const DecodeScratch<T> r = cut_decode<T>(own, s);
      const int64_t b = task / s.H, h = task % s.H;
      T* n = args.n.at<T>(b, h);
      T* c = args.c.at<T>(b, h);
      for (int64_t t = 0; t < s.T; ++t) {
        double logw =
            args.key_logw.given() ? load_f64(args.key_logw.data, args.key_logw.dtype, row_of(args.key_logw, b, t, h)) : 0;
        load_rows<double>(args.k, row_of(args.k, b, t, h), 0, 1, static_cast<int>(s.K), r.x, s.ldk);
        log_features(s, f, h, true, 1, r.x, &logw, r.l);
        load_rows<T>(args.v, row_of(args.v, b, t, h), 0, 1, width, r.v, round_up<T>(width));
        for (int64_t m = 0; m < s.M; ++m) {
          const T l = static_cast<T>(r.l[m]), top = l > c[m] ? l : c[m];
          const T old =
              c[m] == none ? T(0) : static_cast<T>(__builtin_exp(static_cast<double>(c[m]) - static_cast<double>(top)));
          const T add = l == none ? T(0) : static_cast<T>(__builtin_exp(static_cast<double>(l) - static_cast<double>(top)));
          T* row = args.state.at<T>(b, h, m);
          n[m] = old * n[m] + add;
          c[m] = top;
          for (int j = 0; j < width; j += X::W) {
            X::store(row + j, fma(X::load(row + j, width - j), X::broadcast(old), X::load(r.v + j) * X::broadcast(add)),
                     width - j);
          }
        }
        load_rows<double>(args.q, row_of(args.q, b, t, h), 0, 1, static_cast<int>(s.K), r.x, s.ldk);
        log_features(s, f, h, false, 1, r.x, nullptr, r.l);
        double peak = -__builtin_inf();
        for (int64_t m = 0; m < s.M; ++m) {
          r.l[m] += static_cast<double>(c[m]);
          peak = r.l[m] > peak ? r.l[m] : peak;
        }
        T den = 0;
        for (int j = 0; j < width; j += X::W) X::store(r.o + j, X::zero());
        for (int64_t m = 0; m < s.M; ++m) {
          const T weight = peak == -__builtin_inf() ? T(0) : static_cast<T>(__builtin_exp(r.l[m] - peak));
          const T* row = args.state.at<const T>(b, h, m);
          den += weight * n[m];
          for (int j = 0; j < width; j += X::W) {
            X::store(r.o + j, fma(X::load(row + j, width - j), X::broadcast(weight), X::load(r.o + j)));
          }
        }
        const T factor = den == 0 ? T(0) : 1 / den;
        store_rows<T>(r.o, round_up<T>(width), 1, width, out.out, row_of(out.out, b, t, h), 0, &factor);
      }
    });
  });
}
int64_t distill_decode_workspace(const DistillDecodeArgs& args, Pass, int workers) {
  return by_type(args.q.dtype, [&]<class T>() {
    if (args.q.size[1] > kPrompt) return prompt_bytes<T>(args, workers);
    const Shape s = shape_of(args);
    Arena arena, each;
    cut_features(arena, s);
    cut_decode<T>(each, s);
    return arena.used() + workers * each.used();
  });
}

}  // namespace linnet::LINNET_ISA
