// Op: the declaration of an operator, from which its argument checks, its listing, its checks and benchmarks, its torch schema
// and its Python function are derived. A mechanism writes three plain structs and one declaration:
//
//   struct GlaArgs  { View q, k, v, g; Maybe scale; };     // inputs and options, defaults as initialisers
//   struct GlaOut   { View out, final_state; };                            // results
//   struct GlaGrads { View dout, dfinal_state, dq, dk, dv, dg; };          // incoming and outgoing gradients
//
//   const Op& gla_op() {
//     static const Op op = Declare<GlaArgs, GlaOut, GlaGrads>("gla", "gla", "gated linear attention")
//         .input("q", &GlaArgs::q, "B T H K", "queries").grad(&GlaGrads::dq)
//         ...
//         .impl<ref::gla_forward, ref::gla_backward, ref::gla_workspace>("ref");
//     return op;
//   }
//
// Shapes are letters and expressions of letters (+ - * // max(a,b)), one word per dimension. A letter takes its value from the
// first tensor that shows it and is compared everywhere else; a letter that no given tensor shows comes from a rule (`letter`).
#pragma once

#include <cmath>
#include <cstddef>
#include <new>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "args.h"
#include "status.h"
#include "tolerance.h"

namespace linnet {

// Element types a tensor may have; `io` is the type of the call, set by the first input.
enum class Element {
  io,      // f64, f32, bf16, f16: the type of the first input
  acc,     // f32, or f64 in an f64 call: states, sums, normalisers
  param,   // io or acc: learned parameters, biases; an output of this kind may be either, as the caller allocates it
  weight,  // f32, bf16 or f16 whatever the call has, f64 in an f64 call: matrices as a checkpoint stores them
  index,   // i32 or i64
  mask,    // u8
  code,    // u8: packed codes of quantised numbers, any byte
};

// What the values of a tensor mean. Offsets and lengths are checked; random cases are drawn accordingly.
enum class Values {
  normal,          // any real number
  logits,          // natural logarithms of weights: any real number, or -inf: masked; an error counts against at least 1
  unit_rows,       // rows of unit norm (check_ranges)
  unit_interval,   // [0, 1] (random cases only)
  write_strength,  // beta of a delta rule, [0, 2] (check_ranges)
  gain,            // a factor, 1 to 2 (random cases only)
  feature_sums,    // sums of features: positive, the first the largest (random cases only)
  rounding,        // what rounding took from a state, zeros at first: its value is nobody's, and is not compared
  log_decay,       // natural logarithm of a decay, <= 0 (check_ranges)
  positive,        // above 0: checked when the operator runs
  finite,          // no infinity: checked when the operator runs
  number,          // neither infinite nor NaN: checked when the operator runs
  weights,         // at least 0, in each row one above 0: checked when the operator runs
  offsets,         // cu_seqlens: 0 first, non-decreasing, last = the letter `of`
  lengths,         // each in [0, letter `of`]: what lies at or behind it is not read
  starts,          // each in [0, letter `of`]: what lies before it is not read
  below,           // each in [0, letter `of`): indices of rows
  page_table,      // entries below the letter `of` where they are used; the operator checks
  tree,            // parent of each node, the first `of` are leaves; a larger number than the node's, -1 for the root
};

struct TensorDecl {
  std::string name, shape, doc;
  // A second legal shape, of another rank; empty if there is none. An output takes it when the first input does.
  std::string other_shape;
  Element element = Element::io;
  Values values = Values::normal;
  std::string of;                       // the letter that bounds offsets and lengths
  bool optional = false;                // inputs: may be absent; outputs: the caller may decline it
  std::string needed_by;                // inputs: the choice option that decides whether this one is given,
  std::vector<std::string> needed_for;  // namely for these choices, and for no others
  bool mutated = false;                 // inputs: a state, read and overwritten
  bool broadcast = false;  // inputs: dimensions may be 1, leading ones may be missing; kernels see the full shape, stride 0
  bool differentiable = false;  // inputs: has a gradient d<name>; outputs: may receive one
  bool saved = false;           // outputs: the backward reads it
  size_t offset = 0;            // of the View in Args (inputs) or Out (outputs)
  size_t grad_offset = 0;       // of its gradient's View in Grads, when differentiable
};

enum class OptionKind { real, maybe_real, integer, boolean, choice, window, sizes };

// What a boolean option does when it is on, where the checks of values and the random cases have to know it.
enum class Effect {
  none,
  averages,          // weights are divided by their sum: a result is a mean of what it reads
  unit_norm,         // rows are given unit norm, so that they may have any length
  doubles_strength,  // the write strength counts twice: [0, 1] is [0, 2]
};

struct OptionDecl {
  std::string name, doc;
  OptionKind kind = OptionKind::real;
  size_t offset = 0;                 // in Args
  double low = 0, high = 0;          // inclusive range of real, maybe_real, integer, window and each of sizes
  std::vector<std::string> choices;  // choice: stored as int32_t index
  Effect effect = Effect::none;
  bool sampled = true;             // random cases vary it,
  double sampled_high = HUGE_VAL;  // up to this
};

// What NaN or infinity in one token of a causal call leaves of the rows before it.
enum class EarlierRows {
  bits,     // every bit
  numbers,  // finite numbers within the gate: a transform over all tokens, whose rounding depends on later ones
  nothing,  // not promised: statistics of all tokens enter every row
};

// A member of a struct that several operators share and that this one does not have: it must stay as the struct's default is.
struct AbsentDecl {
  std::string name;
  size_t offset = 0, bytes = 0;
  bool tensor = false;
};

struct LetterRule {
  std::string letter;
  std::string by;                                          // empty, or the choice option that selects the expression
  std::vector<std::pair<std::string, std::string>> cases;  // (choice, expression); one entry with an empty choice otherwise
};

// Random cases with gradients of averages (Effect::averages) draw `letter` no smaller than this where `option` is `choice`: a
// query of one feature divides out, and its gradient is what rounding leaves.
struct LeastSize {
  std::string letter;
  int64_t least;
  std::string option, choice;
};

// The letters of one call. Names point into the declaration.
class Dims {
 public:
  struct Entry {
    std::string_view letter;
    int64_t value;
    std::string_view from;  // the tensor that showed it first
  };
  const Entry* find(std::string_view letter) const;
  int64_t operator[](std::string_view letter) const;  // 0 when unknown
  void set(std::string_view letter, int64_t value, std::string_view from);
  int count() const { return count_; }
  const Entry& entry(int i) const { return entries_[i]; }

