// prepare(): every check of a call's inputs and options, in order, and what kernels then see: broadcasts expanded, a batch
// dimension everywhere. output_shape(): what the results of a prepared call are.
#include <algorithm>
#include <cstring>
#include <utility>

#include "core/call/checks.h"
#include "core/call/members.h"
#include "core/letters.h"

namespace linnet {
namespace {

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
      if (view.size[i] == 0 && letter_named(word).noun == "channels")
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
    return bad_input(op.name + ": " + decl.name + " has " + std::to_string(view.size[i]) + " " +
                     std::string(letter_named(word).noun) + " in dimension " + std::to_string(i) + " of " + shape_text(shape) +
                     ", expected " + expected_text(*dims, word, expected));
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
      insert_batch(&view);
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
    return bad_input(op.name + ": " + std::string(part->from) + " has " + std::to_string(part->value) + " " +
                     std::string(letter_named(divisor).noun) + ", expected a divisor of " + std::to_string(whole->value) +
                     (whole->from.empty()
                          ? ""
                          : " (the " + std::string(letter_named(letter).noun) + " of " + std::string(whole->from) + ")"));
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

}  // namespace

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

Status prepare(const Op& op, void* args, Dims* dims, bool* packed_rank) {
  Remembered* call;
  return prepare(op, args, dims, packed_rank, &call);
}

Status output_shape(const Op& op, const TensorDecl& output, const void* args, const Dims& dims, bool packed_rank, View* view) {
  const TensorDecl& first = op.inputs.front();
  const Dtype io = view_at(args, first.offset).dtype;
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

}  // namespace linnet
