#!/usr/bin/env python3
"""Converts SmolLM2-135M on a GPU, inside a time limit, and measures before and after, for the pages of docs/results.

    gpu_convert.py MODEL.gguf OUT --tokens WIKI.u16 --test TEST.u16 ACT ...

Each ACT is a line of a recipe, run one after another:

    teacher                                     losses, in f32, of all of TEST in blocks of 2,048 and 8,192; pass keys
    zero:NAME:PLAN.json                         the same of a plan without training
    train:NAME:PLAN.json|OPTIONS[:KEY=VALUE...] a fit layer by layer, KL end to end, then the same; OPTIONS, such as
                                                mechanism=gdn,window=64,sinks=4, stand for every layer
    profile:NAME:...                            as train, for a few steps, with the GPU's time by operator

Keys of train: fit, kl (seconds), seq, batch, long, rate (all else), mixer (gates), warmup, ending, quick=1 (evaluated in bf16 on 65,536
tokens), check, rows, save=1 (written, read again and compared).

The files of tokens hold 16 bits for each, in the byte order of the machine. tools/plain_wiki.py writes such a text, and the model's own
tokenizer its numbers:

    from array import array
    from linnet.runtime import Tokenizer
    numbers = Tokenizer("MODEL.gguf").encode(open("wiki.txt", encoding="utf-8").read(), add_special=False, parse_special=False)
    array("H", numbers).tofile(open("WIKI.u16", "wb"))
"""

import argparse
import copy
import dataclasses
import json
import math
import pathlib
import sys
import time
import traceback

import torch

from linnet.convert import Fit, Settings, attention, choose, data, mixers, write

SIZES = [2048, 8192]
AT_ONCE = 16384  # tokens of a forward in the evaluation


def tokens(path):
    return torch.frombuffer(bytearray(pathlib.Path(path).read_bytes()), dtype=torch.uint16).long()


