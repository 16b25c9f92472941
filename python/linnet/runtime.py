"""Models without torch: the C library's runtime by ctypes.

    tokenizer = linnet.runtime.Tokenizer("model/tokenizer.json")        # or a GGUF file
    ids = tokenizer.encode("Hello, world")
    text = tokenizer.decode(ids)

Errors are ValueError with the library's sentence.
"""

import ctypes
import os
import pathlib
from collections.abc import Sequence

_NAMES = ("liblinnet.so", "liblinnet.so.0", "liblinnet_c.so")
ADD_SPECIAL, PARSE_SPECIAL, SKIP_SPECIAL = 1, 2, 4


def _load_library() -> ctypes.CDLL:
    here = pathlib.Path(__file__).parent
    given = os.environ.get("LINNET_LIBRARY")
    paths = [pathlib.Path(given)] if given else [folder / name for folder in (here, here.parents[1]) for name in _NAMES]
    for path in paths:
        if path.exists():
            return ctypes.CDLL(str(path))
    raise ImportError("linnet.runtime: liblinnet.so is missing beside the package; `pip install .` builds it, LINNET_LIBRARY names one")


_library = _load_library()


def _declare(name, result, *arguments):
    function = getattr(_library, name)
    function.restype, function.argtypes = result, arguments
    return function


_i32_p, _void_p, _text, _size, _i64, _int = (
    ctypes.POINTER(ctypes.c_int32), ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int64, ctypes.c_int)  # fmt: skip
_tokenizer_open = _declare("linnet_tokenizer_open", _void_p, _text, _text, _size)
_tokenizer_free = _declare("linnet_tokenizer_free", None, _void_p)
_tokenizer_size = _declare("linnet_tokenizer_size", _i64, _void_p)
_tokenizer_encode = _declare("linnet_tokenizer_encode", _i64, _void_p, _text, _i64, _int, _i32_p, _i64)
_tokenizer_decode = _declare("linnet_tokenizer_decode", _i64, _void_p, _i32_p, _i64, _int, _text, _i64)
_dequantize = _declare("linnet_gguf_dequantize", _int, _text, _text, _i64, _void_p, _text, _size)


class _Message:
    """Room for the library's sentence; `check` raises it."""

    def __init__(self):
        self.buffer = ctypes.create_string_buffer(1024)

    def arguments(self):
        return self.buffer, len(self.buffer)

    def check(self, success) -> None:
        if not success:
            raise ValueError(self.buffer.value.decode(errors="replace"))


class Tokenizer:
    """Text to token numbers and back, from a tokenizer.json, a model's folder or a GGUF file."""

    def __init__(self, path):
        self._handle = None
        message = _Message()
        handle = _tokenizer_open(os.fsencode(path), *message.arguments())
        message.check(handle)
        self._handle = handle

    def __del__(self):
        if self._handle:
            _tokenizer_free(self._handle)

    def __len__(self) -> int:
        return _tokenizer_size(self._handle)

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """The token numbers of a text. add_special: with what the model expects around it; parse_special: names of special
        tokens in the text mean these tokens."""
        data = text.encode(errors="replace")
        flags = (ADD_SPECIAL if add_special else 0) | (PARSE_SPECIAL if parse_special else 0)
        room = len(data) + 16
        while True:
            ids = (ctypes.c_int32 * room)()
            count = _tokenizer_encode(self._handle, data, len(data), flags, ids, room)
            if count <= room:
                return ids[:count]
            room = count

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of token numbers; bytes that are no UTF-8 become U+FFFD."""
        array = (ctypes.c_int32 * len(ids))(*ids)
        room = 16 * len(ids) + 16
        while True:
            text = ctypes.create_string_buffer(room)
            count = _tokenizer_decode(self._handle, array, len(ids), SKIP_SPECIAL if skip_special else 0, text, room)
            if count <= room:
                return text.raw[:count].decode()
            room = count


def dequantize(kind: str, data: bytes, elements: int) -> list[float]:
    """Blocks of a GGUF tensor (kind "Q4_K", ...) as floats, a ctypes array."""
    out = (ctypes.c_float * elements)()
    message = _Message()
    message.check(_dequantize(kind.encode(), data, elements, out, *message.arguments()) == 0)
    return out
