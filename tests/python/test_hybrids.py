"""Recurrent layers of transformers' models on Linnet's kernels: logits, gradients and generated tokens of their torch code."""

import importlib

import pytest
import torch

import linnet
from linnet import _hybrids
from linnet._library import TOLERANCE

transformers = pytest.importorskip("transformers", minversion="5.0", reason="transformers is not installed")

SMALL = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0, "eos_token_id": None, "bos_token_id": None}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}
GATED_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "layer_types": ["linear_attention", "full_attention"],
}
MIXTURE = {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "decoder_sparse_step": 1,
}
MODELS = {
    "qwen3_next": ("Qwen3Next", {**ATTENTION, **GATED_DELTA, **MIXTURE}),
    "olmo_hybrid": ("OlmoHybrid", {**ATTENTION, **GATED_DELTA}),
    "kimi_linear": (
        "KimiLinear",
        {
            "intermediate_size": 48,
            "moe_intermediate_size": 16,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "mlp_layer_types": ["dense", "dense"],
            "layer_types": ["linear_attention", "full_attention"],
            "linear_head_dim": 8,
            "linear_num_heads": 4,
        },
    ),
    "mamba": ("Mamba", {"state_size": 5, "expand": 2, "time_step_rank": 3}),
    "mamba2": ("Mamba2", {"num_heads": 4, "head_dim": 16, "state_size": 6, "n_groups": 2, "chunk_size": 8}),
    "falcon_mamba": ("FalconMamba", {"state_size": 5, "expand": 2, "time_step_rank": 3}),
    "lfm2": ("Lfm2", {**ATTENTION, "layer_types": ["conv", "full_attention"], "block_multiple_of": 8}),
}


FORWARD, GRADIENTS = TOLERANCE["gates"]["f32"]["reference"]  # of src/core/tolerance.h


def expect_close(got, want, gate, scale, name):
    """The two gated numbers of a tensor; one below 1e-4 of the scale is all cancellation."""
    error, largest = (got - want).abs().max().item(), want.abs().max().item()
    if largest < TOLERANCE["cancelled"] * scale:
        assert error <= TOLERANCE["cancelled_epsilons"] * torch.finfo(want.dtype).eps * scale, name
        return
    rms = ((got - want).norm() / want.norm()).item()
    assert rms <= gate and error <= TOLERANCE["max_over_rms"] * gate * largest, f"{name}: rms {rms:.1e}, gate {gate:.1e}"


def refuse(*args, **keywords):
    raise _hybrids.Unserved


@pytest.fixture(params=MODELS)
def model(request):
    linnet.register_with_transformers()
    prefix, more = MODELS[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, prefix + "Config")(**SMALL, **more)
    return getattr(transformers, prefix + "ForCausalLM")(config).eval()


def results(model):
    """Logits, gradients of all parameters, and greedy tokens after a prompt."""
    ids = torch.randint(1, 97, (2, 37), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    logits = model(ids).logits
    logits.square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    with torch.no_grad():
        tokens = model.generate(ids, max_new_tokens=9, do_sample=False)
    return logits.detach(), gradients, tokens


def test_logits_gradients_and_tokens(model, monkeypatch):
    served = dict(_hybrids.SERVED)
    calls = []

    def counted(function):
        def call(*args, **keywords):
            result = function(*args, **keywords)
            calls.append(function.__name__)
            return result

        return call

    for name, function in served.items():
        monkeypatch.setitem(_hybrids.SERVED, name, refuse)
    expected = results(model)
    for name, function in served.items():
        monkeypatch.setitem(_hybrids.SERVED, name, counted(function))
    logits, gradients, tokens = results(model)
    assert calls, "Linnet served no call"
    expect_close(logits, expected[0], FORWARD, 1, "logits")
    scale = max(gradient.abs().max().item() for gradient in expected[1].values())
    for name, gradient in expected[1].items():
        expect_close(gradients[name], gradient, GRADIENTS, scale, name)
    assert torch.equal(tokens, expected[2])


def test_a_call_that_is_not_served_runs_the_torch_code():
    linnet.register_with_transformers()
    module = importlib.import_module("transformers.models.mamba2.modeling_mamba2")
    x = torch.randn(1, 3, 5)
    weight = torch.randn(3, 4)
    for activation in ("silu", "gelu"):  # the convolution has no gelu
        expected = torch.nn.functional.conv1d(x, weight[:, None], padding=3, groups=3)[:, :, :5]
        expected = getattr(torch.nn.functional, activation)(expected)
        expect_close(module.causal_conv1d_fn(x, weight, activation=activation), expected, FORWARD, 1, activation)
