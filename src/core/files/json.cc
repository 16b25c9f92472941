#include "core/files/json.h"

#include <algorithm>
#include <cassert>
#include <charconv>
#include <cmath>
#include <cstring>

namespace linnet {
namespace {

constexpr size_t kShortBytes = 100;  // of a name or a value shown in a sentence

bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }
int hex_digit(char c) {
  if (is_digit(c)) return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}
uint32_t hex4(const char* p) {  // four hexadecimal digits that were checked
  uint32_t code = 0;
  for (int i = 0; i < 4; ++i) code = code << 4 | static_cast<uint32_t>(hex_digit(p[i]));
  return code;
}
bool is_high_surrogate(uint32_t code) { return code >= 0xd800 && code < 0xdc00; }
bool is_low_surrogate(uint32_t code) { return code >= 0xdc00 && code < 0xe000; }

// Below, text is known to be valid JSON.

const char* skip_space(const char* p, const char* end) {
  while (p != end && is_space(*p)) ++p;
  return p;
}

const char* skip_string(const char* p) {  // from the opening quote to behind the closing one
  for (++p; *p != '"'; ++p) {
    if (*p == '\\') ++p;
  }
  return p + 1;
}

const char* skip_value(const char* p, const char* end) {
  if (*p == '"') return skip_string(p);
  if (*p != '{' && *p != '[') {
    while (p != end && !is_space(*p) && *p != ',' && *p != ']' && *p != '}') ++p;
    return p;
  }
  size_t open = 0;
  do {
    if (*p == '"') {
      p = skip_string(p);
      continue;
    }
    open += *p == '{' || *p == '[';
    open -= *p == '}' || *p == ']';
    ++p;
  } while (open > 0);
  return p;
}

// The bytes of a string literal after unescaping, one at a time: comparing and searching need no copy.
class StringBytes {
 public:
  explicit StringBytes(const char* opening_quote) : at_(opening_quote + 1) {}
  int next() {  // -1 at the end
    if (waiting_ > 0) return pending_[--waiting_];
    if (*at_ == '"') return -1;
    if (*at_ != '\\') return static_cast<unsigned char>(*at_++);
    const char escape = at_[1];
    at_ += 2;
    switch (escape) {
      case 'b': return '\b';
      case 'f': return '\f';
      case 'n': return '\n';
      case 'r': return '\r';
      case 't': return '\t';
      case 'u': return utf8(unicode());
      default: return escape;  // the quote, the backslash and the slash
    }
  }

 private:
  uint32_t unicode() {
    uint32_t code = hex4(at_);
    at_ += 4;
    if (is_high_surrogate(code)) {  // its other half follows as \uXXXX
      code = 0x10000 + ((code - 0xd800) << 10) + (hex4(at_ + 2) - 0xdc00);
      at_ += 6;
    }
    return code;
  }
  int utf8(uint32_t code) {  // gives the first byte and keeps the others, last first
    if (code < 0x80) return static_cast<int>(code);
    const int others = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    for (waiting_ = 0; waiting_ < others; ++waiting_, code >>= 6) pending_[waiting_] = static_cast<int>(0x80 | (code & 0x3f));
    return static_cast<int>((0xff00u >> (others + 1) & 0xffu) | code);  // 110..., 1110... or 11110...
  }

  const char* at_;
  int pending_[3] = {};
  int waiting_ = 0;
};

int compare_strings(const char* a, const char* b) {
  do {  // what is written alike is alike, up to an escape or the end
    ++a, ++b;
  } while (*a == *b && *a != '"' && *a != '\\');
  StringBytes left(a - 1), right(b - 1);
  for (;;) {
    const int l = left.next(), r = right.next();
    if (l != r) return l - r;
    if (l < 0) return 0;
  }
}

std::string shorten(std::string_view s) {
  if (s.size() <= kShortBytes) return std::string(s);
  size_t cut = kShortBytes;
  while (cut > 0 && (static_cast<unsigned char>(s[cut]) & 0xc0) == 0x80) --cut;  // not inside a character
  return std::string(s.substr(0, cut)) + "...";
}

// Checks a text; makes nothing from it.
class Checker {
 public:
  Checker(std::string_view text, std::string_view source, const JsonLimits& limits)
      : begin_(text.data()), at_(begin_), end_(begin_ + text.size()), source_(source), limits_(limits) {}

