// ModernBERT: pre-norm blocks that see both sides, rotary positions, a gated MLP; two of three layers see a window.
#include "core/files/json.h"
#include "layers/layer.h"
#include "runtime/families/families.h"

namespace linnet {

void describe_modernbert(Config& config, Description& d) {
  d.causal = d.head = d.rms = false;
  d.embed_norm = true;
  d.vocabulary = config.count("vocab_size", 1, kMaxVocabularyRows, 50368);
  d.hidden = config.count("hidden_size", 1, kMaxWidth, 768);
  d.context = config.count("max_position_embeddings", 1, int64_t{1} << 40, 8192);
  d.eps = config.real("norm_eps", 0, 1, 1e-5);
  d.norm_bias = config.flag("norm_bias", false);
  const int64_t layers = config.count("num_hidden_layers", 1, kMaxLayers, 22),
                heads = config.count("num_attention_heads", 1, kMaxHeads, 12),
                inner = config.count("intermediate_size", 1, kMaxWidth, 1152);
  if (d.hidden % heads != 0) {
    config.refuse("hidden_size is " + std::to_string(d.hidden) + ", expected a multiple of num_attention_heads, " +
                  std::to_string(heads));
  }
  const bool bias = config.flag("attention_bias", false);
  const int64_t window = config.count("local_attention", 1, int64_t{1} << 40, 128) / 2,
                period = config.count("global_attn_every_n_layers", 1, kMaxLayers, 3);
  const double full = config.real("global_rope_theta", 1, 1e12, 160000),
               local = config.real("local_rope_theta", 1, 1e12, 10000);
  BlockSpec block;
  block.mlp = {MlpSpec::Kind::glu, activation_name(config, "hidden_activation", "gelu"), inner, config.flag("mlp_bias", false)};
  if (!config.status().ok()) return;
  for (int64_t i = 0; i < layers; ++i) {
    const std::string type = layer_type(config, i, layers);
    const bool sees_all = type.empty() ? i % period == 0 : type == "full_attention";
    BlockSpec own = block;
    own.input_norm = i > 0;
    own.options = {{"hidden", std::to_string(d.hidden)},
                   {"heads", std::to_string(heads)},
                   {"causal", "0"},
                   {"bias", bias ? "1" : "0"},
                   {"out_bias", bias ? "1" : "0"}};
    if (!sees_all) own.options.push_back({"window", std::to_string(window) + "," + std::to_string(window)});
    add_rotary(config, d.hidden / heads, 1, own.options, sees_all ? full : local,
               sees_all ? "full_attention" : "sliding_attention");
    d.blocks.push_back(std::move(own));
  }
  const auto part = [&d](const char* ours, const char* theirs, int64_t which, int64_t parts) {
    d.names.push_back({ours, theirs, false, which, parts});
  };
  d.prefixes = {"", "model."};
  d.names = {{"embed_tokens.weight", "embeddings.tok_embeddings.weight"}, {"embed_norm.*", "embeddings.norm.*"}};
  part("layers.#.self_attn.q_proj.*", "layers.#.attn.Wqkv.*", 0, 3);
  part("layers.#.self_attn.k_proj.*", "layers.#.attn.Wqkv.*", 1, 3);
  part("layers.#.self_attn.v_proj.*", "layers.#.attn.Wqkv.*", 2, 3);
  part("layers.#.mlp.gate_proj.*", "layers.#.mlp.Wi.*", 0, 2);
  part("layers.#.mlp.up_proj.*", "layers.#.mlp.Wi.*", 1, 2);
  d.names.push_back({"layers.#.self_attn.o_proj.*", "layers.#.attn.Wo.*"});
  d.names.push_back({"layers.#.mlp.down_proj.*", "layers.#.mlp.Wo.*"});
  d.names.push_back({"layers.#.input_layernorm.*", "layers.#.attn_norm.*"});
  d.names.push_back({"layers.#.post_attention_layernorm.*", "layers.#.mlp_norm.*"});
  d.names.push_back({"norm.*", "final_norm.*"});
  // Heads for other tasks: the encoder's states are what is read here.
  d.ignored = {"head.dense.weight", "head.dense.bias", "head.norm.weight",  "head.norm.bias",
               "decoder.weight",    "decoder.bias",    "classifier.weight", "classifier.bias"};
}

}  // namespace linnet
