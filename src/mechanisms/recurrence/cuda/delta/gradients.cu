// The gradients of the delta rules from the states and their gradients between chunks (docs/notes/recurrence.md): all
// chunks at once, one block each. N = beta res and dY = beta Z are told as res and Z, 16-bit numbers.
//
//   dP = scale tril(dO N^T D)   dA = -tril(dY N^T D, -1)    (the decays D in them)
//   dQ = scale read dO S_0^T + dP K
//   dK = write N dS^T - read dY S_0^T + dP^T Q + (dA + dA^T) K
//   dV = dY    dbeta_i = Z_i . res_i
//
// dg: what reaches a row by its decays, less what leaves it, are dots of the row with parts of its gradients, taken while these
// are formed: Q_i . (dP K)_i is the sum of dP * Q K^T over row i, K_j . (dP^T Q)_j that over column j.
//
// Blocks stay, one a multiprocessor, and take every so many-th chunk; a chunk's tiles come while the one before is worked on:
//
//   producer     one thread: dO, res, K of the next two chunks, Z, S_0, dS and Q of the next one, by the copy engine
//   pair         two warpgroups: decays, dP; dA, dbeta, dV
//   accumulate   two warpgroups: dQ and dK, 64 key channels each (D = 64: one of them each)
//   decays       one warp, beside the producer: dg
//
// Bytes per token and head, D = 128: 2304 read, 768 written: 0.38 ms at 16,2048,16,128 of an H200's copy bandwidth.
#include "mechanisms/recurrence/cuda/delta/delta.cuh"
#include "ptx/mma.cuh"

namespace linnet::cuda {
namespace {

// Where a chunk's rows stand; no rows: there is no more chunk.
struct Spot {
  int64_t b, t;
  int h, rows;
};

// Of a chunk's first token in a result, which has all heads.
__device__ __forceinline__ int64_t first_of(const Rows& to, const Spot& spot) {
  return spot.b * to.stride_b + spot.t * to.stride_t + spot.h * to.stride_h;
}

template <int D>
struct GradientsShared {
  alignas(1024) char dout[2][D / 64 * kPanel];  // at last a panel of dQ
  char residuals[2][D / 64 * kPanel];           // at last a panel of dK
  char k[2][D / 64 * kPanel];
  char adjoints[D / 64 * kPanel], q[D / 64 * kPanel];
  char state[D * D * 2], dstate[D * D * 2];
  char dp[kPanel], da[kPanel];
  struct alignas(16) {
    Decays decays;
    float read[C], write[C];
  } gates[2];
  // Dots of rows, by group: what reaches a row less what leaves it; what it leaves in the state.
  struct alignas(16) {
    float reached[2][C], written[2][C];
    float carried[8];  // parts of <S_0, dS>
  } dots[2];
  // Told by the group of dP with the gates; read until a chunk's gradients are stored.
  alignas(16) float beta[4][C];
  Spot spots[4];
  uint64_t rows_full[2], rows_empty[2], adjoints_full, adjoints_empty, queries_full, queries_empty, states_full, states_empty,
      gates_full[2], pairs_full, pairs_empty, dots_full[2], dots_empty[2], rows_read;
};

// The chunk that a block takes as its i-th; all roles of the block walk over the same ones. Groups with sums in their registers
// are told by `spots`.
struct Item {
  int64_t image;
  Walk w;
  int h, chunk, rows;
};
__device__ __forceinline__ bool next_item(const Delta& delta, int64_t& at, Item& item) {
  const Engine& e = delta.e;
  for (const int64_t end = delta_slots(e) * e.H; at < end;) {
    item.image = at;
    at += gridDim.x;
    const auto image = static_cast<uint32_t>(item.image), H = static_cast<uint32_t>(e.H);
    const Place place = place_of(e, image / H);
    if (place.chunk < 0) continue;
    item.h = static_cast<int>(image % H);
    item.w = walk_of(e, place.n, 0, false);
    item.chunk = place.chunk;
    item.rows = static_cast<int>(min(static_cast<int64_t>(C), item.w.length - static_cast<int64_t>(place.chunk) * C));
    return true;
  }
  return false;
}

// The thread's number in its group. Addresses that follow from it are computed anew in every chunk: kept, there would be no
// room for the sums.
__device__ __forceinline__ int own_thread() {
  int thread = threadIdx.x % 128;
  ptx::forget(thread);
  return thread;
}

// Of the two rows that a thread has of an accumulator [64, 64]: this one and the one 8 below.
__device__ __forceinline__ int own_row() {
  const int thread = own_thread();
  return thread / 32 * 16 + thread % 32 / 4;
}

// The dots of an accumulator's two rows with those of a panel, this thread's part, added to `dots`.
template <bool bf16>
__device__ __forceinline__ void dot_rows(const float (&acc)[32], const char* panel, float (&dots)[2]) {
  const int lane = own_thread() % 32;
  const char* at = panel + own_row() * 128 + lane % 4 * 4;  // tile_byte, by hand: a row's pieces differ in bits 4 to 6
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 y = ptx::unpack<bf16>(*reinterpret_cast<const uint32_t*>(at + 1024 * half + ((j ^ lane / 4) * 16)));
      dots[half] = fmaf(acc[4 * j + 2 * half], y.x, fmaf(acc[4 * j + 2 * half + 1], y.y, dots[half]));
    }
  }
}
__device__ __forceinline__ void store_dots(const float (&dots)[2], float* to) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float dot = dots[half];
    dot += __shfl_xor_sync(0xffffffff, dot, 1);
    dot += __shfl_xor_sync(0xffffffff, dot, 2);
    if (threadIdx.x % 4 == 0) to[own_row() + 8 * half] = dot;
  }
}