 private:
  static constexpr int kMaxLetters = 24;
  Entry entries_[kMaxLetters];
  int count_ = 0;
};

struct Cost {
  double flops = 0;  // multiply-adds counted as two
  double bytes = 0;  // inputs read once, outputs written once, states read and written
};

// A row of an operator's table: an implementation, the calls that it takes, and how it runs them. The GPU's kernels have one
// row for each way to run a call (cuda.step, cuda.tile, ...); the last row that takes a call runs it.
struct Impl {
  std::string name;                    // ref, portable, avx2, avx512, cuda, cuda.tile, ...
  Device device = Device::cpu;         // where its tensors lie
  Rounding rounding = Rounding::none;  // which gates of tolerance.h hold in f16 and bf16
  std::string (*missing)() = nullptr;  // empty when this machine runs it, else the reason
  // Null when it can run this prepared call, else the reason: "it has no f64". Without such a function it runs every call.
  // Looks at shapes, strides and addresses alone; `out` is null where the results are not known yet: then they are dense and
  // aligned.
  const char* (*refuses)(const void* args, const void* out, Pass pass) = nullptr;
  int64_t slow_from = 0;  // a call of so many tokens is slow here, and says so once (core/log.h); 0: none is
  void (*forward)(const void* args, const void* out, const Launch& launch) = nullptr;
  void (*backward)(const void* args, const void* out, const void* grads, const Launch& launch) = nullptr;  // null: none
  int64_t (*workspace)(const void* args, Pass pass, int workers) = nullptr;
};

// A way to use an operator as attention, for `linnet compare`.
struct Variant {
  std::string name;     // "window 64"
  std::string options;  // "window=64,64 prefix=4": what differs from the defaults, and what inputs hold (compare/binding.h)
};

// A number that no other object has, a copy neither.
class Serial {
 public:
  Serial();
  Serial(const Serial&) : Serial() {}
  Serial& operator=(const Serial&) { return *this; }
  bool operator==(const Serial& other) const { return value_ == other.value_; }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_;
};

struct Op {
  Serial serial;          // tells a declaration from another one that stood at the same address (remembered.h)
  std::string name;       // gla; softmax_paged
  std::string mechanism;  // gla; softmax
  std::string summary, equation;
  std::string decode;  // the operator that continues token by token, empty if none
  std::vector<TensorDecl> inputs, outputs;
  std::vector<OptionDecl> options;
  std::vector<AbsentDecl> absent, absent_gradients;  // of Args and of Grads
  std::vector<LetterRule> letters;
  std::vector<std::pair<std::string, std::string>> multiples;  // (H, Hkv): Hkv divides H
  std::vector<LeastSize> least_sizes;                          // of random cases
  std::vector<Impl> impls;                                     // best last
  // Cases of `linnet bench`, one or more per line: "B=1 T=8192 H=8 K=64|128 V=K causal=1 dtype=f32|bf16 pass=fwd|fwd+bwd".
  std::vector<std::string> benchmarks;
  std::vector<std::string> gpu_benchmarks;  // the same for `linnet bench --device cuda`
  std::vector<Variant> variants;            // of `linnet compare`; none: no attention
  // No row depends on a later token, whatever the options; is_causal() tells it of a call.
  bool always_causal = false;
  EarlierRows earlier_rows = EarlierRows::bits;         // of a causal call
  bool (*shares_units)(const void* args) = nullptr;     // with these options nothing is promised: all tokens share one unit
  bool growing = false;                                 // the state only grows (ungated sums): see tolerance.h
  std::vector<std::string> grows_without;               // it does when none of these inputs is given
  double (*largest_logit)(const void* args) = nullptr;  // of exponential weights, on a prepared f64 call; null: no such weights
  Status (*check)(const void* args, const Dims& dims) = nullptr;  // what the declaration cannot say; args are normalised
  Cost (*cost)(const void* args, const Dims& dims, Pass pass) = nullptr;
  // Flops of checking a call, where the reference is of another order than the kernels (an exponential counts 16); null:
  // `cost`.
  double (*check_flops)(const void* args, const Dims& dims, Pass pass) = nullptr;
  size_t args_bytes = 0, out_bytes = 0, grads_bytes = 0;
  void (*construct)(void* args, void* out, void* grads) = nullptr;  // default values

