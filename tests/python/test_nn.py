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
from linnet._records import LAYERS, products

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


@pytest.mark.parametrize(
    "name", ["deltanet", "gated_deltanet", "kda", "gated_linear_attention", "simple_gla", "mamba1", "mamba2", "metala_attention"]
)
def test_short_convolutions_start_loud(name):
    """Taps of deviation 0.02 leave the norm behind a small layer's mixer with its eps alone, and it learns late or not at all."""
    module = getattr(linnet.nn, LAYERS[name]["module"])(hidden=64, taps=4)
    taps = [value for key, value in module.named_parameters() if key.endswith("conv1d.weight")]
    assert taps
    for value in taps:
        assert 0.45 < value.abs().max() <= 0.5 and value.std() > 0.2


def test_base_conv_is_zoologys():
    """y = x + conv(x) * (W x + b), the convolution causal with its own bias."""
    torch.manual_seed(0)
    layer, x = linnet.nn.ShortConv(hidden=6, form="base", bias=True, dtype=torch.float64), torch.randn(2, 9, 6, dtype=torch.float64)
    conv = torch.nn.functional.conv1d(x.transpose(1, 2), layer.conv.weight[:, None], layer.conv.bias, padding=2, groups=6)[..., :9].transpose(1, 2)
    torch.testing.assert_close(layer(x), x + conv * torch.nn.functional.linear(x, layer.in_proj.weight, layer.in_proj.bias))


def test_metalas_decays_start_as_far_apart_as_asked():
    assert linnet.nn.MetaLA(hidden=64, decay_init=0.5).a_proj.weight.std().item() == pytest.approx(0.5, rel=0.1)
    assert linnet.nn.MetaLA(hidden=64).a_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("autocast", [False, True])
def test_products_have_the_gradients_of_each(autocast):
    """Several dense steps in one call: the numbers and gradients of F.linear, also with biases, a frozen weight and a result that nobody reads."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8, requires_grad=True)
    weights = [torch.randn(width, 8, requires_grad=width != 3) for width in (4, 3, 6, 2)]
    bias, seen = torch.randn(6, requires_grad=True), {}
    for name in ("together", "each"):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            if name == "together":
                out = products(x, weights[0], weights[1], (weights[2], bias), weights[3])
            else:
                out = [torch.nn.functional.linear(x, weight, bias if weight is weights[2] else None) for weight in weights]
        loss = sum((i + 1) * y.float().square().sum() for i, y in enumerate(out[:3]))
        seen[name] = [*out, *torch.autograd.grad(loss, [x, weights[0], weights[2], bias])]
    for got, want in zip(*seen.values()):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=2e-2 if autocast else 1e-5, atol=0.5 if autocast else 1e-5)
