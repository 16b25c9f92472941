// Call: one call of an operator by name, for everything that does not know the operator's structs: the C header, the torch
// operators, `linnet check` and `linnet bench`.
//
//   Call call(*find_op("softmax"));
//   LINNET_TRY(call.set("q", q));  ...  LINNET_TRY(call.set_option("causal", "true"));
//   LINNET_TRY(call.prepare());
//   View out;
//   LINNET_TRY(call.output_view("out", &out));     // dtype, sizes and dense strides; data is null
//   out.data = ...;
//   LINNET_TRY(call.set("out", out));
//   LINNET_TRY(call.run(Pass::forward, context));
//
// Tensors are named as declared: inputs, outputs, and d<name> for the gradient of a differentiable one. Plain data: a Call may
// be copied, and holds no memory of its own.
#pragma once

#include <string_view>

#include "core/op.h"

namespace linnet {

class Call {
 public:
  explicit Call(const Op& op);

  const Op& op() const { return *op_; }
  Status set(std::string_view name, const View& view);
  // The same for an input, and an option of the struct's own type, by declaration: no name is looked for. prepare() checks
  // them.
  void set(const TensorDecl& input, const View& view) {
    is_prepared_ = false;
    *reinterpret_cast<View*>(args_ + input.offset) = view;
  }
  template <class T>
  void set(const OptionDecl& option, const T& value) {
    is_prepared_ = false;
    *reinterpret_cast<T*>(args_ + option.offset) = value;
  }
  void set(const OptionDecl& option, const Maybe& value) {  // by member: what lies between them stays zero (remembered.h)
    is_prepared_ = false;
    auto* place = reinterpret_cast<Maybe*>(args_ + option.offset);
    place->value = value.value;
    place->given = value.given;
  }
  Status set_option(std::string_view name, std::string_view text);  // "1", "0.5", "elu1", "4,-1", "none"
  // The view set for a tensor; one that is not given() when none was set.
  Status get(std::string_view name, View* view) const;
  // Checks inputs and options completely. Call it after the last set of an input or option.
  Status prepare();
  // What an output or a gradient has to be: dtype, sizes, dense strides. Gradients of inputs look like the inputs as given.
  // Only after prepare().
  Status output_view(std::string_view name, View* view) const;
  Status workspace(Pass pass, const Context& context, int64_t* bytes) const;
  // Checks everything, then runs. Outputs and gradients that were not set are not computed.
  Status run(Pass pass, const Context& context) const;

  // The operator's structs as set, for hooks that take them.
  void* args() { return args_; }
  const void* args() const { return args_; }
  const void* out() const { return out_; }
  const void* grads() const { return grads_; }
  // After prepare(): arguments with broadcasts expanded and a batch dimension, and the letters.
  const void* prepared_args() const { return prepared_; }
  const Dims& dims() const { return dims_; }

 private:
  // Where a tensor's view lies; null when the operator has no tensor of that name.
  View* find(std::string_view name);

  const Op* op_;
  Dims dims_;
  bool packed_rank_ = false;
  bool is_prepared_ = false;
  alignas(std::max_align_t) char args_[kMaxStruct];
  alignas(std::max_align_t) char prepared_[kMaxStruct];
  alignas(std::max_align_t) char out_[kMaxStruct];
  alignas(std::max_align_t) char grads_[kMaxStruct];
};

}  // namespace linnet
