// safetensors: named tensors in one file, read without trusting the file.
//
//   SafetensorsFile file;
//   LINNET_TRY(SafetensorsFile::open("case.safetensors", file));
//   SafetensorsEntry q;
//   LINNET_TRY(file.find("q", q));                                    // {name, dtype "F64", shape [B, T, H, K], begin, end}
//   std::vector<double> values;
//   LINNET_TRY(file.read_f64("q", values));                           // any number type; refuses NaN and infinity
//
// The format: 8 bytes little-endian N; N bytes of JSON; the buffer. The JSON is one object with an entry
// name -> {"dtype", "shape", "data_offsets": [begin, end]} for each tensor, offsets counted from the start of the buffer, and
// optionally "__metadata__": string -> string. Row-major, little-endian.
//
// open() checks everything about the layout and leaves the values alone. It keeps the header's text and 4 bytes per tensor;
// while it checks it needs 32 more bytes per tensor, of which there are at most kMaxTensors. What a call returns (names, an
// entry, values) is made for that call. Errors read `<file>: tensor "<name>": <reason>`. Reading is safe from many threads.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/files/file.h"
#include "core/files/json.h"
#include "core/status.h"
#include "core/view.h"

namespace linnet {

inline constexpr uint64_t kMaxHeaderBytes = 100'000'000;
inline constexpr int kMaxHeaderDepth = 4;
inline constexpr uint64_t kMaxTensors = uint64_t{1} << 20;
inline constexpr uint64_t kMaxTensorNameBytes = 4096;
inline constexpr uint64_t kMaxTensorRank = 16;

// The format's own dtypes. Ours are a part of them: F64 F32 BF16 F16 I64 I32 U8; BOOL is read as u8. none: no Dtype fits.
Dtype dtype_of_safetensors(std::string_view name);
const char* safetensors_name(Dtype dtype);    // "F64", ...; "" for none
int safetensors_bits(std::string_view name);  // of one element; 0 for an unknown name

struct SafetensorsEntry {
  std::string name;
  std::string dtype;  // as in the file: "F64", "BOOL", "F8_E4M3", ...
  std::vector<int64_t> shape;
  uint64_t begin = 0, end = 0;  // bytes within the buffer

  uint64_t bytes() const { return end - begin; }
  int64_t elements() const;  // cannot overflow in an entry that open() accepted
  // A dense view of `data`, which holds this tensor converted to `type`; refused when the rank is above kMaxRank.
  Status view(const void* data, Dtype type, View& out) const;
};

enum class ReadValues { finite, any };  // whether reading refuses NaN and infinities

class SafetensorsFile {
 public:
  static Status open(const std::string& path, SafetensorsFile& out);

  const std::string& path() const { return file_.path(); }
  size_t size() const { return order_.size(); }  // number of tensors
  std::vector<std::string> names() const;        // sorted by bytes
  SafetensorsEntry entry(size_t i) const;        // i < size(), in the order of names()
  bool has(std::string_view name) const;
  Status find(std::string_view name, SafetensorsEntry& out) const;
  std::vector<std::pair<std::string, std::string>> metadata() const;  // in the file's order
  std::string metadata(std::string_view key) const;                   // empty when absent

  // The bytes as they are in the file. The first form needs room for exactly entry.bytes().
  Status read_bytes(const SafetensorsEntry& entry, void* out) const;
  Status read_bytes(std::string_view name, std::vector<unsigned char>& out) const;
  // Floats, integers and BOOL (0 or 1) as double. An integer that is no double (beyond 2^53) is refused.
  Status read_f64(std::string_view name, std::vector<double>& out, ReadValues values = ReadValues::finite) const;
  // Integers and BOOL as int64_t. Floats are refused, and so is U64 beyond 2^63 - 1.
  Status read_i64(std::string_view name, std::vector<int64_t>& out) const;
  // Whether every value is finite, 64 KiB at a time; tensors that are not floats pass.
  Status check_finite(std::string_view name) const;

 private:
  friend class SafetensorsModel;
  Status open_checked(const std::string& path);
  Status check_header(uint64_t header_bytes);
  Status check_layout(std::vector<struct SafetensorsSpan>& spans) const;
  Status read_entry(const JsonValue& key, const JsonValue& value, SafetensorsEntry& out) const;
  JsonValue name_value(size_t i) const { return JsonItems::key_at(header_, order_[i]); }
  size_t lower_bound(std::string_view name) const;
  Status fail(const JsonValue& name, const std::string& reason) const;
  Status fail(const SafetensorsEntry& entry, const std::string& reason) const;
  template <class Use>
  Status read_pieces(const SafetensorsEntry& entry, uint64_t element_bytes, const Use& use) const;

  InputFile file_;
  std::unique_ptr<char[]> text_;  // the header as read; header_ and metadata_ point into it
  uint64_t buffer_begin_ = 0;     // in the file
  uint64_t buffer_bytes_ = 0;
  JsonValue header_, metadata_;
  std::vector<uint32_t> order_;  // offsets of the tensors' keys in header_, sorted by name
};

struct SafetensorsTensor {
  std::string name;
  std::string dtype;  // "F32", ...
  std::vector<int64_t> shape;
  const void* data = nullptr;  // dense, row-major, little-endian
};

// Writes a file that open() accepts: under a temporary name, then renamed. Entries stand in the order of element size (largest
// first), then name, so that every tensor is aligned to its element; the header is padded to a multiple of 8. "format": "pt",
// which other tools ask for, is added to the metadata unless that has a "format" already.
Status write_safetensors(const std::string& path, const std::vector<SafetensorsTensor>& tensors,
                         const std::vector<std::pair<std::string, std::string>>& metadata = {});

}  // namespace linnet
