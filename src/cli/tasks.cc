// linnet tasks: what can be generated, and what it looks like.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>

#include "cli/command.h"
#include "cli/print.h"
#include "core/files/json.h"
#include "core/files/safetensors.h"
#include "core/op.h"
#include "tasks/listops.h"
#include "tasks/task.h"

namespace linnet::cli {
namespace {

using namespace tasks;

constexpr int64_t kShownValues = 64;  // of a row

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text;
  for (const int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

int list_tasks(bool json) {
  if (json) {
    std::printf("%s\n", describe_tasks(2).c_str());
    return kDone;
  }
  Table table({{"task"}, {"what it is"}, {"tensors"}});
  for (const Task* task : all_tasks()) {
    std::string names;
    for (const TaskResult& result : task->results) names += (names.empty() ? "" : ", ") + result.name;
    table.row({task->name, task->summary, names});
  }
  table.print(stdout);
  std::printf("\nlinnet tasks show NAME [option=value ...] prints options and examples.\n");
  return kDone;
}

std::string bound_text(double x) {
  const auto whole = static_cast<int64_t>(x);
  return static_cast<double>(whole) == x ? std::to_string(whole) : number(x, 4);
}

void print_declaration(const Task& task) {
  std::printf("%s: %s\n\n%s\n\n", task.name.c_str(), task.summary.c_str(), task.details.c_str());
  Table options({{"option"}, {"default"}, {"expected"}, {"what it is"}});
  for (const TaskOption& option : task.options) {
    std::string expected;
    if (option.type == OptionType::integer || option.type == OptionType::real) {
      expected = bound_text(option.low) + " to " + bound_text(option.high);
    } else if (option.type == OptionType::flag) {
      expected = "0 or 1";
    } else {
      for (const std::string& choice : option.choices) expected += (expected.empty() ? "" : ", ") + choice;
      if (option.type == OptionType::text) expected = "a path";
    }
    options.row({option.name, option.otherwise.empty() ? "-" : option.otherwise, expected, option.doc});
  }
  options.print(stdout);
  std::printf("\n");
  Table results({{"tensor"}, {"shape"}, {"what it is"}});
  for (const TaskResult& result : task.results) results.row({result.name, "[" + result.shape + "]", result.doc});
  results.print(stdout);
  std::printf("\n");
}

std::string value_text(const TaskTensor& tensor, int64_t i) {
  return tensor.dtype == Dtype::f64 ? number(tensor.get(i), 4) : std::to_string(static_cast<int64_t>(tensor.get(i)));
}

// An image as characters, two pixels a letter high.
void print_image(const uint8_t* pixels, int64_t side) {
  static constexpr char kShades[] = " .:-=+*#%@";
  for (int64_t y = 0; y + 1 < side; y += 2) {
    std::string line;
    for (int64_t x = 0; x < side; ++x) line += kShades[std::max(pixels[y * side + x], pixels[(y + 1) * side + x]) * 9 / 255];
    std::printf("    %s\n", line.c_str());
  }
}

void print_rows(const Task& task, const TaskTensor& tensor, int64_t rows) {
  if (tensor.shape.empty()) return;
  const int64_t width = tensor.shape[0] == 0 ? 0 : tensor.count() / tensor.shape[0];
  const int64_t side = static_cast<int64_t>(std::sqrt(static_cast<double>(width)));
  const bool image = tensor.name == "pixels" && side * side == width && side >= 8 && side <= 128;
  for (int64_t row = 0; row < std::min(rows, tensor.shape[0]); ++row) {
    if (image) {
      std::printf("  %s %lld\n", tensor.name.c_str(), static_cast<long long>(row));
      print_image(tensor.bytes.data() + row * width, side);
      continue;
    }
    std::string line;
    for (int64_t i = 0; i < std::min(width, kShownValues); ++i) {
      const std::string value = value_text(tensor, row * width + i);
      if (task.name == "listops" && tensor.name == "ids") {
        line += std::string(i > 0 ? " " : "") + kListopsTokens[static_cast<size_t>(tensor.get(row * width + i))];
      } else if (task.name == "text" || (task.name == "documents" && tensor.name == "inputs")) {
        const auto byte = static_cast<uint8_t>(tensor.get(row * width + i));
        line += byte >= 32 && byte < 127 ? static_cast<char>(byte) : '.';
      } else {
        line += (i > 0 ? " " : "") + (value == std::to_string(kIgnored) ? "." : value);
      }
    }
    std::printf("  %s %lld: %s%s\n", tensor.name.c_str(), static_cast<long long>(row), line.c_str(),
                width > kShownValues ? " ..." : "");
  }
}

Status write_tensors(const std::string& path, const Task& task, const Words& words, const std::vector<TaskTensor>& tensors) {
  std::vector<SafetensorsTensor> entries;
  for (const TaskTensor& tensor : tensors) {
    entries.push_back({tensor.name, safetensors_name(tensor.dtype), tensor.shape, tensor.data()});
  }
  std::vector<std::pair<std::string, std::string>> metadata = {{"mechanism", "tasks"}, {"operator", task.name}};
  for (const TaskOption& option : task.options) {
    std::string value = option.otherwise;
    for (const auto& [name, text] : words) {
      if (name == option.name) value = text;
    }
    if (!value.empty()) metadata.emplace_back(option.name, value);
  }
  return write_safetensors(path, entries, metadata);
}

int show_task(const Arguments& args, const std::vector<std::string>& rest) {
  if (rest.size() < 2) return fail(bad_input("tasks: show needs the name of a task; linnet tasks list has them"));
  const Task* task = find_task(rest[1]);
  if (task == nullptr) {
    const std::string hint = did_you_mean(rest[1], task_names());
    return fail(
        bad_input("tasks: there is no task '" + rest[1] + "'" + (hint.empty() ? "; linnet tasks list has them" : hint)));
  }
  Words words;
  for (size_t i = 2; i < rest.size(); ++i) {
    const size_t equals = rest[i].find('=');
    if (equals == std::string::npos) return fail(bad_input("tasks: '" + rest[i] + "' is no option=value"));
    const std::string name = rest[i].substr(0, equals);
    std::vector<std::string> names;
    for (const TaskOption& option : task->options) names.push_back(option.name);
    if (std::find(names.begin(), names.end(), name) == names.end()) {
      if (const std::string hint = did_you_mean(name, names); !hint.empty()) {
        return fail(bad_input(task->name + ": there is no option '" + name + "'" + hint));
      }
    }
    words.emplace_back(name, rest[i].substr(equals + 1));
  }
  int64_t rows = 2;
  if (const Status status = args.integer("rows", 0, 1'000'000, &rows); !status.ok()) return fail(status);
  const bool json = args.has("json");
  bool drawn = false, file = false;
  for (const TaskOption& option : task->options) {
    drawn |= option.name == "examples";
    file |= option.type == OptionType::text;
  }
  const bool has_examples = std::any_of(words.begin(), words.end(), [](const auto& word) { return word.first == "examples"; });
  Words asked = words;
  if (drawn && !has_examples) asked.emplace_back("examples", std::to_string(std::max<int64_t>(rows, 1)));
  if (!json) print_declaration(*task);
  if (file && words.empty() && task->name != "forecast") return kDone;  // it needs a file to show more
  std::vector<TaskTensor> tensors;
  const auto start = std::chrono::steady_clock::now();
  if (const Status status = make_task(task->name, asked, &tensors); !status.ok()) return fail(status);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (const std::string path = args.text("out"); !path.empty()) {
    if (const Status status = write_tensors(path, *task, asked, tensors); !status.ok()) return fail(status);
  }
  if (json) {
    JsonWriter writer(2);
    writer.begin_object().member("task", task->name).member("seconds", seconds).key("options").begin_object();
    for (const auto& [name, value] : asked) writer.member(name, value);
    writer.end_object().key("tensors").begin_array();
    for (const TaskTensor& tensor : tensors) {
      writer.begin_object().member("name", tensor.name).member("dtype", dtype_name(tensor.dtype)).key("shape").begin_array();
      for (const int64_t size : tensor.shape) writer.value(size);
      writer.end_array().key("values").begin_array();
      const int64_t width = tensor.shape.empty() || tensor.shape[0] == 0 ? 1 : tensor.count() / tensor.shape[0];
      for (int64_t i = 0; i < std::min(tensor.count(), rows * width); ++i) {
        if (tensor.dtype == Dtype::f64) {
          writer.value(tensor.get(i));
        } else {
          writer.value(static_cast<int64_t>(tensor.get(i)));
        }
      }
      writer.end_array().end_object();
    }
    std::printf("%s\n", writer.end_array().end_object().text().c_str());
    return kDone;
  }
  for (const TaskTensor& tensor : tensors) {
    std::printf("%s %s %s\n", tensor.name.c_str(), dtype_name(tensor.dtype), shape_text(tensor.shape).c_str());
    if (tensor.shape.empty()) std::printf("  %s\n", value_text(tensor, 0).c_str());
    print_rows(*task, tensor, rows);
  }
  const double tokens = tensors.empty() ? 0 : static_cast<double>(tensors.front().count());
  if (seconds > 0.05)
    std::printf("\n%s values of %s a second\n", number(tokens / seconds, 3).c_str(), tensors.front().name.c_str());
  return kDone;
}

int tasks_main(const Arguments& args) {
  const std::vector<std::string>& rest = args.rest();
  if (rest.empty() || rest[0] == "list") {
    if (rest.size() > 1)
      return fail(bad_input("tasks: list takes no '" + rest[1] + "'; linnet tasks show " + rest[1] + " shows one"));
    return list_tasks(args.has("json"));
  }
  if (rest[0] == "show") return show_task(args, rest);
  return fail(
      bad_input("tasks: there is no '" + rest[0] + "', expected list or show" + did_you_mean(rest[0], {"list", "show"})));
}

}  // namespace

const Command& tasks_command() {
  static const Command command = {
      .name = "tasks",
      .summary = "the benchmarks of the papers, generated from a seed: MQAR, MAD, ListOps, RegBench, Pathfinder, series, files",
      .usage = "list | show NAME [option=value ...] [OPTION ...]",
      .details =
          "  linnet tasks list\n"
          "  linnet tasks show mqar length=64 pairs=4 vocab=128\n"
          "  linnet tasks show listops min_length=5 max_length=60 max_depth=5 max_args=5 --rows 4\n"
          "  linnet tasks show mqar examples=100000 random_filler=1 seed=1 --out train.safetensors\n\n"
          "The same options give the same numbers everywhere. A . stands for -100, a label that does not count. Files that\n"
          "--out writes are checked by `linnet check`. From Python: linnet.tasks.mqar(examples=4, length=64).",
      .options = {{"rows", "N", "rows of each tensor to print (default 2), and examples to draw unless examples= is given"},
                  {"out", "FILE", "write the tensors as safetensors"},
                  {"json", "", "print JSON"}},
      .run = tasks_main,
  };
  return command;
}

}  // namespace linnet::cli
