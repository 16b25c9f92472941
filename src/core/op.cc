#include "op.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <utility>

#include "cuda.h"
#include "cuda_device.h"
#include "half.h"
#include "isa.h"
#include "log.h"
#include "remembered.h"

namespace linnet {
namespace {

View& view_at(void* base, size_t offset) { return *reinterpret_cast<View*>(static_cast<char*>(base) + offset); }
const View& view_at(const void* base, size_t offset) {
  return *reinterpret_cast<const View*>(static_cast<const char*>(base) + offset);
}
template <class T>
const T& value_at(const void* base, size_t offset) {
  return *reinterpret_cast<const T*>(static_cast<const char*>(base) + offset);
}
template <class T>
T& value_at(void* base, size_t offset) {
  return *reinterpret_cast<T*>(static_cast<char*>(base) + offset);
}

// Names and letters are short: a loop costs less than a call of memcmp, and every call of an operator compares dozens.
bool same(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] != b[i]) return false;
  }
  return true;
}

std::string number(double x) {
  char text[32];
  const auto end = std::to_chars(text, text + sizeof text, x).ptr;
  return std::string(text, end);
}

std::string sizes_text(const View& v) {
  std::string text = "[";
  for (int i = 0; i < v.rank; ++i) text += (i ? ", " : "") + std::to_string(v.size[i]);
  return text + "]";
}

// "B T H K" -> words.
struct Words {
  static constexpr int kMax = kMaxRank;
  std::string_view word[kMax];
  int count = 0;
  explicit Words(std::string_view shape) {
    for (size_t begin = 0, end = 0; begin < shape.size(); begin = ++end) {  // every call comes here: no library call per letter
      while (end < shape.size() && shape[end] != ' ') ++end;
      word[count++] = shape.substr(begin, end - begin);
    }
  }
};

std::string shape_text(std::string_view shape) {
  std::string text = "[";
  const Words words(shape);
  for (int i = 0; i < words.count; ++i) text += (i ? ", " : "") + std::string(words.word[i]);
  return text + "]";
}

constexpr std::string_view kChannels = "channels";
const char* noun(std::string_view letter) {
  static constexpr std::pair<std::string_view, const char*> kNouns[] = {
      {"B", "batch rows"}, {"T", "tokens"},   {"S", "tokens"},   {"Tq", "tokens"},   {"Tk", "tokens"},
      {"H", "heads"},      {"Hq", "heads"},   {"Hk", "heads"},   {"Hv", "heads"},    {"Hkv", "heads"},
      {"K", "channels"},   {"V", "channels"}, {"F", "features"}, {"N", "sequences"}, {"P", "pages"},
      {"R", "rows"},       {"C", "channels"}, {"D", "channels"}, {"I", "channels"},  {"O", "channels"},
  };
  for (const auto& [name, text] : kNouns) {
    if (name == letter) return text;
  }
  return "entries";
}

bool is_letter(std::string_view word) {
  for (const char c : word) {
    if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_')) return false;
  }
  return !word.empty();
}

// expression := term (('+' | '-') term)*;  term := factor (('*' | '//') factor)*;  factor := number | name | max(a,b) | (a)
class Evaluator {
 public:
  Evaluator(std::string_view text, const Op& op, const void* args, const Dims& dims)
      : text_(text), op_(op), args_(args), dims_(dims) {}
  bool run(int64_t* value) { return sum(value) && text_.empty(); }

 private:
  bool take(std::string_view token) {
    if (!same(text_.substr(0, token.size()), token)) return false;
    text_.remove_prefix(token.size());
    return true;
  }
  bool sum(int64_t* value) {
    if (!product(value)) return false;
    for (int64_t right; !text_.empty();) {
      const bool plus = take("+");
      if (!plus && !take("-")) return true;
      if (!product(&right)) return false;
      if (plus ? __builtin_add_overflow(*value, right, value) : __builtin_sub_overflow(*value, right, value)) return false;
    }
    return true;
  }
  bool product(int64_t* value) {
    if (!factor(value)) return false;
    for (int64_t right; !text_.empty();) {
      const bool times = take("*");
      if (!times && !take("//")) return true;
      if (!factor(&right) || (!times && right == 0)) return false;
      if (!times) {
        *value /= right;
      } else if (__builtin_mul_overflow(*value, right, value)) {
        return false;
      }
    }
    return true;
  }
  bool factor(int64_t* value) {
    if (take("max(")) {
      int64_t right;
      if (!sum(value) || !take(",") || !sum(&right) || !take(")")) return false;
      *value = *value > right ? *value : right;
      return true;
    }
    if (take("(")) return sum(value) && take(")");
    size_t length = 0;
    while (length < text_.size() && (std::isalnum(static_cast<unsigned char>(text_[length])) || text_[length] == '_')) ++length;
    const std::string_view word = text_.substr(0, length);
    if (word.empty()) return false;
    text_.remove_prefix(length);
    if (word[0] >= '0' && word[0] <= '9') {
      const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), *value);
      return error == std::errc() && end == word.data() + word.size();
    }
    if (const Dims::Entry* entry = dims_.find(word)) {
      *value = entry->value;
      return true;
    }
    if (const OptionDecl* option = op_.find_option(word)) {
      if (option->kind == OptionKind::boolean) return *value = value_at<bool>(args_, option->offset) ? 1 : 0, true;
      if (option->kind == OptionKind::integer) return *value = value_at<int64_t>(args_, option->offset), true;
      if (option->kind == OptionKind::sizes) return *value = value_at<Sizes>(args_, option->offset).count, true;  // how many
      return false;
    }
    for (const LetterRule& rule : op_.letters) {  // a letter that no tensor has shown
      if (!same(rule.letter, word)) continue;
      const int32_t choice = rule.by.empty() ? 0 : value_at<int32_t>(args_, op_.find_option(rule.by)->offset);
      for (const auto& [name, expression] : rule.cases) {
        if (rule.by.empty() || name == op_.find_option(rule.by)->choices[static_cast<size_t>(choice)]) {
          return evaluate(expression, op_, args_, dims_, value);
        }
      }
    }
    return false;
  }

  std::string_view text_;
  const Op& op_;
  const void* args_;
  const Dims& dims_;
};

