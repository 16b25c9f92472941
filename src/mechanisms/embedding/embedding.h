// embedding: rows of a table, one for each token.
//
//   out[b, t] = scale table[ids[b, t]]
//
// embedding_quantised: the same of a table in the panels of dense_quantised, so that a model whose logits share the table holds
// it once.
//
// Results are of the table's type or f32, as the caller allocates them.
#pragma once

#include "../../core/args.h"
#include "../dense/dense.h"

namespace linnet {

struct EmbeddingArgs {
  View table;  // [rows, D]
  View ids;    // [B, T], each below rows
  double scale = 1;
};
struct EmbeddingOut {
  View out;  // [B, T, D]
};
struct EmbeddingNoGrads {};
const Op& embedding_op();
Status embedding(const EmbeddingArgs& args, const EmbeddingOut& out, const Context& context);
int64_t embedding_workspace(const EmbeddingArgs& args, const Context& context);

struct EmbeddingQuantisedArgs {
  View scales;  // [panels, groups, 16]: its type is the call's
  View codes;   // [panels, groups, 512 or 256] bytes
  View offset;  // [panels, groups, 16]
  View ids;     // [B, T], each below 16 panels
  QuantisedBits bits = QuantisedBits::eight;
  double scale = 1;
};
const Op& embedding_quantised_op();
Status embedding_quantised(const EmbeddingQuantisedArgs& args, const EmbeddingOut& out, const Context& context);
int64_t embedding_quantised_workspace(const EmbeddingQuantisedArgs& args, const Context& context);

LINNET_KERNELS(embedding, EmbeddingArgs, EmbeddingOut, EmbeddingNoGrads)
LINNET_CUDA_KERNELS(embedding, EmbeddingArgs, EmbeddingOut, EmbeddingNoGrads)
LINNET_KERNELS(embedding_quantised, EmbeddingQuantisedArgs, EmbeddingOut, EmbeddingNoGrads)
LINNET_CUDA_KERNELS(embedding_quantised, EmbeddingQuantisedArgs, EmbeddingOut, EmbeddingNoGrads)

}  // namespace linnet
