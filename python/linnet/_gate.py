"""A gate on any read: one call for what mechanism `gated` fuses with softmax."""

from ._library import DECLARATIONS
from ._ops import FUNCTIONS

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
    names = [decl["name"] for decl in DECLARATIONS[name]["inputs"]]
    if position != "G1" and _GATED[position] not in names:
        raise ValueError(f"with_gate: {name} has no input {_GATED[position]} to gate at {position}")

    def gated(*tensors, **keywords):
        keywords.update(zip(names, tensors, strict=False))
        if name == "softmax":
            return FUNCTIONS["gated"](g=g, position=position, **options, **keywords)
        if position != "G1":
            keywords[_GATED[position]] = FUNCTIONS["gated_gate"](keywords[_GATED[position]], g, **options)
            return read(**keywords)
        results = read(**keywords)
        if not isinstance(results, tuple):
            return FUNCTIONS["gated_gate"](results, g, **options)
        return (FUNCTIONS["gated_gate"](results[0], g, **options), *results[1:])

    return gated
