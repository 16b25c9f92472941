// The forward of softmax attention on Hopper: bf16 and f16, keys and values of 64 or 128 channels, no packing, no lengths.
//
// A block has 128 queries of one head and walks over tiles of 128 keys.
//   producer     one thread: queries, then keys and values by the copy engine, two stages of each
//   consumers    two warpgroups of 64 queries: S = Q K^T from shared memory, the weights of the tile before stay in registers
//   as
//                the left operand of O += P V, which runs while the exponentials of S are made
//
// Per tile and warpgroup at D = 128: 2048 cycles of the tensor cores, 1024 of exponentials.
#include "core/cuda/driver.h"
#include "mechanisms/softmax/cuda/attend.cuh"
#include "mechanisms/softmax/cuda/hopper.h"
#include "mechanisms/softmax/cuda/tile.cuh"
#include "ptx/layout.h"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace linnet::cuda {
namespace {

constexpr int kStages = 2, kKeys = kHopperKeys, kRows = kHopperRows;

template <int D>
struct Shared {
  alignas(1024) char q[kRows * D * 2];
  char k[kStages][kKeys * D * 2];
  char v[kStages][kKeys * D * 2];
  char clean[2][kKeys * D * 2];  // of each consumer: values without what is not finite
  uint32_t flags[2][4];
  float tops[2][4][32];
  uint64_t q_full, k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
};

using Tiles = KeyTilesOf<kKeys>;

template <int D>
__device__ __forceinline__ void produce(const HopperMaps& maps, const Tiles& tiles, Shared<D>& s, int token, int head,
                                        int key_head, int b) {
  constexpr uint32_t kBytes = kKeys * D * 2;
  ptx::barrier_arrive_expect(&s.q_full, kRows * D * 2);
  ptx::load_box(s.q, &maps.q, &s.q_full, 0, token, 0, head, b);
  int i = 0;
  for (int32_t tile = tiles.begin; tile < tiles.end; tile = tiles.next(tile), ++i) {
    const int stage = i % kStages, before = (i / kStages - 1) & 1;
    if (i >= kStages) ptx::barrier_wait(&s.k_empty[stage], before);
    ptx::barrier_arrive_expect(&s.k_full[stage], kBytes);
    ptx::load_box(s.k[stage], &maps.k, &s.k_full[stage], 0, tile * kKeys, 0, key_head, b);
    if (i >= kStages) ptx::barrier_wait(&s.v_empty[stage], before);
    ptx::barrier_arrive_expect(&s.v_full[stage], kBytes);
    ptx::load_box(s.v[stage], &maps.v, &s.v_full[stage], 0, tile * kKeys, 0, key_head, b);
  }
}

// The tile's weights: s becomes exp2(s factor - top); returns what earlier sums shrink by.
struct RowState {
  float top[2], sum[2];
};
__device__ __forceinline__ void weigh(float (&s)[64], RowState& state, float (&shrink)[2], float factor) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float most = state.top[h];
#pragma unroll
    for (int n = 0; n < 16; ++n) most = fmaxf(most, fmaxf(s[4 * n + 2 * h], s[4 * n + 2 * h + 1]));
    most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 2));
    const float safe = most == -infinity() ? 0 : most * factor;
    shrink[h] = ptx::exp2_fast(state.top[h] * factor - safe);
    state.top[h] = most;
    float total = 0;
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      s[4 * n + 2 * h] = ptx::exp2_fast(fmaf(s[4 * n + 2 * h], factor, -safe));
      s[4 * n + 2 * h + 1] = ptx::exp2_fast(fmaf(s[4 * n + 2 * h + 1], factor, -safe));
      total += s[4 * n + 2 * h] + s[4 * n + 2 * h + 1];
    }
    state.sum[h] = fmaf(state.sum[h], shrink[h], total);
  }
}

