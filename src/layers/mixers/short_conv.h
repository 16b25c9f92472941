// What many recurrent layers share: a projection, a short convolution with its activation, heads.
#pragma once

#include "layers/layer.h"

namespace linnet::layers {

struct Branch {
  int64_t hidden, heads, width;
  int64_t taps = 4;                 // 0: no convolution
  std::string activation = "silu";  // of the result: silu, relu, elu1, identity
  bool conv_bias = false;
  bool activation_without_conv = true;
};

// [B, T, hidden] -> [B, T, heads, width]: <name>_proj, <name>_conv1d; w<name>, c<name> in vector files.
// Taps start between -1 / sqrt(taps) and 1 / sqrt(taps). The deviation of 0.02 that large models give every weight makes what
// small ones write so faint that the norm behind the mixer sees its eps instead, and they learn hundreds of steps later or not
// at all.
inline Value branch(Recorder& l, const std::string& name, const Branch& o, Value x, const Init& init = normal(0.02)) {
  const int64_t channels = o.heads * o.width;
  Value y = l.dense(x, l.weight(name + "_proj.weight", {channels, o.hidden}, init, transposed("w" + name)));
  const bool silu = o.activation == "silu";
  if (o.taps > 0) {
    const Value weight = l.weight(name + "_conv1d.weight", {channels, o.taps}, fan_in(), as("c" + name));
    const Value bias = o.conv_bias ? l.weight(name + "_conv1d.bias", {channels}, zeros(), as("c" + name + "_b")) : Value();
    y = l.op("causal_conv", {{"x", y}, {"weight", weight}, {"bias", bias}}, {{"activation", silu ? "silu" : "none"}},
             name + "_conv1d");
    if (silu) return l.split(y, o.heads);
  } else if (!o.activation_without_conv) {
    return l.split(y, o.heads);
  }
  if (o.activation != "identity") y = l.op("activation", {{"x", y}}, {{"act", o.activation}}, name + "_act");
  return l.split(y, o.heads);
}

inline std::string whole(int64_t x) { return std::to_string(x); }
inline std::string flag(bool on) { return on ? "1" : "0"; }

}  // namespace linnet::layers
