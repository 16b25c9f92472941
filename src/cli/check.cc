// linnet check: vector files and random cases against the reference, a line per tensor.
#include "check/check.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <map>

#include "check/files/vectors.h"
#include "check/sample.h"
#include "cli/command.h"
#include "cli/print.h"
#include "core/cuda/driver.h"
#include "core/executor.h"
#include "core/files/json.h"

namespace linnet::cli {
namespace {

namespace fs = std::filesystem;
using check::Case;
using check::Result;
using check::Sampling;

constexpr int kMaxShown = 20;  // failing random cases that are printed
constexpr int kMaxShrunk = 3;  // of them, made smaller
constexpr int kShrinkRuns = 150;

struct Plan {
  std::vector<const Op*> ops;
  std::vector<std::string> files, cases;
  std::vector<Dtype> dtypes;
  std::string impl;  // a name, or all; empty: the best for files, all for random cases
  Device device = Device::cpu;
  int threads = 0;  // 0: all cores for files, drawn for random cases
  bool forward = true, backward = true, json = false, verbose = false;
  int64_t random = 0, seed = 1;
};

// The result of a file or a case, the sentence about one that could not be run, or the reason why it was skipped.
class Report {
 public:
  explicit Report(const Plan& plan)
      : plan_(plan),
        table_({{"check", Align::left, 34},
                {"tensor", Align::left, 13},
                {"dtype", Align::left, 5},
                {"impl", Align::left, 8},
                {"rms", Align::right, 8},
                {"gate", Align::right, 8},
                {"max", Align::right, 8},
                {"gate", Align::right, 8},
                {"", Align::left, 4}}) {
    json_.begin_object().key("results").begin_array();
  }

  void add(const std::string& name, const Result& result, bool show) {
    ++(result.ok() ? passed_ : failed_);
    for (const check::TensorResult& tensor : result.tensors) {
      if (tensor.pass == Pass::forward ? !plan_.forward : !plan_.backward) continue;
      if (show && !plan_.json) print(name, result, tensor);
    }
    if (show && !plan_.json) {
      for (const std::string& fault : result.faults) std::printf("%s: FAIL: %s\n", name.c_str(), fault.c_str());
    }
    if (plan_.json) write(result);
  }
  void skip(const std::string& name, const std::string& reason) {
    ++skipped_;
    if (!plan_.json) std::printf("%s: skipped: %s\n", name.c_str(), reason.c_str());
    skips_.emplace_back(name, reason);
  }
  void refuse(const Status& status) {
    refused_ = std::max(refused_, static_cast<int>(status.code()));
    refusals_.push_back(status.message());
    fail(status);
  }
  // Prints the summary; the exit code.
  int finish(double seconds) {
    if (plan_.json) {
      json_.end_array().key("skipped").begin_array();
      for (const auto& [name, reason] : skips_)
        json_.begin_object().member("check", name).member("reason", reason).end_object();
      json_.end_array().key("refused").begin_array();
      for (const std::string& sentence : refusals_) json_.value(sentence);
      json_.end_array().member("passed", passed_).member("failed", failed_).member("seconds", seconds).end_object();
      std::printf("%s\n", json_.text().c_str());
    } else {
      std::printf("%lld passed, %lld failed, %lld skipped in %s\n", static_cast<long long>(passed_),
                  static_cast<long long>(failed_), static_cast<long long>(skipped_), seconds_text(seconds).c_str());
    }
    if (failed_ > 0) return kCheckFailed;
    return refused_;
  }

 private:
  void print(const std::string& name, const Result& result, const check::TensorResult& tensor) {
    const check::Comparison& c = tensor.comparison;
    const std::string note = plan_.verbose || !c.ok ? c.note : "";
    table_.stream(stdout,
                  {name, tensor.name, dtype_name(result.dtype), result.impl, scientific(c.rms), scientific(c.rms_gate),
                   scientific(c.max), scientific(c.max_gate), (c.ok ? "ok" : "FAIL") + (note.empty() ? "" : "  " + note)});
  }
  void write(const Result& result) {
    json_.begin_object().member("check", result.what).member("dtype", dtype_name(result.dtype)).member("impl", result.impl);
    json_.member("ok", result.ok()).key("tensors").begin_array();
    for (const check::TensorResult& tensor : result.tensors) {
      const check::Comparison& c = tensor.comparison;
      json_.begin_object().member("name", tensor.name).member("pass", tensor.pass == Pass::forward ? "fwd" : "bwd");
      json_.member("rms", c.rms).member("rms_gate", c.rms_gate).member("max", c.max).member("max_gate", c.max_gate);
      json_.member("ok", c.ok).member("note", c.note).end_object();
    }
    json_.end_array().key("faults").begin_array();
    for (const std::string& fault : result.faults) json_.value(fault);
    json_.end_array().key("not_compared").begin_array();
    for (const std::string& name : result.unchecked) json_.value(name);
    json_.end_array().end_object();
  }

