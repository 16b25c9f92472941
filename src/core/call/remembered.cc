#include "core/call/remembered.h"

#include <algorithm>
#include <cstring>

#include "core/call/members.h"

namespace linnet {
namespace {

constexpr int kCalls = 4;  // of a thread: the operators of a layer, in turn

thread_local Remembered calls[kCalls];
thread_local int oldest = 0;

bool same_shape(const View& a, const View& b) {
  if (a.dtype != b.dtype || a.device != b.device || a.rank != b.rank) return false;
  for (int i = 0; i < a.rank; ++i) {
    if (a.size[i] != b.size[i] || a.stride[i] != b.stride[i]) return false;
  }
  return true;
}

// One that no check has anything to say about: neither null nor between elements.
bool has_address(const View& view) {
  const auto address = reinterpret_cast<uintptr_t>(view.data);
  return address != 0 && address % static_cast<uintptr_t>(dtype_size(view.dtype)) == 0;
}

// The prepared struct gets the addresses of `given` where that is what was asked; nothing is written that is as it was. False
// too when a tensor is given without a proper address: whether it may be is for the check to say.
template <size_t kBytes>
bool recall_part(Remembered::Part<kBytes>& part, const char* given) {
  size_t from = 0;  // options lie between the tensors and behind them
  for (int i = 0; i < part.tensors; ++i) {
    const size_t at = part.at[i];
    if (at > from && std::memcmp(given + from, part.asked + from, at - from) != 0) return false;
    const View& view = view_at(given, at);
    if (!same_shape(view, view_at(part.asked, at)) || (view.given() && !has_address(view))) return false;
    from = at + sizeof(View);
  }
  if (from < part.bytes && std::memcmp(given + from, part.asked + from, part.bytes - from) != 0) return false;
  for (int i = 0; i < part.tensors; ++i) {
    void* data = view_at(given, part.at[i]).data;
    View& view = *reinterpret_cast<View*>(part.prepared + part.at[i]);
    if (view.data != data) view.data = data;
  }
  return true;
}

template <size_t kBytes>
void remember_part(const std::vector<TensorDecl>& decls, size_t bytes, const void* asked, const void* prepared,
                   Remembered::Part<kBytes>* part) {
  part->bytes = bytes;
  part->tensors = 0;
  for (const TensorDecl& decl : decls) part->at[part->tensors++] = static_cast<uint16_t>(decl.offset);
  std::sort(part->at, part->at + part->tensors);
  std::memcpy(part->asked, asked, bytes);
  std::memcpy(part->prepared, prepared, bytes);
}

// A check reads nothing of this tensor but its shape.
bool shape_only(const TensorDecl& decl) {
  switch (decl.values) {
    case Values::positive:
    case Values::finite:
    case Values::number:
    case Values::weights:
    case Values::offsets:
    case Values::lengths:
    case Values::starts:
    case Values::below:
    case Values::page_table:
    case Values::tree: return false;
    default: return true;
  }
}

}  // namespace

Remembered* Remembered::recall(const Op& op, const void* asked) {
  for (Remembered& call : calls) {
    if (call.op == &op && call.serial == op.serial.value() && !call.running &&
        recall_part(call.args, static_cast<const char*>(asked)))
      return &call;
  }
  return nullptr;
}

Remembered* Remembered::remember(const Op& op, const void* asked, const void* prepared, const Dims& dims, bool packed_rank) {
  if (op.args_bytes > kMostArgs || op.out_bytes > kMostOut) return nullptr;
  if (op.inputs.size() > kMostTensors || op.outputs.size() > kMostTensors) return nullptr;
  for (const TensorDecl& decl : op.inputs) {
    if (view_at(asked, decl.offset).given() && !shape_only(decl)) return nullptr;
  }
  for (int tried = 0; tried < kCalls; ++tried) {
    Remembered& call = calls[oldest];
    oldest = (oldest + 1) % kCalls;
    if (call.running) continue;
    call.op = &op;
    call.serial = op.serial.value();
    call.packed_rank = packed_rank;
    call.dims = dims;
    call.impl = nullptr;
    remember_part(op.inputs, op.args_bytes, asked, prepared, &call.args);
    return &call;
  }
  return nullptr;
}

bool Remembered::recall_out(const void* asked, int of_workers) {
  return impl != nullptr && workers == of_workers && recall_part(out, static_cast<const char*>(asked));
}

void Remembered::remember_out(const void* asked, const void* prepared, const Impl* chosen, int of_workers, int64_t bytes) {
  remember_part(op->outputs, op->out_bytes, asked, prepared, &out);
  impl = chosen;
  workers = of_workers;
  workspace = bytes;
}

}  // namespace linnet
