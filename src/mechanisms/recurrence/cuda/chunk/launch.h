// Runs a recurrence without beta in chunks on the multiply-add units: any type, keys and values of up to 128 channels, decays
// per head or (forwards alone) per channel.
#pragma once

#include "mechanisms/recurrence/cuda/chunk/chunk.h"
#include "mechanisms/recurrence/cuda/launch.h"

namespace linnet::cuda {

// Null when these kernels take the engine, given the memory of cut_chunks.
const char* chunk_refuses(const Engine& engine);
// Whether they are worth it for this shape, whatever its rows: what gradients ask for memory by.
bool has_chunks(const Engine& engine);
// States between chunks and the decays over them; null where has_chunks says no.
float* cut_chunks(Arena& arena, const Engine& engine);
void run_chunks(const Launch& launch, const Engine& engine, float* scratch);

}  // namespace linnet::cuda
