"""Layer records as Python: the text of a forward function, parameters and their initial values.

A layer is written once, in C++ (src/layers); `record(name, options)` reads what it recorded, `source(record)` writes the same
steps as ordinary torch code. linnet.nn makes modules of both.
"""

import ast
import ctypes
import functools
import json
import math

import torch
import torch.nn.functional as F

from ._library import DECLARATIONS, LIBRARY
from ._ops import autocast, on_demand


class _Option(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("text", ctypes.c_char_p)]


LIBRARY.linnet_describe_layers.restype = ctypes.c_char_p
LAYERS = {layer["name"]: layer for layer in json.loads(LIBRARY.linnet_describe_layers())["layers"]}


def wide(x):
    """Maps run in f32, or in f64 on f64 tensors."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def option_text(value):
    """An option as the library reads it: True is 1, None is none, (4, -1) is 4,-1."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, (tuple, list)):
        return ",".join(str(part) for part in value) or "none"
    return repr(value) if isinstance(value, float) else str(value)


def option_value(option, text):
    """The Python value of an option's text."""
    kind = option["kind"]
    if kind == "boolean":
        return text in ("1", "true", "True")
    if kind == "integer":
        return int(text)
    if kind in ("real", "maybe_real"):
        return None if text == "none" else float(text)
    if kind in ("window", "sizes"):
        return tuple(int(part) for part in text.split(",")) if text not in ("", "none") else ()
    return text


@functools.lru_cache(maxsize=256)
def _record(name, options):
    pairs = (_Option * len(options))(*(_Option(key.encode(), text.encode()) for key, text in options))
    message, needed = ctypes.create_string_buffer(1024), ctypes.c_size_t()

    def call(buffer, size):
        code = LIBRARY.linnet_layer_json(
            name.encode(), pairs, len(options), buffer, ctypes.c_size_t(size), ctypes.byref(needed), message, len(message)
        )
        if code != 0:
            raise ValueError(message.value.decode())

    call(None, 0)
    buffer = ctypes.create_string_buffer(needed.value)
    call(buffer, len(buffer))
    return json.loads(buffer.value)


def record(name, options):
    """What the layer records with these options (src/layers/describe.h): parameters, steps, states."""
    return _record(name, tuple((key, option_text(value)) for key, value in options.items()))


# Functions of map expressions, by the names that they have there (src/layers/map.h).
_FUNCTIONS = {
    **{name: f"torch.{name}" for name in "exp expm1 log log1p sqrt rsqrt abs square tanh erf sin cos sigmoid relu".split()},
    **{name: f"F.{name}" for name in "silu softplus logsigmoid gelu".split()},
    "clip": "torch.clamp",
}


class _Expression(ast.NodeTransformer):
    def __init__(self, names):
        self.names = names

    def visit_Name(self, node):
        return ast.parse(self.names[node.id], mode="eval").body

    def visit_Call(self, node):
        name, arguments = node.func.id, [self.visit(each) for each in node.args]
        text = [ast.unparse(each) for each in arguments]
        if name in ("sum", "mean", "amax"):
            return ast.parse(f"({text[0]}).{name}(-1, keepdim=True)", mode="eval").body
        if name in ("min", "max"):
            numbers = [isinstance(each, (ast.Constant, ast.UnaryOp)) for each in arguments]
            if any(numbers):
                tensor, number = (text[1], text[0]) if numbers[0] else (text[0], text[1])
                bound = {"max": "min", "min": "max"}[name]  # max(x, 1) is x clamped from below
                return ast.parse(f"({tensor}).clamp({bound}={number})", mode="eval").body
            return ast.parse(f"torch.{name}imum({text[0]}, {text[1]})", mode="eval").body
        if name == "gelu_tanh":
            return ast.parse(f'F.gelu({text[0]}, approximate="tanh")', mode="eval").body
        return ast.parse(f"{_FUNCTIONS[name]}({', '.join(text)})", mode="eval").body


def expression(text, names):
    """A map expression as torch code; `names` gives the code of each tensor."""
    tree = ast.parse(text.replace("\n", " "), mode="eval")
    whole = tree.body
    dropped = isinstance(whole, ast.Call) and whole.func.id in ("sum", "mean", "amax")
    code = ast.unparse(_Expression(names).visit(tree))
    return code.replace("keepdim=True", "keepdim=False") if dropped and code.endswith("keepdim=True)") else code


def _literal(op, option, text):
    declared = {each["name"]: each for each in DECLARATIONS[op]["options"]}
    return repr(option_value(declared[option], text))


def _identifier(name):
    return "".join(c if c.isalnum() or c == "_" else "_" for c in name)


def _sizes(shape):
    return ", ".join({"B": "x.shape[0]", "T": "x.shape[1]"}.get(size, str(size)) for size in shape)


