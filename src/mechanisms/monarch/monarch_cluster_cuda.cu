// Monarch attention in one step, 16-bit, blocks of 64 tokens, at most 64 of them, widths up to 64: a head in a cluster of 16
// blocks of threads, one head streaming behind the other.
//
// Each block of threads has 4 blocks of tokens and 4 slots (the programs of monarch_tile.cuh), one of each for a warpgroup.
// Block programs send a and y into the shared memory of those that have the slots; from there slot programs read them. So q, k
// and v pass through memory once, q once more through the L2 cache, and a and y through neither: with both in the cache its
// bandwidth binds (9 passes over the tensors; 220 us where memory needs 95). a and y of two heads fit, so that a warpgroup runs
// its block of one head and its slot of the head before as one sequence, in which most products run beside other work:
//
//   A = R k and Y = R v begin              round and send a while Y runs, then round y
//   S = q a^T of the slot
//   softmax of the slot                    send y between exponentials
//   O = L y and the next block's S begin   round and store the output while S runs
//   softmax of the next block
//
// What leaves a multiprocessor binds: 16 to 18 bytes a clock, whatever sends or stores them and wherever they go (to itself,
// too), 6,100 of the 9,700 clocks that a head takes for a, y and the output; shuffles and loads from shared memory queue behind
// it. Hence y leaves between exponentials, which need neither (153 us, 173 if it is sent as soon as it is rounded), and queries
// of slots come by the copy engine into the place of the block's queries: kept in registers they cost spills, and a load of a
// spilled register waits behind the sends, too (a tenth of all waiting).
//
// Nothing is staged: a thread sends what it holds of a row, 4 pairs of channels, as one piece of 16 bytes. The pairs of a row
// then lie transposed, word i of piece t being channels 8 i + 2 t of each half, and that is what both sides of the slot's
// products want: as left operand a thread takes piece t of q as it is, for in step s its words are channels 8 t + 4 s on, and
// of the output it holds channels 8 t to 8 t + 7, a piece as memory wants it. Block p stands in row p ^ slot % 8, so that the 8
// rows that a warp sends at once go to different banks.
#include "monarch_maps.h"
#include "monarch_tile.cuh"
#include "ptx/cluster.cuh"
#include "ptx/tma.cuh"

