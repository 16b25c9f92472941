#include "layers/plan.h"

#include <algorithm>

#include "core/cuda/driver.h"
#include "core/half.h"
#include "core/isa.h"
#include "layers/expression.h"
#include "layers/map_cuda.h"
#include "layers/memory.h"

namespace linnet::layers {
namespace {

bool is_dense(const View& view) {
  int64_t stride = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    if (view.size[i] != 1 && view.stride[i] != stride) return false;
    stride *= view.size[i];
  }
  return true;
}

int64_t inner_of(const Record& record, const Step& experts) {  // inputs: x, weights, gate of the first one, ..
  return record.values[static_cast<size_t>(experts.inputs[2].second)].shape[0];
}

using MapForward = void (*)(const MapCall&, const Launch&);
using MapWorkspace = int64_t (*)(const MapCall&, int);
Status map_kernel(Device device, MapForward* forward, MapWorkspace* workspace) {
  if (device == Device::cuda) {
    *forward = cuda::map_forward, *workspace = cuda::map_workspace;
    return {};
  }
  Isa isa;
  LINNET_TRY(isa_choice(&isa));
#if defined(LINNET_HAS_portable)
  *forward = portable::map_forward, *workspace = portable::map_workspace;
#else
  *forward = LINNET_ONLY::map_forward, *workspace = LINNET_ONLY::map_workspace;  // this build has one instruction set
#endif
#if defined(LINNET_HAS_avx2)
  if (isa >= Isa::avx2) *forward = avx2::map_forward, *workspace = avx2::map_workspace;
#endif
#if defined(LINNET_HAS_avx512)
  if (isa >= Isa::avx512) *forward = avx512::map_forward, *workspace = avx512::map_workspace;
#endif
  return {};
}

}  // namespace

// ---- the arena --------------------------------------------------------------------------------------------------------------

Dtype PlanBuilder::dtype_of(const ValueInfo& info) const {
  if (info.integers) return Dtype::i64;
  const bool map = info.source == Source::step && record_.steps[static_cast<size_t>(info.index)].kind == StepKind::map;
  const Dtype acc = options_.activations == Dtype::f64 ? Dtype::f64 : Dtype::f32;
  return map && info.acc ? acc : options_.activations;
}

View PlanBuilder::dense_view(const ValueInfo& info, void* data) const {
  int64_t sizes[kMaxRank];
  for (size_t i = 0; i < info.shape.size(); ++i) sizes[i] = size_of(info.shape[i]);
  return placed(data, dtype_of(info), sizes, static_cast<int>(info.shape.size()));
}
View PlanBuilder::placed(void* data, Dtype dtype, const int64_t* sizes, int rank) const {
  View view = View::dense(data, dtype, sizes, rank);
  view.device = options_.device;
  return view;
}

int PlanBuilder::root_of(int id) const {
  const ValueInfo* info = &record_.values[static_cast<size_t>(id)];
  while (info->source == Source::step && record_.steps[static_cast<size_t>(info->index)].kind == StepKind::view) {
    id = record_.steps[static_cast<size_t>(info->index)].inputs.front().second;
    info = &record_.values[static_cast<size_t>(id)];
  }
  return id;
}

bool PlanBuilder::needs_cast(int input) const {
  const View& view = call_->inputs[static_cast<size_t>(input)];
  return is_float(view.dtype) && (view.dtype != options_.activations || !is_dense(view));
}

void PlanBuilder::find_folded() {
  folded_.assign(record_.values.size(), false);
  folded_bytes_ = 0;
  for (const Step& step : record_.steps) {
    if (step.positional || (step.kind == StepKind::op && !is_tokenwise(*step.op))) continue;
    const Shape& shape = record_.values[static_cast<size_t>(step.result)].shape;
    bool fixed = std::none_of(shape.begin(), shape.end(), [](int64_t size) { return size < 0; });
    for (const auto& [name, id] : step.inputs) {
      const Source source = record_.values[static_cast<size_t>(id)].source;
      fixed &= source == Source::parameter || source == Source::constant || folded_[static_cast<size_t>(id)];
    }
    folded_[static_cast<size_t>(step.result)] = fixed;
  }
}

