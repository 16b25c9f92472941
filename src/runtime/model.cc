#include "runtime/model.h"

#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/cuda/driver.h"
#include "core/files/file.h"
#include "core/files/json.h"
#include "runtime/files/gguf_config.h"

namespace linnet {

namespace {

constexpr uint64_t kMaxConfigBytes = uint64_t{16} << 20;
constexpr int64_t kHeadRows = 128;  // logits of so many tokens at a time: 49152 x 128 floats are 25 MB

bool exists(const std::string& path) {
  struct stat info;
  return stat(path.c_str(), &info) == 0;
}

// A number or a list of numbers.
void add_ends(const JsonValue& value, std::vector<int32_t>& ends) {
  int64_t id = 0;
  if (value.count(id) == nullptr && id < kMaxVocabulary) ends.push_back(static_cast<int32_t>(id));
  if (!value.is(JsonValue::Kind::array)) return;
  for (JsonItems items(value); items.next();) {
    if (items.value().count(id) == nullptr && id < kMaxVocabulary) ends.push_back(static_cast<int32_t>(id));
  }
}

Status read_json(const std::string& path, std::string& text, JsonValue& root) {
  LINNET_TRY(read_file(path, kMaxConfigBytes, text));
  return parse_json(text, path, {.infinity = true}, root);
}

}  // namespace

Status Model::Inner::load(const std::string& path, const ModelOptions& options) {
  if (!options.weights.empty() && options.weights != "f32" && options.weights != "bf16" && options.weights != "q8" &&
      options.weights != "q4") {
    return bad_input("weights is '" + options.weights + "', expected f32, bf16, q8 or q4");
  }
  if (!options.attention.empty() && options.attention != "f32" && options.attention != "bf16") {
    return bad_input("attention is '" + options.attention + "', expected f32 or bf16");
  }
  if (options.threads < 0 || options.threads > 1024) {
    return bad_input("threads is " + std::to_string(options.threads) + ", expected 0 to 1024");
  }
  if (!options.device.empty() && options.device != "cpu" && options.device != "cuda") {
    return bad_input("device is '" + options.device + "', expected cpu or cuda");
  }
  if (options.device == "cuda") {
    if (const std::string reason = cuda::missing(); !reason.empty()) return impossible("device is cuda: " + reason);
    run.device = Device::cuda;
    run.uploads = std::make_shared<layers::Uploads>();
  }
  if (options.threads > 0) own_threads = std::make_unique<ThreadPool>(options.threads);
  executor = own_threads ? own_threads.get() : &default_executor();

  LINNET_TRY(WeightFiles::open(path, files));
  std::string text;
  std::string source = path + "/config.json";
  if (files.is_gguf()) {
    source = path;
    LINNET_TRY(gguf_config(*files.gguf(), text));
  } else {
    LINNET_TRY(read_file(source, kMaxConfigBytes, text));
  }
  Config config;
  LINNET_TRY(Config::parse(text, source, config));
  LINNET_TRY(describe_model(config, d));
  if (files.is_gguf()) use_gguf_names(*files.gguf(), d);
  add_ends(config.value("eos_token_id"), ends);

  layers::Record body_record, head_record;
  LINNET_TRY(record_body(d, &body_record));
  const bool has_head = d.image > 0 ? d.classes > 0 : d.head;
  if (has_head) LINNET_TRY(record_head(d, &head_record));
  std::vector<const layers::Record*> records = {&body_record};
  if (has_head) records.push_back(&head_record);
  LINNET_TRY(weights.load(files, d, records, options.weights, *executor));
  if (weights.kinds() == "bf16") run.rounding = "bf16";
  const bool narrow = options.attention.empty() ? weights.kinds() != "f32" : options.attention == "bf16";
  if (narrow) run.attention = Dtype::bf16;
  LINNET_TRY(layers::Runner::make(std::move(body_record), run, &body));
  LINNET_TRY(weights.bind(body));
  if (has_head) {
    LINNET_TRY(layers::Runner::make(std::move(head_record), run, &head));
    LINNET_TRY(weights.bind(head));
  }
  LINNET_TRY(read_texts(path));
  return summarize(path);
}

Status Model::Inner::read_texts(const std::string& path) {
  if (files.is_gguf()) {
    const GgufFile& gguf = *files.gguf();
    LINNET_TRY(Tokenizer::from_gguf(gguf, tokenizer));
    std::string_view text;
    if (gguf.find("tokenizer.chat_template").text(text)) chat_template = text;
    for (const char* name : {"eos", "eot", "eom"}) {
      int64_t id = 0;
      if (gguf.find(std::string("tokenizer.ggml.") + name + "_token_id").integer(id) && id >= 0 && id < d.vocabulary) {
        ends.push_back(static_cast<int32_t>(id));
      }
    }
    return {};
  }
  if (d.image > 0) return {};
  if (exists(path + "/tokenizer.json")) LINNET_TRY(Tokenizer::from_json(path + "/tokenizer.json", tokenizer));
  std::string text;
  JsonValue root;
  if (exists(path + "/generation_config.json")) {
    LINNET_TRY(read_json(path + "/generation_config.json", text, root));
    add_ends(root.find("eos_token_id"), ends);
  }
  if (exists(path + "/chat_template.jinja")) {
    LINNET_TRY(read_file(path + "/chat_template.jinja", kMaxConfigBytes, chat_template));
  } else if (exists(path + "/tokenizer_config.json")) {
    LINNET_TRY(read_json(path + "/tokenizer_config.json", text, root));
    chat_template = root.find("chat_template").string();
  }
  if (exists(path + "/1_Pooling/config.json")) {
    LINNET_TRY(read_json(path + "/1_Pooling/config.json", text, root));
    pool_first = root.find("pooling_mode_cls_token").boolean();
    if (!pool_first && !root.find("pooling_mode_mean_tokens").boolean()) {
      return bad_input(path + "/1_Pooling/config.json: pools neither by the mean nor by the first token");
    }
  }
  return {};
}

Status Model::Inner::summarize(const std::string& path) {
  ModelSummary& s = summary;
  s.path = path;
  s.family = d.family;
  s.format = files.is_gguf() ? "GGUF" : "safetensors";
  s.weights = weights.kinds();
  s.attention = dtype_name(run.attention);
  s.causal = d.causal;
  s.images = d.image > 0;
  s.hidden = d.hidden;
  s.vocabulary = d.vocabulary;
  s.context = d.context;
  s.classes = d.classes;
  s.weight_bytes = weights.bytes();
  s.warnings = weights.warnings();
  s.parameters = body.record().parameter_count();
  if (d.image > 0 ? d.classes > 0 : d.head && !d.tied) s.parameters += head.record().parameter_count();
  if (d.causal) {
    int64_t none = 0, some = 0;
    // Far behind every window: what grows without end.
    constexpr int64_t far = int64_t{1} << 24;
    LINNET_TRY(layers::state_bytes(body.record(), far, Dtype::f32, &none, run.attention));
    LINNET_TRY(layers::state_bytes(body.record(), far + 1024, Dtype::f32, &some, run.attention));
    s.state_per_token = static_cast<double>(some - none) / 1024;
    s.state_bytes = none - static_cast<int64_t>(s.state_per_token * static_cast<double>(far));
  }
  for (size_t i = 0; i < d.blocks.size(); ++i) {
    const BlockSpec& spec = d.blocks[i];
    const std::string mixer = spec.mixer.empty() ? "none" : spec.mixer;
    ModelSummary::Block block{block_order_name(spec.order.value_or(d.order)), spec.label.empty() ? mixer : spec.label, "none"};
    if (spec.mlp.kind != MlpSpec::Kind::none) {
      const MlpSpec& mlp = spec.mlp;
      const bool experts = mlp.kind == MlpSpec::Kind::experts;
      block.mlp = (mlp.kind == MlpSpec::Kind::plain ? "plain " : "glu ") + mlp.act + " " + std::to_string(mlp.inner);
      if (experts) block.mlp += ", " + std::to_string(mlp.top) + " of " + std::to_string(mlp.experts) + " experts";
      if (experts && mlp.shared > 0) block.mlp += ", shared " + std::to_string(mlp.shared);
    }
    const std::string prefix = "layers." + std::to_string(i) + ".";
    for (const layers::Parameter& parameter : body.record().parameters) {
      if (parameter.name.rfind(prefix, 0) != 0) continue;
      int64_t count = 1;
      for (const int64_t size : parameter.shape) count *= size;
      block.parameters += count;
    }
    s.blocks.push_back(std::move(block));
  }
  return {};
}

Status Model::Inner::check_tokens(const std::vector<int32_t>& tokens, int64_t position) const {
  if (d.image > 0) return bad_input(d.family + ": reads images, not tokens");
  if (tokens.empty()) return bad_input("the prompt is empty: a model needs at least one token to start from");
  const int64_t count = static_cast<int64_t>(tokens.size());
  if (count > d.context - position) {
    const std::string before = position > 0 ? " behind " + std::to_string(position) : "";
    return bad_input("the prompt has " + std::to_string(count) + " tokens" + before + ", more than the model's context of " +
                     std::to_string(d.context));
  }
  for (const int32_t token : tokens) {
    if (token < 0 || token >= d.vocabulary) {
      return bad_input("token " + std::to_string(token) + " is none of the model's " + std::to_string(d.vocabulary));
    }
  }
  return {};
}

Status Model::Inner::run_body(const std::vector<int32_t>& tokens, int64_t rows, int64_t position,
                              const std::vector<layers::State*>& states, float* hidden) {
  const int64_t count = static_cast<int64_t>(tokens.size()) / std::max<int64_t>(rows, 1);
  const std::vector<int64_t> ids(tokens.begin(), tokens.end());
  std::vector<int64_t> positions, types;
  std::vector<View> inputs = {View::dense(ids.data(), Dtype::i64, {rows, count})};
  if (d.positions > 0) {
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t first = states.size() == static_cast<size_t>(rows) ? states[static_cast<size_t>(r)]->position() : position;
      for (int64_t t = 0; t < count; ++t) positions.push_back(first + t);
    }
    inputs.push_back(View::dense(positions.data(), Dtype::i64, {rows, count}));
  }
  if (d.types > 0) {
    types.assign(ids.size(), 0);
    inputs.push_back(View::dense(types.data(), Dtype::i64, {rows, count}));
  }
  Context context;
  context.executor = executor;
  return body.run(inputs, View::dense(hidden, Dtype::f32, {rows, count, d.hidden}), states, context);
}

