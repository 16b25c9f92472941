#include "linnet_c.h"

#include <cstring>
#include <memory>
#include <string>

#include "capi/report.h"
#include "core/call/call.h"
#include "core/call/describe.h"
#include "core/log.h"
#include "tasks/task.h"

using namespace linnet;
using capi::report;

struct linnet_executor {
  std::unique_ptr<Executor> executor;
};

namespace {

static_assert(LINNET_F64 == static_cast<int>(Dtype::f64) && LINNET_F32 == static_cast<int>(Dtype::f32) &&
              LINNET_BF16 == static_cast<int>(Dtype::bf16) && LINNET_F16 == static_cast<int>(Dtype::f16) &&
              LINNET_I64 == static_cast<int>(Dtype::i64) && LINNET_I32 == static_cast<int>(Dtype::i32) &&
              LINNET_U8 == static_cast<int>(Dtype::u8) && LINNET_CPU == static_cast<int>(Device::cpu) &&
              LINNET_CUDA == static_cast<int>(Device::cuda) && LINNET_MAX_RANK == kMaxRank &&
              LINNET_BAD_INPUT == static_cast<int>(Code::bad_input) && LINNET_IMPOSSIBLE == static_cast<int>(Code::impossible));

class CallersThreads final : public Executor {
 public:
  using Run = void (*)(void* self, int64_t tasks, Task task, void* context);
  CallersThreads(int workers, Run start, void* self) : workers_(workers), run_(start), self_(self) {}
  int workers() const override { return workers_; }
  void run(int64_t tasks, Task fn, void* context) override { run_(self_, tasks, fn, context); }

 private:
  int workers_;
  Run run_;
  void* self_;
};

Status to_view(const std::string& op, const linnet_tensor& tensor, View* view) {
  const std::string name = op + ": " + tensor.name;
  if (tensor.dtype < LINNET_F64 || tensor.dtype > LINNET_U8) {
    return bad_input(name + " has dtype " + std::to_string(tensor.dtype) + ", expected LINNET_F64 (1) to LINNET_U8 (7)");
  }
  if (tensor.device != LINNET_CPU && tensor.device != LINNET_CUDA) {
    return bad_input(name + " has device " + std::to_string(tensor.device) + ", expected LINNET_CPU (0) or LINNET_CUDA (1)");
  }
  if (tensor.rank < 0 || tensor.rank > kMaxRank) {
    return bad_input(name + " has rank " + std::to_string(tensor.rank) + ", expected 0 to " + std::to_string(kMaxRank));
  }
  if (tensor.rank > 0 && tensor.sizes == nullptr) return bad_input(name + " has no sizes");
  int64_t elements = 1;
  for (int i = 0; i < tensor.rank; ++i) {
    if (tensor.sizes[i] > 0 && __builtin_mul_overflow(elements, tensor.sizes[i], &elements)) {
      return bad_input(name + " has more elements than 64 bits can count");
    }
  }
  *view = View::dense(tensor.data, static_cast<Dtype>(tensor.dtype), tensor.sizes, tensor.rank);
  view->device = static_cast<Device>(tensor.device);
  if (tensor.strides != nullptr) std::memcpy(view->stride, tensor.strides, sizeof(int64_t) * static_cast<size_t>(tensor.rank));
  return {};
}

Status find(const char* name, const Op** op) {
  if (name == nullptr) return bad_input("the operator's name is NULL");
  *op = find_op(name);
  if (*op != nullptr) return {};
  return bad_input("there is no operator '" + std::string(name) + "'; linnet_describe() has them all");
}

Status bind(Call& call, const linnet_tensor* tensors, int tensor_count, const linnet_option* options, int option_count) {
  const std::string& op = call.op().name;
  if (tensor_count < 0 || (tensor_count > 0 && tensors == nullptr)) return bad_input(op + ": the list of tensors is missing");
  if (option_count < 0 || (option_count > 0 && options == nullptr)) return bad_input(op + ": the list of options is missing");
  for (int i = 0; i < tensor_count; ++i) {
    if (tensors[i].name == nullptr) return bad_input(op + ": tensor " + std::to_string(i) + " has no name");
    View view;
    LINNET_TRY(call.get(tensors[i].name, &view));  // a tensor of this operator?
    if (view.given()) return bad_input(op + ": " + tensors[i].name + " is given twice");
    LINNET_TRY(to_view(op, tensors[i], &view));
    LINNET_TRY(call.set(tensors[i].name, view));
  }
  for (int i = 0; i < option_count; ++i) {
    if (options[i].name == nullptr) return bad_input(op + ": option " + std::to_string(i) + " has no name");
    if (options[i].text == nullptr) return bad_input(op + ": option " + options[i].name + " has no text");
    for (int j = 0; j < i; ++j) {
      if (std::strcmp(options[i].name, options[j].name) == 0) return bad_input(op + ": " + options[i].name + " is given twice");
    }
    LINNET_TRY(call.set_option(options[i].name, options[i].text));
  }
  return {};
}

Status to_pass(const Op& op, int number, Pass* pass) {
  if (number != LINNET_FORWARD && number != LINNET_BACKWARD) {
    return bad_input(op.name + ": pass is " + std::to_string(number) + ", expected LINNET_FORWARD (0) or LINNET_BACKWARD (1)");
  }
  *pass = number == LINNET_FORWARD ? Pass::forward : Pass::backward;
  return {};
}

Context to_context(const linnet_context* context) {
  if (context == nullptr) return {};
  return {.executor = context->executor == nullptr ? nullptr : context->executor->executor.get(),
          .workspace = context->workspace,
          .workspace_bytes = context->workspace_bytes,
          .impl = context->impl};
}

}  // namespace

