// JSON: a strict reader for files nobody vouches for, and a writer for `--json`.
//
//   JsonValue root;
//   LINNET_TRY(parse_json(text, "config.json", {}, root));          // text must outlive root
//   int64_t layers = 0;
//   if (const char* why = root.find("num_hidden_layers").count(layers)) return bad_input(...);
//   for (JsonItems items(root); items.next();) use(items.key().string(), items.value());
//
// The text is the tree. parse_json checks all of it once; after that a JsonValue is a piece of the checked text and moving
// around means skipping over characters. So a document needs no memory beyond its text: a tree of nodes would need 20 bytes
// for each `0,` of a hostile file. Looking up a key takes time proportional to the object's text.
//
// Strict: RFC 8259 without extensions; in addition valid UTF-8 throughout (lone surrogates refused in \u escapes too) and no
// key twice in an object, compared after unescaping. Accessors of the wrong kind give empty or false, never undefined
// behaviour.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "core/status.h"

namespace linnet {

struct JsonLimits {
  size_t max_bytes = size_t{16} << 20;
  int max_depth = 32;                    // objects and arrays inside each other; at most kMaxJsonDepth counts
  size_t max_members = size_t{1} << 20;  // of one object; checking for duplicates takes 8 bytes each
  bool infinity = false;                 // Infinity, as Python writes it, is a number too, which number() does not read
};
inline constexpr size_t kMaxJsonBytes = 0xffffffff;  // offsets have 32 bits
inline constexpr int kMaxJsonDepth = 256;            // the parser calls itself once per level

class JsonValue {
 public:
  enum class Kind { null, boolean, number, string, array, object };

  JsonValue() = default;                                            // null
  explicit JsonValue(std::string_view checked) : text_(checked) {}  // one value of a text that parse_json accepted
  std::string_view text() const { return text_; }                   // as written, without space around it
  Kind kind() const;
  bool is(Kind k) const { return kind() == k; }

  bool boolean() const { return text_ == "true"; }
  std::string string() const;             // unescaped; empty if not a string
  bool equals(std::string_view s) const;  // whether this is the string s
  int compare(std::string_view s) const;  // unescaped, byte by byte: < 0, 0, > 0
  int compare(const JsonValue& other) const;
  // Numbers are kept as written, since 1.0, 1e0 and 1 are told apart where a file must count something.
  const char* count(int64_t& out) const;       // plain digits, 0 .. 2^63 - 1: null; otherwise why not: "is negative", ...
  bool integer(int64_t& out) const;            // plain digits of either sign that fit
  bool number(double& out) const;              // any number within the range of double, correctly rounded
  JsonValue find(std::string_view key) const;  // the member of an object; null when there is none
  bool has(std::string_view key) const;

 private:
  std::string_view text_ = "null";
};

// Walks over the members of an object or the elements of an array (keys are then null), in the order of the text.
class JsonItems {
 public:
  explicit JsonItems(const JsonValue& container);
  // Starts at the member whose key begins at `offset` of the object's text (a former key_offset()).
  JsonItems(const JsonValue& object, size_t offset);
  static JsonValue key_at(const JsonValue& object, size_t offset);       // only the key, without looking for its value's end
  static int compare_keys(const JsonValue& object, size_t a, size_t b);  // of the members at two offsets
  bool next();
  const JsonValue& key() const { return key_; }
  const JsonValue& value() const { return value_; }
  size_t key_offset() const { return static_cast<size_t>(key_.text().data() - begin_); }

 private:
  const char* begin_ = nullptr;
  const char* at_ = nullptr;  // before the next item, behind its comma
  const char* end_ = nullptr;
  bool object_ = false;
  JsonValue key_, value_;
};

// Checks all of `text` and gives its value. `source` opens every message: `config.json: duplicate key "a" at byte 17`.
Status parse_json(std::string_view text, std::string_view source, const JsonLimits& limits, JsonValue& root);

// The position of the first byte that is not UTF-8, or text.size().
size_t find_invalid_utf8(std::string_view text);

// A JSON string literal. Bytes that are not UTF-8 become U+FFFD, so that the output is always JSON.
std::string json_quote(std::string_view s);
// The same for use in a sentence: long ones are cut.
std::string json_quote_short(std::string_view s);
std::string json_show_short(const JsonValue& value);  // the value as written, cut

// Writes JSON text, compact or indented.
//
//   JsonWriter w(2);                                                   // indent by 2; 0 writes one line
//   w.begin_object().member("name", "softmax").key("shape").begin_array().value(2).value(64).end_array().end_object();
//   puts(w.text().c_str());
//
// Doubles are written in the shortest form that reads back to the same double; NaN and infinities, which JSON lacks, as null.
class JsonWriter {
 public:
  explicit JsonWriter(int indent = 0) : indent_(indent) {}
  JsonWriter& begin_object() { return open('{'); }
  JsonWriter& end_object() { return close('}'); }
  JsonWriter& begin_array() { return open('['); }
  JsonWriter& end_array() { return close(']'); }
  JsonWriter& key(std::string_view name);
  JsonWriter& value(std::string_view s) { return put(json_quote(s)); }
  JsonWriter& value(const char* s) { return value(std::string_view(s)); }
  JsonWriter& value(const std::string& s) { return value(std::string_view(s)); }
  JsonWriter& value(double x);
  JsonWriter& value(bool b) { return put(b ? "true" : "false"); }
  JsonWriter& value(std::nullptr_t) { return put("null"); }
  template <class Integer, class = std::enable_if_t<std::is_integral_v<Integer>>>
  JsonWriter& value(Integer i) {
    return put(std::to_string(i));
  }
  template <class T>
  JsonWriter& member(std::string_view name, const T& v) {
    return key(name).value(v);
  }
  const std::string& text() const { return text_; }

 private:
  JsonWriter& open(char bracket);
  JsonWriter& close(char bracket);
  JsonWriter& put(std::string_view piece);
  void separate();  // the comma and the new line before an item
  void new_line();

  std::string text_;
  int indent_;
  std::vector<bool> filled_;  // for each open bracket: whether it has an item already
  bool after_key_ = false;
};

}  // namespace linnet
