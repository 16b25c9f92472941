"""Models without torch: the C library's runtime by ctypes.

    model = linnet.runtime.load("SmolLM2-135M-Instruct.Q4_1.gguf")     # or a folder with config.json and safetensors
    print(model.generate("The linnet is", tokens=40))
    for piece in model.chat().ask("What is a linnet?"):
        print(piece, end="")

    session = model.start()                                             # token by token
    logits = session.prefill(model.tokenizer.encode("Hello"))           # a ctypes array of floats: numpy.frombuffer takes it

Errors are ValueError with the library's sentence.
"""

import ctypes
import json
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


class _Options(ctypes.Structure):
    _fields_ = [("weights", ctypes.c_char_p), ("attention", ctypes.c_char_p), ("threads", ctypes.c_int)]


class _TextScore(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("tokens", "scored", "bytes", "windows")] + [
        (name, ctypes.c_double) for name in ("loss", "perplexity", "bits_per_byte")
    ]


_model_load = _declare("linnet_model_load", _void_p, _text, ctypes.POINTER(_Options), _text, _size)
_model_json = _declare("linnet_model_json", _i64, _void_p, _text, _i64)
_model_score = _declare("linnet_model_score", _int, _void_p, _text, _i64, _i64, _i64, _i64, ctypes.POINTER(_TextScore), _text, _size)
_i64_p = ctypes.POINTER(ctypes.c_int64)
_model_recall = _declare("linnet_model_recall", _int, _void_p, _i64, _i64, ctypes.c_uint64, _i64_p, _i64_p, _text, _size)
_model_free = _declare("linnet_model_free", None, _void_p)
_model_vocabulary = _declare("linnet_model_vocabulary", _i64, _void_p)
_model_context = _declare("linnet_model_context", _i64, _void_p)
_model_hidden = _declare("linnet_model_hidden", _i64, _void_p)
_model_classes = _declare("linnet_model_classes", _i64, _void_p)
_model_is_end = _declare("linnet_model_is_end", _int, _void_p, ctypes.c_int32)
_model_tokenizer = _declare("linnet_model_tokenizer", _void_p, _void_p)
_model_chat = _declare("linnet_model_chat", _i64, _void_p, _text, _text, _int, _i32_p, _i64, _text, _size)
_model_calls = {
    name: _declare(f"linnet_model_{name}", _int, _void_p, _i32_p, _i64, _void_p, _text, _size)
    for name in ("logits", "states", "losses", "embed")
}
_model_classify = _declare("linnet_model_classify", _int, _void_p, _void_p, _i64, _void_p, _text, _size)
_session_start = _declare("linnet_session_start", _void_p, _void_p, _text, _size)
_session_copy = _declare("linnet_session_copy", _void_p, _void_p, _text, _size)
_session_free = _declare("linnet_session_free", None, _void_p)
_session_position = _declare("linnet_session_position", _i64, _void_p)
_session_state_bytes = _declare("linnet_session_state_bytes", _i64, _void_p)
_session_prefill = _declare("linnet_session_prefill", _int, _void_p, _i32_p, _i64, _void_p, _text, _size)
_session_decode = _declare("linnet_session_decode", _int, ctypes.POINTER(_void_p), _i32_p, _i64, _void_p, _text, _size)
_session_save = _declare("linnet_session_save", _int, _void_p, _text, _text, _size)
_session_restore = _declare("linnet_session_restore", _int, _void_p, _text, _text, _size)


class _Sampling(ctypes.Structure):
    _fields_ = [("temperature", ctypes.c_double), ("top_p", ctypes.c_double), ("min_p", ctypes.c_double),
                ("repeat_penalty", ctypes.c_double), ("top_k", _i64), ("seed", ctypes.c_uint64)]  # fmt: skip


_sampler_new = _declare("linnet_sampler_new", _void_p, ctypes.POINTER(_Sampling), _text, _size)
_sampler_free = _declare("linnet_sampler_free", None, _void_p)
_sampler_accept = _declare("linnet_sampler_accept", None, _void_p, ctypes.c_int32)
_sampler_next = _declare("linnet_sampler_next", ctypes.c_int32, _void_p, _void_p, _i64)
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
        self._handle = self._model = None
        message = _Message()
        handle = _tokenizer_open(os.fsencode(path), *message.arguments())
        message.check(handle)
        self._handle = handle

    @classmethod
    def _of_model(cls, model):
        made = cls.__new__(cls)
        made._handle, made._model = _model_tokenizer(model._handle), model  # the model's own: kept alive, not freed
        return made

    def __del__(self):
        if self._handle and self._model is None:
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


