// The plain forward programs (plain.cuh).
#include "plain.cuh"

namespace linnet::cuda {
namespace plain {

// a, c and, with values, y of block p for 16 R slots. `own`: instead, the attention of the block's queries to its keys up to
// their own, for the causal form. Grid: units * blocks, tiles of slots.
template <int R>
__device__ __forceinline__ void block_forward(const MonarchProblem& g, const MonarchStep& step, const MonarchPassing& pass,
                                              bool first, bool values, bool own, char* memory) {
  const BlockProgram<R> x(g, memory);
  Shared<R>& s = x.s;
  const int p = x.p, j0 = x.first;
  const int64_t local = x.local;
  const MonarchUnitIndex u = x.u;
  const Source q = first ? source_of(g.q, g.K) : source_of(step.mean, g.K), k = source_of(g.k, g.K), v = source_of(g.v, g.V);
  x.list([&](int i) {
    const int t = query_at(g, u.tile, p % g.rows, j0 + i);
    s.left_at[0][i] = j0 + i >= g.cols ? -1
                      : !first         ? cell(g, local, j0 + i, p) * g.K
                      : t < 0          ? -1
                                       : offset_of(g.q, u.b, t, u.h);
  });
  Scores<R> z;
  const auto scores = [&](int i0) {
    x.key_scores(z, q, i0);
#pragma unroll
    for (int i = 0; i < R; ++i) {
#pragma unroll
      for (int j = 0; j < R; ++j) {
        const int key = x.tx + 16 * j;
        const bool there = s.right_at[0][key] >= 0 && (!own || i0 + key <= j0 + x.ty + 16 * i);
        z[i][j] = there ? z[i][j] * g.factor : -kInfinity;
      }
    }
  };
  Normaliser<R> normaliser;
  const bool whole = g.cols <= x.kTile;  // one tile holds all keys
  for (int i0 = 0; i0 < g.cols; i0 += x.kTile) {
    scores(i0);
    normaliser.add(z);
  }
  float products[R] = {};
  const int widths[2] = {own ? 0 : g.K, values || own ? g.V : 0};
  for (int part = 0; part < 2; ++part) {
    for (int c0 = 0; c0 < widths[part]; c0 += kChannels) {
      Rows<R> o;
      clear_rows<R>(o);
      for (int i0 = 0; i0 < g.cols; i0 += x.kTile) {
        if (!whole) scores(i0);
        Scores<R> w;
#pragma unroll
        for (int i = 0; i < R; ++i) {
          float sum = 0;
#pragma unroll
          for (int j = 0; j < R; ++j) {
            w[i][j] = normaliser.weight(i, z[i][j]);
            if (w[i][j] > 0) sum = fmaf(w[i][j], z[i][j] - normaliser.shift(i), sum);
          }
          if (part == 0 && c0 == 0) products[i] += row_sum(sum);
        }
        x.expand(o, w, part == 0 ? k : v, s.right_at[part], c0);
      }
      float* const to = own ? pass.own : part == 0 ? step.a : pass.y;
      x.each(o, widths[part], c0, [&](int j, int c, float value) {
        if (j0 + j >= g.cols) return;
        const int64_t at = own ? query_cell(g, local, j0 + j, p % g.rows) : cell(g, local, j0 + j, p);
        to[at * widths[part] + c] = value;
      });
    }
  }
#pragma unroll
  for (int i = 0; i < R; ++i) {
    const int j = j0 + x.ty + 16 * i;
    if (x.tx != 0 || j >= g.cols) continue;
    const float lse = normaliser.value(i);
    if (own) {
      pass.own_lse[query_cell(g, local, j, p % g.rows)] = lse;
    } else {
      step.c[cell(g, local, j, p)] = lse == kInfinity ? kInfinity : products[i] - log2f(normaliser.total[i]);
    }
  }
}

// out and lse of 16 R queries of slot j. Grid: units * cols, tiles of rows.
template <int R>
__device__ __forceinline__ void slot_forward(const MonarchProblem& g, const MonarchStep& step, const MonarchPassing& pass,
                                             char* memory) {
  const SlotProgram<R> x(g, memory);
  Shared<R>& s = x.s;
  const int slot = x.slot, l0 = x.first;
  const int64_t local = x.local;
  const MonarchUnitIndex u = x.u;
  const Source q = source_of(g.q, g.K), a = source_of(step.a, g.K), y = source_of(pass.y, g.V);
  x.list([&](int i) {
    const int t = query_at(g, u.tile, l0 + i, slot);
    s.left_at[0][i] = token_offset(g.q, u, t);
    s.left_at[1][i] = t;
    s.left_number[0][i] = g.causal && t >= 0 ? pass.own_lse[query_cell(g, local, slot, l0 + i)] : -kInfinity;
  });
  Scores<R> z;
  Normaliser<R> normaliser;
  const bool whole = g.blocks <= x.kTile;
  for (int p0 = 0; p0 < g.blocks; p0 += x.kTile) {
    x.beta(z, step, p0);
    normaliser.add(z);
  }
  float lse[R], share[R];
#pragma unroll
  for (int i = 0; i < R; ++i) {
    const float mine = s.left_number[0][x.ty + 16 * i];  // causal: the own block joins
    normaliser.join(i, mine);
    lse[i] = normaliser.value(i), share[i] = normaliser.weight(i, mine);
  }
  for (int c0 = 0; c0 < g.V; c0 += kChannels) {
    Rows<R> o;
    clear_rows<R>(o);
    for (int p0 = 0; p0 < g.blocks; p0 += x.kTile) {
      if (!whole) x.beta(z, step, p0);
      Scores<R> w;
      each_score<R>([&](int i, int j) { w[i][j] = normaliser.weight(i, z[i][j]); });
      x.expand(o, w, y, s.right_at[1], c0);
    }
    if (g.causal) {
#pragma unroll
      for (int i = 0; i < R; ++i) {
        if (s.left_at[1][x.ty + 16 * i] < 0) continue;
#pragma unroll
        for (int j = 0; j < kChannels / 16; ++j) {
          const int c = c0 + x.tx + 16 * j;
          if (c < g.V) o[i][j] += share[i] * pass.own[query_cell(g, local, slot, l0 + x.ty + 16 * i) * g.V + c];
        }
      }
    }
    x.each(o, g.V, c0, [&](int l, int c, float value) {
      const int t = static_cast<int>(s.left_at[1][l]);
      if (t >= 0) ptx::store(g.out.data, g.out.dtype, offset_of(g.out, u.b, t, u.h) + c, value);
    });
  }
#pragma unroll
  for (int i = 0; i < R; ++i) {
    const int l = x.ty + 16 * i, t = static_cast<int>(s.left_at[1][l]);
    if (x.tx != 0 || t < 0 || g.lse.data == nullptr) continue;
    static_cast<float*>(g.lse.data)[offset_of(g.lse, u.b, t, u.h)] = lse[i] == kInfinity ? -kInfinity : lse[i] * kLn2;
  }
}

// Between steps: lse of 16 R queries of slot j. Grid: units * cols, tiles of rows.
template <int R>
__device__ __forceinline__ void slot_lse(const MonarchProblem& g, const MonarchStep& step, char* memory) {
  const SlotProgram<R> x(g, memory);
  Shared<R>& s = x.s;
  const int slot = x.slot, l0 = x.first;
  const int64_t local = x.local;
  const MonarchUnitIndex u = x.u;
  x.list([&](int i) {
    const int t = valid_query_at(g, u.b, u.tile, l0 + i, slot);
    s.left_at[0][i] = token_offset(g.q, u, t);
  });
  Normaliser<R> normaliser;
  for (int p0 = 0; p0 < g.blocks; p0 += x.kTile) {
    Scores<R> z;
    x.beta(z, step, p0);
    normaliser.add(z);
  }
#pragma unroll
  for (int i = 0; i < R; ++i) {
    const int l = l0 + x.ty + 16 * i;
    if (x.tx == 0 && l < g.rows) step.lse[query_cell(g, local, slot, l)] = normaliser.value(i);
  }
}

// Between steps: the means of 16 R blocks for slot j, W[p, :] = softmax_l(a_p.q_l - lse_l). Grid: units * cols, tiles of
// blocks.
template <int R>
__device__ __forceinline__ void slot_means(const MonarchProblem& g, const MonarchStep& step, float* mean, char* memory) {
  const SlotProgram<R> x(g, memory);
  Shared<R>& s = x.s;
  const int slot = x.slot, p0 = x.first;
  const int64_t local = x.local;
  const MonarchUnitIndex u = x.u;
  const Source q = source_of(g.q, g.K), a = source_of(step.a, g.K);
  x.list_blocks(step, p0, s.left_at, s.left_number);
  Scores<R> z;
  const auto scores = [&](int l0) {
    x.list([&](int i) {
      const int t = valid_query_at(g, u.b, u.tile, l0 + i, slot);
      s.right_at[0][i] = token_offset(g.q, u, t);
      s.right_number[0][i] = t < 0 ? 0 : step.lse[query_cell(g, local, slot, l0 + i)];
    });
    clear<R>(z);
    x.contract(z, a, s.left_at[0], q, s.right_at[0]);
#pragma unroll
    for (int i = 0; i < R; ++i) {
#pragma unroll
      for (int j = 0; j < R; ++j) {
        const int l = x.tx + 16 * j;
        const bool there = s.right_at[0][l] >= 0 && s.left_at[0][x.ty + 16 * i] >= 0;
        z[i][j] = there ? fmaf(z[i][j], g.factor, -s.right_number[0][l]) : -kInfinity;
      }
    }
  };
  Normaliser<R> normaliser;
  const bool whole = g.rows <= x.kTile;
  for (int l0 = 0; l0 < g.rows; l0 += x.kTile) {
    scores(l0);
    normaliser.add(z);
  }
  for (int c0 = 0; c0 < g.K; c0 += kChannels) {
    Rows<R> o;
    clear_rows<R>(o);
    for (int l0 = 0; l0 < g.rows; l0 += x.kTile) {
      if (!whole) scores(l0);
      Scores<R> w;
      each_score<R>([&](int i, int j) { w[i][j] = normaliser.weight(i, z[i][j]); });
      x.expand(o, w, q, s.right_at[0], c0);
    }
    x.each(o, g.K, c0, [&](int i, int c, float value) {
      if (p0 + i < g.blocks) mean[cell(g, local, slot, p0 + i) * g.K + c] = value;
    });
  }
#pragma unroll
  for (int i = 0; i < R; ++i) {
    const int p = p0 + x.ty + 16 * i;
    if (x.tx == 0 && p < g.blocks) step.lse_w[cell(g, local, slot, p)] = normaliser.value(i);
  }
}

}  // namespace plain

extern __shared__ __align__(16) char memory[];

#define LINNET_CALL(R) plain::block_forward<R>(g, step, pass, first != 0, values != 0, own != 0, memory)
LINNET_MONARCH_PLAIN(block_forward,
                     (const __grid_constant__ MonarchProblem g, const __grid_constant__ MonarchStep step,
                      const __grid_constant__ MonarchPassing pass, int first, int values, int own),
                     LINNET_CALL)
#undef LINNET_CALL
#define LINNET_CALL(R) plain::slot_forward<R>(g, step, pass, memory)
LINNET_MONARCH_PLAIN(slot_forward,
                     (const __grid_constant__ MonarchProblem g, const __grid_constant__ MonarchStep step,
                      const __grid_constant__ MonarchPassing pass),
                     LINNET_CALL)
#undef LINNET_CALL
#define LINNET_CALL(R) plain::slot_lse<R>(g, step, memory)
LINNET_MONARCH_PLAIN(slot_lse, (const __grid_constant__ MonarchProblem g, const __grid_constant__ MonarchStep step),
                     LINNET_CALL)
#undef LINNET_CALL
#define LINNET_CALL(R) plain::slot_means<R>(g, step, mean, memory)
LINNET_MONARCH_PLAIN(slot_means,
                     (const __grid_constant__ MonarchProblem g, const __grid_constant__ MonarchStep step, float* mean),
                     LINNET_CALL)
#undef LINNET_CALL

// Zeroes the counters of the tuned kernel.
extern "C" __global__ void __launch_bounds__(256) clear_counters(uint32_t* counters, int count) {
  for (int i = threadIdx.x; i < count; i += 256) counters[i] = 0;
}

}  // namespace linnet::cuda
