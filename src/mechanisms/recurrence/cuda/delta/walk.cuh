// The delta rules on matrix units (16-bit operands, K = V of 64 or 128): the walk of tile/tile.cuh with the triangular
// system of a chunk (docs/notes/recurrence.md), everything transposed. T is there already
// (prepare.cu).
//
//   U = S^T K^T * read     Y = V^T - U     N = Y T^T
//   S^T = total S^T + (N * write) K        O^T = scale (S^T Q^T * read + N P^T)
//
//   producer    one thread: Q, K, V and T of the next chunks by the copy engine
//   state       a warpgroup for each 64 value channels: three waits per chunk
//   auxiliary   a warpgroup, ahead of the state: decays and P = tril(Q K^T D)
//
// T, Y, P and N are operands in tf32: in bf16 they alone would cost more than the tolerance (with keys that are alike, four
// times as much). f16 has as many bits as tf32 and a tighter tolerance: there Y and N * write are two operands each, the second
// what the first leaves, and rows of S^T and N are in units of a power of two, so that no sum overflows the type.
//
// Products per chunk, D = 128: 12 of 64 x 64 x 128 where tf32 counts twice; at 16,2048,16,128 0.147 ms of an H200's matrix
// units.
//
// Long sequences are cut in segments (delta.h): a first walk without Q finds what each leaves of a zero state, B,
// and what it multiplies a state by, A (the state that it leaves of the identity, without V). Where the decays forget
// everything before the segment's last chunks, it starts there, and A is zero. Without decays, where all of A and B is needed,
// the first segment is walked in full along with these: it waits for nothing.
#pragma once

#include "mechanisms/recurrence/cuda/delta/delta.cuh"

