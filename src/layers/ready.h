// What a plan is made of: weights as they are bound, and calls of operators that are checked once and run again and again.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/call/call.h"
#include "layers/runner.h"

namespace linnet::layers {

// A bound parameter: a view for every operator, or what dense_quantised takes in its place.
struct Weight {
  View view;
  bool quantised = false;
  Quantised packed;
  std::shared_ptr<std::vector<double>> memory;  // of a converted copy
  std::vector<std::shared_ptr<char>> copies;    // on the GPU
};

// Codes, scales and options of quantised weights, as the operators with `_quantised` in their names take them.
Status set_packed(const Quantised& packed, int64_t outputs, Call* call);

// A prepared call with its implementation. Addresses and sizes of its tensors may change between runs.
struct ReadyOp {
  const Op* op = nullptr;
  const Impl* impl = nullptr;
  std::unique_ptr<char[]> memory;  // args, then out
  size_t args_bytes = 0;

  // `call` is prepared and has its output.
  static Status make(const Call& call, const Context& context, Device device, std::unique_ptr<ReadyOp>* ready);
  void* args() const { return memory.get(); }
  void* out() const { return memory.get() + args_bytes; }
  View* tensor(std::string_view name) const;  // an input, or an output
  void run(const Launch& launch) const { impl->forward(args(), out(), launch); }
};

}  // namespace linnet::layers