class Measured:
    """The evaluation of one model after another, beside the teacher's hidden states."""

    def __init__(self, model, test, device, keys):
        self.model, self.test, self.device, self.keys = model, test, device, keys
        self.rows, self.teacher = {}, {}

    @torch.no_grad()
    def hidden(self, model, blocks, quick):
        with torch.autocast(self.device.type, torch.bfloat16, enabled=quick and self.device.type == "cuda"):
            return model.base_model(input_ids=blocks.to(self.device), use_cache=False)[0]

    @torch.no_grad()
    def losses(self, model, size, most, quick):
        """Mean loss of next tokens of model and teacher, KL and agreement, over whole blocks."""
        count = min(len(self.test) // size, max(most // size, 1))
        blocks = self.test[: count * size].view(count, size)
        sums, scored = torch.zeros(4, dtype=torch.float64, device=self.device), 0
        states = self.teacher.setdefault((size, quick), [])
        for number, part in enumerate(blocks.split(max(AT_ONCE // size, 1))):
            mine = self.hidden(model, part, quick)
            if number == len(states):
                states.append(mine if model is self.model else self.hidden(self.model, part, quick))
            for own, other, ids in zip(mine, states[number], part.to(self.device), strict=True):
                for begin in range(0, size - 1, 4096):
                    wanted = ids[begin + 1 : begin + 4097]
                    q, p = (m.lm_head(y[begin : begin + len(wanted)].float()).log_softmax(-1) for m, y in ((model, own), (self.model, other)))
                    at = torch.arange(len(wanted), device=self.device)
                    sums += torch.stack([-q[at, wanted].sum(), -p[at, wanted].sum(), (p.exp() * (p - q)).sum(),
                                         (p.argmax(-1) == q.argmax(-1)).sum()]).double()  # fmt: skip
                    scored += len(wanted)
        return [*(sums / scored).tolist(), scored]

    @torch.no_grad()
    def passkey(self, model):
        """Share of prompts whose key is given back in full (greedy, the key's own tokens fed)."""
        right = 0
        for row in self.keys:
            ids = row.to(self.device)
            out = self.hidden(model, ids[None], True)[0, -6:-1]
            right += bool((model.lm_head(out.float()).argmax(-1) == ids[-5:]).all())
        return right / len(self.keys)

    def row(self, name, model, quick=False):
        start, row = time.monotonic(), {}
        for size in SIZES:
            loss, teacher, kl, agreed, scored = self.losses(model, size, 65536 if quick else 10**9, quick)
            row[size] = {"loss": loss, "perplexity": math.exp(loss), "ratio": math.exp(loss - teacher), "kl": kl, "agreement": agreed,
                         "tokens": scored}  # fmt: skip
        if self.keys is not None:
            row["passkey"] = self.passkey(model)
        row["seconds"], row["in"] = time.monotonic() - start, "bf16" if quick else "f32"
        self.rows[name] = row
        short = {size: {k: round(v, 5) for k, v in row[size].items()} for size in SIZES}
        print("ROW", name, short, "passkey", row.get("passkey"), row["in"], round(row["seconds"], 1), "s", flush=True)


def plan_of(text, sites):
    """A plan's entries by layer: of a file, or one set of options for all layers."""
    if text.endswith(".json"):
        return {entry["index"]: entry for entry in json.loads(pathlib.Path(text).read_text())["layers"]}
    options = dict(pair.split("=") for pair in text.split(","))
    options = {k: int(v) if v.isdigit() else v for k, v in options.items()}
    return {site.index: {"index": site.index, **options} for site in sites}


def student_of(model, text):
    """A copy of the teacher with the plan's mixers beside their softmax, none of them active."""
    student = copy.deepcopy(model)
    sites = attention.find(student)
    student.requires_grad_(False)
    plan = plan_of(text, sites)
    for site in sites:
        entry = plan.get(site.index, {"mechanism": "softmax"})
        known = mixers.MIXERS[entry["mechanism"]].option_names
        mixer = mixers.make(site.shape, entry["mechanism"], **{k: v for k, v in entry.items() if k in known and (v != 0 or k == "sinks")})
        site.candidates = {choose.label(mixer.mechanism, mixer.options): mixer}
    return student, sites


def train(name, text, keys, model, ids, measured, device, profile=False):
    began = time.monotonic()
    settings = Settings(
        tokens=10**9, finetune="kl", finetune_tokens=10**9, batch=int(keys.get("batch", 8)), calibration=1, held_out=2,
        check=int(keys.get("check", 50)), rows=int(keys.get("rows", 64)), mixer_rate=keys.get("mixer", 1e-4), other_rate=keys.get("rate", 1e-5),
        warmup=keys.get("warmup", 0.03), ending=keys.get("ending", 0.7), long=int(keys.get("long", 0)), fit_seconds=keys.get("fit", 0.0),
        finetune_seconds=keys.get("kl", 0.0), bf16=device.type == "cuda", save_seconds=1e9)  # fmt: skip
    seq = int(keys.get("seq", 2048))
    parts = data.split(ids, seq, None, 0.75)
    student, sites = student_of(model, text)
    log = lambda sentence: print(f"  {name}: {sentence} [{time.monotonic() - began:.1f} s]", flush=True)  # noqa: E731
    if profile:
        settings = dataclasses.replace(settings, tokens=3 * settings.batch * seq, finetune_tokens=6 * settings.batch * seq)
    fit = Fit(student, sites, parts, settings, log=log)
    fit.initialise()
    if keys.get("fit", 0.0) > 0:
        fit.fit_layers()
        for site in sites:
            for mixer in site.candidates.values():
                mixer.requires_grad_(True)
    choose.settle(fit)
    log("initial values and layers are done")
    if keys.get("kl", 0.0) > 0:
        if profile:
            activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=activities) as profiler:
                fit.kl()
            events = profiler.key_averages()
            order = "cuda_time_total" if device.type == "cuda" else "cpu_time_total"
            print(events.table(sort_by=order.replace("cuda", "self_cuda"), row_limit=40, max_name_column_width=60), flush=True)
        else:
            fit.kl()
    count = lambda stage: sum(1 for each in fit.history if each[0] == stage)  # noqa: E731
    log(f"{count('layers')} steps layer by layer, {count('kl')} end to end of {settings.batch} x {seq} tokens")
    trail = [round(value, 4) for stage, _, value in fit.history if stage == "kl"]
    print("  trail", trail[:: max(len(trail) // 24, 1)], flush=True)
    if device.type == "cuda":
        print(f"  memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)
    if profile:
        return
    measured.row(name, student, keys.get("quick", 0) == 1)
    if keys.get("save", 0) == 1:
        student.linnet_sites = sites
        from linnet.convert import save_checked

        folder = pathlib.Path("/tmp") / name
        save_checked(fit, folder, None, {})
        print(f"  {folder}: written and read again, the same logits to the last bit", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out")
    parser.add_argument("acts", nargs="+")
    parser.add_argument("--tokens", required=True)
    parser.add_argument("--test", required=True)
    parser.add_argument("--passkey", help="prompts of 16-bit tokens, 4,096 each, the key's five at the end")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sizes", type=int, nargs=2, default=SIZES, help="tokens of a block (2048 8192)")
    options = parser.parse_args()
    SIZES[:] = options.sizes
    began = time.monotonic()
    torch.set_float32_matmul_precision("highest")
    device = torch.device(options.device)
    pathlib.Path(options.out).mkdir(parents=True, exist_ok=True)
    model = write.load_model(options.model).to(device)
    attention.find(model)
    model.requires_grad_(False)
    ids, test = tokens(options.tokens), tokens(options.test)
    keys = tokens(options.passkey).view(-1, 4096) if options.passkey else None
    measured = Measured(model, test, device, keys)
    print("loaded", len(ids), "tokens,", round(time.monotonic() - began, 1), "s", flush=True)
    failed = 0
    for act in options.acts:
        kind, *rest = act.split(":")
        start = time.monotonic()
        try:
            if kind == "teacher":
                measured.row("teacher", model, rest == ["quick"])
            elif kind == "zero":
                student, sites = student_of(model, rest[1])
                for site in sites:
                    (mixer,) = site.candidates.values()
                    site.mixer = None if mixer.mechanism == "softmax" else mixer.to(device)
                measured.row(rest[0], student, rest[2:] == ["quick"])
            else:
                values = {k: float(v) for k, v in (pair.split("=") for pair in rest[2:])}
                train(rest[0], rest[1], values, model, ids, measured, device, kind == "profile")
        except Exception:  # the acts behind it are worth their time
            failed += 1
            traceback.print_exc()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        print(f"{act}: {time.monotonic() - start:.1f} s, {time.monotonic() - began:.1f} s in all", flush=True)
        pathlib.Path(options.out, "results.json").write_text(json.dumps(measured.rows))
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
