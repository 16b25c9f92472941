"""The shapes of the results of a call, for torch's fake tensors. Sizes may be symbolic."""

import torch

from ._letters import Letters


class Shapes:
    """The shapes of one call of an operator."""

    def __init__(self, declaration, tensors, options):
        self.name = declaration["name"]
        self.letters = Letters(declaration["letters"], options)
        given = [(decl, tensor) for decl, tensor in zip(declaration["inputs"], tensors) if tensor is not None]
        packed = any(decl["values"] == "offsets" for decl, _ in given)
        self.packed_rank = False
        for decl, tensor in given:
            if not decl["broadcast"]:
                self._match(decl, tensor.shape, packed)
        first = given[0][1]
        self.other = "other_shape" in given[0][0] and len(first.shape) == len(given[0][0]["other_shape"])
        self.device, self.io = first.device, first.dtype
        self.acc = torch.float64 if self.io == torch.float64 else torch.float32

    def _match(self, decl, sizes, packed):
        shapes = [decl[key] for key in ("shape", "other_shape") if key in decl]
        # Of two shapes the rank alone does not tell whether the batch is missing: the tensors before it do.
        missing = len(sizes) == len(decl["shape"]) - 1 if len(shapes) == 1 else self.packed_rank
        if packed and decl["shape"][0] == "B" and missing:
            sizes = (1, *sizes)
            self.packed_rank = True
        words = next((words for words in shapes if len(words) == len(sizes)), None)
        if words is None:
            expected = " or ".join(f"[{', '.join(words)}]" for words in shapes)
            raise RuntimeError(f"{self.name}: {decl['name']} has shape {[int(s) for s in sizes]}, expected {expected}")
        for word, size in zip(words, sizes):
            letter, _, more = word.partition("+")
            if letter not in self.letters and (decl["values"] == "offsets" or not self.letters.knows(word)):
                self.letters[letter] = size - int(more or 0)  # "N+1" shows N
                continue
            torch._check(
                size == self.letters.evaluate(word),
                lambda: (
                    f"{self.name}: {decl['name']} has size {size} in dimension {word} of [{', '.join(words)}], "
                    f"expected {self.letters.evaluate(word)}"
                ),
            )

    def output(self, decl):
        """An empty tensor for an output."""
        words = decl["other_shape"] if self.other and "other_shape" in decl else decl["shape"]
        words = words[1:] if self.packed_rank and words[0] == "B" else words
        sizes = [self.letters.evaluate(word) for word in words]
        return torch.empty(sizes, dtype=self.dtype(decl), device=self.device)

    def dtype(self, decl):
        return {"acc": self.acc, "index": torch.int64}.get(decl["element"], self.io)

    def nothing(self, dtype):
        """What stands for a result that was not asked for."""
        return torch.empty(0, dtype=dtype, device=self.device)