__device__ __forceinline__ bool has_wide_rows(const Rows& rows) {
  const auto bits =
      reinterpret_cast<uintptr_t>(rows.data) | static_cast<uintptr_t>((rows.stride_b | rows.stride_t | rows.stride_h) * 2);
  return rows.dtype != Dtype::f32 && bits % 16 == 0;
}

// A group's rows [64 tokens, 64 channels from `column` on] out; by the way of `tile`, where 16 bytes may be stored at once.
template <bool bf16>
__device__ __forceinline__ void store_gradient(const Rows& to, const Spot& spot, int column, const float (&acc)[32], char* tile,
                                               int group) {
  const int thread = own_thread(), warp = thread / 32, lane = thread % 32, rows = spot.rows;
  const int64_t first = first_of(to, spot);
  if (!has_wide_rows(to)) {
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const int r = 16 * warp + lane / 4 + ptx::Fragment::below(j), c = column + ptx::Fragment{lane}.column(j);
      if (r < rows) ptx::store(const_cast<void*>(to.data), to.dtype, first + r * to.stride_t + c, acc[j]);
    }
    return;
  }
  const uint32_t shared = ptx::shared_address(tile);
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    const int row = 16 * warp + lane / 8 % 2 * 8 + lane % 8, at = 8 * (j + lane / 16);
    const float* x = acc + 4 * j;
    ptx::store_matrices(shared + ptx::tile_byte(C, row, at), ptx::pack<bf16>(x[0], x[1]), ptx::pack<bf16>(x[2], x[3]),
                        ptx::pack<bf16>(x[4], x[5]), ptx::pack<bf16>(x[6], x[7]));
  }
  sync_state(group);
  auto* out = static_cast<uint16_t*>(const_cast<void*>(to.data)) + first + thread / 8 * to.stride_t + column + thread % 8 * 8;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int token = thread / 8 + 16 * i;
    if (token < rows) {
      *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(tile + ptx::tile_byte(C, token, thread % 8 * 8));
    }
    out += 16 * to.stride_t;
  }
}

// D [64, n] (+)= A B over `depth` of K.
template <bool bf16, bool transposed_a, bool transposed_b, int size, class A, class B>
__device__ __forceinline__ void multiply(float (&d)[size], int depth, A a, B b, bool add) {
#pragma unroll
  for (int kk = 0; kk < depth / 16; ++kk) ptx::wgmma_shared<bf16, transposed_a, transposed_b>(d, a(kk), b(kk), add || kk > 0);
}

