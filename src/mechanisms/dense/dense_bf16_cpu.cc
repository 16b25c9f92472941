// dense on the bf16 dot products of AVX512_BF16: bf16 weights, x in bf16 or rounded to it; other calls take the avx512 kernels.
// Few tokens: dot products along the rows of the weights as they lie. Many: panels of pairs in scratch and the tiles of
// gemm_bf16.h.
#if defined(LINNET_ISA_avx512)

#undef LINNET_ISA
#define LINNET_ISA avx512_bf16
#pragma GCC target("avx512bf16")

#include "dense.h"
#include "dense_panels.h"
#include "simd/gemm_bf16.h"

namespace linnet::avx512_bf16 {
namespace {

constexpr int64_t kFew = 4;
constexpr int kOutputs = 32;  // of a task with few tokens
constexpr int kPairDepth = kDepth / 2;

bool takes(const DenseArgs& args) {
  if (args.weight.dtype != Dtype::bf16) return false;
  return args.x.dtype == Dtype::bf16 || (args.rounding == DenseRounding::bf16 && args.x.dtype != Dtype::f64);
}

struct PairScratch {
  Pair* rows;   // [rows, ld], zeros behind the end
  Pair* panel;  // [workers, kPairDepth, kColumns]
  float* sums;  // [workers, kRows, kColumns]
  int64_t ld;
  static PairScratch cut(Arena& arena, const View& x, int workers) {
    PairScratch s;
    const int64_t rows = x.size[0] * x.size[1];
    s.ld = (x.size[2] + 31) / 32 * 16;
    s.rows = arena.take<Pair>(rows * s.ld);
    s.panel = arena.take<Pair>(workers * kPairDepth * kColumns);
    s.sums = arena.take<float>(workers * (rows < kRows ? rows : kRows) * kColumns);
    return s;
  }
};

template <class E>
void load_pairs_of(const View& x, const PairScratch& scratch, const Launch& launch) {
  const int n = static_cast<int>(x.size[2]);
  const int64_t rows = x.size[0] * x.size[1], each = 16;
  parallel(launch, (rows + each - 1) / each, [&](int64_t task, int) {
    for (int64_t i = task * each; i < task * each + each && i < rows; ++i) {
      const E* from = x.at<const E>(i / x.size[1], i % x.size[1]);
      char* to = reinterpret_cast<char*>(scratch.rows + i * scratch.ld);
      for (int c = 0; c < n; c += 16, to += 32) {
        const vu16 h = from_vf(Vec<float>::load(from + c, n - c), Bf16{});
        __builtin_memcpy(to, &h, sizeof h);
      }
      if ((n + 15) / 16 % 2 != 0) __builtin_memset(to, 0, 32);
    }
  });
}

LINNET_INLINE vu32 load_row(const Bf16* p, int n) {
  if (n >= 32) return load_pairs(reinterpret_cast<const Pair*>(p));
  return reinterpret_cast<vu32>(_mm512_maskz_loadu_epi16((1u << n) - 1u, p));
}

// Q outputs times R rows: sums[r * kOutputs + q].
template <int Q, int R>
LINNET_INLINE void dots(const Bf16* weight, int64_t stride, const Pair* x, int64_t ld, int n, float* sums) {
  vf acc[Q][R] = {};
  for (int c = 0; c < n; c += 32) {
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q) {
      const vu32 w = load_row(weight + q * stride + c, n - c);
      if constexpr (Q == 8) __builtin_prefetch(weight + (q + Q) * stride + c, 0, 2);  // the next block
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) acc[q][r] = dot_pairs(acc[q][r], w, load_pairs(x + r * ld + c / 2));
    }
  }
#pragma GCC unroll 2
  for (int q = 0; q < Q; q += 4) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sum_four<R, float>(&acc[q][r], sums + r * kOutputs + q);
  }
}
template <int R, class E>
void few_rows(const DenseArgs& args, const PairScratch& x, int64_t first, int64_t begin, int64_t end, const View& out) {
  constexpr int Q = R == 1 ? 8 : 4;
  const int n = static_cast<int>(args.weight.size[1]);
  const int64_t stride = args.weight.stride[0], per_batch = args.x.size[1];
  const Pair* rows = x.rows + first * x.ld;
  float sums[R * kOutputs];
  int64_t o = begin;
  for (; o + Q <= end; o += Q) dots<Q, R>(args.weight.at<const Bf16>(o), stride, rows, x.ld, n, sums + (o - begin));
  for (; o < end; ++o) {  // the same sums as in a block: one output four times
    float four[R * kOutputs];
    dots<4, R>(args.weight.at<const Bf16>(o), 0, rows, x.ld, n, four);
    for (int r = 0; r < R; ++r) sums[r * kOutputs + o - begin] = four[r * kOutputs];
  }
  for (int r = 0; r < R; ++r) {
    const int64_t row = first + r;
    store_row<float>(sums + r * kOutputs, args.bias, begin, static_cast<int>(end - begin),
                     out.at<E>(row / per_batch, row % per_batch, begin));
  }
}

