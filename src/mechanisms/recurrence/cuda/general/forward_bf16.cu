// The general engine, forwards, for bf16.
#include "mechanisms/recurrence/cuda/general/kernels.cuh"

LINNET_GENERAL_FORWARD(1)
