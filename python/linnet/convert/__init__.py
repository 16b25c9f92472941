"""Pretrained softmax transformers become models with cheaper attention.

    model = AutoModelForCausalLM.from_pretrained(path)
    linnet.convert(model, "text.txt", budget=0.3, length=8192, out="fast")     # in place; returns the model
    model = linnet.load_converted("fast")

`linnet convert` is the command with statistics, plan and report; it starts `python -m linnet.convert fit` for what needs gradients.
docs/convert.md tells the whole.
"""

import dataclasses
import os
import pathlib
import sys
import types

import torch

from . import attention, cache, choose, data, mixers, write
from .choose import OverBudget
from .fit import Fit, NotFinite, Settings
from .write import load_converted, save

__all__ = ["Fit", "NotFinite", "OverBudget", "Settings", "convert", "load_converted", "save"]


def candidates(shape, mechanisms):
    """The options of each mechanism that are tried when there is no plan."""
    tried = {
        "window": [{"window": w} for w in (64, 128, 256, 512, 1024)],
        "monarch": [{"block": b} for b in (8, 16)],
        "hierarchical": [{"arity": a} for a in (8, 16)],
    }
    for mechanism in mechanisms:
        for options in tried.get(mechanism, [{}]):
            if mechanism in mixers.MIXERS and mixers.MIXERS[mechanism].causal_only and not shape.causal:
                continue
            mixer = mixers.make(shape, mechanism, **options)
            yield choose.label(mechanism, mixer.options), mixer


def _tokens(model, text, tokenizer):
    """Token numbers from what the caller gave: a tensor, a list, a path or a text."""
    if isinstance(text, torch.Tensor):
        return text
    if not isinstance(text, (str, os.PathLike)):
        return torch.as_tensor(text, dtype=torch.long)
    if tokenizer is None:
        tokenizer = data.tokenizer_of(getattr(model.config, "_name_or_path", "") or "the model")
    elif isinstance(tokenizer, (str, os.PathLike)):
        tokenizer = data.tokenizer_of(tokenizer)
    is_path = isinstance(text, os.PathLike) or ("\n" not in text and len(text) < 4096 and pathlib.Path(text).exists())
    return data.encode(data.read_text(text) if is_path else text, tokenizer)


def convert(model, text, *, budget=0.25, length=8192, plan=None, mechanisms=None, keep_softmax=(), seq=512, tokenizer=None, out=None,
            work=None, source=None, log=None, **settings):  # fmt: skip
    """Converts a loaded transformers model in place and returns it; model.linnet_report tells what was done.

    text          a text, the path of one, token numbers, or rows of inputs [n, T] (encoders) or images [n, C, H, W]
    budget        share of the softmax attention's cost that may remain at `length` tokens; 1 keeps every layer
    plan          a list of layers as in config.json (docs/convert.md) instead of choosing by measured damage
    mechanisms    candidates, by default ("softmax", "window", "hybrid"), for encoders ("softmax", "window", "monarch", "hierarchical")
    keep_softmax  numbers of layers that stay as they are
    out           a folder to write; source: the folder that the model came from, whose bytes are kept
    work          a folder for checkpoints: killed, the same call goes on where it was
    settings      of Settings: tokens, error_tokens, finetune ("kl", "ce", "lora"), finetune_tokens, batch, seed, bf16, ...
    """
    known = {field.name for field in dataclasses.fields(Settings)}
    for name in settings:
        if name not in known:
            raise TypeError(f"linnet.convert: there is no option {name!r}; the settings are {', '.join(sorted(known))}")
    if not 0 < budget <= 1:
        raise ValueError(f"budget is {budget}, expected more than 0 and at most 1")
    settings = Settings(**settings)
    torch.nn.Module.float(model.eval())
    ids = _tokens(model, text, tokenizer)
    sites = attention.find(model)
    end = model.config.eos_token_id if isinstance(getattr(model.config, "eos_token_id", None), int) else None
    share = settings.finetune_tokens / max(settings.finetune_tokens + max(settings.tokens, settings.error_tokens), 1)
    parts = data.split(ids, seq, end, share if settings.finetune != "none" else 0.0)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    if plan is not None:
        entries = {entry["index"]: entry for entry in plan}
        for site in sites:
            entry = {k: v for k, v in entries.pop(site.index, {}).items() if k not in ("index", "cost", "damage")} or {"mechanism": "softmax"}
            known = mixers.MIXERS[entry["mechanism"]].option_names if entry["mechanism"] in mixers.MIXERS else ()
            entry = {k: v for k, v in entry.items() if v != 0 or k in known}  # a window of 0 says that there is none
            if why := attention.refusal(site, entry["mechanism"], entry):
                raise ValueError(f"layer {site.index} cannot be {entry['mechanism']}: {why}")
            mixer = mixers.make(site.shape, **entry)
            site.candidates = {choose.label(mixer.mechanism, mixer.options): mixer}
        if others := [index for index, entry in entries.items() if entry["mechanism"] != "softmax"]:
            raise ValueError(f"the plan has layer {min(others)}, the model has attention in {', '.join(str(site.index) for site in sites)}")
    else:
        causal = all(site.shape.causal for site in sites)
        mechanisms = mechanisms or (("softmax", "window", "hybrid") if causal else ("softmax", "window", "monarch", "hierarchical"))
        if budget >= 1 and "softmax" in mechanisms:
            mechanisms = ("softmax",)  # nothing is gained by anything else
        for site in sites:
            offered = ("softmax",) if site.index in keep_softmax else mechanisms
            site.candidates = {label: mixer for label, mixer in candidates(site.shape, offered)
                               if not attention.refusal(site, mixer.mechanism, mixer.options)}  # fmt: skip
            if not site.candidates:
                site.candidates = dict(candidates(site.shape, ("softmax",)))
    fit = Fit(model, sites, parts, settings, work, log)
    fit.restore()
    fit.initialise()
    fit.fit_layers()
    if plan is None:
        choose.choose(fit, budget, length)
    choose.settle(fit)
    held = parts["held_out"][: settings.held_out]
    states, head = choose.teacher_states(fit, held), fit.head_copy()
    report = {"layerwise": choose.compare(fit, held, states)}
    fit.fit_layers(second=True)
    if fit.facts.get("kl_done"):
        fit.load_weights()
    fit.kl()
    model.requires_grad_(False)
    report |= {"after": choose.compare(fit, held, states, head), "layers": [site.entry() for site in sites], "facts": fit.facts,
               "history": fit.history}  # fmt: skip
    model.linnet_report, model.linnet_sites = report, sites
    model.config.linnet = write.section(sites, {"seed": settings.seed})
    cache.install(model, sites)
    if out is not None and fit.rank == 0:
        save_checked(fit, out, source or getattr(model.config, "_name_or_path", None), {"seed": settings.seed, "tokens": settings.tokens})
    return model


def save_checked(fit, out, source, facts):
    """Writes the folder, loads it again and compares one batch's numbers to the last bit."""
    save(fit.model, fit.sites, out, source, facts)
    again = load_converted(out, fit.device)
    block = fit.parts["held_out"][:1]
    with torch.no_grad():
        mine, theirs = (m(**fit.inputs(block))[0] for m in (fit.model, again))
    if not torch.equal(mine, theirs):
        raise RuntimeError(f"{out} gives other numbers than the model that was written: by up to {(mine - theirs).abs().max():.3g}")


class _Callable(types.ModuleType):
    """linnet.convert is a package and a function."""

    def __call__(self, *arguments, **options):
        return convert(*arguments, **options)


sys.modules[__name__].__class__ = _Callable
