// dense and dense_quantised: agreement with the reference, what rounding x means, conversion from blocks and from floats.
#include "check/agreement.h"
#include "check/named.h"
#include "dense_pack.h"

namespace linnet {
namespace {

TEST(Dense, AgreesWithTheReference) {
  check::expect_agreement({
      "dense B=1 T=1 I=1 O=1",
      "dense B=3 T=1 I=33 O=70 with=bias threads=3",
      "dense B=2 T=4 I=100 O=9 strided=1",
      "dense B=1 T=5 I=300 O=65 with=bias strided=1 threads=2",
      "dense B=2 T=67 I=64 O=130",
      "dense B=1 T=500 I=576 O=192",
      "dense B=1 T=7 I=1536 O=40 rounding=bf16 with=bias",
      "dense B=2 T=1 I=96 O=33 rounding=bf16",
      "dense B=1 T=0 I=5 O=7",
      "dense B=1 T=3 I=2000 O=17",
  });
}

TEST(DenseHeads, AgreesWithTheReference) {
  check::expect_agreement({
      "dense_heads B=1 T=1 H=1 K=1 F=1",
      "dense_heads B=3 T=1 H=4 K=33 F=70 with=bias threads=3",
      "dense_heads B=2 T=67 H=3 K=64 F=32 strided=1",
      "dense_heads B=1 T=40 H=2 K=5 F=130 with=bias threads=2",
      "dense_heads B=1 T=0 H=2 K=5 F=7",
  });
}

TEST(DenseQuantised, AgreesWithTheReference) {
  std::vector<std::string> lines;
  for (const std::string bits : {"8", "4"}) {
    for (const std::string rounding : {"none", "int8", "int16"}) {
      for (const std::string given : {"", " with=offset,bias"}) {
        const std::string options = " bits=" + bits + " rounding=" + rounding + given;
        lines.push_back("dense_quantised B=1 T=1 I=32 panels=1" + options);
        lines.push_back("dense_quantised B=2 T=1 I=576 panels=5 outputs=70" + options + " threads=3");
        lines.push_back("dense_quantised B=1 T=7 I=320 panels=3 strided=1" + options);
        lines.push_back("dense_quantised B=2 T=33 I=64 panels=9 outputs=129" + options);
      }
    }
  }
  check::expect_agreement(lines);
}

// A call that names wrong sizes gets a sentence.
TEST(DenseQuantised, Refusals) {
  const auto bytes = [](std::vector<int64_t> size) { return check::Tensor(Dtype::u8, std::move(size)); };
  const auto f32 = [](std::vector<int64_t> size) { return check::Tensor(Dtype::f32, std::move(size)); };
  const check::Tensors x = {{"x", f32({1, 2, 64})}, {"codes", bytes({2, 2, 512})}, {"scale", f32({2, 2, 16})}};
  EXPECT_EQ(check::refusal("dense_quantised", x), "");
  EXPECT_EQ(check::refusal("dense_quantised", x, {{"outputs", "16"}}),
            "dense_quantised: outputs is 16, expected 17 to 32 (codes has 2 panels of 16)");
  EXPECT_EQ(check::refusal("dense_quantised", check::with(x, "x", f32({1, 2, 65}))),
            "dense_quantised: x has 65 channels, expected a multiple of 32");
  EXPECT_NE(check::refusal("dense_quantised", x, {{"bits", "4"}}), "");
  EXPECT_EQ(check::refusal("dense", {{"x", f32({1, 2, 64})}, {"weight", f32({3, 32})}}),
            "dense: weight has 32 channels in dimension 1 of [O, I], expected 64 (same as x)");
}

struct Packed {
  check::Tensor codes, scale, offset;
};
Packed quantised(const check::Tensor& weight, QuantisedBits bits, bool offset, Dtype dtype) {
  const int64_t panels = dense_panels(weight.sizes[0]), groups = weight.sizes[1] / kGroup;
  Packed p{
      check::Tensor(Dtype::u8, {panels, groups, dense_block_bytes(bits)}), check::Tensor(dtype, {panels, groups, kPanel}), {}};
  if (offset) p.offset = check::Tensor(dtype, {panels, groups, kPanel});
  const Status status = dense_quantise(weight.view(), bits, p.codes.view(), p.scale.view(), offset ? p.offset.view() : View());
  EXPECT_TRUE(status.ok()) << status.message();
  return p;
}

// Rounding to codes loses at most half a step of each group (one for the end of Q4_0's range that -8 leaves out), and the
// rounding of a 16-bit scale.
TEST(DensePack, QuantisesWithinHalfAStep) {
  const check::Tensor weight = check::random_tensor({37, 96}, 3);
  struct Case {
    QuantisedBits bits;
    bool offset;
    Dtype dtype;
    double steps;
  };
  for (const Case& c :
       {Case{QuantisedBits::eight, false, Dtype::f32, 0.501}, Case{QuantisedBits::four, false, Dtype::f32, 1.001},
        Case{QuantisedBits::four, true, Dtype::f32, 0.501}, Case{QuantisedBits::eight, false, Dtype::f16, 0.57},
        Case{QuantisedBits::four, true, Dtype::f16, 0.57}}) {
    const Packed p = quantised(weight, c.bits, c.offset, c.dtype);
    const View offset = c.offset ? p.offset.view() : View();
    for (int64_t o = 0; o < 37; ++o) {
      for (int64_t i = 0; i < 96; ++i) {
        const double got = dense_weight(c.bits, p.codes.view(), p.scale.view(), offset, o, i), want = weight.get(o * 96 + i);
        const double step = std::fabs(p.scale.get((o / 16 * 3 + i / 32) * 16 + o % 16));
        ASSERT_LE(std::fabs(got - want), c.steps * step) << o << " " << i;
      }
    }
  }
}

// Blocks as GGUF stores them, Q8_0, Q4_0 and Q4_1, give exactly d q, d (q - 8) and d q + m.
TEST(DensePack, BlocksConvertExactly) {
  constexpr int64_t O = 19, G = 3;
  check::Random random(5, "blocks");
  for (const bool eight : {true, false}) {
    for (const bool with_offset : {false, true}) {
      if (eight && with_offset) continue;
      const QuantisedBits bits = eight ? QuantisedBits::eight : QuantisedBits::four;
      const int64_t data = eight ? 32 : 16, head = with_offset ? 4 : 2, block = head + data;
      std::vector<uint8_t> blocks(static_cast<size_t>(O * G * block));
      for (uint8_t& byte : blocks) byte = static_cast<uint8_t>(random.below(256));
      for (int64_t b = 0; b < O * G; ++b) {  // finite f16 heads
        for (int64_t i = 1; i < head; i += 2) blocks[static_cast<size_t>(b * block + i)] &= 0xbb;
      }
      const int64_t panels = dense_panels(O);
      check::Tensor codes(Dtype::u8, {panels, G, dense_block_bytes(bits)}), scale(Dtype::f16, {panels, G, 16}), offset = scale;
      dense_pack_codes(bits, blocks.data() + head, G * block, block, O, G, static_cast<uint8_t*>(codes.view().data));
      dense_pack_scales(Dtype::f16, blocks.data(), G * block, block, O, G, scale.view().data);
      if (with_offset) dense_pack_scales(Dtype::f16, blocks.data() + 2, G * block, block, O, G, offset.view().data);
      const auto half = [&](const uint8_t* p) { return to_f64(F16{static_cast<uint16_t>(p[0] | p[1] << 8)}); };
      for (int64_t o = 0; o < O; ++o) {
        for (int64_t i = 0; i < 32 * G; ++i) {
          const uint8_t* b = blocks.data() + (o * G + i / 32) * block;
          const int64_t k = i % 32;
          const int q = eight ? static_cast<int8_t>(b[head + k]) : b[head + k % 16] >> (k / 16 * 4) & 15;
          const double want = half(b) * (eight || with_offset ? q : q - 8) + (with_offset ? half(b + 2) : 0);
          const View m = with_offset ? offset.view() : View();
          ASSERT_EQ(dense_weight(bits, codes.view(), scale.view(), m, o, i), want) << o << " " << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace linnet
