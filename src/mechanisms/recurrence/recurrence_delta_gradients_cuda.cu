// The gradients of the delta rules from the states and their gradients between chunks (docs/mechanisms/recurrence.md): all
// chunks at once, one block each. N = beta res and dY = beta Z are told as res and Z, 16-bit numbers.
//
//   dP = scale tril(dO N^T D)   dA = -tril(dY N^T D, -1)    (the decays D in them)
//   dQ = scale read dO S_0^T + dP K
//   dK = write N dS^T - read dY S_0^T + dP^T Q + (dA + dA^T) K
//   dV = dY    dbeta_i = Z_i . res_i    dg: from the sums of dP * Q K^T + dA * K K^T over rows and columns, and dots of the
//   others
//
//   group 0   dQ         group 1   dK through dY and dA         group 2   dK through dS and dP
//   group 3   dP, dA, dbeta, dg, dV
//
// Bytes per token and head, D = 128: 2304 read, 768 written: 0.38 ms at 16,2048,16,128 of an H200's copy bandwidth.
#include "mechanisms/recurrence/recurrence_delta.cuh"

namespace linnet::cuda {
namespace {

template <int D>
struct GradientsShared {
  alignas(1024) char q[D / 64 * kPanel];
  char k[D / 64 * kPanel];
  char dout[D / 64 * kPanel];       // at last dQ
  char residuals[D / 64 * kPanel];  // at last dK
  char adjoints[D / 64 * kPanel];
  char state[D * D * 2], dstate[D * D * 2];  // at last group 1's part of dK
  char dp[kPanel], da[kPanel];
  Decays decays;
  float read[C], write[C], beta[C];
  float queries[C], keys[C];  // dots of rows with what reaches them through the state before
  float written[C];           // and after the chunk
  float pair_rows[C], pair_columns[4][C];
  float carried[16], total;
  uint64_t full, adjoints_full, state_full, dstate_full;
};

// Rows of an accumulator: a dot with the same rows of a tile, times factor[row], which also multiplies the accumulator.
template <bool bf16, int D, bool decays>
__device__ __forceinline__ void scale_rows(float (&acc)[D / 2], const char* tile, const float* factor, float sign,
                                           const float* second, float* dots) {
  const int thread = threadIdx.x % 128, lane = thread % 32, row = thread / 32 * 16 + lane / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = row + 8 * half;
    float f = sign;
    if constexpr (decays) f *= factor[r];
    if (second != nullptr) f *= second[r];
    float dot = 0;
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
      float* x = acc + 4 * j + 2 * half;
      x[0] *= f;
      x[1] *= f;
      if constexpr (decays) {
        const float2 y =
            ptx::unpack<bf16>(*reinterpret_cast<const uint32_t*>(tile + ptx::tile_byte(C, r, 8 * j + lane % 4 * 2)));
        dot = fmaf(x[0], y.x, fmaf(x[1], y.y, dot));
      }
    }
    if constexpr (decays) {
      dot += __shfl_xor_sync(0xffffffff, dot, 1);
      dot += __shfl_xor_sync(0xffffffff, dot, 2);
      if (lane % 4 == 0) dots[r] = dot;
    }
  }
}

__device__ __forceinline__ bool has_wide_rows(const Rows& rows) {
  const auto bits =
      reinterpret_cast<uintptr_t>(rows.data) | static_cast<uintptr_t>((rows.stride_b | rows.stride_t | rows.stride_h) * 2);
  return rows.dtype != Dtype::f32 && bits % 16 == 0;
}

