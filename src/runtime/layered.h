// LayeredModel: a model block by block, so that one block can be looked into, or run with another mechanism in the place of its
// softmax attention. The converter and the analysis of heads use it. Numbers are those of Model, to the last bit; a text of
// more than 2,048 tokens goes through softmax attention in pieces, as a prompt does, with the same numbers within rounding.
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

#include "layers/runner.h"
#include "runtime.h"
#include "runtime/converted.h"
#include "runtime/weights.h"

namespace linnet {

// What the attention of a block was given and what it gave, before the output projection.
struct HeadTaps {
  int64_t tokens = 0, heads = 0, kv_heads = 0, key = 0, value = 0;
  std::vector<float> q, k, v, out;  // [T, heads, key], [T, kv_heads, key], [T, kv_heads, value], [T, heads, value]
  double scale = 0, softcap = 0;
  int64_t window_left = -1, window_right = -1, prefix = 0;  // keys that are seen; -1: all
};

// What an operator of a block was given, as it entered the call: [1, T, heads, channels] and parameters.
struct OpTaps {
  struct Tensor {
    std::vector<int64_t> shape;
    std::vector<double> values;
  };
  std::string op;
  std::map<std::string, Tensor> inputs;
  std::map<std::string, std::string> options;  // those that are set
  Tensor out;
};

using ParameterValues = std::map<std::string, std::vector<double>>;  // layers.<i>.self_attn.<mechanism>.<name> -> numbers

// What the last operator of `ops` among the runner's steps was given in the last call, whose values were kept.
Status tap_runner(const layers::Runner& runner, const std::vector<std::string>& ops, OpTaps* taps);

inline constexpr const char* kNoSystem = "none of its steps is a system that this tool knows";

class LayeredModel {
 public:
  explicit LayeredModel(const Model& model);

  int64_t layers() const;
  int64_t hidden() const;
  bool causal() const;
  // Whether it is the source's softmax attention, so that something may stand in its place; beside a window of its own only a
  // smaller one.
  bool converts(int64_t layer) const;
  int64_t own_window(int64_t layer) const;  // keys of the window that the source has in this layer; 0: it sees all
  bool attends(int64_t layer) const;        // whether it has softmax weights, be they gated or of a window
  std::string mixer(int64_t layer) const;
  // Whether more than one window for all heads may: the layer has nothing that converted_attention has no word for (a soft
  // cap, a gate).
  bool parts_heads(int64_t layer) const;
  bool replaces(int64_t layer) const;  // whether any mechanism may: it sees all keys, too
  int64_t heads(int64_t layer) const;
  int64_t kv_heads(int64_t layer) const;
  int64_t key(int64_t layer) const;
  int64_t value(int64_t layer) const;

  // Whether texts longer than the model's context run: positions are computed, not read from a table.
  bool goes_beyond() const;
  Status embed(const std::vector<int32_t>& tokens, std::vector<float>& x) const;
  Status embed_image(const std::vector<float>& pixels, std::vector<float>& x) const;
  // x, y [T, hidden]. `extra`: the new parameters of the layer. `taps`: only where the layer is softmax or a window.
  Status block(const ConvertedLayer& layer, const std::vector<float>& x, std::vector<float>& y,
               const ParameterValues* extra = nullptr, HeadTaps* taps = nullptr) const;
  // The same, with what the first operator of `ops` in the block was given; a sentence where the block has none.
  Status record(int64_t layer, const std::vector<std::string>& ops, const std::vector<float>& x, std::vector<float>& y,
                OpTaps* taps) const;
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
