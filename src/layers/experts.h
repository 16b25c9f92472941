// Experts: a mixture of feed-forwards (StepKind::experts) as part of a plan.
//
//   y[t] = sum over the chosen e of w[t, e] down_e (act(gate_e x[t]) * up_e x[t])
//
// Each token chooses the `top` experts of its largest weights. The tokens of a call are grouped by expert: those of one expert
// are gathered, run through its three products as one dense call each, and added to the result, expert by expert in ascending
// order. Weights of an expert that no token chose are not read. Where every sequence of the call has one token, each row is
// multiplied as a sequence of its own: what else is decoded beside it changes no bit of it.
#pragma once

#include <memory>
#include <vector>

#include "core/launch.h"
#include "layers/ready.h"
#include "layers/record.h"

namespace linnet::layers {

class Experts {
 public:
  struct Parts {
    const Weight *gate, *up, *down;
  };
  View x, weights, out;  // [B, T, C], [B, T, E] in f32 (f64 in an f64 run), [B, T, C]: their addresses may change between runs

  // Bytes that a run needs between its products, for so many rows (B T) of x.
  static int64_t room_bytes(int64_t rows, int64_t channels, int64_t inner, Dtype dtype);
  // x, weights and out are set. `list` and `room` outlive the plan; `workspace` grows to what the products need.
  Status make(const Step& step, const std::vector<Parts>& list, int64_t inner, const RunnerOptions& options, Executor& executor,
              char* room, int64_t* workspace);
  void run(const Launch& launch);

 private:
  struct Room {  // rows of x that are gathered, what lies between the products, the result in more bits than its type has
    char *x, *gate, *up, *inner, *y, *sums;
  };
  static Room cut(Arena& arena, int64_t rows, int64_t channels, int64_t inner, Dtype dtype);
  // The product of one matrix of every expert. Experts whose weights are held alike share a call.
  struct Product {
    std::vector<const Weight*> weights;
    std::vector<int> forms;  // of each expert: its call
    std::vector<std::unique_ptr<ReadyOp>> calls;
  };
  struct Choice {
    int64_t row;
    double weight;
  };

  Status make_product(std::vector<const Weight*> list, const View& from, const View& to, const RunnerOptions& options,
                      const Context& context, Product* product);
  int64_t rows() const { return x.size[0] * x.size[1]; }
  void choose(const Launch& launch);
  void multiply(const Product& product, size_t expert, int64_t count, const Launch& launch) const;
  void resize(View* view, int64_t count) const;

  int64_t top_ = 0, experts_ = 0;
  bool normalised_ = false;
  bool single_ = false;  // one token for each sequence
  Room room_ = {};
  Product gate_, up_, down_;
  std::unique_ptr<ReadyOp> glu_;
  std::vector<int32_t> chosen_;         // [rows, top]
  std::vector<double> chosen_weights_;  // [rows, top]
  std::vector<int64_t> begin_;          // [experts + 1]: where the choices of an expert begin
  std::vector<Choice> choices_;         // by expert, then by row
};

}  // namespace linnet::layers