// A group's rows [64, D] out; by the way of `tile`, where 16 bytes may be stored at once.
template <bool bf16, int D, int barrier>
__device__ __forceinline__ void store_gradient(const Rows& to, const Walk& w, int h, int chunk, int rows,
                                               const float (&acc)[D / 2], char* tile) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const int64_t first = w.begin + static_cast<int64_t>(chunk) * C;
  if (!has_wide_rows(to)) {
#pragma unroll
    for (int j = 0; j < D / 2; ++j) {
      const int r = 16 * warp + lane / 4 + (j & 2) * 4, c = j / 4 * 8 + lane % 4 * 2 + (j & 1);
      if (r < rows) ptx::store(const_cast<void*>(to.data), to.dtype, row_of(to, w.b, first + r, h) + c, acc[j]);
    }
    return;
  }
  const uint32_t shared = ptx::shared_address(tile);
#pragma unroll
  for (int j = 0; j < D / 8; j += 2) {
    const int row = 16 * warp + lane / 8 % 2 * 8 + lane % 8, column = 8 * (j + lane / 16);
    const float* x = acc + 4 * j;
    ptx::store_matrices(shared + ptx::tile_byte(C, row, column), ptx::pack<bf16>(x[0], x[1]), ptx::pack<bf16>(x[2], x[3]),
                        ptx::pack<bf16>(x[4], x[5]), ptx::pack<bf16>(x[6], x[7]));
  }
  ptx::group_sync<barrier, 128>();
#pragma unroll
  for (int i = 0; i < D / 16; ++i) {
    const int at = thread + 128 * i, token = at / (D / 8), channel = at % (D / 8) * 8;
    if (token >= rows) continue;
    *reinterpret_cast<uint4*>(static_cast<uint16_t*>(const_cast<void*>(to.data)) + row_of(to, w.b, first + token, h) +
                              channel) = *reinterpret_cast<const uint4*>(tile + ptx::tile_byte(C, token, channel));
  }
}

// D [64, n] (+)= A B over `depth` of K.
template <bool bf16, bool transposed_a, bool transposed_b, int size, class A, class B>
__device__ __forceinline__ void multiply(float (&d)[size], int depth, A a, B b, bool add) {
#pragma unroll
  for (int kk = 0; kk < depth / 16; ++kk) ptx::wgmma_shared<bf16, transposed_a, transposed_b>(d, a(kk), b(kk), add || kk > 0);
}

// dP, dA as operands, the sums over their pairs, dbeta.
template <bool bf16, int D, bool decays>
__device__ __forceinline__ void pair_up(const Delta& delta, const Walk& w, int h, int chunk, int rows, GradientsShared<D>& s) {
  const Engine& e = delta.e;
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, row = warp * 16 + lane / 4;
  const auto rows_of_tile = [](const char* tile) {
    return [at = ptx::shared_address(tile)](int kk) { return ptx::descriptor_k_major(at, C, kk); };
  };
  float row_sums[2] = {}, column_sums[16] = {};
#pragma unroll 1
  for (int part = 0; part < 2; ++part) {  // P, then A
    float d[32], p[32];
    if (part == 1) ptx::barrier_wait(&s.adjoints_full, 0);
    ptx::wgmma_fence();
    multiply<bf16, false, false>(d, D, rows_of_tile(part == 0 ? s.dout : s.adjoints), rows_of_tile(s.residuals), false);
    if constexpr (decays) {
      multiply<bf16, false, false>(p, D, rows_of_tile(part == 0 ? s.q : s.k), rows_of_tile(s.k), false);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::hold(d);
    if constexpr (decays) ptx::hold(p);
    if (part == 1 && delta.dbeta.data != nullptr) {
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        const int r = row + (j & 2) * 4;
        if (j / 8 == warp && j / 4 * 8 + lane % 4 * 2 + (j & 1) == r && r < rows) {
          const int64_t t = w.begin + static_cast<int64_t>(chunk) * C + r;
          ptx::store(const_cast<void*>(delta.dbeta.data), delta.dbeta.dtype, row_of(delta.dbeta, w.b, t, h),
                     e.beta_factor * d[j]);
        }
      }
    }
    weigh<decays, false>(d, s.decays, warp, lane, false);
    char* const to = part == 0 ? s.dp : s.da;
#pragma unroll
    for (int j = 0; j < 32; j += 2) {
      const int r = row + (j & 2) * 4, c = j / 4 * 8 + lane % 4 * 2;
      const float2 beta = *reinterpret_cast<const float2*>(&s.beta[c]);
      const float factor = part == 0 ? e.scale : -s.beta[r];
      const bool kept[2] = {part == 0 || c != r, part == 0 || c + 1 != r};  // A has no diagonal
      const float x[2] = {kept[0] ? d[j] * (factor * beta.x) : 0, kept[1] ? d[j + 1] * (factor * beta.y) : 0};
      *reinterpret_cast<uint32_t*>(to + ptx::tile_byte(C, r, c)) = ptx::pack<bf16>(x[0], x[1]);
      if constexpr (decays) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float pair = c + i < r ? x[i] * p[j + i] : 0;
          row_sums[j / 2 % 2] += pair;
          column_sums[j / 4 * 2 + i] += pair;
        }
      }
    }
  }
  if constexpr (decays) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row_sums[half] += __shfl_xor_sync(0xffffffff, row_sums[half], 1);
      row_sums[half] += __shfl_xor_sync(0xffffffff, row_sums[half], 2);
      if (lane % 4 == 0) s.pair_rows[row + 8 * half] = row_sums[half];
    }
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      for (int step = 4; step < 32; step *= 2) column_sums[j] += __shfl_xor_sync(0xffffffff, column_sums[j], step);
      if (lane < 4) s.pair_columns[warp][j / 2 * 8 + lane * 2 + j % 2] = column_sums[j];
    }
  }
  ptx::fence_async_shared();
}

