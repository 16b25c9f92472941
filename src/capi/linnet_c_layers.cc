#include "linnet_c_layers.h"

#include <cstring>
#include <string>

#include "capi/report.h"
#include "core/files/safetensors.h"
#include "layers/describe.h"

using namespace linnet;
using capi::report;

namespace {

Status write(const std::string& text, char* json, size_t json_bytes, size_t* needed) {
  if (needed != nullptr) *needed = text.size() + 1;
  if (json != nullptr && json_bytes > text.size()) std::memcpy(json, text.c_str(), text.size() + 1);
  return {};
}

}  // namespace

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
    return write(text, json, json_bytes, needed);
  });
}

int linnet_layer_of_file(const char* path, char* json, size_t json_bytes, size_t* needed, char* message, size_t message_bytes) {
  return report(message, message_bytes, [&]() -> Status {
    SafetensorsFile file;
    LINNET_TRY(SafetensorsFile::open(path == nullptr ? "" : path, file));
    const layers::FileFacts facts = layers::facts_of(file);
    const layers::LayerFile* form = nullptr;
    const layers::Layer* layer = layers::layer_of_file(facts.text("mechanism"), facts.text("operator"), facts, &form);
    if (layer == nullptr) return bad_input(file.path() + " is about no layer");
    std::vector<layers::Setting> settings;
    LINNET_TRY(layers::options_of_file(*layer, *form, facts, &settings));
    std::string text;
    LINNET_TRY(layers::layer_json(*layer, settings, 0, &text));
    text = "{\"input\": \"" + form->input + "\", \"output\": \"" + form->output + "\", \"layer\": " + text + "}";
    return write(text, json, json_bytes, needed);
  });
}
