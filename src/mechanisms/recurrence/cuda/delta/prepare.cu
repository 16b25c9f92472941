// What a chunk of the delta rules needs besides the state, for all chunks at once: T = (I + A)^-1 diag(beta), A = tril(beta K
// K^T D, -1) (delta.h). In f32: 8-row blocks by substitution, then 8 -> 16 -> 32 -> 64 by -X22 (A21 X11), rounded to
// tf32 at the end: in bf16 it alone would cost more than the tolerance (with keys that are alike, four times as much).
//
// One warpgroup a chunk and head: each step of the inverse waits for the one before, and the other blocks of a multiprocessor
// work meanwhile. At 16,2048,16,128 it reads 134 MB and writes 101 MB: 0.056 ms of an H200's copy bandwidth.
#include "mechanisms/recurrence/cuda/delta/delta.cuh"
#include "mechanisms/recurrence/cuda/invert.cuh"

namespace linnet::cuda {
namespace {

template <int D>
struct PrepareShared {
  alignas(1024) char k[D / 64 * kPanel];
  float x[C][kLine];
  Decays decays;
  float beta[C], squares[C];  // squares: of the keys' norms
  uint64_t full;
};

// 8 columns of a row of T or T^T, to the line of its tile: two pieces of 16 bytes, the even and the odd ones, which are
// neighbours there (tile_byte_paired_f32). Settled: their sum is rounded once (settle), from the larger ones beside the
// diagonal on.
template <bool settled, bool downwards>
__device__ __forceinline__ void store_columns(char* line, int r, int c, float (&x)[8]) {
  uint32_t t[8];
  float left = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int j = downwards ? 7 - i : i;
    if constexpr (settled) x[j] = settle(x[j], left, 0x1p-8f);
    t[j] = ptx::round_tf32(x[j]);
    left = x[j] - __uint_as_float(t[j] & 0xffffe000);
  }
  *reinterpret_cast<uint4*>(line + ptx::tile_byte_paired_f32(C, r % 8, c % 32) % 128) = uint4{t[0], t[2], t[4], t[6]};
  *reinterpret_cast<uint4*>(line + ptx::tile_byte_paired_f32(C, r % 8, c % 32 + 1) % 128) = uint4{t[1], t[3], t[5], t[7]};
}

template <bool bf16, int D, bool decays>
__device__ void prepare(const Delta& delta) {
  extern __shared__ char memory[];
  static_assert(sizeof(PrepareShared<D>) + 1024 <= prepare_shared_bytes(D));
  auto& s = ptx::shared_as<PrepareShared<D>>(memory);
  const Engine& e = delta.e;
  const int h = blockIdx.x % e.H, thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int64_t slot = blockIdx.x / e.H;
  const Place place = place_of(e, slot);
  if (place.chunk < 0) return;
  const bool gradients = delta.inverse_transposed != nullptr;
  const Walk w = walk_of(e, place.n, 0, false);
  const int rows = static_cast<int>(min(static_cast<int64_t>(C), w.length - static_cast<int64_t>(place.chunk) * C));
  if (thread == 0) {
    ptx::barrier_init(&s.full, 1);
    ptx::barrier_init_fence();
    ptx::barrier_arrive_expect(&s.full, D / 64 * kPanel);
    ptx::load_box(s.k, &delta.k, &s.full, 0, static_cast<int>(w.begin) + place.chunk * C, 0, h / e.k.group,
                  static_cast<int>(w.b));
  }
  Sums G = {};
  if (warp == 0) {
    const Numbers gates = decays ? ask_numbers(e.g, w, h, place.chunk, lane) : Numbers{};
    const float2 beta = take_numbers(ask_numbers(e.beta, w, h, place.chunk, lane), e.beta.dtype);
    if constexpr (decays) {
      G = sum_gates(take_gates(gates, e.g.dtype), lane);
      store_decays(G, lane, s.decays);
    }
    // For gradients an exact 0 is none: N is divided by beta again.
    const float both[2] = {e.beta_factor * beta.x, e.beta_factor * beta.y};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      s.beta[lane + 32 * j] = gradients && both[j] == 0 && lane + 32 * j < rows ? kLeastBeta : both[j];
    }
  }
  __syncthreads();
  ptx::barrier_wait(&s.full, 0);
  const int row = warp * 16 + lane / 4;
  const bool bounds = e.T > kLongest;  // segments ask for them
  {
    float p[32];
    const uint32_t k = ptx::shared_address(s.k);
    ptx::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < D / 16; ++kk) {
      const uint64_t keys = ptx::descriptor_k_major(k, C, kk);
      ptx::wgmma_shared<bf16, false, false>(p, keys, keys, kk > 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::hold(p);
#pragma unroll
    for (int j = 0; j < 32 && bounds; ++j) {
      const int r = row + ptx::Fragment::below(j);
      if (j / 8 == warp && ptx::Fragment{lane}.column(j) == r) s.squares[r] = r < rows ? p[j] : 0;
    }
    weigh<decays, true>(p, s.decays, warp, lane, false);
    const float beta[2] = {s.beta[row], s.beta[row + 8]};
    const bool in[2] = {row < rows, row + 8 < rows};
#pragma unroll
    for (int j = 0; j < 32; j += 2) {
      if (j / 8 > warp) continue;
      const int half = j / 2 % 2;
      *reinterpret_cast<float2*>(&s.x[row + 8 * half][ptx::Fragment{lane}.pair(j)]) =
          float2{in[half] ? beta[half] * p[j] : 0, in[half] ? beta[half] * p[j + 1] : 0};
    }
  }
  __syncthreads();
  invert(s.x, thread);
  // A token multiplies the norm of a state by at most exp(g) max(1, |1 - beta k^2|).
  if (warp == 0 && bounds) {
    float bound = 0;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float least = fabsf(1 - s.beta[lane + 32 * j] * s.squares[lane + 32 * j]);
      bound += least > 1 ? __logf(least) : 0;
    }
    for (int step = 1; step < 32; step *= 2) bound += __shfl_xor_sync(0xffffffff, bound, step);
    if (lane == 0) delta.bounds[slot * e.H + h] = bound + G.all;
  }
  const int64_t image = (slot * e.H + h) * kInverseBytes;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const int at = thread + 128 * i, r = at < 256 ? at / 4 : 32 + (at - 256) / 4, c = (at < 256 ? 0 : 32) + at % 4 * 8;
    float x[8], beta[8];
#pragma unroll
    for (int j = 0; j < 8; j += 4) {
      *reinterpret_cast<float4*>(x + j) = *reinterpret_cast<const float4*>(&s.x[r][c + j]);
      *reinterpret_cast<float4*>(beta + j) = *reinterpret_cast<const float4*>(&s.beta[c + j]);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = c + j <= r ? x[j] * beta[j] : 0;
    char* const line = delta.inverse + image + (c < 32 ? r * 128 : kInversePanel + (r - 32) * 128);
    if (bf16 && gradients) {  // they sum over long sequences what keys that are alike leave of it
      store_columns<true, true>(line, r, c, x);
    } else {
      store_columns<false, true>(line, r, c, x);
    }
  }
  if (!gradients) return;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const int at = thread + 128 * i, r = at < 256 ? at / 4 : (at - 256) / 4, c = (at < 256 ? 32 : 0) + at % 4 * 8;
    float x[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = r <= c + j ? s.x[c + j][r] * s.beta[r] : 0;
    store_columns<true, false>(delta.inverse_transposed + image + (c < 32 ? 0 : kInversePanel / 2) + r * 128, r, c, x);
  }
}

}  // namespace

#define LINNET_PREPARE(name, bf16, D, decays)                                                      \
  extern "C" __global__ void __launch_bounds__(128, 6) name(const __grid_constant__ Delta delta) { \
    prepare<bf16, D, decays>(delta);                                                               \
  }
LINNET_PREPARE(prepare_64, true, 64, false)
LINNET_PREPARE(prepare_64_decay, true, 64, true)
LINNET_PREPARE(prepare_128, true, 128, false)
LINNET_PREPARE(prepare_128_decay, true, 128, true)
LINNET_PREPARE(prepare_64_f16, false, 64, false)
LINNET_PREPARE(prepare_64_decay_f16, false, 64, true)
LINNET_PREPARE(prepare_128_f16, false, 128, false)
LINNET_PREPARE(prepare_128_decay_f16, false, 128, true)

}  // namespace linnet::cuda
