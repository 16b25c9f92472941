// The walk of the delta rule with a decay per channel over prepared chunks (kda.h): one block per (sequence, head)
// or segment, a warpgroup for each 64 value channels with S^T in f32 accumulators, and a thread that fetches two chunks ahead.
#include "mechanisms/recurrence/cuda/kda/kda.cuh"

namespace linnet::cuda {
namespace {

template <int D, bool reads>
struct KdaStage {
  alignas(1024) char q[D * 128];  // without reads what rounding took from K", where that is kept
  char read[D * 128], k[D * 128], t[16384], p[reads ? 16384 : 1024], v[D * 128];
  float record[kda_record(D)];
};
template <int D, bool reads>
struct KdaWalkShared {
  KdaStage<D, reads> stage[kFetched];
  alignas(1024) char state[reads ? 1 : D / 64][reads ? 16 : D * 128];  // on its way to memory
  uint64_t full[kFetched], empty[kFetched];
};

// The tokens of a chunk one by one, the state in accumulators: every factor at most 1. Results, or what is written where that
// is kept, in place of the values.
template <int D, bool reads>
__device__ void step_chunk(const Kda& t, const Walk& w, int h, int chunk, int rows, bool map, bool keeps, int thread,
                           char* values, float (&S)[D / 2]) {
  const Engine& e = t.e;
  const int lane = thread % 32, own = thread / 32 * 16 + lane / 4;  // of the group's 64 values; and 8 below
  const auto* q = static_cast<const uint16_t*>(e.q.data);
  const auto* k = static_cast<const uint16_t*>(e.k.data);
#pragma unroll 1
  for (int i = 0; i < rows; ++i) {
    const int64_t token = w.begin + static_cast<int64_t>(chunk) * C + i;
    const int64_t at = lane % 4 * 2, q_at = row_of(e.q, w.b, token, h) + at, k_at = row_of(e.k, w.b, token, h) + at;
    const int64_t g_at = row_of(e.g, w.b, token, h) + at;
    float read[2] = {};
#pragma unroll
    for (int j = 0; j < D / 2; j += 4) {
      const float2 x = ptx::unpack<true>(*reinterpret_cast<const uint32_t*>(k + k_at + j * 2));
      float2 g = {ptx::load(e.g.data, e.g.dtype, g_at + j * 2), ptx::load(e.g.data, e.g.dtype, g_at + j * 2 + 1)};
      g = {ptx::exp2_fast(clamp_gate(g.x * kLog2E)), ptx::exp2_fast(clamp_gate(g.y * kLog2E))};
      S[j] *= g.x;
      S[j + 1] *= g.y;
      S[j + 2] *= g.x;
      S[j + 3] *= g.y;
      read[0] = fmaf(S[j], x.x, fmaf(S[j + 1], x.y, read[0]));
      read[1] = fmaf(S[j + 2], x.x, fmaf(S[j + 3], x.y, read[1]));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      for (int step = 1; step < 4; step *= 2) read[half] += __shfl_xor_sync(0xffffffff, read[half], step);
    }
    float beta = e.beta_factor * ptx::load(e.beta.data, e.beta.dtype, row_of(e.beta, w.b, token, h));
    if (t.back && beta == 0) beta = kKdaLeastBeta;
    auto* value = reinterpret_cast<__nv_bfloat16*>(values + ptx::tile_byte(C, i, own));
    auto* below = reinterpret_cast<__nv_bfloat16*>(values + ptx::tile_byte(C, i, own + 8));
    const float written[2] = {beta * ((map ? 0 : __bfloat162float(*value)) - read[0]),
                              beta * ((map ? 0 : __bfloat162float(*below)) - read[1])};
    float out[2] = {};
#pragma unroll
    for (int j = 0; j < D / 2; j += 4) {
      const float2 x = ptx::unpack<true>(*reinterpret_cast<const uint32_t*>(k + k_at + j * 2));
      S[j] = fmaf(written[0], x.x, S[j]);
      S[j + 1] = fmaf(written[0], x.y, S[j + 1]);
      S[j + 2] = fmaf(written[1], x.x, S[j + 2]);
      S[j + 3] = fmaf(written[1], x.y, S[j + 3]);
      if constexpr (reads) {
        const float2 y = ptx::unpack<true>(*reinterpret_cast<const uint32_t*>(q + q_at + j * 2));
        out[0] = fmaf(S[j], y.x, fmaf(S[j + 1], y.y, out[0]));
        out[1] = fmaf(S[j + 2], y.x, fmaf(S[j + 3], y.y, out[1]));
      }
    }
    if (!reads && keeps) {
      __syncwarp();
      if (lane % 4 == 0) {
        *value = __float2bfloat16_rn(written[0]);
        *below = __float2bfloat16_rn(written[1]);
      }
    }
    if constexpr (reads) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        for (int step = 1; step < 4; step *= 2) out[half] += __shfl_xor_sync(0xffffffff, out[half], step);
      }
      __syncwarp();
      if (lane % 4 == 0) {
        *value = __float2bfloat16_rn(e.scale * out[0]);
        *below = __float2bfloat16_rn(e.scale * out[1]);
      }
      __syncwarp();
    }
  }
}

