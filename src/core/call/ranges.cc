// check_ranges: what values mean, as far as a call can be wrong by values alone. Shapes are checked by prepare().
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <limits>

#include "core/call/members.h"
#include "core/half.h"
#include "core/op.h"

namespace linnet {
namespace {

constexpr double kLongestKey = 1.02;  // unit norm, as rounded to bf16 channel by channel
constexpr double kLargestBeta = 2;    // I - beta k k^T then has eigenvalues in [-1, 1]

bool is_on(const Op& op, const void* args, Effect effect) {
  const OptionDecl* option = op.find_option(effect);
  return option != nullptr && value_at<bool>(args, option->offset);
}

std::string text(double x) {
  char buffer[32];
  std::snprintf(buffer, sizeof buffer, "%.4g", x);
  return buffer;
}

// Calls use(value, coordinates) for every element.
template <class Use>
Status for_each(const View& view, const Use& use) {
  int64_t at[kMaxRank] = {};
  for (int64_t i = 0, count = view.elements(); i < count; ++i) {
    int64_t rest = i, offset = 0;
    for (int d = view.rank - 1; d >= 0; --d) {
      at[d] = rest % view.size[d];
      rest /= view.size[d];
      offset += at[d] * view.stride[d];
    }
    LINNET_TRY(use(load_f64(view.data, view.dtype, offset), at));
  }
  return {};
}

std::string place(const int64_t* at, int count) {
  std::string result;
  for (int d = 0; d < count; ++d) result += "[" + std::to_string(at[d]) + "]";
  return result;
}

Status check_unit_rows(const Op& op, const TensorDecl& decl, const View& view) {
  const int64_t width = view.size[view.rank - 1];
  const OptionDecl* norm = op.find_option(Effect::unit_norm);
  double squares = 0;
  return for_each(view, [&](double x, const int64_t* at) -> Status {
    squares = (at[view.rank - 1] == 0 ? 0 : squares) + x * x;
    if (at[view.rank - 1] + 1 < width || !(std::sqrt(squares) > kLongestKey)) return {};
    return bad_input(op.name + ": " + decl.name + place(at, view.rank - 1) + " has norm " + text(std::sqrt(squares)) +
                     ", expected at most 1; divide each row by its norm" +
                     (norm != nullptr ? ", or set " + norm->name + ": longer keys let the state grow without limit" : ""));
  });
}

Status check_log_decay(const Op& op, const TensorDecl& decl, const View& view) {
  bool factors = true;  // every value could be a decay itself
  LINNET_TRY(for_each(view, [&](double x, const int64_t*) -> Status {
    factors &= x >= 0 && x <= 1;
    return {};
  }));
  return for_each(view, [&](double x, const int64_t* at) -> Status {
    if (!(x > 0)) return {};
    return bad_input(op.name + ": " + decl.name + place(at, view.rank) + " is " + text(x) +
                     ", expected the natural logarithm of a decay, at most 0" +
                     (factors ? "; all values lie in [0, 1]: is it the decay itself? pass its logarithm" : ""));
  });
}

Status check_write_strength(const Op& op, const TensorDecl& decl, const View& view, const void* args) {
  const double high = is_on(op, args, Effect::doubles_strength) ? kLargestBeta / 2 : kLargestBeta;
  return for_each(view, [&](double x, const int64_t* at) -> Status {
    if (x >= 0 && x <= high) return {};
    if (std::isnan(x)) return {};
    return bad_input(op.name + ": " + decl.name + place(at, view.rank) + " is " + text(x) +
                     ", expected a write strength in [0, " + text(high) + "]" + (x < 0 ? "; is it the log decay g?" : ""));
  });
}

// Without its write strength a recurrence corrects nothing, and keys may have any length.
bool corrects(const Op& op, const void* args) {
  for (const TensorDecl& decl : op.inputs) {
    if (decl.values == Values::write_strength) return view_at(args, decl.offset).given();
  }
  return true;
}

}  // namespace

Status check_ranges(const Op& op, const void* caller_args) {
  alignas(std::max_align_t) char args[kMaxStruct];
  std::memcpy(args, caller_args, op.args_bytes);
  Dims dims;
  bool packed_rank;
  LINNET_TRY(prepare(op, args, &dims, &packed_rank));
  if (device_of(op, args) != Device::cpu) return {};
  for (const TensorDecl& decl : op.inputs) {
    const View& view = view_at(args, decl.offset);
    if (!view.given()) continue;
    const bool any_length = is_on(op, args, Effect::unit_norm) || !corrects(op, args);
    if (decl.values == Values::unit_rows && view.rank > 0 && !any_length) LINNET_TRY(check_unit_rows(op, decl, view));
    if (decl.values == Values::log_decay) LINNET_TRY(check_log_decay(op, decl, view));
    if (decl.values == Values::write_strength) LINNET_TRY(check_write_strength(op, decl, view, args));
  }
  return {};
}

}  // namespace linnet
