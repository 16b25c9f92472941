"""Inputs of every operator, made from its declaration."""

import math

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
}


def make(name, given=(), dtype=torch.float32, sizes=None, seed=0, **options):
    """The inputs of a call by name: all required ones, and the optional ones named in `given`."""
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
        for word in decl["shape"]:
            letter = word.partition("+")[0]
            if decl["values"] == "offsets" or not letters.knows(letter):
                letters[letter] = sizes.get(letter, 3)
        tensors[decl["name"]] = _values(decl, [letters.evaluate(word) for word in decl["shape"]], letters, dtype, generator)
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
    if decl["element"] == "index":
        return torch.zeros(shape, dtype=torch.int64)
    if decl["element"] == "mask":
        return torch.rand(shape, generator=generator) < 0.7
    if decl["element"] == "acc":
        dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.randn(shape, dtype=torch.float64, generator=generator).div(math.sqrt(2)).to(dtype)


def differentiable(name, tensors):
    """The same inputs, those with a gradient asking for one."""
    wanted = {decl["name"] for decl in linnet.info(name)["inputs"] if decl["differentiable"]}
    return {key: tensor.clone().requires_grad_(key in wanted) for key, tensor in tensors.items()}


def call(name, tensors, **keywords):
    """The function of that name: required tensors by position as far as possible, everything else by keyword."""
    return getattr(linnet, name)(**tensors, **keywords)


def every_output(name):
    """Keywords that ask for every output of the operator."""
    return {f"return_{decl['name']}": True for decl in linnet.info(name)["outputs"][1:] if decl["optional"]}


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
]
DIFFERENTIABLE = [case for case in CASES if linnet.info(case[0])["differentiable"]]
OVERWRITING = [case for case in CASES if any(decl["mutated"] for decl in linnet.info(case[0])["inputs"])]


def case_id(case):
    name, given, options = case
    return " ".join([name, *given, *(f"{key}={value}" for key, value in options.items())])
