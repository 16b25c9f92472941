"""What the tests of the runtime share: the module under test, and the files they may fetch."""

import os
import pathlib

import pytest
from conftest import BUILD  # noqa: F401
from linnet import runtime  # noqa: F401

CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache")) / "linnet"
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
