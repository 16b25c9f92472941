// invoke: one call of an operator by name on tensors with their own memory, for tests of relations between operators.
//
//   Named t = {{"q", q}, {"k", k}, {"v", v}, {"g", g}, {"dout", dout}};
//   ASSERT_TRUE(invoke("gated", {{"causal", "1"}}, &t).ok());        // t now has out, lse, ..., dq, dk, dv, dg
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "check/tensor.h"
#include "core/call.h"

namespace linnet::check {

using Named = std::map<std::string, Tensor>;
using Options = std::vector<std::pair<std::string, std::string>>;

// Adds every output, and, where the gradient of an output is among the tensors, the gradient of every differentiable input.
// A state is overwritten where it stands.
inline Status invoke(const std::string& name, const Options& options, Named* tensors, const char* impl = nullptr) {
  const Op* op = find_op(name);
  if (op == nullptr) return bad_input("there is no operator '" + name + "'");
  Call call(*op);
  bool backward = false;
  for (const auto& [key, text] : options) LINNET_TRY(call.set_option(key, text));
  for (const TensorDecl& decl : op->inputs) {
    if (const auto at = tensors->find(decl.name); at != tensors->end()) LINNET_TRY(call.set(decl.name, at->second.view()));
  }
  LINNET_TRY(call.prepare());
  const auto make = [&](const std::string& tensor) {
    View view;
    LINNET_TRY(call.output_view(tensor, &view));
    Tensor& t = (*tensors)[tensor] = Tensor(view.dtype, std::vector<int64_t>(view.size, view.size + view.rank));
    return call.set(tensor, t.view());
  };
  const auto run = [&](Pass pass) {
    Context context{.impl = impl};
    int64_t bytes;
    LINNET_TRY(call.workspace(pass, context, &bytes));
    std::vector<double> memory(static_cast<size_t>(bytes / 8 + 1));
    context.workspace = memory.data();
    context.workspace_bytes = bytes;
    return call.run(pass, context);
  };
  for (const TensorDecl& decl : op->outputs) {
    LINNET_TRY(make(decl.name));
    backward |= decl.differentiable && tensors->count("d" + decl.name) > 0;
  }
  LINNET_TRY(run(Pass::forward));
  if (!backward) return {};
  for (const TensorDecl& decl : op->outputs) {
    const auto at = tensors->find("d" + decl.name);
    if (decl.differentiable && at != tensors->end()) LINNET_TRY(call.set(at->first, at->second.view()));
  }
  for (const TensorDecl& decl : op->inputs) {
    if (decl.differentiable && tensors->count(decl.name) > 0) LINNET_TRY(make("d" + decl.name));
  }
  return run(Pass::backward);
}

}  // namespace linnet::check
