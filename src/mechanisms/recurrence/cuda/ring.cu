// One token with the state in place (decode.cuh), many heads: blocks stay and walk over heads. States come by the copy engine
// as soon as there is room, 4 warps make the token's numbers of the next head ready, the others have nothing but the state.
#include "mechanisms/recurrence/cuda/decode.cuh"
#include "ptx/tma.cuh"

namespace linnet::cuda {
namespace {

template <int kRows, int kGroups, int kStages>
struct Ring {
  alignas(1024) float4 states[kStages][16 * kRows][8 * kGroups];
  Head<16 * kRows, 32 * kGroups> heads[2];
  Reads reads[2][kGroups];
  uint64_t full[kStages], done[kStages];  // states: there, and as they are behind the token
  uint64_t ready[2], used[2];             // heads
};

// K = 16 kRows, V = 32 kGroups, states side by side: 128 kGroups threads for the states, 128 for the heads' numbers, a warp
// that asks for states.
template <int kRows, int kGroups>
__device__ void ring(const Engine& e) {
  extern __shared__ char memory[];
  constexpr DecodeRing kShape = decode_ring(16 * kRows, 32 * kGroups);
  constexpr int kStages = kShape.stages;
  using Memory = Ring<kRows, kGroups, kStages>;
  auto& s = ptx::shared_as<Memory>(memory);
  constexpr uint32_t kBytes = sizeof(s.states[0]);
  static_assert(sizeof(Memory) + 1024 <= kShape.bytes);
  const int heads = static_cast<int>(e.N) * e.H;
  const int count = (heads - static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
  const auto head = [&](int i) { return static_cast<int>(blockIdx.x) + i * static_cast<int>(gridDim.x); };
  const auto state = [&](int n, int h) { return e.final.data + n * e.final.stride_n + h * e.final.stride_h; };
  const auto load = [&](int i) {
    ptx::barrier_arrive_expect(&s.full[i % kStages], kBytes);
    ptx::load_bytes(s.states[i % kStages], state(head(i) / e.H, head(i) % e.H), kBytes, &s.full[i % kStages]);
  };
  constexpr int kOwners = 128 * kGroups;  // the threads that have the states
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
  Token<16 * kRows, 32 * kGroups> next;
  if (group == kGroups && count > 0) next.ask(e, head(0) / e.H, head(0) % e.H, thread, 0);
  if (threadIdx.x == kOwners + 128) {
    for (int i = 0; i < kStages; ++i) {
      ptx::barrier_init(&s.full[i], 1);
      ptx::barrier_init(&s.done[i], kOwners);
    }
    for (int i = 0; i < 2; ++i) {
      ptx::barrier_init(&s.ready[i], 128);
      ptx::barrier_init(&s.used[i], kOwners);
    }
    ptx::barrier_init_fence();
    for (int i = 0; i < kStages && i < count; ++i) load(i);
  }
  __syncthreads();
  if (group > kGroups) {
    for (int i = 0; i < count && thread == 0; ++i) {  // a state goes back before another takes its place
      ptx::barrier_wait(&s.done[i % kStages], i / kStages & 1);
      ptx::store_bytes(state(head(i) / e.H, head(i) % e.H), s.states[i % kStages], kBytes);
      if (i + kStages >= count) continue;
      ptx::wait_stores_read();
      load(i + kStages);
    }
    if (thread == 0) ptx::wait_stores();
    return;
  }
  if (group == kGroups) {
    for (int i = 0; i < count; ++i) {
      const Token<16 * kRows, 32 * kGroups> token = next;
      if (i + 1 < count) next.ask(e, head(i + 1) / e.H, head(i + 1) % e.H, thread, 0);
      if (i >= 2) ptx::barrier_wait(&s.used[i % 2], i / 2 - 1 & 1);
      token.share(e, thread, s.heads[i % 2]);
      ptx::barrier_arrive(&s.ready[i % 2]);
    }
    return;
  }
  const auto sync = [&] {
    if (group == 0) ptx::group_sync<1, 128>();
    if (group == 1) ptx::group_sync<2, 128>();
    if (group == 2) ptx::group_sync<3, 128>();
    if (group == 3) ptx::group_sync<4, 128>();
  };
  for (int i = 0, stage = 0; i < count; ++i) {
    const int n = head(i) / e.H, h = head(i) % e.H;
    ptx::barrier_wait(&s.full[stage], i / kStages & 1);
    float4 S[kRows];
#pragma unroll
    for (int j = 0; j < kRows; ++j) S[j] = s.states[stage][thread / 8 + 16 * j][8 * group + thread % 8];
    ptx::barrier_wait(&s.ready[i % 2], i / 2 & 1);
    update(e, n, h, thread, 32 * group, 32 * group, s.heads[i % 2], s.reads[i % 2][group], S, sync);
    ptx::barrier_arrive(&s.used[i % 2]);
#pragma unroll
    for (int j = 0; j < kRows; ++j) s.states[stage][thread / 8 + 16 * j][8 * group + thread % 8] = S[j];
    ptx::fence_async_shared();
    ptx::barrier_arrive(&s.done[stage]);
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
}

}  // namespace

#define LINNET_RING(K, V)                                                                           \
  extern "C" __global__ void __launch_bounds__(decode_ring(K, V).threads, decode_ring(K, V).blocks) \
      ring_##K##_##V(const __grid_constant__ Engine e) {                                            \
    ring<K / 16, V / 32>(e);                                                                        \
  }
LINNET_RING(64, 64)
LINNET_RING(64, 128)
LINNET_RING(128, 64)
LINNET_RING(128, 128)

}  // namespace linnet::cuda
