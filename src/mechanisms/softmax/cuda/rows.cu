// Small kernels around softmax attention: a warp for each row, memory alone bounds them.
#include "mechanisms/softmax/cuda/attend.cuh"

namespace linnet::cuda {
namespace {

constexpr int kWarps = 8;

// The warp's row of a [B, Tq, H] tensor; false behind the last.
__device__ __forceinline__ bool own_row(const Attend& p, Sequence* seq, RowPlace* row) {
  const int64_t at = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32, heads = int64_t{p.Hkv} * p.G;
  if (at >= flat_rows(p)) return false;
  *seq = {at / heads / p.Tq, 0, p.Tq, 0, p.Tk};
  *row = {static_cast<int32_t>(at / heads % p.Tq), static_cast<int32_t>(at % heads), 0, true};
  return true;
}

}  // namespace

// A block for each item.
extern "C" __global__ void __launch_bounds__(256) append_tokens(const __grid_constant__ AppendTokens p) {
  const int64_t b = blockIdx.x, length = index_of(p.lengths, b);
  if (length < 0 || length + p.T > p.capacity) return;  // no room: the cache is left alone
  const auto copy = [&](const AttendRows& from, const AttendRows& to, int32_t width) {
    const int64_t count = int64_t{p.T} * p.heads * width;
    for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
      const int64_t c = i % width, h = i / width % p.heads, t = i / width / p.heads;
      const int64_t source = b * from.stride_b + t * from.stride_t + h * from.stride_h + c;
      const int64_t place = b * to.stride_b + (length + t) * to.stride_t + h * to.stride_h + c;
      if (from.dtype == Dtype::f32) {
        static_cast<uint32_t*>(to.data)[place] = static_cast<const uint32_t*>(from.data)[source];
      } else {
        static_cast<uint16_t*>(to.data)[place] = static_cast<const uint16_t*>(from.data)[source];
      }
    }
  };
  copy(p.k, p.k_cache, p.K);
  copy(p.v, p.v_cache, p.V);
  __syncthreads();  // everybody knows the length
  if (threadIdx.x != 0) return;
  const int64_t at = b * p.lengths.stride[0];
  if (p.lengths.is_64) {
    static_cast<int64_t*>(p.lengths.data)[at] = length + p.T;
  } else {
    static_cast<int32_t*>(p.lengths.data)[at] = static_cast<int32_t>(length + p.T);
  }
}

// The parts of split keys: w = exp(lse - max), out = sum w read / sum w, with sink and gate. A block for each row: 4 groups of
// 128 threads share the parts, a thread has every 128th channel.
extern "C" __global__ void __launch_bounds__(512) join_parts(const __grid_constant__ Attend p) {
  __shared__ float weights[kMostParts], sums[4][128], tops[16], totals[16];
  const int64_t at = blockIdx.x, rows = flat_rows(p), heads = int64_t{p.Hkv} * p.G;
  const Sequence seq = {at / heads / p.Tq, 0, p.Tq, 0, p.Tk};
  const RowPlace row = {static_cast<int32_t>(at / heads % p.Tq), static_cast<int32_t>(at % heads), 0, true};
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float top = -infinity();
  for (int i = threadIdx.x; i < p.parts; i += 512) top = fmaxf(top, weights[i] = p.part_lse[i * rows + at]);
#pragma unroll
  for (int step = 1; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, step));
  if (lane == 0) tops[warp] = top;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 16; ++i) top = fmaxf(top, tops[i]);
  float sum = 0;
  for (int i = threadIdx.x; i < p.parts; i += 512) {
    weights[i] = weights[i] == -infinity() ? 0 : exp2f((weights[i] - top) * kLog2e);
    sum += weights[i];
  }
  sum = ptx::sum_lanes<32>(sum);
  if (lane == 0) totals[warp] = sum;
  __syncthreads();
  sum = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) sum += totals[i];
  const Normal normal = normalise(p, row.head, top, sum);
  if (threadIdx.x == 0 && p.lse.data != nullptr) static_cast<float*>(p.lse.data)[row_at(p.lse, seq, row)] = normal.lse;
  for (int c0 = 0; c0 < p.V; c0 += 128) {
    const int c = c0 + threadIdx.x % 128, group = threadIdx.x / 128;
    float y = 0;
    if (c < p.V) {
#pragma unroll 8
      for (int i = group; i < p.parts; i += 4) {
        const float part = p.part_read[(i * rows + at) * p.V + c];
        y = weights[i] == 0 ? y : fmaf(weights[i], part, y);
      }
    }
    sums[group][threadIdx.x % 128] = y;
    __syncthreads();
    if (group == 0 && c < p.V) {
      y = (sums[0][threadIdx.x] + sums[1][threadIdx.x]) + (sums[2][threadIdx.x] + sums[3][threadIdx.x]);
      put_channel(p, seq, row, c, y * normal.inverse);
    }
    __syncthreads();
  }
}

// delta = sum_c dout out - dlse.
extern "C" __global__ void __launch_bounds__(32 * kWarps) row_deltas(const __grid_constant__ Attend p) {
  Sequence seq;
  RowPlace row;
  if (!own_row(p, &seq, &row)) return;
  const int lane = threadIdx.x % 32;
  float sum = 0;
  if (p.dout.data != nullptr && p.out.data != nullptr) {
    const int64_t d = row_at(p.dout, seq, row), o = row_at(p.out, seq, row);
    for (int c = lane; c < p.V; c += 32) {
      sum = fmaf(ptx::load(p.dout.data, p.dout.dtype, d + c), ptx::load(p.out.data, p.out.dtype, o + c), sum);
    }
  }
  sum = ptx::sum_lanes<32>(sum);
  if (lane != 0) return;
  if (p.dlse.data != nullptr) sum -= static_cast<const float*>(p.dlse.data)[row_at(p.dlse, seq, row)];
  static_cast<float*>(p.delta.data)[row_at(p.delta, seq, row)] = sum;
}

