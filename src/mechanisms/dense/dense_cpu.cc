// dense on the vector units. Few tokens (T at most kFew, decoding): dot products along the rows of the weights as they lie,
// which memory bounds. Many: panels of 64 outputs transposed in scratch and the register tiles of gemm.h.
#include "dense.h"
#include "dense_panels.h"

namespace linnet::LINNET_ISA {
namespace {

constexpr int64_t kFew = 4;   // by T alone: a sequence's result does not depend on the batch
constexpr int kOutputs = 32;  // of a task
constexpr int kTogether = 4;  // rows of x at a time

LINNET_INLINE RowRounding rounding_of(const DenseArgs& args) {
  return args.rounding == DenseRounding::bf16 ? RowRounding::bf16 : RowRounding::none;
}

// Q outputs times R rows: sums along the lanes, one accumulator each; sums[r * kOutputs + q].
template <int Q, int R, class T, class S>
LINNET_INLINE void dots(const S* weight, int64_t stride, const T* x, int64_t ld, int n, T* sums) {
  using X = Vec<T>;
  typename X::V acc[Q][R] = {};
  int c = 0;
  for (; c + X::W <= n; c += X::W) {
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q) {
      const typename X::V w = X::load(weight + q * stride + c);
      if constexpr (Q == 8) __builtin_prefetch(weight + (q + Q) * stride + c, 0, 2);  // the next block
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
#pragma GCC unroll 2
  for (int q = 0; q < Q; q += 4) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sum_four<R, T>(&acc[q][r], sums + r * kOutputs + q);
  }
}

// Outputs [begin, end), at most kOutputs, of R rows. Outputs that are too few for a block of Q are computed with the last
// weights repeated: every output has the same sums wherever it stands.
template <int R, class T, class E, class S>
void few_rows(const DenseArgs& args, const Rows<T>& x, int64_t first, int64_t begin, int64_t end, const View& out) {
  constexpr int Q = R == 1 ? 8 : 4;
  const int n = static_cast<int>(args.weight.size[1]);
  const int64_t stride = args.weight.stride[0], per_batch = args.x.size[1];
  const T* rows = x.data + first * x.stride;
  T sums[R * kOutputs];
  int64_t o = begin;
  for (; o + Q <= end; o += Q) dots<Q, R>(args.weight.at<const S>(o), stride, rows, x.stride, n, sums + (o - begin));
  for (; o < end; ++o) {
    T four[R * kOutputs];
    dots<4, R>(args.weight.at<const S>(o), 0, rows, x.stride, n, four);
    for (int r = 0; r < R; ++r) sums[r * kOutputs + o - begin] = four[r * kOutputs];
  }
  for (int r = 0; r < R; ++r) {
    const int64_t row = first + r;
    store_row<T>(sums + r * kOutputs, args.bias, begin, static_cast<int>(end - begin),
                 out.at<E>(row / per_batch, row % per_batch, begin));
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
