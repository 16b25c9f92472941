// linnet info LAYER [option=value ...]
#pragma once

#include <string>
#include <vector>

#include "layers/layer.h"

namespace linnet::cli {

int layer_info(const layers::Layer& layer, const std::vector<std::string>& words, bool json);

}  // namespace linnet::cli
