// Vector files of layers: the record runs in f64 against the file, in lower precision against itself in double with the
// reference operators on the rounded inputs; and the tokens in pieces and one by one against all of them at once.
#include "check/files/layers.h"

#include <algorithm>
#include <cmath>

#include "check/files/file_kind.h"
#include "core/half.h"
#include "layers/layer.h"
#include "layers/runner.h"

namespace linnet::check {
namespace {

using layers::FileFacts;
using layers::Layer;
using layers::LayerFile;
using layers::Parameter;
using layers::Record;
using layers::Runner;
using layers::State;

void round_to_dtype(std::vector<double>* values, Dtype dtype) {
  for (double& x : *values) {
    double element = 0;
    store_f64(&element, dtype, 0, x);
    x = load_f64(&element, dtype, 0);
  }
}

// [rows, columns] <- [columns, rows]
std::vector<double> turned(const std::vector<double>& values, int64_t rows, int64_t columns) {
  std::vector<double> result(values.size());
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      result[static_cast<size_t>(r * columns + c)] = values[static_cast<size_t>(c * rows + r)];
    }
  }
  return result;
}

// The shape of a file's tensor is the parameter's, but for heads that one of them has in one dimension with their channels.
bool fits(const std::vector<int64_t>& shape, const std::vector<int64_t>& expected) {
  if (shape == expected) return true;
  int64_t numbers = 1, wanted = 1;
  for (const int64_t n : shape) numbers *= n;
  for (const int64_t n : expected) wanted *= n;
  return numbers == wanted && shape.size() != expected.size();
}

struct Input {
  std::vector<double> values;
  std::vector<int64_t> shape;
  double largest = 1;  // magnitude among x and the parameters
};

// The numbers of x and of every parameter, rounded to dtype.
Status read_tensors(const Record& record, const LayerFile& form, Dtype dtype, Stored* stored, Input* x,
                    std::vector<std::vector<double>>* weights) {
  const auto scale = [&](const std::vector<double>& values) {
    for (const double v : values) x->largest = std::max(x->largest, std::abs(v));
  };
  LINNET_TRY(stored->numbers(form.input, &x->values, &x->shape));
  round_to_dtype(&x->values, dtype);
  scale(x->values);
  for (const Parameter& parameter : record.parameters) {
    const std::string name = parameter.alias.name.empty() ? parameter.name : parameter.alias.name;
    if (!parameter.trained && !stored->has(name)) {  // a fixed table
      weights->push_back(layers::initial_values(parameter.init, parameter.shape, parameter.name, 0));
      continue;
    }
    if (!stored->has(name)) return stored->error("it has no tensor " + name + ", expected " + parameter.name);
    std::vector<double> values;
    std::vector<int64_t> shape, expected = parameter.shape;
    LINNET_TRY(stored->numbers(name, &values, &shape));
    if (parameter.alias.transposed) std::reverse(expected.begin(), expected.end());
    if (!fits(shape, expected)) {
      return stored->error(name + " has shape " + layers::shape_text(shape) + ", expected " + layers::shape_text(expected));
    }
    if (parameter.alias.transposed) values = turned(values, parameter.shape[0], parameter.shape[1]);
    round_to_dtype(&values, dtype);
    scale(values);
    weights->push_back(std::move(values));
  }
  return {};
}

Status bind_all(const std::vector<std::vector<double>>& weights, Runner* runner) {
  for (size_t i = 0; i < weights.size(); ++i) {
    LINNET_TRY(runner->bind_values(runner->record().parameters[i].name, weights[i]));
  }
  return {};
}

// x [B, T, C] in a dtype, tokens [begin, end) of it, and the results back in their places.
struct Tokens {
  const Input& x;
  Dtype dtype;
  std::vector<int64_t> out_shape;

  Status run(Runner* runner, int64_t begin, int64_t end, const std::vector<State*>& states, Executor* executor,
             std::vector<double>* out) const {
    const int64_t B = x.shape[0], T = x.shape[1], C = x.shape[2], n = end - begin, O = out_shape[2];
    std::vector<double> input(static_cast<size_t>(B * n * C) + 1), output(static_cast<size_t>(B * n * O) + 1);
    for (int64_t b = 0; b < B; ++b) {
      for (int64_t i = 0; i < n * C; ++i) {
        store_f64(input.data(), dtype, b * n * C + i, x.values[static_cast<size_t>((b * T + begin) * C + i)]);
      }
    }
    LINNET_TRY(runner->run(View::dense(input.data(), dtype, {B, n, C}), View::dense(output.data(), dtype, {B, n, O}), states,
                           {.executor = executor}));
    for (int64_t b = 0; b < B; ++b) {
      for (int64_t i = 0; i < n * O; ++i) {
        (*out)[static_cast<size_t>((b * T + begin) * O + i)] = load_f64(output.data(), dtype, b * n * O + i);
      }
    }
    return {};
  }
};

