#include "check/check.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>

#include "check/poison.h"
#include "check/random.h"

namespace linnet::check {
namespace {

// The largest finite magnitude among inputs and incoming gradients, at least 1. Options do not count: a softmax scale of 1000
// sharpens the weights, but the results stay as large as the values are.
double scale_of(const Problem& problem) {
  double scale = 1;
  for (const auto* list : {&problem.inputs, &problem.incoming}) {
    for (const Array& array : *list) {
      if (!is_float(array.dtype)) continue;
      for (const double x : array.values) {
        if (std::isfinite(x)) scale = std::max(scale, std::abs(x));
      }
    }
  }
  return scale;
}

bool same_bits(const std::vector<double>& a, const std::vector<double>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](double x, double y) {
    return (std::isnan(x) && std::isnan(y)) || std::bit_cast<uint64_t>(x) == std::bit_cast<uint64_t>(y);
  });
}

// A row of the batch computed alone must have the bits it has among the others.
Status check_batch_row(const Problem& problem, const Setting& setting, const Execution& whole, Result* result) {
  Problem alone;
  int64_t batch;
  const auto row = static_cast<int64_t>(setting.seed % 7);
  if (!take_batch_row(problem, row, &alone, &batch)) return {};
  Execution run;
  LINNET_TRY(execute(alone, setting, &run));
  for (const Array& part : run.results) {
    const Array& among = *find_array(whole.results, part.name);
    const int dimension = batch_dimension(*problem.op, among, batch);
    if (dimension < 0 || same_bits(part.values, batch_row(among, dimension, row % batch).values)) continue;
    result->faults.push_back(part.name + " of batch row " + std::to_string(row % batch) + " differs when it is computed alone");
  }
  return {};
}

Rounding rounding_of(const Op& op, const std::string& name) {
  for (const Impl& impl : op.impls) {
    if (impl.name == name) return impl.rounding;
  }
  return Rounding::none;
}

// A causal call with NaN or infinity in one token: earlier rows keep their bits. On a GPU the rows of a chunk share products on
// the tiles, with zeros for what a row does not see; those of chunks before are none of them.
Status check_poison(const Problem& problem, const Setting& setting, const Execution& whole, Result* result) {
  constexpr int64_t kLargestTile = 128;
  Poisoned poisoned;
  if (!poison(problem, setting.seed, &poisoned)) return {};
  Execution run;
  LINNET_TRY(execute(poisoned.problem, setting, &run));
  const bool tiles = rounding_of(*problem.op, run.impl) == Rounding::matrix_units || run.impl == "cuda.chunk";
  if (setting.device == Device::cuda && tiles) poisoned.tile = kLargestTile;
  const std::vector<std::string> faults = poison_faults(poisoned, whole.results, run.results);
  result->faults.insert(result->faults.end(), faults.begin(), faults.end());
  return {};
}

// A state that only grows (tolerance.h).
bool grows(const Problem& problem) {
  const std::vector<std::string>& stops = problem.op->grows_without;
  const auto given = [&](const std::string& name) { return find_array(problem.inputs, name) != nullptr; };
  return problem.op->growing || (!stops.empty() && std::none_of(stops.begin(), stops.end(), given));
}

// What the inputs' last digit costs: no kernel can do better than the reference on inputs that are moved by half a unit of the
// arithmetic (f64, else f32). Said of tensors that miss their gate, which it does not widen.
Status note_condition(const Problem& problem, Result* result) {
  const bool wide = problem.dtype == Dtype::f64;
  const double half = epsilon(wide ? Dtype::f64 : Dtype::f32) / 2;
  Problem near = problem;
  for (auto* list : {&near.inputs, &near.incoming}) {
    for (Array& array : *list) {
      Random random(1, array.name + " moved");
      for (double& x : array.values) x *= is_float(array.dtype) ? 1 + (random.chance(0.5) ? half : -half) : 1;
    }
  }
  Execution here, there;
  LINNET_TRY(execute(problem, {.as_reference = true, .impl = "ref"}, &here));
  LINNET_TRY(execute(near, {.as_reference = true, .impl = "ref"}, &there));
  for (TensorResult& tensor : result->tensors) {
    const Array *const before = find_array(here.results, tensor.name), *const after = find_array(there.results, tensor.name);
    if (tensor.comparison.ok || before == nullptr || after == nullptr || !is_float(before->dtype)) continue;
    const double moved = compare(after->values, before->values, before->size, {}).rms;
    char text[120];
    std::snprintf(text, sizeof text, "inputs moved by half a unit of %s move it by %.1e", wide ? "f64" : "f32", moved);
    std::string& note = tensor.comparison.note;
    note += (note.empty() ? "" : "; ") + std::string(text);
  }
  return {};
}

}  // namespace

