#include "compare/compare.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <set>

#include "check/tensor.h"
#include "compare/binding.h"
#include "core/tolerance.h"
#include "mechanisms/recurrence/recurrence.h"

namespace linnet::compare {
namespace {

const double kGate = rms_gate(Dtype::f32, Pass::forward, Against::reference, true, 0);

Input random_input(int64_t T, int64_t H, int64_t Hkv, int64_t K, int64_t V) {
  Input in;
  in.source = "random";
  in.B = 1, in.T = T, in.H = H, in.Hkv = Hkv, in.K = K, in.V = V;
  in.scale = 1 / std::sqrt(static_cast<double>(K));
  std::mt19937_64 random(1);
  std::normal_distribution<double> normal;
  Layer layer{.name = "layer0"};
  const auto fill = [&](std::vector<double>* x, int64_t count) {
    for (int64_t i = 0; i < count; ++i) x->push_back(normal(random));
  };
  fill(&layer.q, T * H * K);
  fill(&layer.k, T * Hkv * K);
  fill(&layer.v, T * Hkv * V);
  in.layers.push_back(layer);
  return in;
}

Comparison run(const Input& in) {
  Settings settings;
  settings.seconds = 0.001;
  settings.longest_length = 2 * in.T;
  Comparison c;
  const Status status = compare(in, settings, &c);
  EXPECT_TRUE(status.ok()) << status.message();
  return c;
}

const VariantResult& find(const Comparison& c, const std::string& name) {
  for (const VariantResult& v : c.variants) {
    if (v.name == name) return v;
  }
  ADD_FAILURE() << "no variant " << name;
  return c.variants.front();
}

TEST(Comparison, facts_that_follow_from_the_declarations) {
  const Comparison c = run(random_input(48, 4, 2, 16, 16));
  const VariantResult& exact = c.variants.front();
  EXPECT_EQ(exact.name, "softmax exact");
  EXPECT_LT(exact.error, kGate);
  EXPECT_NEAR(exact.cosine, 1, kGate);
  EXPECT_NEAR(exact.exponent, 2, 0.01);
  EXPECT_EQ(growth_text(exact.exponent), "T^2");
  EXPECT_EQ(exact.state_bytes, 48 * 2 * (16 + 16) * 4);  // keys and values of 48 tokens, 2 heads
  EXPECT_TRUE(exact.state_grows);
  const VariantResult& window = find(c, "softmax window 64");  // wider than the sequence: exact as well
  EXPECT_LT(window.error, kGate);
  EXPECT_EQ(growth_text(window.exponent), "T");
  EXPECT_EQ(find(c, "softmax blocks of 64").state_bytes, -1);  // its decode operator has no such option
  const VariantResult& linear = find(c, "linear elu1");
  EXPECT_GT(linear.error, 0.01);
  EXPECT_LT(linear.error, 1);
  EXPECT_EQ(growth_text(linear.exponent), "T");
  EXPECT_EQ(linear.state_bytes, 4 * 4 * (16 * 16 + 16));  // S and z of 4 heads
  EXPECT_FALSE(linear.state_grows);
  EXPECT_GT(c.average_error, 0);
  for (const VariantResult& v : c.variants) {
    EXPECT_EQ(v.times.size(), 2u) << v.name;
    EXPECT_EQ(v.head_errors.size(), 1u);
    EXPECT_EQ(v.head_errors[0].size(), 4u);
  }
}

// Every mechanism that is attention has a row, also on an input that is not causal. (recurrence is what its members share.)
TEST(Comparison, every_mechanism_is_there) {
  std::set<std::string> missing = {}, none = {"activation", "causal_conv", "dense",    "embedding",      "grid_conv", "l2_norm",
                                              "layer_norm", "recurrence",  "rms_norm", "rms_norm_gated", "rotary"};
  for (const Op* op : all_ops()) {
    if (none.count(op->mechanism) == 0) missing.insert(op->mechanism);
  }
  const Comparison c = run(random_input(32, 2, 2, 8, 8));
  EXPECT_TRUE(c.left_out.empty()) << c.left_out.front();
  for (const VariantResult& v : c.variants) {
    missing.erase(v.op->mechanism);
    EXPECT_TRUE(std::isfinite(v.error) && std::isfinite(v.cosine)) << v.name;
  }
  EXPECT_TRUE(missing.empty()) << *missing.begin();
  EXPECT_TRUE(c.variants.back().causal);
  EXPECT_LT(find(c, "softmax causal").error, kGate);
  EXPECT_LT(find(c, "gated open").error, kGate);  // gates of 1 - 1e-13
  EXPECT_EQ(find(c, "decay").state_bytes, 2 * 8 * 8 * 4);
}

// What a variant's words put into inputs.
TEST(Binding, words) {
  const Op& op = *find_op("recurrence");
  const check::Tensor q = check::random_tensor({1, 5, 2, 4}, 1), k = check::random_tensor({1, 5, 2, 4}, 2);
  Binding binding(op, "q=unit@q g=logsigmoid@k beta=0.25 scale=1");
  Call call(op);
  Dims dims;
  ASSERT_TRUE(binding.bind({q.view(), k.view(), k.view()}, true, false, &call, &dims).ok());
  ASSERT_TRUE(call.prepare().ok());
  binding.fill();
  const auto* args = static_cast<const RecurrenceArgs*>(call.args());
  double squares = 0, value;
  for (int64_t i = 4; i < 8; ++i) {
    bench::read_values(args->q, i, 1, &value);
    squares += value * value;
    EXPECT_GT(value * q.get(i), 0);
    bench::read_values(args->g, i, 1, &value);
    EXPECT_NEAR(value, -std::log(1 + std::exp(-k.get(i))), 1e-15);
  }
  EXPECT_NEAR(squares, 1, 1e-15);
  bench::read_values(args->beta, 9, 1, &value);
  EXPECT_EQ(value, 0.25);
  EXPECT_TRUE(binding.causal(false));
  EXPECT_FALSE(Binding(*find_op("linear"), "").causal(false));
  EXPECT_TRUE(Binding(*find_op("linear"), "causal=1").causal(false));
  Dims state;
  Binding(op, "state.M=sqrt state.levels=log8 state.width=8").show_state(512, &state);
  EXPECT_EQ(state["M"], 23);
  EXPECT_EQ(state["levels"], 3);
  EXPECT_EQ(state["width"], 8);
  EXPECT_NE(Binding(op, "colour=1").bind({q.view(), k.view(), k.view()}, true, true, &call, &dims).message(), "");
}

TEST(Comparison, equal_keys_leave_only_the_average) {
  Input in = random_input(20, 2, 1, 8, 8);
  std::fill(in.layers[0].k.begin(), in.layers[0].k.end(), 0.5);
  for (const bool causal : {false, true}) {
    in.causal = causal;
    const Comparison c = run(in);
    EXPECT_LT(c.average_error, rms_gate(Dtype::f64, Pass::forward, Against::reference, false, 0));
    EXPECT_LT(find(c, "linear elu1").error, kGate);
  }
}

TEST(Comparison, the_scale_goes_into_the_queries) {
  Input in = random_input(32, 2, 2, 16, 16), scaled = in;
  scaled.scale = in.scale / 4;
  for (double& x : scaled.layers[0].q) x *= 4;
  EXPECT_NEAR(find(run(in), "linear relu").error, find(run(scaled), "linear relu").error, kGate);
}

TEST(Comparison, lengths_repeat_the_tokens) {
  Input in = random_input(3, 1, 1, 2, 2);
  const std::vector<double> q = in.layers[0].q;
  set_length(5, &in);
  EXPECT_EQ(in.T, 5);
  ASSERT_EQ(in.layers[0].q.size(), 10u);
  for (size_t i = 0; i < 10; ++i) EXPECT_EQ(in.layers[0].q[i], q[i % 6]);
  set_length(2, &in);
  EXPECT_EQ(in.layers[0].q.size(), 4u);
}

TEST(Comparison, the_sample_is_built_in) {
  Input in;
  ASSERT_TRUE(read_sample(&in).ok());
  EXPECT_EQ(shape_text(in), "[1, 256, 12, 32]");
  EXPECT_EQ(in.layers.size(), 3u);
  EXPECT_FALSE(in.causal);
  ASSERT_TRUE(choose_layers({"5", "layer0"}, &in).ok());
  EXPECT_EQ(in.layers[0].name, "layer5");
  EXPECT_NE(choose_layers({"4"}, &in).message().find("there is no layer '4'"), std::string::npos);
}

TEST(Page, has_every_variant_and_nothing_from_outside) {
  Comparison c = run(random_input(16, 2, 2, 8, 8));
  c.input.source = "a <b> & \"c\"";
  const std::string html = html_page(c);
  for (const VariantResult& v : c.variants) EXPECT_NE(html.find(v.name), std::string::npos) << v.name;
  for (const char* piece : {"<script", " src=", " href=", "url(", "@import", "nan", "<b>"}) {
    EXPECT_EQ(html.find(piece), std::string::npos) << piece;
  }
  for (const std::string& sentence : summary(c)) EXPECT_EQ(sentence.back(), '.');
}

TEST(Growth, text) {
  EXPECT_EQ(growth_text(0), "constant");
  EXPECT_EQ(growth_text(1.02), "T");
  EXPECT_EQ(growth_text(1.5), "T^1.5");
  EXPECT_EQ(growth_text(1.99), "T^2");
}

}  // namespace
}  // namespace linnet::compare
