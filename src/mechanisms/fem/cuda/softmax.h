// fem_read with the softmax prior on the GPU: the values are widened once, [vc | x], and read by softmax attention
// (softmax/cuda/launch.h) as one read of width 2 V; then mean, free energy and gates. A channel's x has one of three forms:
//
//   excess   (expm1(z) - z) / beta, z = beta v of at most 0.5: F - mu, which is of that size, keeps its digits when x is
//   rounded small    expm1(z) / beta, as on the CPU (fem_cpu.cc): z >= -4, or -1 where x is rounded to bf16 log      exp(z -
//   M), M the middle of the channel's range
//
//   plain   the widened values in f32
//   tile    bf16 calls: the widened values in bf16, on the matrix units (f16 would not hold exp(40)). dbeta is a difference of
//           sums that rounded weights would drown: it is made anew in f32 on the multiply-add units, where it is wanted
#pragma once

#include "mechanisms/fem/fem.h"
#include "mechanisms/softmax/cuda/launch.h"

namespace linnet::cuda {

struct FemForm {  // of a channel's x
  float shift;    // M
  int32_t form;   // 0 log, 1 small, 2 excess
};
// What the kernels of softmax.cu are told (plain data).
struct FemCall {
  AttendRows v;                         // values [B, S, H, V]: of the call, or of the cache
  AttendRows lam, g, dout;              // [B, T, H, V]
  AttendRows out, mu, free, lse;        // lse: f32 [B, T, H]
  AttendRows wide, read, dread, dwide;  // [B, S or T, H, 2 V]
  AttendRows k, clean_k;                // with a mask: keys, zeros where they are masked, which may hold anything
  AttendRows dv, dlam, dg, delta;       // delta: f32 [B, T, H]
  AttendNumbers beta, dbeta;            // [H, V]
  AttendIndices lengths;                // given: of each cache
  const uint8_t* mask = nullptr;        // [B, S]
  int64_t mask_stride[2] = {};
  float* bias = nullptr;          // [B, S]: the mask as logits
  FemForm* channels = nullptr;    // [B, H, V]
  double* dbeta_parts = nullptr;  // [B, H, V]
  int64_t B = 0, S = 0, T = 0;
  int32_t H = 0, V = 0, K = 0;
  float cap = 40;
  float small = -4;  // the least beta v of the small form
};

struct FemSoftmaxTable {
  static constexpr int64_t slow_from(AttendRow row) { return row_slow_from(row); }
  static const char* refuses(AttendRow row, const FemReadArgs& args, const FemReadOut* out, Pass pass);
  static int64_t workspace(AttendRow row, const FemReadArgs& args, Pass pass);
  static void forward(AttendRow row, const FemReadArgs& args, const FemReadOut& out, const Launch& launch);
  static void backward(AttendRow row, const FemReadArgs& args, const FemReadOut& out, const FemReadGrads& grads,
                       const Launch& launch);
};
struct FemSoftmaxDecodeTable {
  static constexpr int64_t slow_from(AttendRow row) { return row_slow_from(row); }
  static const char* refuses(AttendRow row, const FemReadDecodeArgs& args, const FemReadDecodeOut* out, Pass pass);
  static int64_t workspace(AttendRow row, const FemReadDecodeArgs& args, Pass pass);
  static void forward(AttendRow row, const FemReadDecodeArgs& args, const FemReadDecodeOut& out, const Launch& launch);
};

}  // namespace linnet::cuda
