#include "core/files/safetensors.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <new>
#include <tuple>

#include "core/half.h"

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian and read as they are");

namespace linnet {

struct SafetensorsSpan {  // of a tensor within the buffer, while the layout is checked
  uint64_t begin, end;
  uint32_t key_offset;
};

namespace {

using Kind = JsonValue::Kind;

enum class Numbers { floating, with_sign, without_sign, truth, other };

struct StoredDtype {
  const char* name;
  int bits;
  Dtype dtype;      // none: no view of ours can have it
  Numbers numbers;  // other: sizes and bytes are known, values are not read
};

constexpr StoredDtype kStoredDtypes[] = {
    {"F64", 64, Dtype::f64, Numbers::floating},      {"F32", 32, Dtype::f32, Numbers::floating},
    {"BF16", 16, Dtype::bf16, Numbers::floating},    {"F16", 16, Dtype::f16, Numbers::floating},
    {"I64", 64, Dtype::i64, Numbers::with_sign},     {"I32", 32, Dtype::i32, Numbers::with_sign},
    {"I16", 16, Dtype::none, Numbers::with_sign},    {"I8", 8, Dtype::none, Numbers::with_sign},
    {"U64", 64, Dtype::none, Numbers::without_sign}, {"U32", 32, Dtype::none, Numbers::without_sign},
    {"U16", 16, Dtype::none, Numbers::without_sign}, {"U8", 8, Dtype::u8, Numbers::without_sign},
    {"BOOL", 8, Dtype::u8, Numbers::truth},          {"C64", 64, Dtype::none, Numbers::other},
    {"F8_E5M2", 8, Dtype::none, Numbers::other},     {"F8_E4M3", 8, Dtype::none, Numbers::other},
    {"F8_E8M0", 8, Dtype::none, Numbers::other},     {"F8_E4M3FNUZ", 8, Dtype::none, Numbers::other},
    {"F8_E5M2FNUZ", 8, Dtype::none, Numbers::other}, {"F6_E2M3", 6, Dtype::none, Numbers::other},
    {"F6_E3M2", 6, Dtype::none, Numbers::other},     {"F4", 4, Dtype::none, Numbers::other},
};

const StoredDtype* stored_dtype(std::string_view name) {
  for (const StoredDtype& d : kStoredDtypes) {
    if (name == d.name) return &d;
  }
  return nullptr;
}

// The bytes of a dense tensor; a reason when there is no such number. Zero dimensions do not excuse the others: strides are
// products of them, and they must not overflow either.
const char* tensor_bytes(int bits, const std::vector<int64_t>& shape, uint64_t& bytes) {
  uint64_t total = static_cast<uint64_t>(bits);
  bool empty = false;
  for (const int64_t size : shape) {
    empty |= size == 0;
    if (size != 0 && __builtin_mul_overflow(total, static_cast<uint64_t>(size), &total)) {
      return "the product of its dimensions and element size overflows 64 bits";
    }
  }
  if (empty) total = 0;
  if (total % 8 != 0) return "its elements do not fill a whole number of bytes";
  bytes = total / 8;
  return nullptr;
}

std::string text(uint64_t n) { return std::to_string(n); }

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string out = "[";
  for (const int64_t size : shape) out += (out.size() > 1 ? ", " : "") + std::to_string(size);
  return out + "]";
}

std::string byte_text(char c) {
  char buffer[8];
  std::snprintf(buffer, sizeof buffer, "0x%02x", static_cast<unsigned>(static_cast<unsigned char>(c)));
  return buffer;
}

bool is_metadata(const JsonValue& key) { return key.equals("__metadata__"); }

bool ends_with_any(std::string_view s, std::initializer_list<std::string_view> endings) {
  return std::any_of(endings.begin(), endings.end(), [&](std::string_view e) { return s.ends_with(e); });
}

uint64_t load_bits(const unsigned char* at, uint64_t bytes) {
  uint64_t value = 0;
  std::memcpy(&value, at, bytes);
  return value;
}

// One integer or BOOL as int64_t, or why not.
const char* load_integer(const unsigned char* at, const StoredDtype& type, int64_t& out) {
  const uint64_t bits = load_bits(at, static_cast<uint64_t>(type.bits) / 8);
  const int unused = 64 - type.bits;
  out = type.numbers == Numbers::with_sign ? static_cast<int64_t>(bits << unused) >> unused : static_cast<int64_t>(bits);
  if (type.numbers == Numbers::without_sign && out < 0) return "is above 2^63 - 1";
  if (type.numbers == Numbers::truth && bits > 1) return "is a BOOL other than 0 and 1";
  return nullptr;
}

}  // namespace