  const Plan& plan_;
  Table table_;
  JsonWriter json_{2};
  std::vector<std::pair<std::string, std::string>> skips_;
  std::vector<std::string> refusals_;
  int64_t passed_ = 0, failed_ = 0, skipped_ = 0;
  int refused_ = kDone;
};

// The worst of each operator and tensor over all random cases, a column for each dtype.
class Worst {
 public:
  explicit Worst(const std::vector<Dtype>& dtypes) : dtypes_(dtypes) {}
  void add(const Op& op, const Result& result) {
    for (const check::TensorResult& tensor : result.tensors) {
      Line& line = lines_[{op.name, tensor.pass, tensor.name}];
      ++line.cases;
      line.failed += !tensor.comparison.ok;
      const auto worst = line.worst.try_emplace(result.dtype, tensor.comparison).first;
      if (tensor.comparison.share() > worst->second.share()) worst->second = tensor.comparison;
    }
  }
  void print() const {
    std::vector<Column> columns = {{"operator"}, {"tensor"}, {"cases", Align::right}};
    for (const Dtype dtype : dtypes_) columns.push_back({dtype_name(dtype) + std::string(" rms, of gate"), Align::right});
    columns.push_back({""});
    Table table(columns);
    for (const Op* op : all_ops()) {
      for (const auto& [key, line] : lines_) {
        if (std::get<0>(key) != op->name) continue;
        std::vector<std::string> cells = {op->name, std::get<2>(key), std::to_string(line.cases)};
        for (const Dtype dtype : dtypes_) {
          const auto worst = line.worst.find(dtype);
          cells.push_back(worst == line.worst.end() ? "-" : scientific(worst->second.rms) + percent(worst->second.share()));
        }
        cells.push_back(line.failed == 0 ? "ok" : "FAIL in " + std::to_string(line.failed));
        table.row(cells);
      }
    }
    table.print(stdout);
  }

