#include "check/problem.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <mutex>

#include "check/guarded.h"
#include "check/random.h"
#include "core/cuda.h"
#include "core/half.h"

namespace linnet::check {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

std::vector<std::string> words_of(const std::string& shape) {
  std::vector<std::string> words;
  for (size_t start = 0; start < shape.size();) {
    const size_t end = std::min(shape.find(' ', start), shape.size());
    words.push_back(shape.substr(start, end - start));
    start = end + 1;
  }
  return words;
}

bool is_token_letter(const std::string& word) { return word[0] == 'T' || word == "S" || word == "capacity"; }

int64_t product(const std::vector<int64_t>& size, size_t from = 0) {
  int64_t n = 1;
  for (size_t i = from; i < size.size(); ++i) n *= size[i];
  return n;
}

bool is_index(Dtype dtype) { return dtype == Dtype::i32 || dtype == Dtype::i64; }

// Draws the inputs of a case, one random stream for each tensor, so that a case keeps its other values when one is left out.
class Maker {
 public:
  Maker(const Case& c, Problem* problem) : c_(c), op_(*c.op), call_(*c.op), problem_(problem) {}

  // The inputs' shapes and integers; refused calls end here.
  Status outline() {
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

  void fill() {
    for (Array& array : problem_->inputs) {
      if (!is_index(array.dtype)) draw(*op_.find_input(array.name), &array);
    }
    for (Array& array : problem_->inputs) {
      if (!is_float(array.dtype)) continue;
      if (c_.has_value("garbage")) spoil(*op_.find_input(array.name), &array);
      round_values(&array);
    }
  }

  Status results() {
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

  const Call& call() const { return call_; }

 private:
  std::vector<std::string> shape_words(const TensorDecl& decl) const {
    return words_of(contains(c_.other, decl.name) ? decl.other_shape : decl.shape);
  }
  const Array* find(std::string_view name) const { return find_array(problem_->inputs, name); }

  Status add(const TensorDecl& decl) {
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

  void draw_index(const TensorDecl& decl, Array* array) {
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

  // Every node but the root takes a run of the nodes that have no parent yet; the root takes the rest. Runs keep subtrees over
  // consecutive leaves together; "mixed" shuffles the leaves first.
  void draw_tree(int64_t leaves, Random& random, std::vector<double>* parent) const {
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

  // The rows of a paged cache that its lengths use: page_table [B, pages] and lengths [B] of pages*page.
  struct Paging {
    const Array* table = nullptr;
    const Array* lengths = nullptr;
    std::string page, P;
  };
  Paging paging(const TensorDecl& table) const {
    const std::string pages = words_of(table.shape).back();
    for (const TensorDecl& decl : op_.inputs) {
      if (decl.values != Values::lengths || decl.of.rfind(pages + "*", 0) != 0) continue;
      return {find(table.name), find(decl.name), decl.of.substr(pages.size() + 1), table.of};
    }
    return {};
  }

  // Entries past the last used page may hold anything.
  void spoil_page_table(const TensorDecl& decl) {
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

  Status prepare() {
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

  void draw(const TensorDecl& decl, Array* array) {
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

  // Calls use(value, at) for each element, `at` its coordinates by the words of the declared shape (-1: dimension missing or
  // 1).
  template <class Use>
  void for_each(const TensorDecl& decl, Array* array, const Use& use) const {
    const size_t rank = shape_words(decl).size(), missing = rank - array->size.size();
    std::vector<int64_t> at(rank, -1);
    for (size_t i = 0; i < array->values.size(); ++i) {
      int64_t rest = static_cast<int64_t>(i);
      for (size_t d = array->size.size(); d-- > 0;) {
        at[d + missing] = rest % array->size[d];
        rest /= array->size[d];
      }
      use(array->values[i], at);
    }
  }

  // All tokens are one token, whose numbers are made positive: a result that hangs on its one score q.k would otherwise carry
  // the conditioning of that dot product, which no kernel can mend.
  void repeat_tokens(const TensorDecl& decl, Array* array) const {
    const std::vector<std::string> words = shape_words(decl);
    const size_t missing = words.size() - array->size.size();
    std::vector<double> values = array->values;
    const bool any_sign = decl.values == Values::normal || decl.values == Values::unit_rows;
    for (double& x : values) x = any_sign ? std::abs(x) : x;
    for_each(decl, array, [&](double& x, const std::vector<int64_t>& at) {
      int64_t index = 0;
      for (size_t d = missing; d < at.size(); ++d) {
        index = index * array->size[d - missing] + (is_token_letter(words[d]) ? 0 : at[d]);
      }
      x = values[static_cast<size_t>(index)];
    });
  }

  // NaN in all that the operator must not read: keys past a length, before a start, under a mask, rows of no page.
  void spoil(const TensorDecl& decl, Array* array) const {
    const std::vector<std::string> words = shape_words(decl);
    if (words.size() < 3 || decl.broadcast || drop_batch_) return;
    for (const TensorDecl& by : op_.inputs) {
      const Array* index = find(by.name);
      if (index == nullptr) continue;
      const bool lengths = by.values == Values::lengths, starts = by.values == Values::starts;
      const bool mask = by.element == Element::mask && by.shape == words[0] + " " + words[1] &&
                        (by.of.empty() || by.of == decl.name);  // some masks cover one tensor alone
      if (((lengths || starts) && words[0] == "B" && words[1] == by.of) || mask) {
        for_each(decl, array, [&](double& x, const std::vector<int64_t>& at) {
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
      for_each(decl, array, [&](double& x, const std::vector<int64_t>& at) {
        if (!used[static_cast<size_t>(at[0] * array->size[1] + at[1])]) x = kNan;
      });
    }
  }

  const Case& c_;
  const Op& op_;
  Call call_;
  Dims dims_;
  Problem* problem_;
  bool drop_batch_ = false;
  std::vector<std::vector<int64_t>> integers_;  // the prepared call reads them: its cost depends on lengths
};

Executor& executor_of(int threads) {
  static std::mutex mutex;
  static std::map<int, std::unique_ptr<ThreadPool>> pools;
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<ThreadPool>& pool = pools[threads];
  if (pool == nullptr) pool = std::make_unique<ThreadPool>(threads);
  return *pool;
}

std::vector<int64_t> size_of(const View& view) { return {view.size, view.size + view.rank}; }

}  // namespace

void round_values(Array* array) {
  if (array->dtype == Dtype::f64 || !is_float(array->dtype)) return;
  alignas(8) char cell[8];
  for (double& x : array->values) {
    store_f64(cell, array->dtype, 0, x);
    x = load_f64(cell, array->dtype, 0);
  }
}

// Shapes say B; states of sequences that are not packed say N.
int batch_dimension(const Op& op, const Array& array, int64_t batch) {
  const TensorDecl* decl = op.find_input(array.name);
  if (decl == nullptr) decl = op.find_output(array.name);
  if (decl == nullptr) decl = op.find_input(array.name.substr(1));  // gradients
  if (decl == nullptr) decl = op.find_output(array.name.substr(1));
  std::vector<std::string> words = words_of(decl->shape);
  if (const std::vector<std::string> other = words_of(decl->other_shape); other.size() == array.size.size()) words = other;
  const size_t missing = words.size() - array.size.size();
  for (size_t d = missing; d < words.size(); ++d) {
    if ((words[d] == "B" || words[d] == "N") && array.size[d - missing] == batch) return static_cast<int>(d - missing);
  }
  return -1;
}

Array batch_row(const Array& array, int dimension, int64_t row) {
  if (dimension < 0) return array;
  Array part = array;
  const auto d = static_cast<size_t>(dimension);
  const int64_t inner = product(array.size, d + 1), batch = array.size[d],
                outer = product(array.size) / std::max<int64_t>(1, inner * batch);
  part.size[d] = 1;
  part.values.clear();
  for (int64_t i = 0; i < outer; ++i) {
    const auto from = array.values.begin() + (i * batch + row) * inner;
    part.values.insert(part.values.end(), from, from + inner);
  }
  return part;
}

bool take_batch_row(const Problem& problem, int64_t row, Problem* alone, int64_t* batch) {
  const Op& op = *problem.op;
  *batch = 0;
  for (const Array& array : problem.inputs) {
    const TensorDecl& decl = *op.find_input(array.name);
    if (decl.values == Values::offsets) return false;
    const std::vector<std::string> words = words_of(decl.shape);
    for (size_t d = 0; d < words.size() && !decl.broadcast; ++d) {
      if (words[d] == "B") *batch = array.size[d];
    }
  }
  if (*batch < 2) return false;
  *alone = problem;
  for (auto* list : {&alone->inputs, &alone->incoming}) {
    for (Array& array : *list) array = batch_row(array, batch_dimension(op, array, *batch), row % *batch);
  }
  return true;
}

const Array* find_array(const std::vector<Array>& arrays, std::string_view name) {
  const auto at = std::find_if(arrays.begin(), arrays.end(), [&](const Array& array) { return array.name == name; });
  return at == arrays.end() ? nullptr : &*at;
}

Status make_problem(const Case& c, Problem* problem) {
  *problem = Problem();
  Maker maker(c, problem);
  LINNET_TRY(maker.outline());
  // Inputs as doubles, twice in each of two executions, results alike: some ten copies of the inputs in double.
  double bytes = 0;
  for (const Array& array : problem->inputs) bytes += 80 * static_cast<double>(product(array.size));
  if (bytes > static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE))) {
    return impossible("case " + c.op->name + ": it does not fit into the memory of this machine");
  }
  maker.fill();
  return maker.results();
}

Status choices(const Case& c, std::vector<Choice>* list) {
  Problem problem;
  Maker maker(c, &problem);
  LINNET_TRY(maker.outline());
  const Op& op = *c.op;
  const void* args = maker.call().prepared_args();
  list->clear();
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    if (pass == Pass::backward && !c.backward) continue;
    for (const Impl& impl : op.impls) {
      Choice choice = {.impl = &impl, .pass = pass, .reason = refusal(impl, pass, args)};
      if (choice.reason.empty() && impl.device == Device::cuda) choice.workspace = impl.workspace(args, pass, 1);
      list->push_back(std::move(choice));
    }
    const Impl* chosen = nullptr;
    const Context context = {.impl = c.impl.empty() ? nullptr : c.impl.c_str()};
    const Status status = choose_impl(op, pass, context, Device::cpu, args, nullptr, &chosen);
    if (status.code() == Code::bad_input) return status;
    if (!status.ok()) chosen = nullptr;
    for (const Device device : {Device::cpu, Device::cuda}) {
      std::string_view wanted = c.impl;
      for (const ForcedImpl& each : forced_impls()) {
        const bool here = each.everywhere || each.op == op.name;
        for (const Impl& impl : op.impls) {
          if (here && c.impl.empty() && impl.device == device && is_named(impl, each.impl)) wanted = each.impl;
        }
      }
      Choice* best = nullptr;
      for (Choice& choice : *list) {
        if (choice.pass != pass || choice.impl->device != device || !choice.reason.empty()) continue;
        const bool named = wanted.empty() || is_named(*choice.impl, wanted);
        if (device == Device::cpu ? choice.impl == chosen : named) best = &choice;
      }
      if (best != nullptr) best->chosen = true;
    }
  }
  return {};
}

Status launches(const Case& c, std::vector<cuda::Recorded>* list) {
  Problem problem;
  Maker maker(c, &problem);
  LINNET_TRY(maker.outline());
  Call call = maker.call();
  const auto place = [&](const std::string& name, View view) {  // nobody reads or writes there
    view.device = Device::cuda;
    view.data =
        reinterpret_cast<void*>((uintptr_t{1} << 20) + (c.strided ? static_cast<uintptr_t>(dtype_size(view.dtype)) : 0));
    return call.set(name, view);
  };
  for (const Array& array : problem.inputs) {
    LINNET_TRY(place(array.name, View::dense(nullptr, array.dtype, array.size.data(), static_cast<int>(array.size.size()))));
  }
  LINNET_TRY(call.prepare());
  std::vector<std::string> names;
  for (const TensorDecl& decl : c.op->outputs) {
    if (!decl.optional || (c.backward && decl.saved) || !contains(c.skip, decl.name)) names.push_back(decl.name);
    if (c.backward && decl.differentiable && !contains(c.skip, "d" + decl.name)) names.push_back("d" + decl.name);
  }
  for (const Array& array : problem.inputs) {
    const bool differentiable = c.backward && c.op->find_input(array.name)->differentiable;
    if (differentiable && !contains(c.skip, "d" + array.name)) names.push_back("d" + array.name);
  }
  for (const std::string& name : names) {
    View view;
    LINNET_TRY(call.output_view(name, &view));
    LINNET_TRY(place(name, view));
  }
  cuda::Recording recording;
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    if (pass == Pass::backward && !c.backward) continue;
    Context context = {.impl = c.impl.empty() ? nullptr : c.impl.c_str()};
    LINNET_TRY(call.workspace(pass, context, &context.workspace_bytes));
    context.workspace = reinterpret_cast<void*>(uintptr_t{1} << 21);
    LINNET_TRY(call.run(pass, context));
  }
  *list = recording.launches;
  return {};
}

Status accepts(const Case& c, Cost* cost) {
  Problem problem;
  Maker maker(c, &problem);
  LINNET_TRY(maker.outline());
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    if (c.impl.empty() || (pass == Pass::backward && !c.backward)) continue;
    bool known = false, taken = false;
    std::string reason;  // of the first of that name, which takes the most
    for (size_t i = c.op->impls.size(); i-- > 0 && !taken;) {
      const Impl& impl = c.op->impls[i];
      if (!is_named(impl, c.impl)) continue;
      known = true;
      reason = refusal(impl, pass, maker.call().prepared_args());
      taken = reason.empty();
    }
    if (known && !taken) return impossible(c.op->name + ": implementation " + c.impl + " cannot run: " + reason);
  }
  *cost = {};
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    if (c.op->cost == nullptr || (pass == Pass::backward && !c.backward)) continue;
    const Cost part = c.op->cost(maker.call().prepared_args(), maker.call().dims(), pass);
    const bool slow = c.op->check_flops != nullptr;
    cost->flops += slow ? c.op->check_flops(maker.call().prepared_args(), maker.call().dims(), pass) : part.flops;
    cost->bytes += part.bytes;
  }
  double given = 0;  // a bias of every pair may be larger than all that the operator's cost counts
  for (const Array& array : problem.inputs) {
    given += static_cast<double>(product(array.size)) * static_cast<double>(dtype_size(array.dtype));
  }
  cost->bytes = std::max(cost->bytes, given);
  return {};
}

Status execute(const Problem& problem, const Setting& setting, Execution* execution) {
  const Op& op = *problem.op;
  *execution = Execution();
  Call call(op);
  for (const auto& [name, value] : problem.options) LINNET_TRY(call.set_option(name, value));

  std::map<std::string, Guarded> tensors;
  const auto place = [&](const std::string& name, const std::vector<int64_t>& size, Dtype dtype) -> Guarded& {
    Random random(setting.seed, name + " layout");
    const Layout layout =
        setting.strided ? random.pick({Layout::dense, Layout::padded, Layout::padded, Layout::transposed}) : Layout::dense;
    return tensors[name] = Guarded(size, setting.as_reference && is_float(dtype) ? Dtype::f64 : dtype, layout, random);
  };
  const auto give = [&](const Array& array) {
    Guarded& tensor = place(array.name, array.size, array.dtype);
    tensor.fill(array.values);
    return call.set(array.name, tensor.view());
  };
  const auto ask = [&](const std::string& name) {
    View view;
    LINNET_TRY(call.output_view(name, &view));
    return call.set(name, place(name, size_of(view), view.dtype).view());
  };
  const Context context = {.executor = &executor_of(setting.threads),
                           .impl = setting.impl.empty() ? nullptr : setting.impl.c_str()};
  const auto run = [&](Pass pass, const std::vector<std::string>& written) {
    int64_t bytes;
    const bool on_gpu = setting.device == Device::cuda;
    for (auto& [name, tensor] : tensors) {
      tensor.remember();
      View view;
      if (!on_gpu) continue;
      LINNET_TRY(tensor.to_device(&view));
      LINNET_TRY(call.set(name, view));
    }
    LINNET_TRY(call.workspace(pass, context, &bytes));
    GuardedBytes workspace(bytes);
    Context with_memory = context;
    with_memory.workspace = workspace.data();
    with_memory.workspace_bytes = bytes;
    if (on_gpu) LINNET_TRY(workspace.to_device(&with_memory.workspace));
    LINNET_TRY(call.run(pass, with_memory));
    if (on_gpu) {
      LINNET_TRY(cuda::synchronize());
      LINNET_TRY(workspace.from_device());
      for (auto& [name, tensor] : tensors) LINNET_TRY(tensor.from_device());
      LINNET_TRY(call.prepare());
      const Impl* impl;
      LINNET_TRY(choose_impl(op, pass, context, setting.device, call.prepared_args(), nullptr, &impl));
      if (pass == Pass::forward) execution->impl = impl->name;
    }
    const std::string where = pass == Pass::forward ? "forward: " : "backward: ";
    if (!workspace.intact()) execution->faults.push_back(where + "the workspace was written outside of its bytes");
    for (const auto& [name, tensor] : tensors) {
      const std::string damage = tensor.damage(contains(written, name));
      if (!damage.empty()) execution->faults.push_back(where + name + " " + damage);
    }
    for (const std::string& name : written) {
      const TensorDecl* input = op.find_input(name);
      if (input != nullptr && input->values == Values::rounding) continue;
      const Guarded& tensor = tensors.at(name);
      execution->results.push_back({name, size_of(tensor.view()), tensor.view().dtype, tensor.values()});
    }
    return Status();
  };

  std::vector<std::string> written = problem.outputs;
  for (const Array& array : problem.inputs) {
    LINNET_TRY(give(array));
    if (op.find_input(array.name)->mutated) written.push_back(array.name);
  }
  LINNET_TRY(call.prepare());
  if (setting.as_reference && op.largest_logit != nullptr) execution->largest_logit = op.largest_logit(call.prepared_args());
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    if (op.cost != nullptr) execution->flops[pass == Pass::backward] = op.cost(call.prepared_args(), call.dims(), pass).flops;
  }
  for (const std::string& name : problem.outputs) LINNET_TRY(ask(name));
  if (setting.device == Device::cpu) {  // on a GPU it depends on where tensors lie there
    const Impl* impl;
    LINNET_TRY(choose_impl(op, Pass::forward, context, setting.device, call.prepared_args(), nullptr, &impl));
    execution->impl = impl->name;
  }
  LINNET_TRY(run(Pass::forward, written));
  if (problem.gradients.empty()) return {};
  for (const std::string& name : problem.outputs) {
    const Array* saved = setting.saved == nullptr ? nullptr : find_array(*setting.saved, name);
    if (saved != nullptr && op.find_output(name)->saved) tensors.at(name).fill(saved->values);
  }
  for (const Array& array : problem.incoming) LINNET_TRY(give(array));
  for (const std::string& name : problem.gradients) LINNET_TRY(ask(name));
  return run(Pass::backward, problem.gradients);
}

}  // namespace linnet::check
