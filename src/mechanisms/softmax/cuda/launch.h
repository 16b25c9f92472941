// Softmax attention on the GPU: the ways to run it, best last, and how the mechanisms built on it call them.
//
//   plain   everything, in f32 on the multiply-add units (plain.cuh)
//   tile    bf16 and f16, keys and values of at most 256 channels, in tiles on the matrix units (tile.cuh, gradients.cuh);
//           few rows (decodes) by blocks that share their keys (few.cuh)
//   hopper  forward of bf16 and f16, 64 or 128 channels of keys and of values, 128 queries or more, without bias, soft cap,
//           lengths and packing: the copy engine and products of warpgroups (hopper.cu); its gradients are those of tile
//
// The first two take every mask, grouped heads, packed sequences, caches and pages, biases, soft caps, sinks and gates. A
// bias's gradient is made by the plain kernels in either. Few rows split their keys between blocks, whose reads are joined in
// order.
#pragma once

#include "core/launch.h"
#include "mechanisms/softmax/cuda/problem.h"
#include "mechanisms/softmax/softmax.h"

namespace linnet::cuda {

enum class AttendRow : int32_t { plain, tile, hopper };
constexpr const char* row_name(AttendRow row) {
  return row == AttendRow::hopper ? "hopper" : row == AttendRow::tile ? "tile" : "plain";
}
constexpr bool row_needs_hopper(AttendRow row) { return row == AttendRow::hopper; }
// Weights are rounded to the call's type before they are multiplied.
constexpr bool row_rounds(AttendRow row) { return row != AttendRow::plain; }
// Queries from which the multiply-add units are slow.
constexpr int64_t row_slow_from(AttendRow row) { return row == AttendRow::plain ? 1024 : 0; }

AttendRows attend_rows(const View& view);  // [B, T, H, width] or [B, T, H]; absent when the view is
AttendIndices attend_indices(const View& view);
AttendNumbers attend_numbers(const View& view);
AttendMask attend_mask(bool causal, Window window, int64_t prefix, int64_t chunk);
// Keys, values and queries of a call; `scale` and `softcap` set the factors of its logits.
void set_tensors(Attend* p, const View& q, const View& k, const View& v);
void set_logits(Attend* p, double scale, double softcap);
Attend attend_of(const SoftmaxArgs& args);
Attend attend_of(const SoftmaxDecodeArgs& args);
Attend attend_of(const SoftmaxPagedArgs& args);

// Null when a row takes this call, else the reason.
const char* attend_refuses(AttendRow row, const Attend& p, Pass pass);
// Bytes between the kernels of the forward, and the forward itself.
int64_t attend_workspace(AttendRow row, const Attend& p);
void run_attend(const Launch& launch, AttendRow row, Attend p, char* workspace);
// Gradients: p has dout, dlse, dq, dk, dv, lse, and either delta or out. `dbias`, `dsinks`: may be absent.
int64_t attend_gradients_workspace(const Attend& p);
void run_attend_gradients(const Launch& launch, AttendRow row, Attend p, const View& dbias, const View& dsinks,
                          char* workspace);
void append_tokens(const Launch& launch, const SoftmaxDecodeArgs& args);

}  // namespace linnet::cuda
