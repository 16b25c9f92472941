// InLine attention on the vector units: the centred walks of shared/mapped.h, with the kernel as their map; the local
// residual beside them; and decoding by Welford's recurrence, one pass over M per token.
#include "core/half.h"
#include "inline.h"
#include "mechanisms/recurrence/cpu/decode.h"
#include "mechanisms/recurrence/cpu/walk.h"
#include "mechanisms/shared/mapped.h"
#include "simd/math.h"

namespace linnet::LINNET_ISA {
namespace {

// ---- the map: phi, times scale for queries

struct KernelMap {
  InlineKernel kernel;
  int K;
  double scale;
};

template <class T, class V>
LINNET_INLINE V kernel_of(InlineKernel kernel, V x) {
  using X = Vec<T>;
  switch (kernel) {
    case InlineKernel::identity: return x;
    case InlineKernel::relu: return max(V{}, x);  // keeps NaN
    case InlineKernel::leakyrelu: return select(gt(x, V{}), x, x * X::broadcast(static_cast<T>(0.01)));
    case InlineKernel::exp:
      return exp(min(X::broadcast(static_cast<T>(kInlineLargest)), x) * X::broadcast(static_cast<T>(kInlineExponent)));
  }
  return x;
}
template <class T, class V>
LINNET_INLINE V slope_of(InlineKernel kernel, V x) {
  using X = Vec<T>;
  const V one = X::broadcast(1);
  switch (kernel) {
    case InlineKernel::identity: return one;
    case InlineKernel::relu: return select(gt(x, V{}), one, V{});
    case InlineKernel::leakyrelu: return select(gt(x, V{}), one, X::broadcast(static_cast<T>(0.01)));
    case InlineKernel::exp:
      return select(gt(x, X::broadcast(static_cast<T>(kInlineLargest))), V{},
                    X::broadcast(static_cast<T>(kInlineExponent)) * kernel_of<T>(kernel, x));
  }
  return one;
}

template <class T>
void apply_kernel(const void* self, const MapRows& at, const T* x, int64_t ldx, T* f, int64_t ldf, T*) {
  using X = Vec<T>;
  const KernelMap& m = *static_cast<const KernelMap*>(self);
  const typename X::V factor = X::broadcast(at.key ? T(1) : static_cast<T>(m.scale));
  for (int r = 0; r < at.count; ++r, x += ldx, f += ldf) {
    for (int c = 0; c < m.K; c += X::W) X::store(f + c, kernel_of<T>(m.kernel, X::load(x + c)) * factor, m.K - c);
  }
}
template <class T>
void kernel_backward(const void* self, const MapRows& at, const T* x, int64_t ldx, T* df, int64_t ldf, T* dx, T*, T*) {
  using X = Vec<T>;
  const KernelMap& m = *static_cast<const KernelMap*>(self);
  const typename X::V factor = X::broadcast(at.key ? T(1) : static_cast<T>(m.scale));
  for (int r = 0; r < at.count; ++r, x += ldx, dx += ldx, df += ldf) {
    for (int c = 0; c < m.K; c += X::W) {
      X::store(dx + c, slope_of<T>(m.kernel, X::load(x + c)) * X::load(df + c, m.K - c) * factor);
    }
  }
}

template <class T, class Args>
MappedCall<T> call_of(const Args& args, const KernelMap& map) {
  MappedCall<T> call;
  call.q = args.q;
  call.k = args.k;
  call.v = args.v;
  call.key_mask = args.mask;
  call.causal = args.causal;
  call.centred = true;
  call.normalizer = Normalizer::none;
  call.map = {&map, map.K, map.K, 0, 0, apply_kernel<T>, nullptr, kernel_backward<T>};
  return call;
}
template <class Args>
KernelMap map_of(const Args& args) {
  return {args.kernel, static_cast<int>(args.q.size[3]), inline_scale(args.scale, args.q.size[3])};
}

template <class Body>
LINNET_INLINE auto by_type(Dtype dtype, const Body& body) {
  return dtype == Dtype::f64 ? body.template operator()<double>() : body.template operator()<float>();
}
template <class T>
inline constexpr Dtype kDtype = sizeof(T) == 8 ? Dtype::f64 : Dtype::f32;

// ---- the residual

// r [B, H, 9, ld]: taps outside, channels in the lanes.
template <class T>
struct ResidualPlan {
  int64_t B, H, D, ld, height, width, prefix;
  T* r;
  T* dr;          // [B, H, 9, ld], backward
  View mask;      // [B, T] or absent
  double* mlp;    // [H, B, 3, D] scratch of the coefficient network: hidden, its slope, and the gradient before it
  T* rows;        // [B, T, H, D] when the tensors are 16-bit: what attention leaves for the residual to add to
  char* scratch;  // per worker: 3 rows of v, 3 of dout, one of results, each [width, ld]
  int64_t scratch_bytes;
};
template <class T>
ResidualPlan<T> residual_plan(Arena& arena, const InlineResidualArgs& args, bool backward, int workers) {
  ResidualPlan<T> p{};
  p.B = args.q.size[0];
  p.H = args.q.size[2];
  p.D = args.q.size[3];
  p.ld = round_up<T>(p.D);
  p.height = args.height;
  p.width = args.width;
  p.prefix = args.prefix;
  p.r = arena.take<T>(p.B * p.H * 9 * p.ld);
  if (backward) p.dr = arena.take<T>(p.B * p.H * 9 * p.ld);
  p.mask = args.mask;
  p.mlp = arena.take<double>(p.H * p.B * 3 * p.D);
  if (args.q.dtype != kDtype<T>) p.rows = arena.take<T>(args.q.elements());
  p.scratch_bytes = (7 * p.width * p.ld * static_cast<int64_t>(sizeof(T)) + 127) / 128 * 128;
  p.scratch = arena.take<char>(workers * p.scratch_bytes);
  return p;
}

LINNET_INLINE double gelu(double x) { return 0.5 * x * __builtin_erfc(-x * __builtin_sqrt(0.5)); }
LINNET_INLINE double gelu_slope(double x) {
  return 0.5 * __builtin_erfc(-x * __builtin_sqrt(0.5)) + x * __builtin_exp(-0.5 * x * x) * 0.39894228040143267794;
}
LINNET_INLINE double entry(const View& view, int64_t i, int64_t j, int64_t k = 0) {
  return load_f64(view.data, view.dtype, i * view.stride[0] + j * view.stride[1] + k * view.stride[2]);
}

// hidden = w1 pooled + b1 of one batch row and head: gelu to `value`, its slope to `slope`.
void hidden_of(const InlineResidualArgs& args, int64_t D, int64_t b, int64_t h, double* value, double* slope) {
  for (int64_t i = 0; i < D; ++i) {
    double sum = entry(args.b1, h, i);
    for (int64_t c = 0; c < D; ++c) sum += entry(args.w1, h, i, c) * entry(args.pooled, b, h, c);
    value[i] = gelu(sum);
    slope[i] = gelu_slope(sum);
  }
}

template <class T>
void coefficients(const ResidualPlan<T>& p, const InlineResidualArgs& args, const View& r, const Launch& launch) {
  parallel(launch, p.H, [&](int64_t h, int) {
    for (int64_t b = 0; b < p.B; ++b) {
      double* value = p.mlp + (h * p.B + b) * 3 * p.D;
      T* to = p.r + (b * p.H + h) * 9 * p.ld;
      for (int64_t i = 0; i < 9 * p.ld; ++i) to[i] = 0;
      hidden_of(args, p.D, b, h, value, value + p.D);
      for (int64_t i = 0; i < 9 * p.D; ++i) {
        double sum = entry(args.b2, h, i);
        for (int64_t c = 0; c < p.D; ++c) sum += entry(args.w2, h, i, c) * value[c];
        to[i % 9 * p.ld + i / 9] = static_cast<T>(sum);
        if (r.given()) {
          store_f64(r.data, r.dtype, b * r.stride[0] + h * r.stride[1] + i / 9 * r.stride[2] + i % 9 * r.stride[3], sum);
        }
      }
    }
  });
}

// A row of the grid: [width, ld] in T.
template <class T>
void load_grid(const ResidualPlan<T>& p, const View& view, int64_t b, int64_t h, int64_t y, T* to) {
  load_rows<T>(view, b * view.stride[0] + (p.prefix + y * p.width) * view.stride[1] + h * view.stride[2], view.stride[1],
               static_cast<int>(p.width), static_cast<int>(p.D), to, p.ld);
}

// Zeros for the masked tokens of a row of the grid: to the residual they are as what lies outside of it.
template <class T>
void clear_masked(const ResidualPlan<T>& p, int64_t b, int64_t y, T* row) {
  for (int64_t x = 0; p.mask.given() && x < p.width; ++x) {
    if (*p.mask.template at<const uint8_t>(b, p.prefix + y * p.width + x) != 0) continue;
    for (int64_t c = 0; c < p.ld; ++c) row[x * p.ld + c] = 0;
  }
}
template <class T>
void load_values(const ResidualPlan<T>& p, const View& v, int64_t b, int64_t h, int64_t y, T* to) {
  load_grid(p, v, b, h, y, to);
  clear_masked(p, b, y, to);
}

// to[y, x] += sum_tap r[tap] from[y + dy, x + dx], rows y - 1, y, y + 1 of `from` in window[(y + dy) % 3]; kTurned: of the
// positions y - dy, x - dx, as the gradient needs.
template <bool kTurned, class T>
void add_taps(const ResidualPlan<T>& p, const T* r, T* const* window, int64_t y, T* to) {
  using X = Vec<T>;
  for (int64_t x = 0; x < p.width; ++x) {
    for (int64_t c = 0; c < p.ld; c += X::W) {
      typename X::V sum = X::load(to + x * p.ld + c);
      for (int tap = 0; tap < 9; ++tap) {
        const int64_t dy = kTurned ? 1 - tap / 3 : tap / 3 - 1, dx = kTurned ? 1 - tap % 3 : tap % 3 - 1;
        if (y + dy < 0 || y + dy >= p.height || x + dx < 0 || x + dx >= p.width) continue;
        sum = fma(X::load(r + tap * p.ld + c), X::load(window[(y + dy) % 3] + (x + dx) * p.ld + c), sum);
      }
      X::store(to + x * p.ld + c, sum);
    }
  }
}

// Tokens that are not on the grid, from workspace to the result.
template <class T>
void copy_prefix(const ResidualPlan<T>& p, const View& from, const View& to, int64_t b, int64_t h, T* row) {
  for (int64_t t = 0; t < p.prefix; ++t) {
    load_rows<T>(from, b * from.stride[0] + t * from.stride[1] + h * from.stride[2], 0, 1, static_cast<int>(p.D), row, p.ld);
    store_rows<T>(row, p.ld, 1, static_cast<int>(p.D), to, b * to.stride[0] + t * to.stride[1] + h * to.stride[2], 0, nullptr);
  }
}

// One head: result = attention + residual, and with dout the gradient of the coefficients.
template <class T>
void residual_head(const ResidualPlan<T>& p, const View& v, const View& dout, const View& attention, const View& result,
                   int64_t b, int64_t h, int worker) {
  using X = Vec<T>;
  const bool backward = p.dr != nullptr;
  T* scratch = reinterpret_cast<T*>(p.scratch + worker * p.scratch_bytes);
  const int64_t row = p.width * p.ld;
  T* values[3] = {scratch, scratch + row, scratch + 2 * row};
  T* slopes[3] = {scratch + 3 * row, scratch + 4 * row, scratch + 5 * row};
  T* to = scratch + 6 * row;
  const T* r = p.r + (b * p.H + h) * 9 * p.ld;
  T* dr = backward ? p.dr + (b * p.H + h) * 9 * p.ld : nullptr;
  for (int64_t i = 0; backward && i < 9 * p.ld; ++i) dr[i] = 0;
  if (p.height == 0 || p.width == 0 || p.D == 0) {
    if (p.D > 0 && result.given() && attention.data != result.data && p.prefix > 0) {
      // No grid row to borrow: one token at a time through a row of its own size is not there; prefix alone means width 0.
      for (int64_t t = 0; t < p.prefix; ++t) {
        for (int64_t c = 0; c < p.D; ++c) {
          store_f64(result.data, result.dtype, b * result.stride[0] + t * result.stride[1] + h * result.stride[2] + c,
                    load_f64(attention.data, attention.dtype,
                             b * attention.stride[0] + t * attention.stride[1] + h * attention.stride[2] + c));
        }
      }
    }
    return;
  }
  if (attention.given() && attention.data != result.data) copy_prefix(p, attention, result, b, h, to);
  load_values(p, v, b, h, 0, values[0]);
  if (backward) load_grid(p, dout, b, h, 0, slopes[0]);
  for (int64_t y = 0; y < p.height; ++y) {
    if (y + 1 < p.height) {
      load_values(p, v, b, h, y + 1, values[(y + 1) % 3]);
      if (backward) load_grid(p, dout, b, h, y + 1, slopes[(y + 1) % 3]);
    }
    if (result.given()) {
      load_grid(p, attention, b, h, y, to);
      if (backward) {
        add_taps<true>(p, r, slopes, y, to);
        clear_masked(p, b, y, to);
      } else {
        add_taps<false>(p, r, values, y, to);
      }
      store_rows<T>(to, p.ld, static_cast<int>(p.width), static_cast<int>(p.D), result,
                    b * result.stride[0] + (p.prefix + y * p.width) * result.stride[1] + h * result.stride[2], result.stride[1],
                    nullptr);
    }
    if (!backward) continue;
    for (int tap = 0; tap < 9; ++tap) {
      const int64_t dy = tap / 3 - 1, dx = tap % 3 - 1;
      if (y + dy < 0 || y + dy >= p.height) continue;
      const int64_t begin = dx < 0 ? -dx : 0, end = dx > 0 ? p.width - dx : p.width;
      for (int64_t c = 0; c < p.ld; c += X::W) {
        typename X::V sum = X::zero();
        for (int64_t x = begin; x < end; ++x) {
          sum = fma(X::load(slopes[y % 3] + x * p.ld + c), X::load(values[(y + dy) % 3] + (x + dx) * p.ld + c), sum);
        }
        X::store(dr + tap * p.ld + c, X::load(dr + tap * p.ld + c) + sum);
      }
    }
  }
}

// From dr through the two maps. An entry of a parameter's gradient is summed over the batch in double and rounded once.
template <class T>
void network_backward(const ResidualPlan<T>& p, const InlineResidualArgs& args, const InlineResidualGrads& grads,
                      const Launch& launch) {
  const int64_t D = p.D;
  parallel(launch, p.H, [&](int64_t h, int) {
    const auto put = [](const View& view, double x, int64_t i, int64_t j, int64_t k) {
      store_f64(view.data, view.dtype, i * view.stride[0] + j * view.stride[1] + k * view.stride[2], x);
    };
    const auto value = [&](int64_t b) { return p.mlp + (h * p.B + b) * 3 * D; };
    const auto dpre = [&](int64_t b) { return value(b) + 2 * D; };
    const auto dr = [&](int64_t b, int64_t i) { return static_cast<double>(p.dr[((b * p.H + h) * 9 + i % 9) * p.ld + i / 9]); };
    const auto over_batch = [&](const View& view, int64_t i, int64_t c, const auto& part) {
      if (!view.given()) return;
      double sum = 0;
      for (int64_t b = 0; b < p.B; ++b) sum += part(b);
      put(view, sum, h, i, c);
    };
    for (int64_t b = 0; b < p.B; ++b) {
      hidden_of(args, D, b, h, value(b), value(b) + D);
      for (int64_t c = 0; c < D; ++c) {
        double sum = 0;
        for (int64_t i = 0; i < 9 * D; ++i) sum += entry(args.w2, h, i, c) * dr(b, i);
        dpre(b)[c] = sum * value(b)[D + c];
      }
      for (int64_t c = 0; grads.dpooled.given() && c < D; ++c) {
        double sum = 0;
        for (int64_t i = 0; i < D; ++i) sum += entry(args.w1, h, i, c) * dpre(b)[i];
        put(grads.dpooled, sum, b, h, c);
      }
    }
    for (int64_t i = 0; i < 9 * D; ++i) {
      over_batch(grads.db2, i, 0, [&](int64_t b) { return dr(b, i); });
      for (int64_t c = 0; c < D; ++c) over_batch(grads.dw2, i, c, [&](int64_t b) { return dr(b, i) * value(b)[c]; });
    }
    for (int64_t i = 0; i < D; ++i) {
      over_batch(grads.db1, i, 0, [&](int64_t b) { return dpre(b)[i]; });
      for (int64_t c = 0; c < D; ++c) {
        over_batch(grads.dw1, i, c, [&](int64_t b) { return dpre(b)[i] * entry(args.pooled, b, h, c); });
      }
    }
  });
}

template <class T>
View rows_view(const ResidualPlan<T>& p, const View& like) {
  return p.rows == nullptr ? like : View::dense(p.rows, kDtype<T>, like.size, 4);
}

// ---- decode

template <class T>
struct DecodeScratch {
  T *x, *q, *k, *v, *o;
};
template <class T>
DecodeScratch<T> cut_decode(Arena& arena, const InlineDecodeArgs& args) {
  const int64_t K = round_up<T>(args.q.size[3]), V = round_up<T>(args.v.size[3]);
  DecodeScratch<T> s;
  for (T** row : {&s.x, &s.q, &s.k}) *row = arena.take<T>(K);
  for (T** row : {&s.v, &s.o}) *row = arena.take<T>(V);
  return s;
}

}  // namespace

void inline_forward(const InlineArgs& args, const InlineOut& out, const Launch& launch) {
  by_type(args.q.dtype, [&]<class T>() {
    const KernelMap map = map_of(args);
    MappedCall<T> call = call_of<T>(args, map);
    call.out = out.out;
    call.final_state = out.final_moment;
    call.final_z = out.final_key;
    call.final_v = out.final_value;
    call.final_count = out.final_count;
    mapped_forward(call, launch);
  });
}
void inline_backward(const InlineArgs& args, const InlineOut&, const InlineGrads& grads, const Launch& launch) {
  by_type(args.q.dtype, [&]<class T>() {
    const KernelMap map = map_of(args);
    MappedCall<T> call = call_of<T>(args, map);
    call.dout = grads.dout;
    call.dq = grads.dq;
    call.dk = grads.dk;
    call.dv = grads.dv;
    mapped_backward(call, launch);
  });
}
int64_t inline_workspace(const InlineArgs& args, Pass pass, int workers) {
  return by_type(args.q.dtype, [&]<class T>() {
    const KernelMap map = map_of(args);
    const MappedCall<T> call = call_of<T>(args, map);
    return pass == Pass::forward ? mapped_forward_bytes(call, workers) : mapped_backward_bytes(call, workers);
  });
}

void inline_residual_forward(const InlineResidualArgs& args, const InlineResidualOut& out, const Launch& launch) {
  by_type(args.q.dtype, [&]<class T>() {
    Arena arena(launch.workspace);
    const ResidualPlan<T> p = residual_plan<T>(arena, args, false, launch.workers);
    const KernelMap map = map_of(args);
    MappedCall<T> call = call_of<T>(args, map);
    call.out = rows_view(p, out.out);
    mapped_forward(call, after(launch, arena.used()));
    coefficients(p, args, out.r, launch);
    parallel(launch, p.B * p.H, [&](int64_t task, int worker) {
      residual_head<T>(p, args.v, View(), call.out, out.out, task / p.H, task % p.H, worker);
    });
  });
}
void inline_residual_backward(const InlineResidualArgs& args, const InlineResidualOut&, const InlineResidualGrads& grads,
                              const Launch& launch) {
  by_type(args.q.dtype, [&]<class T>() {
    Arena arena(launch.workspace);
    const ResidualPlan<T> p = residual_plan<T>(arena, args, true, launch.workers);
    const KernelMap map = map_of(args);
    MappedCall<T> call = call_of<T>(args, map);
    call.dout = grads.dout;
    call.dq = grads.dq;
    call.dk = grads.dk;
    if (grads.dv.given()) call.dv = rows_view(p, grads.dv);
    mapped_backward(call, after(launch, arena.used()));
    coefficients(p, args, View(), launch);
    if (!grads.dout.given()) {  // nothing comes in: dv holds zeros, as do all others
      for (int64_t i = 0; i < p.B * p.H * 9 * p.ld; ++i) p.dr[i] = 0;
    }
    parallel(launch, grads.dout.given() ? p.B * p.H : 0, [&](int64_t task, int worker) {
      residual_head<T>(p, args.v, grads.dout, call.dv, grads.dv, task / p.H, task % p.H, worker);
    });
    if (!grads.dout.given() && p.rows != nullptr && grads.dv.given()) {
      for (int64_t i = 0; i < args.v.elements(); ++i) {
        const int64_t c = i % p.D, h = i / p.D % p.H, t = i / (p.D * p.H) % args.q.size[1],
                      b = i / (p.D * p.H * args.q.size[1]);
        store_f64(grads.dv.data, grads.dv.dtype, b * grads.dv.stride[0] + t * grads.dv.stride[1] + h * grads.dv.stride[2] + c,
                  0);
      }
    }
    network_backward(p, args, grads, launch);
  });
}
int64_t inline_residual_workspace(const InlineResidualArgs& args, Pass pass, int workers) {
  return by_type(args.q.dtype, [&]<class T>() {
    Arena arena;
    residual_plan<T>(arena, args, pass == Pass::backward, workers);
    const KernelMap map = map_of(args);
    const MappedCall<T> call = call_of<T>(args, map);
    return arena.used() + (pass == Pass::forward ? mapped_forward_bytes(call, workers) : mapped_backward_bytes(call, workers));
  });
}

void inline_decode_forward(const InlineDecodeArgs& args, const InlineDecodeOut& out, const Launch& launch) {
  by_type(args.q.dtype, [&]<class T>() {
    using X = Vec<T>;
    const KernelMap map = map_of(args);
    const int64_t H = args.q.size[2];
    const int K = map.K, width = static_cast<int>(args.v.size[3]);
    Arena size;
    cut_decode<T>(size, args);
    parallel(launch, args.q.size[0] * H, [&](int64_t task, int worker) {
      Arena arena(launch.workspace + worker * size.used());
      const DecodeScratch<T> s = cut_decode<T>(arena, args);
      const int64_t b = task / H, h = task % H;
      T* key = args.key.at<T>(b, h);
      T* value = args.value.at<T>(b, h);
      T* count = args.count.at<T>(b, h);
      const auto load = [&](const View& view, int64_t t, int cols, T* to) {
        load_rows<T>(view, b * view.stride[0] + t * view.stride[1] + h * view.stride[2], 0, 1, cols, to, round_up<T>(cols));
      };
      for (int64_t t = 0; t < args.q.size[1]; ++t) {
        load(args.k, t, K, s.x);
        apply_kernel<T>(&map, {b, h, t, 1, true, 1}, s.x, round_up<T>(K), s.k, round_up<T>(K), nullptr);
        load(args.q, t, K, s.x);
        apply_kernel<T>(&map, {b, h, t, 1, false, 1}, s.x, round_up<T>(K), s.q, round_up<T>(K), nullptr);
        load(args.v, t, width, s.v);
        const T n = *count + 1, inverse = 1 / n, share = (n - 1) / n;
        *count = n;
        for (int c = 0; c < K; c += X::W) {  // k becomes (n-1)/n dk, the mean moves
          const typename X::V mean = X::load(key + c, K - c), d = X::load(s.k + c, K - c) - mean;
          X::store(key + c, fma(d, X::broadcast(inverse), mean), K - c);
          X::store(s.k + c, d * X::broadcast(share), K - c);
        }
        for (int c = 0; c < width; c += X::W) {
          const typename X::V mean = X::load(value + c, width - c), d = X::load(s.v + c, width - c) - mean;
          X::store(value + c, fma(d, X::broadcast(inverse), mean), width - c);
          X::store(s.v + c, d, width - c);
        }
        decode_step<false>(K, width, args.moment.at<T>(b, h), args.moment.stride[2], static_cast<T*>(nullptr), 0, s.k, s.q, s.v,
                           s.o);
        for (int c = 0; c < width; c += X::W) {
          X::store(s.o + c, fma(X::load(s.o + c, width - c), X::broadcast(inverse), X::load(value + c, width - c)), width - c);
        }
        store_rows<T>(s.o, round_up<T>(width), 1, width, out.out,
                      b * out.out.stride[0] + t * out.out.stride[1] + h * out.out.stride[2], 0, nullptr);
      }
    });
  });
}
int64_t inline_decode_workspace(const InlineDecodeArgs& args, Pass, int workers) {
  return by_type(args.q.dtype, [&]<class T>() {
    Arena arena;
    cut_decode<T>(arena, args);
    return workers * arena.used();
  });
}

}  // namespace linnet::LINNET_ISA
