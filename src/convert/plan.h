// plan: which mechanism each layer gets, as a knapsack over measured damage under a budget of cost.
//
// Costs are shares of the model's softmax attention in a prompt of `length` tokens; damages are nats of KL a token (1 - cosine
// of the embedding for encoders). The dynamic programme runs over costs in 1/2000 of the budget, rounded up, so that the budget
// is never exceeded; ties go to the smaller cost, then to the option that stands first.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/status.h"
#include "runtime/converted.h"

namespace linnet::convert {

struct LayerOption {
  ConvertedLayer layer;
  double cost = 0;    // share of this layer's softmax cost
  double error = 0;   // of the attention's output, in the layer's own units
  double recall = 0;  // what repeated passages have in the damage, nats
  double damage = 0;  // to the whole model
};

// Whether a mechanism has parameters that a fit has to find.
bool is_trained(const std::string& mechanism);
// Shares of softmax's cost (docs/convert.md). `length` tokens.
double window_cost(int64_t window, int64_t sinks, int64_t length, bool causal);
double monarch_cost(int64_t block, int64_t steps, int64_t length);
double hierarchical_cost(int64_t arity, int64_t length);
// Mechanisms that are trained: the formulas of the specification with chunks of 64; `key` = `value` channels.
double mechanism_cost(const ConvertedLayer& layer, int64_t length, int64_t key, int64_t value, bool causal);
// What a layer keeps while it decodes, in tokens of its softmax cache; `length`: of heads that see all keys. `heads` of
// queries, `kv_heads` of keys. Encoders keep nothing.
double cache_tokens(const ConvertedLayer& layer, int64_t length, int64_t heads, int64_t kv_heads, int64_t key, int64_t value);

// One option of each layer with the least damage and at most `budget` of the cost; `weights` are the layers' shares of the
// softmax cost. impossible() with the cheapest cost when there is none.
Status choose(const std::vector<std::vector<LayerOption>>& options, const std::vector<double>& weights, double budget,
              std::vector<size_t>& chosen);

// The choice made better where damages add up as vectors do, not as numbers: product[a][b] is the inner product of what two
// options do, options counted slot by slot, so that product[a][a] is the damage of one alone. Single options and pairs change
// places under the budget while half of the sum's square and half of the squares' sum gets smaller: the sum is what was
// measured, the squares keep the choice from what cancels on these texts alone.
void choose_together(const std::vector<std::vector<LayerOption>>& options, const std::vector<double>& weights, double budget,
                     const std::vector<std::vector<float>>& product, std::vector<size_t>& chosen);

// The windows of the heads of one layer: for every cost the combination with the least error, ascending in cost, descending in
// error. error [heads][windows], cost [windows] (share of a head's softmax cost). Of more than `most` points, the evenly
// spaced.
struct HeadWindows {
  std::vector<size_t> window;  // of each head
  double cost = 0, error = 0;
};
std::vector<HeadWindows> combine_heads(const std::vector<std::vector<double>>& error, const std::vector<double>& cost,
                                       size_t most);

}  // namespace linnet::convert
