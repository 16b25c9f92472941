"""Settings of linnet.train: where they come from, which are refused, and the model that follows from them."""

import dataclasses
import difflib
import inspect
import math
import pathlib
import re

import torch

import linnet.nn

from ._records import LAYERS, initialise, record
from ._train_tasks import KINDS, declared_options

CHOICES = {"mlp": ("none", "plain", "glu"), "norm": ("rms", "layer"), "dtype": ("f32", "bf16"), "device": ("auto", "cpu", "cuda"),
           "parallel": ("ddp", "fsdp", "sequence"), "init": ("page", "fan_in")}  # fmt: skip
# A layer whose own defaults are those of a large model gets sizes that fit the width.
FITTING = {
    "gated_deltanet": lambda width, heads: {"key": width // heads, "value": width // heads},
    "kda": lambda width, heads: {"key": width // heads, "value": width // heads},
    "mamba2": lambda width, heads: {"head": math.gcd(64, 2 * width), "state": min(64, width)},
}


def hint(word, known):
    starting = [name for name in known if name.startswith(word)] or difflib.get_close_matches(word, known, 1)
    return f"; did you mean {starting[0]!r}?" if starting else f"; there are {', '.join(known)}"


def assign(settings, name, value):
    """One `name=value`: a setting, else an option of the task, else of the layer; task., eval., layer. or a layer's name say which."""
    fields = {field.name: field for field in dataclasses.fields(settings) if not field.name.endswith("_options")}
    task = {} if not settings.task else declared_options(settings.task)
    layer = {option["name"]: option for each in settings.layer.split(",") for option in LAYERS[each]["options"]}
    where, dot, rest = name.partition(".")
    if dot and where in settings.layer.split(","):
        own = [option["name"] for option in LAYERS[where]["options"]]
        if rest not in own:
            raise ValueError(f"{where} has no option {rest!r}{hint(rest, own)}")
        settings.layer_options[name] = str(value)
    elif dot and where in ("task", "eval", "layer"):
        options = layer if where == "layer" else task
        if rest not in options:
            raise ValueError(f"{settings.layer if where == 'layer' else settings.task} has no option {rest!r}{hint(rest, list(options))}")
        getattr(settings, where + "_options")[rest] = str(value)
    elif name in fields:
        setattr(settings, name, typed(name, fields[name].type, value))
    elif name in task:
        settings.task_options[name] = str(value)
    elif name in layer:
        settings.layer_options[name] = str(value)
    else:
        near = difflib.get_close_matches(name, [*fields, *task, *layer], 1)
        raise ValueError(f"there is no setting {name!r}" + (f"; did you mean {near[0]!r}?" if near else "; linnet train --settings lists them"))


def typed(name, kind, value):
    if name in CHOICES and value not in CHOICES[name]:
        raise ValueError(f"{name} is {value!r}, expected {', '.join(CHOICES[name])}")
    if kind is bool:
        words = {"1": True, "true": True, "True": True, "0": False, "false": False, "False": False}
        if str(value) not in words:
            raise ValueError(f"{name} is {value!r}, expected 0 or 1")
        return words[str(value)]
    try:
        number = kind(value)
    except ValueError:
        raise ValueError(f"{name} is {value!r}, expected {'a whole number' if kind is int else 'a number'}") from None
    least = 1 if name in ("layers", "width", "batch", "accumulate", "steps", "log_every", "eval_every") else 0
    if (kind is int and not least <= number < 2**53) or (kind is float and not 0 <= number < math.inf):
        raise ValueError(f"{name} is {value}, expected at least {least}")
    return number


def read_settings(settings, args):
    """Fills the settings: defaults, then the task's protocol, then the TOML file, then --set."""
    given = []
    if args.config:
        try:
            import tomllib
        except ModuleNotFoundError:
            raise ValueError("--config needs Python 3.11 or newer, whose library reads TOML; --set works here") from None
        try:
            given += list(tomllib.loads(pathlib.Path(args.config).read_text()).items())
        except (OSError, tomllib.TOMLDecodeError) as problem:
            raise ValueError(f"{args.config}: {problem}") from None
    for words in args.set or []:
        for word in words:
            name, equals, value = word.partition("=")
            if not equals:
                raise ValueError(f"--set {word}: expected name=value")
            given.append((name, value))
    first = dict(given)
    settings.task = args.task or first.pop("task", "")
    settings.layer = args.layer or first.pop("layer", settings.layer)
    if settings.task not in KINDS:
        raise ValueError(f"there is no task {settings.task!r}{hint(settings.task, list(KINDS))}" if settings.task else f"which task? There are {', '.join(KINDS)}")
    for each in settings.layer.split(","):
        if each not in LAYERS:
            raise ValueError(f"there is no layer {each!r}{hint(each, list(LAYERS))}")
    for name, value in (KINDS[settings.task].full if args.full else KINDS[settings.task].small).items():
        assign(settings, name, value)
    for name, value in given:
        if name not in ("task", "layer"):
            assign(settings, name, value)
    return settings


def model_config(settings, task):
    """config.json of the model, as linnet.nn.Model and the C++ runtime read it."""
    heads = settings.heads or max(1, settings.width // 64)
    blocks = []
    for each in settings.layer.split(","):
        declared = {option["name"]: option for option in LAYERS[each]["options"]}
        options = {"heads": heads} if "heads" in declared else {}
        options.update(FITTING.get(each, lambda *_: {})(settings.width, heads))
        if "causal" in declared and task.kind.answer == "tokens":
            options["causal"] = 1
        options.update({name: text for name, text in settings.layer_options.items() if name in declared})
        options.update({name.partition(".")[2]: text for name, text in settings.layer_options.items() if name.startswith(each + ".")})
        record(each, {"hidden": settings.width, **options})  # its sentence, where they do not fit
        mlp = {"mlp": settings.mlp} if settings.mlp == "none" else {"mlp": settings.mlp, "intermediate_size": int(settings.expand * settings.width)}
        blocks.append({"mixer": each, "options": options, **mlp})
    return {
        "model_type": "linnet", "vocab_size": max(task.vocab, 1), "hidden_size": settings.width, "tie_word_embeddings": settings.tie,
        "linnet": {"norm": settings.norm, "norm_eps": 1e-5, "positions": settings.positions,
                   "layers": [blocks[i % len(blocks)] for i in range(settings.layers)]},
    }  # fmt: skip


@torch.no_grad()
def start_as_torch_does(model):
    """Matrices whose page starts them with a deviation of 0.02 start as torch's linear maps do, uniform within 1 / sqrt(inputs)."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            initialise(module.weight, {"rule": "fan_in", "a": 1, "b": 0})
        elif isinstance(module, linnet.nn.Layer):
            for parameter in module._record()["parameters"]:
                if parameter["init"]["rule"] == "normal" and len(parameter["shape"]) == 2:
                    initialise(module.get_tensor(parameter["name"]), {"rule": "fan_in", "a": 1, "b": 0})


def state_bytes(model, length):
    """What the model keeps to decode, in bytes at f32, after `length` tokens; None where a layer cannot decode."""
    total = 0
    for block in model.layers:
        made = block.self_attn._record()
        if not made["decode"]:
            return None
        window = block.self_attn.options.get("window", (-1, -1))
        kept = min(length, window[0] + 1) if isinstance(window, tuple) and window and window[0] >= 0 else length
        for state in made["states"]:
            if state["dtype"] not in ("i32", "i64"):
                total += 4 * math.prod({"B": 1, "capacity": kept}.get(size, size) for size in state["shape"])
    return total


def settings_help(settings):
    """The settings with their defaults and comments, from the source of their class."""
    source = inspect.getsource(type(settings))
    lines = re.findall(r"^    (\w+): \w+ = (\S+)(?:  # (.*))?$", source.split("task_options")[0], re.MULTILINE)
    rows = [f"  {name:<17}{default:<18}{doc}" for name, default, doc in lines if name not in ("task", "layer")]
    return "settings, their defaults (a task's protocol changes some):\n" + "\n".join(rows) + (
        "\n\nOptions of the task (`linnet tasks show TASK`) and of the layer (`linnet info LAYER`) are set the same way; task.NAME,\n"
        "layer.NAME and eval.NAME (the task where it is evaluated) where a name is in two of them.\n\ntasks: " + ", ".join(KINDS))  # fmt: skip
