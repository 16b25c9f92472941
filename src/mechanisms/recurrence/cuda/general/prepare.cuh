// prepare: what a chunk needs that does not know the state: scores P, the system L, decays. A block has a chunk of a head; a
// warp 16 rows of P or, four more of them with beta, of A = K K^T.
#pragma once

#include "mechanisms/recurrence/cuda/general/gates.cuh"

namespace linnet::cuda {
namespace {

constexpr int kSystemLine = 68;

// The 16 x 16 block D [row][column] (+)= sign A B of a warp in f32 by three products of tf32 halves: A[i * lda + k], B[k * ldb
// + j], to D[i * ldd + j]. The columns of A may have factors.
__device__ __forceinline__ void add_block(float (&d)[2][4], const float* A, const float* factor, const float* B, int ldb) {
  const int lane = threadIdx.x % 32;
  const auto split = [](float x, uint32_t& high, uint32_t& low) {
    high = __float_as_uint(x) & 0xffffe000;
    low = __float_as_uint(x - __uint_as_float(high));
  };
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    uint32_t a_high[4], a_low[4], b_high[2], b_low[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = 8 * k + lane % 4 + i / 2 * 4;
      const float f = factor == nullptr ? 1 : factor[column];
      split(A[(lane / 4 + i % 2 * 8) * kSystemLine + column] * f, a_high[i], a_low[i]);
    }
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) split(B[(8 * k + lane % 4 + i * 4) * ldb + 8 * tile + lane / 4], b_high[i], b_low[i]);
      ptx::mma_tf32(d[tile], a_low, b_high);
      ptx::mma_tf32(d[tile], a_high, b_low);
      ptx::mma_tf32(d[tile], a_high, b_high);
    }
  }
}
template <class Put>
__device__ __forceinline__ void each_of_block(const float (&d)[2][4], const Put& put) {
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) put(lane_row() + i / 2 * 8, 8 * tile + lane_column() + i % 2, d[tile][i]);
  }
}

// L from A, strictly lower: (I + A diag(beta)) L = -A, 16 rows at a time. inverse: [4][16][20]. All threads are here, 256.
__device__ void solve(const float* A, const float* beta, float* inverse, float* L) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp < 4) {  // the inverse of the block on the diagonal by substitution, a lane has a column
    const float* block = A + warp * 16 * (kSystemLine + 1);
    const float* factor = beta + warp * 16;
    float column[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float sum = 0;
#pragma unroll
      for (int j = 0; j < i; ++j) sum = fmaf(block[i * kSystemLine + j] * factor[j], column[j], sum);
      column[i] = i == lane ? 1 : i > lane ? -sum : 0;
    }
    if (lane < 16) {
#pragma unroll
      for (int i = 0; i < 16; ++i) inverse[(warp * 16 + i) * 20 + lane] = column[i];
    }
  }
  __syncthreads();
  for (int i = 0; i < 4; ++i) {
    if (warp <= i) {  // block (i, warp)
      float d[2][4] = {};
      for (int k = warp; k < i; ++k) {
        add_block(d, A + 16 * i * kSystemLine + 16 * k, beta + 16 * k, L + 16 * k * kSystemLine + 16 * warp, kSystemLine);
      }
      float* to = L + 16 * i * kSystemLine + 16 * warp;
      const float* from = A + 16 * i * kSystemLine + 16 * warp;
      each_of_block(d, [&](int r, int c, float x) { to[r * kSystemLine + c] = -from[r * kSystemLine + c] - x; });
      __syncwarp();
      float e[2][4] = {};
      // The inverse has lines of 20: as A of a product it is read through its own stride.
      const float* X = inverse + i * 16 * 20;
      const auto split = [](float x, uint32_t& high, uint32_t& low) {
        high = __float_as_uint(x) & 0xffffe000;
        low = __float_as_uint(x - __uint_as_float(high));
      };
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        uint32_t a_high[4], a_low[4], b_high[2], b_low[2];
#pragma unroll
        for (int j = 0; j < 4; ++j) split(X[(lane / 4 + j % 2 * 8) * 20 + 8 * k + lane % 4 + j / 2 * 4], a_high[j], a_low[j]);
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
          for (int j = 0; j < 2; ++j)
            split(to[(8 * k + lane % 4 + j * 4) * kSystemLine + 8 * tile + lane / 4], b_high[j], b_low[j]);
          ptx::mma_tf32(e[tile], a_low, b_high);
          ptx::mma_tf32(e[tile], a_high, b_low);
          ptx::mma_tf32(e[tile], a_high, b_high);
        }
      }
      __syncwarp();
      each_of_block(e, [&](int r, int c, float x) { to[r * kSystemLine + c] = x; });
    }
    __syncthreads();
  }
}

