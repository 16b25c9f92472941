// The GPU's table of the recurrence: the ways to run an Engine, which engines each takes, and how it runs them. Best last: the
// last row that takes an engine runs it. Choosing looks at shapes, strides and addresses, never at memory.
//
//   step      any engine, token by token (step.cu); gradients token by token (plain/) or as walks
//   chunk     chunks on the multiply-add units: f32, other widths (chunk/)
//   general   any engine that runs forwards, chunks on mma.sync: every GPU since Ampere (general/); with gradients of its own
//   tile      no decay or one per head, 16 bits, matrix units (tile/)
//   channel   a decay per channel, bf16, matrix units (channel/)
//   kda       the delta rule with a decay per channel, bf16, matrix units (kda/)
//   delta     the delta rule with no decay or one per head, 16 bits, matrix units (delta/)
//   decode    one token, the state in place (decode.cu)
//
// A new row is a word in Row, its name, a case in each of the functions of rows.cc, and a line in the declarations of the
// operators that have it (`cuda_row`).
#pragma once

#include "mechanisms/recurrence/cuda/delta/launch.h"
#include "mechanisms/recurrence/cuda/general/launch.h"
#include "mechanisms/recurrence/cuda/kda/launch.h"
#include "mechanisms/recurrence/cuda/launch.h"

namespace linnet::cuda {

enum class Row : int32_t { step, chunk, general, tile, channel, kda, delta, decode };
// Those on which engines inside a backward run.
inline constexpr Row kRows[] = {Row::step, Row::chunk, Row::tile, Row::channel, Row::kda, Row::delta, Row::decode};

// Whether weights or states are rounded to the call's type for a matrix unit (core/tolerance.h).
constexpr bool row_rounds(Row row) {
  return row == Row::general || row == Row::tile || row == Row::channel || row == Row::kda || row == Row::delta;
}
constexpr bool row_needs_hopper(Row row) {
  return row == Row::tile || row == Row::channel || row == Row::kda || row == Row::delta;
}
constexpr const char* row_name(Row row) {
  switch (row) {
    case Row::step: return "step";
    case Row::chunk: return "chunk";
    case Row::general: return "general";
    case Row::tile: return "tile";
    case Row::channel: return "channel";
    case Row::kda: return "kda";
    case Row::delta: return "delta";
    case Row::decode: return "decode";
  }
  return "";
}
// Tokens from which a row is slow (Impl::slow_from): one by one costs little where there are few.
constexpr int64_t row_slow_from(Row row) { return row == Row::step ? 128 : 0; }

// Null when a row takes this engine, else the reason.
const char* row_refuses(Row row, const Engine& engine);

// Memory between the kernels of an engine; the same cuts on a null arena tell its size.
struct EngineScratch {
  float* segments = nullptr;  // tile, channel: cut_segments
  float* chunks = nullptr;    // chunk: cut_chunks
  GeneralScratch general;
  DeltaScratch delta;
  KdaScratch kda;
};
EngineScratch cut_engine(Arena& arena, Row row, const Engine& engine);
// Enqueues the engine; a failure is in launch.error.
void run_engine(const Launch& launch, Row row, const Engine& engine, const EngineScratch& scratch);

// For engines inside a backward, several of which share memory: cut by the shape alone, then each on the best row.
EngineScratch cut_engine(Arena& arena, const Engine& engine);
void run_engine(const Launch& launch, const Engine& engine, const EngineScratch& scratch);

// Where results lie that are not known yet when a row is asked: an address that every kernel can write to.
Rows assumed_rows(int64_t T, int64_t H, int64_t width, Dtype dtype);

}  // namespace linnet::cuda
