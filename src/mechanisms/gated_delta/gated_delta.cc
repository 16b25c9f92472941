#include "gated_delta.h"

#include "mechanisms/recurrence/declare.h"

namespace linnet {
namespace {
constexpr RecurrenceMember kMember = {
    "gated_delta",
    "Gated DeltaNet (decay per head) and Kimi Delta Attention (decay per key channel)",
    "S' = diag(exp(g_t)) S_{t-1};  S_t = S' + k_t u_t^T,  u_t = beta_t (v_t - S'^T k_t);  o_t = scale S_t^T q_t",
    Decay::either,
    true,
    false};
}  // namespace
LINNET_RECURRENCE_MEMBER(gated_delta, kMember)

}  // namespace linnet
