// The declarations of the recurrence family differ in the inputs they name; everything else is said here once.
#pragma once

#include "core/op.h"
#include "recurrence.h"

namespace linnet {

enum class Decay { none, scalar, channel, either };

// What a member has: its decay, the write strength beta, a constant decay per head.
struct RecurrenceMember {
  const char* name;
  const char* summary;
  const char* equation;
  Decay decay;
  bool beta, g_head;
};

Op declare_recurrence(const RecurrenceMember& member);
Op declare_recurrence_decode(const RecurrenceMember& member);

}  // namespace linnet

// The public functions of a member: LINNET_RECURRENCE_MEMBER(gla, member) defines gla_op, gla, gla_backward, gla_workspace and
// those of gla_decode.
#define LINNET_RECURRENCE_MEMBER(stem, member)                                                                     \
  const Op& stem##_op() {                                                                                          \
    static const Op op = declare_recurrence(member);                                                               \
    return op;                                                                                                     \
  }                                                                                                                \
  const Op& stem##_decode_op() {                                                                                   \
    static const Op op = declare_recurrence_decode(member);                                                        \
    return op;                                                                                                     \
  }                                                                                                                \
  Status stem(const RecurrenceArgs& args, const RecurrenceOut& out, const Context& context) {                      \
    return run(stem##_op(), Pass::forward, &args, &out, nullptr, context);                                         \
  }                                                                                                                \
  Status stem##_backward(const RecurrenceArgs& args, const RecurrenceOut& out, const RecurrenceGrads& grads,       \
                         const Context& context) {                                                                 \
    return run(stem##_op(), Pass::backward, &args, &out, &grads, context);                                         \
  }                                                                                                                \
  int64_t stem##_workspace(const RecurrenceArgs& args, Pass pass, const Context& context) {                        \
    return workspace_bytes(stem##_op(), pass, &args, context);                                                     \
  }                                                                                                                \
  Status stem##_decode(const RecurrenceDecodeArgs& args, const RecurrenceDecodeOut& out, const Context& context) { \
    return run(stem##_decode_op(), Pass::forward, &args, &out, nullptr, context);                                  \
  }                                                                                                                \
  int64_t stem##_decode_workspace(const RecurrenceDecodeArgs& args, const Context& context) {                      \
    return workspace_bytes(stem##_decode_op(), Pass::forward, &args, context);                                     \
  }