  Status run(JsonValue& root) {
    const std::string_view text(begin_, static_cast<size_t>(end_ - begin_));
    const size_t most = std::min(limits_.max_bytes, kMaxJsonBytes);
    if (text.size() > most) {
      return bad_input(source_ + ": " + std::to_string(text.size()) + " bytes of JSON, more than the limit of " +
                       std::to_string(most));
    }
    if (const size_t bad = find_invalid_utf8(text); bad != text.size()) {
      at_ = begin_ + bad;
      return fail("invalid UTF-8");
    }
    space();
    const char* first = at_;
    LINNET_TRY(value(0));
    const char* last = at_;
    space();
    if (at_ != end_) return fail("unexpected text after the end of the JSON value");
    root = JsonValue(std::string_view(first, static_cast<size_t>(last - first)));
    return {};
  }

 private:
  // Names the member of the outermost object in which the error lies: in a table of tensors, the tensor.
  Status fail(const std::string& reason) const {
    const std::string where = inside_ ? ": in " + shorten({inside_, static_cast<size_t>(skip_string(inside_) - inside_)}) : "";
    return bad_input(source_ + where + ": " + reason + " at byte " + std::to_string(at_ - begin_));
  }
  bool more() const { return at_ != end_; }
  char peek() const { return at_ == end_ ? '\0' : *at_; }
  void space() { at_ = skip_space(at_, end_); }

  Status value(int depth) {
    switch (peek()) {
      case '{': return object(depth + 1);
      case '[': return array(depth + 1);
      case '"': return string();
      case 't': return word("true");
      case 'f': return word("false");
      case 'n': return word("null");
      default: break;
    }
    if (limits_.infinity && peek() == 'I') return word("Infinity");
    if (peek() == '-' || is_digit(peek())) return number();
    return fail(more() ? "expected a JSON value" : "the text ends where a JSON value should stand");
  }

  Status word(std::string_view expected) {
    if (std::string_view(at_, static_cast<size_t>(end_ - at_)).substr(0, expected.size()) != expected) {
      return fail("expected a JSON value");
    }
    at_ += expected.size();
    return {};
  }

  Status digits() {
    if (!is_digit(peek())) return fail("expected a digit");
    while (is_digit(peek())) ++at_;
    return {};
  }

  Status number() {
    if (peek() == '-') ++at_;
    if (peek() == '0') {
      ++at_;
      if (is_digit(peek())) return fail("a number begins with a superfluous 0");
    } else {
      LINNET_TRY(digits());
    }
    if (peek() == '.') {
      ++at_;
      LINNET_TRY(digits());
    }
    if (peek() == 'e' || peek() == 'E') {
      ++at_;
      if (peek() == '+' || peek() == '-') ++at_;
      LINNET_TRY(digits());
    }
    return {};
  }

  Status hex(uint32_t& code) {  // behind "\u"
    for (int i = 0; i < 4; ++i) {
      if (end_ - at_ <= i || hex_digit(at_[i]) < 0) return fail("\\u needs four hexadecimal digits");
    }
    code = hex4(at_);
    at_ += 4;
    return {};
  }