// The sum of S_0 * dS over all elements; both tiles have one layout. By all threads, each warp its own part.
template <bool bf16, int D>
__device__ __forceinline__ void sum_states(GradientsShared<D>& s) {
  ptx::barrier_wait(&s.state_full, 0);
  ptx::barrier_wait(&s.dstate_full, 0);
  const int thread = threadIdx.x;
  float sum = 0;
#pragma unroll
  for (int i = thread; i < D * D / 8; i += 512) {
    const uint4 x = reinterpret_cast<const uint4*>(s.state)[i], y = reinterpret_cast<const uint4*>(s.dstate)[i];
    const uint32_t a[4] = {x.x, x.y, x.z, x.w}, b[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 u = ptx::unpack<bf16>(a[j]), v = ptx::unpack<bf16>(b[j]);
      sum = fmaf(u.x, v.x, fmaf(u.y, v.y, sum));
    }
  }
  for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
  if (thread % 32 == 0) s.carried[thread / 32] = sum;
}

// dg_t = sum over i >= t of what reaches row i less what leaves it, + total <S_0, dS> + sum over j < t of what row j leaves in
// the state. One warp.
template <int D>
__device__ __forceinline__ void store_dg(const Delta& delta, const Walk& w, int h, int chunk, int rows,
                                         const GradientsShared<D>& s) {
  const Engine& e = delta.e;
  const int lane = threadIdx.x % 32;
  float reached[2], left[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = lane + 32 * i;
    const float columns = (s.pair_columns[0][r] + s.pair_columns[1][r]) + (s.pair_columns[2][r] + s.pair_columns[3][r]);
    reached[i] = s.pair_rows[r] - columns + s.queries[r] + s.keys[r];
    left[i] = s.written[r];
  }
  // Inclusive sums from behind, and from the front.
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float behind = __shfl_down_sync(0xffffffff, reached[i], step), before = __shfl_up_sync(0xffffffff, left[i], step);
      if (lane + step < 32) reached[i] += behind;
      if (lane >= step) left[i] += before;
    }
  }
  reached[0] += __shfl_sync(0xffffffff, reached[1], 0);
  const float low = __shfl_sync(0xffffffff, left[0], 31);
  float carried = s.carried[lane % 16];
  for (int step = 1; step < 16; step *= 2) carried += __shfl_xor_sync(0xffffffff, carried, step);
  carried *= s.total;
  const float2 g = take_numbers(ask_numbers(e.g, w, h, chunk, lane), e.g.dtype);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = lane + 32 * i;
    float before = __shfl_up_sync(0xffffffff, left[i], 1);
    if (lane == 0) before = 0;
    if (i == 1) before += low;
    const float dg = expf(i == 0 ? g.x : g.y) == 0 ? 0 : reached[i] + carried + before;
    const int64_t t = w.begin + static_cast<int64_t>(chunk) * C + r;
    if (r < rows) ptx::store(const_cast<void*>(delta.dg.data), delta.dg.dtype, row_of(delta.dg, w.b, t, h), dg);
  }
}

