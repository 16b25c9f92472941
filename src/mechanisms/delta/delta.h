// delta: DeltaNet (arXiv 2406.06484): each token reads what the state returns for its key and writes the difference to its
// value.
//
//   S_t = S_{t-1} + k_t u_t^T,   u_t = beta_t (v_t - S_{t-1}^T k_t),   o_t = scale S_t^T q_t
//
// It is `recurrence` with beta and nothing else; see recurrence.h for every argument.
#pragma once

#include "../recurrence/recurrence.h"

namespace linnet {

const Op& delta_op();
Status delta(const RecurrenceArgs& args, const RecurrenceOut& out, const Context& context);
Status delta_backward(const RecurrenceArgs& args, const RecurrenceOut& out, const RecurrenceGrads& grads,
                      const Context& context);
int64_t delta_workspace(const RecurrenceArgs& args, Pass pass, const Context& context);
const Op& delta_decode_op();
Status delta_decode(const RecurrenceDecodeArgs& args, const RecurrenceDecodeOut& out, const Context& context);
int64_t delta_decode_workspace(const RecurrenceDecodeArgs& args, const Context& context);

}  // namespace linnet
