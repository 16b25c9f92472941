// gated_delta: the delta rule with a decay: one per head (Gated DeltaNet, arXiv 2412.06464) or one per key channel (KDA, arXiv
// 2510.26692). The decay acts first; the correction reads the decayed state.
//
//   S' = diag(exp(g_t)) S_{t-1},   S_t = S' + k_t u_t^T,   u_t = beta_t (v_t - S'^T k_t),   o_t = scale S_t^T q_t
//
// It is `recurrence` with g and beta and nothing else; see recurrence.h for every argument.
#pragma once

#include "../recurrence/recurrence.h"

namespace linnet {

const Op& gated_delta_op();
Status gated_delta(const RecurrenceArgs& args, const RecurrenceOut& out, const Context& context);
Status gated_delta_backward(const RecurrenceArgs& args, const RecurrenceOut& out, const RecurrenceGrads& grads,
                            const Context& context);
int64_t gated_delta_workspace(const RecurrenceArgs& args, Pass pass, const Context& context);
const Op& gated_delta_decode_op();
Status gated_delta_decode(const RecurrenceDecodeArgs& args, const RecurrenceDecodeOut& out, const Context& context);
int64_t gated_delta_decode_workspace(const RecurrenceDecodeArgs& args, const Context& context);

}  // namespace linnet