template <int D, bool reads>
__device__ void walk_kda(const Kda& t, const Walk& w, int64_t n, int h, int segment, bool map, KdaWalkShared<D, reads>& s) {
  const Engine& e = t.e;
  const int group = threadIdx.x / 128;
  int thread = threadIdx.x % 128;
  constexpr int kState = D / 2;
  float S[kState];
  const auto element = [&](const States& states, int j) -> float& { return state_element(states, n, h, j, group, thread); };
  const auto mapped = [&](int number, int which, int j) -> float& {  // [D channels, D values]
    const int64_t row = (((number * e.N + n) * e.H + h) * 2 + which) * D + state_channel(j, thread);
    return t.maps[row * D + state_value(j, group, thread)];
  };
#pragma unroll
  for (int j = 0; j < kState; ++j) {
    if (map) {
      S[j] = state_channel(j, thread) == state_value(j, group, thread) ? 1 : 0;
    } else if (t.phase == KdaPhase::joined && segment > 0) {
      S[j] = mapped(segment - 1, 0, j);
    } else {
      S[j] = e.initial.data != nullptr && w.starts ? e.in_factor * element(e.initial, j) : 0;
    }
  }
  const bool keeps = !reads && t.states != nullptr && t.phase != KdaPhase::summary && t.phase != KdaPhase::probe;
  for (int i = 0; i < w.count; ++i) {
    KdaStage<D, reads>& stage = s.stage[i % kFetched];
    const int chunk = w.first + i, rows = chunk_rows(w, chunk);
    char* values = stage.v + group * kPanel;
    ptx::forget(thread);
    const int warp = thread / 32, lane = thread % 32;
    ptx::ring_wait(s.full, i % kFetched, i);
    const bool steps = stage.record[2 * D] != 0;
    const int64_t number = (channel_chunk(e.offsets != nullptr, e.T, n, w.begin) + chunk) * e.H + h;
    if (!steps) scale_channels(S, stage.record, thread);
    if (keeps) {
      keep_state(S, s.state[group], t.states + (number * (D / 64) + group) * (D * 128), i > 0, group, thread);
    }
    const auto keep_written = [&] {
      ptx::fence_async_shared();
      sync_values(group);
      if (thread == 0) ptx::store_bytes(t.residuals + number * (D * 128) + group * kPanel, values, kPanel);
    };
    if (steps) {
      step_chunk<D, reads>(t, w, h, chunk, rows, map, keeps, thread, values, S);
      if (keeps) {
        for (int piece = thread; piece < (C - rows) * 8; piece += 128) {
          *reinterpret_cast<uint4*>(values + (rows + piece / 8) * 128 + piece % 8 * 16) = {};
        }
        keep_written();
      }
    } else {
      const uint32_t q = ptx::shared_address(stage.q), read = ptx::shared_address(stage.read);
      const uint32_t k = ptx::shared_address(stage.k), system = ptx::shared_address(stage.t);
      const uint32_t p = ptx::shared_address(stage.p), v = ptx::shared_address(values);
      float U[32], O[32];
      uint32_t Y[32];
      {
        uint32_t A[kState / 2];
#pragma unroll
        for (int j = 0; j < kState; j += 2) A[j / 2] = ptx::pack<true>(S[j], S[j + 1]);
        ptx::hold(A);
        ptx::wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < D / 16; ++kk) {
          ptx::wgmma<true, false>(U, A + 4 * kk, ptx::descriptor_k_major(read, C, kk), kk > 0);
        }
        if constexpr (!reads) {
          if (t.back) {
            ptx::wgmma_fence();
#pragma unroll
            for (int kk = 0; kk < D / 16; ++kk) {
              ptx::wgmma<true, false>(U, A + 4 * kk, ptx::descriptor_k_major(q, C, kk), true);
            }
          }
        } else {
#pragma unroll
          for (int kk = 0; kk < D / 16; ++kk) {
            ptx::wgmma<true, false>(O, A + 4 * kk, ptx::descriptor_k_major(q, C, kk), kk > 0);
          }
        }
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::hold(U);
        if constexpr (reads) ptx::hold(O);
      }
      // Y = V^T - U in tf32, zero behind the sequence.
#pragma unroll
      for (int kk = 0; kk < 4; ++kk) {
        uint32_t x[4] = {};
        const int token = 16 * kk + lane / 16 * 8 + lane % 8, channel = 16 * warp + lane / 8 % 2 * 8;
        if (!map) ptx::load_matrices_transposed(x, v + ptx::tile_byte(C, token, channel));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 y = ptx::unpack<true>(x[j]);
          const int at = ptx::Fragment{lane}.operand_pair(kk, j);
          Y[8 * kk + 2 * j] = ptx::round_tf32(at < rows ? y.x - U[8 * kk + 2 * j] : 0);
          Y[8 * kk + 2 * j + 1] = ptx::round_tf32(at + 1 < rows ? y.y - U[8 * kk + 2 * j + 1] : 0);
        }
      }
      ptx::hold(Y);
      ptx::wgmma_fence();
      multiply_lower(U, Y, system, false);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::hold(U);  // N
      if (keeps) {
        stage_results(U, 0, 1, values, group, thread);
        keep_written();
      }
      uint32_t written[16];
#pragma unroll
      for (int j = 0; j < 16; ++j) written[j] = ptx::pack<true>(U[2 * j], U[2 * j + 1]);
#pragma unroll
      for (int j = 0; j < 32; ++j) Y[j] = ptx::round_tf32(U[j]);
      ptx::hold(S);
      ptx::hold(written);
      if constexpr (reads) {
        ptx::hold(O);
        ptx::hold(Y);
      }
      ptx::wgmma_fence();
#pragma unroll
      for (int kk = 0; kk < 4; ++kk) ptx::wgmma<true, true>(S, written + 4 * kk, ptx::descriptor_mn_major(k, C, kk), true);
      if constexpr (reads) {
        multiply_lower(O, Y, p, true);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::hold(S);
      scale_channels(S, stage.record + D, thread);
      if constexpr (reads) {
        ptx::hold(O);
        stage_results(O, 0, e.scale, values, group, thread);
      }
    }
    if constexpr (reads) send_results(e, w, h, group, chunk, rows, values, thread);
    if (keeps && thread == 0) ptx::wait_stores_read();
    ptx::barrier_arrive(&s.empty[i % kFetched]);
  }
  if (keeps && thread == 0) ptx::wait_stores();
  if (!reads && t.phase == KdaPhase::probe && map) {
    bool left = false;
#pragma unroll
    for (int j = 0; j < kState; ++j) left = left || !(fabsf(S[j]) < kKdaForgotten);
    left = ptx::group_any<5, D / 64 * 128>(left);
    if (threadIdx.x == 0) forgets(t, n, h, segment, blockIdx.z == 2) = left ? 0 : 1;
  } else if (t.phase == KdaPhase::summary || t.phase == KdaPhase::probe) {
#pragma unroll
    for (int j = 0; j < kState; ++j) mapped(segment, map ? 1 : 0, j) = S[j];
  } else if (e.final.data != nullptr && w.ends) {
#pragma unroll
    for (int j = 0; j < kState; ++j) element(e.final, j) = e.out_factor * S[j];
  }
}

