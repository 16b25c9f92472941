#include "gradients.cuh"

namespace linnet::cuda {

LINNET_MONARCH_GRADIENTS(blocks_bf16_64_64, blocks, 64, 64, true, 5)
LINNET_MONARCH_GRADIENTS(slot_gradients_bf16_64_64, slots, 64, 64, true, 4)
LINNET_MONARCH_GRADIENTS(block_gradients_bf16_64_64, block_gradients, 64, 64, true, 3)
LINNET_MONARCH_GRADIENTS(blocks_bf16_64_128, blocks, 64, 128, true, 1)
LINNET_MONARCH_GRADIENTS(slot_gradients_bf16_64_128, slots, 64, 128, true, 1)
LINNET_MONARCH_GRADIENTS(block_gradients_bf16_64_128, block_gradients, 64, 128, true, 1)
LINNET_MONARCH_GRADIENTS(blocks_bf16_128_64, blocks, 128, 64, true, 2)
LINNET_MONARCH_GRADIENTS(slot_gradients_bf16_128_64, slots, 128, 64, true, 2)
LINNET_MONARCH_GRADIENTS(block_gradients_bf16_128_64, block_gradients, 128, 64, true, 2)
LINNET_MONARCH_GRADIENTS(blocks_bf16_128_128, blocks, 128, 128, true, 1)
LINNET_MONARCH_GRADIENTS(slot_gradients_bf16_128_128, slots, 128, 128, true, 1)
LINNET_MONARCH_GRADIENTS(block_gradients_bf16_128_128, block_gradients, 128, 128, true, 1)

}  // namespace linnet::cuda
