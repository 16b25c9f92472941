// l2_norm on the vector units: a row at a time, read twice while it lies in L1. Tasks are runs of 64 tokens.
#include "l2_norm.h"
#include "mechanisms/shared/token_tasks.h"

namespace linnet::LINNET_ISA {
namespace {

template <class T, class E>
LINNET_INLINE T dot(const E* x, const E* y, int n) {
  using X = Vec<T>;
  typename X::V total = X::zero();
  for (int c = 0; c < n; c += X::W) total = fma(X::load(x + c, n - c), X::load(y + c, n - c), total);
  return sum(total);
}
template <class T>
LINNET_INLINE T reciprocal_root(T squares) {
  return squares == 0 ? T(0) : T(1) / sqrt(Vec<T>::broadcast(squares))[0];
}

template <class T, class E>
void forward(const L2NormArgs& args, const L2NormOut& out, const Launch& launch) {
  using X = Vec<T>;
  const int K = static_cast<int>(args.x.size[3]);
  each_row(args.x, launch, [&](int64_t b, int64_t t, int64_t h, int64_t, int) {
    const E* x = args.x.at<const E>(b, t, h);
    E* y = out.out.at<E>(b, t, h);
    const typename X::V r = X::broadcast(reciprocal_root<T>(dot<T>(x, x, K) + static_cast<T>(args.eps)));
    for (int c = 0; c < K; c += X::W) X::store(y + c, r * X::load(x + c, K - c), K - c);
  });
}

template <class T, class E>
void backward(const L2NormArgs& args, const L2NormGrads& grads, const Launch& launch) {
  using X = Vec<T>;
  const int K = static_cast<int>(args.x.size[3]);
  each_row(args.x, launch, [&](int64_t b, int64_t t, int64_t h, int64_t, int) {
    const E* x = args.x.at<const E>(b, t, h);
    E* dx = grads.dx.at<E>(b, t, h);
    if (!grads.dout.given()) {
      for (int c = 0; c < K; c += X::W) X::store(dx + c, X::zero(), K - c);
      return;
    }
    const E* d = grads.dout.at<const E>(b, t, h);
    // dx = r (d - a x), a = x.d / (x.x + eps). Where d lies along x little is left of d, so a is refined once by what is left:
    // the rest e = d - a x has x.e = a eps when a is exact.
    const T eps = static_cast<T>(args.eps), r = reciprocal_root<T>(dot<T>(x, x, K) + eps), a = r * dot<T>(x, d, K) * r;
    const typename X::V along = X::broadcast(-a);
    typename X::V total = X::zero();
    for (int c = 0; c < K; c += X::W) {
      const typename X::V row = X::load(x + c, K - c);
      total = fma(row, fma(along, row, X::load(d + c, K - c)), total);
    }
    const typename X::V scale = X::broadcast(r), rest = X::broadcast(-(r * (sum(total) - a * eps) * r));
    for (int c = 0; c < K; c += X::W) {
      const typename X::V row = X::load(x + c, K - c);
      X::store(dx + c, scale * fma(rest, row, fma(along, row, X::load(d + c, K - c))), K - c);
    }
  });
}

}  // namespace

void l2_norm_forward(const L2NormArgs& args, const L2NormOut& out, const Launch& launch) {
  by_dtype(args.x.dtype, [&]<class T, class E>() { forward<T, E>(args, out, launch); });
}
void l2_norm_backward(const L2NormArgs& args, const L2NormOut&, const L2NormGrads& grads, const Launch& launch) {
  if (!grads.dx.given()) return;
  by_dtype(args.x.dtype, [&]<class T, class E>() { backward<T, E>(args, grads, launch); });
}
int64_t l2_norm_workspace(const L2NormArgs&, Pass, int) { return 0; }

}  // namespace linnet::LINNET_ISA
