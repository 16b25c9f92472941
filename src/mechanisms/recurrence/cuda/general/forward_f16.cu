// The general engine, forwards, for f16.
#include "mechanisms/recurrence/cuda/general/kernels.cuh"

LINNET_GENERAL_FORWARD(2)
