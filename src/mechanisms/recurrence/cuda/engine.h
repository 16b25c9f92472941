// The recurrence on the GPU: what its kernels are told, for host and device code alike (plain data).
//
// An Engine runs one recurrence over the tokens of every (sequence, head), forwards or backwards in time:
//
//   S = exp(g_t) S + k_t u_t^T,   u_t = v_t or beta_t (v_t - S^T k_t),   out_t = scale S^T q_t
//
// The gradients of a recurrence without beta are recurrences too: dq with (q, k, v) := (dout, v, k), and in reverse time dk
// with (v, dout, q) and dv with (k, q, dout). So operands are named by what they do here, not by what the caller calls them,
// and the state may be read and written transposed (by its strides) and in other units (in_factor, out_factor).
#pragma once

#include <cstdint>

#include "core/launch.h"
#include "mechanisms/shared/rows.h"

namespace linnet::cuda {

// g of an Engine as mamba_ssd has it: g holds dt, delta = clamp(softplus(dt + bias)), the log decay is delta A, and delta
// multiplies what is written; in the walks of gradients (on tiles only) the result instead, or nothing. Off without A.
enum class StepRole : int32_t { writes, results, decays };
struct StepSizes {
  StepRole role = StepRole::writes;
  const float* A = nullptr;  // [H]
  int64_t stride_A = 0;
  const void* bias = nullptr;  // [H]
  int64_t stride_bias = 0;
  Dtype bias_dtype = Dtype::none;
  float low = 0, high = 0;
};
// What becomes of its result: out = (o + D v) z sigmoid(z); either may be absent.
struct Finish {
  const void* D = nullptr;  // [H, V]
  int64_t stride_h = 0, stride_v = 0;
  Dtype dtype = Dtype::none;
  Rows z;
};

// The walk of mamba_ssd's dv (tiles only), whose values are dy, finishes what stands on it while it is still f32: its result is
// dx = delta dv + D dy, and it leaves dv . x of every token and the sums of dy x over tokens.
struct StepGradients {
  Rows x;
  float* dots = nullptr;  // [B, H, V / 16, T]: by 16 channels; null: an ordinary walk
  float* dD = nullptr;    // [H, N * segments, V]
};

struct Engine {
  int64_t N = 0, T = 0;  // sequences; tokens of a batch row
  int32_t H = 0, K = 0, V = 0;
  Rows q, k, v;  // read, write key, write value; no k: nothing is written
  Rows out;      // no out: nothing is read
  Rows g;        // log decay; g_width 0: none, 1: scalar, K: per channel; stride_b = stride_t = 0: per head
  int32_t g_width = 0;
  Rows beta;
  float beta_factor = 1;
  Rows out_source;                      // the result is multiplied by the derivative of its map there
  States out_bias;                      // added to the result first: [N, H, 1, V]
  const uint8_t* write_mask = nullptr;  // [B, T]: tokens with 0 write nothing
  const uint8_t* out_mask = nullptr;    // [B, T]: results of tokens with 0 are 0
  int64_t mask_stride_b = 0;
  const void* offsets = nullptr;  // cu_seqlens: sequence n is rows offsets[n] .. offsets[n+1] of batch row 0
  bool offsets_64 = false;
  bool reverse = false;
  bool normalize = false;
  bool l2_norm = false;  // q and k are x / sqrt(sum x^2 + 1e-6)
  float scale = 1, eps = 0;
  States initial, final;  // [N, H, K, V]
  float in_factor = 1, out_factor = 1;
  States initial_z, final_z;  // [N, H, K, 1]: sums of the keys
  bool sums = false;          // keep z: normalise, or final_z is wanted
  Rows den;                   // [B, T, H] f32, when normalised
  // The state before every chunk of 64 tokens (in reverse: behind it), for the gradient of g: [slots, H, K, V] of the type
  // saved_dtype by the step and chunk kernels; as the operands of the tile kernel, f16 ones in units [slots, H, V], by that
  // one.
  void* saved = nullptr;
  float* saved_units = nullptr;
  bool saved_transposed = false;  // by the tile kernel, as operands with key channels for rows
  StepSizes steps;
  Finish finish;
  StepGradients back;
  bool untiled = false;  // not the tile kernel, whatever it could take
};

constexpr Dtype saved_dtype(Dtype dtype, int32_t K, int32_t V) {
  return dtype == Dtype::bf16 && K % 64 == 0 && V % 64 == 0 ? Dtype::bf16 : Dtype::f32;  // as large as the tile kernel's
}
// The place of a chunk's saved state: sequence n begins at token `begin` of its batch row.
constexpr int64_t saved_slot(const Engine& e, int64_t n, int64_t begin, int64_t chunk) {
  return e.offsets == nullptr ? n * ((e.T + 63) / 64) + chunk : begin / 64 + n + chunk;
}
constexpr int64_t saved_slots(const Engine& e) { return e.offsets == nullptr ? e.N * ((e.T + 63) / 64) : e.T / 64 + e.N; }

}  // namespace linnet::cuda