Dtype dtype_of_safetensors(std::string_view name) {
  const StoredDtype* d = stored_dtype(name);
  return d ? d->dtype : Dtype::none;
}

const char* safetensors_name(Dtype dtype) {
  for (const StoredDtype& d : kStoredDtypes) {
    if (d.dtype == dtype && dtype != Dtype::none) return d.name;  // U8 stands before BOOL
  }
  return "";
}

int safetensors_bits(std::string_view name) {
  const StoredDtype* d = stored_dtype(name);
  return d ? d->bits : 0;
}

int64_t SafetensorsEntry::elements() const {
  int64_t count = 1;
  for (const int64_t size : shape) {
    if (size == 0) return 0;
    count *= size;
  }
  return count;
}

Status SafetensorsEntry::view(const void* data, Dtype type, View& out) const {
  if (shape.size() > static_cast<size_t>(kMaxRank)) {
    return bad_input("tensor " + json_quote_short(name) + ": has " + text(shape.size()) + " dimensions, at most " +
                     std::to_string(kMaxRank) + " can be used");
  }
  out = View::dense(data, type, shape.data(), static_cast<int>(shape.size()));
  return {};
}

// ---- Opening: the rules, in the order in which they can be checked.

Status SafetensorsFile::fail(const JsonValue& name, const std::string& reason) const {
  return bad_input(path() + ": tensor " + json_show_short(name) + ": " + reason);
}

Status SafetensorsFile::fail(const SafetensorsEntry& entry, const std::string& reason) const {
  return bad_input(path() + ": tensor " + json_quote_short(entry.name) + ": " + reason);
}

Status SafetensorsFile::open(const std::string& path, SafetensorsFile& out) {
  try {
    SafetensorsFile file;
    LINNET_TRY(file.open_checked(path));
    out = std::move(file);
    return {};
  } catch (const std::bad_alloc&) {
    return impossible(path + ": not enough memory for its header");
  }
}

Status SafetensorsFile::open_checked(const std::string& path) {
  if (ends_with_any(path, {".bin", ".pt", ".pth"})) {
    return bad_input(path + ": is a pickle file by its name; loading those can run code, so only safetensors files are read");
  }
  LINNET_TRY(InputFile::open(path, file_));
  const uint64_t size = file_.size();
  uint64_t header_bytes = 0;
  if (size < sizeof header_bytes) {
    return bad_input(path + ": has " + text(size) +
                     " bytes; a safetensors file begins with 8 bytes that give the header's length");
  }
  LINNET_TRY(file_.read(0, sizeof header_bytes, &header_bytes));
  char opening = '{';  // of the header
  if (size > sizeof header_bytes) LINNET_TRY(file_.read(sizeof header_bytes, 1, &opening));
  if (opening != '{' && header_bytes > size - sizeof header_bytes) {
    return bad_input(path + ": this is no safetensors file, which begins with the length of its header and an opening brace");
  }
  const std::string length = path + ": header of " + text(header_bytes) + " bytes";
  if (header_bytes > kMaxHeaderBytes) return bad_input(length + ", more than the limit of " + text(kMaxHeaderBytes));
  if (header_bytes > size - sizeof header_bytes) {
    return bad_input(length + " does not fit into the file, which has " + text(size - sizeof header_bytes) +
                     " behind the length");
  }
  if (header_bytes < 2) return bad_input(length + "; the smallest is 2, {}");
  text_ = std::make_unique_for_overwrite<char[]>(header_bytes);
  LINNET_TRY(file_.read(sizeof header_bytes, header_bytes, text_.get()));
  buffer_begin_ = sizeof header_bytes + header_bytes;
  buffer_bytes_ = size - buffer_begin_;
  return check_header(header_bytes);
}

