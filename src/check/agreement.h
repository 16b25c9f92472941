// Lines of cases that every implementation of this machine must pass in the dtypes that it has (the CPU's have all four, the
// GPU's never f64), with NaN in the workspace, canaries around every buffer and another number of threads, which must not
// change a bit. (`linnet check --random` draws many more.)
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "check/check.h"
#include "core/op.h"

namespace linnet::check {

inline void expect_agreement(const std::vector<std::string>& lines) {
  for (const std::string& line : lines) {
    const Op* op = find_op(line.substr(0, line.find(' ')));
    ASSERT_NE(op, nullptr) << line;
    for (const Impl& impl : op->impls) {
      if (!impl.missing().empty() || (impl.name == "ref" && op->impls.size() > 1)) continue;
      for (const char* dtype : {"f64", "f32", "bf16", "f16"}) {
        Result result;
        const Status status = run_line(line + " dtype=" + dtype + " impl=" + impl.name, &result);
        if (impl.device == Device::cuda) {  // its kernels may refuse a call, with a sentence, and have no f64
          EXPECT_TRUE(is_refusal(status) || std::string_view(dtype) != "f64") << line << ": f64 is not refused";
          if (is_refusal(status)) continue;
        }
        ASSERT_TRUE(status.ok()) << line << ": " << status.message();
        EXPECT_TRUE(result.ok()) << result.text();
      }
    }
  }
}

}  // namespace linnet::check
