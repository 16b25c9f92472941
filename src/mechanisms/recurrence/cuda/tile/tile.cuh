// The recurrence without beta on matrix units, 16-bit operands, K and V of 64 or 128: one block per (sequence, head) walks
// chunks of 64 tokens, and the state never leaves the registers.
//
// Everything is transposed: rows are value channels, columns are tokens or key channels.
//
//   O^T = scale (S^T Q^T * read + V^T P^T),   S^T = total S^T + (V * write)^T K,   P = tril(Q K^T * D)
//
//   producer    one thread: Q, K, V of the next chunks by the copy engine, three stages
//   state       a warpgroup for each 64 value channels: S^T in f32 accumulators, and rounded as the A operand of its own read
//   auxiliary   a warpgroup, one chunk ahead: decays and P
//
// Decays: r_i is the sum of g from the state that comes in to row i, in the order of the walk; then read_i = exp(r_i),
// write_j = exp(r_C - r_j), D_ij = exp(r_i - r_j), total = exp(r_C). Where no r of a chunk is far from its middle one, m, the
// chunk costs what one without decays costs (bf16, whose range allows it):
//
//   O^T = scale (S_m^T Q^T + U^T P^T) * exp(r - m),   S^T = exp(r_C - m) (S_m^T + U^T K),   S_m = exp(m) S, U = V * exp(m - r)
//
// In reverse time the chunks are walked from the last one, and P keeps the other triangle. f16: a row of S^T, and all of P, are
// operands in units of a power of two, so that no sum overflows the type.
//
// Bytes per token and head: 2 (2 K + 2 V); at 16,2048,16,128 0.128 ms of an H200's copy bandwidth, against 0.07 ms of products.
#pragma once

#include "mechanisms/recurrence/cuda/tile/decays.cuh"
#include "mechanisms/recurrence/cuda/tile/rows.cuh"

