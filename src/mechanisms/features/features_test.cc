// features: agreement of every map with the reference, the relations of the page, decode, refusals.
#include "features.h"

#include <gtest/gtest.h>

#include <cmath>

#include "check/agreement.h"
#include "check/named.h"

namespace linnet {
namespace {

using check::constant;
using check::Options;
using check::out_of;
using check::random_tensor;
using check::refusal;
using check::rms_error;
using check::Tensor;
using check::Tensors;
using check::tokens;
using check::with;

TEST(Features, AgreesWithTheReference) {
  std::vector<std::string> lines = {
      "features B=2 T=0 S=0 H=2 K=4 V=4 pass=bwd",
      "features B=1 T=1 S=1 H=1 K=4 V=3 map=elu1 causal=1 pass=bwd",
      "features B=1 T=600 S=600 H=1 K=8 V=8 map=exp causal=1 threads=4 pass=bwd",
      "features B=2 T=70 S=70 H=2 K=8 V=5 map=exp causal=1 key_top=running with=key_mask values=mixed,garbage pass=bwd",
      "features B=1 T=70 S=70 H=2 K=8 V=5 M=6 map=favor_hyp causal=1 key_top=running with=proj values=mixed pass=bwd",
      "features B=1 T=20 S=30 H=2 K=8 V=5 M=6 map=favor key_top=given with=proj,key_tops pass=bwd",
      "features_decode B=2 T=3 H=2 K=8 V=12 map=elu1",
      "features_decode B=1 T=2 H=2 K=8 V=4 map=focused with=scale",
      "features_decode B=1 T=2 H=2 K=6 V=4 map=cosformer max_length=9",
      "features_decode B=2 T=77 H=2 K=8 V=12 map=elu1 threads=3",  // in chunks
      "features_decode B=2 T=40 H=2 K=8 V=5 map=focused with=scale",
      "features_decode B=2 T=77 H=2 K=12 V=17 map=exp with=top strided=1",
      "features_decode B=1 T=33 H=2 K=12 V=17 map=efficient with=top",
      "features_decode B=2 T=77 H=2 K=12 V=17 M=20 map=favor with=proj,top,sums",
      "features_decode B=1 T=64 H=2 K=12 V=3 M=5 map=favor_hyp with=proj,top,sums",
  };
  for (const char* map : {"identity", "cosine", "elu1", "relu", "relu2", "exp", "cosformer", "dpfp dpfp_nu=2", "taylor"}) {
    lines.push_back("features B=2 T=33 S=33 H=2 K=9 V=17 causal=1 with=key_mask values=garbage pass=bwd map=" +
                    std::string(map));
  }
  for (const char* map : {"hedgehog", "hedgehog_exp", "t2r with=w,b"}) {
    const std::string with = std::string(map) == "t2r with=w,b" ? "" : " with=w";
    lines.push_back("features B=1 T=40 S=40 H=2 K=9 V=7 R=11 causal=1 threads=2 pass=bwd map=" + std::string(map) + with);
  }
  for (const char* map : {"favor", "favor_hyp", "favor_relu"}) {
    lines.push_back("features B=1 T=40 S=35 H=2 K=9 V=7 M=12 with=proj pass=bwd map=" + std::string(map));
  }
  lines.push_back("features B=1 T=40 S=40 H=2 K=9 V=7 causal=1 with=w,b other=w,b map=hedgehog_joint pass=bwd");
  lines.push_back("features B=1 T=40 S=40 H=2 K=9 V=7 causal=1 with=gamma,beta map=rebased pass=bwd");
  lines.push_back("features B=8 T=121 S=121 H=1 K=1 V=1 map=cosine normalizer=none causal=1 pass=bwd seed=610188");
  lines.push_back("features B=2 T=70 S=70 H=2 K=9 V=7 with=scale,key_mask map=focused pass=bwd");
  for (const char* rest : {"T=45 S=45", "T=45 S=30 normalizer=add", "T=45 S=45 causal=1", "T=45 S=45 causal=1 key_top=running",
                           "T=0 S=0", "T=1 S=1", "T=1 S=1 causal=1", "T=20 S=600 threads=3"}) {
    lines.push_back("features B=2 H=2 K=9 V=7 with=key_mask values=mixed,garbage map=efficient pass=bwd " + std::string(rest));
  }
  lines.push_back("features B=1 T=20 S=20 H=2 K=8 V=5 map=efficient causal=1 key_top=given with=key_tops pass=bwd");
  lines.push_back("features_decode B=2 T=3 H=2 K=8 V=12 map=efficient with=top,key_tops");
  check::expect_agreement(lines);
}

// One key has the weight 1 however small its score is: on the CPU, where the type is not double already.
TEST(Features, OneKeyOfRebased) {
  for (const Impl& impl : features_op().impls) {
    if (impl.device == Device::cuda || !impl.missing().empty()) continue;
    for (const char* dtype : {"f32", "bf16", "f16"}) {
      check::Result result;
      const Status status = check::run_line(
          "features B=2 T=101 S=1 H=1 K=16 V=16 map=rebased normalizer=max eps=0 "
          "with=gamma,beta pass=bwd seed=6405 dtype=" +
              std::string(dtype) + " impl=" + impl.name,
          &result);
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_TRUE(result.ok()) << result.text();
    }
  }
}

Tensors attention(int64_t T, uint64_t seed) {
  return {{"q", random_tensor({1, T, 2, 6}, seed)},
          {"k", random_tensor({1, T, 2, 6}, seed + 1)},
          {"v", random_tensor({1, T, 2, 5}, seed + 2)}};
}
Tensor identities(int64_t n) {
  Tensor w = constant({2, n, n}, 0);
  for (int64_t h = 0; h < 2; ++h) {
    for (int64_t i = 0; i < n; ++i) w.set((h * n + i) * n + i, 1);
  }
  return w;
}

TEST(Features, Relations) {
  const Tensors x = attention(30, 1);
  const auto run = [&](const char* map, Options more = {}) {
    more.emplace_back("map", map);
    return out_of("features", x, more);
  };
  // Constant values come back, up to eps.
  const Tensors same = with(x, "v", constant({1, 30, 2, 5}, 2));
  for (const char* map : {"elu1", "exp", "taylor"}) {
    EXPECT_LT(rms_error(out_of("features", same, {{"map", map}, {"eps", "0"}}), same.at("v")), 1e-13) << map;
  }
  // t2r of the identity is relu; cosformer of a huge length is relu; hedgehog of zeros is mean pooling.
  Tensors t2r = x;
  t2r.insert({{"w", identities(6)}, {"b", constant({2, 6}, 0)}});
  EXPECT_LT(rms_error(out_of("features", t2r, {{"map", "t2r"}}), run("relu")), 1e-14);
  EXPECT_LT(rms_error(run("cosformer", {{"max_length", "1000000000"}, {"normalizer", "add"}}), run("relu")), 1e-12);
  Tensors hedgehog = x;
  hedgehog.emplace("w", constant({2, 6, 4}, 0));
  const Tensor mean = out_of("features", hedgehog, {{"map", "hedgehog"}});
  EXPECT_LT(rms_error(tokens(mean, 0, 1), tokens(mean, 9, 10)), 1e-14);
  // taylor is taylor_exact.
  EXPECT_LT(rms_error(run("taylor"), out_of("taylor_exact", x)), 1e-13);
  // efficient: means by channel of the values, mixed by the query's softmax. Causal, it is exp up to eps.
  EXPECT_LT(rms_error(out_of("features", same, {{"map", "efficient"}}), same.at("v")), 1e-14);
  const Options causal = {{"causal", "1"}, {"eps", "0"}};
  EXPECT_LT(rms_error(run("efficient", causal), run("exp", causal)), 1e-13);
  Tensors far = x;  // a common part of the values, and of each channel of the keys, changes nothing else
  for (int64_t i = 0; i < far.at("k").count(); ++i) far.at("k").set(i, far.at("k").get(i) + 1e3 * static_cast<double>(i % 6));
  EXPECT_LT(rms_error(out_of("features", far, {{"map", "efficient"}}), run("efficient")), 1e-12);
  // elu1 is linear's; the last causal row sees what all rows of the other form see.
  EXPECT_LT(rms_error(run("elu1", {{"causal", "1"}}), out_of("linear", x, {{"map", "elu1"}, {"normalize", "1"}})), 1e-12);
  EXPECT_LT(rms_error(tokens(run("relu2", {{"causal", "1"}}), 29, 30), tokens(run("relu2"), 29, 30)), 1e-13);
}

TEST(Features, EfficientByDifferences) {
  Tensors x = attention(7, 4);
  x.emplace("key_mask", constant({1, 7}, 1, Dtype::u8));
  x.at("key_mask").set(2, 0);
  for (const char* causal : {"0", "1"}) {
    for (const char* normalizer : {"standard", "max"}) {
      check::expect_gradients("features", {{"map", "efficient"}, {"causal", causal}, {"normalizer", normalizer}, {"eps", "0"}},
                              x, "out");
    }
  }
}

// Running maxima make the causal result independent of later keys; the global maximum does not.
TEST(Features, RunningMaximaAreCausal) {
  Tensors x = attention(60, 2);
  x.emplace("proj", random_tensor({12, 6}, 9));
  const Options running = {{"map", "favor"}, {"causal", "1"}, {"key_top", "running"}};
  const Tensor before = out_of("features", x, running);
  for (int64_t i = 50 * 12; i < 60 * 12; ++i) x.at("k").set(i, 20 * x.at("k").get(i));
  EXPECT_LT(rms_error(tokens(out_of("features", x, running), 0, 50), tokens(before, 0, 50)), 1e-12);
}

TEST(Features, DecodeContinues) {
  const Tensors x = attention(40, 3);
  const auto part = [&](int64_t begin, int64_t end) {
    return Tensors{
        {"q", tokens(x.at("q"), begin, end)}, {"k", tokens(x.at("k"), begin, end)}, {"v", tokens(x.at("v"), begin, end)}};
  };
  const Options options = {{"map", "dpfp"}, {"dpfp_nu", "2"}};
  Options causal = options;
  causal.emplace_back("causal", "1");
  Tensors state = part(0, 33);
  ASSERT_EQ(check::invoke("features", causal, &state), "");
  Tensors rest = part(33, 40);
  rest.insert({{"state", state["final_state"]}, {"z", state["final_z"]}});
  EXPECT_LT(rms_error(out_of("features_decode", rest, options), tokens(out_of("features", x, causal), 33, 40)), 1e-12);
}

TEST(Features, Refusals) {
  const Tensors x = attention(10, 1);
  EXPECT_EQ(refusal("features", x, {{"map", "identity"}, {"normalizer", "add"}}),
            "features: normalizer with map identity can divide by zero, expected none");
  EXPECT_EQ(refusal("features", x, {{"map", "hedgehog"}}), "features: w is missing; map hedgehog needs it");
  EXPECT_EQ(refusal("features", x, {{"map", "cosformer"}, {"max_length", "9"}}),
            "features: max_length is 9, expected at least the 10 tokens of the call");
  EXPECT_EQ(refusal("features", x, {{"map", "exp"}, {"key_top", "given"}}),
            "features: key_tops is missing; key_top given needs it");
}

}  // namespace
}  // namespace linnet
