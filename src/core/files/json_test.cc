#include "core/files/json.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

namespace linnet {
namespace {

std::string repeat(std::string_view piece, int count) {
  std::string out;
  for (int i = 0; i < count; ++i) out += piece;
  return out;
}

constexpr JsonLimits kSmall = {.max_bytes = 200, .max_depth = 4, .max_members = 8};

struct Refused {
  const char* name;
  std::string text;
  const char* message;  // the whole sentence
};

TEST(Json, RefusesWithASentence) {
  const Refused cases[] = {
      {"nothing", "", "f: the text ends where a JSON value should stand at byte 0"},
      {"only space", "  ", "f: the text ends where a JSON value should stand at byte 2"},
      {"two values", "1 2", "f: unexpected text after the end of the JSON value at byte 2"},
      {"byte order mark", "\xef\xbb\xbf{}", "f: expected a JSON value at byte 0"},
      {"comment", "{} // x", "f: unexpected text after the end of the JSON value at byte 3"},
      {"nul byte", std::string("\0", 1), "f: expected a JSON value at byte 0"},
      {"nul byte after", std::string("1\0", 2), "f: unexpected text after the end of the JSON value at byte 1"},
      {"word", "nul", "f: expected a JSON value at byte 0"},
      {"word in capitals", "True", "f: expected a JSON value at byte 0"},
      {"word too long", "nulls", "f: unexpected text after the end of the JSON value at byte 4"},
      {"not a number", "NaN", "f: expected a JSON value at byte 0"},
      {"infinity", "-Infinity", "f: expected a digit at byte 1"},
      {"plus", "+1", "f: expected a JSON value at byte 0"},
      {"minus alone", "-", "f: expected a digit at byte 1"},
      {"leading zero", "01", "f: a number begins with a superfluous 0 at byte 1"},
      {"leading zero, negative", "-00", "f: a number begins with a superfluous 0 at byte 2"},
      {"leading point", ".5", "f: expected a JSON value at byte 0"},
      {"point alone", "1.", "f: expected a digit at byte 2"},
      {"point then exponent", "1.e3", "f: expected a digit at byte 2"},
      {"exponent alone", "1e", "f: expected a digit at byte 2"},
      {"exponent sign alone", "1e+", "f: expected a digit at byte 3"},
      {"hexadecimal", "0x10", "f: unexpected text after the end of the JSON value at byte 1"},
      {"array open", "[1", "f: expected ',' or ']' in an array at byte 2"},
      {"array comma last", "[1,]", "f: expected a JSON value at byte 3"},
      {"array comma first", "[,1]", "f: expected a JSON value at byte 1"},
      {"array wrong bracket", "[1}", "f: expected ',' or ']' in an array at byte 2"},
      {"object open", "{\"a\":1", "f: expected ',' or '}' in an object at byte 6"},
      {"object comma last", "{\"a\":1,}", "f: expected a key in quotes at byte 7"},
      {"object without value", "{\"a\"}", "f: expected ':' after a key at byte 4"},
      {"key without quotes", "{a:1}", "f: expected a key in quotes at byte 1"},
      {"key is a number", "{1:1}", "f: expected a key in quotes at byte 1"},
      {"single quotes", "'a'", "f: expected a JSON value at byte 0"},
      {"string open", "\"abc", "f: a string does not end at byte 4"},
      {"string ends in a backslash", "\"abc\\", "f: unknown escape in a string at byte 5"},
      {"string escape", "\"\\x41\"", "f: unknown escape in a string at byte 2"},
      {"string escaped nul byte", std::string("\"\\\0\"", 4), "f: unknown escape in a string at byte 2"},
      {"string with a new line", "\"a\nb\"", "f: a control character in a string must be escaped at byte 2"},
      {"unicode short", "\"\\u12\"", "f: \\u needs four hexadecimal digits at byte 3"},
      {"unicode at the end", "\"\\u123", "f: \\u needs four hexadecimal digits at byte 3"},
      {"unicode not hexadecimal", "\"\\u12g4\"", "f: \\u needs four hexadecimal digits at byte 3"},
      {"high surrogate alone", "\"\\ud800\"", "f: half of a surrogate pair at byte 7"},
      {"high surrogate twice", "\"\\ud800\\ud800\"", "f: half of a surrogate pair at byte 13"},
      {"low surrogate alone", "\"\\udc00\"", "f: half of a surrogate pair at byte 7"},
      {"utf-8 continuation alone", "\"\x80\"", "f: invalid UTF-8 at byte 1"},
      {"utf-8 cut", "\"\xe2\x82\"", "f: invalid UTF-8 at byte 1"},
      {"utf-8 cut by the end", "\"\xf0\x9f\x98", "f: invalid UTF-8 at byte 1"},
      {"utf-8 overlong 2", "\"\xc0\xaf\"", "f: invalid UTF-8 at byte 1"},
      {"utf-8 overlong 3", "\"\xe0\x9f\xbf\"", "f: invalid UTF-8 at byte 1"},
      {"utf-8 overlong 4", "\"\xf0\x8f\xbf\xbf\"", "f: invalid UTF-8 at byte 1"},
      {"utf-8 surrogate", "\"\xed\xa0\x80\"", "f: invalid UTF-8 at byte 1"},
      {"utf-8 beyond U+10FFFF", "\"\xf4\x90\x80\x80\"", "f: invalid UTF-8 at byte 1"},
      {"utf-8 byte ff", "\"a\xff\"", "f: invalid UTF-8 at byte 2"},
      {"duplicate key", "{\"a\":1,\"b\":2,\"a\":3}", "f: duplicate key \"a\" at byte 13"},
      {"duplicate key, escaped", "{\"a\":1,\"\\u0061\":3}", "f: duplicate key \"\\u0061\" at byte 7"},
      {"duplicate key, escaped in two ways", "{\"\\u00e9\":1,\"\xc3\xa9\":3}", "f: duplicate key \"\xc3\xa9\" at byte 12"},
      {"duplicate key, pair", "{\"\\ud83d\\ude00\":1,\"\xf0\x9f\x98\x80\":3}",
       "f: duplicate key \"\xf0\x9f\x98\x80\" at byte 18"},
      {"duplicate key, empty", "{\"\":1,\"\":3}", "f: duplicate key \"\" at byte 6"},
      {"duplicate key inside", "{\"w\":{\"a\":1,\"a\":3}}", "f: in \"w\": duplicate key \"a\" at byte 12"},
      {"duplicate key in an array", "[1,{\"a\":1,\"a\":3}]", "f: duplicate key \"a\" at byte 10"},
      {"duplicate key, deepest", "{\"w\":[[{\"a\":1,\"a\":3}]]}", "f: in \"w\": duplicate key \"a\" at byte 14"},
      {"too deep, arrays", "[[[[[", "f: nested deeper than 4 at byte 4"},
      {"too deep, objects", repeat("{\"a\":", 5), "f: in \"a\": nested deeper than 4 at byte 20"},
      {"too long", std::string(201, ' '), "f: 201 bytes of JSON, more than the limit of 200"},
      {"too many members", "{\"0\":0,\"1\":0,\"2\":0,\"3\":0,\"4\":0,\"5\":0,\"6\":0,\"7\":0,\"8\":0}",
       "f: an object with more than 8 members at byte 49"},
  };
  for (const Refused& c : cases) {
    JsonValue root;
    const Status status = parse_json(c.text, "f", kSmall, root);
    EXPECT_EQ(status.message(), c.message) << c.name;
    EXPECT_EQ(status.code(), Code::bad_input) << c.name;
    EXPECT_TRUE(root.is(JsonValue::Kind::null)) << c.name;
  }
}

TEST(Json, DepthIsBoundedWhateverTheCallerAllows) {
  JsonValue root;
  const std::string deep = repeat("[", 1 << 20);
  EXPECT_EQ(parse_json(deep, "f", {.max_depth = 1 << 30}, root).message(), "f: nested deeper than 256 at byte 256");
  EXPECT_TRUE(parse_json(repeat("[", 256) + repeat("]", 256), "f", {.max_depth = 1 << 30}, root).ok());
}

// Two keys with the same 32-bit FNV-1a hash: equal hashes alone make no duplicate, and do not hide one.
TEST(Json, KeysWhoseHashesCollide) {
  const auto hash = [](std::string_view s) {
    uint32_t h = 2166136261u;
    for (const char c : s) h = (h ^ static_cast<unsigned char>(c)) * 16777619u;
    return h;
  };
  ASSERT_EQ(hash("costarring"), hash("liquid"));
  JsonValue root;
  EXPECT_TRUE(parse_json(R"({"costarring":1,"liquid":2})", "f", {}, root).ok());
  EXPECT_EQ(parse_json(R"({"liquid":0,"costarring":1,"liquid":2})", "f", {}, root).message(),
            "f: duplicate key \"liquid\" at byte 27");
}

TEST(Json, LongNamesAreCutInMessages) {
  JsonValue root;
  const std::string key = "\"" + repeat("\xc3\xa9", 1000) + "\"";
  const std::string text = "{" + key + ":1," + key + ":2}";
  EXPECT_EQ(parse_json(text, "f", {}, root).message(),
            "f: duplicate key \"" + repeat("\xc3\xa9", 49) + "... at byte " + std::to_string(key.size() + 4));
}

JsonValue parse(std::string_view text) {
  JsonValue root;
  const Status status = parse_json(text, "f", {}, root);
  EXPECT_TRUE(status.ok()) << status.message();
  return root;
}

TEST(Json, Strings) {
  struct Case {
    const char* text;
    std::string expected;
  };
  const Case cases[] = {
      {R"("")", ""},
      {R"("plain")", "plain"},
      {R"("\"\\\/\b\f\n\r\t")", "\"\\/\b\f\n\r\t"},
      {R"("\u0041\u00e9\u20ac\ud83d\ude00z")", "A\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80z"},
      {R"("a\u0000b")", std::string("a\0b", 3)},
      {R"("\uFFFF\uDBFF\uDFFF")", "\xef\xbf\xbf\xf4\x8f\xbf\xbf"},
      {"\"\xc2\x80\xdf\xbf\xe0\xa0\x80\xed\x9f\xbf\xee\x80\x80\xf0\x90\x80\x80\x7f\"",
       "\xc2\x80\xdf\xbf\xe0\xa0\x80\xed\x9f\xbf\xee\x80\x80\xf0\x90\x80\x80\x7f"},
  };
  for (const Case& c : cases) {
    const JsonValue v = parse(c.text);
    EXPECT_EQ(v.string(), c.expected) << c.text;
    EXPECT_TRUE(v.equals(c.expected)) << c.text;
    EXPECT_FALSE(v.equals(c.expected + "x")) << c.text;
    if (!c.expected.empty()) {
      EXPECT_FALSE(v.equals(c.expected.substr(1))) << c.text;
    }
    EXPECT_EQ(parse(json_quote(c.expected)).string(), c.expected) << c.text;
  }
  EXPECT_EQ(parse(R"("a")").compare(parse(R"("\u0061")")), 0);
  EXPECT_EQ(parse(R"("\u0061")").compare("a"), 0);
  EXPECT_LT(parse(R"("a")").compare("aa"), 0);
  EXPECT_GT(parse(R"("aa")").compare("a"), 0);
  EXPECT_GT(parse("\"\xc3\xa9\"").compare("z"), 0);
  EXPECT_LT(parse(R"("a")").compare(parse(R"("aa")")), 0);
  EXPECT_GT(parse("\"\xc3\xa9\"").compare(parse("\"z\"")), 0);
}

TEST(Json, Numbers) {
  struct Case {
    const char* text;
    const char* why_no_count;  // null: it is one
    bool integer;
    double value;
  };
  const Case cases[] = {
      {"0", nullptr, true, 0},
      {"7", nullptr, true, 7},
      {"9223372036854775807", nullptr, true, 0x1p63},
      {"9223372036854775808", "is above 2^63 - 1", false, 0x1p63},
      {"18446744073709551616", "is above 2^63 - 1", false, 0x1p64},
      {"-9223372036854775808", "is negative", true, -0x1p63},
      {"-9223372036854775809", "is negative", false, -0x1p63},
      {"-0", "is negative", true, -0.0},
      {"-1", "is negative", true, -1},
      {"1.0", "is written with a fraction", false, 1},
      {"0.1", "is written with a fraction", false, 0.1},
      {"1e0", "is written with an exponent", false, 1},
      {"1E+2", "is written with an exponent", false, 100},
      {"2.5e-3", "is written with an exponent", false, 0.0025},
      {"-1.5e2", "is negative", false, -150},
      {"1.7976931348623157e308", "is written with an exponent", false, std::numeric_limits<double>::max()},
      {"5e-324", "is written with an exponent", false, 5e-324},
  };
  for (const Case& c : cases) {
    const JsonValue v = parse(c.text);
    int64_t count = -5, integer = -5;
    double number = -5;
    const char* why = v.count(count);
    EXPECT_STREQ(why, c.why_no_count) << c.text;
    EXPECT_EQ(v.integer(integer), c.integer) << c.text;
    EXPECT_EQ(count, why ? -5 : integer) << c.text;
    EXPECT_TRUE(v.number(number)) << c.text;
    EXPECT_EQ(number, c.value) << c.text;
    EXPECT_EQ(std::signbit(number), std::signbit(c.value)) << c.text;
    EXPECT_EQ(v.text(), c.text);
    if (c.integer) {
      EXPECT_EQ(std::to_string(integer), c.text == std::string("-0") ? "0" : c.text);
    }
  }
  double number = -5;
  EXPECT_FALSE(parse("1e999").number(number));
  EXPECT_FALSE(parse("\"1\"").number(number));
  EXPECT_EQ(number, -5);
}

TEST(Json, Navigation) {
  const JsonValue root =
      parse(" { \"a\" : [ 1 , [ ] , { } , \"]}\\\"\" , true,null ] ,\n\t\"b\":{\"c\":false,\"n\":null}, \"\\u0064\": -2 } ");
  EXPECT_EQ(root.text().front(), '{');
  EXPECT_EQ(root.text().back(), '}');
  std::string walked;
  std::vector<size_t> offsets;
  for (JsonItems items(root); items.next();) {
    walked += items.key().string() + "=" + std::string(items.value().text()) + ";";
    offsets.push_back(items.key_offset());
  }
  EXPECT_EQ(walked, "a=[ 1 , [ ] , { } , \"]}\\\"\" , true,null ];b={\"c\":false,\"n\":null};d=-2;");
  JsonItems again(root, offsets[1]);
  ASSERT_TRUE(again.next());
  EXPECT_TRUE(again.key().equals("b"));
  EXPECT_EQ(JsonItems::key_at(root, offsets[2]).text(), "\"\\u0064\"");
  ASSERT_TRUE(again.next());
  EXPECT_TRUE(again.key().equals("d"));
  EXPECT_FALSE(again.next());
  EXPECT_FALSE(again.next());

  using Kind = JsonValue::Kind;
  const Kind kinds[] = {Kind::number, Kind::array, Kind::object, Kind::string, Kind::boolean, Kind::null};
  size_t i = 0;
  for (JsonItems items(root.find("a")); items.next(); ++i) {
    ASSERT_LT(i, std::size(kinds));
    EXPECT_EQ(items.value().kind(), kinds[i]);
    EXPECT_TRUE(items.key().is(Kind::null));
    EXPECT_EQ(items.value().boolean(), i == 4);
  }
  EXPECT_EQ(i, std::size(kinds));
  EXPECT_TRUE(root.find("b").has("n"));
  EXPECT_FALSE(root.find("b").has("a"));
  EXPECT_TRUE(root.find("b").find("n").is(Kind::null));
  EXPECT_TRUE(root.find("x").find("y").find("z").is(Kind::null));  // nothing of the wrong kind does harm
  EXPECT_EQ(root.string(), "");
  EXPECT_EQ(root.compare(root.find("d")), 0);
  EXPECT_FALSE(root.equals(""));
  for (const char* empty : {"{}", "[ ]", "3", "\"ab\""}) {
    JsonItems items(parse(empty));
    EXPECT_FALSE(items.next()) << empty;
  }
}

// Whatever the checker accepts can be walked to the last leaf. Exercises the unchecked skipping under the sanitizers.
size_t walk(const JsonValue& v) {
  size_t leaves = 1;
  for (JsonItems items(v); items.next();) leaves += items.key().string().size() + walk(items.value());
  int64_t i;
  double x;
  leaves += v.string().size() + (v.count(i) == nullptr) + v.integer(i) + v.number(x);
  return leaves;
}

TEST(Json, MutatedTextsNeverMislead) {
  const std::string seed =
      "{\"a\": [1, -2.5e3, {\"x\\u00e9\\ud83d\\ude00\": \"\\n\xc3\xa9\"}, [], {}], \"b\": {\"c\": true, \"d\": null}, \"\": 0}";
  EXPECT_TRUE(parse(seed).is(JsonValue::Kind::object));
  for (size_t n = 0; n < seed.size(); ++n) {
    JsonValue root;
    const std::string cut(seed, 0, n);
    EXPECT_FALSE(parse_json(cut, "f", {}, root).ok()) << cut;
  }
  const std::string_view alphabet("{}[]\",:\\u0e-.tfn \x80\xc3\xff\0", 21);
  std::mt19937 random(1);
  int accepted = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string text = seed;
    for (unsigned edits = 1 + random() % 3; edits > 0; --edits) {
      const size_t at = random() % text.size();
      const char c = alphabet[random() % alphabet.size()];
      switch (random() % 3) {
        case 0: text[at] = c; break;
        case 1: text.insert(at, 1, c); break;
        default: text.erase(at, 1 + random() % 4); break;
      }
    }
    const std::vector<char> exact(text.begin(), text.end());  // no NUL behind it: reading past the end is seen
    JsonValue root;
    if (!parse_json({exact.data(), exact.size()}, "f", {}, root).ok()) continue;
    EXPECT_GT(walk(root), 0u);
    ++accepted;
  }
  EXPECT_GT(accepted, 500);  // the mutations are gentle enough to test both outcomes
  EXPECT_LT(accepted, 15000);
}

