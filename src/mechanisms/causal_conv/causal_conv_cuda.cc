// causal_conv on the GPU (causal_conv_cuda.cu).
#include "causal_conv_cuda.h"

#include "causal_conv.h"
#include "core/cuda/driver.h"
#include "core/sequence.h"

LINNET_USES_IMAGES(causal_conv)

namespace linnet::cuda {
namespace {

constexpr const char* kImage = "causal_conv/causal_conv_cuda";
constexpr int kThreads = 128, kTaps = 4;  // the kernels' fast form has 4 taps

ConvTensor tensor_of(const View& view) {
  if (!view.given()) return {};
  return {view.data, {view.stride[0], view.stride[1], view.stride[2]}};
}

template <class Args>
Conv conv_of(const Args& args) {
  Conv c;
  c.B = args.x.size[0];
  c.T = args.x.size[1];
  c.N = c.B;
  c.E = static_cast<int32_t>(args.weight.size[0]);
  c.W = static_cast<int32_t>(args.weight.size[1]);
  c.x = tensor_of(args.x);
  c.weight = args.weight.data;
  c.weight_dtype = args.weight.dtype;
  c.weight_stride[0] = args.weight.stride[0];
  c.weight_stride[1] = args.weight.stride[1];
  c.packed =
      c.W == kTaps && c.weight_stride[1] == 1 && c.weight_stride[0] == kTaps && reinterpret_cast<uintptr_t>(c.weight) % 16 == 0;
  if (args.bias.given()) {
    c.bias = args.bias.data;
    c.bias_dtype = args.bias.dtype;
    c.bias_stride = args.bias.stride[0];
  }
  c.silu = args.activation == ConvActivation::silu;
  return c;
}
Conv conv_of_call(const CausalConvArgs& args) {
  Conv c = conv_of(args);
  c.state = tensor_of(args.initial_state);
  if (args.cu_seqlens.given()) {
    c.N = sequence_count(args.cu_seqlens, c.B);
    c.offsets = args.cu_seqlens.data;
    c.offsets_64 = args.cu_seqlens.dtype == Dtype::i64;
  }
  return c;
}

bool fits_vectors(const ConvTensor& x, int64_t vector) {
  return x.data == nullptr || (reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.stride[0] % vector == 0 &&
                               x.stride[1] % vector == 0 && x.stride[2] == 1);
}
// The tiles of the backward are longer where there are many: each leaves its part of the taps' gradients.
int32_t backward_tile(const Conv& c) { return c.B * c.T * c.E >= (int64_t{1} << 25) ? 128 : 32; }
int64_t tiles_of(const Conv& c) { return c.B * ((c.T + c.tile - 1) / c.tile); }

Kernel kernel(const char* name_f32, const char* name_bf16, const char* name_f16, Dtype dtype) {
  return {kImage, dtype == Dtype::f32 ? name_f32 : dtype == Dtype::bf16 ? name_bf16 : name_f16, kThreads};
}
#define LINNET_CONV_KERNEL(stem, dtype) kernel(#stem "_f32", #stem "_bf16", #stem "_f16", dtype)

const char* refuses(Dtype dtype) { return dtype == Dtype::f64 ? "the CUDA kernels have no f64" : nullptr; }

}  // namespace

const char* causal_conv_refuses(const CausalConvArgs& args, Pass) { return refuses(args.x.dtype); }

int64_t causal_conv_workspace(const CausalConvArgs& args, Pass pass, int) {
  Arena arena;
  if (pass == Pass::backward) {
    Conv c = conv_of_call(args);
    c.tile = backward_tile(c);
    arena.take<float>(tiles_of(c) * (c.W + 1) * c.E);
  }
  return arena.used();
}

void causal_conv_forward(const CausalConvArgs& args, const CausalConvOut& out, const Launch& launch) {
  Conv c = conv_of_call(args);
  c.out = tensor_of(out.out);
  const Dtype dtype = args.x.dtype;
  c.tile = 32;  // shorter where that fills the machine: no bit depends on it
  while (c.tile > 8 && c.B * c.T * c.E / c.tile < (int64_t{1} << 20)) c.tile /= 2;
  const int64_t vector = 16 / dtype_size(dtype), tiles = (c.T + c.tile - 1) / c.tile;
  if (c.W == kTaps && c.E % vector == 0 && fits_vectors(c.x, vector) && fits_vectors(c.out, vector)) {
    enqueue(launch, c.offsets != nullptr ? LINNET_CONV_KERNEL(convolve_packed, dtype) : LINNET_CONV_KERNEL(convolve, dtype),
            {(c.E / (vector / 2) + kThreads - 1) / kThreads, tiles, c.B}, c);
  } else {
    enqueue(launch, LINNET_CONV_KERNEL(convolve_any, dtype), {(c.E + kThreads - 1) / kThreads, tiles, c.B}, c);
  }
  if (!out.final_state.given()) return;
  c.final_state = tensor_of(out.final_state);
  enqueue(launch, LINNET_CONV_KERNEL(last_inputs, dtype), {(c.E + kThreads - 1) / kThreads, c.N}, c);
}

void causal_conv_backward(const CausalConvArgs& args, const CausalConvOut&, const CausalConvGrads& grads,
                          const Launch& launch) {
  Conv c = conv_of_call(args);
  c.tile = backward_tile(c);
  c.dout = tensor_of(grads.dout);
  c.dx = tensor_of(grads.dx);
  c.dfinal_state = tensor_of(grads.dfinal_state);
  c.dinitial_state = tensor_of(grads.dinitial_state);
  Arena arena(launch.workspace);
  const bool sums = grads.dweight.given() || grads.dbias.given();
  if (sums) c.sums = arena.take<float>(tiles_of(c) * (c.W + 1) * c.E);
  const Dtype dtype = args.x.dtype;
  const int64_t vector = 16 / dtype_size(dtype), tiles = (c.T + c.tile - 1) / c.tile;
  if (c.W == kTaps && c.E % vector == 0 && fits_vectors(c.x, vector) && fits_vectors(c.dout, vector) &&
      fits_vectors(c.dx, vector)) {
    enqueue(launch,
            c.offsets != nullptr ? LINNET_CONV_KERNEL(convolve_back_packed, dtype) : LINNET_CONV_KERNEL(convolve_back, dtype),
            {(c.E / (vector / 2) + kThreads - 1) / kThreads, tiles, c.B}, c);
  } else {
    enqueue(launch, LINNET_CONV_KERNEL(convolve_back_any, dtype), {(c.E + kThreads - 1) / kThreads, tiles, c.B}, c);
  }
  if (grads.dinitial_state.given()) {
    enqueue(launch, LINNET_CONV_KERNEL(first_inputs_back, dtype), {(c.E + kThreads - 1) / kThreads, c.N}, c);
  }
  if (!sums) return;
  const View &dw = grads.dweight, &db = grads.dbias;
  const float* parts = c.sums;
  const int64_t count = tiles_of(c), stride_e = dw.stride[0], stride_w = dw.stride[1], stride_bias = db.stride[0];
  const int32_t type = static_cast<int32_t>(dw.dtype), bias_type = static_cast<int32_t>(db.dtype);
  enqueue(launch, {kImage, "sum_taps", 256}, {(c.E + 31) / 32, c.W + 1}, parts, count, c.E, c.W, dw.data, type, stride_e,
          stride_w, db.data, bias_type, stride_bias);
}

const char* causal_conv_decode_refuses(const CausalConvDecodeArgs& args, Pass) { return refuses(args.x.dtype); }
int64_t causal_conv_decode_workspace(const CausalConvDecodeArgs&, Pass, int) { return 0; }
void causal_conv_decode_forward(const CausalConvDecodeArgs& args, const CausalConvDecodeOut& out, const Launch& launch) {
  Conv c = conv_of(args);
  c.out = tensor_of(out.out);
  c.state = tensor_of(args.state);
  const Dtype dtype = args.x.dtype;
  const int64_t vector = 16 / dtype_size(dtype), between = kTaps - 1;
  const bool side_by_side = c.state.stride[2] == 1 && c.state.stride[1] == between && c.state.stride[0] % vector == 0 &&
                            reinterpret_cast<uintptr_t>(c.state.data) % 16 == 0;
  if (c.T == 1 && c.W == kTaps && c.E % vector == 0 && side_by_side && fits_vectors(c.x, vector) &&
      fits_vectors(c.out, vector)) {
    enqueue(launch, LINNET_CONV_KERNEL(continue_vectors, dtype), {(c.E / vector + kThreads - 1) / kThreads, c.B}, c);
    return;
  }
  enqueue(launch, LINNET_CONV_KERNEL(continue, dtype), {(c.E + kThreads - 1) / kThreads, c.B}, c);
}

}  // namespace linnet::cuda
