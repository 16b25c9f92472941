// What a mechanism's header and its kernels need: plain data, nothing that the linker could take from another instruction set.
#pragma once

#include "launch.h"
#include "view.h"

namespace linnet {

class Status;
struct Context;
struct Op;

enum class Pass { forward, backward };

// How far a query sees to the left and to the right of its position; -1: unlimited on that side.
struct Window {
  int64_t left = -1, right = -1;
};

// A short list of whole numbers: branching factors of a tree, from the bottom.
struct Sizes {
  static constexpr int kMax = 16;
  int64_t count = 0;
  int64_t value[kMax] = {};
};

// An option that may be left to its default: Maybe scale; scale.value_or(1.0).
struct Maybe {
  double value = 0;
  bool given = false;
  LINNET_INLINE constexpr Maybe() = default;
  LINNET_INLINE constexpr Maybe(double x) : value(x), given(true) {}
  LINNET_INLINE constexpr double value_or(double other) const { return given ? value : other; }
};

}  // namespace linnet

// Declares the kernels of an operator in the namespace of every implementation: ref::softmax_forward, avx512::softmax_forward,
// ...
#define LINNET_KERNELS(stem, Args, Out, Grads)        \
  LINNET_KERNELS_IN(ref, stem, Args, Out, Grads)      \
  LINNET_KERNELS_IN(portable, stem, Args, Out, Grads) \
  LINNET_KERNELS_IN(avx2, stem, Args, Out, Grads)     \
  LINNET_KERNELS_IN(avx512, stem, Args, Out, Grads)
// The same for the GPU's kernels, which may refuse a call: cuda::softmax_refuses returns the reason, else null.
#define LINNET_CUDA_KERNELS(stem, Args, Out, Grads)        \
  LINNET_KERNELS_IN(cuda, stem, Args, Out, Grads)          \
  namespace cuda {                                         \
  const char* stem##_refuses(const Args& args, Pass pass); \
  }
#define LINNET_KERNELS_IN(space, stem, Args, Out, Grads)                                            \
  namespace space {                                                                                 \
  void stem##_forward(const Args& args, const Out& out, const Launch& launch);                      \
  void stem##_backward(const Args& args, const Out& out, const Grads& grads, const Launch& launch); \
  int64_t stem##_workspace(const Args& args, Pass pass, int workers);                               \
  }
