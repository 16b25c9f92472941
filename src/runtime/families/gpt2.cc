// GPT-2: pre-norm blocks with layer norms, learned positions, biases everywhere; its matrices are [in, out] in files.
// GPT-BigCode (StarCoder) has one head of keys and values and matrices [out, in].
#include <cmath>

#include "layers/layer.h"
#include "runtime/families/families.h"

namespace linnet {

void describe_gpt2(Config& config, Description& d) {
  d.vocabulary = config.count("vocab_size", 1, kMaxVocabularyRows, 50257);
  d.hidden = config.count("n_embd", 1, kMaxWidth, 768);
  d.context = d.positions = config.count("n_positions", 1, int64_t{1} << 24, 1024);
  d.eps = config.real("layer_norm_epsilon", 0, 1, 1e-5);
  d.rms = false;
  d.tied = config.flag("tie_word_embeddings", true);
  const int64_t layers = config.count("n_layer", 1, kMaxLayers, 12), heads = config.count("n_head", 1, kMaxHeads, 12);
  const int64_t inner = config.count("n_inner", 1, kMaxWidth, 4 * d.hidden);
  if (d.hidden % heads != 0) {
    config.refuse("n_embd is " + std::to_string(d.hidden) + ", expected a multiple of n_head, " + std::to_string(heads));
  }
  const bool bigcode = d.family == "gpt_bigcode", one = bigcode && config.flag("multi_query", true);
  if (config.flag("add_cross_attention", false)) config.refuse("add_cross_attention is true, expected false");
  const std::string act = activation_name(config, "activation_function", "gelu_new");
  const bool scaled = config.flag("scale_attn_weights", true), by_layer = config.flag("scale_attn_by_inverse_layer_idx", false);
  if (!config.status().ok()) return;
  for (int64_t i = 0; i < layers; ++i) {
    BlockSpec block;
    const int64_t head = d.hidden / heads;
    const double base = scaled ? 1 / std::sqrt(static_cast<double>(head)) : 1;
    block.options = {{"hidden", std::to_string(d.hidden)},
                     {"heads", std::to_string(heads)},
                     {"kv_heads", std::to_string(one ? 1 : heads)},
                     {"rope", "none"},
                     {"bias", "1"},
                     {"out_bias", "1"},
                     {"scale", layers::number_text(by_layer ? base / static_cast<double>(i + 1) : base)}};
    block.mlp = {MlpSpec::Kind::plain, act, inner, true};
    d.blocks.push_back(block);
  }
  d.prefixes = {"", "transformer."};
  d.names = {{"embed_tokens.weight", "wte.weight"},
             {"embed_positions.weight", "wpe.weight"},
             {"layers.#.input_layernorm.*", "h.#.ln_1.*"},
             {"layers.#.post_attention_layernorm.*", "h.#.ln_2.*"},
             {"layers.#.self_attn.q_proj.*", "h.#.attn.c_attn.*", true, 0, 3},
             {"layers.#.self_attn.k_proj.*", "h.#.attn.c_attn.*", true, 1, 3},
             {"layers.#.self_attn.v_proj.*", "h.#.attn.c_attn.*", true, 2, 3},
             {"layers.#.self_attn.o_proj.*", "h.#.attn.c_proj.*", true},
             {"layers.#.mlp.up_proj.*", "h.#.mlp.c_fc.*", true},
             {"layers.#.mlp.down_proj.*", "h.#.mlp.c_proj.*", true},
             {"norm.*", "ln_f.*"},
             {"lm_head.weight", "lm_head.weight"}};
  if (bigcode) {
    const int64_t width = d.hidden / heads, kv = one ? width : d.hidden;
    for (NameRule& rule : d.names) {
      rule.transposed = false;
      if (rule.parts == 1) continue;
      if (one) {
        rule.first = rule.part == 0 ? 0 : d.hidden + (rule.part - 1) * kv;
        rule.total = d.hidden + 2 * kv;
        rule.part = 0;
        rule.parts = 1;
      } else {
        rule.joined_heads = heads;
      }
    }
  }
  d.ignored = {"attn.bias", "attn.masked_bias"};
  if (d.tied) d.ignored.push_back("lm_head.weight");
}

}  // namespace linnet
