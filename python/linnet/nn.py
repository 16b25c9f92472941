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

from ._records import LAYERS, initialise, numbers, option_value, positions, products, record, source, source_with_state, wide
from ._state import Run, State, call, trees

__all__ = ["MLP", "Block", "DecayGate", "Layer", "Model", "Norm", "State", "from_fla", "trees", *(layer["module"] for layer in LAYERS.values())]


def _compiled(name, text, others=None):
    """The function of this text; inspect.getsource and tracebacks find it. `others`: what it finds in place of the usual names."""
    place = f"<linnet.nn.{name} {hash(text):x}>"
    linecache.cache[place] = (len(text), None, text.splitlines(True), place)
    space = {"F": F, "linnet": linnet, "numbers": numbers, "positions": positions, "products": products, "torch": torch, "wide": wide}
    space.update(others or {})
    exec(compile(text, place, "exec"), space)
    return space["steps" if text.startswith("def steps") else "forward"]


class Part(nn.Module):
    """Holds the parameters below a name with dots: self.gk_proj[0].weight."""

    def __getitem__(self, index):
        return self._modules[str(index)]

    def extra_repr(self):
        return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in (*self._parameters.items(), *self._buffers.items()))


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
            tensor = torch.empty(parameter["shape"] or [1], device=device, dtype=dtype)  # one number is [1]: FSDP2 takes no scalars
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
        made = self._record()
        self.code, self.code_with_state = source(made), source_with_state(made)
        self.states, self.why_not = made["states"], made["why_not"]
        # Steps that read one token of the sequence, or a grid: packed sequences run the whole layer one after the other.
        self.is_whole = made["tokens"] > 0 or any(step.get("view") in ("last", "drop_token") for step in made["steps"])
        if self.code != type(self).default_code:
            self.forward = _compiled(type(self).__name__, self.code).__get__(self)
            self.steps = _compiled(type(self).__name__, self.code_with_state).__get__(self)

    def make_state(self, rows=1, capacity=64):
        """A memory of so many rows; its caches, if there are any, have room for `capacity` tokens and grow."""
        if self.why_not:
            raise NotImplementedError(self.why_not)
        return State(rows, capacity)

    def remember(self, x, state=None, cu_seqlens=None, mask=None):
        """forward with a memory (which is carried on), with packed sequences (x [1, total, hidden]) or with padding."""
        if isinstance(state, Run):  # a model's call
            return self.run_steps(x, state)
        return call(self.run_steps, x, state, cu_seqlens, mask)

    def run_steps(self, x, run):
        run.enter(self)
        if self.is_whole and run.offsets is not None:
            pieces = [self(x[:, begin:end]) for begin, end in zip(run.offsets, run.offsets[1:]) if end > begin]
            return torch.cat(pieces, 1) if pieces else x
        return self.steps(x, run)

    @torch.no_grad()
    def step(self, x, state):
        """One token of each row: x [B, hidden] in and out."""
        return self(x[:, None], state=state)[:, 0]

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

    def __getstate__(self):  # the functions are made again from the options
        return {key: value for key, value in self.__dict__.items() if key not in ("forward", "steps")}

    def __setstate__(self, state):
        super().__setstate__(state)
        self._make_forward()


class DecayGate(nn.Module):
    """linnet.decay_gate with its parameters: a [B, T, heads] -> the logarithm of the decay.

    key: channels of a head with a decay of their own (KDA), a is [B, T, heads, key] then. Initial values: exp(A_log) uniform over `rate`
    (Gated DeltaNet 0 to 16, Mamba-2 and KDA 1 to 16), softplus(dt_bias) log-uniform over `step`, at least 1e-4.
    """

    def __init__(self, heads, key=0, lower=None, rate=(1.0, 16.0), step=(1e-3, 0.1), device=None, dtype=None):
        super().__init__()
        self.lower, self.rate, self.first_step = lower, rate, step
        self.A_log = nn.Parameter(torch.empty(heads, device=device, dtype=dtype))
        self.dt_bias = nn.Parameter(torch.empty((heads, key) if key else heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self):
        rate = {"rule": "log_uniform", "a": self.rate[0], "b": self.rate[1]}
        initialise(self.A_log, rate if self.lower is None else {"rule": "zeros", "a": 0, "b": 0})
        initialise(self.dt_bias, {"rule": "inverse_softplus_log_uniform", "a": self.first_step[0], "b": self.first_step[1]})

    def forward(self, a):
        return linnet.decay_gate(a, self.A_log, self.dt_bias, self.lower)


def _document(layer):
    lines = [layer["summary"] + ".", "", layer["equation"], "", "Source: " + layer["paper"], "", "Options:"]
    lines += [f"    {each['name']} = {each['default']}: {each['doc']}" for each in layer["options"]]
    return "\n".join(lines)


def _class(layer):
    try:
        made = record(layer["name"], {})
        text, functions = source(made), {}
        for name, code in (("forward", text), ("steps", source_with_state(made))):
            functions[name] = _compiled(layer["module"], code)
    except ValueError:  # a layer whose defaults leave something to say, such as the size of a grid: each module has its own forward
        text, functions = None, {}
    options = [
        inspect.Parameter(each["name"], inspect.Parameter.KEYWORD_ONLY, default=option_value(each, each["default"]))
        for each in layer["options"]
    ]
    return type(
        layer["module"],
        (Layer,),
        {
            "__doc__": _document(layer),
            "__module__": __name__,
            "__signature__": inspect.Signature(options),
            "layer": layer["name"],
            "default_code": text,
            **functions,
        },
    )


globals().update({layer["module"]: _class(layer) for layer in LAYERS.values()})

from ._fla import from_fla  # noqa: E402, models are made of the layers
from ._model import MLP, Block, Model, Norm  # noqa: E402
