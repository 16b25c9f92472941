#include "runtime/evaluate.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "core/files/json.h"
#include "core/op.h"

namespace linnet {

namespace {

// 0-63, 64-255, 256-1023, ...
size_t bucket_of(int64_t position) {
  size_t bucket = 0;
  for (int64_t end = 64; position >= end; end *= 4) ++bucket;
  return bucket;
}

uint64_t next(uint64_t& state) {  // splitmix64
  uint64_t z = state += 0x9e3779b97f4a7c15ull;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return z ^ z >> 31;
}

struct Puzzle {
  std::string prompt, answer;
};

constexpr const char* kFiller = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. ";

Puzzle passkey(int64_t sentences, double depth, uint64_t& random) {
  const std::string key = std::to_string(10000 + next(random) % 90000);
  Puzzle p;
  p.prompt = "There is a pass key hidden in this text. Find it and remember it. ";
  const int64_t at = static_cast<int64_t>(depth * static_cast<double>(sentences));
  for (int64_t i = 0; i <= sentences; ++i) {
    if (i == at) p.prompt += "The pass key is " + key + ". Remember it. " + key + " is the pass key. ";
    if (i < sentences) p.prompt += kFiller;
  }
  p.prompt += "What is the pass key? The pass key is";
  p.answer = " " + key;
  return p;
}

Puzzle associative(int64_t pairs, uint64_t& random) {
  std::vector<std::string> names, values;
  for (int64_t i = 0; i < pairs; ++i) {
    std::string name;
    for (int j = 0; j < 4; ++j) name += static_cast<char>('a' + next(random) % 26);
    names.push_back(name);
    values.push_back(std::to_string(100 + next(random) % 900));
  }
  Puzzle p;
  for (int64_t i = 0; i < pairs; ++i) {
    p.prompt += names[static_cast<size_t>(i)] + " = " + values[static_cast<size_t>(i)] + "\n";
  }
  const size_t asked = next(random) % static_cast<uint64_t>(pairs);
  const size_t first = static_cast<size_t>(std::find(names.begin(), names.end(), names[asked]) - names.begin());
  p.prompt += names[first] + " =";
  p.answer = " " + values[first];
  return p;
}

// Whether the most likely tokens behind the prompt are the answer's.
Status solve(const Model& model, const Puzzle& puzzle, bool& right) {
  Session session;
  LINNET_TRY(model.start(session));
  std::vector<float> logits;
  const std::vector<int32_t> prompt = model.tokenizer().encode(puzzle.prompt, {true, false});
  LINNET_TRY(session.prefill(prompt, logits));
  Sampler greedy({});
  std::vector<int32_t> said;
  std::string text;
  while (text.size() < puzzle.answer.size() && said.size() < 16 && session.position() < model.context()) {
    const int32_t token = greedy.next(logits.data(), model.vocabulary());
    said.push_back(token);
    text += model.tokenizer().bytes(token);
    if (puzzle.answer.compare(0, text.size(), text, 0, puzzle.answer.size()) != 0) break;
    LINNET_TRY(session.decode(token, logits));
  }
  right = text.compare(0, puzzle.answer.size(), puzzle.answer) == 0;
  return {};
}

}  // namespace

Status score_text(const Model& model, const std::string& text, const TextOptions& options, const Progressed& progressed,
                  TextScore& out) {
  out = {};
  if (!model.has_tokenizer()) return bad_input(model.summary().path + ": has no tokenizer.json, which reading a text needs");
  std::vector<int32_t> tokens = model.tokenizer().encode(text, {false, false});
  if (options.limit > 0 && static_cast<int64_t>(tokens.size()) > options.limit)
    tokens.resize(static_cast<size_t>(options.limit));
  const int64_t count = static_cast<int64_t>(tokens.size()), stride = options.stride > 0 ? options.stride : options.length;
  if (count < 2) return bad_input("the text has " + std::to_string(count) + " tokens, expected at least 2");
  if (options.length < 2 || options.length > model.context()) {
    return bad_input("length is " + std::to_string(options.length) + ", expected 2 to the model's context, " +
                     std::to_string(model.context()));
  }
  if (stride > options.length) {
    return bad_input("stride is " + std::to_string(stride) + ", expected at most length, " + std::to_string(options.length));
  }
  const auto start = std::chrono::steady_clock::now();
  out.tokens = count;
  double total = 0;
  int64_t scored_to = 1;  // the first token has nothing before it
  std::vector<float> losses;
  for (int64_t begin = 0; scored_to < count; begin += stride) {
    const int64_t end = std::min(count, begin + options.length);
    LINNET_TRY(model.losses({tokens.begin() + begin, tokens.begin() + end}, losses));
    for (int64_t j = std::max<int64_t>(scored_to, begin + 1); j < end; ++j) {
      const double loss = losses[static_cast<size_t>(j - begin - 1)];
      const size_t bucket = bucket_of(j - begin);
      if (out.buckets.size() <= bucket) out.buckets.resize(bucket + 1);
      out.buckets[bucket].loss += loss;
      ++out.buckets[bucket].tokens;
      total += loss;
      ++out.scored;
      out.bytes += static_cast<int64_t>(model.tokenizer().bytes(tokens[static_cast<size_t>(j)]).size());
    }
    scored_to = end;
    ++out.windows;
    if (progressed) progressed(end, count);
    if (end == count) break;
  }
  int64_t first = 0, width = 64;
  for (LossBucket& bucket : out.buckets) {
    bucket.first = first;
    bucket.last = width - 1;
    first = width;
    width *= 4;
    if (bucket.tokens > 0) bucket.loss /= static_cast<double>(bucket.tokens);
  }
  out.loss = total / static_cast<double>(out.scored);
  out.perplexity = std::exp(out.loss);
  out.bits_per_byte = total / std::log(2.0) / static_cast<double>(std::max<int64_t>(out.bytes, 1));
  out.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return {};
}

namespace {

int64_t tokens_in(const Model& model, const std::string& text) {
  return static_cast<int64_t>(model.tokenizer().encode(text, {false, false}).size());
}

// Tokens of a puzzle around what fills it, the answer among them.
int64_t frame(const Model& model, bool is_passkey) {
  uint64_t random = 0;
  if (!is_passkey) return std::max<int64_t>(16, tokens_in(model, associative(1, random).answer) + 4);
  const Puzzle puzzle = passkey(1, 0.5, random);
  return std::max<int64_t>(64,
                           tokens_in(model, puzzle.prompt) - tokens_in(model, kFiller) + tokens_in(model, puzzle.answer) + 4);
}

}  // namespace

int64_t shortest_recall(const Model& model) {
  uint64_t random = 0;
  return std::max(frame(model, true) + tokens_in(model, kFiller),
                  frame(model, false) + tokens_in(model, associative(2, random).prompt));
}

Status score_recall(const Model& model, const std::vector<int64_t>& lengths, int64_t trials, uint64_t seed,
                    const Progressed& progressed, std::vector<RecallScore>& out) {
  out.clear();
  if (!model.has_tokenizer()) return bad_input(model.summary().path + ": has no tokenizer.json, which recall needs");
  const auto tokens_of = [&](const std::string& text) {
    return static_cast<double>(model.tokenizer().encode(text, {false, false}).size());
  };
  uint64_t random = seed;
  const double filler = tokens_of(kFiller), pair = tokens_of(associative(64, random).prompt) / 64.5;
  const int64_t total = static_cast<int64_t>(lengths.size()) * trials * 2;
  int64_t done = 0;
  for (const char* task : {"passkey", "associative"}) {
    const bool is_passkey = std::string(task) == "passkey";
    const int64_t around = frame(model, is_passkey);
    for (const int64_t length : lengths) {
      if (length > model.context()) {
        return bad_input("recall at length " + std::to_string(length) + " is beyond the model's context of " +
                         std::to_string(model.context()));
      }
      if (length < shortest_recall(model)) {
        return bad_input("recall at length " + std::to_string(length) + " leaves no room: the question takes " +
                         std::to_string(shortest_recall(model)) + " tokens of this model");
      }
      RecallScore score{task, length, trials, 0};
      for (int64_t i = 0; i < trials; ++i) {
        const double room = static_cast<double>(length - around);
        const int64_t units = std::max<int64_t>(1, static_cast<int64_t>(room / (is_passkey ? filler : pair)));
        const Puzzle puzzle = is_passkey ? passkey(units, (static_cast<double>(i) + 0.5) / static_cast<double>(trials), random)
                                         : associative(units, random);
        bool right = false;
        LINNET_TRY(solve(model, puzzle, right));
        score.right += right;
        if (progressed) progressed(++done, total);
      }
      out.push_back(score);
    }
  }
  return {};
}

std::string model_json(const Model& model) {
  const ModelSummary& s = model.summary();
  ChatTemplate chat;
  const std::string form = model.chat(chat).ok() ? chat_form_name(chat.form()) : "none that is known";
  const Impl* impl = nullptr;
  const Op* dense = find_op("dense");
  const std::string here = dense != nullptr && choose_impl(*dense, Pass::forward, {}, &impl).ok() ? impl->name : "";
  JsonWriter w(2);
  w.begin_object().member("path", s.path).member("family", s.family).member("format", s.format).member("weights", s.weights);
  w.member("attention", s.attention);
  w.member("parameters", s.parameters).member("weight_bytes", s.weight_bytes).member("hidden", s.hidden);
  w.member("vocabulary", s.vocabulary).member("context", s.context).member("causal", s.causal);
  w.member("state_bytes", s.state_bytes).member("state_bytes_per_token", s.state_per_token);
  w.member("tokenizer", model.has_tokenizer() ? model.tokenizer().kind() : "none").member("chat", form).member("dense", here);
  w.key("blocks").begin_array();
  for (const ModelSummary::Block& block : s.blocks) {
    w.begin_object().member("order", block.order).member("mixer", block.mixer).member("mlp", block.mlp);
    w.member("parameters", block.parameters).end_object();
  }
  w.end_array().end_object();
  return w.text();
}

}  // namespace linnet
