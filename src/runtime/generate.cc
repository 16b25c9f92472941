#include "runtime/generate.h"

#include <algorithm>
#include <chrono>

namespace linnet {

namespace {

using Clock = std::chrono::steady_clock;
double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Holds text back while it may be the beginning of a stop.
class StopFilter {
 public:
  explicit StopFilter(const std::vector<std::string>& stops) : stops_(stops) {}

  // The text that may be shown; `stopped` once a stop was met.
  std::string next(const std::string& piece, bool& stopped) {
    held_ += piece;
    size_t first = std::string::npos;
    for (const std::string& stop : stops_) {
      if (!stop.empty()) first = std::min(first, held_.find(stop));
    }
    if (first != std::string::npos) {
      stopped = true;
      return held_.substr(0, first);
    }
    size_t keep = 0;
    for (const std::string& stop : stops_) {
      for (size_t n = std::min(stop.size(), held_.size()); n > keep; --n) {
        if (held_.compare(held_.size() - n, n, stop, 0, n) == 0) keep = n;
      }
    }
    std::string shown = held_.substr(0, held_.size() - keep);
    held_.erase(0, held_.size() - keep);
    return shown;
  }
  const std::string& rest() const { return held_; }

 private:
  const std::vector<std::string>& stops_;
  std::string held_;
};

}  // namespace

Status generate(const Model& model, Session& session, const std::vector<int32_t>& prompt, Sampler& sampler,
                const GenerateOptions& options, const std::function<bool(const std::string&)>& print, Generation& out) {
  out = {};
  out.prompt_tokens = static_cast<int64_t>(prompt.size());
  std::vector<float> logits;
  Clock::time_point start = Clock::now();
  LINNET_TRY(session.prefill(prompt, logits, options.progress));
  out.prompt_seconds = since(start);
  for (const int32_t token : prompt) sampler.accept(token);
  TextStream stream(model.tokenizer());
  StopFilter filter(options.stops);
  bool stopped = false;
  start = Clock::now();
  const auto show = [&](const std::string& piece) {
    const std::string text = filter.next(piece, stopped);
    out.text += text;
    if (!text.empty() && !print(text)) stopped = true;
  };
  while (static_cast<int64_t>(out.tokens.size()) < options.tokens) {
    const int32_t token = sampler.next(logits.data(), model.vocabulary());
    if (model.is_end(token) || std::find(options.ends.begin(), options.ends.end(), token) != options.ends.end()) {
      out.reason = "end";
      break;
    }
    sampler.accept(token);
    out.tokens.push_back(token);
    show(stream.next(token));
    if (stopped) {
      out.reason = "stop";
      break;
    }
    if (session.position() >= model.context()) {
      out.reason = "context";
      break;
    }
    LINNET_TRY(session.decode(token, logits));
  }
  out.decode_seconds = since(start);
  if (!stopped) {
    show(stream.finish());
    if (!stopped && !filter.rest().empty()) {
      out.text += filter.rest();
      print(filter.rest());
    }
  }
  return {};
}

}  // namespace linnet
