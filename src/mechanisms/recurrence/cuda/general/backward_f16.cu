// The general engine, backwards, for f16.
#include "mechanisms/recurrence/cuda/general/kernels.cuh"

LINNET_GENERAL_BACKWARD(2)
