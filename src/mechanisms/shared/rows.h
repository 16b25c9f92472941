// Where the rows and states of a call lie, for kernels on the GPU and their launches (plain data).
#pragma once

#include <cstdint>

#include "core/view.h"

namespace linnet::cuda {

enum class Map : int32_t { identity, elu1, relu, relu2, silu, softplus, exp };  // elementwise feature maps

// Rows of a tensor [B, T, heads, width], strides in elements. Head h of the call uses head h / group.
struct Rows {
  const void* data = nullptr;  // null: absent
  int64_t stride_b = 0, stride_t = 0, stride_h = 0;
  int32_t group = 1;
  Dtype dtype = Dtype::none;
  Map map = Map::identity;
};

// States [N, H, rows, columns] in f32.
struct States {
  float* data = nullptr;  // null: absent
  int64_t stride_n = 0, stride_h = 0, stride_row = 0, stride_column = 1;
};

}  // namespace linnet::cuda