bool element_fits(Element element, Dtype dtype, Dtype io) {
  const Dtype acc = io == Dtype::f64 ? Dtype::f64 : Dtype::f32;
  switch (element) {
    case Element::io: return dtype == io;
    case Element::acc: return dtype == acc;
    case Element::param: return dtype == io || dtype == acc;
    case Element::weight: return io == Dtype::f64 ? dtype == Dtype::f64 : is_float(dtype) && dtype != Dtype::f64;
    case Element::index: return dtype == Dtype::i32 || dtype == Dtype::i64;
    case Element::mask:
    case Element::code: return dtype == Dtype::u8;
  }
  return false;
}

std::string element_text(Element element, Dtype io) {
  const std::string acc = io == Dtype::f64 ? "f64" : "f32";
  switch (element) {
    case Element::io: return dtype_name(io);
    case Element::acc: return acc;
    case Element::param: return acc == dtype_name(io) ? acc : std::string(dtype_name(io)) + " or " + acc;
    case Element::weight: return io == Dtype::f64 ? "f64" : "f32, bf16 or f16";
    case Element::index: return "i32 or i64";
    case Element::mask:
    case Element::code: return "u8";
  }
  return "";
}

std::string expected_text(const Dims& dims, std::string_view word, int64_t value) {
  std::string text = std::to_string(value);
  if (is_letter(word)) {
    const Dims::Entry* entry = dims.find(word);
    if (entry != nullptr && !entry->from.empty()) text += " (same as " + std::string(entry->from) + ")";
  } else {
    text += " (" + std::string(word) + ")";
  }
  return text;
}

// Compares the sizes of a tensor with its declared shape; letters seen for the first time take their value here.
Status match_shape(const Op& op, const TensorDecl& decl, const View& view, const void* args, Dims* dims) {
  const std::string& shape = view.rank == Words(decl.shape).count ? decl.shape : decl.other_shape;
  const Words words(shape);
  for (int i = 0; i < words.count; ++i) {
    const std::string_view word = words.word[i];
    const Dims::Entry* known = dims->find(word);
    if (known != nullptr && known->value == view.size[i]) continue;
    int64_t expected;
    if (known == nullptr && is_letter(word) && !evaluate(word, op, args, *dims, &expected)) {
      // No tokens, no rows, no heads are an empty call; without channels nothing is defined (a scale of K^-0.5).
      if (view.size[i] == 0 && noun(word) == kChannels)
        return bad_input(op.name + ": " + decl.name + " has 0 channels in dimension " + std::to_string(i) + " of " +
                         shape_text(shape) + ", expected at least 1");
      dims->set(word, view.size[i], decl.name);
      continue;
    }
    const std::string_view letter = word.substr(0, word.find('+'));
    const bool shows = decl.values == Values::offsets && dims->find(letter) == nullptr;  // offsets decide N, not its rule
    if (shows || !evaluate(word, op, args, *dims, &expected)) {                          // "N+1" with N unknown: shows N
      dims->set(letter, view.size[i] - 1, decl.name);
      if (view.size[i] < 1)
        return bad_input(op.name + ": " + decl.name + " is empty, expected " + std::string(word) + " entries");
      continue;
    }
    if (view.size[i] == expected || (decl.broadcast && view.size[i] == 1)) {
      if (is_letter(word) && dims->find(word) == nullptr) dims->set(word, expected, "");
      continue;
    }
    return bad_input(op.name + ": " + decl.name + " has " + std::to_string(view.size[i]) + " " + noun(word) + " in dimension " +
                     std::to_string(i) + " of " + shape_text(shape) + ", expected " + expected_text(*dims, word, expected));
  }
  return {};
}

void expand_broadcast(const Op& op, const TensorDecl& decl, const void* args, const Dims& dims, View* view) {
  const Words words(decl.shape);
  for (int i = 0; i < words.count; ++i) {
    int64_t full = view->size[i];
    evaluate(words.word[i], op, args, dims, &full);
    if (view->size[i] == full) continue;
    view->size[i] = full;
    view->stride[i] = 0;
  }
}

void insert_leading(View* view, int64_t stride) {
  for (int i = view->rank; i > 0; --i) {
    view->size[i] = view->size[i - 1];
    view->stride[i] = view->stride[i - 1];
  }
  view->size[0] = 1;
  view->stride[0] = stride;
  ++view->rank;
}

bool starts_with_batch(const TensorDecl& decl) { return decl.shape.substr(0, 2) == "B "; }

constexpr int64_t kMaxElements = int64_t{1} << 48;  // beyond any memory, and its products with small numbers fit in 64 bits

Status check_layout(const Op& op, const TensorDecl& decl, const std::string& name, const View& view) {
  int64_t extent = 1;  // with empty dimensions counted as 1: no product of sizes below may overflow
  for (int i = 0; i < view.rank; ++i) {
    if (view.size[i] < 0) return bad_input(op.name + ": " + name + " has a negative size, " + sizes_text(view));
    if (__builtin_mul_overflow(extent, view.size[i] > 0 ? view.size[i] : 1, &extent) || extent > kMaxElements) {
      return bad_input(op.name + ": " + name + " has shape " + sizes_text(view) + ", more than 2^48 elements");
    }
  }
  const int64_t elements = view.elements();
  if (elements > 0 && view.data == nullptr) return bad_input(op.name + ": " + name + " has no data");
  if (reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(std::max<int64_t>(dtype_size(view.dtype), 1)) != 0) {
    return bad_input(op.name + ": " + name + " is at an address that is no multiple of " +
                     std::to_string(dtype_size(view.dtype)) + ", the size of " + dtype_name(view.dtype));
  }
  int64_t span = 0;  // no product of a stride below may overflow either
  for (int i = 0; i < view.rank; ++i) {
    const int64_t stride = view.stride[i];
    int64_t step = 0;
    if (elements == 0 || view.size[i] == 1) continue;
    if (stride < -kMaxElements || stride > kMaxElements || __builtin_mul_overflow(std::abs(stride), view.size[i] - 1, &step) ||
        step > kMaxElements - span) {
      return bad_input(op.name + ": " + name + " has stride " + std::to_string(stride) + " in dimension " + std::to_string(i) +
                       ", so that it spans more than 2^48 elements");
    }
    span += step;
  }
  const int last = view.rank - 1;
  if (!decl.broadcast && elements > 0 && last >= 0 && view.size[last] > 1 && view.stride[last] != 1) {
    return bad_input(op.name + ": " + name + " is not contiguous in its last dimension (stride " +
                     std::to_string(view.stride[last]) + "), expected stride 1");
  }
  return {};
}

