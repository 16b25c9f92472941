// The states between the segments of long sequences, for the tiled kernels of every type.
#include "mechanisms/recurrence/cuda/tile/tile.cuh"

namespace linnet::cuda {

// Between the phases of a cut sequence: the state before segment i + 1, from what segments left. Each thread one element.
extern "C" __global__ void __launch_bounds__(256)
    fold_segments(float* states, const float* decays, const __grid_constant__ Engine e, int segments) {
  const int64_t width = static_cast<int64_t>(e.K) * e.V, heads = e.N * e.H, place = blockIdx.x * 256ll + threadIdx.x;
  const int64_t head = place / width;
  if (head >= heads) return;
  const Walk w = walk_of(e, head / e.H, 0);
  if (w.length <= kLongest) return;
  const int64_t part = segment_tokens(e, w.length);
  const int used = static_cast<int>((w.length + part - 1) / part) - 1;
  float state = 0;
  const int count = min(used, segments);
  constexpr int kAhead = 8;  // segments whose states are on their way at once
  for (int first = 0; first < count; first += kAhead) {
    float left[kAhead], factor[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t at = min(first + i, count - 1);
      left[i] = states[at * heads * width + place];
      factor[i] = at == 0 ? 0 : decays[at * heads + head];
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      state = fmaf(factor[i], state, left[i]);
      if (first + i < count) states[(first + i) * heads * width + place] = state;
    }
  }
}

}  // namespace linnet::cuda