namespace linnet::cuda {
namespace {

struct alignas(16) DeltaGates {
  float read[C], write[C];
  float out[C];           // read times the scale
  float inverse_beta[C];  // for the record
  Decays decays;
  float total;
};

template <int D>
struct DeltaShared {
  alignas(1024) char q[delta_stages(D)][D / 64 * kPanel];
  char k[delta_stages(D)][D / 64 * kPanel];
  char v[delta_stages(D)][D / 64 * kPanel];               // at last the chunk's output
  char t[2][2 * kPanel], p[delta_scores(D)][2 * kPanel];  // f32, paired columns
  DeltaGates gates[2];
  Walk walk;  // here, and not in registers that the state needs
  uint64_t full[delta_stages(D)], empty[delta_stages(D)], t_full[2], t_empty[2], p_full[delta_scores(D)],
      p_empty[delta_scores(D)];
};

// Q, K, V and T of the i-th chunk, by one thread.
template <int D, bool reads>
__device__ __forceinline__ void load_delta(const Delta& delta, int64_t n, int h, bool map, int i, DeltaShared<D>& s) {
  constexpr int kLocal = delta_stages(D);
  const Walk& w = s.walk;
  const Engine& e = delta.e;
  const int b = static_cast<int>(w.b), stage = i % kLocal, t = static_cast<int>(w.begin) + (w.first + i) * C;
  const uint32_t bytes = (1 + (reads ? 1 : 0) + (map ? 0 : 1)) * (D / 64) * kPanel;
  ptx::ring_wait_free(s.empty, stage, i);
  ptx::barrier_arrive_expect(&s.full[stage], bytes);
  ptx::load_box(s.k[stage], &delta.k, &s.full[stage], 0, t, 0, h / e.k.group, b);
  if constexpr (reads) ptx::load_box(s.q[stage], &delta.q, &s.full[stage], 0, t, 0, h / e.q.group, b);
  if (!map) ptx::load_box(s.v[stage], &delta.v, &s.full[stage], 0, t, 0, h / e.v.group, b);
  const char* inverse = delta.inverse + (slot_of(e, n, w, w.first + i) * e.H + h) * kInverseBytes;
  ptx::ring_wait_free(s.t_empty, i % 2, i);
  ptx::barrier_arrive_expect(&s.t_full[i % 2], kInverseBytes);
  ptx::load_bytes(s.t[i % 2], inverse, kInversePanel, &s.t_full[i % 2]);
  ptx::load_bytes(s.t[i % 2] + kPanel + kPanel / 2, inverse + kInversePanel, kInversePanel / 2, &s.t_full[i % 2]);
}

template <bool bf16, int D, bool decays, bool reads, bool records>
__device__ void assist_delta(const Delta& delta, int64_t n, int h, bool map, DeltaShared<D>& s) {
  constexpr int kLocal = delta_stages(D), kScores = delta_scores(D);
  const Engine& e = delta.e;
  const Walk& w = s.walk;
  const int thread = threadIdx.x % 128, warp = thread / 32;
  int lane = thread % 32;
  constexpr bool kProduces = delta_pairs(D, bf16);
  if (kProduces && thread == 0) {
    for (int i = 0; i < min(2, w.count); ++i) load_delta<D, reads>(delta, n, h, map, i, s);
  }
  if constexpr (reads) {  // what stands above the diagonal of P and T stays zero
    for (int i = thread; i < kScores * 2 * kPanel / 16; i += 128) reinterpret_cast<uint4*>(s.p)[i] = uint4{0, 0, 0, 0};
    ptx::group_sync<1, 128>();
  }
  Numbers next, next_beta;
  if (decays && warp == 0) next = ask_numbers(e.g, w, h, w.first, lane);
  if (records && warp == 1) next_beta = ask_numbers(e.beta, w, h, w.first, lane);
  for (int i = 0; i < w.count; ++i) {
    const int stage = i % kLocal, slot = i % kScores, chunk = w.first + i;
    DeltaGates& gates = s.gates[i % 2];
    ptx::forget(lane);  // kept, the addresses would leave no room for P
    // P and the gates of two chunks ago are read; with one buffer of P that is known from the chunk before.
    if (kScores == 2) ptx::ring_wait_free(s.p_empty, slot, i);
    if constexpr (decays) {
      if (warp == 0) {
        const Sums G = sum_gates(take_gates(next, e.g.dtype), lane);
        next = ask_numbers(e.g, w, h, chunk + 1, lane);
        store_factors(G, lane, gates);
        gates.out[lane] = e.scale * gates.read[lane];
        gates.out[lane + 32] = e.scale * gates.read[lane + 32];
        if constexpr (reads) store_decays(G, lane, gates.decays);
        if (lane == 0) gates.total = expf(G.all);
      }
    }
    if (records && warp == 1) {
      const float2 beta = take_numbers(next_beta, e.beta.dtype);
      next_beta = ask_numbers(e.beta, w, h, chunk + 1, lane);
      gates.inverse_beta[lane] = inverse_of(e.beta_factor * beta.x);
      gates.inverse_beta[lane + 32] = inverse_of(e.beta_factor * beta.y);
    }
    if constexpr (reads) {
      ptx::ring_wait(s.full, stage, i);
      const uint32_t q = ptx::shared_address(s.q[stage]), k = ptx::shared_address(s.k[stage]);
      float p[32];
      ptx::wgmma_fence();
#pragma unroll
      for (int kk = 0; kk < D / 16; ++kk) {
        ptx::wgmma_shared<bf16, false, false>(p, ptx::descriptor_k_major(q, C, kk), ptx::descriptor_k_major(k, C, kk), kk > 0);
      }
      ptx::wgmma_commit();
      if constexpr (decays) ptx::group_sync<1, 128>();  // the sums
      ptx::wgmma_wait<0>();
      ptx::hold(p);
      ptx::barrier_arrive(&s.empty[stage]);
      weigh<decays, false>(p, gates.decays, warp, lane, false);
      if (kScores == 1) ptx::ring_wait_free(s.p_empty, 0, i);
      // tile_byte_paired_f32, by hand: a row's pieces differ in bits 4 to 6.
      char* at = s.p[slot] + (warp * 16 + lane / 4) * 128 + lane % 4 * 4;
      const uint32_t swizzle = lane / 4 * 16;
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        if (j / 8 > warp) continue;  // zero from the start
        const uint32_t piece = (j / 4 % 4 * 2 + (j & 1)) * 16;
        *reinterpret_cast<uint32_t*>(at + (piece ^ swizzle) + j / 16 * kPanel + (j & 2) * 512) =
            ptx::round_tf32(p[j] * e.scale);
      }
      ptx::fence_async_shared();
    } else {
      if (kScores == 1) ptx::ring_wait_free(s.p_empty, 0, i);
    }
    ptx::barrier_arrive(&s.p_full[slot]);
    // Its place is that of the last chunk, which the state has all but left: P waited for it.
    if (kProduces && thread == 0 && i > 0 && i + 1 < w.count) load_delta<D, reads>(delta, n, h, map, i + 1, s);
    if constexpr (kProduces) __syncwarp();
  }
}

// O^T [64 value channels of this group, 64 tokens] to rows of tokens; then, in another function, out: 128 bytes of a token for
// 8 threads. In between the next products are asked for.
template <bool bf16>
__device__ __forceinline__ void stage_output(const float (&O)[32], char* tile) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const uint32_t o = ptx::shared_address(tile);
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    const int token = 8 * (j + lane / 16) + lane % 8, channel = 16 * warp + lane / 8 % 2 * 8;
    const float* x = O + 4 * j;
    ptx::store_matrices_transposed(o + ptx::tile_byte(C, token, channel), ptx::pack<bf16>(x[0], x[1]),
                                   ptx::pack<bf16>(x[2], x[3]), ptx::pack<bf16>(x[4], x[5]), ptx::pack<bf16>(x[6], x[7]));
  }
}
__device__ __forceinline__ void write_output(const Engine& e, const Walk& w, int h, int group, int chunk, int rows,
                                             const char* tile) {
  const int thread = threadIdx.x % 128, channel = thread % 8 * 8;
  sync_state(group);
  auto* to = static_cast<uint16_t*>(const_cast<void*>(e.out.data)) +
             row_of(e.out, w.b, w.begin + static_cast<int64_t>(chunk) * C + thread / 8, h) + group * 64 + channel;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int token = 16 * j + thread / 8;
    if (token < rows) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(tile + ptx::tile_byte(C, token, channel));
    to += 16 * e.out.stride_t;
  }
}

