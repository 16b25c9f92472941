// Llama and its kin: pre-norm blocks of rotary attention with grouped heads and a gated MLP. OLMo 2 norms what a block adds
// instead of what it reads; Phi-3 keeps q, k, v and the MLP's two halves in one matrix each.
#include "core/files/json.h"
#include "layers/layer.h"
#include "runtime/families/families.h"

namespace linnet {

namespace {

// Whether layer i of SmolLM3 turns its heads: all but every fourth, or as the list says.
bool turns(Config& config, int64_t i, int64_t layers) {
  if (!config.given("no_rope_layers")) return (i + 1) % config.count("no_rope_layer_interval", 1, kMaxLayers, 4) != 0;
  JsonItems flags(config.value("no_rope_layers"));
  int64_t flag = 0;
  for (int64_t j = 0; j <= i; ++j) {
    if (!flags.next() || flags.value().count(flag) != nullptr) {
      config.refuse("no_rope_layers has fewer than " + std::to_string(layers) + " numbers");
      return true;
    }
  }
  return flag != 0;
}

}  // namespace

void describe_llama(Config& config, Description& d) {
  const bool llama = d.family == "llama", qwen2 = d.family == "qwen2", qwen3 = d.family == "qwen3",
             mistral = d.family == "mistral", smollm3 = d.family == "smollm3", phi3 = d.family == "phi3",
             olmo2 = d.family == "olmo2";
  d.vocabulary = config.count("vocab_size", 1, kMaxVocabularyRows);
  d.hidden = config.count("hidden_size", 1, kMaxWidth);
  d.context = config.count("max_position_embeddings", 1, int64_t{1} << 40, llama || olmo2 ? 2048 : 32768);
  d.eps = config.real("rms_norm_eps", 0, 1, olmo2 || phi3 ? 1e-5 : 1e-6);
  d.tied = config.flag("tie_word_embeddings", smollm3);
  if (olmo2) d.order = BlockOrder::after;
  const int64_t layers = config.count("num_hidden_layers", 1, kMaxLayers),
                inner = config.count("intermediate_size", 1, kMaxWidth);
  const HeadSizes sizes = read_heads(config, d.hidden, qwen3 ? 128 : 0);
  const bool bias = config.flag("attention_bias", qwen2);
  BlockSpec block;
  block.options = head_options(d.hidden, sizes, bias, bias && !qwen2);
  if (qwen3 || olmo2) {
    block.options.push_back({"qk_norm", qwen3 ? "rms" : "rms_all"});
    block.options.push_back({"norm_eps", layers::number_text(d.eps)});
  }
  const double theta = config.real("rope_theta", 1, 1e12, smollm3 ? 2000000 : olmo2 ? 500000 : 10000);
  add_rotary(config, sizes.width, config.real("partial_rotary_factor", 0, 1, 1), block.options, theta);
  block.mlp = {MlpSpec::Kind::glu, activation_name(config, "hidden_act", "silu"), inner, config.flag("mlp_bias", false)};
  if (!config.status().ok()) return;
  for (int64_t i = 0; i < layers; ++i) {
    d.blocks.push_back(block);
    add_window(layer_window(config, i, layers, mistral || phi3 ? 0 : 28), d.blocks.back());
    if (smollm3 && !turns(config, i, layers)) d.blocks.back().options.push_back({"rope", "none"});
  }
  d.names = {{"embed_tokens.weight", "model.embed_tokens.weight"}};
  if (phi3) {
    const int64_t q = sizes.heads * sizes.width, kv = sizes.kv_heads * sizes.width;
    const auto part = [&d](const char* ours, const char* theirs, int64_t first, int64_t total) {
      NameRule rule{ours, theirs};
      rule.first = first;
      rule.total = total;
      d.names.push_back(rule);
    };
    const char *qkv = "model.layers.#.self_attn.qkv_proj.*", *gate_up = "model.layers.#.mlp.gate_up_proj.*";
    part("layers.#.self_attn.q_proj.*", qkv, 0, q + 2 * kv);
    part("layers.#.self_attn.k_proj.*", qkv, q, q + 2 * kv);
    part("layers.#.self_attn.v_proj.*", qkv, q + kv, q + 2 * kv);
    part("layers.#.mlp.gate_proj.*", gate_up, 0, 2 * inner);
    part("layers.#.mlp.up_proj.*", gate_up, inner, 2 * inner);
  }
  add_decoder_names(d);
}

}  // namespace linnet
