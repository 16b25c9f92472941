// gated: agreement with the reference in every implementation and dtype, the relations and edge cases of its page, refusals.
#include "gated.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "check/agreement.h"
#include "check/named.h"

namespace linnet {
namespace {

using check::constant;
using check::invoke;
using check::Options;
using check::random_tensor;
using check::rms_error;
using check::Tensor;
using check::Tensors;
using check::with;

constexpr double kInf = std::numeric_limits<double>::infinity();

const char* const kLines[] = {
    "gated B=1 Tq=1 Tk=1 H=1 Hkv=1 K=8 V=8 causal=1 pass=bwd",
    "gated B=2 Tq=63 Tk=63 H=4 Hkv=2 K=16 V=24 causal=1 pass=bwd",
    "gated B=1 Tq=129 Tk=129 H=2 Hkv=2 K=20 V=17 causal=1 act=silu pass=bwd threads=3",
    "gated B=2 Tq=37 Tk=50 H=4 Hkv=4 K=16 V=16 mode=add act=identity pass=bwd strided=1",
    "gated B=2 Tq=70 Tk=70 H=4 Hkv=2 K=16 V=16 causal=1 act=ns_sigmoid shared=1 pass=bwd",
    "gated B=1 Tq=70 Tk=70 H=6 Hkv=3 K=16 V=40 causal=1 granularity=headwise other=g pass=bwd",
    "gated B=1 Tq=70 Tk=70 H=4 Hkv=1 K=16 V=8 granularity=headwise shared=1 other=g mode=add act=silu pass=bwd",
    "gated B=2 Tq=40 Tk=70 H=4 Hkv=2 K=16 V=24 position=G2 with=key_len values=garbage pass=bwd",
    "gated B=2 Tq=40 Tk=70 H=4 Hkv=2 K=16 V=24 position=G3 shared=1 pass=bwd",
    "gated B=2 Tq=40 Tk=40 H=4 Hkv=2 K=16 V=24 position=G4 act=silu causal=1 pass=bwd",
    "gated B=1 Tq=90 Tk=90 H=2 Hkv=2 K=16 V=16 N=4 with=cu_seqlens_q,cu_seqlens_k,sinks causal=1 pass=bwd",
    "gated B=1 Tq=90 Tk=90 H=2 Hkv=2 K=16 V=16 with=bias,sinks window=16,3 softcap=5 pass=bwd values=masked",
    "gated B=2 Tq=0 Tk=0 H=2 Hkv=2 K=8 V=8 pass=bwd",
    "gated_decode B=2 T=1 H=8 Hkv=2 K=32 V=40 capacity=70",
    "gated_decode B=2 T=3 H=4 Hkv=4 K=16 V=16 capacity=600 shared=1 act=silu",
    "gated_decode B=1 T=2 H=4 Hkv=2 K=16 V=16 capacity=20 granularity=headwise other=g mode=add",
    "gated_gate B=2 T=33 H=3 V=20 pass=bwd strided=1",
    "gated_gate B=2 T=33 H=3 V=20 act=silu shared=1 pass=bwd",
    "gated_gate B=1 T=17 H=4 V=5 granularity=headwise other=g mode=add act=ns_sigmoid pass=bwd",
};

TEST(Gated, AgreesWithTheReference) { check::expect_agreement({std::begin(kLines), std::end(kLines)}); }

Tensors call(int64_t H = 3, int64_t V = 12) {
  return {{"q", random_tensor({2, 40, H, 16}, 1)},
          {"k", random_tensor({2, 40, H, 16}, 2)},
          {"v", random_tensor({2, 40, H, V}, 3)},
          {"g", random_tensor({2, 40, H, V}, 4)},
          {"dout", random_tensor({2, 40, H, V}, 5)}};
}
Tensors run(const char* op, Tensors tensors, Options options) {
  options.emplace_back("causal", "1");
  EXPECT_EQ(invoke(op, options, &tensors), "");
  return tensors;
}
Tensor scaled(const Tensor& x, double factor) {
  Tensor y = x;
  for (int64_t i = 0; i < y.count(); ++i) y.set(i, factor * x.get(i));
  return y;
}

TEST(Gated, OpenAndHalfOpenGatesAreSoftmax) {
  const Tensors plain = run("softmax", call(), {});
  const Tensors open = run("gated", with(call(), "g", constant({2, 40, 3, 12}, kInf)), {});
  EXPECT_LT(rms_error(open.at("out"), plain.at("out")), 1e-15);
  EXPECT_LT(rms_error(open.at("dq"), plain.at("dq")), 1e-13);
  EXPECT_EQ(rms_error(open.at("dg"), constant({2, 40, 3, 12}, 0)), 0);
  const Tensors half = run("gated", with(call(), "g", constant({2, 40, 3, 12}, 0)), {});
  EXPECT_LT(rms_error(half.at("out"), scaled(plain.at("out"), 0.5)), 1e-15);
  EXPECT_EQ(half.at("y"), open.at("y"));
  EXPECT_EQ(half.at("lse"), plain.at("lse"));
  const Tensors added = run("gated", with(call(), "g", constant({2, 40, 3, 12}, 0)), {{"mode", "add"}, {"act", "identity"}});
  EXPECT_LT(rms_error(added.at("out"), plain.at("out")), 1e-15);
}

TEST(Gated, ClosedGatesAreZero) {
  for (const char* act : {"sigmoid", "silu"}) {
    const Tensors closed = run("gated", with(call(), "g", constant({2, 40, 3, 12}, -kInf)), {{"act", act}});
    for (const char* name : {"out", "dq", "dk", "dv", "dg"}) {
      EXPECT_EQ(rms_error(closed.at(name), scaled(closed.at(name), 0)), 0) << act << " " << name;
    }
  }
}

TEST(Gated, AGateOfNaNSpoilsItsOwnElement) {
  Tensors tensors = call();
  tensors["g"].set(tensors["g"].at(1, 7, 2, 5), std::numeric_limits<double>::quiet_NaN());
  tensors.erase("dout");
  const Tensors result = run("gated", tensors, {});
  int64_t spoiled = 0;
  for (int64_t i = 0; i < result.at("out").count(); ++i) spoiled += std::isnan(result.at("out").get(i));
  EXPECT_EQ(spoiled, 1);
}

TEST(Gated, HeadwiseIsElementwiseWithEqualLogits) {
  Tensors tensors = call();
  const Tensor heads = random_tensor({2, 40, 3}, 9);
  for (int64_t i = 0; i < tensors["g"].count(); ++i) tensors["g"].set(i, heads.get(i / 12));
  const Tensors one = run("gated", tensors, {}), other = run("gated", with(tensors, "g", heads), {{"granularity", "headwise"}});
  for (const char* name : {"out", "dq", "dk", "dv"}) EXPECT_LT(rms_error(other.at(name), one.at(name)), 1e-14) << name;
  for (int64_t i = 0; i < heads.count(); ++i) {
    double sum = 0;
    for (int64_t c = 0; c < 12; ++c) sum += one.at("dg").get(i * 12 + c);
    EXPECT_NEAR(other.at("dg").get(i), sum, 1e-13);
  }
}

TEST(Gated, SharedByOneHeadIsItsOwn) {
  const Tensors own = run("gated", call(1), {}), shared = run("gated", call(1), {{"shared", "1"}});
  for (const char* name : {"out", "dq", "dk", "dv", "dg"}) EXPECT_LT(rms_error(shared.at(name), own.at(name)), 1e-13) << name;
}

TEST(Gated, AConstantGateOfValuesIsOneOfTheRead) {
  Tensors tensors = call();
  for (int64_t i = 0; i < tensors["g"].count(); ++i)
    tensors["g"].set(i, std::sin(static_cast<double>(i % 36)));  // per head, channel
  const Tensors read = run("gated", tensors, {}), values = run("gated", tensors, {{"position", "G2"}});
  for (const char* name : {"out", "dq", "dk", "dv"}) EXPECT_LT(rms_error(values.at(name), read.at(name)), 1e-13) << name;
}

TEST(Gated, NonSparseSigmoidIsHalfOpen) {
  const Tensors plain = run("softmax", call(), {}), gate = run("gated", call(), {}),
                ns = run("gated", call(), {{"act", "ns_sigmoid"}});
  for (int64_t i = 0; i < ns.at("out").count(); ++i) {
    EXPECT_NEAR(ns.at("out").get(i), (plain.at("out").get(i) + gate.at("out").get(i)) / 2, 1e-15);
  }
}

TEST(Gated, TheGateAloneAfterAnyReadIsTheFusedOne) {
  const Tensors fused = run("gated", call(), {});
  Tensors alone = {{"y", fused.at("y")}, {"g", fused.at("g")}, {"dout", fused.at("dout")}};
  ASSERT_EQ(invoke("gated_gate", {}, &alone), "");
  EXPECT_LT(rms_error(alone["out"], fused.at("out")), 1e-15);
  EXPECT_LT(rms_error(alone["dg"], fused.at("dg")), 1e-13);
}

TEST(Gated, DecodingIsTheLastRow) {
  const Tensors whole = run("gated", call(), {});
  Tensors step = {{"k_cache", Tensor(Dtype::f64, {2, 64, 3, 16})},
                  {"v_cache", Tensor(Dtype::f64, {2, 64, 3, 12})},
                  {"lengths", check::whole_numbers({0, 0})}};
  for (int64_t t = 0; t < 40; ++t) {
    for (const char* name : {"q", "k", "v", "g"}) step[name] = check::tokens(whole.at(name), t, t + 1);
    ASSERT_EQ(invoke("gated_decode", {}, &step), "");
    EXPECT_LT(rms_error(step["out"], check::tokens(whole.at("out"), t, t + 1)), 1e-13) << t;
  }
}

TEST(Gated, RefusesBadInput) {
  const auto refusal = [](const char* op, Tensors tensors, const Options& options) { return invoke(op, options, &tensors); };
  EXPECT_NE(refusal("gated", with(call(), "g", constant({2, 40, 3}, 0)), {}).find("g has rank 3, expected 4"),
            std::string::npos);
  EXPECT_NE(refusal("gated", with(call(), "g", constant({2, 40, 3, 11}, 0)), {}).find("g has 11"), std::string::npos);
  EXPECT_NE(refusal("gated", call(), {{"position", "G5"}}).find("use gated_gate"), std::string::npos);
  EXPECT_NE(refusal("gated", call(), {{"position", "G6"}}).find("expected one of G1, G2, G3, G4, G5"), std::string::npos);
  EXPECT_NE(refusal("gated", call(), {{"act", "tanh"}}).find("expected one of sigmoid, ns_sigmoid, silu, identity"),
            std::string::npos);
}

}  // namespace
}  // namespace linnet
