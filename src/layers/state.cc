#include "layers/state.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/call/call.h"
#include "core/half.h"
#include "layers/memory.h"

namespace linnet::layers {
namespace {

const Setting* find_setting(const std::vector<Setting>& settings, std::string_view name) {
  for (const Setting& setting : settings) {
    if (setting.name == name) return &setting;
  }
  return nullptr;
}

// What an option of a step is: as set, or the operator's default.
std::string option_of(const Step& step, std::string_view name) {
  if (const Setting* setting = find_setting(step.options, name)) return setting->text;
  const OptionDecl* option = step.op->find_option(name);
  if (option == nullptr) return "";
  alignas(std::max_align_t) char args[kMaxStruct], out[kMaxStruct], grads[kMaxStruct];
  step.op->construct(args, out, grads);
  return option_text(*option, args);
}

Dtype acc_of(Dtype activations) { return activations == Dtype::f64 ? Dtype::f64 : Dtype::f32; }

// A call of the forward operator on one token, for its letters.
Status forward_dims(const Record& record, const Step& step, int64_t rows, Dtype activations, Call* call) {
  alignas(64) static double anything[8] = {};
  for (const Setting& option : step.options) LINNET_TRY(call->set_option(option.name, option.text));
  for (const auto& [name, value] : step.inputs) {
    const Shape& shape = record.values[static_cast<size_t>(value)].shape;
    int64_t sizes[kMaxRank];
    for (size_t i = 0; i < shape.size(); ++i) sizes[i] = shape[i] == kB ? rows : shape[i] == kT ? 1 : shape[i];
    const TensorDecl* decl = step.op->find_input(name);
    Dtype dtype = activations;
    if (decl != nullptr && decl->element == Element::acc) dtype = acc_of(activations);
    if (decl != nullptr && decl->element == Element::mask) dtype = Dtype::u8;
    if (decl != nullptr && decl->element == Element::index) dtype = Dtype::i64;
    LINNET_TRY(call->set(name, View::dense(anything, dtype, sizes, static_cast<int>(shape.size()))));
  }
  return call->prepare();
}

}  // namespace

Status continuation(const Record& record, const Step& step, Continuation* result) {
  const Op& op = *step.op;
  const std::string where = record.name + ": " + step.name;
  if (op.decode.empty()) return impossible(where + " cannot be continued token by token: " + op.name + " has no decode");
  result->op = find_op(op.decode);
  result->options.clear();
  if (result->op == nullptr) return impossible(where + ": there is no operator '" + op.decode + "' in this build");
  const Op& decode = *result->op;
  if (op.find_option("causal") != nullptr) {
    const std::string causal = option_of(step, "causal");
    if (causal != "1" && causal != "true") {
      return impossible(where + " cannot be continued token by token: " + op.name + " is not causal here");
    }
  }
  // A shift by the largest of all keys, later ones too, is no continuation's.
  if (op.name == "features" && option_of(step, "key_top") == "global") {
    const std::string map = option_of(step, "map");
    for (const char* shifted : {"exp", "favor", "favor_hyp", "efficient"}) {
      if (map == shifted)
        return impossible(where + " cannot be continued token by token: its key_top is global, expected running");
    }
  }
  for (const auto& [name, value] : step.inputs) {
    if (decode.find_input(name) != nullptr) continue;
    return impossible(where + " cannot be continued token by token: " + decode.name + " has no " + name);
  }
  for (const Setting& option : step.options) {
    if (decode.find_option(option.name) != nullptr) {
      result->options.push_back(option);
      continue;
    }
    // Options of the forward alone: how it computes, or what a continuation is by itself.
    static constexpr std::string_view kImplied[] = {"causal", "form", "block", "steps", "pad", "key_top", "position"};
    const bool implied = std::find(std::begin(kImplied), std::end(kImplied), option.name) != std::end(kImplied);
    alignas(std::max_align_t) char args[kMaxStruct], out[kMaxStruct], grads[kMaxStruct];
    op.construct(args, out, grads);
    if (implied || option_text(*op.find_option(option.name), args) == option.text) continue;
    return impossible(where + " cannot be continued token by token: " + decode.name + " has no option " + option.name);
  }
  // One decode operator for several modes names them by what follows the mechanism in the operator's name.
  if (const OptionDecl* mode = decode.find_option("mode"); mode != nullptr && op.find_option("mode") == nullptr) {
    const std::string name = op.name.substr(std::min(op.mechanism.size() + 1, op.name.size()));
    if (std::find(mode->choices.begin(), mode->choices.end(), name) != mode->choices.end()) {
      result->options.push_back({"mode", name});
    }
  }
  // Forms that the forward gives as results of their own, out_sliding and out_terraced, are an option of the continuation.
  const std::string_view output = step.output;
  if (decode.find_option("form") != nullptr && op.find_option("form") == nullptr && output.substr(0, 4) == "out_") {
    result->options.push_back({"form", std::string(output.substr(4))});
  }
  return {};
}

CacheBound cache_bound(const Step& step) {
  CacheBound bound;
  if (step.kind != StepKind::op || step.op->decode.empty()) return bound;
  const Op* decode = find_op(step.op->decode);
  if (decode == nullptr || decode->find_input("k_cache") == nullptr || decode->find_input("lengths") == nullptr) return bound;
  if (decode->find_option("window") == nullptr || decode->find_option("prefix") == nullptr) return bound;
  const std::string window = option_of(step, "window"), prefix = option_of(step, "prefix");
  bound.left = std::atoll(window.c_str());
  if (!bound.given()) return bound;
  bound.prefix = std::atoll(prefix.c_str());
  // A quarter of the window to spare: four keys move for each token.
  bound.capacity = bound.prefix + bound.left + std::max<int64_t>({kDecodeTokens, 16, bound.left / 4});
  return bound;
}

Status decodable(const Record& record) {
  alignas(64) static const char nothing[4096] = {};  // views of one row and one token; only counts are read, and they are 0
  for (size_t i = 0; i < record.steps.size(); ++i) {
    const Step& step = record.steps[i];
    if (step.kind != StepKind::op || is_tokenwise(*step.op)) continue;
    std::vector<StateTensor> tensors;
    LINNET_TRY(state_tensors(record, static_cast<int>(i), 1, 64, Dtype::f32, &tensors));
    // The decode operator has the last word: some maps and modes have no continuation.
    Continuation next;
    LINNET_TRY(continuation(record, step, &next));
    Call call(*next.op);
    for (const Setting& option : next.options) LINNET_TRY(call.set_option(option.name, option.text));
    for (const auto& [name, value] : step.inputs) {
      const Shape& shape = record.values[static_cast<size_t>(value)].shape;
      int64_t sizes[kMaxRank];
      for (size_t d = 0; d < shape.size(); ++d) sizes[d] = shape[d] < 0 ? 1 : shape[d];
      LINNET_TRY(call.set(name, View::dense(nothing, Dtype::f32, sizes, static_cast<int>(shape.size()))));
    }
    for (const StateTensor& tensor : tensors) {
      View view = tensor.view;
      view.data = const_cast<char*>(nothing);
      LINNET_TRY(call.set(tensor.input, view));
    }
    if (const Status status = call.prepare(); !status.ok()) {
      return impossible(record.name + ": " + step.name + " cannot be continued token by token: " + status.message());
    }
  }
  return {};
}

Dtype attention_type(const Step& step, Dtype activations, Dtype attention) {
  const bool narrow = attention == Dtype::bf16 || attention == Dtype::f16;
  return narrow && activations == Dtype::f32 && step.kind == StepKind::op && step.op->name == "softmax" ? attention
                                                                                                        : activations;
}

Status state_tensors(const Record& record, int index, int64_t rows, int64_t capacity, Dtype activations,
                     std::vector<StateTensor>* tensors, Dtype attention) {
  const Step& step = record.steps[static_cast<size_t>(index)];
  Continuation next;
  LINNET_TRY(continuation(record, step, &next));
  Call forward(*step.op);
  LINNET_TRY(forward_dims(record, step, rows, activations, &forward));
  Dims dims = forward.dims();
  const auto number = [&](std::string_view option) {
    const std::string text = option_of(step, option);
    return text.empty() ? int64_t{0} : static_cast<int64_t>(std::atoll(text.c_str()));
  };
  const CacheBound bound = cache_bound(step);
  dims.set("capacity", std::max<int64_t>(bound.given() ? std::min(capacity, bound.capacity) : capacity, 1), "");
  if (step.op->find_option("block") != nullptr && next.op->find_input("q_block") != nullptr) {
    const int64_t block = number("block");
    if (block < 1) return impossible(record.name + ": " + step.name + " needs a fixed block to be continued token by token");
    dims.set("block", block, "");
    dims.set("M", std::max<int64_t>((capacity + block - 1) / block, 1), "");
  }
  if (step.op->find_option("arity") != nullptr) {
    // Levels for 2^31 tokens: a level that never branches changes nothing, so the tree need not grow with the sequence.
    const double arity = static_cast<double>(std::max<int64_t>(number("arity"), 2));
    dims.set("levels", static_cast<int64_t>(std::ceil(31 * std::log(2.0) / std::log(arity))), "");
    dims.set("width", static_cast<int64_t>(arity), "");
  }
  Call probe(*next.op);
  for (const Setting& option : next.options) LINNET_TRY(probe.set_option(option.name, option.text));
  for (const TensorDecl& decl : next.op->inputs) {
    if (!decl.mutated || decl.values == Values::rounding) continue;
    if (!decl.needed_by.empty()) {
      const std::string choice = option_text(*next.op->find_option(decl.needed_by), probe.args());
      if (std::find(decl.needed_for.begin(), decl.needed_for.end(), choice) == decl.needed_for.end()) continue;
    }
    StateTensor tensor{.name = step.name + "." + decl.name, .step = index, .input = decl.name};
    int64_t sizes[kMaxRank];
    int rank = 0;
    for (size_t begin = 0; begin < decl.shape.size();) {
      const size_t end = std::min(decl.shape.find(' ', begin), decl.shape.size());
      const std::string_view word = std::string_view(decl.shape).substr(begin, end - begin);
      if (!evaluate(word, *step.op, forward.prepared_args(), dims, &sizes[rank]) &&
          !evaluate(word, *next.op, probe.args(), dims, &sizes[rank])) {
        return impossible(record.name + ": " + step.name + ": the size " + std::string(word) + " of " + decl.name +
                          " is not known");
      }
      ++rank;
      begin = end + 1;
    }
    const Dtype dtype = decl.element == Element::index ? Dtype::i64
                        : decl.element == Element::acc ? acc_of(activations)
                                                       : attention_type(step, activations, attention);
    tensor.view = View::dense(nullptr, dtype, sizes, rank);
    tensors->push_back(std::move(tensor));
  }
  return {};
}

Status state_bytes(const Record& record, int64_t tokens, Dtype activations, int64_t* bytes, Dtype attention) {
  std::vector<StateTensor> tensors;
  for (size_t i = 0; i < record.steps.size(); ++i) {
    const Step& step = record.steps[i];
    if (step.kind != StepKind::op || is_tokenwise(*step.op)) continue;
    LINNET_TRY(state_tensors(record, static_cast<int>(i), 1, tokens, activations, &tensors, attention));
  }
  *bytes = 0;
  for (const StateTensor& tensor : tensors) *bytes += tensor.view.elements() * dtype_size(tensor.view.dtype);
  return {};
}

Status fill_initial(const Op& op, const std::string& input, const View& view) {
  if (view.device == Device::cuda) {
    std::vector<double> memory(static_cast<size_t>(view.elements() * dtype_size(view.dtype) / 8 + 1));
    View host = view;
    host.data = memory.data();
    host.device = Device::cpu;
    LINNET_TRY(fill_initial(op, input, host));
    return put_bytes(view, host.data);
  }
  std::memset(view.data, 0, static_cast<size_t>(view.elements() * dtype_size(view.dtype)));
  // Running maxima of logarithms begin at -inf: distill's c, fem's shift, and the last row of fem's sums.
  const bool maxima = ((op.name == "distill_decode" || op.name == "distill_hybrid_decode") && input == "c") ||
                      (op.name == "fem_read_decode" && input == "shift") || (op.name == "features_decode" && input == "top");
  const bool last_row = op.name == "fem_read_decode" && input == "sums";
  if (!maxima && !last_row) return {};
  const int64_t width = view.size[view.rank - 1], rows = view.rank > 1 ? view.size[view.rank - 2] : 1;
  for (int64_t i = 0; i < view.elements(); ++i) {
    if (maxima || i / width % rows == rows - 1) store_f64(view.data, view.dtype, i, -std::numeric_limits<double>::infinity());
  }
  return {};
}

int64_t State::bytes() const {
  int64_t total = 0;
  for (const StateTensor& tensor : tensors_) total += tensor.view.elements() * dtype_size(tensor.view.dtype);
  return total;
}

Status State::copy(State* to) const {
  State other = *this;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    View& view = other.tensors_[i].view;
    const int64_t bytes = view.elements() * dtype_size(view.dtype);
    LINNET_TRY(take_memory(view.device, bytes, &other.memory_[i]));
    LINNET_TRY(move_bytes(view.device, other.memory_[i].get(), view.data, bytes));
    view.data = other.memory_[i].get();
  }
  *to = std::move(other);
  return {};
}

Status State::reset() {
  position_ = 0;
  for (size_t i = 0; i < tensors_.size(); ++i) LINNET_TRY(fill_initial(*ops_[i], tensors_[i].input, tensors_[i].view));
  return {};
}

}  // namespace linnet::layers
