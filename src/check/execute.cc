#include "check/execute.h"

#include <map>
#include <memory>
#include <mutex>

#include "check/guarded.h"
#include "check/random.h"
#include "core/cuda/driver.h"

namespace linnet::check {
namespace {

Executor& executor_of(int threads) {
  static std::mutex mutex;
  static std::map<int, std::unique_ptr<ThreadPool>> pools;
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<ThreadPool>& pool = pools[threads];
  if (pool == nullptr) pool = std::make_unique<ThreadPool>(threads);
  return *pool;
}

std::vector<int64_t> size_of(const View& view) { return {view.size, view.size + view.rank}; }

}  // namespace

Status execute(const Problem& problem, const Setting& setting, Execution* execution) {
  const Op& op = *problem.op;
  *execution = Execution();
  Call call(op);
  for (const auto& [name, value] : problem.options) LINNET_TRY(call.set_option(name, value));

  std::map<std::string, Guarded> tensors;
  const auto place = [&](const std::string& name, const std::vector<int64_t>& size, Dtype dtype) -> Guarded& {
    Random random(setting.seed, name + " layout");
    const Layout layout =
        setting.strided ? random.pick({Layout::dense, Layout::padded, Layout::padded, Layout::transposed}) : Layout::dense;
    return tensors[name] = Guarded(size, setting.as_reference && is_float(dtype) ? Dtype::f64 : dtype, layout, random);
  };
  const auto give = [&](const Array& array) {
    Guarded& tensor = place(array.name, array.size, array.dtype);
    tensor.fill(array.values);
    return call.set(array.name, tensor.view());
  };
  const auto ask = [&](const std::string& name) {
    View view;
    LINNET_TRY(call.output_view(name, &view));
    return call.set(name, place(name, size_of(view), view.dtype).view());
  };
  const Context context = {.executor = &executor_of(setting.threads),
                           .impl = setting.impl.empty() ? nullptr : setting.impl.c_str()};
  const auto run = [&](Pass pass, const std::vector<std::string>& written) {
    int64_t bytes;
    const bool on_gpu = setting.device == Device::cuda;
    for (auto& [name, tensor] : tensors) {
      tensor.remember();
      View view;
      if (!on_gpu) continue;
      LINNET_TRY(tensor.to_device(&view));
      LINNET_TRY(call.set(name, view));
    }
    LINNET_TRY(call.workspace(pass, context, &bytes));
    GuardedBytes workspace(bytes);
    Context with_memory = context;
    with_memory.workspace = workspace.data();
    with_memory.workspace_bytes = bytes;
    if (on_gpu) LINNET_TRY(workspace.to_device(&with_memory.workspace));
    LINNET_TRY(call.run(pass, with_memory));
    if (on_gpu) {
      LINNET_TRY(cuda::synchronize());
      LINNET_TRY(workspace.from_device());
      for (auto& [name, tensor] : tensors) LINNET_TRY(tensor.from_device());
      LINNET_TRY(call.prepare());
      const Impl* impl;
      LINNET_TRY(choose_impl(op, pass, context, setting.device, call.prepared_args(), nullptr, &impl));
      if (pass == Pass::forward) execution->impl = impl->name;
    }
    const std::string where = pass == Pass::forward ? "forward: " : "backward: ";
    if (!workspace.intact()) execution->faults.push_back(where + "the workspace was written outside of its bytes");
    for (const auto& [name, tensor] : tensors) {
      const std::string damage = tensor.damage(contains(written, name));
      if (!damage.empty()) execution->faults.push_back(where + name + " " + damage);
    }
    for (const std::string& name : written) {
      const TensorDecl* input = op.find_input(name);
      if (input != nullptr && input->values == Values::rounding) continue;
      const Guarded& tensor = tensors.at(name);
      execution->results.push_back({name, size_of(tensor.view()), tensor.view().dtype, tensor.values()});
    }
    return Status();
  };

  std::vector<std::string> written = problem.outputs;
  for (const Array& array : problem.inputs) {
    LINNET_TRY(give(array));
    if (op.find_input(array.name)->mutated) written.push_back(array.name);
  }
  LINNET_TRY(call.prepare());
  if (setting.as_reference && op.largest_logit != nullptr) execution->largest_logit = op.largest_logit(call.prepared_args());
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    if (op.cost != nullptr) execution->flops[pass == Pass::backward] = op.cost(call.prepared_args(), call.dims(), pass).flops;
  }
  for (const std::string& name : problem.outputs) LINNET_TRY(ask(name));
  if (setting.device == Device::cpu) {  // on a GPU it depends on where tensors lie there
    const Impl* impl;
    LINNET_TRY(choose_impl(op, Pass::forward, context, setting.device, call.prepared_args(), nullptr, &impl));
    execution->impl = impl->name;
  }
  LINNET_TRY(run(Pass::forward, written));
  if (problem.gradients.empty()) return {};
  for (const std::string& name : problem.outputs) {
    const Array* saved = setting.saved == nullptr ? nullptr : find_array(*setting.saved, name);
    if (saved != nullptr && op.find_output(name)->saved) tensors.at(name).fill(saved->values);
  }
  for (const Array& array : problem.incoming) LINNET_TRY(give(array));
  for (const std::string& name : problem.gradients) LINNET_TRY(ask(name));
  return run(Pass::backward, problem.gradients);
}

}  // namespace linnet::check
