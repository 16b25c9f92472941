// Task files: sequences drawn from a seed, regenerated number for number.
#include "check/files/file_kind.h"
#include "tasks/forecast.h"
#include "tasks/listops.h"
#include "tasks/mad.h"
#include "tasks/regbench.h"
#include "tasks/task.h"

namespace linnet::check {
namespace {

using namespace tasks;

// The options of a task, under the names of the metadata; other keys label the file.
Status words_of(const SafetensorsFile& file, const std::string& task, Words* words) {
  for (const auto& [key, value] : file.metadata()) {
    for (const TaskOption& option : find_task(task)->options) {
      if (option.name == key) words->emplace_back(key, value);
    }
  }
  return {};
}

Status make(const SafetensorsFile& file, const std::string& task, const Words& words, std::vector<TaskTensor>* tensors) {
  const Status status = make_task(task, words, tensors);
  return status.ok() ? status : bad_input(file.path() + ": " + status.message());
}

// The length of a stored tensor's first dimension.
Status rows_of(const SafetensorsFile& file, const std::string& name, int64_t* rows) {
  SafetensorsEntry entry;
  LINNET_TRY(file.find(name, entry));
  if (entry.shape.empty()) return bad_input(file.path() + ": " + name + " has no dimensions");
  *rows = entry.shape.front();
  return {};
}

Status expect_all(Stored& stored, const std::vector<TaskTensor>& tensors, double gate) {
  for (const TaskTensor& tensor : tensors) {
    std::vector<double> values(static_cast<size_t>(tensor.count()));
    for (int64_t i = 0; i < tensor.count(); ++i) values[static_cast<size_t>(i)] = tensor.get(i);
    LINNET_TRY(stored.expect(tensor.name, values, tensor.shape, tensor.dtype == Dtype::f64 ? gate : 0));
  }
  return {};
}

Status run_listops(const SafetensorsFile& file, Stored& stored) {
  Words words;
  LINNET_TRY(words_of(file, "listops", &words));
  if (file.metadata("examples").empty()) {
    int64_t rows = 0;
    LINNET_TRY(rows_of(file, "ids", &rows));
    words.emplace_back("examples", std::to_string(rows));
  }
  words.emplace_back("text", "1");
  std::vector<TaskTensor> tensors;
  LINNET_TRY(make(file, "listops", words, &tensors));
  LINNET_TRY(expect_all(stored, tensors, 0));
  std::string names;
  for (const char* token : kListopsTokens) names += (names.empty() ? "" : " ") + std::string(token);
  stored.expect_text("tokens", names);
  return {};
}

// One sequence of each task from one stream; the table of memorisation from a stream of its own.
Status run_mad(Stored& stored) {
  int64_t seed = 0;
  LINNET_TRY(stored.integer("seed", 0, static_cast<int64_t>(kMaxInteger), &seed));
  Stream stream(static_cast<uint64_t>(seed));
  const RecallSize plain = {.vocab = 16, .length = 32}, noisy = {.vocab = 32, .length = 32, .noise_vocab = 16, .noise = 0.4};
  for (const auto& [name, size] : {std::pair{"recall", plain}, std::pair{"noisy", noisy}}) {
    std::vector<int64_t> inputs(31), next(31), probe(31);
    draw_recall(stream, size, inputs.data(), next.data(), probe.data());
    LINNET_TRY(stored.expect(name + std::string("_inputs"), inputs, {31}));
    LINNET_TRY(stored.expect(name + std::string("_next"), next, {31}));
    LINNET_TRY(stored.expect(name + std::string("_probe"), probe, {31}));
  }
  std::vector<int64_t> inputs(40), targets(40);
  draw_selective_copy(stream, 16, 40, 6, inputs.data(), targets.data());
  LINNET_TRY(stored.expect("copy_inputs", inputs, {40}));
  LINNET_TRY(stored.expect("copy_targets", targets, {40}));
  const std::vector<int64_t> table = memorisation_table(static_cast<uint64_t>(seed), 64);
  LINNET_TRY(stored.expect("memory_map", table, {static_cast<int64_t>(table.size())}));
  inputs.resize(16);
  targets.resize(16);
  draw_memorisation(stream, table, 64, 16, inputs.data(), targets.data());
  LINNET_TRY(stored.expect("memory_inputs", inputs, {16}));
  LINNET_TRY(stored.expect("memory_targets", targets, {16}));
  inputs.resize(32);
  draw_compression(stream, 16, 32, inputs.data());
  return stored.expect("compress", inputs, {32});
}

Status run_regbench(Stored& stored) {
  int64_t seed = 0, words = 10, max_word = 50;
  LINNET_TRY(stored.integer("seed", 0, static_cast<int64_t>(kMaxInteger), &seed));
  LINNET_TRY(stored.integer("words", 1, 100'000, &words));
  LINNET_TRY(stored.integer("max_word", 2, 100'000, &max_word));
  Stream stream(static_cast<uint64_t>(seed));
  const Automaton automaton = draw_automaton(stream);
  std::vector<int64_t> sequence, legal;
  draw_words(stream, automaton, words, max_word, &sequence, &legal);
  const auto length = static_cast<int64_t>(sequence.size());
  LINNET_TRY(stored.expect("table", automaton.next, {automaton.nodes, kSymbols}));
  LINNET_TRY(stored.expect("sequence", sequence, {length}));
  return stored.expect("legal", legal, {length, kSymbols});
}

Status run_forecast(Stored& stored, double gate) {
  Series series;
  std::vector<int64_t> shape;
  LINNET_TRY(stored.numbers("series", &series.values, &shape));
  if (shape.size() != 2 || shape[1] < 1) return stored.error("series has no rows and channels");
  series.rows = shape[0];
  series.channels = shape[1];
  Forecast f;
  constexpr int64_t kMost = int64_t{1} << 40;
  LINNET_TRY(stored.integer("lookback", 1, kMost, &f.lookback));
  LINNET_TRY(stored.integer("horizon", 1, kMost, &f.horizon));
  LINNET_TRY(stored.integer("train", 1, kMost, &f.train));
  LINNET_TRY(stored.integer("valid", 0, kMost, &f.valid));
  LINNET_TRY(stored.integer("test", 0, kMost, &f.test));
  if (const Status status = prepare_forecast(series, &f); !status.ok()) return stored.error(status.message());
  const int64_t C = series.channels;
  LINNET_TRY(stored.expect("scaled", f.scaled, {series.rows, C}, gate));
  LINNET_TRY(stored.expect("mean", f.mean, {C}, gate));
  LINNET_TRY(stored.expect("std", f.deviation, {C}, gate));
  LINNET_TRY(stored.expect("parts", {f.begin[0], f.end[0], f.begin[1], f.end[1], f.begin[2], f.end[2]}, {3, 2}));
  LINNET_TRY(stored.expect("windows", {f.windows[0], f.windows[1], f.windows[2]}, {3}));
  LINNET_TRY(stored.expect("mse", {f.mse}, {}, gate));
  return stored.expect("mae", {f.mae}, {}, gate);
}

Status run(const SafetensorsFile& file, Dtype dtype, const Setting&, Result* result) {
  Stored stored(file, result);
  const std::string name = file.metadata("operator");
  const double gate = rms_gate(dtype, Pass::forward, Against::vectors, false, 0);
  if (name == "listops") {
    LINNET_TRY(run_listops(file, stored));
  } else if (name == "mad") {
    LINNET_TRY(run_mad(stored));
  } else if (name == "regbench" && file.has("sequence")) {  // one automaton, as the page stores it
    LINNET_TRY(run_regbench(stored));
  } else if (name == "forecast") {
    LINNET_TRY(run_forecast(stored, gate));
  } else {  // every other task under its own name, with its own options and tensors
    Words words;
    std::vector<TaskTensor> tensors;
    LINNET_TRY(words_of(file, name, &words));
    LINNET_TRY(make(file, name, words, &tensors));
    LINNET_TRY(expect_all(stored, tensors, gate));
  }
  return stored.finish();
}

}  // namespace

const FileKind& tasks_files() {
  static const FileKind kind = {
      .name = "task",
      .takes =
          [](std::string_view mechanism, std::string_view operation) {
            return mechanism == "tasks" && (operation == "mad" || find_task(operation) != nullptr);
          },
      .exact_only = true,
      .run = run,
  };
  return kind;
}

}  // namespace linnet::check