// dP (part 0) or dA as operand, dbeta.
template <bool bf16, int D, bool decays, int part>
__device__ __forceinline__ void pair_up(const Delta& delta, const Spot& spot, int i, GradientsShared<D>& s) {
  const Engine& e = delta.e;
  const auto& gates = s.gates[i % 2];
  const int thread = own_thread(), warp = thread / 32, lane = thread % 32, row = warp * 16 + lane / 4, stage = i % 2;
  const auto rows_of_tile = [](const char* tile) {
    return [at = ptx::shared_address(tile)](int kk) { return ptx::descriptor_k_major(at, C, kk); };
  };
  float d[32];
  ptx::ring_wait(s.rows_full, stage, i);
  if (part == 1) ptx::barrier_wait(&s.adjoints_full, i & 1);
  ptx::wgmma_fence();
  multiply<bf16, false, false>(d, D, rows_of_tile(part == 0 ? s.dout[stage] : s.adjoints), rows_of_tile(s.residuals[stage]),
                               false);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::hold(d);
  if (part == 1 && delta.dbeta.data != nullptr && lane % 4 == lane / 8) {  // the lanes on the diagonal
    const bool odd = lane / 4 % 2 == 1;
    float x[2] = {};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if (w == warp) {
        x[0] = odd ? d[8 * w + 1] : d[8 * w];
        x[1] = odd ? d[8 * w + 7] : d[8 * w + 6];
      }
    }
    const Rows& to = delta.dbeta;
    const int64_t first = first_of(to, spot) + row * to.stride_t;
    if (row < spot.rows) ptx::store(const_cast<void*>(to.data), to.dtype, first, e.beta_factor * x[0]);
    if (row + 8 < spot.rows) {
      ptx::store(const_cast<void*>(to.data), to.dtype, first + 8 * to.stride_t, e.beta_factor * x[1]);
    }
  }
  weigh<decays, part == 1>(d, gates.decays, warp, lane, false);  // A has no diagonal
  if (i > 0) ptx::barrier_wait(&s.pairs_empty, (i - 1) & 1);
  char* const to = part == 0 ? s.dp : s.da;
  const float* const betas = s.beta[i % 4];
  const float factors[2] = {part == 0 ? e.scale : -betas[row], part == 0 ? e.scale : -betas[row + 8]};
#pragma unroll
  for (int j = 0; j < 32; j += 2) {
    const int r = row + ptx::Fragment::below(j), c = ptx::Fragment{lane}.pair(j);
    const float2 beta = *reinterpret_cast<const float2*>(betas + c);
    const float factor = factors[j / 2 % 2];
    *reinterpret_cast<uint32_t*>(to + ptx::tile_byte(C, r, c)) =
        ptx::pack<bf16>(d[j] * (factor * beta.x), d[j + 1] * (factor * beta.y));
  }
  ptx::fence_async_shared();
  ptx::barrier_arrive(&s.pairs_full);
}

// The sum of S_0 * dS over all elements; both tiles have one layout. Each accumulating warp has its own part: 8 rows times 8
// columns of products of which the diagonal is wanted, whatever elements a lane takes, as long as they are the same of both.
template <bool bf16, int D>
__device__ __forceinline__ void sum_states(const GradientsShared<D>& s, float (&carried)[8]) {
  const int lane = own_thread() % 32, first = threadIdx.x / 128 * 128 + own_thread();  // these groups are the first two
  float d[2][4] = {};
#pragma unroll 4
  for (int i = 0; i < D * D / 2048; ++i) {
    const uint4 x = reinterpret_cast<const uint4*>(s.state)[first + 256 * i];
    const uint4 y = reinterpret_cast<const uint4*>(s.dstate)[first + 256 * i];
    const uint32_t low[4] = {x.x, 0, x.y, 0}, high[4] = {x.z, 0, x.w, 0};  // rows 8 to 15 are nobody's
    ptx::mma<bf16>(d[0], low, y.x, y.y);
    ptx::mma<bf16>(d[1], high, y.z, y.w);
  }
  const bool odd = lane / 4 % 2 == 1;
  float sum = lane % 4 == lane / 8 ? (odd ? d[0][1] + d[1][1] : d[0][0] + d[1][0]) : 0;
  for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
  if (lane == 0) carried[first / 32] = sum;
}

