// Decoders whose feed-forward is a mixture of experts and which are Llama otherwise: one row of a table each.
#include "core/files/json.h"
#include "layers/layer.h"
#include "runtime/families/families.h"

namespace linnet {

namespace {

struct Mixture {
  const char* type;
  double eps = 1e-6, theta = 10000;
  int64_t kv_heads = 0;                // where the file does not say; 0: as many as heads
  const char* bias_field = nullptr;    // null: none
  bool bias = false, out_bias = true;  // where the file does not say; whether the output has one, too
  const char* qk_norm = "none";
  const char* inner_field = "intermediate_size";  // of an expert
  int64_t experts = 8, top = 2;
  bool normalised = true, says_normalised = false;  // norm_topk_prob
  const char* shared_field = nullptr;               // inner size of a shared expert
  bool shared_gate = false;
  bool dense_layers = false;  // decoder_sparse_step and mlp_only_layers leave layers without experts
  bool granite = false;       // its multipliers, and all experts in one tensor
};

constexpr Mixture kMixtures[] = {
    {.type = "mixtral", .eps = 1e-5, .theta = 1e6, .kv_heads = 8},
    {.type = "qwen2_moe",
     .bias_field = "qkv_bias",
     .bias = true,
     .out_bias = false,
     .inner_field = "moe_intermediate_size",
     .experts = 60,
     .top = 4,
     .normalised = false,
     .says_normalised = true,
     .shared_field = "shared_expert_intermediate_size",
     .shared_gate = true,
     .dense_layers = true},
    {.type = "qwen3_moe",
     .kv_heads = 4,
     .bias_field = "attention_bias",
     .qk_norm = "rms",
     .inner_field = "moe_intermediate_size",
     .experts = 128,
     .top = 8,
     .normalised = false,
     .says_normalised = true,
     .dense_layers = true},
    {.type = "olmoe",
     .eps = 1e-5,
     .bias_field = "attention_bias",
     .qk_norm = "rms_all",
     .experts = 64,
     .top = 8,
     .normalised = false,
     .says_normalised = true},
    {.type = "granitemoe", .bias_field = "attention_bias", .granite = true},
    {.type = "granitemoeshared", .bias_field = "attention_bias", .shared_field = "shared_intermediate_size", .granite = true},
};

// Windows of the Qwens, which are off unless use_sliding_window says otherwise.
int64_t qwen_window(Config& config, const std::string& family, int64_t i, int64_t layers) {
  if (!config.flag("use_sliding_window", false)) return -1;
  const int64_t window = config.count("sliding_window", 1, int64_t{1} << 40, 4096);
  if (const std::string type = layer_type(config, i, layers); !type.empty()) return type == "sliding_attention" ? window : -1;
  if (family == "qwen3_moe") return window;
  return i % 2 == 0 && i < config.count("max_window_layers", 0, kMaxLayers, 28) ? window : -1;
}

void add_name(Description& d, const std::string& ours, const std::string& theirs, bool or_next) {
  d.names.push_back({"layers.#.mlp." + ours, "model.layers.#." + theirs});
  d.names.back().or_next = or_next;
}

// Gate and up as the halves of one matrix of 2 x inner rows; `experts` of them one behind the other.
void add_halves(Description& d, const std::string& ours, const std::string& end, const std::string& theirs, int64_t inner,
                int64_t experts, bool or_next) {
  for (const int64_t half : {0, 1}) {
    add_name(d, ours + (half == 0 ? "gate_proj" : "up_proj") + end, theirs, or_next);
    d.names.back().first = half * inner;
    d.names.back().total = 2 * inner;
    d.names.back().stacked = experts;
  }
}

// All experts in two tensors.
void add_stacked(Description& d, const MlpSpec& mlp, const std::string& joined, const std::string& down, bool or_next) {
  add_halves(d, "experts.@.", ".weight", joined, mlp.inner, mlp.experts, or_next);
  add_name(d, "experts.@.down_proj.weight", down, or_next);
  d.names.back().stacked = mlp.experts;
}

}  // namespace

void add_granite_experts(const MlpSpec& mlp, Description& d) {
  const std::string folder = "block_sparse_moe.";
  add_name(d, "router.weight", folder + "router.layer.weight", true);
  add_name(d, "router.weight", folder + "router.weight", false);
  add_stacked(d, mlp, folder + "input_linear.weight", folder + "output_linear.weight", true);
  add_stacked(d, mlp, folder + "experts.gate_up_proj", folder + "experts.down_proj", false);
  add_halves(d, "shared_expert.", ".*", "shared_mlp.input_linear.*", mlp.shared, 0, false);
  add_name(d, "shared_expert.down_proj.*", "shared_mlp.output_linear.*", false);
}

void describe_mixture(Config& config, Description& d) {
  const Mixture* row = kMixtures;
  while (d.family != row->type) ++row;
  const Mixture& mixture = *row;
  const bool mixtral = d.family == "mixtral", qwen = mixture.dense_layers;
  d.vocabulary = config.count("vocab_size", 1, kMaxVocabularyRows);
  d.hidden = config.count("hidden_size", 1, kMaxWidth);
  d.context = config.count("max_position_embeddings", 1, int64_t{1} << 40, 2048);
  d.eps = config.real("rms_norm_eps", 0, 1, mixture.eps);
  d.tied = config.flag("tie_word_embeddings", false);
  if (mixture.granite) read_granite_scales(config, d);
  if (config.given("clip_qkv")) config.refuse("clip_qkv is given, expected null");
  const int64_t layers = config.count("num_hidden_layers", 1, kMaxLayers);
  const HeadSizes sizes = read_heads(config, d.hidden, 0, 0, mixture.kv_heads);
  const bool bias = mixture.bias_field != nullptr && config.flag(mixture.bias_field, mixture.bias);
  BlockSpec block;
  block.options = head_options(d.hidden, sizes, bias, bias && mixture.out_bias);
  block.options.insert(block.options.end(), {{"qk_norm", mixture.qk_norm}, {"norm_eps", layers::number_text(d.eps)}});
  if (mixture.granite) {
    block.options.push_back({"scale", layers::number_text(config.real("attention_multiplier", 1e-9, 1e9, 1))});
  }
  add_rotary(config, sizes.width, 1, block.options, config.real("rope_theta", 1, 1e12, mixture.theta));
  block.mlp.kind = MlpSpec::Kind::experts;
  block.mlp.act = activation_name(config, "hidden_act", "silu");
  block.mlp.inner = config.count(mixture.inner_field, 1, kMaxWidth);
  const char* experts = config.given("num_local_experts") ? "num_local_experts" : "num_experts";  // files have either
  block.mlp.experts = config.count(experts, 1, kMaxExperts, mixture.experts);
  block.mlp.top = config.count("num_experts_per_tok", 1, block.mlp.experts, std::min(mixture.top, block.mlp.experts));
  block.mlp.normalised = mixture.says_normalised ? config.flag("norm_topk_prob", mixture.normalised) : mixture.normalised;
  if (mixture.shared_field != nullptr) block.mlp.shared = config.count(mixture.shared_field, 0, kMaxWidth, 0);
  block.mlp.shared_gate = mixture.shared_gate;
  const int64_t step = qwen ? config.count("decoder_sparse_step", 1, kMaxLayers, 1) : 1;
  if (!config.status().ok()) return;
  for (int64_t i = 0; i < layers; ++i) {
    d.blocks.push_back(block);
    add_window(qwen      ? qwen_window(config, d.family, i, layers)
               : mixtral ? layer_window(config, i, layers, 0)
                         : -1,
               d.blocks.back());
    if ((i + 1) % step == 0 && !(qwen && lists(config.value("mlp_only_layers"), i))) continue;
    d.blocks.back().mlp = {MlpSpec::Kind::glu, block.mlp.act, config.count("intermediate_size", 1, kMaxWidth)};
  }
  d.names = {{"embed_tokens.weight", "model.embed_tokens.weight"}};
  // As checkpoints are published; then as newer libraries keep them in memory and may write them.
  if (mixture.granite) {
    add_granite_experts(block.mlp, d);
  } else {
    if (mixtral) {
      add_name(d, "router.weight", "block_sparse_moe.gate.weight", true);
      add_name(d, "experts.@.gate_proj.weight", "block_sparse_moe.experts.@.w1.weight", true);
      add_name(d, "experts.@.down_proj.weight", "block_sparse_moe.experts.@.w2.weight", true);
      add_name(d, "experts.@.up_proj.weight", "block_sparse_moe.experts.@.w3.weight", true);
    } else {
      add_name(d, "experts.@.*", "mlp.experts.@.*", true);
    }
    add_name(d, "router.weight", "mlp.gate.weight", false);
    add_stacked(d, block.mlp, "mlp.experts.gate_up_proj", "mlp.experts.down_proj", false);
  }
  add_decoder_names(d);
}

}  // namespace linnet
