"""The peers of `linnet bench` compute what they are measured for: each is compared with its formula in double."""

import pathlib

import pytest

torch = pytest.importorskip("torch")
ROOT = pathlib.Path(__file__).resolve().parents[2]
SOFTMAX = {"causal": "0", "window": "-1,-1", "softcap": "0", "prefix": "0", "chunk": "0", "scale": "none"}
LINEAR = {"map": "identity", "causal": "1", "normalize": "0", "scale": "none"}


@pytest.fixture(scope="module")
def peers():
    namespace = {"__name__": "peers"}
    for path in [ROOT / "src/bench/peers.py", *sorted(ROOT.glob("src/mechanisms/*/*_peer.py"))]:
        exec(compile(path.read_text(), str(path), "exec"), namespace)
    return namespace


def call(peers, op, letters, options, backward=False, lengths=None):
    """The peer's output, its inputs in double in the order it draws them, and their gradients for a gradient of ones."""
    torch.manual_seed(1)
    case = peers["Case"]({"op": op, "letters": letters, "options": options, "dtype": "f64", "lengths": lengths or {},
                          "pass": "fwd+bwd" if backward else "fwd"})
    drawn, random = [], case.random

    def recorded(shape, dtype=None):
        drawn.append(random(shape, dtype))
        return drawn[-1]

    case.random = recorded
    name, work = peers[op](case)
    before = [x.detach().clone() for x in drawn]
    return work().detach(), before, drawn


def weights(letters, causal=False, left=-1, right=-1):
    distance = torch.arange(letters["Tk"]) - torch.arange(letters["Tq"])[:, None]
    seen = torch.ones_like(distance, dtype=torch.bool)
    if causal or right >= 0:
        seen &= distance <= (0 if causal else right)
    if left >= 0:
        seen &= distance >= -left
    return seen


@pytest.mark.parametrize("options, seen", [
    ({}, {}),
    ({"causal": "1"}, {"causal": True}),
    ({"causal": "1", "window": "5,-1"}, {"causal": True, "left": 5}),
    ({"window": "3,4"}, {"left": 3, "right": 4}),
])
@pytest.mark.parametrize("backward", [False, True])
def test_softmax(peers, options, seen, backward):
    letters = {"B": 2, "H": 4, "Hkv": 2, "Tq": 33, "Tk": 33, "K": 8, "V": 8}
    out, (q, k, v), drawn = call(peers, "softmax", letters, {**SOFTMAX, **options}, backward)
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2) * 8 ** -0.5).masked_fill(~weights(letters, **seen), float("-inf"))
    torch.testing.assert_close(out, scores.softmax(-1) @ v)
    assert not backward or all(x.grad is not None and x.grad.shape == x.shape for x in drawn)


def test_softmax_decode(peers):
    letters = {"B": 2, "H": 4, "Hkv": 2, "T": 1, "K": 8, "V": 8, "capacity": 16}
    out, (q, k, v, k_cache, v_cache), _ = call(peers, "softmax_decode", letters, SOFTMAX, lengths={"lengths": 10})
    k, v = (torch.cat([cache[:, :, :10], x], dim=2).repeat_interleave(2, dim=1) for cache, x in ((k_cache, k), (v_cache, v)))
    torch.testing.assert_close(out, (q @ k.transpose(-1, -2) * 8 ** -0.5).softmax(-1) @ v)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["identity", "elu1", "relu", "relu2", "silu", "softplus", "exp", "hedgehog"])
@pytest.mark.parametrize("backward", [False, True])
def test_linear(peers, name, causal, backward):
    letters = {"B": 1, "Hq": 2, "Hk": 2, "Hv": 2, "T": 256, "S": 256, "K": 8, "V": 8}
    normalize = name not in ("identity", "silu")
    options = {**LINEAR, "map": name, "causal": str(int(causal)), "normalize": str(int(normalize))}
    out, (q, k, v), drawn = call(peers, "linear", letters, options, backward)
    phi = peers["_feature_map"](name)
    scores = phi(q) @ phi(k).transpose(-1, -2) * (1 if normalize else 8 ** -0.5)
    scores = scores.tril() if causal else scores
    expected = scores @ v
    if normalize:
        expected = expected / (scores.sum(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(out, expected)
    assert not backward or all(x.grad is not None for x in drawn)


def test_linear_decode(peers):
    letters = {"B": 2, "Hq": 2, "Hk": 2, "Hv": 2, "H": 2, "T": 1, "K": 8, "V": 4, "F": 8}
    out, (q, k, v, state), drawn = call(peers, "linear_decode", letters, LINEAR)
    expected = state + (k.transpose(-1, -2) @ v).float()
    torch.testing.assert_close(drawn[3], expected)
    torch.testing.assert_close(out.float(), (q * 8 ** -0.5).float() @ expected)