int64_t PlanBuilder::layout(const Shape4Call& call, bool keep_values) {
  call_ = &call;
  const size_t count = record_.values.size();
  places_.assign(count, {});
  find_folded();
  // The output's own value lies in the caller's memory where that is possible.
  int root = record_.output;
  bool whole = true;
  for (;;) {
    const ValueInfo& info = record_.values[static_cast<size_t>(root)];
    if (info.source != Source::step || record_.steps[static_cast<size_t>(info.index)].kind != StepKind::view) break;
    const Step& step = record_.steps[static_cast<size_t>(info.index)];
    whole &= step.view != ViewKind::slice && step.view != ViewKind::last && step.view != ViewKind::drop_token;
    root = step.inputs.front().second;
  }
  const ValueInfo& out = record_.values[static_cast<size_t>(root)];
  output_root_ = whole && out.source == Source::step && !folded_[static_cast<size_t>(root)] &&
                         dtype_of(out) == call.out.dtype && is_dense(call.out)
                     ? root
                     : -1;

  std::vector<int> last(count, -1);
  for (size_t s = 0; s < record_.steps.size(); ++s) {
    for (const auto& [name, id] : record_.steps[s].inputs) last[static_cast<size_t>(root_of(id))] = static_cast<int>(s);
  }
  last[static_cast<size_t>(root_of(record_.output))] = static_cast<int>(record_.steps.size());

  struct Block {
    int64_t begin, end;
    int value;
  };
  std::vector<Block> live;  // by address
  int64_t total = 0;
  const auto take = [&](int id) {
    const ValueInfo& info = record_.values[static_cast<size_t>(id)];
    const int64_t bytes = aligned(std::max<int64_t>(bytes_of(dense_view(info, nullptr)), 1));
    int64_t begin = 0;
    auto place = live.begin();
    for (; place != live.end() && place->begin - begin < bytes; ++place) begin = place->end;
    live.insert(place, {begin, begin + bytes, id});
    places_[static_cast<size_t>(id)] = {begin, bytes};
    total = std::max(total, begin + bytes);
  };
  for (size_t i = 0; i < record_.inputs.size(); ++i) {
    if (needs_cast(static_cast<int>(i))) take(record_.inputs[i]);
  }
  for (size_t s = 0; s < record_.steps.size(); ++s) {
    const Step& step = record_.steps[s];
    if (step.kind != StepKind::view && folded_[static_cast<size_t>(step.result)]) {
      const ValueInfo& info = record_.values[static_cast<size_t>(step.result)];
      const int64_t bytes = aligned(std::max<int64_t>(bytes_of(dense_view(info, nullptr)), 1));
      places_[static_cast<size_t>(step.result)] = {folded_bytes_, bytes};
      folded_bytes_ += bytes;
    } else if (step.kind != StepKind::view && step.result != output_root_) {
      take(step.result);
    }
    if (keep_values) continue;
    std::erase_if(live, [&](const Block& block) { return last[static_cast<size_t>(block.value)] <= static_cast<int>(s); });
  }
  temporary_ = aligned(total);
  int64_t states = 0;
  for (size_t s = 0; call.with_states && s < record_.steps.size(); ++s) {
    int64_t bytes = 0;
    for (const Piece& piece : call.pieces) {
      int64_t own = 0;
      for (const StateTensor& tensor : piece.state->tensors()) {
        if (tensor.step != static_cast<int>(s)) continue;
        own += aligned(bytes_of(tensor.view));
        // A bounded cache and the new tokens behind it.
        const bool bounded = tensor.view.rank > 1 && cache_bound(record_.steps[s]).given();
        if (bounded) own += aligned(bytes_of(tensor.view) / std::max<int64_t>(tensor.view.size[1], 1) * piece.tokens);
      }
      bytes = std::max(bytes, own);
    }
    states = std::max(states, bytes);
  }
  for (const Step& step : record_.steps) {
    if (step.kind != StepKind::experts) continue;
    const ValueInfo& x = record_.values[static_cast<size_t>(step.inputs[0].second)];
    states = std::max(states, Experts::room_bytes(size_of(x.shape[0]) * size_of(x.shape[1]), x.shape[2],
                                                  inner_of(record_, step), dtype_of(x)));
  }
  narrow_ = temporary_ + aligned(states);
  int64_t operands = 0;
  for (const Step& step : record_.steps) {
    if (attention_type(step, options_.activations, options_.attention) == options_.activations) continue;
    int64_t bytes = aligned(bytes_of(dense_view(record_.values[static_cast<size_t>(step.result)], nullptr)));
    for (const auto& [name, id] : step.inputs) {
      bytes += aligned(bytes_of(dense_view(record_.values[static_cast<size_t>(id)], nullptr)));
    }
    operands = std::max(operands, bytes);
  }
  return narrow_ + operands;
}

