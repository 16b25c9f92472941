// Config: the fields of a config.json, each with its range. The first field that is missing or out of range is kept as a
// sentence; readers ask for all they need and look at status() once.
//
//   const int64_t hidden = config.count("hidden_size", 1, 1 << 20);
//   const double eps = config.real("rms_norm_eps", 0, 1, 1e-6);            // a default: the field may be absent or null
//   LINNET_TRY(config.status());
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/files/json.h"
#include "core/status.h"

namespace linnet {

class Config {
 public:
  // `text` must outlive the Config.
  static Status parse(std::string_view text, const std::string& source, Config& out);
  Config() = default;
  Config(const JsonValue& value, std::string source) : value_(value), source_(std::move(source)) {}

  int64_t count(const char* name, int64_t low, int64_t high);
  int64_t count(const char* name, int64_t low, int64_t high, int64_t otherwise);
  double real(const char* name, double low, double high);
  double real(const char* name, double low, double high, double otherwise);
  bool flag(const char* name, bool otherwise);
  std::string text(const char* name, const std::string& otherwise);
  JsonValue value(const char* name) const { return value_.find(name); }
  bool given(const char* name) const { return !value_.find(name).is(JsonValue::Kind::null); }

  void refuse(const std::string& sentence);  // "<source>: <sentence>"
  const Status& status() const { return status_; }
  const std::string& source() const { return source_; }

 private:
  JsonValue value_;
  std::string source_;
  Status status_;
};

}  // namespace linnet
