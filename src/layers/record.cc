#include "layers/record.h"

#include <algorithm>
#include <cmath>

#include "core/call/call.h"
#include "layers/expression.h"

namespace linnet::layers {
namespace {

// Sizes that stand for kB and kT while an operator's declaration looks at a step. A width may happen to equal one of them, so
// a step is looked at twice, with other sizes: what changes alike is the batch or the tokens.
struct Probe {
  int64_t batch, tokens;
};
constexpr Probe kProbes[2] = {{2, 3}, {5, 7}};

View probe_view(const Shape& shape, Dtype dtype, const Probe& probe) {
  alignas(64) static double anything[8] = {};
  int64_t sizes[kMaxRank];
  for (size_t i = 0; i < shape.size(); ++i) sizes[i] = shape[i] == kB ? probe.batch : shape[i] == kT ? probe.tokens : shape[i];
  return View::dense(anything, dtype, sizes, static_cast<int>(shape.size()));
}

Shape from_probes(const View* views) {
  Shape shape;
  for (int i = 0; i < views[0].rank; ++i) {
    const auto is = [&](int64_t Probe::*size) {
      return views[0].size[i] == kProbes[0].*size && views[1].size[i] == kProbes[1].*size;
    };
    shape.push_back(is(&Probe::batch) ? kB : is(&Probe::tokens) ? kT : views[0].size[i]);
  }
  return shape;
}

Value id(size_t index) { return {static_cast<int>(index)}; }

// NumPy's broadcasting, aligned at the last dimension.
bool broadcast(const Shape& a, const Shape& b, Shape* out) {
  const size_t rank = std::max(a.size(), b.size());
  out->assign(rank, 1);
  for (size_t i = 0; i < rank; ++i) {
    const int64_t x = i < a.size() ? a[a.size() - 1 - i] : 1, y = i < b.size() ? b[b.size() - 1 - i] : 1;
    if (x != y && x != 1 && y != 1) return false;
    (*out)[rank - 1 - i] = x == 1 ? y : x;
  }
  return true;
}

// splitmix64: the same numbers on every machine.
uint64_t next(uint64_t* state) {
  uint64_t z = (*state += 0x9e3779b97f4a7c15ull);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}
double unit(uint64_t* state) { return (static_cast<double>(next(state) >> 11) + 0.5) * 0x1p-53; }
double gauss(uint64_t* state) { return std::sqrt(-2 * std::log(unit(state))) * std::cos(6.283185307179586 * unit(state)); }

}  // namespace

std::string shape_text(const Shape& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    text += (i ? ", " : "") + (shape[i] == kB ? "B" : shape[i] == kT ? "T" : std::to_string(shape[i]));
  }
  return text + "]";
}

const char* rule_name(Init::Rule rule) {
  switch (rule) {
    case Init::Rule::zeros: return "zeros";
    case Init::Rule::ones: return "ones";
    case Init::Rule::constant: return "constant";
    case Init::Rule::normal: return "normal";
    case Init::Rule::uniform: return "uniform";
    case Init::Rule::fan_in: return "fan_in";
    case Init::Rule::xavier: return "xavier";
    case Init::Rule::identity: return "identity";
    case Init::Rule::log_uniform: return "log_uniform";
    case Init::Rule::uniform_log: return "uniform_log";
    case Init::Rule::inverse_softplus_log_uniform: return "inverse_softplus_log_uniform";
    case Init::Rule::log_range: return "log_range";
    case Init::Rule::range: return "range";
    case Init::Rule::first_one: return "first_one";
    case Init::Rule::retention: return "retention";
  }
  return "";
}