// ---- views ------------------------------------------------------------------------------------------------------------------

View PlanBuilder::value(int id) const {
  const ValueInfo& info = record_.values[static_cast<size_t>(id)];
  char* own = arena_ + places_[static_cast<size_t>(id)].offset;
  switch (info.source) {
    case Source::input: {
      const size_t index =
          static_cast<size_t>(std::find(record_.inputs.begin(), record_.inputs.end(), id) - record_.inputs.begin());
      return needs_cast(static_cast<int>(index)) ? dense_view(info, own) : call_->inputs[index];
    }
    case Source::parameter: return weights_[static_cast<size_t>(info.index)].view;
    case Source::constant: return constants_[static_cast<size_t>(id)];
    case Source::step: break;
  }
  const Step& step = record_.steps[static_cast<size_t>(info.index)];
  if (step.kind != StepKind::view) {
    if (folded_[static_cast<size_t>(id)]) {
      const uintptr_t base = (reinterpret_cast<uintptr_t>(plan_->folded_.get()) + kAlign - 1) / kAlign * kAlign;
      return dense_view(info, reinterpret_cast<char*>(base) + places_[static_cast<size_t>(id)].offset);
    }
    if (id != output_root_) return dense_view(info, own);
    return dense_view(info, call_->out.data);
  }
  View view = value(step.inputs.front().second);
  const int last = view.rank - 1;
  switch (step.view) {
    case ViewKind::split: {
      const int64_t width = view.size[last] / step.size;
      view.size[view.rank] = width;
      view.stride[view.rank] = view.stride[last];
      view.size[last] = step.size;
      view.stride[last] *= width;
      ++view.rank;
      break;
    }
    case ViewKind::join: {
      view.stride[last - 1] = view.stride[last];
      view.size[last - 1] *= view.size[last];
      --view.rank;
      break;
    }
    case ViewKind::slice:
      view.data = at(view, step.begin * view.stride[last]);
      view.size[last] = step.size;
      view.stride[last] *= step.stride;
      break;
    case ViewKind::column:
      view.size[view.rank] = 1;
      view.stride[view.rank] = 1;
      ++view.rank;
      break;
    case ViewKind::drop_token:
      for (int i = 1; i < last; ++i) {
        view.size[i] = view.size[i + 1];
        view.stride[i] = view.stride[i + 1];
      }
      --view.rank;
      break;
    case ViewKind::last:
      view.data = at(view, (view.size[1] - 1) * view.stride[1]);
      view.size[1] = 1;
      break;
    case ViewKind::reshape: {
      const View dense = dense_view(info, view.data);
      for (int i = 2; i < dense.rank; ++i) {
        view.size[i] = dense.size[i];
        view.stride[i] = dense.stride[i];
      }
      view.rank = dense.rank;
      break;
    }
  }
  return view;
}

