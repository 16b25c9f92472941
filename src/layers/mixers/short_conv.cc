// The gated short convolution of LFM2, with the parameter names of transformers' checkpoints, and Zoology's BaseConv.
#include "layers/mixers/short_conv.h"

#include <cmath>

namespace linnet::layers {
namespace {

enum class Form : int32_t { lfm2, base };

struct ShortConv {
  int64_t hidden = 1024, taps = 3;
  Form form = Form::lfm2;
  bool bias = false;
};

// What stands in front of every mixer in Zoology's comparisons: y = x + conv(x) * (W x + b).
Value base_conv(Recorder& l, const ShortConv& o, Value x) {
  const int64_t C = o.hidden;
  const double bound = 1 / std::sqrt(static_cast<double>(o.taps));
  const Value conv_bias = o.bias ? l.weight("conv.bias", {C}, uniform(-bound, bound)) : Value();
  const Value weight = l.weight("conv.weight", {C, o.taps}, fan_in());
  const Value y = l.op("causal_conv", {{"x", x}, {"weight", weight}, {"bias", conv_bias}}, {{"activation", "none"}}, "conv");
  const Value bias = o.bias ? l.weight("in_proj.bias", {C}, zeros()) : Value();
  const Value gate = l.dense(x, l.weight("in_proj.weight", {C, C}, normal(0.02)), bias);
  return l.map("x + y * gate", {{"x", x}, {"y", y}, {"gate", gate}}, "out");
}

Value record(Recorder& l, const ShortConv& o, Value x) {  // x [B, T, hidden]
  if (o.form == Form::base) return base_conv(l, o, x);
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
      "ShortConv", "LFM2, Liquid AI 2025; base: Arora et al., ICLR 2024, arXiv 2312.04927",
      Declaration<O>("short_conv", "causal_conv", "a gated short convolution: what stands in front of a mixer, or in its place")
          .equation("y = W_out (c * conv(b * u)); [b, c, u] = W_in x; base: y = x + conv(x) * W x")
          .option("hidden", &O::hidden, 1, kAnyCount, "channels of x")
          .option("taps", &O::taps, 1, 64, "of the convolution")
          .option("form", &O::form, {"lfm2", "base"}, "LFM2's, or Zoology's BaseConv")
          .option("bias", &O::bias, "projections and convolution have a bias"),
      {});
  return layer;
}

}  // namespace linnet::layers
