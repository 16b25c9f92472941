// dq, dk and dg of all chunks at once (gradients.h), bf16: a block stays on its multiprocessor and walks over chunks
// of 64 tokens, and for each over the heads that share a query and a key, whose gradients it sums in its accumulators.
//
//   dq^T = scale sum_h (S_0 dout^T * read + K^T P^T),   dk^T = scale sum_h (dS_C V^T * write + Q^T P),   P = tril(dout V^T * D)
//
// Rows are key channels, columns tokens. S_0 and dS_C come as the walks left them, which is how a warpgroup wants its A
// operand.
//
//   producer    one thread: the tiles of the next head, two stages, and its states
//   consumers   a warpgroup for each 64 key channels
//   auxiliary   a warpgroup, ahead of them: decays, P, and what dg needs of the pairs inside the chunk; then dg
//
// Bytes per token and head: 4 K V / 64 for the states, 4 V, and 8 K / (heads of a group); at 128 channels 3 us a chunk and
// head, against 1.2 us of products.
#include "mechanisms/recurrence/cuda/tile/gradients.h"
#include "mechanisms/recurrence/cuda/tile/pairs.cuh"
#include "mechanisms/recurrence/cuda/tile/tile.cuh"

namespace linnet::cuda {
namespace {

constexpr int kTileBuffers = 2;

struct alignas(16) Factors {
  Decays decays;
  float g[C], read[C], write[C], weight[C];  // write with the weight
};

template <int K, int V>
struct WholeShared {
  alignas(1024) char q[kTileBuffers][K / 64 * kPanel];
  char k[kTileBuffers][K / 64 * kPanel];
  char v[kTileBuffers][V / 64 * kPanel];
  char dout[kTileBuffers][V / 64 * kPanel];
  char p[kPanel];
  uint4 states[2][K * V / 8];
  Factors factors[2];
  float reads[2][K / 16][C], writes[2][K / 16][C];  // by warp
  float rows[2][C], columns[2][4][C];
  float over[2][K / 16];
  uint64_t full[kTileBuffers], empty[kTileBuffers], states_full, states_empty, p_full, p_empty, factors_full[2], dots_full[2];
};

// One head of one chunk.
struct Item {
  int unit, head = 0;  // the chunk (of a sequence and a group of heads), the head in its group
  int chunk = 0, h = 0;
  int64_t b = 0, begin = 0, length = 0;  // of the sequence
  __device__ __forceinline__ Walk walk() const { return {b, begin, length, 0, 0, false, false}; }
  __device__ __forceinline__ int rows() const {
    return static_cast<int>(min(static_cast<int64_t>(C), length - static_cast<int64_t>(chunk) * C));
  }
};
// The first unit of this block from item.unit on that has tokens: whether there is one.
__device__ __forceinline__ bool find(const Pairs& pairs, Item& item) {
  const Engine& e = pairs.e;
  const int groups = e.H / e.q.group, chunks = static_cast<int>((e.T + C - 1) / C);
  for (; item.unit < pairs.chunks; item.unit += static_cast<int>(gridDim.x)) {
    const int at = item.unit / groups;
    item.chunk = at % chunks;
    item.h = item.unit % groups * e.q.group;
    const Walk w = walk_of(e, at / chunks, 0, false);
    item.b = w.b;
    item.begin = w.begin;
    item.length = w.length;
    if (item.chunk < w.count) return true;
  }
  return false;
}
__device__ __forceinline__ bool advance(const Pairs& pairs, Item& item) {
  if (++item.head < pairs.e.q.group) {
    ++item.h;
    return true;
  }
  item.head = 0;
  item.unit += static_cast<int>(gridDim.x);
  return find(pairs, item);
}

template <int K, int V>
__device__ void produce_items(const Pairs& pairs, WholeShared<K, V>& s) {
  const Engine& e = pairs.e;
  constexpr uint32_t kTiles = (2 * K + 2 * V) / 64 * kPanel, kState = sizeof(s.states[0]);
  Item item = {static_cast<int>(blockIdx.x)};
  int i = 0;
  for (bool more = find(pairs, item); more; more = advance(pairs, item), ++i) {
    const int stage = i % kTileBuffers, t = static_cast<int>(item.begin) + item.chunk * C, b = static_cast<int>(item.b);
    ptx::ring_wait_free(s.empty, stage, i);
    ptx::barrier_arrive_expect(&s.full[stage], kTiles);
    ptx::load_box(s.dout[stage], &pairs.dout, &s.full[stage], 0, t, 0, item.h / e.out.group, b);
    ptx::load_box(s.v[stage], &pairs.v, &s.full[stage], 0, t, 0, item.h / e.v.group, b);
    ptx::load_box(s.q[stage], &pairs.q, &s.full[stage], 0, t, 0, item.h / e.q.group, b);
    ptx::load_box(s.k[stage], &pairs.k, &s.full[stage], 0, t, 0, item.h / e.k.group, b);
    if (i > 0) ptx::barrier_wait(&s.states_empty, (i - 1) & 1);
    ptx::barrier_arrive_expect(&s.states_full, 2 * kState);
    const int64_t n = item.unit / (e.H / e.q.group) / static_cast<int>((e.T + C - 1) / C);
    const int64_t place = saved_slot(e, n, item.begin, item.chunk) * e.H + item.h;
    for (int j = 0; j < 2; ++j) {
      ptx::load_bytes(s.states[j], static_cast<const char*>(pairs.saved[j]) + place * kState, kState, &s.states_full);
    }
  }
}

// O [this warp's 16 rows, 64 tokens] times the tile's channels of the same tokens, summed over the rows: to[token].
__device__ __forceinline__ void dot_tokens(const float (&O)[32], uint32_t tile, int warp, int lane, float* to) {
  float sums[16];
#pragma unroll
  for (int kk = 0; kk < 4; ++kk) {
    const int token = 16 * kk + lane / 16 * 8 + lane % 8, channel = 16 * warp + lane / 8 % 2 * 8;
    uint32_t x[4];
    ptx::load_matrices_transposed(x, tile + ptx::tile_byte(C, token, channel));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 up = ptx::unpack<true>(x[2 * half]), low = ptx::unpack<true>(x[2 * half + 1]);
      const float* o = O + 8 * kk + 4 * half;
      sums[4 * kk + 2 * half] = fmaf(o[0], up.x, o[2] * low.x);
      sums[4 * kk + 2 * half + 1] = fmaf(o[1], up.y, o[3] * low.y);
    }
  }
  halve<8>(sums, lane);
  halve<4>(sums, lane);
  halve<2>(sums, lane);
  *reinterpret_cast<float2*>(to + 2 * lane) = {sums[0], sums[1]};
}
// sum += O with its columns (tokens) times their factors.
__device__ __forceinline__ void add_scaled(float (&sum)[32], const float (&O)[32], const float* factors, int lane) {
#pragma unroll
  for (int j = 0; j < 32; j += 4) {
    const float2 factor = *reinterpret_cast<const float2*>(factors + ptx::Fragment{lane}.pair(j));
    sum[j] = fmaf(factor.x, O[j], sum[j]);
    sum[j + 1] = fmaf(factor.y, O[j + 1], sum[j + 1]);
    sum[j + 2] = fmaf(factor.x, O[j + 2], sum[j + 2]);
    sum[j + 3] = fmaf(factor.y, O[j + 3], sum[j + 3]);
  }
}

template <int K, int V>
__device__ void consume_items(const Pairs& pairs, WholeShared<K, V>& s) {
  const Engine& e = pairs.e;
  const int group = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const auto sync = [&] { group == 0 ? ptx::group_sync<3, 128>() : ptx::group_sync<4, 128>(); };
  float dq[32], dk[32], O[32];
  Item item = {static_cast<int>(blockIdx.x)};
  int i = 0;
  for (bool more = find(pairs, item); more; more = advance(pairs, item), ++i) {
    const int stage = i % kTileBuffers, slot = i % 2, rows = item.rows();
    const Factors& factors = s.factors[slot];
    char *const q = s.q[stage] + group * kPanel, *const k = s.k[stage] + group * kPanel;
    if (item.head == 0) {
#pragma unroll
      for (int j = 0; j < 32; ++j) dq[j] = dk[j] = 0;
    }
    ptx::ring_wait(s.full, stage, i);
    if (rows < C) {  // rows behind the sequence, which the products with P sum over
      for (int piece = thread; piece < (C - rows) * 8; piece += 128) {
        const uint32_t at = ptx::tile_byte(C, rows + piece / 8, piece % 8 * 8);
        *reinterpret_cast<uint4*>(q + at) = *reinterpret_cast<uint4*>(k + at) = uint4{0, 0, 0, 0};
      }
      ptx::fence_async_shared();
      sync();
    }
    uint32_t state[V / 4];
    const uint4* const kept[2] = {s.states[0] + group * (128 * V / 16) + thread, s.states[1] + group * (128 * V / 16) + thread};
    const auto load = [&](int which) {
#pragma unroll
      for (int j = 0; j < V / 16; ++j) {
        const uint4 x = kept[which][128 * j];
        state[4 * j] = x.x, state[4 * j + 1] = x.y, state[4 * j + 2] = x.z, state[4 * j + 3] = x.w;
      }
    };
    const auto multiply = [&](const char* tile) {  // O = state tile^T
      const uint64_t other = ptx::descriptor_k_major(ptx::shared_address(tile), C, 0);
      ptx::hold(state);
      ptx::wgmma_fence();
#pragma unroll
      for (int kk = 0; kk < V / 16; ++kk) ptx::wgmma<true, false>(O, state + 4 * kk, ptx::step_k_major(other, C, kk), kk > 0);
      ptx::wgmma_commit();
    };
    ptx::barrier_wait(&s.states_full, i & 1);
    load(0);
    multiply(s.dout[stage]);
    float over = 0;  // <S_0, dS_C>, this warp's part
#pragma unroll
    for (int j = 0; j < V / 16; ++j) {
      const uint4 words = kept[1][128 * j];
      const uint32_t other[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const float2 x = ptx::unpack<true>(state[4 * j + m]), y = ptx::unpack<true>(other[m]);
        over = fmaf(x.x, y.x, fmaf(x.y, y.y, over));
      }
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) over += __shfl_xor_sync(0xffffffff, over, step);
    ptx::ring_wait(s.factors_full, slot, i);
    if (lane == 0) s.over[slot][group * 4 + warp] = over;
    ptx::wgmma_wait<0>();
    ptx::hold(O);
    load(1);
    ptx::barrier_arrive(&s.states_empty);
    dot_tokens(O, ptx::shared_address(q), warp, lane, s.reads[slot][group * 4 + warp]);
    add_scaled(dq, O, factors.read, lane);
    ptx::hold(O);
    multiply(s.v[stage]);
    ptx::wgmma_wait<0>();
    ptx::hold(O);
    dot_tokens(O, ptx::shared_address(k), warp, lane, s.writes[slot][group * 4 + warp]);
    ptx::barrier_arrive(&s.dots_full[slot]);
    add_scaled(dk, O, factors.write, lane);
    ptx::barrier_wait(&s.p_full, i & 1);
    const uint32_t p = ptx::shared_address(s.p);
    ptx::hold(dq);
    ptx::hold(dk);
    ptx::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
      ptx::wgmma_shared<true, true, false>(dq, ptx::descriptor_mn_major(ptx::shared_address(k), C, kk),
                                           ptx::descriptor_k_major(p, C, kk), true);
      ptx::wgmma_shared<true, true, true>(dk, ptx::descriptor_mn_major(ptx::shared_address(q), C, kk),
                                          ptx::descriptor_mn_major(p, C, kk), true);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::hold(dq);
    ptx::hold(dk);
    ptx::barrier_arrive(&s.p_empty);
    if (item.head == e.q.group - 1) {  // through the tiles of q and k, which nobody reads any more
      const uint4 none[4] = {};
      sync();
      if (pairs.dq.data != nullptr) {
        store_rows<true, false>(place_of(pairs.dq, item.walk(), item.h, group), group, item.chunk, rows, dq, e.scale, q, none,
                                false);
      }
      if (pairs.dk.data != nullptr) {
        store_rows<true, false>(place_of(pairs.dk, item.walk(), item.h, group), group, item.chunk, rows, dk, e.scale, k, none,
                                false);
      }
      ptx::fence_async_shared();
    }
    ptx::barrier_arrive(&s.empty[stage]);
  }
}

template <int K, int V>
__device__ void assist_items(const Pairs& pairs, WholeShared<K, V>& s) {
  const Engine& e = pairs.e;
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  // dg of an item whose sums are all there, by the first warp, which knows the sum of its g.
  const auto finish = [&](const Item& item, int i, float all) {
    const int slot = i % 2, rows = item.rows();
    const Factors& factors = s.factors[slot];
    ptx::ring_wait(s.dots_full, slot, i);
    float whole[2], write[2], g[2], product = 0;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int t = lane + 32 * j;
      float reads = 0, writes = 0, columns = 0;
      for (int each = 0; each < K / 16; ++each) {
        reads += s.reads[slot][each][t];
        writes += s.writes[slot][each][t];
      }
      for (int each = 0; each < 4; ++each) columns += s.columns[slot][each][t];
      whole[j] = t < rows ? e.scale * (s.rows[slot][t] - columns + factors.read[t] * reads) : 0;
      write[j] = t < rows ? e.scale * factors.write[t] * writes : 0;
      g[j] = factors.g[t];
    }
    for (int each = 0; each < K / 16; ++each) product += s.over[slot][each];
    store_dg(pairs, item.walk(), item.h, item.chunk, lane, whole, write, e.scale * expf(all) * product, g);
  };
  Item item = {static_cast<int>(blockIdx.x)}, before = item;
  bool more = find(pairs, item);
  Numbers next;
  if (more && warp == 0) next = ask_numbers(e.g, item.walk(), item.h, item.chunk, lane);
  int i = 0;
  float all = 0, all_before = 0;
  for (; more; more = advance(pairs, item), ++i) {
    const int stage = i % kTileBuffers, slot = i % 2, rows = item.rows();
    Factors& factors = s.factors[slot];
    if (warp == 0) {
      const Numbers numbers = next;
      Item ahead = item;
      if (advance(pairs, ahead)) next = ask_numbers(e.g, ahead.walk(), ahead.h, ahead.chunk, lane);
      float2 g = take_gates(numbers, e.g.dtype), raw = take_numbers(numbers, e.g.dtype), weight = {1, 1};
      if (e.steps.A != nullptr) {
        const float rate = e.steps.A[item.h * e.steps.stride_A], bias = step_bias(e.steps, item.h);
        weight = {lane < rows ? step_size<true>(e.steps, raw.x + bias) : 0,
                  lane + 32 < rows ? step_size<true>(e.steps, raw.y + bias) : 0};
        raw = {step_decay(weight.x, rate), step_decay(weight.y, rate)};
        g = {fmaxf(raw.x, kLeastGate), fmaxf(raw.y, kLeastGate)};
      }
      const Sums G = sum_gates(g, lane);
      store_decays(G, lane, factors.decays);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float sum = j == 0 ? G.low : G.high, size = j == 0 ? weight.x : weight.y;
        factors.g[lane + 32 * j] = j == 0 ? raw.x : raw.y;
        factors.weight[lane + 32 * j] = size;
        factors.read[lane + 32 * j] = expf(sum);
        factors.write[lane + 32 * j] = expf(G.all - sum) * size;
      }
      all_before = all;
      all = G.all;
      ptx::barrier_arrive(&s.factors_full[slot]);
    }
    ptx::group_sync<1, 128>();
    ptx::ring_wait(s.full, stage, i);
    float p[32], x[32];
    multiply_pairs<true, K, V>(p, x, s.q[stage], s.k[stage], s.v[stage], s.dout[stage]);
    ptx::barrier_arrive(&s.empty[stage]);
    weigh<true, false>(p, factors.decays, warp, lane, false);
    const int row = warp * 16 + lane / 4, column = lane % 4 * 2;
    float sums[2] = {0, 0}, columns[16];
#pragma unroll
    for (int j = 0; j < 32; ++j) {  // rows behind the sequence see nothing; columns there are seen by none
      const int r = row + ptx::Fragment::below(j), c = j / 4 * 8 + column + (j & 1);
      p[j] = r < rows && c <= r ? p[j] * factors.weight[c] : 0;
      x[j] = r < rows && c < r ? p[j] * x[j] : 0;
      sums[j / 2 % 2] += x[j];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sums[half] += __shfl_xor_sync(0xffffffff, sums[half], 1);
      sums[half] += __shfl_xor_sync(0xffffffff, sums[half], 2);
      if (lane % 4 == 0) s.rows[slot][row + 8 * half] = sums[half];
    }
#pragma unroll
    for (int j = 0; j < 16; ++j) columns[j] = x[j / 2 * 4 + j % 2] + x[j / 2 * 4 + 2 + j % 2];
    halve<8>(columns, lane);
    halve<4>(columns, lane);
    halve<2>(columns, lane);
    *reinterpret_cast<float2*>(&s.columns[slot][warp][2 * lane]) = {columns[0], columns[1]};
    if (i > 0) ptx::barrier_wait(&s.p_empty, (i - 1) & 1);
#pragma unroll
    for (int j = 0; j < 32; j += 2) {
      const int r = row + ptx::Fragment::below(j), c = j / 4 * 8 + column;
      *reinterpret_cast<uint32_t*>(s.p + ptx::tile_byte(C, r, c)) = ptx::pack<true>(p[j], p[j + 1]);
    }
    ptx::fence_async_shared();
    ptx::barrier_arrive(&s.p_full);
    if (warp == 0 && i > 0) finish(before, i - 1, all_before);
    before = item;
  }
  if (i == 0) return;
  ptx::group_sync<1, 128>();  // the last rows and columns
  if (warp == 0) finish(before, i - 1, all);
}

