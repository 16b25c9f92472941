"""Gates: one on any read, in one call for what mechanism `gated` fuses with softmax; and the decays of gated recurrences."""

import torch
import torch.nn.functional as F

from ._records import wide
from ._library import DECLARATIONS
from ._ops import FUNCTIONS
from ._signature import argument

_GATED = {"G2": "v", "G3": "k", "G4": "q"}  # G1 gates the read


def with_gate(read, g, position="G1", **options):
    """The function `read` of this package with a gate of logits `g`: takes and returns what `read` does.

        out = linnet.with_gate(linnet.gla, g)(q, k, v, log_decay)               # read * sigmoid(g)
        out = linnet.with_gate(linnet.delta, g, "G2", act="silu")(q, k, v, beta)  # gates the values

    position: G1 the read (the first result), G2 values, G3 keys, G4 queries; G5, what the layer's output projection returns, is
    linnet.gated_gate itself. options: granularity, act, mode, shared of linnet.gated_gate. With linnet.softmax the gate is fused
    (linnet.gated); elsewhere it is one pass over the gated tensor, before or after the read. Gradients reach g.
    """
    if position not in ("G1", *_GATED):
        raise ValueError(f"with_gate: position is {position!r}, expected G1, G2, G3 or G4 (G5: use gated_gate)")
    name = getattr(read, "__name__", None)
    if FUNCTIONS.get(name) is not read:
        raise ValueError(f"with_gate: read is {read!r}, expected a function of linnet")
    inputs = DECLARATIONS[name]["inputs"]
    names = [argument(decl) for decl in inputs]
    positional = next((i for i, decl in enumerate(inputs) if decl["optional"]), len(inputs))
    chosen = _GATED.get(position)
    if chosen is not None and chosen not in names:
        raise ValueError(f"with_gate: {name} has no input {chosen} to gate at {position}")

    def gated(*tensors, **keywords):
        if len(tensors) > positional or keywords.keys() & set(names[: len(tensors)]):
            return read(*tensors, **keywords)  # Python's own sentence says what is wrong
        keywords.update(zip(names, tensors, strict=False))
        if name == "softmax":
            return FUNCTIONS["gated"](g=g, position=position, **options, **keywords)
        if chosen is not None:
            if keywords.get(chosen) is None:
                raise ValueError(f"with_gate: {name} is called without {chosen}, which {position} gates")
            keywords[chosen] = FUNCTIONS["gated_gate"](keywords[chosen], g, **options)
            return read(**keywords)
        results = read(**keywords)
        if not isinstance(results, tuple):
            return FUNCTIONS["gated_gate"](results, g, **options)
        return (FUNCTIONS["gated_gate"](results[0], g, **options), *results[1:])

    return gated


def decay_gate(a, A_log, dt_bias=None, lower=None):
    """The logarithm of the decay in Gated DeltaNet, Mamba-2 and KDA: -exp(A_log) softplus(a + dt_bias), in f32 (f64 of f64).

        g = linnet.decay_gate(a_proj(x), A_log, dt_bias)
        out = linnet.gated_delta(q, k, v, g, beta, l2_norm=True)

    a [B, T, H], or [B, T, H, K] with a decay for each channel; A_log [H]; dt_bias [H], or [H, K] (flat, too). lower, at most 0: KDA's
    bounded gate, lower sigmoid(exp(A_log) (a + dt_bias)). Differentiable. Initial values: linnet.nn.DecayGate.
    """
    if a.dim() not in (3, 4) or A_log.shape != a.shape[2:3]:
        shapes = f"{list(a.shape)} and {list(A_log.shape)}"
        raise ValueError(f"decay_gate: a and A_log have shapes {shapes}, expected [B, T, H] or [B, T, H, K] and [H]")
    rate = wide(A_log).exp() if a.dim() == 3 else wide(A_log).exp()[:, None]
    step = wide(a) if dt_bias is None else wide(a) + wide(dt_bias).reshape(a.shape[2:])
    return -rate * F.softplus(step) if lower is None else lower * torch.sigmoid(rate * step)