// From the smallest stride on, each dimension must step over all that the ones before it reach.
Status check_written(const Op& op, const std::string& name, const View& view) {
  if (view.elements() == 0) return {};
  int64_t reach = 0;
  uint32_t rest = 0;
  for (int i = 0; i < view.rank; ++i) rest |= view.size[i] > 1 ? 1U << i : 0U;
  while (rest != 0) {
    int next = -1;
    for (int i = 0; i < view.rank; ++i) {
      if ((rest >> i & 1) != 0 && (next < 0 || std::abs(view.stride[i]) < std::abs(view.stride[next]))) next = i;
    }
    if (std::abs(view.stride[next]) <= reach) {
      return bad_input(op.name + ": " + name + " has stride " + std::to_string(view.stride[next]) + " in dimension " +
                       std::to_string(next) + ", but it is written and may not overlap itself");
    }
    reach += std::abs(view.stride[next]) * (view.size[next] - 1);
    rest &= ~(1U << next);
  }
  return {};
}

Status check_values(const Op& op, const TensorDecl& decl, const View& view, const void* args, const Dims& dims) {
  const bool below = decl.values == Values::below;
  const bool bounded = below || decl.values == Values::lengths || decl.values == Values::starts;
  if (decl.values != Values::offsets && !bounded) return {};
  int64_t bound = 0;
  evaluate(decl.of, op, args, dims, &bound);
  if (below) --bound;
  const int64_t count = view.size[0];
  const std::string name = op.name + ": " + decl.name;
  if (bounded) {
    const int64_t columns = view.rank > 1 ? view.size[1] : 1;
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t j = 0; j < columns; ++j) {
        const int64_t x = index_value(view, i, j);
        if (x >= 0 && x <= bound) continue;
        return bad_input(name + "[" + std::to_string(i) + "]" + (view.rank > 1 ? "[" + std::to_string(j) + "]" : "") + " is " +
                         std::to_string(x) + ", expected 0 to " + std::to_string(bound));
      }
    }
    return {};
  }
  if (index_value(view, 0) != 0) return bad_input(name + " starts at " + std::to_string(index_value(view, 0)) + ", expected 0");
  for (int64_t i = 1; i < count; ++i) {
    if (index_value(view, i) >= index_value(view, i - 1)) continue;
    return bad_input(name + " decreases from " + std::to_string(index_value(view, i - 1)) + " to " +
                     std::to_string(index_value(view, i)) + " at entry " + std::to_string(i) +
                     ", expected non-decreasing offsets");
  }
  const int64_t last = index_value(view, count - 1);
  if (last == bound) return {};
  return bad_input(name + " ends at " + std::to_string(last) + ", expected " + std::to_string(bound) +
                   " (the number of tokens)");
}

// Values that a declaration forbids, as far as they are floats: read only when the operator runs, not when its call is planned.
Status check_numbers(const Op& op, const TensorDecl& decl, const View& view) {
  struct Rule {
    Values values;
    bool (*holds)(double x);
    const char* expected;
  };
  static constexpr Rule kRules[] = {
      {Values::positive, [](double x) { return x > 0; }, "a number above 0"},
      {Values::finite, [](double x) { return !std::isinf(x); }, "a finite number"},
      {Values::number, [](double x) { return std::isfinite(x); }, "a finite number"},
      {Values::weights, [](double x) { return x >= 0; }, "a number that is at least 0"},
  };
  const auto rule = std::find_if(std::begin(kRules), std::end(kRules), [&](const Rule& r) { return r.values == decl.values; });
  if (!view.given() || rule == std::end(kRules)) return {};
  const int64_t width = view.rank == 0 ? 1 : view.size[view.rank - 1];
  double largest = 0;  // of the row
  for (int64_t i = 0; i < view.elements(); ++i) {
    int64_t at[kMaxRank], offset = 0, rest = i;
    for (int d = view.rank - 1; d >= 0; --d) {
      at[d] = rest % view.size[d];
      offset += at[d] * view.stride[d];
      rest /= view.size[d];
    }
    const double x = load_f64(view.data, view.dtype, offset);
    const auto place = [&](int dimensions) {
      std::string text;
      for (int d = 0; d < dimensions; ++d) text += "[" + std::to_string(at[d]) + "]";
      return text;
    };
    if (!rule->holds(x)) {
      return bad_input(op.name + ": " + decl.name + place(view.rank) + " is " + number(x) + ", expected " + rule->expected);
    }
    largest = i % width == 0 ? x : std::max(largest, x);
    if (decl.values != Values::weights || i % width != width - 1 || largest > 0) continue;
    return bad_input(op.name + ": " + decl.name + place(view.rank - 1) + " is 0 everywhere, expected a number above 0");
  }
  return {};
}

std::string range_text(double low, double high) {
  if (std::isinf(low) || low == -std::numeric_limits<double>::max())
    return high >= 9e15 ? "a finite number" : "at most " + number(high);
  return high >= 9e15 ? "at least " + number(low) : number(low) + " to " + number(high);
}

Status check_option(const Op& op, const OptionDecl& option, const void* args) {
  const auto range = [&](double x) -> Status {
    if (x >= option.low && x <= option.high) return {};
    std::string expected = range_text(option.low, option.high);
    if (x > option.high && option.high >= 9e15) expected = std::isinf(x) ? "a finite number" : "at most " + number(option.high);
    return bad_input(op.name + ": " + option.name + " is " + number(x) + ", expected " + expected);
  };
  switch (option.kind) {
    case OptionKind::real: return range(value_at<double>(args, option.offset));
    case OptionKind::maybe_real: {
      const Maybe& x = value_at<Maybe>(args, option.offset);
      return x.given ? range(x.value) : Status();
    }
    case OptionKind::integer: return range(static_cast<double>(value_at<int64_t>(args, option.offset)));
    case OptionKind::choice: return range(value_at<int32_t>(args, option.offset));
    case OptionKind::window: {
      const Window& w = value_at<Window>(args, option.offset);
      if (w.left >= -1 && w.right >= -1) return {};
      return bad_input(op.name + ": " + option.name + " is (" + std::to_string(w.left) + ", " + std::to_string(w.right) +
                       "), expected values of at least -1 (-1: unlimited)");
    }
    case OptionKind::sizes: {
      const Sizes& list = value_at<Sizes>(args, option.offset);
      if (list.count < 0 || list.count > Sizes::kMax) {
        return bad_input(op.name + ": " + option.name + " has " + std::to_string(list.count) + " numbers, expected at most " +
                         std::to_string(Sizes::kMax));
      }
      for (int64_t i = 0; i < list.count; ++i) LINNET_TRY(range(static_cast<double>(list.value[i])));
      return {};
    }
    case OptionKind::boolean: break;
  }
  return {};
}

