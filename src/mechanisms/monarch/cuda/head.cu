// Monarch attention of a whole head in one block of threads, one step, 16-bit: at most 16 blocks of at most 16 tokens.
//
// q, k and v of the head lie in shared memory, row (block, slot) at 16 block + slot; the 16-byte piece p of a row stands at p ^
// ((block ^ slot) % 8), so that 8 rows of a block and 8 rows of a slot both lie in 8 groups of banks. Each of 8 warps takes two
// blocks: it waits for its own rows alone, R = softmax(q k^T) stays in registers as the left operand, a replaces k and y
// replaces v. Behind one barrier it takes two slots in the same way. Every tensor passes through memory once.
//
// Gradients (widths up to 64): dout lies there too, and a and y beside k and v. Each of 16 warps takes its block as above, its
// slot, and its block once more, with the algebra of tile/gradients.cuh; scores are transposed in registers. Results
// take the place of what they are the last to read: dy of y, dq of dout, e of a, then dk of e and dv of dy.
#include "place.cuh"
#include "ptx/copy.cuh"
#include "ptx/matrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/numbers.cuh"
#include "ptx/sync.cuh"

namespace linnet::cuda {
namespace {

using namespace linnet::ptx;

constexpr int kSide = 16, kWarps = 8;
constexpr float kInfinity = __builtin_huge_valf();

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

template <int D, bool bf16>
struct Head {
  static constexpr int kPieces = D / 8, kRow = 2 * D, kTensor = kSide * kSide * kRow, kRowsAtOnce = 32 / kPieces;
  // Weights as left operands; what bf16 leaves of them is a second one. Rows under almost equal weights cancel each other, the
  // roundings of the weights do not: 8 bits alone leave an error of up to 6e-3 there, where the gate is 4e-3.
  static constexpr int kParts = bf16 ? 2 : 1;
  using Weights = uint32_t[kParts][4];

  const MonarchProblem& g;
  uint32_t q, k, v;  // shared addresses
  float* lse_r;      // [slot][16]: normalisers of R
  int b, h, lane;

  // Lanes name rows and pieces in their own way; a place moves by XOR to other pieces (pieces % 8 of an even multiple of the
  // lane's own) and by addition to rows 8 further.
  __device__ __forceinline__ static uint32_t place(int block, int slot, int piece) {
    return (block * kSide + slot) * kRow + ((piece ^ ((block ^ slot) & 7)) * 16);
  }

  // The rows of a block; `full`: all tokens are there and valid.
  __device__ __forceinline__ void load_tensor(uint32_t to, const MonarchRows& x, int width, int block, int t0, bool full,
                                              uint32_t valid) const {
    const int row = lane / kPieces, piece = lane % kPieces;
    const int64_t step = 2 * kRowsAtOnce * x.stride_t;
    const char* const base = static_cast<const char*>(x.data);
    const char* at = base + 2 * (b * x.stride_b + h * x.stride_h + (t0 + row) * x.stride_t + piece * 8);
    const uint32_t first = to + place(block, row, piece);
#pragma unroll
    for (int i = 0; i < kSide / kRowsAtOnce; ++i, at += step) {
      const uint32_t here = (first ^ (i * kRowsAtOnce % 8 * 16)) + i * kRowsAtOnce * kRow;
      if (full) {
        copy_16(here, at, 16);
      } else {
        const bool there = piece * 8 < width && (valid >> (row + i * kRowsAtOnce) & 1);
        copy_16(here, there ? at : base, there ? 16 : 0);
      }
    }
  }
  // The tokens of a block, a bit for each.
  __device__ __forceinline__ uint32_t tokens_of(int block) const {
    const int t = block * g.cols - g.front + lane;
    return __ballot_sync(0xffffffffu, lane < g.cols && block < g.rows && t >= 0 && t < g.T);
  }
  // Returns the valid keys of the block, a bit for each.
  __device__ __forceinline__ uint32_t load_block(int block) const {
    const int t0 = block * g.cols - g.front;
    const uint32_t tokens = tokens_of(block);
    const uint32_t keys =
        g.mask == nullptr ? tokens : __ballot_sync(0xffffffffu, (tokens >> lane & 1) && mask_at(g, b, t0 + lane));
    const bool wide = g.K == D && g.V == D;
    load_tensor(q, g.q, g.K, block, t0, wide && tokens == 0xffff, tokens);
    load_tensor(k, g.k, g.K, block, t0, wide && keys == 0xffff, keys);
    load_tensor(v, g.v, g.V, block, t0, wide && keys == 0xffff, keys);
    copy_commit();
    return keys;
  }

