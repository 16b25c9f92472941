"""Stages 6 to 8: initial values, the layerwise fit and its second pass on the student's own input, and KL end to end.

A Fit has the model with its sites, blocks of tokens and a work folder. Every stage is a loop of steps whose randomness is a
function of the seed and the step alone, and whose whole state is written from time to time: killed, it goes on with the same
numbers. Under torchrun each process takes its part of every batch.
"""

import contextlib
import copy
import functools
import math
import os
import pathlib
import time
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from . import attention, checkpoint, data, mixers

FEATURE_WEIGHT = 1000.0  # of the outputs' relative error beside the cross entropy
POOLED_WEIGHT = 10.0  # of an encoder's pooled state beside its tokens
CHUNK = 1024  # tokens whose logits are held at a time
GATE_RATE = 1e-3  # of gates in the layerwise fit


class NotFinite(ValueError):
    pass


@dataclass
class Settings:
    tokens: int = 1_000_000  # of the layerwise fit
    error_tokens: int = 0  # of the second pass
    finetune: str = "none"  # kl, ce, lora
    finetune_tokens: int = 0
    batch: int = 8  # sequences of a step, over all processes
    rows: int = 64  # sampled rows of a sequence for the cross entropy
    calibration: int = 4  # sequences for initial values
    held_out: int = 8  # sequences for the held-out loss
    check: int = 50  # steps between held-out losses
    patience: int = 200  # stop when they improve by less than 0.1 % over so many steps
    mixer_rate: float = 1e-4  # of a gate; other parameters of mixers keep their proportion to it in the layerwise fit
    other_rate: float = 1e-5
    warmup: float = 0.0  # share of the end-to-end stage in which its rates rise
    ending: float = 0.2  # share of it in which they fall, as a cosine
    long: int = 0  # tokens of the sequences of every fourth step there; 0: those of all
    fit_seconds: float = 0.0  # of the layerwise fit at most; 0: as many tokens as were asked for
    finetune_seconds: float = 0.0  # of the end-to-end stage
    lora_rank: int = 8
    lora_alpha: int = 16
    clip: float = 1.0
    seed: int = 0
    bf16: bool = False
    save_seconds: float = 120.0
    head_chunk: int = CHUNK


