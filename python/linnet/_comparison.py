"""What a comparison of linnet.results is, and what it measures beside the score."""

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
    published: dict = dataclasses.field(default_factory=dict)  # what the papers have, by row
    mean: bool = False  # the table has the mean of the columns, too


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


def seconds_of(run, steps):
    """How long so many more training steps take."""
    if run.graphs:
        torch.cuda.synchronize()
    clock = time.perf_counter if run.device.type == "cuda" else time.process_time  # of this process alone: the machine may be busy
    start = clock()
    for found in run.steps_until(run.step + steps):
        run.step += found is not None  # ends with numbers on the host
    return clock() - start


def over_length(run):
    """Of a trained run: a training step's time for each token, and how far the loss of a window read token by token is from the loss at once."""
    times = [seconds_of(run, 2) / (2 * run.settings.batch * run.length) for _ in range(3)]
    model, count = run.plain.model.eval(), min(run.length, 512)
    inputs, targets = (each[:1, :count].to(run.device) for each in run.task.split("test")[0].take(slice(0, 1))[:2])
    with torch.no_grad():
        state = model.make_state(1, count)
        single = torch.stack([model.step(token, state) for token in inputs.T], 1)
        losses = [torch.nn.functional.cross_entropy(logits[0].double(), targets[0]) for logits in (model(inputs), single)]
    return {"us a token": 1e6 * min(times), "token by token, loss differs by": float((losses[1] - losses[0]).abs())}


@torch.no_grad()
def decoded(run, rows=64, prompt=256, count=32):
    """Tokens that so many rows decode in a second behind a prompt, together; every step is launched from Python."""
    model = run.plain.model.eval()
    ids = run.task.split("test")[0].take(slice(0, 1))[0][:, :prompt].expand(rows, -1).to(run.device)
    state = model.make_state(rows, prompt + count + 1)
    with run.autocast():
        model(ids, state=state)
        model.step(ids[:, 0], state)
        if run.device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            token = model.step(ids[:, 0], state)
        float(token.sum())
    return rows * count / (time.perf_counter() - start)


def speed(run):
    """Of a language model: training tokens a second, memory of training, decoding."""
    rate = run.settings.batch * run.length * 10 / min(seconds_of(run, 10) for _ in range(2))
    memory = torch.cuda.max_memory_reserved() / 2**30 if run.device.type == "cuda" else float("nan")
    return {"tokens/s": rate, "GiB": memory, "decoded tokens/s, 64 rows": decoded(run)}
