"""Sentences for calls that other libraries would understand: their names of arguments, their layout, other types of values."""

import difflib
import warnings

import torch

from ._signature import argument, on_demand

# What other libraries call an argument, and the names that it may have here: the first that the operator knows.
OTHER_NAMES = {
    "is_causal": ("causal",),
    "attn_mask": ("bias", "mask", "key_mask"),
    "attention_mask": ("bias", "mask", "key_mask"),
    "attn_bias": ("bias",),
    "mask": ("bias", "key_mask"),
    "key_padding_mask": ("key_len", "key_mask"),
    "seqused_k": ("key_len",),
    "softmax_scale": ("scale",),
    "sm_scale": ("scale",),
    "scaling": ("scale",),
    "window_size": ("window",),
    "sliding_window": ("window",),
    "logits_soft_cap": ("softcap",),
    "logit_cap": ("softcap",),
    "attn_sink": ("sinks",),
    "sink": ("sinks",),
    "s_aux": ("sinks",),
    "block_table": ("page_table",),
    "cache_seqlens": ("lengths",),
    "cu_seqlens": ("cu_seqlens_q",),
    "cu_seqlens_q": ("cu_seqlens",),
    "cu_seq_lens": ("cu_seqlens", "cu_seqlens_q"),
    "return_softmax_lse": ("return_lse",),
    "return_attn_probs": ("return_lse",),
    "output_final_state": ("return_final_state",),
    "return_final_states": ("return_final_state",),
    "initial_states": ("initial_state",),
    "initial_state": ("state",),
    "state": ("initial_state",),
    "use_qk_l2norm_in_kernel": ("l2_norm",),
    "use_qk_l2norm": ("l2_norm",),
    "qk_l2norm": ("l2_norm",),
    "gk": ("log_decay", "g"),
    "log_g": ("log_decay", "g"),
    "log_decay": ("g",),
    "decay": ("g", "log_decay"),
    "g": ("log_decay", "g_head"),
    "A_log": ("A",),
    "delta": ("dt",),
    "delta_bias": ("dt_bias",),
    "feature_map": ("map",),
    "normalise": ("normalize",),
    "activation": ("act",),
    "temperature": ("scale",),
}
# Those that have no counterpart, and why none is needed.
NO_NAME = {
    "dropout_p": "attention here has no dropout: leave it out",
    "dropout": "attention here has no dropout: leave it out",
    "enable_gqa": "grouped heads are seen from the shapes: leave it out",
    "head_first": "tensors are [B, T, H, D]: x.transpose(1, 2) where yours are [B, H, T, D]",
    "deterministic": "results are always deterministic: leave it out",
    "max_seqlen_q": "the lengths are read from cu_seqlens: leave it out",
    "max_seqlen_k": "the lengths are read from cu_seqlens: leave it out",
    "max_seqlen": "the lengths are read from cu_seqlens: leave it out",
    "alibi_slopes": "give the slopes as bias[h, i, j]",
    "chunk_size": "the chunk is chosen by the kernels, and changes no more than rounding: leave it out",
    "need_weights": "the weights are never formed: leave it out",
    "output_attentions": "the weights are never formed: leave it out",
    "use_qk_l2norm_in_kernel": "normalise q and k with linnet.l2_norm first",
    "use_qk_l2norm": "normalise q and k with linnet.l2_norm first",
}


def refuse_names(declaration, others):
    """Raises a TypeError for keyword arguments that the operator does not have."""
    name, given = declaration["name"], next(iter(others))
    known = [argument(decl) for decl in declaration["inputs"]] + [option["name"] for option in declaration["options"]]
    known += ["return_" + output for output in on_demand(declaration)]
    here = next((each for each in OTHER_NAMES.get(given, ()) if each in known), None)
    if here is None and given in NO_NAME:
        hint = NO_NAME[given]
    elif here is None:
        near = difflib.get_close_matches(given, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}"
    else:
        hint = f"it is called {here!r} here"
    raise TypeError(f"{name}: there is no argument {given!r}; {hint}")


