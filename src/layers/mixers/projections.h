// What the attention layers share around their mechanism: q, k, v from x with biases, norms and rotary positions, and the
// output projection. A softmax layer keeps these when its mechanism is replaced.
#pragma once

#include "layers/mixers/rope.h"
#include "layers/mixers/short_conv.h"

namespace linnet::layers {

struct Projections {
  int64_t hidden = 2048, heads = 16, kv_heads = 0, key = 0, value = 0;
  bool bias = false, out_bias = false, qk_norm = false;
  Rope rope = Rope::none;
  double rope_base = 10000, norm_eps = 1e-6;

  int64_t keys() const { return key > 0 ? key : hidden / heads; }
  int64_t values() const { return value > 0 ? value : keys(); }
};

struct Heads {
  Value q, k, v;  // [B, T, heads, key], [B, T, heads, key], [B, T, heads, value]: grouped keys are repeated
};

inline bool check_projections(Recorder& l, const Projections& o) {
  const int64_t kv = o.kv_heads > 0 ? o.kv_heads : o.heads;
  if (o.key == 0) {
    l.require(o.hidden % o.heads == 0, "hidden is " + whole(o.hidden) + ", expected a multiple of heads, " + whole(o.heads));
  }
  l.require(o.heads % kv == 0, "heads is " + whole(o.heads) + ", expected a multiple of kv_heads, " + whole(kv));
  return l.ok();
}

inline Heads project(Recorder& l, const Projections& o, Value x, bool repeat_groups = true) {
  const int64_t kv = o.kv_heads > 0 ? o.kv_heads : o.heads;
  const auto one = [&](const std::string& n, int64_t heads, int64_t width, bool placed) {
    const Value bias = o.bias ? l.weight(n + "_proj.bias", {heads * width}, zeros(), as("b" + n)) : Value();
    Value y = l.split(
        l.dense(x, l.weight(n + "_proj.weight", {heads * width, o.hidden}, normal(0.02), transposed("w" + n)), bias), heads);
    if (placed && o.qk_norm) {
      y = l.op("rms_norm", {{"x", y}, {"weight", l.weight(n + "_norm.weight", {width}, ones(), as(n + "_norm"))}},
               {{"eps", number_text(o.norm_eps)}}, n + "_norm");
    }
    if (placed) y = rope(l, o.rope, o.rope_base, y, n + "_rotary");
    return repeat_groups && heads < o.heads ? l.repeat(y, o.heads / heads) : y;
  };
  return {one("q", o.heads, o.keys(), true), one("k", kv, o.keys(), true), one("v", kv, o.values(), false)};
}

inline Value project_out(Recorder& l, const Projections& o, Value y) {
  const Value bias = o.out_bias ? l.weight("o_proj.bias", {o.hidden}, zeros(), as("bo")) : Value();
  return l.dense(l.join(y), l.weight("o_proj.weight", {o.hidden, o.heads * o.values()}, normal(0.02), transposed("wo")), bias);
}

inline void projections_of_file(const FileFacts& f, std::vector<Setting>* s) {
  const int64_t heads = f.number("heads", 1), kv = f.number("kv_heads", heads);
  s->push_back({"key", whole(f.size("wk", 1) / kv)});
  s->push_back({"value", whole(f.size("wv", 1) / kv)});
  s->push_back({"bias", flag(f.has("bq"))});
  s->push_back({"out_bias", flag(f.has("bo"))});
  s->push_back({"qk_norm", flag(f.has("q_norm"))});
}

}  // namespace linnet::layers

// The options that every such layer has; its struct derives from Projections (&O::hidden is a member of that).
#define LINNET_OF(O, member) (static_cast<decltype(Projections::member) O::*>(&O::member))
#define LINNET_PROJECTION_OPTIONS(O)                                                                               \
  option("hidden", LINNET_OF(O, hidden), 1, kAnyCount, "channels of x")                                            \
      .option("heads", LINNET_OF(O, heads), 1, kAnyCount, "heads of queries")                                      \
      .option("kv_heads", LINNET_OF(O, kv_heads), 0, kAnyCount, "heads of keys and values, a divisor; 0: as many") \
      .option("key", LINNET_OF(O, key), 0, kAnyCount, "channels of a head's queries and keys; 0: hidden / heads")  \
      .option("value", LINNET_OF(O, value), 0, kAnyCount, "channels of a head's values; 0: as key")                \
      .option("bias", LINNET_OF(O, bias), "q, k and v have a bias")                                                \
      .option("out_bias", LINNET_OF(O, out_bias), "the output projection has a bias")                              \
      .option("qk_norm", LINNET_OF(O, qk_norm), "RMS norm of each head's q and k")                                 \
      .option("norm_eps", LINNET_OF(O, norm_eps), 0, 1, "of that norm")                                            \
      .option("rope", LINNET_OF(O, rope), rope_names(), "rotary positions of q and k")                             \
      .option("rope_base", LINNET_OF(O, rope_base), 1e-300, kAnyReal, "base of the frequencies")