namespace linnet::cuda {
namespace {

struct alignas(16) Gates {
  float read[C], write[C];      // factors of the chunk's rows
  float weight[C];              // steps: their sizes
  float before, middle, after;  // of S: before it is read, before it is written to; what is then left to the state
  float out;                    // the result's, the units of P included
  int strong;                   // decays too far apart for one reference: between rows they stand in P
  Decays decays;                // the auxiliary's own
  float part[4];                // the largest of P in each warp
};

template <int K, int V>
struct Shared {
  alignas(1024) char q[kStages][K / 64 * kPanel];
  char k[kStages][K / 64 * kPanel];
  char v[kStages][V / 64 * kPanel];
  char p[2][kPanel];
  char o[2][V / 64][kPanel];
  Gates gates[2];
  uint64_t full[kStages], empty[kStages], p_full[2], p_empty[2];
};

// Whether a walk reads: not where only the states that segments leave are wanted, or those that it keeps.
__device__ __forceinline__ bool has_reads(const Tile& tile) { return tile.phase != 1 && tile.e.out.data != nullptr; }

template <int K, int V>
__device__ void produce(const Tile& tile, const Walk& w, int h, Shared<K, V>& s) {
  const Engine& e = tile.e;
  const bool reads = has_reads(tile);
  constexpr uint32_t kWritten = (K + V) / 64 * kPanel, kRead = K / 64 * kPanel;
  ptx::prefetch_map(&tile.q);
  ptx::prefetch_map(&tile.k);
  ptx::prefetch_map(&tile.v);
  const int q_head = h / e.q.group, k_head = h / e.k.group, v_head = h / e.v.group, b = static_cast<int>(w.b);
  for (int i = 0; i < w.count; ++i) {
    const int stage = i % kStages;
    ptx::ring_wait_free(s.empty, stage, i);
    const int t = static_cast<int>(w.begin) + (e.reverse ? w.first - i : w.first + i) * C;
    ptx::barrier_arrive_expect(&s.full[stage], kWritten + (reads ? kRead : 0));
    ptx::load_box(s.k[stage], &tile.k, &s.full[stage], 0, t, 0, k_head, b);
    if (reads) ptx::load_box(s.q[stage], &tile.q, &s.full[stage], 0, t, 0, q_head, b);
    ptx::load_box(s.v[stage], &tile.v, &s.full[stage], 0, t, 0, v_head, b);
  }
}

template <bool bf16, int K, int V, bool decays, bool steps>
__device__ void assist(const Tile& tile, const Walk& w, int h, Shared<K, V>& s) {
  const Engine& e = tile.e;
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  Numbers next_gates;
  if (decays && warp == 0) next_gates = ask_numbers(e.g, w, h, w.first, lane);
  const float rate = steps ? e.steps.A[h * e.steps.stride_A] : 0, bias = steps ? step_bias(e.steps, h) : 0;
  float frame = 0;
  for (int i = 0; i < w.count; ++i) {
    const int stage = i % kStages, slot = i % 2, chunk = e.reverse ? w.first - i : w.first + i;
    const int rows = static_cast<int>(min(static_cast<int64_t>(C), w.length - static_cast<int64_t>(chunk) * C));
    Gates& gates = s.gates[slot];
    ptx::ring_wait_free(s.p_empty, slot, i);
    if constexpr (decays) {
      if (warp == 0) {
        float delta[2] = {1, 1};
        float2 g = take_gates(next_gates, e.g.dtype);
        if constexpr (steps) {
          const float2 dt = take_numbers(next_gates, e.g.dtype);
          delta[0] = lane < rows ? step_size<true>(e.steps, dt.x + bias) : 0;
          delta[1] = lane + 32 < rows ? step_size<true>(e.steps, dt.y + bias) : 0;
          g = {fmaxf(step_decay(delta[0], rate), kLeastGate), fmaxf(step_decay(delta[1], rate), kLeastGate)};
          gates.weight[lane] = delta[0];
          gates.weight[lane + 32] = delta[1];
        }
        const Sums G = sum_gates(g, lane);
        next_gates = ask_numbers(e.g, w, h, e.reverse ? chunk - 1 : chunk + 1, lane);
        const float r[2] = {e.reverse ? G.all - G.low : G.low, e.reverse ? G.all - G.high : G.high};
        // The state is exp(frame) S. S stays as it is while all of the chunk is near it, else it is moved to the middle row; a
        // state that is kept is kept as it comes in.
        const bool weak = bf16 && tile.phase != 1;
        const auto near = [&](float m) {
          const float most = fmaxf(fmaxf(fabsf(r[0] - m), fabsf(r[1] - m)), fmaxf(fabsf(m), fabsf(G.all - m)));
          return weak && __all_sync(0xffffffff, most < kFarGate);
        };
        float m = -frame;
        bool strong = e.saved != nullptr || !near(m);
        if (strong) {
          m = e.saved != nullptr ? 0 : __shfl_sync(0xffffffff, r[0], 31);
          strong = !near(m);
          if (strong) m = 0;
        }
        const float last = strong ? G.all : m;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          gates.read[lane + 32 * j] = expf(r[j] - m);
          gates.write[lane + 32 * j] = expf(last - r[j]) * (e.steps.role == StepRole::writes ? delta[j] : 1);
        }
        if (strong) store_decays(G, lane, gates.decays);
        if (lane == 0) {
          gates.before = frame + m == 0 ? 1 : expf(frame + m);
          gates.middle = expf(last - m);
          gates.after = expf(G.all - last);
          gates.strong = strong;
        }
        frame = G.all - last;
      }
    }
    float p[32];
    if (has_reads(tile)) {
      ptx::ring_wait(s.full, stage, i);
      const uint64_t q = ptx::descriptor_k_major(ptx::shared_address(s.q[stage]), C, 0);
      const uint64_t k = ptx::descriptor_k_major(ptx::shared_address(s.k[stage]), C, 0);
      ptx::wgmma_fence();
#pragma unroll
      for (int kk = 0; kk < K / 16; ++kk) {
        ptx::wgmma_shared<bf16, false, false>(p, ptx::step_k_major(q, C, kk), ptx::step_k_major(k, C, kk), kk > 0);
      }
      ptx::wgmma_commit();
      const int row = warp * 16 + lane / 4;
      if constexpr (decays) ptx::group_sync<1, 128>();  // the sums
      ptx::wgmma_wait<0>();
      ptx::hold(p);
      if (decays && (!bf16 || gates.strong)) {
        weigh<decays, false>(p, gates.decays, warp, lane, e.reverse);
        if (steps && e.steps.role == StepRole::writes) {
#pragma unroll
          for (int j = 0; j < 32; ++j) p[j] *= gates.weight[ptx::Fragment{lane}.column(j)];
        }
      } else {
        weigh<false, false>(p, gates.decays, warp, lane, e.reverse);
      }
      if (e.reverse && rows < C) {  // columns behind the sequence, which such rows would see
#pragma unroll
        for (int j = 0; j < 32; ++j) p[j] = ptx::Fragment{lane}.column(j) < rows ? p[j] : 0;
      }
      float unit = 1;
      if constexpr (!bf16) {  // P / unit is at most 2^14
        float largest = 0;
#pragma unroll
        for (int j = 0; j < 32; ++j) largest = fmaxf(largest, row + ptx::Fragment::below(j) < rows ? fabsf(p[j]) : 0);
        for (int step = 1; step < 32; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, step));
        if (lane == 0) gates.part[warp] = largest;
        ptx::group_sync<1, 128>();
        largest = fmaxf(fmaxf(gates.part[0], gates.part[1]), fmaxf(gates.part[2], gates.part[3]));
        if (largest > 0x1p14f) unit = exp2f(fminf(ceilf(log2f(largest)) - 14, 100));
      }
      if (thread == 0) gates.out = e.scale * unit;
      const float down = 1 / unit;
#pragma unroll
      for (int j = 0; j < 32; j += 2) {
        const int r = row + ptx::Fragment::below(j), c = ptx::Fragment{lane}.pair(j);
        *reinterpret_cast<uint32_t*>(s.p[slot] + ptx::tile_byte(C, r, c)) = ptx::pack<bf16>(p[j] * down, p[j + 1] * down);
      }
      ptx::fence_async_shared();
      ptx::barrier_arrive(&s.empty[stage]);
    }
    ptx::barrier_arrive(&s.p_full[slot]);
  }
}

