// State: what a record remembers of the tokens it has seen: the states of its operators and its caches, for one or more rows
// of a batch that have seen equally many tokens. Sequences of different lengths have a State each.
//
//   State state;
//   LINNET_TRY(runner.make_state(1, 4096, &state));        // one row; caches for 4096 tokens, which grow when they are full
//   LINNET_TRY(state.copy(&other));
//
// The tensors are the inputs that the operators' decode forms declare as overwritten, named <step>.<tensor>; the first
// dimension counts rows. Save and restore them by name to keep a session.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "../core/status.h"
#include "../core/view.h"
#include "record.h"

namespace linnet::layers {

struct StateTensor {
  std::string name;   // <step>.<tensor>
  int step = 0;       // of the record
  std::string input;  // of the decode operator
  View view;          // [rows, ..]
};

class State {
 public:
  State() = default;
  State(State&&) = default;
  State& operator=(State&&) = default;  // copies are made by copy(): they are megabytes

  int64_t rows() const { return rows_; }
  int64_t position() const { return position_; }  // tokens so far
  int64_t capacity() const { return capacity_; }  // tokens that fit before caches grow
  int64_t bytes() const;
  const std::vector<StateTensor>& tensors() const { return tensors_; }
  Status copy(State* to) const;
  Status reset();  // as before the first token
  // For whoever fills the tensors from a file.
  void set_position(int64_t position) { position_ = position; }

 private:
  friend class Runner;
  friend class PlanBuilder;
  State(const State&) = default;
  int64_t rows_ = 0, position_ = 0, capacity_ = 0;
  const void* owner_ = nullptr;  // the runner it belongs to
  std::vector<StateTensor> tensors_;
  std::vector<std::shared_ptr<char>> memory_;
  std::vector<const Op*> ops_;  // the decode operator of each tensor
};

// How a step with a memory is continued: the decode operator and its options; a sentence when it cannot be.
struct Continuation {
  const Op* op = nullptr;
  std::vector<Setting> options;
};
Status continuation(const Record& record, const Step& step, Continuation* result);
// A causal step with a window of keys remembers no more than it can still see: the first `prefix` keys and the last `left`
// ones, and room for a few more behind them. When its cache is full, the last `left` keys move up to the prefix; the newest
// keys lie behind each other at any time, so operators see nothing of it. left < 0: the step sees all keys.
struct CacheBound {
  int64_t prefix = 0, left = -1, capacity = 0;
  bool given() const { return left >= 0; }
};
CacheBound cache_bound(const Step& step);
inline constexpr int64_t kDecodeTokens = 4;  // up to so many tokens at once, operators with a state run in their decode form
// Whether every step that needs a state has one.
Status decodable(const Record& record);
// Appends the state tensors of a step for so many rows and tokens; views hold no memory yet.
Status state_tensors(const Record& record, int step, int64_t rows, int64_t capacity, Dtype activations,
                     std::vector<StateTensor>* tensors, Dtype attention = Dtype::f32);
// Bytes of the state of one row after so many tokens (caches sized to them).
Status state_bytes(const Record& record, int64_t tokens, Dtype activations, int64_t* bytes, Dtype attention = Dtype::f32);
// The type that a step's attention runs in (RunnerOptions::attention): softmax steps may run in fewer bits than the rest.
Dtype attention_type(const Step& step, Dtype activations, Dtype attention);
Status fill_initial(const Op& op, const std::string& input, const View& view);

}  // namespace linnet::layers
