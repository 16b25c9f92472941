#include "core/call/describe.h"

#include <algorithm>

#include "core/letters.h"
#include "core/version.h"

namespace linnet {
namespace {

const char* element_name(Element element) {
  switch (element) {
    case Element::io: return "io";
    case Element::acc: return "acc";
    case Element::param: return "param";
    case Element::weight: return "weight";
    case Element::index: return "index";
    case Element::mask: return "mask";
    case Element::code: return "code";
  }
  return "";
}

const char* values_name(Values values) {
  switch (values) {
    case Values::normal: return "normal";
    case Values::logits: return "logits";
    case Values::unit_rows: return "unit_rows";
    case Values::unit_interval: return "unit_interval";
    case Values::write_strength: return "write_strength";
    case Values::gain: return "gain";
    case Values::feature_sums: return "feature_sums";
    case Values::rounding: return "rounding";
    case Values::log_decay: return "log_decay";
    case Values::positive: return "positive";
    case Values::finite: return "finite";
    case Values::number: return "number";
    case Values::weights: return "weights";
    case Values::offsets: return "offsets";
    case Values::lengths: return "lengths";
    case Values::starts: return "starts";
    case Values::below: return "below";
    case Values::page_table: return "page_table";
    case Values::tree: return "tree";
  }
  return "";
}

}  // namespace

const char* option_kind_name(OptionKind kind) {
  switch (kind) {
    case OptionKind::real: return "real";
    case OptionKind::maybe_real: return "maybe_real";
    case OptionKind::integer: return "integer";
    case OptionKind::boolean: return "boolean";
    case OptionKind::choice: return "choice";
    case OptionKind::window: return "window";
    case OptionKind::sizes: return "sizes";
  }
  return "";
}

namespace {

void write_text(JsonWriter& json, const char* name, const std::string& text) {
  json.key(name);
  if (text.empty()) {
    json.value(nullptr);
  } else {
    json.value(text);
  }
}

void write_shape(JsonWriter& json, const char* name, const std::string& shape) {
  json.key(name).begin_array();
  for (const std::string_view word : Words(shape)) json.value(word);
  json.end_array();
}

void write_tensor(JsonWriter& json, const TensorDecl& decl, bool input) {
  json.begin_object().member("name", decl.name);
  write_shape(json, "shape", decl.shape);
  if (!decl.other_shape.empty()) write_shape(json, "other_shape", decl.other_shape);
  json.member("doc", decl.doc).member("element", element_name(decl.element));
  if (input) {
    json.member("values", values_name(decl.values));
    write_text(json, "of", decl.of);
  }
  json.member("optional", decl.optional);
  if (!decl.needed_by.empty()) {
    json.member("needed_by", decl.needed_by).key("needed_for").begin_array();
    for (const std::string& choice : decl.needed_for) json.value(choice);
    json.end_array();
  }
  if (input) json.member("mutated", decl.mutated).member("broadcast", decl.broadcast);
  json.member("differentiable", decl.differentiable);
  if (!input) json.member("saved", decl.saved);
  json.end_object();
}

void write_bound(JsonWriter& json, const char* name, const OptionDecl& option, double bound) {
  json.key(name);
  const bool whole =
      option.kind == OptionKind::integer || option.kind == OptionKind::window || option.kind == OptionKind::sizes;
  if (bound <= -kAnyReal || bound >= (whole ? 9e15 : kAnyReal)) {
    json.value(nullptr);
  } else if (whole) {
    json.value(static_cast<int64_t>(bound));
  } else {
    json.value(bound);
  }
}

template <class T>
const T& at(const char* args, const OptionDecl& option) {
  return *reinterpret_cast<const T*>(args + option.offset);
}

void write_default(JsonWriter& json, const OptionDecl& option, const char* args) {
  json.key("default");
  switch (option.kind) {
    case OptionKind::real: json.value(at<double>(args, option)); break;
    case OptionKind::maybe_real:
      if (at<Maybe>(args, option).given) {
        json.value(at<Maybe>(args, option).value);
      } else {
        json.value(nullptr);
      }
      break;
    case OptionKind::integer: json.value(at<int64_t>(args, option)); break;
    case OptionKind::boolean: json.value(at<bool>(args, option)); break;
    case OptionKind::choice: json.value(option.choices[static_cast<size_t>(at<int32_t>(args, option))]); break;
    case OptionKind::window:
      json.begin_array().value(at<Window>(args, option).left).value(at<Window>(args, option).right).end_array();
      break;
    case OptionKind::sizes:
      json.begin_array();
      for (int64_t i = 0; i < at<Sizes>(args, option).count; ++i) json.value(at<Sizes>(args, option).value[i]);
      json.end_array();
      break;
  }
}

void write_option(JsonWriter& json, const OptionDecl& option, const char* args) {
  json.begin_object().member("name", option.name).member("kind", option_kind_name(option.kind)).member("doc", option.doc);
  write_default(json, option, args);
  if (option.kind == OptionKind::choice) {
    json.key("choices").begin_array();
    for (const std::string& choice : option.choices) json.value(choice);
    json.end_array();
  } else if (option.kind != OptionKind::boolean) {
    write_bound(json, "low", option, option.low);
    write_bound(json, "high", option, option.high);
  }
  json.end_object();
}

// The sizes of the documentation's example: letter -> size, of the inputs' letters.
void write_example(JsonWriter& json, const Op& op) {
  std::vector<std::string_view> written;
  json.key("example").begin_object();
  for (const TensorDecl& decl : op.inputs) {
    for (const std::string_view word : Words(decl.shape)) {
      if (!is_letter(word) || std::find(written.begin(), written.end(), word) != written.end()) continue;
      written.push_back(word);
      json.key(word).value(letter_named(word).example);
    }
  }
  json.end_object();
}

// The RMS gates that hold for an implementation (tolerance.h): dtype -> [forward, gradients], at small logits.
void write_gates(JsonWriter& json, const Op& op, const Impl& impl) {
  const bool growing = op.growing || !op.grows_without.empty();
  json.member("rounding", impl.rounding == Rounding::none ? "none" : "matrix_units").key("gates").begin_object();
  for (const Dtype dtype : {Dtype::f64, Dtype::f32, Dtype::bf16, Dtype::f16}) {
    json.key(dtype_name(dtype)).begin_array();
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      json.value(rms_gate(dtype, pass, Against::reference, growing, 0, impl.rounding));
    }
    json.end_array();
  }
  json.end_object();
}

// What the gates grow with and where they end (tolerance.h).
void write_tolerance(JsonWriter& json) {
  json.key("tolerance").begin_object().member("logits", kLogits).member("largest_rms", kLargestRms);
  json.member("max_over_rms", kMaxOverRms).member("largest_max", kLargestMax);
  json.member("cancelled", kCancelled)
      .member("cancelled_epsilons", kCancelledEpsilons)
      .member("cancelled_most", kCancelledMost)
      .key("gates")
      .begin_object();
  for (const Dtype dtype : {Dtype::f64, Dtype::f32, Dtype::bf16, Dtype::f16}) {  // RMS gates: [forward, gradients]
    const auto pair = [&](const char* name, Against against, bool growing, Rounding rounding) {
      json.key(name).begin_array();
      for (const Pass pass : {Pass::forward, Pass::backward}) json.value(rms_gate(dtype, pass, against, growing, 0, rounding));
      json.end_array();
    };
    json.key(dtype_name(dtype)).begin_object();
    pair("reference", Against::reference, false, Rounding::none);
    pair("growing", Against::reference, true, Rounding::none);
    pair("matrix_units", Against::reference, false, Rounding::matrix_units);
    pair("vectors", Against::vectors, false, Rounding::none);
    json.end_object();
  }
  json.end_object().end_object();
}

}  // namespace

