// The functions of vec.h, math.h, tile.h and gemm.h over plain arrays, once per instruction set, for simd_test.cc.
#include "simd/gemm.h"
#include "simd/math.h"
#include "simd/simd.h"
#include "simd/tile.h"

namespace linnet::LINNET_ISA {

template <class T, class F>
LINNET_INLINE void apply(const T* x, T* y, int64_t count, F f) {
  using X = Vec<T>;
  for (int64_t i = 0; i < count; i += X::W) {
    const int n = static_cast<int>(count - i < X::W ? count - i : X::W);
    X::store(y + i, f(X::load(x + i, n)), n);
  }
}

#define LINNET_FUNCTION(name, expression)                                                                             \
  {                                                                                                                   \
    name, [](const float* x, float* y, int64_t n) { apply(x, y, n, [](vf v) LINNET_LAMBDA { return expression; }); }, \
        [](const double* x, double* y, int64_t n) { apply(x, y, n, [](vd v) LINNET_LAMBDA { return expression; }); }  \
  }
#define LINNET_LAMBDA __attribute__((always_inline))
static const VectorFunction kFunctions[] = {
    LINNET_FUNCTION("exp", exp(v)),
    LINNET_FUNCTION("exp2", exp2(v)),
    LINNET_FUNCTION("exp2_nonpositive", exp2_nonpositive(v)),
    LINNET_FUNCTION("expm1", expm1(v)),
    LINNET_FUNCTION("log", log(v)),
    LINNET_FUNCTION("log1p", log1p(v)),
    LINNET_FUNCTION("sigmoid", sigmoid(v)),
    LINNET_FUNCTION("sigmoid2", sigmoid2(v)),
    LINNET_FUNCTION("softplus", softplus(v)),
    LINNET_FUNCTION("tanh", tanh(v)),
    LINNET_FUNCTION("round", round(v)),
    LINNET_FUNCTION("abs", abs(v)),
    LINNET_FUNCTION("sqrt", sqrt(v)),
    LINNET_FUNCTION("integer", from_int(to_int(v))),
    LINNET_FUNCTION("expm1_or_exp", expm1_or_exp(v, gt(v, splat<decltype(v)>(-1.f)))),
    LINNET_FUNCTION("decay_factor",
                    decay_factor(v, select(gt(v, splat<decltype(v)>(-0.5f)), splat<decltype(v)>(1.f), decltype(v){}))),
    LINNET_FUNCTION("softplus of several", softplus(Several<decltype(v), 3>{{v + v, v, -v}}).at[1]),
    LINNET_FUNCTION("sigmoid of several", sigmoid(Several<decltype(v), 3>{{v + v, v, -v}}).at[1]),
    {nullptr, nullptr, nullptr},
};

template <class T>
static void fold_all(const T* x, T* total, T* high, T* low) {
  const typename Vec<T>::V v = Vec<T>::load(x);
  *total = sum(v);
  *high = highest(v);
  *low = lowest(v);
}

template <class T, Memory kMemory, class Epilogue, class Bounds = Full>
static void product(const GemmCall<T>& g, const Epilogue& epilogue, const Bounds& bounds = Bounds{}) {
  gemm<T, kMemory>(g.m, g.n, g.k, Left<T>{g.a, g.a_row, g.a_depth}, g.b, g.ldb, g.c, g.ldc, epilogue, bounds);
}

// Every epilogue and bound with float. Their code does not depend on the type, nor the masked path on the epilogue, so a few
// with double, and two epilogues on exact memory, keep this file quick to compile.
static void gemm_f32(const GemmCall<float>& g) {
  if (g.exact && g.epilogue == GemmEpilogue::add) return product<float, kExact>(g, Add{});
  if (g.exact) return product<float, kExact>(g, Store{});
  switch (g.bounds) {
    case GemmBounds::full: break;
    case GemmBounds::columns_to: return product<float, kPadded>(g, Store{}, ColumnsTo(g.offset));
    case GemmBounds::columns_from: return product<float, kPadded>(g, Store{}, ColumnsFrom(g.offset));
    case GemmBounds::depth_to: return product<float, kPadded>(g, Store{}, DepthTo(g.offset));
    case GemmBounds::depth_from: return product<float, kPadded>(g, Store{}, DepthFrom(g.offset));
    case GemmBounds::depth_to_lane: return product<float, kPadded>(g, Store{}, DepthToLane(g.offset));
  }
  switch (g.epilogue) {
    case GemmEpilogue::store: return product<float, kPadded>(g, Store{});
    case GemmEpilogue::add: return product<float, kPadded>(g, Add{});
    case GemmEpilogue::scale: return product<float, kPadded>(g, Scale<float>{g.scale});
    case GemmEpilogue::scale_add: return product<float, kPadded>(g, ScaleAdd<float>{g.scale});
    case GemmEpilogue::lane_scale_add: return product<float, kPadded>(g, LaneScaleAdd<float>{g.alpha});
    case GemmEpilogue::row_scale_add: return product<float, kPadded>(g, RowScaleAdd<float>{g.alpha});
    case GemmEpilogue::row_scale: return product<float, kPadded>(g, RowScale<float>{g.alpha});
  }
}

static void gemm_f64(const GemmCall<double>& g) {
  if (g.exact) return product<double, kExact>(g, Add{});
  if (g.bounds == GemmBounds::depth_to) return product<double, kPadded>(g, Store{}, DepthTo(g.offset));
  product<double, kPadded>(g, LaneScaleAdd<double>{g.alpha});
}

template <class T, class S>
static constexpr TileFunctions<T, S> tile_functions() {
  return {load_tile<T, S>, load_tile_transposed<T, S>, store_tile<T, S>, store_tile_transposed<T, S>};
}

extern const SimdTable kTable;
const SimdTable kTable = {
    Vec<float>::W,
    kFused,
    kFunctions,
    fold_all<float>,
    fold_all<double>,
    gemm_f32,
    gemm_f64,
    tile_functions<float, float>(),
    tile_functions<float, Bf16>(),
    tile_functions<float, F16>(),
    tile_functions<double, double>(),
};

}  // namespace linnet::LINNET_ISA
