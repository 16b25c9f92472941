// ViT: pre-norm blocks on patches of an image behind a class token, whose final state is classified. DeiT has a distillation
// token too, and a second classifier on it where it was trained with a teacher.
#include "core/files/json.h"
#include "runtime/families/families.h"

namespace linnet {

void describe_vit(Config& config, Description& d) {
  d.causal = d.rms = false;
  d.hidden = config.count("hidden_size", 1, kMaxWidth, 768);
  d.image = config.count("image_size", 1, 16384, 224);
  d.patch = config.count("patch_size", 1, 4096, 16);
  d.channels = config.count("num_channels", 1, 1024, 3);
  d.eps = config.real("layer_norm_eps", 0, 1, 1e-12);
  const int64_t layers = config.count("num_hidden_layers", 1, kMaxLayers, 12);
  const int64_t heads = config.count("num_attention_heads", 1, kMaxHeads, 12);
  const int64_t inner = config.count("intermediate_size", 1, kMaxWidth, 3072);
  const std::string act = activation_name(config, "hidden_act", "gelu");
  const bool bias = config.flag("qkv_bias", true);
  if (d.image % d.patch != 0) {
    config.refuse("image_size is " + std::to_string(d.image) + ", expected a multiple of patch_size, " +
                  std::to_string(d.patch));
  }
  if (d.hidden % heads != 0) {
    config.refuse("hidden_size is " + std::to_string(d.hidden) + ", expected a multiple of num_attention_heads, " +
                  std::to_string(heads));
  }
  if (!config.status().ok()) return;
  for (JsonItems labels(config.value("id2label")); labels.next();) ++d.classes;
  const bool deit = d.family == "deit";
  if (deit) {
    d.class_tokens = 2;
    for (JsonItems names(config.value("architectures")); names.next();) {
      if (names.value().equals("DeiTForImageClassificationWithTeacher")) d.two_heads = d.classes > 0;
      if (names.value().equals("DeiTModel")) d.classes = 0;
    }
  }
  d.context = (d.image / d.patch) * (d.image / d.patch) + d.class_tokens;
  BlockSpec block;
  block.options = {{"hidden", std::to_string(d.hidden)},
                   {"heads", std::to_string(heads)},
                   {"causal", "0"},
                   {"rope", "none"},
                   {"bias", bias ? "1" : "0"},
                   {"out_bias", "1"}};
  block.mlp = {MlpSpec::Kind::plain, act, inner, true};
  d.blocks.assign(static_cast<size_t>(layers), block);
  d.prefixes = {deit ? "deit." : "vit.", ""};
  // embed_positions holds position_embeddings [1, N + 1, C]; the loader adds cls_token to its first row and takes the bias of
  // patches off it, since the class token's row of the input is zero.
  d.names = {{"patches.*", "embeddings.patch_embeddings.projection.*"},
             {"embed_positions.weight", "embeddings.position_embeddings"},
             {"layers.#.self_attn.q_proj.*", "encoder.layer.#.attention.attention.query.*"},
             {"layers.#.self_attn.k_proj.*", "encoder.layer.#.attention.attention.key.*"},
             {"layers.#.self_attn.v_proj.*", "encoder.layer.#.attention.attention.value.*"},
             {"layers.#.self_attn.o_proj.*", "encoder.layer.#.attention.output.dense.*"},
             {"layers.#.input_layernorm.*", "encoder.layer.#.layernorm_before.*"},
             {"layers.#.post_attention_layernorm.*", "encoder.layer.#.layernorm_after.*"},
             {"layers.#.mlp.up_proj.*", "encoder.layer.#.intermediate.dense.*"},
             {"layers.#.mlp.down_proj.*", "encoder.layer.#.output.dense.*"},
             {"norm.*", "layernorm.*"},
             {"second_classifier.*", "distillation_classifier.*"},
             {"classifier.*", d.two_heads ? "cls_classifier.*" : "classifier.*"}};
  d.ignored = {"embeddings.cls_token", "embeddings.distillation_token", "embeddings.mask_token", "pooler.dense.weight",
               "pooler.dense.bias"};
}

}  // namespace linnet
