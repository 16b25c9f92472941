"""The papers' benchmarks as torch tensors, or as numpy arrays where torch is not installed, made by the compiled library.

    batch = linnet.tasks.mqar(examples=64, length=128, pairs=8, seed=1)
    batch.inputs, batch.labels                                    # int64 [64, 128]

The functions are made from the declarations in the library: `help(linnet.tasks.mqar)` shows options, defaults and tensors,
`linnet.tasks.names()` has them all. The same options give the same numbers on every machine.
"""

import ctypes
import inspect
import json
import types

try:
    import torch

    from ._library import LIBRARY
except ModuleNotFoundError as missing:
    if missing.name != "torch":
        raise
    import numpy

    from .runtime import _library as LIBRARY

    torch = None

_DTYPES = {1: "float64", 5: "int64", 7: "uint8"}
_TYPES = {"integer": int, "real": float, "flag": lambda text: text == "1", "choice": str, "text": str}


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
    ]


class _Option(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("text", ctypes.c_char_p)]


LIBRARY.linnet_describe_tasks.restype = ctypes.c_char_p
LIBRARY.linnet_task_make.argtypes = [
    ctypes.c_char_p,
    ctypes.POINTER(_Option),
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_char_p,
    ctypes.c_size_t,
]
LIBRARY.linnet_task_tensor.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Tensor)]
LIBRARY.linnet_task_free.argtypes = [ctypes.c_void_p]
LIBRARY.linnet_task_free.restype = None


def _copied(entry):
    shape, dtype = [entry.sizes[d] for d in range(entry.rank)], _DTYPES[entry.dtype]
    if torch is None:
        array = numpy.empty(shape, dtype=dtype)
        ctypes.memmove(array.ctypes.data, entry.data, array.nbytes)
        return array
    tensor = torch.empty(shape, dtype=getattr(torch, dtype))
    ctypes.memmove(tensor.data_ptr(), entry.data, tensor.numel() * tensor.element_size())
    return tensor


def make(name, **options):
    """The tensors of a task by its name, as attributes of the result: `make("mqar", examples=4).inputs`."""
    words = [(key, str(int(value)) if isinstance(value, bool) else str(value)) for key, value in options.items()]
    array = (_Option * len(words))(*((key.encode(), text.encode()) for key, text in words))
    task, message = ctypes.c_void_p(), ctypes.create_string_buffer(1024)
    code = LIBRARY.linnet_task_make(name.encode(), array, len(words), ctypes.byref(task), message, len(message))
    if code != 0:
        sentence = message.value.decode(errors="replace")
        raise ValueError(sentence) if code == 2 else RuntimeError(sentence)
    try:
        tensors, entry = types.SimpleNamespace(), _Tensor()
        index = 0
        while LIBRARY.linnet_task_tensor(task, index, ctypes.byref(entry)) == 0:
            setattr(tensors, entry.name.decode(), _copied(entry))
            index += 1
        return tensors
    finally:
        LIBRARY.linnet_task_free(task)


def _function(declaration):
    name = declaration["name"]

    def task(**options):
        return make(name, **options)

    lines = [declaration["summary"] + ".", "", declaration["details"], "", "Options:"]
    parameters = []
    for option in declaration["options"]:
        default = _TYPES[option["type"]](option["default"])
        parameters.append(inspect.Parameter(option["name"], inspect.Parameter.KEYWORD_ONLY, default=default))
        choices = f" ({', '.join(option['choices'])})" if "choices" in option else ""
        lines.append(f"    {option['name']}: {option['doc']}{choices}; default {default!r}")
    lines += ["", "Tensors:"]
    lines += [f"    {result['name']} [{', '.join(result['shape'].split())}]: {result['doc']}" for result in declaration["results"]]
    task.__name__ = task.__qualname__ = name
    task.__doc__ = "\n".join(lines)
    task.__signature__ = inspect.Signature(parameters)
    return task


DECLARATIONS = {task["name"]: task for task in json.loads(LIBRARY.linnet_describe_tasks())["tasks"]}
_FUNCTIONS = {name: _function(declaration) for name, declaration in DECLARATIONS.items()}
globals().update(_FUNCTIONS)
__all__ = ["names", "make", *_FUNCTIONS]


def names():
    """The names of all tasks."""
    return list(_FUNCTIONS)