  bool differentiable() const { return !impls.empty() && impls.front().backward != nullptr; }
  const TensorDecl* find_input(std::string_view name) const;
  const TensorDecl* find_output(std::string_view name) const;
  const OptionDecl* find_option(std::string_view name) const;
  const OptionDecl* find_option(Effect effect) const;  // null when none has it
};

inline constexpr double kAnyReal = 1.7976931348623157e308;  // option range: any finite number
inline constexpr int64_t kAnyCount = int64_t{1} << 53;      // option range: any whole number that a double holds

inline constexpr size_t kMaxStruct = 4096;  // Args, Out and Grads of every operator fit in this many bytes

// How to run a call. Defaults: the process's pool, the best implementation, no workspace (an error where one is needed).
struct Context {
  Executor* executor = nullptr;
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
  // In place of `workspace`: called at most once in a run, with the bytes that it needs; null is an error. It must not throw.
  void* (*allocate)(void* allocator, int64_t bytes) = nullptr;
  void* allocator = nullptr;
  const char* impl = nullptr;  // a name of Op::impls; null: LINNET_IMPL, else the best
  void* stream = nullptr;      // calls on CUDA tensors: the CUstream to enqueue on; null: the default one
};

// All operators, in the order of `linnet list`. A program that links the library and calls single operators by their functions
// should not call these: they bring in every mechanism.
const std::vector<const Op*>& all_ops();
const Op* find_op(std::string_view name);

// Checks a call's inputs and options completely and normalises them in place: broadcasts are expanded, packed tensors without a
// batch dimension get B = 1. `packed_rank` tells whether that dimension was missing.
Status prepare(const Op& op, void* args, Dims* dims, bool* packed_rank);
// The sizes an output has in a prepared call (without the batch dimension when packed_rank).
Status output_shape(const Op& op, const TensorDecl& output, const void* args, const Dims& dims, bool packed_rank, View* view);
// What LINNET_IMPL ("op:impl,op:impl" or "impl") names, in its order.
struct ForcedImpl {
  std::string_view op, impl;
  bool everywhere;  // for all operators, `op` is empty
};
std::vector<ForcedImpl> forced_impls();
// The implementation a call on tensors of this device runs: context.impl, else what LINNET_IMPL names, else the best
// usable. A name may stand for several rows ("cuda" for cuda.step, cuda.tile, ...): then the best of them. `args`, when given,
// is the prepared call, which an implementation may refuse, and `out` its results.
Status choose_impl(const Op& op, Pass pass, const Context& context, Device device, const void* args, const void* out,
                   const Impl** impl);
inline Status choose_impl(const Op& op, Pass pass, const Context& context, const Impl** impl) {
  return choose_impl(op, pass, context, Device::cpu, nullptr, nullptr, impl);
}
// Whether `name` stands for this implementation: its own name, or the part of it before a dot.
bool is_named(const Impl& impl, std::string_view name);
// Why an implementation does not run this prepared call; empty when it does. What the machine has is Impl::missing's to say.
std::string refusal(const Impl& impl, Pass pass, const void* args, const void* out = nullptr);
bool has_impl_on(const Op& op, Device device);
// Whether no row of this call's results depends on a later token: the operator says so, its boolean option `causal` is on, or
// it continues a state token by token. `linnet check` then puts NaN into one token; every earlier row must keep its bits.
bool is_causal(const Op& op, const void* args);
Device device_of(const Op& op, const void* args);  // of a call: where its first input lies
// Bytes of workspace that run() needs for this call.
Status workspace_bytes(const Op& op, Pass pass, const void* args, const Context& context, int64_t* bytes);
// The same, 0 for a call that would be refused.
int64_t workspace_bytes(const Op& op, Pass pass, const void* args, const Context& context);
// Looks at values, not only at shapes: keys of a delta rule longer than unit norm, log decays above 0, a write strength outside
// [0, 2]; a sentence for the first one. LINNET_CHECK=1 in the environment does so before every run on the CPU. Reads every such
// tensor once.
Status check_ranges(const Op& op, const void* args);
// Checks everything, then runs; on failure nothing is written. A call on CUDA tensors is enqueued on context.stream and returns
// at once; its offsets and lengths lie on the GPU, are not read here, and are bounded by the kernels.
Status run(const Op& op, Pass pass, const void* args, const void* out, const void* grads, const Context& context);
// The value of a shape word such as "N+1" or "max(Hq,Hk)"; false when a letter is unknown.
bool evaluate(std::string_view expression, const Op& op, const void* args, const Dims& dims, int64_t* value);
// Sets an option from text ("1", "0.5", "elu1", "4,-1", "none"), with a sentence when it is not of the option's kind.
Status set_option(const Op& op, std::string_view name, std::string_view text, void* args);
std::string option_text(const OptionDecl& option, const void* args);
// Element (i) or (i, j) of an i32 or i64 tensor.
int64_t index_value(const View& view, int64_t i, int64_t j = 0);
const char* dtype_name(Dtype dtype);
Dtype dtype_from_name(std::string_view name);  // none when unknown

// Availability of the implementations every mechanism has: the reference, one per instruction set, and the GPU's.
std::string always_available();
std::string cuda_available();
std::string hopper_available();
template <int isa>
std::string isa_available();

// Builds an Op from three structs; see the top of this file.
template <class Args, class Out, class Grads>
class Declare {
  static_assert(std::is_trivially_copyable_v<Args> && sizeof(Args) <= kMaxStruct);
  static_assert(std::is_trivially_copyable_v<Out> && sizeof(Out) <= kMaxStruct);
  static_assert(std::is_trivially_copyable_v<Grads> && sizeof(Grads) <= kMaxStruct);