// The same in double, for f32: with keys that repeat, each rounding here is seen in the result. A thread has a column.
__device__ void solve_exactly(const float* A, const float* beta, double* L) {
  if (threadIdx.x < 64) {
    const int column = threadIdx.x;
    for (int i = 0; i < 64; ++i) {
      const float* row = A + i * kSystemLine;
      double sums[4] = {};
      int j = column + 1;  // L is strictly lower
      for (; j + 3 < i; j += 4) {
#pragma unroll
        for (int k = 0; k < 4; ++k) sums[k] += static_cast<double>(row[j + k]) * beta[j + k] * L[(j + k) * 64 + column];
      }
      for (; j < i; ++j) sums[0] += static_cast<double>(row[j]) * beta[j] * L[j * 64 + column];
      L[i * 64 + column] = i > column ? -static_cast<double>(row[column]) - ((sums[0] + sums[1]) + (sums[2] + sums[3])) : 0;
    }
  }
  __syncthreads();
}

template <int kPlanes, bool channel, bool beta>
__device__ void prepare(const General& g) {
  constexpr int kPanel = general_panel(kPlanes);
  const Engine& e = g.e;
  const Place p = chunk_of(e);
  if (p.rows == 0) return;
  extern __shared__ __align__(16) char memory[];
  char* at = memory;
  const Planes Q = cut_planes<kPlanes>(at, 64, kPanel), K = cut_planes<kPlanes>(at, 64, kPanel);
  float* raw = channel ? cut_floats(at, 3 * 64 * (kPanel + 1)) : nullptr;  // g, q, k
  float* between = cut_floats(at, 6 * 64);
  float *before = cut_floats(at, 64), *after = cut_floats(at, 64), *write = cut_floats(at, 64);
  float *q_norm = cut_floats(at, 64), *k_norm = cut_floats(at, 64), *scratch = cut_floats(at, 3 * 64);
  float *A = nullptr, *L = nullptr, *inverse = nullptr;
  if constexpr (beta) {
    A = cut_floats(at, 64 * kSystemLine);
    L = cut_floats(at, kPlanes == 3 ? 2 * 64 * 64 : 64 * kSystemLine);
    inverse = cut_floats(at, 4 * 16 * 20);
  }
  const int thread = threadIdx.x, warp = thread / 32;
  const bool gated = e.g_width > 0;
  float gate = 0;
  if (thread < 64) {
    const bool there = thread < p.rows;
    const int64_t token = p.first + thread;
    if (!channel && gated && there) gate = ptx::load(e.g.data, e.g.dtype, row_of(e.g, p.b, token, p.h));
    const auto norm = [&](const float* norms, const Rows& rows) {
      const int heads = e.H / rows.group;
      return norms == nullptr ? 1.0f : there ? norms[(p.b * e.T + token) * heads + p.h / rows.group] : 0.0f;
    };
    q_norm[thread] = norm(g.q_norms, e.q);
    k_norm[thread] = norm(g.k_norms, e.k);
    if constexpr (beta) write[thread] = there ? beta_of(g, p, thread) : 0;
  }
  if constexpr (channel) {
    tiles_ready();
  } else {
    make_decays<kPlanes>({between, before, after, scratch + 8}, gate, scratch);
    if (thread < 64 && g.factors != nullptr) {
      float* to = g.factors + p.tile * 64 + thread;
      const int64_t all = g.tiles * 64;
      to[0] = q_norm[thread] * before[thread];
      to[all] = k_norm[thread] * before[thread];
      to[2 * all] = k_norm[thread] * after[thread];
    }
    if (thread == 0) g.totals[p.tile] = scratch[8];
  }
  const Source q = source_of(e.q, p.b, p.first, p.h, g.Kr), k = source_of(e.k, p.b, p.first, p.h, g.Kr);
  const bool first = warp < 4;  // P, else A
  const int m = warp % 4 * 16;
  float acc[8][4] = {}, diagonal[2][4] = {};
  for (int panel = 0; panel < g.Kp; panel += kPanel) {
    const int width = min(kPanel, g.Kp - panel);
    if constexpr (!channel) {
      load_tile<kPlanes>(Q, q, p.rows, 64, panel, width, nullptr);
      load_tile<kPlanes>(K, k, p.rows, 64, panel, width, nullptr);
      tiles_ready();
      multiply<kPlanes, kPlanes, false, false>(acc, first ? Q : K, m, 0, K, 0, 0, width / 16, m / 16 + 1);
      tiles_ready();
    } else {
      constexpr int kLine = kPanel + 1;
      float *gates = raw, *qs = raw + 64 * kLine, *ks = raw + 2 * 64 * kLine;
      for (int i = thread; i < 64 * kPanel / 8; i += blockDim.x) {
        const int row = i / (kPanel / 8), column = i % (kPanel / 8) * 8;
        float x[8] = {}, y[8] = {};
        const bool there = row < p.rows && panel + column < g.Kr;
        if (there) {
          load_8(q, row, panel + column, x);
          load_8(k, row, panel + column, y);
        }
        const int64_t place = row_of(e.g, p.b, p.first + row, p.h) + panel + column;
        for (int j = 0; j < 8; ++j) {
          const bool is = row < p.rows && panel + column + j < e.K;
          gates[row * kLine + column + j] = is ? ptx::load(e.g.data, e.g.dtype, place + j) : 0;
          qs[row * kLine + column + j] = x[j] * q_norm[row];
          ks[row * kLine + column + j] = y[j] * k_norm[row];
        }
      }
      tiles_ready();
      const int c = thread % kPanel, quarter = thread / kPanel;
      if (quarter < 4 && panel + c < g.Kp) {
        const auto store = [&](void* data, int row, float x) {
          bf16* to = static_cast<bf16*>(data) + (p.tile * 64 + row) * g.Kp + panel + c;
#pragma unroll
          for (int i = 0; i < kPlanes; ++i) {
            const bf16 part = __float2bfloat16_rn(x);
            to[i * g.tiles * 64 * g.Kp] = part;
            x -= __bfloat162float(part);
          }
        };
        const float sum = visit_ends<kPlanes>(gates + c, kLine, quarter, [&](int row, float from, float to) {
          store(g.q_read, row, qs[row * kLine + c] * from);
          if (beta) store(g.k_read, row, ks[row * kLine + c] * from);
          store(g.k_write, row, ks[row * kLine + c] * to);
        });
        if (quarter == 0) g.totals[p.tile * g.Kp + panel + c] = sum;
      }
      for (int level = -1; level < 6; ++level) {  // -1: the diagonal
        if (quarter < 4) {
          const auto visit = [&](int row, float f) {
            put<kPlanes>(Q, row, c, qs[row * kLine + c] * f);
            put<kPlanes>(K, row, c, ks[row * kLine + c] * f);
          };
          if (level < 0) {
            for (int row = quarter * 16; row < quarter * 16 + 16; ++row) visit(row, 1);
          } else {
            visit_level<kPlanes>(gates + c, kLine, quarter, level, visit);
          }
        }
        tiles_ready();
        const Planes& left = first ? Q : K;
        constexpr int kSteps = kPanel / 16;
        if (!beta && !first) {  // helps with decays alone
        } else if (level == 5) {
          if (m >= 32) multiply<kPlanes, kPlanes, false, false>(acc, left, m, 0, K, 0, 0, kSteps, 2);
        } else if (level == 4) {
          float sum[2][4] = {};
          if (m % 32 != 0) multiply<kPlanes, kPlanes, false, false>(sum, left, m, 0, K, m - 16, 0, kSteps);
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            acc[i / 4][i % 4] += m == 16 ? sum[i / 4][i % 4] : 0;
            acc[4 + i / 4][i % 4] += m == 48 ? sum[i / 4][i % 4] : 0;
          }
        } else {
          float sum[2][4] = {};
          multiply<kPlanes, kPlanes, false, false>(sum, left, m, 0, K, m, 0, kSteps);
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const int r = lane_row() + i % 4 / 2 * 8, s = i / 4 * 8 + lane_column() + i % 2;
            const bool mine = level < 0 ? r == s : r > s && (r ^ s) >> level == 1;
            diagonal[i / 4][i % 4] += mine ? sum[i / 4][i % 4] : 0;
          }
        }
        tiles_ready();
      }
    }
  }
  constexpr int kMiddle = general_middle(kPlanes, beta);
