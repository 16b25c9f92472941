// src/ptx/mma.cuh on the emulated GPU. Sums are rounded in f32 term by term, where the hardware has its own order.
#pragma once

#include <cstdint>

#include "core/half.h"
#include "ptx/fragment.cuh"
#include "ptx/matrix.cuh"

namespace linnet::ptx {

inline void load_matrices(uint32_t (&r)[4], uint32_t address) { emulated::load<false>(r, address); }

namespace emulated {

template <bool bf16>
float number(uint32_t bits) {
  if constexpr (bf16) return to_f32(Bf16{static_cast<uint16_t>(bits)});
  return to_f32(F16{static_cast<uint16_t>(bits)});
}

// Words 0 to 3: A, 4 and 5: B, 6 to 9: D.
template <bool bf16>
void multiply(Slot* slots, uint32_t) {
  float a[16][16], b[16][8], d[16][8];
  for (int l = 0; l < 32; ++l) {
    const int g = l / 4, t = l % 4 * 2;
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < 2; ++j) a[g + i % 2 * 8][t + i / 2 * 8 + j] = number<bf16>(slots[l].word[i] >> (16 * j));
    }
    for (int i = 0; i < 2; ++i) {
      for (int j = 0; j < 2; ++j) b[t + 8 * i + j][g] = number<bf16>(slots[l].word[4 + i] >> (16 * j));
    }
    for (int i = 0; i < 4; ++i) d[g + i / 2 * 8][t + i % 2] = slots[l].number[6 + i];
  }
  for (int r = 0; r < 16; ++r) {
    for (int k = 0; k < 16; ++k) {
      for (int c = 0; c < 8; ++c) d[r][c] += a[r][k] * b[k][c];
    }
  }
  for (int l = 0; l < 32; ++l) {
    for (int i = 0; i < 4; ++i) slots[l].number[6 + i] = d[l / 4 + i / 2 * 8][l % 4 * 2 + i % 2];
  }
}

}  // namespace emulated

template <bool bf16>
void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulate::Slot mine;
  for (int i = 0; i < 4; ++i) mine.word[i] = a[i];
  mine.word[4] = b0;
  mine.word[5] = b1;
  for (int i = 0; i < 4; ++i) mine.number[6 + i] = d[i];
  const emulate::Slot& got = emulate::meet("mma", 0xffffffffu, mine, emulated::multiply<bf16>)[emulate::lane()];
  for (int i = 0; i < 4; ++i) d[i] = got.number[6 + i];
}

inline uint32_t load_shared_4(uint32_t address) { return *static_cast<const uint32_t*>(emulate::shared_pointer(address, 4)); }
inline uint4 load_shared_16(uint32_t address) { return *static_cast<const uint4*>(emulate::shared_pointer(address, 16)); }
inline void store_shared_16(uint32_t address, const uint4& x) {
  *static_cast<uint4*>(emulate::shared_pointer(address, 16)) = x;
}
inline void fill_shared_16(uint32_t address, uint32_t x) { store_shared_16(address, {x, x, x, x}); }
inline void store_shared_2(uint32_t address, uint16_t x) { *static_cast<uint16_t*>(emulate::shared_pointer(address, 2)) = x; }

}  // namespace linnet::ptx
