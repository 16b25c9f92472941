// What every declaration has to say.
#include "core/op.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "mechanisms/recurrence/recurrence.h"

namespace linnet {
namespace {

// A struct may serve several operators. Each of its members is declared, or declared absent: a gap larger than what aligns the
// next member would be a member that nobody checks.
TEST(AllOps, EveryMemberOfTheirStructsIsDeclared) {
  const auto bytes_of = [](OptionKind kind) -> size_t {
    switch (kind) {
      case OptionKind::real: return sizeof(double);
      case OptionKind::maybe_real: return sizeof(Maybe);
      case OptionKind::integer: return sizeof(int64_t);
      case OptionKind::boolean: return sizeof(bool);
      case OptionKind::choice: return sizeof(int32_t);
      case OptionKind::window: return sizeof(Window);
      case OptionKind::sizes: return sizeof(Sizes);
    }
    return 0;
  };
  const auto expect_covered = [](std::vector<std::pair<size_t, size_t>> members, size_t bytes, const std::string& what) {
    std::sort(members.begin(), members.end());
    size_t end = 0;
    for (const auto& [offset, size] : members) {
      EXPECT_GE(offset, end) << what;
      EXPECT_LT(offset - end, size < 8 ? size : 8) << what << ": bytes " << end << " to " << offset;
      end = offset + size;
    }
    EXPECT_LT(bytes - end, 8) << what << ": bytes " << end << " to " << bytes;
  };
  for (const Op* op : all_ops()) {
    std::vector<std::pair<size_t, size_t>> args, out, grads;
    for (const TensorDecl& decl : op->inputs) args.emplace_back(decl.offset, sizeof(View));
    for (const OptionDecl& option : op->options) args.emplace_back(option.offset, bytes_of(option.kind));
    for (const AbsentDecl& absent : op->absent) args.emplace_back(absent.offset, absent.bytes);
    for (const TensorDecl& decl : op->outputs) out.emplace_back(decl.offset, sizeof(View));
    for (const auto* list : {&op->inputs, &op->outputs}) {
      for (const TensorDecl& decl : *list) {
        if (decl.differentiable) grads.emplace_back(decl.grad_offset, sizeof(View));
      }
    }
    for (const AbsentDecl& absent : op->absent_gradients) grads.emplace_back(absent.offset, absent.bytes);
    expect_covered(args, op->args_bytes, op->name + " arguments");
    expect_covered(out, op->out_bytes, op->name + " results");
    expect_covered(grads, op->grads_bytes, op->name + " gradients");
  }
}

// Members of the shared struct that a member of the family does not have.
TEST(AllOps, UndeclaredMembersAreRefused) {
  std::vector<float> memory(64);
  const auto tensor = [&](std::initializer_list<int64_t> sizes) { return View::dense(memory.data(), Dtype::f32, sizes); };
  RecurrenceArgs args;
  args.q = args.k = args.v = tensor({1, 2, 1, 4});
  args.beta = tensor({1, 2, 1});
  const View out = tensor({1, 2, 1, 4});
  const RecurrenceOut results = {.out = out, .final_state = {}};
  std::vector<char> workspace(1 << 20);
  const Context context = {.workspace = workspace.data(), .workspace_bytes = 1 << 20, .impl = "ref"};
  const auto message = [&](const char* op) {
    return run(*find_op(op), Pass::forward, &args, &results, nullptr, context).message();
  };
  EXPECT_EQ(message("delta"), "");
  EXPECT_EQ(message("decay"), "decay: beta is not an input");
  EXPECT_EQ(message("gla"), "gla: beta is not an input");
  args.g = View::dense(nullptr, Dtype::f32, {3});
  EXPECT_EQ(message("delta"), "delta: g is not an input");
  args.g = tensor({1, 2, 1});
  EXPECT_EQ(message("delta"), "delta: g is not an input");
  EXPECT_EQ(message("gated_delta"), "");
  args.g_head = tensor({1});
  EXPECT_EQ(message("gated_delta"), "gated_delta: g_head is not an input");
  args.g_head = args.beta = View();
  EXPECT_EQ(message("decay"), "");
  args.double_beta = true;
  EXPECT_EQ(message("decay"), "decay: double_beta is not an option");
  args.double_beta = false;
  args.g = View();
  args.beta = tensor({1, 2, 1});
  const RecurrenceGrads grads = {.dout = out, .dg = tensor({1, 2, 1})};
  EXPECT_EQ(run(*find_op("delta"), Pass::backward, &args, &results, &grads, context).message(), "delta: dg is not a gradient");
}

// What every declaration has to say: the surfaces are made from it.
TEST(AllOps, DeclarationsAreComplete) {
  for (const Op* op : all_ops()) {
    EXPECT_EQ(find_op(op->name), op);
    const bool elementwise = op->mechanism == "activation";  // one folder and page for activation, glu and add
    EXPECT_TRUE(elementwise || op->name == op->mechanism || op->name.rfind(op->mechanism + "_", 0) == 0) << op->name;
    EXPECT_FALSE(op->summary.empty()) << op->name;
    EXPECT_FALSE(op->equation.empty()) << op->name;
    EXPECT_NE(op->cost, nullptr) << op->name;
    ASSERT_FALSE(op->impls.empty()) << op->name;
    EXPECT_EQ(op->impls.front().name, "ref") << op->name;
    EXPECT_TRUE(op->decode.empty() || find_op(op->decode) != nullptr) << op->name;
    EXPECT_EQ(op->inputs.front().element, Element::io) << op->name;
    for (const auto* list : {&op->inputs, &op->outputs}) {
      for (const TensorDecl& decl : *list) EXPECT_FALSE(decl.doc.empty()) << op->name << " " << decl.name;
    }
    for (const OptionDecl& option : op->options) EXPECT_FALSE(option.doc.empty()) << op->name << " " << option.name;
  }
  EXPECT_EQ(find_op("nothing"), nullptr);
}

}  // namespace
}  // namespace linnet