bool Result::ok() const {
  return faults.empty() && std::all_of(tensors.begin(), tensors.end(), [](const auto& tensor) { return tensor.comparison.ok; });
}

std::string Result::text() const {
  std::string text = what + " [" + impl + "]\n";
  for (const std::string& fault : faults) text += "  " + fault + "\n";
  for (const TensorResult& tensor : tensors) {
    const Comparison& c = tensor.comparison;
    if (c.ok) continue;
    char line[160];
    std::snprintf(line, sizeof line, ": rms %.2e of %.1e, max %.2e of %.1e", c.rms, c.rms_gate, c.max, c.max_gate);
    text += "  " + tensor.name + line + (c.note.empty() ? "" : "; " + c.note) + "\n";
  }
  return text;
}

void judge(const Problem& problem, const Execution& reference, const std::vector<Array>& want, const std::vector<Array>& got,
           Against against, Result* result) {
  Gate gate;
  gate.scale = scale_of(problem);
  gate.epsilon = epsilon(problem.dtype);
  for (const Array& tensor : got) {
    const Array* expected = find_array(want, tensor.name);
    if (expected == nullptr) continue;
    const Pass pass = contains(problem.gradients, tensor.name) ? Pass::backward : Pass::forward;
    gate.rms =
        rms_gate(problem.dtype, pass, against, grows(problem), reference.largest_logit, rounding_of(*problem.op, result->impl));
    gate.terms = reference.flops[pass == Pass::backward] / 2 / std::max<double>(1, static_cast<double>(tensor.values.size()));
    gate.stored = tensor.dtype;
    const TensorDecl* output = problem.op->find_output(tensor.name);
    gate.least = output != nullptr && output->values == Values::logits ? 1 : 0;
    Comparison comparison;
    if (expected->size != tensor.size) {
      comparison.ok = false;
      comparison.note = "its shape differs";
    } else if (is_float(tensor.dtype)) {
      comparison = compare(tensor.values, expected->values, tensor.size, gate);
    } else {
      comparison = compare_exact(tensor.values, expected->values, tensor.size);
    }
    result->tensors.push_back({tensor.name, pass, comparison});
  }
}

Status check_problem(const Problem& problem, const Setting& setting, Result* result) {
  Execution reference, run, again;
  LINNET_TRY(execute(problem, setting, &run));
  LINNET_TRY(execute(problem, {.as_reference = true, .saved = &run.results, .impl = "ref"}, &reference));
  result->impl = run.impl;
  result->dtype = problem.dtype;
  result->faults.insert(result->faults.end(), run.faults.begin(), run.faults.end());
  judge(problem, reference, reference.results, run.results, Against::reference, result);
  const auto missed = [](const TensorResult& tensor) { return !tensor.comparison.ok; };
  if (std::any_of(result->tensors.begin(), result->tensors.end(), missed)) LINNET_TRY(note_condition(problem, result));
  Setting other = setting;
  other.threads = setting.threads == 1 ? 3 : 1;
  LINNET_TRY(execute(problem, other, &again));
  for (size_t i = 0; i < run.results.size(); ++i) {
    if (same_bits(run.results[i].values, again.results[i].values)) continue;
    result->faults.push_back(run.results[i].name + " differs between " + std::to_string(setting.threads) + " and " +
                             std::to_string(other.threads) + " threads");
  }
  LINNET_TRY(check_batch_row(problem, setting, run, result));
  return check_poison(problem, setting, run, result);
}

bool is_refusal(const Status& status) {
  return status.code() == Code::impossible && status.message().find(" cannot run: ") != std::string::npos;
}

Status run_case(const Case& c, Result* result) {
  *result = Result();
  result->what = to_text(c);
  Problem problem;
  LINNET_TRY(make_problem(c, &problem));
  Setting setting = {.impl = c.impl, .threads = c.threads, .strided = c.strided, .seed = c.seed};
  for (const Impl& impl : c.op->impls) {
    if (is_named(impl, c.impl)) setting.device = impl.device;
  }
  return check_problem(problem, setting, result);
}

Status run_line(std::string_view line, Result* result) {
  Case c;
  LINNET_TRY(parse_case(line, &c));
  return run_case(c, result);
}

}  // namespace linnet::check