Status SafetensorsFile::check_header(uint64_t header_bytes) {
  const std::string where = path() + ": header";
  if (text_[0] != '{') return bad_input(where + ": begins with byte " + byte_text(text_[0]) + ", expected '{'");
  const std::string_view whole(text_.get(), header_bytes);
  LINNET_TRY(parse_json(whole, where, {kMaxHeaderBytes, kMaxHeaderDepth, kMaxTensors + 1}, header_));
  for (size_t i = header_.text().size(); i < whole.size(); ++i) {
    if (whole[i] != ' ') {
      return bad_input(where + ": byte " + byte_text(whole[i]) + " at byte " + text(i) +
                       ", behind the closing brace only spaces may follow");
    }
  }

  uint64_t tensors = 0;
  for (JsonItems items(header_); items.next();) tensors += !is_metadata(items.key());
  if (tensors > kMaxTensors)
    return bad_input(where + ": " + text(tensors) + " tensors, more than the limit of " + text(kMaxTensors));

  std::vector<SafetensorsSpan> spans;
  spans.reserve(tensors);
  SafetensorsEntry entry;
  for (JsonItems items(header_); items.next();) {
    if (!is_metadata(items.key())) {
      LINNET_TRY(read_entry(items.key(), items.value(), entry));
      spans.push_back({entry.begin, entry.end, static_cast<uint32_t>(items.key_offset())});
      continue;
    }
    metadata_ = items.value();
    if (!metadata_.is(Kind::object)) return bad_input(where + ": __metadata__ is not an object");
    for (JsonItems pairs(metadata_); pairs.next();) {
      if (pairs.value().is(Kind::string)) continue;
      return bad_input(where + ": __metadata__ holds " + json_show_short(pairs.value()) + " for " +
                       json_show_short(pairs.key()) + ", expected a string");
    }
  }
  LINNET_TRY(check_layout(spans));

  order_.reserve(tensors);
  for (const SafetensorsSpan& s : spans) order_.push_back(s.key_offset);
  std::sort(order_.begin(), order_.end(),
            [this](uint32_t a, uint32_t b) { return JsonItems::compare_keys(header_, a, b) < 0; });
  return {};
}

Status SafetensorsFile::read_entry(const JsonValue& key, const JsonValue& value, SafetensorsEntry& out) const {
  if (key.text().size() - 2 > 6 * kMaxTensorNameBytes || (out.name = key.string()).size() > kMaxTensorNameBytes) {  // 6: \u0061
    return fail(key, "the name has more than " + text(kMaxTensorNameBytes) + " bytes");
  }
  if (out.name.empty()) return fail(key, "the name is empty");
  if (!value.is(Kind::object)) return fail(key, "its entry is " + json_show_short(value) + ", expected an object");
  for (const char* needed : {"dtype", "shape", "data_offsets"}) {
    if (!value.has(needed)) return fail(key, std::string("its entry has no ") + needed);
  }

  const JsonValue dtype = value.find("dtype"), shape = value.find("shape"), offsets = value.find("data_offsets");
  if (!dtype.is(Kind::string)) return fail(key, "dtype is " + json_show_short(dtype) + ", expected a string");
  if (!shape.is(Kind::array)) return fail(key, "shape is " + json_show_short(shape) + ", expected an array");
  if (!offsets.is(Kind::array)) return fail(key, "data_offsets is " + json_show_short(offsets) + ", expected an array");

  const auto type = std::find_if(std::begin(kStoredDtypes), std::end(kStoredDtypes),
                                 [&](const StoredDtype& d) { return dtype.equals(d.name); });
  if (type == std::end(kStoredDtypes)) return fail(key, "unknown dtype " + json_show_short(dtype));
  out.dtype = type->name;

  out.shape.clear();
  for (JsonItems sizes(shape); sizes.next();) {
    if (out.shape.size() == kMaxTensorRank) return fail(key, "shape has more than " + text(kMaxTensorRank) + " dimensions");
    int64_t size = 0;
    if (const char* why = sizes.value().count(size)) {
      return fail(key, "shape[" + text(out.shape.size()) + "] = " + json_show_short(sizes.value()) + " " + why);
    }
    out.shape.push_back(size);
  }

  uint64_t ends[2] = {}, count = 0;
  for (JsonItems numbers(offsets); numbers.next(); ++count) {
    if (count == 2) return fail(key, "data_offsets has more than two numbers");
    int64_t offset = 0;
    if (const char* why = numbers.value().count(offset)) {
      return fail(key, "data_offsets[" + text(count) + "] = " + json_show_short(numbers.value()) + " " + why);
    }
    ends[count] = static_cast<uint64_t>(offset);
  }
  if (count != 2) return fail(key, "data_offsets has " + text(count) + " numbers, expected two");
  out.begin = ends[0];
  out.end = ends[1];

  uint64_t bytes = 0;
  if (const char* why = tensor_bytes(type->bits, out.shape, bytes)) {
    return fail(key, out.dtype + " of shape " + shape_text(out.shape) + ": " + why);
  }
  const auto range = [&] { return "data_offsets [" + text(out.begin) + ", " + text(out.end) + "]"; };
  if (out.end < out.begin) return fail(key, range() + " end before they begin");
  if (out.end > buffer_bytes_)
    return fail(key, range() + " end behind the buffer, which has " + text(buffer_bytes_) + " bytes");
  if (out.bytes() != bytes) {
    return fail(key, range() + " hold " + text(out.bytes()) + " bytes, but " + out.dtype + " of shape " +
                         shape_text(out.shape) + " takes " + text(bytes));
  }
  return {};
}

