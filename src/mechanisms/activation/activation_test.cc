// activation, glu and add: agreement with the reference, gradients, known values.
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

}  // namespace
}  // namespace linnet
