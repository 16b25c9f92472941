// The forward of softmax attention in f32 on the multiply-add units (plain.cuh).
#include "mechanisms/softmax/cuda/plain.cuh"

namespace linnet::cuda {

// Grid: row tiles (find_place), slices of the values.
extern "C" __global__ void __launch_bounds__(kPlainThreads) plain_attend(const __grid_constant__ Attend p) {
  extern __shared__ char memory[];
  PlainMemory& m = *reinterpret_cast<PlainMemory*>(memory);
  Place place;
  if (!find_place<false, 64>(p, blockIdx.x, &place)) return;
  const PlainTile tile = {p, place, place.tile * 64};
  const Sequence& seq = place.seq;
  const int32_t rows = seq.tq * p.G, slice = blockIdx.y * kAttendSlice;
  if (tile.first_row >= rows) return;
  KeyTiles tiles(p.mask, tile.row(0).t, tile.row(min(64, rows - tile.first_row) - 1).t, seq.n);
  if (p.parts > 1) tiles.take_part(place.part, p.parts);
  const Thread thread;
  float top[4], sum[4], read[4][4] = {};
#pragma unroll
  for (int a = 0; a < 4; ++a) {
    top[a] = -infinity();
    sum[a] = 0;
  }
  for (int32_t each = tiles.begin; each < tiles.end; each = tiles.next(each)) {
    const int32_t j0 = each * kAttendKeys;
    float s[4][4], unused[4][4];
    plain_logits<false>(m, tile, j0, s, unused);
#pragma unroll
    for (int a = 0; a < 4; ++a) {
      float most = top[a];
#pragma unroll
      for (int b = 0; b < 4; ++b) most = fmaxf(most, s[a][b]);
      most = row_most(most);
      const float safe = most == -infinity() ? 0 : most, shrink = exp2f((top[a] - safe) * kLog2e);
      top[a] = most;
      float total = 0;
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        s[a][b] = exp2f((s[a][b] - safe) * kLog2e);
        total += s[a][b];
      }
      sum[a] = fmaf(sum[a], shrink, ptx::sum_lanes<16>(total));
#pragma unroll
      for (int b = 0; b < 4; ++b) read[a][b] *= shrink;
    }
    __syncthreads();
    keep_weights(m, s);
    const bool wild = plain_rows(m, p.v, p.V, slice, [&](int r) { return tile.key_of(p.v, j0 + r); });
    if (__syncthreads_or(wild)) {
      plain_sums_seen<false>(m, read);
    } else {
      plain_sums<false>(m, read);
    }
  }
#pragma unroll
  for (int a = 0; a < 4; ++a) {
    const RowPlace row = tile.row(thread.y + 16 * a);
    if (!row.there) continue;
    if (p.parts > 1) {
      const int64_t at = place.part * flat_rows(p) + flat_row(p, seq, row);
      if (thread.x == 0 && slice == 0) p.part_lse[at] = sum[a] == 0 ? -infinity() : top[a] + logf(sum[a]);
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const int c = slice + thread.x + 16 * b;
        if (c < p.V) p.part_read[at * p.V + c] = sum[a] == 0 ? 0 : read[a][b] / sum[a];
      }
      continue;
    }
    const Normal normal = normalise(p, row.head, top[a], sum[a]);
    if (thread.x == 0 && slice == 0 && p.lse.data != nullptr) {
      static_cast<float*>(p.lse.data)[row_at(p.lse, seq, row)] = normal.lse;
    }
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const int c = slice + thread.x + 16 * b;
      if (c < p.V) put_channel(p, seq, row, c, read[a][b] * normal.inverse);
    }
  }
}

}  // namespace linnet::cuda
