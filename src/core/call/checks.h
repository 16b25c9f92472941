// The checks of a call, one after the other, and the sentences in which they refuse it. Each is local to one thing; prepare.cc
// puts those of the inputs in their order, run.cc those of the results.
#pragma once

#include <string>

#include "core/call/remembered.h"
#include "core/op.h"

namespace linnet {

std::string number_text(double x);         // as short as it can be, and exact
std::string sizes_text(const View& view);  // "[2, 16, 4, 64]"
const char* place_name(Device device);     // "the CPU"

// tensors.cc: one tensor as it lies in memory.
bool element_fits(Element element, Dtype dtype, Dtype io);
std::string element_text(Element element, Dtype io);  // what is expected: "f32 or bf16"
// Sizes, address and strides; `name` is that of the tensor or of its gradient.
Status check_layout(const Op& op, const TensorDecl& decl, const std::string& name, const View& view);
// A tensor that is written has no two elements at one address.
Status check_written(const Op& op, const std::string& name, const View& view);
// A tensor lies where the call runs, and somebody runs it there.
Status check_device(const Op& op, const std::string& name, const View& view, Device device);
// A result (an output or a gradient) against its expected shape and type; one that is not given is refused when required.
Status check_result(const Op& op, const TensorDecl& decl, const std::string& name, const View& expected, Device device,
                    bool required, View* view);

// values.cc: what a tensor holds.
// Offsets, lengths and indices against the letter that bounds them.
Status check_values(const Op& op, const TensorDecl& decl, const View& view, const void* args, const Dims& dims);
// Values that a declaration forbids, as far as they are floats: read only when the operator runs, not when its call is planned.
Status check_numbers(const Op& op, const TensorDecl& decl, const View& view);

// options.cc: an option against its range.
Status check_option(const Op& op, const OptionDecl& option, const void* args);

// prepare.cc: all checks of the inputs and options. `call` is where the call is remembered, null when it is not.
Status prepare(const Op& op, void* args, Dims* dims, bool* packed_rank, Remembered** call);

// Packed calls may leave out the batch dimension, which kernels see as B = 1.
inline bool starts_with_batch(const TensorDecl& decl) { return decl.shape.substr(0, 2) == "B "; }
void insert_leading(View* view, int64_t stride);
inline void insert_batch(View* view) { insert_leading(view, view->rank > 0 ? view->size[0] * view->stride[0] : 0); }

}  // namespace linnet
