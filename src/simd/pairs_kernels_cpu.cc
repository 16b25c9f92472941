// The functions of gemm_bf16.h over plain arrays, for simd_test.cc.
#if defined(LINNET_ISA_avx512)

// A namespace of its own, so that the linker never gives these instructions to a machine without them.
#undef LINNET_ISA
#define LINNET_ISA avx512_bf16
#pragma GCC target("avx512bf16")

#include "simd/gemm_bf16.h"
#include "simd/simd.h"

namespace linnet::avx512_bf16 {

LINNET_INLINE Pair* pairs(uint32_t* p) { return reinterpret_cast<Pair*>(p); }
LINNET_INLINE const Pair* pairs(const uint32_t* p) { return reinterpret_cast<const Pair*>(p); }

static void pair_call(int m, int n, int k, const uint32_t* a, int64_t lda, bool turned, const uint32_t* b, int64_t ldb,
                      float* c, int64_t ldc, GemmEpilogue epilogue, GemmBounds bounds) {
  const Left<Pair> left = turned ? transposed(pairs(a), lda) : as_is(pairs(a), lda);
  const int depth = (k + 1) / 2;
  if (bounds == GemmBounds::depth_to) return gemm_pairs(m, n, depth, left, pairs(b), ldb, c, ldc, Store{}, DepthTo(1));
  if (epilogue == GemmEpilogue::add) return gemm_pairs(m, n, depth, left, pairs(b), ldb, c, ldc, Add{});
  gemm_pairs(m, n, depth, left, pairs(b), ldb, c, ldc, Store{});
}

extern const PairFunctions kPairs;
const PairFunctions kPairs = {
    pair_call,
    [](const float* src, int64_t stride, int rows, int cols, uint32_t* dst, int64_t ld) {
      pack_pairs(src, stride, rows, cols, pairs(dst), ld);
    },
    [](const Bf16* src, int64_t stride, int rows, int cols, uint32_t* dst, int64_t ld) {
      pack_pairs(src, stride, rows, cols, pairs(dst), ld);
    },
    [](const Bf16* src, int64_t stride, int rows, int cols, uint32_t* dst, int64_t ld) {
      pack_pairs_transposed(src, stride, rows, cols, pairs(dst), ld);
    },
    [](const float* src, int64_t stride, int rows, int cols, uint32_t* dst, int64_t ld) {
      round_pairs(src, stride, rows, cols, pairs(dst), ld);
    },
};

}  // namespace linnet::avx512_bf16

#endif
