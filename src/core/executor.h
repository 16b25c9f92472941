// Executor: who runs the tasks of a kernel. Kernels cut their work by shape alone, so the executor never changes a bit of the
// result.
//
//   ThreadPool pool(4);
//   softmax(args, out, {.executor = &pool, ...});
//
// Bring your own by deriving from Executor (the torch operators run on torch's threads this way).
#pragma once

#include <cstdint>

namespace linnet {

class Executor {
 public:
  using Task = void (*)(void* context, int64_t task, int worker);

  virtual ~Executor() = default;
  virtual int workers() const = 0;
  // Calls fn(context, task, worker) once for each task in [0, tasks), starting them in order, with worker in [0, workers());
  // calls with the same worker never overlap. Returns when all are done. Re-entrant: a nested or concurrent call still
  // completes.
  virtual void run(int64_t tasks, Task fn, void* context) = 0;
};

// Runs every task in the calling thread.
Executor& inline_executor();

// The process's pool, made on first use: LINNET_THREADS workers, else one per core.
Executor& default_executor();

// A fixed set of threads. Idle workers spin for about 0.1 ms, then sleep; the caller works too and never waits for a sleeper to
// start.
class ThreadPool final : public Executor {
 public:
  explicit ThreadPool(int workers);
  ~ThreadPool() override;
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;
  int workers() const override;
  void run(int64_t tasks, Task fn, void* context) override;

 private:
  struct State;
  State* state_;
};

}  // namespace linnet
