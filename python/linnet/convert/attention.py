"""The attention layers of a transformers model, found by running it, and what runs in them.

transformers hands q, k, v of every layer to one function, by name: `linnet_convert` here. So the projections, norms, rotary
positions and caches of every family stay what they are, and a mixer (mixers.py) replaces the softmax between them.
"""

import contextlib
import contextvars
from dataclasses import dataclass, field

import torch
from torch import nn

from .._transformers import _attention, _Mask, _mask
from . import cache, mixers

NAME = "linnet_convert"
_OUT = ("o_proj", "c_proj", "out_proj", "dense")
_RAW = {"q_raw": "q_proj", "k_raw": "k_proj"}
_visitor = contextvars.ContextVar("linnet_convert_visitor", default=None)


CAPPED = "its scores have a soft cap"  # which a window keeps, and nothing else knows


@dataclass
class Site:
    """One attention layer: where it stands, its shape, and the mixer that is active in it (None: the teacher's softmax)."""

    index: int
    name: str
    module: nn.Module
    project: nn.Module | None  # the output projection
    shape: mixers.Shape
    keep: str = ""  # why it has to stay softmax
    own_window: int = 0  # keys that the source sees from here; 0: all
    candidates: dict = field(default_factory=dict)  # by a text of the options

    @property
    def mixer(self):
        return self.module._modules.get("linnet")

    @mixer.setter
    def mixer(self, mixer):
        if mixer is None:
            self.module._modules.pop("linnet", None)
        else:
            self.module.add_module("linnet", mixer)

    def cost(self, mechanism, options, tokens):
        """FLOPs of one forward over so many tokens; of softmax: as the source has it."""
        if mechanism == "softmax" and self.own_window:
            mechanism, options = "window", {"window": self.own_window, "sinks": 0}
        return mixers.cost(self.shape, mechanism, options, tokens)

    def entry(self):
        """The layer's entry of config.json."""
        mixer = self.mixer
        return {"index": self.index, "mechanism": mixer.mechanism if mixer else "softmax", **(mixer.options if mixer else {})}


@contextlib.contextmanager
def visiting(visitor):
    """Inside, visitor(module, q, k, v, x, teach) runs in every attention layer and gives its output [B, T, H, D]; teach() is
    the teacher's, read() what the layer has now."""
    token = _visitor.set(visitor)
    try:
        yield
    finally:
        _visitor.reset(token)


# What a layer was given stays in its modules until its attention has run, so that copies of a model have their own.
def _keep_input(module, args, kwargs):
    module._linnet_x = args[0] if args else kwargs.get("hidden_states")


def _keep_raw(projection, args, out):
    projection._linnet_raw = out


def _forget(module):
    for owner, name in ((module, "_linnet_x"), *((getattr(module, each, None), "_linnet_raw") for each in _RAW.values())):
        if owner is not None:
            owner.__dict__.pop(name, None)


def more_of(module, needs, query, key):
    """What a mixer needs beside q, k, v; raw ones are those after norms and rotation where the layer has no projection of its own."""
    given = {}
    for name in needs:
        if name == "x":
            given[name] = module._linnet_x
            continue
        placed = query if name == "q_raw" else key
        raw = getattr(getattr(module, _RAW[name], None), "_linnet_raw", None)
        given[name] = placed if raw is None else raw.unflatten(-1, (placed.shape[2], -1))
    return given


def _teach(module, query, key, value, mask, scaling, options):
    """The teacher's attention, on Linnet's softmax where it runs on this device."""
    query, key, value = mixers.of_one_type(query, key, value)
    if not mixers.native("softmax", query):
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        if isinstance(mask, _Mask):
            rule = mask.rule
            limited = rule.window != (-1, -1) or rule.chunk or rule.key_len is not None or rule.cu_seqlens_q is not None
            mask = mask.dense() if limited or query.shape[2] != rule.keys or rule.keys != key.shape[2] else None
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, scaling=scaling, **options)[0]
    return _attention(module, query, key, value, mask, scaling=scaling, **options)[0]


def _tokens_there(mask, batch, tokens, keys):
    """Which tokens of each sequence there are, [B, T], or None for all of them. Masks of other kinds are refused."""
    if mask is None:
        return None
    if isinstance(mask, _Mask):
        rule = mask.rule
        if rule.cu_seqlens_q is not None and rule.tokens_q is None:
            raise NotImplementedError("linnet.convert: packed sequences need softmax in every layer")
        plain = rule.key_len is None and rule.tokens_q is None
        if plain and (not rule.causal or tokens == keys):
            return None
        dense = mask.dense()
    else:
        dense = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    if dense.shape[-2] != dense.shape[-1]:
        raise NotImplementedError(cache.NO_CACHE)
    there = dense[:, 0].any(-2)  # a key that some row sees
    return None if there.all() else there


def _mix(module, mixer, query, key, value, mask):
    """The mixer's output; sequences with padding run by themselves."""
    batch, _, tokens, _ = query.shape
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if tokens != k.shape[1]:
        raise NotImplementedError(cache.NO_CACHE)
    more = more_of(module, mixer.needs, q, k)
    there = _tokens_there(mask, batch, tokens, k.shape[1])
    if there is None:
        with torch.autocast(q.device.type, enabled=False):  # logarithms of weights are large: 8 bits of them are too few
            return mixer(q, k, v, more)
    out = q.new_zeros(batch, tokens, q.shape[2], v.shape[3])
    for b in range(batch):
        ids = there[b].nonzero().flatten()
        if len(ids):
            part = mixer(*(y[b : b + 1, ids] for y in (q, k, v)), {name: y[b : b + 1, ids] for name, y in more.items()})
            out[b, ids] = part[0].to(out.dtype)
    return out


