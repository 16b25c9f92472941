#include "convert/convert.h"

#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <memory>
#include <set>

#include "convert/checkpoint.h"
#include "convert/sha256.h"
#include "core/file.h"
#include "core/json.h"
#include "layers/layer.h"
#include "runtime/evaluate.h"
#include "runtime/generate.h"
#include "runtime/gguf_config.h"

namespace linnet::convert {

namespace fs = std::filesystem;

namespace {

constexpr uint64_t kMaxTextBytes = uint64_t{4} << 30, kMaxStageBytes = uint64_t{512} << 20;
constexpr size_t kMostPoints = 24;  // of a layer's windows

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

uint64_t mix(uint64_t& state) {  // splitmix64
  uint64_t z = state += 0x9e3779b97f4a7c15ull;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return z ^ z >> 31;
}

bool exists(const std::string& path) {
  std::error_code error;
  return fs::exists(path, error);
}

bool contains(const std::vector<std::string>& list, const char* word) {
  return std::find(list.begin(), list.end(), word) != list.end();
}

std::vector<double> numbers(const JsonValue& list) {
  std::vector<double> out;
  for (JsonItems items(list); items.next();) {
    double x = 0;
    items.value().number(x);
    out.push_back(x);
  }
  return out;
}

double number_of(const JsonValue& value) {
  double x = 0;
  value.number(x);
  return x;
}

void write_numbers(JsonWriter& w, const char* name, const std::vector<double>& list) {
  w.key(name).begin_array();
  for (const double x : list) w.value(x);
  w.end_array();
}

}  // namespace

// ---- data -------------------------------------------------------------------------------------------------------------------

Status split_text(const std::string& text, bool with_evaluation, bool with_fit, TextParts& out) {
  // Where documents end: a blank line, or a line that is no sentence of the one before it.
  const auto cut_near = [&](size_t at) {
    const size_t end = text.find("\n\n", at), spaced = text.find("\n \n", at);
    const size_t cut =
        std::min(end == std::string::npos ? text.size() : end + 2, spaced == std::string::npos ? text.size() : spaced + 3);
    if (cut < text.size() && cut < at + text.size() / 10 + 4096) return cut;
    const size_t line = text.find('\n', at);
    return line == std::string::npos ? text.size() : line + 1;
  };
  const double shares[4] = {0.3, 0.2, with_fit ? 0.2 : 0, with_evaluation ? 0.3 : 0};
  const double total = shares[0] + shares[1] + shares[2] + shares[3];
  std::string* parts[4] = {&out.calibration, &out.plan, &out.fit, &out.evaluation};
  size_t begin = 0;
  double sum = 0;
  int last = 3;
  while (shares[last] == 0) --last;
  for (int i = 0; i < 4; ++i) {
    sum += shares[i] / total;
    if (shares[i] == 0) continue;
    const size_t end =
        i == last ? text.size() : std::max(begin, cut_near(static_cast<size_t>(sum * static_cast<double>(text.size()))));
    *parts[i] = text.substr(begin, end - begin);
    begin = end;
    if (parts[i]->empty()) {
      return bad_input("the text is too short: it has " + std::to_string(text.size()) +
                       " bytes, of which one part would be empty");
    }
  }
  return {};
}

std::vector<Sample> samples_of(const Model& model, const std::string& text, int64_t length, int64_t tokens) {
  // A token has about 4 bytes; no more is encoded than can be used.
  const std::string head = text.substr(0, std::min<size_t>(text.size(), static_cast<size_t>(tokens) * 12 + 4096));
  const std::vector<int32_t> ids = model.tokenizer().encode(head, {false, false});
  const bool encoder = !model.summary().causal;
  const std::vector<int32_t> before = encoder ? model.tokenizer().prefix() : std::vector<int32_t>{},
                             after = encoder ? model.tokenizer().suffix() : std::vector<int32_t>{};
  const size_t around = before.size() + after.size(),
               own = static_cast<size_t>(length) > around ? static_cast<size_t>(length) - around : 1;
  std::vector<Sample> list;
  for (size_t at = 0; at < ids.size() && static_cast<int64_t>(list.size() * static_cast<size_t>(length)) < tokens; at += own) {
    const size_t end = std::min(ids.size(), at + own);
    if (end - at < own && !list.empty()) break;
    Sample sample;
    sample.tokens = before;
    sample.tokens.insert(sample.tokens.end(), ids.begin() + static_cast<ptrdiff_t>(at),
                         ids.begin() + static_cast<ptrdiff_t>(end));
    sample.tokens.insert(sample.tokens.end(), after.begin(), after.end());
    list.push_back(std::move(sample));
  }
  return list;
}

std::vector<Sample> random_samples(const Model& model, int64_t length, int64_t count, uint64_t seed) {
  std::vector<Sample> list(static_cast<size_t>(count));
  uint64_t random = seed + 1;
  const ModelSummary& s = model.summary();
  for (Sample& sample : list) {
    if (!s.images) {
      for (int64_t i = 0; i < length; ++i)
        sample.tokens.push_back(static_cast<int32_t>(mix(random) % static_cast<uint64_t>(s.vocabulary)));
      continue;
    }
    // A few waves in random directions: smooth, as pictures are.
    const LayeredModel parts(model);
    const int64_t side = parts.description().image, channels = parts.description().channels;
    sample.pixels.assign(static_cast<size_t>(channels * side * side), 0);
    for (int wave = 0; wave < 12; ++wave) {
      const auto unit = [&] { return static_cast<double>(mix(random) >> 11) / 9007199254740992.0; };
      const double fx = 20 * (unit() - 0.5) / static_cast<double>(side), fy = 20 * (unit() - 0.5) / static_cast<double>(side),
                   phase = 7 * unit();
      const int64_t channel = static_cast<int64_t>(mix(random) % static_cast<uint64_t>(channels));
      for (int64_t y = 0; y < side; ++y) {
        for (int64_t x = 0; x < side; ++x) {
          sample.pixels[static_cast<size_t>((channel * side + y) * side + x)] +=
              static_cast<float>(std::sin(6.2831853 * (fx * static_cast<double>(x) + fy * static_cast<double>(y)) + phase));
        }
      }
    }
  }
  return list;
}

// ---- the job ----------------------------------------------------------------------------------------------------------------

namespace {

class Job {
 public:
  Job(const ConvertOptions& options, const Told& told, ConvertResult& result) : o_(options), told_(told), r_(result) {}

  Status run() {
    LINNET_TRY(check());
    LINNET_TRY(stage("load", [&] { return load(); }));
    LINNET_TRY(stage("data", [&] { return data(); }));
    if (o_.budget < 1 && o_.plan.empty()) LINNET_TRY(stage("statistics", [&] { return statistics(); }));
    if (o_.budget < 1 && o_.plan.empty()) LINNET_TRY(stage("damage", [&] { return damage(); }));
    LINNET_TRY(stage("plan", [&] { return plan(); }));
    if (o_.dry_run) {
      if (fresh_) remove_work();
      return {};
    }
    LINNET_TRY(stage("initial values", [&] { return initial(); }));
    if (!o_.zero_shot) LINNET_TRY(stage("fit", [&] { return fit(); }));
    LINNET_TRY(stage("write", [&] { return write(); }));
    LINNET_TRY(stage("evaluate", [&] { return evaluate(); }));
    return finish();
  }

 private:
  template <class F>
  Status stage(const char* name, F&& body) {
    const double start = now();
    Status status = body();
    r_.seconds.emplace_back(name, now() - start);
    return status;
  }
  void tell(const std::string& what, int64_t done, int64_t total) const {
    if (told_) told_(what, done, total);
  }
  std::string at(const char* file) const { return work_ + "/" + file; }
  void remove_work() const {
    std::error_code error;
    fs::remove_all(work_, error);
  }

