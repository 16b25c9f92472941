// Every function of the vector layer on every instruction set that this machine has.
//
//   build/simd_test                            fast set: every 997th float
//   LINNET_FULL_TESTS=1 build/simd_test        every 97th float, 16 times as many doubles
#include "simd/simd.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include "core/tolerance.h"
#include "simd/ftz.h"

namespace linnet {
namespace {

bool full_tests() { return std::getenv("LINNET_FULL_TESTS") != nullptr; }

std::vector<Isa> usable() {
  std::vector<Isa> isas;
  for (const Isa isa : kIsas)
    if (*isa_missing(isa) == '\0') isas.push_back(isa);
  return isas;
}

// splitmix64
struct Random {
  uint64_t state;
  uint64_t next() {
    uint64_t z = (state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  // The second factor fills the low bits of the mantissa, which the sum leaves zero near 0.
  double uniform(double low, double high) {
    const double v = low + (high - low) * (static_cast<double>(next()) * 0x1p-64);
    return v * (1 - static_cast<double>(next()) * 0x1p-104);
  }
};

float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

// ---- elementary functions -------------------------------------------------------------------------------------------------

// |got - want| in units of T's last place at want (subnormals: the smallest place there is).
template <class T, class Wide>
double ulp_error(T got, Wide want) {
  if (std::isnan(want)) return std::isnan(got) ? 0 : 1e30;
  const T rounded = static_cast<T>(want);
  if (std::isinf(rounded) || std::isinf(got)) return got == rounded ? 0 : 1e30;
  constexpr int digits = std::numeric_limits<T>::digits;
  constexpr int lowest = std::numeric_limits<T>::min_exponent - digits;
  const int place = want == 0 ? lowest : std::max(std::ilogb(want) + 1 - digits, lowest);
  return static_cast<double>(std::fabs(std::scalbn(static_cast<Wide>(got) - want, -place)));
}

template <class Wide>
Wide exact_sigmoid(Wide x) {
  return x < 0 ? std::exp(x) / (1 + std::exp(x)) : 1 / (1 + std::exp(-x));
}
template <class Wide>
Wide exact_softplus(Wide x) {
  return std::fmax(x, Wide(0)) + std::log1p(std::exp(-std::fabs(x)));
}

struct MathCase {
  const char* name;
  double (*f64)(double);
  long double (*f80)(long double);
  double low, high;    // doubles are drawn from here
  float from32, to32;  // floats outside are not in the function's range
  struct Special {
    double x, y;
  } special[6];  // exact results
};
void PrintTo(const MathCase& c, std::ostream* out) { *out << c.name; }
const double kInf = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();
const float kInf32 = std::numeric_limits<float>::infinity();
const MathCase kMath[] = {
    {"exp",
     [](double x) { return std::exp(x); },
     [](long double x) { return std::exp(x); },
     -745,
     709.7,
     -kInf32,
     kInf32,
     {{0, 1}, {-0.0, 1}, {kInf, kInf}, {-kInf, 0}, {kNan, kNan}, {1000, kInf}}},
    {"exp2",
     [](double x) { return std::exp2(x); },
     [](long double x) { return std::exp2(x); },
     -1074,
     1023.9,
     -kInf32,
     kInf32,
     {{0, 1}, {kInf, kInf}, {-kInf, 0}, {kNan, kNan}, {1e30, kInf}, {-1e30, 0}}},
    {"exp2_nonpositive",
     [](double x) { return std::exp2(x); },
     [](long double x) { return std::exp2(x); },
     -1022.4,
     0,
     -126.4f,
     0,
     {{0, 1}, {-0.0, 1}, {-3, 0.125}, {-kInf, 0}, {kNan, kNan}, {-1e30, 0}}},
    {"expm1",
     [](double x) { return std::expm1(x); },
     [](long double x) { return std::expm1(x); },
     -45,
     709,
     -kInf32,
     kInf32,
     {{0, 0}, {-0.0, -0.0}, {kInf, kInf}, {-kInf, -1}, {kNan, kNan}, {-1000, -1}}},
    {"log",
     [](double x) { return std::log(x); },
     [](long double x) { return std::log(x); },
     0,
     4,
     0,
     kInf32,
     {{0, -kInf}, {-0.0, -kInf}, {kInf, kInf}, {-kInf, kNan}, {kNan, kNan}, {1, 0}}},
    {"log1p",
     [](double x) { return std::log1p(x); },
     [](long double x) { return std::log1p(x); },
     -1,
     4,
     -kInf32,
     kInf32,
     {{0, 0}, {-0.0, -0.0}, {kInf, kInf}, {-2, kNan}, {kNan, kNan}, {-1, -kInf}}},
    {"sigmoid",
     exact_sigmoid<double>,
     exact_sigmoid<long double>,
     -40,
     40,
     -kInf32,
     kInf32,
     {{0, 0.5}, {-0.0, 0.5}, {kInf, 1}, {-kInf, 0}, {kNan, kNan}, {1000, 1}}},
    {"sigmoid2",
     [](double x) { return 1 / (1 + std::exp2(-x)); },
     [](long double x) { return 1 / (1 + std::exp2(-x)); },
     -40,
     40,
     -126.4f,
     kInf32,
     {{0, 0.5}, {-0.0, 0.5}, {kInf, 1}, {-kInf, 0}, {kNan, kNan}, {1000, 1}}},
    {"decay_factor",  // expm1 above -1/2, else exp
     [](double x) { return x > -0.5 ? std::expm1(x) : std::exp(x); },
     [](long double x) { return x > -0.5L ? std::expm1(x) : std::exp(x); },
     -708,
     0,
     -87.3f,
     0,
     {{0, 0}, {-1e30, 0}, {-kInf, 0}, {kNan, kNan}, {-1000, 0}, {-710, 0}}},
    {"softplus",
     exact_softplus<double>,
     exact_softplus<long double>,
     -40,
     40,
     -kInf32,
     kInf32,
     {{kInf, kInf}, {-kInf, 0}, {kNan, kNan}, {1000, 1000}, {1e30, 1e30}, {-1e30, 0}}},
    {"tanh",
     [](double x) { return std::tanh(x); },
     [](long double x) { return std::tanh(x); },
     -20,
     20,
     -kInf32,
     kInf32,
     {{0, 0}, {-0.0, -0.0}, {kInf, 1}, {-kInf, -1}, {kNan, kNan}, {1000, 1}}},
};

const VectorFunction& find(Isa isa, const std::string& name) {
  const VectorFunction* f = simd_table(isa).functions;
  while (f->name != nullptr && name != f->name) ++f;
  EXPECT_NE(f->name, nullptr) << name;
  return *f;
}

class Math : public testing::TestWithParam<MathCase> {};

const UlpLimit& limit_of(const std::string& name) {
  return *std::find_if(std::begin(kUlpLimits), std::end(kUlpLimits), [&](const UlpLimit& l) { return name == l.function; });
}

TEST_P(Math, floats_over_the_whole_range) {
  const MathCase& c = GetParam();
  const uint64_t step = full_tests() ? 97 : 997;
  struct Worst {
    double error = 0;
    float x = 0;
  };
  std::vector<Worst> worst(usable().size());
  constexpr int kBlock = 1000;  // no multiple of any lane count
  std::vector<float> x(kBlock), y(kBlock);
  std::vector<double> want(kBlock);
  for (uint64_t next = 0; next < (1ull << 32);) {
    int n = 0;
    for (; n < kBlock && next < (1ull << 32); next += step) {
      const float v = float_of(static_cast<uint32_t>(next));
      if (!(v < c.from32 || v > c.to32)) x[n++] = v;
    }
    for (int i = 0; i < n; ++i) want[i] = c.f64(x[i]);
    for (size_t s = 0; s < worst.size(); ++s) {
      find(usable()[s], c.name).f32(x.data(), y.data(), n);
      for (int i = 0; i < n; ++i) {
        const double error = ulp_error(y[i], want[i]);
        if (error > worst[s].error) worst[s] = {error, x[i]};
      }
    }
  }
  for (size_t s = 0; s < worst.size(); ++s) {
    RecordProperty(std::string(isa_name(usable()[s])) + "_ulp", std::to_string(worst[s].error));
    EXPECT_LE(worst[s].error, limit_of(c.name).f32) << c.name << " on " << isa_name(usable()[s]) << " at " << worst[s].x;
  }
}

TEST_P(Math, doubles) {
  const MathCase& c = GetParam();
  const int rounds = full_tests() ? 1600 : 100;
  constexpr int kBlock = 1000;
  Random random{7};
  std::vector<double> x(kBlock), y(kBlock), worst(usable().size()), at(usable().size());
  std::vector<long double> want(kBlock);
  for (int round = 0; round < rounds; ++round) {
    for (int i = 0; i < kBlock; ++i) {
      // Evenly over the range; evenly over [-4, 4]; and with exponents down to 2^-64 around 0 (for log and log1p around 1).
      const int kind = i % 3;
      double v = kind == 0 ? random.uniform(c.low, c.high) : random.uniform(std::max(c.low, -4.0), std::min(c.high, 4.0));
      if (kind == 2) v = std::ldexp(v, -static_cast<int>(random.next() % 64));
      if (kind == 2 && std::string(c.name) == "log" && round % 2 == 0) v = 1 + (round % 4 == 0 ? v : -v) / 16;
      x[i] = v;
    }
    for (int i = 0; i < kBlock; ++i) want[i] = c.f80(x[i]);
    for (size_t s = 0; s < worst.size(); ++s) {
      find(usable()[s], c.name).f64(x.data(), y.data(), kBlock);
      for (int i = 0; i < kBlock; ++i) {
        const double error = ulp_error(y[i], want[i]);
        if (error > worst[s]) worst[s] = error, at[s] = x[i];
      }
    }
  }
  for (size_t s = 0; s < worst.size(); ++s) {
    RecordProperty(std::string(isa_name(usable()[s])) + "_ulp", std::to_string(worst[s]));
    EXPECT_LE(worst[s], limit_of(c.name).f64) << c.name << " on " << isa_name(usable()[s]) << " at " << at[s];
  }
}

TEST_P(Math, special_values) {
  const MathCase& c = GetParam();
  for (const Isa isa : usable()) {
    for (const MathCase::Special& s : c.special) {
      double x = s.x, y = 12345;
      find(isa, c.name).f64(&x, &y, 1);
      float x32 = static_cast<float>(s.x), y32 = 12345;
      find(isa, c.name).f32(&x32, &y32, 1);
      for (const double got : {y, static_cast<double>(y32)}) {
        if (std::isnan(s.y)) {
          EXPECT_TRUE(std::isnan(got)) << isa_name(isa) << " " << c.name << "(" << s.x << ") = " << got;
        } else if (s.y == 1e30) {
          EXPECT_EQ(static_cast<float>(got), 1e30f);
        } else {
          EXPECT_EQ(got, s.y) << isa_name(isa) << " " << c.name << "(" << s.x << ")";
          EXPECT_EQ(std::signbit(got), std::signbit(s.y)) << isa_name(isa) << " " << c.name << "(" << s.x << ")";
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, Math, testing::ValuesIn(kMath), [](const auto& p) { return std::string(p.param.name); });

template <class T, class Apply>
void expect_bits_of_both(const Apply& apply) {  // apply(function, x, y, n)
  constexpr int kCount = 999;
  std::vector<T> x(kCount), both(kCount), small(kCount), large(kCount);
  for (int i = 0; i < kCount; ++i) x[i] = std::ldexp(static_cast<T>(i % 2 == 0 ? -1 - i : 1 + i), i % 37 - 24);
  x[0] = -std::numeric_limits<T>::infinity(), x[1] = 0, x[2] = -T(0), x[3] = -1, x[4] = std::numeric_limits<T>::quiet_NaN();
  apply("expm1_or_exp", x.data(), both.data(), kCount);
  apply("expm1", x.data(), small.data(), kCount);
  apply("exp", x.data(), large.data(), kCount);
  for (int i = 0; i < kCount; ++i) {
    const T& want = x[i] > -1 ? small[i] : large[i];
    EXPECT_EQ(std::memcmp(&both[i], &want, sizeof want), 0) << x[i];
  }
}
TEST(Expm1OrExp, has_the_bits_of_both) {
  for (const Isa isa : usable()) {
    expect_bits_of_both<float>([&](const char* f, const float* x, float* y, int n) { find(isa, f).f32(x, y, n); });
    expect_bits_of_both<double>([&](const char* f, const double* x, double* y, int n) { find(isa, f).f64(x, y, n); });
  }
}

TEST(Several, have_the_bits_of_one) {
  std::vector<float> x(999), one(999), several(999);
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::ldexp(static_cast<float>(i) - 499.5f, static_cast<int>(i % 29) - 20);
  for (const Isa isa : usable()) {
    for (const std::string name : {"softplus", "sigmoid"}) {
      find(isa, name).f32(x.data(), one.data(), static_cast<int64_t>(x.size()));
      find(isa, name + " of several").f32(x.data(), several.data(), static_cast<int64_t>(x.size()));
      EXPECT_EQ(one, several) << isa_name(isa) << " " << name;
    }
  }
}

TEST(Exp2, is_zero_from_where_it_says) {
  for (const Isa isa : usable()) {
    for (float t = -125; t > -160; t -= 0.01f) {
      float y = -1, flushed = -1;
      find(isa, "exp2_nonpositive").f32(&t, &y, 1);
      EXPECT_EQ(y == 0, t < -126.5f) << t;
      const FlushSubnormals flush;
      find(isa, "exp2_nonpositive").f32(&t, &flushed, 1);
      EXPECT_EQ(flushed == 0, t < -126) << t;
    }
  }
}

// ---- vectors --------------------------------------------------------------------------------------------------------------

TEST(Vec, round_integer_abs_sqrt) {
  const std::vector<double> points = {0,     -0.0, 0.25, 0.5,  -0.5,   1.5,    2.5,     -2.5,      -3.5,  0.49999997, 1e6 + 0.5,
                                      -7.75, 123,  4e6,  -4e6, 0x1p22, 0x1p23, -0x1p24, 8388607.5, 1e-30, -1e-30};
  for (const Isa isa : usable()) {
    for (const double p : points) {
      float x32 = static_cast<float>(p), y32 = 0;
      double y = 0;
      find(isa, "round").f32(&x32, &y32, 1);
      find(isa, "round").f64(&p, &y, 1);
      EXPECT_EQ(y32, std::nearbyint(x32)) << isa_name(isa);
      EXPECT_EQ(y, std::nearbyint(p)) << isa_name(isa);
      EXPECT_EQ(std::signbit(y32), std::signbit(x32)) << isa_name(isa) << " " << x32;
      EXPECT_EQ(std::signbit(y), std::signbit(p)) << isa_name(isa) << " " << p;
      find(isa, "integer").f32(&x32, &y32, 1);
      find(isa, "integer").f64(&p, &y, 1);
      EXPECT_EQ(y32, std::nearbyint(x32)) << isa_name(isa);
      EXPECT_EQ(y, std::nearbyint(p)) << isa_name(isa);
      find(isa, "abs").f32(&x32, &y32, 1);
      find(isa, "abs").f64(&p, &y, 1);
      EXPECT_EQ(bits_of(y32), bits_of(std::fabs(x32)));
      EXPECT_EQ(y, std::fabs(p));
      const double root = std::fabs(p);
      x32 = static_cast<float>(root);
      find(isa, "sqrt").f32(&x32, &y32, 1);
      find(isa, "sqrt").f64(&root, &y, 1);
      EXPECT_EQ(y32, std::sqrt(x32));
      EXPECT_EQ(y, std::sqrt(root));
    }
    float x32 = std::numeric_limits<float>::quiet_NaN(), y32 = 0;
    find(isa, "round").f32(&x32, &y32, 1);
    EXPECT_TRUE(std::isnan(y32));
    x32 = -kInf32;
    find(isa, "round").f32(&x32, &y32, 1);
    EXPECT_EQ(y32, -kInf32);
  }
}

TEST(Vec, tails_touch_nothing_behind_the_end) {
  for (const Isa isa : usable()) {
    for (int n = 0; n <= 40; ++n) {
      // On the heap and of the exact length, so that the address sanitizer sees a read too far.
      std::vector<float> x(n), y(n + 1, 7.0f);
      std::vector<double> xd(n), yd(n + 1, 7.0);
      for (int i = 0; i < n; ++i) xd[i] = x[i] = static_cast<float>(-i - 1);
      find(isa, "abs").f32(x.data(), y.data(), n);
      find(isa, "abs").f64(xd.data(), yd.data(), n);
      for (int i = 0; i <= n; ++i) {
        EXPECT_EQ(y[i], i < n ? static_cast<float>(i + 1) : 7.0f) << isa_name(isa) << " " << n;
        EXPECT_EQ(yd[i], i < n ? i + 1 : 7.0) << isa_name(isa) << " " << n;
      }
    }
  }
}

// Folding halves: the order that sum() promises.
template <class T>
T folded_sum(std::vector<T> v) {
  for (size_t half = v.size() / 2; half > 0; half /= 2)
    for (size_t i = 0; i < half; ++i) v[i] += v[i + half];
  return v[0];
}

TEST(Vec, folds_over_the_lanes) {
  Random random{3};
  for (const Isa isa : usable()) {
    const int lanes = simd_table(isa).lanes_f32;
    for (int round = 0; round < 100; ++round) {
      std::vector<float> x(lanes);
      std::vector<double> xd(lanes / 2);
      for (float& v : x) v = static_cast<float>(random.uniform(-1, 1));
      for (double& v : xd) v = random.uniform(-1, 1);
      float sum, high, low;
      simd_table(isa).fold_f32(x.data(), &sum, &high, &low);
      EXPECT_EQ(sum, folded_sum(x));
      EXPECT_EQ(high, *std::max_element(x.begin(), x.end()));
      EXPECT_EQ(low, *std::min_element(x.begin(), x.end()));
      double sum64, high64, low64;
      simd_table(isa).fold_f64(xd.data(), &sum64, &high64, &low64);
      EXPECT_EQ(sum64, folded_sum(xd));
      EXPECT_EQ(high64, *std::max_element(xd.begin(), xd.end()));
      EXPECT_EQ(low64, *std::min_element(xd.begin(), xd.end()));
    }
  }
}

// ---- 16-bit conversions ---------------------------------------------------------------------------------------------------

template <class S>
const TileFunctions<float, S>& tile_of(Isa isa) {
  if constexpr (std::is_same_v<S, Bf16>) {
    return simd_table(isa).tile_bf16;
  } else if constexpr (std::is_same_v<S, F16>) {
    return simd_table(isa).tile_f16;
  } else {
    return simd_table(isa).tile_f32;
  }
}

template <class S>
class SimdHalf : public testing::Test {};
using HalfTypes = testing::Types<Bf16, F16>;
TYPED_TEST_SUITE(SimdHalf, HalfTypes);

TYPED_TEST(SimdHalf, every_pattern_to_float) {
  std::vector<TypeParam> x(65536);
  for (int i = 0; i < 65536; ++i) x[i].bits = static_cast<uint16_t>(i);
  for (const Isa isa : usable()) {
    for (const bool flush : {false, true}) {
      std::vector<float> y(65536);
      {
        // The copy multiplies by 1, which flushes what is subnormal as a float; those patterns are compared without flushing.
        alignas(FlushSubnormals) char scope[sizeof(FlushSubnormals)];
        FlushSubnormals* f = flush ? new (scope) FlushSubnormals : nullptr;
        tile_of<TypeParam>(isa).load(x.data(), 65536, 1, 65536, y.data(), 65536, 1.0f);
        if (f != nullptr) f->~FlushSubnormals();
      }
      for (int i = 0; i < 65536; ++i) {
        const float want = to_f32(x[i]);
        if (flush && std::fpclassify(want) == FP_SUBNORMAL) continue;
        const uint32_t quiet = std::isnan(want) ? 0x400000u : 0u;
        ASSERT_EQ(bits_of(y[i]), bits_of(want) | quiet) << isa_name(isa) << " pattern " << i << " flush " << flush;
      }
    }
  }
}

TYPED_TEST(SimdHalf, floats_round_to_nearest_even) {
  std::vector<float> x;
  const uint64_t step = full_tests() ? 97 : 4999;
  for (uint64_t b = 0; b < (1ull << 32); b += step) x.push_back(float_of(static_cast<uint32_t>(b)));
  for (uint32_t h = 0; h < 65536; ++h) {  // around every representable value and every midpoint, for both types
    for (const uint32_t low : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) x.push_back(float_of(h << 16 | low));
    const float value = to_f32(F16{static_cast<uint16_t>(h)}), next = to_f32(F16{static_cast<uint16_t>(h + 1)});
    const float middle = value + (next - value) / 2;
    for (const float v : {value, middle, std::nextafter(middle, value), std::nextafter(middle, next)}) x.push_back(v);
  }
  const int n = static_cast<int>(x.size());
  std::vector<TypeParam> y(n);
  for (const Isa isa : usable()) {
    tile_of<TypeParam>(isa).store(x.data(), n, 1, n, y.data(), n, nullptr);
    for (int i = 0; i < n; ++i) {
      ASSERT_EQ(y[i].bits, round_to<TypeParam>(x[i]).bits) << isa_name(isa) << " bits " << bits_of(x[i]) << " value " << x[i];
    }
  }
}

// ---- tiles ----------------------------------------------------------------------------------------------------------------

template <class T, class S>
void check_tiles(const TileFunctions<T, S>& tile, int lanes, const std::string& where) {
  Random random{11};
  const T canary = 77;
  for (const int rows : {1, 2, 3, 4, 7, 8, 15, 16, 17, 33, 64}) {
    for (const int cols : {1, 2, 3, 4, 5, 8, 16, 31, 64, 66}) {
      const std::string at = where + " " + std::to_string(rows) + "x" + std::to_string(cols);
      const int64_t stride = cols + 3, ld_rows = (rows + lanes - 1) / lanes * lanes + lanes, ld_cols = 96;
      // The last row ends the allocation: reading behind it is caught by the address sanitizer.
      std::vector<S> src((rows - 1) * stride + cols), out;
      for (S& s : src) s = round_to<S>(static_cast<double>(random.next() % 2001) / 64 - 15);
      std::vector<T> scale(ld_rows);
      for (T& s : scale) s = static_cast<T>(random.next() % 2 ? 2 : 0.5);

      std::vector<T> t(cols * ld_rows, canary);
      tile.load_transposed(src.data(), stride, rows, cols, t.data(), ld_rows, 2);
      for (int c = 0; c < cols; ++c) {
        for (int r = 0; r < ld_rows; ++r) {
          const T want = r < rows ? static_cast<T>(2 * to_f64(src[r * stride + c])) : r < ld_rows - lanes ? 0 : canary;
          ASSERT_EQ(t[c * ld_rows + r], want) << at << " element " << r << "," << c;
        }
      }
      out.assign(src.size(), round_to<S>(canary));
      tile.store_transposed(t.data(), ld_rows, rows, cols, out.data(), stride, scale.data());
      for (size_t i = 0; i < out.size(); ++i) {
        const int64_t r = static_cast<int64_t>(i) / stride, c = static_cast<int64_t>(i) % stride;
        const double want = c < cols ? 2 * to_f64(src[i]) * scale[r] : canary;
        ASSERT_EQ(to_f64(out[i]), want) << at << " element " << r << "," << c;
      }

      std::vector<T> u(rows * ld_cols, canary);
      tile.load(src.data(), stride, rows, cols, u.data(), ld_cols, 2);
      for (int r = 0; r < rows; ++r) {
        for (int c = 0; c < ld_cols; ++c) {
          const int padded = (cols + lanes - 1) / lanes * lanes;
          const T want = c < cols ? static_cast<T>(2 * to_f64(src[r * stride + c])) : c < padded ? 0 : canary;
          ASSERT_EQ(u[r * ld_cols + c], want) << at << " element " << r << "," << c;
        }
      }
      out.assign(src.size(), round_to<S>(canary));
      tile.store(u.data(), ld_cols, rows, cols, out.data(), stride, scale.data());
      for (size_t i = 0; i < out.size(); ++i) {
        const int64_t r = static_cast<int64_t>(i) / stride, c = static_cast<int64_t>(i) % stride;
        ASSERT_EQ(to_f64(out[i]), c < cols ? 2 * to_f64(src[i]) * scale[r] : canary) << at << " element " << r << "," << c;
      }
    }
  }
}

TEST(Tile, copies_and_transposes_of_every_type) {
  for (const Isa isa : usable()) {
    const SimdTable& t = simd_table(isa);
    check_tiles(t.tile_f32, t.lanes_f32, std::string(isa_name(isa)) + " f32");
    check_tiles(t.tile_bf16, t.lanes_f32, std::string(isa_name(isa)) + " bf16");
    check_tiles(t.tile_f16, t.lanes_f32, std::string(isa_name(isa)) + " f16");
    check_tiles(t.tile_f64, t.lanes_f32 / 2, std::string(isa_name(isa)) + " f64");
  }
}

// ---- the small matrix product ---------------------------------------------------------------------------------------------

void run(Isa isa, const GemmCall<float>& call) { simd_table(isa).gemm_f32(call); }
void run(Isa isa, const GemmCall<double>& call) { simd_table(isa).gemm_f64(call); }

struct Shape {
  int m, n, k;
};
const Shape kShapes[] = {{64, 64, 64}, {64, 128, 64}, {32, 64, 128}, {1, 1, 1},     {1, 64, 64},    {2, 130, 33}, {3, 17, 64},
                         {4, 33, 5},   {5, 96, 32},   {6, 48, 16},   {7, 15, 40},   {13, 80, 7},    {11, 7, 3},   {65, 65, 65},
                         {8, 16, 0},   {0, 16, 8},    {16, 0, 8},    {31, 200, 20}, {10, 112, 100}, {12, 3, 64}};

// The rule of gemm.h in scalars: one accumulator, k ascending, and a fused multiply-add where the instruction set has one.
template <class T>
T multiply_add(bool fused, T a, T b, T c) {
  if (fused) return std::fma(a, b, c);
  volatile T product = a * b;
  return product + c;
}

template <class T>
void check_gemm(Isa isa, const Shape& s, bool transposed, GemmEpilogue epilogue, GemmBounds bounds, bool exact) {
  const std::string at = std::string(isa_name(isa)) + (sizeof(T) == 4 ? " f32 " : " f64 ") + std::to_string(s.m) + "x" +
                         std::to_string(s.n) + "x" + std::to_string(s.k) + " transposed " + std::to_string(transposed) +
                         " epilogue " + std::to_string(static_cast<int>(epilogue)) + " bounds " +
                         std::to_string(static_cast<int>(bounds)) + " exact " + std::to_string(exact);
  const bool fused = simd_table(isa).fused;
  const int lanes = simd_table(isa).lanes_f32 * 4 / static_cast<int>(sizeof(T));
  const int64_t padded = exact ? s.n : (s.n + lanes - 1) / lanes * lanes;
  const int64_t ldb = padded + 2, ldc = padded + 1, lda = (transposed ? s.m : s.k) + 1;
  const int offset = bounds == GemmBounds::columns_from || bounds == GemmBounds::depth_from ? 0 : 1;
  Random random{static_cast<uint64_t>(s.m * 10007 + s.n * 101 + s.k)};
  auto value = [&] { return static_cast<T>(random.uniform(-1, 1)); };
  auto count = [](int64_t rows, int64_t ld, int64_t width) {
    return rows > 0 ? static_cast<size_t>((rows - 1) * ld + width) : 0;
  };
  std::vector<T> a(transposed ? count(s.k, lda, s.m) : count(s.m, lda, s.k)), b(count(s.k, ldb, padded)),
      c(count(s.m, ldc, padded)), alpha(std::max<int64_t>(s.m, padded) + lanes);
  const int64_t a_row = transposed ? 1 : lda, a_depth = transposed ? lda : 1;
  for (std::vector<T>* v : {&a, &b, &c, &alpha})
    for (T& x : *v) x = value();
  // Depth bounds promise zeros in A (or, along the lanes, in B).
  auto inside = [&](int i, int j, int k) {
    switch (bounds) {
      case GemmBounds::depth_to: return k < i + offset;
      case GemmBounds::depth_from: return k >= i + offset;
      case GemmBounds::depth_to_lane: return k < j + offset;
      default: return true;
    }
  };
  for (int k = 0; k < s.k; ++k) {
    for (int i = 0; i < s.m && bounds != GemmBounds::depth_to_lane; ++i)
      if (!inside(i, 0, k)) a[i * a_row + k * a_depth] = 0;
    for (int j = 0; j < s.n && bounds == GemmBounds::depth_to_lane; ++j)
      if (!inside(0, j, k)) b[k * ldb + j] = 0;
  }
  const std::vector<T> before = c;
  const T scale = static_cast<T>(0.375);
  run(isa, GemmCall<T>{s.m, s.n, s.k, a.data(), a_row, a_depth, b.data(), ldb, c.data(), ldc, epilogue, scale, alpha.data(),
                       bounds, offset, exact});
  for (int i = 0; i < s.m; ++i) {
    for (int64_t j = 0; j < ldc && i * ldc + j < static_cast<int64_t>(c.size()); ++j) {
      const T old = before[i * ldc + j], got = c[i * ldc + j];
      if (j >= s.n) {  // exact calls and what lies behind the padding: untouched
        if (exact || j >= padded) {
          ASSERT_EQ(got, old) << at << " wrote behind row " << i << " at " << j;
        }
        continue;
      }
      if (bounds == GemmBounds::columns_to && j >= i + offset) continue;
      if (bounds == GemmBounds::columns_from && j < i + offset) continue;
      T acc = 0;
      double plain = 0;
      for (int k = 0; k < s.k; ++k) {
        acc = multiply_add(fused, a[i * a_row + k * a_depth], b[k * ldb + j], acc);
        plain += static_cast<double>(a[i * a_row + k * a_depth]) * static_cast<double>(b[k * ldb + j]);
      }
      ASSERT_NEAR(acc, plain,
                  (s.k + 1) * static_cast<double>(std::numeric_limits<T>::epsilon()) * std::max(1.0, std::sqrt(s.k)))
          << at;
      T want = acc;
      switch (epilogue) {
        case GemmEpilogue::store: break;
        case GemmEpilogue::add: want = old + acc; break;
        case GemmEpilogue::scale: want = scale * acc; break;
        case GemmEpilogue::scale_add: want = multiply_add(fused, scale, old, acc); break;
        case GemmEpilogue::lane_scale_add: want = multiply_add(fused, alpha[j], old, acc); break;
        case GemmEpilogue::row_scale_add: want = multiply_add(fused, alpha[i], old, acc); break;
        case GemmEpilogue::row_scale: want = alpha[i] * acc; break;
      }
      ASSERT_EQ(got, want) << at << " element " << i << "," << j;  // to the last bit, whatever tile computed it
    }
  }
}

// Bit-equality with the scalar rule, so every tile shape, remainder, layout and bound gives the same bits.
TEST(Gemm, every_path_follows_the_accumulator_rule) {
  for (const Isa isa : usable()) {
    for (const Shape& s : kShapes) {
      for (const bool transposed : {false, true}) {
        for (int e = 0; e <= static_cast<int>(GemmEpilogue::row_scale); ++e) {
          const auto epilogue = static_cast<GemmEpilogue>(e);
          if (transposed && e > 1) continue;
          check_gemm<float>(isa, s, transposed, epilogue, GemmBounds::full, false);
          if (e <= 1) check_gemm<float>(isa, s, transposed, epilogue, GemmBounds::full, true);
          if (HasFatalFailure()) return;
        }
        for (int b = 1; b <= static_cast<int>(GemmBounds::depth_to_lane); ++b) {
          check_gemm<float>(isa, s, transposed, GemmEpilogue::store, static_cast<GemmBounds>(b), false);
          if (HasFatalFailure()) return;
        }
        check_gemm<double>(isa, s, transposed, GemmEpilogue::lane_scale_add, GemmBounds::full, false);
        check_gemm<double>(isa, s, transposed, GemmEpilogue::store, GemmBounds::depth_to, false);
        check_gemm<double>(isa, s, transposed, GemmEpilogue::add, GemmBounds::full, true);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// ---- bf16 products ---------------------------------------------------------------------------------------------------------

Bf16 low_of(uint32_t pair) { return {static_cast<uint16_t>(pair)}; }
Bf16 high_of(uint32_t pair) { return {static_cast<uint16_t>(pair >> 16)}; }

TEST(Pairs, products_and_packing) {
  if (simd_pairs() == nullptr) GTEST_SKIP() << "this machine has no AVX512_BF16";
  const PairFunctions& f = *simd_pairs();
  constexpr int kLanes = 16;
  for (const Shape& s : kShapes) {
    const std::string at = std::to_string(s.m) + "x" + std::to_string(s.n) + "x" + std::to_string(s.k);
    const int64_t pairs = (s.k + 1) / 2, even = 2 * pairs;
    const int64_t ldb = (s.n + kLanes - 1) / kLanes * kLanes, ldc = ldb, ldt = (s.m + kLanes - 1) / kLanes * kLanes;
    Random random{static_cast<uint64_t>(s.m * 10007 + s.n * 101 + s.k)};
    std::vector<float> a(s.m * s.k), at_rows(s.k * ldt), b(s.k * ldb);
    for (int i = 0; i < s.m; ++i)
      for (int k = 0; k < s.k; ++k) at_rows[k * ldt + i] = a[i * s.k + k] = static_cast<float>(random.uniform(-1, 1));
    for (float& x : b) x = static_cast<float>(random.uniform(-1, 1));

    // Packing: round, pair, transpose.
    std::vector<Bf16> b_rows(s.k * s.n), b_columns(s.n * s.k);
    for (int k = 0; k < s.k; ++k)
      for (int j = 0; j < s.n; ++j) b_columns[j * s.k + k] = b_rows[k * s.n + j] = round_to<Bf16>(b[k * ldb + j]);
    std::vector<uint32_t> from_floats(pairs * ldb), from_rows(pairs * ldb), from_columns(pairs * ldb), left(pairs * ldt),
        rows(s.m * pairs, ~0u);
    f.round(a.data(), s.k, s.m, s.k, rows.data(), pairs);
    const auto row_value = [&](int i, int k) {
      return k % 2 == 0 ? low_of(rows[i * pairs + k / 2]) : high_of(rows[i * pairs + k / 2]);
    };
    f.pack_f32(b.data(), ldb, s.k, s.n, from_floats.data(), ldb);
    f.pack_bf16(b_rows.data(), s.n, s.k, s.n, from_rows.data(), ldb);
    f.pack_transposed(b_columns.data(), s.k, s.n, s.k, from_columns.data(), ldb);
    f.pack_f32(at_rows.data(), ldt, s.k, s.m, left.data(), ldt);
    for (int i = 0; i < s.m; ++i) {
      for (int k = 0; k < even; ++k)
        ASSERT_EQ(row_value(i, k).bits, k < s.k ? round_to<Bf16>(a[i * s.k + k]).bits : 0) << at << " " << i << "," << k;
    }
    for (int kk = 0; kk < pairs; ++kk) {
      for (int j = 0; j < s.n; ++j) {
        const uint32_t pair = from_floats[kk * ldb + j];
        ASSERT_EQ(low_of(pair).bits, b_rows[2 * kk * s.n + j].bits) << at;
        ASSERT_EQ(high_of(pair).bits, 2 * kk + 1 < s.k ? b_rows[(2 * kk + 1) * s.n + j].bits : 0) << at;
        ASSERT_EQ(from_rows[kk * ldb + j], pair) << at;
        ASSERT_EQ(from_columns[kk * ldb + j], pair) << at;
      }
    }

    // Products: both layouts and every tile give the same bits, near the product of the rounded factors in double.
    std::vector<float> c(s.m * ldc), transposed(s.m * ldc), single(kLanes), added(s.m * ldc, 2.0f);
    f.gemm(s.m, s.n, s.k, rows.data(), pairs, false, from_rows.data(), ldb, c.data(), ldc, GemmEpilogue::store,
           GemmBounds::full);
    f.gemm(s.m, s.n, s.k, left.data(), ldt, true, from_rows.data(), ldb, transposed.data(), ldc, GemmEpilogue::store,
           GemmBounds::full);
    f.gemm(s.m, s.n, s.k, rows.data(), pairs, false, from_rows.data(), ldb, added.data(), ldc, GemmEpilogue::add,
           GemmBounds::full);
    for (int i = 0; i < s.m; ++i) {
      for (int j = 0; j < s.n; ++j) {
        if (j % kLanes == 0) {
          f.gemm(1, std::min(kLanes, s.n - j), s.k, rows.data() + i * pairs, pairs, false, from_rows.data() + j, ldb,
                 single.data(), kLanes, GemmEpilogue::store, GemmBounds::full);
        }
        double want = 0;
        for (int k = 0; k < s.k; ++k) want += to_f64(row_value(i, k)) * to_f64(b_rows[k * s.n + j]);
        ASSERT_NEAR(c[i * ldc + j], want, (s.k + 1) * 0x1p-23) << at << " " << i << "," << j;
        ASSERT_EQ(c[i * ldc + j], transposed[i * ldc + j]) << at << " " << i << "," << j;
        ASSERT_EQ(c[i * ldc + j], single[j % kLanes]) << at << " " << i << "," << j;
        ASSERT_EQ(added[i * ldc + j], 2.0f + c[i * ldc + j]) << at << " " << i << "," << j;
      }
    }

    // A triangular left operand with and without its bound.
    for (int i = 0; i < s.m; ++i)
      for (int k = i + 1; k < even; ++k) rows[i * pairs + k / 2] &= k % 2 == 0 ? 0xffff0000u : 0x0000ffffu;
    f.gemm(s.m, s.n, s.k, rows.data(), pairs, false, from_rows.data(), ldb, c.data(), ldc, GemmEpilogue::store,
           GemmBounds::full);
    f.gemm(s.m, s.n, s.k, rows.data(), pairs, false, from_rows.data(), ldb, transposed.data(), ldc, GemmEpilogue::store,
           GemmBounds::depth_to);
    for (int i = 0; i < s.m; ++i)
      for (int j = 0; j < s.n; ++j) ASSERT_EQ(c[i * ldc + j], transposed[i * ldc + j]) << at << " " << i << "," << j;
  }
}

// ---- the rest -------------------------------------------------------------------------------------------------------------

#if defined(__SSE2__)
TEST(FlushSubnormals, lives_as_long_as_its_scope) {
  volatile float small = 1e-30f, tiny = 1e-42f;
  {
    const FlushSubnormals flush;
    volatile float product = small * 1e-10f, sum = tiny + tiny;
    EXPECT_EQ(bits_of(product), 0u);
    EXPECT_EQ(bits_of(sum), 0u);
  }
  volatile float product = small * 1e-10f, sum = tiny + tiny;
  EXPECT_NE(bits_of(product), 0u);
  EXPECT_NE(bits_of(sum), 0u);
}
#endif

}  // namespace
}  // namespace linnet