 private:
  struct Line {
    int64_t cases = 0, failed = 0;
    std::map<Dtype, check::Comparison> worst;
  };
  static std::string percent(double share) {
    char text[32];
    std::snprintf(text, sizeof text, "%6.0f %%", std::min(100 * share, 9999.0));
    return text;
  }
  const std::vector<Dtype>& dtypes_;
  std::map<std::tuple<std::string, Pass, std::string>, Line> lines_;
};

Status read_targets(const Arguments& args, Plan* plan) {
  std::vector<std::string> names;
  for (const Op* op : all_ops()) names.push_back(op->name);
  for (const std::string& word : args.rest()) {
    bool known = false;
    for (const Op* op : all_ops()) {  // a mechanism's name means all its operators
      if (op->name != word && op->mechanism != word) continue;
      known = true;
      if (std::find(plan->ops.begin(), plan->ops.end(), op) == plan->ops.end()) plan->ops.push_back(op);
    }
    if (known) continue;
    std::error_code error;
    if (fs::is_directory(word, error)) {
      const size_t before = plan->files.size();
      for (fs::directory_iterator entry(word, error), end; !error && entry != end; entry.increment(error)) {
        if (entry->path().extension() == ".safetensors") plan->files.push_back(entry->path().string());
      }
      if (error) return bad_input("check: the folder " + word + " cannot be read: " + error.message());
      if (plan->files.size() == before) return bad_input("check: the folder " + word + " has no .safetensors file");
      std::sort(plan->files.begin() + static_cast<std::ptrdiff_t>(before), plan->files.end());
    } else if (fs::exists(word, error)) {
      plan->files.push_back(word);
    } else {
      return bad_input("check: there is no operator, file or folder '" + word + "'" + did_you_mean(word, names));
    }
  }
  return {};
}

// The implementations of an operator that --impl asks for; none when it has no such one. One that exists and cannot run here is
// named, so that running it says why. The rows of the GPU's table go by their common name, cuda: each case takes the best.
std::vector<std::string> impls_of(const Op& op, const std::string& wanted, Device device) {
  std::vector<std::string> names;
  for (const Impl& impl : op.impls) {
    if (impl.device != device) continue;
    const std::string name = wanted == "all" ? impl.name.substr(0, impl.name.find('.')) : wanted;
    const bool asked = wanted == "all" ? impl.missing().empty() : is_named(impl, wanted);
    if (asked && (names.empty() || names.back() != name)) names.push_back(name);
  }
  return names;
}

Status read_impl(const Arguments& args, Plan* plan) {
  plan->impl = args.text("impl");
  if (plan->impl.empty() || plan->impl == "all") return {};
  std::vector<std::string> names;
  for (const Op* op : all_ops()) {
    if (!impls_of(*op, plan->impl, plan->device).empty()) return {};
    for (const Impl& impl : op->impls) {
      if (impl.device == plan->device) names.push_back(impl.name);
    }
  }
  const bool cuda = plan->device == Device::cuda;
  return bad_input("check: no operator has an implementation '" + plan->impl + "' on " + (cuda ? "a CUDA device" : "the CPU") +
                   did_you_mean(plan->impl, names));
}

Status read_plan(const Arguments& args, Plan* plan) {
  const std::string device = args.text("device", "cpu");
  if (device == "cuda") {
    plan->device = Device::cuda;
    if (const std::string reason = cuda::missing(); !reason.empty()) {
      return impossible("check: " + reason + "; --device cpu checks the CPU's kernels");
    }
  } else if (device != "cpu")
    return bad_input("check: --device is '" + device + "', expected cpu or cuda");
  LINNET_TRY(read_targets(args, plan));
  LINNET_TRY(read_impl(args, plan));
  int dtype = 0, pass = 0;
  static constexpr Dtype kDtypes[] = {Dtype::f64, Dtype::f32, Dtype::bf16, Dtype::f16};
  LINNET_TRY(args.choice("dtype", {"all", "f64", "f32", "bf16", "f16"}, &dtype));
  if (dtype == 0) {
    plan->dtypes.assign(std::begin(kDtypes), std::end(kDtypes));
  } else {
    plan->dtypes.push_back(kDtypes[dtype - 1]);
  }
  LINNET_TRY(args.choice("pass", {"all", "fwd", "bwd"}, &pass));
  plan->forward = pass != 2;
  plan->backward = pass != 1;
  int64_t threads = 0;
  LINNET_TRY(args.integer("threads", 1, 256, &threads));
  plan->threads = static_cast<int>(threads);
  LINNET_TRY(args.integer("seed", 0, int64_t{1} << 53, &plan->seed));
  plan->json = args.has("json");
  plan->verbose = args.has("verbose");
  for (const std::string& line : args.all("case")) {
    const std::string first = line.substr(0, line.find(' '));
    if (first.find('=') == std::string::npos) {
      plan->cases.push_back(line);
    } else if (plan->ops.empty()) {
      return bad_input("check: --case starts with '" + first + "', expected an operator there or before");
    } else {
      plan->cases.push_back(plan->ops.front()->name + " " + line);
    }
  }
  if (!plan->cases.empty() && !args.has("random")) return {};
  const bool wanted = !plan->ops.empty() || plan->files.empty() || args.has("random");
  plan->random = wanted ? 100 : 0;
  LINNET_TRY(args.integer("random", 1, 1'000'000'000, &plan->random));
  if (plan->ops.empty()) plan->ops = all_ops();
  return {};
}

void print_unchecked(const Plan& plan, const std::string& file, const std::vector<std::string>& unchecked) {
  if (plan.json || unchecked.empty()) return;
  std::string names;
  for (const std::string& name : unchecked) names += (names.empty() ? "" : ", ") + name;
  std::printf("%s: not compared: %s\n", file.c_str(), names.c_str());
}

// A file that holds no call of an operator: in every dtype that it knows.
void check_kind(const Plan& plan, const check::VectorFile& file, Report* report) {
  if (plan.device != Device::cpu) return report->skip(file.name, file.kind->name + " files are checked on the CPU");
  std::vector<Dtype> dtypes = plan.dtypes;
  if (file.kind->exact_only) std::erase_if(dtypes, [](Dtype dtype) { return dtype != Dtype::f64; });
  if (dtypes.empty()) return report->skip(file.name, file.kind->name + " files are checked in f64 alone");
  const int threads = plan.threads > 0 ? plan.threads : default_executor().workers();
  Result result;
  for (const Dtype dtype : dtypes) {
    const std::string impl = plan.impl == "all" ? "" : plan.impl;
    const Status ran = check::run_vectors(file, dtype, {.impl = impl, .threads = threads}, &result);
    if (!ran.ok()) return report->refuse(ran);
    report->add(file.name, result, true);
  }
  print_unchecked(plan, file.name, result.unchecked);
}

void check_call(const Plan& plan, check::VectorFile file, Report* report) {
  if (!file.missing.empty()) {
    report->skip(file.name, file.missing);
    return;
  }
  if (file.kind != nullptr) return check_kind(plan, file, report);
  if (!plan.backward) file.problem.gradients.clear();
  const Op& op = *file.problem.op;
  const bool on_gpu = plan.device == Device::cuda;
  const std::vector<std::string> impls = plan.impl.empty() && !on_gpu
                                             ? std::vector<std::string>{""}
                                             : impls_of(op, plan.impl.empty() ? "all" : plan.impl, plan.device);
  if (impls.empty()) report->skip(file.name, op.name + " has no implementation " + (on_gpu ? "on a CUDA device" : plan.impl));
  for (const std::string& impl : impls) {
    for (const Dtype dtype : plan.dtypes) {
      Result result;
      const int threads = plan.threads > 0 ? plan.threads : default_executor().workers();
      const check::Setting setting = {.impl = impl, .threads = threads, .device = plan.device};
      Status ran = check::run_vectors(file, dtype, setting, &result);
      if (on_gpu && ran.code() == Code::impossible && !file.problem.gradients.empty()) {  // perhaps the forward alone
        check::VectorFile forward = file;
        forward.problem.gradients.clear();
        ran = check::run_vectors(forward, dtype, setting, &result);
      }
      if (on_gpu && ran.code() == Code::impossible) {  // what its kernels do not take
        report->skip(file.name, ran.message());
        continue;
      }
      if (!ran.ok()) {
        report->refuse(ran);
        break;
      }
      report->add(file.name, result, true);
    }
  }
  print_unchecked(plan, file.name, file.unchecked);
}

void check_files(const Plan& plan, Report* report) {
  Progress progress("files", static_cast<int64_t>(plan.files.size()));
  for (size_t i = 0; i < plan.files.size(); ++i) {
    progress.at(static_cast<int64_t>(i));
    std::vector<check::VectorFile> calls;
    const Status status = check::load_vectors(plan.files[i], &calls);
    progress.clear();
    if (!status.ok()) report->refuse(status);
    for (size_t call = 0; status.ok() && call < calls.size(); ++call) check_call(plan, std::move(calls[call]), report);
  }
}

void check_cases(const Plan& plan, const Arguments& args, Report* report) {
  for (const std::string& line : plan.cases) {
    Case c;
    Status status = check::parse_case(line, &c);
    if (status.ok() && !plan.impl.empty() && plan.impl != "all") c.impl = plan.impl;
    if (status.ok() && c.impl.empty() && plan.device == Device::cuda) {
      const std::vector<std::string> impls = impls_of(*c.op, "all", plan.device);
      if (impls.empty()) {
        status = bad_input("check: " + c.op->name + " has no implementation on a CUDA device");
      } else {
        c.impl = impls.front();
      }
    }
    if (status.ok() && plan.threads > 0) c.threads = plan.threads;
    if (status.ok() && args.has("dtype") && plan.dtypes.size() == 1) c.dtype = plan.dtypes.front();
    Result result;
    if (status.ok()) status = check::run_case(c, &result);
    if (!status.ok()) {
      report->refuse(status);
    } else {
      report->add(c.op->name, result, true);
    }
  }
}

// Half of a mechanism's cases go to the operator of its own name, the rest to the others.
const Op& draw_op(const std::vector<const Op*>& ops, check::Random& random) {
  const Op& op = *random.pick(ops);
  if (!random.chance(0.5)) return op;
  const auto own = std::find_if(ops.begin(), ops.end(), [&](const Op* each) { return each->name == op.mechanism; });
  return own == ops.end() ? op : **own;
}

void check_random(const Plan& plan, Report* report) {
  Sampling sampling;
  sampling.dtypes = plan.dtypes;
  sampling.threads = plan.threads;
  sampling.forward = plan.forward;
  sampling.backward = plan.backward;
  std::vector<const Op*> ops = plan.ops;
  if (!plan.forward) std::erase_if(ops, [](const Op* op) { return !op->differentiable(); });
  if (ops.empty()) return report->refuse(bad_input("check: --pass bwd, but none of the operators has a backward"));
  const bool on_gpu = plan.device == Device::cuda;
  const std::string wanted = on_gpu && plan.impl.empty() ? "all" : plan.impl;
  if (on_gpu) std::erase(sampling.dtypes, Dtype::f64);
  for (size_t i = 0; i < ops.size() && !wanted.empty();) {
    if (!impls_of(*ops[i], wanted, plan.device).empty()) {
      ++i;
    } else {
      report->skip(ops[i]->name, "it has no implementation " + (on_gpu ? "on a CUDA device" : wanted));
      ops.erase(ops.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
  if (ops.empty()) return;
  const auto fails = [](const Case& c) {
    Result result;
    return check::run_case(c, &result).ok() && !result.ok();
  };
  check::Random random(static_cast<uint64_t>(plan.seed), "cases");
  Worst worst(plan.dtypes);
  Progress progress("random cases", plan.random);
  int shown = 0;
  for (int64_t i = 0; i < plan.random; ++i) {
    progress.at(i);
    Case c;
    Result result;
    const Op& op = draw_op(ops, random);
    sampling.impls = impls_of(op, wanted, plan.device);
    Status status = check::sample_case(op, random, sampling, &c);
    if (status.ok() && plan.verbose && !plan.json) {  // before it runs: a case that kills the process is the last line
      progress.clear();
      std::printf("%s\n", check::to_text(c).c_str());
      std::fflush(stdout);
    }
    if (status.ok()) status = check::run_case(c, &result);
    if (!status.ok()) {
      progress.clear();
      report->refuse(status);
      return;
    }
    worst.add(op, result);
    report->add(op.name, result, plan.verbose);
    if (result.ok() || plan.json || ++shown > kMaxShown) continue;
    progress.clear();
    std::printf("FAIL: linnet check --case '%s'\n", result.what.c_str());
    std::fputs(result.text().substr(result.text().find('\n') + 1).c_str(), stdout);
    if (shown <= kMaxShrunk) {
      const std::string smaller = check::to_text(check::shrink(c, fails, kShrinkRuns));
      if (smaller != result.what) std::printf("  smaller: linnet check --case '%s'\n", smaller.c_str());
    }
    std::fflush(stdout);
  }
  progress.clear();
  if (!plan.json) worst.print();
}

int check_main(const Arguments& args) {
  Plan plan;
  if (const Status status = read_plan(args, &plan); !status.ok()) {
    if (args.has("json")) {
      JsonWriter writer(2);
      writer.begin_object().member("error", status.message()).end_object();
      std::printf("%s\n", writer.text().c_str());
    }
    return fail(status);
  }
  const auto start = std::chrono::steady_clock::now();
  Report report(plan);
  check_files(plan, &report);
  check_cases(plan, args, &report);
  if (plan.random > 0) check_random(plan, &report);
  return report.finish(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
}

}  // namespace

const Command& check_command() {
  static const Command command = {
      .name = "check",
      .summary = "vector files and random cases against the reference; exit 0 only if all are within tolerance",
      .usage = "[OP | FILE | DIR ...] [OPTION ...]",
      .details =
          "An operator's name runs random cases of it (a mechanism's name: of all its operators); a file or a folder checks "
          "vector\n"
          "files. f64 is compared with what a file holds, lower precision with the reference in double on the rounded inputs.\n"
          "Gradients are checked where there is a backward, and in files that have them.\n\n"
          "  linnet check tests/vectors\n"
          "  linnet check --random 1000 softmax linear\n"
          "  linnet check --case 'softmax B=2 Tq=65 Tk=65 H=4 Hkv=2 K=64 V=64 causal=1 with=sinks dtype=bf16 pass=bwd "
          "seed=7'\n\n"
          "A failing random case prints the line that reproduces it. docs/command.md describes such lines.",
      .options = {{"dtype", "TYPE", "all, f64, f32, bf16 or f16 (default all)"},
                  {"device", "NAME", "cpu or cuda: which kernels to check (default cpu)"},
                  {"impl", "NAME", "an implementation, or all that run here (default: the best; random cases: all)"},
                  {"threads", "N", "threads (default: all cores; random cases: 1 to 16)"},
                  {"pass", "PASS", "fwd, bwd or all (default all)"},
                  {"random", "N", "number of random cases (default 100 when an operator is named)"},
                  {"seed", "N", "of the random cases (default 1)"},
                  {"case", "LINE", "run this case; may be given again"},
                  {"verbose", "", "a line for every tensor of random cases too, and notes"},
                  {"json", "", "print JSON"}},
      .run = check_main,
  };
  return command;
}

}  // namespace linnet::cli