// The listing of all operators is read when the Python package is imported, and must not wake the GPU's driver: a process that
// has it cannot be forked.
void describe(const Op& op, JsonWriter& json, bool ask_gpu) {
  json.begin_object().member("name", op.name).member("mechanism", op.mechanism).member("summary", op.summary);
  json.member("equation", op.equation);
  write_text(json, "decode", op.decode);
  json.member("differentiable", op.differentiable()).member("growing", op.growing);
  json.key("inputs").begin_array();
  for (const TensorDecl& decl : op.inputs) write_tensor(json, decl, true);
  json.end_array().key("outputs").begin_array();
  for (const TensorDecl& decl : op.outputs) write_tensor(json, decl, false);
  json.end_array().key("options").begin_array();
  alignas(std::max_align_t) char args[kMaxStruct], out[kMaxStruct], grads[kMaxStruct];
  op.construct(args, out, grads);
  for (const OptionDecl& option : op.options) write_option(json, option, args);
  json.end_array().key("letters").begin_array();
  for (const LetterRule& rule : op.letters) {
    json.begin_object().member("letter", rule.letter);
    write_text(json, "by", rule.by);
    json.key("cases").begin_array();
    for (const auto& [choice, expression] : rule.cases) json.begin_array().value(choice).value(expression).end_array();
    json.end_array().end_object();
  }
  json.end_array();
  write_example(json, op);
  json.key("multiples").begin_array();
  for (const auto& [letter, divisor] : op.multiples) json.begin_array().value(letter).value(divisor).end_array();
  json.end_array().key("implementations").begin_array();
  for (const Impl& impl : op.impls) {
    const bool asked = ask_gpu || impl.device == Device::cpu;
    const std::string reason = asked ? impl.missing() : "linnet info " + op.name + " tells whether this machine's GPU runs it";
    json.begin_object().member("name", impl.name).member("device", impl.device == Device::cuda ? "cuda" : "cpu");
    json.member("backward", impl.backward != nullptr);
    json.member("usable", reason.empty()).member("reason", reason);
    write_gates(json, op, impl);
    json.end_object();
  }
  json.end_array().end_object();
}

std::string describe_json(const Op& op, int indent) {
  JsonWriter json(indent);
  describe(op, json, true);
  return json.text();
}

std::string describe_json(int indent) {
  JsonWriter json(indent);
  json.begin_object().member("version", LINNET_VERSION);
  write_tolerance(json);
  json.key("ops").begin_array();
  for (const Op* op : all_ops()) describe(*op, json, false);
  json.end_array().end_object();
  return json.text();
}

}  // namespace linnet
