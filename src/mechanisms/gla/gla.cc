#include "gla.h"

#include "mechanisms/recurrence/declare.h"

namespace linnet {
namespace {
constexpr RecurrenceMember kMember = {"gla",
                                      "gated linear attention: one decay per key channel",
                                      "S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T;  o_t = scale S_t^T q_t",
                                      Decay::channel,
                                      false,
                                      false};
}  // namespace
LINNET_RECURRENCE_MEMBER(gla, kMember)

}  // namespace linnet
