// Every 16-bit pattern, and every boundary between two neighbouring values: since rounding is monotonic, the values at a
// boundary and one double beside it on either side decide all other doubles.
#include "core/half.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace linnet {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

struct Format {
  const char* name;
  int mantissa_bits, bias;
  uint16_t (*round)(double);
  float (*to_float)(uint16_t);
  double (*to_double)(uint16_t);
  uint16_t infinity() const { return static_cast<uint16_t>(0x7fff >> mantissa_bits << mantissa_bits); }
  // The definition, by arithmetic: independent of the conversion under test.
  double value(uint16_t bits) const {
    const int exponent = (bits & 0x7fff) >> mantissa_bits;
    const double fraction = std::ldexp(bits & ((1 << mantissa_bits) - 1), -mantissa_bits);
    const double magnitude = exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, exponent - bias);
    return bits & 0x8000 ? -magnitude : magnitude;
  }
};

const Format kFormats[] = {
    {"bf16", 7, 127, [](double x) { return round_to<Bf16>(x).bits; }, [](uint16_t b) { return to_f32(Bf16{b}); },
     [](uint16_t b) { return to_f64(Bf16{b}); }},
    {"f16", 10, 15, [](double x) { return round_to<F16>(x).bits; }, [](uint16_t b) { return to_f32(F16{b}); },
     [](uint16_t b) { return to_f64(F16{b}); }},
};

TEST(Half, EveryPatternWidensExactlyAndComesBack) {
  for (const Format& f : kFormats) {
    for (uint32_t i = 0; i < 0x10000; ++i) {
      const uint16_t bits = static_cast<uint16_t>(i), magnitude = bits & 0x7fff;
      const double wide = f.to_double(bits);
      ASSERT_EQ(std::signbit(wide), i >= 0x8000) << f.name << " " << i;
      if (magnitude > f.infinity()) {
        ASSERT_TRUE(std::isnan(wide)) << f.name << " " << i;
        const int quiet = 1 << (f.mantissa_bits - 1);
        ASSERT_EQ(f.round(wide), bits | quiet) << f.name << " " << i;  // sign and payload kept, quiet
      } else {
        ASSERT_EQ(wide, magnitude == f.infinity() ? (i >= 0x8000 ? -kInf : kInf) : f.value(bits)) << f.name << " " << i;
        ASSERT_EQ(static_cast<double>(f.to_float(bits)), wide) << f.name << " " << i;
        ASSERT_EQ(f.round(wide), bits) << f.name << " " << i;
      }
    }
  }
}

TEST(Half, EveryBoundaryRoundsToNearestEven) {
  for (const Format& f : kFormats) {
    for (uint32_t i = 0; i < f.infinity(); ++i) {
      // Above the largest finite value the next one would be 2^(bias + 1): it overflows to infinity.
      const uint16_t below = static_cast<uint16_t>(i), above = static_cast<uint16_t>(i + 1);
      const double middle = (f.value(below) + f.value(above)) / 2;  // exact: one bit more than the format
      const uint16_t even = below & 1 ? above : below;
      for (const double sign : {1.0, -1.0}) {
        const uint16_t s = sign < 0 ? 0x8000 : 0;
        ASSERT_EQ(f.round(sign * std::nextafter(middle, 0.0)), s | below) << f.name << " " << i;
        ASSERT_EQ(f.round(sign * middle), s | even) << f.name << " " << i;
        ASSERT_EQ(f.round(sign * std::nextafter(middle, kInf)), s | above) << f.name << " " << i;
      }
    }
  }
}

TEST(Half, Extremes) {
  struct Case {
    double x;
    uint16_t bf16, f16;
  };
  const double tiny = std::numeric_limits<double>::denorm_min(), huge = std::numeric_limits<double>::max();
  const Case cases[] = {
      {0.0, 0, 0},
      {-0.0, 0x8000, 0x8000},
      {tiny, 0, 0},
      {-tiny, 0x8000, 0x8000},
      {huge, 0x7f80, 0x7c00},
      {-huge, 0xff80, 0xfc00},
      {1.0, 0x3f80, 0x3c00},
      {65504, 0x4780, 0x7bff},
      {65519.99, 0x4780, 0x7bff},
      {65520, 0x4780, 0x7c00},
      {0x1p-24, 0x3380, 0x0001},
      {0x1p-25, 0x3300, 0x0000},
      {0x1.8p-25, 0x3340, 0x0001},
      {0x1p-133, 0x0001, 0x0000},
      {0x1p-134, 0x0000, 0x0000},
      {1 + 0x1p-8 + 0x1p-40, 0x3f81, 0x3c04},  // float would round to the tie 1 + 2^-8, and then to 1
  };
  for (const Case& c : cases) {
    EXPECT_EQ(round_to<Bf16>(c.x).bits, c.bf16) << c.x;
    EXPECT_EQ(round_to<F16>(c.x).bits, c.f16) << c.x;
  }
}

TEST(Half, LoadAndStoreEveryDtype) {
  alignas(8) unsigned char buffer[32];
  for (const Dtype dtype : {Dtype::f64, Dtype::f32, Dtype::bf16, Dtype::f16}) {
    for (int i = 0; i < 3; ++i) store_f64(buffer, dtype, i, -1.5 * i);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(load_f64(buffer, dtype, i), -1.5 * i);
  }
  const int64_t longs[] = {1, -(int64_t{1} << 53)};
  const int32_t ints[] = {1, -7};
  const uint8_t bytes[] = {1, 255};
  EXPECT_EQ(load_f64(longs, Dtype::i64, 1), -0x1p53);
  EXPECT_EQ(load_f64(ints, Dtype::i32, 1), -7);
  EXPECT_EQ(load_f64(bytes, Dtype::u8, 1), 255);
}

}  // namespace
}  // namespace linnet
