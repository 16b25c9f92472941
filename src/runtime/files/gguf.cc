#include "runtime/files/gguf.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/files/json.h"

namespace linnet {

namespace {

constexpr GgufTypeInfo kTypes[] = {
    {GgufType::f32, "F32", 1, 4},       {GgufType::f16, "F16", 1, 2},       {GgufType::bf16, "BF16", 1, 2},
    {GgufType::q4_0, "Q4_0", 32, 18},   {GgufType::q4_1, "Q4_1", 32, 20},   {GgufType::q5_0, "Q5_0", 32, 22},
    {GgufType::q8_0, "Q8_0", 32, 34},   {GgufType::q4_k, "Q4_K", 256, 144}, {GgufType::q5_k, "Q5_K", 256, 176},
    {GgufType::q6_k, "Q6_K", 256, 210},
};
// Types of the format that have no reader here, for the sentence that says so.
constexpr std::pair<uint32_t, const char*> kOtherTypes[] = {
    {7, "Q5_1"},    {9, "Q8_1"},     {10, "Q2_K"},  {11, "Q3_K"},   {15, "Q8_K"},  {16, "IQ2_XXS"},
    {17, "IQ2_XS"}, {18, "IQ3_XXS"}, {19, "IQ1_S"}, {20, "IQ4_NL"}, {21, "IQ3_S"}, {22, "IQ2_S"},
    {23, "IQ4_XS"}, {24, "I8"},      {25, "I16"},   {26, "I32"},    {27, "I64"},   {28, "F64"},
    {29, "IQ1_M"},  {34, "TQ1_0"},   {35, "TQ2_0"}, {39, "MXFP4"},
};

template <class T>
T load(const unsigned char* at) {
  T value;
  std::memcpy(&value, at, sizeof value);  // nothing in the file is aligned
  return value;
}

int64_t kind_bytes(GgufValue::Kind kind) {  // 0: texts and arrays have no fixed size
  using Kind = GgufValue::Kind;
  switch (kind) {
    case Kind::u8:
    case Kind::i8:
    case Kind::boolean: return 1;
    case Kind::u16:
    case Kind::i16: return 2;
    case Kind::u32:
    case Kind::i32:
    case Kind::f32: return 4;
    case Kind::u64:
    case Kind::i64:
    case Kind::f64: return 8;
    default: return 0;
  }
}

bool load_integer(GgufValue::Kind kind, const unsigned char* at, int64_t& out) {
  using Kind = GgufValue::Kind;
  switch (kind) {
    case Kind::u8: out = load<uint8_t>(at); return true;
    case Kind::i8: out = load<int8_t>(at); return true;  // NOLINT(bugprone-signed-char-misuse): a number, no letter
    case Kind::u16: out = load<uint16_t>(at); return true;
    case Kind::i16: out = load<int16_t>(at); return true;
    case Kind::u32: out = load<uint32_t>(at); return true;
    case Kind::i32: out = load<int32_t>(at); return true;
    case Kind::i64: out = load<int64_t>(at); return true;
    case Kind::u64: out = load<int64_t>(at); return out >= 0;
    default: return false;
  }
}

bool load_real(GgufValue::Kind kind, const unsigned char* at, double& out) {
  if (kind == GgufValue::Kind::f32) return out = load<float>(at), true;
  if (kind == GgufValue::Kind::f64) return out = load<double>(at), true;
  int64_t whole = 0;
  if (!load_integer(kind, at, whole)) return false;
  return out = static_cast<double>(whole), true;
}

// Reads forward through the file. Once something did not fit, every further read fails.
class Reader {
 public:
  Reader(const unsigned char* data, uint64_t size) : data_(data), size_(size) {}
  uint64_t at() const { return at_; }
  uint64_t left() const { return size_ - at_; }
  template <class T>
  bool number(T& out) {
    if (left() < sizeof(T)) return false;
    out = load<T>(data_ + at_);
    at_ += sizeof(T);
    return true;
  }
  bool text(std::string_view& out) {
    uint64_t bytes = 0;
    if (!number(bytes) || bytes > left()) return false;
    out = {reinterpret_cast<const char*>(data_ + at_), static_cast<size_t>(bytes)};
    at_ += bytes;
    return true;
  }
  bool skip(uint64_t count, uint64_t bytes_each) {
    if (count > left() / bytes_each) return false;
    at_ += count * bytes_each;
    return true;
  }
  const unsigned char* here() const { return data_ + at_; }

