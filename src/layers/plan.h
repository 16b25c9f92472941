// Plan: a record resolved for one shape of a call: operators chosen, arguments checked, every intermediate value at its place
// in the arena. Used by runner.cc alone.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "layers/experts.h"
#include "layers/ready.h"
#include "layers/record.h"
#include "layers/runner.h"
#include "layers/state.h"

namespace linnet::layers {

// The part of a call that one State serves, or one packed sequence.
struct Piece {
  int64_t row = 0, rows = 0, token = 0, tokens = 0;
  State* state = nullptr;
  int64_t position = 0;
};

struct Shape4Call {
  int64_t batch = 0, tokens = 0;
  std::vector<View> inputs;
  View out;
  std::vector<Piece> pieces;
  std::vector<int64_t> offsets;  // packed sequences; empty: none
  bool with_states = false;
  bool decode = false;  // operators with a state run in their decode form
};

class Plan {
 public:
  // Runs the steps on these tensors and states, which have the plan's shapes.
  Status run(const Shape4Call& call, Executor* executor, char* workspace);
  int64_t workspace_bytes() const { return workspace_; }
  Status view_of(const Record& record, std::string_view name, View* view) const;

 private:
  friend class PlanBuilder;

  struct ReadyMap {
    MapProgram program;
    MapCall call;
    void (*forward)(const MapCall& call, const Launch& launch) = nullptr;
  };
  struct Copy {  // of equal shapes and types
    View from, to;
  };
  enum class Kind { op, map, copy, lengths, experts };
  struct Action {
    Kind kind;
    int index;
  };
  void run(const Action& action, const Shape4Call& call, const Launch& launch);
  // Where the address of an input, the output or a state goes before a run.
  enum class Root { none, input, output, state };
  struct Patch {
    Root root;
    int index;       // of the input; of the piece for a state
    int tensor;      // of the state
    int64_t bytes;   // behind the root's address
    void** address;  // in args, out, a map's call or a copy
  };
  struct PositionPatch {
    int piece;
    int64_t* option;
  };
  struct Positions {
    int piece;
    std::vector<float> f32;
    std::vector<double> f64;
    float* on_gpu = nullptr;  // in place of f32, whose size counts
  };

  std::vector<std::unique_ptr<ReadyOp>> ops_;
  std::vector<std::unique_ptr<ReadyMap>> maps_;
  std::vector<std::unique_ptr<Copy>> copies_;
  std::vector<std::unique_ptr<Experts>> experts_;
  std::vector<View> lengths_;  // of caches that a forward operator has filled
  std::vector<int> length_pieces_;
  std::vector<int64_t> length_values_;  // -1: position + tokens
  std::vector<Action> actions_;
  std::vector<Action> once_;  // what depends on parameters alone: before the first run
  std::shared_ptr<char> folded_;
  bool ready_ = false;
  std::vector<Patch> patches_;
  std::vector<PositionPatch> position_patches_;
  std::vector<std::unique_ptr<Positions>> positions_;
  std::vector<View> values_;
  std::vector<std::unique_ptr<std::vector<double>>> constants_;
  std::vector<std::shared_ptr<char>> gpu_memory_;  // of constants and positions
  Device device_ = Device::cpu;
  std::vector<int64_t> offsets_;
  int64_t workspace_ = 0;
};

class PlanBuilder {
 public:
  PlanBuilder(const Record& record, const std::vector<Weight>& weights, const RunnerOptions& options, Executor* executor)
      : record_(record), weights_(weights), options_(options), executor_(executor) {}
  // Bytes of arena that the call needs; then the plan on an arena of at least that size.
  int64_t layout(const Shape4Call& call, bool keep_values);
  Status build(const Shape4Call& call, char* arena, Plan* plan);

 private:
  struct Place {
    int64_t offset = 0, bytes = 0;
  };
  // How an operator with a state runs: its decode form; its own form with states in and out, with caches, or with states out.
  enum class Memory { decode, states, cache, finals };
  // A tensor of an operator that is no value of the record: a state, offsets.
  struct Extra {
    std::string name;
    View view;
    int state = -1;  // of the piece's State, when it is one of its tensors
  };

  Dtype dtype_of(const ValueInfo& info) const;
  int64_t size_of(int64_t size) const { return size == kB ? call_->batch : size == kT ? call_->tokens : size; }
  View dense_view(const ValueInfo& info, void* data) const;
  View placed(void* data, Dtype dtype, const int64_t* sizes, int rank) const;  // a dense tensor of the runner's memory
  View value(int id) const;
  View sliced(int id, const Piece* piece) const;
  int root_of(int id) const;
  bool needs_cast(int input) const;
  void find_folded();
  // result: where the operator's output goes instead of the step's value.
  Status add_op(const Step& step, const Op& op, const std::vector<Setting>& settings, const Piece* piece, int piece_index,
                const std::vector<Extra>& extras, const View* result = nullptr);
  // The same for a softmax step that runs in fewer bits than the rest: inputs that are no extras are rounded on the way in.
  Status add_attention(const Step& step, const Op& op, const std::vector<Setting>& settings, const Piece* piece,
                       int piece_index, std::vector<Extra> extras);
  Status add_cast(const View& from, int from_id, const View& to, int to_id);
  Status add_map(const MapProgram& program, const std::vector<std::pair<View, int>>& inputs, const View& out, int out_id,
                 const Piece* piece, int piece_index);
  Status add_step(int index);
  Status add_memory_step(int index, const Step& step);
  Status add_experts(const Step& step);
  void add_copy(const View& from, const View& to);
  void add_lengths(const View& lengths, int piece, int64_t value);
  Status add_bounded(const Step& step, const Piece& piece, int number, const std::vector<int>& states, const CacheBound& bound);
  void patch(int id, const View& view, void** address);
  Memory memory_of(const Op& op, const Piece& piece, const std::vector<int>& states) const;

  const Record& record_;
  const std::vector<Weight>& weights_;
  const RunnerOptions& options_;
  Executor* executor_;
  const Shape4Call* call_ = nullptr;
  std::vector<Place> places_;  // of values that own memory
  std::vector<View> constants_;
  std::vector<bool> folded_;  // values that depend on parameters alone
  int64_t folded_bytes_ = 0;
  int64_t temporary_ = 0;  // where final states of one step lie, or what its experts need,
  int64_t narrow_ = 0;     // and rounded operands of a softmax step
  int output_root_ = -1;   // the value that lies in the caller's out
  bool copy_out_ = false;
  char* arena_ = nullptr;
  Plan* plan_ = nullptr;
};

}  // namespace linnet::layers