// A number as a tf32 operand: rounded, or whole, where a second one takes what the instruction cuts off.
template <bool bf16>
__device__ __forceinline__ uint32_t operand(float x) {
  return bf16 ? ptx::round_tf32(x) : __float_as_uint(x);
}
__device__ __forceinline__ uint32_t rest_of(uint32_t x) {
  return __float_as_uint(__uint_as_float(x) - __uint_as_float(x & 0xffffe000));
}
// The power of two by which a row must be divided to stay below 2^14; the row's four lanes ask for it together.
__device__ __forceinline__ float unit_of(float largest) {
  for (int step = 1; step < 4; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, step));
  return largest > 0x1p14f ? exp2f(fminf(ceilf(log2f(largest)) - 14, 100)) : 1;
}

template <bool bf16, int D, bool decays, bool reads, bool records>
__device__ void carry_delta(const Delta& delta, int64_t n, int h, int segment, bool map, DeltaShared<D>& s) {
  constexpr int kLocal = delta_stages(D), kScores = delta_scores(D), kState = D / 2;
  constexpr bool kSplit = !bf16 && reads && D == 64 && !decays;  // N for the output too, where there is room
  const Engine& e = delta.e;
  const Walk& w = s.walk;
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const int row = group * 64 + warp * 16 + lane / 4;  // of S^T: this value channel and the one 8 below
  float S[kState];
  const auto element = [&](const States& states, int j) -> float& {
    const int channel = ptx::Fragment{lane}.column(j), value = row + ptx::Fragment::below(j);
    return states.data[n * states.stride_n + h * states.stride_h + channel * states.stride_row + value * states.stride_column];
  };
  // B^T or A^T of a segment.
  const auto mapped = [&](int number, int which, int j) -> float2& {
    float* at = delta.maps + (((number * e.N + n) * e.H + h) * 2 + which) * D * D;
    return *reinterpret_cast<float2*>(at + (row + ptx::Fragment::below(j)) * D + ptx::Fragment{lane}.pair(j));
  };
  if (!reads && map) {
#pragma unroll
    for (int j = 0; j < kState; ++j) S[j] = ptx::Fragment{lane}.column(j) == row + ptx::Fragment::below(j) ? 1 : 0;
  } else if ((reads || records) && segment > 0) {
#pragma unroll
    for (int j = 0; j < kState; j += 2) {
      const float2 x = mapped(segment - 1, 0, j);
      S[j] = x.x;
      S[j + 1] = x.y;
    }
  } else {
    const bool given = e.initial.data != nullptr && w.starts;
#pragma unroll
    for (int j = 0; j < kState; ++j) S[j] = given ? e.in_factor * element(e.initial, j) : 0;
  }

  // What the next chunk reads from the state by its keys is asked for before the output of this one is written, what it reads
  // by its queries while the keys' is worked on.
  const int count = w.count;
  float U[32], O[32];
  uint32_t A[kState / 2];
  const auto rows_at = [&](int i) {
    return static_cast<int>(min(static_cast<int64_t>(C), w.length - static_cast<int64_t>(w.first + i) * C));
  };
  // The record's corrected writes: without decays they come to nothing where keys repeat, and what the state's rounding leaves
  // of them is multiplied by gradients of the state that have grown since. So the keys read what rounding takes from it, too.
  constexpr bool kTwo = records && !decays;
  uint32_t A_rest[kTwo ? kState / 2 : 1];
  const auto ask_keys = [&](int i) {  // behind the last chunk: of anything
    const int stage = i % kLocal;
    if (i < count) {
      ptx::ring_wait(s.full, stage, i);
      if (rows_at(i) < C) clear_rows<D, D>(s.k[stage], s.v[stage], rows_at(i), group * 128 + thread);
    }
    const uint32_t k = ptx::shared_address(s.k[stage]);
    ptx::hold(A);
    if constexpr (kTwo) ptx::hold(A_rest);
    ptx::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < D / 16; ++kk) {
      const uint64_t keys = ptx::descriptor_k_major(k, C, kk);
      ptx::wgmma<bf16, false>(U, A + 4 * kk, keys, kk > 0);
      if constexpr (kTwo) ptx::wgmma<bf16, false>(U, A_rest + 4 * kk, keys, true);
    }
    ptx::wgmma_commit();
  };
  const auto take = [&] {
    ptx::wgmma_wait<0>();
    ptx::hold(U);
  };
  const auto ask_queries = [&](int i) {
    const uint32_t q = ptx::shared_address(s.q[i % kLocal]);
    ptx::hold(A);
    ptx::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < D / 16; ++kk) ptx::wgmma<bf16, false>(O, A + 4 * kk, ptx::descriptor_k_major(q, C, kk), kk > 0);
    ptx::wgmma_commit();
  };
  float units[2] = {1, 1};  // f16: of the two rows of A
  const auto round = [&] {
    if constexpr (!bf16) {
      float largest[2] = {};
#pragma unroll
      for (int j = 0; j < kState; ++j) largest[j / 2 % 2] = fmaxf(largest[j / 2 % 2], fabsf(S[j]));
      units[0] = unit_of(largest[0]);
      units[1] = unit_of(largest[1]);
    }
    const float down[2] = {1 / units[0], 1 / units[1]};
#pragma unroll
    for (int j = 0; j < kState; j += 2) {
      const float factor = bf16 ? 1 : down[j / 2 % 2];
      A[j / 2] = ptx::pack<bf16>(S[j] * factor, S[j + 1] * factor);
      if constexpr (kTwo) {
        const float2 first = ptx::unpack<bf16>(A[j / 2]);
        A_rest[j / 2] = ptx::pack<bf16>(S[j] - first.x, S[j + 1] - first.y);
      }
    }
  };
  const auto record_state = [&](int i) {  // while the keys read it
    if (records && i < count) {
      store_state<D>(delta.states + (slot_of(e, n, w, w.first + i) * e.H + h) * D * D * 2, A, group, s.q[group]);
    }
  };
  round();
  ask_keys(0);
  record_state(0);
  take();
  for (int i = 0; i < count; ++i) {
    const int stage = i % kLocal, slot = i % kScores, chunk = w.first + i;
    const DeltaGates& gates = s.gates[i % 2];
    const uint32_t k = ptx::shared_address(s.k[stage]), v = ptx::shared_address(s.v[stage]) + group * kPanel;
    const uint32_t t = ptx::shared_address(s.t[i % 2]), p = ptx::shared_address(s.p[slot]);

    if constexpr (reads) ask_queries(i);
    if constexpr (kSplit) {  // there are no registers to go on
      ptx::wgmma_wait<0>();
      ptx::hold(O);
    }
    // The gates; where there are none, so that the auxiliary group is never a phase of p_empty behind.
    if (decays || !reads) ptx::ring_wait(s.p_full, slot, i);
    // Y = V^T - U, in tf32.
    uint32_t Y[32];
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
      uint32_t values[4] = {};
      const int token = 16 * kk + lane / 16 * 8 + lane % 8, channel = 16 * warp + lane / 8 % 2 * 8;
      if (reads || !map) ptx::load_matrices_transposed(values, v + ptx::tile_byte(C, token, channel));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 x = ptx::unpack<bf16>(values[j]);
        float2 read = {1, 1};
        if constexpr (decays) read = *reinterpret_cast<const float2*>(&gates.read[ptx::Fragment{lane}.operand_pair(kk, j)]);
        const float unit = bf16 ? 1 : units[j % 2];
        Y[8 * kk + 2 * j] = operand<bf16>(fmaf(-read.x * unit, U[8 * kk + 2 * j], x.x));
        Y[8 * kk + 2 * j + 1] = operand<bf16>(fmaf(-read.y * unit, U[8 * kk + 2 * j + 1], x.y));
      }
    }
    float N[32];
    if constexpr (reads) {  // its operands leave registers to N
      ptx::wgmma_wait<0>();
      ptx::hold(O);
    }
    ptx::ring_wait(s.t_full, i % 2, i);
    ptx::hold(Y);
    ptx::wgmma_fence();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      ptx::wgmma_tf32(N, Y[4 * j], Y[4 * j + 2], Y[4 * j + 1], Y[4 * j + 3], ptx::descriptor_k_major(t, C, j), j > 0);
    }
    ptx::wgmma_commit();
    if constexpr (reads) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        float2 out = {e.scale, e.scale};
        if constexpr (decays) out = *reinterpret_cast<const float2*>(&gates.out[ptx::Fragment{lane}.pair(4 * j)]);
        O[4 * j] *= bf16 ? out.x : out.x * units[0];
        O[4 * j + 1] *= bf16 ? out.y : out.y * units[0];
        O[4 * j + 2] *= bf16 ? out.x : out.x * units[1];
        O[4 * j + 3] *= bf16 ? out.y : out.y * units[1];
      }
    }
    if constexpr (decays) {
      const float total = gates.total;
#pragma unroll
      for (int j = 0; j < kState; ++j) S[j] *= total;
    }
    ptx::wgmma_wait<0>();
    ptx::hold(N);
    if constexpr (!bf16) {
#pragma unroll
      for (int j = 0; j < 32; ++j) Y[j] = rest_of(Y[j]);
      ptx::hold(Y);
      ptx::wgmma_fence();
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        ptx::wgmma_tf32(N, Y[4 * j], Y[4 * j + 2], Y[4 * j + 1], Y[4 * j + 3], ptx::descriptor_k_major(t, C, j), true);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::hold(N);
    }
    ptx::barrier_arrive(&s.t_empty[i % 2]);
    float up[2] = {1, 1};  // f16: units of the rows of N * write
    if constexpr (!bf16) {
      float largest[2] = {};
#pragma unroll
      for (int j = 0; j < 32; ++j) largest[j / 2 % 2] = fmaxf(largest[j / 2 % 2], fabsf(N[j]));
      up[0] = unit_of(largest[0]);
      up[1] = unit_of(largest[1]);
      if (up[0] != 1 || up[1] != 1) {
#pragma unroll
        for (int j = 0; j < kState; ++j) S[j] *= 1 / up[j / 2 % 2];
      }
    }
    // N times its decays as 16-bit numbers for the state, N itself as tf32 for the output.
    uint32_t written[16], rest[bf16 ? 1 : 16], Y_rest[kSplit ? 32 : 1];
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      float2 write = {1, 1};
      if constexpr (decays) write = *reinterpret_cast<const float2*>(&gates.write[ptx::Fragment{lane}.operand_pair(0, j)]);
      const float down = bf16 ? 1 : 1 / up[j % 2];
      const float2 x = {N[2 * j] * (write.x * down), N[2 * j + 1] * (write.y * down)};
      written[j] = ptx::pack<bf16>(x.x, x.y);
      if constexpr (!bf16) {
        const float2 first = ptx::unpack<bf16>(written[j]);
        rest[j] = ptx::pack<bf16>(x.x - first.x, x.y - first.y);
      }
    }
    if constexpr (reads) {
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        Y[j] = kSplit ? __float_as_uint(N[j]) : ptx::round_tf32(N[j]);
        if constexpr (kSplit) Y_rest[j] = rest_of(Y[j]);
      }
      if (!decays) ptx::ring_wait(s.p_full, slot, i);
      ptx::hold(O);
      ptx::hold(Y);
      if constexpr (kSplit) ptx::hold(Y_rest);
    }
    ptx::hold(S);
    ptx::hold(written);
    if constexpr (!bf16) ptx::hold(rest);
    ptx::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
      ptx::wgmma<bf16, true>(S, written + 4 * kk, ptx::descriptor_mn_major(k, C, kk), true);
      if constexpr (!bf16) ptx::wgmma<bf16, true>(S, rest + 4 * kk, ptx::descriptor_mn_major(k, C, kk), true);
    }
    ptx::wgmma_commit();
    if constexpr (reads) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const uint64_t scores = ptx::descriptor_k_major(p, C, j);
        ptx::wgmma_tf32(O, Y[4 * j], Y[4 * j + 2], Y[4 * j + 1], Y[4 * j + 3], scores, true);
        if constexpr (kSplit)
          ptx::wgmma_tf32(O, Y_rest[4 * j], Y_rest[4 * j + 2], Y_rest[4 * j + 1], Y_rest[4 * j + 3], scores, true);
      }
      ptx::wgmma_commit();
    }
    if (records) {
#pragma unroll
      for (int j = 0; j < 32; ++j) N[j] *= gates.inverse_beta[ptx::Fragment{lane}.column(j)];
      store_chunk<bf16, false>(delta.residuals + (slot_of(e, n, w, chunk) * e.H + h) * D * C * 2, N, group,
                               s.q[D / 64] + group * kPanel);
    }
    ptx::wgmma_wait<reads ? 1 : 0>();
    ptx::hold(S);
    if (!bf16 && (up[0] != 1 || up[1] != 1)) {
#pragma unroll
      for (int j = 0; j < kState; ++j) S[j] *= up[j / 2 % 2];
    }
    round();
    if constexpr (reads) {
      ptx::wgmma_wait<0>();
      ptx::hold(O);
      stage_output<bf16>(O, s.v[stage] + group * kPanel);
    }
    ptx::barrier_arrive(&s.p_empty[slot]);
    ask_keys(i + 1);
    if constexpr (reads) {
      write_output(e, w, h, group, chunk, rows_at(i), s.v[stage] + group * kPanel);
      ptx::fence_async_shared();
    }
    ptx::barrier_arrive(&s.empty[stage]);
    record_state(i + 1);
    take();
  }
  if (records) {
    if (thread == 0) ptx::wait_stores();
  } else if (!reads || (delta.phase == DeltaPhase::early && !w.ends)) {
#pragma unroll
    for (int j = 0; j < kState; j += 2) mapped(segment, map ? 1 : 0, j) = float2{S[j], S[j + 1]};
  } else if (e.final.data != nullptr && w.ends) {
#pragma unroll
    for (int j = 0; j < kState; ++j) element(e.final, j) = e.out_factor * S[j];
  }
}

