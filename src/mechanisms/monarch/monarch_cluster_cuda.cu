// Monarch attention in one step, 16-bit, blocks of 64 tokens, at most 64 of them, widths up to 64: a head in a cluster of 8
// blocks of threads, one head after the other.
//
// Each block of threads takes 8 blocks of tokens and 8 slots (the programs of monarch_tile.cuh, a warpgroup each). Its block
// programs send a and y into the shared memory of those that have the slots; from there its slot programs read them. So q, k
// and v pass through memory once, q once more through the L2 cache, and a and y through neither: with both in the cache its
// bandwidth binds (9 passes over the tensors; 220 us where memory needs 95).
//
// Nothing is staged: a thread sends what it holds of a row, 4 pairs of channels, as one piece of 16 bytes. The pairs of a row
// then lie transposed, word i of piece t being channels 8 i + 2 t of each half, and that is what both sides of the slot's
// products want: as left operand a thread takes piece t of q as it is, for in step s its words are channels 8 t + 4 s on, and
// of the output it holds channels 8 t to 8 t + 7, a piece as memory wants it. Block p stands in row p ^ slot % 8, so that the 8
// rows that a warp sends at once go to different banks.
//
// One thread asks the copy engine for the tiles of blocks in the order in which they are used, across heads, into a ring of 12:
// while slots of one head are worked on, tiles of the next arrive. Queries of slots come straight into registers. `arrived`
// gets the bytes of a head's a, y and normalisers; `freed` counts the warps of the cluster that are done with the slots of a
// head, which the next head's sends wait for.
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
    char ay[kCluster][2][kTile];  // of this block's slots: a and y [row of a block][channels, pairs transposed]
    float lse[kCluster][kSide];   // of this block's slots: normalisers of R
    uint64_t full[kStages], empty[kStages];
    uint64_t arrived, freed;
  };
  const MonarchProblem& g;
  Memory& m;
  int rank, clusters, cluster, units;
  int blocks;  // of this block of threads

  __device__ __forceinline__ void produce(const MonarchMaps& maps) const {
    uint32_t n = 0;
    const auto ask = [&](const TensorMap& map, int x1, int x2, int x3, int x4) {
      const uint32_t at = n % kStages;
      ptx::barrier_wait(&m.empty[at], n / kStages % 2 ^ 1);
      ptx::barrier_arrive_expect(&m.full[at], kTile);
      ptx::load_box(m.stage[at], &map, &m.full[at], 0, x1, x2, x3, x4);
      ++n;
    };
#pragma unroll 1
    for (int unit = cluster; unit < units; unit += clusters) {
      const int b = unit / g.H, h = unit % g.H;
#pragma unroll 1
      for (int i = 0; i < blocks; ++i) {
        const int t0 = (rank * kCluster + i) * kSide;
        ask(maps.q, t0, h, b, 0);
        ask(maps.k, t0, h, b, 0);
        ask(maps.v, t0, h, b, 0);
      }
    }
  }

  // A stage that this warp has read for the last time.
  __device__ __forceinline__ void release(uint32_t n, int lane) const {
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(&m.empty[n % kStages]);
  }
  __device__ __forceinline__ uint32_t stage(uint32_t n) const { return ptx::shared_address(m.stage[n % kStages]); }
  __device__ __forceinline__ void await(uint32_t n) const { ptx::barrier_wait(&m.full[n % kStages], n / kStages % 2); }
  __device__ __forceinline__ static void meet(int worker) { asm volatile("bar.sync %0, 128;" ::"r"(worker + 1) : "memory"); }

  // Products with one descriptor that is stepped: by 32 bytes along the channels, by 16 rows.
  __device__ __forceinline__ static void begin(float (&s)[32]) {
    ptx::hold(s);
    ptx::wgmma_fence();
  }
  __device__ __forceinline__ static void end(float (&s)[32]) {
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::hold(s);
  }
  __device__ __forceinline__ static void average(float (&o)[32], const uint32_t (&p)[4][4], uint32_t tile) {
    const uint64_t rows = ptx::descriptor_mn_major(tile, kSide, 0);
    begin(o);
#pragma unroll
    for (int i = 0; i < 4; ++i) ptx::wgmma<bf16, true>(o, p[i], rows + i * (16 * ptx::kRowBytes / 16), i > 0);
    end(o);
  }
  __device__ __forceinline__ static void round_rows(uint32_t (&x)[2][8], const float (&o)[32], const float (&by)[2]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float* const y = o + 4 * i;
      x[0][i] = ptx::pack<bf16>(y[0] * by[0], y[1] * by[0]);
      x[1][i] = ptx::pack<bf16>(y[2] * by[1], y[3] * by[1]);
    }
  }

  __device__ __forceinline__ static int row_of(int block, int slot) { return block ^ slot % kCluster; }

  // Tiles n, n + 1, n + 2 of the ring are q, k and v.
  __device__ __forceinline__ void block_program(const Tile& tile, uint32_t n, int round, int block) const {
    const int lane = tile.lane;
    float s[1][32], by[2], lse[2];
    uint32_t r[4][4];
    await(n);
    await(n + 1);
    const uint64_t q = ptx::descriptor_k_major(tile.q, kSide, 0), k = ptx::descriptor_k_major(tile.k, kSide, 0);
    begin(s[0]);
#pragma unroll
    for (int i = 0; i < 4; ++i) ptx::wgmma_shared<bf16, false, false>(s[0], q + 2 * i, k + 2 * i, i > 0);
    end(s[0]);
    release(n, lane);
    tile.template softmax<false>(s, r, by, lse);
    uint32_t ay[2][2][8];
    await(n + 2);
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      float o[32];
      average(o, r, part == 0 ? tile.k : tile.v);
      release(n + 1 + part, lane);
      round_rows(ay[part], o, by);
    }
    if (round > 0) ptx::barrier_wait(&m.freed, (round - 1) % 2);
    const int row = row_of(block, lane / 4);
    const uint32_t to = ptx::shared_address(m.ay[lane / 4][0]) + Tile::place(row, lane % 4);
    const uint32_t to_lse = ptx::shared_address(&m.lse[lane / 4][row]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int there = tile.first / kCluster + half;  // who has the slots of these 8 rows
      const uint32_t barrier = ptx::address_in(ptx::shared_address(&m.arrived), there), at = ptx::address_in(to, there);
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const uint32_t* const x = ay[part][half];
        ptx::send_16(at + part * kTile, make_uint4(x[0], x[1], x[2], x[3]), barrier);
        ptx::send_16((at ^ 64) + part * kTile, make_uint4(x[4], x[5], x[6], x[7]), barrier);  // 4 pieces further
      }
      if (lane % 4 == half) ptx::send_4(ptx::address_in(to_lse, there), lse[half], barrier);
    }
  }

  // This thread's queries of a slot as left operand: of query l and the 8th behind it the pieces lane % 4 and + 4. `from` is
  // piece lane % 4 of l's first slot.
  __device__ __forceinline__ void load_queries(uint32_t (&x)[4][4], const uint16_t* from, int slot, int l, int lane) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int half = i % 2, further = i / 2 * 32;
      const bool there = l + 8 * half < g.rows && lane % 4 * 8 + further < g.K;
      const uint16_t* const at = from + (slot + 8 * half * kSide) * g.q.stride_t + further;
      const uint4 q = there ? __ldg(reinterpret_cast<const uint4*>(at)) : make_uint4(0, 0, 0, 0);
      uint32_t(&first)[4] = x[i / 2 * 2], (&second)[4] = x[i / 2 * 2 + 1];
      first[half] = q.x, first[half + 2] = q.y, second[half] = q.z, second[half + 2] = q.w;
    }
  }
  // From bias = lse_R to bias = -c = lse_R - the diagonal of S (monarch_tile.cuh): query l meets its own block in column
  // row_of(l, slot).
  __device__ __forceinline__ void subtract_diagonal(const Tile& tile, const float (&s)[32], int slot) const {
    const int column = row_of(tile.lane / 4, slot);
    if (tile.lane % 4 != column / 2) return;
#pragma unroll
    for (int warp = 0; warp < 4; ++warp) {
      if (tile.first != 16 * warp) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* const x = s + (warp * 2 + half) * 4 + 2 * half;
        tile.bias[tile.first + column + 8 * half] -= (column % 2 == 0 ? x[0] : x[1]) * g.factor;
      }
    }
  }
  // The slots i of this block of threads that are the warpgroup's. The queries of a slot are on their way before the blocks
  // have arrived, and those of the next before this one's average: earlier they cost registers (3 % of the time).
  __device__ __forceinline__ void slot_programs(int worker, int unit, int round, int thread) const {
    const int lane = thread % 32, first = thread / 32 * 16, l = first + lane / 4, b = unit / g.H, h = unit % g.H;
    const uint16_t* const from = static_cast<const uint16_t*>(g.q.data) + offset_of(g.q, b, l * kSide, h) + lane % 4 * 8;
    uint32_t q[4][4];
    load_queries(q, from, rank * kCluster + worker, l, lane);
    ptx::barrier_wait(&m.arrived, round % 2);
    ptx::fence_async_shared();  // what was sent, for the products
#pragma unroll 1
    for (int i = worker; i < kCluster; i += kWorkers) {
      const int slot = rank * kCluster + i;
      const uint32_t a_at = ptx::shared_address(m.ay[i][0]), y_at = ptx::shared_address(m.ay[i][1]);
      const Tile tile = {g, 0, a_at, y_at, m.lse[i], b, h, thread, lane, first};
      const uint64_t a = ptx::descriptor_k_major(a_at, kSide, 0);
      float s[1][32], o[32], by[2], lse[2];
      uint32_t p[4][4], x[2][8];
      begin(s[0]);
#pragma unroll
      for (int k = 0; k < 4; ++k) ptx::wgmma<bf16, false>(s[0], q[k], a + 2 * k, k > 0);
      end(s[0]);
      subtract_diagonal(tile, s[0], slot);
      meet(worker);
      tile.template softmax<true>(s, p, by, lse);
      tile.give_lse(slot, lse);
      if (i + kWorkers < kCluster) load_queries(q, from, slot + kWorkers, l, lane);
      average(o, p, y_at);
      round_rows(x, o, by);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int half = k / 2, channel = (lane % 4 + k % 2 * 4) * 8;
        if (l + 8 * half >= g.rows || channel >= g.V) continue;
        const uint32_t* const y = x[half] + k % 2 * 4;
        store_row(g.out, g.out_aligned, offset_of(g.out, b, (l + 8 * half) * kSide + slot, h) + channel,
                  make_uint4(y[0], y[1], y[2], y[3]));
      }
    }
    __syncwarp();
    if (lane < kCluster) ptx::barrier_arrive_in(ptx::address_in(ptx::shared_address(&m.freed), lane));
  }

  __device__ __forceinline__ void consume(int worker) const {
    const int thread = threadIdx.x % 128, lane = thread % 32;
#pragma unroll 1
    for (int round = 0, unit = cluster; unit < units; ++round, unit += clusters) {
      if (worker == 0 && thread == 0) {
        ptx::barrier_arrive_expect(&m.arrived, kCluster * g.rows * (2 * 128 + 4));
      }
#pragma unroll 1
      for (int i = worker; i < blocks; i += kWorkers) {
        const uint32_t n = 3 * (round * blocks + i);
        block_program({g, stage(n), stage(n + 1), stage(n + 2), nullptr, 0, 0, thread, lane, thread / 32 * 16}, n, round,
                      rank * kCluster + i);
      }
      slot_programs(worker, unit, round, thread);
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
      ptx::barrier_init(&m.freed, kCluster * kWorkers * 4);
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
