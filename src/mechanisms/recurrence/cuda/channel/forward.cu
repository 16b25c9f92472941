// The tiled recurrence with a decay per channel.
#include "mechanisms/recurrence/cuda/channel/channel.cuh"

namespace linnet::cuda {

LINNET_CHANNEL(channel_64_64, 64, 64, true)
LINNET_CHANNEL(channel_64_64_states, 64, 64, false)
LINNET_CHANNEL(channel_64_128, 64, 128, true)
LINNET_CHANNEL(channel_64_128_states, 64, 128, false)
LINNET_CHANNEL(channel_128_64, 128, 64, true)
LINNET_CHANNEL(channel_128_64_states, 128, 64, false)
LINNET_CHANNEL(channel_128_128, 128, 128, true)
LINNET_CHANNEL(channel_128_128_states, 128, 128, false)

// Between the phases of a cut sequence: the state before segment i + 1, from what segments left. Each thread one element, in
// the order of the registers of walk().
extern "C" __global__ void __launch_bounds__(256)
    fold_channel_segments(float* states, const float* decays, const __grid_constant__ Engine e, int segments) {
  const int64_t width = static_cast<int64_t>(e.K) * e.V, heads = e.N * e.H, place = blockIdx.x * 256ll + threadIdx.x;
  const int64_t head = place / width;
  if (head >= heads) return;
  const Walk w = walk_of(e, head / e.H, 0);
  if (w.length <= kLongest) return;
  const int used = static_cast<int>((w.length + kSegment - 1) / kSegment) - 1;
  const int j = static_cast<int>(place % width % (64 * e.K) / 128), lane = static_cast<int>(place % 32);
  const int channel = ptx::Fragment{lane}.column(j);
  float state = 0;
  for (int i = 0; i < used && i < segments; ++i) {
    float* at = states + i * heads * width + place;
    state = i == 0 ? *at : fmaf(decays[(i * heads + head) * e.K + channel], state, *at);
    *at = state;
  }
}

}  // namespace linnet::cuda
