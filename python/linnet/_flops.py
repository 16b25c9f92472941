"""The operators' own counts of floating-point operations, for torch.utils.flop_counter.FlopCounterMode."""

import ctypes

import torch
from torch.utils.flop_counter import register_flop_formula

from ._library import DECLARATIONS, LIBRARY
from ._ops import torch_name

FORWARD, BACKWARD = 0, 1
DTYPES = {torch.float64: 1, torch.float32: 2, torch.bfloat16: 3, torch.float16: 4, torch.int64: 5, torch.int32: 6, torch.uint8: 7, torch.bool: 7}
NUMBERS = torch.zeros(64, dtype=torch.float64)  # where tensors lie whose numbers nobody reads


class _Tensor(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("data", ctypes.c_void_p), ("dtype", ctypes.c_int32), ("device", ctypes.c_int32),
                ("rank", ctypes.c_int32), ("sizes", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.c_void_p)]  # fmt: skip


class _Option(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("text", ctypes.c_char_p)]


def _text(value):
    if value is None:
        return "none"
    if isinstance(value, (list, tuple)):
        return ",".join(str(int(part)) for part in value) or "none"
    return str(int(value)) if isinstance(value, bool) else str(value)


def cost(name, tensors, options, backward=False):
    """Floating-point operations and bytes of a call: tensors and options by name; tensors may be on any device, or fake."""
    declared = {each["name"]: each for each in DECLARATIONS[name]["inputs"]}
    listed, kept = [], []
    for key, tensor in tensors.items():
        data, dtype = NUMBERS.data_ptr(), DTYPES[tensor.dtype]
        if declared[key]["element"] == "index":  # values are looked at
            if isinstance(tensor, torch._subclasses.FakeTensor) or tensor.device.type == "meta":
                if declared[key]["optional"]:
                    continue
                tensor = torch.zeros(tensor.shape, dtype=torch.int64)
            tensor = tensor.detach().to("cpu", torch.int64).contiguous()
            kept.append(tensor)
            data, dtype = tensor.data_ptr(), 5
        sizes = (ctypes.c_int64 * max(tensor.dim(), 1))(*tensor.shape)
        listed.append(_Tensor(key.encode(), data, dtype, 0, tensor.dim(), sizes, None))
        kept.append(sizes)
    chosen = [_Option(key.encode(), _text(value).encode()) for key, value in options.items()]
    flops, size, message = ctypes.c_double(), ctypes.c_double(), ctypes.create_string_buffer(1024)
    code = LIBRARY.linnet_cost(
        name.encode(), BACKWARD if backward else FORWARD, (_Tensor * len(listed))(*listed), len(listed),
        (_Option * len(chosen))(*chosen), len(chosen), ctypes.byref(flops), ctypes.byref(size), message, ctypes.c_size_t(len(message)),
    )  # fmt: skip
    if code != 0:
        raise RuntimeError(message.value.decode())
    return int(flops.value), int(size.value)


def _register(declaration):
    name, inputs = declaration["name"], [each["name"] for each in declaration["inputs"]]
    options = [each["name"] for each in declaration["options"]]
    received = sum(each["differentiable"] for each in declaration["outputs"])

    def formula(*arguments, out_val=None, backward=False, **keywords):
        given = {key: tensor for key, tensor in zip(inputs, arguments[received if backward else 0 :]) if tensor is not None}
        given |= {key: keywords[key] for key in inputs if isinstance(keywords.get(key), torch.Tensor)}
        return cost(name, given, {key: keywords[torch_name(key)] for key in options if torch_name(key) in keywords}, backward)[0]

    register_flop_formula(getattr(torch.ops.linnet, name), get_raw=True)(formula)
    if declaration["differentiable"]:
        backward = getattr(torch.ops.linnet, name + "_backward")
        register_flop_formula(backward, get_raw=True)(lambda *arguments, **keywords: formula(*arguments, backward=True, **keywords))


for _declaration in DECLARATIONS.values():
    _register(_declaration)