View PlanBuilder::sliced(int id, const Piece* piece) const {
  View view = value(id);
  if (piece == nullptr) return view;
  const Shape& shape = record_.values[static_cast<size_t>(id)].shape;
  if (!shape.empty() && shape[0] == kB) {
    view.data = at(view, piece->row * view.stride[0]);
    view.size[0] = piece->rows;
  }
  if (shape.size() > 1 && shape[1] == kT) {
    view.data = at(view, piece->token * view.stride[1]);
    view.size[1] = piece->tokens;
  }
  return view;
}

void PlanBuilder::patch(int id, const View& view, void** address) {
  const int root = root_of(id);
  const auto add = [&](Plan::Root kind, int index, const void* base) {
    const int64_t bytes = static_cast<const char*>(view.data) - static_cast<const char*>(base);
    plan_->patches_.push_back({kind, index, 0, bytes, address});
  };
  if (root == output_root_) return add(Plan::Root::output, 0, call_->out.data);
  const auto input = std::find(record_.inputs.begin(), record_.inputs.end(), root);
  if (input == record_.inputs.end()) return;
  const int index = static_cast<int>(input - record_.inputs.begin());
  if (!needs_cast(index)) add(Plan::Root::input, index, call_->inputs[static_cast<size_t>(index)].data);
}

// ---- steps ------------------------------------------------------------------------------------------------------------------

Status PlanBuilder::add_op(const Step& step, const Op& op, const std::vector<Setting>& settings, const Piece* piece,
                           int piece_index, const std::vector<Extra>& extras, const View* elsewhere) {
  const auto about = [&](const Status& status) {
    return status.ok() ? status : Status(status.code(), record_.name + ": " + step.name + ": " + status.message());
  };
  const Weight* packed = nullptr;
  for (const auto& [name, id] : step.inputs) {
    const ValueInfo& info = record_.values[static_cast<size_t>(id)];
    if (info.source != Source::parameter || !weights_[static_cast<size_t>(info.index)].quantised) continue;
    packed = &weights_[static_cast<size_t>(info.index)];
  }
  const Op* run = &op;
  if (packed != nullptr) run = find_op(op.name + "_quantised");
  if (run == nullptr) return impossible(record_.name + ": " + op.name + " has no form for quantised weights");
  Call call(*run);
  for (const Setting& option : settings) LINNET_TRY(about(call.set_option(option.name, option.text)));
  if (op.name == "dense" && packed == nullptr) LINNET_TRY(about(call.set_option("rounding", options_.rounding)));
  const OptionDecl* position = position_option(*run);
  if (position != nullptr && piece != nullptr) {
    LINNET_TRY(about(call.set_option(position->name, std::to_string(piece->position))));
  }
  if (packed != nullptr) {
    int64_t outputs = 0;
    for (const auto& [name, id] : step.inputs) {
      if (name == "weight" || name == "table") outputs = record_.values[static_cast<size_t>(id)].shape[0];
    }
    LINNET_TRY(about(set_packed(packed->packed, outputs, &call)));
  }
  const auto skipped = [&](const std::string& name) {
    if (packed != nullptr && (name == "weight" || name == "table")) return true;
    return std::any_of(extras.begin(), extras.end(), [&](const Extra& extra) { return extra.name == name; });
  };
  for (const auto& [name, id] : step.inputs) {
    if (!skipped(name)) LINNET_TRY(about(call.set(name, sliced(id, piece))));
  }
  for (const Extra& extra : extras) LINNET_TRY(about(call.set(extra.name, extra.view)));
  const std::string output = run->find_output(step.output) != nullptr ? step.output : "out";  // a decode form may have one
  const View result = elsewhere != nullptr ? *elsewhere : sliced(step.result, piece);
  LINNET_TRY(about(call.set(output, result)));
  LINNET_TRY(about(call.prepare()));
  View expected;
  LINNET_TRY(about(call.output_view(output, &expected)));
  const bool any_type = op.name == "embedding";  // of its table's type or f32, as the caller wants it
  bool same = expected.rank == result.rank && (expected.dtype == result.dtype || any_type);
  for (int i = 0; same && i < result.rank; ++i) same = expected.size[i] == result.size[i];
  if (!same) {
    return bad_input(record_.name + ": " + step.name + " gives " + dtype_name(expected.dtype) + " where the record has " +
                     dtype_name(result.dtype));
  }
  const Context context{.executor = executor_, .impl = options_.impl.empty() ? nullptr : options_.impl.c_str()};
  std::unique_ptr<ReadyOp> ready;
  LINNET_TRY(about(ReadyOp::make(call, context, options_.device, &ready)));
  plan_->workspace_ = std::max(plan_->workspace_, ready->impl->workspace(ready->args(), Pass::forward, executor_->workers()));

  const auto address = [&](const std::string& name) { return ready->tensor(name); };
  for (const auto& [name, id] : step.inputs) {
    if (!skipped(name)) patch(id, *address(name), &address(name)->data);
  }
  for (const Extra& extra : extras) {
    if (extra.state >= 0) {
      plan_->patches_.push_back({Plan::Root::state, piece_index, extra.state, 0, &address(extra.name)->data});
    }
  }
  if (elsewhere == nullptr) patch(step.result, *address(output), &address(output)->data);
  if (position != nullptr && piece != nullptr) {
    plan_->position_patches_.push_back(
        {piece_index, reinterpret_cast<int64_t*>(static_cast<char*>(ready->args()) + position->offset)});
  }
  plan_->actions_.push_back({Plan::Kind::op, static_cast<int>(plan_->ops_.size())});
  plan_->ops_.push_back(std::move(ready));
  return {};
}