namespace linnet::cuda {
namespace {

constexpr int kSide = 64, kCluster = 16, kShare = kSide / kCluster;  // kShare: blocks, and slots, of a block of threads
constexpr int kThreads = 128 * kShare;

// The same number, but nothing that was computed from it before: registers are short, and it is cheap to compute again.
__device__ __forceinline__ int anew(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
__device__ __forceinline__ int row_of(int block, int slot) { return block ^ slot % 8; }

template <bool bf16>
struct Cluster {
  using Tile = MonarchTile<64, kSide, bf16>;
  static constexpr int kTile = Tile::kTile, kBuffer = kShare * 2 * kTile;
  static constexpr uint32_t kBytesOfHead = kShare * kSide * (2 * 128 + 4);
  struct Memory {
    char tile[kShare][3][kTile];   // q of a block, then of a slot; k; v
    char ay[2][kShare][2][kTile];  // of two heads and this block's slots: a and y [row of a block][channels, pairs transposed]
    float lse[2][kShare][kSide];   // of two heads and this block's slots: normalisers of R
    // Of a warpgroup: its tiles and its slot's queries are there; its warps have read tiles, and queries of the block.
    uint64_t tiles[kShare], queries[kShare], tiles_read[kShare], queries_read[kShare];
    // Of two heads: all of a, y and lse has come; all warps of the cluster are done with the slots.
    uint64_t arrived[2], freed[2];
  };
  struct Head {
    int b, h, slot;  // slot: of this warpgroup, and its block
  };

  const MonarchProblem& g;
  const MonarchMaps& maps;
  Memory& m;
  const int i, lane, warp, rounds;  // i: the warpgroup
  uint32_t to;                      // where this thread's rows go, in the blocks of threads that have their slots
  uint32_t queries_at;              // this thread's piece of the slot's queries
  uint32_t r[4][4];                 // R of the block, its factors and normalisers
  float by[2], lse[2];

  // The round-th head of this cluster. Registers of the machine are asked anew, too.
  __device__ __forceinline__ Head head_of(int round) const {
    uint32_t block;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    const int unit = static_cast<int>(block / kCluster + round * (gridDim.x / kCluster));
    const int b = unit / g.H;
    return {b, unit - b * g.H, static_cast<int>(block % kCluster) * kShare + i};
  }

  // ---- tiles -------------------------------------------------------------------------------------------------------------
  __device__ __forceinline__ void ask_tiles(int round) const {
    const Head x = head_of(round);
    ptx::barrier_arrive_expect(&m.tiles[i], 3 * kTile);
    ptx::load_box(m.tile[i][0], &maps.q, &m.tiles[i], 0, x.slot * kSide, x.h, x.b, 0);
    ptx::load_box(m.tile[i][1], &maps.k, &m.tiles[i], 0, x.slot * kSide, x.h, x.b, 0);
    ptx::load_box(m.tile[i][2], &maps.v, &m.tiles[i], 0, x.slot * kSide, x.h, x.b, 0);
  }
  __device__ __forceinline__ void ask_queries(int round) const {
    const Head x = head_of(round);
    ptx::barrier_arrive_expect(&m.queries[i], kTile);
    ptx::load_box(m.tile[i][0], &maps.slots, &m.queries[i], 0, x.slot, 0, x.h, x.b);
  }
  // This warp has read something for the last time in this round; when all four have, warp 3 asks for what comes in its place.
  __device__ __forceinline__ void done(uint64_t* read) const {
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(read);
  }
  template <class Ask>
  __device__ __forceinline__ void when_done(uint64_t* read, int round, const Ask& ask) const {
    if (warp != 3) return;
    ptx::barrier_wait(read, round % 2);
    if (ptx::elect()) ask();
    __syncwarp();
  }

  // ---- products ----------------------------------------------------------------------------------------------------------
  // They are begun one by one; until<n> waits until all but the last n are done.
  template <int n>
  __device__ __forceinline__ static void until(float (&o)[32]) {
    ptx::wgmma_wait<n>();
    ptx::hold(o);
  }
  __device__ __forceinline__ static void keep(uint32_t (&x)[4][4]) {  // up to here: a product reads them
#pragma unroll
    for (int k = 0; k < 4; ++k) ptx::hold(x[k]);
  }
  __device__ __forceinline__ static void begin(float (&o)[32]) {
    ptx::hold(o);
    ptx::wgmma_fence();
  }
  __device__ __forceinline__ static void begin_average(float (&o)[32], const uint32_t (&p)[4][4], uint32_t tile) {
    const uint64_t rows = ptx::descriptor_mn_major(tile, kSide, 0);
    begin(o);
#pragma unroll
    for (int k = 0; k < 4; ++k) ptx::wgmma<bf16, true>(o, p[k], rows + k * (16 * ptx::kRowBytes / 16), k > 0);
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void begin_block(float (&s)[32]) const {
    const uint32_t tiles = ptx::shared_address(m.tile[i]);
    const uint64_t q = ptx::descriptor_k_major(tiles, kSide, 0), k = ptx::descriptor_k_major(tiles + kTile, kSide, 0);
    begin(s);
#pragma unroll
    for (int c = 0; c < 4; ++c) ptx::wgmma_shared<bf16, false, false>(s, q + 2 * c, k + 2 * c, c > 0);
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ uint32_t slot_at(uint32_t buffer) const { return ptx::shared_address(m.ay[buffer][i]); }
  __device__ __forceinline__ void begin_slot(float (&s)[32], uint32_t (&q)[4][4], uint32_t buffer) const {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int half = k % 2;
      const uint4 x = ptx::load_shared_16((queries_at ^ (k / 2 * 64)) + half * (8 * ptx::kRowBytes));
      uint32_t(&first)[4] = q[k / 2 * 2], (&second)[4] = q[k / 2 * 2 + 1];
      first[half] = x.x, first[half + 2] = x.y, second[half] = x.z, second[half + 2] = x.w;
    }
    const uint64_t a = ptx::descriptor_k_major(slot_at(buffer), kSide, 0);
    begin(s);
#pragma unroll
    for (int c = 0; c < 4; ++c) ptx::wgmma<bf16, false>(s, q[c], a + 2 * c, c > 0);
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ static void round_rows(uint32_t (&x)[2][8], const float (&o)[32], const float (&by)[2]) {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const float* const y = o + 4 * k;
      x[0][k] = ptx::pack<bf16>(y[0] * by[0], y[1] * by[0]);
      x[1][k] = ptx::pack<bf16>(y[2] * by[1], y[3] * by[1]);
    }
  }

  // ---- between the programs ----------------------------------------------------------------------------------------------
  // Who has the slot of this thread's row, or of the 8th behind it.
  __device__ __forceinline__ uint32_t owner_of(int half) const {
    return static_cast<uint32_t>(anew(warp) * 16 + half * 8 + anew(lane) / 4) / kShare;
  }
  // A quarter of this thread's two rows of a (part 0) or y.
  __device__ __forceinline__ void send(const uint32_t (&x)[2][8], int part, int quarter, uint32_t buffer) const {
    const int half = quarter / 2;
    const uint32_t* const piece = x[half] + quarter % 2 * 4;
    const uint32_t at = (to + buffer * kBuffer + part * kTile) ^ (quarter % 2 * 64), rank = owner_of(half);  // 4 pieces on
    ptx::send_16(ptx::address_in(at, rank), make_uint4(piece[0], piece[1], piece[2], piece[3]),
                 ptx::address_in(ptx::shared_address(&m.arrived[buffer]), rank));
  }
  // Blocks that do not exist (their tiles are zeros) have no weight.
  __device__ __forceinline__ void send_lse(uint32_t buffer, int round) const {
    if (lane % 4 > 1) return;
    const int from = anew(lane), block = head_of(round).slot;
    const uint32_t rank = owner_of(from % 4);
    const uint32_t at = ptx::shared_address(&m.lse[buffer][from / 4 % kShare][row_of(block, from / 4)]);
    const float x = from % 4 == 0 ? lse[0] : lse[1];
    ptx::send_4(ptx::address_in(at, rank), block < g.rows ? x : -Tile::kInfinity,
                ptx::address_in(ptx::shared_address(&m.arrived[buffer]), rank));
  }
  // From bias = lse_R to bias = -c = lse_R - the diagonal of S (monarch_tile.cuh): query l meets its own block in column
  // row_of(l, slot). Values are selected, not places: the scores would else not stay in registers.
  __device__ __forceinline__ void subtract_diagonal(float* bias, const float (&s)[32], int slot) const {
    const int from = anew(lane), rows = anew(warp), column = row_of(from / 4, slot);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float own = 0;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float even = s[(k * 2 + half) * 4 + 2 * half], odd = s[(k * 2 + half) * 4 + 2 * half + 1];
        if (rows == k) own = column % 2 == 0 ? even : odd;
      }
      if (from % 4 == column / 2) bias[16 * rows + column + 8 * half] -= own * g.factor;
    }
  }
  template <class Between>
  __device__ __forceinline__ void weigh_slot(float (&s)[1][32], uint32_t (&p)[4][4], float (&factors)[2], uint32_t buffer,
                                             int round, const Between& between) const {
    float* const bias = m.lse[buffer][i];
    const int first = anew(warp) * 16;
    const Tile tile = {g, 0, 0, 0, bias, 0, 0, first * 2 + lane, anew(lane), first};
    if (round >= 0) subtract_diagonal(bias, s[0], head_of(round).slot);
    asm volatile("bar.sync %0, 128;" ::"r"(i + 1) : "memory");
    float normalisers[2];
    tile.template softmax<true>(s, p, factors, normalisers, between);
    if (g.lse.data == nullptr || round < 0) return;
    const Head x = head_of(round);
    const Tile of_head = {g, 0, 0, 0, bias, x.b, x.h, first * 2 + lane, lane, first};
    of_head.give_lse(x.slot, normalisers);
  }
  __device__ __forceinline__ void give(const float (&o)[32], const float (&factors)[2], int round) const {
    uint32_t x[2][8];
    round_rows(x, o, factors);
    const Head head = head_of(round);
    const int from = anew(lane), l = warp * 16 + from / 4;
    const int64_t at = offset_of(g.out, head.b, l * kSide + head.slot, head.h) + from % 4 * 8,
                  down = 8 * kSide * g.out.stride_t;
    if (g.rows == kSide && g.V == kSide && g.out_aligned) {
      uint16_t* const out = static_cast<uint16_t*>(g.out.data) + at;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint32_t* const y = x[k / 2] + k % 2 * 4;
        __stcs(reinterpret_cast<uint4*>(out + k / 2 * down + k % 2 * 32), make_uint4(y[0], y[1], y[2], y[3]));
      }
      return;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int half = k / 2, further = k % 2 * 32;
      const uint32_t* const y = x[half] + k % 2 * 4;
      if (l + 8 * half >= g.rows || from % 4 * 8 + further >= g.V) continue;
      store_row(g.out, g.out_aligned, at + half * down + further, make_uint4(y[0], y[1], y[2], y[3]));
    }
  }
  // Says to all that this warp is done with the slot.
  __device__ __forceinline__ void free_slot(uint32_t buffer) const {
    __syncwarp();
    const int rank = anew(lane);
    if (rank < kCluster) ptx::barrier_arrive_in(ptx::address_in(ptx::shared_address(&m.freed[buffer]), rank));
  }

