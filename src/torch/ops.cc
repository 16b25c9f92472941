// The torch operators: torch.ops.linnet.<op> and <op>_backward for every declaration, on PyTorch's stable ABI (2.11), so that
// one binary serves every torch from 2.11 on. One function serves all of them; nothing here knows an operator.
//
// Autograd and fake kernels are registered by the Python package, since the stable ABI has neither.
#include <dlfcn.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <atomic>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "capi/linnet_c.h"
#include "core/call/call.h"
#include "schema.h"

namespace linnet {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::detail::from;
using torch::stable::detail::to;

// Tasks on torch's own threads: a second pool would fight with torch's spinning OpenMP workers for the cores (a region of
// 0.2 ms then takes 8 ms).
class TorchThreads final : public Executor {
 public:
  TorchThreads() : workers_(static_cast<int>(torch::stable::get_num_threads())) {}
  int workers() const override { return workers_; }
  void run(int64_t tasks, Task fn, void* context) override {
    std::atomic<int64_t> next{0};
    // One call of the body per worker, which takes tasks until none is left; inside a parallel region torch makes a single
    // call, which then does everything.
    const int64_t bodies = tasks < workers_ ? tasks : workers_;
    torch::stable::parallel_for(0, bodies, 1, [&](int64_t worker, int64_t) {
      for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;)
        fn(context, task, static_cast<int>(worker));
    });
  }

 private:
  int workers_;
};

// Always std::runtime_error, Python's RuntimeError: it is what torch itself raises for wrong arguments, and newer versions of
// torch make that of every other exception too.
void check(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message());
}

Dtype dtype_of(const Op& op, const std::string& name, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Double: return Dtype::f64;
    case ScalarType::Float: return Dtype::f32;
    case ScalarType::BFloat16: return Dtype::bf16;
    case ScalarType::Half: return Dtype::f16;
    case ScalarType::Long: return Dtype::i64;
    case ScalarType::Int: return Dtype::i32;
    case ScalarType::Byte:
    case ScalarType::Bool: return Dtype::u8;
    default: break;
  }
  throw std::runtime_error(op.name + ": " + name + " is " + torch::headeronly::toString(tensor.scalar_type()) +
                           ", expected float64, float32, bfloat16, float16, int64, int32, uint8 or bool");
}

int32_t torch_dtype(Dtype dtype) {
  switch (dtype) {
    case Dtype::f64: return aoti_torch_dtype_float64();
    case Dtype::f32: return aoti_torch_dtype_float32();
    case Dtype::bf16: return aoti_torch_dtype_bfloat16();
    case Dtype::f16: return aoti_torch_dtype_float16();
    case Dtype::i64: return aoti_torch_dtype_int64();
    case Dtype::i32: return aoti_torch_dtype_int32();
    case Dtype::u8:
    case Dtype::none: break;
  }
  return aoti_torch_dtype_uint8();
}

// Where the tensors of a call lie: -1 on the CPU, else the number of the CUDA device.
Tensor empty(const Op& op, const std::string& name, const View& view, int32_t gpu) {
  AtenTensorHandle handle;
  const int32_t type = gpu < 0 ? aoti_torch_device_type_cpu() : aoti_torch_device_type_cuda();
  if (aoti_torch_empty_strided(view.rank, view.size, view.stride, torch_dtype(view.dtype), type, gpu < 0 ? 0 : gpu, &handle)) {
    throw std::runtime_error(op.name + ": out of memory: " + name + " takes " +
                             std::to_string(view.elements() * dtype_size(view.dtype)) + " bytes");
  }
  return Tensor(handle);
}

// torch's current stream. The function that tells it is in the CUDA half of torch, which a torch for CPUs does not have: it is
// looked for in the library that is already loaded.
void* current_stream(int32_t gpu) {
  using Function = AOTITorchError (*)(int32_t, void**);
  static const auto function = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return library == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
  }();
  if (function == nullptr) throw std::runtime_error("linnet: this torch does not tell its current CUDA stream");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(function(gpu, &stream));
  return stream;
}

// torch's arguments of one call, taken off the stack one after the other. Every value is owned from then on.
class Arguments {
 public:
  Arguments(StableIValue* stack, uint64_t count) : stack_(stack), count_(count) {}
  Tensor tensor() { return to<Tensor>(next()); }
  std::optional<Tensor> maybe_tensor() { return to<std::optional<Tensor>>(next()); }
  template <class T>
  T value() {
    return to<T>(next());
  }
  std::string string() {  // to<std::string> of torch 2.13 leaks
    const auto handle = to<StringHandle>(next());
    size_t length = 0;
    const char* data = nullptr;
    TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
    TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
    std::string text(data, length);
    TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
    return text;
  }

 private:
  StableIValue next() {
    if (taken_ == count_) throw std::runtime_error("linnet: torch passed fewer arguments than the schema has");
    return stack_[taken_++];
  }
  StableIValue* stack_;
  uint64_t count_, taken_ = 0;
};

