// The gradients of a recurrence in f32 (gradients.h), in chunks of 32 tokens. E are the decays between rows, A =
// tril(K K^T E, -1), P = scale tril(Q K^T E); without beta A is zero and beta 1. In place of N and dY, which carry the factor
// beta, stand r = N / beta and z = dY / beta, so that nothing is divided by a beta of 0:
//
//   record      r_i = v_i - read_i k_i S_0 - sum_j<i A_ij beta_j r_j              S = total S_0 + sum_i write_i k_i^T N_i
//   reverse     z_i = write_i k_i dS + sum_j P_ji dO_j - sum_j>i A_ji beta_j z_j  dS = total dS + sum_i read_i (scale q_i^T
//   dO_i
//               - k_i^T dY_i)
//   gradients   as delta/gradients.cu
//
// The walks have a block for each 32 value channels of a head, the gradients one for each chunk; 256 threads.
#include "mechanisms/recurrence/cuda/chunk/gradients.h"
#include "mechanisms/recurrence/cuda/map.cuh"

namespace linnet::cuda {
namespace {

constexpr int R = kDeltaChunk, W = kDeltaColumns, kThreads = 256;

struct Sequence {
  int64_t b, begin, length;
};
__device__ Sequence sequence_of(const Engine& e, int64_t n) {
  if (e.offsets == nullptr) return {n, 0, e.T};
  const int64_t begin = offset(e, n), end = offset(e, n + 1);
  return {0, begin, end > begin ? end - begin : 0};
}

// The decays of a chunk's rows, in double until they are differences: those keep all that f32 has.
struct Scales {
  double sums[R];
  float read[R], write[R], beta[R];
  float over;  // what the chunk multiplies a state by, less 1 where `near`
  bool near;
};
__device__ void load_scales(const Engine& e, const Sequence& w, int h, int64_t first, int rows, Scales& s) {
  if (threadIdx.x >= 32) return;
  const int lane = threadIdx.x;
  const int64_t t = w.begin + first + lane;
  double g = 0;
  if (lane < rows && e.g_width != 0) {
    g = ptx::load(e.g.data, e.g.dtype, row_of(e.g, w.b, t, h));
    if (g < -1e4) g = -1e4;
  }
  for (int step = 1; step < 32; step *= 2) {
    const double before = __shfl_up_sync(0xffffffff, g, step);
    if (lane >= step) g += before;
  }
  const double all = __shfl_sync(0xffffffff, g, 31);
  s.sums[lane] = g;
  s.read[lane] = expf(static_cast<float>(g));
  s.write[lane] = expf(static_cast<float>(all - g));
  float beta = lane < rows ? 1 : 0;
  if (lane < rows && e.beta.data != nullptr) {
    beta = e.beta_factor * ptx::load(e.beta.data, e.beta.dtype, row_of(e.beta, w.b, t, h));
  }
  s.beta[lane] = beta;
  if (lane == 0) {
    const auto total = static_cast<float>(all);
    s.near = total > kMinusLog2;
    s.over = s.near ? expm1f(total) : expf(total);
  }
}
__device__ __forceinline__ float decayed(const Scales& s, float x, float added) {
  return s.near ? x + fmaf(s.over, x, added) : fmaf(s.over, x, added);
}
__device__ __forceinline__ float between(const Scales& s, int i, int j) {
  return expf(static_cast<float>(s.sums[i] - s.sums[j]));
}

// The sum over the 8 neighbours that share a row.
__device__ __forceinline__ float over_row(float x) {
  for (int step = 1; step < 8; step *= 2) x += __shfl_xor_sync(0xffffffff, x, step);
  return x;
}

// Rows of keys or queries, zero outside, of length 1 where the call says so; `inverse` then has 1 over their lengths.
template <int KT>
__device__ void load_keys(const Engine& e, const Rows& from, const Sequence& w, int h, int64_t first, int rows,
                          float (&to)[R][KT + 1], float* inverse = nullptr) {
  const int row = threadIdx.x / 8, lane = threadIdx.x % 8;
  const int64_t place = row_of(from, w.b, w.begin + first + row, h);
  float squares = 0;
  for (int k = lane; k < KT; k += 8) {
    const float x = row < rows && k < e.K ? ptx::load(from.data, from.dtype, place + k) : 0;
    squares = fmaf(x, x, squares);
    to[row][k] = x;
  }
  if (!e.l2_norm) return;
  const float factor = 1 / sqrtf(over_row(squares) + 1e-6f);
  for (int k = lane; k < KT; k += 8) to[row][k] *= factor;
  if (inverse != nullptr && lane == 0) inverse[row] = factor;
}
// Values of W columns from `column` on.
__device__ void load_values(const Engine& e, const Rows& from, const Sequence& w, int h, int64_t first, int rows, int column,
                            float (&to)[R][W + 1]) {
  for (int i = threadIdx.x; i < R * W; i += kThreads) {
    const int t = i / W, c = column + i % W;
    const bool in = t < rows && c < e.V && from.data != nullptr;
    to[t][i % W] = in ? ptx::load(from.data, from.dtype, row_of(from, w.b, w.begin + first + t, h) + c) : 0;
  }
}

// x[i][j] of rows ty, ty + 16 of `a` and tx, tx + 16 of `b`: their products over `depth`.
template <class A, class B>
__device__ __forceinline__ void multiply(const A& a, const B& b, int depth, float (&x)[2][2]) {
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  x[0][0] = x[0][1] = x[1][0] = x[1][1] = 0;
#pragma unroll 4
  for (int k = 0; k < depth; ++k) {
    const float a0 = a[ty][k], a1 = a[ty + 16][k], b0 = b[tx][k], b1 = b[tx + 16][k];
    x[0][0] = fmaf(a0, b0, x[0][0]);
    x[0][1] = fmaf(a0, b1, x[0][1]);
    x[1][0] = fmaf(a1, b0, x[1][0]);
    x[1][1] = fmaf(a1, b1, x[1][1]);
  }
}
template <class Work>
__device__ __forceinline__ void for_block(const float (&x)[2][2], const Work& work) {
#pragma unroll
  for (int i = 0; i < 4; ++i) work(threadIdx.x / 16 + i / 2 * 16, threadIdx.x % 16 + i % 2 * 16, x[i / 2][i % 2]);
}

template <int KT>
struct WalkShared {
  float k[R][KT + 1], q[R][KT + 1], state[W][KT + 1];  // state: S^T or dS^T
  float a[R][R + 1], p[R][R + 1], x[R][W + 1], y[R][W + 1];
  Scales scales;
};

// state[c][k] = total state[c][k] + sum over the chunk of y[t][c] k[t][k] (and of x[t][c] q[t][k]).
template <int KT, bool queries>
__device__ void update(WalkShared<KT>& s) {
  const int c = threadIdx.x / 8, lane = threadIdx.x % 8;
  float sum[KT / 8] = {};
  for (int t = 0; t < R; ++t) {
    const float y = s.y[t][c], x = queries ? s.x[t][c] : 0;
#pragma unroll
    for (int j = 0; j < KT / 8; ++j) {
      sum[j] = fmaf(y, s.k[t][lane + 8 * j], sum[j]);
      if constexpr (queries) sum[j] = fmaf(x, s.q[t][lane + 8 * j], sum[j]);
    }
  }
#pragma unroll
  for (int j = 0; j < KT / 8; ++j) {
    float& state = s.state[c][lane + 8 * j];
    state = decayed(s.scales, state, sum[j]);
  }
}

template <int KT>
__device__ void load_state(const States& from, int64_t n, int h, int K, int V, int column, WalkShared<KT>& s) {
  for (int i = threadIdx.x; i < W * KT; i += kThreads) {
    const int c = i / KT, k = i % KT;
    const bool in = from.data != nullptr && column + c < V && k < K;
    s.state[c][k] =
        in ? from.data[n * from.stride_n + h * from.stride_h + k * from.stride_row + (column + c) * from.stride_column] : 0;
  }
}
template <int KT>
__device__ void save_state(float* image, int K, int V, int column, const WalkShared<KT>& s) {  // [V, K]
  for (int i = threadIdx.x; i < W * KT; i += kThreads) {
    const int c = i / KT, k = i % KT;
    if (column + c < V && k < K) image[static_cast<int64_t>(column + c) * K + k] = s.state[c][k];
  }
}
__device__ void save_rows(float* image, int V, int column, const float (&x)[R][W + 1]) {  // [R, V]
  for (int i = threadIdx.x; i < R * W; i += kThreads) {
    if (column + i % W < V) image[static_cast<int64_t>(i / W) * V + column + i % W] = x[i / W][i % W];
  }
}

template <int KT>
__device__ void record(const DeltaChunks& chunks) {
  extern __shared__ char memory[];
  static_assert(sizeof(WalkShared<KT>) <= chunk_walk_bytes(KT));
  auto& s = *reinterpret_cast<WalkShared<KT>*>(memory);
  const Engine& e = chunks.e;
  const int h = blockIdx.x % e.H, column = blockIdx.y * W;
  const int64_t n = blockIdx.x / e.H;
  const Sequence w = sequence_of(e, n);
  const bool corrects = e.beta.data != nullptr;
  load_state<KT>(e.initial, n, h, e.K, e.V, column, s);
  for (int64_t first = 0; first < w.length; first += R) {
    const int rows = static_cast<int>(min(static_cast<int64_t>(R), w.length - first));
    const int64_t place = chunk_slot(e, n, w.begin, first / R) * e.H + h;
    __syncthreads();
    load_keys<KT>(e, e.k, w, h, first, rows, s.k);
    load_values(e, e.v, w, h, first, rows, column, s.x);
    load_scales(e, w, h, first, rows, s.scales);
    __syncthreads();
    save_state<KT>(chunks.states + place * e.K * e.V, e.K, e.V, column, s);
    if (corrects) {
      float x[2][2];
      multiply(s.k, s.k, e.K, x);
      for_block(x, [&](int i, int j, float sum) { s.a[i][j] = j < i ? sum * between(s.scales, i, j) : 0; });
      multiply(s.k, s.state, e.K, x);
      for_block(x, [&](int i, int c, float sum) { s.x[i][c] = fmaf(-s.scales.read[i], sum, s.x[i][c]); });
    }
    __syncthreads();
    if (threadIdx.x < W) {
      const int c = threadIdx.x;
      float N[R];
#pragma unroll
      for (int i = 0; i < R; ++i) {
        float r = s.x[i][c];
        if (corrects) {
          float sum = 0;
#pragma unroll
          for (int j = 0; j < i; ++j) sum = fmaf(s.a[i][j], N[j], sum);
          r -= sum;
        }
        N[i] = s.scales.beta[i] * r;
        s.x[i][c] = r;
        s.y[i][c] = s.scales.write[i] * N[i];
      }
    }
    __syncthreads();
    save_rows(chunks.residuals + place * R * e.V, e.V, column, s.x);
    update<KT, false>(s);
  }
}

template <int KT>
__device__ void reverse(const DeltaChunks& chunks) {
  extern __shared__ char memory[];
  auto& s = *reinterpret_cast<WalkShared<KT>*>(memory);
  const Engine& e = chunks.e;
  const int h = blockIdx.x % e.H, column = blockIdx.y * W;
  const int64_t n = blockIdx.x / e.H;
  const Sequence w = sequence_of(e, n);
  const bool corrects = e.beta.data != nullptr;
  load_state<KT>(chunks.d.dfinal, n, h, e.K, e.V, column, s);
  for (int64_t chunk = (w.length + R - 1) / R - 1; chunk >= 0; --chunk) {
    const int64_t first = chunk * R, place = chunk_slot(e, n, w.begin, chunk) * e.H + h;
    const int rows = static_cast<int>(min(static_cast<int64_t>(R), w.length - first));
    __syncthreads();
    load_keys<KT>(e, e.k, w, h, first, rows, s.k);
    load_keys<KT>(e, e.q, w, h, first, rows, s.q);
    load_values(e, chunks.d.dout, w, h, first, rows, column, s.x);
    load_scales(e, w, h, first, rows, s.scales);
    __syncthreads();
    save_state<KT>(chunks.dstates + place * e.K * e.V, e.K, e.V, column, s);
    float x[2][2], y[2][2];
    if (corrects) {
      multiply(s.k, s.k, e.K, x);
      for_block(x, [&](int i, int j, float sum) { s.a[i][j] = j < i ? sum * between(s.scales, i, j) : 0; });
    }
    multiply(s.q, s.k, e.K, x);
    for_block(x, [&](int i, int j, float sum) { s.p[j][i] = j <= i ? e.scale * sum * between(s.scales, i, j) : 0; });
    multiply(s.k, s.state, e.K, y);
    __syncthreads();
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int t = ty + i / 2 * 16, c = tx + i % 2 * 16;
      float sum = 0;
      for (int j = t; j < R; ++j) sum = fmaf(s.p[t][j], s.x[j][c], sum);
      s.y[t][c] = fmaf(s.scales.write[t], y[i / 2][i % 2], sum);
    }
    __syncthreads();
    if (threadIdx.x < W) {
      const int c = threadIdx.x;
      float Y[R];
#pragma unroll
      for (int i = R - 1; i >= 0; --i) {
        float z = s.y[i][c];
        if (corrects) {
          float sum = 0;
#pragma unroll
          for (int j = i + 1; j < R; ++j) sum = fmaf(s.a[j][i], Y[j], sum);
          z -= sum;
        }
        Y[i] = s.scales.beta[i] * z;
        s.y[i][c] = z;
      }
    }
    __syncthreads();
    save_rows(chunks.adjoints + place * R * e.V, e.V, column, s.y);
    __syncthreads();
    for (int i = threadIdx.x; i < R * W; i += kThreads) {
      const int t = i / W, c = i % W;
      s.x[t][c] *= e.scale * s.scales.read[t];
      s.y[t][c] *= corrects ? -s.scales.read[t] * s.scales.beta[t] : 0;
    }
    __syncthreads();
    update<KT, true>(s);
  }
  const States& to = chunks.d.dinitial;
  if (to.data == nullptr) return;
  __syncthreads();
  for (int i = threadIdx.x; i < W * KT; i += kThreads) {
    const int c = i / KT, k = i % KT;
    if (column + c < e.V && k < e.K) {
      to.data[n * to.stride_n + h * to.stride_h + k * to.stride_row + (column + c) * to.stride_column] = s.state[c][k];
    }
  }
}

template <int KT>
struct GradientsShared {
  float k[R][KT + 1], q[R][KT + 1], state[W][KT + 1];
  float dout[R][W + 1], r[R][W + 1], z[R][W + 1], dp[R][R + 1], da[R][R + 1];
  Scales scales;
  float dbeta[R], queries[R], keys[R], written[R], rows[R], inverse_q[R], inverse_k[R];
  float over[kThreads / 32];
};

template <int KT>
__device__ void gradients(const DeltaChunks& chunks) {
  extern __shared__ char memory[];
  static_assert(sizeof(GradientsShared<KT>) <= chunk_gradients_bytes(KT));
  auto& s = *reinterpret_cast<GradientsShared<KT>*>(memory);
  const Engine& e = chunks.e;
  const DeltaGradients& d = chunks.d;
  const int h = blockIdx.x % e.H, row = threadIdx.x / 8, lane = threadIdx.x % 8;
  const int64_t n = blockIdx.x / e.H;
  const Sequence w = sequence_of(e, n);
  const int64_t first = static_cast<int64_t>(blockIdx.y) * R;
  if (first >= w.length) return;
  const int rows = static_cast<int>(min(static_cast<int64_t>(R), w.length - first));
  const int64_t place = chunk_slot(e, n, w.begin, blockIdx.y) * e.H + h;
  const bool corrects = e.beta.data != nullptr, decays = e.g_width != 0 && d.dg.data != nullptr;
  load_keys<KT>(e, e.k, w, h, first, rows, s.k, s.inverse_k);
  load_keys<KT>(e, e.q, w, h, first, rows, s.q, s.inverse_q);
  load_scales(e, w, h, first, rows, s.scales);
  const int64_t token = w.begin + first + row;

  float dq[KT / 8] = {}, dk[KT / 8] = {}, written[KT / 8] = {}, P[2][2] = {}, A[2][2] = {}, over = 0;
  for (int column = 0; column < e.V; column += W) {
    const float *states = chunks.states + place * e.K * e.V, *dstates = chunks.dstates + place * e.K * e.V;
    __syncthreads();
    load_values(e, d.dout, w, h, first, rows, column, s.dout);
    for (int i = threadIdx.x; i < R * W; i += kThreads) {
      const int64_t at = place * R * e.V + static_cast<int64_t>(i / W) * e.V + column + i % W;
      const bool in = column + i % W < e.V;
      s.r[i / W][i % W] = in ? chunks.residuals[at] : 0;
      s.z[i / W][i % W] = in ? chunks.adjoints[at] : 0;
    }
    const auto state_at = [&](const float* from, int i) {
      const int c = column + i / KT, k = i % KT;
      return c < e.V && k < e.K ? from[static_cast<int64_t>(c) * e.K + k] : 0;
    };
    for (int i = threadIdx.x; i < W * KT; i += kThreads) s.state[i / KT][i % KT] = state_at(states, i);
    __syncthreads();
    for (int c = 0; c < W; ++c) {
      const float x = s.dout[row][c], z = corrects ? s.z[row][c] : 0;
#pragma unroll
      for (int j = 0; j < KT / 8; ++j) {
        dq[j] = fmaf(x, s.state[c][lane + 8 * j], dq[j]);
        dk[j] = fmaf(z, s.state[c][lane + 8 * j], dk[j]);
      }
    }
    float x[2][2];
    multiply(s.dout, s.r, W, x);
    for (int i = 0; i < 4; ++i) P[i / 2][i % 2] += x[i / 2][i % 2];
    multiply(s.z, s.r, W, x);
    for (int i = 0; i < 4; ++i) A[i / 2][i % 2] += x[i / 2][i % 2];
    if (d.dv.data != nullptr && row < rows) {
      for (int c = lane; c < W && column + c < e.V; c += 8) {
        ptx::store(const_cast<void*>(d.dv.data), d.dv.dtype, row_of(d.dv, w.b, token, h) + column + c,
                   s.scales.beta[row] * s.z[row][c]);
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < W * KT; i += kThreads) {
      const float x = state_at(dstates, i);
      over = fmaf(s.state[i / KT][i % KT], x, over);
      s.state[i / KT][i % KT] = x;
    }
    __syncthreads();
    for (int c = 0; c < W; ++c) {
      const float x = s.r[row][c];
#pragma unroll
      for (int j = 0; j < KT / 8; ++j) written[j] = fmaf(x, s.state[c][lane + 8 * j], written[j]);
    }
  }
  __syncthreads();
  // The products through the states, and their dots with the rows that they belong to.
  float dots[3] = {};
  const float factors[3] = {e.scale * s.scales.read[row], -s.scales.read[row] * s.scales.beta[row],
                            s.scales.write[row] * s.scales.beta[row]};
#pragma unroll
  for (int j = 0; j < KT / 8; ++j) {
    const float q = s.q[row][lane + 8 * j], k = s.k[row][lane + 8 * j];
    dq[j] *= factors[0];
    dk[j] *= factors[1];
    written[j] *= factors[2];
    dots[0] = fmaf(dq[j], q, dots[0]);
    dots[1] = fmaf(dk[j], k, dots[1]);
    dots[2] = fmaf(written[j], k, dots[2]);
    dk[j] += written[j];
  }
  for (int i = 0; i < 3; ++i) dots[i] = over_row(dots[i]);
  if (lane == 0) {
    s.queries[row] = dots[0];
    s.keys[row] = dots[1];
    s.written[row] = dots[2];
  }
  for_block(P, [&](int i, int j, float sum) {
    s.dp[i][j] = j <= i ? e.scale * sum * s.scales.beta[j] * between(s.scales, i, j) : 0;
  });
  for_block(A, [&](int i, int j, float sum) {
    if (i == j) s.dbeta[i] = sum;
    s.da[i][j] = corrects && j < i ? -sum * s.scales.beta[i] * s.scales.beta[j] * between(s.scales, i, j) : 0;
  });
  if (decays) {  // pairs of a read and a write, in the tiles of dO and r
    float x[2][2], y[2][2];
    multiply(s.q, s.k, e.K, x);
    multiply(s.k, s.k, e.K, y);
    for (int i = 0; i < 2; ++i) {
      for (int j = 0; j < 2; ++j) {
        const int r = threadIdx.x / 16 + 16 * i, c = threadIdx.x % 16 + 16 * j;  // s.dp[r][c] is this thread's own
        s.dout[r][c] = c < r ? s.dp[r][c] * x[i][j] + s.da[r][c] * y[i][j] : 0;
      }
    }
    for (int step = 1; step < 32; step *= 2) over += __shfl_xor_sync(0xffffffff, over, step);
    if (threadIdx.x % 32 == 0) s.over[threadIdx.x / 32] = over;
  }
  __syncthreads();
  for (int i = 0; i < R; ++i) {
    const float p = s.dp[row][i], back = s.dp[i][row], a = s.da[row][i] + s.da[i][row];
#pragma unroll
    for (int j = 0; j < KT / 8; ++j) {
      const float k = s.k[i][lane + 8 * j];
      dq[j] = fmaf(p, k, dq[j]);
      dk[j] = fmaf(back, s.q[i][lane + 8 * j], fmaf(a, k, dk[j]));
    }
  }
  // x / |x|: what points along x changes nothing.
  const auto store = [&](const Rows& to, float(&x)[KT / 8], const float(&source)[R][KT + 1], const float* inverse) {
    if (e.l2_norm) {
      float along = 0;
#pragma unroll
      for (int j = 0; j < KT / 8; ++j) along = fmaf(x[j], source[row][lane + 8 * j], along);
      along = over_row(along);
#pragma unroll
      for (int j = 0; j < KT / 8; ++j) x[j] = inverse[row] * fmaf(-along, source[row][lane + 8 * j], x[j]);
    }
    if (to.data == nullptr || row >= rows) return;
    const int64_t at = row_of(to, w.b, token, h);
#pragma unroll
    for (int j = 0; j < KT / 8; ++j) {
      if (lane + 8 * j < e.K) ptx::store(const_cast<void*>(to.data), to.dtype, at + lane + 8 * j, x[j]);
    }
  };
  store(d.dq, dq, s.q, s.inverse_q);
  store(d.dk, dk, s.k, s.inverse_k);
  if (threadIdx.x >= 32) return;
  const int t = threadIdx.x;
  if (d.dbeta.data != nullptr && t < rows) {
    ptx::store(const_cast<void*>(d.dbeta.data), d.dbeta.dtype, row_of(d.dbeta, w.b, w.begin + first + t, h),
               e.beta_factor * s.dbeta[t]);
  }
  if (!decays) return;
  // dg_t = sum over i >= t of what reaches row i less what leaves it + total <S_0, dS> + sum over j < t of what j leaves.
  float reached = s.queries[t] + s.keys[t], left = s.written[t];
  for (int i = 0; i < R; ++i) reached += s.dout[t][i] - s.dout[i][t];
  for (int step = 1; step < 32; step *= 2) {
    const float behind = __shfl_down_sync(0xffffffff, reached, step), before = __shfl_up_sync(0xffffffff, left, step);
    if (t + step < 32) reached += behind;
    if (t >= step) left += before;
  }
  float before = __shfl_up_sync(0xffffffff, left, 1);
  if (t == 0) before = 0;
  float all = 0;
  for (int i = 0; i < kThreads / 32; ++i) all += s.over[i];
  const float carried = s.scales.near ? all + s.scales.over * all : s.scales.over * all;
  if (t >= rows) return;
  const float g = ptx::load(e.g.data, e.g.dtype, row_of(e.g, w.b, w.begin + first + t, h));
  ptx::store(const_cast<void*>(d.dg.data), d.dg.dtype, row_of(d.dg, w.b, w.begin + first + t, h),
             expf(g) == 0 ? 0 : reached + carried + before);
}

}  // namespace

#define LINNET_DELTA_CHUNKS(K)                                                                                  \
  extern "C" __global__ void __launch_bounds__(256) record_##K(const __grid_constant__ DeltaChunks chunks) {    \
    record<K>(chunks);                                                                                          \
  }                                                                                                             \
  extern "C" __global__ void __launch_bounds__(256) reverse_##K(const __grid_constant__ DeltaChunks chunks) {   \
    reverse<K>(chunks);                                                                                         \
  }                                                                                                             \
  extern "C" __global__ void __launch_bounds__(256) gradients_##K(const __grid_constant__ DeltaChunks chunks) { \
    gradients<K>(chunks);                                                                                       \
  }
LINNET_DELTA_CHUNKS(64)
LINNET_DELTA_CHUNKS(128)
LINNET_DELTA_CHUNKS(256)

}  // namespace linnet::cuda
