// map: small elementwise expressions over named tensors, evaluated in one pass.
//
//   MapProgram program;
//   LINNET_TRY(parse_map("-exp(A_log) * softplus(a + dt_bias)", {"A_log", "a", "dt_bias"}, &program));
//
// The text is the Python of the same step (torch functions of the same names), so that a layer's gate is written once.
//
//   + - * / (unary -), numbers, names, parentheses;  min(a, b), max(a, b), clip(x, low, high)
//   exp expm1 log log1p sqrt rsqrt abs square tanh erf sin cos
//   sigmoid silu softplus logsigmoid relu gelu gelu_tanh
//   sum(x), mean(x), amax(x): over the last dimension, which stays with size 1; where one of them is the whole expression the
//   dimension is dropped
//
// Tensors broadcast as in NumPy, aligned at the last dimension. The computation runs in f32 (f64 when a tensor is f64),
// whatever the types of the tensors are. This header is read by sources of every instruction set: plain data only.
#pragma once

#include "../core/args.h"

namespace linnet::layers {

enum class MapCode : int32_t {
  load,      // input a
  constant,  // value
  add,
  sub,
  mul,
  div,
  min,
  max,
  neg,
  exp,
  expm1,
  log,
  log1p,
  sqrt,
  rsqrt,
  abs,
  square,
  tanh,
  erf,
  sin,
  cos,
  sigmoid,
  silu,
  softplus,
  logsigmoid,
  relu,
  gelu,
  gelu_tanh,
  sum,
  mean,
  amax,
};

// One operation on rows of numbers: register `to` from registers a and b, or from the number `value` in place of b.
struct MapStep {
  MapCode code = MapCode::load;
  int32_t to = 0, a = 0, b = -1;
  double value = 0;
};

inline constexpr int kMapSteps = 96, kMapRegisters = 16, kMapInputs = 12, kMapRank = 6;

struct MapProgram {
  int32_t steps = 0, registers = 0, inputs = 0;
  bool reduces = false;  // needs whole rows
  bool drops = false;    // the whole expression is a reduction: the result lacks the last dimension
  MapStep step[kMapSteps];
};

// A tensor of the call, with strides for every dimension of the call (0 where it is broadcast).
struct MapTensor {
  void* data = nullptr;
  Dtype dtype = Dtype::none;
  int64_t stride[kMapRank] = {};
};

struct MapCall {
  const MapProgram* program = nullptr;
  int32_t rank = 0;
  int64_t size[kMapRank] = {};  // the last dimension is the row
  MapTensor input[kMapInputs];
  MapTensor out;  // stride[rank - 1] is not used where the program drops
};

}  // namespace linnet::layers

#define LINNET_MAP_IN(isa)                                             \
  namespace linnet::isa {                                              \
  void map_forward(const layers::MapCall& call, const Launch& launch); \
  int64_t map_workspace(const layers::MapCall& call, int workers);     \
  }
LINNET_MAP_IN(portable)
LINNET_MAP_IN(avx2)
LINNET_MAP_IN(avx512)
