// mixers: which system each mixer is (docs/understand.md has the table), from its inputs.
//
//   MixerInputs x;
//   LINNET_TRY(random_inputs("gla", {.tokens = 64, .keys = 8, .values = 4}, 1, &x));
//   System system;
//   std::vector<double> out;                                     // what the mixer itself gives, by its own loop
//   LINNET_TRY(build_system("gla", x, &system, &out));
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "analysis/system.h"

namespace linnet::analysis {

struct Array {
  std::vector<int64_t> shape;
  std::vector<double> values;
};

struct MixerInputs {
  std::map<std::string, Array> tensors;      // q, k, v, ...: one (batch, head) slice each
  std::map<std::string, std::string> words;  // scale, order, feature, power, reverse_power
};

struct Mixer {
  std::string name, what, form;  // "gla", "gated linear attention", "diag(alpha)"
  std::string tensors;           // what it reads
  std::string separates;         // state expansion, normalisation, gate: one phrase each
};
const std::vector<Mixer>& all_mixers();
std::vector<std::string> mixer_names();
// The mixer of that name, also in other people's spelling (DeltaNet, RG-LRU, mamba2); null: none.
const Mixer* find_mixer(std::string_view name);
// The mixer that a file names or, failing that, the one that its tensors are made for.
const Mixer* guess_mixer(std::string_view name, const MixerInputs& inputs);

struct MixerSize {
  int64_t tokens = 64, keys = 8, values = 4;  // keys: also the states of S6 and LRU; values: channels
};
Status random_inputs(std::string_view mixer, const MixerSize& size, uint64_t seed, MixerInputs* inputs);

Status build_system(std::string_view mixer, const MixerInputs& inputs, System* system, std::vector<double>* out);
// u [T, Du] of the system.
const Array& system_input(const MixerInputs& inputs);

// The weights [S] that one query gives to all keys, without a mask, where the mixer has such a map: softmax, linear, taylor.
Status query_weights(std::string_view mixer, const MixerInputs& inputs, const std::vector<double>& query,
                     std::vector<double>* weights);

// phi(x) of degree up to p, scaled so that phi(x) . phi(y) = sum_m (x . y)^m / m!.
std::vector<double> taylor_features(const double* x, int64_t width, int64_t order);

}  // namespace linnet::analysis
