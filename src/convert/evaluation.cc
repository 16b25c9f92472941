// Before and after: losses, agreement, continuations, recall, rates.
#include <cmath>
#include <cstring>
#include <set>

#include "convert/checkpoint.h"
#include "convert/job.h"
#include "core/files/file.h"
#include "runtime/evaluate.h"
#include "runtime/generate.h"

namespace linnet::convert {

namespace {

// linnet.layers.<i>.<mechanism>.<name> -> layers.<i>.self_attn.<mechanism>.<name>
std::string name_in_block(const std::string& name) {
  const size_t first = std::strlen("linnet.layers."), dot = name.find('.', first);
  return "layers." + name.substr(first, dot - first) + ".self_attn" + name.substr(dot);
}

}  // namespace

// Stage 9. Each part is saved as soon as it is there.
template <class F>
Status Job::part(const char* name, F&& body) {
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

Status Job::evaluate() {
  LINNET_TRY(Model::load(at("out"), {"f32", static_cast<int>(o_.threads)}, student_));
  LINNET_TRY(part("identity", [&](JsonWriter& w) { return same_numbers(w); }));
  if (!parts_->causal()) return part("embedding", [&](JsonWriter& w) { return score_encoder(w); });
  const int64_t most = std::min(length_, static_cast<int64_t>(evaluation_.front().tokens.size()));
  std::set<int64_t> lengths = {std::min<int64_t>(2048, most), most};
  for (const int64_t length : lengths) {
    LINNET_TRY(part(("blocks_" + std::to_string(length)).c_str(),
                    [&](JsonWriter& w) { return score_text_blocks(length, planned(), w); }));
  }
  if (!keeps_all()) LINNET_TRY(branches(*lengths.begin()));
  if (o_.baseline && !keeps_all() && !alone_.empty()) LINNET_TRY(others(lengths));
  if (!teacher_.has_tokenizer()) return {};
  LINNET_TRY(part("texts", [&](JsonWriter& w) { return continuations(w); }));
  if (o_.recall) LINNET_TRY(part("recall", [&](JsonWriter& w) { return recall(w); }));
  if (o_.speed) LINNET_TRY(part("speed", [&](JsonWriter& w) { return speed(w); }));
  return {};
}

Status Job::branches(int64_t length) {
  struct Branch {
    const char* name;
    void (*change)(ConvertedLayer& layer, int64_t near);
  };
  constexpr Branch kBranches[] = {
      {"branch_first", [](ConvertedLayer& layer, int64_t) { layer.sinks = 0; }},
      {"branch_near",  // heads that see all keys get a window, so do layers that stayed
       [](ConvertedLayer& layer, int64_t near) {
         if (layer.mechanism == "softmax") layer.mechanism = "window", layer.window = near;
         for (int64_t& w : layer.windows) w = w == 0 ? near : w;
       }},
      {"branch_window",  // what is trained leaves its window alone
       [](ConvertedLayer& layer, int64_t) {
         if (is_trained(layer.mechanism) && layer.window > 0) layer.mechanism = "window", layer.features = 0;
       }},
      {"branch_far",  // and the other way round; the forms of one normaliser keep the token itself
       [](ConvertedLayer& layer, int64_t) {
         if (!is_trained(layer.mechanism) || layer.window == 0) return;
         const bool recurrent = layer.mechanism == "gdn" || layer.mechanism == "gla";
         layer.window = recurrent ? 0 : 1, layer.sinks = 0;
       }},
  };
  int64_t near = windows_.front();
  for (const int64_t w : windows_) near = w <= length / 4 ? w : near;
  for (const Branch& branch : kBranches) {
    std::vector<ConvertedLayer> list = section_layers();
    bool changed = false;
    for (ConvertedLayer& layer : list) {
      const std::string before = layer.label();
      if (layer.mechanism == "softmax" && (!parts_->converts(layer.index) || parts_->own_window(layer.index) > 0)) continue;
      branch.change(layer, near);
      changed |= layer.label() != before;
    }
    if (!changed) continue;
    const auto score = [&](JsonWriter& w) -> Status {
      const std::string folder = at("branch");
      LINNET_TRY(link_checkpoint(at("out"), list, folder));
      Model model;
      LINNET_TRY(Model::load(folder, {"f32", static_cast<int>(o_.threads)}, model));
      LINNET_TRY(score_text_blocks(length, list, w, nullptr, &model));
      std::error_code error;
      fs::remove_all(folder, error);
      return {};
    };
    LINNET_TRY(part((std::string(branch.name) + "_" + std::to_string(length)).c_str(), score));
  }
  return {};
}

Status Job::others(const std::set<int64_t>& lengths) {
  struct Other {
    std::string name;
    ConvertedLayer form;
    bool uniform = false;
  };
  std::vector<Other> list;
  for (const bool uniform : {false, true}) {
    for (const int64_t window : {int64_t{512}, int64_t{256}}) {
      Other& other = list.emplace_back();
      other.name = (uniform ? "uniform_" : "baseline_") + std::to_string(window);
      other.form.mechanism = "window", other.form.window = window, other.form.sinks = o_.sinks, other.uniform = uniform;
    }
  }
  const auto published = [&](const char* name, const char* mechanism, int64_t window, int64_t features) {
    Other& other = list.emplace_back();
    other.name = name;
    other.form.mechanism = mechanism, other.form.window = window, other.form.features = features;
  };
  int64_t key = 0;
  bool free = true;  // whether every layer could take them
  for (int64_t i = 0; i < parts_->layers(); ++i) key = std::max(key, parts_->key(i)), free &= parts_->replaces(i);
  if (free) {
    published("lolcats", "hybrid", 64, key);
    published("liger", "gla", 64, 0);
    published("hedgehog", "hedgehog", 0, key);
  }
  for (const Other& other : list) {
    const std::vector<ConvertedLayer> layers = baseline(other.form, other.uniform);
    NewTensors tensors;
    LINNET_TRY(initial_values(layers, tensors));
    ParameterValues extra;
    for (const auto& [name, t] : tensors) extra[name_in_block(name)].assign(t.values.begin(), t.values.end());
    for (const int64_t length : lengths) {
      LINNET_TRY(part((other.name + "_" + std::to_string(length)).c_str(),
                      [&](JsonWriter& w) { return score_text_blocks(length, layers, w, &extra); }));
    }
  }
  return {};
}

// Ten lines: the layers that a window of the reference size harms least get this form, as many as the plan's cost allows.
// Uniform: so many layers, evenly spaced, whatever the harm.
std::vector<ConvertedLayer> Job::baseline(const ConvertedLayer& form, bool uniform) const {
  std::vector<ConvertedLayer> list = plain_layers();
  const auto saved = [&](size_t i) { return 1 - layer_cost(form, i); };
  std::vector<size_t> order(list.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return alone_[a] < alone_[b]; });
  if (uniform) {  // the kept ones come last: their places are those of an even spacing
    const double n = static_cast<double>(list.size());
    const size_t kept =
        list.size() - std::min(list.size(), static_cast<size_t>(std::ceil((1 - r_.cost) * n / saved(0) - 1e-9)));
    std::vector<bool> keeps(list.size());
    for (size_t i = 0; i < kept; ++i) keeps[(2 * i + 1) * list.size() / (2 * kept)] = true;
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return keeps[a] < keeps[b]; });
  }
  double cost = 1;
  for (const size_t i : order) {
    if (cost <= r_.cost || !parts_->converts(static_cast<int64_t>(i)) || saved(i) <= 0) continue;
    list[i] = form;
    list[i].index = static_cast<int64_t>(i);
    cost -= weights_[i] * saved(i);
  }
  return list;
}

