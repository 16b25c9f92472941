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


def save_tokenizer(folder: pathlib.Path, vocabulary: int = 300) -> None:
    """A byte-level tokenizer that was trained on a sentence, as tokenizer.json of a model's folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  special_tokens=["<|end|>"], show_progress=False)  # fmt: skip
    tokenizer.train_from_iterator(["the linnet is a small finch of the open country " * 4], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
