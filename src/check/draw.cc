#include "check/draw.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "check/random.h"
#include "core/letters.h"

namespace linnet::check {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

bool is_index(Dtype dtype) { return dtype == Dtype::i32 || dtype == Dtype::i64; }

}  // namespace

Status Drawing::outline() {
  problem_->op = &op_;
  problem_->dtype = c_.dtype;
  problem_->options = c_.options;
  for (const auto& [name, value] : c_.options) LINNET_TRY(call_.set_option(name, value));
  for (const auto& [letter, value] : c_.letters) dims_.set(letter, value, "");
  drop_batch_ = is_packed(op_, c_.with) && Random(c_.seed, "rank").chance(0.5);
  for (const TensorDecl& decl : op_.inputs) {
    if (decl.optional && !contains(c_.with, decl.name)) continue;
    LINNET_TRY(add(decl));
  }
  for (const TensorDecl& decl : op_.inputs) {
    if (decl.values == Values::page_table && find(decl.name) != nullptr) spoil_page_table(decl);
  }
  return prepare();
}

void Drawing::fill() {
  for (Array& array : problem_->inputs) {
    if (!is_index(array.dtype)) draw(*op_.find_input(array.name), &array);
  }
  for (Array& array : problem_->inputs) {
    if (!is_float(array.dtype)) continue;
    if (c_.has_value("garbage")) spoil(*op_.find_input(array.name), &array);
    round_values(&array);
  }
}

Status Drawing::results() {
  for (const TensorDecl& decl : op_.outputs) {
    const bool needed = !decl.optional || (c_.backward && decl.saved);
    if (needed || !contains(c_.skip, decl.name)) problem_->outputs.push_back(decl.name);
    if (!c_.backward || !decl.differentiable || contains(c_.skip, "d" + decl.name)) continue;
    View view;
    LINNET_TRY(call_.output_view(decl.name, &view));
    Array array{.name = "d" + decl.name, .size = {view.size, view.size + view.rank}, .dtype = view.dtype, .values = {}};
    Random random(c_.seed, array.name);
    array.values.resize(static_cast<size_t>(view.elements()));
    for (double& x : array.values) x = random.normal();
    round_values(&array);
    problem_->incoming.push_back(std::move(array));
  }
  for (const Array& array : problem_->inputs) {
    if (!c_.backward || !op_.find_input(array.name)->differentiable || contains(c_.skip, "d" + array.name)) continue;
    problem_->gradients.push_back("d" + array.name);
  }
  return {};
}

std::vector<std::string> Drawing::shape_words(const TensorDecl& decl) const {
  return words_of(contains(c_.other, decl.name) ? decl.other_shape : decl.shape);
}

Status Drawing::add(const TensorDecl& decl) {
  Array array;
  array.name = decl.name;
  Random random(c_.seed, decl.name + " type");
  const Dtype acc = c_.dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32;
  switch (decl.element) {
    case Element::io: array.dtype = c_.dtype; break;
    case Element::acc: array.dtype = acc; break;
    case Element::param: array.dtype = random.chance(0.5) ? c_.dtype : acc; break;
    case Element::weight:
      array.dtype = c_.dtype == Dtype::f64 ? Dtype::f64 : random.pick({Dtype::f32, Dtype::bf16, Dtype::f16});
      break;
    case Element::index: array.dtype = random.chance(0.5) ? Dtype::i32 : Dtype::i64; break;
    case Element::mask:
    case Element::code: array.dtype = Dtype::u8; break;
  }
  const std::vector<std::string> words = shape_words(decl);
  for (const std::string& word : words) {
    int64_t size;
    if (!evaluate(word, op_, call_.args(), dims_, &size)) {
      return bad_input("case " + op_.name + ": the size " + word + " of " + decl.name + " does not follow from the letters");
    }
    if (decl.broadcast && random.chance(0.4)) size = 1;
    array.size.push_back(size);
  }
  if (drop_batch_ && words.size() > 1 && words[0] == "B" && !decl.broadcast) array.size.erase(array.size.begin());
  while (decl.broadcast && array.size.size() > 1 && array.size[0] == 1 && random.chance(0.5)) {
    array.size.erase(array.size.begin());
  }
  if (is_index(array.dtype)) draw_index(decl, &array);
  problem_->inputs.push_back(std::move(array));
  return {};
}

void Drawing::draw_index(const TensorDecl& decl, Array* array) {
  Random random(c_.seed, decl.name);
  int64_t bound = 0;
  if (!evaluate(decl.of, op_, call_.args(), dims_, &bound)) bound = 1000;  // any whole numbers
  array->values.resize(static_cast<size_t>(product(array->size)));
  std::vector<double>& values = array->values;
  if (values.empty()) return;
  switch (decl.values) {
    case Values::offsets:  // sorted cuts; equal ones are empty sequences
      for (double& x : values) x = static_cast<double>(random.chance(0.2) ? bound / 2 : random.between(0, bound));
      values.front() = 0;
      values.back() = static_cast<double>(bound);
      std::sort(values.begin(), values.end());
      break;
    case Values::page_table:
    case Values::below:
      for (double& x : values) x = static_cast<double>(random.below(std::max<int64_t>(bound, 1)));
      break;
    case Values::tree: draw_tree(bound, random, &values); break;
    default: {  // lengths and starts: empty, full, or between
      for (double& x : values) {
        const double kind = random.uniform();
        x = static_cast<double>(kind < 0.1 ? 0 : kind < 0.2 ? bound : random.between(0, bound));
      }
    }
  }
}