template <bool bf16, int K, int V, bool decays, bool steps, bool back>
__device__ void carry(const Tile& tile, const Walk& w, bool late, int64_t n, int h, int segment, Shared<K, V>& s) {
  const Engine& e = tile.e;
  const int group = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const int row = group * 64 + warp * 16 + lane / 4;  // of S^T: this value channel and the one 8 below
  const bool reads = has_reads(tile);
  constexpr int kState = K / 2;
  float S[kState];

  // Elements of a state [K, V]: j-th register of this thread.
  const auto element = [&](const States& states, int j) -> float& {
    const int channel = ptx::Fragment{lane}.column(j), value = row + ptx::Fragment::below(j);
    return states.data[n * states.stride_n + h * states.stride_h + channel * states.stride_row + value * states.stride_column];
  };
  const auto saved = [&](int number) { return tile.states + ((number * e.N + n) * e.H + h) * K * V + group * 64 * K + thread; };
  if (segment > 0 && tile.phase == 2) {
#pragma unroll
    for (int j = 0; j < kState; ++j) S[j] = saved(segment - 1)[128 * j];
  } else {
    const bool given = e.initial.data != nullptr && w.starts;
#pragma unroll
    for (int j = 0; j < kState; ++j) S[j] = given ? e.in_factor * element(e.initial, j) : 0;
  }

  float all = 1;    // phase 1: the product of the chunks' decays
  float frame = 1;  // times S^T is the state
  const RowPlace out_place = place_of(e.out, w, h, group);
  RowPlace z_place = {};
  float skip[2] = {};
  if constexpr (steps) {
    z_place = place_of(back ? e.back.x : e.finish.z, w, h, group);
    skip[0] = skip_of(e.finish, h, row);
    skip[1] = skip_of(e.finish, h, row + 8);
  }
  float dD[2] = {};
  for (int i = 0; i < w.count; ++i) {
    const int stage = i % kStages, slot = i % 2, chunk = e.reverse ? w.first - i : w.first + i;
    const int rows = static_cast<int>(min(static_cast<int64_t>(C), w.length - static_cast<int64_t>(chunk) * C));
    const Gates& gates = s.gates[slot];
    const uint32_t v = ptx::shared_address(s.v[stage]) + group * kPanel;
    const uint64_t q = ptx::descriptor_k_major(ptx::shared_address(s.q[stage]), C, 0);
    const uint64_t k = ptx::descriptor_mn_major(ptx::shared_address(s.k[stage]), C, 0);
    const uint64_t p = ptx::descriptor_k_major(ptx::shared_address(s.p[slot]), C, 0);

    bool strong = false;
    if constexpr (decays) {
      ptx::ring_wait(s.p_full, slot, i);
      strong = !bf16 || __any_sync(0xffffffff, gates.strong);
      const float factor = gates.before;
      if (__any_sync(0xffffffff, factor != 1)) {
#pragma unroll
        for (int j = 0; j < kState; ++j) S[j] *= factor;
      }
      frame = gates.after;
    }
    // S^T as operand. f16: each row in units of a power of two.
    float O[32], units[2] = {1, 1};
    uint32_t A[kState / 2];
    const bool keeps = e.saved != nullptr && tile.phase != 1;
    if (reads || keeps) {
      if constexpr (!bf16) {
        float largest[2] = {};
#pragma unroll
        for (int j = 0; j < kState; ++j) largest[j / 2 % 2] = fmaxf(largest[j / 2 % 2], fabsf(S[j]));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          for (int step = 1; step < 4; step *= 2) {
            largest[half] = fmaxf(largest[half], __shfl_xor_sync(0xffffffff, largest[half], step));
          }
          if (largest[half] > 0x1p14f) units[half] = exp2f(fminf(ceilf(log2f(largest[half])) - 14, 100));
        }
      }
      const float down[2] = {1 / units[0], 1 / units[1]};
#pragma unroll
      for (int j = 0; j < kState; j += 2) {
        const float factor = bf16 ? 1 : down[j / 2 % 2];
        A[j / 2] = ptx::pack<bf16>(S[j] * factor, S[j + 1] * factor);
      }
    }
    if (keeps && e.saved_transposed) {
      save_transposed<K, V>(e, saved_slot(e, n, w.begin, chunk), h, group, A);
    } else if (keeps) {
      save_operand<K, V>(e, saved_slot(e, n, w.begin, chunk), h, group, A, units, row, lane);
    }
    ptx::ring_wait(s.full, stage, i);
    if (reads) {
      ptx::hold(A);
      ptx::wgmma_fence();
#pragma unroll
      for (int kk = 0; kk < K / 16; ++kk) {
        ptx::wgmma<bf16, false>(O, A + 4 * kk, ptx::step_k_major(q, C, kk), kk > 0);
      }
      ptx::wgmma_commit();
    }
    if (rows < C) clear_rows<K, V>(s.k[stage], s.v[stage], rows, group * 128 + thread);
    // V^T as operand, times the decays: 16 tokens x this warp's 16 channels at a time.
    if constexpr (!decays) ptx::ring_wait(s.p_full, slot, i);
    uint32_t values[4][4];
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
      const int token = 16 * kk + lane / 16 * 8 + lane % 8, channel = 16 * warp + lane / 8 % 2 * 8;
      ptx::load_matrices_transposed(values[kk], v + ptx::tile_byte(C, token, channel));
      if constexpr (decays) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 factor = *reinterpret_cast<const float2*>(&gates.write[ptx::Fragment{lane}.operand_pair(kk, j)]);
          const float2 x = ptx::unpack<bf16>(values[kk][j]);
          values[kk][j] = ptx::pack<bf16>(x.x * factor.x, x.y * factor.y);
        }
      }
    }
    const bool scaled = strong || !bf16;  // the read's sum changes before P's is added to it
    if (scaled) {
      if (reads) {
        ptx::wgmma_wait<0>();
        ptx::hold(O);
        const float up = bf16 ? 1 : e.scale / gates.out;  // 1 / unit of P
#pragma unroll
        for (int j = 0; j < 32; ++j) {
          float factor = decays ? gates.read[ptx::Fragment{lane}.column(j)] : 1;
          if (!bf16) factor *= up * units[j / 2 % 2];
          O[j] *= factor;
        }
        ptx::hold(O);
      }
      if constexpr (decays) {
        const float total = gates.middle;
        all *= total;
#pragma unroll
        for (int j = 0; j < kState; ++j) S[j] *= total;
      }
    }
    ptx::hold(S);
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) ptx::hold(values[kk]);
    ptx::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
      ptx::wgmma<bf16, true>(S, values[kk], ptx::step_mn_major(k, kk), true);
    }
    if (reads) {
      if (strong) {  // V itself, where the registers hold its decayed form
#pragma unroll
        for (int kk = 0; kk < 4; ++kk) {
          ptx::wgmma_shared<bf16, true, false>(O, ptx::descriptor_mn_major(v, C, kk), ptx::step_k_major(p, C, kk), true);
        }
      } else {
#pragma unroll
        for (int kk = 0; kk < 4; ++kk) ptx::wgmma<bf16, false>(O, values[kk], ptx::step_k_major(p, C, kk), true);
      }
    }
    ptx::wgmma_commit();
    uint4 z[4] = {};
    if (steps && reads && (back || e.finish.z.data != nullptr)) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint16_t* from = z_place.at + (chunk * (C / 16) + j) * z_place.distance;
        if (16 * j + thread / 8 < rows) z[j] = *reinterpret_cast<const uint4*>(from);
      }
    }
    ptx::wgmma_wait<0>();
    ptx::hold(S);
    const float out = reads ? gates.out : 1;
    if (reads) {
      ptx::hold(O);
      if constexpr (decays) {
#pragma unroll
        for (int j = 0; j < 32; j += 4) {
          const float2 read = *reinterpret_cast<const float2*>(&gates.read[ptx::Fragment{lane}.pair(j)]);
          float2 factor = {strong ? out : read.x * out, strong ? out : read.y * out};
          if (steps && e.steps.role == StepRole::results) {
            factor.x *= gates.weight[ptx::Fragment{lane}.pair(j)];
            factor.y *= gates.weight[ptx::Fragment{lane}.pair(j) + 1];
          }
          O[j] *= factor.x;
          O[j + 1] *= factor.y;
          O[j + 2] *= factor.x;
          O[j + 3] *= factor.y;
        }
      }
      if constexpr (back) {
        float* dots = e.back.dots + ((w.b * e.H + h) * (V / 16) + group * 4 + warp) * e.T + w.begin + chunk * C;
        finish_steps<bf16>(O, z, skip, gates.weight, v, s.o[slot][group], group, rows, dD, dots);
      } else if constexpr (steps) {
        if (e.finish.D != nullptr) add_skip<bf16>(O, skip, v, warp, lane);
      }
    }
    ptx::barrier_arrive(&s.empty[stage]);
    ptx::barrier_arrive(&s.p_empty[slot]);
    if (reads) {
      const bool gate = steps && !back && e.finish.z.data != nullptr;
      store_rows<bf16, steps && !back>(out_place, group, chunk, rows, O, decays ? 1 : out, s.o[slot][group], z, gate);
    }
  }
  if constexpr (decays) {
#pragma unroll
    for (int j = 0; j < kState; ++j) S[j] *= frame;
  }

  if (tile.phase == 1) {
    if (w.ends || w.count == 0) return;  // nobody starts from there
#pragma unroll
    for (int j = 0; j < kState; ++j) saved(segment)[128 * j] = S[j];
    if (group == 0 && thread == 0) tile.decays[(segment * e.N + n) * e.H + h] = late ? 0 : all;
    return;
  }
  if (e.final.data != nullptr && w.ends) {
#pragma unroll
    for (int j = 0; j < kState; ++j) element(e.final, j) = e.out_factor * S[j];
  }
  if constexpr (back) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      dD[half] += __shfl_xor_sync(0xffffffff, dD[half], 1);
      dD[half] += __shfl_xor_sync(0xffffffff, dD[half], 2);
      if (lane % 4 == 0) e.back.dD[((h * e.N + n) * gridDim.y + segment) * V + row + 8 * half] = dD[half];
    }
  }
}

