"""Models of every family beside transformers, in f32: small random ones, and SmolLM2 and MiniLM where they were fetched."""

import json
import subprocess

import numpy
import pytest
import torch
import transformers
from runtime_cases import BUILD, MINILM, SMOLLM2, need, runtime, wikitext

SMALL = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=256)  # fmt: skip
CAUSAL = {
    "llama": (transformers.LlamaConfig, dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
              num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-5)),
    "llama-tied-bias": (transformers.LlamaConfig, dict(vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
                        num_attention_heads=3, head_dim=32, attention_bias=True, mlp_bias=True, tie_word_embeddings=True,
                        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0})),
    "llama3-rope": (transformers.LlamaConfig, dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
                    num_attention_heads=2, max_position_embeddings=512, rope_parameters={"rope_type": "llama3", "rope_theta": 1000.0,
                    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64})),
    "yarn-rope": (transformers.LlamaConfig, dict(SMALL, rope_parameters={"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0,
                  "original_max_position_embeddings": 64})),
    "yarn-partial": (transformers.GlmConfig, dict(SMALL, head_dim=32, pad_token_id=0, rope_parameters={"rope_type": "yarn", "rope_theta": 100.0,
                     "partial_rotary_factor": 0.5, "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 16.0, "beta_slow": 2.0,
                     "attention_factor": 1.3})),
    "dynamic-rope": (transformers.LlamaConfig, dict(SMALL, rope_parameters={"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0})),
    "qwen2": (transformers.Qwen2Config, dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
              num_attention_heads=4, num_key_value_heads=1)),
    "qwen2-window": (transformers.Qwen2Config, dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
                     num_attention_heads=4, num_key_value_heads=2, use_sliding_window=True, sliding_window=7, max_window_layers=1)),
    "qwen3": (transformers.Qwen3Config, dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
              num_attention_heads=4, num_key_value_heads=2, head_dim=24)),
    "gpt2": (transformers.GPT2Config, dict(vocab_size=97, n_positions=128, n_embd=64, n_layer=3, n_head=4)),
    "gpt2-by-layer": (transformers.GPT2Config, dict(vocab_size=97, n_positions=128, n_embd=48, n_layer=2, n_head=3, n_inner=80,
                      scale_attn_by_inverse_layer_idx=True, activation_function="relu")),
    "mistral": (transformers.MistralConfig, dict(SMALL, sliding_window=9)),
    "mistral-full": (transformers.MistralConfig, dict(SMALL, sliding_window=None, head_dim=24)),
    "smollm3": (transformers.SmolLM3Config, dict(SMALL, num_hidden_layers=5, pad_token_id=0)),
    "phi3": (transformers.Phi3Config, dict(SMALL, pad_token_id=0, sliding_window=11)),
    "olmo2": (transformers.Olmo2Config, dict(SMALL)),
    "gemma": (transformers.GemmaConfig, dict(SMALL, head_dim=32)),
    "gemma2": (transformers.Gemma2Config, dict(SMALL, head_dim=32, sliding_window=9, query_pre_attn_scalar=24)),
    "gemma3_text": (transformers.Gemma3TextConfig, dict(SMALL, num_hidden_layers=7, head_dim=32, sliding_window=9,
                    query_pre_attn_scalar=24)),
    "gpt_neox": (transformers.GPTNeoXConfig, dict(SMALL, num_attention_heads=2, rotary_pct=0.25)),
    "gpt_neox-serial": (transformers.GPTNeoXConfig, dict(SMALL, use_parallel_residual=False, attention_bias=False)),
    "phi": (transformers.PhiConfig, dict(SMALL)),
    "stablelm": (transformers.StableLmConfig, dict(SMALL, use_qkv_bias=True)),
    "stablelm-parallel": (transformers.StableLmConfig, dict(SMALL, use_parallel_residual=True)),
    "starcoder2": (transformers.Starcoder2Config, dict(SMALL, sliding_window=9)),
    "granite": (transformers.GraniteConfig, dict(SMALL, embedding_multiplier=3.0, residual_multiplier=0.4, attention_multiplier=0.1,
                logits_scaling=2.0)),
    "arcee": (transformers.ArceeConfig, dict(SMALL, head_dim=16, mlp_bias=True)),
    "ernie4_5": (transformers.Ernie4_5Config, dict(SMALL, head_dim=24)),
    "ernie4_5-bias": (transformers.Ernie4_5Config, dict(SMALL, head_dim=16, use_bias=True)),
    "glm": (transformers.GlmConfig, dict(SMALL, head_dim=16, pad_token_id=0)),
    "glm4": (transformers.Glm4Config, dict(SMALL, head_dim=24, pad_token_id=0)),
    "seed_oss": (transformers.SeedOssConfig, dict(SMALL, head_dim=24)),
    "helium": (transformers.HeliumConfig, dict(SMALL, head_dim=16, pad_token_id=0)),
    "olmo": (transformers.OlmoConfig, dict(SMALL)),
    "olmo3": (transformers.Olmo3Config, dict(SMALL, num_hidden_layers=5, sliding_window=9)),
    "exaone4": (transformers.Exaone4Config, dict(SMALL, num_hidden_layers=5, sliding_window=9)),
    "exaone4-full": (transformers.Exaone4Config, dict(SMALL, sliding_window=None, layer_types=["full_attention"] * 3)),
    "cohere": (transformers.CohereConfig, dict(SMALL, pad_token_id=0)),
    "cohere2": (transformers.Cohere2Config, dict(SMALL, num_hidden_layers=5, sliding_window=9, pad_token_id=0, head_dim=16)),
    "nemotron": (transformers.NemotronConfig, dict(SMALL, head_dim=16, pad_token_id=0)),
    "gptj": (transformers.GPTJConfig, dict(vocab_size=97, n_positions=128, n_embd=64, n_layer=3, n_head=4, rotary_dim=8)),
    "codegen": (transformers.CodeGenConfig, dict(vocab_size=97, n_positions=128, n_embd=64, n_layer=3, n_head=8, rotary_dim=4)),
    "gpt_neo": (transformers.GPTNeoConfig, dict(vocab_size=97, max_position_embeddings=128, hidden_size=64, num_layers=4, num_heads=4,
                attention_types=[[["global", "local"], 2]], window_size=9)),
    "opt": (transformers.OPTConfig, dict(vocab_size=97, hidden_size=64, num_hidden_layers=3, ffn_dim=96, max_position_embeddings=128,
            num_attention_heads=4, word_embed_proj_dim=64)),
    "opt-post": (transformers.OPTConfig, dict(vocab_size=97, hidden_size=64, num_hidden_layers=2, ffn_dim=96, max_position_embeddings=128,
                 num_attention_heads=4, word_embed_proj_dim=64, do_layer_norm_before=False)),
    "falcon": (transformers.FalconConfig, dict(vocab_size=97, hidden_size=64, num_hidden_layers=3, num_attention_heads=4)),
    "falcon-new": (transformers.FalconConfig, dict(vocab_size=97, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_kv_heads=2,
                   new_decoder_architecture=True)),
    "falcon-old": (transformers.FalconConfig, dict(vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, multi_query=False,
                   parallel_attn=False, bias=True)),
    "vaultgemma": (transformers.VaultGemmaConfig, dict(SMALL, head_dim=32, sliding_window=9, query_pre_attn_scalar=24)),
    "ministral": (transformers.MinistralConfig, dict(SMALL, head_dim=24, sliding_window=9, layer_types=["sliding_attention", "full_attention"] * 2,
                  num_hidden_layers=4)),
    "cwm": (transformers.CwmConfig, dict(SMALL, head_dim=16, sliding_window=9, num_hidden_layers=5)),
    "jais2": (transformers.Jais2Config, dict(SMALL)),
    "hunyuan_v1_dense": (transformers.HunYuanDenseV1Config, dict(SMALL, head_dim=24)),
    "hunyuan_v1_dense-alpha": (transformers.HunYuanDenseV1Config, dict(SMALL, head_dim=16, attention_bias=True, rope_parameters={"rope_type": "dynamic",
                               "rope_theta": 500.0, "alpha": 50.0, "factor": 1.0})),
    "nanochat": (transformers.NanoChatConfig, dict(SMALL)),
    "apertus": (transformers.ApertusConfig, dict(SMALL)),
    "persimmon": (transformers.PersimmonConfig, dict(SMALL)),
    "persimmon-plain": (transformers.PersimmonConfig, dict(SMALL, qk_layernorm=False, tie_word_embeddings=True)),
    "gpt_bigcode": (transformers.GPTBigCodeConfig, dict(vocab_size=97, n_positions=128, n_embd=64, n_layer=3, n_head=4)),
    "gpt_bigcode-heads": (transformers.GPTBigCodeConfig, dict(vocab_size=97, n_positions=128, n_embd=64, n_layer=2, n_head=4, multi_query=False)),
    "xglm": (transformers.XGLMConfig, dict(vocab_size=97, d_model=64, ffn_dim=96, num_layers=3, attention_heads=4, max_position_embeddings=256)),
    "biogpt": (transformers.BioGptConfig, dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
               max_position_embeddings=256)),
    "bloom": (transformers.BloomConfig, dict(vocab_size=97, hidden_size=64, n_layer=3, n_head=4)),
    "bloom-six": (transformers.BloomConfig, dict(vocab_size=97, hidden_size=96, n_layer=2, n_head=6, tie_word_embeddings=False, seq_length=600)),
    "mpt": (transformers.MptConfig, dict(vocab_size=97, d_model=64, n_layers=3, n_heads=4, max_seq_len=256)),
    "mpt-six": (transformers.MptConfig, dict(vocab_size=97, d_model=96, n_layers=2, n_heads=6, max_seq_len=256, attn_config={"softmax_scale": 0.3})),
    "mamba": (transformers.MambaConfig, dict(vocab_size=97, hidden_size=48, state_size=8, num_hidden_layers=3)),
    "mamba-untied": (transformers.MambaConfig, dict(vocab_size=97, hidden_size=48, state_size=8, num_hidden_layers=2, expand=1, use_bias=True,
                     use_conv_bias=False, conv_kernel=3, time_step_rank=5, tie_word_embeddings=False)),
    "mamba2": (transformers.Mamba2Config, dict(vocab_size=97, hidden_size=32, state_size=16, num_hidden_layers=3, num_heads=8, head_dim=8, n_groups=2,
               chunk_size=16)),
    "mamba2-limit": (transformers.Mamba2Config, dict(vocab_size=97, hidden_size=32, state_size=16, num_hidden_layers=2, num_heads=4, head_dim=16,
                     n_groups=1, time_step_limit=(0.01, 0.5), chunk_size=16, use_bias=True)),
    "falcon_mamba": (transformers.FalconMambaConfig, dict(vocab_size=97, hidden_size=48, state_size=8, num_hidden_layers=3)),
    "olmo_hybrid": (transformers.OlmoHybridConfig, dict(SMALL, num_hidden_layers=4, linear_num_key_heads=4, linear_num_value_heads=4,
                    linear_key_head_dim=8, linear_value_head_dim=8, pad_token_id=0)),
    "nemotron_h": (transformers.NemotronHConfig, dict(vocab_size=97, hidden_size=48, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
                   head_dim=16, mamba_num_heads=8, mamba_head_dim=8, n_groups=2, ssm_state_size=16, chunk_size=16, max_position_embeddings=256,
                   layer_types=["linear_attention", "mlp", "full_attention", "mlp", "linear_attention", "full_attention"])),
    "lfm2": (transformers.Lfm2Config, dict(SMALL, num_hidden_layers=4, layer_types=["conv", "conv", "full_attention", "conv"], block_multiple_of=16)),
    "lfm2-bias": (transformers.Lfm2Config, dict(SMALL, full_attn_idxs=[1], conv_bias=True, conv_L_cache=4, block_auto_adjust_ff_dim=False,
                  tie_word_embeddings=False)),
    "qwen3_5_text": (transformers.Qwen3_5TextConfig, dict(SMALL, num_hidden_layers=4, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4,
                     linear_key_head_dim=8, linear_value_head_dim=16)),
    "bamba": (transformers.BambaConfig, dict(SMALL, num_hidden_layers=4, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16,
              mamba_chunk_size=16)),
    "granitemoehybrid": (transformers.GraniteMoeHybridConfig, dict(SMALL, num_local_experts=0, shared_intermediate_size=80, mamba_n_heads=8, mamba_d_state=16,
                         mamba_n_groups=2, layer_types=["mamba", "attention", "mamba"], embedding_multiplier=3.0, residual_multiplier=0.4,
                         attention_multiplier=0.1, logits_scaling=2.0, mamba_chunk_size=16)),
    "mixtral": (transformers.MixtralConfig, dict(SMALL, num_local_experts=6, num_experts_per_tok=2, sliding_window=9)),
    "qwen2_moe": (transformers.Qwen2MoeConfig, dict(SMALL, moe_intermediate_size=40, shared_expert_intermediate_size=72, num_experts=5,
                  num_experts_per_tok=3)),
    "qwen2_moe-dense": (transformers.Qwen2MoeConfig, dict(SMALL, num_hidden_layers=5, moe_intermediate_size=32, shared_expert_intermediate_size=64,
                        num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, decoder_sparse_step=2, mlp_only_layers=[3], qkv_bias=False)),
    "qwen3_moe": (transformers.Qwen3MoeConfig, dict(SMALL, head_dim=24, moe_intermediate_size=32, num_experts=7, num_experts_per_tok=3,
                  norm_topk_prob=True)),
    "qwen3_moe-plain": (transformers.Qwen3MoeConfig, dict(SMALL, head_dim=16, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=1,
                        mlp_only_layers=[0], attention_bias=True)),
    "olmoe": (transformers.OlmoeConfig, dict(SMALL, num_experts=5, num_experts_per_tok=2)),
    "olmoe-norm": (transformers.OlmoeConfig, dict(SMALL, num_experts=5, num_experts_per_tok=5, norm_topk_prob=True)),
    "granitemoe": (transformers.GraniteMoeConfig, dict(SMALL, num_local_experts=5, num_experts_per_tok=2, embedding_multiplier=3.0,
                   residual_multiplier=0.4, attention_multiplier=0.1, logits_scaling=2.0)),
    "granitemoeshared": (transformers.GraniteMoeSharedConfig, dict(SMALL, num_local_experts=5, num_experts_per_tok=2, shared_intermediate_size=80,
                         residual_multiplier=0.4, attention_multiplier=0.2)),
    "granitemoehybrid-experts": (transformers.GraniteMoeHybridConfig, dict(SMALL, num_local_experts=4, num_experts_per_tok=2,
                                 shared_intermediate_size=80, mamba_n_heads=8, mamba_d_state=16, mamba_chunk_size=16,
                                 layer_types=["mamba", "attention", "mamba"], residual_multiplier=0.4)),
    "granitemoehybrid-rope": (transformers.GraniteMoeHybridConfig, dict(SMALL, num_local_experts=0, shared_intermediate_size=80, mamba_n_heads=8,
                              mamba_d_state=16, layer_types=["attention", "mamba", "attention"], position_embedding_type="rope", mamba_chunk_size=16)),
}  # fmt: skip
PROMPTS = [
    "The capital of France is", "Once upon a time", "def fibonacci(n):", "The linnet is a small", "In 1969, humans",
    "Water boils at", "To make bread, first", "The three states of matter are", "My favourite book is", "1, 1, 2, 3, 5, 8,",
    "The opposite of hot is", "A haiku about rain:", "SELECT name FROM", "The largest planet", "If it rains tomorrow,",
    "Dear Sir or Madam,", "The mitochondria is", "Photosynthesis converts", "Bonjour, je m'appelle", "Linear attention is",
]  # fmt: skip


