// compare: every way of attention that the declarations offer (Op::variants), on one input: how far its output is from exact
// softmax attention, what it costs in time and memory, and how that grows with the length.
//
//   Input input;
//   LINNET_TRY(read_sample(&input));
//   Comparison comparison;
//   LINNET_TRY(compare(input, settings, &comparison));
//   LINNET_TRY(write_file("compare.html", html_page(comparison)));
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "bench/timing.h"
#include "core/op.h"

namespace linnet::compare {

// q, k, v of one layer, row-major in double: q [B, T, H, K], k [B, T, Hkv, K], v [B, T, Hkv, V].
struct Layer {
  std::string name;
  std::vector<double> q, k, v;
};

struct Input {
  std::string source;       // a file's path, or what the sample is
  std::string description;  // of its content, from the metadata; may be empty
  int64_t B = 0, T = 0, H = 0, Hkv = 0, K = 0, V = 0;
  double scale = 0;     // of the logits
  bool causal = false;  // how the model that made it attends
  std::vector<Layer> layers;
};

// The sample that is built in: attention inputs of a sentence transformer on English text (data/README.md).
Status read_sample(Input* input);
// A safetensors file with NAME.q, NAME.k, NAME.v for each layer, or q, k, v: [B, T, H, D] or [T, H, D], all layers alike.
// Metadata that counts: scale (default K^-0.5), causal (true or false), model, text.
Status read_input(const std::string& path, Input* input);
// Keeps the layers of these names ("0" stands for "layer0" too), in this order.
Status choose_layers(const std::vector<std::string>& names, Input* input);
// The first `length` tokens, the sequence repeated when it is shorter.
void set_length(int64_t length, Input* input);

struct Settings {
  Dtype dtype = Dtype::f32;
  int threads = 1;
  double seconds = 0.05;       // of calls per variant and length, about
  double longest_seconds = 1;  // a call that would take longer is not measured
  int64_t longest_length = 16384;
  std::function<void(int64_t done, int64_t all)> progress;
};

struct VariantResult {
  const Op* op = nullptr;
  std::string variant, name;    // "elu1", "linear elu1"
  std::string options;          // what differs from the defaults (binding.h)
  bool causal = false;          // a token sees no later one: its error is against exact attention of that kind
  bool repeated_heads = false;  // the operator takes no grouped heads: every key head was repeated for its query heads
  std::string impl;
  double error = 0;                              // RMS error / RMS of exact softmax attention, over all layers
  double cosine = 0;                             // mean over tokens and heads of the angle's cosine between the two outputs
  std::vector<std::vector<double>> head_errors;  // [layer][head]
  bench::Spread time;                            // of one layer at the input's length
  double flops = 0;                              // of that call
  int64_t workspace_bytes = 0;
  int64_t state_bytes = -1;  // to continue one sequence of the input's length token by token; -1: no operator does
  bool state_grows = false;  // with the length
  double exponent = 0;       // the operations grow like length ^ exponent
  std::vector<std::pair<int64_t, double>> times;  // (length, median seconds), the input's length first
};

struct Comparison {
  Input input;
  Settings settings;
  std::vector<VariantResult> variants;  // the first is exact softmax attention
  double average_error = 0;             // of the plain average of the visible values: attention that does not look
  std::vector<std::string> left_out;    // "NAME: why"
  std::vector<int64_t> lengths;
  double other_load = 0;  // the part of the machine that other processes used meanwhile
};

Status compare(Input input, const Settings& settings, Comparison* result);

// What a newcomer should know, in a few sentences made from the numbers.
std::vector<std::string> summary(const Comparison& comparison);
// One page, complete in itself: plots, table, how it was measured, machine and date.
std::string html_page(const Comparison& comparison);

std::string growth_text(double exponent);    // "T", "T^2", "T^1.5", "constant"
std::string shape_text(const Input& input);  // "[1, 256, 12, 32]"

}  // namespace linnet::compare
