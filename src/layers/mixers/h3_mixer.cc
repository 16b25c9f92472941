// H3 (arXiv 2212.14052): keys through a short filter, times values, through a long filter, times queries.
#include <cmath>

#include "layers/mixers/short_conv.h"

namespace linnet::layers {
namespace {

enum class Disc : int32_t { bilinear, zoh };
constexpr const char* kDiscs[] = {"bilinear", "zoh"};

struct H3 {
  int64_t hidden = 768, head_dim = 1, shift = 64, modes = 32;
  Disc disc = Disc::bilinear;
  bool bias = true;
};

Value record(Recorder& l, const H3& o, Value x) {  // x [B, T, hidden]
  const int64_t C = o.hidden, H = C / o.head_dim, N = o.shift, M = o.modes;
  if (!l.require(C % o.head_dim == 0, "hidden is " + whole(C) + ", expected a multiple of head_dim, " + whole(o.head_dim)))
    return {};
  const auto project = [&](Value from, const std::string& n, const std::string& alias) {
    const Value bias = o.bias ? l.weight(n + ".bias", {C}, zeros(), as("b" + alias)) : Value();
    return l.dense(from, l.weight(n + ".weight", {C, C}, normal(0.02), as("w" + alias)), bias);
  };
  const Value q = project(x, "q_proj", "q"), k = project(x, "k_proj", "k"), v = project(x, "v_proj", "v");
  const double bound = 1 / std::sqrt(static_cast<double>(N));
  const Value y = l.op("h3",
                       {{"q", q},
                        {"k", k},
                        {"v", v},
                        {"sb", l.weight("shift.B", {C, N}, first_one(), as("sb"))},
                        {"sc", l.weight("shift.C", {C, N}, uniform(-bound, bound), as("sc"))},
                        {"sd", l.weight("shift.D", {C}, normal(1), as("sd"))},
                        {"log_dt", l.weight("ssm.log_dt", {H}, uniform_log(1e-3, 0.1), as("log_dt"))},
                        {"log_neg_re", l.weight("ssm.log_neg_re", {H, M}, constant(-0.6931471805599453), as("log_neg_re"))},
                        {"imag", l.weight("ssm.imag", {H, M}, range(3.141592653589793), as("imag"))},
                        {"b", l.weight("ssm.B", {H, M, 2}, first_one(), as("b"))},
                        {"c", l.weight("ssm.C", {H, M, 2}, normal(0.7071067811865476), as("c"))},
                        {"d", l.weight("ssm.D", {H}, normal(1), as("d"))}},
                       {{"disc", kDiscs[static_cast<size_t>(o.disc)]}, {"head_dim", whole(o.head_dim)}});
  return project(y, "out_proj", "o");
}

void of_file(const FileFacts& f, std::vector<Setting>* s) {
  s->push_back({"shift", whole(f.size("sb", 1))});
  s->push_back({"modes", whole(f.size("imag", 1))});
  s->push_back({"bias", flag(f.has("bq"))});
}

}  // namespace

const Layer& h3_mixer_layer() {
  using O = H3;
  static const Layer layer =
      make_layer<O, record>("H3", "Fu, Dao, Saab, Thomas, Rudra, Re, ICLR 2023, arXiv 2212.14052",
                            Declaration<O>("h3_mixer", "h3", "H3: a shift and a diagonal state space model with two gates")
                                .equation("y = Wo h3(Wq x, Wk x, Wv x) + bo")
                                .option("hidden", &O::hidden, 1, kAnyCount, "channels of x")
                                .option("head_dim", &O::head_dim, 1, kAnyCount, "slots of a head, a divisor of hidden")
                                .option("shift", &O::shift, 1, kAnyCount, "taps of the short filter")
                                .option("modes", &O::modes, 1, kAnyCount, "complex states of a head")
                                .option("disc", &O::disc, {"bilinear", "zoh"}, "how the continuous system becomes discrete")
                                .option("bias", &O::bias, "the projections have a bias"),
                            {{"h3", "attention", {{"heads", ""}}, of_file, "u", "layer_out", "layer_out"}});
  return layer;
}

}  // namespace linnet::layers