  Status check() {
    if (!(o_.budget > 0 && o_.budget <= 1)) {
      return bad_input("budget is " + layers::number_text(o_.budget) +
                       ", expected above 0 to 1: the share of the attention's cost that remains");
    }
    if (o_.out.empty()) return bad_input("where to? --out DIR, which must not exist yet");
    std::string out = o_.out;
    while (out.size() > 1 && out.back() == '/') out.pop_back();
    out_ = out;
    work_ = out + ".work";
    if (exists(out_)) return bad_input(out_ + ": exists already; nothing is written over it");
    std::error_code error;
    const fs::path parent = fs::absolute(out_).parent_path();
    if (!fs::is_directory(parent, error)) return bad_input(parent.string() + ": there is no such folder to write into");
    static const std::set<std::string> known = {"softmax", "window", "distill", "hybrid",
                                                "gdn",     "gla",    "monarch", "hierarchical"};
    for (const std::string& name : o_.mechanisms) {
      if (known.count(name) == 0) {
        return bad_input("there is no mechanism '" + name +
                         "', expected softmax, window, distill, hybrid, gdn, gla, monarch or hierarchical");
      }
      const bool trained = name == "distill" || name == "hybrid" || name == "gdn" || name == "gla";
      if (trained && o_.zero_shot)
        return bad_input(name + " has parameters to be trained: leave out --zero-shot, or this mechanism");
    }
    if (!o_.text.empty() && !o_.eval_text.empty()) {
      std::string a, b;
      LINNET_TRY(sha256_of_file(o_.text, a));
      LINNET_TRY(sha256_of_file(o_.eval_text, b));
      if (a == b)
        return bad_input(o_.eval_text + ": holds the same bytes as " + o_.text +
                         "; a model is not evaluated on what it was made with");
    }
    if (o_.text.empty() && !o_.zero_shot) return bad_input("which text? --text FILE; only --zero-shot can do without, badly");
    return {};
  }

  // Stage 1.
  Status load() {
    LINNET_TRY(Model::load(o_.model, {"f32", static_cast<int>(o_.threads)}, teacher_));
    parts_ = std::make_unique<LayeredModel>(teacher_);
    const ModelSummary& s = teacher_.summary();
    r_.family = s.family;
    r_.parameters = s.parameters;
    r_.unit = s.causal ? "KL, nats a token" : "1 - cosine";
    length_ = o_.length > 0 ? std::min(o_.length, s.context) : std::min<int64_t>(s.context, 8192);
    if (length_ < 2) return bad_input("length is " + std::to_string(length_) + ", expected at least 2");
    r_.length = length_;
    if (!o_.text.empty() && !s.images && !teacher_.has_tokenizer()) {
      return bad_input(o_.model + ": has no tokenizer.json, which reading a text needs");
    }
    if (parts_->files().is_gguf()) {  // told now, not when everything is measured
      std::string tokenizer, config;
      LINNET_TRY(gguf_tokenizer(*parts_->files().gguf(), tokenizer, config));
    }
    int64_t convertible = 0;
    for (int64_t i = 0; i < parts_->layers(); ++i) {
      const double weight =
          parts_->converts(i) ? static_cast<double>(parts_->heads(i) * (parts_->key(i) + parts_->value(i))) : 0;
      weights_.push_back(weight);
      convertible += parts_->converts(i);
    }
    if (convertible == 0) return impossible(o_.model + ": has no softmax attention layer that could be converted");
    double total = 0;
    for (const double w : weights_) total += w;
    for (double& w : weights_) w /= total;
    for (const int64_t i : o_.keep) {
      if (i < 0 || i >= parts_->layers()) {
        return bad_input("--keep-softmax has layer " + std::to_string(i) + ", the model has " +
                         std::to_string(parts_->layers()));
      }
    }
    windows_ = o_.windows;
    if (windows_.empty()) {
      for (int64_t w = s.causal ? 64 : 16; w < length_ / (s.causal ? 2 : 1) && w <= 2048; w *= 2) windows_.push_back(w);
      if (windows_.empty()) windows_ = {std::max<int64_t>(1, length_ / 4)};
    }
    const bool any = o_.mechanisms.empty();
    if (!s.causal && (any || contains(o_.mechanisms, "monarch"))) {
      for (const int64_t block : {int64_t{4}, int64_t{8}, int64_t{16}, int64_t{32}}) {
        for (const int64_t steps : {1, 2, 3}) {
          if (block * 2 > length_) continue;
          ConvertedLayer layer;
          layer.mechanism = "monarch", layer.block = block, layer.steps = steps;
          if (monarch_cost(block, steps, length_) < 0.95) whole_.push_back(layer);
        }
      }
    }
    if (!s.causal && (any || contains(o_.mechanisms, "hierarchical"))) {
      for (const int64_t arity : {int64_t{16}, int64_t{64}}) {
        ConvertedLayer layer;
        layer.mechanism = "hierarchical", layer.tie = "row", layer.arity = arity;
        if (hierarchical_cost(arity, length_) < 0.95) whole_.push_back(layer);
      }
    }
    for (const std::string& file : source_files(o_.model)) {
      tell("hashes", 0, 1);
      LINNET_TRY(sha256_of_file(file, sources_[fs::path(file).filename().string()]));
    }
    // The work folder: of this conversion, or none.
    JsonWriter w(1);
    w.begin_object()
        .member("format", 1)
        .member("model", fs::absolute(o_.model).string())
        .member("out", fs::absolute(out_).string());
    w.key("sources").begin_object();
    for (const auto& [file, hash] : sources_) w.member(file, hash);
    for (const std::string& text : {o_.text, o_.eval_text, o_.plan}) {
      std::string hash;
      if (text.empty()) continue;
      LINNET_TRY(sha256_of_file(text, hash));
      w.member(fs::absolute(text).string(), hash);
    }
    w.end_object()
        .key("options")
        .begin_object()
        .member("budget", o_.budget)
        .member("length", length_)
        .member("sinks", o_.sinks);
    w.member("seed", o_.seed).member("zero_shot", o_.zero_shot).member("calibration_tokens", o_.calibration_tokens);
    w.member("plan_tokens", o_.plan_tokens).member("eval_tokens", o_.eval_tokens).member("rounds", o_.rounds);
    w.key("windows").begin_array();
    for (const int64_t each : windows_) w.value(each);
    w.end_array().key("mechanisms").begin_array();
    for (const std::string& name : o_.mechanisms) w.value(name);
    w.end_array().key("keep_softmax").begin_array();
    for (const int64_t i : o_.keep) w.value(i);
    w.end_array().end_object().end_object();
    std::string before;
    if (exists(at("state.json"))) {
      LINNET_TRY(read_file(at("state.json"), kMaxStageBytes, before));
      if (before != w.text()) {
        return bad_input(
            work_ + ": belongs to a conversion with other options or files; give the same ones, or remove it to start over");
      }
      return {};
    }
    fresh_ = true;
    std::error_code error;
    fs::create_directory(work_, error);
    if (error) return impossible(work_ + ": cannot be made: " + error.message());
    return write_file(at("state.json"), w.text());
  }