template <bool bf16, int D>
__device__ __forceinline__ void store_dv(const Delta& delta, const Walk& w, int h, int chunk, int rows,
                                         const GradientsShared<D>& s) {
  const Rows& to = delta.dv;
  const bool wide = has_wide_rows(to);
#pragma unroll 2
  for (int i = threadIdx.x % 128; i < C * D / 8; i += 128) {
    const int token = i / (D / 8), channel = i % (D / 8) * 8;
    if (token >= rows) continue;
    const uint4 z = *reinterpret_cast<const uint4*>(s.adjoints + ptx::tile_byte(C, token, channel));
    const uint32_t parts[4] = {z.x, z.y, z.z, z.w};
    const int64_t at = row_of(to, w.b, w.begin + static_cast<int64_t>(chunk) * C + token, h) + channel;
    uint32_t packed[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float2 x = ptx::unpack<bf16>(parts[j]);
      x.x *= s.beta[token];
      x.y *= s.beta[token];
      packed[j] = ptx::pack<bf16>(x.x, x.y);
      if (!wide) {
        ptx::store(const_cast<void*>(to.data), to.dtype, at + 2 * j, x.x);
        ptx::store(const_cast<void*>(to.data), to.dtype, at + 2 * j + 1, x.y);
      }
    }
    if (wide) {
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(const_cast<void*>(to.data)) + at) =
          uint4{packed[0], packed[1], packed[2], packed[3]};
    }
  }
}