// The written model gives what the plan gives in memory, to the last bit (new parameters that were trained: what was fitted).
Status Job::same_numbers(JsonWriter& w) {
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
    LINNET_TRY(file.read_f64(name, extra[name_in_block(name)]));
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

Status Job::score_encoder(JsonWriter& w) {
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

Status Job::score_text_blocks(int64_t length, const std::vector<ConvertedLayer>& list, JsonWriter& w,
                              const ParameterValues* extra, const Model* model) {
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
    std::vector<float>& known = teacher_states_[{length, begin}];
    if (known.empty()) LINNET_TRY(teacher_.hidden(block, known));
    a = known;
    if (!o_.baseline && block.size() > 2048) known.clear();  // nobody asks again
    if (own || model != nullptr) {
      LINNET_TRY((model != nullptr ? *model : student_).hidden(block, b));
    } else {
      LINNET_TRY(parts_->embed(block, x));
      LINNET_TRY(run_from(*parts_, list, 0, std::move(x), extra, b));
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
    cost += weights_[i] * layer_cost(list[i], i);
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

Status Job::continuations(JsonWriter& w) {
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
      if (!status.ok()) {  // a layer that cannot go on token by token; the sentence names it
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
Status Job::fast(Model& teacher, Model& student) {
  LINNET_TRY(Model::load(o_.model, {"q4", static_cast<int>(o_.threads)}, teacher));
  return Model::load(at("out"), {"q4", static_cast<int>(o_.threads)}, student);
}

Status Job::recall(JsonWriter& w) {
  Model models[2];
  LINNET_TRY(fast(models[0], models[1]));
  std::vector<int64_t> lengths;
  for (const int64_t length : o_.recall_lengths) {
    if (length <= std::min(length_, teacher_.context()) && length >= shortest_recall(teacher_)) lengths.push_back(length);
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

Status Job::speed(JsonWriter& w) {
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

}  // namespace linnet::convert
