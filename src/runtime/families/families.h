// The families of models: one file and one line each.
#pragma once

#include "runtime/config.h"
#include "runtime/description.h"

namespace linnet {

struct Family {
  const char* model_type;
  void (*describe)(Config& config, Description& d);  // failures are kept by the config
};

void describe_llama(Config& config, Description& d);      // llama, mistral, qwen2, qwen3, smollm3, phi3, olmo2
void describe_gemma(Config& config, Description& d);      // gemma, gemma2, gemma3_text, vaultgemma
void describe_text_part(Config& config, Description& d);  // gemma3, mistral3: of models with images the part for text
void describe_gpt2(Config& config, Description& d);       // gpt2, gpt_bigcode
void describe_neox(Config& config, Description& d);       // gpt_neox, phi, stablelm, starcoder2, persimmon
void describe_kin(Config& config, Description& d);        // granite, glm, cohere, .. : the table of kin.cc
void describe_mixture(Config& config, Description& d);    // mixtral, qwen2_moe, .. : the table of moe.cc
void describe_gpt_neo(Config& config, Description& d);
void describe_gptj(Config& config, Description& d);  // gptj, codegen
void describe_opt(Config& config, Description& d);
void describe_fairseq(Config& config, Description& d);  // xglm, biogpt
void describe_alibi(Config& config, Description& d);    // bloom, mpt
void describe_falcon(Config& config, Description& d);
void describe_bert(Config& config, Description& d);  // bert, roberta and their kin
void describe_nomic_bert(Config& config, Description& d);
void describe_modernbert(Config& config, Description& d);
void describe_vit(Config& config, Description& d);    // vit, deit
void describe_mamba(Config& config, Description& d);  // mamba, mamba2, falcon_mamba
void describe_lfm2(Config& config, Description& d);
void describe_qwen3_5(Config& config, Description& d);  // qwen3_5_text, qwen3_5
void describe_olmo_hybrid(Config& config, Description& d);
void describe_nemotron_h(Config& config, Description& d);
void describe_mamba_hybrid(Config& config, Description& d);  // bamba, granitemoehybrid
void describe_fla(Config& config, Description& d);           // gla, retnet, delta_net, gated_deltanet, kda
void describe_linnet(Config& config, Description& d);

inline constexpr Family kFamilies[] = {
    {"llama", describe_llama},
    {"mistral", describe_llama},
    {"qwen2", describe_llama},
    {"qwen3", describe_llama},
    {"smollm3", describe_llama},
    {"phi3", describe_llama},
    {"olmo2", describe_llama},
    {"gemma", describe_gemma},
    {"gemma2", describe_gemma},
    {"gemma3_text", describe_gemma},
    {"gemma3", describe_text_part},
    {"mistral3", describe_text_part},
    {"vaultgemma", describe_gemma},
    {"gpt2", describe_gpt2},
    {"gpt_bigcode", describe_gpt2},
    {"gpt_neox", describe_neox},
    {"phi", describe_neox},
    {"stablelm", describe_neox},
    {"starcoder2", describe_neox},
    {"persimmon", describe_neox},
    {"bert", describe_bert},
    {"roberta", describe_bert},
    {"xlm-roberta", describe_bert},
    {"distilbert", describe_bert},
    {"vit", describe_vit},
    {"deit", describe_vit},
    {"granite", describe_kin},
    {"arcee", describe_kin},
    {"ernie4_5", describe_kin},
    {"glm", describe_kin},
    {"glm4", describe_kin},
    {"seed_oss", describe_kin},
    {"helium", describe_kin},
    {"olmo", describe_kin},
    {"olmo3", describe_kin},
    {"exaone4", describe_kin},
    {"cohere", describe_kin},
    {"cohere2", describe_kin},
    {"nemotron", describe_kin},
    {"ministral", describe_kin},
    {"cwm", describe_kin},
    {"jais2", describe_kin},
    {"hunyuan_v1_dense", describe_kin},
    {"nanochat", describe_kin},
    {"apertus", describe_kin},
    {"mixtral", describe_mixture},
    {"qwen2_moe", describe_mixture},
    {"qwen3_moe", describe_mixture},
    {"olmoe", describe_mixture},
    {"granitemoe", describe_mixture},
    {"granitemoeshared", describe_mixture},
    {"gpt_neo", describe_gpt_neo},
    {"gptj", describe_gptj},
    {"codegen", describe_gptj},
    {"opt", describe_opt},
    {"xglm", describe_fairseq},
    {"biogpt", describe_fairseq},
    {"bloom", describe_alibi},
    {"mpt", describe_alibi},
    {"falcon", describe_falcon},
    {"camembert", describe_bert},
    {"electra", describe_bert},
    {"albert", describe_bert},
    {"ernie", describe_bert},
    {"data2vec-text", describe_bert},
    {"roberta-prelayernorm", describe_bert},
    {"xlm-roberta-xl", describe_bert},
    {"megatron-bert", describe_bert},
    {"nomic_bert", describe_nomic_bert},
    {"modernbert", describe_modernbert},
    {"mamba", describe_mamba},
    {"mamba2", describe_mamba},
    {"falcon_mamba", describe_mamba},
    {"lfm2", describe_lfm2},
    {"qwen3_5_text", describe_qwen3_5},
    {"qwen3_5", describe_qwen3_5},
    {"olmo_hybrid", describe_olmo_hybrid},
    {"nemotron_h", describe_nemotron_h},
    {"bamba", describe_mamba_hybrid},
    {"granitemoehybrid", describe_mamba_hybrid},
    {"gla", describe_fla},
    {"retnet", describe_fla},
    {"delta_net", describe_fla},
    {"gated_deltanet", describe_fla},
    {"kda", describe_fla},
    {"linnet", describe_linnet},
};

// Parts that several families share; failures are kept by the config.
struct HeadSizes {
  int64_t heads = 1, kv_heads = 1, width = 1;
};
// num_attention_heads, num_key_value_heads, head_dim (hidden / heads where it is absent and `width` is 0, else `width`);
// `heads` and `kv_heads` above 0 stand for absent fields.
HeadSizes read_heads(Config& config, int64_t hidden, int64_t width = 0, int64_t heads = 0, int64_t kv_heads = 0);
// Options of softmax_attention: its sizes, and which projections have a bias.
std::vector<layers::Setting> head_options(int64_t hidden, const HeadSizes& sizes, bool bias, bool out_bias);
// Options of softmax_attention: base, scaling and turning channels of rotary positions. `nested` is the object with the fields:
// rope_parameters of newer files; of older ones rope_scaling, with rope_theta beside it.
void add_rotary(Config& config, int64_t width, double share, std::vector<layers::Setting>& options, double theta = 10000,
                const char* part = nullptr);
// The window of layer i: sliding_window where the layer has one, else -1. Layers without layer_types have one from
// max_window_layers on, or from `first` on where that is absent.
int64_t layer_window(Config& config, int64_t i, int64_t layers, int64_t first);
std::string layer_type(Config& config, int64_t i, int64_t layers);  // entry i of layer_types; empty where there is no list
void add_window(int64_t window, BlockSpec& block);                  // the token itself is one of them; -1: nothing

// Where Llama and its kin keep layers, last norm and head, behind the rules of a family's own, and what their files have
// besides.
void add_decoder_names(Description& d);

// Granite's multipliers of embeddings, residuals and logits; the names of its experts.
void read_granite_scales(Config& config, Description& d);
void add_granite_experts(const MlpSpec& mlp, Description& d);

// Whether a list of numbers, such as mlp_only_layers, has this one.
bool lists(const JsonValue& list, int64_t number);

// The activation of a config by our name; the config keeps a sentence when it is unknown.
std::string activation_name(Config& config, const char* field, const std::string& otherwise);

}  // namespace linnet
