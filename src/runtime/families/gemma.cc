// Gemma 1, 2 and 3 (text), VaultGemma: norms times 1 + weight, a scaled embedding, a GELU-gated MLP. From 2 on norms stand
// before and behind each part, and layers with a window alternate with full ones; 2 caps its logits, 3 norms q and k and turns
// windowed layers by another base. VaultGemma is the second without the norms behind.
#include <cmath>

#include "core/files/json.h"
#include "layers/layer.h"
#include "runtime/families/families.h"

namespace linnet {

void describe_gemma(Config& config, Description& d) {
  using layers::number_text;
  const bool vault = d.family == "vaultgemma", second = d.family == "gemma2" || vault, third = d.family == "gemma3_text";
  d.vocabulary =
      third ? config.count("vocab_size", 1, kMaxVocabularyRows, 262208) : config.count("vocab_size", 1, kMaxVocabularyRows);
  d.hidden = config.count("hidden_size", 1, kMaxWidth);
  d.context = config.count("max_position_embeddings", 1, int64_t{1} << 40, third ? 131072 : 8192);
  d.eps = config.real("rms_norm_eps", 0, 1, 1e-6);
  d.plus_one = true;
  d.embed_scale = std::sqrt(static_cast<double>(d.hidden));
  d.tied = config.flag("tie_word_embeddings", true);
  if ((second && !vault) || third) d.order = BlockOrder::sandwich;
  d.logit_cap = config.real("final_logit_softcapping", 0, 1e6, second ? 30 : 0);
  if (config.flag("use_bidirectional_attention", false)) config.refuse("use_bidirectional_attention is true, expected false");
  const int64_t layers = config.count("num_hidden_layers", 1, kMaxLayers),
                inner = config.count("intermediate_size", 1, kMaxWidth);
  const HeadSizes sizes = third ? read_heads(config, d.hidden, 256, 8, 4) : read_heads(config, d.hidden, 256);
  const bool bias = config.flag("attention_bias", false);
  BlockSpec block;
  block.options = head_options(d.hidden, sizes, bias, bias);
  if (second || third) {
    const double scalar = config.real("query_pre_attn_scalar", 1e-6, 1e9, 256);
    block.options.push_back({"scale", number_text(1 / std::sqrt(scalar))});
    const double cap = config.real("attn_logit_softcapping", 0, 1e6, second ? 50 : 0);
    if (cap > 0) block.options.push_back({"softcap", number_text(cap)});
  }
  if (third) {
    block.options.push_back({"qk_norm", "rms_plus_one"});
    block.options.push_back({"norm_eps", number_text(d.eps)});
  }
  const bool newer = config.given("hidden_activation");
  block.mlp = {MlpSpec::Kind::glu, activation_name(config, newer ? "hidden_activation" : "hidden_act", "gelu_pytorch_tanh"),
               inner, false};
  const int64_t pattern = third ? config.count("sliding_window_pattern", 1, kMaxLayers, 6) : 2;
  const int64_t window = second || third ? config.count("sliding_window", 1, int64_t{1} << 40, 4096) : -1;
  const double theta = config.real("rope_theta", 1, 1e12, third ? 1e6 : 1e4),
               local = config.real("rope_local_base_freq", 1, 1e12, 1e4);
  if (!config.status().ok()) return;
  for (int64_t i = 0; i < layers; ++i) {
    BlockSpec each = block;
    const std::string type = layer_type(config, i, layers);
    const bool windowed = window > 0 && (type.empty() ? (i + 1) % pattern != 0 : type == "sliding_attention");
    if (third && windowed && !config.given("rope_parameters")) {
      each.options.push_back({"rope_base", number_text(local)});  // the scaling of older files is for the full layers
    } else {
      add_rotary(config, sizes.width, 1, each.options, third && windowed ? local : theta,
                 windowed ? "sliding_attention" : "full_attention");
    }
    if (windowed) add_window(window, each);
    d.blocks.push_back(std::move(each));
  }
  d.names = {{"embed_tokens.weight", "model.embed_tokens.weight"}};
  if (vault) {
    d.names.push_back({"layers.#.post_attention_layernorm.weight", "model.layers.#.pre_feedforward_layernorm.weight"});
  }
  add_decoder_names(d);
}

}  // namespace linnet