// Numbers of another type, on all threads.
Status PlanBuilder::add_cast(const View& from, int from_id, const View& to, int to_id) {
  if (to.elements() == 0) return {};
  MapProgram identity;
  LINNET_TRY(parse_map("x", {"x"}, &identity));
  return add_map(identity, {{from, from_id}}, to, to_id, nullptr, -1);
}

Status PlanBuilder::add_attention(const Step& step, const Op& op, const std::vector<Setting>& settings, const Piece* piece,
                                  int piece_index, std::vector<Extra> extras) {
  const Dtype dtype = attention_type(step, options_.activations, options_.attention);
  if (dtype == options_.activations) return add_op(step, op, settings, piece, piece_index, extras);
  char* place = arena_ + narrow_;
  const auto narrow = [&](const View& wide) {
    const View view = placed(place, dtype, wide.size, wide.rank);
    place += aligned(bytes_of(view));
    return view;
  };
  for (const auto& [name, id] : step.inputs) {
    const std::string& input = name;
    const bool given = std::any_of(extras.begin(), extras.end(), [&](const Extra& extra) { return extra.name == input; });
    if (given || op.find_input(name)->element != Element::io) continue;
    const View wide = sliced(id, piece), view = narrow(wide);
    LINNET_TRY(add_cast(wide, id, view, -1));
    extras.push_back({name, view});
  }
  const View wide = sliced(step.result, piece), result = narrow(wide);
  LINNET_TRY(add_op(step, op, settings, piece, piece_index, extras, &result));
  return add_cast(result, -1, wide, step.result);
}

