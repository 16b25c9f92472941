// Tensors of a call inside a kernel: elements of any type by their indices, and rows in pieces of 16 bytes.
#pragma once

#include "core/view.h"
#include "ptx/rows.cuh"

namespace linnet::cuda {

// A tensor is a View, or Strided, which takes a third of its bytes: a kernel's parameters are at most 4096.
template <class Tensor, class... I>
__device__ __forceinline__ int64_t place(const Tensor& view, I... index) {
  int64_t offset = 0;
  int i = 0;
  ((offset += static_cast<int64_t>(index) * view.stride[i++]), ...);
  return offset;
}
template <class Tensor, class... I>
__device__ __forceinline__ float get(const Tensor& view, I... index) {
  return ptx::load(view.data, view.dtype, place(view, index...));
}
template <class Tensor, class... I>
__device__ __forceinline__ float get_or(float absent, const Tensor& view, I... index) {
  return view.dtype == Dtype::none ? absent : get(view, index...);
}
template <class Tensor, class... I>
__device__ __forceinline__ void put(const Tensor& view, float x, I... index) {
  ptx::store(view.data, view.dtype, place(view, index...), x);
}
template <class Tensor>
__device__ __forceinline__ bool is_given(const Tensor& view) {
  return view.dtype != Dtype::none;
}
__device__ __forceinline__ int64_t get_index(const View& view, int64_t offset) {
  return view.dtype == Dtype::i64 ? static_cast<const int64_t*>(view.data)[offset]
                                  : static_cast<const int32_t*>(view.data)[offset];
}

// Channels c .. c + W - 1 of a row of `width`; 0 behind it. whole: the row and its width are multiples of 16 bytes.
template <class T, int W = ptx::kVector<T>>
__device__ __forceinline__ void load_piece(const T* row, int c, int width, bool whole, float (&x)[W]) {
  if (whole) {
    ptx::to_floats<T>(*reinterpret_cast<const uint4*>(row + c), x);
    return;
  }
#pragma unroll
  for (int i = 0; i < W; ++i) x[i] = c + i < width ? static_cast<float>(row[c + i]) : 0;
}
template <class T, int W = ptx::kVector<T>>
__device__ __forceinline__ void store_piece(T* row, int c, int width, bool whole, const float (&x)[W]) {
  if (whole) {
    *reinterpret_cast<uint4*>(row + c) = ptx::from_floats<T>(x);
    return;
  }
#pragma unroll
  for (int i = 0; i < W; ++i) {
    if (c + i < width) row[c + i] = static_cast<T>(x[i]);
  }
}
// The same for a vector of any type, by runs of one element.
template <int W>
__device__ __forceinline__ void load_channels(const View& view, int c, int width, float absent, float (&x)[W]) {
#pragma unroll
  for (int i = 0; i < W; ++i) x[i] = c + i < width ? get_or(absent, view, c + i) : 0;
}

}  // namespace linnet::cuda
