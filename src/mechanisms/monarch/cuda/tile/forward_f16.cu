#include "tile.cuh"

namespace linnet::cuda {

LINNET_MONARCH_TILE(tile_f16_64_64, 64, 64, false, 5)
LINNET_MONARCH_TILE(tile_f16_64_128, 64, 128, false, 2)
LINNET_MONARCH_TILE(tile_f16_128_64, 128, 64, false, 4)
LINNET_MONARCH_TILE(tile_f16_128_128, 128, 128, false, 1)

}  // namespace linnet::cuda
