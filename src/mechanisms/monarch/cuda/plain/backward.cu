// The plain backward programs (plain.cuh). Each product pair of the CPU's programs is two kernels here: one whose rows
// are what it reduces over tiles for, one with the roles exchanged, so that nothing is added up between blocks of threads.
//
//   slots:   rows l: lse, delta, dq          rows p: da, dy, dc
//   blocks:  rows j: lse of R, sums, dmean   rows i: dk, dv
//   between steps, slots: rows l: dq         rows p: da, dc
#include "plain.cuh"

namespace linnet::cuda {
namespace plain {

// From dout of 16 R queries of slot j to their lse, delta and dq. Grid: units * cols, tiles of rows.
template <int R>
__device__ __forceinline__ void slot_queries(const MonarchProblem& g, const MonarchStep& step, const MonarchPassing& pass,
                                             char* memory) {
  const SlotProgram<R> x(g, memory);
  Shared<R>& s = x.s;
  const int slot = x.slot, l0 = x.first;
  const int64_t local = x.local;
  const MonarchUnitIndex u = x.u;
  const Source q = source_of(g.q, g.K), dout = source_of(g.dout, g.V), a = source_of(step.a, g.K), y = source_of(pass.y, g.V);
  x.list([&](int i) {
    const int t = query_at(g, u.tile, l0 + i, slot);
    s.left_at[0][i] = token_offset(g.q, u, t);
    s.left_at[1][i] = t;
    s.left_at[2][i] = token_offset(g.dout, u, t);
    s.left_number[0][i] = g.causal && t >= 0 ? pass.own_lse[query_cell(g, local, slot, l0 + i)] : -kInfinity;
    s.left_number[1][i] =
        t >= 0 && g.dlse.data != nullptr ? static_cast<const float*>(g.dlse.data)[offset_of(g.dlse, u.b, t, u.h)] : 0;
  });
  Scores<R> z, d;
  const auto scores = [&](int p0, bool gradients) {
    x.beta(z, step, p0);
    if (!gradients) return;
    clear<R>(d);
    x.contract(d, dout, s.left_at[2], y, s.right_at[1]);
  };
  Normaliser<R> normaliser;
  const bool whole = g.blocks <= x.kTile;
  for (int p0 = 0; p0 < g.blocks; p0 += x.kTile) {
    scores(p0, whole);
    normaliser.add(z);
  }
  float lse[R], delta[R];
#pragma unroll
  for (int i = 0; i < R; ++i) {
    const int l = x.ty + 16 * i;
    const float mine = s.left_number[0][l];
    delta[i] = -s.left_number[1][l];
    normaliser.join(i, mine);
    lse[i] = normaliser.value(i);
    if (mine == -kInfinity || s.left_at[2][l] < 0) continue;
    // Causal: dout . the attention to the own block, summed in the order of contract, so that the gradient of a weight of 1
    // cancels to the last bit.
    float own = 0;
    for (int c = 0; c < g.V; ++c) {
      own = fmaf(ptx::load(g.dout.data, g.dout.dtype, s.left_at[2][l] + c),
                 pass.own[query_cell(g, local, slot, l0 + l) * g.V + c], own);
    }
    delta[i] = fmaf(normaliser.weight(i, mine), own, delta[i]);
  }
  for (int p0 = 0; p0 < g.blocks; p0 += x.kTile) {
    if (!whole) scores(p0, true);
#pragma unroll
    for (int i = 0; i < R; ++i) {
      float products[R];
#pragma unroll
      for (int j = 0; j < R; ++j) products[j] = normaliser.weight(i, z[i][j]) * d[i][j];
      delta[i] += sum_row<R>(products);
    }
  }
  for (int c0 = 0; c0 < g.K; c0 += kChannels) {
    Rows<R> o;
    clear_rows<R>(o);
    for (int p0 = 0; p0 < g.blocks; p0 += x.kTile) {
      if (!whole) scores(p0, true);
      Scores<R> w;
      each_score<R>([&](int i, int j) { w[i][j] = normaliser.weight(i, z[i][j]) * (d[i][j] - delta[i]); });
      x.expand(o, w, a, s.right_at[0], c0);
    }
    x.each(o, g.K, c0, [&](int l, int c, float value) {
      if (l0 + l < g.rows) pass.dq[query_cell(g, local, slot, l0 + l) * g.K + c] = g.scale * value;
    });
  }
#pragma unroll
  for (int i = 0; i < R; ++i) {
    const int l = l0 + x.ty + 16 * i;
    if (x.tx != 0 || l >= g.rows) continue;
    step.lse[query_cell(g, local, slot, l)] = lse[i];
    pass.delta[query_cell(g, local, slot, l)] = delta[i];
  }
}

// From dout of the queries of slot j to da, dy and dc of 16 R blocks. Grid: units * cols, tiles of blocks.
template <int R>
__device__ __forceinline__ void slot_blocks(const MonarchProblem& g, const MonarchStep& step, const MonarchPassing& pass,
                                            char* memory) {
  const SlotProgram<R> x(g, memory);
  Shared<R>& s = x.s;
  const int slot = x.slot, p0 = x.first;
  const int64_t local = x.local;
  const MonarchUnitIndex u = x.u;
  const Source q = source_of(g.q, g.K), dout = source_of(g.dout, g.V), a = source_of(step.a, g.K), y = source_of(pass.y, g.V);
  x.list_blocks(step, p0, s.left_at, s.left_number);
  Scores<R> z, d;  // L and dbeta, transposed
  const auto scores = [&](int l0) {
    x.list([&](int i) {
      const int t = query_at(g, u.tile, l0 + i, slot);
      s.right_at[0][i] = token_offset(g.q, u, t);
      s.right_at[1][i] = token_offset(g.dout, u, t);
      s.right_number[0][i] = t < 0 ? 0 : step.lse[query_cell(g, local, slot, l0 + i)];
      s.right_number[1][i] = t < 0 ? 0 : pass.delta[query_cell(g, local, slot, l0 + i)];
    });
    clear<R>(z);
    clear<R>(d);
    x.contract(z, a, s.left_at[0], q, s.right_at[0]);
    x.contract(d, y, s.left_at[1], dout, s.right_at[1]);
    each_score<R>([&](int i, int j) {
      const int p = x.ty + 16 * i, l = x.tx + 16 * j;
      const bool there = s.left_at[0][p] >= 0 && s.right_at[0][l] >= 0 && (!g.causal || p0 + p < l0 + l);
      z[i][j] = there ? exp2f(fmaf(z[i][j], g.factor, -s.left_number[0][p]) - s.right_number[0][l]) : 0;
      d[i][j] = there ? z[i][j] * (d[i][j] - s.right_number[1][l]) : 0;
    });
  };
  const bool whole = g.rows <= x.kTile;
  if (whole) scores(0);
  float sums[R] = {};
  for (int part = 0; part < 2; ++part) {
    const int width = part == 0 ? g.K : g.V;
    for (int c0 = 0; c0 < width; c0 += kChannels) {
      Rows<R> o;
      clear_rows<R>(o);
      for (int l0 = 0; l0 < g.rows; l0 += x.kTile) {
        if (!whole) scores(l0);
        if (part == 0 && c0 == 0) {
#pragma unroll
          for (int i = 0; i < R; ++i) sums[i] += sum_row<R>(d[i]);
        }
        x.expand(o, part == 0 ? d : z, part == 0 ? q : dout, s.right_at[part], c0);
      }
      float* const to = part == 0 ? pass.da : pass.dy;
      x.each(o, width, c0, [&](int i, int c, float value) {
        if (p0 + i < g.blocks) to[cell(g, local, slot, p0 + i) * width + c] = value;
      });
    }
  }
#pragma unroll
  for (int i = 0; i < R; ++i) {
    const int p = p0 + x.ty + 16 * i;
    if (x.tx == 0 && p < g.blocks) pass.dc[cell(g, local, slot, p)] = -sums[i];
  }
}

// From da, dc (and dy) of block p to the normaliser of R, sum_i R dR and dmean of 16 R slots; causal: also the part of dq that
// comes through the own block. Grid: units * blocks, tiles of slots.
template <int R>
__device__ __forceinline__ void block_slots(const MonarchProblem& g, const MonarchStep& step, const MonarchPassing& pass,
                                            bool first, bool values, char* memory) {
  const BlockProgram<R> x(g, memory);
  Shared<R>& s = x.s;
  const int p = x.p, j0 = x.first;
  const int64_t local = x.local;
  const MonarchUnitIndex u = x.u;
  const Source q = first ? source_of(g.q, g.K) : source_of(step.mean, g.K), k = source_of(g.k, g.K), v = source_of(g.v, g.V);
  const Source da = source_of(pass.da, g.K), dy = source_of(pass.dy, g.V), dout = source_of(g.dout, g.V);
  x.list([&](int i) {
    const int j = j0 + i, t = query_at(g, u.tile, p % g.rows, j);
    const bool there = j < g.cols;
    s.left_at[0][i] = !there ? -1 : first ? token_offset(g.q, u, t) : cell(g, local, j, p) * g.K;
    s.left_at[1][i] = there ? cell(g, local, j, p) * g.K : -1;
    s.left_at[2][i] = there ? cell(g, local, j, p) * g.V : -1;
    s.left_at[3][i] = token_offset(g.dout, u, t);
    s.left_number[0][i] = there ? pass.dc[cell(g, local, j, p)] * kLn2 : 0;  // scores are in base 2
    const bool own = g.causal && t >= 0;
    s.left_number[1][i] = own ? step.lse[query_cell(g, local, j, p)] : kInfinity;
    s.left_number[2][i] = own ? pass.delta[query_cell(g, local, j, p)] : 0;
  });
  Scores<R> z, d;
  const auto scores = [&](int i0, bool gradients) {
    x.key_scores(z, q, i0);
    each_score<R>([&](int i, int j) { z[i][j] = s.right_at[0][x.tx + 16 * j] >= 0 ? z[i][j] * g.factor : -kInfinity; });
    if (!gradients) return;
    clear<R>(d);
    x.contract(d, da, s.left_at[1], k, s.right_at[0]);
    each_score<R>([&](int i, int j) {
      d[i][j] = z[i][j] > -kInfinity ? fmaf(d[i][j], g.scale, s.left_number[0][x.ty + 16 * i] * z[i][j]) : 0;
    });
    if (values) x.contract(d, dy, s.left_at[2], v, s.right_at[1]);
  };
  Normaliser<R> normaliser;
  const bool whole = g.cols <= x.kTile;
  for (int i0 = 0; i0 < g.cols; i0 += x.kTile) {
    scores(i0, whole);
    normaliser.add(z);
  }
  float sums[R] = {};
  for (int i0 = 0; i0 < g.cols; i0 += x.kTile) {
    if (!whole) scores(i0, true);
#pragma unroll
    for (int i = 0; i < R; ++i) {
      float products[R];
#pragma unroll
      for (int j = 0; j < R; ++j) products[j] = normaliser.weight(i, z[i][j]) * d[i][j];
      sums[i] += sum_row<R>(products);
    }
  }
  for (int c0 = 0; c0 < g.K; c0 += kChannels) {
    Rows<R> o;
    clear_rows<R>(o);
    for (int i0 = 0; i0 < g.cols; i0 += x.kTile) {
      if (!whole) scores(i0, true);
      Scores<R> w;
      each_score<R>([&](int i, int j) { w[i][j] = normaliser.weight(i, z[i][j]) * (d[i][j] - sums[i]); });
      x.expand(o, w, k, s.right_at[0], c0);
    }
    x.each(o, g.K, c0, [&](int j, int c, float value) {
      if (j0 + j < g.cols) pass.dmean[cell(g, local, j0 + j, p) * g.K + c] = g.scale * value;
    });
    if (!g.causal) continue;
    clear_rows<R>(o);
    for (int i0 = 0; i0 < g.cols; i0 += x.kTile) {
      x.key_scores(z, q, i0);
      Scores<R> w;
      clear<R>(w);
      x.contract(w, dout, s.left_at[3], v, s.right_at[1]);
      each_score<R>([&](int i, int j) {
        const int row = x.ty + 16 * i, key = x.tx + 16 * j;
        const bool there = s.right_at[0][key] >= 0 && i0 + key <= j0 + row;
        const float weight = there ? exp2f(z[i][j] * g.factor - s.left_number[1][row]) : 0;
        w[i][j] = weight * (w[i][j] - s.left_number[2][row]);
      });
      x.expand(o, w, k, s.right_at[0], c0);
    }
    x.each(o, g.K, c0, [&](int j, int c, float value) {
      if (j0 + j < g.cols) pass.dq[query_cell(g, local, j0 + j, p) * g.K + c] += g.scale * value;
    });
    if (whole) scores(0, true);
  }
#pragma unroll
  for (int i = 0; i < R; ++i) {
    const int j = j0 + x.ty + 16 * i;
    if (x.tx != 0 || j >= g.cols) continue;
    pass.lse_r[cell(g, local, j, p)] = normaliser.value(i);
    pass.sums[cell(g, local, j, p)] = sums[i];
  }
}

// dk and dv of 16 R keys of block p, over the tiles of queries and the slots in order. Grid: heads * blocks, tiles of keys.
// `opens`: the first of the steps that add to dk (the last of the call); `closes`: the last one.
template <int R>
__device__ __forceinline__ void block_keys(const MonarchProblem& g, const MonarchStep& step, const MonarchPassing& pass,
                                           bool opens, bool closes, char* memory) {
  const Program<R> x(g, memory);
  Shared<R>& s = x.s;
  const int p = blockIdx.x % g.blocks, i0 = blockIdx.y * x.kTile;
  const int64_t head = blockIdx.x / g.blocks;
  const MonarchUnitIndex u = unit_of(g, head * g.q_tiles);
  const Source q = closes ? source_of(g.q, g.K) : source_of(step.mean, g.K), k = source_of(g.k, g.K), v = source_of(g.v, g.V);
  const Source da = source_of(pass.da, g.K), dy = source_of(pass.dy, g.V), dout = source_of(g.dout, g.V);
  x.list([&](int i) {
    const int t = valid_key_at(g, u.b, p, i0 + i);
    s.left_at[0][i] = token_offset(g.k, u, t);
    s.left_at[1][i] = token_offset(g.v, u, t);
    s.left_at[2][i] = token_at(g, g.S, 0, p, i0 + i);
  });
  Scores<R> r, d, own;  // R, dz and, causal, the own block's weights, transposed
  const auto scores = [&](int tile, int j0) {
    const int64_t local = head * g.q_tiles + tile;
    x.list([&](int i) {
      const int j = j0 + i, t = query_at(g, tile, p % g.rows, j);
      const bool there = j < g.cols;
      s.right_at[0][i] = !there ? -1 : closes ? token_offset(g.q, u, t) : cell(g, local, j, p) * g.K;
      s.right_at[1][i] = there ? cell(g, local, j, p) * g.K : -1;
      s.right_at[2][i] = there ? cell(g, local, j, p) * g.V : -1;
      s.right_at[3][i] = token_offset(g.dout, u, t);
      s.right_number[0][i] = there ? pass.lse_r[cell(g, local, j, p)] : kInfinity;
      s.right_number[1][i] = there ? pass.sums[cell(g, local, j, p)] : 0;
      s.right_number[2][i] = there ? pass.dc[cell(g, local, j, p)] * kLn2 : 0;
      const bool mine = g.causal && t >= 0;
      s.right_number[3][i] = mine ? pass.delta[query_cell(g, local, j, p)] : 0;
      s.left_number[0][i] = mine ? step.lse[query_cell(g, local, j, p)] : kInfinity;  // of the slots as well
    });
    clear<R>(r);
    clear<R>(d);
    x.contract(r, k, s.left_at[0], q, s.right_at[0]);
    x.contract(d, k, s.left_at[0], da, s.right_at[1]);
    each_score<R>([&](int i, int j) {
      const int slot = x.tx + 16 * j;
      r[i][j] = s.left_at[0][x.ty + 16 * i] >= 0 ? r[i][j] * g.factor : -kInfinity;
      d[i][j] = r[i][j] > -kInfinity ? fmaf(d[i][j], g.scale, s.right_number[2][slot] * r[i][j]) : 0;
    });
    if (opens) x.contract(d, v, s.left_at[1], dy, s.right_at[2]);
    clear<R>(own);
    if (g.causal) x.contract(own, v, s.left_at[1], dout, s.right_at[3]);
    each_score<R>([&](int i, int j) {
      const int slot = x.tx + 16 * j, key = x.ty + 16 * i;
      const float z = r[i][j];
      r[i][j] = exp2f(z - s.right_number[0][slot]);
      d[i][j] = r[i][j] * (d[i][j] - s.right_number[1][slot]);
      if (!g.causal) return;
      const float weight = i0 + key <= j0 + slot ? exp2f(z - s.left_number[0][slot]) : 0;
      d[i][j] += weight * (own[i][j] - s.right_number[3][slot]);
      own[i][j] = weight;
    });
  };
  const bool whole = g.q_tiles == 1 && g.cols <= x.kTile;
  if (whole) scores(0, 0);
  for (int part = 0; part < (opens ? 2 : 1); ++part) {
    const int width = part == 0 ? g.K : g.V;
    for (int c0 = 0; c0 < width; c0 += kChannels) {
      Rows<R> o;
      clear_rows<R>(o);
      for (int tile = 0; tile < g.q_tiles; ++tile) {
        if (!is_visible(g, tile, p)) continue;
        for (int j0 = 0; j0 < g.cols; j0 += x.kTile) {
          if (!whole) scores(tile, j0);
          x.expand(o, r, part == 0 ? da : dy, s.right_at[1 + part], c0);
          if (part == 0) {
            x.expand(o, d, q, s.right_at[0], c0);
          } else if (g.causal) {
            x.expand(o, own, dout, s.right_at[3], c0);
          }
        }
      }
      const MonarchRows& to = part == 0 ? g.dk : g.dv;
      x.each(o, width, c0, [&](int i, int c, float value) {
        const int t = static_cast<int>(s.left_at[2][i]);
        if (t < 0) return;
        if (part == 0) {
          value *= g.scale;
          const int64_t at = (head * g.S + t) * g.K + c;
          if (!opens) value += pass.dk[at];
          if (!closes) pass.dk[at] = value;
        }
        if ((part == 1 || closes) && to.data != nullptr) ptx::store(to.data, to.dtype, offset_of(to, u.b, t, u.h) + c, value);
      });
    }
  }
}

// Between steps, from dmean of the step behind: W and L of `step` and dlog of 16 R queries of slot j; adds to their dq, keeps
// the sums of dlog. `pass.sums` holds dmean.mean. Grid: units * cols, tiles of rows.
template <int R>
__device__ __forceinline__ void between_queries(const MonarchProblem& g, const MonarchStep& step, const MonarchPassing& pass,
                                                char* memory) {
  const SlotProgram<R> x(g, memory);
  Shared<R>& s = x.s;
  const int slot = x.slot, l0 = x.first;
  const int64_t local = x.local;
  const MonarchUnitIndex u = x.u;
  const Source q = source_of(g.q, g.K), a = source_of(step.a, g.K), dmean = source_of(pass.dmean, g.K);
  x.list([&](int i) {
    const int t = valid_query_at(g, u.b, u.tile, l0 + i, slot);
    s.left_at[0][i] = token_offset(g.q, u, t);
    s.left_number[0][i] = t < 0 ? 0 : step.lse[query_cell(g, local, slot, l0 + i)];
  });
  Scores<R> w, d, L;
  const auto scores = [&](int p0) {
    x.list([&](int i) {
      const int64_t at = p0 + i < g.blocks ? cell(g, local, slot, p0 + i) : -1;
      const float c = at >= 0 ? step.c[at] : kInfinity;
      s.right_at[0][i] = c < kInfinity ? at * g.K : -1;
      s.right_number[0][i] = c;
      s.right_number[1][i] = c < kInfinity ? step.lse_w[at] : 0;
      s.right_number[2][i] = c < kInfinity ? pass.sums[at] : 0;
    });
    clear<R>(w);
    clear<R>(d);
    x.contract(w, q, s.left_at[0], a, s.right_at[0]);
    x.contract(d, q, s.left_at[0], dmean, s.right_at[0]);
    each_score<R>([&](int i, int j) {
      const int l = x.ty + 16 * i, p = x.tx + 16 * j;
      const bool there = s.left_at[0][l] >= 0 && s.right_at[0][p] >= 0;
      const float logit = there ? w[i][j] * g.factor - s.left_number[0][l] : -kInfinity;
      w[i][j] = there ? exp2f(logit - s.right_number[1][p]) : 0;
      L[i][j] = there ? exp2f(logit - s.right_number[0][p]) : 0;
      d[i][j] = w[i][j] * (d[i][j] - s.right_number[2][p]);
    });
  };
  const bool whole = g.blocks <= x.kTile;
  float sums[R] = {};
  for (int p0 = 0; p0 < g.blocks; p0 += x.kTile) {
    scores(p0);
#pragma unroll
    for (int i = 0; i < R; ++i) sums[i] += sum_row<R>(d[i]);
  }
  for (int c0 = 0; c0 < g.K; c0 += kChannels) {
    Rows<R> o, direct;
    clear_rows<R>(o);
    clear_rows<R>(direct);
    for (int p0 = 0; p0 < g.blocks; p0 += x.kTile) {
      if (!whole) scores(p0);
      Scores<R> beta;
      each_score<R>([&](int i, int j) { beta[i][j] = d[i][j] - L[i][j] * sums[i]; });
      x.expand(o, beta, a, s.right_at[0], c0);
      x.expand(direct, w, dmean, s.right_at[0], c0);
    }
#pragma unroll
    for (int i = 0; i < R; ++i) {
#pragma unroll
      for (int j = 0; j < kChannels / 16; ++j) direct[i][j] = fmaf(g.scale, o[i][j], direct[i][j]);
    }
    x.each(direct, g.K, c0, [&](int l, int c, float value) {
      if (l0 + l < g.rows) pass.dq[query_cell(g, local, slot, l0 + l) * g.K + c] += value;
    });
  }
#pragma unroll
  for (int i = 0; i < R; ++i) {
    const int l = l0 + x.ty + 16 * i;
    if (x.tx == 0 && l < g.rows) pass.delta[query_cell(g, local, slot, l)] = sums[i];
  }
}

// Between steps: da and dc of `step` for 16 R blocks of slot j. Grid: units * cols, tiles of blocks.
template <int R>
__device__ __forceinline__ void between_blocks(const MonarchProblem& g, const MonarchStep& step, const MonarchPassing& pass,
                                               char* memory) {
  const SlotProgram<R> x(g, memory);
  Shared<R>& s = x.s;
  const int slot = x.slot, p0 = x.first;
  const int64_t local = x.local;
  const MonarchUnitIndex u = x.u;
  const Source q = source_of(g.q, g.K), a = source_of(step.a, g.K), dmean = source_of(pass.dmean, g.K);
  x.list([&](int i) {
    const int64_t at = p0 + i < g.blocks ? cell(g, local, slot, p0 + i) : -1;
    const float c = at >= 0 ? step.c[at] : kInfinity;
    s.left_at[0][i] = c < kInfinity ? at * g.K : -1;
    s.left_number[0][i] = c;
    s.left_number[1][i] = c < kInfinity ? step.lse_w[at] : 0;
    s.left_number[2][i] = c < kInfinity ? pass.sums[at] : 0;
  });
  Scores<R> z, d;
  const auto scores = [&](int l0) {
    x.list([&](int i) {
      const int t = valid_query_at(g, u.b, u.tile, l0 + i, slot);
      s.right_at[0][i] = token_offset(g.q, u, t);
      s.right_number[0][i] = t < 0 ? 0 : step.lse[query_cell(g, local, slot, l0 + i)];
      s.right_number[1][i] = t < 0 ? 0 : pass.delta[query_cell(g, local, slot, l0 + i)];
    });
    clear<R>(z);
    clear<R>(d);
    x.contract(z, a, s.left_at[0], q, s.right_at[0]);
    x.contract(d, dmean, s.left_at[0], q, s.right_at[0]);
    each_score<R>([&](int i, int j) {
      const int p = x.ty + 16 * i, l = x.tx + 16 * j;
      const bool there = s.left_at[0][p] >= 0 && s.right_at[0][l] >= 0;
      const float logit = there ? z[i][j] * g.factor - s.right_number[0][l] : -kInfinity;
      const float w = there ? exp2f(logit - s.left_number[1][p]) : 0, L = there ? exp2f(logit - s.left_number[0][p]) : 0;
      d[i][j] = w * (d[i][j] - s.left_number[2][p]) - L * s.right_number[1][l];
    });
  };
  const bool whole = g.rows <= x.kTile;
  if (whole) scores(0);
  float sums[R] = {};
  for (int c0 = 0; c0 < g.K; c0 += kChannels) {
    Rows<R> o;
    clear_rows<R>(o);
    for (int l0 = 0; l0 < g.rows; l0 += x.kTile) {
      if (!whole) scores(l0);
      if (c0 == 0) {
#pragma unroll
        for (int i = 0; i < R; ++i) sums[i] += sum_row<R>(d[i]);
      }
      x.expand(o, d, q, s.right_at[0], c0);
    }
    x.each(o, g.K, c0, [&](int i, int c, float value) {
      if (p0 + i < g.blocks) pass.da[cell(g, local, slot, p0 + i) * g.K + c] = value;
    });
  }
#pragma unroll
  for (int i = 0; i < R; ++i) {
    const int p = p0 + x.ty + 16 * i;
    if (x.tx == 0 && p < g.blocks) pass.dc[cell(g, local, slot, p)] = -sums[i];
  }
}

}  // namespace plain

extern __shared__ __align__(16) char memory[];

#define LINNET_PARAMETERS                                                             \
  const __grid_constant__ MonarchProblem g, const __grid_constant__ MonarchStep step, \
      const __grid_constant__ MonarchPassing pass
#define LINNET_CALL(R) plain::slot_queries<R>(g, step, pass, memory)
LINNET_MONARCH_PLAIN(slot_queries, (LINNET_PARAMETERS), LINNET_CALL)
#undef LINNET_CALL
#define LINNET_CALL(R) plain::slot_blocks<R>(g, step, pass, memory)
LINNET_MONARCH_PLAIN(slot_blocks, (LINNET_PARAMETERS), LINNET_CALL)
#undef LINNET_CALL
#define LINNET_CALL(R) plain::block_slots<R>(g, step, pass, first != 0, values != 0, memory)
LINNET_MONARCH_PLAIN(block_slots, (LINNET_PARAMETERS, int first, int values), LINNET_CALL)
#undef LINNET_CALL
#define LINNET_CALL(R) plain::block_keys<R>(g, step, pass, opens != 0, closes != 0, memory)
LINNET_MONARCH_PLAIN(block_keys, (LINNET_PARAMETERS, int opens, int closes), LINNET_CALL)
#undef LINNET_CALL
#define LINNET_CALL(R) plain::between_queries<R>(g, step, pass, memory)
LINNET_MONARCH_PLAIN(between_queries, (LINNET_PARAMETERS), LINNET_CALL)
#undef LINNET_CALL
#define LINNET_CALL(R) plain::between_blocks<R>(g, step, pass, memory)
LINNET_MONARCH_PLAIN(between_blocks, (LINNET_PARAMETERS), LINNET_CALL)
#undef LINNET_CALL

// pass.sums = dmean.mean, a thread per cell.
extern "C" __global__ void __launch_bounds__(256)
    mean_products(const __grid_constant__ MonarchPassing pass, const float* mean, int64_t cells, int K) {
  for (int64_t i = blockIdx.x * int64_t{256} + threadIdx.x; i < cells; i += gridDim.x * int64_t{256}) {
    float sum = 0;
    for (int c = 0; c < K; ++c) sum = fmaf(pass.dmean[i * K + c], mean[i * K + c], sum);
    pass.sums[i] = sum;
  }
}

// Zeros: gradients of keys that no query sees.
extern "C" __global__ void __launch_bounds__(256)
    clear_keys(const __grid_constant__ MonarchProblem g, const __grid_constant__ MonarchRows x, int64_t count, int width) {
  for (int64_t i = blockIdx.x * int64_t{256} + threadIdx.x; i < count; i += gridDim.x * int64_t{256}) {
    const int c = static_cast<int>(i % width), h = static_cast<int>(i / width % g.H);
    const int t = static_cast<int>(i / width / g.H % g.S), b = static_cast<int>(i / width / g.H / g.S);
    ptx::store(x.data, x.dtype, offset_of(x, b, t, h) + c, 0);
  }
}

// dq of every token of the chunk: what came through L, and what came through the first means, which were the queries.
extern "C" __global__ void __launch_bounds__(256)
    finish_queries(const __grid_constant__ MonarchProblem g, const __grid_constant__ MonarchPassing pass, int64_t units) {
  const int64_t count = units * g.cols * g.rows * g.K;
  for (int64_t i = blockIdx.x * int64_t{256} + threadIdx.x; i < count; i += gridDim.x * int64_t{256}) {
    const int c = static_cast<int>(i % g.K), l = static_cast<int>(i / g.K % g.rows);
    const int j = static_cast<int>(i / g.K / g.rows % g.cols);
    const int64_t local = i / g.K / g.rows / g.cols;
    const MonarchUnitIndex u = unit_of(g, local);
    const int t = query_at(g, u.tile, l, j);
    if (t < 0) continue;
    float sum = pass.dq[i];
    for (int f = 0; f < g.k_tiles; ++f) sum += pass.dmean[plain::cell(g, local, j, f * g.rows + l) * g.K + c];
    ptx::store(g.dq.data, g.dq.dtype, offset_of(g.dq, u.b, t, u.h) + c, sum);
  }
}

}  // namespace linnet::cuda
