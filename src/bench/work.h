// Work: one case with its tensors in memory, ready to be called again and again.
//
//   std::unique_ptr<Work> work;
//   LINNET_TRY(Work::make(c, context, &work));
//   LINNET_TRY(work->run());                       // forward, and backward when the case says so
#pragma once

#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "bench/cases.h"
#include "core/call/call.h"
#include "core/cuda/driver.h"

namespace linnet::bench {

// Memory for one tensor or workspace: aligned, every page touched.
class Memory {
 public:
  Memory() = default;
  explicit Memory(int64_t bytes);
  void* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<void, Free> data_;
};

class Work {
 public:
  // Draws the inputs at random, the same for the same case.
  static Status make(const Case& c, const Context& context, std::unique_ptr<Work>* work, Device device = Device::cpu);
  // On a GPU it is enqueued only; the tensors are those of one of several copies in turn, so that no cache holds them.
  Status run();

  const Case& what() const { return case_; }
  const std::string& impl() const { return impl_; }
  const Call& call() const { return call_; }
  Cost forward_cost() const { return forward_cost_; }
  Cost backward_cost() const { return backward_cost_; }  // zeros without a backward
  int64_t tensor_bytes() const { return tensor_bytes_; }
  int64_t workspace_bytes() const { return workspace_bytes_; }
  std::vector<std::pair<std::string, int64_t>> letters() const;  // all of them, those from rules included

  // Takes the values of all inputs and incoming gradients from another work of the same shapes.
  void take_inputs(const Work& other);
  // The largest RMS error / RMS reference among outputs and gradients, `reference` being the same work done in double.
  double error(const Work& reference) const;
  // GPU: the results of the last run, for error(); waits for it.
  Status fetch_results();

 private:
  struct Tensor {
    std::string name;
    View view;
    Memory memory;
    bool result = false;
    std::vector<int64_t> counts;  // of an index tensor that the operator changes: put back before each call
  };
  struct Free {
    void operator()(void* p) const { cuda::release(p); }
  };
  using DeviceMemory = std::unique_ptr<void, Free>;
  Work(const Case& c, const Context& context, Device device) : case_(c), context_(context), device_(device), call_(*c.op) {}
  Status prepare();
  Status to_device();
  Status add(const std::string& name, View view, bool result);
  Status add_input(const TensorDecl& decl, const Dims& dims);
  Status fill_index(const TensorDecl& decl, Tensor* tensor);
  Status check_memory(const TensorDecl& decl, const std::vector<int64_t>& size, Dtype dtype) const;

  Case case_;
  Context context_;
  Device device_;
  Call call_;
  std::string impl_;
  std::vector<Tensor> tensors_;
  Memory workspace_;
  Cost forward_cost_, backward_cost_;
  int64_t tensor_bytes_ = 0, workspace_bytes_ = 0;
  std::vector<Call> device_calls_;           // one for each copy
  std::vector<DeviceMemory> device_memory_;  // of copy c, tensor i: [c * tensors + i]; the workspace behind them
  size_t turn_ = 0;
};

// Elements [first, first + count) of a dense tensor as double.
void read_values(const View& view, int64_t first, int64_t count, double* values);
void write_values(const View& view, int64_t first, int64_t count, const double* values);

}  // namespace linnet::bench
