#!/usr/bin/env python3
"""Converts SmolLM2-135M with training on a GPU, inside a time limit, and measures before and after: the numbers of docs/results.

    gpu_convert.py MODEL.gguf TOKENS.u16 TEST.u16 OUT --seconds 180 [--passkey FILE.npz]

A quarter of the layers keeps softmax: those that a window of 128 harms most. The others become windows of 508 keys with 4 sinks, or
LoLCATs hybrids (window 64, 32 + 32 features). Each is fitted on TOKENS (16 bits each) and evaluated on TEST in blocks of 2,048 and 8,192.
"""

import argparse
import copy
import json
import math
import pathlib
import time

import torch
from safetensors.torch import save_file

from linnet.convert import Fit, Settings, attention, choose, data, mixers, write

KEPT = 8  # of 30
WINDOW = {"mechanism": "window", "window": 508, "sinks": 4}
HYBRID = {"mechanism": "hybrid", "window": 64, "features": 32}


def tokens(path):
    return torch.frombuffer(bytearray(pathlib.Path(path).read_bytes()), dtype=torch.uint16).long()


def blocks(ids, size, most=10**9):
    count = min(len(ids) // size, most)
    return ids[: count * size].view(count, size)


@torch.no_grad()
def losses(model, ids, size, device, most=10**9):
    """Mean loss of next tokens in blocks, in f32."""
    total = count = 0
    for block in blocks(ids, size, most).to(device):
        hidden = model.base_model(input_ids=block[None], use_cache=False)[0][0]
        for begin in range(0, size - 1, 2048):
            wanted = block[begin + 1 : begin + 2049]
            logits = model.lm_head(hidden[begin : begin + len(wanted)]).float()
            total += float(torch.nn.functional.cross_entropy(logits, wanted, reduction="sum"))
            count += len(wanted)
    return total / count


@torch.no_grad()
def passkey(model, file, device):
    """Share of prompts whose key is given back in full (greedy, the key's own tokens fed)."""
    right = 0
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        for row in file["prompts"]:
            ids = torch.tensor(row.astype("int64"), device=device)
            answer = int(file["answer"])
            out = model.base_model(input_ids=ids[None], use_cache=False)[0][0, -answer - 1 : -1]
            right += bool((model.lm_head(out).argmax(-1) == ids[-answer:]).all())
    return right / len(file["prompts"])


def measure(name, model, test, options, results, keys=None):
    device, start = options.device, time.monotonic()
    row = {str(size): losses(model, test, size, device, options.eval_tokens // size) for size in options.sizes}
    if keys is not None:
        row["passkey"] = passkey(model, keys, device)
    row["seconds"] = time.monotonic() - start
    results["rows"][name] = row
    base = results["rows"].get("teacher", row)
    ratios = {size: math.exp(row[str(size)] - base[str(size)]) for size in options.sizes}
    print(name, {**row, "ratio": ratios}, flush=True)
    pathlib.Path(options.out, "results.json").write_text(json.dumps(results))


def students(model, plan, parts, settings, log):
    """A copy of the teacher with the plan's mixers, and its Fit."""
    student = copy.deepcopy(model)
    sites = attention.find(student)
    student.requires_grad_(False)
    for site, entry in zip(sites, plan, strict=True):
        mixer = mixers.make(site.shape, **entry)
        site.candidates = {choose.label(mixer.mechanism, mixer.options): mixer}
    fit = Fit(student, sites, parts, settings, log=log)
    fit.initialise()
    choose.settle(fit)
    return fit


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "tokens", "test", "out"):
        parser.add_argument(name)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--passkey")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sizes", type=int, nargs=2, default=[2048, 8192])
    parser.add_argument("--eval-tokens", type=int, default=10**9)
    options = parser.parse_args()
    began = time.monotonic()
    torch.set_float32_matmul_precision("highest")
    pathlib.Path(options.out).mkdir(parents=True, exist_ok=True)
    keys = None
    if options.passkey:
        import numpy

        keys = numpy.load(options.passkey)
    model = write.load_model(options.model).to(options.device)
    sites = attention.find(model)
    model.requires_grad_(False)
    print("loaded", len(sites), "layers", round(time.monotonic() - began, 1), "s", flush=True)
    results = {"rows": {}, "settings": vars(options)}
    test = tokens(options.test)
    parts = data.split(tokens(options.tokens), options.seq, None, 0.7)
    measure("teacher", model, test, options, results, keys)

    # The harm that a window of 128 does to each layer alone.
    log = lambda sentence: print(f"  {sentence} [{time.monotonic() - began:.0f} s]", flush=True)  # noqa: E731
    settings = Settings(bf16=options.device == "cuda", batch=options.batch, save_seconds=1e9, check=10, held_out=2)
    ranking = Fit(model, sites, parts, settings, log=log)
    for site in sites:
        site.candidates = {"window": mixers.make(site.shape, "window", window=128, sinks=4)}
    damage = choose.measure(ranking, parts["held_out"][:2])
    harm = {index: values["window"] for index, values in damage.items()}
    kept = sorted(harm, key=harm.get)[-min(KEPT, len(sites) - 1) :]
    results |= {"harm": harm, "kept": sorted(kept)}
    print("kept", sorted(kept), round(time.monotonic() - began, 1), "s", flush=True)

    share = {"windows": 0.40, "hybrids": 0.60}
    spare = 22.0  # evaluations that follow
    for name, entry in (("windows", WINDOW), ("hybrids", HYBRID)):
        part_began = time.monotonic()
        limit = (options.seconds - (part_began - began) - spare) * (share[name] if name == "windows" else 1.0)
        plan = [{"mechanism": "softmax"} if site.index in kept else entry for site in sites]
        each = options.batch * options.seq
        if name == "hybrids":  # time of a step decides how many there are
            fit = students(model, plan, parts, settings_with(settings, tokens=2 * each), log)
            start = time.monotonic()
            fit.fit_layers()
            step = (time.monotonic() - start) / 4  # two steps and two held-out losses
            count = max(int(0.35 * limit / step), 2)
            log(f"layerwise: {step:.2f} s a step, {count} steps")
            fit = students(model, plan, parts, settings_with(settings, tokens=count * each), log)
            fit.fit_layers()
            results[f"{name} layerwise"] = {"tokens": count * each, "trail": fit.facts.get("layers_trail")}
            measure(f"{name} layerwise", fit.model, test, options, results)
            done = {site.index: site.mixer.state_dict() for site in fit.sites if site.mixer}
        else:
            fit, done = students(model, plan, parts, settings, log), {}
            measure(f"{name} zero-shot", fit.model, test, options, results, keys)
        trial = students(model, plan, parts, settings_with(settings, finetune="kl", finetune_tokens=3 * each), log)
        start = time.monotonic()
        trial.kl()
        step = (time.monotonic() - start) / 3
        del trial
        left = limit - (time.monotonic() - part_began)
        count = max(min(int(left / step), len(parts["finetune"]) // options.batch), 2)
        log(f"end to end: {step:.2f} s a step, {count} steps")
        fit = students(model, plan, parts, settings_with(settings, finetune="kl", finetune_tokens=count * each), log)
        for site in fit.sites:
            if site.index in done:
                site.mixer.load_state_dict(done[site.index])
        for site in fit.sites:
            if site.mixer:
                site.mixer.requires_grad_(True)
        fit.kl()
        results[f"{name} kl"] = {"tokens": count * each, "history": fit.history}
        measure(f"{name} kl", fit.model, test, options, results, keys)
        mixers_only = write.new_tensors(fit.sites)
        if mixers_only:
            save_file(mixers_only, pathlib.Path(options.out, f"{name}.safetensors"))
    print("done", round(time.monotonic() - began, 1), "s", flush=True)


def settings_with(settings, **changes):
    import dataclasses

    return dataclasses.replace(settings, **changes)


if __name__ == "__main__":
    main()
