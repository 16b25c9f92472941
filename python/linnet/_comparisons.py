"""The papers' comparisons at a size that one core does in minutes (linnet.results): tasks, rows, and what is measured beside the score."""

import dataclasses
import os
import pathlib
import time
import types

import torch

from . import nn, tasks
from ._ops import FUNCTIONS

DATA = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "linnet"


@dataclasses.dataclass
class Comparison:
    """A claim and the runs that test it."""

    claim: str
    columns: dict  # label: (task, settings)
    arms: dict  # label: (layer, settings)
    rates: tuple = (3e-3, 1e-2)
    seeds: int = 3
    data: tuple = ()  # files below DATA that it reads, which tools/fetch.py brings
    measure: object = None  # beside the score, of a trained Run: {name: number}
    reference: object = None  # rows that are not trained: columns -> {label: [a number for each column]}


def nlinear(columns):
    """NLinear by least squares: one matrix from the past to the future, each less the last value of the past."""
    repeated, fitted = [], []
    for _, words in columns.values():
        options = {key: words[key] for key in ("path", "protocol", "lookback", "horizon") if key in words}
        known, wanted = {}, {}
        for split in ("train", "test"):
            made = tasks.make("forecast", **options, split=split, cut=True)
            inputs, targets = (x.transpose(1, 2).flatten(0, 1).double() for x in (made.inputs, made.targets))
            known[split], wanted[split] = inputs - inputs[:, -1:], targets - inputs[:, -1:]
        matrix = torch.linalg.lstsq(known["train"], wanted["train"]).solution
        fitted.append(float((known["test"] @ matrix - wanted["test"]).square().mean()))
        repeated.append(float(wanted["test"].square().mean()))
    return {"NLinear, least squares": fitted, "the last value repeated": repeated}


@torch.no_grad()
def attention_sinks(run):
    """Of a model of softmax attention on test windows: the share of attention on the first token, the largest number between blocks."""
    shares, model = [], run.plain.model

    def looked_at(name):
        def call(q, k, v, **rest):
            scores = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            weights = scores.masked_fill(later, -torch.inf).softmax(-1)
            shares.append(weights[..., 1:, 0].mean())  # the first token has no choice
            return FUNCTIONS[name](q=q, k=k, v=v, **rest)

        return call

    functions = {"linnet": types.SimpleNamespace(**{**FUNCTIONS, "softmax": looked_at("softmax"), "gated": looked_at("gated")})}
    model.eval()
    for block in model.layers:
        layer = block.self_attn
        layer.forward = nn._compiled(type(layer).__name__, layer.code, functions).__get__(layer)
    inputs = run.task.split("test")[0].take(slice(0, run.settings.batch))[0]
    between = model.hidden(inputs.to(run.device), every=True)[:, :, :-1]  # what each block reads
    return {"attention on the first token": float(torch.stack(shares).mean()), "largest activation": float(between.abs().max())}


def over_length(run):
    """Of a trained run: a training step's time for each token, and how far the loss of a window read token by token is from the loss at once."""
    clock = time.perf_counter if run.device.type == "cuda" else time.process_time  # of this process alone: the machine may be busy
    times = []
    for _ in range(3):
        start = clock()
        run.train_step()  # ends with numbers on the host
        times.append((clock() - start) / (run.settings.batch * run.length))
    model, count = run.plain.model.eval(), min(run.length, 512)
    inputs, targets = (each[:1, :count].to(run.device) for each in run.task.split("test")[0].take(slice(0, 1))[:2])
    with torch.no_grad():
        state = model.make_state(1, count)
        single = torch.stack([model.step(token, state) for token in inputs.T], 1)
        losses = [torch.nn.functional.cross_entropy(logits[0].double(), targets[0]) for logits in (model(inputs), single)]
    return {"us a token": 1e6 * min(times), "token by token, loss differs by": float((losses[1] - losses[0]).abs())}


SMALL = {"threads": 1, "log_every": 20}
MQAR = {**SMALL, "length": 32, "pairs": 8, "vocab": 64, "random_filler": 1, "width": 64, "heads": 2, "batch": 64, "steps": 600, "eval_every": 100,
        "checkpoint_every": 600, "examples": 40000, "eval_examples": 500, "weight_decay": 0, "stop_at": 0.99}  # fmt: skip
MAD = {**SMALL, "length": 32, "width": 64, "heads": 4, "batch": 32, "steps": 400, "eval_every": 400, "checkpoint_every": 400, "eval_examples": 512}
FORECAST = {**SMALL, "lookback": 96, "horizon": 96, "width": 16, "heads": 2, "layers": 2, "batch": 32, "steps": 500, "eval_every": 250,
            "checkpoint_every": 500, "eval_examples": 2100, "warmup": 30}  # fmt: skip
