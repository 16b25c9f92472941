// Monarch attention in one step, 16-bit, blocks of 64 tokens, at most 64 of them, widths up to 64: a head in a cluster of 16
// blocks of threads, one head streaming behind the other.
//
// Each block of threads has 4 blocks of tokens and 4 slots (the programs of tile/tile.cuh), one of each for a warpgroup.
// Block programs send a and y into the shared memory of those that have the slots; from there slot programs read them. So q, k
// and v pass through memory once, q once more through the L2 cache, and a and y through neither: with both in the cache its
// bandwidth binds (9 passes over the tensors; 220 us where memory needs 95). a and y of two heads fit, so that a warpgroup runs
// its block of one head and its slot of the head before as one sequence, in which most products run beside other work:
//
//   A = R k and Y = R v begin              round and send a while Y runs, then round y
//   S = q a^T + entropies of the slot
//   softmax of the slot                    y is on its way
//   O = L y and the next block's S begin   round and store the output while S runs
//   softmax of the next block
//
// What leaves a multiprocessor runs at 16 to 18 bytes a clock in pieces of 64, whatever sends or stores it, and more slowly in
// smaller pieces: 6,100 of the 7,700 clocks that a head takes for a, y and the output. To hide them, warpgroups must be free to
// stand at different places of the sequence (times of 192 heads):
//   - a and y of each head have barriers of their own for "all of it is here" and "all have read it" (147 us; one pair for both
//     at the end of the sequence: 159).
//   - A fifth warpgroup has a warp to serve each of the others: it asks for tiles as soon as their places are free, tells the
//     cluster what has been read, and orders what was sent before the products (a fence waits for a warp's own stores, and it
//     has none). Warps of the four had waited for the one of them that did so (138 us).
//   - Tiles take each other's places, so that each can be asked for at once (queries_of; 134 us).
//   - Entropies of 4 slots leave together (127 us).
//
// The entropy of R is what the slot's scores need besides a (tile/tile.cuh): block programs sum it beside their weights and
// send it as two 16-bit numbers, and a fifth step of the slot's product adds it. That step meets the entropies of 4 slots,
// three times 0: a query that is NaN makes 4 slots of its head NaN.
//
// Nothing is staged: a thread sends what it holds of a row, 4 pairs of channels, as one piece of 16 bytes. The pairs of a row
// then lie transposed, word i of piece t being channels 8 i + 2 t of each half, and that is what both sides of the slot's
// products want: as left operand a thread takes piece t of q as it is, for in step s its words are channels 8 t + 4 s on, and
// of the output it holds channels 8 t to 8 t + 7, a piece as memory wants it. Rows of odd slots have their halves exchanged, so
// that the rows that a warp sends at once go to all banks.
#include "cluster.h"
#include "mechanisms/monarch/cuda/tile/tile.cuh"
#include "ptx/cluster.cuh"
#include "ptx/tma.cuh"

namespace linnet::cuda {
namespace {

constexpr int kSide = 64, kCluster = kMonarchCluster, kShare = kSide / kCluster;  // kShare: blocks, and slots, of a block
static_assert(kMonarchThreads == 128 * (kShare + 1));  // warp i of the last warpgroup serves warpgroup i

// Registers are short, and what follows from x is cheap to compute again.
__device__ __forceinline__ uint32_t anew(uint32_t x) {
  ptx::forget(x);
  return x;
}

template <bool bf16>
struct Cluster {
  using Tile = MonarchTile<64, kSide, bf16>;
  static constexpr int kTile = Tile::kTile, kBuffer = kShare * 2 * kTile;
  static constexpr uint32_t kBytesOfA = kShare * kSide * (128 + 4), kBytesOfY = kShare * kSide * 128;
  struct Place {
    uint16_t* out;  // the output's first row
    int b, h;
  };
  struct Memory {
    char tile[kShare][3][kTile];      // k in the middle, the others as queries_of and values_of say
    uint32_t bias[2][kSide][kShare];  // of two heads: entropies of R [block][slot], two 16-bit numbers in units of unit()
    char ay[2][kShare][2][kTile];     // of two heads and this block's slots: a and y [block][channels, pairs transposed]
    Place places[kShare][4];          // of a warpgroup: the heads of the last rounds
    // Of a warpgroup. There are: queries and keys of a block, its values, queries of the slot, a and y.
    uint64_t keys[kShare], values[kShare], queries[kShare], a_ready[kShare], y_ready[kShare];
    // Its warps have averaged keys and values, taken the slot's queries into registers, scored the slot, averaged it, scored
    // the next block.
    uint64_t averaged[kShare], slot_read[kShare], slot_scored[kShare], slot_averaged[kShare], block_scored[kShare];
    // Of two heads: all of a or y has come; all warpgroups of the cluster have read it.
    uint64_t a_here[2], y_here[2], a_free[2], y_free[2];
  };
  static_assert(sizeof(Memory) == kMonarchBytes);