// dg_t = sum over i >= t of what reaches row i less what leaves it, + total <S_0, dS> + sum over j < t of what row j leaves in
// the state; `total` has the unit of dS in it. By one warp.
template <int D>
__device__ __forceinline__ void store_dg(const Delta& delta, const Item& item, float2 g, float total,
                                         const decltype(GradientsShared<D>::dots[0])& dots) {
  const int lane = threadIdx.x % 32;
  float reached[2], left[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = lane + 32 * i;
    left[i] = D == 128 ? dots.written[0][r] + dots.written[1][r] : dots.written[1][r];
    reached[i] = dots.reached[0][r] + dots.reached[1][r];
  }
  // Inclusive sums from behind, and from the front.
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float behind = __shfl_down_sync(0xffffffff, reached[i], step), before = __shfl_up_sync(0xffffffff, left[i], step);
      if (lane + step < 32) reached[i] += behind;
      if (lane >= step) left[i] += before;
    }
  }
  reached[0] += __shfl_sync(0xffffffff, reached[1], 0);
  const float low = __shfl_sync(0xffffffff, left[0], 31);
  float carried = dots.carried[lane % 8];
  for (int step = 1; step < 8; step *= 2) carried += __shfl_xor_sync(0xffffffff, carried, step);
  carried *= total;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = lane + 32 * i;
    float before = __shfl_up_sync(0xffffffff, left[i], 1);
    if (lane == 0) before = 0;
    if (i == 1) before += low;
    const float dg = expf(i == 0 ? g.x : g.y) == 0 ? 0 : reached[i] + carried + before;
    const int64_t t = item.w.begin + static_cast<int64_t>(item.chunk) * C + r;
    if (r < item.rows) {
      ptx::store(const_cast<void*>(delta.dg.data), delta.dg.dtype, row_of(delta.dg, item.w.b, t, item.h), dg);
    }
  }
}

template <bool bf16, int D>
__device__ __forceinline__ void store_dv(const Delta& delta, const Spot& spot, const char* adjoints, const float* beta) {
  const Rows& to = delta.dv;
  const bool wide = has_wide_rows(to);
  const int64_t first = first_of(to, spot);
#pragma unroll 2
  for (int i = own_thread(); i < C * D / 8; i += 128) {
    const int token = i / (D / 8), channel = i % (D / 8) * 8;
    if (token >= spot.rows) continue;
    const uint4 z = *reinterpret_cast<const uint4*>(adjoints + ptx::tile_byte(C, token, channel));
    const uint32_t parts[4] = {z.x, z.y, z.z, z.w};
    const int64_t at = first + token * to.stride_t + channel;
    uint32_t packed[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float2 x = ptx::unpack<bf16>(parts[j]);
      x.x *= beta[token];
      x.y *= beta[token];
      packed[j] = ptx::pack<bf16>(x.x, x.y);
      if (!wide) {
        ptx::store(const_cast<void*>(to.data), to.dtype, at + 2 * j, x.x);
        ptx::store(const_cast<void*>(to.data), to.dtype, at + 2 * j + 1, x.y);
      }
    }
    if (wide) {
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(const_cast<void*>(to.data)) + at) =
          uint4{packed[0], packed[1], packed[2], packed[3]};
    }
  }
}