// An option goes into the call's struct as it comes; prepare() checks its range.
void take_option(const Op& op, const OptionDecl& option, Arguments& arguments, Call* call) {
  switch (option.kind) {
    case OptionKind::real: return call->set(option, arguments.value<double>());
    case OptionKind::maybe_real: {
      const auto x = arguments.value<std::optional<double>>();
      return call->set(option, x ? Maybe(*x) : Maybe());
    }
    case OptionKind::integer: return call->set(option, arguments.value<int64_t>());
    case OptionKind::boolean: return call->set(option, arguments.value<bool>());
    case OptionKind::choice: return check(call->set_option(option.name, arguments.string()));
    case OptionKind::window: {
      const auto sides = arguments.value<std::vector<int64_t>>();
      if (sides.size() != 2) {
        throw std::runtime_error(op.name + ": " + option.name + " has " + std::to_string(sides.size()) +
                                 " numbers, expected 2 (left, right)");
      }
      return call->set(option, Window{sides[0], sides[1]});
    }
    case OptionKind::sizes: {
      const auto list = arguments.value<std::vector<int64_t>>();
      Sizes sizes;
      if (list.size() > Sizes::kMax) {
        throw std::runtime_error(op.name + ": " + option.name + " has " + std::to_string(list.size()) +
                                 " numbers, expected at most " + std::to_string(Sizes::kMax));
      }
      for (const int64_t x : list) sizes.value[sizes.count++] = x;
      return call->set(option, sizes);
    }
  }
}

class TorchCall {
 public:
  explicit TorchCall(const Op& op) : op_(op), call_(op) {}

  // A tensor that is not contiguous in its last dimension is copied, unless kernels accept it (broadcast) or it is overwritten
  // (then the check refuses it).
  void set(const std::string& name, Tensor tensor, const TensorDecl* decl = nullptr) {
    const bool broadcast = decl != nullptr && decl->broadcast, mutated = decl != nullptr && decl->mutated;
    if (!tensor.defined()) throw std::runtime_error(op_.name + ": " + name + " is None, expected a tensor");
    const Dtype dtype = dtype_of(op_, name, tensor);
    if (tensor.scalar_type() == ScalarType::Bool && decl != nullptr && decl->element != Element::mask) {
      throw std::runtime_error(op_.name + ": " + name + " is bool, expected " +
                               (decl->element == Element::index ? "int64 or int32" : "a floating-point type"));
    }
    const int64_t rank = tensor.dim();
    if (rank > kMaxRank) {
      throw std::runtime_error(op_.name + ": " + name + " has " + std::to_string(rank) + " dimensions, expected at most " +
                               std::to_string(kMaxRank));
    }
    View view;
    if (tensor.is_cuda()) {
      view.device = Device::cuda;
      const auto number = static_cast<int32_t>(tensor.get_device_index());
      if (gpu_ >= 0 && gpu_ != number) {
        throw std::runtime_error(op_.name + ": " + name + " is on cuda:" + std::to_string(number) +
                                 ", expected cuda:" + std::to_string(gpu_) + " (same as " + op_.inputs.front().name + ")");
      }
      gpu_ = number;
    } else if (!tensor.is_cpu()) {
      throw std::runtime_error(op_.name + ": " + name + " is neither on the CPU nor on a CUDA device");
    }
    if (!broadcast && !mutated && rank > 0 && tensor.size(rank - 1) > 1 && tensor.stride(rank - 1) != 1) {
      tensor = torch::stable::contiguous(tensor);
    }
    view.data = mutated ? tensor.mutable_data_ptr() : const_cast<void*>(tensor.const_data_ptr());
    view.dtype = dtype;
    view.rank = static_cast<int32_t>(rank);
    const auto sizes = tensor.sizes(), strides = tensor.strides();
    for (size_t i = 0; i < static_cast<size_t>(rank); ++i) view.size[i] = sizes[i], view.stride[i] = strides[i];
    if (decl != nullptr) {
      call_.set(*decl, view);
    } else {
      check(call_.set(name, view));
    }
    kept_.push_back(std::move(tensor));
  }

  void take_inputs(Arguments& arguments) {
    for (const TensorDecl& decl : op_.inputs) {
      if (!decl.optional) {
        set(decl.name, arguments.tensor(), &decl);
      } else if (auto tensor = arguments.maybe_tensor()) {
        set(decl.name, std::move(*tensor), &decl);
      }
    }
  }
  void take_options(Arguments& arguments) {
    for (const OptionDecl& option : op_.options) take_option(op_, option, arguments, &call_);
  }

  // A fresh tensor for a result; empty when it is not wanted.
  Tensor result(const std::string& name, bool wanted, Dtype dtype) {
    View view = View::dense(nullptr, dtype, {0});
    if (!wanted) return empty(op_, name, view, gpu_);
    check(call_.output_view(name, &view));
    Tensor tensor = empty(op_, name, view, gpu_);
    view.data = tensor.mutable_data_ptr();
    view.device = gpu_ < 0 ? Device::cpu : Device::cuda;
    check(call_.set(name, view));
    return tensor;
  }

