"""Docstrings from the declarations, with an example that runs."""

import textwrap

from ._letters import Letters
from ._signature import argument

# io is the type of the call, that of the first input: float64, float32, bfloat16 or float16.
ELEMENTS = {
    "acc": "float32, float64 in a float64 call",
    "param": "type of the call or float32",
    "weight": "float32, bfloat16 or float16, float64 in a float64 call",
    "index": "int32 or int64",
    "mask": "bool or uint8",
    "code": "uint8",
}
EXAMPLES = {  # by the meaning of the values; otherwise any number
    "index": "torch.zeros({}, dtype=torch.int64)",
    "code": "torch.zeros({}, dtype=torch.uint8)",
    "positive": "0.5 + torch.rand({})",
    "unit_interval": "torch.rand({})",
    "write_strength": "torch.rand({})",
    "unit_rows": "torch.nn.functional.normalize(torch.randn({}), dim=-1)",  # delta rules grow without bound on longer keys
    "weights": "torch.rand({})",
    "gain": "1 + torch.rand({})",
    "log_decay": "-torch.rand({})",
}


def _wrapped(text, indent):
    return textwrap.fill(text, 110, initial_indent=" " * indent, subsequent_indent=" " * (indent + 4))


def _tensor(decl, remarks):
    shape = " or ".join("[" + ", ".join(decl[key]) + "]" for key in ("shape", "other_shape") if key in decl)
    remarks = [ELEMENTS[decl["element"]], *remarks] if decl["element"] in ELEMENTS else remarks
    return _wrapped(f"{decl['name']} {shape}: {decl['doc']}{'; ' if remarks else ''}{', '.join(remarks)}.", 4)


def _option(option):
    bounds = [option.get("low"), option.get("high")]
    if option["kind"] == "choice":
        values = ", ".join(option["choices"])
    elif option["kind"] in ("boolean", "window") or bounds == [None, None]:
        values = ""
    elif bounds[1] is None:
        values = f"at least {bounds[0]}"
    else:
        values = f"{bounds[0]} to {bounds[1]}"
    return _wrapped(f"{option['name']}: {option['doc']}{'; ' + values if values else ''}.", 4)


def _example(declaration):
    defaults = {option["name"]: option["default"] for option in declaration["options"]}
    letters = Letters(declaration["letters"], defaults)
    lines, arguments, keyword = [], [], False
    for decl in declaration["inputs"]:
        if decl["optional"]:
            keyword = True
            if "needed_by" not in decl or defaults[decl["needed_by"]] not in decl["needed_for"]:
                continue
        for word in decl["shape"]:
            if not letters.knows(word):
                letters[word] = declaration["example"][word]
        shape = ", ".join(str(letters.evaluate(word)) for word in decl["shape"])
        shape = shape or "()"
        kind = decl["element"] if decl["element"] in ("index", "code") else decl["values"]
        make = EXAMPLES.get(kind, "torch.randn({})").format(shape)
        lines.append(f">>> {argument(decl)} = {make}  # [{', '.join(decl['shape'])}]")
        arguments.append(f"{argument(decl)}={argument(decl)}" if keyword else argument(decl))
    return [*lines, f">>> out = linnet.{declaration['name']}({', '.join(arguments)})"]


def document(declaration):
    inputs, outputs = declaration["inputs"], declaration["outputs"]
    lines = [f"{declaration['summary'][0].upper()}{declaration['summary'][1:]}.", "", f"    {declaration['equation']}", ""]
    lines.append("Args:")
    for decl in inputs:
        remarks = [
            word
            for word, on in (
                ("optional", decl["optional"] and "needed_by" not in decl),
                (f"for {decl.get('needed_by')} {', '.join(decl.get('needed_for', ()))}", "needed_by" in decl),
                ("read and overwritten", decl["mutated"]),
                ("broadcast", decl["broadcast"]),
                ("differentiable", decl["differentiable"]),
            )
            if on
        ]
        lines.append(_tensor(decl, remarks))
    lines += [_option(option) for option in declaration["options"]]
    lines += [f"    return_{decl['name']}: return {decl['name']} too." for decl in outputs[1:] if decl["optional"]]
    lines += ["", "Returns:"]
    for decl in outputs:
        remarks = [f"with return_{decl['name']}"] if decl in outputs[1:] and decl["optional"] else []
        lines.append(_tensor(decl, remarks))
    notes = [f"{part} divides {whole}" for whole, part in declaration["multiples"]]
    for rule in declaration["letters"]:
        if rule["by"] is None:
            notes.append(f"{rule['letter']} = {rule['cases'][0][1]} unless a tensor shows it")
        else:
            widths = {}
            for choice, text in rule["cases"]:
                widths.setdefault(text, []).append(choice)
            notes.append(
                f"{rule['letter']} by {rule['by']}: "
                + ", ".join(f"{text} ({' '.join(names)})" for text, names in widths.items())
            )
    if notes:
        lines += ["", _wrapped("Sizes: " + "; ".join(notes) + ".", 0)]
    if declaration["decode"]:
        lines += ["", f"linnet.{declaration['decode']} continues token by token."]
    if not declaration["differentiable"]:
        lines += ["", "It has no gradient."]
    lines += ["", "Example:", *("    " + line for line in _example(declaration)), ""]
    return "\n".join(lines)