// The tensors fill the buffer: no gap, where something could hide, and no overlap, through which one tensor changes another.
Status SafetensorsFile::check_layout(std::vector<SafetensorsSpan>& spans) const {
  std::sort(spans.begin(), spans.end(), [](const SafetensorsSpan& a, const SafetensorsSpan& b) {
    return std::tie(a.begin, a.end, a.key_offset) < std::tie(b.begin, b.end, b.key_offset);
  });
  const auto name = [this](const SafetensorsSpan& s) { return JsonItems::key_at(header_, s.key_offset); };
  uint64_t filled = 0;
  for (size_t i = 0; i < spans.size(); ++i) {
    const SafetensorsSpan& s = spans[i];
    if (s.begin != filled) {
      const std::string begins = "begins at byte " + text(s.begin) + " of the buffer, ";
      if (i == 0) return fail(name(s), begins + "but nothing lies before it: the first tensor begins at 0");
      const std::string before = "where tensor " + json_show_short(name(spans[i - 1])) + " ends at " + text(filled);
      return fail(name(s), begins + before + (s.begin < filled ? ": they overlap" : ": there is a gap"));
    }
    filled = s.end;
  }
  if (filled == buffer_bytes_) return {};
  const std::string rest = text(buffer_bytes_ - filled) + " bytes of the buffer belong to no tensor";
  return spans.empty() ? bad_input(path() + ": there are no tensors, but " + rest)
                       : fail(name(spans.back()), "is the last one and ends at byte " + text(filled) + ", but " + rest);
}

// ---- Looking up

size_t SafetensorsFile::lower_bound(std::string_view name) const {
  const auto before = [this](uint32_t key, std::string_view n) { return JsonItems::key_at(header_, key).compare(n) < 0; };
  return static_cast<size_t>(std::lower_bound(order_.begin(), order_.end(), name, before) - order_.begin());
}

std::vector<std::string> SafetensorsFile::names() const {
  std::vector<std::string> out;
  out.reserve(size());
  for (size_t i = 0; i < size(); ++i) out.push_back(name_value(i).string());
  return out;
}

SafetensorsEntry SafetensorsFile::entry(size_t i) const {
  SafetensorsEntry out;
  JsonItems item(header_, order_[i]);
  item.next();
  const Status accepted_before = read_entry(item.key(), item.value(), out);
  (void)accepted_before;
  return out;
}

bool SafetensorsFile::has(std::string_view name) const {
  const size_t i = lower_bound(name);
  return i < size() && name_value(i).equals(name);
}

Status SafetensorsFile::find(std::string_view name, SafetensorsEntry& out) const {
  const size_t i = lower_bound(name);
  if (i == size() || !name_value(i).equals(name)) return bad_input(path() + ": has no tensor " + json_quote_short(name));
  out = entry(i);
  return {};
}

std::vector<std::pair<std::string, std::string>> SafetensorsFile::metadata() const {
  std::vector<std::pair<std::string, std::string>> out;
  for (JsonItems pairs(metadata_); pairs.next();) out.emplace_back(pairs.key().string(), pairs.value().string());
  return out;
}

std::string SafetensorsFile::metadata(std::string_view key) const { return metadata_.find(key).string(); }

// ---- Values

