#include "runtime/layered.h"

#include <algorithm>
#include <cmath>
#include <cstring>

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

void copy_out(const View& view, std::vector<float>& out) {  // [1, T, heads, width], strided, to dense
  out.resize(static_cast<size_t>(view.elements()));
  float* to = out.data();
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
  return block.mixer == "softmax_attention" && option_of(block, "window").empty();
}
bool LayeredModel::replaces(int64_t layer) const {
  const Op& options = layers::find_layer("converted_attention")->options;
  const BlockSpec& block = inner_->d.blocks[static_cast<size_t>(layer)];
  return converts(layer) && std::all_of(block.options.begin(), block.options.end(),
                                        [&](const layers::Setting& s) { return options.find_option(s.name) != nullptr; });
}
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

Status LayeredModel::embed(const std::vector<int32_t>& tokens, std::vector<float>& x) const {
  LINNET_TRY(inner_->check_tokens(tokens, 0));
  const Description& d = inner_->d;
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
  const layers::Step* attention = nullptr;
  for (const layers::Step& step : record.steps) {
    if (step.kind != layers::StepKind::op) continue;
    const std::string& op = step.op->name;
    if (op == "softmax" || op == "monarch" || op == "hierarchical") attention = &step;
  }
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
  }
  layers::Runner runner;
  layers::RunnerOptions options;
  if (inner_->weights.kinds() == "bf16") options.rounding = "bf16";
  LINNET_TRY(layers::Runner::make(std::move(record), options, &runner));
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
  LINNET_TRY(runner.run(View::dense(x.data(), Dtype::f32, {1, count, d.hidden}),
                        View::dense(y.data(), Dtype::f32, {1, count, d.hidden}), {}, context));
  if (taps == nullptr) return {};
  taps->tokens = count;
  taps->heads = heads(layer.index);
  taps->kv_heads = spec.mixer == "softmax_attention" ? kv_heads(layer.index) : taps->heads;  // others repeat the groups
  taps->key = key(layer.index);
  taps->value = value(layer.index);
  const std::string scale = option_of(spec, "scale");
  taps->scale = scale.empty() || scale == "none" ? 1 / std::sqrt(static_cast<double>(taps->key)) : std::atof(scale.c_str());
  taps->softcap = std::atof(option_of(spec, "softcap").c_str());
  std::vector<float>* targets[4] = {&taps->q, &taps->k, &taps->v, &taps->out};
  for (int i = 0; i < 4; ++i) {
    View view;
    LINNET_TRY(runner.value(names[i], &view));
    copy_out(view, *targets[i]);
  }
  return {};
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