void Drawing::draw_tree(int64_t leaves, Random& random, std::vector<double>* parent) const {
  const auto nodes = static_cast<int64_t>(parent->size());
  std::vector<int64_t> roots;
  for (int64_t i = 0; i < std::min(leaves, nodes); ++i) roots.push_back(i);
  for (size_t i = roots.size(); c_.has_value("mixed") && i > 1; --i) {
    std::swap(roots[i - 1], roots[static_cast<size_t>(random.below(static_cast<int64_t>(i)))]);
  }
  parent->assign(parent->size(), -1);
  for (int64_t x = leaves; x < nodes && !roots.empty(); ++x) {
    const auto count = static_cast<int64_t>(roots.size());
    const int64_t first = x + 1 == nodes ? 0 : random.below(count);
    const int64_t end = x + 1 == nodes ? count : std::min(count, first + random.between(1, 5));
    for (int64_t i = first; i < end; ++i)
      (*parent)[static_cast<size_t>(roots[static_cast<size_t>(i)])] = static_cast<double>(x);
    roots.erase(roots.begin() + first, roots.begin() + end);
    roots.insert(roots.begin() + first, x);
  }
}

Drawing::Paging Drawing::paging(const TensorDecl& table) const {
  const std::string pages = words_of(table.shape).back();
  for (const TensorDecl& decl : op_.inputs) {
    if (decl.values != Values::lengths || decl.of.rfind(pages + "*", 0) != 0) continue;
    return {find(table.name), find(decl.name), decl.of.substr(pages.size() + 1), table.of};
  }
  return {};
}

void Drawing::spoil_page_table(const TensorDecl& decl) {
  const Paging paged = paging(decl);
  if (paged.lengths == nullptr || !c_.has_value("garbage")) return;
  Array& table = const_cast<Array&>(*paged.table);
  const int64_t pages = table.size[1], page = std::max<int64_t>(1, dims_[paged.page]);
  for (size_t b = 0; b < paged.lengths->values.size(); ++b) {
    const auto used = (static_cast<int64_t>(paged.lengths->values[b]) + page - 1) / page;
    for (int64_t i = used; i < pages; ++i)
      table.values[b * static_cast<size_t>(pages) + static_cast<size_t>(i)] = i % 2 ? -1 : 2e9;
  }
}

Status Drawing::prepare() {
  alignas(128) static char place[256];  // not read; where tensors may lie on a GPU
  integers_.reserve(problem_->inputs.size());
  for (const Array& array : problem_->inputs) {
    View view = View::dense(place + (c_.strided ? dtype_size(array.dtype) : 0), array.dtype, array.size.data(),
                            static_cast<int>(array.size.size()));
    if (is_index(array.dtype)) {
      integers_.emplace_back(array.values.begin(), array.values.end());
      view.dtype = Dtype::i64;
      view.data = integers_.back().data();
    }
    LINNET_TRY(call_.set(array.name, view));
  }
  return call_.prepare();
}