  void run(Pass pass) {
    TorchThreads threads;
    Context context{.executor = &threads};
    if (gpu_ >= 0) context.stream = current_stream(gpu_);
    // The run asks for its memory when it has checked the call: arguments are prepared twice, not three times.
    struct Memory {
      const Op& op;
      int32_t gpu;
      std::optional<Tensor> tensor;
      std::string error;
    } memory{op_, gpu_, {}, {}};
    context.allocator = &memory;
    context.allocate = [](void* allocator, int64_t bytes) -> void* {
      auto* m = static_cast<Memory*>(allocator);
      try {
        m->tensor = empty(m->op, "the workspace", View::dense(nullptr, Dtype::u8, {bytes}), m->gpu);
        return m->tensor->mutable_data_ptr();
      } catch (const std::exception& error) {
        m->error = error.what();
        return nullptr;
      }
    };
    const Status status = call_.run(pass, context);
    if (!memory.error.empty()) throw std::runtime_error(memory.error);
    check(status);
  }

  Call& call() { return call_; }

 private:
  const Op& op_;
  Call call_;
  int32_t gpu_ = -1;
  std::vector<Tensor> kept_;  // what the views point into
};

void run_forward(const Op& op, StableIValue* stack, uint64_t num_arguments) {
  Arguments arguments(stack, num_arguments);
  TorchCall call(op);
  call.take_inputs(arguments);
  call.take_options(arguments);
  std::vector<bool> wanted;
  for (const TensorDecl& decl : op.outputs) wanted.push_back(!on_request(decl) || arguments.value<bool>());
  check(call.call().prepare());
  std::vector<Tensor> results;
  for (size_t i = 0; i < op.outputs.size(); ++i) {
    View view;
    check(call.call().output_view(op.outputs[i].name, &view));
    results.push_back(call.result(op.outputs[i].name, wanted[i], view.dtype));
  }
  call.run(Pass::forward);
  for (size_t i = 0; i < results.size(); ++i) stack[i] = from(results[i]);
}

void run_backward(const Op& op, StableIValue* stack, uint64_t num_arguments) {
  Arguments arguments(stack, num_arguments);
  TorchCall call(op);
  for (const TensorDecl& decl : op.outputs) {
    if (!decl.differentiable) continue;
    if (auto tensor = arguments.maybe_tensor()) call.set("d" + decl.name, std::move(*tensor));
  }
  call.take_inputs(arguments);
  for (const TensorDecl& decl : op.outputs) {
    if (decl.saved) call.set(decl.name, arguments.tensor());
  }
  call.take_options(arguments);
  const auto wanted = arguments.value<std::vector<bool>>();
  check(call.call().prepare());
  std::vector<Tensor> results;
  View first;
  check(call.call().get(op.inputs.front().name, &first));
  for (const TensorDecl& decl : op.inputs) {
    if (!decl.differentiable) continue;
    View input;
    check(call.call().get(decl.name, &input));
    const size_t i = results.size();
    results.push_back(call.result("d" + decl.name, i < wanted.size() && wanted[i] && input.given(),
                                  input.given() ? input.dtype : first.dtype));
  }
  if (wanted.size() != results.size()) {
    throw std::runtime_error(op.name + "_backward: wanted has " + std::to_string(wanted.size()) + " entries, expected " +
                             std::to_string(results.size()));
  }
  call.run(Pass::backward);
  for (size_t i = 0; i < results.size(); ++i) stack[i] = from(results[i]);
}

// torch calls a plain function without telling for which operator: one per declaration, by its place in the list.
template <size_t index>
void forward_of(StableIValue* stack, uint64_t num_arguments, uint64_t) {
  run_forward(*all_ops()[index], stack, num_arguments);
}
template <size_t index>
void backward_of(StableIValue* stack, uint64_t num_arguments, uint64_t) {
  run_backward(*all_ops()[index], stack, num_arguments);
}

constexpr size_t kOps = 0
#define LINNET_OP(name) +1
#include "mechanisms/list.h"
#undef LINNET_OP
    ;

using Library = torch::stable::detail::StableLibrary;

void define(Library& library) {
  for (const Op* op : all_ops()) {
    library.def(forward_schema(*op).c_str());
    if (op->differentiable()) library.def(backward_schema(*op).c_str());
  }
}

template <size_t... index>
void implement(Library& library, std::index_sequence<index...>) {
  (library.impl(all_ops()[index]->name.c_str(), forward_of<index>), ...);
  const auto backward = [&](const Op& op, auto* function) {
    if (op.differentiable()) library.impl((op.name + "_backward").c_str(), function);
  };
  (backward(*all_ops()[index], backward_of<index>), ...);
}

}  // namespace
}  // namespace linnet

STABLE_TORCH_LIBRARY(linnet, library) { linnet::define(library); }
STABLE_TORCH_LIBRARY_IMPL(linnet, CPU, library) { linnet::implement(library, std::make_index_sequence<linnet::kOps>()); }
// CUDA tensors reach the same checks, which say whether there are kernels for them.
STABLE_TORCH_LIBRARY_IMPL(linnet, CUDA, library) { linnet::implement(library, std::make_index_sequence<linnet::kOps>()); }
