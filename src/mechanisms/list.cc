#include "core/op.h"

namespace linnet {

#define LINNET_OP(name) const Op& name##_op();
#include "list.h"
#undef LINNET_OP

const std::vector<const Op*>& all_ops() {
  static const std::vector<const Op*> ops = {
#define LINNET_OP(name) &name##_op(),
#include "list.h"
#undef LINNET_OP
  };
  return ops;
}

}  // namespace linnet
