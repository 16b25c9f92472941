// recurrence_segments on the GPU, in double: [B | A] is a state of V + K columns, those of A with the identity before the first
// token and values of 0. A column needs no other one, so a warp has one column of one sequence, its rows spread over the lanes,
// and walks the tokens. Segments are sequences of their own.
#include "mechanisms/recurrence/recurrence.h"
#include "mechanisms/recurrence/shape.h"
#include "mechanisms/shared/pieces.cuh"

namespace linnet::cuda {
namespace {

constexpr int kColumns = 4, kWidest = 256, kRows = kWidest / 32;

__device__ double over_lanes(double x) {
  for (int lane = 1; lane < 32; lane *= 2) x += __shfl_xor_sync(0xffffffff, x, lane);
  return x;
}
// states and maps are [B, H, K, .], or [segments, B, H, K, .]
__device__ void put_state(const View& view, double x, int64_t segment, int64_t b, int64_t h, int64_t row, int64_t column) {
  const int64_t* stride = view.stride + view.rank - 4;
  const int64_t at = b * stride[0] + h * stride[1] + row * stride[2] + column * stride[3];
  ptx::store(view.data, view.dtype, view.rank == 5 ? segment * view.stride[0] + at : at, static_cast<float>(x));
}

}  // namespace

extern "C" __global__ void __launch_bounds__(32 * kColumns)
    recurrence_segments_columns(const __grid_constant__ RecurrenceSegmentsArgs args, const __grid_constant__ RecurrenceShape s,
                                int64_t length, const __grid_constant__ View out, const __grid_constant__ View states,
                                const __grid_constant__ View maps) {
  const int lane = threadIdx.x % 32;
  const int64_t column = blockIdx.y * static_cast<int64_t>(kColumns) + threadIdx.x / 32;
  const int64_t h = blockIdx.x % s.H, b = blockIdx.x / s.H % s.B, segment = blockIdx.x / s.H / s.B;
  if (column >= s.V + (is_given(maps) ? s.K : 0)) return;
  const bool is_map = column >= s.V;
  const int64_t heads_q = s.H / s.Hq, heads_k = s.H / s.Hk, heads_v = s.H / s.Hv;
  double S[kRows], k[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) S[i] = is_map && column - s.V == i * 32 + lane ? 1 : 0;
  const int64_t begin = segment * length, end = min(s.T, begin + length);
  for (int64_t t = begin; t < end; ++t) {
    const double decay = !is_given(args.g) || s.per_channel ? 1 : exp(static_cast<double>(get(args.g, b, t, h)));
    double seen = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t row = i * 32 + lane;
      const bool here = row < s.K;
      k[i] = here ? get(args.k, b, t, h / heads_k, row) : 0;
      const double a = here && s.per_channel ? exp(static_cast<double>(get(args.g, b, t, h, row))) : decay;
      S[i] = a == 0 ? 0 : a * S[i];  // which forgets a NaN too
      if (here) seen += k[i] * S[i];
    }
    double u = is_map ? 0 : get(args.v, b, t, h / heads_v, column);
    if (is_given(args.beta)) u = get(args.beta, b, t, h) * (u - over_lanes(seen));
    double read = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t row = i * 32 + lane;
      if (row >= s.K) continue;
      // Without beta a map's column is written by no token, which a key of NaN would do.
      if (!is_map || is_given(args.beta)) S[i] += k[i] * u;
      if (is_given(out) && !is_map) read += S[i] * get(args.q, b, t, h / heads_q, row);
    }
    if (is_given(out) && !is_map) {
      read = over_lanes(read);
      if (lane == 0) put(out, static_cast<float>(s.scale * read), b, t, h, column);
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t row = i * 32 + lane;
    if (row >= s.K) continue;
    if (is_map) {
      put_state(maps, S[i], segment, b, h, row, column - s.V);
    } else if (is_given(states)) {
      put_state(states, S[i], segment, b, h, row, column);
    }
  }
}

}  // namespace linnet::cuda