const char* place_name(Device device) { return device == Device::cuda ? "a CUDA device" : "the CPU"; }

// A tensor lies where the call runs, and somebody runs it there.
Status check_device(const Op& op, const std::string& name, const View& view, Device device) {
  if (view.device != device) {
    return bad_input(op.name + ": " + name + " is on " + place_name(view.device) + ", expected " + place_name(device) +
                     " (same as " + op.inputs.front().name + ")");
  }
  if (device == Device::cuda && !has_impl_on(op, device)) {
    return impossible(op.name + ": " + name + " is on a CUDA device; " + op.name + " has no CUDA kernels");
  }
  return {};
}

// Checks the results' views of one struct (outputs, or gradients) against their expected shape and type, and adds B = 1 where
// the call is packed without a batch dimension.
Status check_result(const Op& op, const TensorDecl& decl, const std::string& name, const View& expected, Device device,
                    bool required, View* view) {
  if (!view->given()) {
    if (required) return bad_input(op.name + ": " + name + " is missing");
    return {};
  }
  LINNET_TRY(check_device(op, name, *view, device));
  bool same = view->rank == expected.rank;
  for (int i = 0; same && i < view->rank; ++i) same = view->size[i] == expected.size[i];
  if (!same) return bad_input(op.name + ": " + name + " has shape " + sizes_text(*view) + ", expected " + sizes_text(expected));
  if (view->dtype != expected.dtype) {
    return bad_input(op.name + ": " + name + " is " + dtype_name(view->dtype) + ", expected " + dtype_name(expected.dtype));
  }
  return check_layout(op, decl, name, *view);
}

Dtype call_dtype(const Op& op, const void* args) { return view_at(args, op.inputs.front().offset).dtype; }

}  // namespace

const char* dtype_name(Dtype dtype) {
  switch (dtype) {
    case Dtype::none: return "none";
    case Dtype::f64: return "f64";
    case Dtype::f32: return "f32";
    case Dtype::bf16: return "bf16";
    case Dtype::f16: return "f16";
    case Dtype::i64: return "i64";
    case Dtype::i32: return "i32";
    case Dtype::u8: return "u8";
  }
  return "";
}

Dtype dtype_from_name(std::string_view name) {
  for (const Dtype d : {Dtype::f64, Dtype::f32, Dtype::bf16, Dtype::f16, Dtype::i64, Dtype::i32, Dtype::u8}) {
    if (name == dtype_name(d)) return d;
  }
  return Dtype::none;
}

int64_t index_value(const View& view, int64_t i, int64_t j) {
  const int64_t offset = i * view.stride[0] + j * view.stride[1];
  return view.dtype == Dtype::i32 ? static_cast<const int32_t*>(view.data)[offset]
                                  : static_cast<const int64_t*>(view.data)[offset];
}

const Dims::Entry* Dims::find(std::string_view letter) const {
  for (int i = 0; i < count_; ++i) {
    if (same(entries_[i].letter, letter)) return &entries_[i];
  }
  return nullptr;
}
int64_t Dims::operator[](std::string_view letter) const {
  const Entry* entry = find(letter);
  return entry == nullptr ? 0 : entry->value;
}
void Dims::set(std::string_view letter, int64_t value, std::string_view from) {
  if (count_ < kMaxLetters) entries_[count_++] = {letter, value, from};
}

template <class T>
static const T* find_named(const std::vector<T>& list, std::string_view name) {
  for (const T& item : list) {
    if (same(item.name, name)) return &item;
  }
  return nullptr;
}
const TensorDecl* Op::find_input(std::string_view wanted) const { return find_named(inputs, wanted); }
const TensorDecl* Op::find_output(std::string_view wanted) const { return find_named(outputs, wanted); }
const OptionDecl* Op::find_option(std::string_view wanted) const { return find_named(options, wanted); }

bool evaluate(std::string_view expression, const Op& op, const void* args, const Dims& dims, int64_t* value) {
  if (const Dims::Entry* known = dims.find(expression)) return *value = known->value, true;
  return Evaluator(expression, op, args, dims).run(value);
}

