#include "layers/runner.h"

#include <algorithm>
#include <cstring>

#include "core/cuda/driver.h"
#include "core/half.h"
#include "layers/map_cuda.h"
#include "layers/memory.h"
#include "layers/plan.h"

namespace linnet::layers {
namespace {

constexpr size_t kMostPlans = 16;       // shapes of calls that are kept
constexpr int64_t kLeastCapacity = 64;  // tokens of a cache
constexpr int64_t kLeastGrowth = 256;   // and what it grows by

struct Buffer {
  std::shared_ptr<char> memory;
  int64_t bytes = 0;
  Status reserve(Device device, int64_t wanted, bool* moved = nullptr) {  // moved: it lies elsewhere than before
    if (moved != nullptr) *moved = wanted > bytes;
    if (wanted <= bytes) return {};
    memory.reset();
    bytes = 0;
    LINNET_TRY(take_memory(device, wanted, &memory));
    bytes = wanted;
    return {};
  }
};

std::string sizes_text(const View& view) {
  std::string text = "[";
  for (int i = 0; i < view.rank; ++i) text += (i ? ", " : "") + std::to_string(view.size[i]);
  return text + "]";
}

bool rows_are_dense(const View& view) {
  return view.rank == 0 || view.size[view.rank - 1] <= 1 || view.stride[view.rank - 1] == 1;
}

bool same_shape(const View& view, const Shape& shape) {
  bool same = view.rank == static_cast<int>(shape.size());
  for (int i = 0; same && i < view.rank; ++i) same = view.size[i] == shape[static_cast<size_t>(i)];
  return same;
}

// Whether a dense tensor of one shape may be read as the other: equal but for dimensions of 1, or one of them flat.
bool lie_alike(const View& view, const Shape& shape) {
  int64_t stride = 1, count = 1;
  std::vector<int64_t> own, wanted;
  for (int i = view.rank - 1; i >= 0; --i) {
    if (view.size[i] != 1 && view.stride[i] != stride) return false;
    stride *= view.size[i];
  }
  for (int i = 0; i < view.rank; ++i) {
    if (view.size[i] != 1) own.push_back(view.size[i]);
  }
  for (const int64_t size : shape) {
    count *= size;
    if (size != 1) wanted.push_back(size);
  }
  return own == wanted || (count == stride && (own.size() <= 1 || wanted.size() <= 1));
}

// The entries of `from`, where `to` is at least as large everywhere.
Status copy_prefix(const View& from, const View& to) {
  if (from.device == Device::cuda) {
    const char* error = nullptr;
    const cuda::Scope scope(to.data);
    LINNET_TRY(scope.status());
    cuda::copy_view(from, to, {.error = &error});
    return error == nullptr ? Status() : impossible(std::string("the CUDA driver refused a kernel: ") + error);
  }
  const int64_t bytes = dtype_size(from.dtype);
  for (int64_t i = 0; i < from.elements();) {
    int64_t rest = i, source = 0, target = 0;
    for (int d = from.rank - 1; d >= 0; --d) {
      const int64_t index = rest % from.size[d];
      rest /= from.size[d];
      source += index * from.stride[d];
      target += index * to.stride[d];
    }
    const int64_t run = from.rank == 0 ? 1 : from.size[from.rank - 1];
    std::memcpy(static_cast<char*>(to.data) + target * bytes, static_cast<const char*>(from.data) + source * bytes,
                static_cast<size_t>(run * bytes));
    i += run;
  }
  return {};
}

}  // namespace

struct Runner::Inner {
  struct Kept {
    std::vector<int64_t> key;
    std::unique_ptr<Plan> plan;
    uint64_t used = 0;
  };

  Record record;
  RunnerOptions options;
  std::vector<Weight> weights;
  std::vector<bool> bound;
  std::vector<Kept> plans;
  std::unique_ptr<Plan> latest;  // a plan that is not kept
  Plan* last = nullptr;
  Buffer arena, workspace, gpu_inputs, gpu_out;  // the last two: x and out of a call on the GPU
  uint64_t clock = 0;
  bool keep_values = false;
  Status states;  // whether the record can be continued