  Status string() {
    for (++at_; more() && *at_ != '"';) {
      if (static_cast<unsigned char>(*at_) < 0x20) return fail("a control character in a string must be escaped");
      if (*at_++ != '\\') continue;
      const char escape = peek();
      if (escape == '\0' || std::strchr("\"\\/bfnrtu", escape) == nullptr) return fail("unknown escape in a string");
      ++at_;
      if (escape != 'u') continue;
      uint32_t code = 0, low = 0;
      LINNET_TRY(hex(code));
      if (is_high_surrogate(code)) {
        if (end_ - at_ >= 2 && at_[0] == '\\' && at_[1] == 'u') {
          at_ += 2;
          LINNET_TRY(hex(low));
        }
        if (!is_low_surrogate(low)) return fail("half of a surrogate pair");
      } else if (is_low_surrogate(code)) {
        return fail("half of a surrogate pair");
      }
    }
    if (!more()) return fail("a string does not end");
    ++at_;
    return {};
  }

  Status deeper(int depth) const {
    if (depth <= std::min(limits_.max_depth, kMaxJsonDepth)) return {};
    return fail("nested deeper than " + std::to_string(std::min(limits_.max_depth, kMaxJsonDepth)));
  }

  Status array(int depth) {
    LINNET_TRY(deeper(depth));
    ++at_;
    space();
    if (peek() == ']') return ++at_, Status();
    for (;;) {
      LINNET_TRY(value(depth));
      space();
      if (peek() == ']') return ++at_, Status();
      if (peek() != ',') return fail("expected ',' or ']' in an array");
      ++at_;
      space();
    }
  }

  Status object(int depth) {
    LINNET_TRY(deeper(depth));
    const size_t first_key = keys_.size();
    ++at_;
    space();
    if (peek() == '}') return ++at_, Status();
    for (;;) {
      if (peek() != '"') return fail("expected a key in quotes");
      if (keys_.size() - first_key == limits_.max_members) {
        return fail("an object with more than " + std::to_string(limits_.max_members) + " members");
      }
      const char* key = at_;
      LINNET_TRY(string());
      keys_.push_back(hashed(key));
      space();
      if (peek() != ':') return fail("expected ':' after a key");
      ++at_;
      space();
      if (depth == 1) inside_ = key;
      LINNET_TRY(value(depth));
      space();
      if (depth == 1) inside_ = nullptr;
      if (peek() == '}') break;
      if (peek() != ',') return fail("expected ',' or '}' in an object");
      ++at_;
      space();
    }
    LINNET_TRY(unique(first_key));
    keys_.resize(first_key);
    ++at_;
    return {};
  }

  // Keys that are equal have equal hashes, so only the groups of one hash are compared: sorting 2^20 names themselves takes
  // seconds of cache misses, a hash table of them more memory than their text. FNV-1a; somebody who makes hashes collide
  // gets the slow sorting.
  uint64_t hashed(const char* key) const {
    uint32_t hash = 2166136261u;
    StringBytes bytes(key);
    for (int byte; (byte = bytes.next()) >= 0;) hash = (hash ^ static_cast<uint32_t>(byte)) * 16777619u;
    return uint64_t{hash} << 32 | static_cast<uint64_t>(key - begin_);
  }

  Status unique(size_t first_key) {
    const auto key_of = [this](uint64_t k) { return begin_ + static_cast<uint32_t>(k); };
    const auto end = keys_.end();
    auto group = keys_.begin() + static_cast<ptrdiff_t>(first_key);
    std::sort(group, end);
    while (group != end) {
      const uint64_t hash = *group >> 32;
      const auto next = std::find_if(group, end, [=](uint64_t k) { return k >> 32 != hash; });
      std::sort(group, next, [&](uint64_t a, uint64_t b) { return compare_strings(key_of(a), key_of(b)) < 0; });
      const auto twice =
          std::adjacent_find(group, next, [&](uint64_t a, uint64_t b) { return compare_strings(key_of(a), key_of(b)) == 0; });
      if (twice != next) {
        at_ = key_of(std::max(static_cast<uint32_t>(twice[0]), static_cast<uint32_t>(twice[1])));
        return fail("duplicate key " + shorten({at_, static_cast<size_t>(skip_string(at_) - at_)}));
      }
      group = next;
    }
    return {};
  }

