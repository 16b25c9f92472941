// What a runner needs on the GPU besides operators: maps (map.h), copies, lengths and positions.
#pragma once

#include "layers/map.h"

namespace linnet::cuda {

// A call of map.h as its kernels are told; the program lies inside, since a pointer to it would be the host's.
struct MapLaunch {
  layers::MapProgram program;
  int32_t rank = 0;
  int64_t size[layers::kMapRank] = {};
  layers::MapTensor input[layers::kMapInputs];
  layers::MapTensor out;
};
static_assert(sizeof(MapLaunch) <= 4096);

void map_forward(const layers::MapCall& call, const Launch& launch);
int64_t map_workspace(const layers::MapCall& call, int workers);
void copy_view(const View& from, const View& to, const Launch& launch);              // of equal shapes and types
void fill_lengths(const View& lengths, int64_t value, const Launch& launch);         // i64
void fill_positions(float* to, int64_t count, int64_t first, const Launch& launch);  // first, first + 1, ..

}  // namespace linnet::cuda
