#include "layers/cost.h"

#include <algorithm>

#include "core/call/call.h"
#include "layers/state.h"

namespace linnet::layers {
namespace {

struct Sizes2 {
  int64_t batch, tokens;
  int64_t of(int64_t size) const { return size == kB ? batch : size == kT ? tokens : size; }
};

View dummy(const Shape& shape, Dtype dtype, const Sizes2& sizes) {
  alignas(64) static double anything[8] = {};
  int64_t list[kMaxRank];
  for (size_t i = 0; i < shape.size(); ++i) list[i] = sizes.of(shape[i]);
  return View::dense(anything, dtype, list, static_cast<int>(shape.size()));
}

}  // namespace

Status record_cost(const Record& record, int64_t batch, int64_t tokens, int64_t position, Dtype activations, Cost* cost) {
  *cost = {};
  const Sizes2 sizes{batch, tokens};
  const Dtype acc = activations == Dtype::f64 ? Dtype::f64 : Dtype::f32;
  const double element = static_cast<double>(dtype_size(activations));
  for (size_t s = 0; s < record.steps.size(); ++s) {
    const Step& step = record.steps[s];
    const double results =
        static_cast<double>(dummy(record.values[static_cast<size_t>(step.result)].shape, activations, sizes).elements());
    if (step.kind == StepKind::view) continue;
    if (step.kind == StepKind::experts) {  // weights of the experts that run are read once, x and the result once for each
      const double rows = static_cast<double>(batch * tokens), width = results / std::max(rows, 1.0);
      const double matrices =
          3 * width * static_cast<double>(record.values[static_cast<size_t>(step.inputs[2].second)].shape[0]);
      const double chosen = rows * static_cast<double>(step.top);
      const size_t experts = (step.inputs.size() - 2) / 3;
      const double run = std::min(static_cast<double>(experts), chosen);
      cost->flops += 2 * chosen * matrices;
      cost->bytes += (run * matrices + 2 * chosen * width) * element;
      continue;
    }
    if (step.kind != StepKind::op) {
      double read = 0, most = results;
      for (const auto& [name, id] : step.inputs) {
        const double count =
            static_cast<double>(dummy(record.values[static_cast<size_t>(id)].shape, activations, sizes).elements());
        read += count;
        most = std::max(most, count);
      }
      cost->flops += step.kind == StepKind::map ? most * static_cast<double>(step.program.steps) : 0;
      cost->bytes += (read + results) * element;
      continue;
    }
    const Op* op = step.op;
    std::vector<Setting> options = step.options;
    std::vector<StateTensor> states;
    std::vector<std::vector<int64_t>> counts;
    const bool decode = !is_tokenwise(*op) && (position > 0 || tokens == 1) && !op->decode.empty();
    if (decode) {
      Continuation next;
      LINNET_TRY(continuation(record, step, &next));
      LINNET_TRY(state_tensors(record, static_cast<int>(s), batch, position + tokens, activations, &states));
      op = next.op;
      options = next.options;
    }
    Call call(*op);
    for (const Setting& option : options) LINNET_TRY(call.set_option(option.name, option.text));
    for (const auto& [name, id] : step.inputs) {
      const TensorDecl* decl = op->find_input(name);
      if (decl == nullptr) continue;
      const Dtype dtype = decl->element == Element::index  ? Dtype::i64
                          : decl->element == Element::mask ? Dtype::u8
                          : decl->element == Element::acc  ? acc
                                                           : activations;
      View view = dummy(record.values[static_cast<size_t>(id)].shape, dtype, sizes);
      if (dtype == Dtype::i64) {  // tokens: values are looked at, all of them 0
        for (int d = 0; d < view.rank; ++d) view.stride[d] = 0;
      }
      LINNET_TRY(call.set(name, view));
    }
    int64_t held = position;  // keys in a cache: a bounded one is full
    for (const StateTensor& tensor : states) {
      if (tensor.input == "k_cache") held = std::min(position, tensor.view.size[1] - tokens);
    }
    for (const StateTensor& tensor : states) {
      View view = tensor.view;
      view.data = dummy({1}, activations, sizes).data;
      if (view.dtype == Dtype::i64) {  // counts are looked at: tokens so far; lists of finished children are empty
        counts.push_back(std::vector<int64_t>(static_cast<size_t>(std::max<int64_t>(view.elements(), 1)),
                                              tensor.input == "lengths" ? held : 0));
        view.data = counts.back().data();
      }
      LINNET_TRY(call.set(tensor.input, view));
    }
    LINNET_TRY(call.prepare());
    if (op->cost == nullptr) continue;
    const Cost own = op->cost(call.prepared_args(), call.dims(), Pass::forward);
    cost->flops += own.flops;
    cost->bytes += own.bytes;
  }
  return {};
}

}  // namespace linnet::layers
