// Gradients of Monarch attention in one step, 16-bit, on the tiles of tile.cuh: three launches, one program for each
// block of threads, nothing saved by the forward and nothing added up between programs.
//
//   blocks            a, y and the normalisers of R, as in the forward
//   slot gradients    S = q a^T - c, L = softmax(S), dbeta = L (dout y^T - rows' sums):  dq = dbeta a,  dy = L^T dout,
//                     e = dbeta^T q - (columns' sums of dbeta) q,  where a and y stood
//   block gradients   R from its normalisers, dR = e k^T + dy v^T, dz = R (dR - rows' sums):  dq += dz k,
//                     dk = R^T e + (dz + sums R)^T q,  dv = R^T dy
//
// c = a[j,k].q[k,j] - lse_R falls with q[k,j], so its gradient joins that of a: beta rises with a.(q[l,j] - q[k,j]), and e is
// the gradient of a through that difference, in which large logits do not cancel again. The columns' sums are a product with a
// tile of ones, of dbeta as it was rounded for e. Scores transposed are left operands from shared memory.
#pragma once

#include "tile.cuh"

namespace linnet::cuda {

template <int D, int P, bool bf16>
struct MonarchTileGradients : MonarchTile<D, P, bf16> {
  using Tile = MonarchTile<D, P, bf16>;
  using Tile::g, Tile::q, Tile::k, Tile::v, Tile::bias, Tile::b, Tile::h, Tile::thread, Tile::lane, Tile::first;
  using Tile::kTile, Tile::kPieces, Tile::kPanels, Tile::kRowsAtOnce, Tile::kInfinity;
  static constexpr int kWeights = P * P * 2, kOnes = 16 * ptx::kRowBytes;
  using Scores = float[P / 64][32];
  using Rows = float[kPanels][32];

  uint32_t x, y;           // more tiles: dout and none, or e and dy
  uint32_t weight, other;  // [P][P] scores, 16-bit
  uint32_t ones;           // slots: 16 rows of ones

  __device__ __forceinline__ int row(int half) const { return first + lane / 4 + 8 * half; }

  // o (+)= weights^T rows: of the columns of the weights that are this warpgroup's rows
  __device__ __forceinline__ void gather(Rows& o, uint32_t weights, uint32_t tile, bool add = false) const {
    const uint32_t left = weights + first / 64 * P * ptx::kRowBytes;
#pragma unroll
    for (int n = 0; n < kPanels; ++n) {
#pragma unroll
      for (int i = 0; i < P / 16; ++i) {
        ptx::wgmma_shared<bf16, true, true>(o[n], ptx::descriptor_mn_major(left, P, i),
                                            ptx::descriptor_mn_major(tile + n * P * ptx::kRowBytes, P, i), add || i > 0);
      }
    }
  }
  __device__ __forceinline__ void put_weights(const uint32_t (&p)[P / 16][4], uint32_t to) const {
    to += Tile::place(first + lane % 16, lane / 16);
#pragma unroll
    for (int i = 0; i < P / 16; ++i) {
      ptx::store_matrices((to ^ (i % 4 * 32)) + i / 4 * P * ptx::kRowBytes, p[i][0], p[i][1], p[i][2], p[i][3]);
    }
  }
  __device__ __forceinline__ static float2 pair_at(uint32_t tile, int row, int piece, int lane) {
    return ptx::unpack<bf16>(ptx::load_shared_4(tile + Tile::place(row, piece) + lane % 4 * 4));
  }

