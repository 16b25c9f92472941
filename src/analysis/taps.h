// taps: the mixer that an operator's call is, from the tensors that entered the call: of a block of a model while a text runs
// through it (runtime/layered.h), or of a layer's vector file.
//
//   OpTaps taps;
//   LINNET_TRY(parts.record(layer, tapped_ops(), x, y, &taps));
//   MixerInputs inputs;
//   LINNET_TRY(mixer_of_taps(taps, head, &inputs, &mixer));             // then analyse(mixer, inputs, ...)
#pragma once

#include <functional>

#include "analysis/mixers.h"
#include "runtime/layered.h"

namespace linnet::analysis {

// Operators whose call is a mixer of mixers.h.
const std::vector<std::string>& tapped_ops();
int64_t heads_of(const OpTaps& taps);  // S6: groups of kScanChannels channels
inline constexpr int64_t kScanChannels = 8;

// What the operator itself gave for a head, [T, Dy], and what it does with the system's read (empty: nothing): a gate, a free
// energy.
struct KernelRead {
  std::vector<double> out;
  std::function<std::vector<double>(const System& system, const std::vector<double>& read)> behind;
};

// One head of the first row of the batch. A sentence where the call is none of the mixers: not causal, a window, a soft cap.
Status mixer_of_taps(const OpTaps& taps, int64_t head, MixerInputs* inputs, std::string* mixer, KernelRead* read = nullptr);

// A vector file of a call of h3: the row of its batch.
Status taps_of_h3_file(const std::string& path, int64_t batch, OpTaps* taps);

// The call inside a vector file of a layer (src/layers): the layer is run in double on the file's x and weights.
Status taps_of_layer_file(const std::string& path, OpTaps* taps);

}  // namespace linnet::analysis
