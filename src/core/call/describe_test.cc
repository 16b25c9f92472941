#include "core/call/describe.h"

#include <gtest/gtest.h>

#include "core/letters.h"

namespace linnet {
namespace {

JsonValue named(const JsonValue& list, std::string_view name) {
  for (JsonItems items(list); items.next();) {
    if (items.value().find("name").equals(name)) return items.value();
  }
  return {};
}

TEST(Describe, is_json_with_every_operator_tensor_and_option) {
  for (const int indent : {0, 2}) {
    const std::string text = describe_json(indent);
    JsonValue root;
    const Status status = parse_json(text, "describe", {}, root);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_FALSE(root.find("version").string().empty());
    for (const Op* op : all_ops()) {
      const JsonValue one = named(root.find("ops"), op->name);
      EXPECT_TRUE(one.find("summary").equals(op->summary)) << op->name;
      for (const TensorDecl& decl : op->inputs) EXPECT_TRUE(named(one.find("inputs"), decl.name).find("doc").equals(decl.doc));
      for (const TensorDecl& decl : op->outputs)
        EXPECT_TRUE(named(one.find("outputs"), decl.name).find("doc").equals(decl.doc));
      for (const TensorDecl& decl : op->inputs) {
        for (const std::string_view word : Words(decl.shape)) {
          double size = 0;
          EXPECT_TRUE(!is_letter(word) || (one.find("example").find(word).number(size) && size > 0)) << op->name << " " << word;
        }
      }
      for (const OptionDecl& option : op->options) {
        EXPECT_TRUE(named(one.find("options"), option.name).find("doc").equals(option.doc));
      }
    }
  }
}

// (operator, list, name, member, value as JSON)
struct Fact {
  const char *op, *list, *name, *member, *text;
};
class DescribeFacts : public testing::TestWithParam<Fact> {};

TEST_P(DescribeFacts, holds) {
  const Fact& fact = GetParam();
  const Op* op = find_op(fact.op);
  ASSERT_NE(op, nullptr);
  const std::string text = describe_json(*op);
  JsonValue root;
  ASSERT_TRUE(parse_json(text, "describe", {}, root).ok());
  EXPECT_EQ(named(root.find(fact.list), fact.name).find(fact.member).text(), fact.text);
}

INSTANTIATE_TEST_SUITE_P(
    all, DescribeFacts,
    testing::Values(
        Fact{"softmax", "inputs", "q", "shape", R"(["B","Tq","H","K"])"},
        Fact{"softmax", "inputs", "bias", "broadcast", "true"}, Fact{"softmax", "inputs", "cu_seqlens_q", "of", R"("Tq")"},
        Fact{"softmax", "inputs", "key_len", "element", R"("index")"}, Fact{"softmax", "outputs", "lse", "saved", "true"},
        Fact{"softmax", "outputs", "lse", "element", R"("acc")"}, Fact{"softmax", "options", "scale", "default", "null"},
        Fact{"softmax", "options", "scale", "low", "null"}, Fact{"softmax", "options", "window", "default", "[-1,-1]"},
        Fact{"softmax", "options", "window", "low", "-1"}, Fact{"softmax", "options", "window", "high", "null"},
        Fact{"softmax", "options", "prefix", "low", "0"}, Fact{"softmax", "options", "prefix", "high", "null"},
        Fact{"softmax", "options", "softcap", "low", "0"}, Fact{"softmax", "options", "causal", "default", "false"},
        Fact{"softmax", "implementations", "ref", "usable", "true"},
        Fact{"softmax_decode", "inputs", "k_cache", "mutated", "true"},
        Fact{"linear", "options", "map", "default", R"("identity")"}, Fact{"linear", "options", "eps", "default", "1e-06"},
        Fact{"linear", "options", "dpfp_nu", "high", "64"}));

}  // namespace
}  // namespace linnet
