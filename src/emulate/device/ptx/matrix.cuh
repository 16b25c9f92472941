// src/ptx/matrix.cuh on the emulated GPU: what a warp does together is done by the last lane that comes.
#pragma once

#include <cstdint>

namespace linnet::ptx {

namespace emulated {

using emulate::Slot;

// Matrix m's row r stands where lane 8 m + r says; lane l gets elements (l / 4, 2 (l % 4)) and its right neighbour.
template <bool transposed>
void load_all(Slot* slots, uint32_t) {
  uint16_t x[4][8][8];
  for (int i = 0; i < 32; ++i) {
    if (slots[i].word[0] % 16 != 0) emulate::fail("a row of a matrix at an address that is no multiple of 16");
    std::memcpy(x[i / 8][i % 8], emulate::shared_pointer(slots[i].word[0], 16), 16);
  }
  for (int l = 0; l < 32; ++l) {
    const int r = l / 4, c = l % 4 * 2;
    for (int m = 0; m < 4; ++m) {
      const uint32_t low = transposed ? x[m][c][r] : x[m][r][c], high = transposed ? x[m][c + 1][r] : x[m][r][c + 1];
      slots[l].word[m] = low | high << 16;
    }
  }
}
template <bool transposed>
void load(uint32_t (&r)[4], uint32_t address) {
  Slot mine = {};
  mine.word[0] = address;
  const Slot* slots = emulate::meet(transposed ? "ldmatrix.trans" : "ldmatrix", 0xffffffffu, mine, load_all<transposed>);
  for (int m = 0; m < 4; ++m) r[m] = slots[emulate::lane()].word[m];
}

// Words 0 to 3: the matrices, 4: the address.
template <bool transposed>
void store_all(Slot* slots, uint32_t) {
  uint16_t x[4][8][8];
  for (int l = 0; l < 32; ++l) {
    const int r = l / 4, c = l % 4 * 2;
    for (int m = 0; m < 4; ++m) {
      const uint32_t two = slots[l].word[m];
      (transposed ? x[m][c][r] : x[m][r][c]) = static_cast<uint16_t>(two);
      (transposed ? x[m][c + 1][r] : x[m][r][c + 1]) = static_cast<uint16_t>(two >> 16);
    }
  }
  for (int i = 0; i < 32; ++i) {
    if (slots[i].word[4] % 16 != 0) emulate::fail("a row of a matrix at an address that is no multiple of 16");
    std::memcpy(emulate::shared_pointer(slots[i].word[4], 16), x[i / 8][i % 8], 16);
  }
}
template <bool transposed>
void store(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  Slot mine = {};
  mine.word[0] = a, mine.word[1] = b, mine.word[2] = c, mine.word[3] = d, mine.word[4] = address;
  emulate::meet(transposed ? "stmatrix.trans" : "stmatrix", 0xffffffffu, mine, store_all<transposed>);
}

inline void transpose_all(Slot* slots, uint32_t) {
  uint16_t x[8][8];
  for (int l = 0; l < 32; ++l) {
    x[l / 4][l % 4 * 2] = static_cast<uint16_t>(slots[l].word[0]);
    x[l / 4][l % 4 * 2 + 1] = static_cast<uint16_t>(slots[l].word[0] >> 16);
  }
  for (int l = 0; l < 32; ++l) {
    const int r = l / 4, c = l % 4 * 2;
    slots[l].word[0] = x[c][r] | static_cast<uint32_t>(x[c + 1][r]) << 16;
  }
}

inline float tf32(uint32_t bits) { return __uint_as_float(bits & ~0x1fffu); }

// Words 0 to 3: A, 4 and 5: B, 6 to 9: D.
inline void multiply_tf32(Slot* slots, uint32_t) {
  float a[16][8], b[8][8];
  for (int l = 0; l < 32; ++l) {
    const int g = l / 4, t = l % 4;
    a[g][t] = tf32(slots[l].word[0]);
    a[g + 8][t] = tf32(slots[l].word[1]);
    a[g][t + 4] = tf32(slots[l].word[2]);
    a[g + 8][t + 4] = tf32(slots[l].word[3]);
    b[t][g] = tf32(slots[l].word[4]);
    b[t + 4][g] = tf32(slots[l].word[5]);
  }
  for (int l = 0; l < 32; ++l) {
    for (int i = 0; i < 4; ++i) {
      float sum = slots[l].number[6 + i];
      const int row = l / 4 + i / 2 * 8, column = l % 4 * 2 + i % 2;
      for (int k = 0; k < 8; ++k) sum += a[row][k] * b[k][column];
      slots[l].number[6 + i] = sum;
    }
  }
}

}  // namespace emulated

inline void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) { emulated::load<true>(r, address); }

inline void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  emulated::store<false>(address, a, b, c, d);
}
inline void store_matrices_transposed(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  emulated::store<true>(address, a, b, c, d);
}

inline uint32_t transpose_matrix(uint32_t a) {
  emulate::Slot mine = {};
  mine.word[0] = a;
  return emulate::meet("movmatrix", 0xffffffffu, mine, emulated::transpose_all)[emulate::lane()].word[0];
}

inline void mma_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  emulate::Slot mine;
  for (int i = 0; i < 4; ++i) mine.word[i] = a[i];
  for (int i = 0; i < 2; ++i) mine.word[4 + i] = b[i];
  for (int i = 0; i < 4; ++i) mine.number[6 + i] = d[i];
  const emulate::Slot& got = emulate::meet("mma.tf32", 0xffffffffu, mine, emulated::multiply_tf32)[emulate::lane()];
  for (int i = 0; i < 4; ++i) d[i] = got.number[6 + i];
}

}  // namespace linnet::ptx