template <int K, int V>
__device__ void whole_kernel(const Pairs& pairs) {
  extern __shared__ char memory[];
  static_assert(sizeof(WholeShared<K, V>) + 1024 <= whole_shared_bytes(K, V));
  auto& s = ptx::shared_as<WholeShared<K, V>>(memory);
  constexpr int kGroups = K / 64, kConsumers = 128 * kGroups;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kTileBuffers; ++i) {
      ptx::barrier_init(&s.full[i], 1);
      ptx::barrier_init(&s.empty[i], kConsumers + 128);
    }
    for (int i = 0; i < 2; ++i) {
      ptx::barrier_init(&s.factors_full[i], 32);
      ptx::barrier_init(&s.dots_full[i], kConsumers);
    }
    ptx::barrier_init(&s.states_full, 1);
    ptx::barrier_init(&s.states_empty, kConsumers);
    ptx::barrier_init(&s.p_full, 128);
    ptx::barrier_init(&s.p_empty, kConsumers);
    ptx::barrier_init_fence();
  }
  __syncthreads();
  // Registers: 65536 of the multiprocessor over 512 threads, or over 384.
  const int role = threadIdx.x / 128;
  if (role == 0) {
    ptx::fewer_registers<24>();
    if (threadIdx.x == 0) produce_items<K, V>(pairs, s);
  } else if (role <= kGroups) {
    ptx::more_registers<kGroups == 2 ? 168 : 240>();
    consume_items<K, V>(pairs, s);
  } else {
    ptx::more_registers<kGroups == 2 ? 152 : 240>();
    assist_items<K, V>(pairs, s);
  }
}

}  // namespace

#define LINNET_WHOLE(K, V)                                                                                                   \
  extern "C" __global__ void __launch_bounds__(128 * (2 + K / 64), 1) whole_##K##_##V(const __grid_constant__ Pairs pairs) { \
    whole_kernel<K, V>(pairs);                                                                                               \
  }
LINNET_WHOLE(64, 64)
LINNET_WHOLE(64, 128)
LINNET_WHOLE(128, 64)
LINNET_WHOLE(128, 128)

}  // namespace linnet::cuda