  // s = left rows . right rows. `left` is the place of row lane % 16, piece lane / 16; `right` that of row lane % 8 + lane / 16
  // * 8, piece lane / 8 % 2.
  __device__ __forceinline__ static void logits(float (&s)[2][4], uint32_t left, uint32_t right) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[0][i] = s[1][i] = 0;
    add_logits(s, left, right);
  }
  __device__ __forceinline__ static void add_logits(float (&s)[2][4], uint32_t left, uint32_t right) {
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      uint32_t x[4], y[4];
      load_matrices(x, left ^ (step * 32));
      load_matrices(y, right ^ (step * 32));
      mma<bf16>(s[0], x, y[0], y[1]);
      mma<bf16>(s[1], x, y[2], y[3]);
    }
  }
  // `to` rows = p `from` rows times the row's factor; both are the places of row lane % 16, piece lane / 16. They may be the
  // same.
  __device__ __forceinline__ static void average(const Weights& p, const float (&by)[2], uint32_t from, uint32_t to) {
#pragma unroll
    for (int t = 0; t < D / 8; t += 2) {
      uint32_t y[4];
      float o[2][4] = {};
      load_matrices_transposed(y, from ^ (t * 16));
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        mma<bf16>(o[0], p[part], y[0], y[1]);
        mma<bf16>(o[1], p[part], y[2], y[3]);
      }
      __syncwarp();
      store_matrices(to ^ (t * 16), pack<bf16>(o[0][0] * by[0], o[0][1] * by[0]), pack<bf16>(o[0][2] * by[1], o[0][3] * by[1]),
                     pack<bf16>(o[1][0] * by[0], o[1][1] * by[0]), pack<bf16>(o[1][2] * by[1], o[1][3] * by[1]));
    }
    __syncwarp();
  }
  // p by = softmax of the rows of s, the largest p of a row 1, so that the heaviest weight is not rounded; lse in base 2
  __device__ __forceinline__ static void softmax(float (&s)[2][4], Weights& p, float (&by)[2], float (&lse)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* const x[2] = {s[0] + 2 * half, s[1] + 2 * half};
      float m = quad_max(fmaxf(fmaxf(x[0][0], x[0][1]), fmaxf(x[1][0], x[1][1])));
      m = m == -kInfinity ? 0 : m;
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i / 2][i % 2] = exp2_fast(x[i / 2][i % 2] - m);
      const float total = quad_sum((x[0][0] + x[0][1]) + (x[1][0] + x[1][1]));
      by[half] = total == 0 ? 0 : __fdividef(1, total);
      lse[half] = m + __log2f(total);
    }
    to_left(s, p[0]);
    if constexpr (kParts == 2) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 whole = unpack<bf16>(p[0][i]);
        const float* const x = s[i / 2] + i % 2 * 2;
        p[1][i] = pack<bf16>(x[0] - whole.x, x[1] - whole.y);
      }
    }
  }
  // Scores, rounded, as a left operand.
  __device__ __forceinline__ static void to_left(const float (&s)[2][4], uint32_t (&p)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) p[i] = pack<bf16>(s[i / 2][i % 2 * 2], s[i / 2][i % 2 * 2 + 1]);
  }
  // The scores of valid keys times the factor, -inf for others.
  __device__ __forceinline__ void mask_scores(float (&s)[2][4], uint32_t keys) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float& z = s[i / 4][i % 4];
      z = keys >> ptx::Fragment{lane}.column(i) & 1 ? z * g.factor : -kInfinity;
    }
  }
  // s factor - c; c = the diagonal of S - lse_R (tile/tile.cuh): lane 4 r + r / 2 has those of rows r and r + 8.
  __device__ __forceinline__ void finish_slot_scores(float (&s)[2][4], int slot) const {
    const float diagonal[2] = {lane / 4 % 2 == 0 ? s[0][0] : s[0][1], lane / 4 % 2 == 0 ? s[1][2] : s[1][3]};
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = lane % 4 * 2 + i;
        const float own = __shfl_sync(0xffffffffu, diagonal[t], 4 * column + column / 2);
        const float add = fmaf(-g.factor, own, lse_r[slot * kSide + 8 * t + column]);
        s[t][i] = fmaf(s[t][i], g.factor, add);
        s[t][2 + i] = fmaf(s[t][2 + i], g.factor, add);
      }
    }
  }

  // To a and y, which may be k and v.
  __device__ __forceinline__ void block_program(int block, uint32_t keys, uint32_t a, uint32_t y) const {
    const uint32_t rows = place(block, lane % 16, lane / 16);
    float s[2][4], by[2], lse[2];
    Weights r;
    logits(s, q + rows, k + place(block, lane % 8 + lane / 16 * 8, lane / 8 % 2));
    mask_scores(s, keys);
    softmax(s, r, by, lse);
    if (lane % 4 == 0) {
      lse_r[lane / 4 * kSide + block] = lse[0];
      lse_r[(lane / 4 + 8) * kSide + block] = lse[1];
    }
    average(r, by, k + rows, a + rows);
    average(r, by, v + rows, y + rows);
  }

  __device__ __forceinline__ void slot_program(int slot) const {
    const uint32_t rows = place(lane % 16, slot, lane / 16);
    float s[2][4], by[2], lse[2];
    Weights p;
    logits(s, q + rows, k + place(lane % 8 + lane / 16 * 8, slot, lane / 8 % 2));
    finish_slot_scores(s, slot);
    softmax(s, p, by, lse);
#pragma unroll
    for (int half = 0; half < 2 && g.lse.data != nullptr; ++half) {
      const int t = query_at(g, 0, lane / 4 + 8 * half, slot);
      if (t >= 0 && lane % 4 == 0) static_cast<float*>(g.lse.data)[offset_of(g.lse, b, t, h)] = lse[half] * 0.69314718f;
    }
    average(p, by, v + rows, q + rows);
    const int row = lane / kPieces, piece = lane % kPieces, t0 = row * g.cols + slot - g.front;
    const int64_t at = b * g.out.stride_b + h * g.out.stride_h + t0 * g.out.stride_t + piece * 8;
    const int64_t step = kRowsAtOnce * g.cols * g.out.stride_t;
    const uint32_t from = q + place(row, slot, piece);
#pragma unroll
    for (int i = 0; i < kSide / kRowsAtOnce; ++i) {
      const int l = row + i * kRowsAtOnce, t = t0 + i * kRowsAtOnce * g.cols;
      const uint4 x = load_shared_16((from ^ (i * kRowsAtOnce % 8 * 16)) + i * kRowsAtOnce * kSide * kRow);
      if (l < g.rows && t >= 0 && t < g.T && piece * 8 < g.V) store_row(g.out, g.out_aligned, at + i * step, x);
    }
  }

  __device__ static void run(const MonarchProblem& g) {
    extern __shared__ __align__(16) char memory[];
    const int warp = threadIdx.x / 32;
    char* const aligned = memory + (256 - shared_address(memory) % 256) % 256;  // places move by XOR inside of 256 bytes
    const uint32_t start = shared_address(aligned);
    const Head head = {g,
                       start,
                       start + kTensor,
                       start + 2 * kTensor,
                       reinterpret_cast<float*>(aligned + 3 * kTensor),
                       static_cast<int>(blockIdx.x / g.H),
                       static_cast<int>(blockIdx.x % g.H),
                       static_cast<int>(threadIdx.x % 32)};
    const uint32_t keys[2] = {head.load_block(warp), head.load_block(warp + kWarps)};
    copy_wait<1>();
    __syncwarp();
    head.block_program(warp, keys[0], head.k, head.v);
    copy_wait<0>();
    __syncwarp();
    head.block_program(warp + kWarps, keys[1], head.k, head.v);
    __syncthreads();
    if (warp < g.cols) head.slot_program(warp);
    if (warp + kWarps < g.cols) head.slot_program(warp + kWarps);
  }
};