LISTOPS = {**SMALL, "layers": 3, "width": 64, "heads": 4, "positions": 64, "batch": 32, "steps": 800, "eval_every": 200, "checkpoint_every": 800}
IMAGES = {**SMALL, "path": DATA / "mnist/train-images-idx3-ubyte.gz", "labels": DATA / "mnist/train-labels-idx1-ubyte.gz",
          "eval.path": DATA / "mnist/t10k-images-idx3-ubyte.gz", "eval.labels": DATA / "mnist/t10k-labels-idx1-ubyte.gz", "patch": 4, "positions": 49,
          "layers": 3, "width": 48, "heads": 3, "norm": "layer", "mlp": "plain", "expand": 4, "batch": 64, "steps": 250, "eval_every": 250,
          "checkpoint_every": 250, "examples": 60000, "eval_examples": 2000}  # fmt: skip
TEXT = {**SMALL, "path": DATA / "enwik8/enwik8", "length": 128, "layers": 3, "width": 64, "heads": 2, "mlp": "glu", "batch": 16, "steps": 400,
        "eval_every": 400, "checkpoint_every": 400, "eval_examples": 256}  # fmt: skip

# One head, keys of 16 and values of 64: every recurrent arm carries 16 x 64 numbers in a block, beside the inputs of its short convolutions.
NORMALISERS = {**SMALL, "length": 32, "vocab": 64, "width": 64, "heads": 1, "batch": 64, "steps": 1500, "eval_every": 250, "checkpoint_every": 1500,
               "examples": 100000, "eval_examples": 500, "weight_decay": 0, "stop_at": 0.99}  # fmt: skip


def normalised(**options):
    """An arm of the framework's experiment: the same projections and convolutions, another normaliser."""
    return "normalised_attention", {f"layer.{key}": value for key, value in {"taps": 4, "key": 16, "value": 64, **options}.items()}


def behind_conv(layer, **options):
    """The published harder mixture has a gated short convolution in front of each mixer."""
    return f"short_conv,{layer}", options