// Adds the values that are not finite of the tiles that the mask cuts to the 16 finished rows of a warp from token `first` on,
// where they are seen. Rare, and slow: one key after the other, its weight from q and k once more.
template <int D>
__device__ __noinline__ void add_wild_rows(const Attend& p, const Place& place, int32_t j0, float* rows, int32_t first,
                                           int head, const float* tops, const float* inverses) {
  const int lane = threadIdx.x % 32;
  const Sequence& seq = place.seq;
  for (int32_t j = j0; j < min(j0 + kKeys, seq.n); ++j) {
    const int64_t value = key_at(p, p.v, place, j), key = key_at(p, p.k, place, j);
    bool wild = false;
    for (int c = lane; c < D; c += 32) {
      const float v = ptx::load(p.v.data, p.v.dtype, value + c);
      wild |= !(v - v == 0);
    }
    if (!__any_sync(0xffffffff, wild)) continue;
    for (int r = 0; r < 16; ++r) {
      const RowPlace row = {first + r, head, first + r + seq.shift(), first + r < seq.tq};
      if (!row.there || !seen_keys(p.mask, row.t, seq.n).has(j)) continue;
      float product = 0;
      for (int c = lane; c < D; c += 32) {
        product =
            fmaf(ptx::load(p.q.data, p.q.dtype, row_at(p.q, seq, row) + c), ptx::load(p.k.data, p.k.dtype, key + c), product);
      }
      product = ptx::sum_lanes<32>(product);
      const float weight = exp2f(fmaf(product, p.factor, -tops[r])) * inverses[r];
      for (int c = lane; c < D; c += 32)
        rows[r * D + c] = fmaf(weight, ptx::load(p.v.data, p.v.dtype, value + c), rows[r * D + c]);
      __syncwarp();
    }
  }
}

