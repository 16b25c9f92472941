// Converted models: any family's config.json with a section that names what stands in softmax's place, layer by layer.
//
//   "linnet": {"format": 1, "layers": [{"index": 3, "mechanism": "window", "window": 512, "sinks": 4}, ...]}
//
// Layers that are not listed keep softmax attention. New parameters are tensors linnet.layers.<i>.<mechanism>.<parameter>; one
// that is missing or has another shape is an error. docs/convert.md has all mechanisms and their fields.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/files/json.h"
#include "core/status.h"
#include "runtime/description.h"

namespace linnet {

// One entry of the list.
struct ConvertedLayer {
  int64_t index = 0;
  std::string mechanism = "softmax";
  int64_t window = 0, sinks = 0;
  std::vector<int64_t> windows;  // mechanism window: one for each head of keys instead; 0: all keys
  std::vector<int64_t> blocks;   // beside windows: heads with a number above 0 are Monarch with blocks of it instead
  std::vector<int64_t> updates;  // beside blocks: steps of those heads
  int64_t features = 0;          // distill, hybrid
  std::string form = "sliding";  // hybrid
  int64_t block = 0, steps = 1;  // monarch
  std::string tie = "row";       // hierarchical
  int64_t arity = 4;

  std::string label() const;             // "window 512 + 4"; "softmax"
  void write(JsonWriter& writer) const;  // as the object above
};

// Keys of the window that a softmax_attention has; 0: it sees all keys on a side.
int64_t window_of(const BlockSpec& block);
// The mixer of a block becomes the layer's; `softmax` changes nothing. The block is a softmax_attention; one that has a window
// of its own becomes nothing but smaller windows.
Status convert_block(const ConvertedLayer& layer, BlockSpec& block);
// Reads the section "linnet" of a config and converts the blocks.
Status apply_conversion(Config& config, Description& d);
// The section's layers as a list, in the order of the file.
Status read_conversion(const JsonValue& section, const std::string& source, std::vector<ConvertedLayer>& out);

}  // namespace linnet