#pragma unroll
  for (int tile = 0; tile < 8; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = m + lane_row() + 8 * half, column = 8 * tile + lane_column();
      float x[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int j = column + i;
        x[i] = acc[tile][2 * half + i];
        if constexpr (channel) {
          if (tile / 2 * 16 == m) x[i] = diagonal[tile % 2][2 * half + i];
        } else {
          x[i] *= (first ? q_norm[row] : k_norm[row]) * k_norm[j];
          if (gated && j < row) {
            const int level = level_of(row, j) * 64;
            x[i] *= between[level + row] * between[level + j];
          }
        }
        if (j > row || (j == row && !first)) x[i] = 0;
      }
      if (first) {
        store_planes<kMiddle>(g.scores, g.tiles * 64 * 64, (p.tile * 64 + row) * 64 + column, x[0], x[1]);
      } else if constexpr (beta) {
        *reinterpret_cast<float2*>(&A[row * kSystemLine + column]) = float2{x[0], x[1]};
      }
    }
  }
  if constexpr (beta) {
    tiles_ready();
    const auto keep = [&](const auto* from, int line) {
      for (int i = thread; i < 64 * 32; i += blockDim.x) {
        const int row = i / 32, column = i % 32 * 2;
        const bool there = column / 16 <= row / 16;  // blocks above the diagonal were never written
        const float x = there ? static_cast<float>(from[row * line + column]) : 0;
        const float y = there ? static_cast<float>(from[row * line + column + 1]) : 0;
        store_planes<kMiddle>(g.system, g.tiles * 64 * 64, (p.tile * 64 + row) * 64 + column, x, y);
      }
    };
    if constexpr (kPlanes == 3) {
      double* exact = reinterpret_cast<double*>(L);
      solve_exactly(A, write, exact);
      keep(exact, 64);
    } else {
      solve(A, write, inverse, L);
      keep(L, kSystemLine);
    }
  }
}

}  // namespace
}  // namespace linnet::cuda