def randomized(model, seed=0):
    """Weights that make attention and norms matter: the initial ones are nearly zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_((1.0 if "norm" in name or "ln_" in name else 0.0) + 0.2 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5 * 1.5)
    return model.eval()


def agreement(ours, theirs):
    ours, theirs = numpy.array(ours, dtype=numpy.float64), theirs.detach().double().numpy().reshape(-1)
    return numpy.abs(ours - theirs).max() / numpy.abs(theirs).max()


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("shards", [False, True])
def test_logits_of_causal_models(name, shards, tmp_path):
    kind, options = CAUSAL[name]
    reference = randomized(transformers.AutoModelForCausalLM.from_config(kind(**options), attn_implementation="eager"))
    reference.save_pretrained(tmp_path, max_shard_size="60KB" if shards else "5GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == shards
    ours = runtime.load(tmp_path)
    tokens = torch.randint(0, ours.vocabulary, (1, 53), generator=torch.Generator().manual_seed(1))
    expected = reference(tokens).logits
    assert agreement(ours.logits(tokens[0].tolist()), expected) < 1e-4
    session = ours.start()
    session.prefill(tokens[0, :40].tolist())
    for token in tokens[0, 40:].tolist():
        logits = session.decode(token)
    assert agreement(logits, expected[0, -1]) < 1e-4


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "granitemoeshared"])
def test_experts_in_one_tensor(name, tmp_path):
    """As newer versions of transformers hold them in memory, and write them when asked to."""
    kind, options = CAUSAL[name]
    reference = randomized(transformers.AutoModelForCausalLM.from_config(kind(**options), attn_implementation="eager"))
    reference.save_pretrained(tmp_path, save_original_format=False)
    tokens = list(range(40))
    with torch.no_grad():
        assert agreement(runtime.load(tmp_path).logits(tokens), reference(torch.tensor([tokens])).logits) < 1e-4


def test_experts_in_fewer_bits(tmp_path):
    """Quantised like dense matrices. Every token runs all experts here: rounding exchanges none."""
    kind, options = CAUSAL["olmoe-norm"]
    reference = randomized(transformers.AutoModelForCausalLM.from_config(kind(**options), attn_implementation="eager"))
    reference.save_pretrained(tmp_path)
    tokens = list(range(40))
    exact = torch.tensor(runtime.load(tmp_path, weights="f32").logits(tokens))
    for weights, bound in (("bf16", 0.06), ("q8", 0.12)):
        assert 0 < agreement(runtime.load(tmp_path, weights=weights).logits(tokens), exact) < bound, weights


def test_text_part_of_qwen3_5(tmp_path):
    """Checkpoints with an image tower hold the text model in text_config and model.language_model; the rest is left out."""
    kind, options = CAUSAL["qwen3_5_text"]
    vision = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64, num_position_embeddings=16)
    config = transformers.Qwen3_5Config(text_config=kind(**options).to_dict(), vision_config=vision)
    reference = randomized(transformers.Qwen3_5ForConditionalGeneration._from_config(config, attn_implementation="eager"))
    reference.save_pretrained(tmp_path)
    tokens = list(range(40))
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits
    assert agreement(runtime.load(tmp_path).logits(tokens), expected) < 1e-4


@pytest.mark.parametrize("kind", ["Gemma3", "Mistral3"])
@pytest.mark.parametrize("newer_names", [False, True])
@pytest.mark.parametrize("tied", [True, False])
def test_text_part_of_composites(kind, newer_names, tied, tmp_path):
    text = dict(SMALL, head_dim=32, sliding_window=9, model_type="gemma3_text" if kind == "Gemma3" else "mistral", tie_word_embeddings=tied)
    vision = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)
    vision |= {} if kind == "Gemma3" else dict(head_dim=16, model_type="pixtral")
    config = getattr(transformers, kind + "Config")(text_config=text, vision_config=vision, tie_word_embeddings=tied)
    model = getattr(transformers, kind + "ForConditionalGeneration")
    reference = randomized(model._from_config(config, attn_implementation="eager"))
    reference.save_pretrained(tmp_path, save_original_format=not newer_names)
    tokens = list(range(40))
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits
    assert agreement(runtime.load(tmp_path).logits(tokens), expected) < 1e-4


def test_linear_biases_far_away(tmp_path):
    """Positions behind 256 stand in further channels of the keys."""
    kind, options = CAUSAL["bloom-six"]
    reference = randomized(transformers.AutoModelForCausalLM.from_config(kind(**options), attn_implementation="eager"))
    reference.save_pretrained(tmp_path)
    tokens = torch.randint(0, 97, (1, 600), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(tokens).logits
    ours = runtime.load(tmp_path)
    assert agreement(ours.logits(tokens[0].tolist()), expected) < 1e-4
    with pytest.raises(ValueError, match="600"):
        ours.logits([1] * 601)


def test_infinity_as_python_writes_it(tmp_path):
    kind, options = CAUSAL["mamba2"]
    randomized(transformers.AutoModelForCausalLM.from_config(kind(**options))).save_pretrained(tmp_path)
    path, expected = tmp_path / "config.json", runtime.load(tmp_path).logits([1, 2, 3])
    path.write_text(json.dumps({**json.loads(path.read_text()), "time_step_limit": [0.0, float("inf")]}))
    assert "Infinity" in path.read_text() and list(runtime.load(tmp_path).logits([1, 2, 3])) == list(expected)


def test_older_files_name_windows_by_a_pattern(tmp_path):
    kind, options = CAUSAL["cohere2"]
    reference = randomized(transformers.AutoModelForCausalLM.from_config(kind(**options), attn_implementation="eager"))
    reference.save_pretrained(tmp_path)
    path, tokens = tmp_path / "config.json", list(range(40))
    expected = reference(torch.tensor([tokens])).logits
    saved = {key: value for key, value in json.loads(path.read_text()).items() if key not in ("layer_types", "rope_parameters")}
    for pattern in (4, "LLLG"):
        path.write_text(json.dumps({**saved, "sliding_window_pattern": pattern, "rope_theta": 10000.0}))
        assert agreement(runtime.load(tmp_path).logits(tokens), expected) < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits(dtype, tmp_path):
    kind, options = CAUSAL["llama"]
    reference = randomized(transformers.AutoModelForCausalLM.from_config(kind(**options), attn_implementation="eager")).to(dtype)
    reference.save_pretrained(tmp_path)
    tokens = list(range(30))
    # Read again: .float() would leave the rotary frequencies rounded to 16 bits.
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    expected = reference(torch.tensor([tokens])).logits
    assert agreement(runtime.load(tmp_path, weights="f32").logits(tokens), expected) < 1e-4
    assert agreement(runtime.load(tmp_path).logits(tokens), expected) < 3e-2  # as they lie, on 16-bit products


def test_bert_states(tmp_path):
    config = transformers.BertConfig(vocab_size=97, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96,
                                     max_position_embeddings=64, attn_implementation="eager")  # fmt: skip
    reference = randomized(transformers.BertModel(config))
    reference.save_pretrained(tmp_path)
    tokens = list(range(3, 44))
    expected = reference(torch.tensor([tokens])).last_hidden_state
    assert agreement(runtime.load(tmp_path).states(tokens), expected) < 1e-4
    with pytest.raises(ValueError, match="an encoder continues no text"):
        runtime.load(tmp_path).start()


@pytest.mark.parametrize("kind", ["Roberta", "XLMRoberta", "Camembert", "DistilBert", "Electra", "Albert", "Ernie", "Data2VecText", "RobertaPreLayerNorm",
                                  "XLMRobertaXL", "MegatronBert", "NomicBert"])
def test_encoder_states(kind, tmp_path):
    sizes = dict(dim=64, n_layers=2, n_heads=4, hidden_dim=96) if kind == "DistilBert" else dict(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, pad_token_id=3)
    config = getattr(transformers, kind + "Config")(vocab_size=97, max_position_embeddings=64, attn_implementation="eager", **sizes)
    reference = randomized(getattr(transformers, kind + "Model")(config))
    reference.save_pretrained(tmp_path)
    tokens = list(range(5, 46))
    assert agreement(runtime.load(tmp_path).states(tokens), reference(torch.tensor([tokens])).last_hidden_state) < 1e-4


def test_ernie_with_task_types(tmp_path):
    config = transformers.ErnieConfig(vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
                                      max_position_embeddings=64, use_task_id=True, attn_implementation="eager")  # fmt: skip
    reference = randomized(transformers.ErnieModel(config))
    reference.save_pretrained(tmp_path)
    tokens = list(range(5, 46))
    assert agreement(runtime.load(tmp_path).states(tokens), reference(torch.tensor([tokens])).last_hidden_state) < 1e-4


def test_nomic_bert_with_the_fields_of_gpt2(tmp_path):
    """The configuration of the published models: other names for the sizes."""
    config = transformers.NomicBertConfig(vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
                                          max_position_embeddings=64, attn_implementation="eager")  # fmt: skip
    reference = randomized(transformers.NomicBertModel(config))
    reference.save_pretrained(tmp_path)
    older = dict(model_type="nomic_bert", vocab_size=97, n_embd=64, n_layer=2, n_head=4, n_inner=96, n_positions=64, rotary_emb_base=1000,
                 rotary_emb_fraction=1.0, activation_function="swiglu", layer_norm_epsilon=1e-12, type_vocab_size=2, prenorm=False)  # fmt: skip
    path, tokens = tmp_path / "config.json", list(range(5, 46))
    path.write_text(json.dumps(older))
    assert agreement(runtime.load(tmp_path).states(tokens), reference(torch.tensor([tokens])).last_hidden_state) < 1e-4
    path.write_text(json.dumps({**older, "prenorm": True}))
    with pytest.raises(ValueError, match="prenorm is true, expected false"):
        runtime.load(tmp_path)


@pytest.mark.parametrize("name, changes, sentence", [
    ("hunyuan_v1_dense-alpha", dict(rope_parameters=dict(rope_type="dynamic", alpha=-1.0, rope_theta=10000.0)), "alpha is -1"),
    ("cwm", dict(layer_types=None), "layer_types is missing"),
    ("apertus", dict(rope_parameters=None), "rope_parameters is missing"),
    ("apertus", dict(hidden_act="mish"), "hidden_act is .mish., expected"),
    ("hunyuan_v1_dense", dict(use_cla=True), "use_cla is true"),
    ("nemotron_h", dict(layers_block_type=["linear_attention", "moe"]), "experts are not known here"),
    ("nemotron_h", dict(attention_bias=True), "attention_bias is true"),
    ("olmo_hybrid", dict(layer_types=["conv"] * 4), "an entry of layer_types is .conv."),
    ("xglm", dict(add_cross_attention=True), "add_cross_attention is true"),
    ("gpt_bigcode", dict(add_cross_attention=True), "add_cross_attention is true"),
    ("bloom", dict(apply_residual_connection_post_layernorm=True), "apply_residual_connection_post_layernorm is true"),
    ("mpt", dict(attn_config=dict(qk_ln=True)), "qk_ln is true"),
    ("mpt", dict(attn_config=dict(alibi=False)), "alibi is false"),
    ("nanochat", dict(rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=10000.0)), "rope_back has no scaling"),
])  # fmt: skip
def test_unknown_options_are_refused(name, changes, sentence, tmp_path):
    kind, options = CAUSAL[name]
    transformers.AutoModelForCausalLM.from_config(kind(**options)).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ValueError, match=sentence):
        runtime.load(tmp_path)


@pytest.mark.parametrize("bias", [False, True])
def test_modernbert_states(bias, tmp_path):
    config = transformers.ModernBertConfig(vocab_size=97, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=96,
                                           max_position_embeddings=64, local_attention=8, attention_bias=bias, norm_bias=bias, mlp_bias=bias,
                                           pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
                                           attn_implementation="eager")  # fmt: skip
    reference = randomized(transformers.ModernBertModel(config))
    reference.save_pretrained(tmp_path)
    tokens = list(range(5, 46))
    assert agreement(runtime.load(tmp_path).states(tokens), reference(torch.tensor([tokens])).last_hidden_state) < 1e-4


@pytest.mark.parametrize("kind", ["DeiTForImageClassification", "DeiTForImageClassificationWithTeacher"])
def test_deit(kind, tmp_path):
    config = transformers.DeiTConfig(hidden_size=48, num_hidden_layers=2, num_attention_heads=3, intermediate_size=64, image_size=32,
                                     patch_size=8, num_labels=5, attn_implementation="eager")  # fmt: skip
    reference = randomized(getattr(transformers, kind)(config))
    reference.save_pretrained(tmp_path)
    pixels = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    assert agreement(runtime.load(tmp_path).classify(pixels.reshape(-1).tolist()), reference(pixels).logits) < 1e-4


@pytest.mark.parametrize("classes", [0, 5])
def test_vit(classes, tmp_path):
    config = transformers.ViTConfig(hidden_size=48, num_hidden_layers=2, num_attention_heads=3, intermediate_size=64, image_size=32,
                                    patch_size=8, num_labels=max(classes, 1), attn_implementation="eager")  # fmt: skip
    reference = transformers.ViTForImageClassification(config) if classes else transformers.ViTModel(config, add_pooling_layer=False)
    randomized(reference).save_pretrained(tmp_path)
    if not classes:  # a base model's config has labels all the same
        path = tmp_path / "config.json"
        path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k not in ("id2label", "label2id")}))
    pixels = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    expected = reference(pixels).logits if classes else reference(pixels).last_hidden_state[:, 0]
    assert agreement(runtime.load(tmp_path).classify(pixels.reshape(-1).tolist()), expected) < 1e-4


@pytest.fixture(scope="module")
def smollm2():
    folder, name = need(SMOLLM2).parent, SMOLLM2.name
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32, attn_implementation="eager")
    return reference.eval(), runtime.load(SMOLLM2, weights="f32")


def test_smollm2_logits(smollm2):
    reference, ours = smollm2
    tokens = ours.tokenizer.encode(wikitext())[:96]
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits
    assert agreement(ours.logits(tokens), expected) < 1e-4


def test_smollm2_greedy_text(smollm2):
    reference, ours = smollm2
    for prompt in PROMPTS:
        ids = ours.tokenizer.encode(prompt)
        with torch.no_grad():
            expected = reference.generate(torch.tensor([ids]), max_new_tokens=64, do_sample=False, eos_token_id=None,
                                          pad_token_id=2)[0, len(ids) :].tolist()  # fmt: skip
        session, got = ours.start(), []
        logits = session.prefill(ids)
        for _ in range(64):
            got.append(int(numpy.argmax(logits)))
            logits = session.decode(got[-1])
        assert got == expected, prompt


def test_smollm2_perplexity_by_weights(smollm2):
    _, exact = smollm2
    tokens = exact.tokenizer.encode(wikitext())[:1024]
    losses = {kind: numpy.mean(runtime.load(SMOLLM2, weights=kind).losses(tokens)) for kind in ("f32", "bf16", "q8", "q4")}
    for kind, bound in {"bf16": 0.005, "q8": 0.01, "q4": 0.08}.items():
        assert abs(numpy.exp(losses[kind] - losses["f32"]) - 1) < bound, (kind, losses)


def test_minilm_embeddings():
    folder = need(MINILM)
    reference = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    ours = runtime.load(folder)
    for text in ["A linnet is a small finch.", "Größe", "a", "the quick brown fox " * 30]:
        ids = ours.tokenizer.encode(text, parse_special=False)
        with torch.no_grad():
            states = reference(torch.tensor([ids])).last_hidden_state
        expected = torch.nn.functional.normalize(states.mean(1), dim=-1)
        assert agreement(ours.embed(text), expected) < 1e-4


def test_import_without_torch():
    """linnet.runtime on a Python that has no torch."""
    program = "import sys; sys.modules['torch'] = None; import importlib.util as u; find = u.find_spec\n"
    program += "u.find_spec = lambda name, *rest: None if name == 'torch' else find(name, *rest)\n"
    program += "import linnet.runtime; print(linnet.runtime.load.__name__)\n"
    program += "try: linnet.softmax\nexcept AttributeError as error: print(error)"
    run = subprocess.run([__import__("sys").executable, "-c", program], capture_output=True, text=True,
                         env=dict(__import__("os").environ, PYTHONPATH=str(BUILD / "python")))  # fmt: skip
    assert run.stdout.splitlines() == ["load", "linnet.softmax needs torch, which is not installed here; linnet.runtime works without it"], run.stderr
