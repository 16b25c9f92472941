// embedding: a thread has 16 bytes of a row. Tokens come from the caller's memory on the GPU, unchecked: they are bounded here.
#include "mechanisms/dense/dense_quantised.cuh"
#include "mechanisms/embedding/embedding.h"
#include "mechanisms/shared/pieces.cuh"

namespace linnet::cuda {
namespace {

template <class T>
__device__ void embed(const View& table, const View& ids, const View& out, float scale, bool whole, int per_row) {
  constexpr int W = ptx::kVector<T>;
  const int64_t piece = blockIdx.x * 256ll + threadIdx.x, token = piece / per_row;
  const int64_t tokens = out.size[1], width = out.size[2];
  if (token >= out.size[0] * tokens) return;
  const int64_t b = token / tokens, t = token % tokens;
  const int64_t id = max(int64_t{0}, min(get_index(ids, place(ids, b, t)), table.size[0] - 1));
  const int c = static_cast<int>(piece % per_row) * W;
  float x[W];
  load_piece<T>(static_cast<const T*>(table.data) + place(table, id), c, static_cast<int>(width), whole, x);
#pragma unroll
  for (int i = 0; i < W; ++i) x[i] *= scale;
  if (out.dtype == table.dtype) {
    store_piece<T>(static_cast<T*>(out.data) + place(out, b, t), c, static_cast<int>(width), whole, x);
    return;
  }
#pragma unroll
  for (int i = 0; i < W; ++i) {
    if (c + i < width) put(out, x[i], b, t, c + i);
  }
}

}  // namespace

#define LINNET_EMBED(suffix, T)                                                                                              \
  extern "C" __global__ void __launch_bounds__(256)                                                                          \
      embed_##suffix(const __grid_constant__ View table, const __grid_constant__ View ids, const __grid_constant__ View out, \
                     float scale, bool whole, int per_row) {                                                                 \
    embed<T>(table, ids, out, scale, whole, per_row);                                                                        \
  }
LINNET_EMBED(f32, float)
LINNET_EMBED(bf16, __nv_bfloat16)
LINNET_EMBED(f16, __half)

// Rows of 8 or 4 bits: a thread has an element.
extern "C" __global__ void __launch_bounds__(256)
    embed_quantised(const __grid_constant__ EmbeddingQuantisedArgs args, const __grid_constant__ View out) {
  const int64_t element = blockIdx.x * 256ll + threadIdx.x, width = out.size[2], token = element / width;
  if (token >= out.size[0] * out.size[1]) return;
  const int64_t b = token / out.size[1], t = token % out.size[1], c = element % width;
  const int64_t id = max(int64_t{0}, min(get_index(args.ids, place(args.ids, b, t)), 16 * args.codes.size[0] - 1));
  const int row = static_cast<int>(id % 16), k = static_cast<int>(c % 32);
  const QuantisedGroup group = group_of(args.bits, args.codes, args.scales, args.offset, id / 16, c / 32, row);
  const float weight = fmaf(group.scale, static_cast<float>(code_of(args.bits, group.codes, row, k)), group.offset);
  put(out, static_cast<float>(args.scale) * weight, b, t, c);
}

}  // namespace linnet::cuda