namespace {

// Members of a shared struct that the operator does not have: tensors are not given, options keep their defaults.
Status check_absent(const Op& op, const void* args) {
  if (op.absent.empty()) return {};
  alignas(std::max_align_t) char defaults[kMaxStruct], out[kMaxStruct], grads[kMaxStruct];
  bool constructed = false;
  for (const AbsentDecl& decl : op.absent) {
    if (decl.tensor) {
      if (view_at(args, decl.offset).given()) return bad_input(op.name + ": " + decl.name + " is not an input");
      continue;
    }
    if (!std::exchange(constructed, true)) op.construct(defaults, out, grads);
    if (std::memcmp(static_cast<const char*>(args) + decl.offset, defaults + decl.offset, decl.bytes) != 0) {
      return bad_input(op.name + ": " + decl.name + " is not an option");
    }
  }
  return {};
}

Status prepare_anew(const Op& op, void* args, Dims* dims, bool* packed_rank) {
  *packed_rank = false;
  LINNET_TRY(check_absent(op, args));
  bool packed = false;
  for (const TensorDecl& decl : op.inputs) packed |= decl.values == Values::offsets && view_at(args, decl.offset).given();
  Dtype io = Dtype::none;
  const Device device = device_of(op, args);
  // First pass: presence, place, type, rank. Broadcast tensors wait until every letter is known.
  for (const TensorDecl& decl : op.inputs) {
    View& view = view_at(args, decl.offset);
    if (!view.given()) {
      if (decl.optional) continue;
      return bad_input(op.name + ": " + decl.name + " is missing");
    }
    LINNET_TRY(check_device(op, decl.name, view, device));
    if (io == Dtype::none) {
      io = view.dtype;
      if (!is_float(io)) {
        return bad_input(op.name + ": " + decl.name + " is " + dtype_name(io) + ", expected f64, f32, bf16 or f16");
      }
    }
    if (!element_fits(decl.element, view.dtype, io)) {
      const std::string reason = decl.element == Element::io ? " (same as " + op.inputs.front().name + ")" : "";
      return bad_input(op.name + ": " + decl.name + " is " + dtype_name(view.dtype) + ", expected " +
                       element_text(decl.element, io) + reason);
    }
    const int rank = Words(decl.shape).count;
    if (decl.broadcast) {
      if (view.rank > rank) {
        return bad_input(op.name + ": " + decl.name + " has rank " + std::to_string(view.rank) + ", expected at most " +
                         std::to_string(rank) + ", broadcastable to " + shape_text(decl.shape));
      }
      while (view.rank < rank) insert_leading(&view, 0);
    } else if (packed && starts_with_batch(decl) && (decl.other_shape.empty() ? view.rank == rank - 1 : *packed_rank)) {
      // Of two shapes the rank alone does not tell: the tensors before it do.
      insert_leading(&view, view.rank > 0 ? view.size[0] * view.stride[0] : 0);
      *packed_rank = true;
    }
    if (view.rank != rank && (decl.other_shape.empty() || view.rank != Words(decl.other_shape).count)) {
      const std::string other = decl.other_shape.empty() ? "" : " or " + shape_text(decl.other_shape);
      return bad_input(op.name + ": " + decl.name + " has shape " + sizes_text(view) + ", expected " + shape_text(decl.shape) +
                       other);
    }
    LINNET_TRY(check_layout(op, decl, decl.name, view));
    if (decl.mutated) LINNET_TRY(check_written(op, decl.name, view));
  }
  for (const OptionDecl& option : op.options) LINNET_TRY(check_option(op, option, args));
  for (const TensorDecl& decl : op.inputs) {
    if (decl.needed_by.empty()) continue;
    const std::string choice = option_text(*op.find_option(decl.needed_by), args);
    const bool needed = std::find(decl.needed_for.begin(), decl.needed_for.end(), choice) != decl.needed_for.end();
    if (needed == view_at(args, decl.offset).given()) continue;
    return bad_input(op.name + ": " + decl.name +
                     (needed ? " is missing; " + decl.needed_by + " " + choice + " needs it"
                             : " is given, expected none with " + decl.needed_by + " " + choice));
  }
  for (const bool broadcast : {false, true}) {
    for (const TensorDecl& decl : op.inputs) {
      View& view = view_at(args, decl.offset);
      if (!view.given() || decl.broadcast != broadcast) continue;
      LINNET_TRY(match_shape(op, decl, view, args, dims));
      if (broadcast) expand_broadcast(op, decl, args, *dims, &view);
    }
  }
  for (const LetterRule& rule : op.letters) {
    int64_t value;
    if (dims->find(rule.letter) == nullptr && evaluate(rule.letter, op, args, *dims, &value)) dims->set(rule.letter, value, "");
  }
  for (const auto& [letter, divisor] : op.multiples) {
    const Dims::Entry* whole = dims->find(letter);
    const Dims::Entry* part = dims->find(divisor);
    if (whole == nullptr || part == nullptr || (part->value > 0 && whole->value % part->value == 0) ||
        whole->value == part->value) {
      continue;
    }
    return bad_input(
        op.name + ": " + std::string(part->from) + " has " + std::to_string(part->value) + " " + noun(divisor) +
        ", expected a divisor of " + std::to_string(whole->value) +
        (whole->from.empty() ? "" : " (the " + std::string(noun(letter)) + " of " + std::string(whole->from) + ")"));
  }
  if (packed && (*dims)["B"] != 1) {
    return bad_input(op.name + ": packed sequences need one batch row, " + op.inputs.front().name + " has " +
                     std::to_string((*dims)["B"]));
  }
  for (const TensorDecl& decl : op.inputs) {
    const View& view = view_at(args, decl.offset);
    if (view.given() && device == Device::cpu) LINNET_TRY(check_values(op, decl, view, args, *dims));
  }
  return {};
}

// prepare(), and where the call is remembered, if it is.
Status prepare(const Op& op, void* args, Dims* dims, bool* packed_rank, Remembered** call) {
  *call = Remembered::recall(op, args);
  if (*call != nullptr) {
    std::memcpy(args, (*call)->args.prepared, op.args_bytes);
    *dims = (*call)->dims;
    *packed_rank = (*call)->packed_rank;
  } else {
    alignas(std::max_align_t) char asked[kMaxStruct];
    std::memcpy(asked, args, op.args_bytes);
    LINNET_TRY(prepare_anew(op, args, dims, packed_rank));
    *call = Remembered::remember(op, asked, args, *dims, *packed_rank);
  }
  return op.check == nullptr ? Status() : op.check(args, *dims);
}

}  // namespace

Status prepare(const Op& op, void* args, Dims* dims, bool* packed_rank) {
  Remembered* call;
  return prepare(op, args, dims, packed_rank, &call);
}

Status output_shape(const Op& op, const TensorDecl& output, const void* args, const Dims& dims, bool packed_rank, View* view) {
  const Dtype io = call_dtype(op, args);
  const TensorDecl& first = op.inputs.front();
  const bool other = !output.other_shape.empty() && view_at(args, first.offset).rank != Words(first.shape).count;
  const Words words(other ? output.other_shape : output.shape);
  int64_t sizes[kMaxRank];
  int rank = 0;
  for (int i = packed_rank && starts_with_batch(output) ? 1 : 0; i < words.count; ++i) {
    if (!evaluate(words.word[i], op, args, dims, &sizes[rank++])) {
      return bad_input(op.name + ": the size " + std::string(words.word[i]) + " of " + output.name +
                       " is not known from the inputs");
    }
  }
  const bool acc = output.element == Element::acc;
  const Dtype dtype = output.element == Element::index ? Dtype::i64 : acc ? (io == Dtype::f64 ? Dtype::f64 : Dtype::f32) : io;
  *view = View::dense(nullptr, dtype, sizes, rank);
  return {};
}

