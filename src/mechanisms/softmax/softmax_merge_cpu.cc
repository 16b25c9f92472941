// softmax_merge for one instruction set: one pass over the parts, row by row; bound by memory.
//
//   M = max_p lse_p,  w_p = exp(lse_p - M),  out = sum_p w_p out_p / sum_p w_p,  lse = M + log sum_p w_p
//   backward, w_p = exp(lse_p - lse):  dout_p = w_p dout,  dlse_p = w_p (dout.(out_p - out) + dlse)
//
// A part with lse_p = -inf is skipped whatever its out holds.
#include "softmax_problem.h"

namespace linnet::LINNET_ISA {
namespace {

constexpr int64_t kRows = 64;  // tokens of a task

// Runs f(b, t, h) over all rows, kRows tokens of one batch row at a time.
template <class F>
void for_rows(const View& parts, const Launch& launch, const F& f) {
  const int64_t B = parts.size[1], T = parts.size[2], H = parts.size[3], blocks = divide_up(T, kRows);
  const double work = static_cast<double>(parts.elements()) * 4;
  run_tasks(launch, B * blocks, work, [&](int64_t task, int) {
    const int64_t b = task / blocks, begin = task % blocks * kRows, end = smaller(begin + kRows, T);
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t h = 0; h < H; ++h) f(b, t, h);
    }
  });
}

LINNET_INLINE int64_t row_at(const View& x, int64_t b, int64_t t, int64_t h) {
  return b * x.stride[0] + t * x.stride[1] + h * x.stride[2];
}
LINNET_INLINE int64_t part_at(const View& x, int64_t p, int64_t b, int64_t t, int64_t h) {
  return p * x.stride[0] + b * x.stride[1] + t * x.stride[2] + h * x.stride[3];
}
template <class T>
LINNET_INLINE T* numbers(const View& x) {  // lse and its gradients are T
  return static_cast<T*>(x.data);
}
template <class T>
LINNET_INLINE T exponential(T x) {
  return exp(Vec<T>::broadcast(x))[0];
}

template <class T, class S>
void forward_rows(const SoftmaxMergeArgs& args, const SoftmaxOut& result, const Launch& launch) {
  using X = Vec<T>;
  constexpr int N = 4;
  const int64_t P = args.out_parts.size[0];
  const int V = static_cast<int>(args.out_parts.size[4]);
  for_rows(args.out_parts, launch, [&](int64_t b, int64_t t, int64_t h) {
    const auto lse_of = [&](int64_t p) { return numbers<T>(args.lse_parts)[part_at(args.lse_parts, p, b, t, h)]; };
    T top = -kInfinity<T>, total = 0;
    for (int64_t p = 0; p < P; ++p) top = lse_of(p) > top ? lse_of(p) : top;
    if (top == -kInfinity<T>) top = 0;
    for (int64_t p = 0; p < P; ++p) total += lse_of(p) == -kInfinity<T> ? T(0) : exponential(lse_of(p) - top);
    const typename X::V inverse = X::broadcast(total == 0 ? T(0) : 1 / total);
    S* const out = static_cast<S*>(result.out.data) + row_at(result.out, b, t, h);
    for (int c0 = 0; c0 < V; c0 += N * X::W) {
      typename X::V sum[N] = {};
      for (int64_t p = 0; p < P; ++p) {
        if (lse_of(p) == -kInfinity<T>) continue;
        const typename X::V weight = X::broadcast(exponential(lse_of(p) - top));
        const S* const from = static_cast<const S*>(args.out_parts.data) + part_at(args.out_parts, p, b, t, h);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sum[n] = fma(weight, X::load(from + c0 + n * X::W, V - c0 - n * X::W), sum[n]);
      }
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) X::store(out + c0 + n * X::W, sum[n] * inverse, V - c0 - n * X::W);
    }
    if (result.lse.given()) numbers<T>(result.lse)[row_at(result.lse, b, t, h)] = top + log(X::broadcast(total))[0];
  });
}

template <class T, class S>
void backward_rows(const SoftmaxMergeArgs& args, const SoftmaxOut& result, const SoftmaxMergeGrads& grads,
                   const Launch& launch) {
  using X = Vec<T>;
  const int64_t P = args.out_parts.size[0];
  const int V = static_cast<int>(args.out_parts.size[4]);
  for_rows(args.out_parts, launch, [&](int64_t b, int64_t t, int64_t h) {
    const T lse = numbers<T>(result.lse)[row_at(result.lse, b, t, h)];
    const T dlse = grads.dlse.given() ? numbers<T>(grads.dlse)[row_at(grads.dlse, b, t, h)] : T(0);
    const S* const out = static_cast<const S*>(result.out.data) + row_at(result.out, b, t, h);
    const S* const dout = grads.dout.given() ? static_cast<const S*>(grads.dout.data) + row_at(grads.dout, b, t, h) : nullptr;
    for (int64_t p = 0; p < P; ++p) {
      const T part = numbers<T>(args.lse_parts)[part_at(args.lse_parts, p, b, t, h)];
      const bool skipped = part == -kInfinity<T>;
      const typename X::V weight = X::broadcast(skipped ? T(0) : exponential(part - lse));
      const S* const from = static_cast<const S*>(args.out_parts.data) + part_at(args.out_parts, p, b, t, h);
      S* const to =
          grads.dout_parts.given() ? static_cast<S*>(grads.dout_parts.data) + part_at(grads.dout_parts, p, b, t, h) : nullptr;
      typename X::V dot = X::zero();
      for (int c = 0; c < V; c += X::W) {
        const typename X::V d = dout == nullptr ? X::zero() : X::load(dout + c, V - c);
        dot = fma(d, X::load(from + c, V - c) - X::load(out + c, V - c), dot);
        if (to != nullptr) X::store(to + c, skipped ? X::zero() : weight * d, V - c);
      }
      if (!grads.dlse_parts.given()) continue;
      numbers<T>(grads.dlse_parts)[part_at(grads.dlse_parts, p, b, t, h)] = skipped ? T(0) : weight[0] * (sum(dot) + dlse);
    }
  });
}

template <class F>
LINNET_INLINE void with_types(Dtype dtype, const F& f) {
  switch (dtype) {
    case Dtype::f64: return f.template operator()<double, double>();
    case Dtype::bf16: return f.template operator()<float, Bf16>();
    case Dtype::f16: return f.template operator()<float, F16>();
    default: return f.template operator()<float, float>();
  }
}

}  // namespace

int64_t softmax_merge_workspace(const SoftmaxMergeArgs&, Pass, int) { return 0; }

void softmax_merge_forward(const SoftmaxMergeArgs& args, const SoftmaxOut& out, const Launch& launch) {
  with_types(args.out_parts.dtype, [&]<class T, class S>() { forward_rows<T, S>(args, out, launch); });
}

void softmax_merge_backward(const SoftmaxMergeArgs& args, const SoftmaxOut& out, const SoftmaxMergeGrads& grads,
                            const Launch& launch) {
  with_types(args.out_parts.dtype, [&]<class T, class S>() { backward_rows<T, S>(args, out, grads, launch); });
}

}  // namespace linnet::LINNET_ISA
