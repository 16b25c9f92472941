"""What linnet.train learns from: the tasks of linnet.tasks as batches, with their loss and their measures.

    task = Task("mqar", {"length": "64,128", "pairs": "4,8"}, {}, examples=20000, eval_examples=1000, seed=0)
    inputs, targets, extra, where = task.split("train", batch=64).step(0)

A comma in an option makes a mixture: one part for each value, batches from one part each. How a model answers is one of five
kinds: tokens (a class at every labelled position), classes (one for the sequence), compress (all tokens from the last hidden
state), series (real numbers in and out) and regression (the last number of a prompt of vectors).
"""

import contextlib
import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import nn

import linnet.nn

from . import tasks

IGNORED = -100


@dataclasses.dataclass
class Kind:
    """A task of linnet.tasks as something to train: which tensors are read, how large the vocabulary is, and its protocols."""

    answer: str = "tokens"  # tokens, classes, compress, series, regression
    inputs: str = "inputs"
    targets: str = "targets"
    probe: str = ""  # the targets of evaluation where they differ
    vocab: int = 0  # 0: the task's option of that name
    classes: int = 0
    pad: int = -1  # a token that pooled features leave out
    small: dict = dataclasses.field(default_factory=dict)  # settings that minutes of a CPU allow
    full: dict = dataclasses.field(default_factory=dict)  # the paper's


_MAD = {"layers": 2, "width": 128, "norm": "layer", "mlp": "glu", "batch": 128, "lr": 1e-3}
_MAD_SMALL = {**_MAD, "examples": 12800, "eval_examples": 512, "steps": 400}
_MAD_FULL = {**_MAD, "examples": 12800, "eval_examples": 1280, "epochs": 200, "dtype": "bf16"}
KINDS = {
    "mqar": Kind(
        targets="labels",
        small={"length": 64, "pairs": 4, "vocab": 256, "mlp": "none", "examples": 20000, "steps": 600, "lr": 3e-3, "width": 64},
        full={"length": "64,128,256,256,256", "pairs": "4,8,16,32,64", "examples": "100000,20000,20000,20000,20000",
              "eval.length": "64,64,64,128,256,512,1024", "eval.pairs": "4,8,16,32,64,128,256", "vocab": 8192,
              "random_filler": 1, "batch": 256, "epochs": 32, "mlp": "none", "eval_examples": 1000, "stop_at": 0.99},
    ),
    "recall": Kind(targets="next", probe="probe", small=_MAD_SMALL, full=_MAD_FULL),
    "noisy_recall": Kind(targets="next", probe="probe", small=_MAD_SMALL, full=_MAD_FULL),
    "fuzzy_recall": Kind(targets="next", probe="probe", small=_MAD_SMALL, full=_MAD_FULL),
    "memorisation": Kind(small={**_MAD_SMALL, "examples": 256}, full={**_MAD_FULL, "examples": 256}),
    "compression": Kind(answer="compress", targets="inputs", small=_MAD_SMALL, full=_MAD_FULL),
    "selective_copy": Kind(small=_MAD_SMALL, full=_MAD_FULL),
    "listops": Kind(
        answer="classes", inputs="ids", targets="value", vocab=17, classes=10, pad=0,
        small={"min_length": 5, "max_length": 60, "max_depth": 5, "max_args": 5, "mlp": "glu", "examples": 20000, "steps": 1000},
        full={"examples": 96000, "eval_examples": 2000, "width": 512, "layers": 4, "heads": 8, "batch": 32, "steps": 5000, "mlp": "plain", "expand": 2.0},
    ),
    "regbench": Kind(
        vocab=20,
        small={"examples": 2000, "eval_examples": 100, "words": 10, "max_word": 20, "mlp": "glu", "batch": 32, "steps": 500},
        full={"examples": 5000, "eval_examples": 500, "layers": 8, "width": 128, "heads": 2, "mlp": "glu", "batch": 32, "epochs": 200, "lr": 5e-4},
    ),
    "pathfinder": Kind(
        answer="classes", inputs="pixels", targets="label", vocab=256, classes=2,
        small={"examples": 4000, "size": 16, "dashes": 5, "distractors": 2, "mlp": "glu", "steps": 500},
        full={"examples": 160000, "eval_examples": 20000, "layers": 4, "mlp": "glu", "epochs": 50},
    ),
    "images": Kind(
        answer="classes", inputs="pixels", targets="label", vocab=256, classes=10,
        small={"examples": 10000, "mlp": "glu", "steps": 500}, full={"examples": 60000, "eval_examples": 10000, "layers": 4, "mlp": "glu", "epochs": 50},
    ),
    "text": Kind(
        vocab=256,
        small={"length": 128, "layers": 2, "mlp": "glu", "batch": 16, "steps": 300, "eval_examples": 64},
        full={"length": 512, "layers": 4, "width": 256, "heads": 4, "mlp": "glu", "batch": 32, "steps": 5000, "warmup": 200, "eval_examples": 2000},
    ),
    "documents": Kind(answer="classes", targets="label", vocab=256, classes=2, small={"length": 256, "examples": 4000, "mlp": "glu"},
                      full={"length": 1000, "examples": 20000, "layers": 4, "width": 256, "heads": 4, "mlp": "plain", "steps": 20000}),
    "icl": Kind(answer="regression", small={"mlp": "none", "batch": 64, "steps": 500}, full={"mlp": "none", "layers": 1, "batch": 256, "steps": 20000}),
    "channel_max": Kind(answer="regression", small={"mlp": "none", "layers": 1, "width": 64, "heads": 4, "batch": 64, "steps": 1000, "lr": 3e-3},
                        full={"mlp": "none", "layers": 1, "width": 128, "heads": 4, "channels": 32, "length": 64, "batch": 256, "steps": 10000}),
    "forecast": Kind(answer="series", small={"mlp": "glu", "batch": 32, "steps": 300, "lr": 1e-3}, full={"mlp": "glu", "batch": 32, "epochs": 10, "lr": 1e-3}),
}  # fmt: skip


