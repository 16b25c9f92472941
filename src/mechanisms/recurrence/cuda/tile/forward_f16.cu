// The tiled recurrence for f16.
#include "mechanisms/recurrence/cuda/tile/tile.cuh"

namespace linnet::cuda {

LINNET_TILE(tile_f16_64_64, false, 64, 64, false)
LINNET_TILE(tile_f16_64_64_decay, false, 64, 64, true)
LINNET_TILE(tile_f16_64_128, false, 64, 128, false)
LINNET_TILE(tile_f16_64_128_decay, false, 64, 128, true)
LINNET_TILE(tile_f16_128_64, false, 128, 64, false)
LINNET_TILE(tile_f16_128_64_decay, false, 128, 64, true)
LINNET_TILE(tile_f16_128_128, false, 128, 128, false)
LINNET_TILE(tile_f16_128_128_decay, false, 128, 128, true)

}  // namespace linnet::cuda
