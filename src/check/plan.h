// What the call of a case would do, without its values and without running it.
#pragma once

#include <string>
#include <vector>

#include "check/case.h"
#include "core/cuda/driver.h"

namespace linnet::check {

// Whether the operator accepts the case; the cost of the passes it runs, when the operator knows it.
Status accepts(const Case& c, Cost* cost);

// What every implementation says to the call of a case, on the CPU and on a GPU, in the order of Op::impls, forward first.
// Needs no GPU: choosing looks at shapes, strides and addresses. strided=1: rows lie between multiples of 16 bytes.
struct Choice {
  const Impl* impl = nullptr;
  Pass pass = Pass::forward;
  std::string reason;  // why it does not take the call; empty: it does
  // The best that takes it on its device, LINNET_IMPL and LINNET_ISA obeyed, whether or not this machine has it.
  bool chosen = false;
  int64_t workspace = 0;  // bytes, on a GPU
};
Status choices(const Case& c, std::vector<Choice>* list);

// The kernels that the call of a case launches on a GPU, forward and backward, without one: cuda::Recording.
Status launches(const Case& c, std::vector<cuda::Recorded>* list);

}  // namespace linnet::check