namespace {

// What the environment asks for. Every call comes here: one walk for all names, and most entries differ in their first letters.
struct Asked {
  bool impl = false;    // LINNET_IMPL or LINNET_ISA choose an implementation
  bool ranges = false;  // LINNET_CHECK: values are looked at
};
Asked asked_by_environment() {
  Asked asked;
  const auto begins = [](const char* entry, std::string_view name) {
    size_t i = 0;
    while (i < name.size() && entry[i] == name[i]) ++i;
    return i == name.size();
  };
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    if (!begins(*entry, "LINNET_")) continue;
    asked.impl |= begins(*entry, "LINNET_IMPL=") || begins(*entry, "LINNET_ISA=");
    asked.ranges |= begins(*entry, "LINNET_CHECK=") && (*entry)[13] != '\0' && (*entry)[13] != '0';
  }
  return asked;
}

// The last implementation that can run the call, among those of this name (empty: all). `reason`: why the first of them, which
// takes the most calls, does not, when none does.
Status choose_best(const Op& op, Pass pass, Device device, const void* args, const void* out, std::string_view name,
                   const Impl** chosen, std::string* reason) {
  Isa limit = Isa::avx512;
  if (name.empty()) LINNET_TRY(isa_choice(&limit));
  *chosen = nullptr;
  for (size_t i = op.impls.size(); i-- > 0;) {
    const Impl& impl = op.impls[i];
    if (impl.device != device || (!name.empty() && !is_named(impl, name))) continue;
    bool beyond = false;
    for (const Isa isa : kIsas) beyond |= isa > limit && impl.name.substr(0, impl.name.find('_')) == isa_name(isa);
    if (beyond) continue;
    *reason = impl.missing();
    if (reason->empty()) *reason = refusal(impl, pass, args, out);
    if (!reason->empty()) continue;
    *chosen = &impl;
    return {};
  }
  return {};
}
Status choose_best(const Op& op, Pass pass, Device device, const void* args, const void* out, const Impl** chosen) {
  std::string reason;
  LINNET_TRY(choose_best(op, pass, device, args, out, "", chosen, &reason));
  if (*chosen != nullptr) return {};
  if (device == Device::cpu) return impossible(op.name + ": no implementation runs on this machine");
  return impossible(op.name + ": the tensors are on a CUDA device; " +
                    (reason.empty() ? op.name + " has no CUDA kernels" : reason));
}

}  // namespace

bool is_named(const Impl& impl, std::string_view name) {
  return impl.name == name ||
         (impl.name.size() > name.size() && impl.name[name.size()] == '.' && std::string_view(impl.name).starts_with(name));
}

std::string refusal(const Impl& impl, Pass pass, const void* args, const void* out) {
  if (pass == Pass::backward && impl.backward == nullptr) return "there is no backward";
  const char* reason = args == nullptr || impl.refuses == nullptr ? nullptr : impl.refuses(args, out, pass);
  return reason == nullptr ? "" : reason;
}

bool has_impl_on(const Op& op, Device device) {
  for (const Impl& impl : op.impls) {
    if (impl.device == device) return true;
  }
  return false;
}

bool is_causal(const Op& op, const void* args) {
  if (op.always_causal) return true;
  const OptionDecl* option = op.find_option("causal");
  if (option != nullptr && option->kind == OptionKind::boolean) return value_at<bool>(args, option->offset);
  return std::any_of(op.inputs.begin(), op.inputs.end(), [](const TensorDecl& decl) { return decl.mutated; });
}

Device device_of(const Op& op, const void* args) { return view_at(args, op.inputs.front().offset).device; }

std::vector<ForcedImpl> forced_impls() {
  std::vector<ForcedImpl> list;
  const char* text = std::getenv("LINNET_IMPL");
  for (std::string_view rest = text == nullptr ? "" : text; !rest.empty();) {
    const std::string_view item = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(item.size() + 1, rest.size()));
    const size_t colon = item.find(':');
    const bool everywhere = colon == std::string_view::npos;
    list.push_back({everywhere ? "" : item.substr(0, colon), everywhere ? item : item.substr(colon + 1), everywhere});
  }
  return list;
}

namespace {
const Op* (*op_finder)(std::string_view name) = nullptr;
}  // namespace
void know_all_ops(const Op* (*find)(std::string_view name)) { op_finder = find; }

Status choose_impl(const Op& op, Pass pass, const Context& context, Device device, const void* args, const void* out,
                   const Impl** chosen) {
  if (pass == Pass::backward && !op.differentiable()) return impossible(op.name + ": there is no backward");
  std::string_view wanted = context.impl == nullptr ? "" : context.impl;
  if (wanted.empty()) {
    for (const ForcedImpl& each : forced_impls()) {
      if (each.everywhere || each.op == op.name) {
        wanted = each.impl;
      } else if (op_finder != nullptr && op_finder(each.op) == nullptr) {
        return bad_input("LINNET_IMPL: there is no operator '" + std::string(each.op) + "'");
      }
    }
  }
  if (wanted.empty()) return choose_best(op, pass, device, args, out, chosen);
  std::string names, reason;
  const Impl* named = nullptr;  // the first of that name
  for (const Impl& impl : op.impls) {
    names += (names.empty() ? "" : ", ") + impl.name;
    if (named == nullptr && is_named(impl, wanted)) named = &impl;
  }
  if (named == nullptr) {
    return bad_input(op.name + ": there is no implementation '" + std::string(wanted) + "', expected one of " + names);
  }
  // LINNET_IMPL is for the calls it fits: a process may work on both.
  const bool by_environment = context.impl == nullptr || *context.impl == '\0';
  if (by_environment && named->device != device) return choose_best(op, pass, device, args, out, chosen);
  reason = named->missing();
  if (reason.empty() && named->device != device) reason = std::string("the tensors are on ") + place_name(device);
  if (reason.empty()) LINNET_TRY(choose_best(op, pass, device, args, out, wanted, chosen, &reason));
  if (reason.empty()) return {};
  return impossible(op.name + ": implementation " + std::string(wanted) + " cannot run: " + reason);
}