 public:
  Declare(std::string name, std::string mechanism, std::string summary) {
    op_.name = std::move(name);
    op_.mechanism = std::move(mechanism);
    op_.summary = std::move(summary);
    op_.args_bytes = sizeof(Args);
    op_.out_bytes = sizeof(Out);
    op_.grads_bytes = sizeof(Grads);
    op_.construct = [](void* args, void* out, void* grads) {
      new (args) Args();
      new (out) Out();
      new (grads) Grads();
    };
  }
  Declare& equation(std::string text) { return op_.equation = std::move(text), *this; }
  Declare& decode(std::string op_name) { return op_.decode = std::move(op_name), *this; }

  Declare& input(std::string name, View Args::*member, std::string shape, std::string doc) {
    op_.inputs.push_back({.name = std::move(name), .shape = std::move(shape), .doc = std::move(doc), .offset = offset(member)});
    last_ = &op_.inputs.back();
    return *this;
  }
  Declare& output(std::string name, View Out::*member, std::string shape, std::string doc) {
    op_.outputs.push_back(
        {.name = std::move(name), .shape = std::move(shape), .doc = std::move(doc), .offset = offset(member)});
    last_ = &op_.outputs.back();
    return *this;
  }
  // Properties of the tensor declared last.
  Declare& element(Element element) { return last_->element = element, *this; }
  Declare& values(Values values, std::string of = "") { return last_->values = values, last_->of = std::move(of), *this; }
  Declare& or_shape(std::string shape) { return last_->other_shape = std::move(shape), *this; }
  Declare& optional() { return last_->optional = true, *this; }
  Declare& needed_by(std::string option, std::vector<std::string> choices) {
    last_->needed_by = std::move(option);
    last_->needed_for = std::move(choices);
    return optional();
  }
  Declare& mutated() { return last_->mutated = true, *this; }
  Declare& broadcast() { return last_->broadcast = true, *this; }
  Declare& saved() { return last_->saved = true, *this; }
  Declare& grad(View Grads::*member) { return last_->differentiable = true, last_->grad_offset = offset(member), *this; }

