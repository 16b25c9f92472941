#!/usr/bin/env python3
"""What is written from the declarations in liblinnet.so, where nobody should write it by hand:

    tools/make_reference.py stub build/liblinnet.so build/python/linnet/__init__.pyi    signatures and texts for editors
    tools/make_reference.py api build/liblinnet.so docs                                 the API reference: api.md, api/*.md

The build writes the stub; the reference is kept in the repository, and a test says when it is not current. Needs no torch.
"""

import ctypes
import json
import pathlib
import re
import sys
import types

ROOT = pathlib.Path(__file__).resolve().parents[1]
package = types.ModuleType("linnet")  # its modules without its __init__, which loads torch
package.__path__ = [str(ROOT / "python" / "linnet")]
sys.modules["linnet"] = package
from linnet._documentation import document  # noqa: E402
from linnet._signature import on_demand, parameters  # noqa: E402


def declarations(library):
    library = ctypes.CDLL(str(pathlib.Path(library).resolve()))
    library.linnet_describe.restype = ctypes.c_char_p
    return json.loads(library.linnet_describe())["ops"]


STUB = '''"""Attention from softmax to linear: every mechanism as a function on tensors of shape [B, T, H, D]."""
# Made by tools/make_reference.py from the declarations in liblinnet.so.

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

from torch import Tensor

{modules}
__version__: str

def list_ops() -> list[str]: ...
def info(op: str | Callable[..., Any]) -> dict[str, Any]: ...
def register_with_transformers(name: str = "linnet") -> None: ...
def load_converted(path: Any, device: Any = None) -> Any: ...
def decay_gate(a: Tensor, A_log: Tensor, dt_bias: Tensor | None = None, lower: float | None = None) -> Tensor: ...
def register_with_dtensor() -> None: ...
def with_gate(read: Callable[..., Any], g: Tensor, position: Literal["G1", "G2", "G3", "G4"] = "G1", **options: Any) -> Callable[..., Any]: ...
'''


def literal(names):
    return "Literal[" + ", ".join(f'"{name}"' for name in names) + "]"


def signature(name, words, returns):
    return f"def {name}(\n    " + ",\n    ".join(words) + f",\n) -> {returns}:"


def stub(ops):
    folder = ROOT / "python" / "linnet"
    modules = sorted(path.stem for path in [*folder.glob("*.py"), *folder.glob("*/")] if path.stem.isidentifier() and path.stem[0] != "_")
    text = [STUB.replace("{modules}", "".join(f"from . import {name} as {name}\n" for name in modules))]
    for op in ops:
        words, chosen = parameters(op, "Tensor", literal), on_demand(op)
        if words[-1] == "*" and not chosen:
            words.pop()
        always = len(op["outputs"]) - len(chosen)
        plain = "Tensor" if always == 1 else f"tuple[{', '.join(['Tensor'] * always)}]"
        body = '    """' + document(op).replace("\\", "\\\\").replace("\n", "\n    ").rstrip() + '\n    """'
        if not chosen:
            text.append(f"{signature(op['name'], words, plain)}\n{body}\n    ...\n")
            continue
        off = words + [f"return_{output}: Literal[False] = False" for output in chosen]
        on = words + [f"return_{output}: bool = False" for output in chosen]
        more = f"tuple[{', '.join(['Tensor'] * (always + 1))}]" if len(chosen) == 1 else "tuple[Tensor, ...]"
        if len(chosen) == 1:
            on = words + [f"return_{chosen[0]}: Literal[True]"]
        text.append(f"@overload\n{signature(op['name'], off, plain)}\n{body}\n    ...\n")
        text.append(f"@overload\n{signature(op['name'], on, more)} ...\n")
    return "\n".join(text)


def cell(text):
    return text.replace("|", "\\|").replace("\n", " ")


def cpp_functions():
    """The C++ struct of arguments of each operator, as the public headers declare it."""
    found = {}
    for header in sorted((ROOT / "src").rglob("*.h")):
        for name, args, out in re.findall(r"^Status (\w+)\(const (\w+)& args, const (\w+)& out", header.read_text(), re.MULTILINE):
            found[name] = (args, out, header.relative_to(ROOT).as_posix())
    return found


KINDS = {"io": "call", "acc": "f32 or f64", "param": "call or f32", "index": "i32 or i64", "mask": "bool or u8",
         "weight": "f32, bf16 or f16; f64 in an f64 call", "code": "u8"}
MADE = "Made by `tools/make_reference.py api` from the declarations in the library; do not edit it by hand."


def tensor_row(decl, result):
    shape = " or ".join("[" + ", ".join(decl[key]) + "]" for key in ("shape", "other_shape") if key in decl)
    remarks = ["result"] * result + ["optional"] * decl["optional"] + ["overwritten"] * bool(decl.get("mutated"))
    remarks += ["has a gradient"] * (decl["differentiable"] and not result)
    notes = f" ({', '.join(remarks)})" if remarks else ""
    return f"| `{decl['name']}` | {cell(shape)} | {KINDS[decl['element']]} | {cell(decl['doc'])}{notes} |"