Status PlanBuilder::add_map(const MapProgram& program, const std::vector<std::pair<View, int>>& inputs, const View& out,
                            int out_id, const Piece* piece, int piece_index) {
  auto ready = std::make_unique<Plan::ReadyMap>();
  ready->program = program;
  MapCall& call = ready->call;
  call.program = &ready->program;
  // The result's dimensions, the row last; where the program drops, the row is of the inputs alone.
  int64_t size[kMapRank + 1];
  int rank = out.rank + (program.drops ? 1 : 0);
  for (int d = 0; d < out.rank; ++d) size[d] = out.size[d];
  if (program.drops) {
    size[rank - 1] = 1;
    for (const auto& [view, id] : inputs) size[rank - 1] = std::max(size[rank - 1], view.size[view.rank - 1]);
  }
  if (rank == 0) {
    size[0] = 1;
    rank = 1;
  }
  const size_t count = inputs.size();
  const bool positional = static_cast<int>(count) < program.inputs;
  std::vector<std::vector<int64_t>> strides(static_cast<size_t>(program.inputs) + 1, std::vector<int64_t>(kMapRank + 1, 0));
  for (size_t i = 0; i < count; ++i) {
    const View& view = inputs[i].first;
    call.input[i] = {view.data, view.dtype, {}};
    for (int d = 0; d < view.rank; ++d) {
      const int to = d + rank - view.rank;
      strides[i][static_cast<size_t>(to)] = view.size[d] == 1 && size[to] != 1 ? 0 : view.stride[d];
    }
  }
  if (positional) {
    auto positions = std::make_unique<Plan::Positions>();
    positions->piece = piece_index;
    const int64_t tokens = piece != nullptr ? piece->tokens : call_->tokens;
    const bool wide = options_.activations == Dtype::f64;
    if (wide) {
      positions->f64.resize(static_cast<size_t>(tokens));
    } else {
      positions->f32.resize(static_cast<size_t>(tokens));
    }
    void* data = wide ? static_cast<void*>(positions->f64.data()) : positions->f32.data();
    if (options_.device == Device::cuda) {
      plan_->gpu_memory_.emplace_back();
      LINNET_TRY(take_memory(Device::cuda, tokens * 4, &plan_->gpu_memory_.back()));
      positions->on_gpu = reinterpret_cast<float*>(plan_->gpu_memory_.back().get());
      data = positions->on_gpu;
    }
    call.input[count] = {data, wide ? Dtype::f64 : Dtype::f32, {}};
    strides[count][1] = 1;
    plan_->positions_.push_back(std::move(positions));
  }
  std::vector<int64_t>& result = strides[static_cast<size_t>(program.inputs)];
  for (int d = 0; d < out.rank; ++d) result[static_cast<size_t>(d)] = out.stride[d];
  call.out = {out.data, out.dtype, {}};
  // Neighbouring dimensions that every tensor walks as one become one; those of size 1 vanish.
  const auto remove = [&](int d) {
    for (int i = d; i + 1 < rank; ++i) size[i] = size[i + 1];
    for (auto& stride : strides) stride.erase(stride.begin() + d), stride.push_back(0);
    --rank;
  };
  const int fixed = program.reduces ? 1 : 0;  // rows stay rows
  for (int d = rank - 1 - fixed; d >= 0; --d) {
    if (rank > 1 && size[d] == 1) remove(d);
  }
  for (int d = rank - 2; d >= 0; --d) {
    if (program.reduces && d + 1 == rank - 1) continue;
    bool one = true;
    for (const auto& stride : strides) {
      one &= stride[static_cast<size_t>(d)] == stride[static_cast<size_t>(d) + 1] * size[d + 1];
    }
    if (!one) continue;
    size[d + 1] *= size[d];
    remove(d);
  }
  if (rank > kMapRank) return bad_input(record_.name + ": a map of rank " + std::to_string(rank));
  call.rank = rank;
  for (int d = 0; d < rank; ++d) {
    call.size[d] = size[d];
    for (int i = 0; i < program.inputs; ++i) call.input[i].stride[d] = strides[static_cast<size_t>(i)][static_cast<size_t>(d)];
    call.out.stride[d] = result[static_cast<size_t>(d)];
  }
  MapWorkspace workspace = nullptr;
  LINNET_TRY(map_kernel(options_.device, &ready->forward, &workspace));
  plan_->workspace_ = std::max(plan_->workspace_, workspace(call, executor_->workers()));
  for (size_t i = 0; i < count; ++i) {
    if (inputs[i].second >= 0) patch(inputs[i].second, inputs[i].first, &call.input[i].data);
  }
  if (out_id >= 0) patch(out_id, out, &call.out.data);
  plan_->actions_.push_back({Plan::Kind::map, static_cast<int>(plan_->maps_.size())});
  plan_->maps_.push_back(std::move(ready));
  return {};
}

