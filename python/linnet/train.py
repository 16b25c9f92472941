"""Trains a model of any layer on a task, and writes down how it went.

    python -m linnet.train mqar --layer gated_deltanet --set width=128 pairs=8      or: linnet train mqar ...
    python -m linnet.train mqar --layer gated_deltanet --full                      # the paper's protocol
    python -m linnet.train --config run.toml                                       # the same names, one `name = value` a line
    torchrun --nproc_per_node 2 -m linnet.train text --set path=enwik8.gz parallel=fsdp

A run is a folder (--out, otherwise runs/TASK-LAYER): settings.json, metrics.jsonl (a line per log and per evaluation), checkpoints/,
result.json. The same command goes on where a killed one stopped, with the same numbers. `linnet report RUN ...` draws the page.
Exit codes: 0 done, 1 the loss is no number any more, 2 bad input, 3 not possible here.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # matrix products on a GPU that repeat bit for bit

import torch
import torch.distributed as dist
from torch import nn

import linnet.nn

from ._checkpoints import Checkpoints
from ._train_folder import Progress, device_name, is_before, write_whole
from ._train_graph import CHUNK, Graphs
from ._train_settings import model_config, read_settings, settings_help, start_as_torch_does, state_bytes
from ._train_tasks import Answer, Task


@dataclasses.dataclass
class Settings:
    """What can be set by --set name=value, beside the options of the task and of the layer."""

    task: str = ""
    layer: str = "gated_deltanet"  # a name of `linnet list`; several with commas take turns: a hybrid
    layers: int = 2  # blocks
    width: int = 128  # channels between blocks
    heads: int = 0  # of layers that have heads; 0: one per 64 channels
    mlp: str = "none"  # behind each mixer: none, plain, glu
    expand: float = 2.0  # inner channels of the MLP / width
    norm: str = "rms"  # rms or layer
    positions: int = 0  # rows of a table of learned positions; 0: none
    tie: bool = True  # the head is the table of embeddings
    init: str = "page"  # matrices start as each layer's page says, or fan_in: as torch's linear maps
    examples: str = "20000"  # training sequences of generated tasks
    eval_examples: str = "1000"  # of validation and of test
    batch: int = 64  # sequences of a step
    accumulate: int = 1  # pieces in which a step's batch goes through the model
    steps: int = 1000
    epochs: int = 0  # instead of steps
    lr: float = 1e-3
    warmup: int = 50  # steps from 0 to lr
    final_lr: float = 0.1  # where the cosine ends, as a share of lr
    weight_decay: float = 0.1  # of matrices; vectors have none
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0  # largest norm of the gradient; 0: none
    dtype: str = "f32"  # of the products: f32 or bf16 (weights and optimiser stay f32)
    device: str = "auto"  # cpu, cuda, or auto: a GPU where there is one
    compile: bool = False  # torch.compile
    graph: bool = True  # on a GPU: a step's kernels are recorded once and replayed
    threads: int = 0  # 0: torch's choice
    seed: int = 0
    log_every: int = 10
    eval_every: int = 100
    checkpoint_every: int = 100  # 0: no checkpoints
    stop_at: float = 0.0  # stop when an evaluation reaches this score; 0: never
    best: bool = False  # the test is of the weights of the best evaluation, not of the last
    parallel: str = "ddp"  # under torchrun: ddp, fsdp, or sequence (each process holds a part of every sequence)
    task_options: dict = dataclasses.field(default_factory=dict)
    eval_options: dict = dataclasses.field(default_factory=dict)
    layer_options: dict = dataclasses.field(default_factory=dict)


class Run:
    """One training run: what the loop below needs, made from the settings."""

    def __init__(self, settings, folder, task=None):
        s = self.settings = settings
        self.folder = pathlib.Path(folder)
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.device = torch.device("cuda" if s.device == "cuda" or (s.device == "auto" and torch.cuda.is_available()) else "cpu")
        if self.device.type == "cuda":
            if not torch.cuda.is_available():
                raise RuntimeError("device is cuda, but torch sees no GPU here")
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        # Graphs are recorded on a stream of their own; runs side by side have one each.
        self.stream = torch.cuda.Stream() if self.device.type == "cuda" and self.world == 1 else None
        if s.threads:
            torch.set_num_threads(s.threads)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # a kernel more for every tensor
        torch.manual_seed(s.seed)
        self.task = task or self.task_of(s)
        self.train = self.task.split("train", s.batch)
        for split in ("valid", "test"):
            self.task.split(split)  # what is wrong with them is told before the work
        pieces = s.accumulate * (1 if s.parallel == "sequence" else self.world)
        if s.batch % pieces:
            raise ValueError(f"batch is {s.batch}, expected a multiple of {pieces} (accumulate times processes)")
        if self.splits_sequence:
            if self.task.kind.answer != "tokens":
                raise ValueError(f"parallel=sequence needs a task that answers at every token, and {s.task} does not")
            for part in (part for split in ("train", "valid", "test") for part in self.task.split(split)):
                if part.inputs.shape[1] % self.world:
                    raise ValueError(f"sequences have {part.inputs.shape[1]} tokens, which {self.world} processes cannot share evenly")
        if not self.train.per_epoch:
            raise ValueError(f"batch is {s.batch}, but the task has {max(map(len, self.train))} training sequences")
        self.steps = s.epochs * self.train.per_epoch or s.steps
        self.config = model_config(s, self.task)
        model = linnet.nn.Model(self.config)
        if s.init == "fan_in":
            start_as_torch_does(model)
        self.length = max(part.inputs.shape[1] for part in self.train)
        self.state_bytes = state_bytes(model, self.length)
        self.net = self.plain = Answer(self.task, model, s.width).to(self.device)
        self.parameters = sum(parameter.numel() for parameter in self.net.parameters() if parameter.requires_grad)
        if self.world > 1:
            self.distribute()
        elif s.compile:
            self.net = torch.compile(self.net)
        decayed = [p for p in self.plain.parameters() if p.requires_grad and p.dim() >= 2]
        others = [p for p in self.plain.parameters() if p.requires_grad and p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": s.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.clip = s.clip or math.inf
        self.graphs = Graphs(self) if Graphs.fit(self) else None
        ways = {"fused": True, "capturable": True} if self.graphs else {}
        self.optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=s.lr, betas=(s.beta1, s.beta2), **ways)
        self.checkpoints = Checkpoints(self.folder)
        self.step, self.seconds, self.best, self.best_step, self.last_score = 0, 0.0, None, 0, None

    @staticmethod
    def task_of(s):
        """The task of these settings; runs that differ in other settings may share it."""
        whole = int(os.environ.get("WORLD_SIZE", 1)) > 1 and s.parallel == "sequence"
        return Task(s.task, s.task_options, s.eval_options, examples=s.examples, eval_examples=s.eval_examples, seed=s.seed, whole=whole)

    # --- several processes -------------------------------------------------------------------------------------------------

    def distribute(self):
        if not dist.is_initialized():
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
        if self.settings.parallel == "ddp":
            self.net = nn.parallel.DistributedDataParallel(self.plain)
        elif self.settings.parallel == "fsdp":
            from torch.distributed.fsdp import fully_shard

            mesh = dist.device_mesh.init_device_mesh(self.device.type, (self.world,))
            for block in self.plain.model.layers:
                fully_shard(block, mesh=mesh)
            fully_shard(self.plain, mesh=mesh)
        else:
            from .parallel import split_sequence

            split_sequence(self.plain.model)

    @property
    def splits_sequence(self):
        return self.world > 1 and self.settings.parallel == "sequence"

    def mine(self, batch, piece):
        """This process's share of a piece of the batch: sequences, or tokens of all of them."""
        rows = len(batch[0]) // self.settings.accumulate
        batch = [None if each is None else each[piece * rows : (piece + 1) * rows] for each in batch]
        return self.tokens(batch) if self.splits_sequence else [
            None if each is None else each[self.rank * rows // self.world : (self.rank + 1) * rows // self.world] for each in batch
        ]  # fmt: skip

    def tokens(self, batch):
        """This process's tokens of every sequence."""
        length = batch[0].shape[1]
        own = slice(self.rank * length // self.world, (self.rank + 1) * length // self.world)
        return [None if each is None else each[:, own] for each in batch]

    def state(self, load=None):
        """Weights and optimiser as whole tensors by name, however they are spread; `load` puts them back."""
        from torch.distributed.checkpoint import state_dict as by_name

        options = by_name.StateDictOptions(full_state_dict=True, cpu_offload=True)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(self.step)  # a number, wherever the last step had it
        if load is None:
            return by_name.get_state_dict(self.plain, self.optimizer, options=options)
        by_name.set_state_dict(self.plain, self.optimizer, model_state_dict=load[0], optim_state_dict=load[1], options=options)

    # --- one step ----------------------------------------------------------------------------------------------------------

    def rate(self, step):
        s = self.settings
        if step < s.warmup:
            return s.lr * (step + 1) / s.warmup
        along = min(1.0, (step - s.warmup) / max(1, self.steps - s.warmup))
        return s.lr * (s.final_lr + (1 - s.final_lr) * 0.5 * (1 + math.cos(math.pi * along)))

    def on_stream(self):
        return torch.cuda.stream(self.stream) if self.stream else contextlib.nullcontext()

    def autocast(self):
        return torch.autocast(self.device.type, torch.bfloat16) if self.settings.dtype == "bf16" else contextlib.nullcontext()

    def forward(self, net, batch):
        with self.autocast():
            return net(*(None if each is None else each.to(self.device) for each in batch))

    def losses(self, batch):
        """Gradients of a batch, piece by piece; its loss and measures, and how many numbers they are over."""
        count = self.plain.count(batch[1]).clamp(min=1).to(self.device)
        for piece in range(self.settings.accumulate):
            last = piece + 1 == self.settings.accumulate
            later = self.net.no_sync() if isinstance(self.net, nn.parallel.DistributedDataParallel) and not last else contextlib.nullcontext()
            with later:
                loss, part = self.forward(self.net, self.mine(batch, piece))
                # ddp and fsdp take the mean over processes, so each counts for the share that it has of all.
                (loss * (1 if self.splits_sequence else self.world) / count).backward()
            sums = sums + part if piece else part
        return sums, count

    def train_step(self):
        """Loss and measures of the whole batch, whoever computed them, then the gradient's norm."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(self.step)
        sums, count = self.losses(self.train.step(self.step))
        if self.world > 1:
            dist.all_reduce(sums)
        if self.splits_sequence:
            for parameter in self.plain.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
        norm = nn.utils.clip_grad_norm_(self.plain.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return [*(sums / count).tolist(), float(norm)]

    def steps_until(self, last):
        """What train_step gives, of each step up to the last; None as long as a GPU is busy with them."""
        if self.graphs:
            yield from self.graphs.steps(self.step, last)
        else:
            while self.step < last:
                yield self.train_step()

    def named(self, values):
        return {name: value / math.log(2) if name == "bits_per_byte" else value for name, value in zip(self.task.measures[0], values)}

    @torch.no_grad()
    def evaluate(self, split):
        """Measures over a split, the mean of its parts, and each part where there are several. Every process sees all of it."""
        self.plain.eval()
        parts = []
        for part in self.task.split(split):
            part, sums, count = part.on(self.device), 0, 0
            for begin in range(0, len(part), self.settings.batch):
                batch = part.take(slice(begin, begin + self.settings.batch))
                count = count + self.plain.count(batch[1])
                sums = sums + self.forward(self.plain, self.tokens(batch) if self.splits_sequence else batch)[1]
            if self.splits_sequence:
                dist.all_reduce(sums)
            if self.world > 1:  # the best score and the end are decided by one process's numbers: another's may round otherwise
                dist.broadcast(sums, 0)
            parts.append(self.named((sums / count.clamp(min=1)).tolist()))
        self.plain.train()
        mean = {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}
        if len(parts) > 1:
            mean["parts"] = [{"part": part.label, **values} for part, values in zip(self.task.split(split), parts)]
        return mean

    # --- the folder --------------------------------------------------------------------------------------------------------

    def open(self):
        """Makes the folder, or goes on with the run that is in it."""
        mine = dataclasses.asdict(self.settings)
        path = self.folder / "settings.json"
        if path.exists():
            try:
                theirs = json.loads(path.read_text())
                other = [name for name in mine if theirs[name] != mine[name]]
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{path} is not what linnet train wrote; choose another --out") from None
            if other:
                was, now = (json.dumps(each[other[0]]) for each in (theirs, mine))
                raise ValueError(f"{self.folder} holds another run: {other[0]} is {was} there and {now} here; choose another --out")
        elif self.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(mine, indent=2) + "\n")
        if self.world > 1:
            dist.barrier()
        steps = self.checkpoints.steps()
        if steps:
            trainer = self.back_to(steps[-1])
            self.step, self.seconds = trainer["step"], trainer["seconds"]
            self.best, self.best_step, self.last_score = trainer["best"], trainer["best_step"], trainer["last_score"]
        if self.rank == 0:
            lines = self.folder / "metrics.jsonl"
            kept = [] if not lines.exists() else [text for text in lines.read_text().splitlines(True) if is_before(text, self.step)]
            write_whole(lines, "".join(kept))  # what came behind the checkpoint is computed again
            self.metrics = open(lines, "a")

    def back_to(self, step):
        """Weights and optimiser of a checkpoint; returns what else it holds."""
        model, trainer = self.checkpoints.load(step)
        weights = {**{"model." + name: tensor for name, tensor in model.items()}, **trainer["head"]}
        self.state(load=(weights, trainer["optimizer"]))
        return trainer

    def write(self, **line):
        if self.rank == 0:
            self.metrics.write(json.dumps({"step": self.step, **line}) + "\n")
            self.metrics.flush()

    def save(self):
        weights, optimizer = self.state()
        if self.rank == 0:
            os.fsync(self.metrics.fileno())
            model = {name.removeprefix("model."): tensor for name, tensor in weights.items() if name.startswith("model.")}
            head = {name: tensor for name, tensor in weights.items() if not name.startswith("model.")}
            trainer = {"head": head, "optimizer": optimizer, "step": self.step, "seconds": self.seconds, "best": self.best,
                       "best_step": self.best_step, "last_score": self.last_score}  # fmt: skip
            self.checkpoints.save(self.step, model, self.config if self.task.vocab else None, trainer, self.best_step)
        if self.world > 1:
            dist.barrier()


def train(run, say=print):
    """The loop. Returns the result, which result.json holds too."""
    work = training(run, say)
    while True:
        try:
            with run.on_stream():
                next(work)
            time.sleep(1e-3)  # the GPU is busy
        except StopIteration as end:
            return end.value


def training(run, say, deadline=math.inf):
    """The loop as a generator, which gives way as long as a GPU is busy, so that several runs take turns. At the deadline (time.monotonic)
    a run stops where it is and is tested there."""
    s, run.say = run.settings, say
    names, score, sign = run.task.measures
    if run.stream:
        run.stream.wait_stream(torch.cuda.default_stream())  # where the run was made
    run.open()
    say(f"{s.task}: {s.layer}, {run.parameters} parameters, {run.length} tokens, {run.steps} steps of {s.batch}"
        + (f", from step {run.step}" if run.step else ""))  # fmt: skip
    progress, before, weights = Progress(run), run.seconds, None
    start = time.monotonic()
    done = run.step >= run.steps or (s.stop_at and run.last_score is not None and sign * run.last_score >= sign * s.stop_at)
    while not done and time.monotonic() < deadline:
        last = min(run.steps, *(run.step // every * every + every for every in (s.eval_every, s.checkpoint_every, CHUNK) if every))
        for found in run.steps_until(last):
            if found is None:
                yield
                continue
            *values, norm = found
            measures = run.named(values)
            run.step += 1
            run.seconds = before + time.monotonic() - start
            if not all(math.isfinite(value) for value in found):
                progress.clear()
                raise ArithmeticError(f"at step {run.step} the {names[0]} is {measures[names[0]]} and the gradient's norm {norm}: try a smaller lr than {s.lr}")
            progress.show(measures)
            if run.step % s.log_every == 0 or run.step == 1:
                run.write(split="train", **measures, lr=run.rate(run.step - 1), norm=norm, seconds=run.seconds, tokens=run.step * s.batch * run.length)
        done = run.step >= run.steps
        if run.step % s.eval_every == 0 or done:
            values = run.evaluate("valid")
            run.last_score = values[score]
            if run.best is None or sign * run.last_score > sign * run.best:
                run.best, run.best_step = run.last_score, run.step
                if s.best:
                    weights = {name: tensor.clone() for name, tensor in run.plain.state_dict().items()}
            run.write(split="valid", **values, seconds=run.seconds)
            progress.clear()
            say(f"step {run.step}: " + ", ".join(f"{name} {values[name]:.4f}" for name in names) + f"; {run.seconds:.1f} s")
            done = done or (s.stop_at > 0 and sign * run.last_score >= sign * s.stop_at)
        if s.checkpoint_every and (run.step % s.checkpoint_every == 0 or done or run.best_step == run.step):
            run.save()
    progress.clear()
    if s.best and run.best_step != run.step:
        if weights:
            run.plain.load_state_dict(weights)
        else:
            run.back_to(run.best_step)
    test = run.evaluate("test")
    result = {
        "task": s.task, "layer": s.layer, "parameters": run.parameters, "state_bytes": run.state_bytes, "length": run.length,
        "steps": run.step, "seconds": run.seconds, "tokens": run.step * s.batch * run.length, "score": score, "valid": run.last_score,
        "best": run.best, "test": test, "device": device_name(run.device), "torch": torch.__version__, "processes": run.world,
    }  # fmt: skip
    if not done:
        result["planned_steps"] = run.steps  # the deadline came first
    if run.rank == 0:
        write_whole(run.folder / "result.json", json.dumps(result, indent=2) + "\n")
        run.metrics.close()
    say("test: " + ", ".join(f"{name} {test[name]:.4f}" for name in names) + f"; {run.folder}")
    return result


class Parser(argparse.ArgumentParser):
    def error(self, message):
        print(f"linnet: train: {message}; see linnet train --help", file=sys.stderr)
        sys.exit(2)


def main(arguments=None):
    parser = Parser("linnet train", usage="linnet train TASK [--layer LAYER] [--set NAME=VALUE ...] [options]", description=__doc__.split("\n")[0],
                    epilog=settings_help(Settings()), formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("task", nargs="?", help="what to learn")
    parser.add_argument("--layer", help="the mixer of every block; several with commas take turns")
    parser.add_argument("--set", nargs="+", action="append", metavar="NAME=VALUE", help="settings, options of the task and of the layer")
    parser.add_argument("--config", metavar="FILE", help="a TOML file of settings")
    parser.add_argument("--full", action="store_true", help="the paper's protocol instead of the small one")
    parser.add_argument("--out", metavar="RUN", help="the run's folder; default runs/TASK-LAYER")
    parser.add_argument("--settings", action="store_true", help="list the settings and tasks")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    args = parser.parse_args(arguments)
    if args.settings:
        print(settings_help(Settings()))
        return 0
    quiet = args.json or int(os.environ.get("RANK", 0)) > 0
    run = None
    try:
        settings = read_settings(Settings(), args)
        folder = args.out or f"runs/{settings.task}-{settings.layer.replace(',', '+')}"
        run = Run(settings, folder)
        result = train(run, (lambda _: None) if quiet else lambda text: print(text, flush=True))
    except (ValueError, TypeError) as problem:
        return stop(2, problem)
    except ArithmeticError as problem:
        return stop(1, problem)
    except OSError as problem:
        return stop(3, f"{problem.filename or args.out or 'runs'} cannot be written: {problem.strerror}; what was saved before is whole")
    except RuntimeError as problem:
        return stop(3, problem)
    except KeyboardInterrupt:
        return stop(128 + signal.SIGINT, "stopped; the same command goes on from the last checkpoint")
    finally:
        if dist.is_initialized():
            # DDP's reducer goes before the group. As the group's last owner it would join gloo's threads while it holds the GIL, which they may be
            # waiting for to release the tensor of the last barrier.
            if run is not None:
                run.net = None
            dist.destroy_process_group()
    if run.rank > 0:
        return 0
    if args.json:
        print(json.dumps(result, indent=2))
    if command := os.environ.get("LINNET_COMMAND"):  # the page of this run, drawn by the command that started us
        subprocess.run([command, "report", str(run.folder)], stdout=subprocess.DEVNULL)
    return 0


def stop(code, problem):
    print(f"linnet: train: {problem}", file=sys.stderr)
    return code


if __name__ == "__main__":
    code = main()
    if "WORLD_SIZE" in os.environ:
        from .parallel import leave

        leave(code)
    sys.exit(code)