Status SafetensorsFile::read_bytes(const SafetensorsEntry& entry, void* out) const {
  if (entry.end < entry.begin || entry.end > buffer_bytes_) return fail(entry, "is not an entry of this file");
  return file_.read(buffer_begin_ + entry.begin, entry.bytes(), out);
}

Status SafetensorsFile::read_bytes(std::string_view name, std::vector<unsigned char>& out) const try {
  SafetensorsEntry entry;
  LINNET_TRY(find(name, entry));
  std::vector<unsigned char> bytes(entry.bytes());
  LINNET_TRY(read_bytes(entry, bytes.data()));
  out = std::move(bytes);
  return {};
} catch (const std::bad_alloc&) {
  return impossible(path() + ": tensor " + json_quote_short(name) + ": not enough memory");
}

// Calls use(data, first, count) for pieces of the tensor: `count` elements from element `first` on, aligned at `data`.
template <class Use>
Status SafetensorsFile::read_pieces(const SafetensorsEntry& entry, uint64_t element_bytes, const Use& use) const {
  alignas(8) unsigned char piece[64 << 10];
  const uint64_t elements = entry.bytes() / element_bytes, most = sizeof piece / element_bytes;
  for (uint64_t first = 0; first < elements;) {
    const uint64_t count = std::min(most, elements - first);
    LINNET_TRY(file_.read(buffer_begin_ + entry.begin + first * element_bytes, count * element_bytes, piece));
    LINNET_TRY(use(piece, first, count));
    first += count;
  }
  return {};
}

Status SafetensorsFile::read_f64(std::string_view name, std::vector<double>& out, ReadValues values) const try {
  SafetensorsEntry entry;
  LINNET_TRY(find(name, entry));
  const StoredDtype& type = *stored_dtype(entry.dtype);
  if (type.numbers == Numbers::other) return fail(entry, "values of dtype " + entry.dtype + " cannot be read");
  const uint64_t element_bytes = static_cast<uint64_t>(type.bits) / 8;
  std::vector<double> numbers(entry.bytes() / element_bytes);
  const auto convert = [&](const unsigned char* data, uint64_t first, uint64_t count) -> Status {
    for (uint64_t i = 0; i < count; ++i) {
      double& x = numbers[first + i];
      const char* why = nullptr;
      if (type.numbers == Numbers::floating) {
        x = load_f64(data, type.dtype, static_cast<int64_t>(i));
        if (values == ReadValues::finite && !std::isfinite(x)) why = "is not finite";
      } else {
        constexpr int64_t kExact = int64_t{1} << 53;
        int64_t integer = 0;
        why = load_integer(data + i * element_bytes, type, integer);
        if (!why && (integer > kExact || integer < -kExact)) why = "is beyond 2^53, where doubles skip integers";
        x = static_cast<double>(integer);
      }
      if (why) return fail(entry, "element " + text(first + i) + " " + why);
    }
    return {};
  };
  LINNET_TRY(read_pieces(entry, element_bytes, convert));
  out = std::move(numbers);
  return {};
} catch (const std::bad_alloc&) {
  return impossible(path() + ": tensor " + json_quote_short(name) + ": not enough memory");
}

Status SafetensorsFile::read_i64(std::string_view name, std::vector<int64_t>& out) const try {
  SafetensorsEntry entry;
  LINNET_TRY(find(name, entry));
  const StoredDtype& type = *stored_dtype(entry.dtype);
  if (type.numbers == Numbers::floating || type.numbers == Numbers::other) {
    return fail(entry, "has dtype " + entry.dtype + ", expected integers");
  }
  const uint64_t element_bytes = static_cast<uint64_t>(type.bits) / 8;
  std::vector<int64_t> numbers(entry.bytes() / element_bytes);
  const auto convert = [&](const unsigned char* data, uint64_t first, uint64_t count) -> Status {
    for (uint64_t i = 0; i < count; ++i) {
      const char* why = load_integer(data + i * element_bytes, type, numbers[first + i]);
      if (why) return fail(entry, "element " + text(first + i) + " " + why);
    }
    return {};
  };
  LINNET_TRY(read_pieces(entry, element_bytes, convert));
  out = std::move(numbers);
  return {};
} catch (const std::bad_alloc&) {
  return impossible(path() + ": tensor " + json_quote_short(name) + ": not enough memory");
}