# Operators that treat every token alone (src/layers/record.cc); the others look at other tokens and may have a state.
TOKENWISE = {"dense", "dense_heads", "embedding", "rms_norm", "layer_norm", "rotary", "glu", "activation", "add", "l2_norm", "rms_norm_gated", "gated_gate"}


class _Writer:
    """Writes the steps of a record as lines of a function. Names of steps become names of variables.

    remembers: for calls with a state or with packed sequences, where a Run (_state.py) calls the operators that look at other tokens.
    """

    def __init__(self, record, remembers=False):
        self.record, self.remembers = record, remembers
        self.parameters = {each["name"]: each for each in record["parameters"]}
        self.acc = {step["name"]: step["acc"] for step in record["steps"]}

    def code(self, reference):
        if "input" in reference:
            return reference["input"]
        if "parameter" in reference:
            parts = reference["parameter"].split(".")  # gk_proj.0.weight is self.gk_proj[0].weight
            scalar = "" if self.parameters[reference["parameter"]]["shape"] else "[0]"
            return "self" + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in parts) + scalar
        if "step" in reference:
            return _identifier(reference["step"])
        if "table" in reference:
            return f"numbers(x, {reference['table']})"
        return f"x.new_full(({_sizes(reference['shape'])},), {reference['constant']})"

    def products(self, step):
        """The dense steps that read what this one reads, together: the first of them writes the line, the others are in it."""
        group = [each for each in self.record["steps"] if each.get("op") == "dense" and each["inputs"]["x"] == step["inputs"]["x"]]
        if len(group) == 1:
            return f"{_identifier(step['name'])} = {self.op(step)}"
        if step is not group[0]:
            return None
        parts = []
        for each in group:
            weight, *bias = (self.code(value) for key, value in each["inputs"].items() if key != "x")
            parts.append(f"({weight}, {bias[0]})" if bias else weight)
        return f"{', '.join(_identifier(each['name']) for each in group)} = products({self.code(step['inputs']['x'])}, {', '.join(parts)})"

    def op(self, step):
        name, inputs = step["op"], {key: self.code(value) for key, value in step["inputs"].items()}
        if name == "dense":
            return f"F.linear({', '.join(inputs.values())})"
        if name == "dense_heads":
            bias = f" + {inputs['bias']}.to(x.dtype)" if "bias" in inputs else ""
            return f"torch.einsum('bthk,hkf->bthf', {inputs['x']}, {inputs['weight']}.to(x.dtype)){bias}"
        if name == "add":
            scale = step["options"].get("scale", "1")
            return f"{inputs['x']} + {inputs['y']}" if float(scale) == 1 else f"{inputs['x']} + {scale} * {inputs['y']}"
        declaration = DECLARATIONS[name]
        arguments = [f"{key}={value}" for key, value in inputs.items()]
        arguments += [f"{key}={_literal(name, key, text)}" for key, text in step["options"].items()]
        if self.remembers and name not in TOKENWISE:
            return f"run({step['name']!r}, {name!r}, {step['output']!r}, {', '.join(arguments)})"
        if self.remembers and name == "rotary":
            arguments.append("positions=run.positions")
        wanted, outputs = step["output"], [each["name"] for each in declaration["outputs"]]
        always = [each for each in outputs if each not in on_demand(declaration)]
        if wanted in always:
            index = f"[{always.index(wanted)}]" if len(always) > 1 else ""
        else:
            arguments.append(f"return_{wanted}=True")
            index = "[-1]"
        return f"linnet.{name}({', '.join(arguments)}){index}"

    def map(self, step):
        names = {}
        for key, reference in step["inputs"].items():
            code = self.code(reference)
            is_wide = "table" in reference or "constant" in reference or ("step" in reference and self.acc[reference["step"]])
            names[key] = code if is_wide else f"wide({code})"
        if step["positional"]:
            rank = len(step["shape"])
            names["position"] = ("run.positions" if self.remembers else "positions(x)") + "[..., None]" * max(rank - 2, 0)
        code = expression(step["expression"], names)
        return code if step["acc"] else f"({code}).to(x.dtype)"

    def view(self, step):
        x, begin, size, stride = self.code(next(iter(step["inputs"].values()))), step["begin"], step["size"], step["stride"]
        match step["view"]:
            case "split":
                return f"{x}.unflatten(-1, ({size}, -1))"
            case "join":
                return f"{x}.flatten(-2)"
            case "slice":
                return f"{x}[..., {begin}:{begin + (size - 1) * stride + 1}" + (f":{stride}]" if stride != 1 else "]")
            case "reshape":
                return f"{x}.reshape({_sizes(step['shape'])})"
            case "last":
                return f"{x}[:, -1:]"
            case "column":
                return f"{x}[..., None]"
            case "drop_token":
                return f"{x}[:, 0]"

    def concat(self, step):
        parts = ", ".join(self.code(value) for value in step["inputs"].values())
        return f"torch.stack([{parts}], -1).flatten(-2)" if step["interleaved"] else f"torch.cat([{parts}], -1)"

    def text(self):
        lines = []
        for step in self.record["steps"]:
            dense = step.get("op") == "dense"
            lines.append(self.products(step) if dense else f"{_identifier(step['name'])} = {getattr(self, step['kind'])(step)}")
        lines = [line for line in lines if line]
        lines.append(f"return {self.code(self.record['output'])}")
        if self.remembers:
            heading = ["def steps(self, x, run):"]
        else:
            heading = [
                "def forward(self, x, state=None, cu_seqlens=None, mask=None):",
                "    if state is not None or cu_seqlens is not None or mask is not None:",
                "        return self.remember(x, state, cu_seqlens, mask)",
            ]
        return "\n".join(heading + [f"    {line}" for line in lines]) + "\n"


