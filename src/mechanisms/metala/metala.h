// metala: MetaLA (arXiv 2411.10741): gated linear attention whose key is one minus the decay, with a self-augmentation term.
//
//   g = max(logsigmoid(a) / tau, floor),   alpha = exp(g),   k = 1 - alpha = -expm1(g)
//   S_t = diag(alpha_t) S_{t-1} + k_t v_t^T
//   o_t = scale S_t^T q_t + sigmoid(u_t v_t),   u_t = sum_d q_td w_aug_d k_td          (aug linear: u_t v_t; none: nothing)
//
// It is `recurrence` with a decay per key channel and k tied to it. A masked token has v = 0 and still decays the state, as
// released; with skip_masked it has g = 0 too, which leaves the state alone.
#pragma once

#include "../../core/args.h"

namespace linnet {

enum class MetalaAug : int32_t { sigmoid, linear, none };

struct MetalaMixerArgs {
  View q;           // [B, T, H, K]
  View a;           // [B, T, H, K]: decay logits
  View v;           // [B, T, H, V]
  View w_aug;       // optional [H, K]: zeros when absent
  View mask;        // optional [B, T] u8: tokens with 0 are masked
  View cu_seqlens;  // optional [N+1]: packed sequences (q [total, H, K] or with B = 1)
  View state;       // optional [N, H, K, V] f32: before the first token; N = B unless packed
  double tau = 16;
  Maybe scale;  // of the recurrence only; default K^-0.5
  double floor = -88;
  MetalaAug aug = MetalaAug::sigmoid;
  bool skip_masked = false;
};
struct MetalaMixerOut {
  View out;          // [B, T, H, V]
  View final_state;  // [N, H, K, V] f32
};
struct MetalaMixerGrads {
  View dout, dfinal_state;          // incoming; absent = zero
  View dq, da, dv, dw_aug, dstate;  // results; absent = not wanted
};
const Op& metala_mixer_op();
Status metala_mixer(const MetalaMixerArgs& args, const MetalaMixerOut& out, const Context& context);
Status metala_mixer_backward(const MetalaMixerArgs& args, const MetalaMixerOut& out, const MetalaMixerGrads& grads,
                             const Context& context);
int64_t metala_mixer_workspace(const MetalaMixerArgs& args, Pass pass, const Context& context);

// One or few tokens with the state carried in place.
struct MetalaMixerDecodeArgs {
  View q, a, v, w_aug, mask;
  View state;  // [B, H, K, V] f32: read and overwritten
  double tau = 16;
  Maybe scale;
  double floor = -88;
  MetalaAug aug = MetalaAug::sigmoid;
  bool skip_masked = false;
};
struct MetalaMixerDecodeOut {
  View out;  // [B, T, H, V]
};
struct MetalaMixerDecodeGrads {};
const Op& metala_mixer_decode_op();
Status metala_mixer_decode(const MetalaMixerDecodeArgs& args, const MetalaMixerDecodeOut& out, const Context& context);
int64_t metala_mixer_decode_workspace(const MetalaMixerDecodeArgs& args, const Context& context);

// The recurrence alone, on given log decays.
struct MetalaCoreArgs {
  View q;           // [B, T, H, K]
  View g;           // [B, T, H, K] f32: log decays; those below floor count as floor
  View v;           // [B, T, H, V]
  View cu_seqlens;  // optional [N+1]
  View state;       // optional [N, H, K, V] f32
  Maybe scale;
  double floor = -88;
};
struct MetalaCoreOut {
  View out;          // [B, T, H, V]
  View final_state;  // [N, H, K, V] f32
};
struct MetalaCoreGrads {
  View dout, dfinal_state;
  View dq, dg, dv, dstate;
};
const Op& metala_core_op();
Status metala_core(const MetalaCoreArgs& args, const MetalaCoreOut& out, const Context& context);
Status metala_core_backward(const MetalaCoreArgs& args, const MetalaCoreOut& out, const MetalaCoreGrads& grads,
                            const Context& context);
int64_t metala_core_workspace(const MetalaCoreArgs& args, Pass pass, const Context& context);

// Whether token t of batch row b is masked; metala_core has no mask.
template <class Args>
LINNET_INLINE bool metala_masked(const Args& args, int64_t b, int64_t t) {
  if constexpr (requires { args.mask; }) return args.mask.given() && *args.mask.template at<const uint8_t>(b, t) == 0;
  return false;
}
template <class Args>
LINNET_INLINE bool metala_skipped(const Args& args, int64_t b, int64_t t) {
  if constexpr (requires { args.skip_masked; }) return args.skip_masked && metala_masked(args, b, t);
  return false;
}

LINNET_KERNELS(metala_mixer, MetalaMixerArgs, MetalaMixerOut, MetalaMixerGrads)
LINNET_KERNELS(metala_mixer_decode, MetalaMixerDecodeArgs, MetalaMixerDecodeOut, MetalaMixerDecodeGrads)
LINNET_KERNELS(metala_core, MetalaCoreArgs, MetalaCoreOut, MetalaCoreGrads)

}  // namespace linnet
