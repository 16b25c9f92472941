#include "runtime/files/gguf.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "core/files/file.h"

namespace linnet {
namespace {

// A GGUF file in memory, one field after the other.
struct Writer {
  std::string bytes;
  template <class T>
  Writer& number(T value) {
    return bytes.append(reinterpret_cast<const char*>(&value), sizeof value), *this;
  }
  Writer& text(const std::string& s) { return number<uint64_t>(s.size()), bytes += s, *this; }
  Writer& header(uint64_t tensors, uint64_t pairs, uint32_t version = 3) {
    bytes += "GGUF";
    return number(version).number(tensors).number(pairs);
  }
  Writer& tensor(const std::string& name, std::vector<uint64_t> sizes, uint32_t type, uint64_t offset) {
    text(name).number<uint32_t>(static_cast<uint32_t>(sizes.size()));
    for (const uint64_t size : sizes) number(size);
    return number(type).number(offset);
  }
  Writer& data(size_t count) {
    while (bytes.size() % 32 != 0) bytes += '\0';
    return bytes.append(count, '\1'), *this;
  }
};

std::string path_of(const std::string& name) { return testing::TempDir() + "/" + name + ".gguf"; }

Status open_bytes(const std::string& bytes, GgufFile& file) {
  const std::string path = path_of("case");
  EXPECT_TRUE(write_file(path, bytes).ok());
  return GgufFile::open(path, file);
}

TEST(Gguf, ReadsMetadataAndTensors) {
  Writer w;
  w.header(2, 6);
  w.text("a.count").number<uint32_t>(4).number<uint32_t>(30);
  w.text("a.name").number<uint32_t>(8).text("llama");
  w.text("a.real").number<uint32_t>(6).number<float>(0.5f);
  w.text("a.on").number<uint32_t>(7).number<uint8_t>(1);
  w.text("a.texts").number<uint32_t>(9).number<uint32_t>(8).number<uint64_t>(2).text("x").text("yz");
  w.text("a.numbers").number<uint32_t>(9).number<uint32_t>(5).number<uint64_t>(2).number<int32_t>(-1).number<int32_t>(7);
  w.tensor("w", {32, 2}, 8, 0).tensor("b", {3}, 0, 96).data(96 + 12);
  GgufFile file;
  const Status status = open_bytes(w.bytes, file);
  ASSERT_TRUE(status.ok()) << status.message();
  int64_t count = 0;
  std::string_view name;
  double real = 0;
  bool on = false;
  std::vector<std::string_view> texts;
  std::vector<int64_t> numbers;
  EXPECT_TRUE(file.find("a.count").integer(count) && count == 30);
  EXPECT_TRUE(file.find("a.name").text(name) && name == "llama");
  EXPECT_TRUE(file.find("a.real").real(real) && real == 0.5);
  EXPECT_TRUE(file.find("a.on").boolean(on) && on);
  EXPECT_TRUE(file.find("a.texts").texts(texts) && texts == (std::vector<std::string_view>{"x", "yz"}));
  EXPECT_TRUE(file.find("a.numbers").integers(numbers) && numbers == (std::vector<int64_t>{-1, 7}));
  EXPECT_FALSE(file.find("a.missing").given());
  EXPECT_FALSE(file.find("a.name").integer(count));
  const GgufTensor* t = file.tensor("w");
  ASSERT_NE(t, nullptr);
  EXPECT_EQ(t->shape[0], 2);  // rows first
  EXPECT_EQ(t->shape[1], 32);
  EXPECT_EQ(t->bytes, 68u);
  EXPECT_EQ(file.tensor("nothing"), nullptr);
}

TEST(Gguf, RefusesEachWayToBeWrong) {
  const uint64_t huge = uint64_t{1} << 62;
  struct Case {
    const char* sentence;
    std::function<void(Writer&)> write;
  };
  const std::vector<Case> cases = {
      {"does not begin with 'GGUF'", [](Writer& w) { w.bytes = "GGML...."; }},
      {"does not begin with 'GGUF'", [](Writer& w) { w.bytes = ""; }},
      {"cut off within its header", [](Writer& w) { w.bytes = "GGUF\3"; }},
      {"version 1", [](Writer& w) { w.header(0, 0, 1); }},
      {"big-endian", [](Writer& w) { w.header(0, 0, 0x03000000); }},
      {"declares 4611686018427387904 tensors", [&](Writer& w) { w.header(huge, 0); }},
      {"metadata pair 0 is cut off", [](Writer& w) { w.header(0, 1); }},
      {"metadata pair 0 is cut off", [&](Writer& w) { w.header(0, 1).number(huge); }},
      {"key that is empty", [](Writer& w) { w.header(0, 1).text("").number<uint32_t>(4).number<uint32_t>(1); }},
      {"\"k\" has a type", [](Writer& w) { w.header(0, 1).text("k").number<uint32_t>(13); }},
      {"\"k\" is cut off", [](Writer& w) { w.header(0, 1).text("k").number<uint32_t>(10).number<uint32_t>(1); }},
      {"\"k\" is neither true nor false", [](Writer& w) { w.header(0, 1).text("k").number<uint32_t>(7).number<uint8_t>(2); }},
      {"\"k\" is not UTF-8", [](Writer& w) { w.header(0, 1).text("k").number<uint32_t>(8).text("\xff"); }},
      {"array of arrays",
       [](Writer& w) { w.header(0, 1).text("k").number<uint32_t>(9).number<uint32_t>(9).number<uint64_t>(1); }},
      {"\"k\" is cut off",
       [&](Writer& w) { w.header(0, 1).text("k").number<uint32_t>(9).number<uint32_t>(4).number<uint64_t>(huge); }},
      {"\"k\" is cut off",
       [&](Writer& w) { w.header(0, 1).text("k").number<uint32_t>(9).number<uint32_t>(8).number<uint64_t>(huge); }},
      {"\"k\" is given twice",
       [](Writer& w) {
         w.header(0, 2);
         for (int i = 0; i < 2; ++i) w.text("k").number<uint32_t>(4).number<uint32_t>(1);
       }},
      {"general.alignment",
       [](Writer& w) { w.header(0, 1).text("general.alignment").number<uint32_t>(4).number<uint32_t>(24); }},
      {"rank 5",
       [](Writer& w) {
         w.header(1, 0).tensor("t", {1, 1, 1, 1, 1}, 0, 0).data(64);
       }},
      {"larger than any file",
       [&](Writer& w) {
         w.header(1, 0).tensor("t", {huge, huge}, 0, 0).data(64);
       }},
      {"larger than any file",
       [](Writer& w) {
         w.header(1, 0).tensor("t", {1u << 31, 1u << 31}, 0, 0).data(64);
       }},
      {"has type Q2_K", [](Writer& w) { w.header(1, 0).tensor("t", {256}, 10, 0).data(256); }},
      {"has type ?", [](Writer& w) { w.header(1, 0).tensor("t", {256}, 99, 0).data(256); }},
      {"rows of 33 elements", [](Writer& w) { w.header(1, 0).tensor("t", {33}, 8, 0).data(64); }},
      {"begins at byte 7", [](Writer& w) { w.header(1, 0).tensor("t", {4}, 0, 7).data(64); }},
      {"behind the file's end", [](Writer& w) { w.header(1, 0).tensor("t", {64}, 0, 0).data(255); }},
      {"behind the file's end", [&](Writer& w) { w.header(1, 0).tensor("t", {4}, 0, huge).data(64); }},
      {"overlaps", [](Writer& w) { w.header(2, 0).tensor("t", {16}, 0, 0).tensor("u", {16}, 0, 32).data(128); }},
      {"described twice", [](Writer& w) { w.header(2, 0).tensor("t", {4}, 0, 0).tensor("t", {4}, 0, 32).data(128); }},
  };
  for (const Case& c : cases) {
    Writer w;
    c.write(w);
    GgufFile file;
    const Status status = open_bytes(w.bytes, file);
    EXPECT_FALSE(status.ok()) << c.sentence;
    EXPECT_NE(status.message().find(c.sentence), std::string::npos) << c.sentence << " | " << status.message();
    EXPECT_EQ(status.code(), Code::bad_input);
  }
}

TEST(Gguf, EveryCutOfAFileIsRefused) {
  Writer w;
  w.header(1, 2);
  w.text("a").number<uint32_t>(8).text("llama");
  w.text("b").number<uint32_t>(9).number<uint32_t>(8).number<uint64_t>(2).text("x").text("yz");
  w.tensor("w", {32, 2}, 8, 0).data(68);
  for (size_t size = 0; size < w.bytes.size(); ++size) {
    GgufFile file;
    EXPECT_FALSE(open_bytes(w.bytes.substr(0, size), file).ok()) << size;
  }
  GgufFile file;
  EXPECT_TRUE(open_bytes(w.bytes, file).ok());
}

}  // namespace
}  // namespace linnet
