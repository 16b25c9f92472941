// layer_norm on the vector units: a row at a time through L1, tasks of 64 tokens. dweight and dbias are summed per task, then
// over the tasks in double.
#include "core/heads.h"
#include "layer_norm.h"
#include "mechanisms/shared/token_tasks.h"

namespace linnet::LINNET_ISA {
namespace {

LINNET_INLINE int64_t padded(const View& x) { return (x.size[x.rank - 1] + 15) / 16 * 16; }

// A parameter lies in the call's type or in the computing one; absent it is `otherwise`.
template <class T, class E>
LINNET_INLINE typename Vec<T>::V parameter(const View& view, T otherwise, int c, int n) {
  using X = Vec<T>;
  if (!view.given()) return X::broadcast(otherwise);
  if (view.dtype == (sizeof(T) == 8 ? Dtype::f64 : Dtype::f32)) return X::load(static_cast<const T*>(view.data) + c, n);
  return X::load(static_cast<const E*>(view.data) + c, n);
}

// Leaves the row without its mean in `centered` [padded, zeros behind the end]; returns 1 / sqrt(variance + eps).
template <class T, class E>
LINNET_INLINE T center(const E* x, int n, double eps, T* centered) {
  using X = Vec<T>;
  typename X::V total = X::zero(), squares = X::zero();
  for (int c = 0; c < n; c += X::W) total = total + X::load(x + c, n - c);
  const typename X::V mean = X::broadcast(sum(total) / static_cast<T>(n));
  // The mean of what is left is what rounding took from the first one.
  total = X::zero();
  for (int c = 0; c < n; c += X::W) {
    const typename X::V v = select(X::prefix(n - c), X::load(x + c, n - c) - mean, X::zero());
    X::store(centered + c, v);
    total = total + v;
  }
  const typename X::V more = X::broadcast(sum(total) / static_cast<T>(n));
  for (int c = 0; c < n; c += X::W) {
    const typename X::V v = select(X::prefix(n - c), X::load(centered + c) - more, X::zero());
    X::store(centered + c, v);
    squares = fma(v, v, squares);
  }
  const T variance = sum(squares) / static_cast<T>(n) + static_cast<T>(eps);
  return variance == 0 ? T(0) : T(1) / sqrt(X::broadcast(variance))[0];
}

template <class T>
struct Memory {
  T* rows;   // [workers, 2, ld]
  T* parts;  // [tasks, 2, ld]: dweight, dbias
  int64_t ld;
  static Memory cut(Arena& arena, const LayerNormArgs& args, Pass pass, int workers) {
    Memory m;
    m.ld = padded(args.x);
    m.rows = arena.take<T>(workers * 2 * m.ld);
    m.parts = arena.take<T>(pass == Pass::backward ? args.x.size[0] * token_tasks(args.x) * 2 * m.ld : 0);
    return m;
  }
};

template <class T, class E>
void forward(const LayerNormArgs& args, const LayerNormOut& out, const Launch& launch) {
  using X = Vec<T>;
  const View x = with_heads(args.x), y = with_heads(out.out);
  const int n = static_cast<int>(x.size[3]);
  Arena arena(launch.workspace);
  const Memory<T> m = Memory<T>::cut(arena, args, Pass::forward, launch.workers);
  each_row(x, launch, [&](int64_t b, int64_t t, int64_t h, int64_t, int worker) {
    T* row = m.rows + worker * 2 * m.ld;
    E* to = y.at<E>(b, t, h);
    const typename X::V r = X::broadcast(center<T>(x.at<const E>(b, t, h), n, args.eps, row));
    for (int c = 0; c < n; c += X::W) {
      const typename X::V normed = X::load(row + c) * r, bias = parameter<T, E>(args.bias, T(0), c, n - c);
      X::store(to + c, fma(normed, parameter<T, E>(args.weight, T(1), c, n - c), bias), n - c);
    }
  });
}

// With n = r (x - mean), d = dout weight:  dx = r (d - mean d - n a), a = mean(n d). What is left of d where it lies along n or
// along ones is refined once: its mean is 0, and its product with n has the mean a eps r^2.
template <class T, class E>
void backward(const LayerNormArgs& args, const LayerNormGrads& grads, const Launch& launch) {
  using X = Vec<T>;
  using V = typename X::V;
  const View x = with_heads(args.x), dout = with_heads(grads.dout), dx = with_heads(grads.dx);
  const int n = static_cast<int>(x.size[3]);
  const T width = static_cast<T>(n);
  Arena arena(launch.workspace);
  const Memory<T> m = Memory<T>::cut(arena, args, Pass::backward, launch.workers);
  const int64_t tasks = x.size[0] * token_tasks(x);
  each_row(x, launch, [&](int64_t b, int64_t t, int64_t h, int64_t task, int worker) {
    T *dweight = m.parts + task * 2 * m.ld, *dbias = dweight + m.ld, *row = m.rows + worker * 2 * m.ld, *rest = row + m.ld;
    if (begins_task(t, h)) {
      for (int c = 0; c < 2 * m.ld; c += X::W) X::store(dweight + c, X::zero());
    }
    const E* d = dout.given() ? dout.at<const E>(b, t, h) : nullptr;
    const T root = center<T>(x.at<const E>(b, t, h), n, args.eps, row);
    const V r = X::broadcast(root);
    V totals = X::zero(), dots = X::zero();
    for (int c = 0; c < n; c += X::W) {
      const V normed = X::load(row + c) * r, g = d == nullptr ? X::zero() : X::load(d + c, n - c);
      X::store(row + c, normed);
      X::store(dweight + c, fma(g, normed, X::load(dweight + c)));
      X::store(dbias + c, g + X::load(dbias + c));
      const V weighed = g * parameter<T, E>(args.weight, T(1), c, n - c);
      X::store(rest + c, weighed);
      totals = totals + weighed;
      dots = fma(weighed, normed, dots);
    }
    if (!dx.given()) return;
    T mean = sum(totals) / width, along = sum(dots) / width;
    const T expected = along * static_cast<T>(args.eps) * root * root;
    totals = dots = X::zero();
    for (int c = 0; c < n; c += X::W) {
      const V normed = X::load(row + c);
      const V left =
          select(X::prefix(n - c), fma(normed, X::broadcast(-along), X::load(rest + c) - X::broadcast(mean)), X::zero());
      X::store(rest + c, left);
      totals = totals + left;
      dots = fma(left, normed, dots);
    }
    mean = sum(totals) / width;
    along = sum(dots) / width - expected;
    for (int c = 0; c < n; c += X::W) {
      X::store(dx.at<E>(b, t, h, c), r * fma(X::load(row + c), X::broadcast(-along), X::load(rest + c) - X::broadcast(mean)),
               n - c);
    }
  });
  for (int64_t c = 0; c < n; ++c) {
    double weight = 0, bias = 0;
    for (int64_t task = 0; task < tasks; ++task) {
      weight += static_cast<double>(m.parts[task * 2 * m.ld + c]);
      bias += static_cast<double>(m.parts[task * 2 * m.ld + m.ld + c]);
    }
    if (grads.dweight.given()) store_f64(grads.dweight.data, grads.dweight.dtype, c, weight);
    if (grads.dbias.given()) store_f64(grads.dbias.data, grads.dbias.dtype, c, bias);
  }
}

}  // namespace

void layer_norm_forward(const LayerNormArgs& args, const LayerNormOut& out, const Launch& launch) {
  by_dtype(args.x.dtype, [&]<class T, class E>() { forward<T, E>(args, out, launch); });
}
void layer_norm_backward(const LayerNormArgs& args, const LayerNormOut&, const LayerNormGrads& grads, const Launch& launch) {
  by_dtype(args.x.dtype, [&]<class T, class E>() { backward<T, E>(args, grads, launch); });
}
int64_t layer_norm_workspace(const LayerNormArgs& args, Pass pass, int workers) {
  return by_dtype(args.x.dtype, [&]<class T, class E>() {
    Arena arena;
    Memory<T>::cut(arena, args, pass, workers);
    return arena.used();
  });
}

}  // namespace linnet::LINNET_ISA
