"""Checkpoints with the parameter names of flash-linear-attention: linnet.nn.from_fla beside plain torch loops over tokens in f64."""

import json

import pytest
import torch
import torch.nn.functional as F
import transformers
from runtime_cases import runtime
from test_nn_models import difference

import linnet.nn
from linnet._files import write_tensors

VOCABULARY, HIDDEN = 50, 32


# ---- the models in plain torch, by the papers' equations and flash-linear-attention's names ------------------------------------


def rms(x, weight=None, eps=1e-6):
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def convolve(x, p, name, activation=F.silu):
    weight = p[name + ".weight"]  # [C, 1, taps]
    y = F.conv1d(F.pad(x.transpose(1, 2), (weight.shape[-1] - 1, 0)), weight, p.get(name + ".bias"), groups=x.shape[-1])
    return activation(y.transpose(1, 2))


def unit(x):
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def heads(x, count):
    return x.unflatten(-1, (count, -1))


def scan(q, k, v, g, beta=None, scale=None):
    """S_t = decay S_{t-1} + k u^T, with u = v, or the delta rule's beta (v - S'^T k); q, k, v [B, T, H, ..], g [B, T, H] or [.., K]."""
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (each.repeat_interleave(max(q.shape[2], v.shape[2]) // each.shape[2], 2) for each in (q, k, v))
    g = g[..., None] if g.dim() == 3 else g
    state, out = q.new_zeros(q.shape[0], q.shape[2], k.shape[-1], v.shape[-1]), []
    for t in range(q.shape[1]):
        state = g[:, t].exp()[..., None] * state
        u = v[:, t]
        if beta is not None:
            u = beta[:, t, :, None] * (u - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + k[:, t, ..., None] * u[:, :, None]
        out.append(scale * torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(out, 1)


def turn(x, base=10000.0):
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * base ** (-torch.arange(half, dtype=x.dtype) / half)
    u, v = x[..., :half], x[..., half:]
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    return torch.cat([u * cos - v * sin, u * sin + v * cos], -1)


def gla(x, p, c):
    convolution = convolve if c.get("use_short_conv") else (lambda y, *_: y)
    q, k, v = (convolution(x @ p[f"{n}_proj.weight"].T, p, f"{n}_conv1d") for n in "qkv")
    g = F.logsigmoid(x @ p["gk_proj.0.weight"].T @ p["gk_proj.1.weight"].T + p["gk_proj.1.bias"]) / 16
    g = g if c.get("clamp_min") is None else g.clamp(min=c["clamp_min"])
    kv = c.get("num_kv_heads") or c["num_heads"]
    g = heads(g, kv).repeat_interleave(c["num_heads"] // kv, 2)
    y = scan(heads(q, c["num_heads"]), heads(k, kv).repeat_interleave(c["num_heads"] // kv, 2),
             heads(v, kv).repeat_interleave(c["num_heads"] // kv, 2), g)  # fmt: skip
    y = rms(y, p.get("g_norm_swish_gate.weight", p.get("g_norm.weight")), c["norm_eps"])
    return (y.flatten(-2) * F.silu(x @ p["g_proj.weight"].T)) @ p["o_proj.weight"].T


def retnet(x, p, c):
    q, k, v = (heads(x @ p[f"{n}_proj.weight"].T, c["num_heads"]) for n in "qkv")
    g = torch.log1p(-(2.0 ** (-5 - torch.arange(c["num_heads"], dtype=x.dtype)))).expand(*q.shape[:3])
    y = rms(scan(turn(q), turn(k), v, g), p["g_norm_swish_gate.weight"], c["norm_eps"]).flatten(-2)
    return (y * F.silu(x @ p["g_proj.weight"].T)) @ p["o_proj.weight"].T


def delta_net(x, p, c):
    activation = {"silu": F.silu, "elu": lambda y: F.elu(y) + 1, "relu": F.relu}[c.get("qk_activation", "silu")]
    q, k = (heads(convolve(x @ p[f"{n}_proj.weight"].T, p, f"{n}_conv1d", activation), c["num_heads"]) for n in "qk")
    v = heads(convolve(x @ p["v_proj.weight"].T, p, "v_conv1d"), c["num_heads"])
    q, k = (unit(y) if c.get("qk_norm", "l2") == "l2" else y / y.sum(-1, keepdim=True) for y in (q, k))
    beta = torch.sigmoid(x @ p["b_proj.weight"].T) * (2 if c.get("allow_neg_eigval") else 1)
    y = rms(scan(q, k, v, torch.zeros_like(beta), beta), p["o_norm.weight"], c["norm_eps"]).flatten(-2)
    y = y * F.silu(x @ p["g_proj.weight"].T) if c.get("use_gate") else y
    return y @ p["o_proj.weight"].T


def gated_deltanet(x, p, c):
    q, k, v = (convolve(x @ p[f"{n}_proj.weight"].T, p, f"{n}_conv1d") for n in "qkv")
    g = -p["A_log"].exp() * F.softplus(x @ p["a_proj.weight"].T + p["dt_bias"])
    beta = torch.sigmoid(x @ p["b_proj.weight"].T)
    values = c.get("num_v_heads") or c["num_heads"]
    y = scan(unit(heads(q, c["num_heads"])), unit(heads(k, c["num_heads"])), heads(v, values), g, beta)
    y = rms(y, p["o_norm.weight"], c["norm_eps"]).flatten(-2)
    y = y * F.silu(x @ p["g_proj.weight"].T) if c.get("use_gate", True) else y
    return y @ p["o_proj.weight"].T


def kda(x, p, c):
    q, k, v = (heads(convolve(x @ p[f"{n}_proj.weight"].T, p, f"{n}_conv1d"), c["num_heads"]) for n in "qkv")
    a = heads(x @ p["f_proj.0.weight"].T @ p["f_proj.1.weight"].T + p["dt_bias"], c["num_heads"])
    rate = p["A_log"].exp()[:, None]
    g = -rate * F.softplus(a) if c.get("lower_bound") is None else c["lower_bound"] * torch.sigmoid(rate * a)
    y = scan(unit(q), unit(k), v, g, torch.sigmoid(x @ p["b_proj.weight"].T))
    y = rms(y, p["o_norm.weight"], c["norm_eps"]).flatten(-2)
    gate = x @ p["g_proj.0.weight"].T @ p["g_proj.1.weight"].T + p["g_proj.1.bias"]
    return (y * torch.sigmoid(gate)) @ p["o_proj.weight"].T


def mamba2(x, p, c):
    inner, groups, state = c["expand"] * HIDDEN, c["n_groups"], c["state_size"]
    count = inner // c["head_dim"]
    z, rest, dt = (x @ p["in_proj.weight"].T).split([inner, inner + 2 * groups * state, count], -1)
    rest = convolve(rest, p, "conv1d")
    v, b, cc = rest.split([inner, groups * state, groups * state], -1)
    b, cc = (heads(y, groups).repeat_interleave(count // groups, 2) for y in (b, cc))
    dt = F.softplus(dt + p["dt_bias"])
    v = heads(v, count)
    y = scan(cc, b, dt[..., None] * v, -p["A_log"].exp() * dt, scale=1.0) + p["D"][:, None] * v
    y = (y.flatten(-2) * F.silu(z)).unflatten(-1, (groups, -1))
    return (rms(y, None, c["norm_eps"]).flatten(-2) * p["norm.weight"]) @ p["out_proj.weight"].T


def attention(x, p, spec):
    count, kv = spec["num_heads"], spec.get("num_kv_heads", spec["num_heads"])
    q, k, v = (heads(x @ p[f"{n}_proj.weight"].T + p.get(f"{n}_proj.bias", 0), m) for n, m in zip("qkv", (count, kv, kv)))
    q, k, v = turn(q), turn(k).repeat_interleave(count // kv, 2), v.repeat_interleave(count // kv, 2)
    far = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
    seen = (far >= 0) & (far < (spec.get("window_size") or x.shape[1]))
    weights = torch.einsum("bthk,bshk->bhts", q, k) * q.shape[-1] ** -0.5
    weights = weights.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("bhts,bshv->bthv", weights, v).flatten(-2) @ p["o_proj.weight"].T


def logits_of(config, tensors, ids):
    """The whole model."""
    mamba = config["model_type"] == "mamba2"
    root, norm, mixer = ("backbone", "norm", "mixer") if mamba else ("model", "attn_norm", "attn")
    eps, x = config["norm_eps"], tensors[f"{root}.embeddings.weight"][ids]
    specs = config.get("attn") or []
    for i in range(config["num_hidden_layers"]):
        below = {name.removeprefix(f"{root}.layers.{i}."): each for name, each in tensors.items() if name.startswith(f"{root}.layers.{i}.")}
        own = {name.removeprefix(mixer + "."): each for name, each in below.items() if name.startswith(mixer + ".")}
        y = rms(x, below[norm + ".weight"], eps)
        spec = next((each for each in specs if i in each["layers"]), None)
        x = x + (globals()[config["model_type"]](y, own, config) if spec is None else attention(y, own, spec))
        if not mamba:
            y = rms(x, below["mlp_norm.weight"], eps)
            x = x + (F.silu(y @ below["mlp.gate_proj.weight"].T) * (y @ below["mlp.up_proj.weight"].T)) @ below["mlp.down_proj.weight"].T
    head = tensors[f"{root}.embeddings.weight"] if config.get("tie_word_embeddings") else tensors["lm_head.weight"]
    return rms(x, tensors[f"{root}.norm_f.weight" if mamba else f"{root}.norm.weight"], eps) @ head.T


# ---- shapes of their parameters --------------------------------------------------------------------------------------------------


def branch(names, widths, taps=4):
    made = {}
    for name, width in zip(names, widths):
        made[f"{name}_proj.weight"] = (width, HIDDEN)
        if taps:
            made[f"{name}_conv1d.weight"] = (width, 1, taps)
    return made


def output(width):
    return {"o_proj.weight": (HIDDEN, width)}


GATES = {"b_proj.weight": (2, HIDDEN), "a_proj.weight": (2, HIDDEN), "A_log": (2,), "dt_bias": (2,)}
CASES = {
    "gla": ({"model_type": "gla", "num_heads": 2, "use_short_conv": False},
            branch("qkv", (16, 16, 32), 0) | {"gk_proj.0.weight": (16, HIDDEN), "gk_proj.1.weight": (16, 16), "gk_proj.1.bias": (16,),
                                              "g_proj.weight": (32, HIDDEN), "g_norm_swish_gate.weight": (16,)} | output(32)),
    "gla-grouped": ({"model_type": "gla", "num_heads": 4, "num_kv_heads": 2, "use_short_conv": True, "fuse_norm": False, "clamp_min": -0.05},
                    branch("qkv", (16, 8, 16)) | {"gk_proj.0.weight": (16, HIDDEN), "gk_proj.1.weight": (8, 16), "gk_proj.1.bias": (8,),
                                                  "g_proj.weight": (32, HIDDEN), "g_norm.weight": (8,)} | output(32)),
    "retnet": ({"model_type": "retnet", "num_heads": 2},
               branch("qkv", (32, 32, 64), 0) | {"g_proj.weight": (64, HIDDEN), "g_norm_swish_gate.weight": (32,)} | output(64)),
    "delta_net": ({"model_type": "delta_net", "num_heads": 2},
                  branch("qkv", (32, 32, 32)) | {"b_proj.weight": (2, HIDDEN), "o_norm.weight": (16,)} | output(32)),
    "delta_net-elu": ({"model_type": "delta_net", "num_heads": 2, "qk_activation": "elu", "qk_norm": "sum", "use_gate": True, "allow_neg_eigval": True},
                      branch("qkv", (32, 32, 32)) | {"b_proj.weight": (2, HIDDEN), "g_proj.weight": (32, HIDDEN), "o_norm.weight": (16,)} | output(32)),
    "gated_deltanet": ({"model_type": "gated_deltanet", "num_heads": 2, "head_dim": 12},
                       branch("qkv", (24, 24, 48)) | GATES | {"g_proj.weight": (48, HIDDEN), "o_norm.weight": (24,)} | output(48)),
    "gated_deltanet-hybrid": ({"model_type": "gated_deltanet", "num_heads": 1, "num_v_heads": 2, "head_dim": 8, "expand_v": 1.0, "use_gate": False,
                               "num_hidden_layers": 3, "tie_word_embeddings": True,
                               "attn": [{"layers": [1], "num_heads": 4, "num_kv_heads": 2, "window_size": 5, "qkv_bias": True}]},
                              branch("qkv", (8, 8, 16)) | GATES | {"o_norm.weight": (8,)} | output(16)),
    "kda": ({"model_type": "kda", "num_heads": 2, "head_dim": 8},
            branch("qkv", (16, 16, 16)) | {"b_proj.weight": (2, HIDDEN), "f_proj.0.weight": (8, HIDDEN), "f_proj.1.weight": (16, 8), "A_log": (2,),
                                           "dt_bias": (16,), "g_proj.0.weight": (8, HIDDEN), "g_proj.1.weight": (16, 8), "g_proj.1.bias": (16,),
                                           "o_norm.weight": (8,)} | output(16)),
    "mamba2": ({"model_type": "mamba2", "head_dim": 16, "state_size": 8, "expand": 2, "n_groups": 2},
               {"in_proj.weight": (64 + 64 + 32 + 4, HIDDEN), "conv1d.weight": (96, 1, 4), "conv1d.bias": (96,), "A_log": (4,), "D": (4,), "dt_bias": (4,),
                "norm.weight": (64,), "out_proj.weight": (HIDDEN, 64)}),
}  # fmt: skip
CASES["kda-bounded"] = ({**CASES["kda"][0], "safe_gate": True, "lower_bound": -5.0}, CASES["kda"][1])


def checkpoint(name):
    config = {"num_hidden_layers": 2, "norm_eps": 1e-5, "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "hidden_act": "silu", **CASES[name][0]}
    mamba = config["model_type"] == "mamba2"
    if not mamba:
        config |= {"intermediate_size": 40, "hidden_act": "swish"}
    root = "backbone" if mamba else "model"
    shapes = {f"{root}.embeddings.weight": (VOCABULARY, HIDDEN), f"{root}.{'norm_f' if mamba else 'norm'}.weight": (HIDDEN,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    for i in range(config["num_hidden_layers"]):
        own = CASES[name][1]
        if any(i in spec["layers"] for spec in config.get("attn", [])):
            own = branch("qkv", (32, 16, 16), 0) | {"q_proj.bias": (32,), "k_proj.bias": (16,), "v_proj.bias": (16,)} | output(32)
        shapes |= {f"{root}.layers.{i}.{'mixer' if mamba else 'attn'}.{key}": shape for key, shape in own.items()}
        shapes[f"{root}.layers.{i}.{'norm' if mamba else 'attn_norm'}.weight"] = (HIDDEN,)
        if not mamba:
            shapes[f"{root}.layers.{i}.mlp_norm.weight"] = (HIDDEN,)
            shapes |= {f"{root}.layers.{i}.mlp.{part}_proj.weight": (40, HIDDEN) for part in ("gate", "up")}
            shapes[f"{root}.layers.{i}.mlp.down_proj.weight"] = (HIDDEN, 40)
    torch.manual_seed(4)
    tensors = {}
    for key, shape in shapes.items():
        values = torch.randn(shape, dtype=torch.float64)
        tensors[key] = values * shape[-1] ** -0.5 if len(shape) == 2 else (1.0 if "norm" in key else 0.0) + 0.3 * values
    return config, tensors


@pytest.mark.parametrize("name", CASES)
def test_their_tensors_give_their_logits(name, tmp_path):
    config, tensors = checkpoint(name)
    ids = torch.randint(0, VOCABULARY, (2, 19), generator=torch.Generator().manual_seed(1))
    model = linnet.nn.from_fla(config, tensors)
    expected = logits_of(config, tensors, ids)
    with torch.no_grad():
        torch.testing.assert_close(model(ids), expected, rtol=1e-8, atol=1e-8)
    # As files, in f32, and then in the runtime.
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    write_tensors(tmp_path / "theirs" / "model.safetensors", {key: each.float() for key, each in tensors.items()})
    linnet.nn.from_fla(tmp_path / "theirs").save(tmp_path / "ours")
    for folder in ("ours", "theirs"):
        assert difference(runtime.load(tmp_path / folder).logits(ids[0].tolist()), expected[0]) < 1e-4


@pytest.mark.parametrize("groups", [1, 2])
def test_mamba2_of_transformers(groups, tmp_path):
    torch.manual_seed(0)
    config = transformers.Mamba2Config(vocab_size=VOCABULARY, hidden_size=HIDDEN, num_heads=4, head_dim=16, state_size=8, n_groups=groups, num_hidden_layers=2,
                                       expand=2, chunk_size=8)  # fmt: skip
    theirs = transformers.Mamba2ForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    ids = torch.randint(0, VOCABULARY, (2, 19))
    with torch.no_grad():
        expected = theirs(ids).logits
        torch.testing.assert_close(linnet.nn.from_fla(tmp_path)(ids), expected, rtol=1e-4, atol=1e-4)


REFUSED = {
    "model_type is 'rwkv7', expected gla": {"model_type": "rwkv7"},
    "feature_map is 'relu', expected None": {"feature_map": "relu"},
    "use_short_conv is True, expected False": {"model_type": "retnet", "use_short_conv": True},
    "num_v_heads is 4, expected 2": {"model_type": "kda", "num_v_heads": 4},
    "attnres_block_size is 4, expected None": {"attnres_block_size": 4},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_is_not_here_is_refused(sentence):
    config, tensors = checkpoint("gla")
    with pytest.raises(ValueError, match=sentence):
        linnet.nn.from_fla({**config, **REFUSED[sentence]}, tensors)


def test_missing_tensors_get_a_sentence():
    config, tensors = checkpoint("gla")
    with pytest.raises(ValueError, match="the checkpoint has no layers.1.self_attn.gk_proj.1.bias"):
        linnet.nn.from_fla(config, {name: each for name, each in tensors.items() if name != "model.layers.1.attn.gk_proj.1.bias"})
    with pytest.raises(ValueError, match="a configuration without tensors"):
        linnet.nn.from_fla(config)
