"""The Python signature of an operator, from its declaration: for the functions themselves and for the stubs that editors read."""

from keyword import iskeyword

TYPES = {
    "real": "float",
    "maybe_real": "float | None",
    "integer": "int",
    "boolean": "bool",
    "choice": "str",
    "window": "tuple[int, int] | None",
    "sizes": "tuple[int, ...]",
}


def argument(decl):
    """The Python name of an input: the declared one, except for words of the language (lambda_)."""
    return decl["name"] + "_" if iskeyword(decl["name"]) else decl["name"]


def tensor_type(decl, tensor):
    kinds = [tensor]
    if decl["element"] == "index" and not decl["mutated"]:
        kinds.append("Sequence[int]")  # cu_seqlens=[0, 5, 12]
    return " | ".join(kinds + ["None"] * decl["optional"])


def default_value(option):
    return tuple(option["default"]) if option["kind"] in ("window", "sizes") else option["default"]


def on_demand(declaration):
    """The outputs that a caller asks for with return_<name>=True."""
    return [decl["name"] for decl in declaration["outputs"][1:] if decl["optional"]]


def parameters(declaration, tensor="torch.Tensor", choice=lambda names: "str"):
    """The parameters as text, up to the return_<name> flags: `q: torch.Tensor`, ..., `*`, ..., `causal: bool = False`."""
    inputs = declaration["inputs"]
    positional = next((i for i, decl in enumerate(inputs) if decl["optional"]), len(inputs))
    words = [f"{argument(decl)}: {tensor_type(decl, tensor)}" for decl in inputs[:positional]] + ["*"]
    words += [f"{argument(decl)}: {tensor_type(decl, tensor)}" + " = None" * decl["optional"] for decl in inputs[positional:]]
    for option in declaration["options"]:
        kind = choice(option["choices"]) if option["kind"] == "choice" else TYPES[option["kind"]]
        words.append(f"{option['name']}: {kind} = {default_value(option)!r}")
    return words
