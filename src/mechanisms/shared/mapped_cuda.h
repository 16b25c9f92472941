// mapped on the GPU: linear attention over rows of features that a map has written, in f32 (shared/mapped.h says what it
// computes). Causal: walks of the recurrence engine; else products of matrices.
//
//   features wider than 128 are cut into tiles, each a head of the engine; values with the column of ones (which makes the sum
//   of weights) wider than 128 are cut too, each a walk of its own.
//
// A mechanism writes features with its own kernel and turns their gradients back; everything between is here.
#pragma once

#include "core/launch.h"
#include "mechanisms/features/features.h"
#include "mechanisms/recurrence/cuda/rows.h"

namespace linnet::cuda {

struct MappedShape {
  int64_t B = 0, T = 0, S = 0, H = 0, F = 0, V = 0;
  bool causal = false;
  Normalizer normalizer = Normalizer::add;  // none, add or max
  float eps = 0;
  View decay;                // log decays of a causal call, or absent: [B, T, H], or [B, T, H tiles]
  int64_t wanted_tiles = 0;  // of the features of a causal call, when their borders matter; 0: as few as the engine takes

  int64_t columns() const { return V + 1; }  // of the values, with that of ones
  int64_t feature_tiles() const {
    if (!causal) return 1;
    return wanted_tiles > 0 ? wanted_tiles : F > 128 ? (F + 127) / 128 : 1;
  }
  int64_t tile_features() const { return (F + feature_tiles() - 1) / feature_tiles(); }
  int64_t padded_features() const { return feature_tiles() * tile_features(); }
  int64_t value_tiles() const { return causal && columns() > 128 ? (columns() + 127) / 128 : 1; }
  int64_t tile_columns() const { return (columns() + value_tiles() - 1) / value_tiles(); }
  int64_t padded_columns() const { return value_tiles() * tile_columns(); }
};

struct MappedTensors {
  View v, key_mask;                     // [B, S, H, V], [B, S]
  View out, den, final_state, final_z;  // written by the forward; out and den are read by the backward
  View dout, dv;                        // [B, T, H, V], [B, S, H, V]
  bool wants_dq = true, wants_dk = true;
};

// Memory of a call; the same cuts on a null arena tell its size. phi: [B, T, H, padded_features()], zeros behind F and for
// masked keys: the mechanism fills it. dphi: value_tiles() parts of the same shape, each behind the other: their sum is the
// gradient.
struct MappedScratch {
  float *phi_q = nullptr, *phi_k = nullptr, *dphi_q = nullptr, *dphi_k = nullptr;
  float *v0 = nullptr, *values = nullptr, *rows = nullptr, *parts = nullptr, *states = nullptr, *state = nullptr;
  int32_t* first = nullptr;  // [B, H]: the first token that is not finite
  EngineScratch engine;
};
MappedScratch cut_mapped(Arena& arena, const MappedShape& shape, Pass pass);

// The walks alone, for mechanisms with values and results of their own: `values` [B, S, H, padded_columns()] and, backward, the
// gradients `rows` of what the forward leaves in `parts` [B, T, H feature_tiles(), padded_columns()]. The backward leaves dphi
// and, in `parts`, the gradient of the values.
void run_walks(const Launch& launch, const MappedShape& shape, bool states, const MappedScratch& scratch);
void run_walks_backward(const Launch& launch, const MappedShape& shape, bool dq, bool dk, bool dv,
                        const MappedScratch& scratch);

void run_mapped(const Launch& launch, const MappedShape& shape, const MappedTensors& tensors, const MappedScratch& scratch);
void run_mapped_backward(const Launch& launch, const MappedShape& shape, const MappedTensors& tensors,
                         const MappedScratch& scratch);

// One or few tokens: features [B, T, H, F] of both; state [B, H, F, V] and z [B, H, F] in place. den: [B, T, H] of memory.
void run_mapped_decode(const Launch& launch, const MappedShape& shape, const float* phi_q, const float* phi_k, const View& v,
                       const View& state, const View& z, const View& out, float* den);

// What the kernels are told.
struct MappedCall {
  MappedTensors t;
  int64_t B = 0, T = 0, S = 0;
  bool causal = false;
  int32_t H = 0, F = 0, V = 0, tiles = 1, tile = 0, columns = 0, padded = 0;  // feature tiles and their width; of the values
  Normalizer normalizer = Normalizer::add;
  float eps = 0;
  float *v0 = nullptr, *values = nullptr, *rows = nullptr;  // [B, H, V], [B, S, H, padded], [B, T, H, padded]
  const float* parts = nullptr;                             // [B, T or S, H tiles, padded]
  const float* states = nullptr;                            // [B, H tiles, tile, padded]
};

}  // namespace linnet::cuda
