// linnet info LAYER [option=value ...]: options, parameters, steps, states and costs of a layer.
#include "cli/layer_info.h"

#include <cstddef>
#include <cstdio>

#include "cli/command.h"
#include "cli/print.h"
#include "layers/cost.h"
#include "layers/describe.h"
#include "layers/state.h"

namespace linnet::cli {
namespace {

using layers::Parameter;
using layers::Record;
using layers::Step;
using layers::StepKind;

constexpr int64_t kTokens = 2048;  // of the costs shown

std::string init_text(const layers::Init& init) {
  char text[96];
  switch (init.rule) {
    case layers::Init::Rule::zeros:
    case layers::Init::Rule::ones:
    case layers::Init::Rule::identity:
    case layers::Init::Rule::log_range:
    case layers::Init::Rule::first_one:
    case layers::Init::Rule::retention: return layers::rule_name(init.rule);
    case layers::Init::Rule::constant:
    case layers::Init::Rule::fan_in:
    case layers::Init::Rule::xavier:
    case layers::Init::Rule::range:
      std::snprintf(text, sizeof text, "%s(%g)", layers::rule_name(init.rule), init.a);
      return text;
    default: std::snprintf(text, sizeof text, "%s(%g, %g)", layers::rule_name(init.rule), init.a, init.b); return text;
  }
}

std::string step_text(const Record& record, const Step& step) {
  std::string inputs;
  for (const auto& [name, id] : step.inputs) {
    const layers::ValueInfo& info = record.values[static_cast<size_t>(id)];
    inputs += (inputs.empty() ? "" : ", ") + (step.kind == StepKind::map || info.name != name ? name + "=" : "") + info.name;
  }
  switch (step.kind) {
    case StepKind::op: return step.op->name + "(" + inputs + ")";
    case StepKind::map: return step.expression + "    " + inputs;
    case StepKind::concat: return "concat(" + inputs + ")";
    case StepKind::experts: return std::to_string(step.top) + " experts(" + inputs + ")";
    case StepKind::view: return "";
  }
  return "";
}

Status print_layer(const layers::Layer& layer, const Record& record) {
  std::printf("%s: %s\n\n  %s\n  %s\n\n", layer.name().c_str(), layer.options.summary.c_str(), layer.options.equation.c_str(),
              layer.paper.c_str());
  alignas(std::max_align_t) char defaults[kMaxStruct], out[8], grads[8];
  layer.options.construct(defaults, out, grads);
  Table options({{"options"}, {"value"}, {"default"}, {""}});
  for (size_t i = 0; i < layer.options.options.size(); ++i) {
    const OptionDecl& option = layer.options.options[i];
    std::string doc = option.doc;
    if (!option.choices.empty()) {
      doc += ":";
      for (const std::string& choice : option.choices) doc += " " + choice;
    }
    options.row({"  " + option.name, record.options[i].text, option_text(option, defaults), doc});
  }
  options.print(stdout);
  std::printf("\n");
  Table parameters({{"parameters"}, {"shape"}, {"starts as"}, {"in vector files"}});
  for (const Parameter& p : record.parameters) {
    parameters.row({"  " + p.name, layers::shape_text(p.shape), init_text(p.init) + (p.trained ? "" : ", fixed"),
                    p.alias.name + (p.alias.transposed ? " [in, out]" : "")});
  }
  parameters.print(stdout);
  std::printf("  %lld numbers\n\n", static_cast<long long>(record.parameter_count()));
  Table steps({{"steps"}, {"shape"}, {""}});
  for (const Step& step : record.steps) {
    if (step.kind == StepKind::view) continue;
    steps.row(
        {"  " + step.name, layers::shape_text(record.values[static_cast<size_t>(step.result)].shape), step_text(record, step)});
  }
  steps.print(stdout);
  std::printf("\n");
  const Status decodes = layers::decodable(record);
  if (!decodes.ok()) {
    std::printf("state\n  none: %s\n\n", decodes.message().c_str());
  } else {
    Table states({{"state of a row"}, {"shape"}, {"type"}});
    for (size_t i = 0; i < record.steps.size(); ++i) {
      if (record.steps[i].kind != StepKind::op || layers::is_tokenwise(*record.steps[i].op)) continue;
      std::vector<layers::StateTensor> tensors;
      LINNET_TRY(layers::state_tensors(record, static_cast<int>(i), 1, kTokens, Dtype::f32, &tensors));
      for (const layers::StateTensor& tensor : tensors) {
        const layers::Shape shape(tensor.view.size, tensor.view.size + tensor.view.rank);
        states.row({"  " + tensor.name, layers::shape_text(shape), dtype_name(tensor.view.dtype)});
      }
    }
    states.print(stdout);
    int64_t few = 0, many = 0;
    LINNET_TRY(layers::state_bytes(record, kTokens, Dtype::f32, &few));
    LINNET_TRY(layers::state_bytes(record, 2 * kTokens, Dtype::f32, &many));
    std::printf("  %s after %lld tokens, %s after %lld\n\n", bytes_text(static_cast<double>(few)).c_str(),
                static_cast<long long>(kTokens), bytes_text(static_cast<double>(many)).c_str(),
                2 * static_cast<long long>(kTokens));
  }
  const int64_t tokens = record.tokens > 0 ? record.tokens : kTokens;
  Cost all, next;
  std::printf("cost, f32\n");
  LINNET_TRY(layers::record_cost(record, 1, tokens, 0, Dtype::f32, &all));
  std::printf("  %lld tokens at once: %s GFLOP, %s\n", static_cast<long long>(tokens), number(all.flops / 1e9, 3).c_str(),
              bytes_text(all.bytes).c_str());
  if (decodes.ok()) {
    LINNET_TRY(layers::record_cost(record, 1, 1, tokens, Dtype::f32, &next));
    std::printf("  one more token: %s MFLOP, %s\n", number(next.flops / 1e6, 3).c_str(), bytes_text(next.bytes).c_str());
  }
  return {};
}

}  // namespace

int layer_info(const layers::Layer& layer, const std::vector<std::string>& words, bool json) {
  std::vector<layers::Setting> options;
  std::vector<std::string> names;
  for (const OptionDecl& option : layer.options.options) names.push_back(option.name);
  for (const std::string& word : words) {
    const size_t equals = word.find('=');
    if (equals == std::string::npos) {
      return fail(bad_input("info: '" + word + "' is no option of " + layer.name() + ", expected option=value"));
    }
    const std::string name = word.substr(0, equals);
    if (layer.options.find_option(name) == nullptr) {
      return fail(bad_input("info: " + layer.name() + " has no option '" + name + "'" + did_you_mean(name, names)));
    }
    options.push_back({name, word.substr(equals + 1)});
  }
  if (json) {
    std::string text;
    if (const Status status = layers::layer_json(layer, options, 2, &text); !status.ok()) return fail(status);
    std::printf("%s\n", text.c_str());
    return kDone;
  }
  Record record;
  if (const Status status = layers::record_layer(layer, options, &record); !status.ok()) return fail(status);
  const Status status = print_layer(layer, record);
  return status.ok() ? kDone : fail(status);
}

}  // namespace linnet::cli
