// The gated short convolution of LFM2, with the parameter names of transformers' checkpoints.
#include "layers/mixers/short_conv.h"

namespace linnet::layers {
namespace {

struct ShortConv {
  int64_t hidden = 1024, taps = 3;
  bool bias = false;
};

Value record(Recorder& l, const ShortConv& o, Value x) {  // x [B, T, hidden]
  const int64_t C = o.hidden;
  const Value in_bias = o.bias ? l.weight("in_proj.bias", {3 * C}, zeros()) : Value();
  const Value all = l.dense(x, l.weight("in_proj.weight", {3 * C, C}, fan_in(), transposed("w_in")), in_bias);
  const Value u = l.map("b * x", {{"b", l.slice(all, 0, C)}, {"x", l.slice(all, 2 * C, 3 * C)}}, "u");
  const Value conv_bias = o.bias ? l.weight("conv.bias", {C}, zeros()) : Value();
  const Value weight = l.weight("conv.weight", {C, o.taps}, fan_in(), as("conv_w"));
  const Value y = l.op("causal_conv", {{"x", u}, {"weight", weight}, {"bias", conv_bias}}, {{"activation", "none"}}, "conv");
  const Value out_bias = o.bias ? l.weight("out_proj.bias", {C}, zeros()) : Value();
  return l.dense(l.map("c * y", {{"c", l.slice(all, C, 2 * C)}, {"y", y}}, "gated"),
                 l.weight("out_proj.weight", {C, C}, fan_in(), transposed("w_out")), out_bias);
}

}  // namespace

const Layer& short_conv_layer() {
  using O = ShortConv;
  static const Layer layer = make_layer<O, record>(
      "ShortConv", "LFM2, Liquid AI 2025",
      Declaration<O>("short_conv", "causal_conv", "a gated short convolution: what stands in front of a mixer, or in its place")
          .equation("y = W_out (c * conv(b * u)); [b, c, u] = W_in x")
          .option("hidden", &O::hidden, 1, kAnyCount, "channels of x")
          .option("taps", &O::taps, 1, 64, "of the convolution")
          .option("bias", &O::bias, "projections and convolution have a bias"),
      {});
  return layer;
}

}  // namespace linnet::layers
