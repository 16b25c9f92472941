#include "tasks/task.h"

#include <charconv>
#include <cmath>

#include "core/files/json.h"

namespace linnet::tasks {

#define LINNET_TASK(name) const Task& name##_task();
#include "tasks/list.h"
#undef LINNET_TASK

namespace {

std::string number_text(double x) {
  char text[32];
  const auto [end, error] = std::to_chars(text, text + sizeof text, x);
  return {text, end};
}

template <class T>
bool read_number(const std::string& text, T* value) {
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && stop == text.data() + text.size();
}

Status check_value(const TaskOptions& options, const TaskOption& option, std::string* text) {
  const std::string is = option.name + " is '" + *text + "', expected ";
  const std::string range = number_text(option.low) + " to " + number_text(option.high);
  double x = 0;
  int64_t whole = 0;
  switch (option.type) {
    case OptionType::integer:
      if (!read_number(*text, &whole)) return options.error(is + "a whole number");
      x = static_cast<double>(whole);
      if (x < option.low || x > option.high) return options.error(is + range);
      return {};
    case OptionType::real:
      if (!read_number(*text, &x) || !std::isfinite(x)) return options.error(is + "a number");
      if (x < option.low || x > option.high) return options.error(is + range);
      return {};
    case OptionType::flag:
      if (*text == "true" || *text == "True") *text = "1";
      if (*text == "false" || *text == "False") *text = "0";
      if (*text != "0" && *text != "1") return options.error(is + "0 or 1");
      return {};
    case OptionType::choice: {
      std::string names;
      for (const std::string& choice : option.choices) {
        if (choice == *text) return {};
        names += (names.empty() ? "" : ", ") + choice;
      }
      return options.error(is + "one of " + names);
    }
    case OptionType::text: return {};
  }
  return {};
}

const char* type_name(OptionType type) {
  static constexpr const char* kNames[] = {"integer", "real", "flag", "choice", "text"};
  return kNames[static_cast<int>(type)];
}

int64_t product(const std::vector<int64_t>& shape) {
  int64_t n = 1;
  for (const int64_t size : shape) n *= size;
  return n;
}

}  // namespace

TaskOption integer_option(std::string name, int64_t otherwise, int64_t low, int64_t high, std::string doc) {
  return {
      std::move(name), OptionType::integer, std::to_string(otherwise), static_cast<double>(low), static_cast<double>(high), {},
      std::move(doc)};
}
TaskOption real_option(std::string name, std::string otherwise, double low, double high, std::string doc) {
  return {std::move(name), OptionType::real, std::move(otherwise), low, high, {}, std::move(doc)};
}
TaskOption flag_option(std::string name, bool otherwise, std::string doc) {
  return {std::move(name), OptionType::flag, otherwise ? "1" : "0", 0, 1, {}, std::move(doc)};
}
TaskOption choice_option(std::string name, std::vector<std::string> choices, std::string doc) {
  const std::string first = choices.front();
  return {std::move(name), OptionType::choice, first, 0, 0, std::move(choices), std::move(doc)};
}
TaskOption text_option(std::string name, std::string doc) {
  return {std::move(name), OptionType::text, "", 0, 0, {}, std::move(doc)};
}

int64_t TaskTensor::count() const { return product(shape); }

double TaskTensor::get(int64_t i) const {
  const auto at = static_cast<size_t>(i);
  if (dtype == Dtype::f64) return numbers[at];
  return dtype == Dtype::u8 ? bytes[at] : static_cast<double>(integers[at]);
}

const void* TaskTensor::data() const {
  if (dtype == Dtype::f64) return numbers.data();
  return dtype == Dtype::u8 ? static_cast<const void*>(bytes.data()) : integers.data();
}

TaskTensor integer_tensor(std::string name, std::vector<int64_t> shape, int64_t fill) {
  TaskTensor tensor{std::move(name), Dtype::i64, std::move(shape), {}, {}, {}};
  tensor.integers.assign(static_cast<size_t>(tensor.count()), fill);
  return tensor;
}

TaskTensor real_tensor(std::string name, std::vector<int64_t> shape, std::vector<double> numbers) {
  TaskTensor tensor{std::move(name), Dtype::f64, std::move(shape), {}, std::move(numbers), {}};
  tensor.numbers.resize(static_cast<size_t>(tensor.count()));
  return tensor;
}

TaskTensor byte_tensor(std::string name, std::vector<int64_t> shape, std::vector<uint8_t> bytes) {
  TaskTensor tensor{std::move(name), Dtype::u8, std::move(shape), {}, {}, std::move(bytes)};
  tensor.bytes.resize(static_cast<size_t>(tensor.count()));
  return tensor;
}

std::vector<TaskOption> drawn_options(int64_t examples, std::vector<TaskOption> own) {
  std::vector<TaskOption> options = {
      integer_option("seed", 0, 0, static_cast<int64_t>(kMaxInteger), "of the random stream"),
      choice_option("split", {"train", "valid", "test"}, "draws with seed, seed + 1 or seed + 2"),
      integer_option("examples", examples, 0, int64_t{1} << 32, "number of sequences"),
      flag_option("independent", false, "each sequence has a stream of its own: in parallel, in any order"),
  };
  for (TaskOption& option : own) options.push_back(std::move(option));
  return options;
}

Status TaskOptions::error(const std::string& sentence) const { return bad_input(task_->name + ": " + sentence); }

Status TaskOptions::parse(const Task& task, const Words& words) {
  task_ = &task;
  values_.clear();
  given_.clear();
  for (const TaskOption& option : task.options) values_.push_back(option.otherwise);
  for (const auto& [name, text] : words) {
    size_t i = 0;
    while (i < task.options.size() && task.options[i].name != name) ++i;
    if (i == task.options.size()) {
      std::string names;
      for (const TaskOption& option : task.options) names += (names.empty() ? "" : ", ") + option.name;
      return error("there is no option '" + name + "'; it has " + names);
    }
    std::string value = text;
    LINNET_TRY(check_value(*this, task.options[i], &value));
    values_[i] = value;
    given_.push_back(name);
  }
  return {};
}

const std::string& TaskOptions::text(std::string_view name) const {
  static const std::string kNone;
  for (size_t i = 0; i < values_.size(); ++i) {
    if (task_->options[i].name == name) return values_[i];
  }
  return kNone;
}

int64_t TaskOptions::integer(std::string_view name) const {
  int64_t value = 0;
  read_number(text(name), &value);
  return value;
}

double TaskOptions::real(std::string_view name) const {
  double value = 0;
  read_number(text(name), &value);
  return value;
}

bool TaskOptions::given(std::string_view name) const { return std::find(given_.begin(), given_.end(), name) != given_.end(); }

uint64_t TaskOptions::seed() const {
  const std::string& split = text("split");
  return static_cast<uint64_t>(integer("seed")) + (split == "test" ? 2 : split == "valid" ? 1 : 0);
}

const std::vector<const Task*>& all_tasks() {
  static const std::vector<const Task*> tasks = {
#define LINNET_TASK(name) &name##_task(),
#include "tasks/list.h"
#undef LINNET_TASK
  };
  return tasks;
}

const Task* find_task(std::string_view name) {
  for (const Task* task : all_tasks()) {
    if (task->name == name) return task;
  }
  return nullptr;
}

std::vector<std::string> task_names() {
  std::vector<std::string> names;
  for (const Task* task : all_tasks()) names.push_back(task->name);
  return names;
}

std::string describe_tasks(int indent) {
  JsonWriter json(indent);
  json.begin_object().key("tasks").begin_array();
  for (const Task* task : all_tasks()) {
    json.begin_object().member("name", task->name).member("summary", task->summary).member("details", task->details);
    json.key("options").begin_array();
    for (const TaskOption& option : task->options) {
      json.begin_object()
          .member("name", option.name)
          .member("type", type_name(option.type))
          .member("default", option.otherwise);
      if (option.type == OptionType::integer || option.type == OptionType::real) {
        json.member("low", option.low).member("high", option.high);
      }
      if (!option.choices.empty()) {
        json.key("choices").begin_array();
        for (const std::string& choice : option.choices) json.value(choice);
        json.end_array();
      }
      json.member("doc", option.doc).end_object();
    }
    json.end_array().key("results").begin_array();
    for (const TaskResult& result : task->results) {
      json.begin_object().member("name", result.name).member("shape", result.shape).member("doc", result.doc).end_object();
    }
    json.end_array().end_object();
  }
  json.end_array().end_object();
  return json.text();
}

Status make_task(std::string_view name, const Words& words, std::vector<TaskTensor>* tensors) {
  tensors->clear();
  const Task* task = find_task(name);
  if (task == nullptr) {
    std::string names;
    for (const std::string& each : task_names()) names += (names.empty() ? "" : ", ") + each;
    return bad_input("there is no task '" + std::string(name) + "'; there are " + names);
  }
  TaskOptions options;
  LINNET_TRY(options.parse(*task, words));
  return task->make(options, tensors);
}

const TaskTensor* find_tensor(const std::vector<TaskTensor>& tensors, std::string_view name) {
  for (const TaskTensor& tensor : tensors) {
    if (tensor.name == name) return &tensor;
  }
  return nullptr;
}

}  // namespace linnet::tasks
