// Mamba (arXiv 2312.00752), with the parameter names of mamba_ssm's and transformers' checkpoints.
#include <cmath>

#include "layers/mixers/short_conv.h"

namespace linnet::layers {
namespace {

struct Mamba {
  int64_t hidden = 768, inner = 0, state = 16, rank = 0, taps = 4;
  bool conv_bias = true, bias = false, dt_bias = true, skip = true, norms = false;
  double eps = 1e-6;
};

Value record(Recorder& l, const Mamba& o, Value x) {  // x [B, T, hidden]
  const int64_t E = o.inner > 0 ? o.inner : 2 * o.hidden, N = o.state, R = o.rank > 0 ? o.rank : (o.hidden + 15) / 16;
  const double step = 1 / std::sqrt(static_cast<double>(R));
  const auto optional = [&](bool on, const std::string& name, int64_t size, const std::string& alias) {
    return on ? l.weight(name, {size}, zeros(), as(alias)) : Value();
  };
  const Value uz = l.dense(x, l.weight("in_proj.weight", {2 * E, o.hidden}, fan_in(), transposed("w_in")),
                           optional(o.bias, "in_proj.bias", 2 * E, "b_in"));
  const Value conv_bias = o.conv_bias ? l.weight("conv1d.bias", {E}, uniform(-0.5, 0.5), as("conv_b")) : Value();
  const Value u = l.op("causal_conv",
                       {{"x", l.slice(uz, 0, E)},
                        {"weight", l.weight("conv1d.weight", {E, o.taps}, uniform(-0.5, 0.5), as("conv_w"))},
                        {"bias", conv_bias}},
                       {{"activation", "silu"}}, "conv1d");
  const Value z = l.slice(uz, E, 2 * E);
  const Value parts = l.dense(u, l.weight("x_proj.weight", {R + 2 * N, E}, fan_in(), transposed("w_x")));  // dt, B, C
  const auto part = [&](const char* name, int64_t begin, int64_t end) {
    const Value y = l.slice(parts, begin, end);
    return o.norms ? l.op("rms_norm", {{"x", y}}, {{"eps", number_text(o.eps)}}, name) : y;
  };
  const Value dt = l.dense(part("dt_norm", 0, R), l.weight("dt_proj.weight", {E, R}, uniform(-step, step), transposed("w_dt")));
  const Value A = l.map("-exp(A_log)", {{"A_log", l.weight("A_log", {E, N}, log_range(), as("A_log"))}}, "A");
  const Value dt_bias =
      o.dt_bias ? l.weight("dt_proj.bias", {E}, inverse_softplus_log_uniform(1e-3, 0.1), as("b_dt"), "added inside the scan")
                : Value();
  const Value D = o.skip ? l.weight("D", {E}, ones(), as("D")) : Value();
  const Value y = l.op("mamba_selective_scan", {{"x", u},
                                                {"dt", dt},
                                                {"A", A},
                                                {"B", part("B_norm", R, R + N)},
                                                {"C", part("C_norm", R + N, R + 2 * N)},
                                                {"D", D},
                                                {"z", z},
                                                {"dt_bias", dt_bias}});
  return l.dense(y, l.weight("out_proj.weight", {o.hidden, E}, fan_in(), transposed("w_out")),
                 optional(o.bias, "out_proj.bias", o.hidden, "b_out"));
}

void of_file(const FileFacts& f, std::vector<Setting>* s) {
  s->push_back({"inner", whole(f.size("A_log", 0))});
  s->push_back({"state", whole(f.size("A_log", 1))});
  s->push_back({"rank", whole(f.size("w_dt", 0))});
  s->push_back({"taps", whole(f.size("conv_w", 1))});
  s->push_back({"conv_bias", flag(f.has("conv_b"))});
  s->push_back({"bias", flag(f.has("b_in"))});
  s->push_back({"dt_bias", flag(f.has("b_dt"))});
  s->push_back({"skip", flag(f.has("D"))});
}

}  // namespace

const Layer& mamba_layer() {
  using O = Mamba;
  static const Layer layer = make_layer<O, record>(
      "Mamba", "Gu, Dao 2023, arXiv 2312.00752",
      Declaration<O>("mamba1", "mamba", "Mamba: a selective state space, one per channel")
          .equation(
              "y = W_out scan(u, W_dt dt, -exp(A_log), B, C, D, z); [u, z] = W_in x, u = silu(conv(u)), [dt, B, C] = W_x u")
          .option("hidden", &O::hidden, 1, kAnyCount, "channels of x")
          .option("inner", &O::inner, 0, kAnyCount, "channels of the scan; 0: 2 hidden")
          .option("state", &O::state, 1, kAnyCount, "numbers of a channel's state")
          .option("rank", &O::rank, 0, kAnyCount, "of the step sizes' projection; 0: hidden / 16, rounded up")
          .option("taps", &O::taps, 1, 64, "of the short convolution")
          .option("conv_bias", &O::conv_bias, "the convolution has a bias")
          .option("dt_bias", &O::dt_bias, "the step sizes have a bias")
          .option("skip", &O::skip, "the skip D")
          .option("norms", &O::norms, "dt, B and C are divided by their root mean squares, as in Falcon Mamba")
          .option("eps", &O::eps, 0, 1, "of those norms")
          .option("bias", &O::bias, "the input and output projections have a bias"),
      {{"mamba", "s6_layer", {}, of_file}});
  return layer;
}

}  // namespace linnet::layers
