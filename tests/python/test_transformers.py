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


class Seen(list):
    """Records how softmax is called."""

    def __init__(self, monkeypatch):
        from linnet import _transformers

        softmax = _transformers.FUNCTIONS["softmax"]

        def spy(*tensors, **options):
            self.append({key: value for key, value in options.items() if value is not None})
            return softmax(*tensors, **options)

        monkeypatch.setitem(_transformers.FUNCTIONS, "softmax", spy)


def run(name, implementation, tokens, **options):
    model = build(name).eval()
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(tokens, **options).logits


@pytest.mark.parametrize(
    "name,padding,expected",
    [
        ("llama", None, {"causal": True}),
        ("llama", "left", {"cu_seqlens_q": [0, 13, 22]}),
        ("llama", "right", {"causal": True}),
        ("llama", "middle", {"cu_seqlens_q": [0, 13, 22]}),
        ("mistral window", None, {"window": (4, -1)}),
        ("mistral window", "left", {"window": (4, -1), "cu_seqlens_q": [0, 13, 22]}),
        ("mistral window", "middle", {"bias": None}),
        ("bert both directions", None, {"causal": False}),
        ("bert both directions", "right", {"key_len": [13, 9]}),
        ("bert both directions", "left", {"cu_seqlens_k": [0, 13, 22]}),
    ],
)
def test_masks_are_recognised(name, padding, expected, monkeypatch):
    """Windows and padding reach softmax as such; a dense bias only stands for what is neither."""
    tokens = torch.randint(1, 97, (2, 13), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    if padding is not None:
        mask[1, {"left": slice(0, 4), "right": slice(9, 13), "middle": slice(3, 7)}[padding]] = 0
    eager = run(name, "eager", tokens, attention_mask=mask)
    seen = Seen(monkeypatch)
    ours = run(name, "linnet", tokens, attention_mask=mask)
    torch.testing.assert_close(ours[mask.bool()], eager[mask.bool()], rtol=1e-4, atol=1e-4)
    assert len(seen) == 2
    for call in seen:
        assert ("bias" in call) == ("bias" in expected)
        for key, value in expected.items():
            if key != "bias":
                assert (call[key].tolist() if isinstance(call[key], torch.Tensor) else call[key]) == value


@pytest.mark.parametrize("name", ["llama", "mistral window"])
def test_packed_sequences_are_recognised(name, monkeypatch):
    tokens = torch.randint(1, 97, (2, 13), generator=torch.Generator().manual_seed(1))
    positions = torch.stack([torch.cat([torch.arange(5), torch.arange(8)]), torch.arange(13)])
    eager = run(name, "eager", tokens, position_ids=positions, use_cache=False)
    seen = Seen(monkeypatch)
    ours = run(name, "linnet", tokens, position_ids=positions, use_cache=False)
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)
    assert all("bias" not in call and call["cu_seqlens_q"].tolist() == [0, 5, 13, 26] for call in seen) and len(seen) == 2


def test_other_masks_stay_dense(monkeypatch):
    """A mask of one's own, and the values of ours when something else reads them."""
    tokens = torch.randint(1, 97, (1, 6), generator=torch.Generator().manual_seed(1))
    own = torch.ones(1, 1, 6, 6).tril().bool()
    own[..., 4, 1] = False
    eager = run("llama", "eager", tokens, attention_mask=torch.where(own, 0.0, torch.finfo(torch.float32).min))
    seen = Seen(monkeypatch)
    torch.testing.assert_close(run("llama", "linnet", tokens, attention_mask=own), eager, rtol=1e-4, atol=1e-4)
    assert all("bias" in call for call in seen)

    from transformers.masking_utils import sliding_window_causal_mask_function

    from linnet import _transformers

    rule = _transformers._mask(1, 5, 5, mask_function=sliding_window_causal_mask_function(2))
    assert isinstance(rule, _transformers._Mask) and rule.shape == (1, 1, 5, 5) and rule.dtype == torch.bool
    band = torch.ones(5, 5).tril().triu(-1).bool()
    assert torch.equal(rule[0, 0], band) and torch.equal((~rule)[0, 0], ~band) and type(rule[0, 0]) is torch.Tensor


CONTINUOUS = {
    "llama": (transformers.LlamaConfig, {}),
    "mistral-window": (transformers.MistralConfig, {"sliding_window": 6}),
    "gemma2-alternating": (transformers.Gemma2Config, {"sliding_window": 6, "head_dim": 16}),
}


@pytest.mark.parametrize("name", CONTINUOUS)
def test_continuous_batching_over_pages(name, monkeypatch):
    """Requests of different lengths in one batch, keys in pages of four tokens: the tokens of each request alone."""
    from linnet import _transformers

    kind, more = CONTINUOUS[name]
    config = kind(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                  max_position_embeddings=256, initializer_range=0.3, **more)  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    prompts = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15], [3], list(range(1, 60))]
    generation = transformers.GenerationConfig(max_new_tokens=10, do_sample=False, eos_token_id=96, pad_token_id=0)
    expected = [model.generate(torch.tensor([ids]), generation_config=generation)[0, len(ids) :].tolist() for ids in prompts]
    model.set_attn_implementation("linnet")
    calls = {"softmax_paged": 0, "softmax": 0}

    def counted(function):
        def call(*arguments, **keywords):
            calls[function.__name__] += 1
            return function(*arguments, **keywords)

        return call

    functions = {**_transformers.FUNCTIONS, **{each: counted(getattr(linnet, each)) for each in calls}}
    monkeypatch.setattr(_transformers, "FUNCTIONS", functions)
    pages = transformers.ContinuousBatchingConfig(page_size=4, num_blocks=64, max_batch_tokens=128)
    results = model.generate_batch(inputs=prompts, generation_config=generation, continuous_batching_config=pages, progress_bar=False)
    assert [results[key].generated_tokens for key in sorted(results)] == expected
    assert calls["softmax"] > 0 and (calls["softmax_paged"] > 0) == (name != "mistral-window")
    assert model.config._attn_implementation == "linnet"