Status Model::Inner::run_head(const float* hidden, int64_t rows, float* logits) {
  Context context;
  context.executor = executor;
  const int64_t outputs = d.image > 0 ? d.classes : d.vocabulary, width = d.two_heads ? 2 * d.hidden : d.hidden;
  return head.run(View::dense(hidden, Dtype::f32, {1, rows, width}), View::dense(logits, Dtype::f32, {1, rows, outputs}), {},
                  context);
}

Model::Model() = default;
Model::~Model() = default;
Model::Model(Model&&) noexcept = default;
Model& Model::operator=(Model&&) noexcept = default;

Status Model::load(const std::string& path, const ModelOptions& options, Model& out) {
  auto made = std::make_shared<Inner>();
  LINNET_TRY(made->load(path, options));
  out.inner_ = std::move(made);
  return {};
}

const ModelSummary& Model::summary() const { return inner_->summary; }
int64_t Model::vocabulary() const { return inner_->d.vocabulary; }
int64_t Model::context() const { return inner_->d.context; }
bool Model::has_tokenizer() const { return inner_->tokenizer != nullptr; }
const Tokenizer& Model::tokenizer() const { return *inner_->tokenizer; }
uint64_t Model::fingerprint() const { return inner_->weights.fingerprint(); }

Status Model::chat(ChatTemplate& out) const {
  const Status status = ChatTemplate::recognize(inner_->chat_template, out);
  return status.ok() ? status : bad_input(inner_->summary.path + ": " + status.message());
}