template <bool bf16, int D>
__device__ __forceinline__ void consume(const Attend& p, const Place& place, const Tiles& tiles, Shared<D>& s,
                                        int32_t first_token, int head, int group) {
  const Sequence& seq = place.seq;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int32_t mine = first_token + group * 64;  // first token of this warpgroup
  RowPlace row[2];
  SeenKeys seen[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int32_t i = mine + warp * 16 + lane / 4 + 8 * h;
    row[h] = {i, head, i + seq.shift(), i < seq.tq};
    seen[h] = seen_keys(p.mask, row[h].t, row[h].there ? seq.n : 0);
  }
  const uint32_t q_tile = ptx::shared_address(s.q) + group * 64 * ptx::kRowBytes;
  float scores[64], read[D / 2];
  uint32_t weights[32];
  RowState state = {{-infinity(), -infinity()}, {0, 0}};
#pragma unroll
  for (int i = 0; i < D / 2; ++i) read[i] = 0;

  const auto multiply = [&](int stage) {
    const uint32_t k_tile = ptx::shared_address(s.k[stage]);
#pragma unroll
    for (int c = 0; c < D / 16; ++c) {
      ptx::wgmma_shared<bf16, false, false>(scores, ptx::descriptor_k_major(q_tile, kRows, c),
                                            ptx::descriptor_k_major(k_tile, kKeys, c), c > 0);
    }
    ptx::wgmma_commit();
  };
  const auto add = [&](const char* values) {
    const uint32_t v_tile = ptx::shared_address(values);
#pragma unroll
    for (int c = 0; c < kKeys / 16; ++c) {
      ptx::wgmma<bf16, true>(read, weights + 4 * c, ptx::descriptor_mn_major(v_tile, kKeys, c), true);
    }
    ptx::wgmma_commit();
  };
  const auto sync = [&](bool mine_too) {  // of this warpgroup
    return group == 0 ? ptx::group_any<2, 128>(mine_too) : ptx::group_any<3, 128>(mine_too);
  };
  const auto is_cut = [&](int32_t tile) {
    const int32_t j0 = tile * kKeys, t0 = mine + seq.shift();
    return j0 + kKeys > seq.n || !all_see(p.mask, t0, t0 + 63, j0, j0 + kKeys - 1);
  };
  // A tile that the mask cuts, with values that are not finite: a weight of 0 would not keep them from rows that do not see
  // them. They are zeros in a copy for the product (true: there is one), and who sees them gets them at the end.
  const auto clean = [&](int stage, int32_t tile) {
    if (!is_cut(tile)) return false;
    constexpr int kPieces = kKeys * D / 8;
    const uint32_t from = ptx::shared_address(s.v[stage]), to = ptx::shared_address(s.clean[group]);
    const int me = threadIdx.x % 128;
    bool wild = false;
    for (int i = me; i < kPieces; i += 128) wild |= is_wild<bf16>(ptx::load_shared_16(from + i * 16));
    if (!sync(wild)) return false;
    if (me < 4) s.flags[group][me] = 0;
    sync(false);
    for (int i = me; i < kPieces; i += 128) {
      const int r = i / 8 % kKeys;
      if (is_wild<bf16>(ptx::load_shared_16(from + i * 16))) atomicOr(&s.flags[group][r / 32], 1u << (r % 32));
    }
    sync(false);
    for (int i = me; i < kPieces; i += 128) {
      const int r = i / 8 % kKeys;
      uint4 x = ptx::load_shared_16(from + i * 16);
      if (s.flags[group][r / 32] >> (r % 32) & 1) x = {0, 0, 0, 0};
      ptx::store_shared_16(to + i * 16, x);
    }
    ptx::fence_async_shared();
    sync(false);
    return true;
  };
  const auto mask = [&](int32_t tile) {
    const int32_t j0 = tile * kKeys;
    if (!is_cut(tile)) return;
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      if (!seen[i / 2 % 2].has(j0 + i / 4 * 8 + 2 * (lane % 4) + i % 2)) scores[i] = -infinity();
    }
  };
  const auto pack = [&] {
#pragma unroll
    for (int i = 0; i < 32; ++i) weights[i] = ptx::pack<bf16>(scores[2 * i], scores[2 * i + 1]);
  };
  float shrink[2];
  bool any_wild = false;
  if (tiles.begin < tiles.end) {
    ptx::barrier_wait(&s.q_full, 0);
    ptx::barrier_wait(&s.k_full[0], 0);
    ptx::wgmma_fence();
    multiply(0);
    ptx::wgmma_wait<0>();
    ptx::hold(scores);
    ptx::barrier_arrive(&s.k_empty[0]);
    mask(tiles.begin);
    weigh(scores, state, shrink, p.factor);
    pack();
    int i = 1;
    int32_t before = tiles.begin;
    for (int32_t tile = tiles.next(tiles.begin); tile < tiles.end; before = tile, tile = tiles.next(tile), ++i) {
      const int stage = i % kStages, other = (i - 1) % kStages;
      ptx::barrier_wait(&s.k_full[stage], i / kStages & 1);
      ptx::wgmma_fence();
      multiply(stage);
      ptx::barrier_wait(&s.v_full[other], (i - 1) / kStages & 1);
      const bool wild = clean(other, before);
      any_wild |= wild;
      ptx::hold(weights);
      ptx::hold(read);
      ptx::wgmma_fence();  // here, and not somewhere in clean(), where the compiler would put one
      add(wild ? s.clean[group] : s.v[other]);
      ptx::wgmma_wait<1>();
      ptx::hold(scores);
      ptx::barrier_arrive(&s.k_empty[stage]);
      mask(tile);
      weigh(scores, state, shrink, p.factor);
      ptx::wgmma_wait<0>();
      ptx::hold(read);
      ptx::hold(weights);
      ptx::barrier_arrive(&s.v_empty[other]);
#pragma unroll
      for (int n = 0; n < D / 2; ++n) read[n] *= shrink[n / 2 % 2];
      pack();
    }
    const int stage = (i - 1) % kStages;
    ptx::barrier_wait(&s.v_full[stage], (i - 1) / kStages & 1);
    const bool wild = clean(stage, before);
    any_wild |= wild;
    ptx::hold(weights);
    ptx::hold(read);
    ptx::wgmma_fence();
    add(wild ? s.clean[group] : s.v[stage]);
    ptx::wgmma_wait<0>();
    ptx::hold(read);
  }

  // The rows are finished through the memory of the keys, which nobody reads any more.
  float inverse[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    state.sum[h] += __shfl_xor_sync(0xffffffff, state.sum[h], 1);
    state.sum[h] += __shfl_xor_sync(0xffffffff, state.sum[h], 2);
    const Normal normal = normalise(p, head, state.top[h] * p.factor * kLn2, state.sum[h]);
    inverse[h] = normal.inverse;
    if (lane % 4 == 0 && row[h].there && p.lse.data != nullptr) {
      static_cast<float*>(p.lse.data)[row_at(p.lse, seq, row[h])] = normal.lse;
    }
  }
  ptx::group_sync<1, 256>();
  float* const rows = reinterpret_cast<float*>(s.k[0]) + (group * 4 + warp) * 16 * D;