template <int D>
__device__ void produce(const Delta& delta, GradientsShared<D>& s) {
  constexpr int kTile = D / 64 * kPanel, kSquare = D * D * 2;
  const Engine& e = delta.e;
  // dO, res and K run a chunk ahead of the rest.
  const auto load_rows = [&](const Item& item, int i) {
    const int stage = i % 2, t = static_cast<int>(item.w.begin) + item.chunk * C, b = static_cast<int>(item.w.b);
    ptx::ring_wait_free(s.rows_empty, stage, i);
    ptx::barrier_arrive_expect(&s.rows_full[stage], 3 * kTile);
    ptx::load_box(s.dout[stage], &delta.dout, &s.rows_full[stage], 0, t, 0, item.h, b);
    ptx::load_bytes(s.residuals[stage], delta.residuals + item.image * kTile, kTile, &s.rows_full[stage]);
    ptx::load_box(s.k[stage], &delta.k, &s.rows_full[stage], 0, t, 0, item.h / e.k.group, b);
  };
  const auto load_rest = [&](const Item& item, int i) {
    const int t = static_cast<int>(item.w.begin) + item.chunk * C, b = static_cast<int>(item.w.b);
    if (i >= 1) ptx::barrier_wait(&s.adjoints_empty, (i - 1) & 1);
    ptx::barrier_arrive_expect(&s.adjoints_full, kTile);
    ptx::load_bytes(s.adjoints, delta.adjoints + item.image * kTile, kTile, &s.adjoints_full);
    if (i >= 1) ptx::barrier_wait(&s.states_empty, (i - 1) & 1);
    ptx::barrier_arrive_expect(&s.states_full, 2 * kSquare);
    ptx::load_bytes(s.state, delta.states + item.image * kSquare, kSquare, &s.states_full);
    ptx::load_bytes(s.dstate, delta.dstates + item.image * kSquare, kSquare, &s.states_full);
    if (i >= 1) ptx::barrier_wait(&s.queries_empty, (i - 1) & 1);
    ptx::barrier_arrive_expect(&s.queries_full, kTile);
    ptx::load_box(s.q, &delta.q, &s.queries_full, 0, t, 0, item.h / e.q.group, b);
  };
  int64_t at = blockIdx.x;
  Item item, next;
  bool more = next_item(delta, at, item);
  if (more) load_rows(item, 0);
  for (int i = 0; more; ++i, item = next) {  // in the order in which the places are left
    load_rest(item, i);
    more = next_item(delta, at, next);
    if (more) load_rows(next, i + 1);
  }
}

// dg of all chunks, by one warp.
template <int D>
__device__ void sum_decays(const Delta& delta, GradientsShared<D>& s) {
  const Engine& e = delta.e;
  const float unit = unit_of_scale(e.scale);
  int64_t at = blockIdx.x;
  Item item;
  for (int i = 0; next_item(delta, at, item); ++i) {
    const int stage = i % 2;
    const Numbers numbers = ask_numbers(e.g, item.w, item.h, item.chunk, threadIdx.x % 32);
    ptx::ring_wait(s.dots_full, stage, i);
    const float2 g = take_numbers(numbers, e.g.dtype), gates = take_gates(numbers, e.g.dtype);
    float all = gates.x + gates.y;
    for (int step = 1; step < 32; step *= 2) all += __shfl_xor_sync(0xffffffff, all, step);
    if (delta.dg.data != nullptr) store_dg<D>(delta, item, g, unit * expf(all), s.dots[stage]);
    ptx::barrier_arrive(&s.dots_empty[stage]);
  }
}