// The state that a segment leaves begins where the decays from there to its end leave something: whether chunks were left out.
// By all threads of the block; `sums`: of the chunks' decays, in shared memory.
template <int threads, bool steps>
__device__ bool skip_forgotten(const Engine& e, int h, Walk& w, float* sums) {
  const float rate = steps ? e.steps.A[h * e.steps.stride_A] : 0, bias = steps ? step_bias(e.steps, h) : 0;
  const int lane = threadIdx.x % 16;
  for (int turn = 0; turn < w.count; turn += threads / 16) {  // 16 threads have a chunk
    const int i = turn + threadIdx.x / 16;
    const int64_t first = static_cast<int64_t>(e.reverse ? w.first - i : w.first + i) * C + lane;
    float g[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int64_t t = first + 16 * j;
      g[j] = 0;
      if (i < w.count && t < w.length) g[j] = ptx::load(e.g.data, e.g.dtype, row_of(e.g, w.b, w.begin + t, h));
      if (steps && i < w.count && t < w.length) g[j] = step_decay(step_size<true>(e.steps, g[j] + bias), rate);
    }
    float sum = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) sum += fmaxf(g[j], kLeastGate);
#pragma unroll
    for (int step = 1; step < 16; step *= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
    if (lane == 0 && i < w.count) sums[i] = sum;
  }
  __syncthreads();
  int from = w.count - 1;
  for (float left = 0; from > 0; --from) {
    left += sums[from];
    if (left < kLeastGate) break;
  }
  if (from <= 0) return false;
  w.first += e.reverse ? -from : from;
  w.count -= from;
  return true;
}