def _ids(tokens: Sequence[int]):
    return (ctypes.c_int32 * len(tokens))(*tokens)


class Sampler:
    """The next token from logits; temperature 0 takes the most likely one."""

    def __init__(self, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0, seed=0):
        self._handle = None
        options = _Sampling(temperature, top_p, min_p, repeat_penalty, top_k, seed)
        message = _Message()
        handle = _sampler_new(ctypes.byref(options), *message.arguments())
        message.check(handle)
        self._handle = handle

    def __del__(self):
        if self._handle:
            _sampler_free(self._handle)

    def accept(self, token: int) -> None:
        _sampler_accept(self._handle, token)

    def next(self, logits) -> int:
        return _sampler_next(self._handle, logits, len(logits))


class Session:
    """One sequence of tokens and the states of all layers behind it; made by Model.start."""

    def __init__(self, model, handle):
        self.model, self._handle = model, handle

    def __del__(self):
        if self._handle:
            _session_free(self._handle)

    def prefill(self, tokens: Sequence[int]):
        """Feeds tokens; the logits behind the last one."""
        logits = (ctypes.c_float * self.model.vocabulary)()
        message = _Message()
        message.check(_session_prefill(self._handle, _ids(tokens), len(tokens), logits, *message.arguments()) == 0)
        return logits

    def decode(self, token: int):
        return self.prefill([token])

    @property
    def position(self) -> int:
        return _session_position(self._handle)

    @property
    def state_bytes(self) -> int:
        return _session_state_bytes(self._handle)

    def copy(self) -> "Session":
        message = _Message()
        handle = _session_copy(self._handle, *message.arguments())
        message.check(handle)
        return Session(self.model, handle)

    def save(self, path) -> None:
        message = _Message()
        message.check(_session_save(self._handle, os.fsencode(path), *message.arguments()) == 0)

    def restore(self, path) -> None:
        message = _Message()
        message.check(_session_restore(self._handle, os.fsencode(path), *message.arguments()) == 0)


def decode(sessions: Sequence[Session], tokens: Sequence[int]):
    """One token for each of several sessions of one model, in one call: logits [sessions, vocabulary] as one array."""
    handles = (ctypes.c_void_p * len(sessions))(*[session._handle for session in sessions])
    logits = (ctypes.c_float * (len(sessions) * (sessions[0].model.vocabulary if sessions else 0)))()
    message = _Message()
    message.check(_session_decode(handles, _ids(tokens), len(tokens), logits, *message.arguments()) == 0)
    return logits


class Chat:
    """A conversation in the model's own form; made by Model.chat."""

    def __init__(self, model, system, sampler):
        self.model, self.session, self._system, self._sampler = model, model.start(), system, sampler

    def ask(self, text: str, tokens: int = 256, stop: Sequence[str] = ()):
        """Yields the answer piece by piece; it ends before any text of `stop`."""
        first = self.session.position == 0
        system = None if self._system is None else self._system.encode()
        room = 8 * len(text.encode()) + 4096
        ids, message = (ctypes.c_int32 * room)(), _Message()
        count = _model_chat(self.model._handle, system, text.encode(), first, ids, room, *message.arguments())
        message.check(count >= 0)
        yield from self.model._continue(self.session, ids[:count], self._sampler, tokens, stop)


