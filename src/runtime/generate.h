// generate: the loop of prompt, sample, decode, with text that streams and texts that stop it.
//
//   Generation result;
//   LINNET_TRY(generate(model, session, ids, sampler, {.tokens = 100, .stops = {"\n\n"}}, print, result));
//
// The tokens that end a text (the model's own, and `ends`) are neither printed nor fed: a conversation goes on behind them.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "core/status.h"
#include "runtime.h"

namespace linnet {

struct GenerateOptions {
  int64_t tokens = 256;                        // at most
  std::vector<std::string> stops;              // texts before which the output ends
  std::vector<int32_t> ends;                   // further tokens that end the text
  std::function<void(int64_t)> progress = {};  // gets the tokens of a long prompt that are done
};

struct Generation {
  std::vector<int32_t> tokens;    // without the one that ended it
  std::string text;               // up to a stop
  const char* reason = "length";  // or "end", "stop", "context"
  int64_t prompt_tokens = 0;
  double prompt_seconds = 0, decode_seconds = 0;
};

// `print` gets the text piece by piece; returning false ends the text.
Status generate(const Model& model, Session& session, const std::vector<int32_t>& prompt, Sampler& sampler,
                const GenerateOptions& options, const std::function<bool(const std::string&)>& print, Generation& out);

}  // namespace linnet
