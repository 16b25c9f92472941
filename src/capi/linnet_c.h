// Linnet from C and from every language that can call C: operators by name, tensors and options by name.
//
//   linnet_tensor tensors[] = {{"q", q, LINNET_F32, LINNET_CPU, 4, sizes, NULL},
//                              {"k", k, LINNET_F32, LINNET_CPU, 4, sizes, NULL}, ...};
//   linnet_option options[] = {{"causal", "true"}};
//   char message[256];
//   int code = linnet_call("softmax", LINNET_FORWARD, tensors, 4, options, 1, &context, message, sizeof message);
//   if (code != LINNET_OK) puts(message);
//
// Names, shapes, defaults and ranges are those of `linnet info OP`; linnet_describe() gives them as JSON. Gradients are called
// d<name>. A tensor that is not listed is not given (an optional input) or not wanted (an optional output, a gradient).
//
// Every function may be called from any number of threads at once. On failure nothing has been written to the tensors, and the
// message says in one sentence what was wrong. Memory is only allocated for the time of a call; executors live until freed.
#ifndef LINNET_C_H_
#define LINNET_C_H_

#include <stddef.h>
#include <stdint.h>

#include "../core/version.h" /* LINNET_VERSION, LINNET_VERSION_MAJOR, ... */

#if defined(__GNUC__)
#define LINNET_API __attribute__((visibility("default")))
#else
#define LINNET_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

// What functions return.
enum {
  LINNET_OK = 0,
  LINNET_BAD_INPUT = 2,  // the caller can fix it
  LINNET_IMPOSSIBLE = 3  // not possible here: a missing device, instruction set or implementation
};
enum { LINNET_F64 = 1, LINNET_F32 = 2, LINNET_BF16 = 3, LINNET_F16 = 4, LINNET_I64 = 5, LINNET_I32 = 6, LINNET_U8 = 7 };
enum { LINNET_CPU = 0, LINNET_CUDA = 1 };
enum { LINNET_FORWARD = 0, LINNET_BACKWARD = 1 };
enum { LINNET_MAX_RANK = 8 };

typedef struct {
  const char* name;
  void* data;  // inputs are read only, unless declared as overwritten
  int32_t dtype;
  int32_t device;
  int32_t rank;
  const int64_t* sizes;
  const int64_t* strides;  // in elements; NULL: dense, the last dimension fastest
} linnet_tensor;

typedef struct {
  const char* name;
  const char* text;  // "true", "0.5", "elu1", "4,-1", "none"
} linnet_option;

typedef struct linnet_executor linnet_executor;  // who runs the tasks of a call; never changes a bit of the result

typedef struct {
  const linnet_executor* executor;  // NULL: the process's pool, LINNET_THREADS workers or one per core
  const char* impl;                 // the implementation to run, NULL: the best one
  void* workspace;                  // scratch memory of at least linnet_workspace() bytes; NULL where that is 0
  int64_t workspace_bytes;
} linnet_context;

LINNET_API const char* linnet_version(void);
// All declarations as JSON, {"version": ..., "ops": [...]}; valid for the life of the process.
LINNET_API const char* linnet_describe(void);

// Where the library tells what it cannot return: a call that runs, but on slow kernels, says so once and why. `log` gets whole
// sentences, from any thread; NULL, as at the start: silence.
LINNET_API void linnet_set_log(void (*log)(const char* sentence, void* user), void* user);

// dtype, rank and sizes that an output or a gradient must have, given the inputs and options. `sizes` holds LINNET_MAX_RANK.
LINNET_API int linnet_output_shape(const char* op, const char* output, const linnet_tensor* tensors, int tensor_count,
                                   const linnet_option* options, int option_count, int32_t* dtype, int32_t* rank,
                                   int64_t* sizes, char* message, size_t message_bytes);
// Bytes of workspace that linnet_call() needs with the same arguments; `context` may be NULL.
LINNET_API int linnet_workspace(const char* op, int pass, const linnet_tensor* tensors, int tensor_count,
                                const linnet_option* options, int option_count, const linnet_context* context, int64_t* bytes,
                                char* message, size_t message_bytes);
// What the call costs, by the operator's own count: floating-point operations (a multiply-add is two) and bytes that it must
// read and write. Index tensors (offsets, lengths) are looked at, the numbers of others are not.
LINNET_API int linnet_cost(const char* op, int pass, const linnet_tensor* tensors, int tensor_count,
                           const linnet_option* options, int option_count, double* flops, double* bytes, char* message,
                           size_t message_bytes);
// Checks everything, then runs. The backward reads the inputs, the outputs that `info` calls kept, and the gradients given of
// outputs; it writes the gradients given of inputs. `context` may be NULL.
LINNET_API int linnet_call(const char* op, int pass, const linnet_tensor* tensors, int tensor_count,
                           const linnet_option* options, int option_count, const linnet_context* context, char* message,
                           size_t message_bytes);

// A pool of this many threads, the caller's included; 1 runs in the calling thread. NULL when `threads` is not 1 to 1024 or
// threads cannot be started.
LINNET_API linnet_executor* linnet_threads(int threads);
// Your own threads: run() calls task(context, i, worker) once for each i in [0, tasks), starting in order, with worker in
// [0, workers); calls with the same worker must not overlap; it returns when all are done. NULL when workers < 1.
LINNET_API linnet_executor* linnet_executor_new(
    int workers, void (*run)(void* self, int64_t tasks, void (*task)(void* context, int64_t index, int worker), void* context),
    void* self);
LINNET_API void linnet_executor_free(linnet_executor* executor);  // no call may be running on it; NULL is allowed

// Tasks: benchmarks that are generated from a seed or read from files (`linnet tasks list`).
//
//   linnet_task* task = NULL;
//   linnet_option options[] = {{"examples", "4"}, {"length", "64"}};
//   linnet_tensor tensor;
//   if (linnet_task_make("mqar", options, 2, &task, message, sizeof message) == LINNET_OK) {
//     for (int i = 0; linnet_task_tensor(task, i, &tensor) == LINNET_OK; ++i) use(tensor.name, tensor.data, tensor.sizes);
//   }
//   linnet_task_free(task);
typedef struct linnet_task linnet_task;
// All tasks with options and tensors as JSON, {"tasks": [...]}; valid for the life of the process.
LINNET_API const char* linnet_describe_tasks(void);
LINNET_API int linnet_task_make(const char* name, const linnet_option* options, int option_count, linnet_task** task,
                                char* message, size_t message_bytes);
// The tensor's name, values and sizes stay valid until the task is freed. LINNET_BAD_INPUT when there is none of this index.
LINNET_API int linnet_task_tensor(const linnet_task* task, int index, linnet_tensor* tensor);
LINNET_API void linnet_task_free(linnet_task* task);  // NULL is allowed

#ifdef __cplusplus
}
#endif

#include "linnet_c_layers.h"
#include "linnet_c_runtime.h"

#endif
