#include "mechanisms/recurrence/cuda/rows.h"

#include "mechanisms/recurrence/cuda/channel/launch.h"
#include "mechanisms/recurrence/cuda/chunk/launch.h"
#include "mechanisms/recurrence/cuda/decode.h"
#include "mechanisms/recurrence/cuda/tile/launch.h"

namespace linnet::cuda {
namespace {

bool is_in_place(const Engine& e) { return e.initial.data != nullptr && e.initial.data == e.final.data; }

}  // namespace

const char* row_refuses(Row row, const Engine& e) {
  if (row == Row::step) return nullptr;
  if (row == Row::decode) return decode_refuses(e);
  if (is_in_place(e) && (e.beta.data != nullptr || e.T > kLongest)) {
    return "it needs the state before the call, which is overwritten in place";
  }
  switch (row) {
    case Row::chunk: return chunk_refuses(e);
    case Row::general: return general_refuses(e, false);
    case Row::tile: return tile_refuses(e);
    case Row::channel: return channel_refuses(e);
    case Row::kda: return kda_refuses(e);
    case Row::delta: return delta_refuses(e);
    case Row::step:
    case Row::decode: break;
  }
  return nullptr;
}

EngineScratch cut_engine(Arena& arena, Row row, const Engine& e) {
  EngineScratch scratch;
  switch (row) {
    case Row::step:
    case Row::decode: break;
    case Row::general: scratch.general = cut_general(arena, e, false); break;
    case Row::chunk: scratch.chunks = cut_chunks(arena, e); break;
    case Row::tile:
    case Row::channel: scratch.segments = cut_segments(arena, e); break;
    case Row::kda: scratch.kda = cut_kda(arena, e); break;
    case Row::delta: scratch.delta = cut_delta(arena, e, false); break;
  }
  return scratch;
}

void run_engine(const Launch& launch, Row row, const Engine& e, const EngineScratch& scratch) {
  if (e.H == 0) return;  // every result is empty
  switch (row) {
    case Row::step: return run_steps(launch, e);
    case Row::chunk: return run_chunks(launch, e, scratch.chunks);
    case Row::general: return run_general(launch, e, scratch.general);
    case Row::tile: return run_tile(launch, e, scratch.segments);
    case Row::channel: return run_channels(launch, e, scratch.segments);
    case Row::kda: return run_kda(launch, e, scratch.kda);
    case Row::delta: return run_delta(launch, e, scratch.delta);
    case Row::decode: return run_decode(launch, e);
  }
}

EngineScratch cut_engine(Arena& arena, const Engine& e) {
  EngineScratch scratch;
  if (e.beta.data != nullptr) {
    scratch.delta = cut_delta(arena, e, false);
    scratch.kda = cut_kda(arena, e);
    return scratch;
  }
  scratch.chunks = cut_chunks(arena, e);
  if (scratch.chunks == nullptr && !has_chunks(e)) scratch.segments = cut_segments(arena, e);
  return scratch;
}

void run_engine(const Launch& launch, const Engine& e, const EngineScratch& scratch) {
  Row best = Row::step;
  for (const Row row : kRows) {
    const bool has_memory = row != Row::chunk || scratch.chunks != nullptr;
    if (has_memory && row_refuses(row, e) == nullptr) best = row;
  }
  run_engine(launch, best, e, scratch);
}

Rows assumed_rows(int64_t T, int64_t H, int64_t width, Dtype dtype) {
  return dense_rows(reinterpret_cast<void*>(uintptr_t{1} << 20), T, H, width, dtype);
}

}  // namespace linnet::cuda
