// One tensor of a call as it lies in memory: its type, device, sizes, address and strides.
#include <algorithm>
#include <cstdlib>

#include "core/call/checks.h"

namespace linnet {

std::string sizes_text(const View& v) {
  std::string text = "[";
  for (int i = 0; i < v.rank; ++i) text += (i ? ", " : "") + std::to_string(v.size[i]);
  return text + "]";
}

const char* place_name(Device device) { return device == Device::cuda ? "a CUDA device" : "the CPU"; }

bool element_fits(Element element, Dtype dtype, Dtype io) {
  const Dtype acc = io == Dtype::f64 ? Dtype::f64 : Dtype::f32;
  switch (element) {
    case Element::io: return dtype == io;
    case Element::acc: return dtype == acc;
    case Element::param: return dtype == io || dtype == acc;
    case Element::weight: return io == Dtype::f64 ? dtype == Dtype::f64 : is_float(dtype) && dtype != Dtype::f64;
    case Element::index: return dtype == Dtype::i32 || dtype == Dtype::i64;
    case Element::mask:
    case Element::code: return dtype == Dtype::u8;
  }
  return false;
}

std::string element_text(Element element, Dtype io) {
  const std::string acc = io == Dtype::f64 ? "f64" : "f32";
  switch (element) {
    case Element::io: return dtype_name(io);
    case Element::acc: return acc;
    case Element::param: return acc == dtype_name(io) ? acc : std::string(dtype_name(io)) + " or " + acc;
    case Element::weight: return io == Dtype::f64 ? "f64" : "f32, bf16 or f16";
    case Element::index: return "i32 or i64";
    case Element::mask:
    case Element::code: return "u8";
  }
  return "";
}

void insert_leading(View* view, int64_t stride) {
  for (int i = view->rank; i > 0; --i) {
    view->size[i] = view->size[i - 1];
    view->stride[i] = view->stride[i - 1];
  }
  view->size[0] = 1;
  view->stride[0] = stride;
  ++view->rank;
}

namespace {
constexpr int64_t kMaxElements = int64_t{1} << 48;  // beyond any memory, and its products with small numbers fit in 64 bits
}  // namespace

Status check_layout(const Op& op, const TensorDecl& decl, const std::string& name, const View& view) {
  int64_t extent = 1;  // with empty dimensions counted as 1: no product of sizes below may overflow
  for (int i = 0; i < view.rank; ++i) {
    if (view.size[i] < 0) return bad_input(op.name + ": " + name + " has a negative size, " + sizes_text(view));
    if (__builtin_mul_overflow(extent, view.size[i] > 0 ? view.size[i] : 1, &extent) || extent > kMaxElements) {
      return bad_input(op.name + ": " + name + " has shape " + sizes_text(view) + ", more than 2^48 elements");
    }
  }
  const int64_t elements = view.elements();
  if (elements > 0 && view.data == nullptr) return bad_input(op.name + ": " + name + " has no data");
  if (reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(std::max<int64_t>(dtype_size(view.dtype), 1)) != 0) {
    return bad_input(op.name + ": " + name + " is at an address that is no multiple of " +
                     std::to_string(dtype_size(view.dtype)) + ", the size of " + dtype_name(view.dtype));
  }
  int64_t span = 0;  // no product of a stride below may overflow either
  for (int i = 0; i < view.rank; ++i) {
    const int64_t stride = view.stride[i];
    int64_t step = 0;
    if (elements == 0 || view.size[i] == 1) continue;
    if (stride < -kMaxElements || stride > kMaxElements || __builtin_mul_overflow(std::abs(stride), view.size[i] - 1, &step) ||
        step > kMaxElements - span) {
      return bad_input(op.name + ": " + name + " has stride " + std::to_string(stride) + " in dimension " + std::to_string(i) +
                       ", so that it spans more than 2^48 elements");
    }
    span += step;
  }
  const int last = view.rank - 1;
  if (!decl.broadcast && elements > 0 && last >= 0 && view.size[last] > 1 && view.stride[last] != 1) {
    return bad_input(op.name + ": " + name + " is not contiguous in its last dimension (stride " +
                     std::to_string(view.stride[last]) + "), expected stride 1");
  }
  return {};
}

// From the smallest stride on, each dimension must step over all that the ones before it reach.
Status check_written(const Op& op, const std::string& name, const View& view) {
  if (view.elements() == 0) return {};
  int64_t reach = 0;
  uint32_t rest = 0;
  for (int i = 0; i < view.rank; ++i) rest |= view.size[i] > 1 ? 1U << i : 0U;
  while (rest != 0) {
    int next = -1;
    for (int i = 0; i < view.rank; ++i) {
      if ((rest >> i & 1) != 0 && (next < 0 || std::abs(view.stride[i]) < std::abs(view.stride[next]))) next = i;
    }
    if (std::abs(view.stride[next]) <= reach) {
      return bad_input(op.name + ": " + name + " has stride " + std::to_string(view.stride[next]) + " in dimension " +
                       std::to_string(next) + ", but it is written and may not overlap itself");
    }
    reach += std::abs(view.stride[next]) * (view.size[next] - 1);
    rest &= ~(1U << next);
  }
  return {};
}

Status check_device(const Op& op, const std::string& name, const View& view, Device device) {
  if (view.device != device) {
    return bad_input(op.name + ": " + name + " is on " + place_name(view.device) + ", expected " + place_name(device) +
                     " (same as " + op.inputs.front().name + ")");
  }
  if (device == Device::cuda && !has_impl_on(op, device)) {
    return impossible(op.name + ": " + name + " is on a CUDA device; " + op.name + " has no CUDA kernels");
  }
  return {};
}

Status check_result(const Op& op, const TensorDecl& decl, const std::string& name, const View& expected, Device device,
                    bool required, View* view) {
  if (!view->given()) {
    if (required) return bad_input(op.name + ": " + name + " is missing");
    return {};
  }
  LINNET_TRY(check_device(op, name, *view, device));
  bool same = view->rank == expected.rank;
  for (int i = 0; same && i < view->rank; ++i) same = view->size[i] == expected.size[i];
  if (!same) return bad_input(op.name + ": " + name + " has shape " + sizes_text(*view) + ", expected " + sizes_text(expected));
  if (view->dtype != expected.dtype) {
    return bad_input(op.name + ": " + name + " is " + dtype_name(view->dtype) + ", expected " + dtype_name(expected.dtype));
  }
  return check_layout(op, decl, name, *view);
}

}  // namespace linnet