void Drawing::draw(const TensorDecl& decl, Array* array) {
  Random random(c_.seed, decl.name);
  std::vector<double>& values = array->values;
  values.resize(static_cast<size_t>(product(array->size)));
  const int64_t width = array->size.empty() ? 1 : std::max<int64_t>(1, array->size.back());
  if (decl.element == Element::code) {
    for (double& x : values) x = static_cast<double>(random.below(256));
    return;
  }
  if (decl.element == Element::mask) {
    for (double& x : values) x = random.chance(0.7) ? 1 : 0;
    for (size_t i = 0; c_.has_value("masked") && i < values.size() && i < static_cast<size_t>(width); ++i) values[i] = 0;
    return;
  }
  for (double& x : values) {
    switch (decl.values) {
      case Values::feature_sums:
      case Values::write_strength:
      case Values::unit_interval: x = random.uniform(); break;
      case Values::gain: x = 1 + random.uniform(); break;
      case Values::rounding: x = 0; break;
      case Values::weights:  // gradients have them below a fraction: not near 0
      case Values::positive: x = std::exp2(2 * random.uniform() - 1); break;
      case Values::log_decay: x = -0.2 * std::abs(random.normal() * random.normal() * random.normal()); break;
      default: x = random.normal();
    }
  }
  // A sum that counts something (taylor2's first feature is 1): random signs of the others must not cancel a denominator.
  for (size_t row = 0; decl.values == Values::feature_sums && row < values.size(); row += static_cast<size_t>(width)) {
    values[row] = static_cast<double>(width);
  }
  // Weights of 0 switch off what they weigh, all but the first.
  for (size_t i = 0; decl.values == Values::weights && c_.has_value("masked") && i < values.size(); ++i) {
    if (i % static_cast<size_t>(width) != 0 && random.chance(0.15)) values[i] = 0;
  }
  for (size_t row = 0; row < values.size(); row += static_cast<size_t>(width)) {
    double factor = 1;
    // Rows from 0.03 to 3 (exp of more overflows); logits, where hundreds are legal, to 300, element by element when they are
    // one row (sinks).
    const bool logits = decl.values == Values::logits;
    const auto draw_factor = [&] { return std::pow(10, (logits ? 4 : 2) * random.uniform() - 1.5); };
    // Decays from nearly none to a reset every token.
    const bool decay = decl.values == Values::log_decay;
    if (decay && c_.has_value("mixed")) factor = std::pow(10, 5 * random.uniform() - 2.5);
    const bool mixed = c_.has_value("mixed") && (logits || decl.values == Values::normal);
    if (mixed) factor = draw_factor();
    if (decl.values == Values::unit_rows) {
      double squares = 0;
      for (int64_t i = 0; i < width; ++i)
        squares += values[row + static_cast<size_t>(i)] * values[row + static_cast<size_t>(i)];
      factor = 1 / std::sqrt(squares);
    }
    const bool masked_row = c_.has_value("masked") && decl.values == Values::logits && width > 1 && random.chance(0.1);
    for (int64_t i = 0; i < width; ++i) {
      double& x = values[row + static_cast<size_t>(i)];
      x *= mixed && logits && array->size.size() == 1 ? draw_factor() : factor;
      if (masked_row || (c_.has_value("masked") && decl.values == Values::logits && random.chance(0.15))) x = -HUGE_VAL;
      if (decay && c_.has_value("masked") && random.chance(0.03)) x = -HUGE_VAL;  // forget
    }
  }
  if (c_.has_value("repeated")) repeat_tokens(decl, array);
}

void Drawing::repeat_tokens(const TensorDecl& decl, Array* array) const {
  const std::vector<std::string> words = shape_words(decl);
  const size_t missing = words.size() - array->size.size();
  std::vector<double> values = array->values;
  const bool any_sign = decl.values == Values::normal || decl.values == Values::unit_rows;
  for (double& x : values) x = any_sign ? std::abs(x) : x;
  std::vector<bool> tokens(words.size());
  for (size_t d = 0; d < words.size(); ++d) tokens[d] = letter_named(words[d]).counts == Counts::tokens;
  for_each(*array, words.size(), [&](double& x, const std::vector<int64_t>& at) {
    int64_t index = 0;
    for (size_t d = missing; d < at.size(); ++d) index = index * array->size[d - missing] + (tokens[d] ? 0 : at[d]);
    x = values[static_cast<size_t>(index)];
  });
}

void Drawing::spoil(const TensorDecl& decl, Array* array) const {
  const std::vector<std::string> words = shape_words(decl);
  if (words.size() < 3 || decl.broadcast || drop_batch_) return;
  for (const TensorDecl& by : op_.inputs) {
    const Array* index = find(by.name);
    if (index == nullptr) continue;
    const bool lengths = by.values == Values::lengths, starts = by.values == Values::starts;
    const bool mask = by.element == Element::mask && by.shape == words[0] + " " + words[1] &&
                      (by.of.empty() || by.of == decl.name);  // some masks cover one tensor alone
    if (((lengths || starts) && words[0] == "B" && words[1] == by.of) || mask) {
      for_each(*array, words.size(), [&](double& x, const std::vector<int64_t>& at) {
        const size_t place = static_cast<size_t>(mask ? at[0] * array->size[1] + at[1] : at[0]);
        const double bound = index->values[place], t = static_cast<double>(at[1]);
        if (mask ? bound == 0 : lengths ? t >= bound : t < bound) x = kNan;
      });
    }
    if (by.values != Values::page_table || words[0] != by.of) continue;
    const Paging paged = paging(by);
    if (paged.lengths == nullptr || words[1] != paged.page) continue;
    std::vector<bool> used(static_cast<size_t>(array->size[0] * array->size[1]));
    for (size_t b = 0; b < paged.lengths->values.size(); ++b) {
      for (int64_t t = 0; t < static_cast<int64_t>(paged.lengths->values[b]); ++t) {
        const double page = index->values[b * static_cast<size_t>(index->size[1]) + static_cast<size_t>(t / array->size[1])];
        used[static_cast<size_t>(static_cast<int64_t>(page) * array->size[1] + t % array->size[1])] = true;
      }
    }
    for_each(*array, words.size(), [&](double& x, const std::vector<int64_t>& at) {
      if (!used[static_cast<size_t>(at[0] * array->size[1] + at[1])]) x = kNan;
    });
  }
}

}  // namespace linnet::check
