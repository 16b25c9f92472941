// Description: a model as a list of blocks, from which its records follow. A family (families/*.cc) is a function from
// config.json to a Description, with a table of the names that its tensors have in files.
//
// Tensors of every model in one naming:
//   embed_tokens.weight [vocabulary, hidden]     embed_positions.weight, embed_types.weight, embed_norm.*, patches.*
//   layers.<i>.input_layernorm.*                 layers.<i>.post_attention_layernorm.*
//   layers.<i>.self_attn.<name of the layer>     layers.<i>.mlp.gate_proj|up_proj|down_proj.*
//   layers.<i>.mlp.router.weight [experts, hidden], layers.<i>.mlp.experts.<e>.gate_proj|up_proj|down_proj.weight,
//   layers.<i>.mlp.shared_expert.gate_proj|up_proj|down_proj.weight, layers.<i>.mlp.shared_expert_gate.weight [1, hidden]
//   norm.*                                       lm_head.weight [vocabulary, hidden], or the table of embed_tokens where tied
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/status.h"
#include "layers/record.h"
#include "runtime/config.h"

namespace linnet {

inline constexpr int64_t kMaxLayers = 1000, kMaxHeads = 1024, kMaxWidth = int64_t{1} << 20,
                         kMaxVocabularyRows = int64_t{1} << 24, kMaxExperts = 1024;

enum class BlockOrder {
  pre,       // x += mixer(norm(x)); x += mlp(norm(x))
  post,      // x = norm(x + mixer(x)); x = norm(x + mlp(x))
  parallel,  // y = norm(x); x += mixer(y) + mlp(y)
  // Orders of families; a linnet model has one of the three above.
  parallel_norms,  // x += mixer(norm(x)) + mlp(norm'(x))
  after,           // x += norm(mixer(x)); x += norm(mlp(x))
  sandwich,        // x += norm(mixer(norm(x))); x += norm(mlp(norm(x)))
};
const char* block_order_name(BlockOrder order);

struct MlpSpec {
  enum class Kind { none, glu, plain, experts } kind = Kind::glu;  // experts: gated ones, of which each token runs `top`
  std::string act = "silu";  // of the operator activation; plain ones know xielu, too, which has two parameters
  int64_t inner = 0;         // of one expert
  bool bias = false;
  // An expert's weight is its share in the softmax over all of them; normalised: divided by the sum of those that are chosen,
  // which is the softmax over the chosen ones alone.
  int64_t experts = 0, top = 0;
  bool normalised = true;
  int64_t shared = 0;        // inner size of one more expert that every token runs; 0: none
  bool shared_gate = false;  // times sigmoid(a row times x)
};

struct BlockSpec {
  std::string mixer = "softmax_attention";  // a name of layers::find_layer; empty with order pre: the MLP alone
  std::vector<layers::Setting> options;
  MlpSpec mlp;
  std::optional<BlockOrder> order;  // where it is not the model's
  bool input_norm = true;           // order pre: the mixer reads norm(x), else x
  std::string label;                // what stands in softmax's place in a converted model: "window 512 + 4"
};

// How a tensor of the model is found in files: `#` stands for the number of a layer, `@` for that of an expert, `*` at the end
// for the rest of the name.
struct NameRule {
  std::string ours, theirs;
  bool transposed = false;       // [in, out] in the file
  int64_t part = 0, parts = 1;   // rows part / parts .. (part + 1) / parts of it, in our order
  int64_t permuted_heads = 0;    // rows of each head are in the order of interleaved pairs: GGUF's q and k of llama
  int64_t joined_heads = 0;      // the parts lie head by head: q k v of head 0, q k v of head 1, ..
  int64_t first = 0, total = 0;  // instead of part / parts: rows from `first` on of a tensor of `total` rows, or of each head's
  int64_t stacked = 0;           // all so many experts lie in one tensor, one behind the other
  bool or_next = false;          // where files have no such tensor the next rule that fits is tried
};

struct Description {
  std::string family;
  bool causal = true;
  int64_t hidden = 0, vocabulary = 0, context = 0;
  BlockOrder order = BlockOrder::pre;
  bool rms = true;                            // norms: root mean square; otherwise layer norm with a bias
  bool plus_one = false;                      // times 1 + weight
  bool norm_weight = true, norm_bias = true;  // what a layer norm has; root mean squares: the weight
  double eps = 1e-6;
  int64_t positions = 0, types = 0;  // rows of learned tables that are added to the token's; 0: none
  bool task = false;                 // one more row is added to every token
  int64_t sinusoid_first = -1;       // sines and cosines of the position are added, counted from here; -1: none
  bool embed_norm = false, final_norm = true;
  bool tied = false;  // lm_head is embed_tokens
  bool head = true;   // it has logits
  bool head_bias = false;
  int64_t embed_width = 0;    // of the tables, which a projection widens to hidden; 0: hidden
  double embed_scale = 1;     // times the token's embedding
  double residual_scale = 1;  // times what a block adds
  double logit_scale = 1;
  double logit_cap = 0;  // logits become cap tanh(logit / cap); 0: off
  // Images: patches of `patch` squared pixels behind a class token and, where there are two, a distillation token.
  int64_t image = 0, patch = 0, channels = 0, classes = 0, class_tokens = 1;
  bool two_heads = false;  // the mean of two classifiers, one for each of those tokens
  std::vector<BlockSpec> blocks;
  std::vector<NameRule> names;
  std::vector<std::string> prefixes = {""};  // that may stand before every name
  std::vector<std::string> ignored;          // tensors that may be left over: endings, or beginnings before a *
};

// By model_type; a sentence when there is no such family.
Status describe_model(Config& config, Description& out);

// tokens [B, T] (and positions, types where the model has such tables) -> hidden [B, T, hidden];
// images: patches [B, T, channels patch^2] -> hidden.
Status record_body(const Description& d, layers::Record* record);
// hidden [B, T, hidden] -> logits [B, T, vocabulary or classes].
Status record_head(const Description& d, layers::Record* record);

// The same in parts, for whoever looks between the blocks: tokens (or patches) -> x, block i: x -> x, the last norm: x -> x.
Status record_embedding(const Description& d, layers::Record* record);
Status record_block(const Description& d, size_t block, layers::Record* record);
Status record_norm(const Description& d, layers::Record* record);  // only where d.final_norm

// The rule for one of our names, and the name it gives; null when none fits. Only rules behind `behind` where that is given.
const NameRule* find_name(const Description& d, const std::string& ours, std::string* theirs, const NameRule* behind = nullptr);
// The number of the expert that a tensor of ours belongs to; 0 where it belongs to none.
int64_t expert_of(const std::string& ours);

}  // namespace linnet
