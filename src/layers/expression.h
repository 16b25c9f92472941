// The reader of map expressions (map.h).
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"
#include "layers/map.h"

namespace linnet::layers {

// Names are those of the tensors, in the order of the program's inputs; the name `position` is allowed beyond them and becomes
// the last input: the number of the token, from 0. A sentence says what is wrong and where.
Status parse_map(std::string_view text, const std::vector<std::string>& names, MapProgram* program);
bool map_uses_position(std::string_view text);

}  // namespace linnet::layers
