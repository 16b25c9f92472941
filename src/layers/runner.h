// Runner: runs a record (record.h) on weights.
//
//   Runner runner;
//   LINNET_TRY(Runner::make(std::move(record), {}, &runner));
//   LINNET_TRY(runner.bind("q_proj.weight", view));                 // f32, bf16, f16: dense reads it where it lies
//   LINNET_TRY(runner.bind("o_proj.weight", Quantised{...}));       // 8 or 4 bits
//   LINNET_TRY(runner.run(x, out));                                 // x [B, T, C]: all tokens at once, nothing is kept
//
//   State a, b;                                                     // two sessions
//   LINNET_TRY(runner.make_state(1, 4096, &a));
//   LINNET_TRY(runner.run(prompt_a, out_a, {&a}));                  // a prompt, or a piece of one: x [1, T, C]
//   LINNET_TRY(runner.run(prompt_b, out_b, {&b}));
//   LINNET_TRY(runner.run(tokens, out, {&a, &b}));                  // decode, both in one call: x [2, 1, C]
//
// Products and norms run on all rows of a call together; operators with a state run once for each State on its rows.
// The results of a prompt at once, in pieces and token by token agree within rounding.
//
// Operators, views, memory and workspace are resolved once for each shape of a call and kept, so that a step of a decode call
// costs little beyond its kernel. Intermediate values are held in `activations` (f32; f64 in an f64 run), whatever the types
// of x, of out and of the weights are, in one arena that is shared by values whose lives do not overlap.
//
// A Runner runs one call at a time; several may share weights, which are views. Weights that no operator reads as they are
// (a bf16 A_log, an address off its element) are converted once into memory of the runner.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "../core/op.h"
#include "memory.h"
#include "record.h"
#include "state.h"

namespace linnet::layers {

// Weights of a dense step in 8 or 4 bits (mechanisms/dense/dense.h): the inputs of dense_quantised.
struct Quantised {
  View codes, scale, offset;      // offset: absent where the codes count from the middle
  int bits = 8;                   // 8 or 4
  std::string rounding = "none";  // int8: x is rounded to 8 bits too, and the products run on integers
};

struct RunnerOptions {
  Dtype activations = Dtype::f32;  // f64, f32, bf16 or f16: of the values between the steps
  Dtype attention = Dtype::f32;    // bf16 or f16: softmax steps round q, k, v to it, and their caches hold it; else as the rest
  std::string impl;                // of every operator; empty: the best
  std::string rounding = "none";   // of dense steps with float weights: none, or bf16
  // cuda: weights are copied to the GPU when they are bound, values and states lie there; x and out of a call stay on the host.
  Device device = Device::cpu;
  std::shared_ptr<Uploads> uploads;  // cuda: of runners that share weights; absent: the runner's own
};

class Runner {
 public:
  Runner();
  ~Runner();
  Runner(Runner&&) noexcept;
  Runner& operator=(Runner&&) noexcept;

  static Status make(Record record, const RunnerOptions& options, Runner* runner);
  const Record& record() const;

  // A view that outlives the runner. Its shape must be the parameter's, but for dimensions of 1 and flattened heads.
  Status bind(std::string_view name, const View& weight);
  Status bind(std::string_view name, const Quantised& weight);
  // A copy in the type of the activations.
  Status bind_values(std::string_view name, const std::vector<double>& values);
  // Initial values for every parameter that is not bound.
  Status bind_initial(uint64_t seed);
  // The same for what is not trained (fixed decays, random directions), which checkpoints may leave out.
  Status bind_buffers();
  std::vector<std::string> unbound() const;

  Status make_state(int64_t rows, int64_t capacity, State* state) const;
  // Room for so many more tokens, at once: a call makes room for its own tokens by itself.
  Status reserve(State* state, int64_t tokens) const;
  // x, or all inputs of the record in their order. The rows of the States together are the rows of x; no State: the tokens are
  // run at once and nothing is kept. On failure no state has changed.
  Status run(const View& x, const View& out, const std::vector<State*>& states = {}, const Context& context = {});
  Status run(const std::vector<View>& inputs, const View& out, const std::vector<State*>& states = {},
             const Context& context = {});
  // Sequences end to end: x [1, total, C], offsets [n + 1] from 0 to total. Each is run on its own.
  Status run_packed(const View& x, const std::vector<int64_t>& offsets, const View& out, const Context& context = {});

  int64_t arena_bytes() const;  // of the largest call so far
  // A named value of the last call without states, for tests: dtype, shape and data; only with LINNET's arena kept whole.
  Status keep_values(bool keep);
  Status value(std::string_view name, View* view) const;

 private:
  struct Inner;
  std::unique_ptr<Inner> inner_;
};

}  // namespace linnet::layers
