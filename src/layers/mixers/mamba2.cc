// Mamba-2 (arXiv 2405.21060), with the parameter names of mamba_ssm's and transformers' checkpoints.
#include "layers/mixers/short_conv.h"

namespace linnet::layers {
namespace {

struct Mamba2 {
  int64_t hidden = 768, inner = 0, head = 64, state = 128, groups = 1, taps = 4;
  bool conv_bias = true, bias = false, norm = true, norm_before_gate = false, norm_all = false, skip_per_channel = false,
       skip = true;
  double dt_min = 0, eps = 1e-5;
  double step_low = 1e-3, step_high = 0.1, rate_low = 1, rate_high = 16;
  Maybe dt_max;
};

Value record(Recorder& l, const Mamba2& o, Value x) {  // x [B, T, hidden]
  const int64_t E = o.inner > 0 ? o.inner : 2 * o.hidden, P = o.head, G = o.groups, N = o.state;
  l.require(o.step_low <= o.step_high && o.rate_low <= o.rate_high,
            "step_low and rate_low are at most step_high and rate_high");
  l.require(E % P == 0, "inner is " + whole(E) + ", expected a multiple of head, " + whole(P));
  l.require(E % G == 0 && (E / P) % G == 0, "groups is " + whole(G) + ", expected a divisor of the heads, " + whole(E / P));
  if (!l.ok()) return {};
  const int64_t H = E / P, mixed = E + 2 * G * N;
  const Value in_bias = o.bias ? l.weight("in_proj.bias", {E + mixed + H}, zeros(), as("b_in")) : Value();
  const Value all =
      l.dense(x, l.weight("in_proj.weight", {E + mixed + H, o.hidden}, fan_in(), transposed("w_in")), in_bias);  // z, xBC, dt
  const Value z = l.slice(all, 0, E), dt = l.slice(all, E + mixed, E + mixed + H);
  const Value conv_bias = o.conv_bias ? l.weight("conv1d.bias", {mixed}, uniform(-0.5, 0.5), as("conv_b")) : Value();
  const Value xbc = l.op("causal_conv",
                         {{"x", l.slice(all, E, E + mixed)},
                          {"weight", l.weight("conv1d.weight", {mixed, o.taps}, uniform(-0.5, 0.5), as("conv_w"))},
                          {"bias", conv_bias}},
                         {{"activation", "silu"}}, "conv1d");
  const Value A =
      l.map("-exp(A_log)", {{"A_log", l.weight("A_log", {H}, log_uniform(o.rate_low, o.rate_high), as("A_log"))}}, "A");
  Value D;
  if (o.skip) D = o.skip_per_channel ? l.weight("D", {H, P}, ones(), as("D")) : l.weight("D", {H}, ones(), as("D"));
  Value y = l.op("mamba_ssd",
                 {{"x", l.split(l.slice(xbc, 0, E), H)},
                  {"dt", dt},
                  {"A", A},
                  {"B", l.split(l.slice(xbc, E, E + G * N), G)},
                  {"C", l.split(l.slice(xbc, E + G * N, mixed), G)},
                  {"D", D},
                  {"z", o.norm ? Value() : l.split(z, H)},
                  {"dt_bias", l.weight("dt_bias", {H}, inverse_softplus_log_uniform(o.step_low, o.step_high), as("dt_bias"))}},
                 {{"dt_min", number_text(o.dt_min)}, {"dt_max", o.dt_max.given ? number_text(o.dt_max.value) : "none"}});
  if (o.norm) {  // over each group's channels, or all
    const int64_t parts = o.norm_all ? 1 : G;
    const Value weight = l.split(l.weight("norm.weight", {E}, ones(), as("norm")), parts);
    y = l.op("rms_norm_gated", {{"x", l.reshape(y, {parts, E / parts})}, {"z", l.split(z, parts)}, {"weight", weight}},
             {{"eps", number_text(o.eps)}, {"norm_before_gate", flag(o.norm_before_gate)}}, "norm");
  }
  const Value out_bias = o.bias ? l.weight("out_proj.bias", {o.hidden}, zeros(), as("b_out")) : Value();
  return l.dense(l.join(y), l.weight("out_proj.weight", {o.hidden, E}, fan_in(), transposed("w_out")), out_bias);
}

void of_file(const FileFacts& f, std::vector<Setting>* s) {
  const int64_t inner = f.size("w_out", 0), heads = f.size("A_log", 0);
  s->push_back({"inner", whole(inner)});
  s->push_back({"head", whole(heads > 0 ? inner / heads : 1)});
  s->push_back({"taps", whole(f.size("conv_w", 1))});
  s->push_back({"conv_bias", flag(f.has("conv_b"))});
  s->push_back({"bias", flag(f.has("b_in"))});
  s->push_back({"norm", flag(f.has("norm"))});
  s->push_back({"skip", flag(f.has("D"))});
  s->push_back({"skip_per_channel", flag(f.size("D", 1) > 0)});
}

}  // namespace

const Layer& mamba2_layer() {
  using O = Mamba2;
  static const Layer layer = make_layer<O, record>(
      "Mamba2", "Dao, Gu, ICML 2024, arXiv 2405.21060",
      Declaration<O>("mamba2", "mamba", "Mamba-2: a state space with one decay per head")
          .equation(
              "y = W_out norm(ssd(x, dt, -exp(A_log), B, C, D, dt_bias) silu(z)); [z, xBC, dt] = W_in x, xBC = silu(conv(xBC))")
          .option("hidden", &O::hidden, 1, kAnyCount, "channels of x")
          .option("inner", &O::inner, 0, kAnyCount, "channels of the heads together; 0: 2 hidden")
          .option("head", &O::head, 1, kAnyCount, "channels of a head")
          .option("state", &O::state, 1, kAnyCount, "rows of a head's state")
          .option("groups", &O::groups, 1, kAnyCount, "of B and C, a divisor of the heads")
          .option("taps", &O::taps, 1, 64, "of the short convolution")
          .option("conv_bias", &O::conv_bias, "the convolution has a bias")
          .option("bias", &O::bias, "the input and output projections have a bias")
          .option("skip", &O::skip, "the skip D")
          .option("skip_per_channel", &O::skip_per_channel, "D has a number for each channel, else for each head")
          .option("norm", &O::norm, "the gated norm; else the gate alone")
          .option("norm_all", &O::norm_all, "the norm spans all channels, as in transformers; else each group's")
          .option("norm_before_gate", &O::norm_before_gate, "norm(y) silu(z) instead of norm(y silu(z))")
          .option("dt_min", &O::dt_min, 0, kAnyReal, "least step size")
          .option("dt_max", &O::dt_max, 0, kAnyReal, "largest step size; none: no limit")
          .option("step_low", &O::step_low, 1e-6, 100, "step sizes start between this")
          .option("step_high", &O::step_high, 1e-6, 100, "and this")
          .option("rate_low", &O::rate_low, 1e-6, 1e6, "decay rates, exp(A_log), start between this")
          .option("rate_high", &O::rate_high, 1e-6, 1e6, "and this; a short sequence wants larger steps and smaller rates")
          .option("eps", &O::eps, 0, 1, "of the norm"),
      {{"mamba", "ssd_layer", {}, of_file}});
  return layer;
}

}  // namespace linnet::layers