  // Rows l of slot `slot` of dq, and e, dy in place of the a, y that lie at `ay`.
  __device__ __forceinline__ void slot_program(int slot, char* ay, const float* lse_r, float* dc) const {
    const auto there = [&](int p) { return p < g.blocks; };
    const int64_t t0 = slot - g.front, last = t0 + static_cast<int64_t>(P - 1) * g.cols;
    const bool whole = g.rows == P && t0 >= 0 && last < g.T;
    const auto query = [&](int l) { return query_at(g, 0, l, slot) >= 0; };
    this->ask_queries(slot);
    this->load(k, ay, ay, 4 * D, D, g.blocks == P, there);
    ptx::copy_commit();
    this->load(v, ay, ay + 2 * D, 4 * D, D, g.blocks == P, there);
    if (g.dout.data != nullptr) {
      this->load(x, g.dout.data, this->row_of(g.dout, t0), 2 * g.dout.stride_t * g.cols, g.V, whole && g.V == D, query);
    } else {
      this->load(x, g.q.data, nullptr, 0, 0, false, query);
    }
    ptx::copy_commit();
    if (thread < P) bias[thread] = thread < g.blocks ? lse_r[thread] : -kInfinity;
    if (thread < kOnes / 16) {
      const uint32_t one = ptx::pack<bf16>(1, 1);
      ptx::fill_shared_16(ones + thread * 16, one);
    }
    float dlse[2] = {};
#pragma unroll
    for (int half = 0; half < 2 && g.dlse.data != nullptr; ++half) {
      const int t = query_at(g, 0, row(half), slot);
      if (t >= 0) dlse[half] = static_cast<const float*>(g.dlse.data)[offset_of(g.dlse, b, t, h)];
    }
    ptx::copy_wait<1>();
    ptx::fence_async_shared();
    __syncthreads();
    Scores s, d;
    float by[2], lse[2];
    uint32_t p[P / 16][4];
    this->logits(s);
    this->subtract_diagonal(s);
    ptx::copy_wait<0>();
    ptx::fence_async_shared();
    __syncthreads();
    Tile::begin(d);
    this->multiply(d, x, v);
    this->template softmax<true>(s, p, by, lse);
    Tile::end(d);
    // L to `weight`, dbeta to `other` and p
    float delta[2] = {};
#pragma unroll
    for (int i = 0; i < P / 2; ++i) {
      float& weight_of = s[i / 32][i % 32];
      weight_of *= by[i % 4 / 2];
      delta[i % 4 / 2] = fmaf(weight_of, d[i / 32][i % 32], delta[i % 4 / 2]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) delta[half] = Tile::quad_sum(delta[half]) - dlse[half];
    Tile::to_left(s, p);
    put_weights(p, weight);
#pragma unroll
    for (int i = 0; i < P / 2; ++i) d[i / 32][i % 32] = s[i / 32][i % 32] * (d[i / 32][i % 32] - delta[i % 4 / 2]);
    Tile::to_left(d, p);
    put_weights(p, other);
    ptx::fence_async_shared();
    __syncthreads();  // y is no longer read: its rows carry the results out
    Rows o, e;
    float sums[8];
    Tile::begin(o, e);
    ptx::hold(sums);
    Tile::average(o, p, k);
    gather(e, other, q);
#pragma unroll
    for (int i = 0; i < P / 16; ++i) {
      ptx::wgmma_shared<bf16, true, false>(sums, ptx::descriptor_mn_major(other + first / 64 * P * ptx::kRowBytes, P, i),
                                           ptx::descriptor_k_major(ones, 16, 0), i > 0);
    }
    Tile::end(o, e);
    ptx::hold(sums);
    const float scale[2] = {g.scale, g.scale}, one[2] = {1, 1};
    if (g.dq.data != nullptr) {
      this->put(o, scale, v);
      this->give_queries(g.dq, slot, v, g.K);
    }
#pragma unroll
    for (int n = 0; n < kPanels; ++n) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const float2 own = pair_at(q, row(i % 2), n * 8 + i / 2, lane);
        const float of = sums[i % 2 * 2];
        float* const to = e[n] + i / 2 * 4 + i % 2 * 2;
        to[0] = fmaf(-of, own.x, to[0]), to[1] = fmaf(-of, own.y, to[1]);
      }
    }
    const int p0 = first + lane / kPieces, piece = lane % kPieces;
    const auto give = [&](int64_t byte) {
      Tile::hand_out(v, [&](int i, const uint4& value) {
        const int at = p0 + i * kRowsAtOnce;
        if (at < g.blocks) *reinterpret_cast<uint4*>(ay + int64_t{4 * D} * at + byte + piece * 16) = value;
      });
    };
    this->put(e, scale, v);
    give(0);
    if (lane % 4 == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (row(half) < g.blocks) dc[row(half)] = -sums[2 * half];
      }
    }
    Tile::begin(o);
    gather(o, weight, x);
    Tile::end(o);
    this->put(o, one, v);
    give(2 * D);
  }

  // `ed`, `lse_r` and `dc` are those of this block at slot 0; slots lie `blocks` rows apart.
  __device__ __forceinline__ void block_program(int block, const char* ed, const float* lse_r, const float* dc) const {
    const auto slot = [&](int j) { return j < g.cols; };
    const bool full = this->ask_keys(block);
    ptx::copy_commit();
    this->ask_values(block);
    this->load(x, ed, ed, int64_t{4 * D} * g.blocks, D, g.cols == P, slot);
    this->load(y, ed, ed + 2 * D, int64_t{4 * D} * g.blocks, D, g.cols == P, slot);
    ptx::copy_commit();
    float lse[2], of_c[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t at = static_cast<int64_t>(row(half)) * g.blocks;
      const bool is_slot = row(half) < g.cols;
      lse[half] = is_slot ? lse_r[at] : kInfinity;
      if (lse[half] == -kInfinity) lse[half] = kInfinity;  // no valid key: no weights
      of_c[half] = is_slot ? dc[at] : 0;
    }
    ptx::copy_wait<1>();
    ptx::fence_async_shared();
    __syncthreads();
    Scores s, d;
    this->logits(s);
    ptx::copy_wait<0>();
    ptx::fence_async_shared();
    __syncthreads();
    Tile::begin(d);
    this->multiply(d, x, k);
    this->multiply(d, y, v, true);
#pragma unroll
    for (int i = 0; i < P / 2; ++i) {
      const float add = full ? 0 : bias[i / 32 * 64 + i % 32 / 4 * 8 + lane % 4 * 2 + i % 2];
      s[i / 32][i % 32] = ptx::exp2_fast(fmaf(s[i / 32][i % 32], g.factor, add) - lse[i % 4 / 2]);
    }
    Tile::end(d);
    float sums[2] = {};
#pragma unroll
    for (int i = 0; i < P / 2; ++i) {
      sums[i % 4 / 2] = fmaf(s[i / 32][i % 32], d[i / 32][i % 32], sums[i % 4 / 2]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) sums[half] = Tile::quad_sum(sums[half]);
    uint32_t p[P / 16][4];
    Tile::to_left(s, p);
    put_weights(p, weight);
    // (dz - dc R) scale to `other`, dz to p
#pragma unroll
    for (int i = 0; i < P / 2; ++i) {
      const float r = s[i / 32][i % 32], dz = r * (d[i / 32][i % 32] - sums[i % 4 / 2]);
      s[i / 32][i % 32] = fmaf(-of_c[i % 4 / 2], r, dz) * g.scale;
      d[i / 32][i % 32] = dz;
    }
    Tile::to_left(s, p);
    put_weights(p, other);
    Tile::to_left(d, p);
    ptx::fence_async_shared();
    __syncthreads();  // v is no longer read: its rows carry the results out
    Rows o, keys;
    const float scale[2] = {g.scale, g.scale}, one[2] = {1, 1};
    Tile::begin(o, keys);
    Tile::average(o, p, k);
    gather(keys, weight, x);
    gather(keys, other, q, true);
    Tile::end(o, keys);
    if (g.dq.data != nullptr) {
      this->put(o, scale, v);
      give_tokens(g.dq, block, g.K, true);
    }
    if (g.dk.data != nullptr) {
      this->put(keys, one, v);
      give_tokens(g.dk, block, g.K, false);
    }
    if (g.dv.data == nullptr) return;
    Tile::begin(o);
    gather(o, weight, y);
    Tile::end(o);
    this->put(o, one, v);
    give_tokens(g.dv, block, g.V, false);
  }
  // This warp's tokens of a block, or what is added to them.
  __device__ __forceinline__ void give_tokens(const MonarchRows& to, int block, int width, bool add) const {
    const int i0 = first + lane / kPieces, piece = lane % kPieces;
    const int64_t t0 = static_cast<int64_t>(block) * g.cols - g.front + i0;
    uint16_t* const at = static_cast<uint16_t*>(to.data) + b * to.stride_b + h * to.stride_h + t0 * to.stride_t + piece * 8;
    Tile::hand_out(v, [&](int i, const uint4& value) {
      const int64_t t = t0 + i * kRowsAtOnce;
      if (i0 + i * kRowsAtOnce >= g.cols || t < 0 || t >= g.T || piece * 8 >= width) return;
      uint4* const here = reinterpret_cast<uint4*>(at + i * kRowsAtOnce * to.stride_t);
      *here = add ? sum_of(*here, value) : value;
    });
  }
  __device__ __forceinline__ static uint4 sum_of(const uint4& a, const uint4& c) {
    const auto two = [](uint32_t m, uint32_t n) {
      const float2 u = ptx::unpack<bf16>(m), w = ptx::unpack<bf16>(n);
      return ptx::pack<bf16>(u.x + w.x, u.y + w.y);
    };
    return make_uint4(two(a.x, c.x), two(a.y, c.y), two(a.z, c.z), two(a.w, c.w));
  }

  // Grid: the programs of the chunk's units. Memory: `tiles` tiles, with gradients two of weights and the ones, then the bias.
  template <int tiles>
  __device__ __forceinline__ static MonarchTileGradients make(const MonarchProblem& g, const MonarchUnitIndex& u) {
    extern __shared__ char memory[];
    char* const aligned = memory + (1024 - ptx::shared_address(memory) % 1024) % 1024;
    const uint32_t start = ptx::shared_address(aligned), weights = start + tiles * kTile, ones = weights + 2 * kWeights;
    constexpr int kBias = tiles == 3 ? 3 * kTile : tiles * kTile + 2 * kWeights + (tiles == 4 ? kOnes : 0);
    const int thread = threadIdx.x;
    return {{g, start, start + kTile, start + 2 * kTile, reinterpret_cast<float*>(aligned + kBias), u.b, u.h, thread,
             thread % 32, thread / 32 * 16},
            start + 3 * kTile,
            start + 4 * kTile,
            weights,
            weights + kWeights,
            ones};
  }
  __device__ __forceinline__ static void blocks(const MonarchProblem& g, const MonarchSaved& saved) {
    const int64_t local = blockIdx.x / g.blocks, block = blockIdx.x % g.blocks, at = local * g.cols * g.blocks + block;
    make<3>(g, unit_of(g, local)).Tile::block_program(block, static_cast<char*>(saved.ay) + at * (4 * D), saved.lse + at);
  }
  __device__ __forceinline__ static void slots(const MonarchProblem& g, const MonarchSaved& saved) {
    const int64_t local = blockIdx.x / g.cols, slot = blockIdx.x % g.cols, at = (local * g.cols + slot) * g.blocks;
    make<4>(g, unit_of(g, local))
        .slot_program(slot, static_cast<char*>(saved.ay) + at * (4 * D), saved.lse + at, saved.dc + at);
  }
  __device__ __forceinline__ static void block_gradients(const MonarchProblem& g, const MonarchSaved& saved) {
    const int64_t local = blockIdx.x / g.blocks, block = blockIdx.x % g.blocks, at = local * g.cols * g.blocks + block;
    make<5>(g, unit_of(g, local))
        .block_program(block, static_cast<const char*>(saved.ay) + at * (4 * D), saved.lse + at, saved.dc + at);
  }
};

#define LINNET_MONARCH_GRADIENTS(name, program, D, P, bf16, blocks)                                \
  extern "C" __global__ void __launch_bounds__(2 * P, blocks)                                      \
      name(const __grid_constant__ MonarchProblem g, const __grid_constant__ MonarchSaved saved) { \
    MonarchTileGradients<D, P, bf16>::program(g, saved);                                           \
  }

}  // namespace linnet::cuda