# Tasks of real numbers are drawn here, which the papers leave to the framework's generator: options and their defaults.
OWN_OPTIONS = {
    "icl": {"dims": 5, "prompts": 20, "noise": 0.0, "drift": 1.0, "spectrum": 1.0, "retrieval": 0.0, "alignment": 0.0},
    "channel_max": {"channels": 16, "length": 32},
    "listops": {"tree": 0},  # 1: hierarchical attention sees the expression's own tree instead of windows
    "images": {"patch": 0},  # beside those of the library: squares of so many pixels are the tokens; 0: pixels are
}
# Least and greatest; otherwise 1 to 10000, or 0 to 10000 where the default is 0.
OWN_RANGES = {"drift": (0, 1), "spectrum": (1e-6, 1), "retrieval": (0, 1), "alignment": (0, 100)}


def draw_icl(generator, examples, dims, prompts, noise, drift=1.0, spectrum=1.0, retrieval=0.0, alignment=0.0):
    """Prompts (x_1, y_1) .. (x_n, y_n), (x, 0) with y = w.x + noise: x, w normal, w another one for each prompt. [N, n + 1, d + 1], [N, 1].

    The designs of the theory (linnet analyze icl): w drifts along the prompt, with correlation `drift` from one example to the next; its variances fall
    by `spectrum` from one direction to the next (their sum stays d); examples are near the query x, with correlation `retrieval`; features
    point towards w, x = alignment w + normal, and y is divided by the root of alignment^2 d + 1."""
    w = torch.randn(examples, dims, 1, generator=generator)
    x = torch.randn(examples, prompts + 1, dims, generator=generator)
    error = noise * torch.randn(examples, prompts + 1, 1, generator=generator)
    w = w.transpose(1, 2).repeat(1, prompts + 1, 1)  # [N, n + 1, d], one for each example
    if drift < 1:
        fresh = math.sqrt(1 - drift**2) * torch.randn(examples, prompts + 1, dims, generator=generator)
        for i in range(1, prompts + 1):
            w[:, i] = drift * w[:, i - 1] + fresh[:, i]
    if spectrum < 1:
        falling = spectrum ** torch.arange(dims, dtype=torch.float64)
        w = w * (falling * dims / falling.sum()).sqrt().float()
    if retrieval > 0:
        x[:, :-1] = retrieval * x[:, -1:] + math.sqrt(1 - retrieval**2) * x[:, :-1]
    if alignment > 0:
        x = x + alignment * w
    y = (x * w).sum(-1, keepdim=True) / math.sqrt(alignment**2 * dims + 1) + error
    inputs = torch.cat([x, y], -1)
    inputs[:, -1, -1] = 0
    return inputs, y[:, -1]


