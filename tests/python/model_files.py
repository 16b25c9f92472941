"""The files that tests of real models may have: what tools/fetch.py puts into the cache."""

import os
import pathlib

import pytest

CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "linnet"
SMOLLM2 = CACHE / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
MINILM = CACHE / "minilm"
WIKITEXT = CACHE / "wikitext2" / "test.raw"


def need(path: pathlib.Path) -> pathlib.Path:
    """The path, or a skipped test where it was not fetched."""
    if not path.exists():
        pytest.skip(f"{path.name} is not here; tools/fetch.py fetches it")
    return path


def wikitext() -> str:
    return need(WIKITEXT).read_text()