template <bool bf16, int D, bool decays, bool reads, bool records>
__device__ void delta_kernel(const Delta& delta) {
  extern __shared__ char memory[];
  static_assert(sizeof(DeltaShared<D>) + 1024 <= delta_shared_bytes(D) && delta_shared_bytes(D) <= 232448);
  auto& s = ptx::shared_as<DeltaShared<D>>(memory);
  const Engine& e = delta.e;
  const bool early = delta.phase == DeltaPhase::early;
  const int h = blockIdx.x % e.H, y = blockIdx.y;
  const int segment = early ? (y + 1) / 2 : delta.phase == DeltaPhase::rest ? y + 1 : y;
  const int64_t n = blockIdx.x / e.H;
  const bool map = !reads && (early ? y % 2 == 0 : blockIdx.z == 1);
  Walk w = delta.phase == DeltaPhase::whole ? walk_of(e, n, 0, false) : segment_of(delta, n, segment);
  if (w.count == 0 && segment > 0) return;
  const bool summary = !reads && (early || delta.phase == DeltaPhase::summary);
  if (summary && w.ends) return;  // nobody starts from there
  if (summary && !early) {
    // What comes before a chunk after which everything is forgotten need not be walked.
    int start = decays ? w.count : 0;
    float bound = 0;
    while (start > 0 && !(bound < kForgotten)) {
      --start;
      bound += delta.bounds[slot_of(e, n, w, w.first + start) * e.H + h];
    }
    const bool forgets = bound < kForgotten;
    if (forgets) w.starts = false;
    w.first += start;
    w.count -= start;
    if (map) {
      if (threadIdx.x == 0) delta.forgets[(segment * e.N + n) * e.H + h] = forgets ? 1 : 0;
      if (forgets || segment == 0) return;  // the first segment starts from the initial state
    }
  }
  constexpr int kGroups = D / 64, kConsumers = 128 * kGroups;
  for (int i = threadIdx.x; i < 2 * (kPanel / 2) / 16; i += blockDim.x) {  // rows 0 to 31 of T's second panel: never loaded
    reinterpret_cast<uint4*>(s.t[i / (kPanel / 32)] + kPanel)[i % (kPanel / 32)] = uint4{0, 0, 0, 0};
  }
  begin_walk(s, w, kConsumers, reads ? 128 : 0);
  // Registers: 65536 of the multiprocessor over the 512 or 384 threads of one block, or the 256 of two.
  constexpr bool kPairs = delta_pairs(D, bf16);
  const int role = threadIdx.x / 128;
  if (role < kGroups) {
    ptx::more_registers<kGroups == 2 ? 200 : kPairs ? 168 : 240>();
    carry_delta<bf16, D, decays, reads, records>(delta, n, h, segment, map, s);
  } else if (role == kGroups) {
    if constexpr (kGroups == 2 || kPairs) ptx::fewer_registers<88>();
    assist_delta<bf16, D, decays, reads, records>(delta, n, h, map, s);
  } else {
    ptx::fewer_registers<24>();
    if (threadIdx.x % 128 == 0) {
      for (int i = 0; i < s.walk.count; ++i) load_delta<D, reads>(delta, n, h, map, i, s);
    }
  }
}

}  // namespace

#define LINNET_DELTA(name, bf16, D, decays, reads, records)                                   \
  extern "C" __global__ void __launch_bounds__(delta_threads(D, bf16), delta_blocks(D, bf16)) \
      name(const __grid_constant__ Delta delta) {                                             \
    delta_kernel<bf16, D, decays, reads, records>(delta);                                     \
  }
#define LINNET_DELTA_EARLY(name, bf16, D)                                                     \
  extern "C" __global__ void __launch_bounds__(delta_threads(D, bf16), delta_blocks(D, bf16)) \
      name(const __grid_constant__ Delta delta) {                                             \
    if (blockIdx.y == 0) {                                                                    \
      delta_kernel<bf16, D, false, true, false>(delta);                                       \
    } else {                                                                                  \
      delta_kernel<bf16, D, false, false, false>(delta);                                      \
    }                                                                                         \
  }

}  // namespace linnet::cuda
