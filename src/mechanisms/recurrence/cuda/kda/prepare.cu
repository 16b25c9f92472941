// What a chunk of the delta rule with a decay per channel needs besides the state (kda.h), for all chunks at once: a
// warpgroup for each 64 channels; a thread has two channels of 16 rows.
#include "mechanisms/recurrence/cuda/invert.cuh"
#include "mechanisms/recurrence/cuda/kda/kda.cuh"

namespace linnet::cuda {
namespace {

template <int D>
struct KdaShared {
  alignas(1024) char q[D * 128];
  char read[D * 128], k[D * 128];  // behind each other, as in the image
  // The gates; then T and P; for gradients what rounding took from K", then T, T^T and P T.
  alignas(1024) char g[2 * kKdaSystem + 8192];
  float x[C][kLine];
  float totals[4][D];
  float beta[C];
  uint64_t full;
};

template <int D, bool back>
__device__ void prepare_kda(const Kda& t) {
  extern __shared__ char memory[];
  static_assert(sizeof(KdaShared<D>) + 1024 <= kda_prepare_bytes(D));
  auto& s = ptx::shared_as<KdaShared<D>>(memory);
  constexpr int kThreads = D / 64 * 128;
  const Engine& e = t.e;
  const int h = blockIdx.x % e.H;
  Walk w;
  int64_t n;
  int chunk;
  if (!find_chunk(e, blockIdx.x / e.H, &w, &n, &chunk)) return;
  const int rows = chunk_rows(w, chunk);
  const int64_t number = (channel_chunk(e.offsets != nullptr, e.T, n, w.begin) + chunk) * e.H + h;
  const int thread = threadIdx.x, group = thread / 128, warp = thread % 128 / 32, lane = thread % 32;
  const int channel = group * 64 + 2 * lane, first = 16 * warp;
  if (thread == 0) {
    ptx::barrier_init(&s.full, 1);
    ptx::barrier_init_fence();
    const int row = static_cast<int>(w.begin) + chunk * C, b = static_cast<int>(w.b);
    ptx::barrier_arrive_expect(&s.full, (t.wide ? 4 : 3) * (D * 128));
    ptx::load_box(s.g, &t.g, &s.full, 0, row, 0, h, b);
    ptx::load_box(s.q, &t.q, &s.full, 0, row, 0, h / e.q.group, b);
    ptx::load_box(s.k, &t.k, &s.full, 0, row, 0, h / e.k.group, b);
  }
  if (thread < C) {
    const int64_t place = row_of(e.beta, w.b, w.begin + static_cast<int64_t>(chunk) * C + thread, h);
    const float beta = thread < rows ? e.beta_factor * ptx::load(e.beta.data, e.beta.dtype, place) : 0;
    s.beta[thread] = back && thread < rows && beta == 0 ? kKdaLeastBeta : beta;
  }
  __syncthreads();
  ptx::barrier_wait(&s.full, 0);
  float2 l[16];
  const float range = sum_rows(s.g, t.wide, channel, first, rows, l);
  *reinterpret_cast<float2*>(&s.totals[warp][channel]) = l[15];
  const bool split = ptx::group_any<1, kThreads>(!(range <= kSplit));
  float* record = t.records + number * kda_record(D);
  if (thread == 0) record[2 * D] = split ? 1 : 0;
  if (split) return;
  {
    float2 total[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) total[j] = *reinterpret_cast<const float2*>(&s.totals[j][channel]);
    const float2 a = {warp == 0   ? -total[0].x - total[1].x
                      : warp == 1 ? -total[1].x
                      : warp == 2 ? 0
                                  : total[2].x,
                      warp == 0   ? -total[0].y - total[1].y
                      : warp == 1 ? -total[1].y
                      : warp == 2 ? 0
                                  : total[2].y};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const uint32_t at = ptx::tile_byte(C, first + i, channel);
      const float2 k = ptx::unpack<true>(*reinterpret_cast<const uint32_t*>(s.k + at));
      const float2 q = ptx::unpack<true>(*reinterpret_cast<const uint32_t*>(s.q + at));
      const float2 up = {ptx::exp2_fast(l[i].x + a.x), ptx::exp2_fast(l[i].y + a.y)};
      const float2 read = back ? float2{e.scale * up.x, e.scale * up.y} : up;
      const float2 down = {ptx::exp2_fast(-l[i].x - a.x), ptx::exp2_fast(-l[i].y - a.y)};
      const bool in = first + i < rows;
      *reinterpret_cast<uint32_t*>(s.q + at) = in ? ptx::pack<true>(q.x * read.x, q.y * read.y) : 0;
      const float2 exact = {k.x * up.x, k.y * up.y};
      const uint32_t rounded = ptx::pack<true>(exact.x, exact.y);
      *reinterpret_cast<uint32_t*>(s.read + at) = in ? rounded : 0;
      if constexpr (back) {
        const float2 x = ptx::unpack<true>(rounded);
        *reinterpret_cast<uint32_t*>(s.g + at) = in ? ptx::pack<true>(exact.x - x.x, exact.y - x.y) : 0;
      }
      *reinterpret_cast<uint32_t*>(s.k + at) = in ? ptx::pack<true>(k.x * down.x, k.y * down.y) : 0;
    }
    if (warp == 0) {
      record[channel] = ptx::exp2_fast(total[0].x + total[1].x);
      record[channel + 1] = ptx::exp2_fast(total[0].y + total[1].y);
      record[D + channel] = ptx::exp2_fast(total[2].x + total[3].x);
      record[D + channel + 1] = ptx::exp2_fast(total[2].y + total[3].y);
    }
  }
  ptx::fence_async_shared();
  __syncthreads();
  char* image = t.images + number * (back ? kda_back_images(D) : kda_images(D));
  if (thread == 0) {
    if constexpr (back) ptx::store_bytes(image + kda_low(D), s.g, D * 128);
    ptx::store_bytes(image, s.q, kda_operands(D));
  }
  const uint32_t q = ptx::shared_address(s.q), read = ptx::shared_address(s.read), k = ptx::shared_address(s.k);
  const int row = warp * 16 + lane / 4;
  const auto product = [&](float(&p)[32], uint32_t a) {
    ptx::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < D / 16; ++kk) {
      ptx::wgmma_shared<true, false, false>(p, ptx::descriptor_k_major(a, C, kk), ptx::descriptor_k_major(k, C, kk), kk > 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::hold(p);
  };
  const bool scores = group == D / 64 - 1;
  uint32_t P[32];
  if (scores) {
    float p[32];
    product(p, q);
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const int r = row + ptx::Fragment::below(j), c = ptx::Fragment{lane}.column(j);
      const uint32_t x = ptx::round_tf32(c <= r ? p[j] : 0);
      if constexpr (back) {
        P[j] = x;
      } else if (j < 16 || row >= 32) {
        *reinterpret_cast<uint32_t*>(s.g + kKdaSystem + kda_system_byte(r, c)) = x;
      }
    }
  }
  if (group == 0) {
    float p[32];
    product(p, read);
    const float beta[2] = {s.beta[row], s.beta[row + 8]};
#pragma unroll
    for (int j = 0; j < 32; j += 2) {
      const int half = j / 2 % 2, r = row + 8 * half, c = ptx::Fragment{lane}.pair(j);
      *reinterpret_cast<float2*>(&s.x[r][c]) =
          float2{c < r && r < rows ? beta[half] * p[j] : 0, c + 1 < r && r < rows ? beta[half] * p[j + 1] : 0};
    }
    ptx::group_sync<2, 128>();
    invert(s.x, thread);
    if constexpr (back) {  // the gates' place is sent
      if (thread == 0) ptx::wait_stores_read();
      ptx::group_sync<2, 128>();
    }
    const int r = thread % 64, half = thread / 64 * 32;
#pragma unroll
    for (int c = half; c < half + 32; c += 8) {
      if (half > r) break;  // zeros, left out
      float y[8], betas[8];
#pragma unroll
      for (int j = 0; j < 8; j += 4) {
        *reinterpret_cast<float4*>(y + j) = *reinterpret_cast<const float4*>(&s.x[r][c + j]);
        *reinterpret_cast<float4*>(betas + j) = *reinterpret_cast<const float4*>(&s.beta[c + j]);
      }
      uint32_t z[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) z[j] = ptx::round_tf32(c + j <= r ? y[j] * betas[j] : 0);
      if constexpr (back) {
#pragma unroll
        for (int j = 0; j < 8; ++j) *reinterpret_cast<uint32_t*>(s.g + kKdaSystem + kda_system_byte(c + j, r)) = z[j];
      }
      *reinterpret_cast<uint4*>(s.g + kda_system_byte(r, c)) = uint4{z[0], z[2], z[4], z[6]};
      *reinterpret_cast<uint4*>(s.g + kda_system_byte(r, c + 1)) = uint4{z[1], z[3], z[5], z[7]};
    }
  }
  ptx::fence_async_shared();
  __syncthreads();
  if constexpr (back) {
    if (scores) {  // P T
      float z[32];
      ptx::wgmma_fence();
      multiply_upper(z, P, ptx::shared_address(s.g + kKdaSystem), false);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::hold(z);
#pragma unroll
      for (int j = 0; j < 32; j += 2) {
        const int r = row + ptx::Fragment::below(j), c = ptx::Fragment{lane}.pair(j);
        *reinterpret_cast<uint32_t*>(s.g + 2 * kKdaSystem + ptx::tile_byte(C, r, c)) = ptx::pack<true>(z[j], z[j + 1]);
      }
    }
    ptx::fence_async_shared();
    __syncthreads();
  }
  if (thread == 0) {
    ptx::store_bytes(image + kda_operands(D), s.g, back ? 2 * kKdaSystem + 8192 : 2 * kKdaSystem);
    ptx::wait_stores();
  }
}

}  // namespace

#define LINNET_KDA_PREPARE(name, D, back)                                                                     \
  extern "C" __global__ void __launch_bounds__(2 * D, D == 128 ? 2 : 3) name(const __grid_constant__ Kda t) { \
    prepare_kda<D, back>(t);                                                                                  \
  }
LINNET_KDA_PREPARE(kda_prepare_64, 64, false)
LINNET_KDA_PREPARE(kda_prepare_128, 128, false)
LINNET_KDA_PREPARE(kda_prepare_back_64, 64, true)
LINNET_KDA_PREPARE(kda_prepare_back_128, 128, true)

}  // namespace linnet::cuda
