// Calls of an operator by name on tensors with their own memory, for tests that write their relations by hand.
//
//   Tensors x = {{"q", q}, {"k", k}, {"v", v}, {"dout", dout}};
//   ASSERT_EQ(invoke("linear", {{"causal", "1"}}, &x), "");         // x now has out, final_state, ..., dq, dk, dv
//   Tensor out = out_of("linear", with(x, "q", other), {{"causal", "1"}});
#pragma once

#include <gtest/gtest.h>

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

// Adds every output (or one alone) and, where the gradient of an output is among the tensors, the gradient of every
// differentiable input. A state is overwritten where it stands. The workspace holds NaN at first.
inline Status invoked(const std::string& name, const Options& options, Tensors* tensors, const char* impl = nullptr,
                      const std::string& output = "") {
  const Op* op = find_op(name);
  if (op == nullptr) return bad_input("there is no operator '" + name + "'");
  Call call(*op);
  const auto given = [&](const std::string& tensor) {
    return tensors->count(tensor) > 0 && tensors->at(tensor).dtype != Dtype::none;
  };
  const auto add = [&](const std::string& tensor) {
    View view;
    LINNET_TRY(call.output_view(tensor, &view));
    Tensor& made = (*tensors)[tensor] = Tensor(view.dtype, {view.size, view.size + view.rank});
    return call.set(tensor, made.view());
  };
  const auto run = [&](Pass pass) {
    Context context{.impl = impl};
    LINNET_TRY(call.workspace(pass, context, &context.workspace_bytes));
    std::vector<double> memory(static_cast<size_t>(context.workspace_bytes / 8 + 1), std::numeric_limits<double>::quiet_NaN());
    context.workspace = memory.data();
    return call.run(pass, context);
  };
  for (const auto& [option, value] : options) LINNET_TRY(call.set_option(option, value));
  for (const TensorDecl& decl : op->inputs) {
    if (given(decl.name)) LINNET_TRY(call.set(decl.name, tensors->at(decl.name).view()));
  }
  LINNET_TRY(call.prepare());
  for (const TensorDecl& decl : op->outputs) {
    if (output.empty() || decl.name == output) LINNET_TRY(add(decl.name));
  }
  LINNET_TRY(run(Pass::forward));
  bool backward = false;
  for (const TensorDecl& decl : op->outputs) {
    if (!decl.differentiable || !given("d" + decl.name)) continue;
    LINNET_TRY(call.set("d" + decl.name, tensors->at("d" + decl.name).view()));
    backward = true;
  }
  if (!backward) return {};
  for (const TensorDecl& decl : op->inputs) {
    if (decl.differentiable && given(decl.name)) LINNET_TRY(add("d" + decl.name));
  }
  return run(Pass::backward);
}
// The same; the result is the sentence of a refusal, empty when all went well.
inline std::string invoke(const std::string& name, const Options& options, Tensors* tensors, const char* impl = nullptr) {
  return invoked(name, options, tensors, impl).message();
}
inline Tensors with(Tensors tensors, const std::string& name, const Tensor& value) {
  tensors[name] = value;
  return tensors;
}
inline Tensor out_of(const std::string& op, Tensors tensors, const Options& options = {}, const std::string& output = "out") {
  EXPECT_EQ(invoked(op, options, &tensors, nullptr, output).message(), "");
  return tensors[output];
}
// The sentence of a call that must be refused.
inline std::string refusal(const std::string& op, Tensors tensors, const Options& options = {}) {
  return invoke(op, options, &tensors);
}

}  // namespace linnet::check