  Declare& option(std::string name, double Args::*member, double low, double high, std::string doc) {
    return add_option(std::move(name), OptionKind::real, offset(member), low, high, std::move(doc));
  }
  Declare& option(std::string name, Maybe Args::*member, double low, double high, std::string doc) {
    return add_option(std::move(name), OptionKind::maybe_real, offset(member), low, high, std::move(doc));
  }
  Declare& option(std::string name, int64_t Args::*member, int64_t low, int64_t high, std::string doc) {
    return add_option(std::move(name), OptionKind::integer, offset(member), static_cast<double>(low), static_cast<double>(high),
                      std::move(doc));
  }
  Declare& option(std::string name, Window Args::*member, std::string doc) {
    return add_option(std::move(name), OptionKind::window, offset(member), -1, 9e15, std::move(doc));
  }
  Declare& option(std::string name, Sizes Args::*member, int64_t low, int64_t high, std::string doc) {
    return add_option(std::move(name), OptionKind::sizes, offset(member), static_cast<double>(low), static_cast<double>(high),
                      std::move(doc));
  }
  Declare& option(std::string name, bool Args::*member, std::string doc) {
    return add_option(std::move(name), OptionKind::boolean, offset(member), 0, 1, std::move(doc));
  }
  template <class Enum>
  requires std::is_enum_v<Enum> Declare& option(std::string name, Enum Args::*member, std::vector<std::string> choices,
                                                std::string doc) {
    static_assert(sizeof(Enum) == sizeof(int32_t),
                  "a choice is an enum class of int32_t, its values 0, 1, ... in the order of the names");
    add_option(std::move(name), OptionKind::choice, offset(member), 0, static_cast<double>(choices.size()) - 1, std::move(doc));
    op_.options.back().choices = std::move(choices);
    return *this;
  }
  Declare& effect(Effect effect) { return op_.options.back().effect = effect, *this; }  // of the option declared last
  // The option declared last: random cases leave it alone, since it permits calls whose result no precision can hold.
  Declare& unsampled() { return op_.options.back().sampled = false, *this; }
  Declare& sampled_to(double high) { return op_.options.back().sampled_high = high, *this; }

  // A member of the shared struct that this operator does not have; a call that gives it is refused.
  template <class T>
  Declare& absent(std::string name, T Args::*member) {
    static_assert(std::is_same_v<T, View> || std::is_integral_v<T> || std::is_enum_v<T>, "its bytes are compared");
    op_.absent.push_back({std::move(name), offset(member), sizeof(T), std::is_same_v<T, View>});
    return *this;
  }
  Declare& absent_gradient(std::string name, View Grads::*member) {
    op_.absent_gradients.push_back({std::move(name), offset(member), sizeof(View), true});
    return *this;
  }
  Declare& always_causal() { return op_.always_causal = true, *this; }
  Declare& earlier_rows(EarlierRows kept) { return op_.earlier_rows = kept, *this; }
  template <bool (*function)(const Args&)>
  Declare& shares_units() {
    op_.shares_units = [](const void* args) { return function(*static_cast<const Args*>(args)); };
    return *this;
  }