// The decays of all groups; dP.
template <bool bf16, int D, bool decays>
__device__ void pair_reads(const Delta& delta, GradientsShared<D>& s) {
  const Engine& e = delta.e;
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const auto ask = [&](const Item& item) {
    if (decays && warp == 0) return ask_numbers(e.g, item.w, item.h, item.chunk, lane);
    return warp == 1 ? ask_numbers(e.beta, item.w, item.h, item.chunk, lane) : Numbers{};
  };
  int64_t at = blockIdx.x;
  Item item, next;
  bool more = next_item(delta, at, item);
  Numbers numbers;
  if (more) numbers = ask(item);
  for (int i = 0;; ++i, item = next) {
    const int stage = i % 2;
    auto& gates = s.gates[stage];
    Spot& spot = s.spots[i % 4];
    if (!more) {
      if (thread == 0) spot.rows = 0;
      ptx::barrier_arrive(&s.gates_full[stage]);
      return;
    }
    if (thread == 0) spot = {item.w.b, item.w.begin + static_cast<int64_t>(item.chunk) * C, item.h, item.rows};
    if (warp == 1) {
      const float2 beta = take_numbers(numbers, e.beta.dtype);
      s.beta[i % 4][lane] = e.beta_factor * beta.x;
      s.beta[i % 4][lane + 32] = e.beta_factor * beta.y;
    }
    if (decays && warp == 0) {
      const Sums G = sum_gates(take_gates(numbers, e.g.dtype), lane);
      gates.read[lane] = expf(G.low);
      gates.read[lane + 32] = expf(G.high);
      gates.write[lane] = expf(G.all - G.low);
      gates.write[lane + 32] = expf(G.all - G.high);
      store_decays(G, lane, gates.decays);
    }
    if (item.rows < C) {  // what lies behind the sequence counts as zero, NaN or not
      constexpr int kPieces = D / 8;
      ptx::ring_wait(s.rows_full, stage, i);
      ptx::barrier_wait(&s.queries_full, i & 1);
      for (int piece = thread; piece < (C - item.rows) * kPieces; piece += 128) {
        const uint32_t at = ptx::tile_byte(C, item.rows + piece / kPieces, piece % kPieces * 8);
        *reinterpret_cast<uint4*>(s.q + at) = uint4{0, 0, 0, 0};
        *reinterpret_cast<uint4*>(s.k[stage] + at) = uint4{0, 0, 0, 0};
        *reinterpret_cast<uint4*>(s.dout[stage] + at) = uint4{0, 0, 0, 0};
      }
      ptx::fence_async_shared();
    }
    ptx::group_sync<1, 128>();
    ptx::barrier_arrive(&s.gates_full[stage]);
    more = next_item(delta, at, next);
    if (more) numbers = ask(next);
    pair_up<bf16, D, decays, 0>(delta, spot, i, s);
    ptx::barrier_arrive(&s.rows_empty[stage]);
  }
}

// dA, dbeta and dV.
template <bool bf16, int D, bool decays>
__device__ void pair_writes(const Delta& delta, GradientsShared<D>& s) {
  for (int i = 0;; ++i) {
    const int stage = i % 2;
    const Spot& spot = s.spots[i % 4];
    ptx::ring_wait(s.gates_full, stage, i);
    if (spot.rows == 0) return;
    pair_up<bf16, D, decays, 1>(delta, spot, i, s);
    ptx::barrier_arrive(&s.rows_empty[stage]);
    if (delta.dv.data != nullptr) store_dv<bf16, D>(delta, spot, s.adjoints, s.beta[i % 4]);
    ptx::barrier_arrive(&s.adjoints_empty);
  }
}

