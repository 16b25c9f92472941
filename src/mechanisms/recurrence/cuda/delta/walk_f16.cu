// The delta rules for f16.
#include "mechanisms/recurrence/cuda/delta/walk.cuh"

namespace linnet::cuda {

LINNET_DELTA(delta_64, false, 64, false, true, false)
LINNET_DELTA(delta_64_decay, false, 64, true, true, false)
LINNET_DELTA(delta_128, false, 128, false, true, false)
LINNET_DELTA(delta_128_decay, false, 128, true, true, false)
LINNET_DELTA(summary_64, false, 64, false, false, false)
LINNET_DELTA(summary_64_decay, false, 64, true, false, false)
LINNET_DELTA(summary_128, false, 128, false, false, false)
LINNET_DELTA(summary_128_decay, false, 128, true, false, false)
LINNET_DELTA_EARLY(early_128, false, 128)

}  // namespace linnet::cuda
