#include "delta.h"

#include "mechanisms/recurrence/declare.h"

namespace linnet {
namespace {
constexpr RecurrenceMember kMember = {"delta",
                                      "DeltaNet: each token replaces what the state returns for its key",
                                      "S_t = S_{t-1} + k_t u_t^T,  u_t = beta_t (v_t - S_{t-1}^T k_t);  o_t = scale S_t^T q_t",
                                      Decay::none,
                                      true,
                                      false};
}  // namespace
LINNET_RECURRENCE_MEMBER(delta, kMember)

}  // namespace linnet
