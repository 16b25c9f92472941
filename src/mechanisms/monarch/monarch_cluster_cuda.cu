// Monarch attention in one step, 16-bit, blocks of 64 tokens, at most 64 of them, widths up to 64: a head in a cluster of 8
// blocks of threads, one head after the other.
//
// Each block of threads takes 8 blocks of tokens and 8 slots (the programs of monarch_tile.cuh, a warpgroup each). Its block
// programs send a and y into the shared memory of those that have the slots; from there its slot programs read them. So q, k
// and v pass through memory once, q once more through the L2 cache, and a and y through neither: with both in the cache its
// bandwidth binds (9 passes over the tensors; 220 us where memory needs 95).
//
// One warp asks the copy engine for tiles in the order in which they are used, into a ring of 12, across heads: while slots of
// one head are worked on, tiles of the next arrive. `arrived` gets the bytes of a head's a, y and normalisers; `freed` counts
// the warpgroups of the cluster that are done with the slots of a head, which the next head's sends wait for.
#include "monarch_maps.h"
#include "monarch_tile.cuh"
#include "ptx/cluster.cuh"
#include "ptx/tma.cuh"

namespace linnet::cuda {
namespace {

constexpr int kCluster = 8, kWorkers = 4, kStages = 12, kSide = 64, kThreads = 128 * kWorkers + 32;

template <bool bf16>
struct Cluster {
  using Tile = MonarchTile<64, kSide, bf16>;
  static constexpr int kTile = Tile::kTile;
  struct Memory {
    char stage[kStages][kTile];
    char ay[kCluster][2][kTile];  // of this block's slots: a and y [block][channel]
    float lse[kCluster][kSide];   // of this block's slots: normalisers of R
    uint64_t full[kStages], empty[kStages];
    uint64_t arrived, freed;
  };

  const MonarchProblem& g;
  Memory& m;
  int rank, clusters, cluster, units;
  int blocks;  // of this block of threads

  __device__ __forceinline__ int tiles_before(int round) const { return round * (3 * blocks + kCluster); }

  __device__ __forceinline__ void produce(const MonarchMaps& maps) const {
    int n = 0;
    const auto ask = [&](const TensorMap& map, int x1, int x2, int x3, int x4) {
      const int at = n % kStages;
      ptx::barrier_wait(&m.empty[at], n / kStages % 2 ^ 1);
      ptx::barrier_arrive_expect(&m.full[at], kTile);
      ptx::load_box(m.stage[at], &map, &m.full[at], 0, x1, x2, x3, x4);
      ++n;
    };
    for (int unit = cluster; unit < units; unit += clusters) {
      const int b = unit / g.H, h = unit % g.H;
      for (int i = 0; i < blocks; ++i) {
        const int t0 = (rank * kCluster + i) * kSide;
        ask(maps.q, t0, h, b, 0);
        ask(maps.k, t0, h, b, 0);
        ask(maps.v, t0, h, b, 0);
      }
      for (int i = 0; i < kCluster; ++i) ask(maps.slots, rank * kCluster + i, 0, h, b);
    }
  }

  // A stage that this warp has read (and, with `written`, written) for the last time.
  __device__ __forceinline__ void release(int n, int lane, bool written) const {
    if (written) ptx::fence_async_shared();
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(&m.empty[n % kStages]);
  }
  __device__ __forceinline__ uint32_t stage(int n) const { return ptx::shared_address(m.stage[n % kStages]); }
  __device__ __forceinline__ void await(int n) const { ptx::barrier_wait(&m.full[n % kStages], n / kStages % 2); }
  __device__ __forceinline__ static void meet(int worker) { asm volatile("bar.sync %0, 128;" ::"r"(worker + 1) : "memory"); }

  __device__ __forceinline__ void block_program(const Tile& tile, int worker, int round, int i) const {
    const int n = tiles_before(round) + 3 * i, block = rank * kCluster + i;
    float s[1][32], by[2], lse[2];
    uint32_t r[4][4];
    await(n);
    await(n + 1);
    tile.logits(s);
    tile.template softmax<false>(s, r, by, lse);
    meet(worker);  // behind the last reading of q
    if (round > 0) ptx::barrier_wait_cluster(&m.freed, (round - 1) % 2);
    const uint32_t barrier = ptx::shared_address(&m.arrived);
    if (tile.lane % 4 == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int slot = tile.first + tile.lane / 4 + 8 * half;
        ptx::send_4(ptx::address_in(ptx::shared_address(&m.lse[slot % kCluster][block]), slot / kCluster), lse[half],
                    ptx::address_in(barrier, slot / kCluster));
      }
    }
    const auto send = [&](int part) {
      const uint32_t to = ptx::shared_address(m.ay[0][part]) + Tile::place(block, tile.lane % 8);
      tile.hand_out(tile.q, [&](int row, const uint4& x) {
        const int slot = tile.first + tile.lane / 8 + row * Tile::kRowsAtOnce;
        ptx::send_16(ptx::address_in(to + slot % kCluster * 2 * kTile, slot / kCluster), x,
                     ptx::address_in(barrier, slot / kCluster));
      });
    };
    tile.average_to_q(r, by, tile.k);
    release(n + 1, tile.lane, false);
    send(0);
    await(n + 2);
    tile.average_to_q(r, by, tile.v);
    release(n + 2, tile.lane, false);
    send(1);
    release(n, tile.lane, true);
  }

