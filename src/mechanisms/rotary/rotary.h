// rotary: positions as rotations of pairs of channels.
//
//   with (u, v) the pair i of a row at position p:  out = (u cos a - v sin a, u sin a + v cos a),  a = p f_i
//   f_i = theta^(-2 i / dims),  i = 0 .. dims / 2 - 1
//
// pairs half: channels i and i + dims / 2 (Llama, Qwen, GPT-NeoX); interleaved: 2 i and 2 i + 1 (GPT-J, the papers). Channels
// behind `dims` are copied. Scalings change f_i:
//   linear   f / factor
//   llama3   with the wavelength w = 2 pi / f: f where w < L / high_freq_factor, f / factor where w > L / low_freq_factor,
//            between them (1 - s) f / factor + s f, s = (L / w - low_freq_factor) / (high_freq_factor - low_freq_factor),
//            L = original_length
// or `frequencies` gives f_i itself. Positions are offset + t, or given.
#pragma once

#include "../../core/args.h"

namespace linnet {

enum class RotaryPairs : int32_t { half, interleaved };
enum class RotaryScaling : int32_t { none, linear, llama3 };
struct RotaryArgs {
  View x;            // [B, T, H, D]
  View positions;    // [B, T]; absent: offset + t
  View frequencies;  // [dims / 2]; absent: from theta and scaling
  double theta = 10000;
  RotaryPairs pairs = RotaryPairs::half;
  int64_t dims = 0;  // channels that turn, even; 0: all
  int64_t offset = 0;
  RotaryScaling scaling = RotaryScaling::none;
  double factor = 1, low_freq_factor = 1, high_freq_factor = 4;
  int64_t original_length = 8192;
};
struct RotaryOut {
  View out;  // [B, T, H, D]
};
struct RotaryGrads {
  View dout;  // incoming; absent = zero
  View dx;    // result; absent = not wanted
};
const Op& rotary_op();
Status rotary(const RotaryArgs& args, const RotaryOut& out, const Context& context);
Status rotary_backward(const RotaryArgs& args, const RotaryOut& out, const RotaryGrads& grads, const Context& context);
int64_t rotary_workspace(const RotaryArgs& args, Pass pass, const Context& context);

// f_i of a call, for kernels and for users who keep them.
double rotary_frequency(const RotaryArgs& args, int64_t i);

LINNET_KERNELS(rotary, RotaryArgs, RotaryOut, RotaryGrads)
LINNET_CUDA_KERNELS(rotary, RotaryArgs, RotaryOut, RotaryGrads)

}  // namespace linnet
