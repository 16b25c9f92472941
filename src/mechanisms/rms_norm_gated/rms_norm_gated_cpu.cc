// rms_norm_gated on the vector units: a row at a time through L1, tasks of 64 tokens. The weight is brought to the computing
// type and its full shape once; dweight is summed per task, then over the tasks in double.
#include "mechanisms/shared/token_tasks.h"
#include "rms_norm_gated.h"
#include "simd/math.h"

namespace linnet::LINNET_ISA {
namespace {

template <class T>
struct Memory {
  T* weight;   // [H, ld]
  T* parts;    // [tasks, H, ld]: dweight
  T* workers;  // [workers, 4, ld]
  int64_t ld;
  static Memory cut(Arena& arena, const RmsNormGatedArgs& args, Pass pass, int workers) {
    Memory m;
    m.ld = round_up<T>(args.x.size[3]) + Vec<T>::W;  // V = 0 too
    m.weight = arena.take<T>(args.weight.given() ? args.x.size[2] * m.ld : 0);
    m.parts = arena.take<T>(pass == Pass::backward ? args.x.size[0] * token_tasks(args.x) * args.x.size[2] * m.ld : 0);
    m.workers = arena.take<T>(workers * 4 * m.ld);
    return m;
  }
};

// Gate and its slope at z.
template <class T, class V>
LINNET_INLINE V gate_of(V z, NormGate kind, V* slope) {
  const V one = Vec<T>::broadcast(1), s = sigmoid(z);
  if (kind == NormGate::sigmoid) {
    *slope = s * (one - s);
    return s;
  }
  *slope = s * fma(z, one - s, one);
  return z * s;
}

template <class T>
LINNET_INLINE T reciprocal(T squares, const RmsNormGatedArgs& args) {
  const T mean = squares / static_cast<T>(args.x.size[3]) + static_cast<T>(args.eps);
  return mean == 0 ? T(0) : T(1) / sqrt(Vec<T>::broadcast(mean))[0];
}

template <class T>
void load_weight(const RmsNormGatedArgs& args, const Memory<T>& m) {
  if (!args.weight.given()) return;
  for (int64_t h = 0; h < args.x.size[2]; ++h) {
    for (int64_t c = 0; c < m.ld; ++c) {
      const int64_t at = h * args.weight.stride[0] + c * args.weight.stride[1];
      m.weight[h * m.ld + c] = c < args.x.size[3] ? static_cast<T>(load_f64(args.weight.data, args.weight.dtype, at)) : T(0);
    }
  }
}

template <class T, class E>
void forward(const RmsNormGatedArgs& args, const RmsNormGatedOut& out, const Launch& launch) {
  using X = Vec<T>;
  using V = typename X::V;
  Arena arena(launch.workspace);
  const Memory<T> m = Memory<T>::cut(arena, args, Pass::forward, launch.workers);
  load_weight(args, m);
  const int width = static_cast<int>(args.x.size[3]);
  each_row(args.x, launch, [&](int64_t b, int64_t t, int64_t h, int64_t, int worker) {
    T* const u = m.workers + worker * 4 * m.ld;
    const E* x = args.x.at<const E>(b, t, h);
    const E* z = args.z.given() ? args.z.at<const E>(b, t, h) : nullptr;
    const T* weight = args.weight.given() ? m.weight + h * m.ld : nullptr;
    E* y = out.out.at<E>(b, t, h);
    V squares = X::zero();
    for (int c = 0; c < width; c += X::W) {
      V row = X::load(x + c, width - c), g = X::broadcast(1), slope;
      if (z != nullptr) g = gate_of<T>(X::load(z + c, width - c), args.gate, &slope);
      if (!args.norm_before_gate) row = row * g;
      squares = fma(row, row, squares);
      if (args.norm_before_gate) row = row * g;
      X::store(u + c, row);
    }
    const V r = X::broadcast(reciprocal<T>(sum(squares), args));
    for (int c = 0; c < width; c += X::W) {
      V row = X::load(u + c) * r;
      if (weight != nullptr) row = row * X::load(weight + c);
      X::store(y + c, row, width - c);
    }
  });
}

// With n the normed input (x, or x gate(z)), r its reciprocal root, d = dout weight (gate(z)):
//   dn = r (d - a n), a = r^2 mean(d n),   dweight = dout n r (gate(z))
// Where d lies along n little is left of d, so a is refined once by what is left (l2_norm): mean((d - a n) n) = a eps.
template <class T, class E>
void backward(const RmsNormGatedArgs& args, const RmsNormGatedGrads& grads, const Launch& launch) {
  using X = Vec<T>;
  using V = typename X::V;
  Arena arena(launch.workspace);
  const Memory<T> m = Memory<T>::cut(arena, args, Pass::backward, launch.workers);
  load_weight(args, m);
  const int64_t H = args.x.size[2], tasks = args.x.size[0] * token_tasks(args.x), part = H * m.ld;
  const int width = static_cast<int>(args.x.size[3]);
  each_row(args.x, launch, [&](int64_t b, int64_t t, int64_t h, int64_t task, int worker) {
    T* const scratch = m.workers + worker * 4 * m.ld;
    T *n = scratch, *d = n + m.ld, *gate = d + m.ld, *gate_slope = gate + m.ld;
    const E* x = args.x.at<const E>(b, t, h);
    const E* z = args.z.given() ? args.z.at<const E>(b, t, h) : nullptr;
    const E* dout = grads.dout.given() ? grads.dout.at<const E>(b, t, h) : nullptr;
    const T* weight = args.weight.given() ? m.weight + h * m.ld : nullptr;
    T* dweight = m.parts + task * part + h * m.ld;
    if (t % kTaskTokens == 0) {
      for (int c = 0; c < width; c += X::W) X::store(dweight + c, X::zero());
    }
    V squares = X::zero(), dots = X::zero();
    for (int c = 0; c < width; c += X::W) {
      V row = X::load(x + c, width - c), slope = X::zero(), g = X::broadcast(1);
      V incoming = dout != nullptr ? X::load(dout + c, width - c) : X::zero();
      if (z != nullptr) g = gate_of<T>(X::load(z + c, width - c), args.gate, &slope);
      if (args.norm_before_gate) {
        incoming = incoming * g;
      } else {
        row = row * g;
      }
      X::store(gate + c, g);
      X::store(gate_slope + c, slope);
      X::store(n + c, row);
      squares = fma(row, row, squares);
      if (weight != nullptr) incoming = incoming * X::load(weight + c);
      X::store(d + c, incoming);
      dots = fma(incoming, row, dots);
    }
    const T root = reciprocal<T>(sum(squares), args), along = root * (sum(dots) / static_cast<T>(width)) * root;
    const V r = X::broadcast(root), minus = X::broadcast(-along);
    V left = X::zero();
    for (int c = 0; c < width; c += X::W) left = fma(X::load(n + c), fma(minus, X::load(n + c), X::load(d + c)), left);
    const T excess = sum(left) / static_cast<T>(width) - along * static_cast<T>(args.eps);
    const V rest = X::broadcast(-(root * excess * root));
    for (int c = 0; c < width; c += X::W) {
      const V row = X::load(n + c), g = X::load(gate + c), slope = X::load(gate_slope + c);
      const V incoming = dout != nullptr ? X::load(dout + c, width - c) : X::zero(), normed = row * r;
      const V dn = r * fma(rest, row, fma(minus, row, X::load(d + c)));
      const V dnormed = args.norm_before_gate ? incoming * g : incoming;
      X::store(dweight + c, fma(dnormed, normed, X::load(dweight + c)));
      if (grads.dx.given()) X::store(grads.dx.at<E>(b, t, h, c), args.norm_before_gate ? dn : dn * g, width - c);
      if (!grads.dz.given()) continue;
      V dgate = incoming * normed;
      if (weight != nullptr) dgate = dgate * X::load(weight + c);
      if (!args.norm_before_gate) dgate = dn * X::load(x + c, width - c);
      X::store(grads.dz.at<E>(b, t, h, c), dgate * slope, width - c);
    }
  });
  if (!grads.dweight.given()) return;
  const int64_t rows = grads.dweight.size[0], columns = grads.dweight.size[1];
  parallel(launch, rows * columns, [&](int64_t at, int) {
    const int64_t i = at / columns, j = at % columns;
    double total = 0;  // also over what was broadcast
    for (int64_t h = rows == 1 ? 0 : i; h < (rows == 1 ? H : i + 1); ++h) {
      for (int64_t c = columns == 1 ? 0 : j; c < (columns == 1 ? width : j + 1); ++c) {
        for (int64_t task = 0; task < tasks; ++task) total += static_cast<double>(m.parts[task * part + h * m.ld + c]);
      }
    }
    store_f64(grads.dweight.data, grads.dweight.dtype, i * grads.dweight.stride[0] + j * grads.dweight.stride[1], total);
  });
}

}  // namespace

void rms_norm_gated_forward(const RmsNormGatedArgs& args, const RmsNormGatedOut& out, const Launch& launch) {
  by_dtype(args.x.dtype, [&]<class T, class E>() { forward<T, E>(args, out, launch); });
}
void rms_norm_gated_backward(const RmsNormGatedArgs& args, const RmsNormGatedOut&, const RmsNormGatedGrads& grads,
                             const Launch& launch) {
  by_dtype(args.x.dtype, [&]<class T, class E>() { backward<T, E>(args, grads, launch); });
}
int64_t rms_norm_gated_workspace(const RmsNormGatedArgs& args, Pass pass, int workers) {
  return by_dtype(args.x.dtype, [&]<class T, class E>() {
    Arena arena;
    Memory<T>::cut(arena, args, pass, workers);
    return arena.used();
  });
}

}  // namespace linnet::LINNET_ISA