template <bool bf16>
struct HeadGradients : Head<64, bf16> {
  using Base = Head<64, bf16>;
  using Base::g, Base::q, Base::k, Base::v, Base::lse_r, Base::b, Base::h, Base::lane;
  using Base::kPieces, Base::kRowsAtOnce, Base::kTensor;
  static constexpr int kPairs = 64 / 16;  // of 8 columns
  uint32_t a, y, dout;
  float* sums;  // [slot][16]: columns' sums of dbeta

  // A left operand transposed.
  __device__ __forceinline__ static void transpose(const uint32_t (&p)[4], uint32_t (&t)[4]) {
    const int from[4] = {0, 2, 1, 3};
#pragma unroll
    for (int i = 0; i < 4; ++i) t[i] = transpose_matrix(p[from[i]]);
  }
  // 16 columns from 16 t on: o (+)= p `from` rows, and o to `to`; places of row lane % 16, piece lane / 16.
  __device__ __forceinline__ static void add_average(float (&o)[2][4], const uint32_t (&p)[4], uint32_t from, int t) {
    uint32_t x[4];
    load_matrices_transposed(x, from ^ (t * 32));
    mma<bf16>(o[0], p, x[0], x[1]);
    mma<bf16>(o[1], p, x[2], x[3]);
  }
  __device__ __forceinline__ static void put(const float (&o)[2][4], float by, uint32_t to, int t) {
    __syncwarp();
    store_matrices(to ^ (t * 32), pack<bf16>(o[0][0] * by, o[0][1] * by), pack<bf16>(o[0][2] * by, o[0][3] * by),
                   pack<bf16>(o[1][0] * by, o[1][1] * by), pack<bf16>(o[1][2] * by, o[1][3] * by));
  }
  // o += factors of rows times the rows of a tensor; `places` are those of rows lane / 4 and 8 below, piece 0.
  __device__ __forceinline__ void add_rows(float (&o)[2][4], const float (&by)[2], const uint32_t (&places)[2], int t) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 own = unpack<bf16>(load_shared_4((places[i % 2] ^ ((2 * t + i / 2) * 16)) + lane % 4 * 4));
      float* const to = o[i / 2] + i % 2 * 2;
      to[0] = fmaf(by[i % 2], own.x, to[0]), to[1] = fmaf(by[i % 2], own.y, to[1]);
    }
  }

  __device__ __forceinline__ void slot_gradients(int slot) const {
    const uint32_t rows = Base::place(lane % 16, slot, lane / 16),
                   right = Base::place(lane % 8 + lane / 16 * 8, slot, lane / 8 % 2);
    float s[2][4], d[2][4], by[2], lse[2], delta[2] = {};
    uint32_t p[4], weights[4], moved[4];
    typename Base::Weights unscaled;
    Base::logits(s, q + rows, a + right);
    this->finish_slot_scores(s, slot);
    Base::softmax(s, unscaled, by, lse);
    Base::logits(d, dout + rows, y + right);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float& weight = s[i / 4][i % 4];
      weight *= by[i % 4 / 2];
      delta[i % 4 / 2] = fmaf(weight, d[i / 4][i % 4], delta[i % 4 / 2]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      delta[half] = quad_sum(delta[half]);
      const int t = query_at(g, 0, lane / 4 + 8 * half, slot);
      if (g.dlse.data != nullptr && t >= 0) delta[half] -= static_cast<const float*>(g.dlse.data)[offset_of(g.dlse, b, t, h)];
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) d[i / 4][i % 4] = s[i / 4][i % 4] * (d[i / 4][i % 4] - delta[i % 4 / 2]);
    Base::to_left(s, p);
    transpose(p, weights);
    Base::to_left(d, p);
    transpose(p, moved);
    float of[2][4] = {};
    const uint32_t one = pack<bf16>(1, 1);
    mma<bf16>(of[0], moved, one, one);
    const float minus[2] = {-of[0][0], -of[0][2]};
    if (lane % 4 == 0) sums[slot * kSide + lane / 4] = of[0][0], sums[slot * kSide + lane / 4 + 8] = of[0][2];
    const uint32_t own[2] = {q + Base::place(lane / 4, slot, 0), q + Base::place(lane / 4 + 8, slot, 0)};
#pragma unroll
    for (int t = 0; t < kPairs; ++t) {
      float o[2][4] = {};
      add_average(o, weights, dout + rows, t);
      put(o, 1, y + rows, t);
    }
    __syncwarp();
#pragma unroll
    for (int t = 0; t < kPairs; ++t) {
      float o[2][4] = {};
      add_average(o, p, a + rows, t);
      put(o, g.scale, dout + rows, t);
    }
    __syncwarp();
#pragma unroll
    for (int t = 0; t < kPairs; ++t) {
      float o[2][4] = {};
      add_average(o, moved, q + rows, t);
      add_rows(o, minus, own, t);
      put(o, g.scale, a + rows, t);
    }
  }

  __device__ __forceinline__ void block_gradients(int block, uint32_t keys) const {
    const uint32_t rows = Base::place(block, lane % 16, lane / 16),
                   right = Base::place(block, lane % 8 + lane / 16 * 8, lane / 8 % 2);
    float s[2][4], d[2][4], total[2] = {};
    uint32_t p[4], weights[4], moved[4];
    Base::logits(s, q + rows, k + right);
    this->mask_scores(s, keys);
    Base::logits(d, a + rows, k + right);
    Base::add_logits(d, y + rows, v + right);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int half = i % 4 / 2, slot = lane / 4 + 8 * half;
      const float lse = lse_r[slot * kSide + block];
      float& weight = s[i / 4][i % 4];
      weight = slot < g.cols && keys != 0 ? exp2_fast(weight - lse) : 0;
      total[half] = fmaf(weight, d[i / 4][i % 4], total[half]);
    }
    Base::to_left(s, p);
    transpose(p, weights);
