// dense on the vector units. Few tokens (T at most kFew, decoding): dot products along the rows of the weights as they lie,
// which memory bounds. Many: panels of 64 outputs transposed in scratch and the register tiles of gemm.h.
#include "dense.h"
#include "dense_panels.h"

namespace linnet::LINNET_ISA {
namespace {

constexpr int64_t kFew = 4;   // by T alone: a sequence's result does not depend on the batch
constexpr int kTogether = 4;  // rows of x at a time

LINNET_INLINE RowRounding rounding_of(const DenseArgs& args) {
  return args.rounding == DenseRounding::bf16 ? RowRounding::bf16 : RowRounding::none;
}

// Q outputs times R rows: sums along the lanes, one accumulator each.
template <int Q, int R, class T, class S>
LINNET_INLINE void dots(const S* weight, int64_t stride, const T* x, int64_t ld, int n, T (&result)[Q][R]) {
  using X = Vec<T>;
  typename X::V acc[Q][R] = {};
  int c = 0;
  for (; c + X::W <= n; c += X::W) {
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q) {
      const typename X::V w = X::load(weight + q * stride + c);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) acc[q][r] = fma(w, X::load(x + r * ld + c), acc[q][r]);
    }
  }
  if (c < n) {
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q) {
      const typename X::V w = X::load(weight + q * stride + c, n - c);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) acc[q][r] = fma(w, X::load(x + r * ld + c, n - c), acc[q][r]);
    }
  }
#pragma GCC unroll 8
  for (int q = 0; q < Q; ++q) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) result[q][r] = sum(acc[q][r]);
  }
}

template <int R, class T, class E, class S>
void few_rows(const DenseArgs& args, const Rows<T>& x, int64_t first, int64_t begin, int64_t end, const View& out) {
  constexpr int Q = R == 1 ? 8 : 4;
  const int n = static_cast<int>(args.weight.size[1]);
  const int64_t stride = args.weight.stride[0], T_ = args.x.size[1];
  const T* rows = x.data + first * x.stride;
  const auto store = [&](int64_t o, int r, T value) {
    if (args.bias.given()) value += static_cast<T>(load_f64(args.bias.data, args.bias.dtype, o));
    *out.at<E>((first + r) / T_, (first + r) % T_, o) = round_to<E>(static_cast<double>(value));
  };
  int64_t o = begin;
  for (; o + Q <= end; o += Q) {
    T result[Q][R];
    dots<Q, R>(args.weight.at<const S>(o), stride, rows, x.stride, n, result);
    for (int q = 0; q < Q; ++q) {
      for (int r = 0; r < R; ++r) store(o + q, r, result[q][r]);
    }
  }
  for (; o < end; ++o) {
    T result[1][R];
    dots<1, R>(args.weight.at<const S>(o), stride, rows, x.stride, n, result);
    for (int r = 0; r < R; ++r) store(o, r, result[0][r]);
  }
}

template <class T, class E, class S>
void forward(const DenseArgs& args, const DenseOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  const RowRounding rounding = rounding_of(args);
  const Scratch<T> scratch = Scratch<T>::cut(arena, args.x, rounding, launch.workers);
  const int64_t rows = args.x.size[0] * args.x.size[1], O = args.weight.size[0], I = args.weight.size[1];
  if (rows == 0) return;
  const Rows<T> x = rows_of<T>(args.x, rounding, scratch, launch);
  if (args.x.size[1] > kFew) {
    const auto pack = [&](int64_t o, int n, int64_t i, int depth, T* panel) {
      load_tile_transposed<T>(args.weight.at<const S>(o, i), args.weight.stride[0], n, depth, panel, kColumns);
    };
    return multiply_panels<T, E>(x, rows, I, O, args.x.size[1], args.bias, out.out, scratch, launch, pack);
  }
  constexpr int64_t kOutputs = 32;
  parallel_near(launch, (O + kOutputs - 1) / kOutputs, [&](int64_t task, int) {
    FlushSubnormals flush;
    const int64_t begin = task * kOutputs, end = begin + kOutputs < O ? begin + kOutputs : O;
    int64_t first = 0;
    for (; first + kTogether <= rows; first += kTogether) few_rows<kTogether, T, E, S>(args, x, first, begin, end, out.out);
    for (; first < rows; ++first) few_rows<1, T, E, S>(args, x, first, begin, end, out.out);
  });
}

}  // namespace

void dense_forward(const DenseArgs& args, const DenseOut& out, const Launch& launch) {
  by_dtype(args.x.dtype, [&]<class T, class E>() {
    if constexpr (sizeof(T) == 8) {
      forward<double, double, double>(args, out, launch);
    } else {
      if (args.weight.dtype == Dtype::bf16) return forward<float, E, Bf16>(args, out, launch);
      if (args.weight.dtype == Dtype::f16) return forward<float, E, F16>(args, out, launch);
      forward<float, E, float>(args, out, launch);
    }
  });
}
int64_t dense_workspace(const DenseArgs& args, Pass, int workers) {
  return by_dtype(args.x.dtype, [&]<class T, class E>() {
    Arena arena;
    Scratch<T>::cut(arena, args.x, rounding_of(args), workers);
    return arena.used();
  });
}

}  // namespace linnet::LINNET_ISA
