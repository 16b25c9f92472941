#include "core/log.h"

#include <mutex>
#include <set>
#include <string>
#include <utility>

namespace linnet {
namespace {

struct Log {
  std::mutex mutex;
  LogHook hook = nullptr;
  void* user = nullptr;
  std::set<std::pair<const Impl*, Pass>> said;
  std::set<std::string> sentences;
};
Log& log() {
  static Log* const log = new Log;  // never destroyed: calls may outlive static objects
  return *log;
}

}  // namespace

void set_log_hook(LogHook hook, void* user) {
  const std::lock_guard<std::mutex> lock(log().mutex);
  log().hook = hook;
  log().user = user;
}

void log_slow(const Op& op, const Impl& row, Pass pass, const void* args, const void* out) {
  LogHook hook = nullptr;
  void* user = nullptr;
  {  // the hook is called without the lock: it may wait for a lock of its own (Python's)
    const std::lock_guard<std::mutex> lock(log().mutex);
    if (log().hook == nullptr || !log().said.emplace(&row, pass).second) return;
    hook = log().hook;
    user = log().user;
  }
  std::string text = op.name + ": the " + (pass == Pass::forward ? "call" : "backward") + " runs on " + row.name +
                     ", which is slow for this many tokens";
  for (const Impl* better = &row + 1; better <= &op.impls.back(); ++better) {
    if (better->device != row.device) continue;
    const std::string reason = refusal(*better, pass, args, out);
    if (!reason.empty()) text += "; " + better->name + ": " + reason;
  }
  hook(text.c_str(), user);
}

void log_once(const std::string& sentence) {
  LogHook hook = nullptr;
  void* user = nullptr;
  {
    const std::lock_guard<std::mutex> lock(log().mutex);
    if (log().hook == nullptr || !log().sentences.insert(sentence).second) return;
    hook = log().hook;
    user = log().user;
  }
  hook(sentence.c_str(), user);
}

}  // namespace linnet