#pragma unroll
    for (int half = 0; half < 2; ++half) total[half] = quad_sum(total[half]);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int half = i % 4 / 2, slot = lane / 4 + 8 * half;
      const float r = s[i / 4][i % 4], dz = r * (d[i / 4][i % 4] - total[half]);
      d[i / 4][i % 4] = dz;
      s[i / 4][i % 4] = slot < g.cols ? fmaf(sums[slot * kSide + block], r, dz) * g.scale : 0;
    }
    Base::to_left(s, p);
    transpose(p, moved);
    Base::to_left(d, p);
    const uint32_t own[2] = {dout + Base::place(block, lane / 4, 0), dout + Base::place(block, lane / 4 + 8, 0)};
    const float one[2] = {1, 1};
#pragma unroll
    for (int t = 0; t < kPairs; ++t) {
      float o[2][4] = {};
      add_average(o, p, k + rows, t);
#pragma unroll
      for (int i = 0; i < 8; ++i) o[i / 4][i % 4] *= g.scale;
      add_rows(o, one, own, t);
      put(o, 1, dout + rows, t);
    }
#pragma unroll
    for (int t = 0; t < kPairs; ++t) {
      float o[2][4] = {};
      add_average(o, weights, y + rows, t);
      put(o, 1, y + rows, t);
    }
