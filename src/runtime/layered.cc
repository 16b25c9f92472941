#include "runtime/layered.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/half.h"
#include "layers/layer.h"
#include "runtime/model.h"

namespace linnet {

namespace {

std::string option_of(const BlockSpec& block, const char* name) {
  for (const layers::Setting& s : block.options) {
    if (s.name == name) return s.text;
  }
  return "";
}

int64_t count_of(const BlockSpec& block, const char* name, int64_t otherwise) {
  const std::string text = option_of(block, name);
  const int64_t count = text.empty() ? 0 : std::atoll(text.c_str());
  return count > 0 ? count : otherwise;
}

// The operator that computes softmax weights, or what stands in its place.
const layers::Step* attention_step(const layers::Record& record) {
  const layers::Step* found = nullptr;
  for (const layers::Step& step : record.steps) {
    if (step.kind != layers::StepKind::op) continue;
    const std::string& op = step.op->name;
    if (op == "softmax" || op == "gated" || op == "monarch" || op == "hierarchical") found = &step;
  }
  return found;
}

std::string option_of(const layers::Step& step, const char* name) {
  for (const layers::Setting& s : step.options) {
    if (s.name == name) return s.text;
  }
  return "";
}

// Tokens of a block at a time: what lies between its steps is no more than that of so many, however long the text is.
constexpr int64_t kPiece = 2048;

// [1, T, heads, width], strided, to dense behind what is there.
void copy_out(const View& view, std::vector<float>& out) {
  const size_t before = out.size();
  out.resize(before + static_cast<size_t>(view.elements()));
  float* to = out.data() + before;
  const float* from = static_cast<const float*>(view.data);
  for (int64_t t = 0; t < view.size[1]; ++t) {
    for (int64_t h = 0; h < view.size[2]; ++h) {
      to = std::copy_n(from + t * view.stride[1] + h * view.stride[2], view.size[3], to);
    }
  }
}

}  // namespace

LayeredModel::LayeredModel(const Model& model) : inner_(model.inner_) {}

int64_t LayeredModel::layers() const { return static_cast<int64_t>(inner_->d.blocks.size()); }
int64_t LayeredModel::hidden() const { return inner_->d.hidden; }
bool LayeredModel::causal() const { return inner_->d.causal; }

bool LayeredModel::converts(int64_t layer) const {
  const BlockSpec& block = inner_->d.blocks[static_cast<size_t>(layer)];
  const bool biased = !option_of(block, "alibi").empty();                       // no mechanism has linear biases
  return block.mixer == "softmax_attention" && block.label.empty() && !biased;  // a label: converted before
}
int64_t LayeredModel::own_window(int64_t layer) const {
  const BlockSpec& block = inner_->d.blocks[static_cast<size_t>(layer)];
  return block.mixer == "softmax_attention" && block.label.empty() ? window_of(block) : 0;
}
std::string LayeredModel::mixer(int64_t layer) const {
  const BlockSpec& block = inner_->d.blocks[static_cast<size_t>(layer)];
  const std::string mechanism = option_of(block, "mechanism");
  return (block.mixer.empty() ? "none" : block.mixer) + (mechanism.empty() ? "" : " (" + mechanism + ")");
}
bool LayeredModel::attends(int64_t layer) const {
  layers::Record record;
  if (!record_block(inner_->d, static_cast<size_t>(layer), &record).ok()) return false;
  int64_t softmax = 0, others = 0;  // a window for each head of keys is several operators
  for (const layers::Step& step : record.steps) {
    if (step.kind != layers::StepKind::op) continue;
    const std::string& op = step.op->name;
    (op == "softmax" || op == "gated" ? softmax : others) +=
        op == "softmax" || op == "gated" || op == "monarch" || op == "hierarchical" || op == "features" ||
        op == "distill_window" || op == "gated_delta" || op == "gla" || op == "distill";
  }
  return softmax == 1 && others == 0;
}
bool LayeredModel::parts_heads(int64_t layer) const {
  const Op& options = layers::find_layer("converted_attention")->options;
  const BlockSpec& block = inner_->d.blocks[static_cast<size_t>(layer)];
  return converts(layer) && std::all_of(block.options.begin(), block.options.end(),
                                        [&](const layers::Setting& s) { return options.find_option(s.name) != nullptr; });
}
bool LayeredModel::replaces(int64_t layer) const { return parts_heads(layer) && own_window(layer) == 0; }
int64_t LayeredModel::heads(int64_t layer) const { return count_of(inner_->d.blocks[static_cast<size_t>(layer)], "heads", 1); }
int64_t LayeredModel::kv_heads(int64_t layer) const {
  return count_of(inner_->d.blocks[static_cast<size_t>(layer)], "kv_heads", heads(layer));
}
int64_t LayeredModel::key(int64_t layer) const {
  return count_of(inner_->d.blocks[static_cast<size_t>(layer)], "key", inner_->d.hidden / heads(layer));
}
int64_t LayeredModel::value(int64_t layer) const {
  return count_of(inner_->d.blocks[static_cast<size_t>(layer)], "value", key(layer));
}

bool LayeredModel::goes_beyond() const { return inner_->d.image == 0 && inner_->d.positions == 0; }

Status LayeredModel::embed(const std::vector<int32_t>& tokens, std::vector<float>& x) const {
  const Description& d = inner_->d;
  const int64_t longer = goes_beyond() ? std::max<int64_t>(static_cast<int64_t>(tokens.size()) - d.context, 0) : 0;
  LINNET_TRY(inner_->check_tokens(tokens, -longer));
  layers::Record record;
  LINNET_TRY(record_embedding(d, &record));
  layers::Runner runner;
  LINNET_TRY(layers::Runner::make(std::move(record), {}, &runner));
  LINNET_TRY(inner_->weights.bind(runner));
  const int64_t count = static_cast<int64_t>(tokens.size());
  const std::vector<int64_t> ids(tokens.begin(), tokens.end());
  const std::vector<int64_t> types(ids.size(), 0);
  std::vector<int64_t> positions(tokens.size());
  for (size_t t = 0; t < positions.size(); ++t) positions[t] = static_cast<int64_t>(t);
  std::vector<View> inputs = {View::dense(ids.data(), Dtype::i64, {1, count})};
  if (d.positions > 0) inputs.push_back(View::dense(positions.data(), Dtype::i64, {1, count}));
  if (d.types > 0) inputs.push_back(View::dense(types.data(), Dtype::i64, {1, count}));
  x.resize(static_cast<size_t>(count * d.hidden));
  Context context;
  context.executor = inner_->executor;
  return runner.run(inputs, View::dense(x.data(), Dtype::f32, {1, count, d.hidden}), {}, context);
}

Status LayeredModel::embed_image(const std::vector<float>& pixels, std::vector<float>& x) const {
  const Description& d = inner_->d;
  std::vector<float> patches;
  LINNET_TRY(inner_->patches_of(pixels, patches));
  const int64_t count = d.context, inputs = static_cast<int64_t>(patches.size()) / count;
  layers::Record record;
  LINNET_TRY(record_embedding(d, &record));
  layers::Runner runner;
  LINNET_TRY(layers::Runner::make(std::move(record), {}, &runner));
  LINNET_TRY(inner_->weights.bind(runner));
  std::vector<int64_t> positions(static_cast<size_t>(count));
  for (size_t t = 0; t < positions.size(); ++t) positions[t] = static_cast<int64_t>(t);
  x.resize(static_cast<size_t>(count * d.hidden));
  Context context;
  context.executor = inner_->executor;
  return runner.run(
      {View::dense(patches.data(), Dtype::f32, {1, count, inputs}), View::dense(positions.data(), Dtype::i64, {1, count})},
      View::dense(x.data(), Dtype::f32, {1, count, d.hidden}), {}, context);
}

Status LayeredModel::block(const ConvertedLayer& layer, const std::vector<float>& x, std::vector<float>& y,
                           const ParameterValues* extra, HeadTaps* taps) const {
  const size_t index = static_cast<size_t>(layer.index);
  Description d = inner_->d;
  BlockSpec& spec = d.blocks[index];
  LINNET_TRY(convert_block(layer, spec));
  layers::Record record;
  LINNET_TRY(record_block(d, index, &record));
  const layers::Step* attention = attention_step(record);
  std::string names[4];
  if (taps != nullptr) {
    if (attention == nullptr) return bad_input("layer " + std::to_string(layer.index) + " has no softmax attention");
    const auto name_of = [&](int id) { return record.values[static_cast<size_t>(id)].name; };
    for (const auto& [input, id] : attention->inputs) {
      if (input == "q") names[0] = name_of(id);
      if (input == "k") names[1] = name_of(id);
      if (input == "v") names[2] = name_of(id);
    }
    names[3] = name_of(attention->result);
    const std::string window = option_of(*attention, "window"), prefix = option_of(*attention, "prefix");
    if (const size_t comma = window.find(','); comma != std::string::npos) {
      taps->window_left = std::atoll(window.c_str());
      taps->window_right = std::atoll(window.c_str() + comma + 1);
    }
    taps->prefix = std::atoll(prefix.c_str());
  }
  layers::Runner runner;
  LINNET_TRY(layers::Runner::make(std::move(record), inner_->run, &runner));
  for (const layers::Parameter& parameter : runner.record().parameters) {
    const auto own = extra == nullptr ? ParameterValues::const_iterator{} : extra->find(parameter.name);
    if (extra != nullptr && own != extra->end()) {
      LINNET_TRY(runner.bind_values(parameter.name, own->second));
    } else if (inner_->weights.has(parameter.name)) {
      LINNET_TRY(inner_->weights.bind(runner, parameter.name));
    } else {
      return bad_input("layer " + std::to_string(layer.index) + ": " + parameter.name + " has no values");
    }
  }
  if (taps != nullptr) LINNET_TRY(runner.keep_values(true));
  const int64_t count = static_cast<int64_t>(x.size()) / d.hidden;
  y.resize(x.size());
  Context context;
  context.executor = inner_->executor;
  std::vector<float>* targets[4] = {};
  if (taps != nullptr) {
    targets[0] = &taps->q, targets[1] = &taps->k, targets[2] = &taps->v, targets[3] = &taps->out;
    for (std::vector<float>* each : targets) each->clear();
  }
  // Softmax attention of a long text reads the keys of the pieces before from a cache.
  layers::State cache;
  const bool pieces = count > kPiece && d.causal && layer.mechanism == "softmax" && attends(layer.index) &&
                      runner.make_state(1, count, &cache).ok();
  const int64_t most = pieces ? kPiece : count;
  for (int64_t begin = 0; begin < count; begin += most) {
    const int64_t size = std::min(most, count - begin);
    LINNET_TRY(runner.run(View::dense(x.data() + begin * d.hidden, Dtype::f32, {1, size, d.hidden}),
                          View::dense(y.data() + begin * d.hidden, Dtype::f32, {1, size, d.hidden}),
                          pieces ? std::vector<layers::State*>{&cache} : std::vector<layers::State*>{}, context));
    for (int i = 0; taps != nullptr && i < 4; ++i) {
      View view;
      LINNET_TRY(runner.value(names[i], &view));
      copy_out(view, *targets[i]);
    }
  }
  if (taps == nullptr) return {};
  taps->tokens = count;
  taps->heads = heads(layer.index);
  taps->kv_heads = spec.mixer == "softmax_attention" ? kv_heads(layer.index) : taps->heads;  // others repeat the groups
  taps->key = key(layer.index);
  taps->value = value(layer.index);
  const std::string scale = option_of(spec, "scale");
  taps->scale = scale.empty() || scale == "none" ? 1 / std::sqrt(static_cast<double>(taps->key)) : std::atof(scale.c_str());
  taps->softcap = std::atof(option_of(spec, "softcap").c_str());
  return {};
}

Status tap_runner(const layers::Runner& runner, const std::vector<std::string>& ops, OpTaps* taps) {
  const layers::Record& record = runner.record();
  const layers::Step* step = nullptr;
  for (const layers::Step& each : record.steps) {
    if (each.kind == layers::StepKind::op && std::find(ops.begin(), ops.end(), each.op->name) != ops.end()) step = &each;
  }
  if (step == nullptr) return bad_input(kNoSystem);
  *taps = {};
  taps->op = step->op->name;
  for (const layers::Setting& s : step->options) taps->options[s.name] = s.text;
  const auto copy = [&](int id, OpTaps::Tensor& to) -> Status {
    View view;
    LINNET_TRY(runner.value(record.values[static_cast<size_t>(id)].name, &view));
    to.shape.assign(view.size, view.size + view.rank);
    to.values.reserve(static_cast<size_t>(view.elements()));
    for (int64_t i = 0; i < view.elements(); ++i) {  // strided
      int64_t offset = 0, rest = i;
      for (size_t c = to.shape.size(); c-- > 0; rest /= to.shape[c]) offset += rest % to.shape[c] * view.stride[c];
      to.values.push_back(load_f64(view.data, view.dtype, offset));
    }
    return {};
  };
  for (const auto& [input, id] : step->inputs) LINNET_TRY(copy(id, taps->inputs[input]));
  return copy(step->result, taps->out);
}

Status LayeredModel::record(int64_t layer, const std::vector<std::string>& ops, const std::vector<float>& x,
                            std::vector<float>& y, OpTaps* taps) const {
  const Description& d = inner_->d;
  layers::Record record;
  LINNET_TRY(record_block(d, static_cast<size_t>(layer), &record));
  layers::Runner runner;
  LINNET_TRY(layers::Runner::make(std::move(record), {}, &runner));
  LINNET_TRY(inner_->weights.bind(runner));
  LINNET_TRY(runner.keep_values(true));
  const int64_t count = static_cast<int64_t>(x.size()) / d.hidden;
  y.resize(x.size());
  Context context;
  context.executor = inner_->executor;
  LINNET_TRY(runner.run(View::dense(x.data(), Dtype::f32, {1, count, d.hidden}),
                        View::dense(y.data(), Dtype::f32, {1, count, d.hidden}), {}, context));
  const Status status = tap_runner(runner, ops, taps);
  return status.ok() ? status : bad_input("layer " + std::to_string(layer) + ", " + mixer(layer) + ": " + status.message());
}

Status LayeredModel::finish(std::vector<float>& x) const {
  const Description& d = inner_->d;
  if (!d.final_norm) return {};
  layers::Record record;
  LINNET_TRY(record_norm(d, &record));
  layers::Runner runner;
  LINNET_TRY(layers::Runner::make(std::move(record), {}, &runner));
  LINNET_TRY(inner_->weights.bind(runner));
  const int64_t count = static_cast<int64_t>(x.size()) / d.hidden;
  std::vector<float> y(x.size());
  Context context;
  context.executor = inner_->executor;
  LINNET_TRY(runner.run(View::dense(x.data(), Dtype::f32, {1, count, d.hidden}),
                        View::dense(y.data(), Dtype::f32, {1, count, d.hidden}), {}, context));
  x.swap(y);
  return {};
}

Status LayeredModel::logits(const float* hidden, int64_t rows, float* out) const {
  const std::lock_guard<std::mutex> lock(inner_->mutex);
  return inner_->run_head(hidden, rows, out);
}

std::vector<float> LayeredModel::output_weight(int64_t layer) const {
  const View view = inner_->weights.view("layers." + std::to_string(layer) + ".self_attn.o_proj.weight");
  if (!view.given() || view.dtype != Dtype::f32) return {};
  const float* data = static_cast<const float*>(view.data);
  return {data, data + view.elements()};
}

const Description& LayeredModel::description() const { return inner_->d; }
const WeightFiles& LayeredModel::files() const { return inner_->files; }
View LayeredModel::weight(const std::string& name) const { return inner_->weights.view(name); }

std::vector<std::pair<std::string, std::vector<int64_t>>> LayeredModel::tensors() const {
  std::vector<std::pair<std::string, std::vector<int64_t>>> list;
  for (const layers::Parameter& p : inner_->body.record().parameters) list.emplace_back(p.name, p.shape);
  const bool own_head = inner_->d.image > 0 ? inner_->d.classes > 0 : inner_->d.head && !inner_->d.tied;
  if (own_head) {
    for (const layers::Parameter& p : inner_->head.record().parameters) list.emplace_back(p.name, p.shape);
  }
  return list;
}

Status LayeredModel::parameters(const ConvertedLayer& layer,
                                std::vector<std::pair<std::string, std::vector<int64_t>>>& out) const {
  Description d = inner_->d;
  LINNET_TRY(convert_block(layer, d.blocks[static_cast<size_t>(layer.index)]));
  layers::Record record;
  LINNET_TRY(record_block(d, static_cast<size_t>(layer.index), &record));
  for (const layers::Parameter& parameter : record.parameters) {
    if (!inner_->weights.has(parameter.name)) out.emplace_back(parameter.name, parameter.shape);
  }
  return {};
}

}  // namespace linnet
