// The values of a call that its declaration bounds: offsets, lengths and indices by a letter, floats by their meaning.
#include <algorithm>
#include <cmath>
#include <iterator>

#include "core/call/checks.h"
#include "core/half.h"

namespace linnet {

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
      return bad_input(op.name + ": " + decl.name + place(view.rank) + " is " + number_text(x) + ", expected " +
                       rule->expected);
    }
    largest = i % width == 0 ? x : std::max(largest, x);
    if (decl.values != Values::weights || i % width != width - 1 || largest > 0) continue;
    return bad_input(op.name + ": " + decl.name + place(view.rank - 1) + " is 0 everywhere, expected a number above 0");
  }
  return {};
}

}  // namespace linnet
