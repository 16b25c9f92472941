#include "linnet_c_layers.h"

#include <cstring>
#include <string>

#include "capi/report.h"
#include "layers/describe.h"

using namespace linnet;
using capi::report;

const char* linnet_describe_layers(void) {
  static const std::string text = layers::layers_json();
  return text.c_str();
}

int linnet_layer_json(const char* name, const linnet_option* options, int option_count, char* json, size_t json_bytes,
                      size_t* needed, char* message, size_t message_bytes) {
  return report(message, message_bytes, [&]() -> Status {
    const layers::Layer* layer = name == nullptr ? nullptr : layers::find_layer(name);
    if (layer == nullptr) return bad_input("there is no layer '" + std::string(name == nullptr ? "" : name) + "'");
    std::vector<layers::Setting> settings;
    for (int i = 0; i < option_count; ++i) settings.push_back({options[i].name, options[i].text});
    std::string text;
    LINNET_TRY(layers::layer_json(*layer, settings, 0, &text));
    if (needed != nullptr) *needed = text.size() + 1;
    if (json != nullptr && json_bytes > text.size()) std::memcpy(json, text.c_str(), text.size() + 1);
    return {};
  });
}