TEST(JsonWriter, WritesAndReadsBack) {
  JsonWriter w;
  w.begin_object()
      .member("name", "a\"b\\c\n\t\x01\x7f\xc3\xa9")
      .member("whole", 3)
      .member("big", uint64_t{18446744073709551615u});
  w.member("x", 0.1).member("yes", true).member("none", nullptr).key("list").begin_array();
  w.value(int64_t{-1}).value(1e300).value(std::string("s")).begin_array().end_array().end_array();
  w.key("empty").begin_object().end_object().end_object();
  EXPECT_EQ(
      w.text(),
      "{\"name\":\"a\\\"b\\\\c\\n\\t\\u0001\\u007f\xc3\xa9\",\"whole\":3,\"big\":18446744073709551615,\"x\":0.1,\"yes\":true,"
      "\"none\":null,\"list\":[-1,1e+300,\"s\",[]],\"empty\":{}}");
  EXPECT_EQ(parse(w.text()).find("name").string(), "a\"b\\c\n\t\x01\x7f\xc3\xa9");

  JsonWriter pretty(2);
  pretty.begin_object().key("a").begin_array().value(1).value(2).end_array().member("b", 2.0f).key("c").begin_object();
  pretty.end_object().end_object();
  EXPECT_EQ(pretty.text(), "{\n  \"a\": [\n    1,\n    2\n  ],\n  \"b\": 2,\n  \"c\": {}\n}");
}

