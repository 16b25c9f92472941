// Record: a layer, a block or a whole model written down once as a list of named steps.
//
//   Recorder l;
//   Value x = l.input("x", {kB, kT, 64});
//   Value q = l.split(l.dense(x, l.weight("q_proj.weight", {64, 64}, normal(0.02))), 4);       // [B, T, 4, 16]
//   Value g = l.map("sigmoid(b)", {{"b", l.dense(x, l.weight("b_proj.weight", {4, 64}))}});
//   Value y = l.op("delta", {{"q", q}, {"k", q}, {"v", q}, {"beta", g}}, {{"l2_norm", "1"}});
//   l.output(l.join(y));
//   Record record;
//   LINNET_TRY(l.finish(&record));
//
// A step is an operator of the library (its own declaration checks it here and now), a map (a small elementwise expression,
// map.h), a view, or a mixture of experts (experts.h). Sizes are numbers, kB (rows of the batch) or kT (tokens). What follows
// from a record without being told: the parameters, the states of its operators, prefill and decode (runner.h), costs (cost.h),
// JSON (describe.h).
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../core/op.h"
#include "map.h"

namespace linnet::layers {

inline constexpr int64_t kB = -1, kT = -2;  // sizes that a call decides
using Shape = std::vector<int64_t>;

// A tensor of the record. One that is not given() stands for an absent optional input.
struct Value {
  int id = -1;
  bool given() const { return id >= 0; }
};
struct Named {
  std::string name;
  Value value;
};
struct Setting {
  std::string name, text;
};

// How a parameter starts. Rules with two numbers: uniform(a, b), normal of mean a and deviation b, ...
struct Init {
  enum class Rule {
    zeros,
    ones,
    constant,                      // a
    normal,                        // mean a, deviation b
    uniform,                       // a to b
    fan_in,                        // uniform(-a / sqrt(fan in), a / sqrt(fan in))
    xavier,                        // uniform of +-a sqrt(6 / (fan in + fan out))
    identity,                      // 1 on the diagonal of the last two dimensions
    log_uniform,                   // log(uniform(a, b))
    uniform_log,                   // uniform(log a, log b)
    inverse_softplus_log_uniform,  // softplus^-1 of exp(uniform(log a, log b)), at least 1e-4
    log_range,                     // log(1 + index) along the last dimension
    range,                         // a index along the last dimension
    first_one,                     // 1 at the first entry of the last dimension, else 0
    retention,                     // log(1 - 2^(-5 - index))
  };
  Rule rule = Rule::fan_in;
  double a = 1, b = 0;
};
inline Init zeros() { return {Init::Rule::zeros, 0, 0}; }
inline Init ones() { return {Init::Rule::ones, 0, 0}; }
inline Init constant(double x) { return {Init::Rule::constant, x, 0}; }
inline Init normal(double deviation) { return {Init::Rule::normal, 0, deviation}; }
inline Init uniform(double low, double high) { return {Init::Rule::uniform, low, high}; }
inline Init fan_in(double factor = 1) { return {Init::Rule::fan_in, factor, 0}; }
inline Init xavier(double gain = 1) { return {Init::Rule::xavier, gain, 0}; }
inline Init identity() { return {Init::Rule::identity, 0, 0}; }
inline Init log_uniform(double low, double high) { return {Init::Rule::log_uniform, low, high}; }
inline Init uniform_log(double low, double high) { return {Init::Rule::uniform_log, low, high}; }
inline Init inverse_softplus_log_uniform(double low, double high) {
  return {Init::Rule::inverse_softplus_log_uniform, low, high};
}
inline Init log_range() { return {Init::Rule::log_range, 0, 0}; }
inline Init range(double factor) { return {Init::Rule::range, factor, 0}; }
inline Init first_one() { return {Init::Rule::first_one, 0, 0}; }
const char* rule_name(Init::Rule rule);
// The initial values, the same for the same seed and name everywhere.
std::vector<double> initial_values(const Init& init, const Shape& shape, std::string_view name, uint64_t seed);

// The short name that vector files give a parameter; matrices are [in, out] there when transposed.
struct Alias {
  std::string name;
  bool transposed = false;
};
inline Alias as(std::string name) { return {std::move(name), false}; }
inline Alias transposed(std::string name) { return {std::move(name), true}; }

struct Parameter {
  std::string name, doc;
  Shape shape;
  Init init;
  Alias alias;
  bool trained = true;      // false: a statistic or a fixed draw (a buffer in Python)
  bool dense_only = false;  // read by dense steps alone: any float type, or quantised, as it lies
  Value value;
};

enum class StepKind { op, map, view, concat, experts };
enum class ViewKind { split, join, slice, reshape, last, column, drop_token };

struct Step {
  StepKind kind = StepKind::op;
  std::string name;                                 // unique in the record; names the state
  const Op* op = nullptr;                           // kind op
  std::vector<std::pair<std::string, int>> inputs;  // (the operator's or the expression's name, value)
  std::vector<Setting> options;                     // kind op; experts: those of glu
  std::string output;                               // the operator's output that is taken
  std::string expression;                           // kind map
  MapProgram program;
  bool positional = false;                  // a map that reads `position`
  ViewKind view = ViewKind::split;          // kind view
  int64_t begin = 0, size = 0, stride = 1;  // slice: the channels; split: heads
  bool interleaved = false;                 // kind concat: a0 b0 a1 b1 .. instead of a0 a1 .. b0 b1 ..
  int64_t top = 0;                          // kind experts: how many each token runs,
  bool normalised = false;                  // and whether their weights are divided by their sum
  int result = -1;                          // value
};

// The matrices of a gated feed-forward: down (act(gate x) * up x).
struct Expert {
  Value gate, up, down;  // [inner, C], [inner, C], [C, inner]
};

enum class Source { input, parameter, constant, step };

struct ValueInfo {
  std::string name;
  Shape shape;
  Source source = Source::step;
  int index = 0;          // of the parameter or the step
  bool acc = false;       // f32 whatever the call's type: what operators declare as acc or param
  bool integers = false;  // i64: tokens
  double constant = 0;
  std::vector<double> table;  // of a constant that is a row of numbers
};

struct Record {
  std::string name;
  std::vector<Setting> options;
  std::vector<ValueInfo> values;
  std::vector<Step> steps;
  std::vector<Parameter> parameters;
  std::vector<int> inputs;  // values
  int output = -1;          // value
  int64_t tokens = 0;       // the only legal number of tokens; 0: any

