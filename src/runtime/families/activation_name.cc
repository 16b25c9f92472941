#include "core/files/json.h"
#include "runtime/families/families.h"

namespace linnet {

std::string activation_name(Config& config, const char* field, const std::string& otherwise) {
  const std::string name = config.text(field, otherwise);
  if (name == "silu" || name == "swish") return "silu";
  if (name == "gelu") return "gelu";
  if (name == "gelu_new" || name == "gelu_pytorch_tanh" || name == "gelu_tanh") return "gelu_tanh";
  if (name == "relu" || name == "relu2" || name == "sigmoid" || name == "tanh") return name;
  config.refuse(std::string(field) + " is " + json_quote_short(name) +
                ", expected silu, gelu, gelu_new, relu, relu2, sigmoid or tanh");
  return "silu";
}

}  // namespace linnet
