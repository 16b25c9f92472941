// The functions of this folder on a GPU, against plain loops; skipped where there is none.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "check/random.h"
#include "core/cuda/device.h"
#include "core/cuda/driver.h"
#include "core/half.h"

LINNET_USES_IMAGES(ptx)

namespace linnet::cuda {
namespace {

class Ptx : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = missing_on_hopper(); !reason.empty()) GTEST_SKIP() << reason;
    launch_.error = &error_;
  }
  // Small whole numbers: exact in f16 and in every order of summation.
  static std::vector<float> numbers(size_t count, uint64_t seed) {
    check::Random random(seed);
    std::vector<float> x(count);
    for (float& each : x) each = static_cast<float>(random.between(-8, 8));
    return x;
  }
  template <class T>
  T* upload(const std::vector<T>& x) {
    void* memory = nullptr;
    EXPECT_TRUE(allocate(static_cast<int64_t>(x.size() * sizeof(T)), &memory).ok());
    EXPECT_TRUE(copy_to_device(memory, x.data(), static_cast<int64_t>(x.size() * sizeof(T))).ok());
    kept_.push_back(memory);
    return static_cast<T*>(memory);
  }
  std::vector<float> product(const char* kernel, const std::vector<float>& a, const std::vector<float>& b, size_t count) {
    float* out = upload(std::vector<float>(count, -1e30f));
    const float *pa = upload(a), *pb = upload(b);
    enqueue(launch_, {"ptx/ptx_test_cuda", kernel, 128, 40 * 1024}, {1}, pa, pb, out);
    return download(out, count);
  }
  std::vector<float> download(const float* from, size_t count) {
    EXPECT_EQ(error_, nullptr) << error_;
    EXPECT_TRUE(synchronize().ok());
    std::vector<float> x(count);
    EXPECT_TRUE(copy_to_host(x.data(), from, static_cast<int64_t>(count * sizeof(float))).ok());
    return x;
  }
  void TearDown() override {
    for (void* memory : kept_) release(memory);
  }

  const char* error_ = nullptr;
  Launch launch_;
  std::vector<void*> kept_;
};

TEST_F(Ptx, ProductOfSharedTiles) {
  const auto a = numbers(64 * 128, 1), b = numbers(64 * 128, 2), got = product("product_shared", a, b, 64 * 64);
  for (size_t i = 0; i < 64; ++i) {
    for (size_t j = 0; j < 64; ++j) {
      float want = 0;
      for (size_t k = 0; k < 128; ++k) want += a[i * 128 + k] * b[j * 128 + k];
      ASSERT_EQ(got[i * 64 + j], want) << i << " " << j;
    }
  }
}

TEST_F(Ptx, ProductOfATransposedTile) {
  const auto a = numbers(64 * 64, 3), b = numbers(64 * 64, 4), got = product("product_transposed_a", a, b, 64 * 64);
  for (size_t i = 0; i < 64; ++i) {
    for (size_t j = 0; j < 64; ++j) {
      float want = 0;
      for (size_t k = 0; k < 64; ++k) want += a[k * 64 + i] * b[j * 64 + k];
      ASSERT_EQ(got[i * 64 + j], want) << i << " " << j;
    }
  }
}

TEST_F(Ptx, ProductFromRegisters) {
  const auto a = numbers(64 * 64, 5), b = numbers(64 * 128, 6), got = product("product_registers", a, b, 64 * 128);
  for (size_t i = 0; i < 64; ++i) {
    for (size_t j = 0; j < 128; ++j) {
      float want = 0;
      for (size_t k = 0; k < 64; ++k) want += a[k * 64 + i] * b[k * 128 + j];
      ASSERT_EQ(got[i * 128 + j], want) << i << " " << j;
    }
  }
}

