// The inside of a Model and its sessions (runtime.h).
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/executor.h"
#include "layers/runner.h"
#include "runtime.h"
#include "runtime/description.h"
#include "runtime/weights.h"

namespace linnet {

struct Model::Inner {
  ModelSummary summary;
  Description d;
  WeightFiles files;
  Weights weights;
  std::unique_ptr<Tokenizer> tokenizer;
  std::string chat_template;
  std::vector<int32_t> ends;
  bool pool_first = false;  // encoders: the first token's state instead of the mean

  std::unique_ptr<ThreadPool> own_threads;
  Executor* executor = nullptr;
  std::mutex mutex;  // a runner runs one call at a time
  layers::Runner body, head;
  layers::RunnerOptions run;  // of both

  Status load(const std::string& path, const ModelOptions& options);
  Status check_tokens(const std::vector<int32_t>& tokens, int64_t position) const;
  // tokens [rows, count] behind the states (none: from the start, and nothing is kept) -> hidden [rows, count, hidden].
  Status run_body(const std::vector<int32_t>& tokens, int64_t rows, int64_t position, const std::vector<layers::State*>& states,
                  float* hidden);
  Status run_head(const float* hidden, int64_t rows, float* logits);
  Status patches_of(const std::vector<float>& pixels, std::vector<float>& patches) const;  // rows of an image

 private:
  Status read_texts(const std::string& path);  // tokeniser, template, end tokens, pooling
  Status summarize(const std::string& path);
};

struct Session::Inner {
  std::shared_ptr<Model::Inner> model;
  layers::State state;
};

}  // namespace linnet
