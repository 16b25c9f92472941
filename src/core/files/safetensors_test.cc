// The attacks are a table: a name, the bytes of a file, and the sentence that refuses it. Each rule of the format has a line
// that would pass, or be refused for another reason, without the rule.
#include "core/files/safetensors.h"

#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>
#include <new>
#include <random>

#include "core/half.h"

// Live and peak bytes of this program, to hold the parser to its promise about memory.
namespace {
std::atomic<int64_t> live_bytes{0}, peak_bytes{0};
}  // namespace

// Not inlined: g++ would see malloc on one side and delete on the other, and warn.
[[gnu::noinline]] void* operator new(size_t size, const std::nothrow_t&) noexcept {
  void* p = std::malloc(size ? size : 1);
  if (p == nullptr) return p;
  const int64_t live = live_bytes += static_cast<int64_t>(malloc_usable_size(p));
  if (live > peak_bytes) peak_bytes = live;
  return p;
}
[[gnu::noinline]] void* operator new(size_t size) {
  void* p = operator new(size, std::nothrow);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}
[[gnu::noinline]] void operator delete(void* p) noexcept {
  live_bytes -= static_cast<int64_t>(malloc_usable_size(p));
  std::free(p);
}
[[gnu::noinline]] void operator delete(void* p, size_t) noexcept { operator delete(p); }

namespace linnet {
namespace {

namespace fs = std::filesystem;

std::string le64(uint64_t n) { return std::string(reinterpret_cast<const char*>(&n), sizeof n); }
std::string bytes(size_t n) { return std::string(n, '\x01'); }
std::string file(const std::string& header, size_t buffer_bytes = 0) {
  return le64(header.size()) + header + bytes(buffer_bytes);
}
std::string repeat(const std::string& piece, size_t count) {
  std::string out;
  for (size_t i = 0; i < count; ++i) out += piece;
  return out;
}
// One entry of a header.
std::string tensor(const std::string& name, const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}";
}
std::string one(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return "{" + tensor("w", dtype, shape, offsets) + "}";
}

class Folder {  // removed with all its files
 public:
  Folder() {
    std::string pattern = testing::TempDir() + "linnet-XXXXXX";
    path_ = ::mkdtemp(pattern.data()) ? pattern : "";
  }
  ~Folder() { fs::remove_all(path_); }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

void put(const std::string& path, const std::string& content) {
  FILE* f = std::fopen(path.c_str(), "wb");
  ASSERT_NE(f, nullptr) << path;
  ASSERT_EQ(std::fwrite(content.data(), 1, content.size(), f), content.size());
  ASSERT_EQ(std::fclose(f), 0);
}

// A file in memory that is rewritten thousands of times: on some disks each rewriting waits for the disk.
class MemoryFile {
 public:
  MemoryFile() : descriptor_(::memfd_create("linnet", MFD_CLOEXEC)) {}
  ~MemoryFile() { ::close(descriptor_); }
  std::string path() const { return "/proc/self/fd/" + std::to_string(descriptor_); }
  void put(const std::string& content) const {
    ASSERT_EQ(::ftruncate(descriptor_, 0), 0);
    ASSERT_EQ(::pwrite(descriptor_, content.data(), content.size(), 0), static_cast<ssize_t>(content.size()));
  }

