"""Exact attention for Hugging Face transformers (5 and newer), as attn_implementation="linnet".

transformers asks for a mask once per forward and hands it to every layer. The mask here is a rule (causal, window, padding,
packing) that the attention reads directly; it becomes a dense tensor only when something else looks at its values.
"""

import contextlib
import functools
import math
import warnings
from dataclasses import dataclass

import torch
from torch.utils._pytree import tree_map

from ._hybrids import install as install_recurrent
from ._ops import FUNCTIONS


@dataclass
class _Rule:
    """What a query sees: softmax's own options, and where its tokens are when they are packed."""

    keys: int  # the first so many keys; query i stands at position i + keys - queries
    causal: bool
    window: tuple[int, int] = (-1, -1)
    chunk: int = 0
    key_len: torch.Tensor | None = None  # [B]: padding behind the keys
    tokens_q: torch.Tensor | None = None  # packed: which of the B * Tq queries there are,
    tokens_k: torch.Tensor | None = None  # which of the B * Tk keys,
    cu_seqlens_q: torch.Tensor | None = None  # and where the sequences begin
    cu_seqlens_k: torch.Tensor | None = None


class _Mask(torch.Tensor):
    """A boolean mask [B, 1, Tq, Tk] that holds its rule; any use of its values makes them first."""

    @staticmethod
    def __new__(cls, shape, device, rule, dense):
        mask = torch.Tensor._make_subclass(cls, torch.ones(1, dtype=torch.bool, device=device).expand(shape))
        mask.rule, mask.dense = rule, dense
        return mask

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if function not in _HARMLESS:
                args, kwargs = tree_map(lambda x: x.dense() if isinstance(x, _Mask) else x, (args, kwargs or {}))
            return function(*args, **(kwargs or {}))


_HARMLESS = {
    torch.Tensor.size,
    torch.Tensor.dim,
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda")),
}


def _terms(function):
    """The functions that transformers' and_masks has joined."""
    if function.__qualname__ == "and_masks.<locals>.and_mask":
        return [term for each in function.__closure__[0].cell_contents for term in _terms(each)]
    return [function]


def _closure(function, name):
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents


def _rule(batch, queries, keys, q_offset, kv_offset, mask_function, attention_mask):
    """The rule of a mask, or None where it is none of those that softmax knows."""
    causal, left, right, chunk, segments = False, -1, -1, 0, None
    for term in _terms(mask_function):
        kind = term.__qualname__.removesuffix(".<locals>.inner_mask")
        if kind == "causal_mask_function":
            causal = True
        elif kind == "sliding_window_overlay":
            left = _closure(term, "sliding_window") - 1
        elif kind == "sliding_window_bidirectional_overlay":
            left = right = _closure(term, "sliding_window")
        elif kind == "chunked_overlay" and not _closure(term, "left_padding").any():
            chunk = _closure(term, "chunk_size")
        elif kind == "packed_sequence_mask_function" and segments is None:
            segments = _closure(term, "packed_sequence_mask")
        elif kind != "bidirectional_mask_function":
            return None
    offset = int(q_offset) - int(kv_offset)
    used = min(keys, offset + queries) if causal else keys  # behind them a cache is still empty
    if causal and offset + queries > keys or not causal and (offset != 0 or (queries != keys and (left, right) != (-1, -1))):
        return None
    rule = _Rule(used, causal, (left, right), chunk)
    local = (left, right) != (-1, -1) or chunk > 0
    if chunk and (kv_offset or offset):
        return None  # blocks are counted from the first token

    if segments is not None:
        if attention_mask is not None or queries != keys or offset:
            return None
        begins = torch.ones_like(segments, dtype=torch.bool)
        begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
        ends = torch.tensor([batch * keys], device=segments.device)
        rule.cu_seqlens_q = rule.cu_seqlens_k = torch.cat([begins.flatten().nonzero().flatten(), ends])
        return None if chunk else rule

    if attention_mask is None:
        return rule
    there = attention_mask[:, kv_offset : kv_offset + used]
    if there.shape[1] < used:
        there = torch.nn.functional.pad(there, (0, used - there.shape[1]))
    if there.all():
        return rule
    counts = there.sum(1)
    ordinals = there.cumsum(1)
    behind = bool((there == (ordinals.new_ones(used).cumsum(0) <= counts[:, None])).all())  # all padding is behind
    gaps = bool((there[:, 1:] & ~there[:, :-1]).sum(1).add(there[:, 0]).max() > 1)
    if behind and not causal and not local:
        rule.key_len = counts
        return rule
    if behind and causal and offset == 0:
        return rule  # no token sees the padding; what padding sees is nobody's
    if (gaps and local) or chunk:
        return None
    seen = there[:, offset:] if causal else there
    if queries != used and not seen.all():
        return None
    if queries == 1:
        return None  # a row of logits: gathering the keys would cost more
    nothing = counts.new_zeros(1)
    rule.tokens_k = there.flatten().nonzero().flatten()
    rule.cu_seqlens_k = torch.cat([nothing, counts.cumsum(0)])
    if queries == used:
        rule.tokens_q, rule.cu_seqlens_q = rule.tokens_k, rule.cu_seqlens_k
    else:
        rule.cu_seqlens_q = torch.arange(batch + 1, device=counts.device) * queries
    return rule


