// Where the elements of a shared-memory tile lie, and how wgmma is told: plain arithmetic, for host and device.
//
// A tile [rows][64 * panels] of 16-bit elements is stored as panels of 128-byte rows with the 128-byte swizzle: the 16-byte
// piece p of row r stands at piece p ^ (r % 8). The copy engine writes it so (SWIZZLE_128B), wgmma reads it so, and 8 rows of
// one piece lie in 8 different groups of banks. Every tile starts at a multiple of 1024 bytes.
#pragma once

#include <cstdint>

namespace linnet::ptx {

inline constexpr int kRowBytes = 128, kPanelColumns = 64;

// The byte of element (row, column) in a tile of `rows` rows.
constexpr uint32_t tile_byte(uint32_t rows, uint32_t row, uint32_t column) {
  const uint32_t panel = column / kPanelColumns, piece = column % kPanelColumns / 8;
  return panel * rows * kRowBytes + row * kRowBytes + ((piece ^ (row % 8)) * 16) + column % 8 * 2;
}

// A tile of f32, 32 columns to a panel, as B of a tf32 product whose A are accumulators of another one: a thread holds their
// columns 2 t and 2 t + 1, where A needs t and t + 4, so the columns of each group of 8 are stored as 0 2 4 6 1 3 5 7.
constexpr uint32_t tile_byte_paired_f32(uint32_t rows, uint32_t row, uint32_t column) {
  const uint32_t place = column % 32 / 8 * 8 + column % 2 * 4 + column % 8 / 2;
  return column / 32 * rows * kRowBytes + row * kRowBytes + ((place / 4 ^ (row % 8)) * 16) + place % 4 * 4;
}

// The matrix descriptor of wgmma (PTX ISA, "Matrix descriptor"): addresses and distances in units of 16 bytes.
//   bits 0-13 start; 16-29 leading distance; 32-45 stride distance; 62-63 swizzle, 1 = 128 bytes
constexpr uint64_t descriptor(uint32_t start, uint32_t leading, uint32_t stride) {
  return static_cast<uint64_t>((start & 0x3ffff) >> 4) | static_cast<uint64_t>(leading >> 4) << 16 |
         static_cast<uint64_t>(stride >> 4) << 32 | uint64_t{1} << 62;
}
// Rows of the tile are M or N, its columns are K ("K-major"): 16 of K from column 16 * k on. Groups of 8 rows lie 1024 bytes
// apart; the leading distance is not used.
constexpr uint64_t descriptor_k_major(uint32_t tile, uint32_t rows, uint32_t k) {
  return descriptor(tile + k / 4 * rows * kRowBytes + k % 4 * 32, 16, 1024);
}
// [64][8] 16-bit numbers without swizzle, rows of 16 bytes one behind the other, as M or N by K; the other 8 of K are the same
// numbers again.
constexpr uint64_t descriptor_pieces(uint32_t tile) { return descriptor(tile, 0, 128) & ~(uint64_t{3} << 62); }
// Rows of the tile are K, its columns are M or N ("MN-major", transposed): rows 16 * k on. Panels of 64 columns lie `rows` rows
// apart (leading), groups of 8 rows 1024 bytes (stride).
constexpr uint64_t descriptor_mn_major(uint32_t tile, uint32_t rows, uint32_t k) {
  return descriptor(tile + k * 16 * kRowBytes, rows * kRowBytes, 1024);
}

// The same from that of k = 0, by one addition: shared memory ends before the address's bits do.
constexpr uint64_t step_descriptor(uint64_t first, uint32_t bytes) {
  return (first & 0xffffffff00000000) | (static_cast<uint32_t>(first) + bytes / 16);
}
constexpr uint64_t step_k_major(uint64_t first, uint32_t rows, uint32_t k) {
  return step_descriptor(first, k / 4 * rows * kRowBytes + k % 4 * 32);
}
constexpr uint64_t step_mn_major(uint64_t first, uint32_t k) { return step_descriptor(first, k * 16 * kRowBytes); }

}  // namespace linnet::ptx
