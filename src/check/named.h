// Calls of an operator by name on tensors with their own memory, for tests that write their relations by hand.
//
//   Tensors x = {{"q", random_tensor({1, 9, 2, 4}, 1)}, ...};
//   ASSERT_EQ(run_named("metala_core", {{"scale", "1"}}, &x), "");        // adds every output: x["out"], x["final_state"]
//   x["dout"] = random_tensor(x["out"].sizes, 7);
//   ASSERT_EQ(run_backward("metala_core", {{"scale", "1"}}, &x), "");     // adds the gradient of every input that has one
//
// The result is the sentence of a refusal, empty when all went well. The workspace holds NaN at first.
#pragma once

#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "check/tensor.h"
#include "core/call.h"

namespace linnet::check {

using Tensors = std::map<std::string, Tensor>;
using Options = std::vector<std::pair<std::string, std::string>>;

inline Status run_pass(const std::string& name, const Options& options, Pass pass, Tensors* tensors, const char* impl) {
  const Op* op = find_op(name);
  if (op == nullptr) return bad_input("there is no operator " + name);
  Call call(*op);
  for (const auto& [option, value] : options) LINNET_TRY(call.set_option(option, value));
  const auto given = [&](const std::string& tensor) {
    return tensors->count(tensor) > 0 && (*tensors)[tensor].dtype != Dtype::none;
  };
  for (const TensorDecl& decl : op->inputs) {
    if (given(decl.name)) LINNET_TRY(call.set(decl.name, (*tensors)[decl.name].view()));
  }
  LINNET_TRY(call.prepare());
  const auto ask = [&](const std::string& tensor) -> Status {
    View view;
    LINNET_TRY(call.output_view(tensor, &view));
    (*tensors)[tensor] = Tensor(view.dtype, {view.size, view.size + view.rank});
    return call.set(tensor, (*tensors)[tensor].view());
  };
  for (const TensorDecl& decl : op->outputs) {
    if (pass == Pass::forward) LINNET_TRY(ask(decl.name));
    if (pass == Pass::backward && decl.saved) LINNET_TRY(call.set(decl.name, (*tensors)[decl.name].view()));
    if (pass == Pass::backward && given("d" + decl.name))
      LINNET_TRY(call.set("d" + decl.name, (*tensors)["d" + decl.name].view()));
  }
  for (const TensorDecl& decl : op->inputs) {
    if (pass == Pass::backward && decl.differentiable && given(decl.name)) LINNET_TRY(ask("d" + decl.name));
  }
  Context context{.impl = impl};
  LINNET_TRY(call.workspace(pass, context, &context.workspace_bytes));
  std::vector<double> memory(static_cast<size_t>(context.workspace_bytes / 8 + 1), std::numeric_limits<double>::quiet_NaN());
  context.workspace = memory.data();
  return call.run(pass, context);
}
inline std::string run_named(const std::string& name, const Options& options, Tensors* tensors, const char* impl = nullptr) {
  return run_pass(name, options, Pass::forward, tensors, impl).message();
}
inline std::string run_backward(const std::string& name, const Options& options, Tensors* tensors, const char* impl = nullptr) {
  return run_pass(name, options, Pass::backward, tensors, impl).message();
}

}  // namespace linnet::check
