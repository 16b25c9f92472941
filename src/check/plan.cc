#include "check/plan.h"

#include <algorithm>

#include "check/draw.h"

namespace linnet::check {

Status accepts(const Case& c, Cost* cost) {
  Problem problem;
  Drawing drawing(c, &problem);
  LINNET_TRY(drawing.outline());
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    if (c.impl.empty() || (pass == Pass::backward && !c.backward)) continue;
    bool known = false, taken = false;
    std::string reason;  // of the first of that name, which takes the most
    for (size_t i = c.op->impls.size(); i-- > 0 && !taken;) {
      const Impl& impl = c.op->impls[i];
      if (!is_named(impl, c.impl)) continue;
      known = true;
      reason = refusal(impl, pass, drawing.call().prepared_args());
      taken = reason.empty();
    }
    if (known && !taken) return impossible(c.op->name + ": implementation " + c.impl + " cannot run: " + reason);
  }
  *cost = {};
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    if (c.op->cost == nullptr || (pass == Pass::backward && !c.backward)) continue;
    const Cost part = c.op->cost(drawing.call().prepared_args(), drawing.call().dims(), pass);
    const bool slow = c.op->check_flops != nullptr;
    cost->flops += slow ? c.op->check_flops(drawing.call().prepared_args(), drawing.call().dims(), pass) : part.flops;
    cost->bytes += part.bytes;
  }
  double given = 0;  // a bias of every pair may be larger than all that the operator's cost counts
  for (const Array& array : problem.inputs) {
    given += static_cast<double>(product(array.size)) * static_cast<double>(dtype_size(array.dtype));
  }
  cost->bytes = std::max(cost->bytes, given);
  return {};
}

Status choices(const Case& c, std::vector<Choice>* list) {
  Problem problem;
  Drawing drawing(c, &problem);
  LINNET_TRY(drawing.outline());
  const Op& op = *c.op;
  const void* args = drawing.call().prepared_args();
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
  Drawing drawing(c, &problem);
  LINNET_TRY(drawing.outline());
  Call call = drawing.call();
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

}  // namespace linnet::check