def _distributed():
    """(rank, processes), joining the others under torchrun."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return 0, 1
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank(), dist.get_world_size()


class Divergence(torch.autograd.Function):
    """sum KL(teacher || student) from logits [n, V], with its gradient made at once: softmax of the student's less the teacher's."""

    @staticmethod
    def forward(ctx, mine, theirs):
        wanted = theirs.log_softmax(-1, dtype=torch.float32)
        found = mine.log_softmax(-1, dtype=torch.float32)
        weights = wanted.exp()
        loss = wanted.sub_(found).mul_(weights).sum()
        ctx.save_for_backward(found.exp_().sub_(weights).to(mine.dtype))
        return loss

    @staticmethod
    def backward(ctx, gradient):
        (own,) = ctx.saved_tensors
        return own * gradient, None


@contextlib.contextmanager
def fast(model):
    """Inside, products of float32 matrices may be TF32, and RMS norms of transformers are one kernel where that gives the same."""
    fused = []
    for module in model.modules():
        weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
        if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, nn.Parameter) or not isinstance(eps, float):
            continue
        x = torch.linspace(-3, 5, 4 * weight.shape[-1], device=weight.device, dtype=weight.dtype).view(4, -1)
        with torch.no_grad():
            same = torch.allclose(module(x), F.rms_norm(x, weight.shape, weight, eps), rtol=1e-5, atol=1e-6)
        if same:
            module.forward = functools.partial(_fused_norm, module, eps)
            fused.append(module)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
        for module in fused:
            del module.forward


def _fused_norm(module, eps, x):
    out = F.rms_norm(x, module.weight.shape, module.weight, eps)
    kind = x.device.type
    return out.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else out  # once, for all that read it


class Schedule:
    """How far a stage is, by its steps or by its time, whichever is further. Time makes runs differ; 0 seconds: steps alone."""

    def __init__(self, step, total, seconds, elapsed, processes, device):
        self.step, self.total, self.seconds, self.begin = step, total, seconds, time.monotonic() - elapsed
        self.processes, self.device = processes, device

    def elapsed(self):
        """Seconds of the slowest process."""
        passed = time.monotonic() - self.begin
        if self.processes > 1 and self.seconds:
            together = torch.tensor(passed, dtype=torch.float64, device=self.device)
            dist.all_reduce(together, dist.ReduceOp.MAX)
            return float(together)
        return passed

    def share(self):
        return max(self.step / max(self.total, 1), self.elapsed() / self.seconds if self.seconds else 0.0)

    def over(self):
        return self.share() >= 1


class LoRA(nn.Module):
    """W + alpha / rank B A as a parametrization of a weight."""

    def __init__(self, weight, rank, alpha, generator):
        super().__init__()
        out, into = weight.shape
        start = torch.randn(rank, into, generator=generator) / math.sqrt(into)
        self.A = nn.Parameter(start.to(weight.device))
        self.B = nn.Parameter(torch.zeros(out, rank, device=weight.device))
        self.scale = alpha / rank

    def forward(self, weight):
        return weight + self.scale * (self.B @ self.A)


class Fit:
    def __init__(self, model, sites, parts, settings, work=None, log=None):
        self.model, self.sites, self.parts, self.settings = model, sites, parts, settings
        self.work = pathlib.Path(work) if work else None
        self.rank, self.processes = _distributed()
        self.log = log if log and self.rank == 0 else (lambda sentence: None)
        self.device = next(model.parameters()).device
        self.by_module = {site.module: site for site in sites}
        self.history, self.facts, self.best = [], {}, {}  # best: states by (layer, key)
        self.is_image = getattr(model, "main_input_name", "") == "pixel_values"
        self.causal = all(site.shape.causal for site in sites)
        self.micro = settings.batch
        self.saved = self.load()
        if settings.batch % self.processes:
            raise ValueError(f"batch is {settings.batch}, expected a multiple of the {self.processes} processes")

    # ---- running the model

    def cast(self):
        if self.settings.bf16 and self.device.type == "cuda":
            return torch.autocast("cuda", torch.bfloat16)
        return contextlib.nullcontext()

    def fast(self):
        return fast(self.model) if self.settings.bf16 and self.device.type == "cuda" else contextlib.nullcontext()

    def due(self, last):
        """Whether a checkpoint is due; process 0 says it for all."""
        now = time.monotonic() - last > self.settings.save_seconds
        if self.processes > 1:
            told = torch.tensor(float(now), device=self.device)
            dist.broadcast(told, 0)
            return bool(told)
        return now

    def inputs(self, blocks):
        blocks = blocks.to(self.device)
        return {"pixel_values": blocks} if self.is_image else {"input_ids": blocks}

    def body(self, model, blocks):
        """The final hidden states, without the head."""
        extra = {} if self.is_image or not self.causal else {"use_cache": False}
        with self.cast():
            return model.base_model(**self.inputs(blocks), **extra)[0]

    def out(self, mixer, q, k, v, more, **options):
        """The mixer in float32, whatever the model around it runs in."""
        with torch.autocast(self.device.type, enabled=False):
            if self.device.type == "cpu" and q.dtype != torch.float32 and q.dtype != torch.float64:
                q, k, v = q.float(), k.float(), v.float()
            return mixer(q, k, v, more, **options)

    # ---- stage 6

    def collect(self, part="calibration", count=None):
        """q, k, v, x and the output of every layer on a few sequences, on the CPU."""
        found = {}

        def visit(module, query, key, value, scaling, options, teach, read):
            out, site = teach(), self.by_module.get(module)
            if site is None:
                return out
            self.check_finite(site, out)
            q, k, v = (y.transpose(1, 2) for y in (query, key, value))
            needs = {name for mixer in site.candidates.values() for name in mixer.needs}
            more = attention.more_of(module, needs, q, k)
            found[site.index] = {name: y.detach() for name, y in {"q": q, "k": k, "v": v, "out": out, **more}.items()}
            return out

        blocks = self.parts[part][: count or self.settings.calibration]
        with torch.no_grad(), attention.visiting(visit):
            self.body(self.model, blocks)
        return found

    def check_finite(self, site, out):
        if not torch.isfinite(out).all():
            raise NotFinite(f"the teacher's attention in layer {site.index} ({site.name}) gives NaN or Inf")

    def initialise(self):
        """Initial values of all candidates, from calibration sequences."""
        if self.facts.get("initialised"):
            return
        samples = self.collect()
        for site in self.sites:
            for number, mixer in enumerate(site.candidates.values()):
                generator = torch.Generator().manual_seed(self.settings.seed * 7919 + site.index * 31 + number)
                mixer.to(self.device)
                mixer.initialise(samples[site.index], generator)
        self.facts["initialised"] = True

    # ---- stage 7

    def relative(self, mine, teacher):
        """|mine - teacher|^2 / |teacher|^2 for each sequence, [B]."""
        mine, teacher = mine.float().flatten(1), teacher.float().flatten(1)
        return (mine - teacher).square().sum(1) / teacher.square().sum(1).clamp_min(1e-30)

    def layer_loss(self, site, mixer, q, k, v, more, out, rows, drop=False, with_rows=True):
        """The loss of one layer's student, a mean over the sequences."""
        mine = self.out(mixer, q, k, v, more, **({"drop_window": True} if drop else {}))
        if type(mixer).log_weights is mixers.Mixer.log_weights:  # recurrent: after the output projection
            if site.project is not None:
                with torch.autocast(self.device.type, enabled=False):
                    mine, out = (site.project(y.flatten(2).float()) for y in (mine, out))
            return self.relative(mine, out).mean()
        loss = FEATURE_WEIGHT * self.relative(mine, out).mean()
        if with_rows and not drop and len(rows):
            with torch.autocast(self.device.type, enabled=False):
                teacher = mixers.row_scores(q, k, rows, site.shape).softmax(-1)
                logs = mixer.log_weights(q, k, rows)
                logs = logs.masked_fill(teacher == 0, 0)
                loss = loss - (teacher * logs).sum(-1).mean()
        return loss

    def layer_losses(self, blocks, step, share, second, train):
        """Losses of all candidates on a batch, {(layer, key): loss}; with gradients when training. second: on the student's input."""
        tokens = None
        losses, targets = {}, {}
        generator = torch.Generator().manual_seed(self.settings.seed * 100_003 + step)
        draws = dict(zip((site.index for site in self.sites), torch.rand(len(self.sites), generator=generator).tolist(), strict=True))

        def remember(module, query, key, value, scaling, options, teach, read):
            out = teach()
            if module in self.by_module:
                targets[module] = out.detach()
            return out

        def visit(module, query, key, value, scaling, options, teach, read):
            site = self.by_module.get(module)
            if site is None:
                return teach()
            out = targets[module] if second else teach()
            q, k, v = (y.transpose(1, 2).detach() for y in (query, key, value))
            nonlocal tokens
            tokens = q.shape[1]
            pick = torch.Generator().manual_seed(self.settings.seed * 100_003 + step * 1009 + site.index)
            rows = torch.randperm(tokens, generator=pick)[: self.settings.rows].sort().values.to(q.device)
            for key_, mixer in site.candidates.items():
                if not any(p.requires_grad for p in mixer.parameters()):
                    continue
                more = {name: y.detach() for name, y in attention.more_of(module, mixer.needs, q, k).items()}
                drop = train and mixer.has_window and draws[site.index] < share
                with torch.set_grad_enabled(train):
                    loss = self.layer_loss(site, mixer, q, k, v, more, out, rows, drop, not second)
                    if train:
                        (loss * (len(blocks) / self.settings.batch)).backward()
                losses[site.index, key_] = loss.detach()
            return read() if second else out

        with torch.no_grad():
            if second:
                with attention.visiting(remember):
                    self.body(self.model, blocks)
            with attention.visiting(visit):
                self.body(self.model, blocks)
        return losses

    def mine(self, blocks):
        """This process's part of a batch."""
        each = len(blocks) // self.processes
        return blocks[self.rank * each : (self.rank + 1) * each]

    def pieces(self, blocks):
        """A batch in parts of at most `micro` sequences."""
        return blocks.split(max(self.micro // self.processes, 1))

    def within_memory(self, work):
        """work(), with half the sequences at a time after each lack of memory, at most four times."""
        for attempt in range(5):
            try:
                return work()
            except torch.OutOfMemoryError:
                if attempt == 4 or self.micro == 1:
                    raise
                self.model.zero_grad(set_to_none=True)
                torch.cuda.empty_cache()
                self.micro = max(self.micro // 2, 1)
                self.log(f"out of memory: from now on {self.micro} sequences at a time")
        raise AssertionError("unreachable")

    def reduce(self, parameters):
        """Gradients summed over the processes; they are already shares of the whole batch's mean."""
        if self.processes > 1:
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)

    def mean(self, values):
        """A dictionary of numbers, averaged over the processes."""
        if self.processes > 1:
            together = torch.tensor([float(value) for value in values.values()], dtype=torch.float64, device=self.device)
            dist.all_reduce(together)
            return dict(zip(values, (together / self.processes).tolist(), strict=True))
        return {key: float(value) for key, value in values.items()}

    def trained(self):
        """(name, parameter, learning rate) of all candidates."""
        for site in self.sites:
            for key, mixer in site.candidates.items():
                for name, parameter in mixer.named_parameters():
                    yield f"{site.index}|{key}|{name}", parameter, mixer.rates[name]

    def held_out_losses(self, second):
        losses = {}
        blocks = self.parts["held_out"][: max(self.settings.held_out, self.processes)]
        blocks = self.mine(blocks[: len(blocks) // self.processes * self.processes])
        with torch.no_grad():
            for piece in self.pieces(blocks):
                for key, loss in self.layer_losses(piece, 0, 0.0, second, train=False).items():
                    losses[key] = losses.get(key, 0.0) + float(loss) * len(piece) / len(blocks)
        return self.mean(losses)

    def fit_layers(self, second=False):
        """All layers at once, each against the teacher's output; second: on what the converted layers before it give."""
        with self.fast():
            self._fit_layers(second)

    def _fit_layers(self, second):
        name, settings = ("errors" if second else "layers"), self.settings
        fit = self.parts["fit"]
        wanted = settings.error_tokens if second else settings.tokens
        total = max(round(wanted / (settings.batch * self.length(fit))), 0)
        parameters = list(self.trained())
        if self.facts.get(f"{name}_done") or not parameters or total == 0:
            return
        optimiser = self.optimiser(parameters)
        groups = {}
        for label, parameter, _ in parameters:
            groups.setdefault(label.rsplit("|", 1)[0], []).append(parameter)
        order = data.Order(len(fit), settings.seed)
        step, best, trail = 0, {}, []
        facts = self.resume(name, optimiser, parameters)
        if facts:
            step, trail = facts["step"], facts["trail"]
            best = {tuple(json_key(key)): value for key, value in facts["best"].items()}
        if not facts:
            self.keep_best(best, self.held_out_losses(second))
            trail.append([0, sum(best.values())])
        start = first = time.monotonic()
        first_step = step
        schedule = self.schedule(step, total, settings.fit_seconds, facts)
        while not schedule.over():
            done = schedule.share()
            share = 0.5 + (0.1 - 0.5) * done
            rate = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done))
            for group in optimiser.param_groups:
                group["lr"] = group["start"] * rate
            blocks = self.mine(fit[order.batch(step, settings.batch)])

            def work(blocks=blocks, step=step, share=share):
                losses = {}
                for piece in self.pieces(blocks):
                    for key, loss in self.layer_losses(piece, step + 1, share, second, train=True).items():
                        losses[key] = losses.get(key, 0.0) + float(loss) * len(piece) / len(blocks)
                return losses

            losses = self.mean(self.within_memory(work))
            for key, loss in losses.items():
                if not math.isfinite(loss):
                    site = self.site(key[0])
                    raise NotFinite(f"the loss of layer {site.index} ({site.name}, {key[1]}) is not finite at step {step} of the fit")
            self.reduce([p for _, p, _ in parameters])
            for each in groups.values():  # layers are independent of each other, so are their gradients' norms
                nn.utils.clip_grad_norm_(each, settings.clip)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            step = schedule.step = step + 1
            self.history.append([name, step, sum(losses.values()) / len(losses)])
            if step == first_step + 1:
                self.log(f"{name}: {total} steps of {settings.batch} x {self.length(fit)} tokens, "
                         f"about {(total - step) * (time.monotonic() - first):.0f} s")  # fmt: skip
            if step % settings.check == 0 or schedule.over():
                now = self.held_out_losses(second)
                self.keep_best(best, now)
                trail.append([step, sum(best.values())])
                self.log(f"{name}: step {step} of {total}, held-out loss {sum(now.values()) / len(now):.4f}")
                past = [value for at, value in trail if at <= step - settings.patience]
                if past and trail[-1][1] > past[-1] * (1 - 1e-3):
                    self.log(f"{name}: stopped, the held-out loss improved by less than 0.1 % over {settings.patience} steps")
                    break
            if self.due(start):
                self.save(name, {"step": step, "elapsed": schedule.elapsed(), "trail": trail,
                                 "best": {f"{i}|{k}": v for (i, k), v in best.items()}}, optimiser, parameters)  # fmt: skip
                start = time.monotonic()
        for site in self.sites:
            for key, mixer in site.candidates.items():
                if (site.index, key) in self.best:
                    mixer.load_state_dict(self.best[site.index, key])
        self.facts[f"{name}_trail"] = trail
        self.facts[f"{name}_losses"] = {f"{i}|{k}": v for (i, k), v in best.items()}
        self.facts[f"{name}_done"] = True
        self.best = {}
        self.save("between", {})

    def site(self, index):
        return next(site for site in self.sites if site.index == index)

    def keep_best(self, best, losses):
        if not best:
            self.best = {}
        for key, loss in losses.items():
            if math.isnan(loss):
                site = self.site(key[0])
                raise NotFinite(f"the held-out loss of layer {site.index} ({site.name}) is not finite")
            if key not in best or loss < best[key]:
                best[key] = loss
                mixer = self.site(key[0]).candidates[key[1]]
                self.best[key] = {name: y.detach().clone() for name, y in mixer.state_dict().items()}

    def length(self, blocks):
        """Tokens of one input."""
        if self.is_image:
            return (blocks.shape[-1] // self.model.config.patch_size) ** 2 + 1
        return blocks.shape[1]

    # ---- stage 8

    def kl(self, name="kl"):
        """KL(teacher || student) on logits with everything trained (ce: the text's own next token; lora: low-rank updates)."""
        with self.fast():
            self._kl(name)

    def _kl(self, name):
        settings = self.settings
        blocks = self.parts["finetune"]
        total = round(settings.finetune_tokens / (settings.batch * self.length(blocks))) if settings.finetune != "none" else 0
        if total == 0 or self.facts.get("kl_done") or all(site.mixer is None for site in self.sites):
            return
        if settings.finetune not in ("kl", "ce", "lora"):
            raise ValueError(f"finetune is {settings.finetune!r}, expected none, kl, ce or lora")
        if len(blocks) == 0:
            raise ValueError("no text is left for the end-to-end stage")
        model = self.model
        teacher = self.teacher()
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        # Tied embeddings stay as they are: a head that is trained apart has to be dropped, and the student was trained for it.
        still = set()
        if head is not None and head.weight is model.get_input_embeddings().weight:
            still.add(id(head.weight))
        lora = settings.finetune == "lora"
        if lora:
            self.add_lora()
        names = {id(p): f"{name}" for site in self.sites if site.mixer for name, p in site.mixer.named_parameters()}
        rates = {id(p): site.mixer.rates[names[id(p)]] / GATE_RATE for site in self.sites if site.mixer for p in site.mixer.parameters()}
        parameters = []  # (label, parameter, rate)
        for label, parameter in model.named_parameters():
            is_lora = ".parametrizations." in label and not label.endswith(".original")
            own = id(parameter) in rates
            parameter.requires_grad_(own or is_lora if lora else id(parameter) not in still)
            if parameter.requires_grad:
                rate = settings.mixer_rate * rates.get(id(parameter), 1.0) if own or is_lora else settings.other_rate
                parameters.append((label, parameter, rate))
        optimiser = self.optimiser(parameters)
        order = data.Order(len(blocks), settings.seed + 1)
        step = 0
        facts = self.resume(name, optimiser, parameters)
        if facts:
            step = facts["step"]
        start = first = time.monotonic()
        first_step, pending = step, []
        schedule = self.schedule(step, total, settings.finetune_seconds, facts)
        while not schedule.over():
            done = schedule.share()
            rate = min((done + 1 / total) / settings.warmup, 1.0) if settings.warmup else 1.0
            left = (1 - done) / settings.ending if settings.ending else 1.0
            if left < 1:
                rate *= 0.01 + 0.99 * 0.5 * (1 - math.cos(math.pi * left))
            for group in optimiser.param_groups:
                group["lr"] = group["start"] * rate
            batch = self.mine(self.longer(blocks, order, step))

            def work(batch=batch):
                return sum(self.end_to_end(teacher, head, piece, batch.numel()) for piece in self.pieces(batch))

            pending.append(self.within_memory(work))
            self.reduce([p for _, p, _ in parameters])
            nn.utils.clip_grad_norm_([p for _, p, _ in parameters], settings.clip)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            step = schedule.step = step + 1
            over, due = schedule.over(), self.due(start)
            if step == first_step + 1 or step % 10 == 0 or step % settings.check == 0 or over or due:  # what waits for the GPU
                self.note(name, step, pending)
            if step == first_step + 1:
                self.log(f"{name}: {total} steps of {settings.batch} x {self.length(blocks)} tokens, "
                         f"about {(total - step) * (time.monotonic() - first):.0f} s")  # fmt: skip
            if step % settings.check == 0 or over:
                recent = [value for at, _, value in self.history[-settings.check :] if at == name]
                self.log(f"{name}: step {step} of {total}, {settings.finetune} {sum(recent) / len(recent):.5f}")
            if due:
                self.save(name, {"step": step, "elapsed": schedule.elapsed()}, optimiser, parameters)
                start = time.monotonic()
        if lora:
            self.merge_lora()
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        self.facts["kl_done"] = True
        self.facts["changed"] = True
        del teacher
        self.save("between", {})

    def optimiser(self, parameters):
        """AdamW over (label, parameter, rate); parameters of one rate are one group."""
        groups = {}
        for _, parameter, rate in parameters:
            groups.setdefault(rate, {"params": [], "lr": rate, "start": rate})["params"].append(parameter)
        return torch.optim.AdamW(list(groups.values()), betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=self.device.type == "cuda")

    def schedule(self, step, total, seconds, facts):
        return Schedule(step, total, seconds, facts.get("elapsed", 0.0) if facts else 0.0, self.processes, self.device)

    def longer(self, blocks, order, step):
        """The blocks of a step; of every fourth as many tokens in sequences of settings.long."""
        settings = self.settings
        batch = blocks[order.batch(step, settings.batch)]
        factor = settings.long // self.length(blocks) if settings.long and not self.is_image else 1
        if factor < 2 or step % 4 != 3 or settings.batch % (factor * self.processes) or len(blocks) < factor:
            return batch
        count = settings.batch // factor
        rows = [(place % (len(blocks) // factor)) * factor for place in order.batch(step, count)]
        return torch.stack([blocks[row : row + factor].flatten() for row in rows])

    def note(self, name, step, pending):
        """The losses of the last steps as numbers, a mean over the processes."""
        first = step - len(pending)
        means = self.mean(dict(enumerate(pending)))
        pending.clear()
        for number, loss in means.items():
            loss *= self.processes
            if not math.isfinite(loss):
                raise NotFinite(f"the end-to-end loss is not finite at step {first + number}")
            self.history.append([name, first + number + 1, loss])

    def head_copy(self):
        """The teacher's head, where the end-to-end stage is going to train it."""
        head = self.model.get_output_embeddings() if hasattr(self.model, "get_output_embeddings") else None
        return None if head is None or self.settings.finetune == "none" else copy.deepcopy(head)

    def teacher(self):
        """A frozen copy of the model before any of its weights were trained, with softmax in every layer."""
        held = [(site, site.mixer) for site in self.sites]
        for site, _ in held:
            site.mixer = None
        teacher = copy.deepcopy(self.model).eval().requires_grad_(False)
        for site, mixer in held:
            site.mixer = mixer
        return teacher

    def end_to_end(self, teacher, head, blocks, tokens):
        """The loss of one piece of a batch of so many tokens, as its share of the mean over the batch; its gradient is added."""
        settings = self.settings
        share = 1 / (settings.batch if head is None else tokens * self.processes)
        with torch.no_grad():
            target = self.body(teacher, blocks)
        hidden = self.body(self.model, blocks)
        if head is None:
            return self.hidden_loss(teacher, target, hidden, share)
        # The logits of a part of the tokens at a time: [T, V] of both models never exist.
        other = teacher.get_output_embeddings()
        flat, wanted = hidden.detach().flatten(0, 1).requires_grad_(), target.flatten(0, 1)
        labels = blocks.to(self.device).roll(-1, 1)
        labels[:, -1] = -100
        total = 0.0
        chunk = settings.head_chunk * (4 if flat.is_cuda else 1)
        for begin in range(0, len(flat), chunk):
            part = slice(begin, begin + chunk)
            with self.cast():
                mine = head(flat[part])
            if settings.finetune == "ce":
                loss = F.nll_loss(mine.float().log_softmax(-1), labels.flatten()[part], ignore_index=-100, reduction="sum")
            else:
                with torch.no_grad(), self.cast():
                    theirs = other(wanted[part])
                loss = Divergence.apply(mine, theirs)
            (loss * share).backward()
            total = total + loss.detach() * share
        hidden.backward(flat.grad.view_as(hidden))
        return total

    def hidden_loss(self, teacher, target, hidden, share):
        """Encoders: MSE and cosine of hidden states, and the cosine of their mean (images: of the class token), which is what embeddings
        are compared by; with a classifier KL on its logits, too."""
        mine, theirs = hidden.float(), target.float()
        pool = (lambda y: y[:, 0]) if self.is_image else (lambda y: y.mean(1))
        error = (mine - theirs).square().mean((1, 2)) / theirs.square().mean((1, 2)).clamp_min(1e-30)
        angle = 1 - F.cosine_similarity(mine, theirs, dim=-1).mean(1)
        pooled = 1 - F.cosine_similarity(pool(mine), pool(theirs), dim=-1)
        loss = (error + angle + POOLED_WEIGHT * pooled).sum()
        classifier = getattr(self.model, "classifier", None)
        if isinstance(classifier, nn.Module):
            logits = [each(y[:, 0]).float().log_softmax(-1) for each, y in ((classifier, hidden), (teacher.classifier, target))]
            loss = loss + (logits[1].exp() * (logits[1] - logits[0])).sum()
        (loss * share).backward()
        return loss.detach() * share

    def attention_weights(self):
        """The modules of q, k, v and o."""
        for site in self.sites:
            found = [m for name, m in site.module.named_modules() if not name.startswith("linnet") and getattr(m, "weight", None) is not None]
            yield from (m for m in [*found, site.project] if m is not None and m.weight.dim() == 2)

    def add_lora(self):
        generator = torch.Generator().manual_seed(self.settings.seed)
        done = set()
        for module in self.attention_weights():
            if id(module) not in done:
                done.add(id(module))
                nn.utils.parametrize.register_parametrization(
                    module, "weight", LoRA(module.weight, self.settings.lora_rank, self.settings.lora_alpha, generator))  # fmt: skip

    def merge_lora(self):
        for module in list(self.model.modules()):
            if nn.utils.parametrize.is_parametrized(module, "weight"):
                nn.utils.parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)

    # ---- checkpoints

    def save(self, stage, facts, optimiser=None, parameters=()):
        """The whole state, when there is a work folder; process 0 writes it."""
        if self.work is None:
            return
        if self.rank == 0:
            tensors = {}
            for site in self.sites:
                for key, mixer in site.candidates.items():
                    tensors.update({f"mixer|{site.index}|{key}|{name}": y for name, y in mixer.state_dict().items()})
            for (index, key), state in self.best.items():
                tensors.update({f"best|{index}|{key}|{name}": y for name, y in state.items()})
            if stage == "kl" or self.facts.get("kl_done"):
                tensors.update({f"model|{name}": y for name, y in self.model.named_parameters() if ".linnet." not in name})
            if optimiser is not None:
                for label, parameter, _ in parameters:
                    for name, y in optimiser.state[parameter].items():
                        tensors[f"optimiser|{label}|{name}"] = y if isinstance(y, torch.Tensor) else torch.tensor(float(y))
            whole = {"stage": stage, "facts": self.facts, "history": self.history, "settings": asdict(self.settings),
                     "layers": [[site.index, list(site.candidates)] for site in self.sites], **facts}  # fmt: skip
            checkpoint.save(self.work / "checkpoint", tensors, whole)
        if self.processes > 1:
            dist.barrier()

    def load(self):
        """The newest checkpoint of the work folder, when it belongs to this conversion."""
        saved = checkpoint.load(self.work / "checkpoint") if self.work else None
        if saved is None:
            return None
        tensors, whole = saved
        if whole["settings"] != asdict(self.settings):
            changed = sorted(name for name, value in asdict(self.settings).items() if whole["settings"].get(name) != value)
            raise ValueError(f"{self.work} holds a conversion with other settings ({', '.join(changed)}); "
                             "give the same ones to go on with it, or another folder")  # fmt: skip
        return tensors, whole

    def restore(self):
        """Mixers and facts of the checkpoint; the optimiser follows when its stage begins. True when there was one."""
        if self.saved is None:
            return False
        tensors, whole = self.saved
        listed = [[site.index, list(site.candidates)] for site in self.sites]
        if whole["layers"] != listed:
            kept = {index: keys for index, keys in whole["layers"]}
            for site in self.sites:
                if not set(kept.get(site.index, ())) <= set(site.candidates):
                    raise ValueError(f"{self.work} holds a conversion with another plan: layer {site.index} differs")
                site.candidates = {key: site.candidates[key] for key in kept[site.index]}
        self.facts, self.history = whole["facts"], whole["history"]
        for site in self.sites:
            for key, mixer in site.candidates.items():
                head = f"mixer|{site.index}|{key}|"
                mixer.to(self.device)
                mixer.load_state_dict({name[len(head) :]: y for name, y in tensors.items() if name.startswith(head)})
        for name, y in tensors.items():
            if name.startswith("best|"):
                _, index, key, parameter = name.split("|", 3)
                self.best.setdefault((int(index), key), {})[parameter] = y.to(self.device)
        self.log(f"going on with {self.work}: stage {whole['stage']}, step {whole.get('step', 0)}")
        return True

    def load_weights(self):
        """The model's own weights of a checkpoint of the end-to-end stage."""
        if self.saved is None:
            return
        own = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, y in self.saved[0].items():
                if name.startswith("model|"):
                    own[name[6:]].copy_(y)

    def resume(self, stage, optimiser, parameters):
        """The facts of an interrupted stage, and the state of its optimiser and, end to end, of the weights."""
        if self.saved is None or self.saved[1]["stage"] != stage:
            return None
        tensors, whole = self.saved
        if stage == "kl":
            self.load_weights()
        for label, parameter, _ in parameters:
            state = {}
            for name in ("step", "exp_avg", "exp_avg_sq"):
                y = tensors.get(f"optimiser|{label}|{name}")
                if y is not None:
                    state[name] = y.to(parameter.device)
            if state:
                optimiser.state[parameter] = state
        self.saved = None
        return whole


def json_key(text):
    index, key = text.split("|", 1)
    return int(index), key

