// Decoders with layer norms and rotary positions on a part of each head: GPT-NeoX (Pythia), Phi, StableLM, StarCoder 2,
// Persimmon.
#include "core/files/json.h"
#include "layers/layer.h"
#include "runtime/families/families.h"

namespace linnet {

void describe_neox(Config& config, Description& d) {
  const bool neox = d.family == "gpt_neox", phi = d.family == "phi", stable = d.family == "stablelm",
             star = d.family == "starcoder2", persimmon = d.family == "persimmon";
  d.rms = false;
  d.vocabulary = config.count("vocab_size", 1, kMaxVocabularyRows);
  d.hidden = config.count("hidden_size", 1, kMaxWidth);
  d.context = config.count("max_position_embeddings", 1, int64_t{1} << 40, star || stable ? 4096 : 2048);
  d.eps = config.real(star ? "norm_epsilon" : "layer_norm_eps", 0, 1, 1e-5);
  d.tied = config.flag("tie_word_embeddings", star);
  d.head_bias = phi;
  if (neox && config.flag("use_parallel_residual", true)) d.order = BlockOrder::parallel_norms;
  if (phi || (stable && config.flag("use_parallel_residual", false))) d.order = BlockOrder::parallel;
  const bool normed = config.flag("qk_layernorm", persimmon);
  if (normed && !persimmon) config.refuse("qk_layernorm is true, expected false");
  const int64_t layers = config.count("num_hidden_layers", 1, kMaxLayers),
                inner = config.count("intermediate_size", 1, kMaxWidth);
  HeadSizes sizes = read_heads(config, d.hidden);
  if (neox || persimmon) sizes.kv_heads = sizes.heads;  // it knows no groups
  const bool bias = neox   ? config.flag("attention_bias", true)
                    : star ? config.flag("use_bias", true)
                           : phi || persimmon || config.flag("use_qkv_bias", false);
  BlockSpec block;
  block.options = head_options(d.hidden, sizes, bias, bias && !stable);
  if (normed) {
    block.options.push_back({"qk_norm", "layer"});
    block.options.push_back({"norm_eps", layers::number_text(d.eps)});
  }
  const double share = neox ? config.real("rotary_pct", 0, 1, 0.25)
                            : config.real("partial_rotary_factor", 0, 1,
                                          phi || persimmon ? 0.5
                                          : stable         ? 0.25
                                                           : 1);
  add_rotary(config, sizes.width, share, block.options, config.real(neox ? "rotary_emb_base" : "rope_theta", 1, 1e12, 10000));
  const char* act = neox ? "gelu" : persimmon ? "relu2" : phi ? "gelu_new" : stable ? "silu" : "gelu_pytorch_tanh";
  block.mlp = {stable ? MlpSpec::Kind::glu : MlpSpec::Kind::plain, activation_name(config, "hidden_act", act), inner,
               neox || phi || persimmon || (star && bias)};
  if (!config.status().ok()) return;
  for (int64_t i = 0; i < layers; ++i) {
    d.blocks.push_back(block);
    if (star) add_window(layer_window(config, i, layers, 0), d.blocks.back());
  }
  if (neox || persimmon) {
    const std::string attention = neox ? "layers.#.attention." : "layers.#.self_attn.";
    const auto part = [&](const char* ours, int64_t which) {
      NameRule rule{ours, attention + "query_key_value.*", false, which, 3};
      rule.joined_heads = sizes.heads;
      return rule;
    };
    d.prefixes = {neox ? "gpt_neox." : "model.", ""};
    d.names = {{"embed_tokens.weight", neox ? "embed_in.weight" : "embed_tokens.weight"},
               part("layers.#.self_attn.q_proj.*", 0),
               part("layers.#.self_attn.k_proj.*", 1),
               part("layers.#.self_attn.v_proj.*", 2),
               {"layers.#.self_attn.o_proj.*", attention + "dense.*"},
               {"layers.#.self_attn.q_norm.*", attention + "q_layernorm.*"},
               {"layers.#.self_attn.k_norm.*", attention + "k_layernorm.*"},
               {"layers.#.mlp.up_proj.*", "layers.#.mlp.dense_h_to_4h.*"},
               {"layers.#.mlp.down_proj.*", "layers.#.mlp.dense_4h_to_h.*"},
               {"layers.#.*", "layers.#.*"},
               {"norm.*", neox ? "final_layer_norm.*" : "final_layernorm.*"},
               {"lm_head.weight", neox ? "embed_out.weight" : "lm_head.weight"}};
    d.ignored = {"attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"};
    if (d.tied) d.ignored.push_back(neox ? "embed_out.weight" : "lm_head.weight");
    return;
  }
  d.names = {{"embed_tokens.weight", "model.embed_tokens.weight"}};
  if (phi) d.names.push_back({"layers.#.self_attn.o_proj.*", "model.layers.#.self_attn.dense.*"});
  if (phi || star)
    d.names.push_back({"layers.#.mlp.up_proj.*", phi ? "model.layers.#.mlp.fc1.*" : "model.layers.#.mlp.c_fc.*"});
  if (phi || star) {
    d.names.push_back({"layers.#.mlp.down_proj.*", phi ? "model.layers.#.mlp.fc2.*" : "model.layers.#.mlp.c_proj.*"});
  }
  d.names.push_back({"layers.#.*", "model.layers.#.*"});
  d.names.push_back({"norm.*", phi ? "model.final_layernorm.*" : "model.norm.*"});
  d.names.push_back({"lm_head.*", "lm_head.*"});
  d.ignored = {"rotary_emb.inv_freq"};
  if (d.tied) d.ignored.push_back("lm_head.weight");
}

}  // namespace linnet
