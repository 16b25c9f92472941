// decay: linear attention whose state shrinks by one factor per head and token: constant (retention, arXiv 2307.08621) or given
// by the data (simple GLA, Mamba-2 without its gates).
//
//   S_t = exp(g_t) S_{t-1} + k_t v_t^T,   o_t = scale S_t^T q_t
//
// It is `recurrence` with g (or g_head) and nothing else; see recurrence.h for every argument.
#pragma once

#include "../recurrence/recurrence.h"

namespace linnet {

const Op& decay_op();
Status decay(const RecurrenceArgs& args, const RecurrenceOut& out, const Context& context);
Status decay_backward(const RecurrenceArgs& args, const RecurrenceOut& out, const RecurrenceGrads& grads,
                      const Context& context);
int64_t decay_workspace(const RecurrenceArgs& args, Pass pass, const Context& context);
const Op& decay_decode_op();
Status decay_decode(const RecurrenceDecodeArgs& args, const RecurrenceDecodeOut& out, const Context& context);
int64_t decay_decode_workspace(const RecurrenceDecodeArgs& args, const Context& context);

}  // namespace linnet
