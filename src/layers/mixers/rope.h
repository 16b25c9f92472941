// Rotary positions of q and k as layers name them, with the two crossed tables of released code.
#pragma once

#include <cmath>

#include "layers/layer.h"

namespace linnet::layers {

enum class Rope : int32_t { none, half, interleaved, half_crossed, interleaved_crossed };
inline std::vector<std::string> rope_names() { return {"none", "half", "interleaved", "half-crossed", "interleaved-crossed"}; }

// x [B, T, H, D]. Two released layers pair channels one way and take the angles of the other: no rotations, kept for weights
// that were trained with them. half-crossed: channel j is paired with j + D/2 and has the angle j / 2; interleaved-crossed:
// 2j with 2j + 1, the angle of channel c is c mod D/2.
inline Value rope(Recorder& l, Rope kind, double base, Value x, const std::string& name) {
  if (kind == Rope::none || !x.given()) return x;
  const int64_t D = l.width(x), half = D / 2;
  if (!l.require(D % 2 == 0, "a head has " + std::to_string(D) + " channels, expected an even number for rotary positions"))
    return {};
  if (kind == Rope::half || kind == Rope::interleaved) {
    return l.op("rotary", {{"x", x}}, {{"theta", number_text(base)}, {"pairs", kind == Rope::half ? "half" : "interleaved"}},
                name);
  }
  const bool pairs = kind == Rope::interleaved_crossed;
  std::vector<double> first, second;
  for (int64_t j = 0; j < half; ++j) {
    const auto angle = [&](int64_t i) { return std::pow(base, -2.0 * static_cast<double>(i) / static_cast<double>(D)); };
    first.push_back(angle(pairs ? 2 * j % half : j / 2));
    second.push_back(angle(pairs ? (2 * j + 1) % half : (j + half) / 2));
  }
  const Value a = pairs ? l.slice(x, 0, D, 2) : l.slice(x, 0, half), b = pairs ? l.slice(x, 1, D, 2) : l.slice(x, half, D);
  const Value u =
      l.map("a * cos(position * f) - b * sin(position * f)", {{"a", a}, {"b", b}, {"f", l.table(first)}}, name + "_first");
  const Value v =
      l.map("b * cos(position * f) + a * sin(position * f)", {{"a", a}, {"b", b}, {"f", l.table(second)}}, name + "_second");
  return l.concat(u, v, pairs);
}

}  // namespace linnet::layers