template <bool bf16, int D, bool decays>
__device__ void gradients(const Delta& delta) {
  extern __shared__ char memory[];
  static_assert(sizeof(GradientsShared<D>) + 1024 <= gradients_shared_bytes(D) && gradients_shared_bytes(D) <= 232448);
  auto& s = *reinterpret_cast<GradientsShared<D>*>((reinterpret_cast<uintptr_t>(memory) + 1023) / 1024 * 1024);
  const Engine& e = delta.e;
  const int h = blockIdx.x % e.H, group = threadIdx.x / 128, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const int64_t slot = blockIdx.x / e.H, image = slot * e.H + h;
  const Place place = place_of(e, slot);
  if (place.chunk < 0) return;
  const Walk w = walk_of(e, place.n, 0, false);
  const int chunk = place.chunk;
  const int rows = static_cast<int>(min(static_cast<int64_t>(C), w.length - static_cast<int64_t>(chunk) * C));
  constexpr int kTile = D / 64 * kPanel, kSquare = D * D * 2;
  if (threadIdx.x == 0) {
    ptx::barrier_init(&s.full, 1);
    ptx::barrier_init(&s.adjoints_full, 1);
    ptx::barrier_init(&s.state_full, 1);
    ptx::barrier_init(&s.dstate_full, 1);
    ptx::barrier_init_fence();
    const int t = static_cast<int>(w.begin) + chunk * C, b = static_cast<int>(w.b);
    ptx::barrier_arrive_expect(&s.full, 4 * kTile);
    ptx::load_box(s.dout, &delta.dout, &s.full, 0, t, 0, h, b);
    ptx::load_bytes(s.residuals, delta.residuals + image * kTile, kTile, &s.full);
    ptx::load_box(s.q, &delta.q, &s.full, 0, t, 0, h / e.q.group, b);
    ptx::load_box(s.k, &delta.k, &s.full, 0, t, 0, h / e.k.group, b);
    ptx::barrier_arrive_expect(&s.state_full, kSquare);
    ptx::load_bytes(s.state, delta.states + image * kSquare, kSquare, &s.state_full);
    ptx::barrier_arrive_expect(&s.adjoints_full, kTile);
    ptx::load_bytes(s.adjoints, delta.adjoints + image * kTile, kTile, &s.adjoints_full);
    ptx::barrier_arrive_expect(&s.dstate_full, kSquare);
    ptx::load_bytes(s.dstate, delta.dstates + image * kSquare, kSquare, &s.dstate_full);
  }
  if (group == 3 && warp == 0) {
    const float2 beta = take_numbers(ask_numbers(e.beta, w, h, chunk, lane), e.beta.dtype);
    s.beta[lane] = e.beta_factor * beta.x;
    s.beta[lane + 32] = e.beta_factor * beta.y;
  }
  if (decays && group == 3 && warp == 1) {
    const Sums G = sum_gates(take_gates(ask_numbers(e.g, w, h, chunk, lane), e.g.dtype), lane);
    s.read[lane] = expf(G.low);
    s.read[lane + 32] = expf(G.high);
    s.write[lane] = expf(G.all - G.low);
    s.write[lane + 32] = expf(G.all - G.high);
    store_decays(G, lane, s.decays);
    if (lane == 0) s.total = expf(G.all);
  }
  __syncthreads();
  ptx::barrier_wait(&s.full, 0);
  if (rows < C) {  // what lies behind the sequence counts as zero, NaN or not
    constexpr int kPieces = D / 8;
    for (int piece = threadIdx.x; piece < (C - rows) * kPieces; piece += 512) {
      const uint32_t at = ptx::tile_byte(C, rows + piece / kPieces, piece % kPieces * 8);
      *reinterpret_cast<uint4*>(s.q + at) = uint4{0, 0, 0, 0};
      *reinterpret_cast<uint4*>(s.k + at) = uint4{0, 0, 0, 0};
      *reinterpret_cast<uint4*>(s.dout + at) = uint4{0, 0, 0, 0};
    }
    ptx::fence_async_shared();
    __syncthreads();
  }
  const auto tokens_k = [](const char* tile) {  // rows are M or N
    return [at = ptx::shared_address(tile)](int kk) { return ptx::descriptor_k_major(at, C, kk); };
  };
  const auto tokens_mn = [](const char* tile) {  // rows are summed over
    return [at = ptx::shared_address(tile)](int kk) { return ptx::descriptor_mn_major(at, C, kk); };
  };
  const auto values_mn = [](const char* tile) {
    return [at = ptx::shared_address(tile)](int kk) { return ptx::descriptor_mn_major(at, D, kk); };
  };
  if (group == 0) {
    ptx::fewer_registers<112>();
    float acc[D / 2];
    ptx::barrier_wait(&s.state_full, 0);
    ptx::wgmma_fence();
    multiply<bf16, false, true>(acc, D, tokens_k(s.dout), values_mn(s.state), false);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::hold(acc);
    scale_rows<bf16, D, decays>(acc, s.q, s.read, e.scale, nullptr, s.queries);
    if constexpr (decays) sum_states<bf16, D>(s);
    __syncthreads();
    if (delta.dq.data == nullptr) return;
    ptx::hold(acc);
    ptx::wgmma_fence();
    multiply<bf16, false, true>(acc, C, tokens_k(s.dp), tokens_mn(s.k), true);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::hold(acc);
    store_gradient<bf16, D, 1>(delta.dq, w, h, chunk, rows, acc, s.dout);
  } else if (group == 1) {
    ptx::fewer_registers<112>();
    float acc[D / 2];
    ptx::barrier_wait(&s.state_full, 0);
    ptx::barrier_wait(&s.adjoints_full, 0);
    ptx::wgmma_fence();
    multiply<bf16, false, true>(acc, D, tokens_k(s.adjoints), values_mn(s.state), false);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::hold(acc);
    scale_rows<bf16, D, decays>(acc, s.k, s.read, -1, s.beta, s.keys);
    if constexpr (decays) sum_states<bf16, D>(s);
    __syncthreads();
    if (delta.dk.data == nullptr) return;
    ptx::hold(acc);
    ptx::wgmma_fence();
    multiply<bf16, false, true>(acc, C, tokens_k(s.da), tokens_mn(s.k), true);
    multiply<bf16, true, true>(acc, C, tokens_mn(s.da), tokens_mn(s.k), true);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::hold(acc);
    float* const part = reinterpret_cast<float*>(s.state);
#pragma unroll
    for (int j = 0; j < D / 2; ++j) part[128 * j + thread] = acc[j];
    ptx::group_sync<2, 256>();
  } else if (group == 2) {
    ptx::fewer_registers<112>();
    float acc[D / 2];
    ptx::barrier_wait(&s.dstate_full, 0);
    ptx::wgmma_fence();
    multiply<bf16, false, true>(acc, D, tokens_k(s.residuals), values_mn(s.dstate), false);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::hold(acc);
    scale_rows<bf16, D, decays>(acc, s.k, s.write, 1, s.beta, s.written);
    if constexpr (decays) sum_states<bf16, D>(s);
    __syncthreads();
    if (delta.dk.data == nullptr) return;
    ptx::hold(acc);
    ptx::wgmma_fence();
    multiply<bf16, true, true>(acc, C, tokens_mn(s.dp), tokens_mn(s.q), true);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::hold(acc);
    ptx::group_sync<2, 256>();
    const float* const part = reinterpret_cast<const float*>(s.state);
#pragma unroll
    for (int j = 0; j < D / 2; ++j) acc[j] += part[128 * j + thread];
    store_gradient<bf16, D, 3>(delta.dk, w, h, chunk, rows, acc, s.residuals);
  } else {
    ptx::more_registers<176>();
    pair_up<bf16, D, decays>(delta, w, h, chunk, rows, s);
    if constexpr (decays) sum_states<bf16, D>(s);
    __syncthreads();
    if (decays && warp == 0 && delta.dg.data != nullptr) store_dg<D>(delta, w, h, chunk, rows, s);
    if (delta.dv.data != nullptr) store_dv<bf16, D>(delta, w, h, chunk, rows, s);
  }
}

}  // namespace