void PlanBuilder::add_copy(const View& from, const View& to) {
  plan_->actions_.push_back({Plan::Kind::copy, static_cast<int>(plan_->copies_.size())});
  plan_->copies_.push_back(std::make_unique<Plan::Copy>(Plan::Copy{from, to}));
}

void PlanBuilder::add_lengths(const View& lengths, int piece, int64_t value) {
  plan_->actions_.push_back({Plan::Kind::lengths, static_cast<int>(plan_->lengths_.size())});
  plan_->lengths_.push_back(lengths);
  plan_->length_pieces_.push_back(piece);
  plan_->length_values_.push_back(value);
}

Status PlanBuilder::add_experts(const Step& step) {
  auto experts = std::make_unique<Experts>();
  experts->x = value(step.inputs[0].second);
  experts->weights = value(step.inputs[1].second);
  experts->out = value(step.result);
  std::vector<const Weight*> list;
  for (size_t i = 2; i < step.inputs.size(); ++i) {
    list.push_back(&weights_[static_cast<size_t>(record_.values[static_cast<size_t>(step.inputs[i].second)].index)]);
  }
  std::vector<Experts::Parts> parts;
  for (size_t i = 0; i < list.size(); i += 3) parts.push_back({list[i], list[i + 1], list[i + 2]});
  const Status made =
      experts->make(step, parts, inner_of(record_, step), options_, *executor_, arena_ + temporary_, &plan_->workspace_);
  if (!made.ok()) return {made.code(), record_.name + ": " + step.name + ": " + made.message()};
  patch(step.inputs[0].second, experts->x, &experts->x.data);
  patch(step.inputs[1].second, experts->weights, &experts->weights.data);
  patch(step.result, experts->out, &experts->out.data);
  plan_->actions_.push_back({Plan::Kind::experts, static_cast<int>(plan_->experts_.size())});
  plan_->experts_.push_back(std::move(experts));
  return {};
}

Status PlanBuilder::add_step(int index) {
  const Step& step = record_.steps[static_cast<size_t>(index)];
  if (step.kind == StepKind::view) return {};
  if (step.kind == StepKind::experts) return add_experts(step);
  const bool in_pieces = !call_->pieces.empty();
  if (step.kind == StepKind::concat) {
    MapProgram identity;
    LINNET_TRY(parse_map("x", {"x"}, &identity));
    View target = value(step.result);
    const int last = target.rank - 1;
    const int64_t width = record_.values[static_cast<size_t>(step.inputs[0].second)].shape.back();
    for (size_t i = 0; i < 2; ++i) {
      const View from = value(step.inputs[i].second);
      View to = target;
      to.size[last] = from.size[last];
      if (step.interleaved) to.stride[last] = 2;
      to.data = at(target, i == 0 ? 0 : step.interleaved ? 1 : width);
      LINNET_TRY(add_map(identity, {{from, step.inputs[i].second}}, to, step.result, nullptr, -1));
    }
    return {};
  }
  if (step.kind == StepKind::map) {
    const auto one = [&](const Piece* piece, int number) {
      std::vector<std::pair<View, int>> inputs;
      for (const auto& [name, id] : step.inputs) inputs.emplace_back(sliced(id, piece), id);
      return add_map(step.program, inputs, sliced(step.result, piece), step.result, piece, number);
    };
    if (!step.positional || !in_pieces) return one(nullptr, -1);
    for (size_t p = 0; p < call_->pieces.size(); ++p) {
      if (call_->pieces[p].tokens > 0) LINNET_TRY(one(&call_->pieces[p], static_cast<int>(p)));
    }
    return {};
  }
  if (!is_tokenwise(*step.op)) return add_memory_step(index, step);
  if (position_option(*step.op) == nullptr || !in_pieces) return add_op(step, *step.op, step.options, nullptr, 0, {});
  for (size_t p = 0; p < call_->pieces.size(); ++p) {
    if (call_->pieces[p].tokens > 0) {
      LINNET_TRY(add_op(step, *step.op, step.options, &call_->pieces[p], static_cast<int>(p), {}));
    }
  }
  return {};
}

