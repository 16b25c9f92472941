// The maps of features on the GPU: what their kernels are told (plain data).
#pragma once

#include "features_shape.h"

namespace linnet::cuda {

inline constexpr int kFeatureWarps = 4;    // rows of a block
inline constexpr int64_t kTopSlices = 32;  // parts of the keys whose largest exponents are found apart

struct FeatureRows {
  FeaturesShape s;
  View x;  // [B, T, H, K]
  View w, b, scale, proj, gamma, beta;
  View key_mask, key_tops;  // absent for queries
  bool key = false;
  int64_t tokens = 0, first = 0;  // first: the position of the first token
  int32_t padded = 0, wide = 0;   // of a row of phi; floats of a row in shared memory
  View phi_out;                   // phi for the caller, or absent
  float* phi = nullptr;           // [B, T, H, padded]
  const float* tops = nullptr;    // [B, H]: of the keys
  float* top_parts = nullptr;     // [B, H, kTopSlices]
  float* levels = nullptr;        // efficient over tokens: [B, H, K]
  float* dlevels = nullptr;
  // backward
  const float* dphi = nullptr;  // [parts, B, T, H, padded]
  int64_t part_stride = 0;
  int32_t parts = 0;
  View dx;
  float *rows = nullptr, *more = nullptr;  // [B, T, H, n]: what the gradients of parameters are sums of; rebased: two
};

}  // namespace linnet::cuda