// dQ, dK or both of 64 key channels.
template <bool bf16, int D, bool decays, bool queries, bool keys>
__device__ void accumulate(const Delta& delta, int panel, GradientsShared<D>& s) {
  const Engine& e = delta.e;
  const int group = threadIdx.x / 128;
  const float unit = unit_of_scale(e.scale);    // of dS
  const auto tokens_k = [](const char* tile) {  // rows are M or N
    return
        [first = ptx::descriptor_k_major(ptx::shared_address(tile), C, 0)](int kk) { return ptx::step_k_major(first, C, kk); };
  };
  const auto tokens_mn = [](const char* tile) {  // rows are summed over
    return
        [first = ptx::descriptor_mn_major(ptx::shared_address(tile), C, 0)](int kk) { return ptx::step_mn_major(first, kk); };
  };
  const auto values_mn = [](const char* tile) {
    return
        [first = ptx::descriptor_mn_major(ptx::shared_address(tile), D, 0)](int kk) { return ptx::step_mn_major(first, kk); };
  };
  const char* const q_panel = s.q + panel * kPanel;
  const char *const state = s.state + panel * D * 128, *const dstate = s.dstate + panel * D * 128;
  for (int i = 0;; ++i) {
    const int stage = i % 2;
    const auto& gates = s.gates[stage];
    const Spot& spot = s.spots[i % 4];
    const char* const k_panel = s.k[stage] + panel * kPanel;
    auto& dots = s.dots[stage];
    float reached[2] = {};
    float dq[32], dk[32], rest[32];  // rest: what the chunk writes into the state, then dP^T Q + dA^T K
    ptx::ring_wait(s.gates_full, stage, i);
    if (spot.rows == 0) return;
    ptx::ring_wait(s.rows_full, stage, i);
    ptx::barrier_wait(&s.adjoints_full, i & 1);
    ptx::barrier_wait(&s.states_full, i & 1);
    ptx::wgmma_fence();
    if constexpr (keys) {
      multiply<bf16, false, true>(dk, D, tokens_k(s.adjoints), values_mn(state), false);
      multiply<bf16, false, true>(rest, D, tokens_k(s.residuals[stage]), values_mn(dstate), false);
      ptx::wgmma_commit();
    }
    if constexpr (queries) {
      multiply<bf16, false, true>(dq, D, tokens_k(s.dout[stage]), values_mn(state), false);
      ptx::wgmma_commit();
    }
    if constexpr (decays) {
      ptx::ring_wait_free(s.dots_empty, stage, i);
      sum_states<bf16, D>(s, dots.carried);
    }
    if constexpr (keys) {
      ptx::wgmma_wait<queries ? 1 : 0>();
      ptx::hold(dk);
      ptx::hold(rest);
      ptx::barrier_arrive(&s.adjoints_empty);
      float dot[2] = {};
      if constexpr (decays) dot_rows<bf16>(rest, k_panel, dot);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = own_row() + 8 * half;
        const float beta = s.beta[i % 4][row], write = unit * (decays ? gates.write[row] * beta : beta);
        const float read = decays ? -gates.read[row] * beta : -beta;
        dot[half] *= write;
        reached[half] = -dot[half];
#pragma unroll
        for (int j = 2 * half; j < 32; j += 4) {
          dk[j] = fmaf(read, dk[j], write * rest[j]);
          dk[j + 1] = fmaf(read, dk[j + 1], write * rest[j + 1]);
        }
      }
      if constexpr (decays) store_dots(dot, dots.written[group]);
    } else {
      ptx::barrier_arrive(&s.adjoints_empty);
    }
    if constexpr (queries) {
      ptx::wgmma_wait<0>();
      ptx::hold(dq);
    }
    ptx::barrier_arrive(&s.states_empty);
    ptx::barrier_arrive(&s.rows_read);
    if constexpr (queries) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float read = decays ? e.scale * gates.read[own_row() + 8 * half] : e.scale;
#pragma unroll
        for (int j = 2 * half; j < 32; j += 4) {
          dq[j] *= read;
          dq[j + 1] *= read;
        }
      }
    }
    ptx::barrier_wait(&s.pairs_full, i & 1);
    ptx::barrier_wait(&s.queries_full, i & 1);
    if constexpr (queries) ptx::hold(dq);
    if constexpr (keys) ptx::hold(dk);
    ptx::wgmma_fence();
    if constexpr (keys) multiply<bf16, false, true>(dk, C, tokens_k(s.da), tokens_mn(k_panel), true);
    if constexpr (queries) multiply<bf16, false, true>(dq, C, tokens_k(s.dp), tokens_mn(k_panel), true);
    ptx::wgmma_commit();
    if constexpr (keys) {
      multiply<bf16, true, true>(decays ? rest : dk, C, tokens_mn(s.dp), tokens_mn(q_panel), !decays);
      multiply<bf16, true, true>(decays ? rest : dk, C, tokens_mn(s.da), tokens_mn(k_panel), true);
      ptx::wgmma_commit();
    }
    if constexpr (decays) {
      ptx::wgmma_wait<keys ? 1 : 0>();
      if constexpr (queries) {
        ptx::hold(dq);
        dot_rows<bf16>(dq, q_panel, reached);
      }
    }
    ptx::wgmma_wait<0>();
    if constexpr (queries) ptx::hold(dq);
    if constexpr (keys) {
      ptx::hold(dk);
      if constexpr (decays) ptx::hold(rest);
    }
    ptx::barrier_arrive(&s.pairs_empty);
    ptx::barrier_arrive(&s.queries_empty);
    if constexpr (decays) {
      if constexpr (keys) {  // dP^T Q + dA^T K leaves a row, the rest reaches it
#pragma unroll
        for (int j = 0; j < 32; ++j) dk[j] -= rest[j];
        dot_rows<bf16>(dk, k_panel, reached);
#pragma unroll
        for (int j = 0; j < 32; ++j) dk[j] = fmaf(2, rest[j], dk[j]);
      }
      store_dots(reached, dots.reached[group]);
      ptx::barrier_arrive(&s.dots_full[stage]);
    }
    // Both groups are through with dO and res; the pairs too. No named barrier: at D = 64 the groups run different code.
    ptx::barrier_wait(&s.rows_read, i & 1);
    if (queries && delta.dq.data != nullptr) {
      store_gradient<bf16>(delta.dq, spot, 64 * panel, dq, s.dout[stage] + panel * kPanel, group);
    }
    if (keys && delta.dk.data != nullptr) {
      store_gradient<bf16>(delta.dk, spot, 64 * panel, dk, s.residuals[stage] + panel * kPanel, group);
    }
    ptx::fence_async_shared();
    ptx::barrier_arrive(&s.rows_empty[stage]);
  }
}

