#include "executor.h"

#include <atomic>
#include <cstdlib>
#include <thread>
#include <vector>

namespace linnet {
namespace {

thread_local bool inside_task = false;  // a task that calls run() again runs its tasks itself

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

class InlineExecutor final : public Executor {
 public:
  int workers() const override { return 1; }
  void run(int64_t tasks, Task fn, void* context) override {
    for (int64_t task = 0; task < tasks; ++task) fn(context, task, 0);
  }
};

int default_workers() {
  if (const char* text = std::getenv("LINNET_THREADS")) {
    const long n = std::strtol(text, nullptr, 10);
    if (n >= 1 && n <= 1024) return static_cast<int>(n);
  }
  const unsigned cores = std::thread::hardware_concurrency();
  return cores == 0 ? 1 : static_cast<int>(cores);
}

}  // namespace

// One job at a time, in one line of the cache: a worker sees with one look that there is something to do, and what.
//
// Whoever counts `left` down from above 0 has taken a task of the job that is there at that moment, and the job stays until
// that task is `done`: so what it is may be read after that. Below 0, `left` tells how many came too late.
struct ThreadPool::State {
  static constexpr int32_t kStop = INT32_MIN / 2;

  alignas(128) std::atomic<int32_t> left{0};
  std::atomic<int32_t> done{0};  // by workers
  int64_t end = 0;               // the task behind the last one
  Task fn = nullptr;
  void* context = nullptr;
  alignas(128) std::atomic<bool> busy{false};
  std::vector<std::thread> threads;

  // Runs tasks while there are any; returns how many.
  int32_t work(int worker) {
    int32_t count = 0;
    for (; left.load(std::memory_order_relaxed) > 0; ++count) {
      const int32_t taken = left.fetch_sub(1, std::memory_order_acquire);
      if (taken <= 0) break;
      fn(context, end - taken, worker);
    }
    return count;
  }

  void serve(int worker) {
    inside_task = true;
    for (;;) {
      int32_t seen = left.load(std::memory_order_relaxed);
      for (int spin = 0; spin < 2000 && seen <= 0 && seen > kStop / 2; ++spin) {
        pause();
        seen = left.load(std::memory_order_relaxed);
      }
      if (seen <= kStop / 2) return;
      if (seen <= 0) {
        left.wait(seen, std::memory_order_relaxed);
      } else if (const int32_t count = work(worker); count > 0) {
        done.fetch_add(count, std::memory_order_release);
      }
    }
  }

  // At most 2^30 tasks, up to the one before `last`. The caller takes the first one at once.
  void run(int32_t tasks, int64_t last, Task task, void* task_context) {
    done.store(0, std::memory_order_relaxed);
    end = last;
    fn = task;
    context = task_context;
    left.store(tasks - 1);  // and what is above
    left.notify_all();
    fn(context, last - tasks, 0);
    const int32_t others = tasks - 1 - work(0);
    for (int spin = 0; done.load(std::memory_order_acquire) != others; ++spin) {
      if (spin < 2000) {
        pause();
      } else {
        std::this_thread::yield();
      }
    }
  }
};

ThreadPool::ThreadPool(int workers) : state_(new State) {
  for (int worker = 1; worker < workers; ++worker) state_->threads.emplace_back([this, worker] { state_->serve(worker); });
}

ThreadPool::~ThreadPool() {
  state_->left.store(State::kStop);
  state_->left.notify_all();
  for (std::thread& thread : state_->threads) thread.join();
  delete state_;
}

int ThreadPool::workers() const { return static_cast<int>(state_->threads.size()) + 1; }

void ThreadPool::run(int64_t tasks, Task fn, void* context) {
  State& s = *state_;
  if (tasks <= 1 || s.threads.empty() || inside_task || s.busy.exchange(true, std::memory_order_acquire)) {
    for (int64_t task = 0; task < tasks; ++task) fn(context, task, 0);
    return;
  }
  constexpr int64_t kMost = int64_t{1} << 30;
  inside_task = true;
  for (int64_t first = 0; first < tasks; first += kMost) {
    const int64_t count = tasks - first < kMost ? tasks - first : kMost;
    s.run(static_cast<int32_t>(count), first + count, fn, context);
  }
  inside_task = false;
  s.busy.store(false, std::memory_order_release);
}

Executor& inline_executor() {
  static InlineExecutor executor;
  return executor;
}

Executor& default_executor() {
  static ThreadPool pool(default_workers());
  return pool;
}

}  // namespace linnet
