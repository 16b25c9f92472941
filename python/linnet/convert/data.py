"""Tokens for a conversion, in parts that share no document."""

import pathlib
import random

import torch

PARTS = ("calibration", "held_out", "fit", "finetune")


def tokenizer_of(path):
    """The tokenizer of a model's folder or GGUF file: Linnet's own."""
    from ..runtime import Tokenizer

    file = pathlib.Path(path) if pathlib.Path(path).suffix == ".gguf" else pathlib.Path(path) / "tokenizer.json"
    if not file.exists():
        raise FileNotFoundError(f"{path} has no tokenizer.json; give token numbers (ids) instead of text")
    return Tokenizer(file)


def encode(text, tokenizer):
    """Token numbers of a text, without what a prompt begins and ends with. Tokenizers of Linnet, tokenizers and transformers."""
    from ..runtime import Tokenizer

    if isinstance(tokenizer, Tokenizer):
        encoded = tokenizer.encode(text, add_special=False, parse_special=False)
    else:
        encoded = tokenizer.encode(text, add_special_tokens=False)
    return torch.tensor(encoded if isinstance(encoded, list) else encoded.ids, dtype=torch.long)


def read_text(path):
    try:
        return pathlib.Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as problem:
        raise ValueError(f"{path} is no UTF-8 text: byte {problem.start} is 0x{problem.object[problem.start]:02x}") from problem


def split(ids, seq, end=None, finetune_share=0.5, few=64):
    """Blocks [n, seq] of each part. The cuts are moved to the next end of a document where there is one."""
    if ids.dim() > 1:
        return _split_rows(ids, finetune_share, few)
    total = len(ids)
    if total < 4 * seq:
        raise ValueError(f"{total} tokens are too few for blocks of {seq}: at least {4 * seq} are needed")
    small = max(min(few * seq, total // 16), seq)
    rest = total - 2 * small
    edges = [0, small, 2 * small, 2 * small + max(int(rest * (1 - finetune_share)) // seq, 1) * seq, total]
    if end is not None:
        ends = (ids == end).nonzero().flatten() + 1
        for i in (1, 2, 3):
            after = ends[(ends >= edges[i]) & (ends < edges[i + 1] - seq)]
            if len(after):
                edges[i] = int(after[0])
    parts = {}
    for name, begin, stop in zip(PARTS, edges, edges[1:], strict=False):
        blocks = (stop - begin) // seq
        parts[name] = ids[begin : begin + blocks * seq].view(blocks, seq)
    return parts


def _split_rows(rows, finetune_share, few):
    """The same for inputs that are rows already: sentences of an encoder, images."""
    total = len(rows)
    if total < 4:
        raise ValueError(f"{total} inputs are too few: at least 4 are needed")
    small = max(min(few, total // 8), 1)
    cut = 2 * small + max(int((total - 2 * small) * (1 - finetune_share)), 1)
    return {"calibration": rows[:small], "held_out": rows[small : 2 * small], "fit": rows[2 * small : cut], "finetune": rows[cut:]}


class Order:
    """Which block comes when: every block once, in an order that the seed and the round give, then again."""

    def __init__(self, count, seed):
        self.count, self.seed, self.round, self.list = count, seed, -1, []

    def __getitem__(self, position):
        number, place = divmod(position, self.count)
        if number != self.round:
            self.round, self.list = number, list(range(self.count))
            random.Random(self.seed * 1_000_003 + number).shuffle(self.list)
        return self.list[place]

    def batch(self, step, size):
        return [self[step * size + i] for i in range(size)]