const char* linnet_version(void) { return LINNET_VERSION; }

const char* linnet_describe(void) {
  static const std::string text = describe_json();
  return text.c_str();
}

int linnet_output_shape(const char* op_name, const char* output, const linnet_tensor* tensors, int tensor_count,
                        const linnet_option* options, int option_count, int32_t* dtype, int32_t* rank, int64_t* sizes,
                        char* message, size_t message_bytes) {
  return report(message, message_bytes, [&]() -> Status {
    const Op* op;
    LINNET_TRY(find(op_name, &op));
    if (output == nullptr || dtype == nullptr || rank == nullptr || sizes == nullptr) {
      return bad_input(op->name + ": linnet_output_shape got NULL for output, dtype, rank or sizes");
    }
    Call call(*op);
    LINNET_TRY(bind(call, tensors, tensor_count, options, option_count));
    LINNET_TRY(call.prepare());
    View view;
    LINNET_TRY(call.output_view(output, &view));
    *dtype = static_cast<int32_t>(view.dtype);
    *rank = view.rank;
    std::memcpy(sizes, view.size, sizeof(int64_t) * static_cast<size_t>(view.rank));
    return {};
  });
}

void linnet_set_log(void (*log)(const char* sentence, void* user), void* user) { set_log_hook(log, user); }

int linnet_workspace(const char* op_name, int pass_number, const linnet_tensor* tensors, int tensor_count,
                     const linnet_option* options, int option_count, const linnet_context* context, int64_t* bytes,
                     char* message, size_t message_bytes) {
  return report(message, message_bytes, [&]() -> Status {
    const Op* op;
    Pass pass;
    LINNET_TRY(find(op_name, &op));
    LINNET_TRY(to_pass(*op, pass_number, &pass));
    if (bytes == nullptr) return bad_input(op->name + ": linnet_workspace got NULL for bytes");
    Call call(*op);
    LINNET_TRY(bind(call, tensors, tensor_count, options, option_count));
    return call.workspace(pass, to_context(context), bytes);
  });
}

