// The function of a gate, by its name in glu, as one of activation's.
#pragma once

#include "activation.h"

namespace linnet {

LINNET_INLINE constexpr Activation gate_activation(GluActivation act) {
  switch (act) {
    case GluActivation::silu: return Activation::silu;
    case GluActivation::gelu: return Activation::gelu;
    case GluActivation::gelu_tanh: return Activation::gelu_tanh;
    case GluActivation::sigmoid: return Activation::sigmoid;
    case GluActivation::relu: return Activation::relu;
  }
  return Activation::silu;
}

}  // namespace linnet