  // Stage 2.
  Status data() {
    const ModelSummary& s = teacher_.summary();
    const int64_t calibration = std::min({length_, o_.calibration_tokens, s.context}),
                  planned = std::min({length_, o_.plan_tokens, s.context});
    if (o_.text.empty() || s.images) {
      r_.reliable = false;
      const int64_t count = s.causal ? 1 : 4;
      calibration_ = random_samples(teacher_, calibration, count, static_cast<uint64_t>(o_.seed));
      plan_ = random_samples(teacher_, planned, count, static_cast<uint64_t>(o_.seed) + 1000);
      evaluation_ = random_samples(teacher_, s.causal ? o_.eval_tokens : length_, s.causal ? 1 : 8,
                                   static_cast<uint64_t>(o_.seed) + 2000);
      return {};
    }
    std::string text, other;
    LINNET_TRY(read_file(o_.text, kMaxTextBytes, text));
    if (!o_.eval_text.empty()) LINNET_TRY(read_file(o_.eval_text, kMaxTextBytes, other));
    for (const auto& [name, content] : {std::pair(&o_.text, &text), std::pair(&o_.eval_text, &other)}) {
      if (const size_t bad = unicode_invalid(*content); bad != content->size()) {
        return bad_input(*name + ": is not UTF-8 at byte " + std::to_string(bad) + "; convert it first");
      }
    }
    TextParts parts;
    LINNET_TRY(split_text(text, o_.eval_text.empty(), !o_.zero_shot, parts));
    if (!o_.eval_text.empty()) parts.evaluation = std::move(other);
    const int64_t more = s.causal ? 1 : 8;
    calibration_ = samples_of(teacher_, parts.calibration, calibration, calibration * more);
    plan_ = samples_of(teacher_, parts.plan, planned, planned * more);
    const int64_t eval = s.causal ? o_.eval_tokens : length_ * std::max<int64_t>(1, o_.eval_tokens / length_);
    evaluation_ = samples_of(teacher_, parts.evaluation, s.causal ? eval : length_, eval);
    for (const auto& [name, list] :
         {std::pair("measuring", &calibration_), std::pair("planning", &plan_), std::pair("evaluating", &evaluation_)}) {
      if (list->empty() || list->front().tokens.size() < 16) {
        return bad_input(o_.text + ": is too short: the part for " + name + " has " +
                         std::to_string(list->empty() ? 0 : list->front().tokens.size()) + " tokens, expected at least 16");
      }
    }
    if (exists(at("tokens.safetensors"))) return {};
    const auto joined = [](const std::vector<Sample>& list) {
      std::vector<int32_t> all;
      for (const Sample& sample : list) all.insert(all.end(), sample.tokens.begin(), sample.tokens.end());
      return all;
    };
    const std::vector<int32_t> a = joined(calibration_), b = joined(plan_), d = joined(evaluation_);
    std::vector<int32_t> c;
    if (!o_.zero_shot) {
      const size_t most = static_cast<size_t>(o_.fit_tokens) * 8;
      c = teacher_.tokenizer().encode(std::string_view(parts.fit).substr(0, std::min(parts.fit.size(), most)), {false, false});
    }
    const auto tensor = [](const char* name, const std::vector<int32_t>& ids) {
      return SafetensorsTensor{name, "I32", {static_cast<int64_t>(ids.size())}, ids.data()};
    };
    return write_safetensors(at("tokens.safetensors"),
                             {tensor("calibration", a), tensor("plan", b), tensor("fit", c), tensor("evaluation", d)});
  }

  // Stages 3 and 4.
  Status statistics() {
    const size_t layers = static_cast<size_t>(parts_->layers());
    if (exists(at("statistics.json"))) return read_statistics();
    std::vector<std::vector<float>> x(calibration_.size()), y;
    for (size_t s = 0; s < calibration_.size(); ++s) LINNET_TRY(embed(*parts_, calibration_[s], x[s]));
    errors_.resize(layers);
    for (size_t i = 0; i < layers; ++i) {
      tell("statistics", static_cast<int64_t>(i), static_cast<int64_t>(layers));
      LINNET_TRY(measure_layer(*parts_, static_cast<int64_t>(i), calibration_, x, windows_, o_.sinks, whole_, errors_[i], y));
      x.swap(y);
    }
    JsonWriter w;
    w.begin_object().key("windows").begin_array();
    for (const int64_t each : windows_) w.value(each);
    w.end_array().key("whole").begin_array();
    for (const ConvertedLayer& each : whole_) w.value(each.label());
    w.end_array().key("layers").begin_array();
    for (size_t i = 0; i < layers; ++i) {
      const LayerErrors& e = errors_[i];
      w.begin_object().member("index", i).member("energy", e.energy).key("window_error").begin_array();
      for (const std::vector<double>& head : e.window) {
        w.begin_array();
        for (const double each : head) w.value(each);
        w.end_array();
      }
      w.end_array();
      write_numbers(w, "whole_error", e.whole);
      w.key("heads").begin_array();
      for (const analysis::HeadStatistics& h : e.heads) {
        w.begin_object().member("head", h.head).member("entropy", h.entropy).member("entropy_ratio", h.entropy_ratio);
        w.member("distance", h.distance).member("sink_mass", h.sink_mass).member("stable_rank", h.stable_rank);
        write_numbers(w, "window_mass", h.window_mass);
        w.end_object();
      }
      w.end_array().end_object();
    }
    return write_file(at("statistics.json"), w.end_array().end_object().text());
  }

  Status read_statistics() {
    std::string text;
    JsonValue root;
    LINNET_TRY(read_file(at("statistics.json"), kMaxStageBytes, text));
    LINNET_TRY(parse_json(text, at("statistics.json"), {.max_bytes = kMaxStageBytes}, root));
    errors_.clear();
    for (JsonItems items(root.find("layers")); items.next();) {
      LayerErrors e;
      e.energy = number_of(items.value().find("energy"));
      for (JsonItems heads(items.value().find("window_error")); heads.next();) e.window.push_back(numbers(heads.value()));
      e.whole = numbers(items.value().find("whole_error"));
      for (JsonItems heads(items.value().find("heads")); heads.next();) {
        analysis::HeadStatistics h;
        const JsonValue& v = heads.value();
        h.layer = static_cast<int64_t>(errors_.size());
        h.head = static_cast<int64_t>(number_of(v.find("head")));
        h.entropy = number_of(v.find("entropy")), h.entropy_ratio = number_of(v.find("entropy_ratio"));
        h.distance = number_of(v.find("distance")), h.sink_mass = number_of(v.find("sink_mass"));
        h.stable_rank = number_of(v.find("stable_rank"));
        h.window_mass = numbers(v.find("window_mass"));
        e.heads.push_back(std::move(h));
      }
      errors_.push_back(std::move(e));
    }
    if (errors_.size() != static_cast<size_t>(parts_->layers()))
      return bad_input(at("statistics.json") + ": has another number of layers");
    return {};
  }

  // The window whose damage to each layer alone sets the scale of all its options.
  size_t reference() const { return std::min<size_t>(windows_.size() - 1, 1); }
  double reference_error(size_t i) const {
    double sum = 0;
    for (const std::vector<double>& head : errors_[i].window) sum += head[reference()];
    return sum;
  }

  std::vector<ConvertedLayer> plain_layers() const {
    std::vector<ConvertedLayer> list(static_cast<size_t>(parts_->layers()));
    for (size_t i = 0; i < list.size(); ++i) list[i].index = static_cast<int64_t>(i);
    return list;
  }

  // What one layer's replacement alone does.
  Status alone(const ConvertedLayer& layer, double& kl) {
    std::vector<ConvertedLayer> list = plain_layers();
    const size_t i = static_cast<size_t>(layer.index);
    list[i] = layer;
    std::vector<std::vector<float>> found(plan_.size());
    for (size_t s = 0; s < plan_.size(); ++s) LINNET_TRY(run_from(*parts_, list, i, traced_.inputs[i][s], nullptr, found[s]));
    return distance(*parts_, traced_.last, found, false, kl);
  }

  Status joint(const std::vector<ConvertedLayer>& list, double& kl) {
    size_t first = 0;
    while (first + 1 < list.size() && list[first].mechanism == "softmax") ++first;
    std::vector<std::vector<float>> found(plan_.size());
    for (size_t s = 0; s < plan_.size(); ++s)
      LINNET_TRY(run_from(*parts_, list, first, traced_.inputs[first][s], nullptr, found[s]));
    return distance(*parts_, traced_.last, found, false, kl);
  }

  Status traced() {
    if (!traced_.last.empty()) return {};
    return trace(*parts_, plan_, true, told_, traced_);
  }

