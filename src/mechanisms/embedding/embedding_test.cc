// embedding and embedding_quantised: agreement with the reference, ids outside the table, results in f32.
#include "embedding.h"

#include "check/agreement.h"
#include "check/named.h"

namespace linnet {
namespace {

TEST(Embedding, AgreesWithTheReference) {
  check::expect_agreement({
      "embedding rows=7 D=33 B=2 T=40 scale=0.5 threads=3",
      "embedding rows=1 D=1 B=1 T=1",
      "embedding rows=3 D=5 B=1 T=0",
      "embedding_quantised panels=3 groups=2 B=2 T=40 bits=8",
      "embedding_quantised panels=3 groups=5 B=2 T=40 bits=4 with=offset scale=2",
      "embedding_quantised panels=1 groups=1 B=1 T=9 bits=4",
  });
}

TEST(Embedding, IdsOutsideTheTable) {
  check::Tensors x = {{"table", check::random_tensor({4, 3}, 1)}, {"ids", check::Tensor(Dtype::i64, {1, 2})}};
  x["ids"].set(1, 3);
  EXPECT_EQ(check::refusal("embedding", x), "");
  x["ids"].set(1, 4);
  EXPECT_EQ(check::refusal("embedding", x), "embedding: ids[0][1] is 4, expected 0 to 3");
  x["ids"].set(1, -1);
  EXPECT_EQ(check::refusal("embedding", x), "embedding: ids[0][1] is -1, expected 0 to 3");
}

// A table of 16-bit floats gives rows of its own type, or of f32 where the caller allocates that.
TEST(Embedding, WideResults) {
  uint16_t table[4] = {0x3f80, 0x4000, 0xc040, 0x3f00};  // 1, 2, -3, 0.5 in bf16
  int32_t ids[2] = {1, 0};
  float out[4] = {};
  const EmbeddingArgs args{.table = View::dense(table, Dtype::bf16, {2, 2}), .ids = View::dense(ids, Dtype::i32, {1, 2})};
  const Status status = embedding(args, {View::dense(out, Dtype::f32, {1, 2, 2})}, {});
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(out[0], -3);
  EXPECT_EQ(out[1], 0.5f);
  EXPECT_EQ(out[2], 1);
  EXPECT_EQ(out[3], 2);
}

}  // namespace
}  // namespace linnet
