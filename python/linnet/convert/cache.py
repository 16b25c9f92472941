"""Caches of converted layers in transformers: a window keeps its first keys and its last ones, nothing between them.

transformers makes a DynamicCache; before the model runs, the layers of it that belong to windows are replaced by such that keep, for
every head of keys, what its window can still see. Masks and positions stay those of the whole text.
"""

import weakref

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from . import mixers

NO_CACHE = "linnet.convert: this mixer has no cache: generate with use_cache=False, or with `linnet generate`"

PADDED = "linnet.convert: the caches of windows know no padding: generate texts of one length, or with use_cache=False"


def spans(mixer, kv_heads):
    """(heads of keys, window) of the parts that see the same keys; 0: all keys."""
    if "windows" in mixer.options:
        return [(slice(g, g + 1), window) for g, window in enumerate(mixer.options["windows"])]
    return [(slice(0, kv_heads), mixer.options["window"])]


class WindowLayer(DynamicLayer):
    """What the windows of one layer still see: for each part keys and values [B, heads, first + window - 1, D]."""

    def __init__(self, site, like):
        super().__init__()
        self.module, self.like, self.is_sliding = weakref.ref(site.module), like, like.is_sliding
        self.parts, self.seen, self.padded = [], 0, False

    def lazy_initialization(self, key_states, value_states):
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        """The new keys alone; the attention takes what is kept from here."""
        self.lazy_initialization(key_states, value_states)
        self.seen += key_states.shape[-2]
        self.module().__dict__["_linnet_kept"] = self
        return key_states, value_states

    def takes(self, keys, padded):
        """Whether the next tokens can be read from here. A first call with padding is the whole text: only what follows it fails."""
        first = self.seen == keys.shape[-2]
        self.padded = padded if first else self.padded or padded
        if self.padded and not first:
            raise NotImplementedError(PADDED)
        return not self.padded

    def attend(self, mixer, q, k, v):
        """Attention of new queries [B, H, n, D] to what is kept and to new keys; then only what will be seen is kept."""
        n, sinks, groups = k.shape[-2], mixer.options["sinks"], q.shape[1] // k.shape[1]
        out, parts = [], []
        for number, (heads, window) in enumerate(spans(mixer, k.shape[1])):
            keys, values = k[:, heads], v[:, heads]
            if self.seen > n:
                keys, values = (torch.cat(pair, -2) for pair in zip(self.parts[number], (keys, values), strict=True))
            queries = q[:, heads.start * groups : heads.stop * groups]
            out.append(over_keys(mixer, queries, keys, values, window))
            if window and keys.shape[-2] > sinks + window - 1:
                keys, values = (torch.cat((y[..., :sinks, :], y[..., y.shape[-2] - window + 1 :, :]), -2) for y in (keys, values))
            parts.append((keys, values))
        self.parts = parts
        return torch.cat(out, 2)

    def get_seq_length(self):
        return self.seen

    def get_mask_sizes(self, query_length):
        if self.is_sliding:
            self.like.cumulative_length = self.seen
            return self.like.get_mask_sizes(query_length)
        return self.seen + query_length, 0

    def crop(self, tokens_to_remove):
        raise NotImplementedError("linnet.convert: the cache of a window cannot go back: generate without an assistant, or with use_cache=False")

    def _each(self, change):
        self.parts = [(change(keys), change(values)) for keys, values in self.parts]

    def reset(self):
        self.parts, self.seen, self.is_initialized = [], 0, False

    def batch_repeat_interleave(self, repeats):
        self._each(lambda y: y.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices):
        self._each(lambda y: y[indices])

    def reorder_cache(self, beam_idx):
        self._each(lambda y: y.index_select(0, beam_idx.to(y.device)))

    def offload(self):
        self._each(lambda y: y.to("cpu", non_blocking=True))

    def prefetch(self):
        self._each(lambda y: y.to(self.device, non_blocking=True))


def over_keys(mixer, q, k, v, window):
    """A window over keys at whose end the queries stand; [B, H, n, D] -> [B, n, H, D]."""
    if not mixers.native("softmax", q):
        return _dense(mixer, q, k, v, window)
    return mixers.linnet.softmax(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True, scale=mixer.shape.scale,
                                 window=(window - 1, -1) if window else (-1, -1), prefix=mixer.options["sinks"] if window else 0,
                                 softcap=mixer.shape.softcap)  # fmt: skip


def _dense(mixer, q, k, v, window):
    total, n, groups = k.shape[-2], q.shape[-2], q.shape[1] // k.shape[1]
    j, i = torch.arange(total, device=q.device), torch.arange(total - n, total, device=q.device)[:, None]
    seen = (j <= i) & ((j > i - window) | (j < mixer.options["sinks"])) if window else j <= i
    scores = q @ k.repeat_interleave(groups, 1).mT * mixer.shape.scale
    if mixer.shape.softcap:
        scores = torch.tanh(scores / mixer.shape.softcap) * mixer.shape.softcap
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.repeat_interleave(groups, 1)).transpose(1, 2)


def _bound(cache, sites):
    for site in sites:
        if not isinstance(site.mixer, mixers.Window):
            continue
        index = getattr(site.module, "layer_idx", site.index)
        while len(cache.layers) <= index and cache.layer_class_to_replicate is not None:
            cache.layers.append(cache.layer_class_to_replicate())
        if index >= len(cache.layers) or isinstance(cache.layers[index], WindowLayer):
            continue
        if cache.layers[index].get_seq_length() > 0:
            raise ValueError("linnet.convert: this cache was filled by another model")
        cache.layers[index] = WindowLayer(site, cache.layers[index])


def _owner(model, site):
    """The module that hands the cache to its list of layers."""
    path = site.name.split(".")
    number = next((at for at, word in enumerate(path) if word.isdigit()), 0)
    return model.get_submodule(".".join(path[: number - 1])) if number > 0 else model.base_model


def install(model, sites):
    """The model takes caches where all its mixers have one; generation without a cache is what is left to the others."""
    whole = all(site.mixer is None or (isinstance(site.mixer, mixers.Window) and site.shape.causal) for site in sites)
    for config in (model.config, getattr(model, "generation_config", None)):
        if config is not None and not whole:
            config.use_cache = False

    def before(module, args, kwargs):
        cache = kwargs.get("past_key_values")
        wanted = kwargs.get("use_cache")
        if cache is None and (getattr(module.config, "use_cache", False) if wanted is None else wanted) and "past_key_values" in kwargs:
            cache = kwargs["past_key_values"] = DynamicCache(config=module.config)
        if isinstance(cache, DynamicCache):
            _bound(cache, model.linnet_sites)
        return args, kwargs

    if whole and any(site.mixer is not None for site in sites) and not getattr(model, "_linnet_caches", False):
        model._linnet_caches = True
        _owner(model, sites[0]).register_forward_pre_hook(before, with_kwargs=True)
