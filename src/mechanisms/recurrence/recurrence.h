// recurrence: one matrix state per head, decayed, corrected and read by every token. The common ground of decay, gla, delta and
// gated_delta, which are this operator with some inputs absent.
//
//   S'  = diag(exp(g_t)) S_{t-1}                 g absent: S' = S_{t-1}; g [B, T, H]: every row by the same factor
//   u_t = beta_t (v_t - S'^T k_t)                beta absent: u_t = v_t
//   S_t = S' + k_t u_t^T
//   o_t = scale S_t^T q_t                        the read comes after the write
//
// The decay acts first, then the correction reads the decayed state (Kimi Linear, arXiv 2510.26692). Heads: H = max(Hq, Hk,
// Hv); each of the three divides H, and head h uses query head h / (H / Hq), and so on.
#pragma once

#include "../../core/args.h"

namespace linnet {

struct RecurrenceArgs {
  View q;                    // [B, T, Hq, K]
  View k;                    // [B, T, Hk, K]
  View v;                    // [B, T, Hv, V]
  View g;                    // optional [B, T, H] or [B, T, H, K]: natural logarithm of the decay; -inf forgets, > 0 grows
  View g_head;               // optional [H]: a constant log decay per head, in place of g (decay only)
  View beta;                 // optional [B, T, H]: write strength
  View cu_seqlens;           // optional [N+1]: packed sequences (q, k, v [total, H, .] or with B = 1)
  View initial_state;        // optional [N, H, K, V] f32; N = B unless packed
  Maybe scale;               // default K^-0.5; multiplies the output only
  bool l2_norm = false;      // q and k become x / sqrt(sum x^2 + 1e-6)
  bool double_beta = false;  // beta counts twice: (0, 1) becomes (0, 2), negative eigenvalues
  int64_t chunk = 0;         // tokens per chunk, at most what the kernel can take; 0: its choice. Rounding alone differs
};
struct RecurrenceOut {
  View out;          // [B, T, H, V]
  View final_state;  // [N, H, K, V] f32
};
struct RecurrenceGrads {
  View dout, dfinal_state;                              // incoming; absent = zero
  View dq, dk, dv, dg, dg_head, dbeta, dinitial_state;  // results; absent = not wanted
};

// One or few tokens with the state carried in place.
struct RecurrenceDecodeArgs {
  View q, k, v, g, g_head, beta;  // as above, T small
  View state;                     // [B, H, K, V] f32: read and overwritten
  Maybe scale;
  bool l2_norm = false;
  bool double_beta = false;
};
struct RecurrenceDecodeOut {
  View out;  // [B, T, H, V]
};
struct RecurrenceDecodeGrads {};

const Op& recurrence_op();
Status recurrence(const RecurrenceArgs& args, const RecurrenceOut& out, const Context& context);
Status recurrence_backward(const RecurrenceArgs& args, const RecurrenceOut& out, const RecurrenceGrads& grads,
                           const Context& context);
int64_t recurrence_workspace(const RecurrenceArgs& args, Pass pass, const Context& context);
const Op& recurrence_decode_op();
Status recurrence_decode(const RecurrenceDecodeArgs& args, const RecurrenceDecodeOut& out, const Context& context);
int64_t recurrence_decode_workspace(const RecurrenceDecodeArgs& args, const Context& context);

// A run of tokens acts on the incoming state as S_out = A S_in + B; segments compose: (A2, B2) after (A1, B1) = (A2 A1, A2 B1 +
// B2).
struct RecurrenceSegmentsArgs {
  View q, k, v, g, beta;  // as above; no initial state
  Maybe scale;
  int64_t segment = 64;  // tokens per segment; the last may be shorter
};
struct RecurrenceSegmentsOut {
  View out;             // [B, T, H, V]: the whole sequence from a zero state
  View final_state;     // [B, H, K, V]: B of the whole
  View A;               // [B, H, K, K]: A of the whole
  View segment_A;       // [segments, B, H, K, K]
  View segment_states;  // [segments, B, H, K, V]: B of each, its final state from a zero state
};
struct RecurrenceSegmentsGrads {};
const Op& recurrence_segments_op();
Status recurrence_segments(const RecurrenceSegmentsArgs& args, const RecurrenceSegmentsOut& out, const Context& context);
int64_t recurrence_segments_workspace(const RecurrenceSegmentsArgs& args, const Context& context);

LINNET_KERNELS(recurrence, RecurrenceArgs, RecurrenceOut, RecurrenceGrads)
LINNET_KERNELS(recurrence_decode, RecurrenceDecodeArgs, RecurrenceDecodeOut, RecurrenceDecodeGrads)
LINNET_KERNELS(recurrence_segments, RecurrenceSegmentsArgs, RecurrenceSegmentsOut, RecurrenceSegmentsGrads)
LINNET_CUDA_KERNELS(recurrence_segments, RecurrenceSegmentsArgs, RecurrenceSegmentsOut, RecurrenceSegmentsGrads)

}  // namespace linnet