template <class E>
void multiply(const DenseArgs& args, const PairScratch& x, const View& out, const Launch& launch) {
  const int64_t rows = args.x.size[0] * args.x.size[1], O = args.weight.size[0], I = args.weight.size[1];
  if (args.x.size[1] <= kFew) {
    return parallel_near(launch, (O + kOutputs - 1) / kOutputs, [&](int64_t task, int) {
      FlushSubnormals flush;
      const int64_t begin = task * kOutputs, end = begin + kOutputs < O ? begin + kOutputs : O;
      int64_t first = 0;
      for (; first + 4 <= rows; first += 4) few_rows<4, E>(args, x, first, begin, end, out);
      for (; first < rows; ++first) few_rows<1, E>(args, x, first, begin, end, out);
    });
  }
  const int64_t panels = (O + kColumns - 1) / kColumns, each = rows_of_task(rows, panels, launch.workers);
  const int64_t cuts = (rows + each - 1) / each, most = rows < kRows ? rows : kRows;
  parallel(launch, panels * cuts, [&](int64_t task, int worker) {
    Pair* panel = x.panel + worker * kPairDepth * kColumns;
    float* sums = x.sums + worker * most * kColumns;
    const int64_t first = task % cuts * each, column = task / cuts * kColumns;
    const int m = static_cast<int>(first + each < rows ? each : rows - first);
    const int n = static_cast<int>(column + kColumns < O ? kColumns : O - column);
    for (int64_t k = 0; k < I; k += kDepth) {
      const int depth = static_cast<int>(k + kDepth < I ? kDepth : I - k), pairs = (depth + 1) / 2;
      pack_pairs_transposed(args.weight.at<const Bf16>(column, k), args.weight.stride[0], n, depth, panel, kColumns);
      const Left<Pair> left = as_is(x.rows + first * x.ld + k / 2, x.ld);
      if (k == 0) {
        gemm_pairs(m, n, pairs, left, panel, kColumns, sums, kColumns, Store{});
      } else {
        gemm_pairs(m, n, pairs, left, panel, kColumns, sums, kColumns, Add{});
      }
    }
    for (int i = 0; i < m; ++i) {
      const int64_t row = first + i;
      store_row<float>(sums + i * kColumns, args.bias, column, n,
                       out.at<E>(row / args.x.size[1], row % args.x.size[1], column));
    }
  });
}

}  // namespace

int64_t dense_workspace(const DenseArgs& args, Pass pass, int workers) {
  if (!takes(args)) return avx512::dense_workspace(args, pass, workers);
  Arena arena;
  PairScratch::cut(arena, args.x, workers);
  return arena.used();
}
void dense_forward(const DenseArgs& args, const DenseOut& out, const Launch& launch) {
  if (!takes(args)) return avx512::dense_forward(args, out, launch);
  Arena arena(launch.workspace);
  const PairScratch scratch = PairScratch::cut(arena, args.x, launch.workers);
  by_dtype(args.x.dtype, [&]<class T, class E>() {
    if constexpr (sizeof(T) == 4) {
      load_pairs_of<E>(args.x, scratch, launch);
      multiply<E>(args, scratch, out.out, launch);
    }
  });
}

}  // namespace linnet::avx512_bf16

#endif