  const char* begin_;
  const char* at_;
  const char* end_;
  std::string source_;
  JsonLimits limits_;
  std::vector<uint64_t> keys_;    // of all open objects, outermost first: the hash above, the offset in the text below
  const char* inside_ = nullptr;  // the key of the outermost object whose value is being checked
};

}  // namespace

JsonValue::Kind JsonValue::kind() const {
  if (text_.empty()) return Kind::null;
  switch (text_[0]) {
    case '{': return Kind::object;
    case '[': return Kind::array;
    case '"': return Kind::string;
    case 't':
    case 'f': return Kind::boolean;
    case 'n': return Kind::null;
    default: return Kind::number;
  }
}

std::string JsonValue::string() const {
  std::string out;
  if (!is(Kind::string)) return out;
  out.reserve(text_.size());
  StringBytes bytes(text_.data());
  for (int byte; (byte = bytes.next()) >= 0;) out.push_back(static_cast<char>(byte));
  return out;
}

bool JsonValue::equals(std::string_view s) const { return is(Kind::string) && compare(s) == 0; }

int JsonValue::compare(std::string_view s) const {
  if (!is(Kind::string)) return -1;
  StringBytes bytes(text_.data());
  for (const char c : s) {
    const int byte = bytes.next(), other = static_cast<unsigned char>(c);
    if (byte != other) return byte - other;
  }
  return bytes.next() < 0 ? 0 : 1;
}

int JsonValue::compare(const JsonValue& other) const {
  const bool left = is(Kind::string), right = other.is(Kind::string);
  return left && right ? compare_strings(text_.data(), other.text_.data()) : left - right;
}

const char* JsonValue::count(int64_t& out) const {
  if (!is(Kind::number)) return "is not a number";
  if (text_[0] == '-') return "is negative";
  if (text_.find_first_of("eE") != text_.npos) return "is written with an exponent";
  if (text_.find('.') != text_.npos) return "is written with a fraction";
  return integer(out) ? nullptr : "is above 2^63 - 1";
}

bool JsonValue::integer(int64_t& out) const {
  if (!is(Kind::number)) return false;
  int64_t result = 0;
  const char* end = text_.data() + text_.size();
  const auto [stop, error] = std::from_chars(text_.data(), end, result);
  if (error != std::errc() || stop != end) return false;
  out = result;
  return true;
}

bool JsonValue::number(double& out) const {
  if (!is(Kind::number)) return false;
  double result = 0;
  if (std::from_chars(text_.data(), text_.data() + text_.size(), result).ec != std::errc()) return false;
  out = result;
  return true;
}

JsonValue JsonValue::find(std::string_view name) const {
  for (JsonItems items(*this); items.next();) {
    if (items.key().equals(name)) return items.value();
  }
  return {};
}

bool JsonValue::has(std::string_view name) const {
  for (JsonItems items(*this); items.next();) {
    if (items.key().equals(name)) return true;
  }
  return false;
}

JsonItems::JsonItems(const JsonValue& container) {
  object_ = container.is(JsonValue::Kind::object);
  if (!object_ && !container.is(JsonValue::Kind::array)) return;  // no items
  begin_ = container.text().data();
  end_ = begin_ + container.text().size() - 1;
  at_ = begin_ + 1;
}

JsonItems::JsonItems(const JsonValue& object, size_t offset) : JsonItems(object) {
  if (at_ != end_) at_ = begin_ + offset;
}

int JsonItems::compare_keys(const JsonValue& object, size_t a, size_t b) {
  return compare_strings(object.text().data() + a, object.text().data() + b);
}

JsonValue JsonItems::key_at(const JsonValue& object, size_t offset) {
  const char* key = object.text().data() + offset;
  return JsonValue(std::string_view(key, static_cast<size_t>(skip_string(key) - key)));
}

