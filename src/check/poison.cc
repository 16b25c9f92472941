#include "check/poison.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <limits>
#include <optional>

#include "check/compare.h"
#include "core/letters.h"

namespace linnet::check {
namespace {

bool counts_tokens(const std::string& word) { return letter_named(word).counts == Counts::tokens; }

// Packed calls may leave B out, of all tensors or of none: those with one shape tell which.
bool batch_is_left_out(const Problem& problem) {
  for (const Array& array : problem.inputs) {
    const TensorDecl& decl = *problem.op->find_input(array.name);
    const std::vector<std::string> words = words_of(decl.shape);
    if (!decl.other_shape.empty() || decl.broadcast || words.empty() || words[0] != "B") continue;
    return array.size.size() + 1 == words.size();
  }
  return false;
}

// The words of the shape that an array has: of its two, that of its rank. [T, G, K] without B is not [B, T, K].
std::vector<std::string> shape_of(const TensorDecl& decl, const Array& array, bool without_batch) {
  for (const std::string& shape : {decl.shape, decl.other_shape}) {
    std::vector<std::string> words = words_of(shape);
    if (without_batch && !words.empty() && words[0] == "B") words.erase(words.begin());
    if (!words.empty() && words.size() == array.size.size()) return words;
  }
  std::vector<std::string> words = words_of(decl.shape);  // fewer, aligned at the last one
  if (words.size() < array.size.size()) return {};
  words.erase(words.begin(), words.begin() + static_cast<std::ptrdiff_t>(words.size() - array.size.size()));
  return words;
}

// Numbers that an operator refuses where they are not finite are left alone.
bool may_be_poisoned(const TensorDecl& decl) {
  switch (decl.values) {
    case Values::positive:
    case Values::finite:
    case Values::number:
    case Values::weights:
    case Values::rounding: return false;
    default: return !decl.mutated;
  }
}

bool same_bits(double x, double y) {
  return (std::isnan(x) && std::isnan(y)) || std::bit_cast<uint64_t>(x) == std::bit_cast<uint64_t>(y);
}

}  // namespace

bool poison(const Problem& problem, uint64_t seed, Poisoned* poisoned) {
  const Op& op = *problem.op;
  Call call(op);
  for (const auto& [name, value] : problem.options) {
    if (!call.set_option(name, value).ok()) return false;
  }
  if (!is_causal(op, call.args()) || op.earlier_rows == EarlierRows::nothing) return false;
  if (op.shares_units != nullptr && op.shares_units(call.args())) return false;
  // One number of tokens, and one packing: with several, which key is "later" depends on how the operator aligns them.
  const bool without_batch = batch_is_left_out(problem);
  std::optional<int64_t> tokens;
  int packings = 0;
  for (const Array& array : problem.inputs) {
    const TensorDecl& decl = *op.find_input(array.name);
    packings += decl.values == Values::offsets;
    const std::vector<std::string> words = shape_of(decl, array, without_batch);
    for (size_t d = 0; d < words.size(); ++d) {
      if (!counts_tokens(words[d]) || (decl.broadcast && array.size[d] == 1)) continue;
      if (tokens.has_value() && *tokens != array.size[d]) return false;
      tokens = array.size[d];
    }
  }
  if (packings > 1 || tokens.value_or(0) < 2) return false;
  *poisoned = {.problem = problem, .token = 1 + static_cast<int64_t>(seed % static_cast<uint64_t>(*tokens - 1))};
  poisoned->problem.incoming.clear();
  poisoned->problem.gradients.clear();
  const double value = seed % 3 == 0 ? HUGE_VAL : std::numeric_limits<double>::quiet_NaN();
  bool any = false;
  for (Array& array : poisoned->problem.inputs) {
    const TensorDecl& decl = *op.find_input(array.name);
    if (!is_float(array.dtype) || !may_be_poisoned(decl)) continue;
    const std::vector<std::string> words = shape_of(decl, array, without_batch);
    const bool batched = !words.empty() && words[0] == "B" && array.size[0] > 0 && !(decl.broadcast && array.size[0] == 1);
    std::vector<size_t> token_axes;
    for (size_t d = 0; d < words.size(); ++d) {
      if (counts_tokens(words[d]) && array.size[d] > 1) token_axes.push_back(d);
    }
    bool here = false;
    for_each(array, array.size.size(), [&](double& x, const std::vector<int64_t>& at) {
      bool hit = false;
      for (const size_t d : token_axes) hit |= at[d] == poisoned->token;
      if (!hit || (batched && at[0] != static_cast<int64_t>(seed / 7) % array.size[0])) return;
      if (batched) poisoned->row = at[0];
      x = value;
      here = true;
    });
    poisoned->apart &= !here || batched;
    any |= here;
  }
  return any;
}

std::vector<std::string> poison_faults(const Poisoned& poisoned, const std::vector<Array>& before,
                                       const std::vector<Array>& after) {
  std::vector<std::string> faults;
  const bool without_batch = batch_is_left_out(poisoned.problem);
  for (const Array& result : after) {
    const TensorDecl* decl = poisoned.problem.op->find_output(result.name);
    const Array* whole = find_array(before, result.name);
    if (decl == nullptr || whole == nullptr) continue;  // a state belongs to the last token
    const std::vector<std::string> words = shape_of(*decl, result, without_batch);
    size_t tokens = words.size();
    // Rows of queries (T, Tq). Those of keys (S) may be in units of all of them: phi_k of features.
    for (size_t d = 0; d < words.size(); ++d)
      tokens = words[d][0] == 'T' && counts_tokens(words[d]) && tokens == words.size() ? d : tokens;
    if (tokens == words.size()) continue;
    const bool batched = words[0] == "B";
    const bool bits = poisoned.problem.op->earlier_rows == EarlierRows::bits;
    if (!bits && decl->saved && !decl->differentiable) continue;  // den of features is in units of all keys, as phi_k
    double largest = 0;
    for (const double x : whole->values) largest = std::isfinite(x) ? std::max(largest, std::abs(x)) : largest;
    // A transform of fewer or other numbers rounds differently: as far as two kernels may differ.
    const double allowed = 2 * largest * max_gate(rms_gate(poisoned.problem.dtype, Pass::forward, Against::reference, true, 0));
    const auto kept = [&](double after_it, double before_it) {
      if (same_bits(after_it, before_it)) return true;
      return !bits && std::isfinite(after_it) && std::isfinite(before_it) && std::abs(after_it - before_it) <= allowed;
    };
    bool changed = false;
    for_each(result, result.size.size(), [&](const double& x, const std::vector<int64_t>& at) {
      const size_t i = static_cast<size_t>(&x - result.values.data());
      const bool other = batched && poisoned.apart && at[0] != poisoned.row;
      if (changed || !(other || at[tokens] + poisoned.tile <= poisoned.token) || kept(x, whole->values[i])) return;
      changed = true;
      char values[64];
      std::snprintf(values, sizeof values, " becomes %.9g from %.9g", x, whole->values[i]);
      faults.push_back(result.name + place_text(static_cast<int64_t>(i), result.size) + values + " when token " +
                       std::to_string(poisoned.token) + " of batch row " + std::to_string(poisoned.row) + " is not finite");
    });
  }
  return faults;
}

}  // namespace linnet::check