TEST(JsonWriter, DoublesRoundTrip) {
  std::vector<double> values = {
      0.0, -0.0, 1.0, 0.1, 1.0 / 3, 5e-324, 2.2250738585072014e-308, 1.7976931348623157e308, 1e21, 123456789012345680.0};
  std::mt19937_64 random(2);
  for (int i = 0; i < 10000; ++i) values.push_back(__builtin_bit_cast(double, static_cast<uint64_t>(random())));
  for (const double x : values) {
    JsonWriter w;
    w.value(x);
    double back = -5;
    const JsonValue v = parse(w.text());
    if (!std::isfinite(x)) {
      EXPECT_EQ(w.text(), "null");
      continue;
    }
    ASSERT_TRUE(v.number(back)) << w.text();
    ASSERT_EQ(__builtin_bit_cast(uint64_t, back), __builtin_bit_cast(uint64_t, x)) << w.text();
  }
  for (const double x : {NAN, INFINITY, -INFINITY}) EXPECT_EQ(JsonWriter().value(x).text(), "null");
}

TEST(JsonWriter, BadBytesAreReplaced) {
  EXPECT_EQ(json_quote("a\xff"), "\"a\xef\xbf\xbd\"");
  EXPECT_EQ(json_quote("\xe2\x82z\xc3\xa9\x80"), "\"\xef\xbf\xbd\xef\xbf\xbdz\xc3\xa9\xef\xbf\xbd\"");
  std::mt19937 random(3);
  for (int i = 0; i < 2000; ++i) {
    std::string noise(random() % 12, '\0');
    for (char& c : noise) c = static_cast<char>(random());
    EXPECT_EQ(parse(json_quote(noise)).string().empty(), noise.empty());
  }
  EXPECT_EQ(json_quote_short(repeat("x", 200)), "\"" + repeat("x", 100) + "...\"");
}

}  // namespace
}  // namespace linnet
