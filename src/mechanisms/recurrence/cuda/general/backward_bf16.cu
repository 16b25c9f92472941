// The general engine, backwards, for bf16.
#include "mechanisms/recurrence/cuda/general/kernels.cuh"

LINNET_GENERAL_BACKWARD(1)