template <bool bf16, int K, int V, bool decays, bool steps, bool back>
__device__ void tile_kernel(const Tile& tile) {
  extern __shared__ char memory[];
  static_assert(sizeof(Shared<K, V>) + 1024 <= tile_shared_bytes(K, V));
  auto& s = ptx::shared_as<Shared<K, V>>(memory);
  const int h = blockIdx.x % tile.e.H, segment = blockIdx.y;
  const int64_t n = blockIdx.x / tile.e.H;
  constexpr int kGroups = V / 64, kConsumers = 128 * kGroups;
  const bool reads = has_reads(tile);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::barrier_init(&s.full[i], 1);
      ptx::barrier_init(&s.empty[i], kConsumers + (reads ? 128 : 0));
    }
    for (int i = 0; i < 2; ++i) {
      ptx::barrier_init(&s.p_full[i], 128);
      ptx::barrier_init(&s.p_empty[i], kConsumers);
    }
    ptx::barrier_init_fence();
  }
  Walk w = walk_of(tile.e, n, segment);
  bool late = false;
  if (decays && tile.phase == 1) {
    static_assert(2 * kSegment / C <= C);
    late = skip_forgotten<tile_threads(V), steps>(tile.e, h, w, s.gates[0].read);
  }
  __syncthreads();
  // Registers: 65536 of the multiprocessor over 512 threads of one block, or over 384 threads of one (K = 128) or two.
  constexpr bool two = kGroups == 1 && K == 64;
  const int role = threadIdx.x / 128;
  if (role == 0) {
    ptx::fewer_registers<24>();
    if (threadIdx.x == 0) produce<K, V>(tile, w, h, s);
  } else if (role <= kGroups) {
    ptx::more_registers<kGroups == 2 ? 192 : two ? 136 : 240>();
    carry<bf16, K, V, decays, steps, back>(tile, w, late, n, h, segment, s);
  } else {
    if constexpr (kGroups == 2) {
      ptx::fewer_registers<104>();
    } else if constexpr (!two) {
      ptx::more_registers<240>();
    }
    assist<bf16, K, V, decays, steps>(tile, w, h, s);
  }
}

}  // namespace