 private:
  int descriptor_;
};

struct Attack {
  std::string name;
  std::string content;
  std::string message;  // all that follows the file's name
};

std::vector<Attack> attacks() {
  std::string many = "{";
  for (uint64_t i = 0; i <= kMaxTensors; ++i) many += (i ? ",\"" : "\"") + std::to_string(i) + "\":0";
  const std::string meta = "{\"__metadata__\":";
  const std::string w = ": tensor \"w\": ";
  const std::string f4 = one("F32", "[1]", "[0,4]");
  return {
      // 1. lengths
      {"empty file", "", ": has 0 bytes; a safetensors file begins with 8 bytes that give the header's length"},
      {"seven bytes", std::string("\x02\0\0\0\0\0\0", 7),
       ": has 7 bytes; a safetensors file begins with 8 bytes that give the header's length"},
      {"a text", "# Linnet\n\nAttention from softmax to linear",
       ": this is no safetensors file, which begins with the length of its header and an opening brace"},
      {"header length 0", le64(0), ": header of 0 bytes; the smallest is 2, {}"},
      {"header length 1", le64(1) + "{", ": header of 1 bytes; the smallest is 2, {}"},
      {"header length above the limit", le64(kMaxHeaderBytes + 1) + "{}",
       ": header of 100000001 bytes, more than the limit of 100000000"},
      {"header length -1", le64(~uint64_t{0}) + "{}",
       ": header of 18446744073709551615 bytes, more than the limit of 100000000"},
      {"header length -8", le64(~uint64_t{7}) + "{}",
       ": header of 18446744073709551608 bytes, more than the limit of 100000000"},
      {"header one byte too long", le64(3) + "{}",
       ": header of 3 bytes does not fit into the file, which has 2 behind the length"},
      {"header length at the limit", le64(kMaxHeaderBytes) + "{}",
       ": header of 100000000 bytes does not fit into the file, which has 2 behind the length"},
      // 2. the text
      {"array", file("[]"), ": header: begins with byte 0x5b, expected '{'"},
      {"space first", file(" {}"), ": header: begins with byte 0x20, expected '{'"},
      {"byte order mark", file("\xef\xbb\xbf{}"), ": header: begins with byte 0xef, expected '{'"},
      {"not JSON", file("{w}"), ": header: expected a key in quotes at byte 1"},
      {"header cut", file("{\"w\":"), ": header: in \"w\": the text ends where a JSON value should stand at byte 5"},
      {"invalid UTF-8 in a name", file("{\"\xff\":0}"), ": header: invalid UTF-8 at byte 2"},
      {"invalid UTF-8 in metadata", file(meta + "{\"a\":\"\xc0\xaf\"}}"), ": header: invalid UTF-8 at byte 22"},
      {"new line behind", file("{}\n"), ": header: byte 0x0a at byte 2, behind the closing brace only spaces may follow"},
      {"tab behind spaces", file("{}  \t "), ": header: byte 0x09 at byte 4, behind the closing brace only spaces may follow"},
      {"nul bytes behind", file(std::string("{}\0\0", 4)),
       ": header: unexpected text after the end of the JSON value at byte 2"},
      {"second object behind", file("{}{}"), ": header: unexpected text after the end of the JSON value at byte 2"},
      {"nested deeper than 4", file("{\"w\":[[[[]]]]}"), ": header: in \"w\": nested deeper than 4 at byte 8"},
      {"duplicate tensor", file("{" + tensor("w", "U8", "[0]", "[0,0]") + "," + tensor("w", "U8", "[1]", "[0,1]") + "}", 1),
       ": header: duplicate key \"w\" at byte 53"},
      {"duplicate tensor, escaped",
       file("{" + tensor("w", "U8", "[0]", "[0,0]") + "," + tensor("\\u0077", "U8", "[1]", "[0,1]") + "}", 1),
       ": header: duplicate key \"\\u0077\" at byte 53"},
      {"duplicate dtype", file("{\"w\":{\"dtype\":\"U8\",\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,4]}}", 4),
       ": header: in \"w\": duplicate key \"dtype\" at byte 19"},
      {"duplicate metadata", file("{\"__metadata__\":{},\"__metadata__\":{}}"),
       ": header: duplicate key \"__metadata__\" at byte 19"},
      {"duplicate key in metadata", file(meta + "{\"a\":\"1\",\"a\":\"2\"}}"),
       ": header: in \"__metadata__\": duplicate key \"a\" at byte 25"},
      {"too many tensors", file(many + "}"), ": header: 1048577 tensors, more than the limit of 1048576"},
      {"far too many tensors", file(many + ",\"x\":0}"),
       ": header: an object with more than 1048577 members at byte " + std::to_string(many.size() + 1)},
      {"empty name", file("{" + tensor("", "U8", "[0]", "[0,0]") + "}"), ": tensor \"\": the name is empty"},
      {"long name", file("{" + tensor(repeat("n", 4097), "U8", "[0]", "[0,0]") + "}"),
       ": tensor \"" + repeat("n", 99) + "...: the name has more than 4096 bytes"},
      {"long name, escaped", file("{" + tensor(repeat("\\u00e9", 2049), "U8", "[0]", "[0,0]") + "}"),
       ": tensor \"" + repeat("\\u00e9", 16) + "\\u0...: the name has more than 4096 bytes"},
      {"very long name", file("{" + tensor(repeat("n", 100000), "U8", "[0]", "[0,0]") + "}"),
       ": tensor \"" + repeat("n", 99) + "...: the name has more than 4096 bytes"},
      // 3. metadata and entries
      {"metadata null", file(meta + "null}"), ": header: __metadata__ is not an object"},
      {"metadata array", file(meta + "[]}"), ": header: __metadata__ is not an object"},
      {"metadata with a number", file(meta + "{\"a\":1}}"), ": header: __metadata__ holds 1 for \"a\", expected a string"},
      {"metadata with an object", file(meta + "{\"a\":\"b\",\"c\":{}}}"),
       ": header: __metadata__ holds {} for \"c\", expected a string"},
      {"entry is a number", file("{\"w\":1}"), w + "its entry is 1, expected an object"},
      {"entry is null", file("{\"w\":null}"), w + "its entry is null, expected an object"},
      {"entry is an array", file("{\"w\":[]}"), w + "its entry is [], expected an object"},
      {"no dtype", file("{\"w\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 4), w + "its entry has no dtype"},
      {"no shape", file("{\"w\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4), w + "its entry has no shape"},
      {"no offsets", file("{\"w\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4), w + "its entry has no data_offsets"},
      {"dtype is a number", file("{\"w\":{\"dtype\":32,\"shape\":[1],\"data_offsets\":[0,4]}}", 4),
       w + "dtype is 32, expected a string"},
      {"dtype is null", file("{\"w\":{\"dtype\":null,\"shape\":[1],\"data_offsets\":[0,4]}}", 4),
       w + "dtype is null, expected a string"},
      {"dtype unknown", file(one("F128", "[1]", "[0,16]"), 16), w + "unknown dtype \"F128\""},
      {"dtype in small letters", file(one("f32", "[1]", "[0,4]"), 4), w + "unknown dtype \"f32\""},
      {"dtype empty", file(one("", "[1]", "[0,4]"), 4), w + "unknown dtype \"\""},
      {"shape is a number", file(one("F32", "1", "[0,4]"), 4), w + "shape is 1, expected an array"},
      {"shape is an object", file(one("F32", "{\"a\":1}", "[0,4]"), 4), w + "shape is {\"a\":1}, expected an array"},
      {"shape holds a string", file(one("F32", "[\"1\"]", "[0,4]"), 4), w + "shape[0] = \"1\" is not a number"},
      {"shape holds null", file(one("F32", "[1,null]", "[0,4]"), 4), w + "shape[1] = null is not a number"},
      {"shape negative", file(one("F32", "[-1]", "[0,4]"), 4), w + "shape[0] = -1 is negative"},
      {"shape twice negative", file(one("F32", "[-1,-1]", "[0,4]"), 4), w + "shape[0] = -1 is negative"},
      {"shape negative zero", file(one("F32", "[-0]", "[0,0]")), w + "shape[0] = -0 is negative"},
      {"shape fractional", file(one("F32", "[1.0]", "[0,4]"), 4), w + "shape[0] = 1.0 is written with a fraction"},
      {"shape with exponent", file(one("F32", "[1e0]", "[0,4]"), 4), w + "shape[0] = 1e0 is written with an exponent"},
      {"shape above 2^63 - 1", file(one("F32", "[9223372036854775808]", "[0,4]"), 4),
       w + "shape[0] = 9223372036854775808 is above 2^63 - 1"},
      {"shape 2^64 + 1", file(one("F32", "[18446744073709551617]", "[0,4]"), 4),
       w + "shape[0] = 18446744073709551617 is above 2^63 - 1"},
      {"shape of rank 17", file(one("F32", "[1" + repeat(",1", 16) + "]", "[0,4]"), 4),
       w + "shape has more than 16 dimensions"},
      {"offsets are a number", file(one("F32", "[1]", "4"), 4), w + "data_offsets is 4, expected an array"},
      {"offsets empty", file(one("F32", "[1]", "[]"), 4), w + "data_offsets has 0 numbers, expected two"},
      {"offsets one", file(one("F32", "[1]", "[0]"), 4), w + "data_offsets has 1 numbers, expected two"},
      {"offsets three", file(one("F32", "[1]", "[0,4,4]"), 4), w + "data_offsets has more than two numbers"},
      {"offsets negative", file(one("F32", "[1]", "[-4,0]"), 4), w + "data_offsets[0] = -4 is negative"},
      {"offsets fractional", file(one("F32", "[1]", "[0,4.0]"), 4), w + "data_offsets[1] = 4.0 is written with a fraction"},
      {"offsets with exponent", file(one("F32", "[1]", "[0,4e0]"), 4), w + "data_offsets[1] = 4e0 is written with an exponent"},
      {"offsets above 2^63 - 1", file(one("F32", "[1]", "[0,18446744073709551620]"), 4),
       w + "data_offsets[1] = 18446744073709551620 is above 2^63 - 1"},
      {"offsets hold a string", file(one("F32", "[1]", "[0,\"4\"]"), 4), w + "data_offsets[1] = \"4\" is not a number"},
      // 4. sizes
      {"product overflows", file(one("F32", "[4294967296,4294967296]", "[0,0]")),
       w + "F32 of shape [4294967296, 4294967296]: the product of its dimensions and element size overflows 64 bits"},
      {"bits overflow", file(one("U8", "[2305843009213693952]", "[0,0]")),
       w + "U8 of shape [2305843009213693952]: the product of its dimensions and element size overflows 64 bits"},
      {"bits overflow to the right size", file(one("F32", "[1073741824,1073741825]", "[0,4294967296]")),
       w + "F32 of shape [1073741824, 1073741825]: the product of its dimensions and element size overflows 64 bits"},
      {"overflow beside a zero", file(one("U8", "[0,4294967296,4294967296]", "[0,0]")),
       w + "U8 of shape [0, 4294967296, 4294967296]: the product of its dimensions and element size overflows 64 bits"},
      {"half a byte", file(one("F4", "[3]", "[0,1]"), 1),
       w + "F4 of shape [3]: its elements do not fill a whole number of bytes"},
      {"six bits", file(one("F6_E2M3", "[2]", "[0,1]"), 1),
       w + "F6_E2M3 of shape [2]: its elements do not fill a whole number of bytes"},
      {"end before begin", file(one("F32", "[1]", "[4,0]"), 4), w + "data_offsets [4, 0] end before they begin"},
      {"end behind the buffer", file(f4, 3), w + "data_offsets [0, 4] end behind the buffer, which has 3 bytes"},
      {"end far behind", file(one("F32", "[1]", "[9223372036854775803,9223372036854775807]"), 4),
       w + "data_offsets [9223372036854775803, 9223372036854775807] end behind the buffer, which has 4 bytes"},
      {"offsets too short", file(one("F32", "[2]", "[0,4]"), 4),
       w + "data_offsets [0, 4] hold 4 bytes, but F32 of shape [2] takes 8"},
      {"offsets too long", file(one("F32", "[1]", "[0,8]"), 8),
       w + "data_offsets [0, 8] hold 8 bytes, but F32 of shape [1] takes 4"},
      {"scalar too long", file(one("F64", "[]", "[0,16]"), 16),
       w + "data_offsets [0, 16] hold 16 bytes, but F64 of shape [] takes 8"},
      {"empty tensor with bytes", file(one("F32", "[0]", "[0,4]"), 4),
       w + "data_offsets [0, 4] hold 4 bytes, but F32 of shape [0] takes 0"},
      // 5. layout
      {"first not at 0", file(one("F32", "[1]", "[4,8]"), 8),
       w + "begins at byte 4 of the buffer, but nothing lies before it: the first tensor begins at 0"},
      {"gap", file("{" + tensor("v", "U8", "[2]", "[0,2]") + "," + tensor("w", "U8", "[2]", "[3,5]") + "}", 5),
       w + "begins at byte 3 of the buffer, where tensor \"v\" ends at 2: there is a gap"},
      {"gap, listed backwards",
       file("{" + tensor("w", "U8", "[2]", "[3,5]") + "," + tensor("v", "U8", "[2]", "[0,2]") + "}", 5),
       w + "begins at byte 3 of the buffer, where tensor \"v\" ends at 2: there is a gap"},
      {"overlap", file("{" + tensor("v", "U8", "[2]", "[0,2]") + "," + tensor("w", "U8", "[2]", "[1,3]") + "}", 3),
       w + "begins at byte 1 of the buffer, where tensor \"v\" ends at 2: they overlap"},
      {"same bytes twice", file("{" + tensor("v", "U8", "[2]", "[0,2]") + "," + tensor("w", "I8", "[2]", "[0,2]") + "}", 2),
       w + "begins at byte 0 of the buffer, where tensor \"v\" ends at 2: they overlap"},
      {"empty tensor inside another",
       file("{" + tensor("v", "U8", "[4]", "[0,4]") + "," + tensor("w", "U8", "[0]", "[2,2]") + "}", 4),
       w + "begins at byte 2 of the buffer, where tensor \"v\" ends at 4: they overlap"},
      {"bytes behind the last", file(f4, 5),
       w + "is the last one and ends at byte 4, but 1 bytes of the buffer belong to no tensor"},
      {"bytes without tensors", file("{}", 3), ": there are no tensors, but 3 bytes of the buffer belong to no tensor"},
      {"bytes with only metadata", file(meta + "{\"a\":\"b\"}}", 3),
       ": there are no tensors, but 3 bytes of the buffer belong to no tensor"},
  };
}

TEST(Safetensors, AttacksAreRefusedWithTheirReason) {
  const MemoryFile memory;
  const std::string path = memory.path();
  for (const Attack& a : attacks()) {
    memory.put(a.content);
    SafetensorsFile opened;
    const Status status = SafetensorsFile::open(path, opened);
    EXPECT_EQ(status.message(), path + a.message) << a.name;
    EXPECT_EQ(status.code(), Code::bad_input) << a.name;
    EXPECT_EQ(opened.size(), 0u) << a.name;
  }
}

TEST(Safetensors, LegalCornersOpen) {
  struct Case {
    const char* name;
    std::string content;
    size_t tensors;
  };
  const Case cases[] = {
      {"nothing", file("{}"), 0},
      {"nothing, padded", file("{}      "), 0},
      {"only metadata", file("{\"__metadata__\":{\"a\":\"b\"}}"), 0},
      {"space inside", file("{ \"w\" :\n\t{\"dtype\" :\"U8\" , \"shape\": [ 1 ],\r\"data_offsets\":[ 0 ,1 ] } } "), 1},
      {"unaligned", file("{" + tensor("a", "U8", "[1]", "[0,1]") + "," + tensor("b", "F64", "[1]", "[1,9]") + "}", 9), 2},
      {"scalar", file(one("F64", "[]", "[0,8]"), 8), 1},
      {"empty tensors at every boundary",
       file("{" + tensor("a", "U8", "[2]", "[0,2]") + "," + tensor("b", "F32", "[0,3]", "[2,2]") + "," +
                tensor("c", "F32", "[0]", "[0,0]") + "}",
            2),
       3},
      {"rank 16", file(one("U8", "[1" + repeat(",1", 15) + "]", "[0,1]"), 1), 1},
      {"name of 4096 bytes", file("{" + tensor(repeat("n", 4096), "U8", "[1]", "[0,1]") + "}", 1), 1},
      {"name that looks like a path", file("{" + tensor("../../etc/passwd", "U8", "[1]", "[0,1]") + "}", 1), 1},
      {"four bits", file(one("F4", "[2,3]", "[0,3]"), 3), 1},
      {"six bits", file(one("F6_E3M2", "[4]", "[0,3]"), 3), 1},
      {"unknown keys of an entry", file("{\"w\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"note\":[[0]]}}", 1),
       1},
  };
  const MemoryFile memory;
  const std::string path = memory.path();
  for (const Case& c : cases) {
    memory.put(c.name == std::string("space inside") ? c.content + "\x01" : c.content);
    SafetensorsFile opened;
    const Status status = SafetensorsFile::open(path, opened);
    EXPECT_TRUE(status.ok()) << c.name << ": " << status.message();
    EXPECT_EQ(opened.size(), c.tensors) << c.name;
  }
}

TEST(Safetensors, OtherThanRegularFiles) {
  const Folder folder;
  SafetensorsFile opened;
  const auto message = [&](const std::string& path) { return SafetensorsFile::open(path, opened).message(); };
  EXPECT_EQ(message(folder / "none"), folder / "none: cannot be opened: No such file or directory");
  EXPECT_EQ(message(folder.path()), folder.path() + ": is a directory");
  EXPECT_EQ(message("/dev/zero"), "/dev/zero: is not a regular file");
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  EXPECT_EQ(message(folder / "pipe"), folder / "pipe: is not a regular file");
  for (const char* name : {"pytorch_model.bin", "model.pt", "model.pth"}) {
    put(folder / name, file("{}"));
    EXPECT_EQ(message(folder / name),
              folder / name + ": is a pickle file by its name; loading those can run code, so only safetensors files are read");
  }
}

TEST(Safetensors, AFileThatShrinksIsAnError) {
  const Folder folder;
  const std::string path = folder / "f.safetensors";
  put(path, file(one("U8", "[8]", "[0,8]"), 8));
  SafetensorsFile opened;
  ASSERT_TRUE(SafetensorsFile::open(path, opened).ok());
  const auto size = fs::file_size(path);
  fs::resize_file(path, size - 3);
  std::vector<double> values = {5};
  EXPECT_EQ(opened.read_f64("w", values).message(), path + ": ends at byte " + std::to_string(size - 3) + " now, but had " +
                                                        std::to_string(size) + " bytes when it was opened");
  EXPECT_EQ(values, std::vector<double>{5});  // nothing partial
}

// ---- Values

template <class T>
SafetensorsTensor make(const std::string& name, const char* dtype, std::vector<int64_t> shape, const std::vector<T>& data) {
  return {name, dtype, std::move(shape), data.data()};
}

TEST(Safetensors, RoundTripOfEveryDtype) {
  const Folder folder;
  const std::string path = folder / "all.safetensors";
  const std::vector<double> f64 = {0.1, -0.0, 5e-324, 1e308};
  const std::vector<float> f32 = {0.1f, -3, 1e-45f};
  const std::vector<uint16_t> bf16 = {round_to<Bf16>(0.1).bits, 0x8001}, f16 = {round_to<F16>(0.1).bits, 0x8001};
  const std::vector<int64_t> i64 = {-(int64_t{1} << 53), int64_t{1} << 53};
  const std::vector<int32_t> i32 = {INT32_MIN, INT32_MAX};
  const std::vector<int16_t> i16 = {INT16_MIN, -1};
  const std::vector<int8_t> i8 = {INT8_MIN, INT8_MAX};
  const std::vector<uint64_t> u64 = {0, uint64_t{1} << 53};
  const std::vector<uint32_t> u32 = {UINT32_MAX};
  const std::vector<uint16_t> u16 = {UINT16_MAX};
  const std::vector<uint8_t> u8 = {255, 7, 1}, truth = {0, 1}, f8 = {0x7f};
  const std::vector<SafetensorsTensor> tensors = {
      make("u8", "U8", {3}, u8),           make("bool", "BOOL", {1, 2}, truth), make("bf16", "BF16", {2}, bf16),
      make("f16", "F16", {2, 1}, f16),     make("f64", "F64", {2, 2}, f64),     make("f32", "F32", {3}, f32),
      make("i64", "I64", {2}, i64),        make("i32", "I32", {2}, i32),        make("i16", "I16", {2}, i16),
      make("i8", "I8", {2}, i8),           make("u64", "U64", {2}, u64),        make("u32", "U32", {}, u32),
      make("u16", "U16", {1}, u16),        make("f8", "F8_E4M3", {1}, f8),      {"none", "F32", {0, 5}, nullptr},
      make("\xc3\xa9\n\"", "U8", {3}, u8),
  };
  ASSERT_TRUE(write_safetensors(path, tensors, {{"mechanism", "softmax"}, {"note", "a\n\"\xc3\xa9"}}).ok());
  SafetensorsFile opened;
  const Status status = SafetensorsFile::open(path, opened);
  ASSERT_TRUE(status.ok()) << status.message();
  ASSERT_EQ(opened.size(), tensors.size());
  const std::vector<std::pair<std::string, std::string>> metadata = {
      {"format", "pt"}, {"mechanism", "softmax"}, {"note", "a\n\"\xc3\xa9"}};
  EXPECT_EQ(opened.metadata(), metadata);
  EXPECT_EQ(opened.metadata("mechanism"), "softmax");
  EXPECT_EQ(opened.metadata("missing"), "");

  const std::vector<std::string> names = opened.names();
  EXPECT_TRUE(std::is_sorted(names.begin(), names.end()));
  uint64_t total = 0;
  for (const SafetensorsTensor& t : tensors) {
    SafetensorsEntry entry;
    ASSERT_TRUE(opened.find(t.name, entry).ok()) << t.name;
    EXPECT_EQ(entry.name, t.name);
    EXPECT_EQ(entry.dtype, t.dtype) << t.name;
    EXPECT_EQ(entry.shape, t.shape) << t.name;
    EXPECT_EQ(entry.begin * 8 % static_cast<uint64_t>(safetensors_bits(t.dtype)), 0u) << t.name << " is not aligned";
    std::vector<unsigned char> raw;
    ASSERT_TRUE(opened.read_bytes(t.name, raw).ok()) << t.name;
    ASSERT_EQ(raw.size(), entry.bytes()) << t.name;
    EXPECT_TRUE(raw.empty() || std::memcmp(raw.data(), t.data, raw.size()) == 0) << t.name;
    EXPECT_EQ(entry.bytes() * 8, static_cast<uint64_t>(entry.elements() * safetensors_bits(t.dtype))) << t.name;
    total += raw.size();
  }
  uint64_t header_bytes = 0;
  std::string content;
  ASSERT_TRUE(read_file(path, 1 << 20, content).ok());
  std::memcpy(&header_bytes, content.data(), 8);
  EXPECT_EQ(header_bytes % 8, 0u);
  EXPECT_EQ(content.size(), 8 + header_bytes + total);
  EXPECT_EQ(content.substr(8, 53), "{\"__metadata__\":{\"format\":\"pt\",\"mechanism\":\"softmax\",");

  const auto f64_of = [&](const char* name) {
    std::vector<double> values;
    const Status s = opened.read_f64(name, values);
    EXPECT_TRUE(s.ok()) << s.message();
    EXPECT_TRUE(opened.check_finite(name).ok());
    return values;
  };
  const auto i64_of = [&](const char* name) {
    std::vector<int64_t> values;
    const Status s = opened.read_i64(name, values);
    EXPECT_TRUE(s.ok()) << s.message();
    return values;
  };
  EXPECT_EQ(f64_of("f64"), f64);
  EXPECT_EQ(f64_of("f32"), std::vector<double>(f32.begin(), f32.end()));
  EXPECT_EQ(f64_of("bf16"), (std::vector<double>{0.10009765625, -0x1p-133}));
  EXPECT_EQ(f64_of("f16"), (std::vector<double>{0.0999755859375, -0x1p-24}));
  EXPECT_EQ(f64_of("i64"), (std::vector<double>{-0x1p53, 0x1p53}));
  EXPECT_EQ(f64_of("i16"), (std::vector<double>{-32768, -1}));
  EXPECT_EQ(f64_of("u64"), (std::vector<double>{0, 0x1p53}));
  EXPECT_EQ(f64_of("bool"), (std::vector<double>{0, 1}));
  EXPECT_EQ(f64_of("none"), std::vector<double>());
  EXPECT_EQ(i64_of("i64"), i64);
  EXPECT_EQ(i64_of("i32"), (std::vector<int64_t>{INT32_MIN, INT32_MAX}));
  EXPECT_EQ(i64_of("i16"), (std::vector<int64_t>{INT16_MIN, -1}));
  EXPECT_EQ(i64_of("i8"), (std::vector<int64_t>{INT8_MIN, INT8_MAX}));
  EXPECT_EQ(i64_of("u64"), (std::vector<int64_t>{0, int64_t{1} << 53}));
  EXPECT_EQ(i64_of("u32"), (std::vector<int64_t>{UINT32_MAX}));
  EXPECT_EQ(i64_of("u16"), (std::vector<int64_t>{UINT16_MAX}));
  EXPECT_EQ(i64_of("u8"), (std::vector<int64_t>{255, 7, 1}));
  EXPECT_EQ(i64_of("bool"), (std::vector<int64_t>{0, 1}));

  std::vector<double> values = {5};
  EXPECT_EQ(opened.read_f64("f8", values).message(), path + ": tensor \"f8\": values of dtype F8_E4M3 cannot be read");
  EXPECT_EQ(opened.read_f64("q", values).message(), path + ": has no tensor \"q\"");
  const SafetensorsEntry foreign = {"x", "U8", {1}, total, total + 1};
  EXPECT_EQ(opened.read_bytes(foreign, &values).message(), path + ": tensor \"x\": is not an entry of this file");
  std::vector<int64_t> integers = {5};
  EXPECT_EQ(opened.read_i64("f32", integers).message(), path + ": tensor \"f32\": has dtype F32, expected integers");
  EXPECT_EQ(values, std::vector<double>{5});
  EXPECT_EQ(integers, std::vector<int64_t>{5});
}

TEST(Safetensors, ValuesThatAreRefused) {
  const Folder folder;
  const std::string path = folder / "values.safetensors";
  std::vector<float> long_one(40000, 1.0f);  // more than one piece of 64 KiB
  long_one[39999] = NAN;
  const std::vector<uint16_t> infinity = {0x3c00, 0xfc00};
  const std::vector<double> fine = {1, INFINITY};
  const std::vector<int64_t> big = {1, (int64_t{1} << 53) + 1};
  const std::vector<uint64_t> huge = {1, uint64_t{1} << 63};
  const std::vector<uint8_t> truth = {1, 2};
  ASSERT_TRUE(write_safetensors(path, {make("nan", "F32", {40000}, long_one), make("inf", "F16", {2}, infinity),
                                       make("f64", "F64", {2}, fine), make("big", "I64", {2}, big),
                                       make("huge", "U64", {2}, huge), make("bool", "BOOL", {2}, truth)})
                  .ok());
  SafetensorsFile f;
  ASSERT_TRUE(SafetensorsFile::open(path, f).ok());
  std::vector<double> values;
  std::vector<int64_t> integers;
  const std::string t = path + ": tensor ";
  EXPECT_EQ(f.read_f64("nan", values).message(), t + "\"nan\": element 39999 is not finite");
  EXPECT_EQ(f.check_finite("nan").message(), t + "\"nan\": element 39999 is not finite");
  EXPECT_EQ(f.check_finite("inf").message(), t + "\"inf\": element 1 is not finite");
  EXPECT_EQ(f.check_finite("f64").message(), t + "\"f64\": element 1 is not finite");
  EXPECT_TRUE(f.check_finite("big").ok());
  EXPECT_EQ(f.read_f64("big", values).message(), t + "\"big\": element 1 is beyond 2^53, where doubles skip integers");
  EXPECT_EQ(f.read_f64("huge", values).message(), t + "\"huge\": element 1 is above 2^63 - 1");
  EXPECT_EQ(f.read_i64("huge", integers).message(), t + "\"huge\": element 1 is above 2^63 - 1");
  EXPECT_EQ(f.read_i64("bool", integers).message(), t + "\"bool\": element 1 is a BOOL other than 0 and 1");
  EXPECT_TRUE(values.empty() && integers.empty());
  ASSERT_TRUE(f.read_f64("nan", values, ReadValues::any).ok());
  EXPECT_EQ(values.size(), 40000u);
  EXPECT_EQ(values[39998], 1.0);
  EXPECT_TRUE(std::isnan(values[39999]));
  ASSERT_TRUE(f.read_f64("inf", values, ReadValues::any).ok());
  EXPECT_EQ(values, (std::vector<double>{1, -INFINITY}));
}

TEST(Safetensors, UnalignedTensorsAreCopied) {
  const MemoryFile memory;
  const std::string path = memory.path();
  const double values[] = {1.5, -2.5};
  const std::string header = "{" + tensor("a", "U8", "[1]", "[0,1]") + "," + tensor("b", "F64", "[2]", "[1,17]") + "}";
  for (size_t shift = 0; shift < 8; ++shift) {
    memory.put(file(header + std::string(shift, ' '), 1) + std::string(reinterpret_cast<const char*>(values), 16));
    SafetensorsFile f;
    const Status status = SafetensorsFile::open(path, f);
    ASSERT_TRUE(status.ok()) << status.message();
    std::vector<double> read;
    ASSERT_TRUE(f.read_f64("b", read).ok());
    EXPECT_EQ(read, (std::vector<double>{1.5, -2.5}));
  }
}

TEST(Safetensors, DtypesAndViews) {
  for (const Dtype d : {Dtype::f64, Dtype::f32, Dtype::bf16, Dtype::f16, Dtype::i64, Dtype::i32, Dtype::u8}) {
    EXPECT_EQ(dtype_of_safetensors(safetensors_name(d)), d);
    EXPECT_EQ(safetensors_bits(safetensors_name(d)), 8 * dtype_size(d));
  }
  EXPECT_EQ(dtype_of_safetensors("BOOL"), Dtype::u8);
  EXPECT_EQ(dtype_of_safetensors("F8_E5M2"), Dtype::none);
  EXPECT_STREQ(safetensors_name(Dtype::none), "");
  EXPECT_EQ(safetensors_bits("F128"), 0);
  const double data[6] = {};
  View view;
  ASSERT_TRUE((SafetensorsEntry{"q", "F64", {2, 3}, 0, 48}).view(data, Dtype::f64, view).ok());
  EXPECT_EQ(view.data, data);
  EXPECT_EQ(view.rank, 2);
  EXPECT_EQ(view.size[1], 3);
  EXPECT_EQ(view.stride[0], 3);
  EXPECT_EQ((SafetensorsEntry{"q", "U8", std::vector<int64_t>(9, 1), 0, 1}).view(data, Dtype::u8, view).message(),
            "tensor \"q\": has 9 dimensions, at most 8 can be used");
}

// ---- Writing

TEST(SafetensorsWriter, RefusesWhatTheReaderWould) {
  const float x[4] = {};
  const SafetensorsTensor good = {"w", "F32", {4}, x};
  struct Case {
    std::vector<SafetensorsTensor> tensors;
    std::vector<std::pair<std::string, std::string>> metadata;
    const char* message;
  };
  const Case cases[] = {
      {{{"", "F32", {4}, x}}, {}, ": tensor \"\": the name is empty"},
      {{{"__metadata__", "F32", {4}, x}}, {}, ": tensor \"__metadata__\": the name is reserved"},
      {{{"a\xff", "F32", {4}, x}}, {}, ": tensor \"a\xef\xbf\xbd\": the name is not UTF-8"},
      {{{"w", "F128", {1}, x}}, {}, ": tensor \"w\": unknown dtype \"F128\""},
      {{{"w", "F32", {-4, -1}, x}}, {}, ": tensor \"w\": shape [-4, -1] has a negative dimension"},
      {{{"w", "F32", std::vector<int64_t>(17, 1), x}}, {}, ": tensor \"w\": shape has more than 16 dimensions"},
      {{{"w", "F32", {int64_t{1} << 62, 4}, x}},
       {},
       ": tensor \"w\": the product of its dimensions and element size overflows 64 bits"},
      {{{"w", "F4", {3}, x}}, {}, ": tensor \"w\": its elements do not fill a whole number of bytes"},
      {{{"w", "F32", {4}, nullptr}}, {}, ": tensor \"w\": no data"},
      {{good, good}, {}, ": header: duplicate key \"w\" at byte 86"},
      {{good}, {{"a", "1"}, {"a", "2"}}, ": header: in \"__metadata__\": duplicate key \"a\" at byte 39"},
      {{good}, {{"a", "\x80"}}, ": metadata \"a\" is not UTF-8"},
  };
  const Folder folder;
  const std::string path = folder / "out.safetensors";
  put(path, "before");
  for (const Case& c : cases) EXPECT_EQ(write_safetensors(path, c.tensors, c.metadata).message(), path + c.message);
  EXPECT_EQ(write_safetensors(path, {{repeat("n", 4097), "F32", {4}, x}}).message(),
            path + ": tensor \"" + repeat("n", 100) + "...\": the name has more than 4096 bytes");
  std::string content;
  ASSERT_TRUE(read_file(path, 100, content).ok());
  EXPECT_EQ(content, "before");  // a failed write loses nothing
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), fs::directory_iterator()), 1);

  EXPECT_EQ(write_safetensors(folder / "no/such/place", {good}).message(),
            folder / "no/such/place: cannot be written: No such file or directory");
  EXPECT_EQ(write_safetensors(folder.path(), {good}).message(), folder.path() + ": cannot be written: it is a directory");
  EXPECT_EQ(write_safetensors("/dev/null", {good}).message(), "/dev/null: cannot be written: it is not a regular file");
  ASSERT_TRUE(write_safetensors(path, {good}, {{"format", "linnet"}}).ok());
  SafetensorsFile f;
  ASSERT_TRUE(SafetensorsFile::open(path, f).ok());
  EXPECT_EQ(f.metadata("format"), "linnet");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), fs::directory_iterator()), 1);  // no temporary file stays
}

// ---- Whatever opens is sound

void expect_sound(const SafetensorsFile& f, uint64_t file_bytes, const std::string& what) {
  const std::vector<std::string> names = f.names();
  ASSERT_EQ(names.size(), f.size()) << what;
  std::vector<std::pair<uint64_t, uint64_t>> spans;
  for (size_t i = 0; i < names.size(); ++i) {
    ASSERT_TRUE(i == 0 || names[i - 1] < names[i]) << what;
    SafetensorsEntry entry;
    ASSERT_TRUE(f.find(names[i], entry).ok()) << what;
    ASSERT_EQ(entry.name, names[i]) << what;
    ASSERT_EQ(entry.bytes() * 8, static_cast<uint64_t>(entry.elements()) * static_cast<uint64_t>(safetensors_bits(entry.dtype)))
        << what;
    spans.emplace_back(entry.begin, entry.end);
    std::vector<unsigned char> raw;
    ASSERT_TRUE(f.read_bytes(names[i], raw).ok()) << what;
    std::vector<double> values;
    const bool f64 = f.read_f64(names[i], values, ReadValues::any).ok();
    ASSERT_EQ(static_cast<int64_t>(values.size()), f64 ? entry.elements() : 0) << what;
    std::vector<int64_t> integers;
    const bool i64 = f.read_i64(names[i], integers).ok();
    ASSERT_EQ(static_cast<int64_t>(integers.size()), i64 ? entry.elements() : 0) << what;
  }
  std::sort(spans.begin(), spans.end());
  uint64_t filled = 0;
  for (const auto& [begin, end] : spans) {
    ASSERT_EQ(begin, filled) << what;
    filled = end;
  }
  ASSERT_LE(filled, file_bytes) << what;
  for (const auto& [key, value] : f.metadata()) ASSERT_EQ(f.metadata(key), value) << what;
}

TEST(Safetensors, TheVectorsOpenAndAddUp) {
  int files = 0;
  for (const auto& item : fs::directory_iterator(LINNET_SOURCE_DIR "/tests/vectors")) {
    if (item.path().extension() != ".safetensors") continue;
    ++files;
    const std::string path = item.path().string(), name = item.path().filename().string();
    SafetensorsFile f;
    const Status status = SafetensorsFile::open(path, f);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(f.metadata("mechanism"), name.substr(0, name.find('-'))) << name;
    EXPECT_NE(f.metadata("operator"), "") << name;
    EXPECT_GT(f.size(), 0u) << name;
    expect_sound(f, item.file_size(), name);
    uint64_t total = 0;
    std::vector<double> values;
    for (const std::string& t : f.names()) {
      SafetensorsEntry entry;
      ASSERT_TRUE(f.find(t, entry).ok());
      EXPECT_TRUE(f.read_f64(t, values, ReadValues::any).ok()) << name << " " << t;
      total += entry.bytes();
    }
    uint64_t header_bytes = 0;
    InputFile in;
    ASSERT_TRUE(InputFile::open(path, in).ok());
    ASSERT_TRUE(in.read(0, 8, &header_bytes).ok());
    EXPECT_EQ(8 + header_bytes + total, item.file_size()) << name;
  }
  EXPECT_GE(files, 70);
}

std::string small_file() {
  const std::string header = "{\"__metadata__\":{\"format\":\"pt\",\"k\":\"v\"}," + tensor("q", "F64", "[1,2]", "[0,16]") +
                             "," + tensor("bias", "BF16", "[]", "[16,18]") + "," + tensor("z", "I32", "[0,3]", "[18,18]") +
                             "," + tensor("mask", "BOOL", "[3]", "[18,21]") + "}";
  return file(header + std::string((8 - header.size() % 8) % 8, ' '), 21);
}

TEST(Safetensors, NoTruncatedFileOpens) {
  const MemoryFile memory;
  const std::string path = memory.path(), whole = small_file();
  SafetensorsFile f;
  memory.put(whole);
  const Status status = SafetensorsFile::open(path, f);
  ASSERT_TRUE(status.ok()) << status.message();
  expect_sound(f, whole.size(), "whole");
  for (size_t n = 0; n < whole.size(); ++n) {
    memory.put(whole.substr(0, n));
    SafetensorsFile cut;
    EXPECT_FALSE(SafetensorsFile::open(path, cut).ok()) << n;
  }
}

TEST(Safetensors, MutatedFilesNeverMislead) {
  const MemoryFile memory;
  const std::string path = memory.path(), seed = small_file();
  const std::string pieces[] = {"0",       "1",    "9",    "-",        ".",  "e",    "\"",
                                "{",       "}",    "[",    "]",        ",",  ":",    " ",
                                "\\u0071", "q",    "F64",  "F4",       "I8", "BOOL", "9223372036854775807",
                                "\xff",    "\x80", "null", "\"q\":{},"};
  std::mt19937 random(1);
  int opened = 0;
  for (int round = 0; round < 4000; ++round) {
    std::string content = seed;
    for (unsigned edits = 1 + random() % 3; edits > 0; --edits) {
      const size_t at = random() % content.size();
      const std::string& piece = pieces[random() % std::size(pieces)];
      switch (random() % 5) {
        case 0: content[at] = static_cast<char>(random()); break;
        case 1: content.replace(at, piece.size(), piece); break;
        case 2: content.insert(at, piece); break;
        case 3: content.erase(at, 1 + random() % 4); break;
        default: content += content.substr(at, random() % 32); break;
      }
      if (random() % 2) {  // repair the length, so that later rules are reached: the buffer stays 21 bytes
        const uint64_t header_bytes = content.size() - 8 - 21;
        content.replace(0, 8, le64(header_bytes));
      }
    }
    memory.put(content);
    SafetensorsFile f;
    if (!SafetensorsFile::open(path, f).ok()) continue;
    ++opened;
    expect_sound(f, content.size(), "round " + std::to_string(round));
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(opened, 100);  // both outcomes are tested
  EXPECT_LT(opened, 3000);
}

TEST(Safetensors, MemoryStaysBelowTheFileAndAConstant) {
  const MemoryFile memory;
  const std::string path = memory.path();
  std::string tensors = "{", ones = "[1", keys = "{\"__metadata__\":{";
  constexpr size_t kCount = 20000;
  for (size_t i = 0; i < kCount; ++i)
    tensors += (i ? "," : "") + tensor(std::to_string(i), "U8", "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,0]", "[0,0]");
  for (size_t i = 0; i < kCount; ++i) keys += (i ? ",\"" : "\"") + std::to_string(i) + "\":\"\"";
  for (size_t i = 0; i < 500000; ++i) ones += ",1";
  struct Case {
    const char* name;
    std::string content;
    size_t members;  // that are kept track of at the same time
    bool opens;
  };
  const Case cases[] = {
      {"many tensors", file(tensors + "}"), kCount, true},
      {"much metadata", file(keys + "}}"), kCount, true},
      {"long shape", file("{\"w\":{\"dtype\":\"U8\",\"shape\":" + ones + "]}}"), 3, false},
      {"long text", file("{\"" + repeat("\\u0061", 100000) + "\":0}"), 1, false},
      {"long number", file("{\"w\":{\"dtype\":\"U8\",\"data_offsets\":[0,0],\"shape\":[" + repeat("9", 500000) + "]}}"), 3,
       false},
      {"header length without a header", le64(kMaxHeaderBytes) + "{}", 0, false},
      {"offsets without a buffer", file(one("U8", "[1099511627776]", "[0,1099511627776]")), 0, false},
  };
  for (const Case& c : cases) {
    memory.put(c.content);
    SafetensorsFile f;
    const int64_t before = live_bytes;
    peak_bytes = before;
    const bool ok = SafetensorsFile::open(path, f).ok();
    const int64_t most = static_cast<int64_t>(c.content.size() + 36 * c.members + 16384);
    EXPECT_LE(peak_bytes - before, most) << c.name << ": file of " << c.content.size();
    EXPECT_EQ(ok, c.opens) << c.name;
  }
}

}  // namespace
}  // namespace linnet
