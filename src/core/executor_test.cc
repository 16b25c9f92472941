#include "core/executor.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace linnet {
namespace {

// Runs `tasks` tasks and counts, for each, how often it ran and whether two of one worker ever overlapped.
struct Counted {
  explicit Counted(int64_t tasks, int workers) : runs(static_cast<size_t>(tasks)), busy(static_cast<size_t>(workers)) {}
  std::vector<std::atomic<int>> runs, busy;
  std::atomic<int> overlaps{0}, strangers{0};

  static void task(void* context, int64_t task, int worker) {
    Counted& self = *static_cast<Counted*>(context);
    if (worker < 0 || worker >= static_cast<int>(self.busy.size())) {
      ++self.strangers;
      return;
    }
    if (self.busy[static_cast<size_t>(worker)].fetch_add(1) != 0) ++self.overlaps;
    ++self.runs[static_cast<size_t>(task)];
    self.busy[static_cast<size_t>(worker)].fetch_sub(1);
  }
  void expect_once() const {
    for (const auto& count : runs) ASSERT_EQ(count.load(), 1);
    EXPECT_EQ(overlaps.load(), 0);
    EXPECT_EQ(strangers.load(), 0);
  }
};

TEST(Executor, EveryTaskOnceForEveryThreadCount) {
  for (const int threads : {1, 2, 3, 4, 7, 8, 16}) {
    ThreadPool pool(threads);
    ASSERT_EQ(pool.workers(), threads);
    for (const int64_t tasks : {0, 1, 2, 3, 15, 16, 17, 1000}) {
      for (int round = 0; round < 20; ++round) {
        Counted counted(tasks, threads);
        pool.run(tasks, Counted::task, &counted);
        counted.expect_once();
      }
    }
  }
}

TEST(Executor, RunsInlineInOrder) {
  std::vector<int64_t> order;
  inline_executor().run(
      5, [](void* context, int64_t task, int) { static_cast<std::vector<int64_t>*>(context)->push_back(task); }, &order);
  EXPECT_EQ(order, (std::vector<int64_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(inline_executor().workers(), 1);
}

// A task that runs tasks: they complete, in the thread that asked. Workers of the inner call belong to that call.
TEST(Executor, Nested) {
  ThreadPool pool(4);
  struct Outer {
    ThreadPool* pool;
    std::atomic<int> inner{0};
  } outer{&pool};
  for (int round = 0; round < 50; ++round) {
    outer.inner = 0;
    pool.run(
        8,
        [](void* context, int64_t, int) {
          Outer& self = *static_cast<Outer*>(context);
          self.pool->run(
              5, [](void* inner, int64_t, int) { ++static_cast<Outer*>(inner)->inner; }, &self);
        },
        &outer);
    ASSERT_EQ(outer.inner.load(), 40);
  }
}

// Many threads use one pool at once: each call completes with all of its own tasks. A call that finds the pool taken runs in
// its own thread, so nobody waits for a stranger.
TEST(Executor, ConcurrentCallers) {
  ThreadPool pool(3);
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&, caller] {
      for (int round = 0; round < 200; ++round) {
        const int64_t tasks = 1 + (caller * 7 + round) % 40;
        std::vector<int64_t> done(static_cast<size_t>(tasks));  // not atomic: the sanitizer sees a missing happens-before
        pool.run(
            tasks,
            [](void* context, int64_t task, int) {
              (*static_cast<std::vector<int64_t>*>(context))[static_cast<size_t>(task)] += task + 1;
            },
            &done);
        for (int64_t task = 0; task < tasks; ++task) wrong += done[static_cast<size_t>(task)] != task + 1;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong.load(), 0);
}

TEST(Executor, PoolsComeAndGo) {
  for (int round = 0; round < 50; ++round) {
    ThreadPool pool(1 + round % 5);
    Counted counted(10, pool.workers());
    if (round % 2 == 0) pool.run(10, Counted::task, &counted);
    if (round % 2 == 0) counted.expect_once();
  }
  EXPECT_GE(default_executor().workers(), 1);
}

}  // namespace
}  // namespace linnet
