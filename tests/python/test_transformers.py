"""attn_implementation="linnet" in Hugging Face models: the logits, gradients and tokens of the eager implementation."""

import pytest
import torch

import linnet

transformers = pytest.importorskip("transformers", minversion="5.0", reason="transformers is not installed")

SMALL = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {"num_key_value_heads": 2}),
    "mistral window": ("MistralForCausalLM", "MistralConfig", {"num_key_value_heads": 1, "sliding_window": 5}),
    "gemma2 soft cap": ("Gemma2ForCausalLM", "Gemma2Config", {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6}),
    "gpt-oss sinks": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "bert both directions": (
        "BertForMaskedLM",
        "BertConfig",
        {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0},
    ),
}


@pytest.fixture(autouse=True, scope="module")
def registered():
    linnet.register_with_transformers()


def build(name):
    model, config, more = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config)(**SMALL, **more)
    config.pad_token_id, config.eos_token_id = 0, None
    return getattr(transformers, model)(config)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(name, padded):
    tokens = torch.randint(1, 97, (2, 13), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    if padded:
        mask[1, :4] = 0
    results = []
    for implementation in ("eager", "linnet"):
        model = build(name)
        model.set_attn_implementation(implementation)
        assert model.config._attn_implementation == implementation
        logits = model(tokens, attention_mask=mask).logits
        (logits * mask[..., None]).sin().sum().backward()
        results.append([logits[mask.bool()], *(p.grad for p in model.parameters() if p.grad is not None)])
    for eager, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", [name for name in MODELS if "bert" not in name])
def test_generated_tokens(name, cache):
    prompt = torch.randint(1, 97, (2, 7), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(prompt)
    mask[0, :3] = 0
    tokens = []
    for implementation in ("eager", "linnet"):
        model = build(name)
        model.set_attn_implementation(implementation)
        options = {"cache_implementation": cache, "disable_compile": True} if cache == "static" else {}
        tokens.append(model.generate(prompt, attention_mask=mask, max_new_tokens=9, do_sample=False, **options))
    assert torch.equal(*tokens)


def test_dropout_is_refused():
    model = build("llama")
    model.config.attention_dropout = 0.1
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    model.set_attn_implementation("linnet")
    with pytest.raises(NotImplementedError, match="^linnet: attention has no dropout"):
        model.train()(torch.ones(1, 3, dtype=torch.int64))


def test_attention_weights_are_not_promised_in_silence():
    model = build("llama")
    model.set_attn_implementation("linnet")
    with pytest.warns(UserWarning, match="^linnet: attention weights are never formed"):
        model.eval()(torch.ones(1, 3, dtype=torch.int64), output_attentions=True)