template <int D, bool reads>
__device__ void fetch_kda(const Kda& t, const Walk& w, int64_t n, int h, KdaWalkShared<D, reads>& s) {
  const Engine& e = t.e;
  for (int i = 0; i < w.count; ++i) {
    KdaStage<D, reads>& stage = s.stage[i % kFetched];
    uint64_t* full = &s.full[i % kFetched];
    ptx::ring_wait_free(s.empty, i % kFetched, i);
    const int64_t number = (channel_chunk(e.offsets != nullptr, e.T, n, w.begin) + w.first + i) * e.H + h;
    // Without reads K", K' and T alone. Zeros stand between the parts of T and of P.
    constexpr uint32_t kFrom = reads ? 0 : D * 128, kFirst = kda_operands(D) + 8192, kSecond = reads ? 12288 : 4096;
    constexpr uint32_t kBytes = kFirst - kFrom + kSecond + (reads ? 4096 : 0);
    const bool low = !reads && t.back;
    const char* image = t.images + number * t.image;
    ptx::barrier_arrive_expect(full, kBytes + (low ? 2 : 1) * D * 128 + kda_record(D) * 4);
    ptx::load_bytes(stage.record, t.records + number * kda_record(D), kda_record(D) * 4, full);
    ptx::load_bytes(stage.q + kFrom, image + kFrom, kFirst - kFrom, full);
    ptx::load_bytes(stage.t + 12288, image + kFirst, kSecond, full);
    if constexpr (reads) ptx::load_bytes(stage.p + 12288, image + kFirst + kSecond, 4096, full);
    if (low) ptx::load_bytes(stage.q, image + kda_low(D), D * 128, full);
    ptx::load_box(stage.v, &t.v, full, 0, static_cast<int>(w.begin) + (w.first + i) * C, 0, h / e.v.group,
                  static_cast<int>(w.b));
  }
}

