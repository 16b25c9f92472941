// A run of a plan: addresses and positions of this call, then one action behind the other.
#include <cstring>

#include "core/cuda/driver.h"
#include "layers/map_cuda.h"
#include "layers/plan.h"

namespace linnet::layers {
namespace {

void copy_box(const View& from, const View& to, int dimension, const char* source, char* target) {
  const int64_t bytes = dtype_size(from.dtype);
  if (dimension == from.rank) {
    std::memcpy(target, source, static_cast<size_t>(bytes));
    return;
  }
  const bool row = dimension == from.rank - 1 && from.stride[dimension] == 1 && to.stride[dimension] == 1;
  if (row) {
    std::memcpy(target, source, static_cast<size_t>(from.size[dimension] * bytes));
    return;
  }
  for (int64_t i = 0; i < from.size[dimension]; ++i) {
    copy_box(from, to, dimension + 1, source + i * from.stride[dimension] * bytes, target + i * to.stride[dimension] * bytes);
  }
}
void copy_view(const View& from, const View& to) {
  copy_box(from, to, 0, static_cast<const char*>(from.data), static_cast<char*>(to.data));
}

}  // namespace

Status Plan::run(const Shape4Call& call, Executor* executor, char* workspace) {
  for (const Patch& patch : patches_) {
    const void* base = nullptr;
    switch (patch.root) {
      case Root::none: continue;
      case Root::input: base = call.inputs[static_cast<size_t>(patch.index)].data; break;
      case Root::output: base = call.out.data; break;
      case Root::state: {
        const State& state = *call.pieces[static_cast<size_t>(patch.index)].state;
        base = state.tensors()[static_cast<size_t>(patch.tensor)].view.data;
        break;
      }
    }
    *patch.address = const_cast<char*>(static_cast<const char*>(base)) + patch.bytes;
  }
  for (const PositionPatch& patch : position_patches_) {
    *patch.option = call.pieces[static_cast<size_t>(patch.piece)].position;
  }
  const char* error = nullptr;
  Launch launch;
  launch.executor = executor;
  launch.workers = executor->workers();
  launch.workspace = workspace;
  launch.error = &error;
  const cuda::Scope scope(device_ == Device::cuda ? workspace : nullptr);
  if (device_ == Device::cuda) LINNET_TRY(scope.status());
  for (const auto& positions : positions_) {
    const int64_t first = positions->piece < 0 ? 0 : call.pieces[static_cast<size_t>(positions->piece)].position;
    if (positions->on_gpu != nullptr) {
      cuda::fill_positions(positions->on_gpu, static_cast<int64_t>(positions->f32.size()), first, launch);
      continue;
    }
    for (size_t i = 0; i < positions->f32.size(); ++i) positions->f32[i] = static_cast<float>(first + static_cast<int64_t>(i));
    for (size_t i = 0; i < positions->f64.size(); ++i) positions->f64[i] = static_cast<double>(first + static_cast<int64_t>(i));
  }
  if (!ready_) {
    for (const Action& action : once_) run(action, call, launch);
    ready_ = true;
  }
  for (const Action& action : actions_) run(action, call, launch);
  return error == nullptr ? Status() : impossible(std::string("the CUDA driver refused a kernel: ") + error);
}

void Plan::run(const Action& action, const Shape4Call& call, const Launch& launch) {
  const size_t index = static_cast<size_t>(action.index);
  switch (action.kind) {
    case Kind::op: ops_[index]->run(launch); break;
    case Kind::experts: experts_[index]->run(launch); break;
    case Kind::map: maps_[index]->forward(maps_[index]->call, launch); break;
    case Kind::copy:
      if (device_ == Device::cuda) {
        cuda::copy_view(copies_[index]->from, copies_[index]->to, launch);
      } else {
        copy_view(copies_[index]->from, copies_[index]->to);
      }
      break;
    case Kind::lengths: {
      const Piece& piece = call.pieces[static_cast<size_t>(length_pieces_[index])];
      int64_t* lengths = static_cast<int64_t*>(lengths_[index].data);
      const int64_t value = length_values_[index] < 0 ? piece.position + piece.tokens : length_values_[index];
      if (device_ == Device::cuda) return cuda::fill_lengths(lengths_[index], value, launch);
      for (int64_t i = 0; i < lengths_[index].size[0]; ++i) lengths[i] = value;
      break;
    }
  }
}

Status Plan::view_of(const Record& record, std::string_view name, View* view) const {
  for (size_t i = 0; i < record.values.size() && i < values_.size(); ++i) {
    if (record.values[i].name != name) continue;
    *view = values_[i];
    return {};
  }
  return bad_input(record.name + ": there is no value '" + std::string(name) + "'");
}

}  // namespace linnet::layers
