"""The compiled library: loads the torch operators and reads their declarations."""

import atexit
import ctypes
import json
import pathlib
import warnings

import torch

PATH = pathlib.Path(__file__).with_name("liblinnet_torch.so")
OLDEST_TORCH = (2, 11)


@ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_void_p)
def _warn(sentence, _):
    """A call that runs, but on slow kernels, says so once and why."""
    warnings.warn(sentence.decode(), RuntimeWarning, stacklevel=2)


def _load():
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
        raise ImportError(f"linnet needs torch {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} or newer, this is torch {torch.__version__}")
    if not PATH.exists():
        raise ImportError(
            f"linnet: {PATH} is missing; `pip install .` builds it, or put build/python of a build with "
            "-DLINNET_TORCH=ON first in PYTHONPATH"
        )
    torch.ops.load_library(str(PATH))
    library = ctypes.CDLL(str(PATH))
    library.linnet_describe.restype = ctypes.c_char_p
    library.linnet_set_log(_warn, None)
    atexit.register(library.linnet_set_log, None, None)
    return library, json.loads(library.linnet_describe())


LIBRARY, _description = _load()
VERSION = _description["version"]
TOLERANCE = _description["tolerance"]  # of src/core/tolerance.h; each implementation's gates stand in its declaration
DECLARATIONS = {declaration["name"]: declaration for declaration in _description["ops"]}
