#include "decay.h"

#include "mechanisms/recurrence/declare.h"

namespace linnet {
namespace {
constexpr RecurrenceMember kMember = {"decay",
                                      "retention and scalar-decay linear attention: one decay per head",
                                      "S_t = exp(g_t) S_{t-1} + k_t v_t^T;  o_t = scale S_t^T q_t",
                                      Decay::scalar,
                                      false,
                                      true};
}  // namespace
LINNET_RECURRENCE_MEMBER(decay, kMember)

}  // namespace linnet