  __device__ __forceinline__ void weigh_block(float (&s)[1][32]) {
    const Tile tile = {g, 0, 0, 0, nullptr, 0, 0, 0, lane, 0};
    tile.template softmax<false>(s, r, by, lse);
  }

  // ---- one head behind the other -----------------------------------------------------------------------------------------
  __device__ __forceinline__ void work() {
    if (warp == 3 && ptx::elect()) ask_tiles(0);
    __syncwarp();
    ptx::barrier_wait(&m.tiles[i], 0);
    {
      float s[1][32];
      begin_block(s[0]);
      until<0>(s[0]);
      weigh_block(s);
    }
    const uint32_t tiles = ptx::shared_address(m.tile[i]);
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {  // the first has no slot: what it computes of one is not used
      const bool more = round + 1 < rounds;
      const uint32_t buffer = round % 2, before = 1 - buffer;  // of the block, of the slot
      float s[1][32], factors[2];
      uint32_t p[4][4], q[4][4], y[2][8];
      {
        float sums[2][32];
        begin_average(sums[0], r, tiles + kTile);
        begin_average(sums[1], r, tiles + 2 * kTile);
        if (round > 0) {
          ptx::barrier_wait(&m.arrived[before], (round - 1) / 2 % 2);
          ptx::fence_async_shared();  // what was sent, for the products
          if (i == 0 && warp == 0 && ptx::elect()) ptx::barrier_arrive_expect(&m.arrived[before], kBytesOfHead);  // the next
          __syncwarp();
        }
        if (round > 1) ptx::barrier_wait(&m.freed[buffer], (round / 2 - 1) % 2);
        until<1>(sums[0]);
        uint32_t a[2][8];
        round_rows(a, sums[0], by);
#pragma unroll
        for (int quarter = 0; quarter < 3; ++quarter) send(a, 0, quarter, buffer);
        send_lse(buffer, round);
        until<0>(sums[1]);
        keep(r);
        send(a, 0, 3, buffer);
        round_rows(y, sums[1], by);
      }
      if (round > 0) ptx::barrier_wait(&m.queries[i], (round - 1) % 2);
      begin_slot(s[0], q, before);
      done(&m.tiles_read[i]);
      until<0>(s[0]);
      keep(q);
      if (more) when_done(&m.tiles_read[i], round, [&] { ask_tiles(round + 1); });
      weigh_slot(s, p, factors, before, round - 1, [&](int quarter) { send(y, 1, quarter, buffer); });
      float o[32];
      begin_average(o, p, slot_at(before) + kTile);
      if (more) ptx::barrier_wait(&m.tiles[i], (round + 1) % 2);
      begin_block(s[0]);
      until<1>(o);
      keep(p);
      if (round > 0) {
        free_slot(before);
        give(o, factors, round - 1);
      }
      until<0>(s[0]);
      done(&m.queries_read[i]);
      when_done(&m.queries_read[i], round, [&] { ask_queries(round); });
      weigh_block(s);
    }
    const uint32_t buffer = 1 - rounds % 2;  // the last slot
    float s[1][32], o[32], factors[2];
    uint32_t p[4][4], q[4][4];
    ptx::barrier_wait(&m.arrived[buffer], (rounds - 1) / 2 % 2);
    ptx::fence_async_shared();
    ptx::barrier_wait(&m.queries[i], (rounds - 1) % 2);
    begin_slot(s[0], q, buffer);
    until<0>(s[0]);
    keep(q);
    weigh_slot(s, p, factors, buffer, rounds - 1, [](int) {});
    begin_average(o, p, slot_at(buffer) + kTile);
    until<0>(o);
    keep(p);
    give(o, factors, rounds - 1);
  }

