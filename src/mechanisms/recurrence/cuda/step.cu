// The recurrence token by token, for every width up to 256 and every type: the kernel that is right for all calls, and the one
// for f32, where no matrix unit may round.
//
// A warp owns 4 columns of one head's state; 8 lanes share a column, each with kRows contiguous rows in registers. Sums of 64
// tokens are kept apart from the state before them (rounding then grows with T / 64, as in the chunked form):
//
//   S^T x = exp(G) S_0^T x + P^T x        G: log decay since S_0;  P: what the tokens since then wrote
//
// A decay near 1 is applied as P + (expm1(g) P + k u^T): one rounding of P (docs/notes/recurrence.md).
#include "mechanisms/recurrence/cuda/engine.h"
#include "mechanisms/recurrence/cuda/map.cuh"
#include "ptx/rows.cuh"

namespace linnet::cuda {
namespace {

constexpr int kWarps = 4, kColumns = 4, kPart = 64;

__device__ float over_rows(float x) {  // the sum over the 8 lanes of a column
  for (int lane = 4; lane < 32; lane *= 2) x += __shfl_xor_sync(0xffffffff, x, lane);
  return x;
}

// x[i] = map(row[i]) for i < count, else 0.
template <int kRows>
__device__ __forceinline__ void load_row(const Rows& rows, int64_t place, int count, float (&x)[kRows]) {
  load_numbers(rows, place, count, x);
  if (rows.map == Map::identity) return;
#pragma unroll
  for (int i = 0; i < kRows; ++i) x[i] = i < count ? apply(rows.map, x[i]) : 0;
}

// A decay as the two numbers that apply it: x becomes multiply ? a x + y : x + (a x + y).
struct Factor {
  float a = 0;
  bool multiply = false;
  __device__ explicit Factor(float g) : a(g > kMinusLog2 ? expm1f(g) : expf(g)), multiply(!(g > kMinusLog2)) {}
  __device__ float operator()(float x, float y) const { return multiply ? fmaf(a, x, y) : x + fmaf(a, x, y); }
};

template <int kRows, bool kChannel, bool kSums>
__device__ void step(const Engine& e) {
  const int lane = threadIdx.x % 32, first = lane / kColumns * kRows;
  const int column = (blockIdx.y * kWarps + threadIdx.x / 32) * kColumns + lane % kColumns;
  const int h = blockIdx.x % e.H;
  const int64_t n = blockIdx.x / e.H;
  const bool mine = column < e.V;
  int64_t b = n, begin = 0, end = e.T;
  if (e.offsets != nullptr) {
    b = 0;
    begin = offset(e, n);
    end = offset(e, n + 1);
  }
  const auto state_at = [&](const States& s, int row) { return n * s.stride_n + h * s.stride_h + row * s.stride_row; };

  float S[kRows], P[kRows], z[kSums ? kRows : 1], Pz[kSums ? kRows : 1], G[kChannel ? kRows : 1];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = first + i;
    S[i] = P[i] = 0;
    if (kChannel) G[i] = 0;
    if (row < e.K && mine && e.initial.data != nullptr) {
      S[i] = e.in_factor * e.initial.data[state_at(e.initial, row) + column * e.initial.stride_column];
    }
    if (kSums) {
      Pz[i] = 0;
      z[i] = row < e.K && e.initial_z.data != nullptr ? e.initial_z.data[state_at(e.initial_z, row)] : 0;
    }
  }
  if (!kChannel) G[0] = 0;

  const auto fold = [&] {  // S_0 := the state now
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (kChannel || i == 0) {
        const Factor over(G[kChannel ? i : 0]);
        if (kChannel) {
          S[i] = over(S[i], P[i]);
        } else {
#pragma unroll
          for (int j = 0; j < kRows; ++j) S[j] = over(S[j], P[j]);
        }
      }
      if (kChannel) G[i] = 0;
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) P[i] = 0;
    G[0] = 0;
    if (kSums) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        z[i] += Pz[i];
        Pz[i] = 0;
      }
    }
  };
  const float rate = e.steps.A == nullptr ? 0 : e.steps.A[h * e.steps.stride_A], bias = step_bias(e.steps, h);
  const auto decay = [&](int64_t t) {  // the decay of token t, or none where there is no such token
    if (e.g_width == 0) return;
    const bool none = t < begin || t >= end;
    if constexpr (kChannel) {
      float g[kRows];
      load_row(e.g, row_of(e.g, b, t, h) + first, none ? 0 : e.K - first, g);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        G[i] += g[i];
        P[i] = Factor(g[i])(P[i], 0);
      }
    } else {
      float g = none ? 0 : ptx::load(e.g.data, e.g.dtype, row_of(e.g, b, t, h));
      if (e.steps.A != nullptr && !none) g = step_decay(step_size(e.steps, g + bias), rate);
      const Factor over(g);
      G[0] += g;
#pragma unroll
      for (int i = 0; i < kRows; ++i) P[i] = over(P[i], 0);
    }
  };
  const auto read = [&](const float(&x)[kRows]) {  // S^T x, for the column
    float from_state = 0, from_part = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      from_state = fmaf(kChannel ? x[i] * expf(G[i]) : x[i], S[i], from_state);
      from_part = fmaf(x[i], P[i], from_part);
    }
    if (!kChannel && e.g_width != 0) from_state *= expf(G[0]);
    return over_rows(from_state + from_part);
  };

  const auto normalize = [](float(&x)[kRows]) {
    float squares = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) squares = fmaf(x[i], x[i], squares);
    const float factor = 1 / sqrtf(over_rows(squares) + 1e-6f);