namespace {

// Results whose rows lie as badly as rows may: some kernels do not take such.
Status misaligned_results(const Op& op, const void* args, const Dims& dims, bool packed_rank, void* out) {
  alignas(std::max_align_t) char unused[2][kMaxStruct];
  op.construct(unused[0], out, unused[1]);
  for (const TensorDecl& decl : op.outputs) {
    View& view = view_at(out, decl.offset);
    LINNET_TRY(output_shape(op, decl, args, dims, packed_rank, &view));
    if (packed_rank && starts_with_batch(decl)) insert_leading(&view, view.rank > 0 ? view.size[0] * view.stride[0] : 0);
    view.data = reinterpret_cast<void*>((uintptr_t{1} << 20) + static_cast<uintptr_t>(dtype_size(view.dtype)));
    view.device = device_of(op, args);
  }
  return {};
}

}  // namespace

Status workspace_bytes(const Op& op, Pass pass, const void* args, const Context& context, int64_t* bytes) {
  alignas(std::max_align_t) char copy[kMaxStruct];
  std::memcpy(copy, args, op.args_bytes);
  Dims dims;
  bool packed_rank;
  LINNET_TRY(prepare(op, copy, &dims, &packed_rank));
  const Impl* impl;
  LINNET_TRY(choose_impl(op, pass, context, device_of(op, copy), copy, nullptr, &impl));
  const Executor& executor = context.executor == nullptr ? default_executor() : *context.executor;
  *bytes = impl->workspace(copy, pass, executor.workers());
  if (impl->device == Device::cuda && pass == Pass::forward) {  // the results may lie so that another row runs: room for both
    alignas(std::max_align_t) char out[kMaxStruct];
    LINNET_TRY(misaligned_results(op, copy, dims, packed_rank, out));
    if (choose_impl(op, pass, context, Device::cuda, copy, out, &impl).ok()) {
      *bytes = std::max(*bytes, impl->workspace(copy, pass, executor.workers()));
    }
  }
  if (*bytes > 0) *bytes += 128;  // run() aligns the caller's pointer
  return {};
}

int64_t workspace_bytes(const Op& op, Pass pass, const void* args, const Context& context) {
  int64_t bytes = 0;
  return workspace_bytes(op, pass, args, context, &bytes).ok() ? bytes : 0;
}

Status run(const Op& op, Pass pass, const void* caller_args, const void* caller_out, const void* caller_grads,
           const Context& context) {
  Launch launch;
  launch.executor = context.executor == nullptr ? &default_executor() : context.executor;
  launch.workers = launch.executor->workers();
  const auto take_workspace = [&](int64_t needed) -> Status {
    if (needed <= 0) return {};
    void* memory = context.workspace;
    int64_t bytes = memory == nullptr ? 0 : context.workspace_bytes;
    if (context.allocate != nullptr) {
      memory = context.allocate(context.allocator, needed + 128);
      bytes = memory == nullptr ? 0 : needed + 128;
    }
    if (bytes < needed + 128) {
      return bad_input(op.name + ": the workspace has " + std::to_string(bytes) + " bytes, expected at least " +
                       std::to_string(needed + 128) + " (ask " + op.name + "_workspace; in C linnet_workspace)");
    }
    const uintptr_t base = reinterpret_cast<uintptr_t>(memory);
    launch.workspace = static_cast<char*>(memory) + ((base + 127) / 128 * 128 - base);
    return {};
  };
  const bool forward = pass == Pass::forward;
  const Asked asked = asked_by_environment();
  if (asked.ranges) LINNET_TRY(check_ranges(op, caller_args));
  const bool free_choice = (context.impl == nullptr || *context.impl == '\0') && !asked.impl;
  Remembered* call = forward && free_choice ? Remembered::recall(op, caller_args) : nullptr;
  if (call != nullptr && call->recall_out(caller_out, launch.workers)) {
    if (op.check != nullptr) LINNET_TRY(op.check(call->args.prepared, call->dims));
    LINNET_TRY(take_workspace(call->workspace));
    call->run(launch);
    return {};
  }

  alignas(std::max_align_t) char args[kMaxStruct], out[kMaxStruct], grads[kMaxStruct];
  std::memcpy(args, caller_args, op.args_bytes);
  std::memcpy(out, caller_out, op.out_bytes);
  if (!forward) std::memcpy(grads, caller_grads, op.grads_bytes);
  Dims dims;
  bool packed_rank;
  LINNET_TRY(prepare(op, args, &dims, &packed_rank, &call));
  const Device device = device_of(op, args);
  for (const TensorDecl& decl : op.inputs) {
    if (device == Device::cpu) LINNET_TRY(check_numbers(op, decl, view_at(args, decl.offset)));
  }
  const Impl* impl;
  LINNET_TRY(choose_impl(op, pass, context, device, args, nullptr, &impl));

  const auto add_batch = [&](const TensorDecl& decl, View* view) {
    if (packed_rank && view->given() && starts_with_batch(decl))
      insert_leading(view, view->rank > 0 ? view->size[0] * view->stride[0] : 0);
  };
  for (const TensorDecl& decl : op.outputs) {
    View expected;
    LINNET_TRY(output_shape(op, decl, args, dims, packed_rank, &expected));
    View& view = view_at(out, decl.offset);
    if (decl.element == Element::param && element_fits(Element::acc, view.dtype, expected.dtype)) expected.dtype = view.dtype;
    if (!forward && !decl.saved) view = View();
    LINNET_TRY(check_result(op, decl, decl.name, expected, device, forward ? !decl.optional : decl.saved, &view));
    if (forward) LINNET_TRY(check_written(op, decl.name, view));
    add_batch(decl, &view);
    if (forward || !decl.differentiable) continue;
    View& gradient = view_at(grads, decl.grad_offset);
    LINNET_TRY(check_result(op, decl, "d" + decl.name, expected, device, false, &gradient));
    add_batch(decl, &gradient);
  }
  if (!forward) {
    for (const AbsentDecl& decl : op.absent_gradients) {
      if (view_at(grads, decl.offset).given()) return bad_input(op.name + ": " + decl.name + " is not a gradient");
    }
    for (const TensorDecl& decl : op.inputs) {
      if (!decl.differentiable) continue;
      View& gradient = view_at(grads, decl.grad_offset);
      const View& given = view_at(caller_args, decl.offset);
      if (!gradient.given()) continue;
      if (!given.given()) return bad_input(op.name + ": d" + decl.name + " is given but " + decl.name + " is not");
      LINNET_TRY(check_result(op, decl, "d" + decl.name, given, device, false, &gradient));
      LINNET_TRY(check_written(op, "d" + decl.name, gradient));
      while (gradient.rank < view_at(args, decl.offset).rank) {
        insert_leading(&gradient, gradient.rank > 0 ? gradient.size[0] * gradient.stride[0] : 0);
      }
    }
  }

  if (device == Device::cuda) {  // now that the results are known to be what they should be
    if (forward) LINNET_TRY(choose_impl(op, pass, context, device, args, out, &impl));
    if (free_choice && impl->slow_from > 0 && dims["T"] >= impl->slow_from) {
      log_slow(op, *impl, pass, args, forward ? out : nullptr);
    }
  }
  const int64_t needed = impl->workspace(args, pass, launch.workers);
  LINNET_TRY(take_workspace(needed));
  const auto start = [&] { forward ? impl->forward(args, out, launch) : impl->backward(args, out, grads, launch); };
  if (device == Device::cpu) {
    if (forward && free_choice && call != nullptr) call->remember_out(caller_out, out, impl, launch.workers, needed);
    start();
    return {};
  }
  const char* error = nullptr;
  launch.error = &error;
  launch.stream = context.stream;
  const cuda::Scope scope(view_at(args, op.inputs.front().offset).data);
  if (const Status status = scope.status(); !status.ok()) {
    return impossible(op.name + ": " + op.inputs.front().name + ": " + status.message());
  }
  start();
  return error == nullptr ? Status() : impossible(op.name + ": the CUDA driver refused a kernel: " + error);
}