// steps: decays and weights of mamba_ssd, and what becomes of its result (Engine::steps, Engine::finish).
// back: what ends the walk of its dv (Engine::back).
#define LINNET_TILE(name, bf16, K, V, decays) LINNET_TILE_STEPS(name, bf16, K, V, decays, false, false)
#define LINNET_TILE_STEPS(name, bf16, K, V, decays, steps, back)                            \
  extern "C" __global__ void __launch_bounds__(tile_threads(V), V == 64 && K == 64 ? 2 : 1) \
      name(const __grid_constant__ Tile tile) {                                             \
    tile_kernel<bf16, K, V, decays, steps, back>(tile);                                     \
  }
// Those of mamba_ssd: both types, all widths.
#define LINNET_TILES_OF_SSD(prefix, back)                                    \
  LINNET_TILE_STEPS(prefix##_bf16_64_64, true, 64, 64, true, true, back)     \
  LINNET_TILE_STEPS(prefix##_bf16_64_128, true, 64, 128, true, true, back)   \
  LINNET_TILE_STEPS(prefix##_bf16_128_64, true, 128, 64, true, true, back)   \
  LINNET_TILE_STEPS(prefix##_bf16_128_128, true, 128, 128, true, true, back) \
  LINNET_TILE_STEPS(prefix##_f16_64_64, false, 64, 64, true, true, back)     \
  LINNET_TILE_STEPS(prefix##_f16_64_128, false, 64, 128, true, true, back)   \
  LINNET_TILE_STEPS(prefix##_f16_128_64, false, 128, 64, true, true, back)   \
  LINNET_TILE_STEPS(prefix##_f16_128_128, false, 128, 128, true, true, back)

}  // namespace linnet::cuda