def _mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=None, attention_mask=None, device="cpu", **options):
    """transformers' mask: None for plain causal attention, else a rule, else the dense tensor."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    mask_function = mask_function or causal_mask_function
    given = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        "device": device,
        **options,
    }
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or isinstance(attention_mask, torch._subclasses.FakeTensor):
        return sdpa_mask(**given)
    rule = _rule(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask)
    if rule is None:
        return sdpa_mask(**given)
    given["allow_is_causal_skip"] = given["allow_is_bidirectional_skip"] = False
    dense = functools.cache(lambda: sdpa_mask(**given))
    return _Mask((batch_size, 1, q_length, kv_length), device, rule, dense)


def _packed(rule, query, key, value, options):
    """The call over the tokens that there are, as packed sequences; the others get 0."""
    batch, queries = query.shape[:2]
    q, k, v = query.flatten(0, 1), key[:, : rule.keys].flatten(0, 1), value[:, : rule.keys].flatten(0, 1)
    if rule.tokens_k is not None:
        k, v = k[rule.tokens_k], v[rule.tokens_k]
    if rule.tokens_q is not None:
        q = q[rule.tokens_q]
    out = FUNCTIONS["softmax"](q, k, v, cu_seqlens_q=rule.cu_seqlens_q, cu_seqlens_k=rule.cu_seqlens_k, **options)
    if rule.tokens_q is not None:
        out = out.new_zeros(batch * queries, *out.shape[1:]).index_copy(0, rule.tokens_q, out)
    return out.unflatten(0, (batch, queries))


def _from_pages(module, query, key, value, read, cache, read_index, write_index, cu_seq_lens_q, cu_seq_lens_k, max_length_q,
                max_length_k, sliding_window=None, **_):  # fmt: skip
    """Continuous batching: the new tokens of many requests end to end, [1, H, total, D], their older keys in pages of a cache.

    A step of one token for each request reads the pages where they lie; prompts, and layers with a window, read them gathered.
    """
    allocator = cache.layer_to_allocator[module.layer_idx]
    wanted, written = read_index[allocator.index], write_index[allocator.index]
    kind = allocator.layer_type
    offsets_q, offsets_k = cu_seq_lens_q, cu_seq_lens_k[kind]
    q, k, v = (each.transpose(1, 2)[0] for each in (query, key, value))  # [total, H, D]
    if max_length_q == 1 and wanted.numel() > 0 and kind == "full_attention":
        allocator.update(k, v, module.layer_idx, wanted[:0], written)  # no index to read: it writes alone
        k_pages, v_pages = allocator.get_cache_for_block_table(module.layer_idx)
        page, lengths = allocator.tokens_per_page, offsets_k.diff()
        firsts = offsets_k[:-1, None] + torch.arange(0, max_length_k[kind], page, device=q.device)  # of each page's tokens
        table = wanted[firsts.clamp(max=wanted.numel() - 1)] // page
        return FUNCTIONS["softmax_paged"](q[:, None], k_pages, v_pages, table, lengths, causal=True, **read).transpose(0, 1)
    k, v = allocator.update(k, v, module.layer_idx, wanted, written)
    window = (sliding_window - 1, -1) if sliding_window and kind == "sliding_attention" else (-1, -1)
    offsets = {"cu_seqlens_q": offsets_q, "cu_seqlens_k": offsets_k}
    return FUNCTIONS["softmax"](q, k, v, causal=True, window=window, **offsets, **read)[None]


def _install_continuous(name):
    """Lets transformers' continuous batching keep this implementation, which it knows by a list of names."""
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager as Manager

    original = Manager.switch_to_cb_friendly_attn
    if name in getattr(original, "linnet", ()):
        return

    @functools.wraps(original)
    def switch(self, model, *arguments, **keywords):
        if model.config._attn_implementation != name:
            original(self, model, *arguments, **keywords)

    switch.linnet = (*getattr(original, "linnet", ()), name)
    Manager.switch_to_cb_friendly_attn = switch


