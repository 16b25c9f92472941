// Runs the delta rule with a decay per channel on matrix units.
#pragma once

#include "mechanisms/recurrence/recurrence_kda.h"
#include "mechanisms/recurrence/recurrence_launch.h"

namespace linnet::cuda {

// bf16; K = V of 64 or 128; beta, and a decay per channel as bf16 or f32 in rows of 16 bytes.
bool is_kda(const Engine& engine);
KdaScratch cut_kda(Arena& arena, const Engine& engine);
void run_kda(const Launch& launch, const Engine& engine, const KdaScratch& scratch);

}  // namespace linnet::cuda
