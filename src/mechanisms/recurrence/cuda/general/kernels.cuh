// The kernels of a number of planes: LINNET_GENERAL_FORWARD(2) defines general_prepare_2, general_prepare_2_channel,
// general_prepare_2_beta, general_prepare_2_channel_beta, and so on.
#pragma once

#include "mechanisms/recurrence/cuda/general/gradients.cuh"
#include "mechanisms/recurrence/cuda/general/output.cuh"
#include "mechanisms/recurrence/cuda/general/prepare.cuh"
#include "mechanisms/recurrence/cuda/general/reverse.cuh"
#include "mechanisms/recurrence/cuda/general/turned.cuh"

#define LINNET_GENERAL(name, threads, blocks, ...) \
  extern "C" __global__ void __launch_bounds__(threads, blocks) name(const __grid_constant__ General g) { __VA_ARGS__(g); }

#define LINNET_GENERAL_FORWARD(planes)                                                         \
  namespace linnet::cuda {                                                                     \
  LINNET_GENERAL(general_prepare_##planes, 128, 2, prepare<planes, false, false>)              \
  LINNET_GENERAL(general_prepare_##planes##_beta, 256, 1, prepare<planes, false, true>)        \
  LINNET_GENERAL(general_prepare_##planes##_channel, 256, 1, prepare<planes, true, false>)     \
  LINNET_GENERAL(general_prepare_##planes##_channel_beta, 256, 1, prepare<planes, true, true>) \
  LINNET_GENERAL(general_walk_##planes, 256, 2, walk<planes, false, 1>)                        \
  LINNET_GENERAL(general_walk_##planes##_beta, 256, 2, walk<planes, true, 1>)                  \
  LINNET_GENERAL(general_walk_##planes##_wide, 256, 1, walk<planes, false, 2>)                 \
  LINNET_GENERAL(general_walk_##planes##_wide_beta, 256, 1, walk<planes, true, 2>)             \
  LINNET_GENERAL(general_output_##planes, 128, 4, output<planes, false>)                       \
  LINNET_GENERAL(general_output_##planes##_beta, 128, 4, output<planes, true>)                 \
  }

#define LINNET_GENERAL_BACKWARD(planes)                                                                                \
  namespace linnet::cuda {                                                                                             \
  LINNET_GENERAL(general_turned_##planes, 128, 4, turned<planes>)                                                      \
  LINNET_GENERAL(general_reverse_##planes, 256, 2, reverse<planes, false, 1>)                                          \
  LINNET_GENERAL(general_reverse_##planes##_beta, 256, 2, reverse<planes, true, 1>)                                    \
  LINNET_GENERAL(general_reverse_##planes##_wide, 256, 1, reverse<planes, false, 2>)                                   \
  LINNET_GENERAL(general_reverse_##planes##_wide_beta, 256, 1, reverse<planes, true, 2>)                               \
  LINNET_GENERAL(general_gradients_##planes, 256, (planes == 1 ? 2 : 1), gradients<planes, false, false>)              \
  LINNET_GENERAL(general_gradients_##planes##_beta, 256, (planes == 1 ? 2 : 1), gradients<planes, false, true>)        \
  LINNET_GENERAL(general_gradients_##planes##_channel, 256, (planes == 1 ? 2 : 1), gradients<planes, true, false>)     \
  LINNET_GENERAL(general_gradients_##planes##_channel_beta, 256, (planes == 1 ? 2 : 1), gradients<planes, true, true>) \
  }