#pragma unroll
    for (int i = 0; i < kRows; ++i) x[i] *= factor;
  };

  const auto save = [&](int64_t chunk) {  // nothing was written since S_0
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = first + i;
      if (row >= e.K || !mine) continue;
      const float x = Factor(G[kChannel ? i : 0])(S[i], 0);
      const int64_t place = ((saved_slot(e, n, begin, chunk) * e.H + h) * e.K + row) * e.V + column;
      ptx::store(e.saved, saved_dtype(e.v.dtype, e.K, e.V), place, x);
    }
  };

  for (int64_t i = 0; i < end - begin; ++i) {
    const int64_t t = e.reverse ? end - 1 - i : begin + i;
    if (e.saved != nullptr && !e.reverse && i % kPart == 0) save(i / kPart);
    decay(e.reverse ? t + 1 : t);
    if (e.saved != nullptr && e.reverse && ((t - begin) % kPart == kPart - 1 || i == 0)) save((t - begin) / kPart);
    if (e.k.data != nullptr && e.v.data != nullptr && (e.write_mask == nullptr || e.write_mask[b * e.mask_stride_b + t] != 0)) {
      float k[kRows];
      load_row(e.k, row_of(e.k, b, t, h) + first, e.K - first, k);
      if (e.l2_norm) normalize(k);
      float u = mine ? apply(e.v.map, ptx::load(e.v.data, e.v.dtype, row_of(e.v, b, t, h) + column)) : 0;
      if (e.steps.A != nullptr) u *= step_size(e.steps, ptx::load(e.g.data, e.g.dtype, row_of(e.g, b, t, h)) + bias);
      if (e.beta.data != nullptr) {
        u = e.beta_factor * ptx::load(e.beta.data, e.beta.dtype, row_of(e.beta, b, t, h)) * (u - read(k));
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        P[r] = fmaf(k[r], u, P[r]);
        if (kSums) Pz[r] += k[r];
      }
    }
    if (e.out.data != nullptr) {
      float q[kRows];
      load_row(e.q, row_of(e.q, b, t, h) + first, e.q.data == nullptr ? 0 : e.K - first, q);
      if (e.l2_norm) normalize(q);
      float o = e.scale * read(q);
      if (kSums && e.normalize) {
        float weight = 0;
#pragma unroll
        for (int r = 0; r < kRows; ++r) weight = fmaf(q[r], z[r] + Pz[r], weight);
        const float den = fmaf(e.scale, over_rows(weight), e.eps);
        o /= den;
        if (column == 0 && lane == 0 && e.den.data != nullptr) {
          ptx::store(const_cast<void*>(e.den.data), e.den.dtype, row_of(e.den, b, t, h), den);
        }
      }
      if (mine && lane < kColumns) {
        if (e.out_bias.data != nullptr) o += e.out_bias.data[state_at(e.out_bias, 0) + column * e.out_bias.stride_column];
        if (e.out_source.data != nullptr) {
          const int64_t place = row_of(e.out_source, b, t, h) + column;
          o *= derivative(e.out_source.map, ptx::load(e.out_source.data, e.out_source.dtype, place));
        }
        if (e.finish.D != nullptr) {
          o = fmaf(skip_of(e.finish, h, column), ptx::load(e.v.data, e.v.dtype, row_of(e.v, b, t, h) + column), o);
        }
        if (e.finish.z.data != nullptr) {
          const float z = ptx::load(e.finish.z.data, e.finish.z.dtype, row_of(e.finish.z, b, t, h) + column);
          o *= z * sigmoid(z);
        }
        if (e.out_mask != nullptr && e.out_mask[b * e.mask_stride_b + t] == 0) o = 0;
        ptx::store(const_cast<void*>(e.out.data), e.out.dtype, row_of(e.out, b, t, h) + column, o);
      }
    }
    if ((e.reverse ? t - begin : i + 1) % kPart == 0) fold();
  }
  if (e.reverse) decay(begin);
  fold();
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = first + i;
    if (row >= e.K) continue;
    if (mine && e.final.data != nullptr) {
      e.final.data[state_at(e.final, row) + column * e.final.stride_column] = e.out_factor * S[i];
    }
    if (kSums && column == 0 && e.final_z.data != nullptr) e.final_z.data[state_at(e.final_z, row)] = z[i];
  }
}

}  // namespace

#define LINNET_STEP(rows)                                                                                           \
  extern "C" __global__ void __launch_bounds__(32 * kWarps) step_##rows(const __grid_constant__ Engine e) {         \
    step<rows, false, false>(e);                                                                                    \
  }                                                                                                                 \
  extern "C" __global__ void __launch_bounds__(32 * kWarps) step_channel_##rows(const __grid_constant__ Engine e) { \
    step<rows, true, false>(e);                                                                                     \
  }                                                                                                                 \
  extern "C" __global__ void __launch_bounds__(32 * kWarps) step_sums_##rows(const __grid_constant__ Engine e) {    \
    step<rows, false, true>(e);                                                                                     \
  }
LINNET_STEP(4)
LINNET_STEP(8)
LINNET_STEP(16)
LINNET_STEP(32)

}  // namespace linnet::cuda
