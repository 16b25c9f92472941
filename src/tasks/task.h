// Task: a benchmark that is generated from a seed, or read from files: MQAR, MAD's six, ListOps, RegBench, Pathfinder,
// forecasting, images, text. Each is declared once: options with defaults and ranges, tensors with their shapes. `linnet
// tasks`, the C header and Python's linnet.tasks are made from the declarations.
//
//   std::vector<TaskTensor> tensors;
//   LINNET_TRY(make_task("mqar", {{"examples", "4"}, {"length", "64"}}, &tensors));     // inputs, labels, gaps
//
// The same options give the same numbers on every machine. A new task is one file with a function `const Task& NAME_task()` and
// a line in list.h.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/executor.h"
#include "core/status.h"
#include "core/view.h"
#include "tasks/random.h"

namespace linnet::tasks {

inline constexpr int64_t kIgnored = -100;                  // a label that counts nowhere
inline constexpr int64_t kMaxElements = int64_t{1} << 34;  // of one tensor: above it a typing error is likelier
inline constexpr double kMaxInteger = 9007199254740992;    // 2^53

enum class OptionType { integer, real, flag, choice, text };

struct TaskOption {
  std::string name;
  OptionType type = OptionType::integer;
  std::string otherwise;             // the default
  double low = 0, high = 0;          // of a number
  std::vector<std::string> choices;  // of a choice
  std::string doc;
};
TaskOption integer_option(std::string name, int64_t otherwise, int64_t low, int64_t high, std::string doc);
TaskOption real_option(std::string name, std::string otherwise, double low, double high, std::string doc);
TaskOption flag_option(std::string name, bool otherwise, std::string doc);
TaskOption choice_option(std::string name, std::vector<std::string> choices, std::string doc);  // the first is the default
TaskOption text_option(std::string name, std::string doc);

// i64, f64 or u8 values in row-major order; the vector of its type is filled.
struct TaskTensor {
  std::string name;
  Dtype dtype = Dtype::i64;
  std::vector<int64_t> shape;
  std::vector<int64_t> integers;
  std::vector<double> numbers;
  std::vector<uint8_t> bytes;

  int64_t count() const;
  double get(int64_t i) const;
  const void* data() const;
};
TaskTensor integer_tensor(std::string name, std::vector<int64_t> shape, int64_t fill = 0);
TaskTensor real_tensor(std::string name, std::vector<int64_t> shape, std::vector<double> numbers = {});
TaskTensor byte_tensor(std::string name, std::vector<int64_t> shape, std::vector<uint8_t> bytes = {});

using Words = std::vector<std::pair<std::string, std::string>>;  // option, text

struct Task;

// The options of a call: given or default, checked against their ranges.
class TaskOptions {
 public:
  Status parse(const Task& task, const Words& words);
  int64_t integer(std::string_view name) const;
  double real(std::string_view name) const;
  bool flag(std::string_view name) const { return text(name) == "1"; }
  const std::string& text(std::string_view name) const;
  bool given(std::string_view name) const;
  // The seed of the part: seed, seed + 1 or seed + 2 for split train, valid or test.
  uint64_t seed() const;
  const Task& task() const { return *task_; }
  Status error(const std::string& sentence) const;  // "mqar: ..."

 private:
  const Task* task_ = nullptr;
  std::vector<std::string> values_, given_;
};

struct TaskResult {
  std::string name, shape, doc;  // "inputs", "examples length", "tokens"
};

struct Task {
  std::string name, summary, details;
  std::vector<TaskOption> options;  // seed, split, examples and independent first, where it draws (drawn_options())
  std::vector<TaskResult> results;
  Status (*make)(const TaskOptions& options, std::vector<TaskTensor>* tensors) = nullptr;
};

// seed, split, examples, independent, then the task's own.
std::vector<TaskOption> drawn_options(int64_t examples, std::vector<TaskOption> own);

const std::vector<const Task*>& all_tasks();
const Task* find_task(std::string_view name);
std::vector<std::string> task_names();
// {"tasks": [{"name": ..., "summary": ..., "options": [...], "results": [...]}]}
std::string describe_tasks(int indent = 0);

Status make_task(std::string_view name, const Words& words, std::vector<TaskTensor>* tensors);
const TaskTensor* find_tensor(const std::vector<TaskTensor>& tensors, std::string_view name);

// Calls f(stream, example) for each example: on one running stream in order, or, with independent=1, each on a stream of its
// own (seeded by the first output of a stream seeded with seed + example), on all cores. f writes only what belongs to its
// example.
template <class F>
void for_examples(const TaskOptions& options, int64_t examples, const F& f) {
  if (!options.flag("independent")) {
    Stream stream(options.seed());
    for (int64_t i = 0; i < examples; ++i) f(stream, i);
    return;
  }
  struct Job {
    const F* f;
    uint64_t seed;
    int64_t examples;
  } job = {&f, options.seed(), examples};
  constexpr int64_t kBlock = 16;
  default_executor().run((examples + kBlock - 1) / kBlock,
                         [](void* context, int64_t block, int) {
                           const Job& own = *static_cast<const Job*>(context);
                           for (int64_t i = block * kBlock; i < std::min(own.examples, (block + 1) * kBlock); ++i) {
                             Stream stream(Stream(own.seed + static_cast<uint64_t>(i)).next());
                             (*own.f)(stream, i);
                           }
                         },
                         &job);
}

}  // namespace linnet::tasks