  // A list of numbers that grows one by one, each saved as soon as it is known.
  Status read_list(const char* file, std::vector<double>& out) const {
    out.clear();
    if (!exists(at(file))) return {};
    std::string text;
    JsonValue root;
    LINNET_TRY(read_file(at(file), kMaxStageBytes, text));
    LINNET_TRY(parse_json(text, at(file), {}, root));
    out = numbers(root.find("kl"));
    return {};
  }
  Status write_list(const char* file, const std::vector<double>& list) const {
    JsonWriter w;
    w.begin_object();
    write_numbers(w, "kl", list);
    return write_file(at(file), w.end_object().text());
  }

  // Stage 5, the first half.
  Status damage() {
    const size_t layers = static_cast<size_t>(parts_->layers());
    LINNET_TRY(read_list("damage.json", alone_));
    while (alone_.size() < layers) {
      const size_t i = alone_.size();
      tell("damage", static_cast<int64_t>(i), static_cast<int64_t>(layers));
      double kl = 0;
      if (parts_->converts(static_cast<int64_t>(i)) && reference_error(i) > 0) {
        LINNET_TRY(traced());
        ConvertedLayer layer;
        layer.index = static_cast<int64_t>(i), layer.mechanism = "window", layer.window = windows_[reference()],
        layer.sinks = o_.sinks;
        LINNET_TRY(alone(layer, kl));
      }
      alone_.push_back(std::max(kl, 0.0));
      LINNET_TRY(write_list("damage.json", alone_));
    }
    scale_.assign(layers, 0);
    for (size_t i = 0; i < layers; ++i) {
      if (parts_->converts(static_cast<int64_t>(i)) && reference_error(i) > 0) scale_[i] = alone_[i] / reference_error(i);
    }
    return {};
  }

  std::vector<std::vector<LayerOption>> options() const {
    std::vector<std::vector<LayerOption>> all;
    const bool causal = parts_->causal(), any = o_.mechanisms.empty();
    for (int64_t i = 0; i < parts_->layers(); ++i) {
      const LayerErrors& e = errors_[static_cast<size_t>(i)];
      std::vector<LayerOption> list(1);
      list[0].layer.index = i;
      list[0].cost = 1;
      const bool kept = std::find(o_.keep.begin(), o_.keep.end(), i) != o_.keep.end();
      if (!parts_->converts(i) || kept) {
        all.push_back(std::move(list));
        continue;
      }
      const auto add = [&](ConvertedLayer layer, double cost, double error) {
        layer.index = i;
        LayerOption option;
        option.layer = std::move(layer), option.cost = cost, option.error = error;
        option.damage = error * scale_[static_cast<size_t>(i)];
        list.push_back(std::move(option));
      };
      if (any || contains(o_.mechanisms, "window")) {
        std::vector<double> cost;
        for (const int64_t w : windows_) cost.push_back(window_cost(w, o_.sinks, length_, causal));
        std::vector<std::vector<double>> error = e.window;
        // One window for each head of keys, or none.
        if (error.size() > 1 && error.size() <= static_cast<size_t>(Sizes::kMax) && parts_->replaces(i)) {
          cost.push_back(1);
          for (std::vector<double>& head : error) head.push_back(0);
        } else {
          error.assign(1, std::vector<double>(windows_.size(), 0));
          for (const std::vector<double>& head : e.window) {
            for (size_t w = 0; w < windows_.size(); ++w) error[0][w] += head[w];
          }
        }
        for (const HeadWindows& point : combine_heads(error, cost, kMostPoints)) {
          ConvertedLayer layer;
          layer.mechanism = "window";
          layer.sinks = o_.sinks;
          bool same = true, full = true;
          for (const size_t w : point.window) {
            layer.windows.push_back(w < windows_.size() ? windows_[w] : 0);
            same &= w == point.window[0];
            full &= w >= windows_.size();
          }
          if (full) continue;
          if (same) layer.window = layer.windows[0], layer.windows.clear();
          add(std::move(layer), point.cost, point.error);
        }
      }
      for (size_t o = 0; o < whole_.size() && parts_->replaces(i); ++o) {
        add(whole_[o], mechanism_cost(whole_[o], length_, parts_->key(i), parts_->value(i), causal), e.whole[o]);
      }
      // Before a fit nobody knows what a trained mechanism will do: half the harm of its window is the guess.
      for (const char* name : {"gdn", "gla", "hybrid", "distill"}) {
        if (!contains(o_.mechanisms, name) || !causal || !parts_->replaces(i)) continue;
        ConvertedLayer layer;
        layer.mechanism = name;
        const bool features = layer.mechanism == "hybrid" || layer.mechanism == "distill";
        layer.window = layer.mechanism == "distill" ? 0 : std::min<int64_t>(64, windows_[0]);
        layer.sinks = layer.mechanism == "gdn" || layer.mechanism == "gla" ? o_.sinks : 0;
        if (features) layer.features = layer.mechanism == "hybrid" ? (parts_->key(i) + 1) / 2 : parts_->key(i);
        double error = 0;
        for (const std::vector<double>& head : e.window) error += head[0];
        add(layer, mechanism_cost(layer, length_, parts_->key(i), parts_->value(i), causal), error / 2);
      }
      all.push_back(std::move(list));
    }
    return all;
  }

  void take(const std::vector<std::vector<LayerOption>>& all, const std::vector<size_t>& chosen) {
    r_.layers.clear();
    r_.cost = r_.predicted = 0;
    for (size_t i = 0; i < all.size(); ++i) {
      const LayerOption& o = all[i][chosen[i]];
      r_.layers.push_back({o.layer, o.cost, o.damage, alone_.empty() ? 0 : alone_[i]});
      r_.cost += o.cost * weights_[i];
      r_.predicted += o.damage;
    }
  }
  std::vector<ConvertedLayer> planned() const {
    std::vector<ConvertedLayer> list;
    for (const PlannedLayer& p : r_.layers) list.push_back(p.layer);
    return list;
  }

  // Stage 5, the second half: the knapsack, then the scale of each layer measured again where the plan stands, and again.
  Status plan() {
    if (exists(at("plan.json"))) return read_plan(at("plan.json"));
    if (!o_.plan.empty()) {
      LINNET_TRY(read_plan(o_.plan));
    } else if (o_.budget >= 1) {
      for (const ConvertedLayer& layer : plain_layers()) r_.layers.push_back({layer});
      r_.cost = 1;
    } else {
      std::vector<std::vector<LayerOption>> all = options();
      std::vector<size_t> chosen;
      LINNET_TRY(choose(all, weights_, o_.budget, chosen));
      take(all, chosen);
      // What is still to be trained cannot be measured.
      const auto trained = [](const LayerOption& option) {
        const std::string& m = option.layer.mechanism;
        return m == "gdn" || m == "gla" || m == "hybrid" || m == "distill";
      };
      const bool untrained = std::any_of(all.begin(), all.end(), [&](const std::vector<LayerOption>& list) {
        return std::any_of(list.begin(), list.end(), trained);
      });
      if (!o_.dry_run && !untrained) LINNET_TRY(refine(all, chosen));
    }
    JsonWriter w(1);
    w.begin_object().member("format", 1).member("model", fs::path(o_.model).filename().string()).member("family", r_.family);
    w.member("seed", o_.seed).member("length", length_).member("budget", o_.budget).member("cost", r_.cost);
    w.member("predicted_kl", r_.predicted)
        .member("measured_kl", r_.measured)
        .member("unit", r_.unit)
        .member("reliable", r_.reliable);
    w.member("tokens", "tokens.safetensors").member("initial", "initial.safetensors").key("layers").begin_array();
    for (const PlannedLayer& p : r_.layers) {
      JsonWriter one;
      p.layer.write(one);
      std::string text = one.text();
      text.pop_back();
      JsonWriter extra;
      extra.begin_object().member("cost", p.cost).member("damage", p.damage).member("alone", p.alone).end_object();
      raw_.push_back(text + ", " + extra.text().substr(1));
      w.value("@" + std::to_string(raw_.size() - 1));
    }
    std::string text = w.end_array().end_object().text();
    for (size_t i = 0; i < raw_.size(); ++i) {
      const std::string mark = "\"@" + std::to_string(i) + "\"";
      text.replace(text.find(mark), mark.size(), raw_[i]);
    }
    raw_.clear();
    return write_file(at("plan.json"), text);
  }