COMPARISONS = {
    "channel_max": Comparison(
        "the free energy mixer reads each channel's largest past value in one layer; averages cannot",
        {"mse": ("channel_max", {**SMALL, "steps": 1500, "eval_every": 250, "checkpoint_every": 1500, "weight_decay": 0})},
        {
            "softmax_attention": ("softmax_attention", {"rope": "none"}),
            "softmax_attention-16-heads": ("softmax_attention", {"rope": "none", "heads": 16}),
            "linear_attention": ("linear_attention", {}),
            "gated_deltanet": ("gated_deltanet", {}),
            "zeros_attention": ("zeros_attention", {"rope": "none"}),
            "free_energy_mixer": ("free_energy_mixer", {"conv": 0, "rope": "none"}),
            "free_energy_mixer-lse=0": ("free_energy_mixer", {"conv": 0, "rope": "none", "lse": 0}),
        },
    ),
    "mqar": Comparison(
        "recall against the size of the state (Zoology)",
        {"accuracy": ("mqar", MQAR)},
        {
            "softmax_attention": behind_conv("softmax_attention", rope="none"),
            "softmax_attention-window-8": behind_conv("softmax_attention", rope="none", window="7,0"),
            "softmax_attention-window-16": behind_conv("softmax_attention", rope="none", window="15,0"),
            "linear_attention": behind_conv("linear_attention"),
            "taylor_attention": behind_conv("taylor_attention", key=8),
            "retention": behind_conv("retention"),
            "gated_linear_attention": behind_conv("gated_linear_attention"),
            "deltanet": behind_conv("deltanet"),
            "deltanet-8-heads": behind_conv("deltanet", heads=8),
            "gated_deltanet": behind_conv("gated_deltanet"),
            "gated_deltanet-8-heads": behind_conv("gated_deltanet", heads=8),
            "kda": behind_conv("kda"),
            "mamba2": behind_conv("mamba2", head=32, state=32),
            "mamba2-long-memory": behind_conv("mamba2", head=32, state=32, step_low=0.1, step_high=1, rate_low=0.05, rate_high=0.5),
            "metala_attention": behind_conv("metala_attention"),
            "zeros_attention": behind_conv("zeros_attention"),
            "free_energy_mixer": behind_conv("free_energy_mixer"),
        },
        rates=(1e-3, 3e-3),
        seeds=2,
    ),
    "normalisers": Comparison(
        "a learned normaliser brings linear attention nearer to softmax's recall, at the same state (Dynamical Systems Framework)",
        {"4 pairs": ("mqar", {**NORMALISERS, "pairs": 4}), "8 pairs": ("mqar", {**NORMALISERS, "pairs": 8})},
        {
            "softmax": normalised(normaliser="softmax"),
            "elu1-sum": normalised(normaliser="sum", map="elu1"),
            "elu1-none": normalised(normaliser="none", map="elu1"),
            "elu1-exp": normalised(normaliser="exp", map="elu1"),
            "identity-none": normalised(normaliser="none"),
            "identity-exp": normalised(normaliser="exp"),
            "identity-exp-offset-4": normalised(normaliser="exp", offset=-4),
            "mamba2": ("mamba2", {"layer.inner": 64, "layer.head": 64, "layer.state": 16}),
            "mamba1": ("mamba1", {"layer.inner": 64, "layer.state": 16}),
        },
        rates=(3e-3, 1e-2),
    ),
    "mad": Comparison(
        "FEM ahead of the Transformer, ZeroS ahead of linear attention (MAD)",
        {
            "compression": ("compression", MAD),
            "memorisation": ("memorisation", MAD),
        },
        {
            "softmax_attention": ("softmax_attention", {}),
            "linear_attention": ("linear_attention", {}),
            "gated_deltanet": ("gated_deltanet", {}),
            "metala_attention": ("metala_attention", {}),
            "zeros_attention": ("zeros_attention", {}),
            "zeros_attention-quadratic": ("zeros_attention", {"order": "quadratic"}),
            "zeros_attention-zeroth=1": ("zeros_attention", {"zeroth": 1}),
            "free_energy_mixer": ("free_energy_mixer", {}),
            "free_energy_mixer-gated": ("free_energy_mixer", {"prior": "gated"}),
            "free_energy_mixer-lse=0": ("free_energy_mixer", {"lse": 0}),
            "free_energy_mixer-conv=0": ("free_energy_mixer", {"conv": 0}),
        },
        rates=(3e-3,),
        seeds=2,
    ),
    "images": Comparison(
        "InLine: linear < softmax ~ InLine without its residual < InLine; the order of QT-ViT's kernels",
        {"MNIST": ("images", IMAGES)},
        {
            "softmax_attention": ("softmax_attention", {"causal": 0, "rope": "none"}),
            "linear_attention-relu": ("linear_attention", {"causal": 0, "map": "relu"}),
            "inline_attention-residual=0": ("inline_attention", {"causal": 0, "residual": 0}),
            "inline_attention": ("inline_attention", {"causal": 0, "layer.height": 7, "layer.width": 7}),
            "qt_attention": ("qt_attention", {"dim": 16, "tokens": 49}),
            "taylor_attention": ("taylor_attention", {"causal": 0}),
        },
        rates=(3e-3,),
        seeds=2,
        data=("mnist/train-images-idx3-ubyte.gz",),
    ),
    "listops": Comparison(
        "hierarchical attention on an expression's own tree ahead of flat softmax attention, with the same parameters",
        {"accuracy": ("listops", LISTOPS)},
        {
            "softmax_attention": ("softmax_attention", {"causal": 0, "rope": "none"}),
            "hierarchical_attention-windows": ("hierarchical_attention", {"causal": 0, "layer.tie": "block", "arity": 4}),
            "hierarchical_attention-tree": ("hierarchical_attention", {"causal": 0, "layer.tie": "block", "task.tree": 1}),
        },
        rates=(1e-3,),
        seeds=2,
    ),
    "forecast": Comparison(
        "FEM and ZeroS ahead of softmax attention on ETT, beside NLinear",
        {
            "ETTh1-96": ("forecast", {**FORECAST, "path": DATA / "ett/ETTh1.csv", "protocol": "ett_hour"}),
            "ETTm1-96": ("forecast", {**FORECAST, "path": DATA / "ett/ETTm1.csv", "protocol": "ett_minute"}),
        },
        {
            "softmax_attention": ("softmax_attention", {}),
            "zeros_attention": ("zeros_attention", {}),
            "free_energy_mixer": ("free_energy_mixer", {}),
        },
        rates=(1e-3, 3e-3),
        seeds=2,
        data=("ett/ETTh1.csv", "ett/ETTm1.csv"),
        reference=nlinear,
    ),
    "gated": Comparison(
        "a gate on the read (G1) lowers the loss, the first token's attention and the largest activation",
        {"bits-per-byte": ("text", TEXT)},
        {
            "softmax_attention": ("softmax_attention", {"qk_norm": "rms"}),
            "softmax_attention-G1": ("softmax_attention", {"qk_norm": "rms", "position": "G1", "expand": 5 / 3}),
        },
        rates=(3e-3,),
        data=("enwik8/enwik8",),
        measure=attention_sinks,
    ),
    "length": Comparison(
        "DeltaNet in parallel over length: time for a token flat, the same loss as token by token",
        {"bits-per-byte": ("text", {**TEXT, "layers": 2, "mlp": "none", "steps": 20, "warmup": 5, "eval_every": 20, "checkpoint_every": 20,
                                    "eval_examples": 4})},
        {
            f"{layer}-{length}": (layer, {"task.length": length, "batch": 8192 // length})
            for layer in ("deltanet", "softmax_attention")
            for length in (512, 2048, 8192)
        },
        rates=(3e-3,),
        seeds=1,
        data=("enwik8/enwik8",),
        measure=over_length,
    ),
    "text": Comparison(
        "bits per byte of every layer on enwik8",
        {"bits-per-byte": ("text", TEXT)},
        {
            name: (name, {})
            for name in ("softmax_attention", "linear_attention", "retention", "gated_linear_attention", "deltanet", "gated_deltanet", "kda", "mamba2",
                         "metala_attention", "zeros_attention", "free_energy_mixer", "gated_deltanet,softmax_attention")  # fmt: skip
        },
        rates=(3e-3,),
        seeds=1,
        data=("enwik8/enwik8",),
    ),
}  # fmt: skip