  Status find(std::string_view name, size_t* index) const;
  Status check_inputs(const std::vector<View>& inputs, const View& out, int64_t* batch, int64_t* tokens) const;
  Status reserve(State* state, int64_t tokens) const;
  Status compact(State* state, int64_t tokens) const;
  Status upload(Weight* weight) const;
  Status run_on_gpu(Shape4Call& call, const Context& context);
  Status describe_tensors(int64_t rows, int64_t capacity, State* state) const;
  Status run(Shape4Call& call, const Context& context);
  Status convert(size_t index, const View& view);
};

Runner::Runner() = default;
Runner::~Runner() = default;
Runner::Runner(Runner&&) noexcept = default;
Runner& Runner::operator=(Runner&&) noexcept = default;

Status Runner::make(Record record, const RunnerOptions& options, Runner* runner) {
  if (!is_float(options.activations)) {
    return bad_input(record.name + ": activations are " + dtype_name(options.activations) + ", expected f64, f32, bf16 or f16");
  }
  if (options.device == Device::cuda) {
    if (const std::string reason = cuda::missing(); !reason.empty()) return impossible(record.name + ": " + reason);
    if (options.activations == Dtype::f64)
      return bad_input(record.name + ": activations are f64, the CUDA kernels have no f64");
  }
  const auto mixes = [](const Step& step) { return step.kind == StepKind::experts; };
  if (options.device == Device::cuda && std::any_of(record.steps.begin(), record.steps.end(), mixes)) {
    return impossible(record.name + ": its feed-forward is a mixture of experts, which runs on the CPU alone so far");
  }
  auto inner = std::make_unique<Inner>();
  inner->record = std::move(record);
  inner->options = options;
  if (inner->options.uploads == nullptr) inner->options.uploads = std::make_shared<Uploads>();
  inner->weights.resize(inner->record.parameters.size());
  inner->bound.assign(inner->record.parameters.size(), false);
  inner->states = decodable(inner->record);
  runner->inner_ = std::move(inner);
  return {};
}

const Record& Runner::record() const { return inner_->record; }
int64_t Runner::arena_bytes() const { return inner_->arena.bytes + inner_->workspace.bytes; }

Status Runner::keep_values(bool keep) {
  inner_->keep_values = keep;
  inner_->plans.clear();
  return {};
}
Status Runner::value(std::string_view name, View* view) const {
  if (inner_->last == nullptr) return bad_input(inner_->record.name + ": nothing has been run");
  return inner_->last->view_of(inner_->record, name, view);
}

// ---- weights ----------------------------------------------------------------------------------------------------------------

Status Runner::Inner::find(std::string_view name, size_t* index) const {
  for (*index = 0; *index < record.parameters.size(); ++*index) {
    if (record.parameters[*index].name == name) return {};
  }
  return bad_input(record.name + ": there is no parameter '" + std::string(name) + "'");
}

Status Runner::Inner::convert(size_t index, const View& view) {
  const Dtype dtype = options.activations == Dtype::f64 ? Dtype::f64 : Dtype::f32;
  Weight& weight = weights[index];
  weight.memory = std::make_shared<std::vector<double>>(static_cast<size_t>(view.elements() * dtype_size(dtype) / 8 + 1));
  weight.view = View::dense(weight.memory->data(), dtype, view.size, view.rank);
  const char* base = static_cast<const char*>(view.data);
  for (int64_t i = 0; i < view.elements(); ++i) {
    int64_t rest = i, offset = 0;
    for (int d = view.rank - 1; d >= 0; --d) {
      offset += rest % view.size[d] * view.stride[d];
      rest /= view.size[d];
    }
    double element = 0;  // the address may be off its element: copied byte by byte
    std::memcpy(&element, base + offset * dtype_size(view.dtype), static_cast<size_t>(dtype_size(view.dtype)));
    store_f64(weight.view.data, dtype, i, load_f64(&element, view.dtype, 0));
  }
  return {};
}

Status Runner::bind(std::string_view name, const View& given) {
  size_t index;
  LINNET_TRY(inner_->find(name, &index));
  const Parameter& parameter = inner_->record.parameters[index];
  // Checkpoints differ in dimensions of 1 (convolutions [C, 1, taps]) and in flattened heads; the numbers lie alike.
  View view = given;
  if (!same_shape(given, parameter.shape) && lie_alike(given, parameter.shape)) {
    view = View::dense(given.data, given.dtype, parameter.shape.data(), static_cast<int>(parameter.shape.size()));
  }
  if (!same_shape(view, parameter.shape)) {
    return bad_input(inner_->record.name + ": " + parameter.name + " has shape " + sizes_text(view) + ", expected " +
                     shape_text(parameter.shape));
  }
  if (!is_float(view.dtype)) {
    return bad_input(inner_->record.name + ": " + parameter.name + " is " + dtype_name(view.dtype) +
                     ", expected f64, f32, bf16 or f16");
  }
  if (view.elements() > 0 && view.data == nullptr)
    return bad_input(inner_->record.name + ": " + parameter.name + " has no data");
  const Dtype activations = inner_->options.activations;
  const bool placed = reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(dtype_size(view.dtype)) == 0;
  const bool fits = activations == Dtype::f64 ? view.dtype == Dtype::f64
                    : parameter.dense_only    ? view.dtype != Dtype::f64
                                              : view.dtype == activations || view.dtype == Dtype::f32;
  inner_->weights[index] = {};
  if (fits && placed && rows_are_dense(view)) {
    inner_->weights[index].view = view;
  } else {
    LINNET_TRY(inner_->convert(index, view));
  }
  LINNET_TRY(inner_->upload(&inner_->weights[index]));
  inner_->bound[index] = true;
  inner_->plans.clear();
  return {};
}

// Of a runner on the GPU: the weight's copy there, in its place.
Status Runner::Inner::upload(Weight* weight) const {
  if (options.device == Device::cpu) return {};
  const auto one = [&](View* view) -> Status {
    if (!view->given()) return {};
    const View host = *view;
    int64_t dense = 1;
    for (int i = host.rank - 1; i >= 0; --i) {
      if (host.size[i] != 1 && host.stride[i] != dense)
        return bad_input(record.name + ": a weight's rows do not lie one behind the other");
      dense *= host.size[i];
    }
    if (weight->memory == nullptr) return options.uploads->upload(host, view);
    Uploads own;  // converted: nobody else has it
    LINNET_TRY(own.upload(host, view));
    weight->copies.push_back(own.copies.begin()->second);
    return {};
  };
  if (!weight->quantised) {
    LINNET_TRY(one(&weight->view));
    weight->memory.reset();
    return {};
  }
  LINNET_TRY(one(&weight->packed.codes));
  LINNET_TRY(one(&weight->packed.scale));
  return one(&weight->packed.offset);
}

Status Runner::bind(std::string_view name, const Quantised& weight) {
  size_t index;
  LINNET_TRY(inner_->find(name, &index));
  const Parameter& parameter = inner_->record.parameters[index];
  if (!parameter.dense_only) {
    return bad_input(inner_->record.name + ": " + parameter.name + " is read by more than products, expected float weights");
  }
  if (weight.bits != 8 && weight.bits != 4) {
    return bad_input(inner_->record.name + ": " + parameter.name + " has " + std::to_string(weight.bits) +
                     " bits, expected 8 or 4");
  }
  inner_->weights[index] = {};
  inner_->weights[index].quantised = true;
  inner_->weights[index].packed = weight;
  LINNET_TRY(inner_->upload(&inner_->weights[index]));
  inner_->bound[index] = true;
  inner_->plans.clear();
  return {};
}

Status Runner::bind_values(std::string_view name, const std::vector<double>& values) {
  size_t index;
  LINNET_TRY(inner_->find(name, &index));
  const Parameter& parameter = inner_->record.parameters[index];
  int64_t sizes[kMaxRank], count = 1;
  for (size_t i = 0; i < parameter.shape.size(); ++i) count *= sizes[i] = parameter.shape[i];
  if (static_cast<int64_t>(values.size()) != count) {
    return bad_input(inner_->record.name + ": " + parameter.name + " has " + std::to_string(values.size()) +
                     " numbers, expected " + std::to_string(count));
  }
  LINNET_TRY(inner_->convert(index, View::dense(values.data(), Dtype::f64, sizes, static_cast<int>(parameter.shape.size()))));
  LINNET_TRY(inner_->upload(&inner_->weights[index]));
  inner_->bound[index] = true;
  inner_->plans.clear();
  return {};
}

Status Runner::bind_initial(uint64_t seed) {
  for (size_t i = 0; i < inner_->record.parameters.size(); ++i) {
    const Parameter& parameter = inner_->record.parameters[i];
    if (inner_->bound[i]) continue;
    LINNET_TRY(bind_values(parameter.name, initial_values(parameter.init, parameter.shape, parameter.name, seed)));
  }
  return {};
}

Status Runner::bind_buffers() {
  for (size_t i = 0; i < inner_->record.parameters.size(); ++i) {
    const Parameter& parameter = inner_->record.parameters[i];
    if (inner_->bound[i] || parameter.trained) continue;
    LINNET_TRY(bind_values(parameter.name, initial_values(parameter.init, parameter.shape, parameter.name, 0)));
  }
  return {};
}

std::vector<std::string> Runner::unbound() const {
  std::vector<std::string> names;
  for (size_t i = 0; i < inner_->bound.size(); ++i) {
    if (!inner_->bound[i]) names.push_back(inner_->record.parameters[i].name);
  }
  return names;
}

// ---- states -----------------------------------------------------------------------------------------------------------------

// The tensors of a state, without memory.
Status Runner::Inner::describe_tensors(int64_t rows, int64_t capacity, State* state) const {
  state->rows_ = rows;
  state->capacity_ = std::max(capacity, kLeastCapacity);
  state->owner_ = this;
  for (size_t i = 0; i < record.steps.size(); ++i) {
    const Step& step = record.steps[i];
    if (step.kind != StepKind::op || is_tokenwise(*step.op)) continue;
    LINNET_TRY(state_tensors(record, static_cast<int>(i), rows, state->capacity_, options.activations, &state->tensors_,
                             options.attention));
    Continuation next;
    LINNET_TRY(continuation(record, step, &next));
    state->ops_.resize(state->tensors_.size(), next.op);
  }
  for (StateTensor& tensor : state->tensors_) tensor.view.device = options.device;
  return {};
}

Status Runner::make_state(int64_t rows, int64_t capacity, State* state) const {
  LINNET_TRY(inner_->states);
  if (rows < 1) return bad_input(inner_->record.name + ": a state of " + std::to_string(rows) + " rows, expected at least 1");
  *state = State();
  LINNET_TRY(inner_->describe_tensors(rows, capacity, state));
  for (StateTensor& tensor : state->tensors_) {
    state->memory_.emplace_back();
    LINNET_TRY(take_memory(tensor.view.device, tensor.view.elements() * dtype_size(tensor.view.dtype), &state->memory_.back()));
    tensor.view.data = state->memory_.back().get();
  }
  return state->reset();
}

Status Runner::reserve(State* state, int64_t tokens) const {
  if (state->owner_ != inner_.get()) return bad_input(inner_->record.name + ": the state was not made by this runner");
  return inner_->reserve(state, tokens);
}

// Where a cache that keeps a window has no room for so many tokens, the keys that are still seen move up.
Status Runner::Inner::compact(State* state, int64_t tokens) const {
  for (size_t i = 0; i < state->tensors_.size(); ++i) {
    if (state->tensors_[i].input != "lengths") continue;
    const int step = state->tensors_[i].step;
    const CacheBound window = cache_bound(record.steps[static_cast<size_t>(step)]);
    if (!window.given()) continue;
    const View& lengths = state->tensors_[i].view;
    std::vector<int64_t> held(static_cast<size_t>(lengths.size[0]));
    LINNET_TRY(get_bytes(lengths, held.data()));
    const int64_t kept = window.left;
    if (held[0] < window.prefix + kept) continue;
    bool full = false;
    for (const StateTensor& tensor : state->tensors_) {
      if (tensor.step != step || tensor.input == "lengths" || held[0] + tokens <= tensor.view.size[1]) continue;
      full = true;
      const int64_t row = tensor.view.stride[1] * dtype_size(tensor.view.dtype);
      for (int64_t b = 0; b < tensor.view.size[0]; ++b) {
        char* base = static_cast<char*>(tensor.view.data) + b * tensor.view.stride[0] * dtype_size(tensor.view.dtype);
        LINNET_TRY(move_bytes(tensor.view.device, base + window.prefix * row, base + (held[0] - kept) * row, kept * row));
      }
    }
    if (!full) continue;
    std::fill(held.begin(), held.end(), window.prefix + kept);
    LINNET_TRY(put_bytes(lengths, held.data()));
  }
  return {};
}

// Room for so many more tokens. A quarter more than there was, not twice as much: memory is what a state costs, and each token
// is copied four times at most. Tensor by tensor: the old and the new one are never there together as a whole.
Status Runner::Inner::reserve(State* state, int64_t tokens) const {
  const int64_t wanted = state->position_ + tokens;
  if (wanted <= state->capacity_) return {};
  State grown;
  const int64_t more = std::max(state->capacity_ / 4, kLeastGrowth);
  LINNET_TRY(describe_tensors(state->rows_, std::max(state->capacity_ + more, wanted), &grown));
  for (size_t i = 0; i < grown.tensors_.size(); ++i) {
    View& view = grown.tensors_[i].view;
    grown.memory_.emplace_back();
    LINNET_TRY(take_memory(view.device, view.elements() * dtype_size(view.dtype), &grown.memory_.back()));
    view.data = grown.memory_.back().get();
    LINNET_TRY(fill_initial(*grown.ops_[i], grown.tensors_[i].input, view));
    LINNET_TRY(copy_prefix(state->tensors_[i].view, view));
    state->memory_[i].reset();
  }
  grown.position_ = state->position_;
  *state = std::move(grown);
  return {};
}

// ---- calls ------------------------------------------------------------------------------------------------------------------

Status Runner::Inner::check_inputs(const std::vector<View>& inputs, const View& out, int64_t* batch, int64_t* tokens) const {
  if (inputs.size() != record.inputs.size()) {
    return bad_input(record.name + ": " + std::to_string(inputs.size()) + " inputs, expected " +
                     std::to_string(record.inputs.size()));
  }
  *batch = *tokens = -1;
  const auto match = [&](const std::string& name, const Shape& shape, const View& view, bool integers) -> Status {
    bool same = view.rank == static_cast<int>(shape.size());
    for (int i = 0; same && i < view.rank; ++i) {
      const int64_t wanted = shape[static_cast<size_t>(i)];
      if (wanted == kB && *batch < 0) *batch = view.size[i];
      if (wanted == kT && *tokens < 0) *tokens = view.size[i];
      same = view.size[i] == (wanted == kB ? *batch : wanted == kT ? *tokens : wanted);
    }
    if (!same) {
      return bad_input(record.name + ": " + name + " has shape " + sizes_text(view) + ", expected " + shape_text(shape));
    }
    if (integers ? view.dtype != Dtype::i64 && view.dtype != Dtype::i32 : !is_float(view.dtype)) {
      return bad_input(record.name + ": " + name + " is " + dtype_name(view.dtype) + ", expected " +
                       (integers ? "i32 or i64" : "f64, f32, bf16 or f16"));
    }
    if (view.elements() > 0 && view.data == nullptr) return bad_input(record.name + ": " + name + " has no data");
    return {};
  };
  for (size_t i = 0; i < inputs.size(); ++i) {
    const ValueInfo& info = record.values[static_cast<size_t>(record.inputs[i])];
    LINNET_TRY(match(info.name, info.shape, inputs[i], info.integers));
  }
  LINNET_TRY(match("out", record.values[static_cast<size_t>(record.output)].shape, out, false));
  *batch = std::max<int64_t>(*batch, 0);
  *tokens = *tokens < 0 ? (record.tokens > 0 ? record.tokens : 1) : *tokens;
  if (record.tokens > 0 && *tokens != record.tokens) {
    return bad_input(record.name + ": " + std::to_string(*tokens) + " tokens, expected " + std::to_string(record.tokens));
  }
  for (size_t i = 0; i < bound.size(); ++i) {
    if (!bound[i]) return bad_input(record.name + ": " + record.parameters[i].name + " is not bound");
  }
  return {};
}

Status Runner::Inner::run(Shape4Call& call, const Context& context) {
  Executor* executor = context.executor == nullptr ? &default_executor() : context.executor;
  // Plans of calls that continue nothing, and of decode calls, serve every call of the same shape.
  const bool kept = call.offsets.empty() && (!call.with_states || call.decode);
  std::vector<int64_t> key;
  const auto add_view = [&](const View& view) {
    key.push_back(static_cast<int64_t>(view.dtype));
    for (int i = 0; i < view.rank; ++i) key.push_back(view.size[i]), key.push_back(view.stride[i]);
  };
  Plan* plan = nullptr;
  if (kept) {
    key = {call.with_states, call.batch, call.tokens, executor->workers()};
    for (const View& view : call.inputs) add_view(view);
    add_view(call.out);
    for (const Piece& piece : call.pieces) key.push_back(piece.rows), key.push_back(piece.state->capacity());
    for (Kept& candidate : plans) {
      if (candidate.key != key) continue;
      candidate.used = ++clock;
      plan = candidate.plan.get();
    }
  }
  if (plan == nullptr) {
    PlanBuilder builder(record, weights, options, executor);
    bool moved = false;
    LINNET_TRY(arena.reserve(options.device, builder.layout(call, keep_values), &moved));
    if (moved) plans.clear();  // they point into the old one
    auto fresh = std::make_unique<Plan>();
    LINNET_TRY(builder.build(call, arena.memory.get(), fresh.get()));
    plan = fresh.get();
    if (kept) {
      if (plans.size() >= kMostPlans) {
        plans.erase(std::min_element(plans.begin(), plans.end(), [](const Kept& a, const Kept& b) { return a.used < b.used; }));
      }
      plans.push_back({std::move(key), std::move(fresh), ++clock});
    } else {
      latest = std::move(fresh);
    }
  }
  LINNET_TRY(workspace.reserve(options.device, plan->workspace_bytes() + 128));
  last = plan;
  return plan->run(call, executor, workspace.memory.get());
}

// x goes to the GPU before the call, out comes back behind it.
Status Runner::Inner::run_on_gpu(Shape4Call& call, const Context& context) {
  const auto bytes = [](const View& view) { return (view.elements() * dtype_size(view.dtype) + 127) / 128 * 128; };
  const auto is_dense = [](const View& view) {
    int64_t stride = 1;
    for (int i = view.rank - 1; i >= 0; --i) {
      if (view.size[i] != 1 && view.stride[i] != stride) return false;
      stride *= view.size[i];
    }
    return true;
  };
  if (!call.offsets.empty()) return impossible(record.name + ": packed sequences do not run on the GPU yet");
  int64_t all = 0;
  bool dense = is_dense(call.out);
  for (const View& view : call.inputs) all += bytes(view), dense &= is_dense(view);
  if (!dense) return bad_input(record.name + ": x or out of a call on the GPU has gaps between its numbers");
  LINNET_TRY(gpu_inputs.reserve(Device::cuda, all));
  LINNET_TRY(gpu_out.reserve(Device::cuda, bytes(call.out)));
  char* place = gpu_inputs.memory.get();
  for (View& view : call.inputs) {
    const void* host = view.data;
    view.data = place;
    view.device = Device::cuda;
    LINNET_TRY(put_bytes(view, host));
    place += bytes(view);
  }
  void* const host = call.out.data;
  call.out.data = gpu_out.memory.get();
  call.out.device = Device::cuda;
  LINNET_TRY(run(call, context));
  return get_bytes(call.out, host);
}

Status Runner::run(const View& x, const View& out, const std::vector<State*>& states, const Context& context) {
  return run(std::vector<View>{x}, out, states, context);
}

Status Runner::run(const std::vector<View>& inputs, const View& out, const std::vector<State*>& states,
                   const Context& context) {
  Inner& inner = *inner_;
  Shape4Call call;
  LINNET_TRY(inner.check_inputs(inputs, out, &call.batch, &call.tokens));
  call.inputs = inputs;
  call.out = out;
  call.with_states = !states.empty();
  int64_t rows = 0;
  for (size_t i = 0; i < states.size(); ++i) {
    State* state = states[i];
    if (state == nullptr || state->owner_ != inner_.get()) {
      return bad_input(inner.record.name + ": state " + std::to_string(i) + " was not made by this runner");
    }
    if (std::find(states.begin(), states.begin() + static_cast<int64_t>(i), state) !=
        states.begin() + static_cast<int64_t>(i)) {
      return bad_input(inner.record.name + ": state " + std::to_string(i) + " is given twice");
    }
    call.pieces.push_back({rows, state->rows_, 0, call.tokens, state, state->position_});
    rows += state->rows_;
  }
  if (call.with_states && rows != call.batch) {
    return bad_input(inner.record.name + ": the states have " + std::to_string(rows) + " rows, expected " +
                     std::to_string(call.batch) + " (the rows of " +
                     inner.record.values[static_cast<size_t>(inner.record.inputs[0])].name + ")");
  }
  if (call.batch == 0 || call.tokens == 0) return {};
  for (State* state : states) LINNET_TRY(inner.reserve(state, call.tokens));
  call.decode = call.with_states && call.tokens <= kDecodeTokens;
  for (State* state : states) {
    if (call.decode) LINNET_TRY(inner.compact(state, call.tokens));
  }
  LINNET_TRY(inner.options.device == Device::cuda ? inner.run_on_gpu(call, context) : inner.run(call, context));
  for (State* state : states) state->position_ += call.tokens;
  return {};
}

Status Runner::run_packed(const View& x, const std::vector<int64_t>& offsets, const View& out, const Context& context) {
  Inner& inner = *inner_;
  Shape4Call call;
  LINNET_TRY(inner.check_inputs({x}, out, &call.batch, &call.tokens));
  const std::string name = inner.record.name + ": offsets";
  if (call.batch != 1) return bad_input(name + " of packed sequences need one row, x has " + std::to_string(call.batch));
  if (offsets.empty() || offsets.front() != 0 || offsets.back() != call.tokens ||
      !std::is_sorted(offsets.begin(), offsets.end())) {
    return bad_input(name + " are no ascending numbers from 0 to " + std::to_string(call.tokens));
  }
  if (call.tokens == 0) return {};
  call.inputs = {x};
  call.out = out;
  call.offsets = offsets;
  for (size_t i = 0; i + 1 < offsets.size(); ++i) call.pieces.push_back({0, 1, offsets[i], offsets[i + 1] - offsets[i]});
  return inner.options.device == Device::cuda ? inner.run_on_gpu(call, context) : inner.run(call, context);
}

}  // namespace linnet::layers
