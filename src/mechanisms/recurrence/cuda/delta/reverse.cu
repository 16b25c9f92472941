// The gradient of the state of the delta rules, from the last chunk to the first: the walk of walk_bf16.cu
// backwards in time, with the same roles.
//
//   dN^T = dS^T K^T * write + dO^T P     dY^T = dN^T T     dS^T = total dS^T + (dO * read scale)^T Q - (dY * read)^T K
//
// P has the scale in it; dS is in units of unit_of_scale. It leaves dS^T after each chunk and dY / beta for
// gradients.cu. dN and T are operands in tf32, the others are 16-bit numbers, P two of them: with keys
// that are alike its rounding alone would cost dg the tolerance.
//
// Segments of long sequences (delta.h): a first walk finds what each leaves of a zero gradient; with A^T they are
// folded from the last one down.
//
// Products per chunk, D = 128: 11.5 of 64 x 64 x 128; bytes per token and head: 960 read, 768 written.
#include "mechanisms/recurrence/cuda/delta/delta.cuh"

namespace linnet::cuda {
namespace {

constexpr int kReverseStages = 2;

struct alignas(16) ReverseGates {
  float read[C], write[C], inverse_beta[C];  // write: in units of dS
  Decays decays;
  float total;
};

template <int D>
struct ReverseShared {
  alignas(1024) char q[kReverseStages][D / 64 * kPanel];
  char k[kReverseStages][D / 64 * kPanel];
  char dout[kReverseStages][D / 64 * kPanel];
  char t[2][kInverseBytes];                                    // T^T: f32, paired columns
  char p[delta_scores(D)][2][kPanel];                          // and what rounding takes from it
  char chunk[D / 64][kPanel], state[D / 64][D / 64 * kPanel];  // on their way to memory
  ReverseGates gates[2];
  Walk walk;
  uint64_t full[kReverseStages], empty[kReverseStages], t_full[2], t_empty[2], p_full[delta_scores(D)],
      p_empty[delta_scores(D)];
};

// Q, K, dO and T^T of the i-th chunk from the last, by one thread.
template <int D>
__device__ __forceinline__ void load_reverse(const Delta& delta, int64_t n, int h, int i, ReverseShared<D>& s) {
  const Engine& e = delta.e;
  const Walk& w = s.walk;
  const int b = static_cast<int>(w.b), stage = i % kReverseStages, t = static_cast<int>(w.begin) + (w.first - i) * C;
  ptx::ring_wait_free(s.empty, stage, i);
  ptx::barrier_arrive_expect(&s.full[stage], 3 * (D / 64) * kPanel);
  ptx::load_box(s.k[stage], &delta.k, &s.full[stage], 0, t, 0, h / e.k.group, b);
  ptx::load_box(s.q[stage], &delta.q, &s.full[stage], 0, t, 0, h / e.q.group, b);
  ptx::load_box(s.dout[stage], &delta.dout, &s.full[stage], 0, t, 0, h, b);
  const char* inverse = delta.inverse_transposed + (slot_of(e, n, w, w.first - i) * e.H + h) * kInverseBytes;
  ptx::ring_wait_free(s.t_empty, i % 2, i);
  ptx::barrier_arrive_expect(&s.t_full[i % 2], kInverseBytes);
  ptx::load_bytes(s.t[i % 2], inverse, kInverseBytes, &s.t_full[i % 2]);
}

template <bool bf16, int D, bool decays>
__device__ void assist_reverse(const Delta& delta, int64_t n, int h, ReverseShared<D>& s) {
  constexpr int kScores = delta_scores(D);
  const Engine& e = delta.e;
  const Walk& w = s.walk;
  const int thread = threadIdx.x % 128, warp = thread / 32;
  int lane = thread % 32;
  constexpr bool kProduces = delta_pairs(D, bf16);
  if (kProduces && thread == 0) {
    for (int i = 0; i < min(2, w.count); ++i) load_reverse<D>(delta, n, h, i, s);
  }
  const float unit = unit_of_scale(e.scale);
  Numbers next;
  if (decays && warp == 0) next = ask_numbers(e.g, w, h, w.first, lane);
  if (warp == 1) next = ask_numbers(e.beta, w, h, w.first, lane);
  for (int i = 0; i < w.count; ++i) {
    const int stage = i % kReverseStages, slot = i % kScores, chunk = w.first - i;
    const int rows = static_cast<int>(min(static_cast<int64_t>(C), w.length - static_cast<int64_t>(chunk) * C));
    ReverseGates& gates = s.gates[i % 2];
    ptx::forget(lane);  // kept, the addresses would leave no room for P
    if (kScores == 2) ptx::ring_wait_free(s.p_empty, slot, i);
    if (decays && warp == 0) {
      const Sums G = sum_gates(take_gates(next, e.g.dtype), lane);
      next = ask_numbers(e.g, w, h, chunk - 1, lane);
      store_factors(G, lane, gates);
      gates.write[lane] *= unit;
      gates.write[lane + 32] *= unit;
      store_decays(G, lane, gates.decays);
      if (lane == 0) gates.total = expf(G.all);
    }
    if (warp == 1) {
      const float2 beta = take_numbers(next, e.beta.dtype);
      next = ask_numbers(e.beta, w, h, chunk - 1, lane);
      gates.inverse_beta[lane] = inverse_of(e.beta_factor * beta.x);
      gates.inverse_beta[lane + 32] = inverse_of(e.beta_factor * beta.y);
    }
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
    const int row = warp * 16 + lane / 4;
    char* const to = s.p[slot][0];
#pragma unroll
    for (int j = 0; j < 32; j += 2) {
      const int r = row + ptx::Fragment::below(j), c = ptx::Fragment{lane}.pair(j);
      // Rows behind the sequence are summed over, and may be anything.
      const float2 x = {r < rows ? p[j] * e.scale : 0, r < rows ? p[j + 1] * e.scale : 0};
      const uint32_t at = ptx::tile_byte(C, r, c), packed = ptx::pack<bf16>(x.x, x.y);
      const float2 first = ptx::unpack<bf16>(packed);
      *reinterpret_cast<uint32_t*>(to + at) = packed;
      *reinterpret_cast<uint32_t*>(to + kPanel + at) = ptx::pack<bf16>(x.x - first.x, x.y - first.y);
    }
    ptx::fence_async_shared();
    ptx::barrier_arrive(&s.p_full[slot]);
    if (kProduces && thread == 0 && i > 0 && i + 1 < w.count) load_reverse<D>(delta, n, h, i + 1, s);
    if constexpr (kProduces) __syncwarp();
  }
}

// What lies behind the sequence counts as zero, NaN or not. By all state groups.
template <int D>
__device__ __forceinline__ void clear_reverse(ReverseShared<D>& s, int stage, int rows, int thread) {
  constexpr int kThreads = D / 64 * 128, kPieces = D / 8;
  for (int piece = thread; piece < (C - rows) * kPieces; piece += kThreads) {
    const uint32_t at = ptx::tile_byte(C, rows + piece / kPieces, piece % kPieces * 8);
    *reinterpret_cast<uint4*>(s.q[stage] + at) = uint4{0, 0, 0, 0};
    *reinterpret_cast<uint4*>(s.k[stage] + at) = uint4{0, 0, 0, 0};
    *reinterpret_cast<uint4*>(s.dout[stage] + at) = uint4{0, 0, 0, 0};
  }
  ptx::fence_async_shared();
  ptx::group_sync<2, kThreads>();
}

template <bool bf16, int D, bool decays>
__device__ void carry_reverse(const Delta& delta, int64_t n, int h, int segment, bool from_zero, ReverseShared<D>& s) {
  constexpr int kState = D / 2, kScores = delta_scores(D);
  const Engine& e = delta.e;
  const Walk& w = s.walk;
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const int row = group * 64 + warp * 16 + lane / 4;  // of dS^T: this value channel and the one 8 below
  const float power = power_of(e.scale), unit = unit_of_scale(e.scale);
  float S[kState];
  const auto element = [&](const States& states, int j) -> float& {
    const int channel = ptx::Fragment{lane}.column(j), value = row + ptx::Fragment::below(j);
    return states.data[n * states.stride_n + h * states.stride_h + channel * states.stride_row + value * states.stride_column];
  };
  const bool summary = delta.phase == DeltaPhase::summary;
  const auto mapped = [&](int number, int j) -> float2& {  // dS^T before a segment
    float* at = delta.dmaps + ((number * e.N + n) * e.H + h) * D * D;
    return *reinterpret_cast<float2*>(at + (row + ptx::Fragment::below(j)) * D + ptx::Fragment{lane}.pair(j));
  };
  if (!w.ends && !summary) {
#pragma unroll
    for (int j = 0; j < kState; j += 2) {
      const float2 x = mapped(segment + 1, j);
      S[j] = x.x;
      S[j + 1] = x.y;
    }
  } else {
    const bool given = delta.dfinal.data != nullptr && w.ends && !from_zero;
#pragma unroll
    for (int j = 0; j < kState; ++j) S[j] = given ? element(delta.dfinal, j) / unit : 0;
  }

  for (int i = 0; i < w.count; ++i) {
    const int stage = i % kReverseStages, slot = i % kScores, chunk = w.first - i;
    const int rows = static_cast<int>(min(static_cast<int64_t>(C), w.length - static_cast<int64_t>(chunk) * C));
    const ReverseGates& gates = s.gates[i % 2];
    const uint32_t q = ptx::shared_address(s.q[stage]), k = ptx::shared_address(s.k[stage]);
    const uint32_t dout = ptx::shared_address(s.dout[stage]) + group * kPanel, p = ptx::shared_address(s.p[slot][0]);
    const uint32_t t = ptx::shared_address(s.t[i % 2]);

    float N[32];
    {
      float U[32];
      uint32_t A[kState / 2];
#pragma unroll
      for (int j = 0; j < kState; j += 2) A[j / 2] = ptx::pack<bf16>(S[j], S[j + 1]);
      ptx::ring_wait(s.full, stage, i);
      if (rows < C) clear_reverse<D>(s, stage, rows, group * 128 + thread);
      ptx::ring_wait(s.p_full, slot, i);
      ptx::hold(A);
      ptx::wgmma_fence();
#pragma unroll
      for (int kk = 0; kk < D / 16; ++kk) ptx::wgmma<bf16, false>(U, A + 4 * kk, ptx::descriptor_k_major(k, C, kk), kk > 0);
#pragma unroll
      for (int kk = 0; kk < 8; ++kk) {
        ptx::wgmma_shared<bf16, true, true>(N, ptx::descriptor_mn_major(dout, C, kk % 4),
                                            ptx::descriptor_mn_major(p + kk / 4 * kPanel, C, kk % 4), kk > 0);
      }
      ptx::wgmma_commit();
      if (!summary) store_state<D>(delta.dstates + (slot_of(e, n, w, chunk) * e.H + h) * D * D * 2, A, group, s.state[group]);
      ptx::ring_wait(s.t_full, i % 2, i);
      ptx::wgmma_wait<0>();
      ptx::hold(U);
      ptx::hold(N);
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        N[j] = fmaf(decays ? gates.write[ptx::Fragment{lane}.column(j)] : unit, U[j], N[j]);
      }
    }
    float Y[32];
    {
      uint32_t A[32];
#pragma unroll
      for (int j = 0; j < 32; ++j) A[j] = ptx::round_tf32(N[j]);
      ptx::hold(A);
      ptx::wgmma_fence();
      multiply_upper(Y, A, t, false);
      ptx::wgmma_commit();
    }
    // What the queries leave in the state waits for nothing: dO^T as operand, times its decays.
    uint32_t read[4][4];
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
      const int token = 16 * kk + lane / 16 * 8 + lane % 8, channel = 16 * warp + lane / 8 % 2 * 8;
      ptx::load_matrices_transposed(read[kk], dout + ptx::tile_byte(C, token, channel));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float2 factor = {power, power};
        if constexpr (decays) {
          const float2 decay = *reinterpret_cast<const float2*>(&gates.read[ptx::Fragment{lane}.operand_pair(kk, j)]);
          factor = {power * decay.x, power * decay.y};
        }
        const float2 x = ptx::unpack<bf16>(read[kk][j]);
        read[kk][j] = ptx::pack<bf16>(x.x * factor.x, x.y * factor.y);
      }
    }
    if constexpr (decays) {
      const float total = gates.total;
#pragma unroll
      for (int j = 0; j < kState; ++j) S[j] *= total;
    }
    ptx::hold(S);
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) ptx::hold(read[kk]);
    ptx::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) ptx::wgmma<bf16, true>(S, read[kk], ptx::descriptor_mn_major(q, C, kk), true);
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    ptx::hold(Y);
    ptx::barrier_arrive(&s.t_empty[i % 2]);
    const float down = -1 / unit;
    uint32_t written[16];
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      float2 decay = {1, 1};
      if constexpr (decays) decay = *reinterpret_cast<const float2*>(&gates.read[ptx::Fragment{lane}.operand_pair(0, j)]);
      written[j] = ptx::pack<bf16>(Y[2 * j] * (down * decay.x), Y[2 * j + 1] * (down * decay.y));
    }
    ptx::hold(written);
    ptx::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) ptx::wgmma<bf16, true>(S, written + 4 * kk, ptx::descriptor_mn_major(k, C, kk), true);
    ptx::wgmma_commit();
    if (!summary) {
#pragma unroll
      for (int j = 0; j < 32; ++j) Y[j] *= gates.inverse_beta[ptx::Fragment{lane}.column(j)];
      store_chunk<bf16, decays>(delta.adjoints + (slot_of(e, n, w, chunk) * e.H + h) * D * C * 2, Y, group, s.chunk[group]);
    }
    ptx::wgmma_wait<0>();
    ptx::hold(S);
    ptx::barrier_arrive(&s.p_empty[slot]);
    ptx::barrier_arrive(&s.empty[stage]);
  }
  if (thread == 0) ptx::wait_stores();
  if (summary) {
#pragma unroll
    for (int j = 0; j < kState; j += 2) mapped(segment, j) = float2{S[j], S[j + 1]};
  } else if (delta.dinitial.data != nullptr && w.starts) {
#pragma unroll
    for (int j = 0; j < kState; ++j) element(delta.dinitial, j) = unit * S[j];
  }
}