def _padded(mask):
    """Whether some keys are of nobody: a mask that is no rule, or a rule with gaps."""
    if mask is None:
        return False
    return not isinstance(mask, _Mask) or mask.rule.key_len is not None or mask.rule.tokens_k is not None


def _attend(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **options):
    if dropout and module.training:
        raise NotImplementedError("linnet.convert: attention has no dropout; call model.eval() or set it to 0 in the configuration")
    mixer, kept = module._modules.get("linnet"), module.__dict__.pop("_linnet_kept", None)

    def teach():
        return _teach(module, query, key, value, attention_mask, scaling, options)

    def read():
        nonlocal kept
        if mixer is None or isinstance(mixer, mixers.Softmax):
            return teach()
        if kept is not None and not kept.takes(key, _padded(attention_mask)):
            kept = None
        if kept is None:
            return _mix(module, mixer, query, key, value, attention_mask)
        return kept.attend(mixer, query, key, value)

    visitor = _visitor.get()
    out = read() if visitor is None else visitor(module, query, key, value, scaling, options, teach, read)
    _forget(module)
    return out, None


def attach(model):
    """Makes every attention layer of the model run here."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _mask)
    model.set_attn_implementation(NAME)


def _parent(model, name):
    return model.get_submodule(name.rpartition(".")[0])


def _out_projection(model, name, module):
    for owner in (module, getattr(_parent(model, name), "output", None)):
        for each in _OUT:
            if isinstance(getattr(owner, each, None), nn.Module):
                return getattr(owner, each)
    return None


def _own_window(options, causal):
    """Keys of the window that a layer of the source has; transformers counts those of one side where both are seen."""
    window = options.get("sliding_window") or 0
    return window if causal or not window else 2 * window + 1


def refusal(site, mechanism, options):
    """Why a mechanism cannot stand in the place of this layer's softmax; empty: it can."""
    if mechanism == "softmax":
        return ""
    if site.keep and not (site.keep == CAPPED and mechanism == "window"):
        return site.keep
    if site.own_window:
        windows = options.get("windows") or [options.get("window", 0)]
        if mechanism != "window" or not all(0 < w <= site.own_window for w in windows):
            return f"it has a window of its own, {site.own_window} keys, in whose place only smaller ones may stand"
    return ""


def probe(model):
    """A small input that runs every layer: two tokens, or a black image."""
    config, device = model.config, next(model.parameters()).device
    if getattr(model, "main_input_name", "") == "pixel_values":
        size = config.image_size if isinstance(config.image_size, (tuple, list)) else (config.image_size,) * 2
        return {"pixel_values": torch.zeros(1, config.num_channels, *size, device=device)}
    return {"input_ids": torch.zeros(1, 2, dtype=torch.long, device=device)}


def numbered(sites):
    """Sites by the number of their block, which its name ends with: a hybrid model has other blocks between them."""
    numbers = [[int(part) for part in site.name.split(".") if part.isdigit()] for site in sites]
    blocks = [each[-1] for each in numbers if each]
    if len(blocks) == len(sites) and all(a < b for a, b in zip(blocks, blocks[1:])):
        for site, block in zip(sites, blocks, strict=True):
            site.index = block
    return sites


def find(model):
    """The attention layers in the order in which they run. The model runs once, on two tokens."""
    kind = getattr(model.config, "model_type", type(model).__name__)
    names = {module: name for name, module in model.named_modules()}
    found = {}

    def visit(module, query, key, value, scaling, options, teach, read):
        keep = ""
        if options.get("softcap"):
            keep = CAPPED
        elif options.get("s_aux") is not None:
            keep = "it has learned sinks"
        elif options.get("position_bias") is not None:
            keep = "it has a position bias"
        elif query.shape[2] != key.shape[2]:
            keep = "its keys come from elsewhere"
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        causal = bool(getattr(module, "is_causal", True)) if options.get("is_causal") is None else bool(options["is_causal"])
        if module in found:
            raise ValueError(f"{kind}: {names[module]} runs twice in one forward, which linnet.convert does not know")
        x = getattr(module, "_linnet_x", None)
        hidden = 0 if x is None else x.shape[-1]
        shape = mixers.Shape(hidden, query.shape[1], key.shape[1], query.shape[3], value.shape[3], scale, causal,
                             float(options.get("softcap") or 0))  # fmt: skip
        found[module] = Site(len(found), names[module], module, _out_projection(model, names[module], module), shape, keep,
                             _own_window(options, causal))  # fmt: skip
        return teach()

    try:
        attach(model)
    except (ValueError, AttributeError, KeyError) as problem:
        raise ValueError(f"linnet.convert does not know the attention of a {kind} model: {problem}") from problem
    hooks = [module.register_forward_pre_hook(_keep_input, with_kwargs=True) for module in names
             if "attention" in type(module).__name__.lower()]  # fmt: skip
    try:
        with visiting(visit), torch.no_grad():
            model(**probe(model))
    finally:
        for hook in hooks:
            hook.remove()
    if not found:
        raise ValueError(f"linnet.convert does not know the attention of a {kind} model: it does not use transformers' AttentionInterface")
    for site in found.values():
        if getattr(site.module, "_linnet_hooked", False):
            continue
        site.module._linnet_hooked = True
        site.module.register_forward_pre_hook(_keep_input, with_kwargs=True)
        for name in _RAW.values():
            if isinstance(getattr(site.module, name, None), nn.Module):
                getattr(site.module, name).register_forward_hook(_keep_raw)
    return numbered(list(found.values()))
