#include "layers/map_cuda.h"

#include "core/cuda/driver.h"

LINNET_USES_IMAGES(layers)

namespace linnet::cuda {
namespace {

constexpr const char* kImage = "layers/map_cuda";
constexpr int64_t kThreads = 256;
int64_t blocks(int64_t elements) { return (elements + kThreads - 1) / kThreads; }

}  // namespace

void map_forward(const layers::MapCall& call, const Launch& launch) {
  MapLaunch m;
  m.program = *call.program;
  m.rank = call.rank;
  int64_t rows = 1;
  for (int d = 0; d < call.rank; ++d) {
    m.size[d] = call.size[d];
    if (d + 1 < call.rank) rows *= call.size[d];
  }
  for (int i = 0; i < m.program.inputs; ++i) m.input[i] = call.input[i];
  m.out = call.out;
  const int64_t width = call.size[call.rank - 1];
  if (rows * width == 0) return;
  if (m.program.reduces) {
    enqueue(launch, {kImage, "map_rows", 128}, {rows}, m);
  } else {
    enqueue(launch, {kImage, "map_elements", 256}, {blocks(rows * width)}, m);
  }
}
int64_t map_workspace(const layers::MapCall&, int) { return 0; }

void copy_view(const View& from, const View& to, const Launch& launch) {
  if (from.elements() > 0) enqueue(launch, {kImage, "copy_elements", 256}, {blocks(from.elements())}, from, to);
}
void fill_lengths(const View& lengths, int64_t value, const Launch& launch) {
  if (lengths.elements() > 0) enqueue(launch, {kImage, "set_lengths", 256}, {blocks(lengths.elements())}, lengths, value);
}
void fill_positions(float* to, int64_t count, int64_t first, const Launch& launch) {
  if (count > 0) enqueue(launch, {kImage, "set_positions", 256}, {blocks(count)}, to, count, first);
}

}  // namespace linnet::cuda