#pragma unroll
    for (int t = 0; t < kPairs; ++t) {
      float o[2][4] = {};
      add_average(o, weights, a + rows, t);
      add_average(o, moved, q + rows, t);
      put(o, 1, a + rows, t);
    }
    __syncwarp();
  }
  __device__ __forceinline__ void give(const MonarchRows& to, uint32_t from, int width, int block, uint32_t tokens) const {
    if (to.data == nullptr) return;
    const int row = lane / kPieces, piece = lane % kPieces;
    const int64_t t0 = static_cast<int64_t>(block) * g.cols - g.front + row;
    const int64_t at = b * to.stride_b + h * to.stride_h + t0 * to.stride_t + piece * 8;
    from += Base::place(block, row, piece);
#pragma unroll
    for (int i = 0; i < kSide / kRowsAtOnce; ++i) {
      const uint4 x = load_shared_16((from ^ (i * kRowsAtOnce % 8 * 16)) + i * kRowsAtOnce * Base::kRow);
      if (piece * 8 < width && (tokens >> (row + i * kRowsAtOnce) & 1)) {
        store_row(to, true, at + i * kRowsAtOnce * to.stride_t, x);
      }
    }
  }

  __device__ static void run(const MonarchProblem& g) {
    extern __shared__ __align__(16) char memory[];
    const int warp = threadIdx.x / 32;
    char* const aligned = memory + (128 - shared_address(memory) % 128) % 128;
    const uint32_t start = shared_address(aligned);
    float* const numbers = reinterpret_cast<float*>(aligned + 6 * kTensor);
    const HeadGradients x = {{g, start, start + kTensor, start + 2 * kTensor, numbers, static_cast<int>(blockIdx.x / g.H),
                              static_cast<int>(blockIdx.x % g.H), static_cast<int>(threadIdx.x % 32)},
                             start + 3 * kTensor,
                             start + 4 * kTensor,
                             start + 5 * kTensor,
                             numbers + kSide * kSide};
    const uint32_t keys = x.load_block(warp), tokens = x.tokens_of(warp);
    const int t0 = warp * g.cols - g.front;
    if (g.dout.data != nullptr) {
      x.load_tensor(x.dout, g.dout, g.V, warp, t0, g.V == 64 && tokens == 0xffff, tokens);
    } else {
      x.load_tensor(x.dout, g.q, 0, warp, t0, false, 0);
    }
    copy_commit();
    copy_wait<1>();
    __syncwarp();
    x.block_program(warp, keys, x.a, x.y);
    copy_wait<0>();
    __syncthreads();
    if (warp < g.cols) x.slot_gradients(warp);
    __syncthreads();
    x.block_gradients(warp, keys);
    x.give(g.dq, x.dout, g.K, warp, tokens);
    x.give(g.dk, x.a, g.K, warp, tokens);
    x.give(g.dv, x.y, g.V, warp, tokens);
  }
};

}  // namespace

#define LINNET_MONARCH_HEAD(name, D, bf16, blocks)                                                                   \
  extern "C" __global__ void __launch_bounds__(32 * kWarps, blocks) name(const __grid_constant__ MonarchProblem g) { \
    Head<D, bf16>::run(g);                                                                                           \
  }
LINNET_MONARCH_HEAD(head_f16_64, 64, false, 2)
LINNET_MONARCH_HEAD(head_bf16_64, 64, true, 2)
LINNET_MONARCH_HEAD(head_f16_128, 128, false, 1)
LINNET_MONARCH_HEAD(head_bf16_128, 128, true, 1)

extern "C" __global__ void __launch_bounds__(512) head_gradients_f16(const __grid_constant__ MonarchProblem g) {
  HeadGradients<false>::run(g);
}
extern "C" __global__ void __launch_bounds__(512) head_gradients_bf16(const __grid_constant__ MonarchProblem g) {
  HeadGradients<true>::run(g);
}

}  // namespace linnet::cuda