  Declare& letter(std::string letter, std::string expression) {
    op_.letters.push_back({std::move(letter), "", {{"", std::move(expression)}}});
    return *this;
  }
  Declare& letter_by(std::string letter, std::string option, std::vector<std::pair<std::string, std::string>> cases) {
    op_.letters.push_back({std::move(letter), std::move(option), std::move(cases)});
    return *this;
  }
  Declare& least_size(std::string letter, int64_t least, std::string option, std::string choice) {
    op_.least_sizes.push_back({std::move(letter), least, std::move(option), std::move(choice)});
    return *this;
  }
  Declare& multiple(std::string letter, std::string divisor) {
    op_.multiples.emplace_back(std::move(letter), std::move(divisor));
    return *this;
  }

  Declare& bench(std::string cases) { return op_.benchmarks.push_back(std::move(cases)), *this; }
  Declare& gpu_bench(std::string cases) { return op_.gpu_benchmarks.push_back(std::move(cases)), *this; }
  Declare& compare(std::string variant, std::string options) {
    return op_.variants.push_back({std::move(variant), std::move(options)}), *this;
  }
  Declare& growing() { return op_.growing = true, *this; }
  Declare& grows_without(std::vector<std::string> inputs) { return op_.grows_without = std::move(inputs), *this; }
  template <double (*F)(const Args&)>
  Declare& largest_logit() {
    op_.largest_logit = [](const void* args) { return F(*static_cast<const Args*>(args)); };
    return *this;
  }
  template <Status (*F)(const Args&, const Dims&)>
  Declare& check() {
    op_.check = [](const void* args, const Dims& dims) { return F(*static_cast<const Args*>(args), dims); };
    return *this;
  }
  template <Cost (*F)(const Args&, const Dims&, Pass)>
  Declare& cost() {
    op_.cost = [](const void* args, const Dims& dims, Pass pass) { return F(*static_cast<const Args*>(args), dims, pass); };
    return *this;
  }
  template <double (*F)(const Args&, const Dims&, Pass)>
  Declare& check_flops() {
    op_.check_flops = [](const void* args, const Dims& dims, Pass pass) {
      return F(*static_cast<const Args*>(args), dims, pass);
    };
    return *this;
  }
  // forward(args, out, launch); backward(args, out, grads, launch) or nullptr; workspace(args, pass, workers) in bytes.
  template <auto Forward, auto Backward, int64_t (*Workspace)(const Args&, Pass, int)>
  Declare& impl(std::string name, std::string (*missing)()) {
    Impl impl{.name = std::move(name), .missing = missing};
    impl.forward = [](const void* args, const void* out, const Launch& launch) {
      Forward(*static_cast<const Args*>(args), *static_cast<const Out*>(out), launch);
    };
    if constexpr (!std::is_null_pointer_v<decltype(Backward)>) {
      impl.backward = [](const void* args, const void* out, const void* grads, const Launch& launch) {
        Backward(*static_cast<const Args*>(args), *static_cast<const Out*>(out), *static_cast<const Grads*>(grads), launch);
      };
    }
    impl.workspace = [](const void* args, Pass pass, int workers) {
      return Workspace(*static_cast<const Args*>(args), pass, workers);
    };
    op_.impls.push_back(std::move(impl));
    return *this;
  }

  // The kernels on the GPU; refuses(args, pass) tells which calls they cannot run.
  template <auto Forward, auto Backward, int64_t (*Workspace)(const Args&, Pass, int),
            const char* (*Refuses)(const Args&, Pass)>
  Declare& cuda() {
    impl<Forward, Backward, Workspace>("cuda", cuda_available);
    op_.impls.back().device = Device::cuda;
    op_.impls.back().refuses = [](const void* args, const void*, Pass pass) {
      return Refuses(*static_cast<const Args*>(args), pass);
    };
    return *this;
  }