  // Encoders are small: every option that is worth its cost is measured, and the plan made again.
  Status measure_options(std::vector<std::vector<LayerOption>>& all, std::vector<size_t>& chosen) {
    std::vector<double> found;
    LINNET_TRY(read_list("damage_all.json", found));
    size_t n = 0, total = 0;
    for (const auto& list : all) total += list.size();
    for (std::vector<LayerOption>& list : all) {
      for (LayerOption& o : list) {
        bool worth = o.layer.mechanism != "softmax";
        for (const LayerOption& other : list) worth &= !(other.cost <= o.cost && other.error < 0.7 * o.error);
        if (n == found.size()) {
          tell("options", static_cast<int64_t>(n), static_cast<int64_t>(total));
          double kl = -1;
          if (worth) LINNET_TRY(alone(o.layer, kl));
          found.push_back(kl);
          LINNET_TRY(write_list("damage_all.json", found));
        }
        if (worth) o.damage = std::max(found[n], 0.0);
        if (!worth && o.layer.mechanism != "softmax") o.damage = 1;  // something cheaper is better
        ++n;
      }
    }
    LINNET_TRY(choose(all, weights_, o_.budget, chosen));
    take(all, chosen);
    return {};
  }

  Status refine(std::vector<std::vector<LayerOption>>& all, std::vector<size_t>& chosen) {
    LINNET_TRY(traced());
    if (!parts_->causal()) {
      LINNET_TRY(measure_options(all, chosen));
      return joint(planned(), r_.measured);
    }
    double best = 0;
    LINNET_TRY(joint(planned(), best));
    r_.measured = best;
    std::vector<double> again;
    for (int64_t round = 0; round < o_.rounds; ++round) {
      const std::string file = "damage_" + std::to_string(round + 1) + ".json";
      LINNET_TRY(read_list(file.c_str(), again));
      while (again.size() < all.size()) {
        const size_t i = again.size();
        tell("refinement", static_cast<int64_t>(i), static_cast<int64_t>(all.size()));
        double kl = 0;
        if (all[i][chosen[i]].layer.mechanism != "softmax" && all[i][chosen[i]].error > 0)
          LINNET_TRY(alone(all[i][chosen[i]].layer, kl));
        again.push_back(std::max(kl, 0.0));
        LINNET_TRY(write_list(file.c_str(), again));
      }
      for (size_t i = 0; i < all.size(); ++i) {
        const LayerOption& o = all[i][chosen[i]];
        if (o.layer.mechanism == "softmax" || !(o.error > 0)) continue;
        scale_[i] = std::sqrt(std::max(scale_[i], 1e-30) * std::max(again[i] / o.error, 1e-30));  // both points count
        for (LayerOption& each : all[i]) each.damage = each.error * scale_[i];
      }
      std::vector<size_t> next;
      LINNET_TRY(choose(all, weights_, o_.budget, next));
      const ConvertResult before = r_;
      take(all, next);
      if (next == chosen) {
        r_.measured = best;
        break;
      }
      double kl = 0;
      LINNET_TRY(joint(planned(), kl));
      if (kl >= best) {
        r_ = before;
        break;
      }
      best = r_.measured = kl;
      chosen = next;
    }
    return {};
  }

  Status read_plan(const std::string& path) {
    std::string text;
    JsonValue root;
    LINNET_TRY(read_file(path, kMaxStageBytes, text));
    LINNET_TRY(parse_json(text, path, {.max_bytes = kMaxStageBytes}, root));
    std::vector<ConvertedLayer> list;
    LINNET_TRY(read_conversion(root, path, list));
    r_.layers.assign(static_cast<size_t>(parts_->layers()), {});
    for (size_t i = 0; i < r_.layers.size(); ++i) r_.layers[i].layer.index = static_cast<int64_t>(i);
    size_t n = 0;
    for (JsonItems items(root.find("layers")); items.next(); ++n) {
      const ConvertedLayer& layer = list[n];
      if (layer.index >= parts_->layers())
        return bad_input(path + ": has layer " + std::to_string(layer.index) + ", the model has " +
                         std::to_string(parts_->layers()));
      if (layer.mechanism != "softmax" && !parts_->converts(layer.index)) {
        return bad_input(path + ": layer " + std::to_string(layer.index) + " is no softmax attention that could be converted");
      }
      PlannedLayer& p = r_.layers[static_cast<size_t>(layer.index)];
      p.layer = layer;
      p.damage = number_of(items.value().find("damage"));
      p.alone = number_of(items.value().find("alone"));
    }
    r_.cost = r_.predicted = 0;
    for (size_t i = 0; i < r_.layers.size(); ++i) {
      PlannedLayer& p = r_.layers[i];
      const int64_t index = static_cast<int64_t>(i);
      p.cost = mechanism_cost(p.layer, length_, parts_->key(index), parts_->value(index), parts_->causal());
      r_.cost += p.cost * weights_[i];
      r_.predicted += p.damage;
    }
    if (root.has("measured_kl")) r_.measured = number_of(root.find("measured_kl"));
    if (root.has("reliable")) r_.reliable = root.find("reliable").boolean();
    if (r_.cost > o_.budget * (1 + 1e-9)) {
      return impossible(path + ": its plan costs " + layers::number_text(r_.cost) +
                        " of the attention, more than the budget of " + layers::number_text(o_.budget));
    }
    return {};
  }

  // Stage 6: values of new parameters from the statistics of the heads.
  Status initial() {
    if (exists(at("initial.safetensors"))) return {};
    NewTensors tensors;
    for (const PlannedLayer& p : r_.layers) {
      std::vector<std::pair<std::string, std::vector<int64_t>>> list;
      if (p.layer.mechanism == "softmax") continue;
      LINNET_TRY(parts_->parameters(p.layer, list));
      for (const auto& [ours, shape] : list) {
        // layers.<i>.self_attn.<mechanism>.<name> -> linnet.layers.<i>.<mechanism>.<name>
        const std::string key = "self_attn.";
        const size_t cut = ours.find(key);
        const std::string theirs = "linnet." + ours.substr(0, cut) + ours.substr(cut + key.size());
        NewTensor& t = tensors[theirs];
        t.shape = shape;
        int64_t count = 1;
        for (const int64_t size : shape) count *= size;
        t.values.assign(static_cast<size_t>(count), 0);
        fill(ours.substr(ours.rfind('.', ours.rfind(".weight") == ours.size() - 7 ? ours.size() - 8 : std::string::npos) + 1),
             p.layer, shape, t.values, theirs);
      }
    }
    std::vector<SafetensorsTensor> out;
    for (const auto& [name, t] : tensors) out.push_back({name, "F32", t.shape, t.values.data()});
    return write_safetensors(at("initial.safetensors"), out);
  }

  void fill(const std::string& name, const ConvertedLayer& layer, const std::vector<int64_t>& shape, std::vector<float>& values,
            const std::string& full) const {
    const size_t i = static_cast<size_t>(layer.index);
    const std::vector<analysis::HeadStatistics> none, &heads = i < errors_.size() ? errors_[i].heads : none;
    if (name == "v_scale" || name == "balance") std::fill(values.begin(), values.end(), 1.0f);
    if (name == "window_factor") std::fill(values.begin(), values.end(), layer.mechanism == "hybrid" ? -2.1972246f : 0.0f);
    double low = INFINITY, high = -INFINITY;
    for (const auto& h : heads) low = std::min(low, h.entropy), high = std::max(high, h.entropy);
    for (size_t h = 0; h < values.size() && h < heads.size(); ++h) {
      if (name == "dt_bias") {
        const double target = std::clamp(std::log(2.0) / std::max(heads[h].distance, 0.5), 0.001, 5.0);
        values[h] = static_cast<float>(target + std::log(-std::expm1(-target)));
      } else if (name == "bias" && full.find(".b_proj.") != std::string::npos) {
        const double beta = 0.3 + 0.4 * (1 - (heads[h].entropy - low) / std::max(high - low, 1e-3));
        values[h] = static_cast<float>(std::log(beta / (1 - beta)));
      }
    }
    if (name == "z" || name.find("feature_map") != std::string::npos) {
      uint64_t random = static_cast<uint64_t>(o_.seed) * 1000003 + std::hash<std::string>{}(full);
      const double bound = name == "z" ? 1 : 1 / std::sqrt(static_cast<double>(shape[1]));
      const auto unit = [&] { return (static_cast<double>(mix(random) >> 11) + 0.5) / 9007199254740992.0; };
      for (float& x : values) {
        x = static_cast<float>(name == "z" ? std::sqrt(-2 * std::log(unit())) * std::cos(6.283185307179586 * unit())
                                           : bound * (2 * unit() - 1));
      }
    }
  }

