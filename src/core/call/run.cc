// run(): a call from its checks to its kernel, and the workspace that it needs.
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "core/call/checks.h"
#include "core/call/members.h"
#include "core/cuda/driver.h"
#include "core/log.h"

namespace linnet {
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

// Results whose rows lie as badly as rows may: some kernels do not take such.
Status misaligned_results(const Op& op, const void* args, const Dims& dims, bool packed_rank, void* out) {
  alignas(std::max_align_t) char unused[2][kMaxStruct];
  op.construct(unused[0], out, unused[1]);
  for (const TensorDecl& decl : op.outputs) {
    View& view = view_at(out, decl.offset);
    LINNET_TRY(output_shape(op, decl, args, dims, packed_rank, &view));
    if (packed_rank && starts_with_batch(decl)) insert_batch(&view);
    view.data = reinterpret_cast<void*>((uintptr_t{1} << 20) + static_cast<uintptr_t>(dtype_size(view.dtype)));
    view.device = device_of(op, args);
  }
  return {};
}

constexpr int64_t kAlign = 128;  // of the workspace; the caller's pointer is rounded up to it

// The workspace of the caller, or of the caller's allocator.
Status take_workspace(const Op& op, const Context& context, int64_t needed, Launch* launch) {
  if (needed <= 0) return {};
  void* memory = context.workspace;
  int64_t bytes = memory == nullptr ? 0 : context.workspace_bytes;
  if (context.allocate != nullptr) {
    memory = context.allocate(context.allocator, needed + kAlign);
    bytes = memory == nullptr ? 0 : needed + kAlign;
  }
  if (bytes < needed + kAlign) {
    return bad_input(op.name + ": the workspace has " + std::to_string(bytes) + " bytes, expected at least " +
                     std::to_string(needed + kAlign) + " (ask " + op.name + "_workspace; in C linnet_workspace)");
  }
  const uintptr_t base = reinterpret_cast<uintptr_t>(memory);
  launch->workspace = static_cast<char*>(memory) + ((base + kAlign - 1) / kAlign * kAlign - base);
  return {};
}

// The outputs, and in a backward their incoming gradients, against what a prepared call expects. They get their batch dimension
// here; outputs that a backward does not read are taken out.
Status check_outputs(const Op& op, Pass pass, const void* args, const Dims& dims, bool packed_rank, void* out, void* grads) {
  const bool forward = pass == Pass::forward;
  const Device device = device_of(op, args);
  const auto add_batch = [&](const TensorDecl& decl, View* view) {
    if (packed_rank && view->given() && starts_with_batch(decl)) insert_batch(view);
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
  return {};
}

// The gradients of inputs against the inputs as the caller gave them; they get the rank of the prepared ones.
Status check_gradients(const Op& op, const void* caller_args, const void* args, void* grads) {
  for (const AbsentDecl& decl : op.absent_gradients) {
    if (view_at(grads, decl.offset).given()) return bad_input(op.name + ": " + decl.name + " is not a gradient");
  }
  for (const TensorDecl& decl : op.inputs) {
    if (!decl.differentiable) continue;
    View& gradient = view_at(grads, decl.grad_offset);
    const View& given = view_at(caller_args, decl.offset);
    if (!gradient.given()) continue;
    if (!given.given()) return bad_input(op.name + ": d" + decl.name + " is given but " + decl.name + " is not");
    LINNET_TRY(check_result(op, decl, "d" + decl.name, given, device_of(op, args), false, &gradient));
    LINNET_TRY(check_written(op, "d" + decl.name, gradient));
    while (gradient.rank < view_at(args, decl.offset).rank) insert_batch(&gradient);
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
  if (*bytes > 0) *bytes += kAlign;  // run() aligns the caller's pointer
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
  const bool forward = pass == Pass::forward;
  const Asked asked = asked_by_environment();
  if (asked.ranges) LINNET_TRY(check_ranges(op, caller_args));
  const bool free_choice = (context.impl == nullptr || *context.impl == '\0') && !asked.impl;
  Remembered* call = forward && free_choice ? Remembered::recall(op, caller_args) : nullptr;
  if (call != nullptr && call->recall_out(caller_out, launch.workers)) {
    if (op.check != nullptr) LINNET_TRY(op.check(call->args.prepared, call->dims));
    LINNET_TRY(take_workspace(op, context, call->workspace, &launch));
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

  LINNET_TRY(check_outputs(op, pass, args, dims, packed_rank, out, grads));
  if (!forward) LINNET_TRY(check_gradients(op, caller_args, args, grads));
  if (device == Device::cuda) {  // now that the results are known to be what they should be
    if (forward) LINNET_TRY(choose_impl(op, pass, context, device, args, out, &impl));
    if (free_choice && impl->slow_from > 0 && dims["T"] >= impl->slow_from) {
      log_slow(op, *impl, pass, args, forward ? out : nullptr);
    }
  }
  const int64_t needed = impl->workspace(args, pass, launch.workers);
  LINNET_TRY(take_workspace(op, context, needed, &launch));
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

}  // namespace linnet
