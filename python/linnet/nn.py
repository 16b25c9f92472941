"""The papers' layers as modules: x [B, T, hidden] in and out.

    layer = linnet.nn.GatedDeltaNet(hidden=512, heads=4, key=64, value=128)
    y = layer(x)
    print(layer.code)                                     # the forward function, as ordinary torch code

A module is made from the layer's record (`linnet info gated_deltanet`), the same that the runtime runs: options and defaults,
parameter names as in checkpoints, initial values, steps. Options left out have their defaults; `help(linnet.nn.GatedDeltaNet)`
lists them. Modules train under autograd, torch.compile and autocast, and are saved by their state_dict.
"""

import difflib
import inspect
import linecache

import torch
import torch.nn.functional as F
from torch import nn

import linnet

from . import _kernels as kernels
from ._records import LAYERS, initialise, option_value, positions, record, source, wide

__all__ = ["MLP", "Block", "Layer", "Model", "Norm", *(layer["module"] for layer in LAYERS.values())]


def _compiled(name, text):
    """The forward function of this text; inspect.getsource and tracebacks find it."""
    place = f"<linnet.nn.{name} {hash(text):x}>"
    linecache.cache[place] = (len(text), None, text.splitlines(True), place)
    space = {"F": F, "kernels": kernels, "linnet": linnet, "positions": positions, "torch": torch, "wide": wide}
    exec(compile(text, place, "exec"), space)
    return space["forward"]


class Part(nn.Module):
    """Holds the parameters below a name with dots: self.gk_proj[0].weight."""

    def __getitem__(self, index):
        return self._modules[str(index)]


class Layer(nn.Module):
    """What the layers share: parameters, initial values and forward come from the record of the options given."""

    layer = ""  # the name in src/layers

    def __init__(self, *, device=None, dtype=None, **options):
        super().__init__()
        declared = {option["name"]: option for option in LAYERS[self.layer]["options"]}
        for name in options:
            if name not in declared:
                near = difflib.get_close_matches(name, declared, 1)
                hint = f"did you mean {near[0]!r}?" if near else "the options are " + ", ".join(declared)
                raise TypeError(f"{type(self).__name__}: there is no option {name!r}; {hint}")
        made = record(self.layer, options)
        self.options = {each["name"]: option_value(each, each["value"]) for each in made["options"]}
        for parameter in made["parameters"]:
            *path, last = parameter["name"].split(".")
            owner = self
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, Part())
                owner = getattr(owner, part)
            tensor = torch.empty(parameter["shape"], device=device, dtype=dtype)
            if parameter["trained"]:
                owner.register_parameter(last, nn.Parameter(tensor))
            else:
                owner.register_buffer(last, tensor)
        self._make_forward()
        self.reset_parameters()

    @classmethod
    def from_text(cls, options, **where):
        """The layer with options as texts, as `linnet info`, config.json and vector files write them."""
        declared = {option["name"]: option for option in LAYERS[cls.layer]["options"]}
        return cls(**{name: option_value(declared[name], text) for name, text in options.items()}, **where)

    def _record(self):
        return record(self.layer, self.options)

    def _make_forward(self):
        self.code = source(self._record())
        if self.code != type(self).default_code:
            self.forward = _compiled(type(self).__name__, self.code).__get__(self)

    def reset_parameters(self):
        """The initial values of the paper's page."""
        for parameter in self._record()["parameters"]:
            initialise(self.get_tensor(parameter["name"]), parameter["init"])

    def reset_buffers(self):
        """The same for what is not trained: fixed decays, random directions."""
        for parameter in self._record()["parameters"]:
            if not parameter["trained"]:
                initialise(self.get_tensor(parameter["name"]), parameter["init"])

    def get_tensor(self, name):
        """A parameter or buffer by its checkpoint name."""
        *path, last = name.split(".")
        return getattr(self.get_submodule(".".join(path)), last)

    def extra_repr(self):
        default = {each["name"]: option_value(each, each["default"]) for each in LAYERS[self.layer]["options"]}
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items() if value != default[name])

    def __getstate__(self):  # the function itself is made again from the options
        return {key: value for key, value in self.__dict__.items() if key != "forward"}

    def __setstate__(self, state):
        super().__setstate__(state)
        self._make_forward()


def _document(layer):
    lines = [layer["summary"] + ".", "", layer["equation"], "", "Source: " + layer["paper"], "", "Options:"]
    lines += [f"    {each['name']} = {each['default']}: {each['doc']}" for each in layer["options"]]
    return "\n".join(lines)


def _class(layer):
    try:
        text = source(record(layer["name"], {}))
    except ValueError:  # a layer whose defaults leave something to say, such as the size of a grid: each module has its own forward
        text = None
    options = [
        inspect.Parameter(each["name"], inspect.Parameter.KEYWORD_ONLY, default=option_value(each, each["default"]))
        for each in layer["options"]
    ]
    made = type(
        layer["module"],
        (Layer,),
        {
            "__doc__": _document(layer),
            "__module__": __name__,
            "__signature__": inspect.Signature(options),
            "layer": layer["name"],
            "default_code": text,
            **({} if text is None else {"forward": _compiled(layer["module"], text)}),
        },
    )
    return made


globals().update({layer["module"]: _class(layer) for layer in LAYERS.values()})

from ._model import MLP, Block, Model, Norm  # noqa: E402, they are made of the layers