def source(record):
    """The forward function of the record as text."""
    return _Writer(record).text()


def source_with_state(record):
    """The same steps with a state or with packed sequences."""
    return _Writer(record, remembers=True).text()


class _Products(torch.autograd.Function):
    """x W^T + b for several W and b. The gradient of x is summed by the matrix products themselves, where autograd would add tensors of its size."""

    @staticmethod
    def forward(ctx, x, *parts):  # weight, bias, weight, bias, ...
        ctx.save_for_backward(x, *parts[::2])
        ctx.set_materialize_grads(False)
        return tuple(F.linear(x, weight, bias) for weight, bias in zip(parts[::2], parts[1::2]))

    @staticmethod
    def backward(ctx, *gradients):
        x, *weights = ctx.saved_tensors
        flat, dx, dparts = x.reshape(-1, x.shape[-1]), None, []
        for i, (dy, weight) in enumerate(zip(gradients, weights)):
            of_weight, of_bias = ctx.needs_input_grad[2 * i + 1], ctx.needs_input_grad[2 * i + 2]
            rows = None if dy is None else dy.reshape(-1, dy.shape[-1])
            dparts += [rows.T @ flat if of_weight and rows is not None else None, rows.sum(0) if of_bias and rows is not None else None]
            if rows is not None and ctx.needs_input_grad[0]:
                dx = rows @ weight if dx is None else dx.addmm_(rows, weight)
        return None if dx is None else dx.reshape(x.shape), *dparts


def products(x, *parts):
    """F.linear of x with several weights, or pairs of a weight and a bias."""
    pairs = [part if isinstance(part, tuple) else (part, None) for part in parts]
    together = torch.is_grad_enabled() and not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()
    if not together or not any(each.requires_grad for each in (x, *(weight for weight, _ in pairs))):
        return tuple(F.linear(x, weight, bias) for weight, bias in pairs)
    given = [x, *(each for pair in pairs for each in pair)]
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        given = autocast(*given)
    return _Products.apply(*given)


def numbers(x, values):
    """Fixed numbers beside x, in the type in which maps run."""
    return torch.tensor(values, device=x.device, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)


def positions(x):
    """0, 1, ... along the tokens of x."""
    return torch.arange(x.shape[1], device=x.device, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)


@torch.no_grad()
def initialise(tensor, init):
    """Initial values in place, by the rules of src/layers/record.h."""
    rule, a, b = init["rule"], init["a"], init["b"]
    shape = tensor.shape
    fan_in = math.prod(shape[1:]) if len(shape) > 1 else math.prod(shape)
    match rule:
        case "zeros":
            tensor.zero_()
        case "ones":
            tensor.fill_(1)
        case "constant":
            tensor.fill_(a)
        case "normal":
            tensor.normal_(a, b)
        case "uniform":
            tensor.uniform_(a, b)
        case "fan_in":
            tensor.uniform_(-a / math.sqrt(fan_in), a / math.sqrt(fan_in))
        case "xavier":
            bound = a * math.sqrt(6 / (fan_in + shape[0]))
            tensor.uniform_(-bound, bound)
        case "identity":
            tensor.copy_(torch.eye(*shape[-2:], dtype=tensor.dtype).expand(shape))
        case "log_uniform":
            tensor.uniform_(max(a, 1e-6), b).log_()
        case "uniform_log":
            tensor.uniform_(math.log(a), math.log(b))
        case "inverse_softplus_log_uniform":
            step = tensor.uniform_(math.log(a), math.log(b)).exp_().clamp_(min=1e-4)
            step.add_(torch.log(-torch.expm1(-step)))
        case "log_range":
            tensor.copy_(torch.arange(1, shape[-1] + 1, dtype=tensor.dtype).log().expand(shape))
        case "range":
            tensor.copy_((a * torch.arange(shape[-1], dtype=tensor.dtype)).expand(shape))
        case "first_one":
            tensor.zero_()[..., 0] = 1
        case "retention":
            tensor.copy_(torch.log1p(-(2.0 ** (-5 - torch.arange(shape[-1], dtype=torch.float64)))).to(tensor.dtype).expand(shape))
        case _:
            raise ValueError(f"there is no rule {rule!r} for initial values")
