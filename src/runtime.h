// Models that run without torch or Python: load a folder (config.json + safetensors) or a GGUF file, feed tokens, read logits.
//
//   Model model;
//   LINNET_TRY(Model::load("SmolLM2-135M-Instruct.Q4_1.gguf", {}, model));
//   Session session;
//   LINNET_TRY(model.start(session));
//   std::vector<float> logits;
//   LINNET_TRY(session.prefill(model.tokenizer().encode("The linnet is", {}), logits));
//   Sampler sampler({.temperature = 0.7, .seed = 1});
//   for (int i = 0; i < 100; ++i) {
//     const int32_t token = sampler.next(logits.data(), model.vocabulary());
//     if (model.is_end(token)) break;
//     ...
//     LINNET_TRY(session.decode(token, logits));
//   }
//
// Families (runtime/families/families.h): llama, mistral, qwen2, qwen3, gemma, gpt2, gpt_neox and others (causal), bert and its
// kin (encoders), vit and deit (images), and linnet, a list of any layers. Weights stay as they lie in the file, quantised ones
// included, unless `weights` says otherwise. Every failure is a Status with a sentence. A Model is read by many sessions; calls
// on one model run one after the other, on `threads` threads, which never change a result.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/status.h"
#include "runtime/chat.h"
#include "runtime/sampler.h"
#include "runtime/tokenizer/tokenizer.h"

namespace linnet {

struct ModelOptions {
  std::string weights;  // f32, bf16, q8, q4: what the matrices are held in; empty: as in the file
  int threads = 0;      // 0: LINNET_THREADS, else one per core
  // f32, bf16: what softmax attention computes in and its cache holds; empty: f32 where all matrices are f32, else bf16.
  std::string attention;
  std::string device;  // cpu, cuda: where the model runs; empty: cpu
};

// What `linnet info MODEL` prints.
struct ModelSummary {
  std::string path, family, format;  // "llama", "GGUF"
  std::string weights;               // what the matrices are held in: "q4 + q8"
  std::string attention;             // what softmax attention computes in, and its cache holds: "bf16"
  bool causal = false, images = false;
  int64_t hidden = 0, vocabulary = 0, context = 0, classes = 0;
  int64_t parameters = 0;    // numbers in all trained tensors
  int64_t weight_bytes = 0;  // as held, mapped or converted
  int64_t state_bytes = 0;   // of a session, beside what grows: states of fixed size, windows at their full size
  double state_per_token = 0;
  struct Block {
    std::string order, mixer, mlp;  // "pre", "softmax_attention", "glu silu 1536"
    int64_t parameters = 0;
  };
  std::vector<Block> blocks;
  std::vector<std::string> warnings;  // tensors of the files that the model does not read
};

class Session;

class Model {
 public:
  Model();
  ~Model();
  Model(Model&&) noexcept;
  Model& operator=(Model&&) noexcept;

  static Status load(const std::string& path, const ModelOptions& options, Model& out);

  const ModelSummary& summary() const;
  int64_t vocabulary() const;
  int64_t context() const;
  bool has_tokenizer() const;
  const Tokenizer& tokenizer() const;    // only when it has one
  Status chat(ChatTemplate& out) const;  // a sentence where the model's template is missing or unknown
  bool is_end(int32_t token) const;      // a token that ends a text
  uint64_t fingerprint() const;          // of shapes and weights; state files carry it

  Status start(Session& out) const;  // causal models only
  // Causal models: the logits of every token of a text, [tokens, vocabulary], without a session.
  Status logits(const std::vector<int32_t>& tokens, std::vector<float>& out) const;
  // The loss in nats, -log p(token[i + 1] | tokens 0 .. i), of each token but the first.
  Status losses(const std::vector<int32_t>& tokens, std::vector<float>& out) const;
  // The final hidden states of every token, [tokens, hidden]; any family that reads tokens.
  Status hidden(const std::vector<int32_t>& tokens, std::vector<float>& out) const;
  // Encoders: the mean of the hidden states, of length one.
  Status embed(const std::vector<int32_t>& tokens, std::vector<float>& out) const;
  // vit: logits of the classes (the class token's state where there are none) of one image [channels, height, width].
  Status classify(const std::vector<float>& pixels, std::vector<float>& out) const;

 private:
  friend class Session;
  friend class LayeredModel;
  friend Status decode(const std::vector<Session*>& sessions, const std::vector<int32_t>& tokens, std::vector<float>& logits);
  struct Inner;
  std::shared_ptr<Inner> inner_;  // sessions keep the model alive
};

// One sequence: the states of all layers after the tokens it was fed.
class Session {
 public:
  Session();
  ~Session();
  Session(Session&&) noexcept;
  Session& operator=(Session&&) noexcept;

  // Feeds tokens, one or many; logits [vocabulary] are those behind the last one. On failure nothing was fed. Long prompts go
  // in pieces: `progress` gets the tokens that are done before each.
  Status prefill(const std::vector<int32_t>& tokens, std::vector<float>& logits,
                 const std::function<void(int64_t)>& progress = {});
  Status decode(int32_t token, std::vector<float>& logits) { return prefill({token}, logits); }
  int64_t position() const;  // tokens so far
  int64_t state_bytes() const;
  Status copy(Session& out) const;
  // The state as a safetensors file; restoring asks for the same model.
  Status save(const std::string& path) const;
  Status restore(const std::string& path);

 private:
  friend class Model;
  friend Status decode(const std::vector<Session*>& sessions, const std::vector<int32_t>& tokens, std::vector<float>& logits);
  struct Inner;
  std::unique_ptr<Inner> inner_;
};

// One token for each of several sessions of one model, in one call: logits [sessions, vocabulary].
Status decode(const std::vector<Session*>& sessions, const std::vector<int32_t>& tokens, std::vector<float>& logits);

}  // namespace linnet