Status SafetensorsFile::check_finite(std::string_view name) const {
  SafetensorsEntry entry;
  LINNET_TRY(find(name, entry));
  const StoredDtype& type = *stored_dtype(entry.dtype);
  if (type.numbers != Numbers::floating) return {};
  const auto check = [&](const unsigned char* data, uint64_t first, uint64_t count) -> Status {
    for (uint64_t i = 0; i < count; ++i) {
      if (std::isfinite(load_f64(data, type.dtype, static_cast<int64_t>(i)))) continue;
      return fail(entry, "element " + text(first + i) + " is not finite");
    }
    return {};
  };
  return read_pieces(entry, static_cast<uint64_t>(type.bits) / 8, check);
}

// ---- Writing: whatever the reader would refuse is refused here.

namespace {

struct Item {
  const SafetensorsTensor* tensor;
  int bits;
  uint64_t bytes;
};

Status make_item(const std::string& path, const SafetensorsTensor& t, Item& out) {
  const auto fail = [&](const std::string& reason) {
    return bad_input(path + ": tensor " + json_quote_short(t.name) + ": " + reason);
  };
  if (t.name.empty()) return fail("the name is empty");
  if (t.name == "__metadata__") return fail("the name is reserved");
  if (t.name.size() > kMaxTensorNameBytes) return fail("the name has more than " + text(kMaxTensorNameBytes) + " bytes");
  if (find_invalid_utf8(t.name) != t.name.size()) return fail("the name is not UTF-8");
  if (t.shape.size() > kMaxTensorRank) return fail("shape has more than " + text(kMaxTensorRank) + " dimensions");
  for (const int64_t size : t.shape) {
    if (size < 0) return fail("shape " + shape_text(t.shape) + " has a negative dimension");
  }
  out = {&t, safetensors_bits(t.dtype), 0};
  if (out.bits == 0) return fail("unknown dtype " + json_quote_short(t.dtype));
  if (const char* why = tensor_bytes(out.bits, t.shape, out.bytes)) return fail(why);
  if (t.data == nullptr && out.bytes > 0) return fail("no data");
  return {};
}

}  // namespace

Status write_safetensors(const std::string& path, const std::vector<SafetensorsTensor>& tensors,
                         const std::vector<std::pair<std::string, std::string>>& metadata) try {
  std::vector<Item> items(tensors.size());
  for (size_t i = 0; i < items.size(); ++i) LINNET_TRY(make_item(path, tensors[i], items[i]));
  std::sort(items.begin(), items.end(),
            [](const Item& a, const Item& b) { return a.bits != b.bits ? a.bits > b.bits : a.tensor->name < b.tensor->name; });

  JsonWriter header;
  header.begin_object().key("__metadata__").begin_object();
  bool has_format = false;
  for (const auto& [key, value] : metadata) has_format |= key == "format";
  if (!has_format) header.member("format", "pt");
  for (const auto& [key, value] : metadata) {
    if (find_invalid_utf8(key) != key.size() || find_invalid_utf8(value) != value.size()) {
      return bad_input(path + ": metadata " + json_quote_short(key) + " is not UTF-8");
    }
    header.member(key, value);
  }
  header.end_object();
  uint64_t end = 0;
  for (const Item& item : items) {
    header.key(item.tensor->name).begin_object().member("dtype", item.tensor->dtype).key("shape").begin_array();
    for (const int64_t size : item.tensor->shape) header.value(size);
    header.end_array().key("data_offsets").begin_array().value(end);
    end += item.bytes;  // of tensors in memory: cannot overflow
    header.value(end).end_array().end_object();
  }
  header.end_object();
  std::string json = header.text();
  json.resize((json.size() + 7) / 8 * 8, ' ');
  JsonValue unused;  // what stands twice, too many tensors and too long a header are found here
  LINNET_TRY(parse_json(json, path + ": header", {kMaxHeaderBytes, kMaxHeaderDepth, kMaxTensors + 1}, unused));

  OutputFile file;
  LINNET_TRY(OutputFile::create(path, file));
  const uint64_t header_bytes = json.size();
  LINNET_TRY(file.write(&header_bytes, sizeof header_bytes));
  LINNET_TRY(file.write(json.data(), json.size()));
  for (const Item& item : items) LINNET_TRY(file.write(item.tensor->data, item.bytes));
  return file.commit();
} catch (const std::bad_alloc&) {
  return impossible(path + ": not enough memory for its header");
}

}  // namespace linnet
