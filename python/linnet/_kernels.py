"""The operators that treat each token alone, and softmax, for modules: the library's kernels, and torch's own on devices for
which the library has none. Names, arguments and results are those of the operators."""

import functools
import math

import torch
import torch.nn.functional as F

from ._library import DECLARATIONS
from ._ops import FUNCTIONS

ACTIVATIONS = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "relu2": lambda x: F.relu(x).square(),
    "elu1": lambda x: F.elu(x) + 1,
    "exp": torch.exp,
    "ns_sigmoid": lambda x: 0.5 + 0.5 * torch.sigmoid(x),
    "identity": lambda x: x,
}


def wide(x):
    """Maps run in f32, or in f64 on f64 tensors."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _scaled(y, weight, like):
    return (y if weight is None else y * wide(weight)).to(like.dtype)


def _or_kernel(formula):
    """The operator of the formula's name where it has a kernel for the device, else the formula."""
    name = formula.__name__
    devices = {each["device"] for each in DECLARATIONS[name]["implementations"]} | {"cpu", "meta"}
    kernel = FUNCTIONS[name]

    @functools.wraps(formula)
    def function(**arguments):
        first = next(iter(arguments.values()))
        return kernel(**arguments) if first.device.type in devices else formula(**arguments)

    function.formula = formula
    return function


@_or_kernel
def rms_norm(x, weight=None, eps=1e-6, plus_one=False):
    y = wide(x) * torch.rsqrt(wide(x).square().mean(-1, keepdim=True) + eps)
    return _scaled(y, weight + 1 if plus_one else weight, x)


@_or_kernel
def layer_norm(x, weight=None, bias=None, eps=1e-5):
    y = F.layer_norm(wide(x), x.shape[-1:], eps=eps)
    y = y if weight is None else y * wide(weight)
    return (y if bias is None else y + wide(bias)).to(x.dtype)


@_or_kernel
def rms_norm_gated(x, z=None, weight=None, eps=1e-5, gate="silu", norm_before_gate=False):
    y, opened = wide(x), 1 if z is None else ACTIVATIONS[gate](wide(z))
    y = y if norm_before_gate else y * opened
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return _scaled(y * opened if norm_before_gate else y, weight, x)


@_or_kernel
def l2_norm(x, eps=1e-6):
    return (wide(x) * torch.rsqrt(wide(x).square().sum(-1, keepdim=True) + eps)).to(x.dtype)


@_or_kernel
def activation(x, act="silu", cap=30.0):
    y = cap * torch.tanh(wide(x) / cap) if act == "softcap" else ACTIVATIONS[act](wide(x))
    return y.to(x.dtype)


@_or_kernel
def glu(gate, up, act="silu"):
    return (ACTIVATIONS[act](wide(gate)) * wide(up)).to(gate.dtype)


@_or_kernel
def gated_gate(y, g, granularity="elementwise", act="sigmoid", mode="multiply", shared=False):
    a = ACTIVATIONS[act](wide(g))
    a = a[..., None] if a.dim() < y.dim() else a
    a = a.mean(2, keepdim=True) if shared else a
    return (wide(y) + a if mode == "add" else wide(y) * a).to(y.dtype)


@functools.lru_cache(maxsize=64)
def _frequencies(dims, theta, scaling, factor, low, high, length):
    def one(i):
        f = theta ** (-2 * i / dims)
        turns = length * f / (2 * math.pi)
        if scaling == "none" or (scaling == "llama3" and turns > high):
            return f
        if scaling == "linear" or turns < low:
            return f / factor
        s = (turns - low) / (high - low)
        return (1 - s) * f / factor + s * f

    return tuple(one(i) for i in range(dims // 2))


@_or_kernel
def rotary(x, positions=None, theta=10000.0, pairs="half", dims=0, offset=0, scaling="none", factor=1.0, low_freq_factor=1.0,
           high_freq_factor=4.0, original_length=8192):  # fmt: skip
    dims = dims or x.shape[-1]
    f = _frequencies(dims, theta, scaling, factor, low_freq_factor, high_freq_factor, original_length)
    exact = torch.float64 if x.dtype == torch.float64 else torch.float32
    if positions is None:
        positions = torch.arange(offset, offset + x.shape[1], device=x.device)[None]
    a = positions[..., None, None].to(exact) * torch.tensor(f, device=x.device, dtype=exact)  # [B, T, 1, dims / 2]
    turned, rest = wide(x[..., :dims]), x[..., dims:]
    u, v = (turned[..., 0::2], turned[..., 1::2]) if pairs == "interleaved" else turned.chunk(2, -1)
    first, second = u * a.cos() - v * a.sin(), u * a.sin() + v * a.cos()
    turned = torch.stack([first, second], -1).flatten(-2) if pairs == "interleaved" else torch.cat([first, second], -1)
    return torch.cat([turned.to(x.dtype), rest], -1)


@_or_kernel
def softmax(q, k, v, sinks=None, cu_seqlens_q=None, cu_seqlens_k=None, scale=None, causal=False, window=(-1, -1), prefix=0,
            softcap=0.0):  # fmt: skip
    """q [B, Tq, H, K], k and v [B, Tk, Hkv, ..]; query i stands at i + Tk - Tq."""
    if cu_seqlens_q is None and window == (-1, -1) and not softcap and sinks is None and (not causal or q.shape[1] == k.shape[1]):
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True).transpose(1, 2)
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    keys = torch.arange(k.shape[1], device=q.device)
    rows = torch.arange(q.shape[1], device=q.device) + k.shape[1] - q.shape[1]
    far = rows[:, None] - keys  # how far the key lies behind the query
    seen = far >= 0 if causal else torch.ones_like(far, dtype=torch.bool)
    if cu_seqlens_q is not None:
        rows = torch.arange(q.shape[1], device=q.device)
        own, other = (torch.searchsorted(c.to(q.device), r, right=True) for c, r in ((cu_seqlens_q, rows), (cu_seqlens_k, keys)))
        seen = seen & (own[:, None] == other)
    left, right = window
    if left >= 0:
        first = keys if cu_seqlens_q is None else keys - cu_seqlens_k.to(q.device)[other - 1]
        seen = seen & ((far <= left) | (first < prefix))
    if right >= 0:
        seen = seen & (-far <= right)
    if not softcap and sinks is None:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale).transpose(1, 2)
    logits = torch.einsum("bthk,bshk->bhts", wide(q), wide(k)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    logits = logits.masked_fill(~seen, -math.inf)
    if sinks is not None:
        logits = torch.cat([logits, wide(sinks)[None, :, None, None].expand(*logits.shape[:3], 1)], -1)
    weights = torch.softmax(logits, -1)[..., : k.shape[1]]
    return torch.einsum("bhts,bshv->bthv", weights, wide(v)).to(q.dtype)


@_or_kernel
def gated(q, k, v, g, position="G1", granularity="elementwise", act="sigmoid", mode="multiply", shared=False, **options):
    y = softmax(q=q, k=k, v=v, **options)
    return gated_gate(y=y, g=g, granularity=granularity, act=act, mode=mode, shared=shared)