  __device__ static void run(const MonarchProblem& g, const MonarchMaps& maps, int units) {
    extern __shared__ __align__(1024) char memory[];
    Memory& m = *reinterpret_cast<Memory*>(memory);
    if (threadIdx.x == 0) {
      for (int k = 0; k < kShare; ++k) {
        ptx::barrier_init(&m.tiles[k], 1), ptx::barrier_init(&m.queries[k], 1);
        ptx::barrier_init(&m.tiles_read[k], 4), ptx::barrier_init(&m.queries_read[k], 4);
      }
      for (int k = 0; k < 2; ++k) {
        ptx::barrier_init(&m.arrived[k], 1), ptx::barrier_init(&m.freed[k], kCluster * kShare * 4);
        ptx::barrier_arrive_expect(&m.arrived[k], kBytesOfHead);
      }
      ptx::barrier_init_fence();
    }
    ptx::cluster_sync();
    const int i = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // the same in a warp, and known to be
    const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32, row = lane / 4;
    const int clusters = gridDim.x / kCluster, cluster = blockIdx.x / kCluster;
    Cluster x = {g, maps, m, i, lane, warp, (units - cluster + clusters - 1) / clusters};
    const int block = static_cast<int>(ptx::cluster_rank()) * kShare + i;
    x.to = ptx::shared_address(m.ay[0][row % kShare][0]) + Tile::place(row_of(block, row), lane % 4);
    x.queries_at = ptx::shared_address(m.tile[i][0]) + Tile::place(warp * 16 + row, lane % 4);
    x.work();
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
