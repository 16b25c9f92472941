// The families of models: one file and one line each.
#pragma once

#include "runtime/config.h"
#include "runtime/description.h"

namespace linnet {

struct Family {
  const char* model_type;
  void (*describe)(Config& config, Description& d);  // failures are kept by the config
};

void describe_llama(Config& config, Description& d);  // llama, qwen2, qwen3
void describe_gpt2(Config& config, Description& d);
void describe_bert(Config& config, Description& d);
void describe_vit(Config& config, Description& d);
void describe_linnet(Config& config, Description& d);

inline constexpr Family kFamilies[] = {
    {"llama", describe_llama}, {"qwen2", describe_llama}, {"qwen3", describe_llama},   {"gpt2", describe_gpt2},
    {"bert", describe_bert},   {"vit", describe_vit},     {"linnet", describe_linnet},
};

// The activation of a config by our name; the config keeps a sentence when it is unknown.
std::string activation_name(Config& config, const char* field, const std::string& otherwise);

}  // namespace linnet