template <int D, bool reads>
__device__ void kda_kernel(const Kda& t) {
  extern __shared__ char memory[];
  static_assert(sizeof(KdaWalkShared<D, reads>) + 1024 <= kda_walk_bytes(D) && kda_walk_bytes(D) <= 232448);
  auto& s = ptx::shared_as<KdaWalkShared<D, reads>>(memory);
  const int h = blockIdx.x % t.e.H, segment = blockIdx.y;
  const int64_t n = blockIdx.x / t.e.H;
  // Probes and summaries: 0: what a segment (or its last chunks) leaves of a zero state; of another state: 1: the
  // same, 2: its first chunks.
  const int what = blockIdx.z;
  const bool probe = t.phase == KdaPhase::probe, map = !reads && what > 0;
  Walk w = segment_of(t, n, segment, t.phase != KdaPhase::whole);
  if (w.count == 0 && segment > 0) return;
  if (!reads && (probe || t.phase == KdaPhase::summary)) {
    if (what == 2 ? segment == 0 : w.ends) return;  // nobody ends before the first segment, or starts behind the last
    if (probe) {
      const int skipped = max(w.count - kKdaProbe, 0);
      w.starts = w.starts && skipped == 0;
      w.count -= skipped;
      if (what < 2) w.first += skipped;
    } else if (forgets(t, n, h, segment, false) != 0 || (map && segment == 0)) {
      return;
    }
  }
  for (int i = threadIdx.x; i < kFetched * 256; i += kda_walk_threads(D)) {  // above the diagonal
    KdaStage<D, reads>& stage = s.stage[i / 256];
    reinterpret_cast<uint4*>(stage.t + 8192)[i % 256] = {};
    if constexpr (reads) reinterpret_cast<uint4*>(stage.p + 8192)[i % 256] = {};
  }
  ptx::fence_async_shared();
  share_roles<D>(
      s, [&] { walk_kda<D, reads>(t, w, n, h, segment, map, s); }, [&] { fetch_kda<D, reads>(t, w, n, h, s); });
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kda_walk_threads(64), 1) kda_64(const __grid_constant__ Kda t) {
  kda_kernel<64, true>(t);
}
extern "C" __global__ void __launch_bounds__(kda_walk_threads(64), 1) kda_summary_64(const __grid_constant__ Kda t) {
  kda_kernel<64, false>(t);
}
extern "C" __global__ void __launch_bounds__(kda_walk_threads(128), 1) kda_128(const __grid_constant__ Kda t) {
  kda_kernel<128, true>(t);
}
extern "C" __global__ void __launch_bounds__(kda_walk_threads(128), 1) kda_summary_128(const __grid_constant__ Kda t) {
  kda_kernel<128, false>(t);
}

