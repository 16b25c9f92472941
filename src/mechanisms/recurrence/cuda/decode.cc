#include "mechanisms/recurrence/cuda/decode.h"

#include "core/cuda/device.h"
#include "mechanisms/recurrence/cuda/launch.h"

namespace linnet::cuda {

const char* decode_refuses(const Engine& e) {
  if (e.T != 1) return "it takes one token at a time";
  if (e.N <= 0 || e.K <= 0 || e.V <= 0) return "there is no state";
  if (e.initial.data == nullptr || e.initial.data != e.final.data) return "the state is not overwritten in place";
  if (e.sums) return "it keeps no sums of keys";
  if (e.l2_norm) return "it does not normalise q and k (l2_norm)";
  if (e.offsets != nullptr || e.write_mask != nullptr) return "it has no packed sequences and no masks";
  if (e.out.data == nullptr) return "nothing is read";
  if (e.V % 4 != 0) return "it takes values of a multiple of 4 channels";
  const bool aligned = reinterpret_cast<uintptr_t>(e.initial.data) % 16 == 0 && e.initial.stride_column == 1 &&
                       e.initial.stride_row % 4 == 0 && e.initial.stride_h % 4 == 0 && e.initial.stride_n % 4 == 0;
  return aligned ? nullptr : "rows of the state do not lie at multiples of 16 bytes";
}

void run_decode(const Launch& launch, const Engine& e) {
  const bool wide = is_hopper() && is_tile_width(e.K) && is_tile_width(e.V) && e.initial.stride_row == e.V;
  const DecodeRing ring = wide ? decode_ring(e.K, e.V) : DecodeRing{};
  const int64_t heads = e.N * e.H, blocks = int64_t{cuda::multiprocessor_count()} * ring.blocks;
  if (wide && heads >= 2 * blocks && heads < int64_t{1} << 30) {
    static constexpr const char* kNames[2][2] = {{"ring_64_64", "ring_64_128"}, {"ring_128_64", "ring_128_128"}};
    const Kernel kernel = {"recurrence/cuda/ring", kNames[e.K == 128][e.V == 128], ring.threads, ring.bytes};
    return enqueue(launch, kernel, {blocks}, e);
  }
  const char* name = e.K <= 64 ? "decode_4" : e.K <= 128 ? "decode_8" : "decode_16";
  enqueue(launch, {"recurrence/cuda/decode", name, 128}, {e.N * e.H, (e.V + 31) / 32}, e);
}

}  // namespace linnet::cuda
