#include "layers/describe.h"

#include <cmath>
#include <cstddef>

#include "core/call/describe.h"
#include "layers/state.h"

namespace linnet::layers {
namespace {

void shape(const Shape& sizes, JsonWriter& json) {
  json.begin_array();
  for (const int64_t size : sizes) {
    if (size == kB) {
      json.value("B");
    } else if (size == kT) {
      json.value("T");
    } else {
      json.value(size);
    }
  }
  json.end_array();
}

void reference(const Record& record, int id, JsonWriter& json) {
  const ValueInfo& info = record.values[static_cast<size_t>(id)];
  json.begin_object();
  switch (info.source) {
    case Source::input: json.member("input", info.name); break;
    case Source::parameter: json.member("parameter", info.name); break;
    case Source::step: json.member("step", info.name); break;
    case Source::constant:
      if (info.table.empty()) {
        json.member("constant", info.constant).key("shape");
        shape(info.shape, json);
      } else {
        json.key("table").begin_array();
        for (const double x : info.table) json.value(x);
        json.end_array();
      }
      break;
  }
  json.end_object();
}

const char* kind_name(StepKind kind) {
  switch (kind) {
    case StepKind::op: return "op";
    case StepKind::map: return "map";
    case StepKind::view: return "view";
    case StepKind::concat: return "concat";
    case StepKind::experts: return "experts";
  }
  return "";
}
const char* view_name(ViewKind kind) {
  switch (kind) {
    case ViewKind::split: return "split";
    case ViewKind::join: return "join";
    case ViewKind::slice: return "slice";
    case ViewKind::reshape: return "reshape";
    case ViewKind::last: return "last";
    case ViewKind::column: return "column";
    case ViewKind::drop_token: return "drop_token";
  }
  return "";
}

// The tensors of a step's state, rows as kB; the sizes that follow the capacity as "capacity".
std::vector<StateTensor> states_of(const Record& record, size_t step, std::vector<std::vector<bool>>* growing) {
  std::vector<StateTensor> small, large;
  const Step& s = record.steps[step];
  if (s.kind != StepKind::op || is_tokenwise(*s.op)) return {};
  const int index = static_cast<int>(step);
  if (!state_tensors(record, index, 1, 1 << 10, Dtype::f32, &small).ok()) return {};
  if (!state_tensors(record, index, 1, 1 << 12, Dtype::f32, &large).ok()) return {};
  for (size_t i = 0; i < small.size(); ++i) {
    growing->emplace_back();
    for (int d = 0; d < small[i].view.rank; ++d) growing->back().push_back(small[i].view.size[d] != large[i].view.size[d]);
  }
  return small;
}

}  // namespace

void describe(const Record& record, JsonWriter& json) {
  json.member("tokens", record.tokens).member("growing", grows(record)).key("inputs").begin_array();
  for (const int id : record.inputs) {
    const ValueInfo& info = record.values[static_cast<size_t>(id)];
    json.begin_object().member("name", info.name).key("shape");
    shape(info.shape, json);
    json.member("integers", info.integers).end_object();
  }
  json.end_array().key("parameters").begin_array();
  for (const Parameter& p : record.parameters) {
    json.begin_object().member("name", p.name).key("shape");
    shape(p.shape, json);
    json.member("trained", p.trained).member("alias", p.alias.name).member("transposed", p.alias.transposed);
    json.key("init").begin_object().member("rule", rule_name(p.init.rule)).member("a", p.init.a).member("b", p.init.b);
    json.end_object().member("doc", p.doc).end_object();
  }
  json.end_array().key("steps").begin_array();
  for (size_t i = 0; i < record.steps.size(); ++i) {
    const Step& step = record.steps[i];
    const ValueInfo& result = record.values[static_cast<size_t>(step.result)];
    json.begin_object().member("name", step.name).member("kind", kind_name(step.kind));
    if (step.kind == StepKind::op) json.member("op", step.op->name).member("output", step.output);
    if (step.kind == StepKind::map) json.member("expression", step.expression).member("positional", step.positional);
    if (step.kind == StepKind::concat) json.member("interleaved", step.interleaved);
    if (step.kind == StepKind::experts) json.member("top", step.top).member("normalised", step.normalised);
    if (step.kind == StepKind::view) {
      json.member("view", view_name(step.view)).member("begin", step.begin).member("size", step.size);
      json.member("stride", step.stride);
    }
    json.key("inputs").begin_object();
    for (const auto& [name, id] : step.inputs) {
      json.key(name);
      reference(record, id, json);
    }
    json.end_object();
    if (step.kind == StepKind::op || step.kind == StepKind::experts) {
      json.key("options").begin_object();
      for (const Setting& option : step.options) json.member(option.name, option.text);
      json.end_object();
    }
    json.key("shape");
    shape(result.shape, json);
    json.member("acc", result.acc);
    std::vector<std::vector<bool>> growing;
    json.key("state").begin_array();
    for (const StateTensor& tensor : states_of(record, i, &growing)) json.value(tensor.name);
    json.end_array().end_object();
  }
  json.end_array().key("output");
  reference(record, record.output, json);
  const Status status = decodable(record);
  json.member("decode", status.ok()).member("why_not", status.message()).key("states").begin_array();
  for (size_t i = 0; status.ok() && i < record.steps.size(); ++i) {
    std::vector<std::vector<bool>> growing;
    const std::vector<StateTensor> tensors = states_of(record, i, &growing);
    for (size_t t = 0; t < tensors.size(); ++t) {
      json.begin_object().member("name", tensors[t].name).member("step", record.steps[i].name).key("shape").begin_array();
      for (int d = 0; d < tensors[t].view.rank; ++d) {
        if (d == 0) {
          json.value("B");
        } else if (growing[t][static_cast<size_t>(d)]) {
          json.value("capacity");
        } else {
          json.value(tensors[t].view.size[d]);
        }
      }
      json.end_array().member("dtype", dtype_name(tensors[t].view.dtype)).end_object();
    }
  }
  json.end_array().member("parameter_count", record.parameter_count());
}

void describe_options(const Layer& layer, const std::vector<Setting>& values, JsonWriter& json) {
  alignas(std::max_align_t) char defaults[kMaxStruct], out[8], grads[8];
  layer.options.construct(defaults, out, grads);
  json.begin_array();
  for (const OptionDecl& option : layer.options.options) {
    std::string value = option_text(option, defaults);
    json.begin_object().member("name", option.name).member("kind", option_kind_name(option.kind)).member("default", value);
    for (const Setting& setting : values) {
      if (setting.name == option.name) value = setting.text;
    }
    json.member("value", value);
    const auto bound = [&](const char* name, double x, bool open) {
      json.key(name);
      if (open) {
        json.value(nullptr);
      } else {
        json.value(x);
      }
    };
    bound("low", option.low, option.low <= -kAnyReal);
    bound("high", option.high, option.high >= static_cast<double>(kAnyCount));
    json.key("choices").begin_array();
    for (const std::string& choice : option.choices) json.value(choice);
    json.end_array().member("doc", option.doc).end_object();
  }
  json.end_array();
}

namespace {
void heading(const Layer& layer, JsonWriter& json) {
  json.member("name", layer.name()).member("module", layer.module).member("mechanism", layer.options.mechanism);
  json.member("summary", layer.options.summary).member("equation", layer.options.equation).member("paper", layer.paper);
}
}  // namespace

Status layer_json(const Layer& layer, const std::vector<Setting>& options, int indent, std::string* text) {
  Record record;
  LINNET_TRY(record_layer(layer, options, &record));
  JsonWriter json(indent);
  json.begin_object();
  heading(layer, json);
  json.key("options");
  describe_options(layer, record.options, json);
  describe(record, json);
  json.end_object();
  *text = json.text();
  return {};
}

std::string layers_json(int indent) {
  JsonWriter json(indent);
  json.begin_object().key("layers").begin_array();
  for (const Layer* layer : all_layers()) {
    json.begin_object();
    heading(*layer, json);
    json.key("options");
    describe_options(*layer, {}, json);
    json.end_object();
  }
  json.end_array().end_object();
  return json.text();
}

}  // namespace linnet::layers
