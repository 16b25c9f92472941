// report: a Status the C way.
#pragma once

#include <cstring>
#include <exception>

#include "core/status.h"

namespace linnet::capi {

// Runs f, writes the sentence of its Status into message (cut where it does not fit) and gives its code. Memory is the only
// thing that can run out here.
template <class F>
int report(char* message, size_t message_bytes, const F& f) {
  const auto say = [&](const char* text, size_t length) {
    if (message == nullptr || message_bytes == 0) return;
    const size_t kept = length < message_bytes - 1 ? length : message_bytes - 1;
    std::memcpy(message, text, kept);
    message[kept] = '\0';
  };
  try {
    const Status status = f();
    say(status.message().data(), status.message().size());
    return static_cast<int>(status.code());
  } catch (const std::exception& error) {
    say(error.what(), std::strlen(error.what()));
    return static_cast<int>(Code::impossible);
  }
}

}  // namespace linnet::capi