std::vector<double> initial_values(const Init& init, const Shape& shape, std::string_view name, uint64_t seed) {
  uint64_t state = seed * 0x9e3779b97f4a7c15ull + 1;
  for (const char c : name) state = (state ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  const int64_t last = shape.empty() ? 1 : shape.back();
  const int64_t rows = shape.size() < 2 ? 1 : shape[shape.size() - 2];
  // A bias starts like the weight beside it: its own length is all that is known of the fan in.
  const double in = static_cast<double>(std::max<int64_t>(last, 1));
  const double out = static_cast<double>(std::max<int64_t>(count / std::max<int64_t>(last, 1), 1));
  std::vector<double> values(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    double& x = values[static_cast<size_t>(i)];
    const auto between = [&](double low, double high) { return low + (high - low) * unit(&state); };
    const int64_t column = last == 0 ? 0 : i % last;
    switch (init.rule) {
      case Init::Rule::zeros: x = 0; break;
      case Init::Rule::ones: x = 1; break;
      case Init::Rule::constant: x = init.a; break;
      case Init::Rule::normal: x = init.a + init.b * gauss(&state); break;
      case Init::Rule::uniform: x = between(init.a, init.b); break;
      case Init::Rule::fan_in: x = between(-1, 1) * init.a / std::sqrt(in); break;
      case Init::Rule::xavier: x = between(-1, 1) * init.a * std::sqrt(6 / (in + out)); break;
      case Init::Rule::identity: x = i / last % rows == column ? 1 : 0; break;
      case Init::Rule::log_uniform: x = std::log(std::max(between(init.a, init.b), 1e-4)); break;
      case Init::Rule::uniform_log: x = between(std::log(init.a), std::log(init.b)); break;
      case Init::Rule::inverse_softplus_log_uniform: {
        const double t = std::max(std::exp(between(std::log(init.a), std::log(init.b))), 1e-4);
        x = t + std::log(-std::expm1(-t));
        break;
      }
      case Init::Rule::log_range: x = std::log(1.0 + static_cast<double>(column)); break;
      case Init::Rule::range: x = init.a * static_cast<double>(column); break;
      case Init::Rule::first_one: x = column == 0 ? 1 : 0; break;
      case Init::Rule::retention: x = std::log1p(-std::exp2(-5 - static_cast<double>(column))); break;
    }
  }
  return values;
}

const Parameter* Record::find_parameter(std::string_view wanted) const {
  for (const Parameter& parameter : parameters) {
    if (parameter.name == wanted) return &parameter;
  }
  return nullptr;
}

int64_t Record::parameter_count() const {
  int64_t total = 0;
  for (const Parameter& parameter : parameters) {
    int64_t count = parameter.trained ? 1 : 0;
    for (const int64_t size : parameter.shape) count *= size;
    total += count;
  }
  return total;
}

bool is_tokenwise(const Op& op) {
  static constexpr std::string_view kNames[] = {
      "dense",    "dense_heads", "dense_quantised", "embedding", "embedding_quantised",
      "rms_norm", "layer_norm",  "rotary",          "glu",       "activation",
      "add",      "l2_norm",     "rms_norm_gated",  "gated_gate"};
  return std::find(std::begin(kNames), std::end(kNames), op.name) != std::end(kNames);
}

bool grows(const Record& record) {
  return std::any_of(record.steps.begin(), record.steps.end(), [](const Step& step) {
    if (step.kind != StepKind::op) return false;
    const auto given = [&](const std::string& name) {
      return std::any_of(step.inputs.begin(), step.inputs.end(), [&](const auto& input) { return input.first == name; });
    };
    const std::vector<std::string>& names = step.op->grows_without;
    return step.op->growing || (!names.empty() && std::none_of(names.begin(), names.end(), given));
  });
}

const OptionDecl* position_option(const Op& op) {
  const OptionDecl* option = op.name == "rotary" ? op.find_option("offset") : op.find_option("position");
  return option != nullptr && option->kind == OptionKind::integer ? option : nullptr;
}

Recorder::Scope::Scope(Recorder& recorder, const std::string& name) : recorder_(recorder), before_(recorder.scope_) {
  if (!name.empty()) recorder.scope_ += name + ".";
}
Recorder::Scope::~Scope() { recorder_.scope_ = before_; }

bool Recorder::require(bool holds, const std::string& sentence) {
  if (!holds && status_.ok()) status_ = bad_input(record_.name + ": " + sentence);
  return holds;
}

void Recorder::tokens(int64_t count) {
  record_.tokens = count;
  for (ValueInfo& info : record_.values) std::replace(info.shape.begin(), info.shape.end(), kT, count);
}

Value Recorder::add(ValueInfo info) {
  if (record_.tokens > 0) std::replace(info.shape.begin(), info.shape.end(), kT, record_.tokens);
  record_.values.push_back(std::move(info));
  return id(record_.values.size() - 1);
}

std::string Recorder::below_scope(const std::string& name) const {
  return name.compare(0, scope_.size(), scope_) == 0 ? name.substr(scope_.size()) : name;
}

std::string Recorder::unique(const std::string& name) {
  const auto taken = [&](const std::string& candidate) {
    return std::any_of(record_.steps.begin(), record_.steps.end(), [&](const Step& s) { return s.name == candidate; });
  };
  std::string candidate = scope_ + name;
  for (int i = 2; taken(candidate); ++i) candidate = scope_ + name + "_" + std::to_string(i);
  return candidate;
}

Value Recorder::input(std::string name, Shape shape, bool integers) {
  Value value = add({.name = std::move(name), .shape = std::move(shape), .source = Source::input, .integers = integers});
  record_.inputs.push_back(value.id);
  return value;
}

Value Recorder::weight(std::string name, Shape shape, Init init, Alias alias, std::string doc) {
  Parameter parameter{.name = scope_ + name, .doc = std::move(doc), .shape = shape, .init = init, .alias = std::move(alias)};
  const auto [at, fresh] = parameters_.emplace(parameter.name, static_cast<int>(record_.parameters.size()));
  if (!fresh) {  // tied: one tensor, read twice
    const Parameter& same = record_.parameters[static_cast<size_t>(at->second)];
    require(same.shape == shape, parameter.name + " is " + shape_text(same.shape) + " and " + shape_text(shape));
    return same.value;
  }
  parameter.value = add({.name = parameter.name,
                         .shape = std::move(shape),
                         .source = Source::parameter,
                         .index = static_cast<int>(record_.parameters.size())});
  record_.parameters.push_back(parameter);
  return parameter.value;
}

Value Recorder::buffer(std::string name, Shape shape, Init init, Alias alias, std::string doc) {
  const Value value = weight(std::move(name), std::move(shape), init, std::move(alias), std::move(doc));
  record_.parameters[static_cast<size_t>(record_.values[static_cast<size_t>(value.id)].index)].trained = false;
  return value;
}

Value Recorder::constant(double value, Shape shape) {
  return add({.name = "constant", .shape = std::move(shape), .source = Source::constant, .constant = value});
}

Value Recorder::add_step(Step step, Shape shape, std::string name) {
  step.name = unique(name);
  const int index = static_cast<int>(record_.steps.size());
  const Value value = add({.name = step.name, .shape = std::move(shape), .source = Source::step, .index = index});
  step.result = value.id;
  record_.steps.push_back(std::move(step));
  return value;
}

Value Recorder::op(std::string_view op_name, std::vector<Named> inputs, std::vector<Setting> options, std::string name,
                   std::string output) {
  if (!status_.ok()) return {};
  const Op* op = find_op(op_name);
  if (!require(op != nullptr, "there is no operator '" + std::string(op_name) + "' in this build")) return {};
  Step step{.kind = StepKind::op, .op = op, .options = std::move(options), .output = std::move(output)};
  const auto check = [&](const Status& status) { return require(status.ok(), status.message()); };
  View views[2];
  for (const Named& input : inputs) {
    if (!input.value.given()) continue;
    step.inputs.emplace_back(input.name, input.value.id);
    const TensorDecl* decl = op->find_input(input.name);
    ValueInfo& info = record_.values[static_cast<size_t>(input.value.id)];
    if (decl != nullptr && (decl->element == Element::acc || decl->element == Element::param)) info.acc = true;
  }
  // A table's rows are read by numbers that a call brings: there are none to look at now.
  if (op->name == "embedding") {
    const auto find = [&](std::string_view wanted) {
      for (const auto& [input, value] : step.inputs) {
        if (input == wanted) return record_.values[static_cast<size_t>(value)].shape;
      }
      return Shape();
    };
    const Shape table = find("table");
    Shape result = find("ids");
    if (!require(table.size() == 2 && result.size() == 2, "embedding: table is " + shape_text(table) + " and ids are " +
                                                              shape_text(result) + ", expected two dimensions each")) {
      return {};
    }
    result.push_back(table[1]);
    if (name.empty()) name = std::string(op_name);
    return add_step(std::move(step), std::move(result), name);
  }
  for (int i = 0; i < 2; ++i) {
    Call call(*op);
    for (const Setting& option : step.options) {
      if (!check(call.set_option(option.name, option.text))) return {};
    }
    for (const auto& [input, value] : step.inputs) {
      const TensorDecl* decl = op->find_input(input);
      const Element element = decl == nullptr ? Element::io : decl->element;
      const Dtype dtype = element == Element::mask ? Dtype::u8 : element == Element::index ? Dtype::i64 : Dtype::f32;
      if (!check(call.set(input, probe_view(record_.values[static_cast<size_t>(value)].shape, dtype, kProbes[i])))) return {};
    }
    if (!check(call.prepare()) || !check(call.output_view(step.output, &views[i]))) return {};
  }
  if (name.empty()) name = std::string(op_name);
  return add_step(std::move(step), from_probes(views), name);
}

Value Recorder::dense(Value x, Value weight, Value bias, std::string name) {
  if (!status_.ok()) return {};
  const Shape& from = shape(x);
  Value rows = x;
  if (from.size() > 3) rows = join(x);
  if (name.empty() && weight.given()) {
    name = below_scope(record_.values[static_cast<size_t>(weight.id)].name);
    if (name.size() > 7 && name.compare(name.size() - 7, 7, ".weight") == 0) name.resize(name.size() - 7);
  }
  return op("dense", {{"x", rows}, {"weight", weight}, {"bias", bias}}, {}, name);
}

Value Recorder::experts(Value x, Value weights, const std::vector<Expert>& list, int64_t top, bool normalised,
                        const std::string& act) {
  if (!status_.ok()) return {};
  const Shape from = shape(x);
  const int64_t count = static_cast<int64_t>(list.size()), channels = from.back();
  Shape wanted = from;
  wanted.back() = count;
  if (!require(from.size() == 3 && shape(weights) == wanted && top >= 1 && top <= count,
               "experts: x is " + shape_text(from) + ", the weights are " + shape_text(shape(weights)) + " for " +
                   std::to_string(count) + " experts, of which each token runs " + std::to_string(top))) {
    return {};
  }
  Step step{.kind = StepKind::experts, .options = {{"act", act}}, .top = top, .normalised = normalised};
  step.inputs = {{"x", x.id}, {"weights", weights.id}};
  const int64_t inner = shape(list[0].gate)[0];
  for (int64_t e = 0; e < count; ++e) {
    const Expert& expert = list[static_cast<size_t>(e)];
    if (!require(shape(expert.gate) == Shape{inner, channels} && shape(expert.up) == Shape{inner, channels} &&
                     shape(expert.down) == Shape{channels, inner},
                 "experts: expert " + std::to_string(e) + " has other shapes than the first one")) {
      return {};
    }
    const std::string number = std::to_string(e) + ".";
    step.inputs.emplace_back(number + "gate", expert.gate.id);
    step.inputs.emplace_back(number + "up", expert.up.id);
    step.inputs.emplace_back(number + "down", expert.down.id);
  }
  record_.values[static_cast<size_t>(weights.id)].acc = true;
  return add_step(std::move(step), from, "experts");
}

Value Recorder::map(std::string expression, std::vector<Named> inputs, std::string name) {
  if (!status_.ok()) return {};
  Step step{.kind = StepKind::map, .expression = std::move(expression)};
  std::vector<std::string> names;
  Shape shape;
  for (const Named& input : inputs) {
    if (!input.value.given()) continue;
    names.push_back(input.name);
    step.inputs.emplace_back(input.name, input.value.id);
    Shape wider;
    const Shape& own = record_.values[static_cast<size_t>(input.value.id)].shape;
    if (!require(broadcast(shape, own, &wider), "map \"" + step.expression + "\": " + input.name + " is " + shape_text(own) +
                                                    ", which does not fit " + shape_text(shape))) {
      return {};
    }
    shape = wider;
  }
  const Status status = parse_map(step.expression, names, &step.program);
  if (!require(status.ok(), status.message())) return {};
  step.positional = map_uses_position(step.expression);
  if (!require(shape.size() <= static_cast<size_t>(kMapRank) && !shape.empty(),
               "map \"" + step.expression + "\": its result has rank " + std::to_string(shape.size()) + ", expected 1 to " +
                   std::to_string(kMapRank))) {
    return {};
  }
  if (step.positional && !require(shape.size() >= 2 && (shape[1] == kT || shape[1] == record_.tokens),
                                  "map \"" + step.expression + "\": position needs a result [B, T, ..]")) {
    return {};
  }
  if (step.program.drops) shape.pop_back();
  if (name.empty()) name = "map";
  return add_step(std::move(step), shape, name);
}

Value Recorder::view(ViewKind kind, Value x, Shape shape, int64_t begin, int64_t size) {
  Step step{.kind = StepKind::view, .view = kind, .begin = begin, .size = size};
  step.inputs.emplace_back("x", x.id);
  return add_step(std::move(step), std::move(shape), below_scope(record_.values[static_cast<size_t>(x.id)].name));
}

Value Recorder::split(Value x, int64_t heads) {
  if (!status_.ok() || !x.given()) return {};
  Shape shape = this->shape(x);
  const int64_t channels = shape.back();
  if (!require(heads > 0 && channels % heads == 0,
               std::to_string(channels) + " channels cannot be split in " + std::to_string(heads) + " heads")) {
    return {};
  }
  shape.back() = heads;
  shape.push_back(channels / heads);
  return view(ViewKind::split, x, shape, 0, heads);
}

Value Recorder::join(Value x) {
  if (!status_.ok() || !x.given()) return {};
  Shape shape = this->shape(x);
  const int64_t channels = shape.back();
  shape.pop_back();
  shape.back() *= channels;
  return view(ViewKind::join, x, shape, 0, 0);
}

Value Recorder::slice(Value x, int64_t begin, int64_t end, int64_t stride) {
  if (!status_.ok() || !x.given()) return {};
  Shape shape = this->shape(x);
  if (!require(begin >= 0 && begin < end && end <= shape.back() && stride > 0,
               "channels " + std::to_string(begin) + " to " + std::to_string(end) + " of " + shape_text(shape))) {
    return {};
  }
  shape.back() = (end - begin + stride - 1) / stride;
  const int64_t size = shape.back();
  const Value result = view(ViewKind::slice, x, shape, begin, size);
  record_.steps.back().stride = stride;
  return result;
}

Value Recorder::concat(Value a, Value b, bool interleaved) {
  if (!status_.ok() || !a.given() || !b.given()) return {};
  Shape shape = this->shape(a), other = this->shape(b);
  const int64_t width = other.back();
  other.back() = shape.back();
  if (!require(shape == other && (!interleaved || width == shape.back()),
               shape_text(this->shape(a)) + " and " + shape_text(this->shape(b)) + " cannot be joined")) {
    return {};
  }
  shape.back() += width;
  Step step{.kind = StepKind::concat, .interleaved = interleaved};
  step.inputs = {{"a", a.id}, {"b", b.id}};
  return add_step(std::move(step), std::move(shape), "concat");
}

Value Recorder::table(std::vector<double> values) {
  const int64_t size = static_cast<int64_t>(values.size());
  return add({.name = "table", .shape = {size}, .source = Source::constant, .table = std::move(values)});
}

Value Recorder::reshape(Value x, Shape last_sizes) {
  if (!status_.ok() || !x.given()) return {};
  Shape shape = this->shape(x);
  int64_t before = 1, after = 1;
  for (size_t i = 2; i < shape.size(); ++i) before *= shape[i];
  for (const int64_t size : last_sizes) after *= size;
  if (!require(shape.size() >= 2 && before == after,
               shape_text(shape) + " cannot be seen as [B, T, ..] of " + shape_text(last_sizes))) {
    return {};
  }
  shape.resize(2);
  shape.insert(shape.end(), last_sizes.begin(), last_sizes.end());
  return view(ViewKind::reshape, x, shape, 0, 0);
}

Value Recorder::last(Value x) {
  if (!status_.ok() || !x.given()) return {};
  Shape shape = this->shape(x);
  if (!require(shape.size() >= 2 && (shape[1] == kT || shape[1] == record_.tokens), shape_text(shape) + " has no tokens"))
    return {};
  shape[1] = 1;
  return view(ViewKind::last, x, shape, 0, 0);
}

Value Recorder::column(Value x) {
  if (!status_.ok() || !x.given()) return {};
  Shape shape = this->shape(x);
  shape.push_back(1);
  return view(ViewKind::column, x, shape, 0, 0);
}

Value Recorder::drop_token(Value x) {
  if (!status_.ok() || !x.given()) return {};
  Shape shape = this->shape(x);
  if (!require(shape.size() >= 2 && shape[1] == 1, shape_text(shape) + " has more than one token")) return {};
  shape.erase(shape.begin() + 1);
  return view(ViewKind::drop_token, x, shape, 0, 0);
}

Value Recorder::repeat(Value x, int64_t times) {
  if (!status_.ok() || !x.given() || times == 1) return x;
  const Shape from = this->shape(x);
  const int64_t heads = from[2], width = from[3];
  const Value one = constant(1, {1, 1, 1, times, 1});
  const Value each = map("x * one", {{"x", reshape(x, {heads, 1, width})}, {"one", one}}, "repeat");
  return reshape(each, {heads * times, width});
}

Value Recorder::output(Value y) {
  record_.output = y.id;
  return y;
}

Status Recorder::finish(Record* record) {
  if (!status_.ok()) return status_;
  if (record_.output < 0) return bad_input(record_.name + ": the record has no output");
  std::vector<bool> read(record_.values.size(), false), otherwise(record_.values.size(), false);  // than by products
  for (const Step& step : record_.steps) {
    const bool dense = step.kind == StepKind::op && (step.op->name == "dense" || step.op->name == "embedding");
    for (const auto& [name, value] : step.inputs) {
      read[static_cast<size_t>(value)] = true;
      if (step.kind == StepKind::experts || (dense && (name == "weight" || name == "table"))) continue;
      otherwise[static_cast<size_t>(value)] = true;
    }
  }
  for (Parameter& parameter : record_.parameters) {
    const size_t value = static_cast<size_t>(parameter.value.id);
    parameter.dense_only = read[value] && !otherwise[value];
  }
  *record = std::move(record_);
  return {};
}

}  // namespace linnet::layers