def _attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, **options):
    """query [B, H, Tq, D], key and value [B, Hkv, Tk, D], all strided views; returns [B, Tq, H, D]."""
    if dropout and module.training:
        raise NotImplementedError(
            "linnet: attention has no dropout; set it to 0 in the model's configuration (attention_dropout, attn_pdrop or "
            "attention_probs_dropout_prob)"
        )
    if options.get("output_attentions"):
        warnings.warn("linnet: attention weights are never formed, output_attentions gives none; eager attention has them")
    tokens = query.shape[2]
    read = {"sinks": options.get("s_aux"), "softcap": options.get("softcap") or 0.0, "scale": scaling}
    if hasattr(options.get("cache"), "layer_to_allocator"):
        return _from_pages(module, query, key, value, read, **options), None
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    if isinstance(attention_mask, _Mask):
        rule = attention_mask.rule
        fits = attention_mask.shape[0] == query.shape[0] and attention_mask.shape[2:] == (tokens, key.shape[1])
        if fits and options.get("position_bias") is None:
            read.update(causal=rule.causal, window=rule.window)
            if rule.chunk:
                read["chunk"] = rule.chunk
            if rule.cu_seqlens_q is not None:
                return _packed(rule, query, key, value, read), None
            key, value = key[:, : rule.keys], value[:, : rule.keys]
            return FUNCTIONS["softmax"](query, key, value, key_len=rule.key_len, **read), None
        attention_mask = attention_mask.dense()

    causal = attention_mask is None and tokens > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if causal and key.shape[1] > tokens:  # a cache with room for more: without a mask, positions count from its start
        key, value = key[:, :tokens], value[:, :tokens]
    bias = attention_mask
    if bias is not None and bias.dtype == torch.bool:
        bias = torch.zeros(bias.shape, dtype=query.dtype, device=bias.device).masked_fill_(~bias, -math.inf)
    if options.get("position_bias") is not None:
        position_bias = options["position_bias"][..., : key.shape[1]]
        bias = position_bias if bias is None else bias + position_bias
    return FUNCTIONS["softmax"](query, key, value, bias=bias, causal=bool(causal), **read), None


def register_with_transformers(name="linnet"):
    """Registers softmax attention with transformers, and serves the recurrent layers of its models.

    linnet.register_with_transformers()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="linnet")

    Gated delta rules, short convolutions and Mamba's scans (Qwen3-Next, Qwen3.5, Kimi Linear, OLMo hybrid, LFM2, Mamba, Mamba-2
    and others built on the same functions) run on Linnet's kernels from then on, whatever attn_implementation is. Saved models of
    linnet.nn and linnet.hf (model_type "linnet") are known to AutoConfig and AutoModel.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    from . import hf  # noqa: F401, its import makes model_type "linnet" known

    AttentionInterface.register(name, _attention)
    AttentionMaskInterface.register(name, _mask)  # without one, padding and windows would be dropped silently
    install_recurrent()
    with contextlib.suppress(ImportError, AttributeError):  # a transformers without continuous batching, or with another form of it
        _install_continuous(name)