#define LINNET_GRADIENTS(name, bf16, D, decays)                                                    \
  extern "C" __global__ void __launch_bounds__(512, 1) name(const __grid_constant__ Delta delta) { \
    gradients<bf16, D, decays>(delta);                                                             \
  }
extern "C" __global__ void __launch_bounds__(256) copy_rows(const __grid_constant__ Rows to, const __grid_constant__ Rows from,
                                                            int64_t T, int heads, int width, int64_t total) {
  const int64_t i = blockIdx.x * 256ll + threadIdx.x;
  if (i >= total) return;
  const int64_t c = i % width, h = i / width % heads, t = i / width / heads % T, b = i / width / heads / T;
  const auto at = [&](const Rows& rows) { return b * rows.stride_b + t * rows.stride_t + h * rows.stride_h + c; };
  static_cast<uint16_t*>(const_cast<void*>(to.data))[at(to)] =
      from.data == nullptr ? 0 : static_cast<const uint16_t*>(from.data)[at(from)];
}
LINNET_GRADIENTS(gradients_64, true, 64, false)
LINNET_GRADIENTS(gradients_64_decay, true, 64, true)
LINNET_GRADIENTS(gradients_128, true, 128, false)
LINNET_GRADIENTS(gradients_128_decay, true, 128, true)

}  // namespace linnet::cuda
