#include "runtime/config.h"

#include <cmath>
#include <utility>

namespace linnet {

Status Config::parse(std::string_view text, const std::string& source, Config& out) {
  JsonValue root;
  LINNET_TRY(parse_json(text, source, {.infinity = true}, root));
  if (!root.is(JsonValue::Kind::object)) return bad_input(source + ": is not an object");
  out = Config(root, source);
  return {};
}

void Config::refuse(const std::string& sentence) {
  if (status_.ok()) status_ = bad_input(source_ + ": " + sentence);
}

int64_t Config::count(const char* name, int64_t low, int64_t high) {
  if (given(name)) return count(name, low, high, low);
  refuse(std::string(name) + " is missing");
  return low;
}

int64_t Config::count(const char* name, int64_t low, int64_t high, int64_t otherwise) {
  if (!given(name)) return otherwise;
  int64_t out = 0;
  if (value(name).integer(out) && out >= low && out <= high) return out;
  refuse(std::string(name) + " is " + json_show_short(value(name)) + ", expected " + std::to_string(low) + " to " +
         std::to_string(high));
  return low;
}

double Config::real(const char* name, double low, double high) {
  if (given(name)) return real(name, low, high, low);
  refuse(std::string(name) + " is missing");
  return low;
}

double Config::real(const char* name, double low, double high, double otherwise) {
  if (!given(name)) return otherwise;
  double out = 0;
  if (value(name).number(out) && out >= low && out <= high) return out;
  refuse(std::string(name) + " is " + json_show_short(value(name)) + ", expected " + std::to_string(low) + " to " +
         std::to_string(high));
  return low;
}

bool Config::flag(const char* name, bool otherwise) {
  if (!given(name)) return otherwise;
  if (!value(name).is(JsonValue::Kind::boolean)) {
    refuse(std::string(name) + " is " + json_show_short(value(name)) + ", expected true or false");
  }
  return value(name).boolean();
}

std::string Config::text(const char* name, const std::string& otherwise) {
  if (!given(name)) return otherwise;
  if (!value(name).is(JsonValue::Kind::string)) {
    refuse(std::string(name) + " is " + json_show_short(value(name)) + ", expected a text");
  }
  return value(name).string();
}

}  // namespace linnet
