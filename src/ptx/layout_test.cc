// The arithmetic of swizzled tiles and descriptors, without a GPU.
#include "ptx/layout.h"

#include <gtest/gtest.h>

#include <set>

namespace linnet::ptx {
namespace {

TEST(PtxLayout, EveryElementHasItsOwnPlace) {
  for (const uint32_t panels : {1u, 2u}) {
    std::set<uint32_t> seen;
    for (uint32_t row = 0; row < 64; ++row) {
      for (uint32_t column = 0; column < 64 * panels; ++column) seen.insert(tile_byte(64, row, column));
    }
    EXPECT_EQ(seen.size(), 64 * 64 * panels);
    EXPECT_EQ(*seen.rbegin(), 64 * 128 * panels - 2);
  }
}

// The 128-byte swizzle of the PTX manual: address bits 4-6 are xored with bits 7-9.
TEST(PtxLayout, SwizzleOfTheManual) {
  for (uint32_t row = 0; row < 64; ++row) {
    for (uint32_t column = 0; column < 128; ++column) {
      const uint32_t plain = column / 64 * 64 * 128 + row * 128 + column % 64 * 2;
      EXPECT_EQ(tile_byte(64, row, column), plain ^ (plain >> 7 & 7) << 4);
    }
  }
}

TEST(PtxLayout, PiecesOfEightRowsLieInDifferentBanks) {
  for (uint32_t column = 0; column < 64; column += 8) {
    std::set<uint32_t> groups;
    for (uint32_t row = 0; row < 8; ++row) groups.insert(tile_byte(64, row, column) % 128 / 16);
    EXPECT_EQ(groups.size(), 8u);
  }
}

uint32_t field(uint64_t descriptor, int first, int bits) {
  return static_cast<uint32_t>(descriptor >> first & ((uint64_t{1} << bits) - 1));
}

TEST(PtxLayout, DescriptorFields) {
  const uint64_t k_major = descriptor_k_major(0x2400, 64, 5);  // the second panel, its second step
  EXPECT_EQ(field(k_major, 0, 14), (0x2400 + 64 * 128 + 32) / 16);
  EXPECT_EQ(field(k_major, 32, 14), 64);
  EXPECT_EQ(field(k_major, 49, 3), 0);
  EXPECT_EQ(field(k_major, 62, 2), 1);
  const uint64_t mn_major = descriptor_mn_major(0x2400, 64, 3);
  EXPECT_EQ(field(mn_major, 0, 14), (0x2400 + 3 * 2048) / 16);
  EXPECT_EQ(field(mn_major, 16, 14), 64 * 128 / 16);
  EXPECT_EQ(field(mn_major, 32, 14), 64);
  EXPECT_EQ(field(mn_major, 62, 2), 1);
  const uint64_t pieces = descriptor_pieces(0x2410);
  EXPECT_EQ(field(pieces, 0, 14), 0x241);
  EXPECT_EQ(field(pieces, 16, 14), 0);
  EXPECT_EQ(field(pieces, 32, 14), 8);
  EXPECT_EQ(field(pieces, 62, 2), 0);
  EXPECT_EQ(field(descriptor(0x3fff0, 16, 1024), 0, 14), 0x3fff);  // the last address
}

// A step of 16 in K-major order is 32 bytes inside of the swizzled row; the hardware swizzles the sum of base and offset, so
// the start must have the row bits of a tile aligned to 1024 bytes.
TEST(PtxLayout, StepsStayInsideTheRow) {
  for (uint32_t k = 0; k < 8; ++k) {
    const uint32_t start = field(descriptor_k_major(0, 64, k), 0, 14) * 16;
    EXPECT_EQ(start >> 7 & 7, 0u);
    EXPECT_EQ(start, tile_byte(64, 0, 16 * k));
  }
}

TEST(PtxLayout, DescriptorsByAddition) {
  for (uint32_t tile : {0u, 1024u, 0x38000u}) {
    for (uint32_t k = 0; k < 8; ++k) {
      EXPECT_EQ(step_k_major(descriptor_k_major(tile, 64, 0), 64, k), descriptor_k_major(tile, 64, k));
      if (k < 4) EXPECT_EQ(step_mn_major(descriptor_mn_major(tile, 64, 0), k), descriptor_mn_major(tile, 64, k));
    }
  }
}

}  // namespace
}  // namespace linnet::ptx
