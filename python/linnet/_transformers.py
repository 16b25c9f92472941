"""Exact attention for Hugging Face transformers (5 and newer), as attn_implementation="linnet"."""

import math
import warnings

import torch

from ._ops import FUNCTIONS


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
    causal = attention_mask is None and tokens > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if causal and key.shape[2] > tokens:  # a cache with room for more: without a mask, positions count from its start
        key, value = key[:, :, :tokens], value[:, :, :tokens]
    bias = attention_mask
    if bias is not None and bias.dtype == torch.bool:
        bias = torch.zeros(bias.shape, dtype=query.dtype, device=bias.device).masked_fill_(~bias, -math.inf)
    if options.get("position_bias") is not None:
        position_bias = options["position_bias"][..., : key.shape[2]]
        bias = position_bias if bias is None else bias + position_bias
    out = FUNCTIONS["softmax"](
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        bias=bias,
        sinks=options.get("s_aux"),
        softcap=options.get("softcap") or 0.0,
        scale=scaling,
        causal=bool(causal),
    )
    return out, None


def register_with_transformers(name="linnet"):
    """Registers softmax attention and its mask with transformers.

    linnet.register_with_transformers()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="linnet")
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(name, _attention)
    AttentionMaskInterface.register(name, sdpa_mask)  # without one, padding and windows would be dropped silently
