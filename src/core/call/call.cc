#include "core/call/call.h"

#include <cstring>

namespace linnet {
namespace {

Status unknown(const Op& op, std::string_view name) {
  std::string names;
  const auto add = [&](const std::string& text) { names += (names.empty() ? "" : ", ") + text; };
  for (const TensorDecl& decl : op.inputs) add(decl.name);
  for (const TensorDecl& decl : op.outputs) add(decl.name);
  for (const auto* list : {&op.inputs, &op.outputs}) {
    for (const TensorDecl& decl : *list) {
      if (decl.differentiable) add("d" + decl.name);
    }
  }
  return bad_input(op.name + ": there is no tensor '" + std::string(name) + "', expected one of " + names);
}

// The differentiable input or output whose gradient is called `name`.
const TensorDecl* find_gradient(const Op& op, std::string_view name) {
  if (name.substr(0, 1) != "d") return nullptr;
  for (const auto* list : {&op.inputs, &op.outputs}) {
    for (const TensorDecl& decl : *list) {
      if (decl.differentiable && decl.name == name.substr(1)) return &decl;
    }
  }
  return nullptr;
}

}  // namespace

Call::Call(const Op& op) : op_(&op) {
  std::memset(args_, 0, op.args_bytes);  // what lies between the members too: equal calls have equal bytes (remembered.h)
  std::memset(out_, 0, op.out_bytes);
  op.construct(args_, out_, grads_);
}

View* Call::find(std::string_view name) {
  if (const TensorDecl* input = op_->find_input(name)) return reinterpret_cast<View*>(args_ + input->offset);
  if (const TensorDecl* output = op_->find_output(name)) return reinterpret_cast<View*>(out_ + output->offset);
  if (const TensorDecl* decl = find_gradient(*op_, name)) return reinterpret_cast<View*>(grads_ + decl->grad_offset);
  return nullptr;
}

Status Call::set(std::string_view name, const View& view) {
  View* place = find(name);
  if (place == nullptr) return unknown(*op_, name);
  *place = view;
  if (op_->find_input(name) != nullptr) is_prepared_ = false;
  return {};
}

Status Call::get(std::string_view name, View* view) const {
  const View* place = const_cast<Call*>(this)->find(name);
  if (place == nullptr) return unknown(*op_, name);
  *view = *place;
  return {};
}

Status Call::set_option(std::string_view name, std::string_view text) {
  is_prepared_ = false;
  return linnet::set_option(*op_, name, text, args_);
}

Status Call::prepare() {
  is_prepared_ = false;
  dims_ = Dims();
  std::memcpy(prepared_, args_, op_->args_bytes);
  LINNET_TRY(linnet::prepare(*op_, prepared_, &dims_, &packed_rank_));
  is_prepared_ = true;
  return {};
}

Status Call::output_view(std::string_view name, View* view) const {
  if (!is_prepared_) return bad_input(op_->name + ": the shape of " + std::string(name) + " is known after prepare()");
  const TensorDecl* decl = op_->find_output(name);
  if (decl == nullptr) decl = find_gradient(*op_, name);
  if (decl == nullptr) return unknown(*op_, name);
  if (op_->find_output(decl->name) == decl) return output_shape(*op_, *decl, prepared_, dims_, packed_rank_, view);
  const View& input = *reinterpret_cast<const View*>(args_ + decl->offset);
  if (!input.given()) return bad_input(op_->name + ": d" + decl->name + " has no shape, " + decl->name + " is not given");
  *view = View::dense(nullptr, input.dtype, input.size, input.rank);
  return {};
}

Status Call::workspace(Pass pass, const Context& context, int64_t* bytes) const {
  return workspace_bytes(*op_, pass, args_, context, bytes);
}

Status Call::run(Pass pass, const Context& context) const { return linnet::run(*op_, pass, args_, out_, grads_, context); }

}  // namespace linnet
