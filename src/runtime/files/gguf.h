// GGUF: one file with weights, often quantised in blocks, and metadata that describes model, tokeniser and chat template.
//
//   GgufFile file;
//   LINNET_TRY(GgufFile::open("model.gguf", file));
//   int64_t layers = 0;
//   if (!file.find("llama.block_count").integer(layers)) return bad_input(...);
//   const GgufTensor* t = file.tensor("blk.0.attn_q.weight");          // type, shape [rows, columns], data in the mapped file
//   dequantize(t->type, t->data, t->elements(), out);                  // runtime/files/dequantize.h
//
// Layout, little-endian, versions 2 and 3: "GGUF", u32 version, u64 tensors, u64 pairs; pairs of key, u32 type, value; tensor
// descriptions (name, u32 rank, u64 sizes with the fastest first, u32 type, u64 offset); padding; data. open() checks all of it
// against the file's size and keeps 64 bytes per pair and 96 per tensor, of which the limits below bound the number. Names,
// texts and data are pieces of the mapped file. Messages read `<file>: <what>`.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"
#include "runtime/files/mapped_file.h"

namespace linnet {

inline constexpr uint64_t kMaxGgufPairs = uint64_t{1} << 16;
inline constexpr uint64_t kMaxGgufTensors = uint64_t{1} << 16;
inline constexpr uint64_t kMaxGgufNameBytes = 4096;
inline constexpr uint32_t kMaxGgufRank = 4;
inline constexpr uint32_t kMaxGgufAlignment = 1u << 16;

// The numbers are the format's own.
enum class GgufType : uint32_t {
  f32 = 0,
  f16 = 1,
  q4_0 = 2,
  q4_1 = 3,
  q5_0 = 6,
  q8_0 = 8,
  q4_k = 12,
  q5_k = 13,
  q6_k = 14,
  bf16 = 30,
};
struct GgufTypeInfo {
  GgufType type;
  const char* name;     // "Q4_K"
  int64_t block;        // elements of a block
  int64_t block_bytes;  // its bytes
};
const GgufTypeInfo* gguf_type_info(uint32_t type);  // null: not one of ours
const char* gguf_type_name(uint32_t type);          // of every type of the format: "IQ2_XS"; "?" when unknown

// One metadata value: a piece of the checked file. Accessors of the wrong kind give false.
class GgufValue {
 public:
  enum class Kind : uint32_t { u8, i8, u16, i16, u32, i32, f32, boolean, text, array, u64, i64, f64, none = 255 };

  GgufValue() = default;
  GgufValue(Kind kind, const unsigned char* data) : kind_(kind), data_(data) {}
  GgufValue(Kind element, uint64_t count, const unsigned char* data)
      : kind_(Kind::array), element_(element), count_(count), data_(data) {}
  bool given() const { return kind_ != Kind::none; }
  Kind kind() const { return kind_; }
  Kind element() const { return element_; }  // of an array
  uint64_t size() const { return count_; }   // of an array
  bool text(std::string_view& out) const;
  bool integer(int64_t& out) const;  // any integer type that fits
  bool real(double& out) const;      // any number
  bool boolean(bool& out) const;
  bool texts(std::vector<std::string_view>& out) const;
  bool integers(std::vector<int64_t>& out) const;
  bool reals(std::vector<double>& out) const;

 private:
  Kind kind_ = Kind::none, element_ = Kind::none;
  uint64_t count_ = 0;
  const unsigned char* data_ = nullptr;
};

struct GgufTensor {
  std::string_view name;
  GgufType type = GgufType::f32;
  int rank = 0;
  int64_t shape[kMaxGgufRank] = {};  // the slowest first, as everywhere else in Linnet
  const unsigned char* data = nullptr;
  uint64_t bytes = 0;

  int64_t elements() const;
};

class GgufFile {
 public:
  static Status open(const std::string& path, GgufFile& out);
  const std::string& path() const { return file_.path(); }
  uint64_t bytes() const { return file_.size(); }
  GgufValue find(std::string_view key) const;
  const std::vector<GgufTensor>& tensors() const { return tensors_; }  // sorted by name
  const GgufTensor* tensor(std::string_view name) const;

 private:
  Status read();
  Status fail(const std::string& reason) const { return bad_input(file_.path() + ": " + reason); }

  struct Pair {
    std::string_view key;
    GgufValue value;
  };
  MappedFile file_;
  std::vector<Pair> pairs_;          // sorted by key
  std::vector<GgufTensor> tensors_;  // sorted by name
};

}  // namespace linnet