def as_index(name, key, values, first, mutated):
    """Whole numbers of any type, or a list of them, as the operator reads them; a tensor that is overwritten stays itself."""
    if isinstance(values, torch.Tensor):
        if values.dtype in (torch.int64, torch.int32) or mutated or values.dtype == torch.bool or values.is_floating_point():
            return values  # as it is, or for the library's own sentence
        return values.to(torch.int64)
    if mutated:
        raise TypeError(f"{name}: {key} is a {type(values).__name__}, expected an int64 or int32 tensor, which is overwritten")
    try:
        found = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name}: {key} is {values!r}, expected a tensor or a list of whole numbers") from None
    if found.is_floating_point() or found.dtype == torch.bool or found.is_complex():
        raise TypeError(f"{name}: {key} holds {found.dtype}, expected whole numbers")
    return found.to(torch.int64).to(first.device if isinstance(first, torch.Tensor) else "cpu")


def as_window(name, key, value):
    """None is no window. torch would read a number as both sides, where other libraries mean the left one."""
    if value is None:
        return (-1, -1)
    raise TypeError(f"{name}: {key} is {value!r}, expected {EXPECTED['window']}")


EXPECTED = {
    "real": "a number",
    "maybe_real": "a number or None",
    "integer": "a whole number",
    "boolean": "True or False",
    "window": "two whole numbers (left, right) such as (128, 0), -1 for no limit, or None",
    "sizes": "a list of whole numbers",
}


def explain_types(declaration, tensors, keywords, error):
    """Raises a TypeError in a sentence where torch refused a value by its type, else returns."""
    if "Expected a value of type" not in str(error) and "incompatible function arguments" not in str(error):
        return
    name = declaration["name"]
    for decl, tensor in zip(declaration["inputs"], tensors):
        if tensor is None and not decl["optional"]:
            raise TypeError(f"{name}: {decl['name']} is None, expected a tensor") from None
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            kind = f"{type(tensor).__module__}.{type(tensor).__name__}".removeprefix("builtins.")
            hint = " (torch.from_numpy makes one)" if kind == "numpy.ndarray" else ""
            raise TypeError(f"{name}: {decl['name']} is a {kind}, expected a torch.Tensor{hint}") from None
    for option in declaration["options"]:
        key = next((key for key in (option["name"], option["name"] + "_") if key in keywords), None)
        if key is None:
            continue
        value = keywords[key]
        fits = {
            "real": isinstance(value, (int, float)),
            "maybe_real": value is None or isinstance(value, (int, float)),
            "integer": isinstance(value, int),
            "boolean": isinstance(value, bool),
            "choice": isinstance(value, str),
        }.get(option["kind"])
        if fits is None:  # window, sizes
            fits = isinstance(value, (list, tuple)) and all(isinstance(x, int) for x in value)
        if not fits:
            expected = EXPECTED.get(option["kind"]) or "one of " + ", ".join(option["choices"])
            raise TypeError(f"{name}: {option['name']} is {value!r}, expected {expected}") from None


# Calls whose layout is still looked at: the first few of each operator that has tokens and heads.
_looks = {}


def watch_layout(declaration):
    shape = declaration["inputs"][0]["shape"]
    if len(shape) == 4 and shape[1].startswith("T") and shape[2].startswith("H"):
        _looks[declaration["name"]] = 8


def look_at_layout(name, first):
    """Hints once when a tensor looks like [B, H, T, D], which scaled_dot_product_attention takes."""
    if name not in _looks:
        return
    if _looks[name] == 0:
        del _looks[name]
        return
    _looks[name] -= 1
    if not isinstance(first, torch.Tensor) or first.ndim != 4 or first.shape[3] == 1:  # one channel: a layer's memory of each channel
        return
    tokens, heads, width = first.shape[1:]
    # No model has so many heads, or a few tokens (not one: decode) with many times as many heads. Heads of a few channels are
    # meant: a layer may keep a memory for every channel (FreeEnergyMixer).
    if width >= 8 and heads > tokens and (heads > 256 or (1 < tokens <= 64 and heads >= 64 and heads > 4 * tokens)):
        _looks.clear()
        warnings.warn(
            f"linnet.{name}: the first tensor is {list(first.shape)}, that is {tokens} tokens of {heads} heads. Tensors are "
            "[B, T, H, D] here; from the layout [B, H, T, D] of scaled_dot_product_attention come with x.transpose(1, 2).",
            stacklevel=4,
        )
