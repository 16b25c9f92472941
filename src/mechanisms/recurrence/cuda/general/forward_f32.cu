// The general engine, forwards, for f32.
#include "mechanisms/recurrence/cuda/general/kernels.cuh"

LINNET_GENERAL_FORWARD(3)