int linnet_cost(const char* op_name, int pass_number, const linnet_tensor* tensors, int tensor_count,
                const linnet_option* options, int option_count, double* flops, double* bytes, char* message,
                size_t message_bytes) {
  return report(message, message_bytes, [&]() -> Status {
    const Op* op;
    Pass pass;
    LINNET_TRY(find(op_name, &op));
    LINNET_TRY(to_pass(*op, pass_number, &pass));
    if (flops == nullptr || bytes == nullptr) return bad_input(op->name + ": linnet_cost got NULL for flops or bytes");
    if (op->cost == nullptr) return impossible(op->name + " does not count its cost");
    Call call(*op);
    LINNET_TRY(bind(call, tensors, tensor_count, options, option_count));
    LINNET_TRY(call.prepare());
    const Cost cost = op->cost(call.prepared_args(), call.dims(), pass);
    *flops = cost.flops;
    *bytes = cost.bytes;
    return {};
  });
}

int linnet_call(const char* op_name, int pass_number, const linnet_tensor* tensors, int tensor_count,
                const linnet_option* options, int option_count, const linnet_context* context, char* message,
                size_t message_bytes) {
  return report(message, message_bytes, [&]() -> Status {
    const Op* op;
    Pass pass;
    LINNET_TRY(find(op_name, &op));
    LINNET_TRY(to_pass(*op, pass_number, &pass));
    Call call(*op);
    LINNET_TRY(bind(call, tensors, tensor_count, options, option_count));
    return call.run(pass, to_context(context));
  });
}

linnet_executor* linnet_threads(int threads) {
  if (threads < 1 || threads > 1024) return nullptr;
  try {
    return new linnet_executor{std::make_unique<ThreadPool>(threads)};
  } catch (const std::exception&) {  // no memory, or the system starts no more threads
    return nullptr;
  }
}

linnet_executor* linnet_executor_new(int workers,
                                     void (*run)(void* self, int64_t tasks,
                                                 void (*task)(void* context, int64_t index, int worker), void* context),
                                     void* self) {
  if (workers < 1 || run == nullptr) return nullptr;
  try {
    return new linnet_executor{std::make_unique<CallersThreads>(workers, run, self)};
  } catch (const std::exception&) {
    return nullptr;
  }
}

void linnet_executor_free(linnet_executor* executor) { delete executor; }

struct linnet_task {
  std::vector<tasks::TaskTensor> tensors;
};

const char* linnet_describe_tasks(void) {
  static const std::string text = tasks::describe_tasks();
  return text.c_str();
}

int linnet_task_make(const char* name, const linnet_option* options, int option_count, linnet_task** task, char* message,
                     size_t message_bytes) {
  return report(message, message_bytes, [&]() -> Status {
    if (name == nullptr || task == nullptr) return bad_input("a task needs a name and a place for the result");
    *task = nullptr;
    if (option_count < 0 || (option_count > 0 && options == nullptr)) {
      return bad_input(std::string(name) + ": " + std::to_string(option_count) + " options are announced, but none are given");
    }
    tasks::Words words;
    for (int i = 0; i < option_count; ++i) {
      if (options[i].name == nullptr || options[i].text == nullptr) {
        return bad_input(std::string(name) + ": option " + std::to_string(i) + " has no name or no text");
      }
      words.emplace_back(options[i].name, options[i].text);
    }
    auto made = std::make_unique<linnet_task>();
    LINNET_TRY(tasks::make_task(name, words, &made->tensors));
    *task = made.release();
    return {};
  });
}

int linnet_task_tensor(const linnet_task* task, int index, linnet_tensor* tensor) {
  if (task == nullptr || tensor == nullptr || index < 0 || static_cast<size_t>(index) >= task->tensors.size()) {
    return LINNET_BAD_INPUT;
  }
  const tasks::TaskTensor& from = task->tensors[static_cast<size_t>(index)];
  *tensor = {from.name.c_str(),
             const_cast<void*>(from.data()),
             static_cast<int32_t>(from.dtype),
             LINNET_CPU,
             static_cast<int32_t>(from.shape.size()),
             from.shape.data(),
             nullptr};
  return LINNET_OK;
}

void linnet_task_free(linnet_task* task) { delete task; }
