// The tiled recurrence for bf16.
#include "mechanisms/recurrence/cuda/tile/tile.cuh"

namespace linnet::cuda {

LINNET_TILE(tile_bf16_64_64, true, 64, 64, false)
LINNET_TILE(tile_bf16_64_64_decay, true, 64, 64, true)
LINNET_TILE(tile_bf16_64_128, true, 64, 128, false)
LINNET_TILE(tile_bf16_64_128_decay, true, 64, 128, true)
LINNET_TILE(tile_bf16_128_64, true, 128, 64, false)
LINNET_TILE(tile_bf16_128_64_decay, true, 128, 64, true)
LINNET_TILE(tile_bf16_128_128, true, 128, 128, false)
LINNET_TILE(tile_bf16_128_128_decay, true, 128, 128, true)

}  // namespace linnet::cuda
