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

const Op* find_op(std::string_view name) {
  for (const Op* op : all_ops()) {
    if (op->name == name) return op;
  }
  return nullptr;
}

void know_all_ops(const Op* (*find)(std::string_view name));  // core/call/choose.cc
namespace {
// Where this file is linked, every operator is, and a name in LINNET_IMPL can be told to be none of them.
[[maybe_unused]] const bool known = (know_all_ops(find_op), true);
}  // namespace

}  // namespace linnet
