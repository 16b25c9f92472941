#include "bench/model.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "core/files/json.h"
#include "runtime/made_model.h"

namespace linnet::bench {
namespace {

constexpr int64_t kStep = 16;              // tokens between two looks at the clock while decoding
constexpr int kPauseMicroseconds = 40000;  // idle workers spin for a while; see bench.cc
constexpr int64_t kLongPrompt = 2048;      // a peer's prompt from here on is not read once more to warm up
const char* const kPeers[] = {"llama.cpp", "transformers"};

constexpr int64_t kNear = 400, kFar = 100000;
const char* const kLinearModel = R"({"model_type": "linnet", "vocab_size": 257, "hidden_size": 256, "tie_word_embeddings": true,
  "max_position_embeddings": 131072, "linnet": {"layers": [{"mixer": "gated_deltanet", "options": {"heads": 4, "key": 64,
  "value": 64}, "mlp": "glu", "intermediate_size": 704, "repeat": 6}]}})";

std::vector<int32_t> tokens_of(const Model& model, int64_t count) {
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  uint64_t x = 88172645463325252U;
  for (int32_t& token : tokens) {  // xorshift
    x ^= x << 13U;
    x ^= x >> 7U;
    x ^= x << 17U;
    token = static_cast<int32_t>(x % static_cast<uint64_t>(model.vocabulary()));
  }
  return tokens;
}

std::string peer_json(const Model& model, const ModelWork& what, const char* peer) {
  JsonWriter w;
  w.begin_object().member("op", what.decode ? "model_decode" : "model_prefill").member("dtype", "f32").member("pass", "fwd");
  w.key("letters").begin_object().member("T", what.tokens).member("vocabulary", model.vocabulary()).end_object();
  w.key("lengths").begin_object().end_object().key("options").begin_object();
  w.member("peer", peer).member("path", model.summary().path).end_object().end_object();
  return w.text();
}

// Appends seconds per token.
class Ours {
 public:
  Ours(const Model& model, const ModelWork& what) : model_(model), what_(what), tokens_(tokens_of(model, what.tokens)) {}

  Status prepare(int64_t* state_bytes) {
    LINNET_TRY(model_.start(before_));
    LINNET_TRY(before_.prefill(tokens_, logits_));
    *state_bytes = before_.state_bytes();
    return {};
  }
  Status round(double seconds, std::vector<double>* samples) {
    const double end = now() + seconds;
    do {
      Session session;
      if (what_.decode) {
        LINNET_TRY(before_.copy(session));
        LINNET_TRY(session.decode(tokens_.front(), logits_));  // buffers grow
      } else {
        LINNET_TRY(model_.start(session));
      }
      const double start = now();
      if (what_.decode) {
        for (int64_t i = 0; i < kStep; ++i) LINNET_TRY(session.decode(tokens_[static_cast<size_t>(i)], logits_));
      } else {
        LINNET_TRY(session.prefill(tokens_, logits_));
      }
      samples->push_back((now() - start) / static_cast<double>(what_.decode ? kStep : what_.tokens));
    } while (now() < end);
    return {};
  }

 private:
  const Model& model_;
  ModelWork what_;
  std::vector<int32_t> tokens_;
  std::vector<float> logits_;
  Session before_;
};

}  // namespace

std::string ModelWork::line() const {
  return (linear ? "linear layers: " : "") + std::string(decode ? "decode after " : "prefill of ") + std::to_string(tokens);
}

std::vector<ModelWork> usual_work(int64_t context) {
  std::vector<ModelWork> fitting;
  for (const ModelWork& what : std::vector<ModelWork>{{false, 512}, {true, 400}, {false, 5500}, {true, 5500}}) {
    if (context <= 0 || what.tokens + 2 * kStep <= context) fitting.push_back(what);
  }
  return fitting;
}

Status measure_model(const Model& model, const ModelWork& what, const ModelSettings& settings, ModelResult* result) {
  result->what = what;
  if (what.tokens < kStep)
    return bad_input("bench: " + what.line() + ", expected at least " + std::to_string(kStep) + " tokens");
  Ours ours(model, what);
  LINNET_TRY(ours.prepare(&result->state_bytes));
  std::vector<double> samples;
  const double slice = settings.seconds / settings.rounds;
  for (const char* peer : kPeers) {
    if (settings.peer == nullptr) break;
    ModelResult::Other other;
    const bool warm = what.decode || what.tokens < kLongPrompt;
    LINNET_TRY(settings.peer->open(peer_json(model, what, peer), &other.name, warm, &result->notes));
    if (other.name.empty()) continue;
    std::vector<double> theirs;
    for (int round = 0; round < settings.rounds; ++round) {
      LINNET_TRY(settings.peer->round(slice, &theirs));
      usleep(kPauseMicroseconds);
      LINNET_TRY(ours.round(slice, &samples));
    }
    for (double& x : theirs) x /= static_cast<double>(what.decode ? 1 : what.tokens);
    other.time = spread(std::move(theirs));
    result->others.push_back(std::move(other));
  }
  if (samples.empty()) LINNET_TRY(ours.round(settings.seconds, &samples));
  result->ours = spread(std::move(samples));
  return {};
}

Status measure_linear(int threads, const ModelSettings& settings, std::vector<ModelResult>* results) {
  std::string folder = (std::filesystem::temp_directory_path() / "linnet_bench_XXXXXX").string();
  if (mkdtemp(folder.data()) == nullptr) {
    return impossible("bench: no folder for a model of linear layers: " + std::string(std::strerror(errno)));
  }
  Model model;
  Status status = made::make(folder, kLinearModel);
  if (status.ok()) status = Model::load(folder, {.threads = threads}, model);
  std::error_code ignored;
  std::filesystem::remove_all(folder, ignored);  // what is mapped stays
  LINNET_TRY(status);
  const ModelWork what[2] = {{.decode = true, .tokens = kNear, .linear = true},
                             {.decode = true, .tokens = kFar, .linear = true}};
  Ours ours[2] = {{model, what[0]}, {model, what[1]}};
  std::vector<double> samples[2];
  results->assign(2, {});
  for (size_t i = 0; i < 2; ++i) {
    (*results)[i].what = what[i];
    LINNET_TRY(ours[i].prepare(&(*results)[i].state_bytes));
  }
  const int rounds = 4 * settings.rounds;  // short ones: what disturbs the machine meets both
  for (int round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < 2; ++i) LINNET_TRY(ours[i].round(settings.seconds / rounds, &samples[i]));
  }
  for (size_t i = 0; i < 2; ++i) (*results)[i].ours = spread(std::move(samples[i]));
  (*results)[1].others.push_back({"the same after " + std::to_string(kNear), (*results)[0].ours});
  return {};
}

}  // namespace linnet::bench
