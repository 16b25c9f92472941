// Decoders whose heads see nearer tokens by linear biases instead of positions (ALiBi, arXiv 2108.12409): BLOOM, MPT.
#include <algorithm>

#include "core/files/json.h"
#include "layers/layer.h"
#include "runtime/families/families.h"

namespace linnet {

void describe_alibi(Config& config, Description& d) {
  const bool mpt = d.family == "mpt";
  // Fields have the names of several years.
  const auto count = [&](const char* newer, const char* older, int64_t high, int64_t otherwise) {
    return config.count(config.given(newer) ? newer : older, 1, high, otherwise);
  };
  d.rms = false;
  d.norm_bias = !mpt;
  d.embed_norm = !mpt;
  d.vocabulary = config.count("vocab_size", 1, kMaxVocabularyRows, mpt ? 50368 : 250880);
  d.hidden = mpt ? config.count("d_model", 1, kMaxWidth, 2048) : count("hidden_size", "n_embed", kMaxWidth, 64);
  d.context = config.count(mpt ? "max_seq_len" : "seq_length", 1, 16384, 2048);  // a channel of keys for each 256 of them
  d.eps = config.real("layer_norm_epsilon", 0, 1, 1e-5);
  d.tied = config.flag("tie_word_embeddings", true);
  const int64_t layers =
                    mpt ? config.count("n_layers", 1, kMaxLayers, 24) : count("n_layer", "num_hidden_layers", kMaxLayers, 2),
                heads = mpt ? config.count("n_heads", 1, kMaxHeads, 16) : count("n_head", "num_attention_heads", kMaxHeads, 8);
  const std::string bias = mpt ? "0" : "1";
  if (d.hidden % heads != 0) {
    config.refuse("the hidden size is " + std::to_string(d.hidden) + ", expected a multiple of the heads, " +
                  std::to_string(heads));
  }
  BlockSpec block;
  block.options = {{"hidden", std::to_string(d.hidden)},
                   {"heads", std::to_string(heads)},
                   {"rope", "none"},
                   {"alibi", std::to_string(d.context)},
                   {"bias", bias},
                   {"out_bias", bias}};
  block.mlp = {MlpSpec::Kind::plain, mpt ? "gelu" : "gelu_tanh", 4 * d.hidden, !mpt};
  if (config.flag("apply_residual_connection_post_layernorm", false)) {
    config.refuse("apply_residual_connection_post_layernorm is true, expected false");
  }
  if (mpt) {
    Config attention(config.value("attn_config"), config.source());
    if (config.count("expansion_ratio", 1, 1024, 4) != 4) config.refuse("expansion_ratio is not 4");
    if (!config.flag("no_bias", true)) config.refuse("no_bias is false, expected true");
    if (config.given("logit_scale")) config.refuse("logit_scale is given, expected null");
    if (attention.given("clip_qkv")) config.refuse("clip_qkv is given, expected null");
    for (const char* field : {"qk_ln", "prefix_lm"}) {
      if (attention.flag(field, false)) config.refuse(std::string(field) + " is true, expected false");
    }
    if (!attention.flag("alibi", true)) config.refuse("alibi is false, expected true");
    if (attention.real("alibi_bias_max", 0, 1e9, 8) != 8) config.refuse("alibi_bias_max is not 8");
    if (attention.text("attn_type", "multihead_attention") != "multihead_attention") {
      config.refuse("attn_type is not multihead_attention");
    }
    if (attention.given("softmax_scale")) {
      block.options.push_back({"scale", layers::number_text(attention.real("softmax_scale", 1e-9, 1e9))});
    }
    if (!attention.status().ok()) config.refuse(attention.status().message().substr(config.source().size() + 2));
  }
  if (!config.status().ok()) return;
  d.blocks.assign(static_cast<size_t>(layers), block);
  d.prefixes = {"transformer.", ""};
  const std::string joined = mpt ? "blocks.#.attn.Wqkv.*" : "h.#.self_attention.query_key_value.*";
  for (const int64_t part : {0, 1, 2}) {
    const char* ours[] = {"layers.#.self_attn.q_proj.*", "layers.#.self_attn.k_proj.*", "layers.#.self_attn.v_proj.*"};
    NameRule rule{ours[part], joined, false, part, 3};
    if (!mpt) rule.joined_heads = heads;
    d.names.push_back(rule);
  }
  const auto name = [&](const char* ours, const char* bloom, const char* other) {
    d.names.push_back({ours, mpt ? other : bloom});
  };
  name("embed_tokens.weight", "word_embeddings.weight", "wte.weight");
  name("embed_norm.*", "word_embeddings_layernorm.*", "");
  name("layers.#.input_layernorm.*", "h.#.input_layernorm.*", "blocks.#.norm_1.*");
  name("layers.#.post_attention_layernorm.*", "h.#.post_attention_layernorm.*", "blocks.#.norm_2.*");
  name("layers.#.self_attn.o_proj.*", "h.#.self_attention.dense.*", "blocks.#.attn.out_proj.*");
  name("layers.#.mlp.up_proj.*", "h.#.mlp.dense_h_to_4h.*", "blocks.#.ffn.up_proj.*");
  name("layers.#.mlp.down_proj.*", "h.#.mlp.dense_4h_to_h.*", "blocks.#.ffn.down_proj.*");
  name("norm.*", "ln_f.*", "norm_f.*");
  name("lm_head.weight", "lm_head.weight", "lm_head.weight");
  if (d.tied) d.ignored.push_back("lm_head.weight");
}

}  // namespace linnet
