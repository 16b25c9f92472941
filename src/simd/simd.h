// simd: the vector layer seen from outside, one table per instruction set.
//
// Kernels do not use this header: they include vec.h, math.h, tile.h and gemm.h and are compiled per instruction set
// themselves. Here are the functions of those headers over plain arrays, for the tests. Ask only for an instruction set that
// isa_missing() does not refuse.
#pragma once

#include <cstdint>

#include "core/half.h"
#include "core/isa.h"

namespace linnet {

// y[i] = f(x[i]) for i < count; nothing behind is touched.
struct VectorFunction {
  const char* name;
  void (*f32)(const float* x, float* y, int64_t count);
  void (*f64)(const double* x, double* y, int64_t count);
};

// C = epilogue(C, A B): the arguments of gemm.h, with the template choices as numbers.
enum class GemmEpilogue { store, add, scale, scale_add, lane_scale_add, row_scale_add, row_scale };
enum class GemmBounds { full, columns_to, columns_from, depth_to, depth_from, depth_to_lane };
template <class T>
struct GemmCall {
  int m, n, k;
  const T* a;
  int64_t a_row, a_depth;
  const T* b;
  int64_t ldb;
  T* c;
  int64_t ldc;
  GemmEpilogue epilogue;  // any; store where bounds are not full; store or add where exact
  T scale;
  const T* alpha;  // of lanes or rows
  GemmBounds bounds;
  int offset;
  bool exact;
};

// Storage type S to dense scratch T and back: tile.h.
template <class T, class S>
struct TileFunctions {
  void (*load)(const S* src, int64_t stride, int rows, int cols, T* dst, int64_t ld, T scale);
  void (*load_transposed)(const S* src, int64_t stride, int rows, int cols, T* dst, int64_t ld, T scale);
  void (*store)(const T* src, int64_t ld, int rows, int cols, S* dst, int64_t stride, const T* scale);
  void (*store_transposed)(const T* src, int64_t ld, int rows, int cols, S* dst, int64_t stride, const T* scale);
};

struct SimdTable {
  int lanes_f32;
  bool fused;                       // multiply-adds round once
  const VectorFunction* functions;  // ended by a null name: exp, exp2_nonpositive, ..., then round, abs, sqrt, integer (to and
                                    // back), expm1_or_exp (above -1)
  void (*fold_f32)(const float* x, float* sum, float* highest, float* lowest);  // over lanes_f32 values
  void (*fold_f64)(const double* x, double* sum, double* highest, double* lowest);
  void (*gemm_f32)(const GemmCall<float>& call);
  void (*gemm_f64)(const GemmCall<double>& call);  // exact add; store with depth_to; lane_scale_add: no other
  TileFunctions<float, float> tile_f32;
  TileFunctions<float, Bf16> tile_bf16;
  TileFunctions<float, F16> tile_f16;
  TileFunctions<double, double> tile_f64;
};
const SimdTable& simd_table(Isa isa);

// Products of bf16 pairs (gemm_bf16.h): whether this machine runs them (AVX512_BF16) and this build has them.
bool simd_has_bf16_products();

// Pairs are 32-bit words here.
struct PairFunctions {
  // a: pairs [m, ceil(k / 2)], or the transposed [ceil(k / 2), m]; epilogues store and add, bounds full and depth_to(1).
  void (*gemm)(int m, int n, int k, const uint32_t* a, int64_t lda, bool transposed, const uint32_t* b, int64_t ldb, float* c,
               int64_t ldc, GemmEpilogue epilogue, GemmBounds bounds);
  void (*pack_f32)(const float* src, int64_t stride, int rows, int cols, uint32_t* dst, int64_t ld);
  void (*pack_bf16)(const Bf16* src, int64_t stride, int rows, int cols, uint32_t* dst, int64_t ld);
  void (*pack_transposed)(const Bf16* src, int64_t stride, int rows, int cols, uint32_t* dst, int64_t ld);
  void (*round)(const float* src, int64_t stride, int rows, int cols, uint32_t* dst, int64_t ld);
};
const PairFunctions* simd_pairs();  // null where simd_has_bf16_products() is false

}  // namespace linnet
