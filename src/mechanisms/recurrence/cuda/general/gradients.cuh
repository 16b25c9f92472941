// gradients: dq, dk, dg and dbeta of a chunk, 64 key channels to a block of 8 warps, of which each has 16 rows and 32 columns.
//
//   dP = scale tril(dO N^T),  dA = -tril(dY N^T, -1),  N = beta R,  dY = beta Z,  dbeta = diag(Z R^T)
//   row parts     q^r = pre scale dO S^T + dP K,  k^r = -pre dY S^T + dA K
//   column parts  k^c = dP^T Q + dA^T K,          k^s = suf N dS^T           (products of pairs with the decays between them)
//   dq = q^r + diag(dP) K,  dk = k^r + k^c + k^s + diag(dP) Q,  dg: recurrence.md, section 6; the diagonal is kept out of it
#pragma once

#include "mechanisms/recurrence/cuda/general/walk.cuh"

namespace linnet::cuda {
namespace {

using Tile4 = float[4][4];

template <class Visit>
__device__ __forceinline__ void each_of_tile(int m, int n, const Visit& visit) {
#pragma unroll
  for (int tile = 0; tile < 4; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) visit(tile, i, m + lane_row() + i / 2 * 8, n + 8 * tile + lane_column() + i % 2);
  }
}

// Leaves of A's registers the pairs of this level: rows and columns of the same 16 tokens, the later token in the row, or, when
// turned, in the column.
struct KeepLevel {
  int level;
  bool turned;
  __device__ __forceinline__ void operator()(uint32_t (&a)[4], int) const {
    if (level >= 4) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = lane_row() + i % 2 * 8, column = lane_column() + i / 2 * 8;
      const auto mine = [&](int r, int c) { return (turned ? c > r : r > c) && (r ^ c) >> level == 1; };
      a[i] &= (mine(row, column) ? 0x0000ffffu : 0u) | (mine(row, column + 1) ? 0xffff0000u : 0u);
    }
  }
};

