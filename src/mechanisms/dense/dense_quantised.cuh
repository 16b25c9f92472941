// Codes of 8 and 4 bits in panels (dense_pack.h) inside a kernel.
#pragma once

#include "mechanisms/dense/dense.h"
#include "mechanisms/shared/pieces.cuh"

namespace linnet::cuda {
namespace {

// One group of 32 inputs of a panel: its codes, and a row's scale and offset, so that a weight is scale code + offset.
struct QuantisedGroup {
  const uint8_t* codes;
  float scale, offset;
};
__device__ __forceinline__ QuantisedGroup group_of(QuantisedBits bits, const View& codes, const View& scale, const View& offset,
                                                   int64_t panel, int64_t group, int row) {
  QuantisedGroup g;
  g.codes = static_cast<const uint8_t*>(codes.data) + place(codes, panel, group);
  g.scale = get(scale, panel, group, row);
  g.offset = is_given(offset) ? get(offset, panel, group, row) : g.scale * (bits == QuantisedBits::eight ? -128 : -8);
  return g;
}
__device__ __forceinline__ int code_of(QuantisedBits bits, const uint8_t* codes, int row, int k) {
  const int m = bits == QuantisedBits::eight ? k : k % 16, byte = codes[m / 4 * 64 + 4 * row + m % 4];
  return bits == QuantisedBits::eight ? byte : byte >> (k / 16 * 4) & 15;
}

}  // namespace
}  // namespace linnet::cuda