TEST_F(Ptx, ProductOfPieces) {
  const auto a = numbers(64 * 16, 13), b = numbers(64 * 8, 14), got = product("product_pieces", a, b, 64 * 64);
  for (size_t i = 0; i < 64; ++i) {
    for (size_t j = 0; j < 64; ++j) {
      float want = 0;
      for (size_t k = 0; k < 16; ++k) want += a[i * 16 + k] * b[j * 8 + k % 8];
      ASSERT_EQ(got[i * 64 + j], want) << i << " " << j;
    }
  }
}

TEST_F(Ptx, TransposedStores) {
  const auto x = numbers(64 * 64, 7), got = product("store_transposed", x, x, 64 * 64);
  for (size_t i = 0; i < 64; ++i) {
    for (size_t j = 0; j < 64; ++j) ASSERT_EQ(got[i * 64 + j], x[j * 64 + i]) << i << " " << j;
  }
}

TEST_F(Ptx, Stores) {
  const auto x = numbers(64 * 64, 9), got = product("store_plain", x, x, 64 * 64);
  for (size_t i = 0; i < 64 * 64; ++i) ASSERT_EQ(got[i], x[i]) << i;
}

TEST_F(Ptx, CopiesOfBytes) {
  const auto x = numbers(64 * 64, 10), got = product("copy_bytes", x, x, 64 * 64);
  for (size_t i = 0; i < 64 * 64; ++i) ASSERT_EQ(got[i], 2 * x[i]) << i;
}

// [B, T, H, 128] with odd sizes and a token stride larger than its row; boxes inside, over the end and behind it.
TEST_F(Ptx, Boxes) {
  constexpr int kB = 2, kT = 101, kH = 3, kStride = kH * 128 + 8;
  const auto x = numbers(static_cast<size_t>(kB * kT * kStride), 8);
  std::vector<uint16_t> halves(x.size());
  for (size_t i = 0; i < x.size(); ++i) store_f64(halves.data(), Dtype::f16, static_cast<int64_t>(i), x[i]);
  const uint16_t* data = upload(halves);
  TensorMap map;
  const uint64_t size[5] = {64, kT, 2, kH, kB}, stride[4] = {2 * kStride, 128, 256, uint64_t{2} * kT * kStride};
  const uint32_t box[5] = {64, 64, 2, 1, 1};
  ASSERT_TRUE(encode_tensor_map(&map, Dtype::f16, data, 5, size, stride, box));
  for (const int t : {0, 37, 64, 128}) {
    float* out = upload(std::vector<float>(64 * 128, -1e30f));
    const int h = 2, b = 1;
    enqueue(launch_, {"ptx/ptx_test_cuda", "copy_box", 128, 20 * 1024}, {1}, map, out, t, h, b);
    const auto got = download(out, 64 * 128);
    for (int i = 0; i < 64; ++i) {
      for (int c = 0; c < 128; ++c) {
        const float want = t + i < kT ? x[static_cast<size_t>((b * kT + t + i) * kStride + h * 128 + c)] : 0;
        ASSERT_EQ(got[static_cast<size_t>(i * 128 + c)], want) << t << " " << i << " " << c;
      }
    }
  }
}

TEST_F(Ptx, ExchangeInAClusterOf16) {
  const Kernel kernel = {"ptx/ptx_test_cuda", "exchange", 32, 0, 16};
  if (clusters_at_a_time(kernel) == 0) {  // some Hopper GPUs have fewer multiprocessors in a group; an H200 has enough
    ASSERT_EQ(device_name().find("H200"), std::string::npos);
    GTEST_SKIP() << "this GPU has no room for a cluster of 16";
  }
  float* out = upload(std::vector<float>(16 * 129, -1));
  enqueue(launch_, kernel, {16}, out);
  const auto got = download(out, 16 * 129);
  for (size_t rank = 0; rank < 16; ++rank) {
    const auto sender = static_cast<float>((rank + 15) % 16);
    for (size_t lane = 0; lane < 32; ++lane) {
      const float want[4] = {sender, static_cast<float>(lane), 2, 3};
      for (size_t i = 0; i < 4; ++i) EXPECT_EQ(got[rank * 129 + lane * 4 + i], want[i]) << rank << " " << lane << " " << i;
    }
    EXPECT_EQ(got[rank * 129 + 128], 1);  // elected
  }
}

