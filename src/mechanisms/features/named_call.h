// One call of an operator by name, for the tests of features, inline, taylor and distill.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "check/check.h"
#include "check/tensor.h"
#include "core/call.h"
#include "core/executor.h"

namespace linnet {

using Inputs = std::vector<std::pair<std::string, check::Tensor>>;
using Options = std::vector<std::pair<std::string, std::string>>;
using Results = std::map<std::string, check::Tensor>;

// Runs the forward; `results` gets the named outputs. Inputs that are overwritten are changed in place.
inline Status run_named(const std::string& op, const Inputs& inputs, const Options& options,
                        const std::vector<std::string>& outputs, Results* results) {
  Call call(*find_op(op));
  for (const auto& [name, text] : options) LINNET_TRY(call.set_option(name, text));
  for (const auto& [name, tensor] : inputs) LINNET_TRY(call.set(name, tensor.view()));
  LINNET_TRY(call.prepare());
  for (const std::string& name : outputs) {
    View view;
    LINNET_TRY(call.output_view(name, &view));
    (*results)[name] = check::Tensor(view.dtype, {view.size, view.size + view.rank});
    LINNET_TRY(call.set(name, (*results)[name].view()));
  }
  int64_t bytes;
  Context context{.executor = &inline_executor()};
  LINNET_TRY(call.workspace(Pass::forward, context, &bytes));
  std::vector<double> memory(static_cast<size_t>(bytes / 8 + 1));
  context.workspace = memory.data();
  context.workspace_bytes = static_cast<int64_t>(memory.size() * 8);
  return call.run(Pass::forward, context);
}
inline check::Tensor out_of(const std::string& op, const Inputs& inputs, const Options& options = {},
                            const std::string& output = "out") {
  Results results;
  const Status status = run_named(op, inputs, options, {output}, &results);
  EXPECT_TRUE(status.ok()) << status.message();
  return results[output];
}
// The sentence of a call that must be refused.
inline std::string refusal(const std::string& op, const Inputs& inputs, const Options& options = {}) {
  Results results;
  return run_named(op, inputs, options, {}, &results).message();
}

// Each line in every implementation of this machine, in f64, f32 and bf16.
inline void expect_agreement(const std::vector<std::string>& lines) {
  for (const std::string& line : lines) {
    const Op* op = find_op(line.substr(0, line.find(' ')));
    ASSERT_NE(op, nullptr) << line;
    for (const Impl& impl : op->impls) {
      if (!impl.missing().empty()) continue;
      for (const char* dtype : {"f64", "f32", "bf16"}) {
        check::Result result;
        const Status status = check::run_line(line + " dtype=" + dtype + " impl=" + impl.name, &result);
        ASSERT_TRUE(status.ok()) << line << ": " << status.message();
        EXPECT_TRUE(result.ok()) << result.text();
      }
    }
  }
}

inline check::Tensor mapped(check::Tensor x, double factor, double offset) {
  for (int64_t i = 0; i < x.count(); ++i) x.set(i, factor * x.get(i) + offset);
  return x;
}

}  // namespace linnet
