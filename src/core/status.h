// Status: success, or what went wrong in one sentence meant for the user.
//
//   Status s = softmax(args, out, context);
//   if (!s.ok()) fprintf(stderr, "%s\n", s.message().c_str());
//
// Expected failures (bad shapes, bad files, unsupported devices) are Status values; the library neither throws nor exits.
#pragma once

#include <string>
#include <utility>

namespace linnet {

enum class Code {
  ok = 0,
  bad_input = 2,   // the caller can fix it; the numbers equal the command's exit codes
  impossible = 3,  // not possible here: a missing device, instruction set or implementation
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}
  bool ok() const { return code_ == Code::ok; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  Code code_ = Code::ok;
  std::string message_;
};

inline Status bad_input(std::string message) { return {Code::bad_input, std::move(message)}; }
inline Status impossible(std::string message) { return {Code::impossible, std::move(message)}; }

}  // namespace linnet

#define LINNET_TRY(expression)                       \
  do {                                               \
    ::linnet::Status linnet_status_ = (expression);  \
    if (!linnet_status_.ok()) return linnet_status_; \
  } while (0)