Status set_option(const Op& op, std::string_view name, std::string_view text, void* args) {
  const OptionDecl* option = op.find_option(name);
  if (option == nullptr) return bad_input(op.name + ": there is no option '" + std::string(name) + "'");
  const auto wrong = [&](const std::string& expected) {
    return bad_input(op.name + ": " + option->name + " is '" + std::string(text) + "', expected " + expected);
  };
  const auto parse = [](std::string_view word, auto* value) {
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), *value);
    return error == std::errc() && end == word.data() + word.size() && !word.empty();
  };
  switch (option->kind) {
    case OptionKind::real: {
      double x;
      if (!parse(text, &x)) return wrong("a number");
      value_at<double>(args, option->offset) = x;
      break;
    }
    case OptionKind::maybe_real: {
      double x = 0;
      const bool none = text == "none" || text.empty();
      if (!none && !parse(text, &x)) return wrong("a number or none");
      value_at<Maybe>(args, option->offset) = none ? Maybe() : Maybe(x);
      break;
    }
    case OptionKind::integer: {
      int64_t x;
      if (!parse(text, &x)) return wrong("a whole number");
      value_at<int64_t>(args, option->offset) = x;
      break;
    }
    case OptionKind::boolean: {
      const bool on = text == "1" || text == "true";
      if (!on && text != "0" && text != "false") return wrong("0 or 1");
      value_at<bool>(args, option->offset) = on;
      break;
    }
    case OptionKind::choice: {
      std::string names;
      for (size_t i = 0; i < option->choices.size(); ++i) {
        names += (i ? ", " : "") + option->choices[i];
        if (text != option->choices[i]) continue;
        value_at<int32_t>(args, option->offset) = static_cast<int32_t>(i);
        return {};
      }
      return wrong("one of " + names);
    }
    case OptionKind::window: {
      Window w;
      const size_t comma = text.find(',');
      if (comma == std::string_view::npos || !parse(text.substr(0, comma), &w.left) ||
          !parse(text.substr(comma + 1), &w.right)) {
        return wrong("two whole numbers such as 4,-1");
      }
      value_at<Window>(args, option->offset) = w;
      break;
    }
    case OptionKind::sizes: {
      Sizes list;
      for (std::string_view rest = text == "none" ? "" : text; !rest.empty();) {
        const std::string_view word = rest.substr(0, rest.find(','));
        if (list.count == Sizes::kMax) return wrong("at most " + std::to_string(Sizes::kMax) + " numbers");
        if (!parse(word, &list.value[list.count++])) return wrong("whole numbers such as 2,4,8, or none");
        rest.remove_prefix(word.size() == rest.size() ? word.size() : word.size() + 1);
      }
      value_at<Sizes>(args, option->offset) = list;
      break;
    }
  }
  return check_option(op, *option, args);
}

std::string option_text(const OptionDecl& option, const void* args) {
  switch (option.kind) {
    case OptionKind::real: return number(value_at<double>(args, option.offset));
    case OptionKind::maybe_real: {
      const Maybe& x = value_at<Maybe>(args, option.offset);
      return x.given ? number(x.value) : "none";
    }
    case OptionKind::integer: return std::to_string(value_at<int64_t>(args, option.offset));
    case OptionKind::boolean: return value_at<bool>(args, option.offset) ? "1" : "0";
    case OptionKind::choice: return option.choices[static_cast<size_t>(value_at<int32_t>(args, option.offset))];
    case OptionKind::window: {
      const Window& w = value_at<Window>(args, option.offset);
      return std::to_string(w.left) + "," + std::to_string(w.right);
    }
    case OptionKind::sizes: {
      const Sizes& list = value_at<Sizes>(args, option.offset);
      std::string text;
      for (int64_t i = 0; i < list.count; ++i) text += (i ? "," : "") + std::to_string(list.value[i]);
      return list.count == 0 ? "none" : text;
    }
  }
  return "";
}

std::string always_available() { return ""; }
std::string cuda_available() { return cuda::missing_on_hopper(); }
template <int isa>
std::string isa_available() {
  return isa_missing(static_cast<Isa>(isa));
}
template std::string isa_available<0>();
template std::string isa_available<1>();
template std::string isa_available<2>();

Serial::Serial() {
  static std::atomic<uint64_t> next{1};
  value_ = next.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace linnet