def draw_channel_max(generator, examples, channels, length):
    """Tokens of normal numbers; the answer is each channel's largest number. [N, T, channels + 1], [N, channels].

    One more channel puts all tokens on a sphere (nearly: chance leaves it about once in 10^9 draws of 16 channels), so that the norms
    in front of a layer take nothing away."""
    values = torch.randn(examples, length, channels, generator=generator)
    rest = (4 * channels - values.square().sum(-1, keepdim=True)).clamp(min=0).sqrt()
    return torch.cat([values, rest], -1), values.amax(1)


DRAWS = {"icl": draw_icl, "channel_max": draw_channel_max}


def declared_options(name):
    """The options that a user may set: not those that the loop itself decides."""
    decided = {"split", "examples", "independent", "cut", "text", "seed"}
    library = tasks.DECLARATIONS.get(name, {"options": []})["options"]
    return [*(option["name"] for option in library if option["name"] not in decided), *OWN_OPTIONS.get(name, {})]


def own_options(name, options):
    """The values of a task's options that are declared here, taken out of `options`."""
    values = {}
    for key, default in OWN_OPTIONS.get(name, {}).items():
        text = str(options.pop(key, default))
        least, most = OWN_RANGES.get(key, (0 if default == 0 else 1, 10000))
        try:
            values[key] = type(default)(text)
        except ValueError:
            raise ValueError(f"{name}: {key} is {text!r}, expected a number") from None
        if not least <= values[key] <= most:
            raise ValueError(f"{name}: {key} is {text}, expected {least:g} to {most:g}")
    return values


def expression_tree(ids):
    """A ListOps expression, with its end, as a tree of its tokens: parent of each node, -1 for the root, the last (linnet.hierarchical)."""
    parent, families = [-1] * len(ids), [[]]
    for place, token in enumerate(ids):
        if 2 <= token <= 5:  # [MIN [MAX [MED [SM
            families.append([])
        families[-1].append(place)
        if token == 6 and len(families) > 1:  # ]: the node of all since the operator
            for child in families.pop():
                parent[child] = len(parent)
            families[-1].append(len(parent))
            parent.append(-1)
    if len(families) > 1 or len(families[0]) > 1:
        for child in (child for family in families for child in family):
            parent[child] = len(parent)
        parent.append(-1)
    return parent


