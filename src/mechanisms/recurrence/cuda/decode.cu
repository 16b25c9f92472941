// One token with the state in place (decode.cuh), a block for 32 columns of a head's state.
#include "mechanisms/recurrence/cuda/decode.cuh"

namespace linnet::cuda {
namespace {

template <int kRows>
__device__ void decode(const Engine& e) {
  __shared__ Head<16 * kRows, 32> s;
  __shared__ Reads reads;
  const int thread = threadIdx.x, first = blockIdx.y * 32, column = first + thread % 8 * 4, h = blockIdx.x % e.H;
  const int64_t n = blockIdx.x / e.H;
  const auto mine = [&](int i) { return column < e.V && thread / 8 + 16 * i < e.K; };
  const float* from = e.initial.data + n * e.initial.stride_n + h * e.initial.stride_h + column;
  float* to = e.final.data + n * e.final.stride_n + h * e.final.stride_h + column;
  float4 S[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t row = thread / 8 + 16 * i;
    S[i] = mine(i) ? __ldcs(reinterpret_cast<const float4*>(from + row * e.initial.stride_row)) : float4{0, 0, 0, 0};
  }
  Token<16 * kRows, 32> token;
  token.ask(e, n, h, thread, first);
  token.share(e, thread, s);
  __syncthreads();
  update(e, n, h, thread, first, 0, s, reads, S, [] { __syncthreads(); });
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t row = thread / 8 + 16 * i;
    if (mine(i)) __stcs(reinterpret_cast<float4*>(to + row * e.final.stride_row), S[i]);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(128, 8) decode_4(const __grid_constant__ Engine e) { decode<4>(e); }
extern "C" __global__ void __launch_bounds__(128, 7) decode_8(const __grid_constant__ Engine e) { decode<8>(e); }
extern "C" __global__ void __launch_bounds__(128) decode_16(const __grid_constant__ Engine e) { decode<16>(e); }

}  // namespace linnet::cuda
