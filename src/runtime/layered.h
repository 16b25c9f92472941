// LayeredModel: a model block by block, so that one block can be looked into, or run with another mechanism in the place of its
// softmax attention. The converter and the analysis of heads use it. Numbers are those of Model, to the last bit.
//
//   LayeredModel parts(model);
//   std::vector<float> x, y;
//   LINNET_TRY(parts.embed(tokens, x));                                       // x [T, hidden]
//   for (int64_t i = 0; i < parts.layers(); ++i) {
//     LINNET_TRY(parts.block({.index = i}, x, y));                            // or {.index = i, .mechanism = "window", ...}
//     x.swap(y);
//   }
//   LINNET_TRY(parts.finish(x));                                              // the last norm
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "runtime.h"
#include "runtime/converted.h"
#include "runtime/weights.h"

namespace linnet {

// What the attention of a block was given and what it gave, before the output projection.
struct HeadTaps {
  int64_t tokens = 0, heads = 0, kv_heads = 0, key = 0, value = 0;
  std::vector<float> q, k, v, out;  // [T, heads, key], [T, kv_heads, key], [T, kv_heads, value], [T, heads, value]
  double scale = 0, softcap = 0;
};

using ParameterValues = std::map<std::string, std::vector<double>>;  // layers.<i>.self_attn.<mechanism>.<name> -> numbers

class LayeredModel {
 public:
  explicit LayeredModel(const Model& model);

  int64_t layers() const;
  int64_t hidden() const;
  bool causal() const;
  bool converts(int64_t layer) const;  // whether it is plain softmax attention, so that something may stand in its place
  // Whether more than a window may: the layer has nothing that converted_attention has no word for (a soft cap).
  bool replaces(int64_t layer) const;
  int64_t heads(int64_t layer) const;
  int64_t kv_heads(int64_t layer) const;
  int64_t key(int64_t layer) const;
  int64_t value(int64_t layer) const;

  Status embed(const std::vector<int32_t>& tokens, std::vector<float>& x) const;
  Status embed_image(const std::vector<float>& pixels, std::vector<float>& x) const;
  // x, y [T, hidden]. `extra`: the new parameters of the layer. `taps`: only where the layer is softmax or a window.
  Status block(const ConvertedLayer& layer, const std::vector<float>& x, std::vector<float>& y,
               const ParameterValues* extra = nullptr, HeadTaps* taps = nullptr) const;
  Status finish(std::vector<float>& x) const;
  Status logits(const float* hidden, int64_t rows, float* out) const;  // of finished states
  // The output projection [hidden, heads * value] in floats; empty where it is held in less than f32.
  std::vector<float> output_weight(int64_t layer) const;
  // The model as it was read: for writing it again.
  const Description& description() const;
  const WeightFiles& files() const;
  View weight(const std::string& name) const;                                 // our name and order; absent where quantised
  std::vector<std::pair<std::string, std::vector<int64_t>>> tensors() const;  // our names and shapes
  // Shapes of the new parameters that a layer needs.
  Status parameters(const ConvertedLayer& layer, std::vector<std::pair<std::string, std::vector<int64_t>>>& out) const;

 private:
  std::shared_ptr<Model::Inner> inner_;
};

}  // namespace linnet
