#include "tile.cuh"

namespace linnet::cuda {

LINNET_MONARCH_TILE(tile_bf16_64_64, 64, 64, true, 5)
LINNET_MONARCH_TILE(tile_bf16_64_128, 64, 128, true, 2)
LINNET_MONARCH_TILE(tile_bf16_128_64, 128, 64, true, 4)
LINNET_MONARCH_TILE(tile_bf16_128_128, 128, 128, true, 1)

}  // namespace linnet::cuda
