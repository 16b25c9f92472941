"""What of a conversion needs gradients, for `linnet convert` (which starts it after the plan) and for itself.

    python -m linnet.convert fit --work DIR.work [--device cuda] [--tokens 20M] [--finetune kl --finetune-tokens 30M]
    python -m linnet.convert run MODEL --out DIR --text TEXT [--budget 0.25] [--length 8192] [--plan plan.json] ...

fit reads plan.json and tokens.safetensors of the work folder (docs/convert.md) and writes fit.safetensors. run
does the whole in Python, on any family that transformers knows. Under `torchrun -m linnet.convert ...` every process takes its part
of each batch. Exit codes: 0 done, 2 bad input, 3 not possible here.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import sys

import torch

from . import OverBudget, Settings, attention, checkpoint, choose, convert, data, mixers, write
from .fit import Fit, NotFinite


def number(text):
    """20M, 300k, 5000."""
    factor = {"k": 10**3, "M": 10**6, "G": 10**9}.get(text[-1:], 1)
    try:
        value = round(float(text[:-1] if factor > 1 else text) * factor)
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number such as 5000, 300k or 20M")
    return value


def add_settings(parser):
    default = Settings()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda (%(default)s)")
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32", help="of the model's products on a GPU; weights stay f32")
    parser.add_argument("--tokens", type=number, default=default.tokens, help="of the layerwise fit (%(default)s)")
    parser.add_argument("--error-tokens", type=number, default=0, help="of its second pass, on the student's own input (none)")
    parser.add_argument("--finetune", choices=["none", "kl", "ce", "lora"], default="none", help="end to end (%(default)s)")
    parser.add_argument("--finetune-tokens", type=number, default=0, help="of that stage")
    parser.add_argument("--seq", type=int, default=512, help="tokens of a sequence (%(default)s)")
    parser.add_argument("--batch", type=int, default=default.batch, help="sequences of a step, over all processes (%(default)s)")
    parser.add_argument("--long", type=int, default=0, help="end to end: tokens of the sequences of every fourth step (those of all)")
    parser.add_argument("--mixer-rate", type=float, default=default.mixer_rate, help="end to end: learning rate of gates (%(default)s)")
    parser.add_argument("--other-rate", type=float, default=default.other_rate, help="end to end: of all else (%(default)s)")
    parser.add_argument("--warmup", type=float, default=default.warmup, help="end to end: share in which the rates rise (%(default)s)")
    parser.add_argument("--fit-seconds", type=float, default=0, help="the layerwise fit takes no longer (no limit)")
    parser.add_argument("--finetune-seconds", type=float, default=0, help="nor does the end-to-end stage (no limit)")
    parser.add_argument("--check", type=int, default=default.check, help="steps between held-out losses (%(default)s)")
    parser.add_argument("--save-seconds", type=float, default=default.save_seconds, help="between checkpoints (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)


def settings_of(options):
    return {"tokens": options.tokens, "error_tokens": options.error_tokens, "finetune": options.finetune,
            "finetune_tokens": options.finetune_tokens, "batch": options.batch, "check": options.check, "seed": options.seed,
            "bf16": options.dtype == "bf16", "save_seconds": options.save_seconds, "long": options.long, "mixer_rate": options.mixer_rate,
            "other_rate": options.other_rate, "warmup": options.warmup, "fit_seconds": options.fit_seconds,
            "finetune_seconds": options.finetune_seconds}  # fmt: skip


def log(sentence):
    print(f"convert: {sentence}", file=sys.stderr, flush=True)


def blocks(ids, seq, name):
    count = len(ids) // seq
    if count == 0:
        raise ValueError(f"the part {name} has {len(ids)} tokens, fewer than one sequence of {seq}")
    return ids[: count * seq].long().view(count, seq)


def read_work(work, options):
    """The parts of tokens and the plan of a work folder."""
    from safetensors.torch import load_file

    for name in ("state.json", "plan.json", "tokens.safetensors"):
        if not (work / name).exists():
            raise FileNotFoundError(f"{work} has no {name}: `linnet convert` writes it before the fit")
    plan, tokens = json.loads((work / "plan.json").read_text()), load_file(work / "tokens.safetensors")
    seq = min(options.seq, *(max(len(tokens[name]), 16) for name in ("calibration", "plan", "fit")))  # a short text has short sequences
    seq = plan.get("sequence") or seq  # an encoder's texts begin and end with tokens of their own
    both = blocks(tokens["fit"], seq, "fit")
    share = options.finetune_tokens / max(options.finetune_tokens + max(options.tokens, options.error_tokens), 1)
    cut = len(both) if options.finetune == "none" else max(round(len(both) * (1 - share)), 1)
    parts = {"calibration": blocks(tokens["calibration"], seq, "calibration"), "fit": both[:cut], "finetune": both[cut:],
             "held_out": blocks(tokens["plan"], seq, "plan")}  # fmt: skip
    return plan, parts


def fit(options):
    """Stages 7 and 8 over the work folder of `linnet convert`."""
    from safetensors.torch import save_file

    work = pathlib.Path(options.work)
    target = work / "fit.safetensors"
    plan, parts = read_work(work, options)
    source = json.loads((work / "state.json").read_text())["model"]
    model = write.load_model(source).to(options.device)
    sites = attention.find(model)
    model.requires_grad_(False)
    write.put_mixers(sites, plan["layers"], None, work / "plan.json")
    for site in sites:
        mixer = site.mixer or mixers.make(site.shape, "softmax")
        site.candidates = {choose.label(mixer.mechanism, mixer.options): mixer.requires_grad_(True)}
    run = Fit(model, sites, parts, Settings(**settings_of(options)), work, log)
    if not run.restore():
        run.initialise()
    choose.settle(run)
    run.fit_layers()
    run.fit_layers(second=True)
    before = {name: y.clone() for name, y in write.own_tensors(model).items()} if options.finetune != "none" else {}
    if run.facts.get("kl_done"):
        run.load_weights()
    run.kl()
    if run.rank == 0:
        tensors = write.new_tensors(sites)
        if run.facts.get("changed"):
            names = write.source_tensors(source) if pathlib.Path(source).is_dir() else None
            for name, y in write.own_tensors(model).items():
                if name not in before or not torch.equal(before[name], y):
                    tensors[(names and write.name_in(names, name, model.base_model_prefix)) or name] = y.float().contiguous()
        temporary = work / "fit.safetensors.new"
        save_file(tensors, temporary, metadata={"format": "pt"})
        checkpoint.sync(temporary)
        os.rename(temporary, target)
        checkpoint.sync(work)
        facts = {"history": run.history, "facts": run.facts, "settings": dataclasses.asdict(run.settings)}
        (work / "fit.json").write_text(json.dumps(facts))
    return 0


def run(options):
    """The whole conversion in Python."""
    model = write.load_model(options.model).to(options.device)
    plan = json.loads(pathlib.Path(options.plan).read_text())["layers"] if options.plan else None
    if options.ids:
        text = torch.frombuffer(bytearray(pathlib.Path(options.ids).read_bytes()), dtype=torch.uint16).long()
        tokenizer = None
    else:
        text, tokenizer = data.read_text(options.text), options.tokenizer or options.model
    convert(model, text, budget=options.budget, length=options.length, plan=plan, seq=options.seq, out=options.out, work=options.work,
            mechanisms=options.mechanisms and tuple(options.mechanisms.split(",")), tokenizer=tokenizer, source=options.model, log=log,
            keep_softmax=tuple(int(i) for i in options.keep_softmax.split(",") if i), **settings_of(options))  # fmt: skip
    report = model.linnet_report
    if int(os.environ.get("RANK", 0)) == 0:
        print(json.dumps({name: report[name] for name in ("layerwise", "after", "layers")}, indent=1))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m linnet.convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    of_fit = commands.add_parser("fit", help="stages 7 and 8 in the work folder of linnet convert")
    of_fit.add_argument("--work", required=True, help="the folder")
    add_settings(of_fit)
    of_run = commands.add_parser("run", help="a whole conversion")
    of_run.add_argument("model", help="folder or GGUF file")
    of_run.add_argument("--out", required=True, help="folder to write")
    of_run.add_argument("--work", help="folder for checkpoints")
    given = of_run.add_mutually_exclusive_group(required=True)
    given.add_argument("--text", help="UTF-8 text")
    given.add_argument("--ids", help="token numbers, 16 bits each")
    of_run.add_argument("--tokenizer", help="folder of the tokenizer, if it is not the model's")
    of_run.add_argument("--budget", type=float, default=0.25, help="share of the attention's cost that may remain (%(default)s)")
    of_run.add_argument("--length", type=int, default=8192, help="tokens at which cost is counted (%(default)s)")
    of_run.add_argument("--plan", help="plan.json instead of choosing")
    of_run.add_argument("--mechanisms", help="candidates, with commas between")
    of_run.add_argument("--keep-softmax", default="", help="layers that stay, with commas between")
    add_settings(of_run)
    options = parser.parse_args(arguments)
    try:
        return fit(options) if options.command == "fit" else run(options)
    except OverBudget as problem:
        log(problem)
        return 3
    except (ValueError, TypeError, FileNotFoundError, FileExistsError, NotFinite, NotImplementedError) as problem:
        log(problem)
        return 2
    except (ImportError, OSError, torch.OutOfMemoryError) as problem:
        log(problem)
        return 3
    except KeyboardInterrupt:
        log("stopped; the same command goes on where it was")
        return 3


if __name__ == "__main__":
    code = main()
    if "WORLD_SIZE" in os.environ:
        from ..parallel import leave

        leave(code)
    sys.exit(code)