class Model:
    """A model on disk, ready to run; made by load()."""

    def __init__(self, handle):
        self._handle = handle
        self.vocabulary, self.context = _model_vocabulary(handle), _model_context(handle)
        self.hidden, self.classes = _model_hidden(handle), _model_classes(handle)
        self.tokenizer = Tokenizer._of_model(self) if _model_tokenizer(handle) else None

    def __del__(self):
        if self._handle:
            _model_free(self._handle)

    def is_end(self, token: int) -> bool:
        return bool(_model_is_end(self._handle, token))

    def start(self) -> Session:
        message = _Message()
        handle = _session_start(self._handle, *message.arguments())
        message.check(handle)
        return Session(self, handle)

    def _call(self, name, tokens, size):
        out, message = (ctypes.c_float * size)(), _Message()
        message.check(_model_calls[name](self._handle, _ids(tokens), len(tokens), out, *message.arguments()) == 0)
        return out

    def logits(self, tokens: Sequence[int]):
        """Logits of every token, [tokens, vocabulary] as one array."""
        return self._call("logits", tokens, len(tokens) * self.vocabulary)

    def states(self, tokens: Sequence[int]):
        """The final hidden state of every token, [tokens, hidden] as one array."""
        return self._call("states", tokens, len(tokens) * self.hidden)

    def losses(self, tokens: Sequence[int]):
        """-log p of every token but the first."""
        return self._call("losses", tokens, max(len(tokens) - 1, 0))

    def embed(self, text: str):
        """A text as a vector of length one, by an encoder."""
        return self._call("embed", self.tokenizer.encode(text, parse_special=False), self.hidden)

    def classify(self, pixels):
        """Logits of the classes of one image, numbers [channels, height, width] in one sequence."""
        data = (ctypes.c_float * len(pixels))(*pixels)
        out, message = (ctypes.c_float * (self.classes or self.hidden))(), _Message()
        message.check(_model_classify(self._handle, data, len(data), out, *message.arguments()) == 0)
        return out

    def _continue(self, session, ids, sampler, tokens, stop=()):
        stop = [stop] if isinstance(stop, str) else list(stop)
        if "" in stop:
            raise ValueError("stop holds an empty text")
        logits = session.prefill(ids)
        for token in ids:
            sampler.accept(token)
        made, shown = [], 0
        ends = {self.tokenizer.encode(name, add_special=False)[0] for name in ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")
                if len(self.tokenizer.encode(name, add_special=False)) == 1}  # fmt: skip
        while len(made) < tokens:
            token = sampler.next(logits)
            if self.is_end(token) or token in ends:
                break
            sampler.accept(token)
            made.append(token)
            text = self.tokenizer.decode(made)
            found = [at for at in (text.find(each) for each in stop) if at >= 0]
            if found:
                yield text[shown : min(found)]
                return
            # What may be the beginning of a stop waits.
            waits = max((n for each in stop for n in range(1, len(each)) if text.endswith(each[:n])), default=0)
            if not text.endswith("\ufffd"):
                yield text[shown : len(text) - waits]
                shown = max(shown, len(text) - waits)
            if session.position >= self.context:
                break
            logits = session.decode(token)
        yield self.tokenizer.decode(made)[shown:]

    def generate(self, prompt: str, tokens: int = 256, stop: Sequence[str] = (), **sampling) -> str:
        """The text behind a prompt, at most up to a text of `stop`; sampling as in Sampler."""
        ids = self.tokenizer.encode(prompt, parse_special=False)
        return "".join(self._continue(self.start(), ids, Sampler(**sampling), tokens, stop))

    def info(self) -> dict:
        """What `linnet info MODEL --json` prints: family, parameters, memory, state, blocks."""
        size = _model_json(self._handle, None, 0)
        text = ctypes.create_string_buffer(size)
        _model_json(self._handle, text, size)
        return json.loads(text.raw)

    def evaluate(self, text: str, length: int = 0, stride: int = 0, tokens: int = 0) -> dict:
        """Perplexity and bits per byte of a text, as `linnet eval MODEL --text`."""
        data, score, message = text.encode(), _TextScore(), _Message()
        message.check(_model_score(self._handle, data, len(data), length, stride, tokens, score, *message.arguments()) == 0)
        return {name: getattr(score, name) for name, _ in _TextScore._fields_}

    def recall(self, length: int, trials: int = 10, seed: int = 0) -> dict:
        """How many of `trials` pass keys and associations are found again in prompts of `length` tokens, as `linnet eval --recall`."""
        passkeys, associations, message = ctypes.c_int64(), ctypes.c_int64(), _Message()
        message.check(_model_recall(self._handle, length, trials, seed, passkeys, associations, *message.arguments()) == 0)
        return {"passkey": passkeys.value, "associative": associations.value}

    def chat(self, system: str | None = None, **sampling) -> Chat:
        return Chat(self, system, Sampler(**sampling))


def load(path, weights: str | None = None, threads: int = 0, attention: str | None = None) -> Model:
    """The model in a folder (config.json and safetensors) or a GGUF file. weights: f32, bf16, q8, q4, or as in the file.
    attention: f32 or bf16, what softmax attention computes in and its cache holds (f32 with f32 matrices)."""
    message = _Message()
    options = _Options(weights.encode() if weights else None, attention.encode() if attention else None, threads)
    handle = _model_load(os.fsencode(path), options, *message.arguments())
    message.check(handle)
    return Model(handle)


def dequantize(kind: str, data: bytes, elements: int) -> list[float]:
    """Blocks of a GGUF tensor (kind "Q4_K", ...) as floats, a ctypes array."""
    out = (ctypes.c_float * elements)()
    message = _Message()
    message.check(_dequantize(kind.encode(), data, elements, out, *message.arguments()) == 0)
    return out