template <bool bf16, int D, bool decays>
__device__ void gradients(const Delta& delta) {
  extern __shared__ char memory[];
  static_assert(sizeof(GradientsShared<D>) + 1024 <= gradients_shared_bytes(D) && gradients_shared_bytes(D) <= 232448);
  auto& s = ptx::shared_as<GradientsShared<D>>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      ptx::barrier_init(&s.rows_full[i], 1);
      ptx::barrier_init(&s.rows_empty[i], 512);
      ptx::barrier_init(&s.gates_full[i], 128);
      ptx::barrier_init(&s.dots_full[i], 256);
      ptx::barrier_init(&s.dots_empty[i], 32);
    }
    ptx::barrier_init(&s.adjoints_full, 1);
    ptx::barrier_init(&s.adjoints_empty, 384);
    ptx::barrier_init(&s.queries_full, 1);
    ptx::barrier_init(&s.queries_empty, 256);
    ptx::barrier_init(&s.states_full, 1);
    ptx::barrier_init(&s.states_empty, 256);
    ptx::barrier_init(&s.pairs_full, 256);
    ptx::barrier_init(&s.pairs_empty, 256);
    ptx::barrier_init(&s.rows_read, 256);
    ptx::barrier_init_fence();
  }
  __syncthreads();
  // Registers: 65536 of the multiprocessor over 640 threads, 96 each, in multiples of 8; three sums of 32 at a time.
  const int role = threadIdx.x / 128;
  if (role < 2) {
    ptx::more_registers<D == 128 ? 144 : 136>();
    if constexpr (D == 128) {
      accumulate<bf16, D, decays, true, true>(delta, role, s);
    } else if (role == 0) {
      accumulate<bf16, D, decays, true, false>(delta, 0, s);
    } else {
      accumulate<bf16, D, decays, false, true>(delta, 0, s);
    }
  } else if (role == 2) {
    ptx::fewer_registers<80>();
    pair_reads<bf16, D, decays>(delta, s);
  } else if (role == 3) {
    ptx::fewer_registers<80>();
    pair_writes<bf16, D, decays>(delta, s);
  } else {
    ptx::fewer_registers<D == 128 ? 32 : 48>();
    if (threadIdx.x % 128 == 0) produce<D>(delta, s);
    if (decays && threadIdx.x % 128 / 32 == 1) sum_decays<D>(delta, s);
  }
}

}  // namespace

#define LINNET_GRADIENTS(name, bf16, D, decays)                                                    \
  extern "C" __global__ void __launch_bounds__(640, 1) name(const __grid_constant__ Delta delta) { \
    gradients<bf16, D, decays>(delta);                                                             \
  }
LINNET_GRADIENTS(gradients_64, true, 64, false)
LINNET_GRADIENTS(gradients_64_decay, true, 64, true)
LINNET_GRADIENTS(gradients_128, true, 128, false)
LINNET_GRADIENTS(gradients_128_decay, true, 128, true)

}  // namespace linnet::cuda