  __device__ __forceinline__ void slot_program(const Tile& tile, int worker, int round, int i) const {
    const int n = tiles_before(round) + 3 * blocks + i, slot = rank * kCluster + i;
    float s[1][32], by[2], lse[2];
    uint32_t p[4][4];
    await(n);
    ptx::barrier_wait_cluster(&m.arrived, round % 2);
    asm volatile("fence.proxy.async;" ::: "memory");  // what was sent, for the products
    tile.logits(s);
    tile.subtract_diagonal(s);
    meet(worker);
    tile.template softmax<true>(s, p, by, lse);
    tile.give_lse(slot, lse);
    tile.average_to_q(p, by, tile.v);
    tile.give_queries(g.out, slot, tile.q, g.V);
    release(n, tile.lane, true);
  }

  __device__ __forceinline__ void consume(int worker) const {
    const int thread = threadIdx.x % 128, lane = thread % 32;
    int round = 0;
    for (int unit = cluster; unit < units; unit += clusters, ++round) {
      if (worker == 0 && thread == 0) {
        ptx::barrier_arrive_expect(&m.arrived, kCluster * g.rows * (2 * 128 + 4));
      }
      const int b = unit / g.H, h = unit % g.H;
      for (int i = worker; i < blocks; i += kWorkers) {
        const int n = tiles_before(round) + 3 * i;
        const Tile tile = {g, stage(n), stage(n + 1), stage(n + 2), nullptr, b, h, thread, lane, thread / 32 * 16};
        block_program(tile, worker, round, i);
      }
      for (int i = worker; i < kCluster; i += kWorkers) {
        const Tile tile = {g,
                           stage(tiles_before(round) + 3 * blocks + i),
                           ptx::shared_address(m.ay[i][0]),
                           ptx::shared_address(m.ay[i][1]),
                           m.lse[i],
                           b,
                           h,
                           thread,
                           lane,
                           thread / 32 * 16};
        slot_program(tile, worker, round, i);
      }
      meet(worker);  // this warpgroup is done with a and y
      if (thread < kCluster) ptx::barrier_arrive_in(ptx::address_in(ptx::shared_address(&m.freed), thread));
    }
  }

  __device__ static void run(const MonarchProblem& g, const MonarchMaps& maps, int units) {
    extern __shared__ __align__(1024) char memory[];
    Memory& m = *reinterpret_cast<Memory*>(memory);
    const int thread = threadIdx.x, rank = static_cast<int>(ptx::cluster_rank());
    const int left = g.rows - rank * kCluster;
    const Cluster x = {g,
                       m,
                       rank,
                       static_cast<int>(gridDim.x / kCluster),
                       static_cast<int>(blockIdx.x / kCluster),
                       units,
                       left < 0          ? 0
                       : left < kCluster ? left
                                         : kCluster};
    if (thread == 0) {
      for (int i = 0; i < kStages; ++i) ptx::barrier_init(&m.full[i], 1), ptx::barrier_init(&m.empty[i], 4);
      ptx::barrier_init(&m.arrived, 1);
      ptx::barrier_init(&m.freed, kCluster * kWorkers);
      ptx::barrier_init_fence();
    }
    if (g.rows < kSide) {  // blocks that do not exist: no weight, and nothing that could spoil a product
      for (int i = thread; i < kCluster * kSide; i += kThreads) m.lse[0][i] = -Tile::kInfinity;
      for (int i = thread; i < kCluster * 2 * kTile / 16; i += kThreads) {
        reinterpret_cast<uint4*>(m.ay)[i] = make_uint4(0, 0, 0, 0);
      }
    }
    ptx::cluster_sync();
    if (thread >= 128 * kWorkers) {
      if (thread == 128 * kWorkers) x.produce(maps);
      __syncwarp();
    } else {
      x.consume(thread / 128);
    }
    ptx::cluster_sync();  // nobody leaves while others may send here
  }
};

}  // namespace

#define LINNET_MONARCH_CLUSTER(name, bf16)                                                                        \
  extern "C" __global__ void __cluster_dims__(kCluster) __launch_bounds__(kThreads, 1)                            \
      name(const __grid_constant__ MonarchProblem g, const __grid_constant__ MonarchMaps maps, const int units) { \
    Cluster<bf16>::run(g, maps, units);                                                                           \
  }
LINNET_MONARCH_CLUSTER(cluster_f16, false)
LINNET_MONARCH_CLUSTER(cluster_bf16, true)

}  // namespace linnet::cuda
