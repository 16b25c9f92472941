"""linnet.nn: modules made from layer records. Numbers come from the vector files (python -m linnet.check), properties from here."""

import copy
import inspect
import io
import pathlib
import pickle

import pytest
import torch

import linnet.nn
from linnet import check
from linnet._records import LAYERS

VECTORS = pathlib.Path(__file__).parents[1] / "vectors"
SMALL = {"hidden": 16, "heads": 2}
# Options beyond SMALL that a layer needs to be small, or to fit 12 tokens.
MORE = {
    "gated_deltanet": {"key": 4, "value": 8},
    "kda": {"key": 4, "value": 8},
    "mamba1": {"state": 4},
    "mamba2": {"state": 4, "head": 8},
    "inline_attention": {"height": 3, "width": 4},
    "qt_attention": {"height": 3, "width": 4},
}
NAMES = sorted(LAYERS)


def options_of(name):
    declared = {option["name"] for option in LAYERS[name]["options"]}
    chosen = {**SMALL, **MORE.get(name, {})}
    return {key: value for key, value in chosen.items() if key in declared}


def module_of(name, **where):
    torch.manual_seed(0)
    return getattr(linnet.nn, LAYERS[name]["module"])(**options_of(name), **where)


def x_of(module, dtype=torch.float32):
    tokens = module._record()["tokens"] or 12
    return torch.randn(2, tokens, 16, generator=torch.Generator().manual_seed(1)).to(dtype)


def test_vector_files_with_gradients(capsys):
    assert check.main([str(VECTORS)]) == 0, capsys.readouterr().out
    lines = capsys.readouterr().out
    assert " dx " in lines and " f32 " in lines and ", 0 failed" in lines


@pytest.mark.parametrize(
    "arguments, sentence",
    [(["absent.safetensors"], "does not exist"), ([__file__], "safetensors")],
)
def test_check_refuses(arguments, sentence, capsys):
    assert check.main(arguments) == 2
    assert sentence in capsys.readouterr().err


def test_check_can_fail(monkeypatch, capsys):
    run = check.run
    monkeypatch.setattr(check, "run", lambda *a: {key: value * 1.001 for key, value in run(*a).items()})
    assert check.main([str(VECTORS / "delta-layer.safetensors")]) == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_every_layer_trains_saves_and_shows_its_code(name):
    module = module_of(name)
    x = x_of(module).requires_grad_()
    out = module(x)
    assert out.shape == x.shape and out.isfinite().all()
    out.square().mean().backward()
    assert x.grad.isfinite().all()
    assert all(parameter.grad is not None for parameter in module.parameters()), "a parameter takes no part"
    assert inspect.getsource(module.forward) == module.code
    again = module_of(name)
    again.load_state_dict({key: value + 0.01 for key, value in module.state_dict().items()})
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    again.load_state_dict(torch.load(buffer, weights_only=True))
    for other in (again, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(x), out)


def test_wrong_options_get_a_sentence():
    with pytest.raises(TypeError, match="GatedDeltaNet: there is no option 'head'; did you mean 'heads'"):
        linnet.nn.GatedDeltaNet(head=3)
    with pytest.raises(ValueError, match="heads"):
        linnet.nn.SoftmaxAttention(hidden=10, heads=3)


def tensors(*shape, count=1):
    generator = torch.Generator().manual_seed(5)
    made = [torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(count)]
    return made if count > 1 else made[0]


X, Z = tensors(2, 7, 4, 8, count=2)
K, V = tensors(2, 7, 2, 8, count=2)
OFFSETS = torch.tensor([0, 3, 3, 7])
FORMULAS = {
    "rms_norm": [{"x": X, "weight": tensors(8)}, {"x": X[:, :, 0], "weight": tensors(8), "plus_one": True}],
    "layer_norm": [{"x": X}, {"x": X, "weight": tensors(8), "bias": tensors(8)}],
    "rms_norm_gated": [{"x": X, "z": Z, "weight": tensors(8)}, {"x": X, "z": Z, "norm_before_gate": True, "gate": "sigmoid"}],
    "l2_norm": [{"x": X}],
    "activation": [{"x": X, "act": act} for act in ("silu", "gelu", "gelu_tanh", "relu2", "elu1", "softcap", "softplus", "tanh")],
    "glu": [{"gate": X, "up": Z, "act": act} for act in ("silu", "gelu", "gelu_tanh", "sigmoid", "relu")],
    "gated_gate": [{"y": X, "g": Z}, {"y": X, "g": Z[..., 0], "granularity": "headwise", "act": "silu", "shared": True},
                   {"y": X, "g": Z, "mode": "add", "act": "ns_sigmoid"}],
    "rotary": [{"x": X, "offset": 3}, {"x": X, "pairs": "interleaved", "dims": 4}, {"x": X, "positions": torch.arange(14).reshape(2, 7) * 5},
               {"x": X, "scaling": "linear", "factor": 4.0}, {"x": X, "scaling": "llama3", "factor": 8.0, "original_length": 64}],
    "softmax": [{"q": X, "k": K, "v": V}, {"q": X, "k": K, "v": V, "causal": True}, {"q": X[:, 4:], "k": K, "v": V, "causal": True},
                {"q": X, "k": K, "v": V, "causal": True, "window": (2, -1), "prefix": 1, "softcap": 5.0, "sinks": tensors(4)},
                {"q": X[:1], "k": K[:1], "v": V[:1], "causal": True, "cu_seqlens_q": OFFSETS, "cu_seqlens_k": OFFSETS},
                {"q": X, "k": K, "v": V, "window": (2, 1), "scale": 0.3}],
    "gated": [{"q": X, "k": K, "v": V, "g": Z, "causal": True}],
}  # fmt: skip


@pytest.mark.parametrize("name", FORMULAS)
def test_torch_formulas_for_devices_without_a_kernel(name):
    for arguments in FORMULAS[name]:
        expected = getattr(linnet, name)(**arguments)
        torch.testing.assert_close(getattr(linnet.nn.kernels, name).formula(**arguments), expected, rtol=1e-9, atol=1e-11)