  const Parameter* find_parameter(std::string_view name) const;
  int64_t parameter_count() const;  // numbers in all trained parameters
};

// Whether an operator treats every token alone, so that it needs no state: norms, products, gates.
bool is_tokenwise(const Op& op);
// Whether one of the layer's operators has a state that only grows: the gates of core/tolerance.h are then wider.
bool grows(const Record& record);
// Whether it reads the number of the token through an option (rotary: offset).
const OptionDecl* position_option(const Op& op);

class Recorder {
 public:
  explicit Recorder(std::string name = "layer") { record_.name = std::move(name); }

  Value input(std::string name, Shape shape, bool integers = false);
  // Names are below the scopes that are open: Scope block(l, "layers.0").
  Value weight(std::string name, Shape shape, Init init = {}, Alias alias = {}, std::string doc = "");
  Value buffer(std::string name, Shape shape, Init init, Alias alias = {}, std::string doc = "");  // not trained
  Value constant(double value, Shape shape);                                                       // one number everywhere
  Value table(std::vector<double> values);                                                         // [n]

  Value op(std::string_view op, std::vector<Named> inputs, std::vector<Setting> options = {}, std::string name = "",
           std::string output = "out");
  Value dense(Value x, Value weight, Value bias = {}, std::string name = "");
  // Each token of x [B, T, C] runs the `top` experts of the largest weights [B, T, E] and adds their results times these
  // weights.
  Value experts(Value x, Value weights, const std::vector<Expert>& list, int64_t top, bool normalised, const std::string& act);
  Value map(std::string expression, std::vector<Named> inputs, std::string name = "");
  Value split(Value x, int64_t heads);                                   // [.., heads * D] -> [.., heads, D]
  Value join(Value x);                                                   // [.., H, D] -> [.., H * D]
  Value slice(Value x, int64_t begin, int64_t end, int64_t stride = 1);  // of the last dimension
  Value concat(Value a, Value b, bool interleaved = false);              // along the last dimension
  Value reshape(Value x, Shape last);                                    // what lies behind [B, T] in another shape
  Value last(Value x);                                                   // [B, T, ..] -> [B, 1, ..]: the last token
  Value column(Value x);                                                 // [..] -> [.., 1]
  Value drop_token(Value x);                                             // [B, 1, ..] -> [B, ..]
  Value repeat(Value x, int64_t times);  // [B, T, H, D] -> [B, T, H * times, D]: each head so many times in a row
  Value output(Value y);

  const Shape& shape(Value v) const { return record_.values[static_cast<size_t>(v.id)].shape; }
  int64_t width(Value v) const { return shape(v).empty() ? 1 : shape(v).back(); }
  // False keeps the sentence of the first failure; steps after it do nothing.
  bool require(bool holds, const std::string& sentence);
  bool ok() const { return status_.ok(); }
  void tokens(int64_t count);  // fixes the number of tokens: kT is this number from here on

  Status finish(Record* record);

  class Scope {
   public:
    Scope(Recorder& recorder, const std::string& name);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Recorder& recorder_;
    std::string before_;
  };

 private:
  friend class Scope;
  Value add(ValueInfo info);
  Value add_step(Step step, Shape shape, std::string name);
  Value view(ViewKind kind, Value x, Shape shape, int64_t begin, int64_t size);
  std::string unique(const std::string& name);
  std::string below_scope(const std::string& name) const;

  Record record_;
  std::unordered_map<std::string, int> parameters_;  // by name
  std::string scope_;
  Status status_;
};

std::string shape_text(const Shape& shape);  // "[B, T, 64]"

}  // namespace linnet::layers
