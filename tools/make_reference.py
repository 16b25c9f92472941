#!/usr/bin/env python3
"""What is written from the declarations in liblinnet.so, where nobody should write it by hand:

    tools/make_reference.py stub build/liblinnet.so build/python/linnet/__init__.pyi    signatures and texts for editors
    tools/make_reference.py api build/liblinnet.so docs/api.md                          the API reference

The build writes the stub; docs/api.md is kept in the repository, and a test says when it is not current. Needs no torch.
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
        words = parameters(op, "Tensor", literal)
        if words[-1] == "*":
            words.pop()
        chosen = on_demand(op)
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


def api(ops):
    functions = cpp_functions()
    lines = [
        "# API reference",
        "",
        "Every operator with its arguments, made by `tools/make_reference.py api` from the declarations in the library: do not edit it by",
        "hand. The same names hold in Python (`linnet.NAME`), in C++ (`linnet::NAME`), in C (`linnet_call(\"NAME\", ...)`), in",
        "`torch.ops.linnet` and on the command line (`linnet info NAME`). What the letters of the shapes mean, and how C++ calls look, stands",
        "[at the end](#letters-and-calls). Types: *call* is the type of the first input (f64, f32, bf16 or f16).",
        "",
    ]
    mechanisms = {}
    for op in ops:
        mechanisms.setdefault(op["mechanism"], []).append(op)
    for mechanism, group in mechanisms.items():
        lines.append(f"[{mechanism}](#{mechanism}): " + ", ".join(f"`{op['name']}`" for op in group) + "  ")
    for mechanism, group in mechanisms.items():
        page = ROOT / "docs" / "mechanisms" / f"{mechanism}.md"
        lines += ["", f"## {mechanism}", ""]
        if page.exists():
            lines += [f"[The page of {mechanism}](mechanisms/{mechanism}.md)", ""]
        for op in group:
            words = [word.split(":")[0] if " = " not in word else re.sub(r":.* = ", "=", word) for word in parameters(op)]
            if words[-1] == "*":
                words.pop()
            words += [f"return_{output}=False" for output in on_demand(op)]
            lines += [f"### {op['name']}", "", f"{op['summary'][0].upper()}{op['summary'][1:]}.", ""]
            lines += ["    " + op["equation"], "", f"    linnet.{op['name']}({', '.join(words)})", ""]
            cpp = "inline_attention" if op["name"] == "inline" else op["name"]
            if cpp in functions:
                args, out, header = functions[cpp]
                lines += [f"C++: `linnet::{cpp}(const {args}&, const {out}&, const Context&)`, `{cpp}_workspace`" + (f", `{cpp}_backward`" if op["differentiable"] else "") + f" in `{header}`.", ""]
            lines += ["| tensor | shape | type | what it is |", "|---|---|---|---|"]
            kinds = {"io": "call", "acc": "f32 or f64", "param": "call or f32", "index": "i32 or i64", "mask": "bool or u8"}
            for decl in op["inputs"] + [{**decl, "out": True} for decl in op["outputs"]]:
                remarks = ["result" if "out" in decl else "", "optional" if decl["optional"] else "", "overwritten" if decl.get("mutated") else "", "gradient" if decl["differentiable"] and "out" not in decl else ""]
                shape = " or ".join("[" + ", ".join(decl[key]) + "]" for key in ("shape", "other_shape") if key in decl)
                notes = ", ".join(word for word in remarks if word)
                lines.append(f"| `{decl['name']}` | {cell(shape)} | {kinds[decl['element']]} | {cell(decl['doc'])}{f' ({notes})' if notes else ''} |")
            if op["options"]:
                lines += ["", "| option | default | values | what it does |", "|---|---|---|---|"]
                for option in op["options"]:
                    values = ", ".join(option["choices"]) if option["kind"] == "choice" else {"boolean": "true, false", "window": "left, right; -1: no limit", "sizes": "whole numbers"}.get(option["kind"])
                    if values is None:
                        low, high = option.get("low"), option.get("high")
                        values = "any number" if low is None and high is None else f"at least {low}" if high is None else f"at most {high}" if low is None else f"{low} to {high}"
                    lines.append(f"| `{option['name']}` | {cell(json.dumps(option['default']).strip(chr(34)))} | {cell(values)} | {cell(option['doc'])} |")
            if op["decode"]:
                lines += ["", f"Decode: `{op['decode']}`."]
            lines.append("")
    lines += [
        "## Letters and calls",
        "",
        "| letter | what it counts |",
        "|---|---|",
        "| B | items of the batch |",
        "| T, Tq | tokens, or queries |",
        "| S, Tk | keys where they are not as many as queries |",
        "| H, Hq, Hk, Hv, Hkv | heads; of queries, keys, values |",
        "| K, V | width of a key, of a value |",
        "| N | packed sequences |",
        "| E, W | channels and taps of a convolution |",
        "| F | features of a key after its feature map |",
        "",
        "A C++ call takes three plain structs: arguments (tensors and options by name), results, and a `Context` with the workspace. `NAME_workspace`",
        "says how many bytes of workspace a call needs. A function returns a `Status`; `message()` is one sentence. `docs/mechanisms/softmax.md`",
        "has a whole program. Gradients: `NAME_backward(args, out, grads, context)`, where a gradient is called `d<name>`.",
        "",
    ]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] not in ("stub", "api"):
        sys.exit(__doc__)
    text = (stub if sys.argv[1] == "stub" else api)(declarations(sys.argv[2]))
    pathlib.Path(sys.argv[3]).write_text(text)
