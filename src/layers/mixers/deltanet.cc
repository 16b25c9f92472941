// DeltaNet (arXiv 2406.06484), with the parameter names of flash-linear-attention's checkpoints.
#include "layers/mixers/short_conv.h"

namespace linnet::layers {
namespace {

enum class Act : int32_t { silu, elu1, relu, identity };
enum class Norm : int32_t { l2, sum };
constexpr const char* kActs[] = {"silu", "elu1", "relu", "identity"};

struct DeltaNet {
  int64_t hidden = 2048, heads = 16, key = 0, value = 0, taps = 4;
  bool gate = false, double_beta = false, beta = true, conv_bias = false;
  Act activation = Act::silu;
  Norm norm = Norm::l2;
  double eps = 1e-5;
};

Value record(Recorder& l, const DeltaNet& o, Value x) {  // x [B, T, hidden]
  const bool derived = o.key == 0 || o.value == 0;
  if (!l.require(!derived || o.hidden % o.heads == 0,
                 "hidden is " + whole(o.hidden) + ", expected a multiple of heads, " + whole(o.heads))) {
    return {};
  }
  const int64_t K = o.key > 0 ? o.key : o.hidden / o.heads, V = o.value > 0 ? o.value : o.hidden / o.heads;
  const Branch keys{o.hidden, o.heads, K, o.taps, kActs[static_cast<size_t>(o.activation)], o.conv_bias};
  const Branch values{o.hidden, o.heads, V, o.taps, "silu", o.conv_bias};
  Value q = branch(l, "q", keys, x), k = branch(l, "k", keys, x);
  const Value v = branch(l, "v", values, x);
  if (o.norm == Norm::sum) {
    q = l.map("x / sum(x)", {{"x", q}}, "q_norm");
    k = l.map("x / sum(x)", {{"x", k}}, "k_norm");
  }
  Value beta;
  if (o.beta) {
    const Value b = l.dense(x, l.weight("b_proj.weight", {o.heads, o.hidden}, normal(0.02), transposed("wb")));
    beta = l.map(o.double_beta ? "2 * sigmoid(b)" : "sigmoid(b)", {{"b", b}}, "beta");
  } else {
    beta = l.map("one * 1", {{"one", l.constant(1, {kB, kT, o.heads})}}, "beta");
  }
  Value y = l.op("delta", {{"q", q}, {"k", k}, {"v", v}, {"beta", beta}}, {{"l2_norm", flag(o.norm == Norm::l2)}});
  Value z;
  if (o.gate) {
    z = l.split(l.dense(x, l.weight("g_proj.weight", {o.heads * V, o.hidden}, normal(0.02), transposed("wg"))), o.heads);
  }
  y = l.op("rms_norm_gated", {{"x", y}, {"z", z}, {"weight", l.weight("o_norm.weight", {V}, ones(), as("norm"))}},
           {{"eps", number_text(o.eps)}, {"norm_before_gate", "1"}}, "o_norm");
  return l.dense(l.join(y), l.weight("o_proj.weight", {o.hidden, o.heads * V}, normal(0.02), transposed("wo")));
}

void of_file(const FileFacts& f, std::vector<Setting>* s) {
  const int64_t heads = f.number("heads", 1);
  s->push_back({"key", whole(f.size("wq", 1) / heads)});
  s->push_back({"value", whole(f.size("wv", 1) / heads)});
  s->push_back({"taps", whole(f.size("cq", 1))});
  s->push_back({"gate", flag(f.has("wg"))});
  s->push_back({"use_beta", flag(f.has("wb"))});
  s->push_back({"conv_bias", flag(f.has("cq_b"))});
}

}  // namespace

const Layer& deltanet_layer() {
  using O = DeltaNet;
  static const Layer layer = make_layer<O, record>(
      "DeltaNet", "Yang, Wang, Zhang, Shen, Kim, NeurIPS 2024, arXiv 2406.06484",
      Declaration<O>("deltanet", "delta", "DeltaNet: a state that is corrected towards each value")
          .equation(
              "y = Wo rmsnorm(delta(q, k, v, beta)); q, k = unit(silu(conv(W x))), v = silu(conv(Wv x)), beta = sigmoid(Wb x)")
          .option("hidden", &O::hidden, 1, kAnyCount, "channels of x")
          .option("heads", &O::heads, 1, kAnyCount, "heads")
          .option("key", &O::key, 0, kAnyCount, "channels of a head's queries and keys; 0: hidden / heads")
          .option("value", &O::value, 0, kAnyCount, "channels of a head's values; 0: hidden / heads")
          .option("taps", &O::taps, 0, 64, "of the short convolutions; 0: none")
          .option("conv_bias", &O::conv_bias, "the convolutions have a bias")
          .option("activation", &O::activation, {"silu", "elu1", "relu", "identity"}, "of q and k")
          .option("norm", &O::norm, {"l2", "sum"}, "of q and k: unit length, or a sum of 1")
          .option("use_beta", &O::beta, "write strengths sigmoid(Wb x); else 1")
          .option("double", &O::double_beta, "beta times 2: negative eigenvalues")
          .option("gate", &O::gate, "an output gate silu(Wg x)")
          .option("eps", &O::eps, 0, 1, "of the output norm"),
      {{"delta", "layer", {}, of_file}});
  return layer;
}

}  // namespace linnet::layers
