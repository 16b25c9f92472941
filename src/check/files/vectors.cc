#include "check/files/vectors.h"

#include <algorithm>

#include "check/files/layers.h"
#include "core/files/safetensors.h"

namespace linnet::check {
namespace {

bool has_mechanism(std::string_view mechanism) {
  return std::any_of(all_ops().begin(), all_ops().end(), [&](const Op* op) { return op->mechanism == mechanism; });
}

Status read(const SafetensorsFile& file, const std::string& name, Dtype dtype, Array* array) {
  SafetensorsEntry entry;
  LINNET_TRY(file.find(name, entry));
  array->name = name;
  array->size = entry.shape;
  array->dtype = dtype;
  if (array->size.size() > kMaxRank) {
    return bad_input(file.path() + ": " + name + " has rank " + std::to_string(array->size.size()) + ", expected at most " +
                     std::to_string(kMaxRank));
  }
  const bool integer = !is_float(dtype);
  const bool stored_as_integer = !is_float(dtype_of_safetensors(entry.dtype));
  if (integer != stored_as_integer) {
    return bad_input(file.path() + ": " + name + " is " + entry.dtype + ", expected " + (integer ? "integers" : "floats"));
  }
  return file.read_f64(name, array->values, ReadValues::any);
}

// The whole matrix of attention weights, [B, H, T, S], under the names that mechanisms' pages give it. No operator returns it;
// it is what an operator that is linear in v makes of v = identity.
bool is_matrix(const Op& op, const SafetensorsFile& file, const std::string& name) {
  SafetensorsEntry entry;
  return (name == "matrix" || name == "weights") && op.find_input("v") != nullptr && file.find(name, entry).ok() &&
         entry.shape.size() == 4;
}

// out [B, T, H, S] of v = identity, as [B, H, T, S].
Status run_identity(Problem problem, const Setting& setting, const Array& matrix, std::vector<Array>* results) {
  const int64_t S = matrix.size[3];
  problem.outputs = {"out"};
  problem.gradients.clear();
  for (Array& array : problem.inputs) {
    if (array.name != "v") continue;
    array.size.back() = S;
    array.values.assign(static_cast<size_t>(array.size[0] * array.size[1] * array.size[2] * S), 0);
    for (size_t i = 0; i < array.values.size(); ++i) {
      const int64_t row = static_cast<int64_t>(i) / S, token = row / array.size[2] % array.size[1];
      array.values[i] = token == static_cast<int64_t>(i) % S ? 1 : 0;
    }
  }
  Execution run;
  LINNET_TRY(execute(problem, setting, &run));
  const Array& out = *find_array(run.results, "out");
  Array turned{matrix.name, matrix.size, out.dtype, std::vector<double>(out.values.size())};
  const int64_t T = out.size[1], H = out.size[2];
  for (size_t i = 0; i < out.values.size(); ++i) {
    const int64_t at = static_cast<int64_t>(i), h = at / S % H, t = at / S / H % T, b = at / S / H / T;
    turned.values[static_cast<size_t>(((b * H + h) * T + t) * S + at % S)] = out.values[i];
  }
  results->push_back(std::move(turned));
  return {};
}

// One call of a file: the operator, the prefix of its own tensors ("elu1." in a file of many calls) and its options.
struct StoredCall {
  std::string op, prefix;
  std::vector<std::pair<std::string, std::string>> options;
};

// A file with a list `maps` in its metadata holds one call of the mechanism's own operator for each: map=NAME, with tensors
// NAME.<tensor> beside those that all share, and eps_NAME = none, add:<eps> or max:<eps> as its normaliser.
std::vector<StoredCall> calls_of(const SafetensorsFile& file) {
  const std::string mechanism = file.metadata("mechanism"), operation = file.metadata("operator"), maps = file.metadata("maps");
  const auto is_label = [](std::string_view key) { return key == "mechanism" || key == "operator" || key == "format"; };
  if (maps.empty()) {
    StoredCall call{operation == "attention" ? mechanism : mechanism + "_" + operation, "", {}};
    for (const auto& [key, value] : file.metadata()) {
      if (!is_label(key)) call.options.emplace_back(key, value);
    }
    return {call};
  }
  std::vector<StoredCall> calls;
  for (size_t start = 0; start < maps.size();) {
    const size_t end = std::min(maps.find(',', start), maps.size());
    const std::string name = maps.substr(start, end - start);
    start = end + 1;
    StoredCall call{mechanism, name + ".", {{"map", name}}};
    for (const auto& [key, value] : file.metadata()) {
      if (is_label(key) || key == "maps") continue;
      if (key.rfind("eps_", 0) != 0) {
        call.options.emplace_back(key, value);
      } else if (key == "eps_" + name) {
        const size_t colon = value.find(':');
        call.options.emplace_back("normalizer", value.substr(0, colon));
        if (colon != std::string::npos) call.options.emplace_back("eps", value.substr(colon + 1));
      }
    }
    calls.push_back(std::move(call));
  }
  return calls;
}

Status load_call(const SafetensorsFile& file, const StoredCall& stored, bool first, VectorFile* vectors) {
  const std::string& path = vectors->path;
  const Op* op = find_op(stored.op);
  if (op == nullptr) {
    const std::string mechanism = file.metadata("mechanism");
    vectors->missing = has_mechanism(mechanism) ? "no operator '" + stored.op + "' in this build"
                                                : "no mechanism '" + mechanism + "' in this build";
    return {};
  }
  Problem& problem = vectors->problem;
  problem.op = op;
  Call call(*op);
  for (const auto& [key, value] : stored.options) {
    if (key == "seed" && op->find_option(key) == nullptr) continue;  // how the inputs were drawn
    if (const Status status = call.set_option(key, value); !status.ok()) return bad_input(path + ": " + status.message());
    problem.options.emplace_back(key, value);
  }
  std::vector<std::string> used;
  const auto stored_name = [&](const std::string& tensor) {
    return file.has(stored.prefix + tensor) ? stored.prefix + tensor : tensor;
  };
  const auto has = [&](const std::string& tensor) { return file.has(stored_name(tensor)); };
  const auto take = [&](const std::string& tensor, Dtype dtype, std::vector<Array>* list) -> Status {
    if (!has(tensor)) return {};
    used.push_back(stored_name(tensor));
    list->emplace_back();
    LINNET_TRY(read(file, used.back(), dtype, &list->back()));
    list->back().name = tensor;
    return {};
  };
  for (const TensorDecl& decl : op->inputs) {
    const Dtype dtype = decl.element == Element::index                                   ? Dtype::i64
                        : decl.element == Element::mask || decl.element == Element::code ? Dtype::u8
                                                                                         : Dtype::f64;
    LINNET_TRY(take(decl.name, dtype, &problem.inputs));
  }
  bool incoming = false;
  for (const TensorDecl& decl : op->outputs) {
    LINNET_TRY(take(decl.name, decl.element == Element::index ? Dtype::i64 : Dtype::f64, &vectors->stored));
    if (!decl.optional || has(decl.name) || decl.saved) problem.outputs.push_back(decl.name);
    if (!decl.differentiable || !op->differentiable()) continue;
    incoming |= has("d" + decl.name);
    LINNET_TRY(take("d" + decl.name, Dtype::f64, &problem.incoming));
  }
  for (const TensorDecl& decl : op->inputs) {
    if (!decl.differentiable || !op->differentiable() || !incoming || !has("d" + decl.name)) continue;
    LINNET_TRY(take("d" + decl.name, Dtype::f64, &vectors->stored));
    problem.gradients.push_back("d" + decl.name);
  }
  for (const std::string& tensor : file.names()) {
    if (is_matrix(*op, file, tensor)) LINNET_TRY(take(tensor, Dtype::f64, &vectors->stored));
    const bool own = stored.prefix.empty() || tensor.rfind(stored.prefix, 0) == 0;
    const bool shared = first && tensor.find('.') == std::string::npos;
    if ((own || shared) && !contains(used, tensor)) vectors->unchecked.push_back(tensor);
  }
  return {};
}

}  // namespace

Status load_vectors(const std::string& path, std::vector<VectorFile>* files) {
  files->clear();
  SafetensorsFile file;
  LINNET_TRY(SafetensorsFile::open(path, file));
  for (const char* key : {"mechanism", "operator"}) {
    if (!file.metadata(key).empty()) continue;
    return bad_input(path + ": its metadata has no " + key + ", expected a vector file (tests/vectors/README.md)");
  }
  if (const FileKind* kind = find_file_kind(file.metadata("mechanism"), file.metadata("operator")); kind != nullptr) {
    VectorFile& vectors = files->emplace_back();
    vectors.path = path;
    vectors.name = path.substr(path.find_last_of('/') + 1);
    vectors.kind = kind;
    return {};
  }
  for (const StoredCall& call : calls_of(file)) {
    VectorFile& vectors = files->emplace_back();
    vectors.path = path;
    vectors.name = path.substr(path.find_last_of('/') + 1);
    if (!call.prefix.empty()) vectors.name += " " + call.prefix.substr(0, call.prefix.size() - 1);
    LINNET_TRY(load_call(file, call, files->size() == 1, &vectors));
  }
  if (const FileKind* kind = layer_in_file(file); kind != nullptr) {
    VectorFile& vectors = files->emplace_back();
    vectors.path = path;
    vectors.name = path.substr(path.find_last_of('/') + 1) + " layer";
    vectors.kind = kind;
  }
  return {};
}

Status run_vectors(const VectorFile& file, Dtype dtype, const Setting& setting, Result* result) {
  *result = Result();
  result->what = file.name;
  result->unchecked = file.unchecked;
  if (file.kind != nullptr) {
    SafetensorsFile opened;
    LINNET_TRY(SafetensorsFile::open(file.path, opened));
    result->dtype = dtype;
    result->impl = file.kind->name;
    return file.kind->run(opened, dtype, setting, result);
  }
  Problem problem = file.problem;
  problem.dtype = dtype;
  for (auto* list : {&problem.inputs, &problem.incoming}) {
    for (Array& array : *list) {
      if (!is_float(array.dtype)) continue;
      const std::string name = list == &problem.inputs ? array.name : array.name.substr(1);
      const TensorDecl* decl = list == &problem.inputs ? problem.op->find_input(name) : problem.op->find_output(name);
      array.dtype = decl->element == Element::acc && dtype != Dtype::f64 ? Dtype::f32 : dtype;
      round_values(&array);
    }
  }
  const auto about = [&](const Status& status) {
    return status.ok() ? status : Status(status.code(), file.path + ": " + status.message());
  };
  if (dtype != Dtype::f64) return about(check_problem(problem, setting, result));
  Execution run;
  LINNET_TRY(about(execute(problem, setting, &run)));
  result->impl = run.impl;
  result->dtype = dtype;
  result->faults = run.faults;
  Execution reference;
  LINNET_TRY(about(execute(problem, {.as_reference = true, .impl = "ref"}, &reference)));
  for (const Array& stored : file.stored) {
    const bool matrix =
        problem.op->find_output(stored.name) == nullptr && problem.op->find_input(stored.name.substr(1)) == nullptr;
    if (matrix) LINNET_TRY(about(run_identity(problem, setting, stored, &run.results)));
  }
  judge(problem, reference, file.stored, run.results, Against::vectors, result);
  return {};
}

}  // namespace linnet::check