// The states between segments, S = A S + B in place of B, or, from the last down, their gradients, R = A^T R + what the segment
// adds, in place of that. A block has 8 values of one head, a thread one channel of 4 of them.
__device__ void fold_segments(const Kda& t, int segments, bool back) {
  const Engine& e = t.e;
  const int D = e.K, h = blockIdx.x % e.H, channel = threadIdx.x % D, parts = 256 / D, count = 8 / parts;
  const int value = blockIdx.y * 8 + threadIdx.x / D * count;
  const int64_t n = blockIdx.x / e.H;
  const Walk w = walk_of(e, n, 0, false);
  if (w.length <= kLongest) return;
  const int used = min(segments, static_cast<int>((w.length + kKdaSegment - 1) / kKdaSegment) - (back ? 0 : 1));
  __shared__ float state[128][8];
  const auto map = [&](int i, int which) { return t.maps + (((i * e.N + n) * e.H + h) * 2 + which) * D * D; };
  const auto at = [&](int i) { return (back ? t.dmaps + ((i * e.N + n) * e.H + h) * D * D : map(i, 0)) + channel * D + value; };
  const int step = back ? -1 : 1, first = back ? used - 1 : 0, last = back ? 0 : used;
  for (int v = 0; v < count; ++v) state[channel][value % 8 + v] = at(first)[v];
  __syncthreads();
  for (int i = first + step; i != last; i += step) {
    const float* a = map(i, 1) + channel * (back ? 1 : D);
    const bool nothing = forgets(t, n, h, i, false) != 0;
    float sum[4] = {};
#pragma unroll 4
    for (int c = 0; c < D && !nothing; ++c) {
      const float x = a[c * (back ? D : 1)];
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        if (v < count) sum[v] = fmaf(x, state[c][value % 8 + v], sum[v]);
      }
    }
    __syncthreads();
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      if (v >= count) continue;
      float& b = at(i)[v];
      b += sum[v];
      state[channel][value % 8 + v] = b;
    }
    __syncthreads();
  }
}
extern "C" __global__ void __launch_bounds__(256) kda_fold(const __grid_constant__ Kda t, int segments) {
  fold_segments(t, segments, false);
}
extern "C" __global__ void __launch_bounds__(256) kda_fold_back(const __grid_constant__ Kda t, int segments) {
  fold_segments(t, segments, true);
}

}  // namespace linnet::cuda
