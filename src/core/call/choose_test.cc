// Which implementation runs a call, and the workspace that it asks for.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "core/call/toy.h"
#include "core/isa.h"

namespace linnet {
namespace {

class Environment {  // set for one scope
 public:
  Environment(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~Environment() { unsetenv(name_); }

 private:
  const char* name_;
};

std::string chosen(const char* impl = nullptr, Pass pass = Pass::forward) {
  const Impl* found;
  const Status status = choose_impl(toy_op(), pass, {.impl = impl}, &found);
  return status.ok() ? found->name : status.message();
}

// The toy's kernel counts as one of the portable set, which a build for one machine alone may lack.
#define SKIP_WITHOUT_PORTABLE() \
  if (*isa_missing(Isa::portable) != 0) GTEST_SKIP() << isa_missing(Isa::portable)

TEST(OpChoice, BestUsableUnlessForced) {
  SKIP_WITHOUT_PORTABLE();
  ASSERT_NE(find_op("softmax"), nullptr);  // a program that links the list of operators knows a wrong name
  EXPECT_EQ(chosen(), "portable");
  EXPECT_EQ(chosen("ref"), "ref");
  EXPECT_EQ(chosen("best"), "toy: there is no implementation 'best', expected one of ref, portable, avx2_never");
  EXPECT_EQ(chosen("avx2_never"), "toy: implementation avx2_never cannot run: it was never built");
  EXPECT_EQ(chosen("portable", Pass::backward), "toy: implementation portable cannot run: there is no backward");
  EXPECT_EQ(chosen(nullptr, Pass::backward), "ref");  // the best that has one
  const struct {
    const char *impl, *isa, *expected;
  } table[] = {
      {"ref", nullptr, "ref"},
      {"toy:ref", nullptr, "ref"},
      {"softmax:ref", nullptr, "portable"},
      {"softmax:ref,toy:ref", nullptr, "ref"},
      {"toys:ref", nullptr, "LINNET_IMPL: there is no operator 'toys'"},
      {"portable,toy:ref", nullptr, "ref"},
      {"toy:fast", nullptr, "toy: there is no implementation 'fast', expected one of ref, portable, avx2_never"},
      {"avx2_never", nullptr, "toy: implementation avx2_never cannot run: it was never built"},
      {"", nullptr, "portable"},
      {nullptr, "portable", "portable"},
      {nullptr, "", "portable"},
      {nullptr, "sse9", "LINNET_ISA is 'sse9', expected portable, avx2 or avx512"},
  };
  for (const auto& row : table) {
    std::vector<Environment*> set;
    if (row.impl != nullptr) set.push_back(new Environment("LINNET_IMPL", row.impl));
    if (row.isa != nullptr) set.push_back(new Environment("LINNET_ISA", row.isa));
    EXPECT_EQ(chosen(), row.expected);
    EXPECT_EQ(chosen("ref"), "ref");  // what the caller names wins
    for (const Environment* each : set) delete each;
  }
}

// Every instruction set that this machine lacks is refused with its reason, every other one limits the choice.
TEST(OpChoice, InstructionSets) {
  for (const Isa isa : kIsas) {
    const Environment set("LINNET_ISA", isa_name(isa));
    Isa choice;
    const Status status = isa_choice(&choice);
    const std::string missing = isa_missing(isa);
    EXPECT_EQ(status.ok(), missing.empty());
    if (missing.empty()) {
      EXPECT_EQ(choice, isa);
    } else {
      EXPECT_EQ(status.code(), Code::impossible);
      EXPECT_EQ(status.message(), "LINNET_ISA=" + std::string(isa_name(isa)) + ": " + missing);
    }
  }
}

TEST(OpWorkspace, IsAskedForInAdvance) {
  SKIP_WITHOUT_PORTABLE();
  Toy toy;
  ThreadPool pool(3);
  Context context = {.executor = &pool, .impl = "portable"};
  int64_t bytes = 0;
  ASSERT_TRUE(workspace_bytes(toy_op(), Pass::forward, &toy.args, context, &bytes).ok());
  EXPECT_EQ(bytes, 3 * 100 + 128);
  Status status = run(toy_op(), Pass::forward, &toy.args, &toy.out, &toy.grads, context);
  EXPECT_EQ(status.message(),
            "toy: the workspace has 0 bytes, expected at least 428 (ask toy_workspace; in C linnet_workspace)");
  std::vector<char> memory(static_cast<size_t>(bytes));
  context.workspace = memory.data();
  context.workspace_bytes = bytes - 1;
  status = run(toy_op(), Pass::forward, &toy.args, &toy.out, &toy.grads, context);
  EXPECT_EQ(status.message(),
            "toy: the workspace has 427 bytes, expected at least 428 (ask toy_workspace; in C linnet_workspace)");
  context.workspace_bytes = bytes;
  EXPECT_TRUE(run(toy_op(), Pass::forward, &toy.args, &toy.out, &toy.grads, context).ok());
  toy.args.k = View();
  EXPECT_EQ(workspace_bytes(toy_op(), Pass::forward, &toy.args, context), 0);
}

}  // namespace
}  // namespace linnet
