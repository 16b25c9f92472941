// The general engine, backwards, for f32.
#include "mechanisms/recurrence/cuda/general/kernels.cuh"

LINNET_GENERAL_BACKWARD(3)
