// dense: the linear map of a layer, out = x W^T + b, with weights as checkpoints store them.
//
//   out[t, o] = sum_i x[t, i] weight[o, i] + bias[o]
//
//   DenseArgs args{.x = x, .weight = w};        // x [B, T, I]; w [O, I] in f32, bf16 or f16, whatever x is
//   dense(args, {out}, context);                // out [B, T, O]
//
// dense_quantised: the same with weights of 8 or 4 bits in groups of 32 along I,
//
//   weight[o, i] = scale[o, i / 32] (code[o, i] - zero)              zero: 128 for 8 bits, 8 for 4 bits
//   weight[o, i] = scale[o, i / 32] code[o, i] + offset[o, i / 32]   where an offset is given
//
// in panels of 16 outputs (dense_pack.h says how they lie and makes them from GGUF blocks or from floats).
//
// dense_heads: a map of its own for each head, as feature maps of converted attention have it:
//
//   out[t, h, f] = sum_k x[t, h, k] weight[h, k, f] + bias[h, f]
//
// `rounding` says what x may lose, and the reference loses it too: bf16 rounds x to bf16 (then bf16 weights run on the bf16 dot
// products), int8 rounds each group of 32 of x to 8 bits (then the products run on integers, as llama.cpp does):
//   s = max |x_i| / 127,   x_i := s round(x_i / s), in float, ties to even;
// int16 adds what the same rounding makes of the rest, x_i - s round(x_i / s).
#pragma once

#include "../../core/args.h"

namespace linnet {

enum class DenseRounding : int32_t { none, bf16 };
struct DenseArgs {
  View x;       // [B, T, I]
  View weight;  // [O, I]
  View bias;    // [O]; absent = 0
  DenseRounding rounding = DenseRounding::none;
};
struct DenseOut {
  View out;  // [B, T, O]
};
struct DenseNoGrads {};
const Op& dense_op();
Status dense(const DenseArgs& args, const DenseOut& out, const Context& context);
int64_t dense_workspace(const DenseArgs& args, const Context& context);

enum class QuantisedBits : int32_t { eight, four };
enum class QuantisedRounding : int32_t { none, int8, int16 };
struct DenseQuantisedArgs {
  View x;               // [B, T, I], I a multiple of 32
  View codes;           // [panels, I / 32, 512 or 256] bytes
  View scale;           // [panels, I / 32, 16]
  View offset;          // [panels, I / 32, 16]; absent: codes count from zero = 128 or 8
  View bias;            // [O]
  int64_t outputs = 0;  // O: 16 (panels - 1) < O <= 16 panels; 0: 16 panels
  QuantisedBits bits = QuantisedBits::eight;
  QuantisedRounding rounding = QuantisedRounding::none;
};
const Op& dense_quantised_op();
Status dense_quantised(const DenseQuantisedArgs& args, const DenseOut& out, const Context& context);
int64_t dense_quantised_workspace(const DenseQuantisedArgs& args, const Context& context);

struct DenseHeadsArgs {
  View x;       // [B, T, H, K]
  View weight;  // [H, K, F]
  View bias;    // [H, F]; absent = 0
};
const Op& dense_heads_op();
Status dense_heads(const DenseHeadsArgs& args, const DenseOut& out, const Context& context);  // out [B, T, H, F]
int64_t dense_heads_workspace(const DenseHeadsArgs& args, const Context& context);

LINNET_KERNELS(dense, DenseArgs, DenseOut, DenseNoGrads)
LINNET_KERNELS(dense_heads, DenseHeadsArgs, DenseOut, DenseNoGrads)
LINNET_CUDA_KERNELS(dense_heads, DenseHeadsArgs, DenseOut, DenseNoGrads)
LINNET_KERNELS(dense_quantised, DenseQuantisedArgs, DenseOut, DenseNoGrads)
LINNET_CUDA_KERNELS(dense_quantised, DenseQuantisedArgs, DenseOut, DenseNoGrads)
LINNET_KERNELS_IN(avx512_bf16, dense, DenseArgs, DenseOut, DenseNoGrads)
LINNET_KERNELS_IN(avx512_vnni, dense_quantised, DenseQuantisedArgs, DenseOut, DenseNoGrads)

}  // namespace linnet
