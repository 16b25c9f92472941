// The gradient of the state of the delta rule with a decay per channel, from the last chunk to the first (kda.h):
// the walk of walk.cu backwards in time, with R^T in f32 accumulators.
//
// Segments of long sequences: a first walk finds what each leaves of a zero gradient (where its first chunks forget, they
// alone); with A^T they are folded from the last one down.
#include "mechanisms/recurrence/cuda/kda/kda.cuh"

namespace linnet::cuda {
namespace {

template <int D>
struct KdaBackStage {
  alignas(1024) char q[D * 128];
  char read[D * 128], k[D * 128], t[kKdaSystem], p[8192], dout[D * 128];  // t: T^T, p: P T; at last dY in place of dO
  float record[kda_record(D)];
};
template <int D>
struct KdaReverseShared {
  KdaBackStage<D> stage[kFetched];
  alignas(1024) char state[D / 64][D * 128];  // on its way to memory
  uint64_t full[kFetched], empty[kFetched];
};

// The tokens of a chunk one by one, from the last; dY in place of dO.
template <int D>
__device__ void step_back(const Kda& t, const Walk& w, int h, int chunk, int rows, int thread, char* douts, float (&R)[D / 2]) {
  const Engine& e = t.e;
  const int lane = thread % 32, own = thread / 32 * 16 + lane / 4;
  const auto* q = static_cast<const uint16_t*>(e.q.data);
  const auto* k = static_cast<const uint16_t*>(e.k.data);
#pragma unroll 1
  for (int i = rows - 1; i >= 0; --i) {
    const int64_t token = w.begin + static_cast<int64_t>(chunk) * C + i;
    const int64_t at = lane % 4 * 2, q_at = row_of(e.q, w.b, token, h) + at, k_at = row_of(e.k, w.b, token, h) + at;
    const int64_t g_at = row_of(e.g, w.b, token, h) + at;
    auto* value = reinterpret_cast<__nv_bfloat16*>(douts + ptx::tile_byte(C, i, own));
    auto* below = reinterpret_cast<__nv_bfloat16*>(douts + ptx::tile_byte(C, i, own + 8));
    const float d[2] = {e.scale * __bfloat162float(*value), e.scale * __bfloat162float(*below)};
    float read[2] = {};
#pragma unroll
    for (int j = 0; j < D / 2; j += 4) {
      const float2 x = ptx::unpack<true>(*reinterpret_cast<const uint32_t*>(k + k_at + j * 2));
      const float2 y = ptx::unpack<true>(*reinterpret_cast<const uint32_t*>(q + q_at + j * 2));
      R[j] = fmaf(y.x, d[0], R[j]);
      R[j + 1] = fmaf(y.y, d[0], R[j + 1]);
      R[j + 2] = fmaf(y.x, d[1], R[j + 2]);
      R[j + 3] = fmaf(y.y, d[1], R[j + 3]);
      read[0] = fmaf(R[j], x.x, fmaf(R[j + 1], x.y, read[0]));
      read[1] = fmaf(R[j + 2], x.x, fmaf(R[j + 3], x.y, read[1]));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      for (int step = 1; step < 4; step *= 2) read[half] += __shfl_xor_sync(0xffffffff, read[half], step);
    }
    float beta = e.beta_factor * ptx::load(e.beta.data, e.beta.dtype, row_of(e.beta, w.b, token, h));
    if (beta == 0) beta = kKdaLeastBeta;
    const float taken[2] = {beta * read[0], beta * read[1]};
#pragma unroll
    for (int j = 0; j < D / 2; j += 4) {
      const float2 x = ptx::unpack<true>(*reinterpret_cast<const uint32_t*>(k + k_at + j * 2));
      float2 g = {ptx::load(e.g.data, e.g.dtype, g_at + j * 2), ptx::load(e.g.data, e.g.dtype, g_at + j * 2 + 1)};
      g = {ptx::exp2_fast(clamp_gate(g.x * kLog2E)), ptx::exp2_fast(clamp_gate(g.y * kLog2E))};
      R[j] = g.x * fmaf(-taken[0], x.x, R[j]);
      R[j + 1] = g.y * fmaf(-taken[0], x.y, R[j + 1]);
      R[j + 2] = g.x * fmaf(-taken[1], x.x, R[j + 2]);
      R[j + 3] = g.y * fmaf(-taken[1], x.y, R[j + 3]);
    }
    __syncwarp();
    if (lane % 4 == 0) {
      *value = __float2bfloat16_rn(taken[0]);
      *below = __float2bfloat16_rn(taken[1]);
    }
    __syncwarp();
  }
}

template <int D>
__device__ void walk_back(const Kda& t, const Walk& w, int64_t n, int h, int segment, KdaReverseShared<D>& s) {
  const Engine& e = t.e;
  const int group = threadIdx.x / 128;
  int thread = threadIdx.x % 128;
  constexpr int kState = D / 2;
  float R[kState];
  const bool summary = t.phase == KdaPhase::summary;
  const auto element = [&](const States& states, int j) -> float& { return state_element(states, n, h, j, group, thread); };
  const auto mapped = [&](int number, int j) -> float& {  // [D channels, D values]
    const int64_t row = ((number * e.N + n) * e.H + h) * D + state_channel(j, thread);
    return t.dmaps[row * D + state_value(j, group, thread)];
  };
#pragma unroll
  for (int j = 0; j < kState; ++j) {
    if (w.ends) {
      R[j] = t.dfinal.data != nullptr ? element(t.dfinal, j) : 0;
    } else {
      R[j] = summary ? 0 : mapped(segment + 1, j);
    }
  }
  for (int i = 0; i < w.count; ++i) {
    KdaBackStage<D>& stage = s.stage[i % kFetched];
    const int chunk = w.first - i, rows = chunk_rows(w, chunk);
    const int64_t number = (channel_chunk(e.offsets != nullptr, e.T, n, w.begin) + chunk) * e.H + h;
    char* douts = stage.dout + group * kPanel;
    ptx::forget(thread);
    ptx::ring_wait(s.full, i % kFetched, i);
    const bool steps = stage.record[2 * D] != 0;
    if (!steps) scale_channels(R, stage.record + D, thread);
    if (!summary) {
      keep_state(R, s.state[group], t.dstates + (number * (D / 64) + group) * (D * 128), i > 0, group, thread);
    }
    if (rows < C) {  // what lies behind the sequence counts as zero, NaN or not
      for (int piece = thread; piece < (C - rows) * 8; piece += 128) {
        *reinterpret_cast<uint4*>(douts + (rows + piece / 8) * 128 + piece % 8 * 16) = {};
      }
      ptx::fence_async_shared();
      sync_values(group);
    }
    if (steps) {
      step_back<D>(t, w, h, chunk, rows, thread, douts, R);
    } else {
      const uint32_t q = ptx::shared_address(stage.q), read = ptx::shared_address(stage.read);
      const uint32_t k = ptx::shared_address(stage.k), system = ptx::shared_address(stage.t);
      const uint32_t p = ptx::shared_address(stage.p), d = ptx::shared_address(douts);
      float Y[32];
      {
        float N[32];
        uint32_t A[kState / 2];
#pragma unroll
        for (int j = 0; j < kState; j += 2) A[j / 2] = ptx::pack<true>(R[j], R[j + 1]);
        ptx::hold(A);
        ptx::hold(R);
        ptx::wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < D / 16; ++kk) {
          ptx::wgmma<true, false>(N, A + 4 * kk, ptx::descriptor_k_major(k, C, kk), kk > 0);
        }
        ptx::wgmma_commit();
#pragma unroll
        for (int kk = 0; kk < 4; ++kk) {
          ptx::wgmma_shared<true, true, true>(Y, ptx::descriptor_mn_major(d, C, kk), ptx::descriptor_mn_major(p, C, kk),
                                              kk > 0);
        }
#pragma unroll
        for (int kk = 0; kk < 4; ++kk) {
          ptx::wgmma_shared<true, true, true>(R, ptx::descriptor_mn_major(d, C, kk), ptx::descriptor_mn_major(q, C, kk), true);
        }
        ptx::wgmma_commit();
        ptx::wgmma_wait<1>();
        ptx::hold(N);
        uint32_t B[32];
#pragma unroll
        for (int j = 0; j < 32; ++j) B[j] = ptx::round_tf32(N[j]);
        ptx::hold(B);
        ptx::wgmma_wait<0>();
        ptx::hold(Y);
        ptx::hold(R);
        ptx::wgmma_fence();
        multiply_upper(Y, B, system, true);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::hold(Y);
      }
      uint32_t written[16];
#pragma unroll
      for (int j = 0; j < 16; ++j) written[j] = ptx::pack<true>(-Y[2 * j], -Y[2 * j + 1]);
      ptx::hold(R);
      ptx::hold(written);
      ptx::wgmma_fence();
#pragma unroll
      for (int kk = 0; kk < 4; ++kk) ptx::wgmma<true, true>(R, written + 4 * kk, ptx::descriptor_mn_major(read, C, kk), true);
      ptx::wgmma_commit();
      if (!summary) stage_results(Y, 0, 1, douts, group, thread);
      ptx::wgmma_wait<0>();
      ptx::hold(R);
      scale_channels(R, stage.record, thread);
    }
    if (!summary) {
      ptx::fence_async_shared();
      sync_values(group);
      if (thread == 0) {
        ptx::store_bytes(t.adjoints + number * (D * 128) + group * kPanel, douts, kPanel);
        ptx::wait_stores_read();
      }
    }
    ptx::barrier_arrive(&s.empty[i % kFetched]);
  }
  if (thread == 0) ptx::wait_stores();
  if (summary) {
#pragma unroll
    for (int j = 0; j < kState; ++j) mapped(segment, j) = R[j];
  } else if (t.dinitial.data != nullptr && w.starts) {
#pragma unroll
    for (int j = 0; j < kState; ++j) element(t.dinitial, j) = R[j];
  }
}

template <int D>
__device__ void fetch_back(const Kda& t, const Walk& w, int64_t n, int h, KdaReverseShared<D>& s) {
  const Engine& e = t.e;
  for (int i = 0; i < w.count; ++i) {
    KdaBackStage<D>& stage = s.stage[i % kFetched];
    uint64_t* full = &s.full[i % kFetched];
    ptx::ring_wait_free(s.empty, i % kFetched, i);
    const int chunk = w.first - i;
    const int64_t number = (channel_chunk(e.offsets != nullptr, e.T, n, w.begin) + chunk) * e.H + h;
    const char* image = t.images + number * t.image;
    ptx::barrier_arrive_expect(full, kda_operands(D) + kKdaSystem + 8192 + D * 128 + kda_record(D) * 4);
    ptx::load_bytes(stage.record, t.records + number * kda_record(D), kda_record(D) * 4, full);
    ptx::load_bytes(stage.q, image, kda_operands(D), full);
    ptx::load_bytes(stage.t, image + kda_operands(D) + kKdaSystem, kKdaSystem + 8192, full);
    ptx::load_box(stage.dout, &t.dout, full, 0, static_cast<int>(w.begin) + chunk * C, 0, h, static_cast<int>(w.b));
  }
}

template <int D>
__device__ void reverse_kda(const Kda& t) {
  extern __shared__ char memory[];
  static_assert(sizeof(KdaReverseShared<D>) + 1024 <= kda_reverse_bytes(D) && kda_reverse_bytes(D) <= 232448);
  auto& s = ptx::shared_as<KdaReverseShared<D>>(memory);
  const bool summary = t.phase == KdaPhase::summary;
  const int h = blockIdx.x % t.e.H, segment = blockIdx.y + (summary ? 1 : 0);
  const int64_t n = blockIdx.x / t.e.H;
  Walk w = segment_of(t, n, segment, t.phase != KdaPhase::whole);
  if (w.count == 0 && segment > 0) return;
  if (summary && forgets(t, n, h, segment, true) != 0) {
    w.count = min(w.count, kKdaProbe);
    w.ends = false;
  }
  w.first += w.count - 1;
  share_roles<D>(
      s, [&] { walk_back<D>(t, w, n, h, segment, s); }, [&] { fetch_back<D>(t, w, n, h, s); });
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kda_walk_threads(64), 1) kda_reverse_64(const __grid_constant__ Kda t) {
  reverse_kda<64>(t);
}
extern "C" __global__ void __launch_bounds__(kda_walk_threads(128), 1) kda_reverse_128(const __grid_constant__ Kda t) {
  reverse_kda<128>(t);
}

}  // namespace linnet::cuda
