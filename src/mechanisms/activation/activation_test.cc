// activation, glu and add: agreement with the reference, gradients, known values.
#include "mechanisms/activation/activation.h"

#include "check/agreement.h"
#include "check/named.h"

namespace linnet {
namespace {

const std::vector<std::string> kActs = {"relu",     "silu",  "gelu", "gelu_tanh", "sigmoid", "tanh",
                                        "softplus", "relu2", "elu1", "exp",       "softcap"};

TEST(Activation, AgreesWithTheReference) {
  std::vector<std::string> lines;
  for (const std::string& act : kActs) lines.push_back("activation B=2 T=9 H=2 D=33 pass=bwd strided=1 act=" + act);
  for (const std::string act : {"silu", "gelu", "gelu_tanh", "sigmoid", "relu"}) {
    lines.push_back("glu B=2 T=65 D=40 other=gate,up pass=bwd threads=3 act=" + act);
  }
  lines.insert(lines.end(),
               {"activation B=1 T=0 H=1 D=4 pass=bwd", "activation B=1 T=700 D=64 other=x pass=bwd threads=3",
                "glu B=1 T=3 H=2 D=7 pass=bwd strided=1", "add B=2 T=65 D=40 other=x,y scale=0.5 pass=bwd threads=3",
                "add B=1 T=3 H=2 D=7 pass=bwd strided=1", "activation B=1 T=5 D=8 other=x act=softcap cap=2 pass=bwd"});
  check::expect_agreement(lines);
}

TEST(Activation, Gradients) {
  const check::Tensors x = {{"x", check::random_tensor({1, 3, 2, 5}, 1)}};
  for (const std::string& act : kActs) check::expect_gradients("activation", {{"act", act}, {"cap", "2"}}, x, "out");
  const check::Tensors pair = {{"gate", check::random_tensor({1, 3, 5}, 1)}, {"up", check::random_tensor({1, 3, 5}, 2)}};
  for (const std::string act : {"silu", "gelu", "gelu_tanh", "sigmoid", "relu"}) {
    check::expect_gradients("glu", {{"act", act}}, pair, "out");
  }
  check::expect_gradients("add", {{"scale", "-0.5"}}, {{"x", pair.at("gate")}, {"y", pair.at("up")}}, "out");
}

// Values of x = 1, from the definitions.
TEST(Activation, KnownValues) {
  check::Tensor x(Dtype::f64, {1, 1, 1});
  x.set(0, 1);
  const std::pair<const char*, double> known[] = {{"relu", 1},
                                                  {"silu", 0.73105857863000487},
                                                  {"gelu", 0.84134474606854293},
                                                  {"gelu_tanh", 0.84119199060827676},
                                                  {"relu2", 1},
                                                  {"elu1", 2},
                                                  {"exp", 2.718281828459045},
                                                  {"tanh", 0.76159415595576489},
                                                  {"softplus", 1.3132616875182228},
                                                  {"sigmoid", 0.73105857863000487},
                                                  {"softcap", 0.9242343145200195}};
  for (const auto& [act, value] : known) {
    EXPECT_NEAR(check::out_of("activation", {{"x", x}}, {{"act", act}, {"cap", "2"}}).get(0), value, 1e-15) << act;
  }
}

// Large arguments stay finite, where the result is.
TEST(Activation, Extremes) {
  check::Tensor x(Dtype::f32, {1, 1, 2});
  x.set(0, 1e4);
  x.set(1, -1e4);
  for (const std::string& act : kActs) {
    if (act == "exp") continue;
    const check::Tensor y = check::out_of("activation", {{"x", x}}, {{"act", act}});
    EXPECT_TRUE(std::isfinite(y.get(0)) && std::isfinite(y.get(1))) << act;
  }
}

TEST(Activation, TwoTensorsHaveOneRank) {
  std::vector<float> numbers(24), out(24);
  const View four = View::dense(numbers.data(), Dtype::f32, {1, 2, 3, 4}),
             three = View::dense(numbers.data(), Dtype::f32, {1, 2, 4});
  const ActivationOut result{View::dense(out.data(), Dtype::f32, {1, 2, 3, 4})};
  EXPECT_EQ(add({.x = four, .y = three}, result, {}).message(), "add: y has rank 3, expected 4 (same as x)");
  EXPECT_EQ(glu({.gate = four, .up = three}, result, {}).message(), "glu: up has rank 3, expected 4 (same as gate)");
  EXPECT_TRUE(add({.x = four, .y = four}, result, {}).ok());
}

// A y that is one row for all tokens (stride 0): dy has a row for each token, to be summed by the caller. A dy that is itself
// one row would keep the last token's alone, and is refused.
TEST(Activation, OneRowForAllTokens) {
  std::vector<double> x(12), y = {1, 2, 3, 4}, out(12), dout(12), dy(12);
  for (int i = 0; i < 12; ++i) dout[i] = x[i] = i;
  const auto view = [](std::vector<double>& of) { return View::dense(of.data(), Dtype::f64, {1, 3, 4}); };
  View repeated = view(x);
  repeated.data = y.data();
  repeated.stride[1] = 0;
  for (const char* impl : {"", "ref"}) {
    const Context context{.impl = impl};
    const AddArgs args{.x = view(x), .y = repeated, .scale = 0.5};
    ASSERT_TRUE(add(args, {view(out)}, context).ok());
    EXPECT_EQ(out[9], x[9] + 0.5 * y[1]);
    AddGrads grads{.dout = view(dout), .dx = {}, .dy = view(dy)};
    ASSERT_TRUE(add_backward(args, {view(out)}, grads, context).ok());
    for (int i = 0; i < 12; ++i) EXPECT_EQ(dy[i], 0.5 * dout[i]) << i;
    grads.dy = repeated;
    EXPECT_EQ(add_backward(args, {view(out)}, grads, context).message(),
              "add: dy has stride 0 in dimension 1, but it is written and may not overlap itself");
  }
}

}  // namespace
}  // namespace linnet
