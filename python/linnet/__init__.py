"""Attention from softmax to linear: every mechanism as a function on tensors of shape [B, T, H, D].

    out = linnet.softmax(q, k, v, causal=True)
    out, state = linnet.linear(q, k, v, map="elu1", return_final_state=True)

The functions are made from the declarations in the compiled library: `help(linnet.softmax)` shows shapes, options and the
equation, `linnet.info("softmax")` the declaration. They work with autograd, torch.compile and torch.export.

`linnet.runtime` runs models on the C library alone: it can be imported where torch is not installed.
"""

import copy
import difflib
import importlib
import importlib.util

if importlib.util.find_spec("torch") is not None:
    from . import _flops, tasks  # noqa: F401, FlopCounterMode knows the operators then
    from ._gate import decay_gate, with_gate
    from ._library import DECLARATIONS, VERSION
    from ._ops import FUNCTIONS
    from ._sharding import register_with_dtensor
    from ._transformers import register_with_transformers

    __version__ = VERSION
    __all__ = ["decay_gate", "info", "list_ops", "register_with_dtensor", "register_with_transformers", "tasks", "with_gate", *FUNCTIONS]
    globals().update(FUNCTIONS)

    def __getattr__(name: str):  # what needs transformers is imported when it is asked for
        if name in ("convert", "load_converted"):
            module = importlib.import_module(".convert", __name__)
            return module if name == "convert" else module.load_converted
        raise AttributeError(f"module 'linnet' has no attribute {name!r}")

else:
    DECLARATIONS, FUNCTIONS = {}, {}

    def __getattr__(name: str):
        raise AttributeError(f"linnet.{name} needs torch, which is not installed here; linnet.runtime works without it")


def list_ops():
    """The names of all operators."""
    return list(FUNCTIONS)


def info(op):
    """The declaration of an operator (given by name or function) as a dictionary: tensors, options, implementations."""
    name = getattr(op, "__name__", op)
    if name not in DECLARATIONS:
        near = difflib.get_close_matches(str(name), DECLARATIONS, 1)
        hint = f"did you mean {near[0]!r}?" if near else "linnet.list_ops() has them all"
        raise ValueError(f"there is no operator {name!r}; {hint}")
    return copy.deepcopy(DECLARATIONS[name])