bool JsonItems::next() {
  at_ = skip_space(at_, end_);
  if (at_ == end_) return false;
  if (object_) {
    const char* key_end = skip_string(at_);
    key_ = JsonValue(std::string_view(at_, static_cast<size_t>(key_end - at_)));
    at_ = skip_space(skip_space(key_end, end_) + 1, end_);  // over the colon
  }
  const char* value_end = skip_value(at_, end_);
  value_ = JsonValue(std::string_view(at_, static_cast<size_t>(value_end - at_)));
  at_ = skip_space(value_end, end_);
  if (at_ != end_) ++at_;  // over the comma
  return true;
}

Status parse_json(std::string_view text, std::string_view source, const JsonLimits& limits, JsonValue& root) {
  return Checker(text, source, limits).run(root);
}

size_t find_invalid_utf8(std::string_view text) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  for (size_t i = 0; i < text.size();) {
    const unsigned first = byte(i);
    if (first < 0x80) {
      ++i;
      continue;
    }
    const size_t others = first >= 0xf0 ? 3 : first >= 0xe0 ? 2 : 1;
    if (first < 0xc2 || first > 0xf4) return i;  // a continuation, an overlong pair, or beyond U+10FFFF
    // The second byte rules out the overlong forms, the surrogates (ed a0..bf) and what lies beyond U+10FFFF (f4 90..).
    const unsigned low = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
    const unsigned high = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
    if (byte(i + 1) < low || byte(i + 1) > high) return i;
    for (size_t k = 2; k <= others; ++k) {
      if ((byte(i + k) & 0xc0) != 0x80) return i;
    }
    i += others + 1;
  }
  return text.size();
}

std::string json_quote(std::string_view s) {
  std::string out = "\"";
  for (size_t i = 0, valid = find_invalid_utf8(s); i < s.size(); ++i) {
    const char c = s[i];
    if (i == valid) {
      out += "\xef\xbf\xbd";
      valid += 1 + find_invalid_utf8(s.substr(i + 1));
    } else if (c == '"' || c == '\\') {
      out += {'\\', c};
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\t') {
      out += "\\t";
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      const char digits[] = "0123456789abcdef";
      out += {'\\', 'u', '0', '0', digits[c >> 4], digits[c & 15]};
    } else {
      out += c;
    }
  }
  return out += '"';
}

std::string json_quote_short(std::string_view s) { return json_quote(shorten(s)); }

std::string json_show_short(const JsonValue& value) { return shorten(value.text()); }

JsonWriter& JsonWriter::key(std::string_view name) {
  separate();
  text_ += json_quote(name);
  text_ += indent_ > 0 ? ": " : ":";
  after_key_ = true;
  return *this;
}

JsonWriter& JsonWriter::value(double x) {
  if (!std::isfinite(x)) return value(nullptr);
  char buffer[32];  // the longest shortest form is -1.7976931348623157e+308
  const auto result = std::to_chars(buffer, buffer + sizeof buffer, x);
  return put({buffer, static_cast<size_t>(result.ptr - buffer)});
}

JsonWriter& JsonWriter::open(char bracket) {
  separate();
  text_ += bracket;
  filled_.push_back(false);
  return *this;
}

JsonWriter& JsonWriter::close(char bracket) {
  assert(!filled_.empty() && "JsonWriter: more brackets closed than opened");
  const bool filled = filled_.back();
  filled_.pop_back();
  if (filled) new_line();
  text_ += bracket;
  return *this;
}

JsonWriter& JsonWriter::put(std::string_view piece) {
  separate();
  text_ += piece;
  return *this;
}

void JsonWriter::separate() {
  if (after_key_) {
    after_key_ = false;
    return;
  }
  if (filled_.empty()) return;
  if (filled_.back()) text_ += ',';
  filled_.back() = true;
  new_line();
}

void JsonWriter::new_line() {
  if (indent_ == 0) return;
  text_ += '\n';
  text_.append(filled_.size() * static_cast<size_t>(indent_), ' ');
}

}  // namespace linnet
