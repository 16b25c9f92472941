#include "executor.h"

#include <atomic>
#include <cstdlib>
#include <mutex>
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

// One job at a time. A worker may touch the job only while it is counted in `inside` and has then seen `open`; the caller
// closes the job and waits until nobody is inside. Both sides use sequentially consistent order: either the worker sees the job
// closed, or the caller sees the worker inside.
struct ThreadPool::State {
  std::mutex busy;
  Task fn = nullptr;
  void* context = nullptr;
  int64_t tasks = 0;
  alignas(128) std::atomic<int64_t> next{0};
  alignas(128) std::atomic<bool> open{false};
  std::atomic<int> inside{0};
  alignas(128) std::atomic<uint32_t> generation{0};
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;

  void work(int worker) {
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) fn(context, task, worker);
  }

  void serve(int worker) {
    inside_task = true;
    uint32_t seen = 0;
    for (;;) {
      for (int spin = 0; spin < 2000 && generation.load(std::memory_order_acquire) == seen; ++spin) pause();
      generation.wait(seen, std::memory_order_acquire);
      seen = generation.load(std::memory_order_acquire);
      if (stop.load()) return;
      inside.fetch_add(1);
      if (open.load()) work(worker);
      inside.fetch_sub(1);
    }
  }
};

ThreadPool::ThreadPool(int workers) : state_(new State) {
  for (int worker = 1; worker < workers; ++worker) state_->threads.emplace_back([this, worker] { state_->serve(worker); });
}

ThreadPool::~ThreadPool() {
  state_->stop.store(true);
  state_->generation.fetch_add(1);
  state_->generation.notify_all();
  for (std::thread& thread : state_->threads) thread.join();
  delete state_;
}

int ThreadPool::workers() const { return static_cast<int>(state_->threads.size()) + 1; }

void ThreadPool::run(int64_t tasks, Task fn, void* context) {
  State& s = *state_;
  std::unique_lock<std::mutex> lock(s.busy, std::defer_lock);
  if (tasks <= 1 || s.threads.empty() || inside_task || !lock.try_lock()) {
    for (int64_t task = 0; task < tasks; ++task) fn(context, task, 0);
    return;
  }
  s.fn = fn;
  s.context = context;
  s.tasks = tasks;
  s.next.store(0, std::memory_order_relaxed);
  s.open.store(true);
  s.generation.fetch_add(1);
  s.generation.notify_all();
  inside_task = true;
  s.work(0);
  inside_task = false;
  s.open.store(false);
  for (int spin = 0; s.inside.load() != 0; ++spin) {
    if (spin < 2000) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
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