bool Model::is_end(int32_t token) const {
  return std::find(inner_->ends.begin(), inner_->ends.end(), token) != inner_->ends.end();
}

Status Model::start(Session& out) const {
  if (!inner_->d.causal || !inner_->d.head) {
    return bad_input(inner_->d.family + ": an encoder continues no text; linnet embed uses it");
  }
  auto made = std::make_unique<Session::Inner>();
  made->model = inner_;
  LINNET_TRY(inner_->body.make_state(1, 256, &made->state));
  out.inner_ = std::move(made);
  return {};
}

Status Model::hidden(const std::vector<int32_t>& tokens, std::vector<float>& out) const {
  LINNET_TRY(inner_->check_tokens(tokens, 0));
  out.resize(tokens.size() * static_cast<size_t>(inner_->d.hidden));
  const std::lock_guard<std::mutex> lock(inner_->mutex);
  return inner_->run_body(tokens, 1, 0, {}, out.data());
}

Status Model::logits(const std::vector<int32_t>& tokens, std::vector<float>& out) const {
  if (!inner_->d.head) return bad_input(inner_->d.family + ": has no logits");
  std::vector<float> states;
  LINNET_TRY(hidden(tokens, states));
  out.resize(tokens.size() * static_cast<size_t>(inner_->d.vocabulary));
  const std::lock_guard<std::mutex> lock(inner_->mutex);
  const int64_t count = static_cast<int64_t>(tokens.size());
  for (int64_t t = 0; t < count; t += kHeadRows) {
    LINNET_TRY(inner_->run_head(states.data() + t * inner_->d.hidden, std::min(kHeadRows, count - t),
                                out.data() + t * inner_->d.vocabulary));
  }
  return {};
}