def patches(pixels, size):
    """Square images [N, pixels] -> [N, squares, size^2], row by row, from -0.5 to 0.5."""
    side = math.isqrt(pixels.shape[1])
    if side * side != pixels.shape[1] or side % size:
        raise ValueError(f"images: patch is {size}, expected a divisor of the side of square images; they have {pixels.shape[1]} pixels")
    cut = pixels.reshape(-1, side // size, size, side // size, size).transpose(2, 3)
    return cut.reshape(len(pixels), -1, size * size).float() / 255 - 0.5


@dataclasses.dataclass
class Part:
    """Examples of one shape: inputs [N, T], targets [N, T], [N, M] or [N], and what a measure needs beside them."""

    label: str
    inputs: torch.Tensor
    targets: torch.Tensor
    extra: torch.Tensor | None = None
    where: torch.Tensor | None = None  # [N, M]: the positions of the targets, where not every token has one
    _there: dict = dataclasses.field(default_factory=dict, repr=False)

    def __len__(self):
        return len(self.inputs)

    def take(self, index):
        def of(tensor):
            taken = tensor[index]
            return taken if taken.is_floating_point() else taken.long()

        return tuple(None if each is None else of(each) for each in (self.inputs, self.targets, self.extra, self.where))

    def on(self, device):
        """The same examples in the memory of a device, copied once."""
        if self.inputs.device == device:
            return self
        if device not in self._there:
            tensors = [None if each is None else each.to(device) for each in (self.inputs, self.targets, self.extra, self.where)]
            if device.type == "cuda":
                torch.cuda.current_stream().synchronize()  # runs on other streams read them, too
            self._there[device] = Part(self.label, *tensors)
        return self._there[device]


def asked_alone(targets):
    """Targets [N, T], most of them not asked -> the asked ones [N, M] and their positions [N, M]. A row that asks less than another is
    filled up with positions that are not asked, so that shapes do not depend on the row."""
    asked = targets != IGNORED
    most = int(asked.sum(1).max()) if targets.numel() else 0
    if most == targets.shape[1]:
        return targets, None
    where = asked.to(torch.uint8).argsort(stable=True, dim=1, descending=True)[:, :most]
    return targets.gather(1, where), _smallest(where)


class Parts(list):
    """The parts of a split. Which examples step s sees follows from seed and s alone: a run can go on from any step."""

    def __init__(self, parts, batch=0, seed=0):
        super().__init__(parts)
        self.batch, self.seed, self._epoch, self._order = batch, seed, -1, []
        self.per_epoch = sum(len(part) // batch for part in self) if batch else 0

    def rows(self, step):
        """The number of the part and the examples of it [batch] that a step sees."""
        epoch, place = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            chance = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
            order = []
            for number, part in enumerate(self):
                mixed = torch.randperm(len(part), generator=chance)
                order += [(number, mixed[i : i + self.batch]) for i in range(0, len(part) - self.batch + 1, self.batch)]
            self._order = [order[i] for i in torch.randperm(len(order), generator=chance)]
            self._epoch = epoch
        return self._order[place]

    def step(self, step):
        number, index = self.rows(step)
        return self[number].take(index)


def _smallest(tensor):
    """Tokens in as few bytes as they need: a text of 100 MB stays one of 100 MB."""
    if tensor.is_floating_point():
        return tensor.float()
    low, high = (int(tensor.min()), int(tensor.max())) if tensor.numel() else (0, 0)
    for dtype in (torch.uint8, torch.int16, torch.int32):
        limits = torch.iinfo(dtype)
        if limits.min <= low and high <= limits.max:
            return tensor.to(dtype)
    return tensor


class Task:
    """A task by its name with its options (texts); eval_options replace some of them where it is evaluated.

    whole: targets keep a place for every token, as sequences that are split over processes want it."""

    def __init__(self, name, options, eval_options, *, examples, eval_examples, seed, whole=False):
        self.name, self.kind, self.seed, self.whole = name, KINDS[name], seed, whole
        self.options, self.eval_options = options, eval_options
        self.examples, self.eval_examples = str(examples), str(eval_examples)
        self.drawn = any(option["name"] == "examples" for option in tasks.DECLARATIONS.get(name, {"options": []})["options"])
        self.parts = {}

    @property
    def reads_numbers(self):
        """Tokens are vectors of real numbers, not symbols."""
        return self.kind.answer in ("series", "regression") or int(self.options.get("patch", 0)) > 0

    @property
    def vocab(self):
        if self.reads_numbers:
            return 0
        if self.kind.vocab:
            return self.kind.vocab
        default = next(option["default"] for option in tasks.DECLARATIONS[self.name]["options"] if option["name"] == "vocab")
        return max(int(text) for text in str(self.options.get("vocab", default)).split(","))

    @property
    def measures(self):
        """Names of the sums that the model returns behind the loss, and which of them is the score: the larger the better."""
        if self.kind.answer in ("series", "regression"):
            return ["mse", "mae"], "mse", -1
        if self.name == "text":
            return ["bits_per_byte", "accuracy"], "bits_per_byte", -1
        return (["loss", "accuracy", "distance"] if self.name == "regbench" else ["loss", "accuracy"]), "accuracy", 1

    def split(self, split, batch=0):
        if split not in self.parts:
            options = dict(self.options)
            if split != "train":
                options.update(self.eval_options)
            listed = {key: str(value).split(",") for key, value in options.items() if "," in str(value)}
            count = max([len(values) for values in listed.values()], default=1)
            for key, values in listed.items():
                if len(values) != count:
                    raise ValueError(f"{key} has {len(values)} values, but the mixture has {count} parts")
            counts = (self.examples if split == "train" else self.eval_examples).split(",")
            if len(counts) not in (1, count):
                raise ValueError(f"examples has {len(counts)} values, but the mixture has {count} parts")
            parts = []
            for i in range(count):
                chosen = {key: listed[key][i] if key in listed else value for key, value in options.items()}
                label = " ".join(f"{key}={listed[key][i]}" for key in listed)
                parts.append(self._make(split, chosen, int(counts[i % len(counts)]), label))
            self.parts[split] = parts
        return Parts(self.parts[split], batch, self.seed)

    def _make(self, split, options, examples, label):
        kind = self.kind
        if self.name == "forecast":
            made = tasks.make(self.name, **options, split=split, **({} if options.get("path") else {"seed": self.seed}))
            part = ("train", "valid", "test").index(split)
            begin, end = made.parts[part].tolist()
            past, rows = (int(options.get(key, 96)) for key in ("lookback", "horizon"))
            # Channels are series of their own that share the model: [windows, C, past + rows] -> [windows C, past + rows].
            cut = made.scaled[begin:end].float()
            cut = cut.unfold(0, past + rows, 1).flatten(0, 1) if made.windows[part] > 0 else cut.new_zeros(0, past + rows)
            inputs, targets = cut[:, :past], cut[:, past:]
            return Part(label, *self._some(split, examples, inputs, targets))
        if self.name in DRAWS:
            chance = torch.Generator().manual_seed(3 * self.seed + ("train", "valid", "test").index(split))
            return Part(label, *DRAWS[self.name](chance, examples, **own_options(self.name, options)))
        if self.name == "images":
            return self._images(split, options, examples, label)
        own_options(self.name, options)
        # One running stream for each split. With independent streams example j of validation (seed + 1 + j) would be example
        # j + 1 of training.
        drawn = {"examples": examples, "seed": self.seed} if self.drawn else {}
        made = tasks.make(self.name, **options, split=split, **drawn)
        inputs = _smallest(getattr(made, kind.inputs))
        targets = _smallest(getattr(made, kind.probe if kind.probe and split != "train" else kind.targets))
        extra = made.legal.to(torch.uint8) if self.name == "regbench" and split != "train" else None
        if not self.drawn:
            inputs, targets = self._some(split, examples, inputs, targets)
        where = None
        if kind.answer == "tokens" and not self.whole:
            targets, where = asked_alone(targets)
        return Part(label, inputs, targets, extra, where)

    def _some(self, split, examples, *tensors):
        """Of a file all windows are for training; of the others as many as asked for, evenly taken."""
        count = len(tensors[0])
        if split == "train" or examples >= count:
            return tensors
        index = torch.arange(examples) * count // examples
        return tuple(tensor[index] for tensor in tensors)

    def _images(self, split, options, examples, label):
        """Without files of their own, the last tenths of the images are for validation and test."""
        patch = own_options(self.name, options)["patch"]
        made = tasks.make(self.name, **options)
        pixels, labels = patches(made.pixels, patch) if patch else made.pixels, _smallest(made.label)
        if split == "train" or not self.eval_options:
            tenth = len(pixels) // 10
            ends = {"train": (0, len(pixels) - (0 if self.eval_options else 2 * tenth)), "valid": (len(pixels) - 2 * tenth, len(pixels) - tenth),
                    "test": (len(pixels) - tenth, len(pixels))}  # fmt: skip
            pixels, labels = (x[slice(*ends[split])] for x in (pixels, labels))
        if split == "train":
            return Part(label, pixels[:examples], labels[:examples])
        return Part(label, *self._some(split, examples, pixels, labels))


class Answer(nn.Module):
    """A model with the head and the loss of a task. forward gives sums over the examples: the loss, then the task's measures."""

    def __init__(self, task, body, width):
        super().__init__()
        self.kind, self.is_regbench = task.kind, task.name == "regbench"
        self.has_trees = task.name == "listops" and str(task.options.get("tree", 0)) != "0"
        self.model = body
        first = task.split("train")[0]
        if task.reads_numbers:
            self.value = nn.Linear(first.inputs.shape[2] if first.inputs.dim() == 3 else 1, width)
            body.embed_tokens.requires_grad_(False)  # the table of tokens takes no part
        match task.kind.answer:
            case "classes":
                self.head = nn.Linear(width, task.kind.classes)
            case "series":
                self.head = nn.Linear(width, first.targets.shape[1])
                nn.init.zeros_(self.head.weight)  # begins as repeating the last value
                nn.init.zeros_(self.head.bias)
            case "regression":
                self.head = nn.Linear(width, first.targets.shape[1])
            case "compress":  # MAD's decoder: the last hidden state, with a sinusoid for each position
                steps = [(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(2)]
                self.decoder = nn.Sequential(*steps[0], *steps[1], nn.LayerNorm(width), nn.Linear(width, task.vocab))

    def forward(self, inputs, targets, extra=None, where=None):
        return getattr(self, "_" + self.kind.answer)(inputs, targets, extra, where)

    def _tokens(self, inputs, targets, extra, where):
        hidden = self.model.hidden(inputs)
        if where is not None:  # the vocabulary is wide: logits only where something is asked
            rows = (where + inputs.shape[1] * torch.arange(len(where), device=where.device)[:, None]).flatten()
            hidden = hidden.flatten(0, 1)[rows]
        logits = self.model.logits(hidden).float().flatten(0, -2)
        targets = targets.flatten()
        loss = F.cross_entropy(logits, targets, reduction="sum")  # ignores what is not asked
        best = logits.argmax(-1)
        if not self.is_regbench or extra is None:
            return loss, _sums(loss, best == targets, *([] if not self.is_regbench else [torch.zeros_like(loss)]))
        # extra [B, T, 18]: the symbols that may stand at a position; the target of position t stands at t + 1.
        legal = F.pad(extra[:, 1:], (0, 2, 0, 1)).flatten(0, 1)
        asked = targets != IGNORED
        legal = (legal if where is None else legal[rows])[asked].float()
        distance = (logits[asked].softmax(-1) - legal / legal.sum(-1, keepdim=True)).abs().sum() / 2
        return loss, _sums(loss, legal.gather(-1, best[asked][:, None]) > 0, distance)

    def _classes(self, inputs, targets, extra, where):
        mask = None if self.kind.pad < 0 else inputs != self.kind.pad
        with linnet.nn.trees([expression_tree(row[row > 0].tolist()) for row in inputs]) if self.has_trees else contextlib.nullcontext():
            hidden = self.model.hidden(self.value(inputs) if inputs.is_floating_point() else inputs, mask=mask)
        counts = hidden.new_ones(hidden.shape[:2]) if mask is None else mask.to(hidden.dtype)
        pooled = (hidden * counts[..., None]).sum(1) / counts.sum(1, keepdim=True)
        logits = self.head(pooled).float()
        loss = F.cross_entropy(logits, targets, reduction="sum")
        return loss, _sums(loss, logits.argmax(-1) == targets)

    def _compress(self, inputs, targets, extra, where):
        last = self.model.hidden(inputs)[:, -1:]
        logits = self.decoder(last + sinusoids(inputs.shape[1], last.shape[-1], last.device)).float()
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return loss, _sums(loss, logits.argmax(-1) == targets)

    def _from_numbers(self, embedded):
        return self.head(self.model.hidden(embedded)[:, -1]).float()

    def _regression(self, inputs, targets, extra, where):
        error = self._from_numbers(self.value(inputs)) - targets
        loss = error.square().sum()
        return loss, _sums(loss, error.abs())

    def _series(self, inputs, targets, extra, where):
        level = inputs[:, -1:]  # NLinear's idea: what is learned is the change
        error = (self._from_numbers(self.value((inputs - level)[..., None])) + level) - targets
        loss = error.square().sum()
        return loss, _sums(loss, error.abs())

    def count(self, targets):
        """How many numbers the sums of forward are over, on the device of the targets."""
        return (targets != IGNORED).sum() if self.kind.answer == "tokens" else torch.full((), targets.numel(), device=targets.device)


def _sums(loss, *others):
    return torch.stack([loss.detach().double(), *(other.detach().double().sum() for other in others)])


def sinusoids(length, width, device):
    angle = torch.arange(length, device=device)[:, None] * torch.exp(torch.arange(0, width, 2, device=device) * (-math.log(10000) / width))
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :width]
