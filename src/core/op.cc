#include "op.h"

#include <algorithm>
#include <atomic>

#include "core/call/members.h"
#include "core/cuda/device.h"
#include "core/cuda/driver.h"
#include "isa.h"
#include "letters.h"

namespace linnet {

const char* dtype_name(Dtype dtype) {
  switch (dtype) {
    case Dtype::none: return "none";
    case Dtype::f64: return "f64";
    case Dtype::f32: return "f32";
    case Dtype::bf16: return "bf16";
    case Dtype::f16: return "f16";
    case Dtype::i64: return "i64";
    case Dtype::i32: return "i32";
    case Dtype::u8: return "u8";
  }
  return "";
}

Dtype dtype_from_name(std::string_view name) {
  for (const Dtype d : {Dtype::f64, Dtype::f32, Dtype::bf16, Dtype::f16, Dtype::i64, Dtype::i32, Dtype::u8}) {
    if (name == dtype_name(d)) return d;
  }
  return Dtype::none;
}

int64_t index_value(const View& view, int64_t i, int64_t j) {
  const int64_t offset = i * view.stride[0] + j * view.stride[1];
  return view.dtype == Dtype::i32 ? static_cast<const int32_t*>(view.data)[offset]
                                  : static_cast<const int64_t*>(view.data)[offset];
}

template <class T>
static const T* find_named(const std::vector<T>& list, std::string_view name) {
  for (const T& item : list) {
    if (same_name(item.name, name)) return &item;
  }
  return nullptr;
}
const TensorDecl* Op::find_input(std::string_view wanted) const { return find_named(inputs, wanted); }
const TensorDecl* Op::find_output(std::string_view wanted) const { return find_named(outputs, wanted); }
const OptionDecl* Op::find_option(std::string_view wanted) const { return find_named(options, wanted); }
const OptionDecl* Op::find_option(Effect effect) const {
  const auto at =
      std::find_if(options.begin(), options.end(), [&](const OptionDecl& option) { return option.effect == effect; });
  return at == options.end() ? nullptr : &*at;
}

bool has_impl_on(const Op& op, Device device) {
  for (const Impl& impl : op.impls) {
    if (impl.device == device) return true;
  }
  return false;
}

bool is_causal(const Op& op, const void* args) {
  if (op.always_causal) return true;
  const OptionDecl* option = op.find_option("causal");
  if (option != nullptr && option->kind == OptionKind::boolean) return value_at<bool>(args, option->offset);
  return std::any_of(op.inputs.begin(), op.inputs.end(), [](const TensorDecl& decl) { return decl.mutated; });
}

Device device_of(const Op& op, const void* args) { return view_at(args, op.inputs.front().offset).device; }

std::string always_available() { return ""; }
std::string cuda_available() { return cuda::missing(); }
std::string hopper_available() { return cuda::missing_on_hopper(); }
template <int isa>
std::string isa_available() {
  return isa_missing(static_cast<Isa>(isa));
}
template std::string isa_available<0>();
template std::string isa_available<1>();
template std::string isa_available<2>();

Serial::Serial() {
  static std::atomic<uint64_t> next{1};
  value_ = next.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace linnet