  // Stages 7 and 8 are Python.
  Status fit() {
    if (exists(at("fit.safetensors"))) return {};
    const char* python = std::getenv("LINNET_PYTHON");
    std::vector<std::string> words = {
        python != nullptr && *python != '\0' ? python : "python3", "-m", "linnet.convert", "fit", "--work", work_};
    words.insert(words.end(), o_.fit.begin(), o_.fit.end());
    std::vector<char*> pointers;
    for (std::string& word : words) pointers.push_back(word.data());
    pointers.push_back(nullptr);
    const pid_t child = fork();
    if (child < 0) return impossible(std::string("python cannot be started: ") + std::strerror(errno));
    if (child == 0) {
      execvp(pointers[0], pointers.data());
      _exit(127);
    }
    int status = 0;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 3;
    if (code == 127)
      return impossible(words[0] + ": cannot be started; the fit needs Python with linnet and torch (or --zero-shot)");
    if (code == 2) return bad_input("the fit was refused (see above); the plan stays in " + work_);
    if (code != 0)
      return impossible("the fit ended with code " + std::to_string(code) + " (torch missing? see above); the plan stays in " +
                        work_);
    if (!exists(at("fit.safetensors"))) return impossible(work_ + ": the fit left no fit.safetensors");
    return {};
  }

  // Stage 10: the folder in the making.
  Status write() {
    const std::string made = at("out");
    if (exists(at("written.json"))) return {};
    struct statvfs disk;
    if (statvfs(work_.c_str(), &disk) == 0 &&
        static_cast<uint64_t>(disk.f_bavail) * disk.f_frsize < checkpoint_bytes(*parts_)) {
      return impossible(work_ + ": the disk has " + std::to_string(static_cast<uint64_t>(disk.f_bavail) * disk.f_frsize >> 20) +
                        " MiB left, the converted model needs " + std::to_string(checkpoint_bytes(*parts_) >> 20));
    }
    std::error_code error;
    fs::remove_all(made, error);
    fs::create_directory(made, error);
    if (error) return impossible(made + ": cannot be made: " + error.message());
    NewTensors tensors;
    const std::string values = exists(at("fit.safetensors")) ? at("fit.safetensors") : at("initial.safetensors");
    SafetensorsFile file;
    LINNET_TRY(SafetensorsFile::open(values, file));
    for (const std::string& name : file.names()) {
      SafetensorsEntry entry;
      std::vector<double> numbers_in;
      LINNET_TRY(file.find(name, entry));
      LINNET_TRY(file.read_f64(name, numbers_in));
      tensors[name] = {entry.shape, {numbers_in.begin(), numbers_in.end()}};
    }
    CheckpointFacts facts;
    std::string plan_text;
    LINNET_TRY(read_file(at("plan.json"), kMaxStageBytes, plan_text));
    facts.plan_sha256 = sha256_of(plan_text);
    facts.sources = sources_;
    facts.seed = o_.seed;
    tell("writing", 0, 1);
    LINNET_TRY(write_checkpoint(*parts_, o_.model, section_layers(), tensors, facts, made));
    return write_file(at("written.json"), "{}");
  }

  // The layers of the section: of the plan, and what an earlier conversion left.
  std::vector<ConvertedLayer> section_layers() const {
    std::vector<ConvertedLayer> list = planned();
    if (parts_->files().is_gguf()) return list;
    std::string text;
    JsonValue root;
    std::vector<ConvertedLayer> before;
    if (!read_file(o_.model + "/config.json", kMaxStageBytes, text).ok() || !parse_json(text, "config.json", {}, root).ok())
      return list;
    if (!root.has("linnet") || !read_conversion(root.find("linnet"), "config.json", before).ok()) return list;
    for (const ConvertedLayer& layer : before) {
      if (list[static_cast<size_t>(layer.index)].mechanism == "softmax") list[static_cast<size_t>(layer.index)] = layer;
    }
    return list;
  }

  // Stage 9. Each part is saved as soon as it is there.
  template <class F>
  Status part(const char* name, F&& body) {
    const std::string file = at((std::string("evaluation_") + name + ".json").c_str());
    std::string text;
    if (exists(file)) {
      LINNET_TRY(read_file(file, kMaxStageBytes, text));
    } else {
      JsonWriter w;
      LINNET_TRY(body(w));
      text = w.text();
      LINNET_TRY(write_file(file, text));
    }
    evaluated_.emplace_back(name, text);
    return {};
  }

  Status evaluate() {
    LINNET_TRY(Model::load(at("out"), {"f32", static_cast<int>(o_.threads)}, student_));
    LINNET_TRY(part("identity", [&](JsonWriter& w) { return same_numbers(w); }));
    if (!parts_->causal()) return part("embedding", [&](JsonWriter& w) { return score_encoder(w); });
    const int64_t most = std::min(length_, static_cast<int64_t>(evaluation_.front().tokens.size()));
    std::set<int64_t> lengths = {std::min<int64_t>(2048, most), most};
    for (const int64_t length : lengths) {
      LINNET_TRY(part(("blocks_" + std::to_string(length)).c_str(),
                      [&](JsonWriter& w) { return score_text_blocks(length, planned(), w); }));
    }
    if (o_.baseline && o_.budget < 1 && !alone_.empty()) {
      for (const int64_t window : {int64_t{512}, int64_t{256}}) {
        for (const int64_t length : lengths) {
          LINNET_TRY(part(("baseline_" + std::to_string(window) + "_" + std::to_string(length)).c_str(),
                          [&](JsonWriter& w) { return score_text_blocks(length, baseline(window), w); }));
        }
      }
    }
    if (!teacher_.has_tokenizer()) return {};
    LINNET_TRY(part("texts", [&](JsonWriter& w) { return continuations(w); }));
    if (o_.recall) LINNET_TRY(part("recall", [&](JsonWriter& w) { return recall(w); }));
    if (o_.speed) LINNET_TRY(part("speed", [&](JsonWriter& w) { return speed(w); }));
    return {};
  }

  // Ten lines: the layers that a window of the reference size harms least get this window, as many as the plan's cost allows.
  std::vector<ConvertedLayer> baseline(int64_t window) const {
    std::vector<ConvertedLayer> list = plain_layers();
    std::vector<size_t> order(list.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return alone_[a] < alone_[b]; });
    double cost = 1;
    for (const size_t i : order) {
      if (cost <= r_.cost || !parts_->converts(static_cast<int64_t>(i))) continue;
      list[i].mechanism = "window", list[i].window = window, list[i].sinks = o_.sinks;
      cost -= weights_[i] * (1 - window_cost(window, o_.sinks, length_, true));
    }
    return list;
  }