 private:
  const unsigned char* data_;
  uint64_t size_, at_ = 0;
};

std::string quoted(std::string_view name) { return json_quote_short(name); }

// null, or why the value is wrong.
const char* read_value(Reader& in, uint32_t type, GgufValue& out) {
  using Kind = GgufValue::Kind;
  const char* const cut = "is cut off by the end of the file";
  if (type > static_cast<uint32_t>(Kind::f64)) return "has a type that the format does not know";
  const Kind kind = static_cast<Kind>(type);
  if (kind == Kind::text) {
    out = {kind, in.here()};
    std::string_view text;
    if (!in.text(text)) return cut;
    return find_invalid_utf8(text) == text.size() ? nullptr : "is not UTF-8";
  }
  if (kind != Kind::array) {
    out = {kind, in.here()};
    if (!in.skip(1, static_cast<uint64_t>(kind_bytes(kind)))) return cut;
    return kind == Kind::boolean && *(in.here() - 1) > 1 ? "is neither true nor false" : nullptr;
  }
  uint32_t element_type = 0;
  uint64_t count = 0;
  if (!in.number(element_type) || !in.number(count)) return cut;
  if (element_type > static_cast<uint32_t>(Kind::f64)) return "is an array of a type that the format does not know";
  const Kind element = static_cast<Kind>(element_type);
  if (element == Kind::array) return "is an array of arrays, which is not supported";
  out = {element, count, in.here()};
  if (element == Kind::text) {
    if (count > in.left() / 8) return cut;
    // Pieces of tokens need not be UTF-8.
    for (uint64_t i = 0; i < count; ++i) {
      std::string_view text;
      if (!in.text(text)) return cut;
    }
    return nullptr;
  }
  return in.skip(count, static_cast<uint64_t>(kind_bytes(element))) ? nullptr : cut;
}

}  // namespace

const GgufTypeInfo* gguf_type_info(uint32_t type) {
  for (const GgufTypeInfo& info : kTypes) {
    if (static_cast<uint32_t>(info.type) == type) return &info;
  }
  return nullptr;
}

const char* gguf_type_name(uint32_t type) {
  if (const GgufTypeInfo* info = gguf_type_info(type)) return info->name;
  for (const auto& [number, name] : kOtherTypes) {
    if (number == type) return name;
  }
  return "?";
}

bool GgufValue::text(std::string_view& out) const {
  if (kind_ != Kind::text) return false;
  out = {reinterpret_cast<const char*>(data_ + 8), static_cast<size_t>(load<uint64_t>(data_))};
  return true;
}

bool GgufValue::integer(int64_t& out) const { return load_integer(kind_, data_, out); }
bool GgufValue::real(double& out) const { return load_real(kind_, data_, out); }
bool GgufValue::boolean(bool& out) const {
  if (kind_ != Kind::boolean) return false;
  out = *data_ != 0;
  return true;
}

bool GgufValue::texts(std::vector<std::string_view>& out) const {
  if (kind_ != Kind::array || element_ != Kind::text) return false;
  out.clear();
  out.reserve(count_);
  const unsigned char* at = data_;
  for (uint64_t i = 0; i < count_; ++i) {
    const uint64_t bytes = load<uint64_t>(at);
    out.emplace_back(reinterpret_cast<const char*>(at + 8), static_cast<size_t>(bytes));
    at += 8 + bytes;
  }
  return true;
}

bool GgufValue::integers(std::vector<int64_t>& out) const {
  if (kind_ != Kind::array || kind_bytes(element_) == 0) return false;
  out.resize(count_);
  for (uint64_t i = 0; i < count_; ++i) {
    if (!load_integer(element_, data_ + i * static_cast<uint64_t>(kind_bytes(element_)), out[i])) return false;
  }
  return true;
}

bool GgufValue::reals(std::vector<double>& out) const {
  if (kind_ != Kind::array || kind_bytes(element_) == 0) return false;
  out.resize(count_);
  for (uint64_t i = 0; i < count_; ++i) {
    if (!load_real(element_, data_ + i * static_cast<uint64_t>(kind_bytes(element_)), out[i])) return false;
  }
  return true;
}

int64_t GgufTensor::elements() const {
  int64_t n = 1;
  for (int i = 0; i < rank; ++i) n *= shape[i];
  return n;
}

Status GgufFile::open(const std::string& path, GgufFile& out) {
  GgufFile file;
  LINNET_TRY(MappedFile::open(path, file.file_));
  LINNET_TRY(file.read());
  out = std::move(file);
  return {};
}

Status GgufFile::read() {
  Reader in(file_.data(), file_.size());
  uint32_t magic = 0, version = 0;
  uint64_t tensor_count = 0, pair_count = 0;
  if (!in.number(magic) || magic != 0x46554747) return fail("not a GGUF file: it does not begin with 'GGUF'");
  if (!in.number(version)) return fail("is cut off within its header");
  if (version != 2 && version != 3) {
    const bool swapped = version != 0 && (version & 0xffff) == 0;
    return fail(swapped ? "is a big-endian GGUF file, which is not supported"
                        : "has GGUF version " + std::to_string(version) + ", expected 2 or 3");
  }
  if (!in.number(tensor_count) || !in.number(pair_count)) return fail("is cut off within its header");
  if (tensor_count > kMaxGgufTensors || pair_count > kMaxGgufPairs) {
    return fail("declares " + std::to_string(tensor_count) + " tensors and " + std::to_string(pair_count) +
                " metadata pairs, at most " + std::to_string(kMaxGgufTensors) + " are allowed");
  }

  for (uint64_t i = 0; i < pair_count; ++i) {
    Pair pair;
    uint32_t type = 0;
    if (!in.text(pair.key) || !in.number(type)) {
      return fail("metadata pair " + std::to_string(i) + " is cut off by the end of the file");
    }
    if (pair.key.empty() || pair.key.size() > kMaxGgufNameBytes || find_invalid_utf8(pair.key) != pair.key.size()) {
      return fail("metadata pair " + std::to_string(i) + " has a key that is empty, too long or not UTF-8");
    }
    if (const char* why = read_value(in, type, pair.value)) return fail("metadata " + quoted(pair.key) + " " + why);
    pairs_.push_back(pair);
  }
  const auto by_key = [](const Pair& a, const Pair& b) { return a.key < b.key; };
  std::sort(pairs_.begin(), pairs_.end(), by_key);
  for (size_t i = 1; i < pairs_.size(); ++i) {
    if (pairs_[i - 1].key == pairs_[i].key) return fail("metadata " + quoted(pairs_[i].key) + " is given twice");
  }

  int64_t alignment = 32;
  if (const GgufValue value = find("general.alignment"); value.given()) {
    if (!value.integer(alignment) || alignment < 1 || alignment > kMaxGgufAlignment || (alignment & (alignment - 1)) != 0) {
      return fail("general.alignment is not a power of two from 1 to " + std::to_string(kMaxGgufAlignment));
    }
  }

  std::vector<uint64_t> offsets;
  for (uint64_t i = 0; i < tensor_count; ++i) {
    GgufTensor t;
    uint32_t rank = 0, type = 0;
    uint64_t offset = 0;
    if (!in.text(t.name) || !in.number(rank)) return fail("tensor " + std::to_string(i) + " is cut off by the end of the file");
    if (t.name.empty() || t.name.size() > kMaxGgufNameBytes || find_invalid_utf8(t.name) != t.name.size()) {
      return fail("tensor " + std::to_string(i) + " has a name that is empty, too long or not UTF-8");
    }
    const std::string name = "tensor " + quoted(t.name);
    if (rank > kMaxGgufRank) return fail(name + " has rank " + std::to_string(rank) + ", at most 4 is allowed");
    t.rank = static_cast<int>(rank);
    uint64_t elements = 1;
    for (int d = t.rank - 1; d >= 0; --d) {  // the file has the fastest first
      uint64_t size = 0;
      if (!in.number(size)) return fail(name + " is cut off by the end of the file");
      if (size > (uint64_t{1} << 48) || (size != 0 && elements > (uint64_t{1} << 48) / size)) {
        return fail(name + " is larger than any file");
      }
      elements *= size;
      t.shape[d] = static_cast<int64_t>(size);
    }
    if (!in.number(type) || !in.number(offset)) return fail(name + " is cut off by the end of the file");
    const GgufTypeInfo* info = gguf_type_info(type);
    if (info == nullptr) {
      return fail(name + " has type " + gguf_type_name(type) + " (number " + std::to_string(type) +
                  "), expected F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q4_K, Q5_K or Q6_K");
    }
    t.type = info->type;
    const int64_t row = t.rank == 0 ? 1 : t.shape[t.rank - 1];
    if (row % info->block != 0) {
      return fail(name + " has rows of " + std::to_string(row) + " elements, expected a multiple of " +
                  std::to_string(info->block) + " (" + info->name + ")");
    }
    // At most 2^48 elements of at most 4 bytes: no overflow.
    t.bytes = elements / static_cast<uint64_t>(info->block) * static_cast<uint64_t>(info->block_bytes);
    if (offset % static_cast<uint64_t>(alignment) != 0) {
      return fail(name + " begins at byte " + std::to_string(offset) + ", expected a multiple of " + std::to_string(alignment));
    }
    tensors_.push_back(t);
    offsets.push_back(offset);
  }

  const uint64_t padding =
      (static_cast<uint64_t>(alignment) - in.at() % static_cast<uint64_t>(alignment)) % static_cast<uint64_t>(alignment);
  if (padding > in.left() && tensor_count > 0) return fail("is cut off before its data");
  const uint64_t begin = in.at() + std::min(padding, in.left()), size = file_.size() - begin;
  std::vector<uint32_t> order(tensors_.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<uint32_t>(i);
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    return offsets[a] != offsets[b] ? offsets[a] < offsets[b] : tensors_[a].bytes < tensors_[b].bytes;
  });
  uint64_t end = 0;
  for (const uint32_t i : order) {
    GgufTensor& t = tensors_[i];
    const std::string name = "tensor " + quoted(t.name);
    if (offsets[i] > size || t.bytes > size - offsets[i]) {
      return fail(name + " ends behind the file's end: the file is cut off, or its description is wrong");
    }
    if (offsets[i] < end) return fail(name + " overlaps another tensor");
    end = offsets[i] + t.bytes;
    t.data = file_.data() + begin + offsets[i];
  }
  std::sort(tensors_.begin(), tensors_.end(), [](const GgufTensor& a, const GgufTensor& b) { return a.name < b.name; });
  for (size_t i = 1; i < tensors_.size(); ++i) {
    if (tensors_[i - 1].name == tensors_[i].name) return fail("tensor " + quoted(tensors_[i].name) + " is described twice");
  }
  return {};
}

GgufValue GgufFile::find(std::string_view key) const {
  const auto at =
      std::lower_bound(pairs_.begin(), pairs_.end(), key, [](const Pair& pair, std::string_view k) { return pair.key < k; });
  return at != pairs_.end() && at->key == key ? at->value : GgufValue();
}

const GgufTensor* GgufFile::tensor(std::string_view name) const {
  const auto at = std::lower_bound(tensors_.begin(), tensors_.end(), name,
                                   [](const GgufTensor& t, std::string_view n) { return t.name < n; });
  return at != tensors_.end() && at->name == name ? &*at : nullptr;
}

}  // namespace linnet