#pragma unroll
  for (int n = 0; n < D / 8; ++n) {
    const int c = n * 8 + 2 * (lane % 4);
    *reinterpret_cast<float2*>(rows + lane / 4 * D + c) = {read[4 * n] * inverse[0], read[4 * n + 1] * inverse[0]};
    *reinterpret_cast<float2*>(rows + (lane / 4 + 8) * D + c) = {read[4 * n + 2] * inverse[1], read[4 * n + 3] * inverse[1]};
  }
  __syncwarp();
  if (any_wild) {
    float* const tops = s.tops[group][warp];  // of the warp's rows, then what they are multiplied by
    if (lane % 4 == 0) {
      for (int h = 0; h < 2; ++h) {
        tops[lane / 4 + 8 * h] = state.top[h] == -infinity() ? 0 : state.top[h] * p.factor;
        tops[16 + lane / 4 + 8 * h] = inverse[h];
      }
    }
    __syncwarp();
    for (int32_t tile = tiles.begin; tile < tiles.end; tile = tiles.next(tile)) {
      if (is_cut(tile)) add_wild_rows<D>(p, place, tile * kKeys, rows, mine + warp * 16, head, tops, tops + 16);
    }
  }
  __syncwarp();
#pragma unroll 4
  for (int i = lane; i < 16 * (D / 4); i += 32) {
    const int r = i / (D / 4), c = i % (D / 4) * 4;
    const RowPlace each = {mine + warp * 16 + r, head, 0, true};
    if (each.token < seq.tq) finish_four(p, seq, each, c, *reinterpret_cast<const float4*>(rows + r * D + c));
  }
}

template <bool bf16, int D>
__device__ __forceinline__ void attend_hopper(const Attend& p, const HopperMaps& maps, char* memory) {
  Shared<D>& s = ptx::shared_as<Shared<D>>(memory);
  const int64_t heads = int64_t{p.Hkv} * p.G;
  const int32_t tile = p.mask.right >= 0 ? p.tiles - 1 - static_cast<int32_t>(blockIdx.x % p.tiles)  // the longest first
                                         : static_cast<int32_t>(blockIdx.x % p.tiles);
  const int64_t block = blockIdx.x / p.tiles;
  const int head = static_cast<int>(block % heads);
  Place place;
  place.seq = sequence(p, block / heads);
  place.head = head / p.G;
  const int32_t first = tile * kRows, last = min(first + kRows, place.seq.tq) - 1;
  const Tiles tiles(p.mask, first + place.seq.shift(), last + place.seq.shift(), place.seq.n);
  if (threadIdx.x == 0) {
    ptx::barrier_init(&s.q_full, 1);
    for (int i = 0; i < kStages; ++i) {
      ptx::barrier_init(&s.k_full[i], 1);
      ptx::barrier_init(&s.v_full[i], 1);
      ptx::barrier_init(&s.k_empty[i], 256);
      ptx::barrier_init(&s.v_empty[i], 256);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    ptx::fewer_registers<24>();
    if (threadIdx.x == 0 && tiles.begin < tiles.end) {
      produce<D>(maps, tiles, s, first, head, place.head, static_cast<int>(place.seq.b));
    }
  } else {
    ptx::more_registers<240>();
    consume<bf16, D>(p, place, tiles, s, first, head, static_cast<int>(threadIdx.x) / 128 - 1);
  }
}

}  // namespace

#define LINNET_HOPPER(type, is_bf16, D)                                                                \
  extern "C" __global__ void __launch_bounds__(384, 1)                                                 \
      hopper_##type##_##D(const __grid_constant__ Attend p, const __grid_constant__ HopperMaps maps) { \
    extern __shared__ char memory[];                                                                   \
    attend_hopper<is_bf16, D>(p, maps, memory);                                                        \
  }

LINNET_HOPPER(bf16, true, 64)
LINNET_HOPPER(bf16, true, 128)
LINNET_HOPPER(f16, false, 64)
LINNET_HOPPER(f16, false, 128)

}  // namespace linnet::cuda
