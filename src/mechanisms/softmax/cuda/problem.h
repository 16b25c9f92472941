// One call of softmax attention as the GPU's kernels see it, for host and device code alike (plain data).
//
// As on the CPU the G query heads of one key head share a tile: row r = i * G + g of (sequence, key head) is token i, query
// head head * G + g. So keys and values are read once for all of them, few queries still fill a tile, and the gradients of keys
// and values sum over their query heads in a fixed order without another kernel.
#pragma once

#include <cstdint>

#include "core/view.h"

namespace linnet::cuda {

inline constexpr int kAttendKeys = 64;   // keys of a tile, everywhere
inline constexpr int kAttendSlice = 64;  // channels of values that a plain block has at a time
inline constexpr int kPlainThreads = 256;
inline constexpr int kMostParts = 512;  // of split keys

// A tensor [B, T, H, width] or [B, T, H]; strides in elements.
struct AttendRows {
  void* data = nullptr;  // null: absent
  int64_t stride_b = 0, stride_t = 0, stride_h = 0;
  Dtype dtype = Dtype::none;
  bool aligned = false;  // rows at multiples of 16 bytes, of whole 16 bytes
};
// A tensor of i32 or i64: [n] or [n, m].
struct AttendIndices {
  void* data = nullptr;
  int64_t stride[2] = {};
  bool is_64 = false;
};
// Numbers [B, H, Tq, Tk] or [H].
struct AttendNumbers {
  void* data = nullptr;
  int64_t stride[4] = {};
  Dtype dtype = Dtype::none;
};
struct AttendMask {  // softmax_mask.h, in 32 bits
  int32_t left = -1, right = -1, prefix = 0, chunk = 0;
};
enum class AttendAct : int32_t { sigmoid, ns_sigmoid, silu, identity };  // GateAct

struct Attend {
  AttendRows q, k, v;
  AttendRows out, lse;        // lse: f32
  AttendRows gate;            // given: out = y act(gate), or y + act(gate)
  AttendRows read, kept;      // given: y itself
  AttendNumbers bias, sinks;  // bias: [B, H, Tq, Tk] with strides of 0 where it is broadcast
  AttendIndices cu_q, cu_k;   // given: packed
  AttendIndices lengths;      // keys of each item
  AttendIndices start;        // first key of each item
  AttendIndices pages;        // given: k and v are pages [P, page, Hkv, D]
  int64_t N = 0;              // sequences
  int64_t page_count = 0;     // P
  int32_t Tq = 0, Tk = 0;     // of an item, or of all packed ones; paged: page * pages of an item
  int32_t Hkv = 0, G = 1, K = 0, V = 0, page = 0;
  AttendMask mask;
  float scale = 1, softcap = 0;
  float factor = 1;  // scale log2(e)
  bool hooked =
      false;  // logits have a soft cap, a bias, or a scale that is not above 0: then the largest product is not theirs
  AttendAct act = AttendAct::sigmoid;
  bool gate_adds = false, gate_per_head = false;
  // Forward with split keys: each part's read [parts, N Tq H, V] and normaliser [parts, N Tq H], joined by `join_parts`.
  int32_t parts = 1;
  float *part_read = nullptr, *part_lse = nullptr;
  int32_t tiles = 0;  // row tiles (key tiles) of a sequence; packed: of all, at most
  // Gradients.
  AttendRows dout, dlse, dq, dk, dv;
  AttendRows delta;    // f32 [B, Tq, H]: sum_c dout out - dlse
  AttendRows exact_v;  // given: what dbias takes for v, where v has been rounded
};

// dbias [B, H, Tq, Tk], sizes of 1 where the bias is broadcast.
struct BiasGradient {
  AttendNumbers to;
  int64_t size[4] = {};
  int32_t tiles_q = 1, tiles_k = 1;
};

// New tokens into a contiguous cache; lengths += T.
struct AppendTokens {
  AttendRows k, v, k_cache, v_cache;
  AttendIndices lengths;
  int32_t T = 0, heads = 0, K = 0, V = 0, capacity = 0;
};

// softmax_merge: parts [P, B, T, H, V].
struct MergeParts {
  AttendRows part, part_lse, out, lse;
  AttendRows dout, dlse, dpart, dpart_lse;
  int64_t stride_part = 0, stride_lse = 0, stride_dpart = 0, stride_dlse = 0;  // from part to part
  int64_t T = 0, rows = 0;                                                     // rows: B T H
  int32_t P = 0, H = 0, V = 0;
};

}  // namespace linnet::cuda