template <int kPlanes, bool channel, bool beta>
__device__ void gradients(const General& g) {
  constexpr int kPanel = general_panel(kPlanes), kMiddle = general_middle(kPlanes, beta);
  const Engine& e = g.e;
  const Place p = chunk_of(e);
  if (p.rows == 0) return;
  extern __shared__ __align__(16) char memory[];
  char* at = memory;
  float *between = cut_floats(at, 6 * 64), *before = cut_floats(at, 64), *after = cut_floats(at, 64);
  float *strength = cut_floats(at, 64), *q_norm = cut_floats(at, 64), *k_norm = cut_floats(at, 64);
  float *diagonal = cut_floats(at, 64), *products = cut_floats(at, 64), *scratch = cut_floats(at, 64);
  float* parts = cut_floats(at, 4 * 64);  // of sums of rows, by the two halves of columns
  char* tiles = at;
  const int thread = threadIdx.x, warp = thread / 32, m = warp % 4 * 16, n = warp / 4 * 32;
  const int channel0 = blockIdx.z * 64, width = min(64, g.Kp - channel0);
  const bool gated = e.g_width > 0, wants_gates = gated && g.dg.data != nullptr;
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
    strength[thread] = !there ? 0 : beta ? beta_of(g, p, thread) : 1;
  }
  if constexpr (channel) {
    tiles_ready();
  } else {
    make_decays<kPlanes>({between, before, after, scratch + 8}, gate, scratch);
  }
  Tile4 dOR = {}, ZR = {}, q_row = {}, k_row = {}, k_state = {};
  float product = 0;  // of S and dS, a quarter of a row
  {
    const Planes dO = cut_planes<kPlanes>(at, 64, kPanel), S = cut_planes<kPlanes>(at, 64, kPanel);
    const Planes dS = cut_planes<kPlanes>(at, 64, kPanel), R = cut_planes<kMiddle>(at, 64, kPanel);
    Planes Z = {};
    if constexpr (beta) Z = cut_planes<kMiddle>(at, 64, kPanel);
    const int64_t states_plane = g.tiles * g.Kp * g.Vp, first = (p.tile * g.Kp + channel0) * g.Vp,
                  rows_plane = g.tiles * 64 * g.Vp;
    const Source states = planes_at<kPlanes>(g.states, states_plane, first, g.Vp);
    const Source dstates = planes_at<kPlanes>(g.dstates, states_plane, first, g.Vp);
    const Source d = source_of(g.dout, p.b, p.first, p.h, g.Vr);
    Source values = source_of(e.v, p.b, p.first, p.h, g.Vr), adjoints = values;
    if constexpr (beta) {
      values = planes_at<kMiddle>(g.residuals, rows_plane, p.tile * 64 * g.Vp, g.Vp);
      adjoints = planes_at<kMiddle>(g.adjoints, rows_plane, p.tile * 64 * g.Vp, g.Vp);
    }
    for (int panel = 0; panel < g.Vp; panel += kPanel) {
      const int columns = min(kPanel, g.Vp - panel), steps = columns / 16;
      load_tile<kPlanes>(dO, d, g.dout.data == nullptr ? 0 : p.rows, 64, panel, columns, nullptr);
      load_tile<kMiddle>(R, values, p.rows, 64, panel, columns, nullptr);
      if constexpr (beta) load_tile<kMiddle>(Z, adjoints, p.rows, 64, panel, columns, nullptr);
      load_tile<kPlanes>(S, states, width, 64, panel, columns, nullptr);
      load_tile<kPlanes>(dS, dstates, width, 64, panel, columns, nullptr);
      tiles_ready();
      if (n <= m) {
        multiply<kPlanes, kMiddle, false, false>(dOR, dO, m, 0, R, n, 0, steps);
        if constexpr (beta) multiply<kMiddle, kMiddle, false, false>(ZR, Z, m, 0, R, n, 0, steps);
      }
      multiply<kPlanes, kPlanes, false, false>(q_row, dO, m, 0, S, n, 0, steps);
      multiply<kMiddle, kPlanes, false, false>(k_state, R, m, 0, dS, n, 0, steps);
      if constexpr (beta) multiply<kMiddle, kPlanes, false, false>(k_row, Z, m, 0, S, n, 0, steps);
      if (wants_gates) {
        for (int c = thread % 4; c < columns; c += 4)
          product = fmaf(get<kPlanes>(S, thread / 4, c), get<kPlanes>(dS, thread / 4, c), product);
      }
      tiles_ready();
    }
  }
  if (wants_gates) {
    product = ptx::sum_lanes<4>(product);
    const int c = thread / 4;
    if (thread % 4 == 0)
      products[c] = c >= width ? 0 : product * expf(channel ? g.totals[p.tile * g.Kp + channel0 + c] : g.totals[p.tile]);
  }
  // Pairs: dP and dA, with their decays unless these are of channels.
  at = tiles;
  const Planes dP = cut_planes<kMiddle>(at, 64, 64);
  Planes dA = {};
  if constexpr (beta) dA = cut_planes<kMiddle>(at, 64, 64);
  char* rest = at;
