#include "convert/convert.h"

#include <set>

#include "convert/checkpoint.h"
#include "convert/job.h"
#include "convert/sha256.h"
#include "core/files/file.h"
#include "layers/layer.h"
#include "runtime/files/gguf_config.h"

namespace linnet::convert {

Status Job::run() {
  LINNET_TRY(check());
  LINNET_TRY(stage("load", [&] { return load(); }));
  if (const Status status = stage("data", [&] { return data(); }); !status.ok()) {
    if (fresh_) remove_work();  // nothing was measured that a second run could use
    return status;
  }
  if (!keeps_all() && o_.plan.empty()) LINNET_TRY(stage("statistics", [&] { return statistics(); }));
  if (!keeps_all() && o_.plan.empty()) LINNET_TRY(stage("damage", [&] { return damage(); }));
  if (const Status status = stage("plan", [&] { return plan(); }); !status.ok()) {
    if (fresh_ && no_plan_) remove_work();  // another budget or plan is another conversion
    return status;
  }
  for (PlannedLayer& p : r_.layers) {
    if (!parts_->attends(p.layer.index)) p.kept = parts_->mixer(p.layer.index);
  }
  if (o_.dry_run) {
    if (fresh_) remove_work();
    return {};
  }
  LINNET_TRY(stage("initial values", [&] { return initial(); }));
  if (needs_fit()) LINNET_TRY(stage("fit", [&] { return fit(); }));
  LINNET_TRY(stage("write", [&] { return write(); }));
  LINNET_TRY(stage("evaluate", [&] { return evaluate(); }));
  return finish();
}

Status Job::check() {
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
  for (const std::string& name : o_.mechanisms) {
    if (name != "softmax" && name != "window" && name != "monarch" && name != "hierarchical" && !is_trained(name)) {
      return bad_input("there is no mechanism '" + name +
                       "', expected softmax, window, distill, hybrid, hybrid-exact, hedgehog, t2r, gdn, gla, monarch or "
                       "hierarchical");
    }
    if (is_trained(name) && o_.zero_shot)
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
Status Job::load() {
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
    const double weight = parts_->converts(i) ? static_cast<double>(parts_->heads(i) * (parts_->key(i) + parts_->value(i))) : 0;
    weights_.push_back(weight * own_cost(static_cast<size_t>(i)));
    convertible += parts_->converts(i);
  }
  if (convertible == 0) return impossible(o_.model + ": has no softmax attention layer that could be converted");
  double total = 0;
  for (const double w : weights_) total += w;
  for (double& w : weights_) w /= total;
  for (const int64_t i : o_.keep) {
    if (i < 0 || i >= parts_->layers()) {
      return bad_input("--keep-softmax has layer " + std::to_string(i) + ", the model has " + std::to_string(parts_->layers()));
    }
  }
  if (o_.keep_count > convertible) {
    return bad_input("--keep-softmax is " + std::to_string(o_.keep_count) + ", the model has " + std::to_string(convertible) +
                     " layers that could be converted");
  }
  windows_ = o_.windows;
  std::sort(windows_.begin(), windows_.end());
  if (windows_.empty()) {
    int64_t least = s.causal ? 64 : 16;
    while (least > 8 && least * 16 > length_) least /= 2;  // short contexts have small budgets, too
    // With a limit on the cache, the first keys count: a window and they fill it exactly.
    const int64_t first = o_.cache > 0 && o_.sinks < least ? o_.sinks : 0;
    for (int64_t w = least; w < length_ / (s.causal ? 2 : 1) && w <= 2048; w *= 2) windows_.push_back(w - first);
    if (windows_.empty()) windows_ = {std::max<int64_t>(1, length_ / 4)};
  }
  const bool any = o_.mechanisms.empty();
  if (!s.causal && (any || contains(o_.mechanisms, "monarch"))) {
    for (const int64_t block : {4, 6, 8, 10, 12, 14, 16, 20, 24, 32}) {
      for (const int64_t steps : {1, 2, 3}) {
        if (block * 2 > length_) continue;
        if (steps != 2 && block != 8 && block != 16 && block != 32) continue;
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
  w.end_object().key("options").begin_object().member("budget", o_.budget).member("length", length_).member("sinks", o_.sinks);
  w.member("seed", o_.seed).member("zero_shot", o_.zero_shot).member("calibration_tokens", o_.calibration_tokens);
  w.member("plan_tokens", o_.plan_tokens).member("eval_tokens", o_.eval_tokens).member("rounds", o_.rounds);
  w.member("keep_recall", o_.keep_recall);
  w.key("windows").begin_array();
  for (const int64_t each : windows_) w.value(each);
  w.end_array().key("mechanisms").begin_array();
  for (const std::string& name : o_.mechanisms) w.value(name);
  w.end_array().key("keep_softmax").begin_array();
  for (const int64_t i : o_.keep) w.value(i);
  w.end_array().member("keep_count", o_.keep_count).member("cache", o_.cache).end_object().end_object();
  std::string before;
  if (exists(at("state.json"))) {
    LINNET_TRY(read_file(at("state.json"), kMaxStageBytes, before));
    if (before != w.text()) {
      return bad_input(work_ +
                       ": belongs to a conversion with other options or files; give the same ones, or remove it to start over");
    }
    return {};
  }
  fresh_ = true;
  std::error_code error;
  fs::create_directory(work_, error);
  if (error) return impossible(work_ + ": cannot be made: " + error.message());
  return write_file(at("state.json"), w.text());
}

Status Job::finish() {
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
  w.end_array().member("recall_teacher", r_.recall_teacher).member("recall_plain", r_.recall_plain).key("recall").begin_array();
  for (const RecallTry& each : r_.recall) {
    w.begin_object().member("weight", each.weight).member("kl", each.kl).member("recall_kl", each.recall_kl);
    w.member("loss", each.loss).end_object();
  }
  w.end_array().key("seconds").begin_array();
  for (const auto& [name, seconds] : r_.seconds) w.begin_object().member("stage", name).member("seconds", seconds).end_object();
  w.end_array().key("layers").begin_array();
  for (size_t i = 0; i < r_.layers.size(); ++i) {
    const PlannedLayer& p = r_.layers[i];
    w.begin_object()
        .member("index", i)
        .member("label", p.label())
        .member("cost", p.cost)
        .member("damage", p.damage)
        .member("alone", p.alone);
    double entropy = 0, far = 0, sink = 0, rank = 0, near = 0, dof = 0;
    const size_t heads = i < errors_.size() ? errors_[i].heads.size() : 0;
    for (size_t h = 0; h < heads; ++h) {
      const analysis::HeadStatistics& s = errors_[i].heads[h];
      const double share = 1 / static_cast<double>(heads);
      entropy += share * s.entropy, far += share * s.distance, sink += share * s.sink_mass, rank += share * s.stable_rank,
          dof = std::max(dof, s.dof);
      near += share * (s.window_mass.empty() ? 0 : s.window_mass[reference(i)]);
    }
    w.member("entropy", entropy)
        .member("distance", far)
        .member("sink_mass", sink)
        .member("stable_rank", rank)
        .member("window_mass", near)
        .member("dof", dof)
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

Status convert_model(const ConvertOptions& options, const Told& told, ConvertResult& result) {
  return Job(options, told, result).run();
}

}  // namespace linnet::convert
