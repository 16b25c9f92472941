"""Inputs of every operator, made from its declaration."""

import math
from keyword import iskeyword

import torch

import linnet
from linnet._shapes import Letters

SIZES = {
    "B": 2,
    "T": 6,
    "Tq": 5,
    "Tk": 7,
    "S": 6,
    "H": 4,
    "Hq": 4,
    "Hk": 4,
    "Hv": 4,
    "Hkv": 2,
    "K": 4,
    "V": 3,
    "N": 2,
    "capacity": 12,
    "Tg": 5,
    "Hg": 4,
    "D": 4,
    "G": 2,
    "C": 4,
    "E": 4,
    "I": 64,
    "O": 6,
}


def make(name, given=(), dtype=torch.float32, sizes=None, seed=0, **options):
    """The inputs of a call by name: all required ones, and the optional ones named in `given`; "other=g" gives g its other shape."""
    declaration = linnet.info(name)
    generator = torch.Generator().manual_seed(seed)
    chosen = {option["name"]: options.get(option["name"], option["default"]) for option in declaration["options"]}
    letters = Letters(declaration["letters"], chosen)
    packed = any(decl["values"] == "offsets" and decl["name"] in given for decl in declaration["inputs"])
    sizes = {**SIZES, **({"B": 1} if packed else {}), **(sizes or {})}
    tensors = {}
    for decl in declaration["inputs"]:
        if decl["optional"] and decl["name"] not in given:
            continue
        words = decl["other_shape" if f"other={decl['name']}" in given else "shape"]
        for word in words:
            letter = word.partition("+")[0]
            if decl["values"] == "offsets" or not letters.knows(letter):
                letters[letter] = sizes.get(letter, 3)
        tensors[decl["name"]] = _values(decl, [letters.evaluate(word) for word in words], letters, dtype, generator)
    return tensors


