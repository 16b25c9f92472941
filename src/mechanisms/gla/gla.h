// gla: gated linear attention (arXiv 2312.06635): a decay for every key channel, given by the data.
//
//   S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T,   o_t = scale S_t^T q_t
//
// It is `recurrence` with g and nothing else; see recurrence.h for every argument.
#pragma once

#include "../recurrence/recurrence.h"

namespace linnet {

const Op& gla_op();
Status gla(const RecurrenceArgs& args, const RecurrenceOut& out, const Context& context);
Status gla_backward(const RecurrenceArgs& args, const RecurrenceOut& out, const RecurrenceGrads& grads, const Context& context);
int64_t gla_workspace(const RecurrenceArgs& args, Pass pass, const Context& context);
const Op& gla_decode_op();
Status gla_decode(const RecurrenceDecodeArgs& args, const RecurrenceDecodeOut& out, const Context& context);
int64_t gla_decode_workspace(const RecurrenceDecodeArgs& args, const Context& context);

}  // namespace linnet