  // One of several ways to run on the GPU, best declared last: row `row` of the table `Rows`, whose static functions take the
  // row first: refuses(row, args, out or null, pass), workspace(row, args, pass), forward(row, args, out, launch) and, where
  // there are gradients, backward(row, args, out, grads, launch). row_name(row) is the name behind "cuda.", row_rounds(row)
  // tells whether it rounds intermediates (tolerance.h), row_needs_hopper(row), where there is one, whether its kernels are for
  // Hopper alone, slow_from(row) Impl's.
  template <class Rows, auto row>
  Declare& cuda_row() {
    Impl impl{.name = std::string("cuda.") + row_name(row), .device = Device::cuda, .missing = cuda_available};
    impl.rounding = row_rounds(row) ? Rounding::matrix_units : Rounding::none;
    if constexpr (requires { row_needs_hopper(row); }) impl.missing = row_needs_hopper(row) ? hopper_available : cuda_available;
    impl.slow_from = Rows::slow_from(row);
    impl.refuses = [](const void* args, const void* out, Pass pass) {
      return Rows::refuses(row, *static_cast<const Args*>(args), static_cast<const Out*>(out), pass);
    };
    impl.forward = [](const void* args, const void* out, const Launch& launch) {
      Rows::forward(row, *static_cast<const Args*>(args), *static_cast<const Out*>(out), launch);
    };
    if constexpr (requires { &Rows::backward; }) {
      impl.backward = [](const void* args, const void* out, const void* grads, const Launch& launch) {
        Rows::backward(row, *static_cast<const Args*>(args), *static_cast<const Out*>(out), *static_cast<const Grads*>(grads),
                       launch);
      };
    }
    impl.workspace = [](const void* args, Pass pass, int) {
      return Rows::workspace(row, *static_cast<const Args*>(args), pass);
    };
    op_.impls.push_back(std::move(impl));
    return *this;
  }
  template <class Rows, auto... rows>
  Declare& cuda_rows() {
    (cuda_row<Rows, rows>(), ...);
    return *this;
  }

  // The implementation declared last rounds weights or states to the call's type before a matrix unit multiplies them.
  Declare& rounds_intermediates() { return op_.impls.back().rounding = Rounding::matrix_units, *this; }

  operator Op() const { return op_; }

 private:
  template <class S, class M>
  static size_t offset(M S::*member) {
    static const S probe{};
    return static_cast<size_t>(reinterpret_cast<const char*>(&(probe.*member)) - reinterpret_cast<const char*>(&probe));
  }
  Declare& add_option(std::string name, OptionKind kind, size_t offset, double low, double high, std::string doc) {
    op_.options.push_back(
        {.name = std::move(name), .doc = std::move(doc), .kind = kind, .offset = offset, .low = low, .high = high});
    return *this;
  }
  Op op_;
  TensorDecl* last_ = nullptr;
};

// .impl<...> for each instruction set that this build has: LINNET_ISA_IMPLS(softmax) expands to the kernels
// linnet::portable::softmax_forward, softmax_backward, softmax_workspace and so on.
#define LINNET_ISA_IMPL(isa, number, stem, backward) \
  .impl<isa::stem##_forward, backward, isa::stem##_workspace>(#isa, isa_available<number>)
#if defined(LINNET_HAS_portable)
#define LINNET_PORTABLE_IMPL(stem, backward) LINNET_ISA_IMPL(portable, 0, stem, backward)
#else
#define LINNET_PORTABLE_IMPL(stem, backward)
#endif
#if defined(LINNET_HAS_avx2)
#define LINNET_AVX2_IMPL(stem, backward) LINNET_ISA_IMPL(avx2, 1, stem, backward)
#else
#define LINNET_AVX2_IMPL(stem, backward)
#endif
#if defined(LINNET_HAS_avx512)
#define LINNET_AVX512_IMPL(stem, backward) LINNET_ISA_IMPL(avx512, 2, stem, backward)
#else
#define LINNET_AVX512_IMPL(stem, backward)
#endif
#define LINNET_ISA_IMPLS(stem)                          \
  LINNET_PORTABLE_IMPL(stem, portable::stem##_backward) \
  LINNET_AVX2_IMPL(stem, avx2::stem##_backward) LINNET_AVX512_IMPL(stem, avx512::stem##_backward)
#define LINNET_ISA_IMPLS_FORWARD(stem) \
  LINNET_PORTABLE_IMPL(stem, nullptr) LINNET_AVX2_IMPL(stem, nullptr) LINNET_AVX512_IMPL(stem, nullptr)

}  // namespace linnet