def option_row(option):
    low, high = option.get("low"), option.get("high")
    if option["kind"] == "choice":
        values = ", ".join(option["choices"])
    elif option["kind"] in ("boolean", "window", "sizes"):
        values = {"boolean": "true, false", "window": "left, right; -1: no limit", "sizes": "whole numbers"}[option["kind"]]
    elif low is None and high is None:
        values = "any number"
    else:
        values = f"at least {low}" if high is None else f"at most {high}" if low is None else f"{low} to {high}"
    default = "none" if option["default"] is None else json.dumps(option["default"]).strip('"')
    return f"| `{option['name']}` | {cell(default)} | {cell(values)} | {cell(option['doc'])} |"


def sentence(text):
    return f"{text[0].upper()}{text[1:]}."


def api_operator(op, functions):
    words = [re.sub(r":.* = ", "=", word) if " = " in word else word.split(":")[0] for word in parameters(op)]
    if words[-1] == "*" and not on_demand(op):
        words.pop()
    words += [f"return_{output}=False" for output in on_demand(op)]
    lines = [f"## {op['name']}", "", sentence(op["summary"]), "", "    " + op["equation"], ""]
    lines += ["Python: `linnet." + op["name"] + "(" + ", ".join(words) + ")`", ""]
    cpp = "inline_attention" if op["name"] == "inline" else op["name"]
    if cpp in functions:
        args, out, header = functions[cpp]
        backward = f", `{cpp}_backward`" if op["differentiable"] else ""
        lines += [f"C++: `linnet::{cpp}(const {args}&, const {out}&, const Context&)`, `{cpp}_workspace`{backward} in `{header}`", ""]
    lines += ["| tensor | shape | type | what it is |", "|---|---|---|---|"]
    lines += [tensor_row(decl, False) for decl in op["inputs"]] + [tensor_row(decl, True) for decl in op["outputs"]]
    if op["options"]:
        lines += ["", "| option | default | values | what it does |", "|---|---|---|---|"]
        lines += [option_row(option) for option in op["options"]]
    if op["decode"]:
        lines += ["", f"Token by token: `{op['decode']}`."]
    return lines + [""]


def api(ops):
    """The pages by their place: the list of operators, and one page per mechanism."""
    functions, mechanisms, pages = cpp_functions(), {}, {}
    for op in ops:
        mechanisms.setdefault(op["mechanism"], []).append(op)
    lines = ["# API reference", "", "Every operator, by mechanism; the links lead to its tensors and options. The same names hold in Python (`linnet.NAME`),",
             'in C++ (`linnet::NAME`), in C (`linnet_call("NAME", ...)`), in `torch.ops.linnet` and on the command line (`linnet info NAME`).', MADE, ""]
    lines += ["| mechanism | operator | what it does |", "|---|---|---|"]
    for mechanism, group in mechanisms.items():
        for i, op in enumerate(group):
            name = f"[{mechanism}](api/{mechanism}.md)" if i == 0 else ""
            lines.append(f"| {name} | [`{op['name']}`](api/{mechanism}.md#{op['name']}) | {cell(op['summary'])} |")
        page = [f"# API of {mechanism}", "", MADE]
        if (ROOT / "docs" / "mechanisms" / f"{mechanism}.md").exists():
            page += [f"What it is and when to use it: [the page of {mechanism}](../mechanisms/{mechanism}.md)."]
        page += ["Letters and how C++ calls look: [overview](../api.md#letters). Type *call*: that of the first input, f64, f32, bf16 or f16.", ""]
        for op in group:
            page += api_operator(op, functions)
        pages[f"api/{mechanism}.md"] = "\n".join(page)
    lines += ["", "## Letters", "", "| letter | what it counts |", "|---|---|", "| B | items of the batch |", "| T, Tq | tokens, or queries |",
              "| S, Tk | keys where they are not as many as queries |", "| H, Hq, Hk, Hv, Hkv | heads; of queries, keys, values |",
              "| K, V | width of a key, of a value |", "| N | packed sequences |", "| E, W | channels and taps of a convolution |",
              "| F | features of a key after its feature map |", "", "## A call from C++", "",
              "A call takes three plain structs: arguments (tensors and options by name), results, and a `Context` with the workspace.",
              "`NAME_workspace` says how many bytes of workspace a call needs; kernels never allocate. A function returns a `Status`, whose `message()`",
              "is one sentence. Gradients: `NAME_backward(args, out, grads, context)`, where a gradient is called `d<name>`. Whole programs:",
              "[README](../README.md#from-c), [softmax](mechanisms/softmax.md), [examples/cpp](../examples/cpp/attention.cc).", ""]
    return {"api.md": "\n".join(lines), **pages}


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] not in ("stub", "api"):
        sys.exit(__doc__)
    if sys.argv[1] == "stub":
        pathlib.Path(sys.argv[3]).write_text(stub(declarations(sys.argv[2])))
    else:
        folder = pathlib.Path(sys.argv[3])
        for old in folder.glob("api/*.md"):
            old.unlink()
        (folder / "api").mkdir(parents=True, exist_ok=True)
        for place, text in api(declarations(sys.argv[2])).items():
            (folder / place).write_text(text)