  const MonarchProblem& g;
  const MonarchMaps& maps;
  Memory& m;
  const uint32_t i, lane, warp, rounds, slot;  // i: the warpgroup; slot: its slot, and its block
  uint32_t to;                                 // where this thread's rows go, in the blocks of threads that have their slots
  uint32_t r[4][4];                            // R of the block and its factors
  float by[2], entropy;                        // even threads have the entropy of their first row, odd ones of the second

  // ---- the warp that serves ----------------------------------------------------------------------------------------------
  // Queries of a block take the place of the values before them, values that of the slot's queries before them, and queries of
  // a slot that of the block's.
  __device__ __forceinline__ char* queries_of(uint32_t round) const { return m.tile[i][round % 2 * 2]; }
  __device__ __forceinline__ char* values_of(uint32_t round) const { return m.tile[i][2 - round % 2 * 2]; }

  __device__ __forceinline__ Place place_of(uint32_t round) const {
    const uint32_t head = blockIdx.x / kCluster + round * (gridDim.x / kCluster), b = head / static_cast<uint32_t>(g.H),
                   h = head - b * static_cast<uint32_t>(g.H);
    return {static_cast<uint16_t*>(g.out.data) + offset_of(g.out, static_cast<int>(b), 0, static_cast<int>(h)),
            static_cast<int>(b), static_cast<int>(h)};
  }
  __device__ __forceinline__ void ask_keys(uint32_t round, const Place& x) const {
    m.places[i][round % 4] = x;
    ptx::barrier_arrive_expect(&m.keys[i], 2 * kTile);
    ptx::load_box(m.tile[i][1], &maps.k, &m.keys[i], 0, slot * kSide, x.h, x.b, 0);
    ptx::load_box(queries_of(round), &maps.q, &m.keys[i], 0, slot * kSide, x.h, x.b, 0);
  }
  __device__ __forceinline__ void ask_values(uint32_t round, const Place& x) const {
    ptx::barrier_arrive_expect(&m.values[i], kTile);
    ptx::load_box(values_of(round), &maps.v, &m.values[i], 0, slot * kSide, x.h, x.b, 0);
  }
  __device__ __forceinline__ void ask_slot(uint32_t round, const Place& x) const {
    ptx::barrier_arrive_expect(&m.queries[i], kTile);
    ptx::load_box(queries_of(round + 1), &maps.slots, &m.queries[i], 0, slot, 0, x.h, x.b);
  }
  // All of a or y of the round before is here, for products, too; the next of it may come.
  __device__ __forceinline__ void receive(uint64_t* here, uint64_t* ready, uint32_t round, uint32_t bytes) const {
    ptx::barrier_wait(here, (round - 1) / 2 % 2);
    ptx::fence_async_shared();
    if (ptx::elect()) {
      ptx::barrier_arrive(ready);
      if (i == 0) ptx::barrier_arrive_expect(here, bytes);
    }
    __syncwarp();
  }
  // Says to the cluster that this warpgroup has read its slot's a or y.
  __device__ __forceinline__ void free(uint64_t* barrier) const {
    if (lane < kCluster) ptx::barrier_arrive_in(ptx::address_in(ptx::shared_address(barrier), lane));
  }
  __device__ __forceinline__ void serve() const {
    Place place = place_of(0);
    if (ptx::elect()) ask_keys(0, place), ask_values(0, place);
    __syncwarp();
#pragma unroll 1
    for (uint32_t round = 0; round < rounds; ++round) {
      const bool more = round + 1 < rounds;
      const uint32_t before = (round + 1) % 2;
      const Place next = place_of(round + 1);
      if (round > 0) receive(&m.a_here[before], &m.a_ready[i], round, kBytesOfA);
      ptx::barrier_wait(&m.averaged[i], round % 2);
      if (more && ptx::elect()) ask_keys(round + 1, next);
      __syncwarp();
      ptx::barrier_wait(&m.slot_read[i], round % 2);
      if (more && ptx::elect()) ask_values(round + 1, next);
      __syncwarp();
      ptx::barrier_wait(&m.slot_scored[i], round % 2);
      if (round > 0) {
        free(&m.a_free[before]);
        receive(&m.y_here[before], &m.y_ready[i], round, kBytesOfY);
      }
      ptx::barrier_wait(&m.slot_averaged[i], round % 2);
      if (round > 0) free(&m.y_free[before]);
      ptx::barrier_wait(&m.block_scored[i], round % 2);
      if (ptx::elect()) ask_slot(round, place);
      __syncwarp();
      place = next;
    }
    const uint32_t last = (rounds + 1) % 2;
    receive(&m.a_here[last], &m.a_ready[i], rounds, kBytesOfA);
    receive(&m.y_here[last], &m.y_ready[i], rounds, kBytesOfY);
  }
  // To the warp that serves: this one has done something for the last time in this round.
  __device__ __forceinline__ void done(uint64_t* barrier) const {
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(barrier);
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
  __device__ __forceinline__ static void begin_average(float (&o)[32], const uint32_t (&p)[4][4], const char* tile) {
    const uint64_t rows = ptx::descriptor_mn_major(ptx::shared_address(tile), kSide, 0);
    begin(o);
#pragma unroll
    for (int k = 0; k < 4; ++k) ptx::wgmma<bf16, true>(o, p[k], rows + k * (16 * ptx::kRowBytes / 16), k > 0);
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void begin_block(float (&s)[32], uint32_t round) const {
    const uint64_t q = ptx::descriptor_k_major(ptx::shared_address(queries_of(round)), kSide, 0);
    const uint64_t k = ptx::descriptor_k_major(ptx::shared_address(m.tile[i][1]), kSide, 0);
    begin(s);
#pragma unroll
    for (int c = 0; c < 4; ++c) ptx::wgmma_shared<bf16, false, false>(s, q + 2 * c, k + 2 * c, c > 0);
    ptx::wgmma_commit();
  }
  // The power of 2 in which entropies are given: 2^8 for the scores of factor 1. So 60,000 of them are more than any score, and
  // what two f16 numbers of them leave of an entropy is far below what 16-bit numbers leave of a score.
  __device__ __forceinline__ float unit() const {
    const int exponent = 127 + 8 + 127 - static_cast<int>(__float_as_uint(g.factor) >> 23);
    return __uint_as_float(static_cast<uint32_t>(min(max(exponent, 127 - 14), 127 + 15)) << 23);
  }
  __device__ __forceinline__ void begin_slot(float (&s)[32], uint32_t (&q)[4][4], uint32_t round) const {
    const uint32_t from = anew(lane), before = (round + 1) % 2;
    const uint32_t at = ptx::shared_address(queries_of(round)) + Tile::place(anew(warp) * 16 + from / 4, from % 4);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int half = k % 2;
      const uint4 x = ptx::load_shared_16((at ^ (k / 2 * 64)) + half * (8 * ptx::kRowBytes));
      uint32_t(&first)[4] = q[k / 2 * 2], (&second)[4] = q[k / 2 * 2 + 1];
      first[half] = x.x, first[half + 2] = x.y, second[half] = x.z, second[half + 2] = x.w;
    }
    // Columns 2 i and 2 i + 1 of the bias are this slot's.
    const uint32_t units = from % 4 == i ? ptx::pack<bf16>(unit(), unit()) : 0, left[4] = {units, units, 0, 0};
    const uint64_t a = ptx::descriptor_k_major(ptx::shared_address(m.ay[before][i][0]), kSide, 0) ^ (i % 2 * 4);
    begin(s);
#pragma unroll
    for (int c = 0; c < 4; ++c) ptx::wgmma<bf16, false>(s, q[c], a ^ (2 * c), c > 0);
    ptx::wgmma<bf16, false>(s, left, ptx::descriptor_pieces(ptx::shared_address(m.bias[before])), true);
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

  // ---- weights -----------------------------------------------------------------------------------------------------------
  // p by = softmax of the rows of s, the largest p of a row 1, so that the heaviest weight is not rounded. `top`: what is
  // subtracted from exponents; `p_log_p`: sums of p log2 p of this thread's own weights.
  __device__ __forceinline__ void softmax(float (&s)[32], uint32_t (&p)[4][4], float (&by)[2], float (&top)[2],
                                          float (&total)[2], float* p_log_p) const {
    top[0] = s[0], top[1] = s[2];
#pragma unroll
    for (int k = 0; k < 32; ++k) top[k % 4 / 2] = fmaxf(top[k % 4 / 2], s[k]);
#pragma unroll
    for (int half = 0; half < 2; ++half) top[half] = Tile::quad_max(top[half]) * g.factor;
#pragma unroll
    for (int k = 0; k < 32; ++k) {
      const int half = k % 4 / 2;
      const float t = fmaf(s[k], g.factor, -top[half]);
      s[k] = ptx::exp2_fast(t);
      total[half] = k % 4 == 2 * half && k < 4 ? s[k] : total[half] + s[k];
      if (p_log_p != nullptr) p_log_p[half] = k % 4 == 2 * half && k < 4 ? s[k] * t : fmaf(s[k], t, p_log_p[half]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      total[half] = Tile::quad_sum(total[half]);
      by[half] = ptx::reciprocal_fast(total[half]);
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      p[k / 2][k % 2 * 2] = ptx::pack<bf16>(s[4 * k], s[4 * k + 1]);
      p[k / 2][k % 2 * 2 + 1] = ptx::pack<bf16>(s[4 * k + 2], s[4 * k + 3]);
    }
  }
  __device__ __forceinline__ void weigh_block(float (&s)[32]) {
    float top[2], total[2], p_log_p[2];
    softmax(s, r, by, top, total, p_log_p);
    const bool odd = anew(lane) % 2 != 0;
    float sum = (odd ? p_log_p[1] : p_log_p[0]) + __shfl_xor_sync(0xffffffffu, odd ? p_log_p[0] : p_log_p[1], 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    entropy = ptx::log2_fast(odd ? total[1] : total[0]) - sum * (odd ? by[1] : by[0]);
  }
  __device__ __forceinline__ void weigh_slot(float (&s)[32], uint32_t (&p)[4][4], float (&factors)[2], uint32_t round) const {
    float top[2], total[2];
    softmax(s, p, factors, top, total, nullptr);
    if (g.lse.data == nullptr || round == 0) return;
    const Place x = m.places[i][(round - 1) % 4];
    const Tile tile = {g, 0, 0, 0, nullptr, x.b, x.h, 0, static_cast<int>(anew(lane)), static_cast<int>(anew(warp)) * 16};
    const float lse[2] = {top[0] + ptx::log2_fast(total[0]), top[1] + ptx::log2_fast(total[1])};
    tile.give_lse(slot, lse);
  }

  // ---- what a thread hands on --------------------------------------------------------------------------------------------
  // Who has the slot of this thread's row, or of the 8th behind it.
  __device__ __forceinline__ uint32_t owner_of(uint32_t half) const { return anew(warp) * 4 + half * 2 + anew(lane) / 16; }
  // A quarter of this thread's two rows of a (part 0) or y.
  __device__ __forceinline__ void send(const uint32_t (&x)[2][8], int part, int quarter, uint32_t buffer) const {
    const int half = quarter / 2;
    const uint32_t* const piece = x[half] + quarter % 2 * 4;
    const uint32_t at = (to + buffer * kBuffer + part * kTile) ^ (quarter % 2 * 64), rank = owner_of(half);  // 4 pieces on
    ptx::send_16(ptx::address_in(at, rank), make_uint4(piece[0], piece[1], piece[2], piece[3]),
                 ptx::address_in(ptx::shared_address(part == 0 ? &m.a_here[buffer] : &m.y_here[buffer]), rank));
  }
  // Those of 4 slots together; blocks that do not exist (their tiles are zeros) have no weight.
  __device__ __forceinline__ void send_entropy(uint32_t buffer) const {
    const uint32_t from = anew(lane);
    const float x = entropy * ptx::reciprocal_fast(g.factor * unit()), high = ptx::unpack<bf16>(ptx::pack<bf16>(x, x)).x;
    const uint32_t sum = slot < g.rows ? ptx::pack<bf16>(x, x - high) : ptx::pack<bf16>(-60000, 0);
    uint32_t four[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) four[k] = __shfl_sync(0xffffffffu, sum, (from & 17) + 4 * k);
    if ((from & 14) != 0) return;
    const uint32_t rank = owner_of(from % 2);
    ptx::send_16(ptx::address_in(ptx::shared_address(m.bias[buffer][slot]), rank),
                 make_uint4(four[0], four[1], four[2], four[3]), ptx::address_in(ptx::shared_address(&m.a_here[buffer]), rank));
  }
  __device__ __forceinline__ void give(const float (&o)[32], const float (&factors)[2], uint32_t round) const {
    uint32_t x[2][8];
    round_rows(x, o, factors);
    const uint32_t from = anew(lane), l = warp * 16 + from / 4;
    const int64_t down = 8 * kSide * g.out.stride_t;
    uint16_t* const out = m.places[i][round % 4].out + (l * kSide + slot) * g.out.stride_t + from % 4 * 8;
    const uint32_t exchanged = i % 2 * 32;
    if (g.rows == kSide && g.V == kSide && g.out_aligned) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint32_t* const y = x[k / 2] + k % 2 * 4;
        __stcs(reinterpret_cast<uint4*>(out + k / 2 * down + (k % 2 * 32 ^ exchanged)), make_uint4(y[0], y[1], y[2], y[3]));
      }
      return;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int half = k / 2, further = static_cast<int>(k % 2 * 32 ^ exchanged);
      const uint32_t* const y = x[half] + k % 2 * 4;
      if (static_cast<int>(l) + 8 * half >= g.rows || static_cast<int>(from) % 4 * 8 + further >= g.V) continue;
      store_row(g.out, g.out_aligned, out - static_cast<uint16_t*>(g.out.data) + half * down + further,
                make_uint4(y[0], y[1], y[2], y[3]));
    }
  }

  // ---- one head behind the other -----------------------------------------------------------------------------------------
  __device__ __forceinline__ void work() {
    float x[32], w[32];  // all sums: products that take them over keep their registers, so that 112 suffice
    ptx::barrier_wait(&m.keys[i], 0);
    begin_block(w, 0);
    until<0>(w);
    weigh_block(w);
    uint32_t p[4][4], q[4][4];
    float factors[2];
#pragma unroll 1
    for (uint32_t round = 0; round < rounds; ++round) {        // the first has no slot: what it computes of one is not used
      const uint32_t buffer = round % 2, before = 1 - buffer;  // of the block, of the slot
      uint32_t a[2][8], y[2][8];
      begin_average(x, r, m.tile[i][1]);
      ptx::barrier_wait(&m.values[i], round % 2);
      begin_average(w, r, values_of(round));
      if (round > 1) ptx::barrier_wait(&m.a_free[buffer], (round / 2 + 1) % 2);
      until<1>(x);
      round_rows(a, x, by);
#pragma unroll
      for (int quarter = 0; quarter < 3; ++quarter) send(a, 0, quarter, buffer);
      send_entropy(buffer);
      until<0>(w);
      keep(r);
      done(&m.averaged[i]);
      send(a, 0, 3, buffer);
      round_rows(y, w, by);
      if (round > 0) {
        ptx::barrier_wait(&m.queries[i], (round - 1) % 2);
        ptx::barrier_wait(&m.a_ready[i], (round - 1) % 2);
      }
      begin_slot(x, q, round);
      done(&m.slot_read[i]);
      until<0>(x);
      keep(q);
      done(&m.slot_scored[i]);
      if (round > 1) ptx::barrier_wait(&m.y_free[buffer], (round / 2 + 1) % 2);
#pragma unroll
      for (int quarter = 0; quarter < 4; ++quarter) send(y, 1, quarter, buffer);
      weigh_slot(x, p, factors, round);
      if (round > 0) ptx::barrier_wait(&m.y_ready[i], (round - 1) % 2);
      begin_average(x, p, m.ay[before][i][1]);
      if (round + 1 < rounds) ptx::barrier_wait(&m.keys[i], (round + 1) % 2);
      begin_block(w, round + 1);
      until<1>(x);
      keep(p);
      done(&m.slot_averaged[i]);
      if (round > 0) give(x, factors, round - 1);
      until<0>(w);
      done(&m.block_scored[i]);
      weigh_block(w);
    }
    ptx::barrier_wait(&m.queries[i], (rounds - 1) % 2);  // the last slot
    ptx::barrier_wait(&m.a_ready[i], (rounds - 1) % 2);
    begin_slot(x, q, rounds);
    until<0>(x);
    keep(q);
    weigh_slot(x, p, factors, rounds);
    ptx::barrier_wait(&m.y_ready[i], (rounds - 1) % 2);
    begin_average(x, p, m.ay[(rounds + 1) % 2][i][1]);
    until<0>(x);
    keep(p);
    give(x, factors, rounds - 1);
  }

  __device__ static void run(const MonarchProblem& g, const MonarchMaps& maps, uint32_t units) {
    extern __shared__ __align__(1024) char memory[];
    Memory& m = *reinterpret_cast<Memory*>(memory);
    if (threadIdx.x == 0) {
      for (int k = 0; k < kShare; ++k) {
        for (uint64_t* const each : {m.keys, m.values, m.queries, m.a_ready, m.y_ready}) ptx::barrier_init(each + k, 1);
        for (uint64_t* const each : {m.averaged, m.slot_read, m.slot_scored, m.slot_averaged, m.block_scored})
          ptx::barrier_init(each + k, 4);
      }
      for (int k = 0; k < 2; ++k) {
        for (uint64_t* const each : {m.a_here, m.y_here}) ptx::barrier_init(each + k, 1);
        for (uint64_t* const each : {m.a_free, m.y_free}) ptx::barrier_init(each + k, kCluster * kShare);
        ptx::barrier_arrive_expect(&m.a_here[k], kBytesOfA), ptx::barrier_arrive_expect(&m.y_here[k], kBytesOfY);
      }
      ptx::barrier_init_fence();
    }
    ptx::cluster_sync();
    const uint32_t thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32, row = lane / 4;
    const uint32_t group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // the same in a warp, and known to be
    const bool serves = group == kShare;
    const uint32_t i = serves ? __shfl_sync(0xffffffffu, warp, 0) : group;
    const uint32_t clusters = gridDim.x / kCluster, cluster = blockIdx.x / kCluster, slot = blockIdx.x % kCluster * kShare + i;
    Cluster x = {g, maps, m, i, lane, warp, (units - cluster + clusters - 1) / clusters, slot};
    x.to = ptx::shared_address(m.ay[0][row % kShare][0]) + (Tile::place(slot, lane % 4) ^ (row % 2 * 64));
    if (serves) {
      ptx::fewer_registers<32>();
      x.serve();
    } else {
      ptx::more_registers<112>();
      x.work();
    }
    ptx::cluster_sync();  // nobody leaves while others may send here
  }
};

}  // namespace

#define LINNET_MONARCH_CLUSTER(name, bf16)                                                                        \
  extern "C" __global__ void __cluster_dims__(kCluster) __launch_bounds__(kMonarchThreads, 1)                     \
      name(const __grid_constant__ MonarchProblem g, const __grid_constant__ MonarchMaps maps, const int units) { \
    Cluster<bf16>::run(g, maps, static_cast<uint32_t>(units));                                                    \
  }
LINNET_MONARCH_CLUSTER(cluster_f16, false)
LINNET_MONARCH_CLUSTER(cluster_bf16, true)

}  // namespace linnet::cuda