Status run_layer(const SafetensorsFile& file, Dtype dtype, const Setting& setting, Result* result) {
  const FileFacts facts = layers::facts_of(file);
  const LayerFile* form = nullptr;
  const Layer* layer = layers::layer_of_file(file.metadata("mechanism"), file.metadata("operator"), facts, &form);
  Stored stored(file, result);
  if (layer == nullptr) return stored.error("no layer has such files");
  const auto about = [&](const Status& status) {
    return status.ok() ? status : Status(status.code(), file.path() + ": " + status.message());
  };
  std::vector<layers::Setting> options;
  Record record;
  LINNET_TRY(about(layers::options_of_file(*layer, *form, facts, &options)));
  LINNET_TRY(about(layers::record_layer(*layer, options, &record)));
  Input x;
  std::vector<std::vector<double>> weights;
  LINNET_TRY(read_tensors(record, *form, dtype, &stored, &x, &weights));
  if (x.shape.size() != 3) return stored.error(form->input + " has rank " + std::to_string(x.shape.size()) + ", expected 3");
  const bool growing = layers::grows(record);
  ThreadPool pool(std::max(setting.threads, 1));
  Executor* executor = setting.threads > 1 ? static_cast<Executor*>(&pool) : &inline_executor();

  Tokens tokens{x, dtype, x.shape};
  const std::vector<int64_t> shape = x.shape;
  const int64_t B = shape[0], T = shape[1];
  Runner runner;
  const Dtype activations = dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32;
  LINNET_TRY(about(Runner::make(record, {.activations = activations, .impl = setting.impl}, &runner)));
  LINNET_TRY(about(bind_all(weights, &runner)));
  LINNET_TRY(about(runner.keep_values(true)));
  const layers::Shape& out_shape = record.values[static_cast<size_t>(record.output)].shape;
  if (out_shape.size() != 3) return stored.error("the layer's output is " + layers::shape_text(out_shape));
  tokens.out_shape[2] = out_shape[2];
  std::vector<double> got(static_cast<size_t>(B * T * out_shape[2]));
  LINNET_TRY(about(tokens.run(&runner, 0, T, {}, executor, &got)));

  const Gate gate{.rms = rms_gate(dtype, Pass::forward, Against::reference, growing, 0),
                  .epsilon = epsilon(dtype),
                  .scale = x.largest,
                  .stored = dtype};
  if (dtype == Dtype::f64) {
    const double rms = rms_gate(dtype, Pass::forward, Against::vectors, growing, 0);
    LINNET_TRY(stored.expect(form->output, got, tokens.out_shape, rms));
    for (const layers::ValueInfo& info : record.values) {  // what the page names on the way
      View view;
      const bool parameter = std::any_of(record.parameters.begin(), record.parameters.end(),
                                         [&](const Parameter& p) { return p.alias.name == info.name; });
      if (info.source != layers::Source::step || parameter || info.name == form->input || !file.has(info.name)) continue;
      if (!runner.value(info.name, &view).ok()) continue;
      std::vector<double> values;
      for (int64_t i = 0; i < view.elements(); ++i) values.push_back(load_f64(view.data, view.dtype, i));
      LINNET_TRY(stored.expect(info.name, values, std::vector<int64_t>(view.size, view.size + view.rank), rms));
    }
  } else {
    Runner reference;
    LINNET_TRY(about(Runner::make(record, {.activations = Dtype::f64, .impl = "ref"}, &reference)));
    LINNET_TRY(about(bind_all(weights, &reference)));
    std::vector<double> want(got.size());
    const Tokens wide{x, Dtype::f64, tokens.out_shape};
    LINNET_TRY(about(wide.run(&reference, 0, T, {}, &inline_executor(), &want)));
    result->tensors.push_back({form->output, Pass::forward, compare(got, want, tokens.out_shape, gate)});
  }

  // In pieces and token by token, where the layer can be continued.
  if (layers::decodable(record).ok()) {
    const int64_t third = std::max<int64_t>(T / 3, 1);
    for (const int64_t step : {T - third > 0 ? T - third : T, int64_t{1}}) {
      State state;
      LINNET_TRY(about(runner.make_state(B, 1, &state)));
      std::vector<double> parts(got.size());
      for (int64_t t = 0; t < T; t += step) {
        LINNET_TRY(about(tokens.run(&runner, t, std::min(T, t + step), {&state}, executor, &parts)));
      }
      result->tensors.push_back({form->output + (step == 1 ? " by token" : " in pieces"), Pass::forward,
                                 compare(parts, got, tokens.out_shape, gate)});
    }
  }
  LINNET_TRY(stored.finish());
  // Gradients are the Python module's to check (python -m linnet.check), what lies on the way is compared in f64, and a file of
  // an operator's call that holds a layer too is checked there.
  std::erase_if(result->unchecked, [&](const std::string& name) {
    const bool gradient = name[0] == 'd' && file.has(name.substr(1));
    const bool value = std::any_of(record.values.begin(), record.values.end(),
                                   [&](const layers::ValueInfo& info) { return info.name == name; });
    return gradient || value || name == form->output || !form->marker.empty();
  });
  return {};
}

}  // namespace

const FileKind& layer_files() {
  static const FileKind kind = {.name = "layer",
                                .takes =
                                    [](std::string_view mechanism, std::string_view operation) {
                                      const LayerFile* form = nullptr;
                                      const Layer* layer = layers::layer_of_file(mechanism, operation, {}, &form);
                                      return layer != nullptr;
                                    },
                                .run = run_layer};
  return kind;
}

const FileKind* layer_in_file(const SafetensorsFile& file) {
  const LayerFile* form = nullptr;
  const Layer* layer =
      layers::layer_of_file(file.metadata("mechanism"), file.metadata("operator"), layers::facts_of(file), &form);
  return layer == nullptr || form->marker.empty() ? nullptr : &layer_files();
}

}  // namespace linnet::check