  // The written model gives what the plan gives in memory, to the last bit (new parameters that were trained: what was fitted).
  Status same_numbers(JsonWriter& w) {
    ParameterValues extra;
    SafetensorsFile file;
    const bool fitted = exists(at("fit.safetensors"));
    LINNET_TRY(SafetensorsFile::open(fitted ? at("fit.safetensors") : at("initial.safetensors"), file));
    bool source_trained = false;
    for (const std::string& name : file.names()) {
      if (name.rfind("linnet.layers.", 0) != 0) {
        source_trained = true;
        continue;
      }
      const size_t dot = name.find('.', 14);
      LINNET_TRY(file.read_f64(name, extra["layers." + name.substr(14, dot - 14) + ".self_attn" + name.substr(dot)]));
    }
    Sample sample = evaluation_.front();
    if (sample.tokens.size() > static_cast<size_t>(std::min<int64_t>(length_, 512)))
      sample.tokens.resize(static_cast<size_t>(std::min<int64_t>(length_, 512)));
    std::vector<float> x, expected, found;
    LINNET_TRY(embed(*parts_, sample, x));
    LINNET_TRY(run_from(*parts_, planned(), 0, std::move(x), &extra, expected));
    const LayeredModel student(student_);
    if (sample.pixels.empty()) {
      LINNET_TRY(student_.hidden(sample.tokens, found));
    } else {
      LINNET_TRY(embed(student, sample, x));
      LINNET_TRY(run_from(student, plain_layers(), 0, std::move(x), nullptr, found));
    }
    if (!source_trained && found != expected) {
      return impossible(at("out") + ": the written model gives other numbers than the plan did; nothing was finished");
    }
    w.begin_object().member("tokens", sample.tokens.size()).member("identical", found == expected).end_object();
    return {};
  }

  Status score_encoder(JsonWriter& w) {
    double worst = 1, sum = 0;
    const LayeredModel student(student_);
    for (size_t s = 0; s < evaluation_.size(); ++s) {
      tell("evaluation", static_cast<int64_t>(s), static_cast<int64_t>(evaluation_.size()));
      std::vector<float> x, a, b;
      LINNET_TRY(embed(*parts_, evaluation_[s], x));
      LINNET_TRY(run_from(*parts_, plain_layers(), 0, x, nullptr, a));
      LINNET_TRY(run_from(student, plain_layers(), 0, x, nullptr, b));
      double far = 0;
      LINNET_TRY(distance(*parts_, {a}, {b}, false, far));
      worst = std::min(worst, 1 - far);
      sum += 1 - far;
    }
    w.begin_object()
        .member("samples", evaluation_.size())
        .member("length", length_)
        .member("cosine", sum / static_cast<double>(evaluation_.size()));
    w.member("worst", worst).end_object();
    return {};
  }

  Status score_text_blocks(int64_t length, const std::vector<ConvertedLayer>& list, JsonWriter& w) {
    std::vector<int32_t> tokens = evaluation_.front().tokens;
    const bool own = list.size() == r_.layers.size() &&
                     std::equal(list.begin(), list.end(), r_.layers.begin(),
                                [](const ConvertedLayer& a, const PlannedLayer& b) { return a.label() == b.layer.label(); });
    struct Bucket {
      double teacher = 0, student = 0, kl = 0;
      int64_t tokens = 0;
    };
    std::vector<Bucket> buckets;
    Bucket all;
    int64_t agreed = 0, blocks = 0;
    for (size_t begin = 0; begin + 1 < tokens.size(); begin += static_cast<size_t>(length)) {
      const size_t end = std::min(tokens.size(), begin + static_cast<size_t>(length));
      if (end - begin < static_cast<size_t>(length) && blocks > 0) break;  // whole blocks only
      const std::vector<int32_t> block(tokens.begin() + static_cast<ptrdiff_t>(begin),
                                       tokens.begin() + static_cast<ptrdiff_t>(end));
      tell("evaluation, blocks of " + std::to_string(length), static_cast<int64_t>(begin), static_cast<int64_t>(tokens.size()));
      std::vector<float> a, b, x;
      LINNET_TRY(teacher_.hidden(block, a));
      if (own) {
        LINNET_TRY(student_.hidden(block, b));
      } else {
        LINNET_TRY(parts_->embed(block, x));
        LINNET_TRY(run_from(*parts_, list, 0, std::move(x), nullptr, b));
      }
      BlockScore score;
      LINNET_TRY(score_block(*parts_, block, a, b, score));
      for (size_t t = 0; t < score.kl.size(); ++t) {
        size_t bucket = 0;
        for (size_t edge = 64; t + 1 >= edge; edge *= 4) ++bucket;
        if (buckets.size() <= bucket) buckets.resize(bucket + 1);
        for (Bucket* each : {&buckets[bucket], &all}) {
          each->teacher += static_cast<double>(score.teacher[t]), each->student += static_cast<double>(score.student[t]);
          each->kl += static_cast<double>(score.kl[t]), ++each->tokens;
        }
      }
      agreed += score.agreed;
      ++blocks;
    }
    const auto write_bucket = [&](const Bucket& b) {
      const double n = static_cast<double>(std::max<int64_t>(b.tokens, 1));
      w.member("tokens", b.tokens)
          .member("teacher_loss", b.teacher / n)
          .member("student_loss", b.student / n)
          .member("kl", b.kl / n);
      w.member("ratio", std::exp((b.student - b.teacher) / n));
    };
    w.begin_object().member("length", length).member("blocks", blocks);
    write_bucket(all);
    const double n = static_cast<double>(std::max<int64_t>(all.tokens, 1));
    w.member("teacher_perplexity", std::exp(all.teacher / n)).member("student_perplexity", std::exp(all.student / n));
    w.member("agreement", static_cast<double>(agreed) / n);
    double cost = 0;
    for (size_t i = 0; i < list.size(); ++i) {
      const int64_t index = static_cast<int64_t>(i);
      cost += weights_[i] * mechanism_cost(list[i], length_, parts_->key(index), parts_->value(index), true);
    }
    int64_t kept = 0;
    for (const ConvertedLayer& layer : list) kept += layer.mechanism == "softmax";
    w.member("cost", cost).member("softmax_layers", kept).key("positions").begin_array();
    size_t first = 0;
    for (size_t i = 0, width = 64; i < buckets.size(); first = width, width *= 4, ++i) {
      w.begin_object().member("first", first).member("last", width - 1);
      write_bucket(buckets[i]);
      w.end_object();
    }
    w.end_array().end_object();
    return {};
  }

  Status continuations(JsonWriter& w) {
    std::vector<std::string> prompts;
    ChatTemplate chat;
    const bool chats = teacher_.chat(chat).ok();
    std::vector<std::vector<int32_t>> ids;
    for (const char* question : {"Why do birds sing?", "Name three rivers of Europe.", "Write one sentence about the sea."}) {
      prompts.emplace_back(chats ? question : "");
      if (chats) ids.push_back(teacher_.tokenizer().encode(chat.begin("", question), true));
    }
    if (!chats) prompts.clear();
    for (size_t i = 0; i < 2 && evaluation_.front().tokens.size() >= 256 * (i + 1); ++i) {
      const auto from = evaluation_.front().tokens.begin() + static_cast<ptrdiff_t>(256 * i);
      ids.emplace_back(from, from + std::min<ptrdiff_t>(128, evaluation_.front().tokens.end() - from));
      prompts.push_back(teacher_.tokenizer().decode(ids.back(), {}));
    }
    w.begin_array();
    for (size_t p = 0; p < ids.size(); ++p) {
      tell("continuations", static_cast<int64_t>(p), static_cast<int64_t>(ids.size()));
      if (static_cast<int64_t>(ids[p].size()) + 48 > teacher_.context()) continue;
      std::vector<int32_t> said[2];
      w.begin_object().member("prompt", prompts[p]);
      for (int i = 0; i < 2; ++i) {
        const Model& model = i == 0 ? teacher_ : student_;
        Session session;
        const Status status = model.start(session);
        if (!status.ok()) {  // hybrid has no session yet
          w.member(i == 0 ? "teacher" : "student", "(" + status.message() + ")");
          continue;
        }
        Sampler greedy({});
        Generation g;
        GenerateOptions options;
        options.tokens = 40;
        std::string text;
        LINNET_TRY(generate(
            model, session, ids[p], greedy, options, [&](const std::string& piece) { return text += piece, true; }, g));
        said[i] = g.tokens;
        w.member(i == 0 ? "teacher" : "student", text);
      }
      size_t same = 0;
      while (same < std::min(said[0].size(), said[1].size()) && said[0][same] == said[1][same]) ++same;
      w.member("same_tokens", same).member("of", said[0].size()).end_object();
    }
    w.end_array();
    return {};
  }

