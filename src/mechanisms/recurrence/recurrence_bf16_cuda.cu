// The tiled recurrence for bf16.
#include "mechanisms/recurrence/recurrence_tile.cuh"

namespace linnet::cuda {

LINNET_TILE(tile_bf16_64_64, true, 64, 64, false)
LINNET_TILE(tile_bf16_64_64_decay, true, 64, 64, true)
LINNET_TILE(tile_bf16_64_128, true, 64, 128, false)
LINNET_TILE(tile_bf16_64_128_decay, true, 64, 128, true)
LINNET_TILE(tile_bf16_128_64, true, 128, 64, false)
LINNET_TILE(tile_bf16_128_64_decay, true, 128, 64, true)
LINNET_TILE(tile_bf16_128_128, true, 128, 128, false)
LINNET_TILE(tile_bf16_128_128_decay, true, 128, 128, true)

// Between the phases of a cut sequence: the state before segment i + 1, from what segments left. Each thread one element.
extern "C" __global__ void __launch_bounds__(256)
    fold_segments(float* states, const float* decays, const __grid_constant__ Engine e, int segments) {
  const int64_t width = static_cast<int64_t>(e.K) * e.V, heads = e.N * e.H, place = blockIdx.x * 256ll + threadIdx.x;
  const int64_t head = place / width;
  if (head >= heads) return;
  const Walk w = walk_of(e, head / e.H, 0);
  if (w.length <= kLongest) return;
  const int used = static_cast<int>((w.length + kSegment - 1) / kSegment) - 1;
  float state = 0;
  for (int i = 0; i < used && i < segments; ++i) {
    float* at = states + i * heads * width + place;
    state = i == 0 ? *at : fmaf(decays[i * heads + head], state, *at);
    *at = state;
  }
}

}  // namespace linnet::cuda