def _values(decl, shape, letters, dtype, generator):
    bound = None if decl["of"] is None else letters.evaluate(decl["of"])
    if decl["values"] == "offsets":
        inner = torch.randint(0, bound + 1, (shape[0] - 2,), generator=generator).sort().values
        return torch.cat([torch.tensor([0]), inner, torch.tensor([bound])])
    if decl["values"] == "lengths":
        return torch.randint(0, bound // 2 + 1, shape, generator=generator)
    if decl["values"] == "page_table":
        return torch.randint(0, bound, shape, generator=generator)
    if decl["values"] == "below":
        return torch.randint(0, bound, shape, generator=generator)
    if decl["element"] == "code":
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    if decl["element"] == "index":
        return torch.zeros(shape, dtype=torch.int64)
    if decl["element"] == "mask":
        return torch.rand(shape, generator=generator) < 0.7
    if decl["element"] == "acc":
        dtype = torch.float64 if dtype == torch.float64 else torch.float32
    if decl["values"] in DRAWN:
        return DRAWN[decl["values"]](torch.rand(shape, dtype=torch.float64, generator=generator)).to(dtype)
    return torch.randn(shape, dtype=torch.float64, generator=generator).div(math.sqrt(2)).to(dtype)


# From numbers between 0 and 1.
DRAWN = {
    "unit_interval": lambda x: 0.1 + 0.8 * x,
    "write_strength": lambda x: 0.1 + 0.8 * x,
    "gain": lambda x: 1 + x,
    "weights": lambda x: 0.1 + 0.8 * x,
    "log_decay": lambda x: -2 * x,
    "positive": lambda x: 0.5 + x,
}


def differentiable(name, tensors):
    """The same inputs, those with a gradient asking for one."""
    wanted = {decl["name"] for decl in linnet.info(name)["inputs"] if decl["differentiable"]}
    return {key: tensor.clone().requires_grad_(key in wanted) for key, tensor in tensors.items()}


def call(name, tensors, **keywords):
    """The function of that name: required tensors by position as far as possible, everything else by keyword."""
    return getattr(linnet, name)(**{key + "_" if iskeyword(key) else key: t for key, t in tensors.items()}, **keywords)


def every_output(name):
    """Keywords that ask for every output of the operator."""
    return {f"return_{decl['name']}": True for decl in linnet.info(name)["outputs"][1:] if decl["optional"]}


def arguments(name, tensors):
    """Positional and keyword arguments of torch.ops.linnet.<name>."""
    return tuple(tensors.get(decl["name"]) for decl in linnet.info(name)["inputs"])


def keywords_of(options):
    """Options by the names that torch.ops.linnet gives them."""
    return {"mode_" if key == "mode" else key: value for key, value in options.items()}


def on_request(name):
    return {f"return_{decl['name']}": True for decl in linnet.info(name)["outputs"] if decl["optional"] and not decl["saved"]}


def as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


# One line per case: operator, optional inputs that are given, options.
CASES = [
    ("softmax", (), {}),
    ("softmax", (), {"causal": True}),
    ("softmax", ("bias", "sinks"), {"causal": True, "softcap": 2.0}),
    ("softmax", ("sinks", "key_len"), {"window": (2, 1), "prefix": 1, "scale": 0.7}),
    ("softmax", ("cu_seqlens_q", "cu_seqlens_k"), {"causal": True}),
    ("softmax", (), {"chunk": 3, "causal": True}),
    ("softmax_decode", (), {}),
    ("softmax_decode", ("sinks",), {"window": (2, -1), "scale": 0.3}),
    ("softmax_paged", (), {}),
    ("softmax_paged", ("sinks",), {"causal": True, "softcap": 3.0}),
    ("softmax_merge", (), {}),
    ("linear", (), {}),
    ("linear", ("initial_state", "initial_z"), {"map": "elu1", "normalize": True}),
    ("linear", ("key_mask",), {"map": "hedgehog", "causal": False, "scale": 0.4}),
    ("linear", ("cu_seqlens", "initial_state"), {"map": "dpfp", "dpfp_nu": 2}),
    ("linear", ("w",), {"map": "t2r", "normalize": True, "eps": 0.01}),
    ("linear_decode", (), {}),
    ("linear_decode", ("z", "compensation"), {"map": "elu1", "normalize": True}),
    ("decay", ("g_head",), {}),
    ("decay", ("g", "initial_state"), {"scale": 0.4}),
    ("decay_decode", ("g",), {}),
    ("gla", (), {}),
    ("gla", ("cu_seqlens", "initial_state"), {}),
    ("gla_decode", (), {}),
    ("delta", (), {}),
    ("delta", ("initial_state",), {"l2_norm": True, "double_beta": True}),
    ("delta_decode", (), {}),
    ("gated_delta", (), {}),
    ("gated_delta", ("cu_seqlens", "initial_state"), {"l2_norm": True}),
    ("gated_delta", ("other=g",), {}),
    ("gated_delta_decode", (), {"l2_norm": True}),
    ("recurrence", (), {}),
    ("recurrence", ("g", "beta"), {"l2_norm": True}),
    ("recurrence_decode", ("g",), {}),
    ("recurrence_segments", ("g", "beta"), {"segment": 4}),
    ("gated", (), {}),
    ("gated", ("sinks",), {"position": "G2", "act": "silu", "causal": True}),
    ("gated", ("other=g", "sinks"), {"granularity": "headwise", "mode": "add", "causal": True}),
    ("gated", ("cu_seqlens_q", "cu_seqlens_k", "sinks"), {"act": "ns_sigmoid", "causal": True}),
    ("gated_decode", (), {}),
    ("gated_gate", (), {"act": "ns_sigmoid"}),
    ("zeros", ("s0",), {"zeroth": True}),
    ("zeros", (), {"causal": False}),
    ("zeros_decode", (), {}),
    ("zeros_softmax", (), {}),
    ("fem_read", ("q", "k"), {}),
    ("fem_read", ("q", "k", "key_mask"), {"prior": "linear", "causal": False}),
    ("monarch", (), {"block": 3, "steps": 2}),
    ("monarch", ("mask",), {"block": 2, "pad": "pre"}),
    ("monarch_tiled", (), {"tile_rows": 2, "tile_cols": 2}),
    ("hierarchical", (), {"arity": 2}),
    ("hierarchical", ("mask",), {"arity": 2, "tie": "row", "include_self": True}),
    ("inline", (), {}),
    ("inline", (), {"kernel": "exp", "causal": True}),
    ("inline_residual", (), {"height": 2, "width": 3}),
    ("inline_decode", (), {}),
    ("taylor_exact", (), {"causal": True}),
    ("taylor_compact", (), {}),
    ("taylor_compact_l2", (), {}),
    ("taylor_qt_layer", (), {}),
    ("taylor_decode", (), {}),
    ("features", (), {"map": "cosformer", "normalizer": "add"}),
    ("features", ("gamma", "beta"), {"map": "rebased", "causal": True}),
    ("features_decode", (), {"map": "elu1"}),
    ("distill", (), {"causal": True}),
    ("distill_decode", (), {}),
    ("distill_dof", (), {}),
    ("distill_window", (), {"window": 3}),
    ("distill_window_decode", (), {"window": 3, "form": "terraced"}),
    ("distill_hybrid", (), {"window": 3, "sinks": 2}),
    ("distill_hybrid_decode", (), {"window": 3, "sinks": 2}),
    ("dense_heads", ("bias",), {}),
    ("mamba_ssd", (), {}),
    ("mamba_ssd", ("D", "z", "dt_bias", "initial_state"), {"dt_min": 0.01}),
    ("mamba_ssd_decode", ("z",), {}),
    ("mamba_selective_scan", (), {}),
    ("mamba_selective_scan", ("D", "z", "dt_bias", "cu_seqlens"), {}),
    ("mamba_selective_scan_decode", (), {}),
    ("metala_mixer", ("w_aug",), {}),
    ("metala_core", ("state",), {}),
    ("metala_mixer_decode", ("w_aug",), {}),
    ("h3", (), {}),
    ("h3", ("cu_seqlens",), {"disc": "zoh"}),
    ("h3_decode", (), {}),
    ("causal_conv", ("bias", "initial_state"), {"activation": "silu"}),
    ("causal_conv_decode", (), {}),
    ("grid_conv", ("bias",), {"height": 2, "width": 3}),
    ("l2_norm", (), {}),
    ("rms_norm_gated", ("z", "weight"), {}),
]
DIFFERENTIABLE = [case for case in CASES if linnet.info(case[0])["differentiable"]]
OVERWRITING = [case for case in CASES if any(decl["mutated"] for decl in linnet.info(case[0])["inputs"])]


def case_id(case):
    name, given, options = case
    return " ".join([name, *given, *(f"{key}={value}" for key, value in options.items())])