#pragma unroll
  for (int tile = 0; tile < 4; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = m + lane_row() + 8 * half, column = n + 8 * tile + lane_column();
      float x[2], y[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int j = column + i;
        float decay = 1;
        if (!channel && gated && j < row) {
          const int level = level_of(row, j) * 64;
          decay = between[level + row] * between[level + j];
        }
        const float pair = e.scale * strength[j] * dOR[tile][2 * half + i];
        if (j == row) {
          diagonal[row] = pair;
          if (beta && blockIdx.z == 0 && g.dbeta.data != nullptr && row < p.rows) {
            ptx::store(const_cast<void*>(g.dbeta.data), g.dbeta.dtype, row_of(g.dbeta, p.b, p.first + row, p.h),
                       e.beta_factor * ZR[tile][2 * half + i]);
          }
        }
        x[i] = j < row ? pair * decay : 0;
        y[i] = beta && j < row ? -strength[row] * strength[j] * decay * ZR[tile][2 * half + i] : 0;
      }
      put2<kMiddle>(dP, row, column, x[0], x[1]);
      if constexpr (beta) put2<kMiddle>(dA, row, column, y[0], y[1]);
    }
  }
  const Planes Q = cut_planes<kPlanes>(rest, 64, 64), K = cut_planes<kPlanes>(rest, 64, 64);
  const Source q = source_of(e.q, p.b, p.first, p.h, g.Kr), k = source_of(e.k, p.b, p.first, p.h, g.Kr);
  Tile4 k_column = {};
  // q and k, normed, where this lane has results.
  Tile4 query, key;
  each_of_tile(m, n, [&](int tile, int i, int row, int c) {
    const bool there = row < p.rows && channel0 + c < g.Kr;
    query[tile][i] = there ? q_norm[row] * ptx::load(q.data, q.dtype, row * q.stride + channel0 + c) : 0;
    key[tile][i] = there ? k_norm[row] * ptx::load(k.data, k.dtype, row * k.stride + channel0 + c) : 0;
  });
  if constexpr (!channel) {
    load_tile<kPlanes>(Q, q, p.rows, 64, channel0, 64, g.q_norms == nullptr ? nullptr : q_norm);
    load_tile<kPlanes>(K, k, p.rows, 64, channel0, 64, g.k_norms == nullptr ? nullptr : k_norm);
    each_of_tile(m, n, [&](int tile, int i, int row, int) {
      q_row[tile][i] *= e.scale * before[row];
      if constexpr (beta) k_row[tile][i] *= -strength[row] * before[row];
      k_state[tile][i] *= strength[row] * after[row];
    });
    tiles_ready();
    multiply<kMiddle, kPlanes, false, true>(q_row, dP, m, 0, K, n, 0, m / 16 + 1);
    multiply<kMiddle, kPlanes, true, true>(k_column, dP, m, m, Q, n, m, 4 - m / 16);
    if constexpr (beta) {
      multiply<kMiddle, kPlanes, false, true>(k_row, dA, m, 0, K, n, 0, m / 16 + 1);
      multiply<kMiddle, kPlanes, true, true>(k_column, dA, m, m, K, n, m, 4 - m / 16);
    }
  } else {
    constexpr int kLine = 65;
    float *gates = cut_floats(rest, 64 * kLine), *factor = cut_floats(rest, 64 * kLine);
    const Planes raw_q = cut_planes<kPlanes>(rest, 64, 64), raw_k = cut_planes<kPlanes>(rest, 64, 64);
    load_tile<kPlanes>(raw_q, q, p.rows, 64, channel0, 64, g.q_norms == nullptr ? nullptr : q_norm);
    load_tile<kPlanes>(raw_k, k, p.rows, 64, channel0, 64, g.k_norms == nullptr ? nullptr : k_norm);
    for (int i = thread; i < 64 * 64; i += blockDim.x) {
      const int row = i / 64, c = i % 64;
      const bool there = row < p.rows && channel0 + c < e.K;
      const int64_t place = row_of(e.g, p.b, p.first + row, p.h) + channel0 + c;
      gates[row * kLine + c] = there ? ptx::load(e.g.data, e.g.dtype, place) : 0;
    }
    tiles_ready();
    const int c0 = thread % 64, quarter = thread / 64;
    for (const bool behind : {false, true}) {
      visit_ends<kPlanes>(gates + c0, kLine, quarter,
                          [&](int row, float from, float to) { factor[row * kLine + c0] = behind ? to : from; });
      tiles_ready();
      each_of_tile(m, n, [&](int tile, int i, int row, int c) {
        const float f = factor[row * kLine + c];
        if (behind) {
          k_state[tile][i] *= strength[row] * f;
        } else {
          q_row[tile][i] *= e.scale * f;
          if constexpr (beta) k_row[tile][i] *= -strength[row] * f;
        }
      });
      tiles_ready();
    }
    for (int level = 0; level < 6; ++level) {
      visit_level<kPlanes>(gates + c0, kLine, quarter, level, [&](int row, float f) {
        factor[row * kLine + c0] = f;
        put<kPlanes>(K, row, c0, get<kPlanes>(raw_k, row, c0) * f);
        put<kPlanes>(Q, row, c0, get<kPlanes>(raw_q, row, c0) * f);  // of all tokens: what a zero meets must be a number
      });
      tiles_ready();
      // The tokens that this warp's rows are tied to on this level.
      const int size = level < 4 ? 16 : 1 << level, steps = size / 16, block = m & ~(size - 1);
      const bool small = level < 4, upper = small || (block & size) != 0, lower = small || !upper;
      Tile4 sum = {};
      const auto add = [&](Tile4& to) {
        each_of_tile(m, n, [&](int tile, int i, int row, int c) {
          to[tile][i] = fmaf(factor[row * kLine + c], sum[tile][i], to[tile][i]);
          sum[tile][i] = 0;
        });
      };
      if (upper) {
        const int from = small ? m : block - size;
        multiply<kMiddle, kPlanes, false, true>(sum, dP, m, from, K, n, from, steps, 2, KeepLevel{level, false});
        add(q_row);
        if constexpr (beta) {
          multiply<kMiddle, kPlanes, false, true>(sum, dA, m, from, K, n, from, steps, 2, KeepLevel{level, false});
          add(k_row);
        }
      }
      if (lower) {
        const int from = small ? m : block + size;
        multiply<kMiddle, kPlanes, true, true>(sum, dP, m, from, Q, n, from, steps, 2, KeepLevel{level, true});
        if constexpr (beta)
          multiply<kMiddle, kPlanes, true, true>(sum, dA, m, from, K, n, from, steps, 2, KeepLevel{level, true});
        add(k_column);
      }
      tiles_ready();
    }
    if (wants_gates) {
      float* written = reinterpret_cast<float*>(Q.data);  // Q and K are done
      each_of_tile(m, n, [&](int tile, int i, int row, int c) {
        factor[row * kLine + c] = fmaf(query[tile][i], q_row[tile][i], key[tile][i] * (k_row[tile][i] - k_column[tile][i]));
        written[row * kLine + c] = key[tile][i] * k_state[tile][i];
      });
      tiles_ready();
      // Sums over the rows of a quarter first, then over the quarters before and behind.
      float reads = 0, writes = 0;
      for (int t = quarter * 16; t < quarter * 16 + 16; ++t) {
        reads += factor[t * kLine + c0];
        writes += written[t * kLine + c0];
      }
      float* quarters = between;  // [2][4][64], and `before` behind it: channels have no such tables
      quarters[quarter * 64 + c0] = reads;
      quarters[256 + quarter * 64 + c0] = writes;
      tiles_ready();
      if (channel0 + c0 < e.K) {
        float later = 0, earlier = products[c0];
        for (int i = 3; i > quarter; --i) later += quarters[i * 64 + c0];
        for (int i = 0; i < quarter; ++i) earlier += quarters[256 + i * 64 + c0];
        // `written` becomes what was written before a row.
        for (int t = quarter * 16; t < quarter * 16 + 16; ++t) {
          const float w = written[t * kLine + c0];
          written[t * kLine + c0] = earlier;
          earlier += w;
        }
        for (int t = quarter * 16 + 15; t >= quarter * 16; --t) {
          later += factor[t * kLine + c0];
          if (t >= p.rows) continue;
          const bool dead = expf(gates[t * kLine + c0]) == 0;
          const int64_t place = row_of(g.dg, p.b, p.first + t, p.h) + channel0 + c0;
          ptx::store(const_cast<void*>(g.dg.data), g.dg.dtype, place, dead ? 0 : later + written[t * kLine + c0]);
        }
      }
    }
  }
  if (!channel && wants_gates) {
    float rows[2][2] = {};  // [pairs and reads, writes][half]
    each_of_tile(m, n, [&](int tile, int i, int, int) {
      rows[0][i / 2] += fmaf(query[tile][i], q_row[tile][i], key[tile][i] * (k_row[tile][i] - k_column[tile][i]));
      rows[1][i / 2] = fmaf(key[tile][i], k_state[tile][i], rows[1][i / 2]);
    });
#pragma unroll
    for (int kind = 0; kind < 2; ++kind) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float sum = ptx::sum_lanes<4>(rows[kind][half]);
        if (lane_column() == 0) parts[(kind * 2 + n / 32) * 64 + m + lane_row() + 8 * half] = sum;
      }
    }
    tiles_ready();
    if (thread < 128) {
      const int kind = thread / 64, row = thread % 64;
      g.sums[((kind * gridDim.z + blockIdx.z) * g.tiles + p.tile) * 64 + row] =
          parts[kind * 128 + row] + parts[kind * 128 + 64 + row];
    } else if (thread == 128) {
      float sum = 0;
      for (int c = 0; c < 64; ++c) sum += products[c];
      g.sums[((2 * gridDim.z + blockIdx.z) * g.tiles + p.tile) * 64] = sum;
    }
  }
#pragma unroll
  for (int tile = 0; tile < 4; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = m + lane_row() + 8 * half, c = channel0 + n + 8 * tile + lane_column(), i = 2 * half;
      if (row >= p.rows || c >= e.K) continue;
      const float own = diagonal[row];
      const bool both = c + 1 < e.K;
      const auto of_k = [&](int j) { return fmaf(own, query[tile][j], k_row[tile][j] + k_column[tile][j] + k_state[tile][j]); };
      if (g.dq.data != nullptr)
        store_results(g.dq, row_of(g.dq, p.b, p.first + row, p.h) + c, both, fmaf(own, key[tile][i], q_row[tile][i]),
                      fmaf(own, key[tile][i + 1], q_row[tile][i + 1]));
      if (g.dk.data != nullptr) store_results(g.dk, row_of(g.dk, p.b, p.first + row, p.h) + c, both, of_k(i), of_k(i + 1));
    }
  }
}

}  // namespace
}  // namespace linnet::cuda