template <bool bf16, int D, bool decays>
__device__ void reverse_kernel(const Delta& delta) {
  extern __shared__ char memory[];
  static_assert(sizeof(ReverseShared<D>) + 1024 <= reverse_shared_bytes(D) && reverse_shared_bytes(D) <= 232448);
  auto& s = ptx::shared_as<ReverseShared<D>>(memory);
  const Engine& e = delta.e;
  const int h = blockIdx.x % e.H, segment = blockIdx.y + (delta.phase == DeltaPhase::summary ? 1 : 0);
  const int64_t n = blockIdx.x / e.H;
  constexpr int kGroups = D / 64, kConsumers = 128 * kGroups;
  Walk w = delta.phase == DeltaPhase::whole ? walk_of(e, n, 0, false) : segment_of(delta, n, segment);
  if (w.count == 0 && segment > 0) return;
  bool from_zero = false;
  if (delta.phase == DeltaPhase::summary) {  // what comes after everything before is forgotten need not be walked
    int count = decays ? 0 : w.count;
    float bound = 0;
    while (count < w.count && !(bound < kForgotten)) bound += delta.bounds[slot_of(e, n, w, w.first + count++) * e.H + h];
    from_zero = bound < kForgotten;
    w.count = count;
  }
  w.first += w.count - 1;
  begin_walk(s, w, kConsumers, 128);
  constexpr bool kPairs = delta_pairs(D, bf16);
  const int role = threadIdx.x / 128;
  if (role < kGroups) {
    ptx::more_registers<kGroups == 2 ? 200 : kPairs ? 168 : 240>();
    carry_reverse<bf16, D, decays>(delta, n, h, segment, from_zero, s);
  } else if (role == kGroups) {
    if constexpr (kGroups == 2 || kPairs) ptx::fewer_registers<88>();
    assist_reverse<bf16, D, decays>(delta, n, h, s);
  } else {
    ptx::fewer_registers<24>();
    if (threadIdx.x % 128 == 0) {
      for (int i = 0; i < s.walk.count; ++i) load_reverse<D>(delta, n, h, i, s);
    }
  }
}

}  // namespace

#define LINNET_REVERSE(name, bf16, D, decays)                                                 \
  extern "C" __global__ void __launch_bounds__(delta_threads(D, bf16), delta_blocks(D, bf16)) \
      name(const __grid_constant__ Delta delta) {                                             \
    reverse_kernel<bf16, D, decays>(delta);                                                   \
  }
LINNET_REVERSE(reverse_64, true, 64, false)
LINNET_REVERSE(reverse_64_decay, true, 64, true)
LINNET_REVERSE(reverse_128, true, 128, false)
LINNET_REVERSE(reverse_128_decay, true, 128, true)

}  // namespace linnet::cuda