Status Model::losses(const std::vector<int32_t>& tokens, std::vector<float>& out) const {
  if (!inner_->d.head || !inner_->d.causal) return bad_input(inner_->d.family + ": predicts no next token");
  std::vector<float> states;
  LINNET_TRY(hidden(tokens, states));
  out.clear();
  const int64_t count = static_cast<int64_t>(tokens.size()) - 1, vocabulary = inner_->d.vocabulary;
  std::vector<float> rows(static_cast<size_t>(std::min(kHeadRows, std::max<int64_t>(count, 0)) * vocabulary));
  const std::lock_guard<std::mutex> lock(inner_->mutex);
  for (int64_t t = 0; t < count; t += kHeadRows) {
    const int64_t part = std::min(kHeadRows, count - t);
    LINNET_TRY(inner_->run_head(states.data() + t * inner_->d.hidden, part, rows.data()));
    const size_t first = out.size();
    out.resize(first + static_cast<size_t>(part));
    struct Work {
      const float* rows;
      const int32_t* targets;
      float* out;
      int64_t vocabulary;
    } work{rows.data(), tokens.data() + t + 1, out.data() + first, vocabulary};
    inner_->executor->run(
        part,
        [](void* context, int64_t i, int) {
          const Work& w = *static_cast<const Work*>(context);
          const float* row = w.rows + i * w.vocabulary;
          const float top = *std::max_element(row, row + w.vocabulary);
          double sum = 0;
          for (int64_t j = 0; j < w.vocabulary; ++j) sum += static_cast<double>(std::exp(row[j] - top));
          w.out[i] = static_cast<float>(std::log(sum) - (static_cast<double>(row[w.targets[i]]) - top));
        },
        &work);
  }
  return {};
}

Status Model::embed(const std::vector<int32_t>& tokens, std::vector<float>& out) const {
  if (inner_->d.causal) return bad_input(inner_->d.family + ": is no encoder; linnet generate and eval use it");
  std::vector<float> states;
  LINNET_TRY(hidden(tokens, states));
  const size_t width = static_cast<size_t>(inner_->d.hidden), count = inner_->pool_first ? 1 : tokens.size();
  std::vector<double> mean(width);
  for (size_t t = 0; t < count; ++t) {
    for (size_t i = 0; i < width; ++i) mean[i] += static_cast<double>(states[t * width + i]) / static_cast<double>(count);
  }
  double square = 0;
  for (const double x : mean) square += x * x;
  const double length = std::max(std::sqrt(square), 1e-12);
  out.resize(width);
  for (size_t i = 0; i < width; ++i) out[i] = static_cast<float>(mean[i] / length);
  return {};
}

Status Model::Inner::patches_of(const std::vector<float>& pixels, std::vector<float>& patches) const {
  if (d.image == 0) return bad_input(d.family + ": reads tokens, not images");
  if (static_cast<int64_t>(pixels.size()) != d.channels * d.image * d.image) {
    return bad_input(d.family + ": the image has " + std::to_string(pixels.size()) + " numbers, expected " +
                     std::to_string(d.channels) + " x " + std::to_string(d.image) + " x " + std::to_string(d.image));
  }
  const int64_t side = d.image / d.patch, inputs = d.channels * d.patch * d.patch;
  patches.assign(static_cast<size_t>(d.context * inputs), 0);  // the first rows, those of the class tokens, stay zero
  for (int64_t p = 0; p < side * side; ++p) {
    float* row = patches.data() + (p + d.class_tokens) * inputs;
    for (int64_t c = 0; c < d.channels; ++c) {
      for (int64_t y = 0; y < d.patch; ++y) {
        const float* line = pixels.data() + (c * d.image + p / side * d.patch + y) * d.image + p % side * d.patch;
        row = std::copy_n(line, d.patch, row);
      }
    }
  }
  return {};
}

Status Model::classify(const std::vector<float>& pixels, std::vector<float>& out) const {
  const Description& d = inner_->d;
  std::vector<float> patches;
  LINNET_TRY(inner_->patches_of(pixels, patches));
  const int64_t count = d.context, inputs = d.channels * d.patch * d.patch;
  std::vector<int64_t> positions(static_cast<size_t>(count));
  for (int64_t t = 0; t < count; ++t) positions[static_cast<size_t>(t)] = t;
  std::vector<float> states(static_cast<size_t>(count * d.hidden));
  Context context;
  context.executor = inner_->executor;
  const std::lock_guard<std::mutex> lock(inner_->mutex);
  LINNET_TRY(inner_->body.run(
      {View::dense(patches.data(), Dtype::f32, {1, count, inputs}), View::dense(positions.data(), Dtype::i64, {1, count})},
      View::dense(states.data(), Dtype::f32, {1, count, d.hidden}), {}, context));
  states.resize(static_cast<size_t>(d.two_heads ? 2 * d.hidden : d.hidden));
  if (d.classes == 0) return out = std::move(states), Status();
  out.resize(static_cast<size_t>(d.classes));
  return inner_->run_head(states.data(), 1, out.data());
}

}  // namespace linnet