TEST_F(Ptx, RowsOfEveryType) {
  for (const char* kernel : {"add_one_f32", "add_one_bf16", "add_one_f16"}) {
    const std::string type = std::string(kernel).substr(8);
    const size_t width = type == "f32" ? 4 : 8, count = 256 * width;
    const auto x = numbers(count, 9);
    const Dtype dtype = type == "f32" ? Dtype::f32 : type == "bf16" ? Dtype::bf16 : Dtype::f16;
    const auto bits = [&](float value) {
      uint32_t word = 0;
      store_f64(&word, dtype, 0, value);
      return word;
    };
    std::vector<uint32_t> words(1024), want(1024);
    for (size_t i = 0; i < count; ++i) {
      const size_t word = type == "f32" ? i : i / 2, shift = type == "f32" ? 0 : i % 2 * 16;
      words[word] |= bits(x[i]) << shift;
      want[word] |= bits(x[i] + 1) << shift;
    }
    const uint32_t* from = upload(words);
    uint32_t* to = upload(std::vector<uint32_t>(1024));
    float* sums = upload(std::vector<float>(768, -1e30f));
    enqueue(launch_, {"ptx/ptx_test_cuda", kernel, 256}, {1}, from, to, sums);
    const auto got = download(sums, 768);
    std::vector<uint32_t> back(1024);
    ASSERT_TRUE(copy_to_host(back.data(), to, 4096).ok());
    EXPECT_EQ(back, want) << type;
    for (size_t i = 0; i < 256; ++i) {
      const auto sum = [&](size_t threads) {
        float total = 0;
        for (size_t j = i / threads * threads * width; j < (i / threads + 1) * threads * width; ++j) total += x[j];
        return total;
      };
      ASSERT_EQ(got[i], sum(16)) << type << " " << i;
      ASSERT_EQ(got[256 + i], sum(32)) << type << " " << i;
      ASSERT_EQ(got[512 + i], sum(256)) << type << " " << i;
    }
  }
}

TEST_F(Ptx, Logarithm) {
  std::vector<float> x(256);
  for (size_t i = 0; i < 256; ++i) x[i] = std::exp2((static_cast<float>(i) - 128) * 0.1f);
  const float* from = upload(x);
  float* to = upload(std::vector<float>(256, -1e30f));
  enqueue(launch_, {"ptx/ptx_test_cuda", "logarithm", 256}, {1}, from, to);
  const auto got = download(to, 256);
  for (size_t i = 0; i < 256; ++i) {
    const double want = std::log2(static_cast<double>(x[i]));
    EXPECT_NEAR(got[i], want, 0x1p-22 * std::fmax(1, std::fabs(want))) << x[i];
  }
}

TEST_F(Ptx, Logistic) {
  std::vector<float> x(256);
  for (size_t i = 0; i < 256; ++i) x[i] = (static_cast<float>(i) - 128) * 0.8f;
  const float* from = upload(x);
  float* to = upload(std::vector<float>(512, -1));
  enqueue(launch_, {"ptx/ptx_test_cuda", "logistic_both", 256}, {1}, from, to);
  const auto got = download(to, 512);
  for (size_t i = 0; i < 256; ++i) {
    const double want = 1 / (1 + std::exp(-static_cast<double>(x[i])));
    EXPECT_NEAR(got[i], want, 2e-7 * want + 1e-37) << x[i];
    EXPECT_NEAR(got[256 + i], want, 2e-5 * want + 1e-30) << x[i];
  }
}

}  // namespace
}  // namespace linnet::cuda
