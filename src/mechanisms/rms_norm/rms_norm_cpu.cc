// rms_norm on the vector units: a row at a time through L1, tasks of 64 tokens (fewer rows when they are long). dweight is
// summed per task, then over the tasks in double.
#include "core/heads.h"
#include "mechanisms/shared/token_tasks.h"
#include "rms_norm.h"

namespace linnet::LINNET_ISA {
namespace {

LINNET_INLINE int64_t padded(const View& x) { return (x.size[x.rank - 1] + 15) / 16 * 16; }

// The weight lies in the call's type or in the computing one.
template <class T, class E>
struct Weight {
  const T* wide = nullptr;
  const E* narrow = nullptr;
  T plus;
  explicit Weight(const RmsNormArgs& args) : plus(args.plus_one ? T(1) : T(0)) {
    if (!args.weight.given()) return;
    if (args.weight.dtype == (sizeof(T) == 8 ? Dtype::f64 : Dtype::f32)) {
      wide = static_cast<const T*>(args.weight.data);
    } else {
      narrow = static_cast<const E*>(args.weight.data);
    }
  }
  LINNET_INLINE typename Vec<T>::V load(int c, int n) const {
    using X = Vec<T>;
    if (wide != nullptr) return X::load(wide + c, n) + X::broadcast(plus);
    return narrow != nullptr ? X::load(narrow + c, n) + X::broadcast(plus) : X::broadcast(1);
  }
};

// Four accumulators: the latency of one multiply-add is four cycles.
template <class T, class E>
LINNET_INLINE T sum_of_squares(const E* x, int n) {
  using X = Vec<T>;
  typename X::V total[4] = {X::zero(), X::zero(), X::zero(), X::zero()};
  for (int c = 0; c < n; c += 4 * X::W) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const typename X::V v = X::load(x + c + i * X::W, n - c - i * X::W);
      total[i] = fma(v, v, total[i]);
    }
  }
  return sum((total[0] + total[1]) + (total[2] + total[3]));
}
template <class T>
LINNET_INLINE T reciprocal(T squares, int64_t width, double eps) {
  const T mean = squares / static_cast<T>(width) + static_cast<T>(eps);
  return mean == 0 ? T(0) : T(1) / sqrt(Vec<T>::broadcast(mean))[0];
}

template <class T, class E>
void forward(const RmsNormArgs& args, const RmsNormOut& out, const Launch& launch) {
  using X = Vec<T>;
  const View x = with_heads(args.x), y = with_heads(out.out);
  const int n = static_cast<int>(x.size[3]);
  const Weight<T, E> weight(args);
  each_row(x, launch, [&](int64_t b, int64_t t, int64_t h, int64_t, int) {
    const E* from = x.at<const E>(b, t, h);
    E* to = y.at<E>(b, t, h);
    const typename X::V r = X::broadcast(reciprocal<T>(sum_of_squares<T>(from, n), n, args.eps));
    for (int c = 0; c < n; c += X::W) X::store(to + c, X::load(from + c, n - c) * r * weight.load(c, n - c), n - c);
  });
}

// With r the reciprocal root, d = dout weight:  dx = r (d - a x), a = r^2 mean(d x);  dweight = dout x r.
// Where d lies along x little is left of d, so a is refined once by what is left (l2_norm): mean((d - a x) x) = a eps.
template <class T, class E>
void backward(const RmsNormArgs& args, const RmsNormGrads& grads, const Launch& launch) {
  using X = Vec<T>;
  using V = typename X::V;
  const View x = with_heads(args.x), dout = with_heads(grads.dout), dx = with_heads(grads.dx);
  const int n = static_cast<int>(x.size[3]);
  const int64_t ld = padded(x), tasks = x.size[0] * token_tasks(x);
  const Weight<T, E> weight(args);
  Arena arena(launch.workspace);
  T* parts = arena.take<T>(tasks * ld);
  each_row(x, launch, [&](int64_t b, int64_t t, int64_t h, int64_t task, int) {
    T* part = parts + task * ld;
    if (begins_task(t, h)) {
      for (int c = 0; c < ld; c += X::W) X::store(part + c, X::zero());
    }
    const E* from = x.at<const E>(b, t, h);
    const E* d = dout.given() ? dout.at<const E>(b, t, h) : nullptr;
    const auto incoming = [&](int c) { return d == nullptr ? X::zero() : X::load(d + c, n - c); };
    V squares = X::zero(), dots = X::zero();
    for (int c = 0; c < n; c += X::W) {
      const V row = X::load(from + c, n - c);
      squares = fma(row, row, squares);
      dots = fma(incoming(c) * weight.load(c, n - c), row, dots);
    }
    const T root = reciprocal<T>(sum(squares), n, args.eps), along = root * (sum(dots) / static_cast<T>(n)) * root;
    const V r = X::broadcast(root), minus = X::broadcast(-along);
    V left = X::zero();
    for (int c = 0; c < n; c += X::W) {
      const V row = X::load(from + c, n - c);
      left = fma(row, fma(minus, row, incoming(c) * weight.load(c, n - c)), left);
    }
    const T excess = sum(left) / static_cast<T>(n) - along * static_cast<T>(args.eps);
    const V rest = X::broadcast(-(root * excess * root));
    for (int c = 0; c < n; c += X::W) {
      const V row = X::load(from + c, n - c), g = incoming(c);
      X::store(part + c, fma(g, row * r, X::load(part + c)));
      if (dx.given()) {
        X::store(dx.at<E>(b, t, h, c), r * fma(rest, row, fma(minus, row, g * weight.load(c, n - c))), n - c);
      }
    }
  });
  if (!grads.dweight.given()) return;
  for (int64_t c = 0; c < n; ++c) {
    double total = 0;
    for (int64_t task = 0; task < tasks; ++task) total += static_cast<double>(parts[task * ld + c]);
    store_f64(grads.dweight.data, grads.dweight.dtype, c, total);
  }
}

}  // namespace

void rms_norm_forward(const RmsNormArgs& args, const RmsNormOut& out, const Launch& launch) {
  by_dtype(args.x.dtype, [&]<class T, class E>() { forward<T, E>(args, out, launch); });
}
void rms_norm_backward(const RmsNormArgs& args, const RmsNormOut&, const RmsNormGrads& grads, const Launch& launch) {
  by_dtype(args.x.dtype, [&]<class T, class E>() { backward<T, E>(args, grads, launch); });
}
int64_t rms_norm_workspace(const RmsNormArgs& args, Pass pass, int) {
  if (pass == Pass::forward) return 0;
  return by_dtype(args.x.dtype, [&]<class T, class E>() {
    Arena arena;
    arena.take<T>(args.x.size[0] * token_tasks(args.x) * padded(args.x));
    return arena.used();
  });
}

}  // namespace linnet::LINNET_ISA
