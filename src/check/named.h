// Calls of an operator by name on tensors with their own memory, for tests that write their relations by hand.
//
//   Tensors x = {{"q", q}, {"k", k}, {"v", v}, {"dout", dout}};
//   ASSERT_EQ(invoke("linear", {{"causal", "1"}}, &x), "");         // x now has out, final_state, ..., dq, dk, dv
//   Tensor out = out_of("linear", with(x, "q", other), {{"causal", "1"}});
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "check/tensor.h"
#include "core/call/call.h"

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

// The reference's gradients of a random form in `output`, of every differentiable input that is given, against differences of
// fourth order: (8 (f(h) - f(-h)) - (f(2h) - f(-2h))) / 12h. About ten elements of each.
inline void expect_gradients(const std::string& op, const Options& options, const Tensors& given, const std::string& output) {
  const auto form = [&](const Tensors& at, const Tensor& weights) {
    Tensors tensors = at;
    EXPECT_EQ(invoked(op, options, &tensors, "ref", output).message(), "");
    double sum = 0;
    for (int64_t i = 0; i < weights.count(); ++i) sum += weights.get(i) * tensors[output].get(i);
    return sum;
  };
  Tensors all = given;
  ASSERT_EQ(invoked(op, options, &all, "ref").message(), "");
  const Tensor weights = random_tensor(all[output].sizes, 99);
  all["d" + output] = weights;
  ASSERT_EQ(invoked(op, options, &all, "ref").message(), "");
  for (const TensorDecl& decl : find_op(op)->inputs) {
    if (!decl.differentiable || given.count(decl.name) == 0) continue;
    const Tensor& x = given.at(decl.name);
    for (int64_t i = 0; i < x.count(); i += 1 + x.count() / 10) {
      constexpr double h = 1e-4;
      const auto at = [&](double step) {
        Tensor moved = x;
        moved.set(i, x.get(i) + step);
        return form(with(given, decl.name, moved), weights);
      };
      const double difference = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h);
      EXPECT_NEAR(all["d" + decl.name].get(i), difference, 1e-7 * (1 + std::fabs(difference)))
          << op << " d" << decl.name << " " << i;
    }
  }
}

}  // namespace linnet::check