Status PlanBuilder::build(const Shape4Call& call, char* arena, Plan* plan) {
  call_ = &call;
  arena_ = arena;
  plan_ = plan;
  plan->offsets_ = call.offsets;
  plan->device_ = options_.device;
  LINNET_TRY(take_memory(options_.device, folded_bytes_ + kAlign, &plan->folded_));
  constants_.assign(record_.values.size(), View());
  for (size_t i = 0; i < record_.values.size(); ++i) {
    const ValueInfo& info = record_.values[i];
    if (info.source != Source::constant) continue;
    const size_t count = std::max<size_t>(info.table.size(), 1);
    plan->constants_.push_back(std::make_unique<std::vector<double>>(count));
    View view = dense_view(info, plan->constants_.back()->data());
    view.device = Device::cpu;
    for (size_t j = 0; j < info.table.size(); ++j) store_f64(view.data, view.dtype, static_cast<int64_t>(j), info.table[j]);
    if (info.table.empty()) store_f64(view.data, view.dtype, 0, info.constant);
    if (options_.device == Device::cuda) {
      plan->gpu_memory_.emplace_back();
      LINNET_TRY(take_memory(Device::cuda, static_cast<int64_t>(count) * 8, &plan->gpu_memory_.back()));
      LINNET_TRY(cuda::copy_to_device(plan->gpu_memory_.back().get(), view.data, static_cast<int64_t>(count) * 8));
      view.data = plan->gpu_memory_.back().get();
      view.device = Device::cuda;
    }
    if (info.table.empty()) {
      for (int d = 0; d < view.rank; ++d) view.stride[d] = 0;
    }
    constants_[i] = view;
  }
  MapProgram identity;
  LINNET_TRY(parse_map("x", {"x"}, &identity));
  for (size_t i = 0; i < record_.inputs.size(); ++i) {
    if (!needs_cast(static_cast<int>(i))) continue;
    const View& from = call.inputs[i];
    const int id = record_.inputs[i];
    LINNET_TRY(add_map(identity, {{from, -1}}, value(id), -1, nullptr, -1));
    plan->patches_.push_back({Plan::Root::input, static_cast<int>(i), 0, 0, &plan->maps_.back()->call.input[0].data});
  }
  for (size_t s = 0; s < record_.steps.size(); ++s) {
    const size_t before = plan->actions_.size();
    LINNET_TRY(add_step(static_cast<int>(s)));
    if (!folded_[static_cast<size_t>(record_.steps[s].result)]) continue;
    plan->once_.insert(plan->once_.end(), plan->actions_.begin() + static_cast<int64_t>(before), plan->actions_.end());
    plan->actions_.resize(before);
  }
  if (output_root_ < 0) {
    LINNET_TRY(add_map(identity, {{value(record_.output), record_.output}}, call.out, -1, nullptr, -1));
    plan->patches_.push_back({Plan::Root::output, 0, 0, 0, &plan->maps_.back()->call.out.data});
  }
  for (size_t i = 0; i < record_.values.size(); ++i) plan->values_.push_back(value(static_cast<int>(i)));
  return {};
}

}  // namespace linnet::layers