// dsink = - sum over rows of exp(z - lse) delta; a block for each head.
extern "C" __global__ void __launch_bounds__(256)
    sink_gradients(const __grid_constant__ Attend p, const __grid_constant__ AttendNumbers to) {
  __shared__ double parts[256];
  const int32_t head = static_cast<int32_t>(blockIdx.x);
  const float z = ptx::load(p.sinks.data, p.sinks.dtype, head * p.sinks.stride[0]);
  const int64_t heads = int64_t{p.Hkv} * p.G, tokens = flat_rows(p) / heads;
  double sum = 0;
  if (z != -infinity()) {
    for (int64_t i = threadIdx.x; i < tokens; i += 256) {
      const int64_t b = i / p.Tq, t = i % p.Tq;
      const float lse = static_cast<const float*>(p.lse.data)[b * p.lse.stride_b + t * p.lse.stride_t + head * p.lse.stride_h];
      const float delta =
          static_cast<const float*>(p.delta.data)[b * p.delta.stride_b + t * p.delta.stride_t + head * p.delta.stride_h];
      sum -= static_cast<double>(expf(z - lse)) * delta;
    }
  }
  parts[threadIdx.x] = sum;
  __syncthreads();
  for (int step = 128; step > 0; step /= 2) {
    if (threadIdx.x < step) parts[threadIdx.x] += parts[threadIdx.x + step];
    __syncthreads();
  }
  if (threadIdx.x == 0) ptx::store(to.data, to.dtype, head * to.stride[0], static_cast<float>(parts[0]));
}

// softmax_merge; a warp for each row.
extern "C" __global__ void __launch_bounds__(32 * kWarps) merge_parts(const __grid_constant__ MergeParts p) {
  const int64_t at = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32;
  if (at >= p.rows) return;
  const int lane = threadIdx.x % 32;
  const int64_t h = at % p.H, t = at / p.H % p.T, b = at / p.H / p.T;
  const auto place = [&](const AttendRows& x) { return b * x.stride_b + t * x.stride_t + h * x.stride_h; };
  const float* const lses = static_cast<const float*>(p.part_lse.data) + place(p.part_lse);
  float top = -infinity(), sum = 0;
  for (int i = 0; i < p.P; ++i) top = fmaxf(top, lses[i * p.stride_lse]);
  for (int i = 0; i < p.P; ++i) {
    const float lse = lses[i * p.stride_lse];
    sum += lse == -infinity() ? 0 : expf(lse - top);
  }
  const float inverse = sum == 0 ? 0 : 1 / sum;
  for (int c = lane; c < p.V; c += 32) {
    float y = 0;
    for (int i = 0; i < p.P; ++i) {
      const float lse = lses[i * p.stride_lse];
      if (lse == -infinity()) continue;
      y = fmaf(expf(lse - top), ptx::load(p.part.data, p.part.dtype, i * p.stride_part + place(p.part) + c), y);
    }
    ptx::store(p.out.data, p.out.dtype, place(p.out) + c, y * inverse);
  }
  if (lane == 0 && p.lse.data != nullptr) {
    static_cast<float*>(p.lse.data)[place(p.lse)] = sum == 0 ? -infinity() : top + logf(sum);
  }
}
// w = exp(lse_p - lse): dout_p = w dout, dlse_p = w (dout.(out_p - out) + dlse).
extern "C" __global__ void __launch_bounds__(32 * kWarps) merge_gradients(const __grid_constant__ MergeParts p) {
  const int64_t at = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32;
  if (at >= p.rows) return;
  const int lane = threadIdx.x % 32;
  const int64_t h = at % p.H, t = at / p.H % p.T, b = at / p.H / p.T;
  const auto place = [&](const AttendRows& x) { return b * x.stride_b + t * x.stride_t + h * x.stride_h; };
  const float whole = static_cast<const float*>(p.lse.data)[place(p.lse)];
  const float dlse = p.dlse.data != nullptr ? static_cast<const float*>(p.dlse.data)[place(p.dlse)] : 0;
  for (int i = 0; i < p.P; ++i) {
    const float lse = static_cast<const float*>(p.part_lse.data)[i * p.stride_lse + place(p.part_lse)];
    const bool skipped = lse == -infinity();
    const float w = skipped ? 0 : expf(lse - whole);
    float dot = 0;
    for (int c = lane; c < p.V; c += 32) {
      const float d = p.dout.data != nullptr ? ptx::load(p.dout.data, p.dout.dtype, place(p.dout) + c) : 0;
      const float y = ptx::load(p.out.data, p.out.dtype, place(p.out) + c);
      const float part = skipped ? y : ptx::load(p.part.data, p.part.dtype, i * p.stride_part + place(p.part) + c);
      dot = fmaf(d, part - y, dot);
      if (p.dpart.data != nullptr) {
        ptx::store(p.dpart.data, p.dpart.dtype, i * p.stride_dpart + place(p.dpart) + c, skipped ? 0 : w * d);
      }
    }
    dot = ptx::sum_lanes<32>(dot);
    if (lane == 0 && p.dpart_lse.data != nullptr) {
      static_cast<float*>(p.dpart_lse.data)[i * p.stride_dlse + place(p.dpart_lse)] = skipped ? 0 : w * (dot + dlse);
    }
  }
}

}  // namespace linnet::cuda