  // 4-bit weights for both, as someone in need of speed would run them.
  Status fast(Model& teacher, Model& student) {
    LINNET_TRY(Model::load(o_.model, {"q4", static_cast<int>(o_.threads)}, teacher));
    return Model::load(at("out"), {"q4", static_cast<int>(o_.threads)}, student);
  }

  Status recall(JsonWriter& w) {
    Model models[2];
    LINNET_TRY(fast(models[0], models[1]));
    std::vector<int64_t> lengths;
    for (const int64_t length : {int64_t{512}, int64_t{2048}}) {
      if (length <= std::min(length_, teacher_.context())) lengths.push_back(length);
    }
    w.begin_object().member("weights", "q4").key("tasks").begin_array();
    Session probe;
    const bool sessions = models[1].start(probe).ok();
    std::vector<RecallScore> scores[2];
    for (int i = 0; i < 2 && sessions && !lengths.empty(); ++i) {
      LINNET_TRY(score_recall(
          models[i], lengths, 4, static_cast<uint64_t>(o_.seed),
          [&](int64_t done, int64_t total) { tell("recall", done, total); }, scores[i]));
    }
    for (size_t s = 0; s < scores[0].size(); ++s) {
      w.begin_object()
          .member("task", scores[0][s].task)
          .member("length", scores[0][s].length)
          .member("trials", scores[0][s].trials);
      w.member("teacher", scores[0][s].right).member("student", scores[1][s].right).end_object();
    }
    w.end_array().end_object();
    return {};
  }

  Status speed(JsonWriter& w) {
    Model models[2];
    LINNET_TRY(fast(models[0], models[1]));
    w.begin_object().member("weights", models[0].summary().weights).key("lengths").begin_array();
    uint64_t random = 7;
    Session probe;
    const bool sessions = models[1].start(probe).ok();
    for (int64_t length = 1024; sessions && length <= std::min(length_, teacher_.context() - 16); length *= 2) {
      tell("speed", length, length_);
      std::vector<int32_t> prompt;
      for (int64_t i = 0; i < length; ++i)
        prompt.push_back(static_cast<int32_t>(mix(random) % static_cast<uint64_t>(teacher_.vocabulary())));
      w.begin_object().member("length", length);
      for (int i = 0; i < 2; ++i) {
        Session session;
        std::vector<float> logits;
        LINNET_TRY(models[i].start(session));
        const double start = now();
        LINNET_TRY(session.prefill(prompt, logits));
        const double middle = now();
        double best = INFINITY;  // of single tokens: the machine may be shared
        for (int t = 0; t < 12; ++t) {
          const double before = now();
          LINNET_TRY(session.decode(prompt[static_cast<size_t>(t)], logits));
          best = std::min(best, now() - before);
        }
        w.key(i == 0 ? "teacher" : "student").begin_object().member("prefill", static_cast<double>(length) / (middle - start));
        w.member("decode", 1 / best).member("state_bytes", session.state_bytes()).end_object();
      }
      w.end_object();
    }
    w.end_array().end_object();
    return {};
  }

  Status finish() {
    JsonWriter w;
    w.begin_object()
        .member("model", fs::path(o_.model).filename().string())
        .member("family", r_.family)
        .member("parameters", r_.parameters);
    w.member("budget", o_.budget).member("cost", r_.cost).member("length", length_).member("zero_shot", o_.zero_shot);
    w.member("reliable", r_.reliable).member("unit", r_.unit).member("predicted", r_.predicted).member("measured", r_.measured);
    w.member("text", o_.text.empty() ? "" : fs::path(o_.text).filename().string());
    w.member("eval_text", o_.eval_text.empty() ? "" : fs::path(o_.eval_text).filename().string());
    w.member("seed", o_.seed).key("sources").begin_object();
    for (const auto& [file, hash] : sources_) w.member(file, hash);
    w.end_object().key("windows").begin_array();
    for (const int64_t each : windows_) w.value(each);
    w.end_array().key("seconds").begin_array();
    for (const auto& [name, seconds] : r_.seconds)
      w.begin_object().member("stage", name).member("seconds", seconds).end_object();
    w.end_array().key("layers").begin_array();
    for (size_t i = 0; i < r_.layers.size(); ++i) {
      const PlannedLayer& p = r_.layers[i];
      w.begin_object()
          .member("index", i)
          .member("label", p.layer.label())
          .member("cost", p.cost)
          .member("damage", p.damage)
          .member("alone", p.alone);
      double entropy = 0, far = 0, sink = 0, rank = 0, near = 0;
      const size_t heads = i < errors_.size() ? errors_[i].heads.size() : 0;
      for (size_t h = 0; h < heads; ++h) {
        const analysis::HeadStatistics& s = errors_[i].heads[h];
        const double share = 1 / static_cast<double>(heads);
        entropy += share * s.entropy, far += share * s.distance, sink += share * s.sink_mass, rank += share * s.stable_rank;
        near += share * (s.window_mass.empty() ? 0 : s.window_mass[reference()]);
      }
      w.member("entropy", entropy)
          .member("distance", far)
          .member("sink_mass", sink)
          .member("stable_rank", rank)
          .member("window_mass", near)
          .end_object();
    }
    w.end_array().key("evaluation").begin_object();
    for (size_t i = 0; i < evaluated_.size(); ++i) w.member(evaluated_[i].first, "@" + std::to_string(i));
    std::string json = w.end_object().end_object().text();
    for (size_t i = 0; i < evaluated_.size(); ++i) {
      const std::string mark = "\"@" + std::to_string(i) + "\"";
      json.replace(json.find(mark), mark.size(), evaluated_[i].second);
    }
    const std::string made = at("out");
    LINNET_TRY(write_file(made + "/report.json", json));
    const std::string markdown = report_markdown(json);
    LINNET_TRY(write_file(made + "/report.md", markdown));
    LINNET_TRY(write_file(made + "/report.html", report_page(json)));
    const size_t first = markdown.find("\n\n") + 2;
    r_.headline = markdown.substr(first, markdown.find("\n\n", first) - first);
    LINNET_TRY(sync_folder(made));
    if (exists(out_)) return bad_input(out_ + ": exists by now; the converted model is in " + made);
    std::error_code error;
    fs::rename(made, out_, error);
    if (error) return impossible(out_ + ": cannot be made: " + error.message() + "; the converted model is in " + made);
    LINNET_TRY(sync_folder(fs::absolute(out_).parent_path().string()));
    if (!o_.keep_work) remove_work();
    r_.report = out_ + "/report.html";
    return {};
  }

  static size_t unicode_invalid(const std::string& text) { return find_invalid_utf8(text); }

  const ConvertOptions& o_;
  const Told& told_;
  ConvertResult& r_;
  std::string out_, work_;
  bool fresh_ = false;
  Model teacher_, student_;
  std::unique_ptr<LayeredModel> parts_;
  int64_t length_ = 0;
  std::vector<double> weights_;  // of each layer in the softmax cost
  std::vector<int64_t> windows_;
  std::vector<ConvertedLayer> whole_;
  std::map<std::string, std::string> sources_;
  std::vector<Sample> calibration_, plan_, evaluation_;
  std::vector<LayerErrors> errors_;
  Traced traced_;
  std::vector<double> alone_, scale_;
  std::vector<std::string> raw_;
  std::vector<std::pair<std::string, std::string>> evaluated_;
};

}  // namespace

Status convert_model(const ConvertOptions& options, const Told& told, ConvertResult& result) {
  return Job(options, told, result).run();
}

}  // namespace linnet::convert
