#include "layers/ready.h"

#include <cstring>

namespace linnet::layers {

Status set_packed(const Quantised& packed, int64_t outputs, Call* call) {
  const Op& op = call->op();
  LINNET_TRY(call->set("codes", packed.codes));
  LINNET_TRY(call->set(op.find_input("scales") != nullptr ? "scales" : "scale", packed.scale));
  if (packed.offset.given()) LINNET_TRY(call->set("offset", packed.offset));
  LINNET_TRY(call->set_option("bits", packed.bits == 4 ? "4" : "8"));
  if (op.find_option("rounding") != nullptr) LINNET_TRY(call->set_option("rounding", packed.rounding));
  if (op.find_option("outputs") != nullptr) LINNET_TRY(call->set_option("outputs", std::to_string(outputs)));
  return {};
}

Status ReadyOp::make(const Call& call, const Context& context, Device device, std::unique_ptr<ReadyOp>* ready) {
  constexpr size_t kAlign = 128;
  auto made = std::make_unique<ReadyOp>();
  made->op = &call.op();
  LINNET_TRY(choose_impl(*made->op, Pass::forward, context, device, call.prepared_args(), nullptr, &made->impl));
  made->args_bytes = (made->op->args_bytes + kAlign - 1) / kAlign * kAlign;
  made->memory.reset(new char[made->args_bytes + made->op->out_bytes]);
  std::memcpy(made->args(), call.prepared_args(), made->op->args_bytes);
  std::memcpy(made->out(), call.out(), made->op->out_bytes);
  *ready = std::move(made);
  return {};
}

View* ReadyOp::tensor(std::string_view name) const {
  if (const TensorDecl* decl = op->find_input(name)) return reinterpret_cast<View*>(static_cast<char*>(args()) + decl->offset);
  return reinterpret_cast<View*>(static_cast<char*>(out()) + op->find_output(name)->offset);
}

}  // namespace linnet::layers
