// Which implementation runs a call: the one that is asked for, or the best that takes it.
#include <algorithm>
#include <cstdlib>

#include "core/call/checks.h"
#include "core/isa.h"

namespace linnet {
namespace {

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

const Op* (*op_finder)(std::string_view name) = nullptr;

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

}  // namespace linnet
