"""Language models from the layers of linnet.nn: the family `linnet` of the runtime (src/runtime/families/linnet.cc) in torch.

    model = linnet.nn.Model({
        "model_type": "linnet", "vocab_size": 256, "hidden_size": 128, "tie_word_embeddings": True,
        "linnet": {"layers": [{"mixer": "gated_deltanet", "options": {"heads": 2, "key": 64, "value": 64}, "repeat": 3},
                              {"mixer": "softmax_attention", "options": {"heads": 4}}]}})
    logits = model(ids)                 # ids [B, T] -> [B, T, vocabulary]
    model.save("folder")                # which `linnet generate folder` and linnet.runtime.load run
    model = linnet.nn.Model.load("folder")

Names of parameters are those of files: embed_tokens, embed_positions, layers.<i>.input_layernorm, layers.<i>.self_attn.<layer's>,
layers.<i>.post_attention_layernorm, layers.<i>.mlp.gate_proj | up_proj | down_proj, norm, lm_head.
"""

import difflib
import functools
import json
import os
import pathlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ._files import read_checkpoint, write_tensors
from ._ops import FUNCTIONS
from ._records import LAYERS, products
from ._state import State, call

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
               "gelu_tanh": "gelu_tanh", "relu": "relu", "relu2": "relu2", "sigmoid": "sigmoid", "tanh": "tanh"}  # fmt: skip
BLOCK_OPTIONS = ("mixer", "options", "mlp", "act", "intermediate_size", "bias", "repeat")


def _one_of(what, value, choices):
    if value not in choices:
        raise ValueError(f"linnet.nn: {what} is {value!r}, expected {', '.join(choices)}")
    return value


def _option_text(value):
    """An option as config.json has it, as the library reads it."""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, (list, tuple)):
        return ",".join(str(part) for part in value)
    return repr(value) if isinstance(value, float) else str(value)


class Norm(nn.Module):
    """kind rms: x / rms(x) times weight; layer: (x - mean) / deviation times weight plus bias."""

    def __init__(self, hidden, kind="rms", eps=1e-6, **where):
        super().__init__()
        self.kind, self.eps = _one_of("norm", kind, ("rms", "layer")), eps
        self.weight = nn.Parameter(torch.ones(hidden, **where))
        self.bias = nn.Parameter(torch.zeros(hidden, **where)) if kind == "layer" else None

    def reset_parameters(self):
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x):
        if self.kind == "rms":
            return FUNCTIONS["rms_norm"](x=x, weight=self.weight, eps=self.eps)
        return FUNCTIONS["layer_norm"](x=x, weight=self.weight, bias=self.bias, eps=self.eps)

    def extra_repr(self):
        return f"{self.weight.shape[0]}, {self.kind}, eps={self.eps}"


class MLP(nn.Module):
    """kind glu: down(act(gate(x)) up(x)); plain: down(act(up(x)))."""

    def __init__(self, hidden, inner, kind="glu", act="silu", bias=False, **where):
        super().__init__()
        self.kind, self.act = _one_of("mlp", kind, ("glu", "plain")), ACTIVATIONS[_one_of("act", act, ACTIVATIONS)]
        if kind == "glu":
            self.gate_proj = nn.Linear(hidden, inner, bias, **where)
        self.up_proj = nn.Linear(hidden, inner, bias, **where)
        self.down_proj = nn.Linear(inner, hidden, bias, **where)
        self.reset_parameters()

    def reset_parameters(self):
        for part in self.children():
            nn.init.normal_(part.weight, 0, 0.02)
            if part.bias is not None:
                nn.init.zeros_(part.bias)

    def forward(self, x):
        if self.kind == "glu":
            gate, up = products(x, (self.gate_proj.weight, self.gate_proj.bias), (self.up_proj.weight, self.up_proj.bias))
            y = FUNCTIONS["glu"](gate=gate, up=up, act=self.act)
        else:
            y = FUNCTIONS["activation"](x=self.up_proj(x), act=self.act)
        return self.down_proj(y)

    def extra_repr(self):
        return f"{self.kind}, {self.act}"


class Block(nn.Module):
    """A layer that mixes tokens and an MLP, each with its norm and its residual.

    mixer: a layer's name (`linnet list`), options: its options; mlp: glu, plain or none.
    order pre: x += mixer(norm(x)); x += mlp(norm(x))      post: x = norm(x + mixer(x)); x = norm(x + mlp(x))
    parallel: y = norm(x); x += mixer(y) + mlp(y)
    """

    def __init__(self, hidden, mixer="softmax_attention", options=None, mlp="glu", act=None, intermediate_size=None, bias=False,
                 order="pre", norm="rms", norm_eps=1e-6, **where):  # fmt: skip
        super().__init__()
        if mixer not in LAYERS:
            near = difflib.get_close_matches(str(mixer), LAYERS, 1)
            hint = f"did you mean {near[0]!r}?" if near else "`linnet list` has them all"
            raise ValueError(f"linnet.nn: mixer is {mixer!r}, which is no layer; {hint}")
        from . import nn as layers

        self.order = _one_of("order", order, ("pre", "post", "parallel"))
        texts = {name: _option_text(value) for name, value in {"hidden": hidden, **(options or {})}.items()}
        self.self_attn = getattr(layers, LAYERS[mixer]["module"]).from_text(texts, **where)
        self.input_layernorm = Norm(hidden, norm, norm_eps, **where)
        self.mlp = self.post_attention_layernorm = None
        if _one_of("mlp", mlp, ("glu", "plain", "none")) != "none":
            self.mlp = MLP(hidden, intermediate_size or 4 * hidden, mlp, act or {"glu": "silu", "plain": "gelu"}[mlp], bias, **where)
            if order != "parallel":
                self.post_attention_layernorm = Norm(hidden, norm, norm_eps, **where)

    def make_state(self, rows=1, capacity=64):
        return self.self_attn.make_state(rows, capacity)

    def forward(self, x, state=None, cu_seqlens=None, mask=None):
        if self.order == "pre":
            x = x + self.self_attn(self.input_layernorm(x), state, cu_seqlens, mask)
            return x if self.mlp is None else x + self.mlp(self.post_attention_layernorm(x))
        if self.order == "post":
            x = self.input_layernorm(x + self.self_attn(x, state, cu_seqlens, mask))
            return x if self.mlp is None else self.post_attention_layernorm(x + self.mlp(x))
        y = self.input_layernorm(x)
        x = x + self.self_attn(y, state, cu_seqlens, mask)
        return x if self.mlp is None else x + self.mlp(y)


def read_config(config):
    """A configuration as a dictionary: given as one, as a path of config.json, or as the path of a folder that has one."""
    if isinstance(config, dict):
        return config
    path = pathlib.Path(config)
    path = path / "config.json" if path.is_dir() else path
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"linnet.nn.Model: {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"linnet.nn.Model: {path} is no JSON: {error}") from None


class Model(nn.Module):
    """A language model of any list of layers.

    config: a dictionary or the path of a config.json, as the runtime reads it (docs/layers.md, "Models").
    ids [B, T] -> logits [B, T, vocabulary]. `model.hidden(ids)` stops before the head: [B, T, hidden].
    """

    gradient_checkpointing = False  # true: blocks are computed again for their gradients, in training

    def __init__(self, config, *, device=None, dtype=None):
        super().__init__()
        self.config = json.loads(json.dumps(read_config(config)))  # a copy that is certainly JSON
        self.build(self.config, device=device, dtype=dtype)

    def build(self, config, **where):
        """Makes the parts that a configuration describes."""
        if config.get("model_type", "linnet") != "linnet":
            raise ValueError(f"linnet.nn.Model: model_type is {config['model_type']!r}, expected 'linnet'")
        config.setdefault("model_type", "linnet")
        for name in ("vocab_size", "hidden_size"):
            if not isinstance(config.get(name), int) or config[name] < 1:
                raise ValueError(f"linnet.nn.Model: {name} is {config.get(name)!r}, expected a number from 1 on")
        own = config.get("linnet") or {}
        if not own.get("layers"):
            raise ValueError("linnet.nn.Model: linnet.layers is missing: the list of blocks")
        hidden, order = config["hidden_size"], own.get("order", "pre")
        shared = {"order": order, "norm": own.get("norm", "rms"), "norm_eps": own.get("norm_eps", 1e-6)}
        self.embed_tokens = nn.Embedding(config["vocab_size"], hidden, **where)
        self.embed_positions = nn.Embedding(own["positions"], hidden, **where) if own.get("positions") else None
        self.layers = nn.ModuleList()
        for entry in own["layers"]:
            for name in entry:
                if name not in BLOCK_OPTIONS:
                    raise ValueError(f"linnet.nn.Model: a block has {name!r}, expected {', '.join(BLOCK_OPTIONS)}")
            block = {name: value for name, value in entry.items() if name != "repeat"}
            self.layers.extend(Block(hidden, **block, **shared, **where) for _ in range(entry.get("repeat", 1)))
        has_norm = own.get("final_norm", order != "post")
        self.norm = Norm(hidden, shared["norm"], shared["norm_eps"], **where) if has_norm else None
        self.lm_head = None  # tied: the table of embed_tokens
        if not config.get("tie_word_embeddings", False):
            self.lm_head = nn.Linear(hidden, config["vocab_size"], bias=False, **where)
        for part in (self.embed_tokens, self.embed_positions, self.lm_head):
            if part is not None:
                nn.init.normal_(part.weight, 0, 0.02)

    def reset_parameters(self):
        """Initial values: the layers' pages for layers, 1 for norms, normal numbers of deviation 0.02 for all tables."""
        for module in self.modules():
            if isinstance(module, (nn.Embedding, nn.Linear)):
                nn.init.normal_(module.weight, 0, 0.02)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)
            elif module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()

    def hidden(self, ids, state=None, cu_seqlens=None, mask=None, every=False):
        """ids [B, T] -> what the head reads, [B, T, hidden]; every: what each block reads, too, [B, T, blocks + 1, hidden]."""
        if state is None and cu_seqlens is None and mask is None:
            return self.body(ids, every=every)
        return call(functools.partial(self.body, every=every), ids, state, cu_seqlens, mask)

    def body(self, ids, run=None, every=False):
        x = ids if ids.is_floating_point() else self.embed_tokens(ids)  # embeddings may be given themselves
        if self.embed_positions is not None:
            positions = torch.arange(ids.shape[1], device=ids.device) if run is None else run.positions
            x = x + self.embed_positions(positions)
        read = []
        for block in self.layers:
            read.append(x)
            if self.gradient_checkpointing and self.training:
                x = checkpoint(block, x, run, use_reentrant=False)
            else:
                x = block(x, run)
        x = x if self.norm is None else self.norm(x)
        return torch.stack([*read, x], 2) if every else x

    def logits(self, x):
        """The head: x [.., hidden] -> [.., vocabulary]."""
        return F.linear(x, self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight)

    def forward(self, ids, state=None, cu_seqlens=None, mask=None):
        """ids [B, T] -> logits [B, T, vocabulary].

        state: the memory of the rows' earlier tokens, carried on (make_state). cu_seqlens: offsets of sequences that lie end to end
        in one row. mask [B, T]: true where there is a token; padding may be on either side, and gets 0."""
        return self.logits(self.hidden(ids, state, cu_seqlens, mask))

    def make_state(self, rows=1, capacity=64):
        """A memory of so many rows for `forward` and `step`; caches have room for `capacity` tokens and grow."""
        for block in self.layers:
            block.make_state(rows, capacity)  # says why where a layer has none
        return State(rows, capacity)

    @torch.no_grad()
    def step(self, ids, state):
        """One token of each row: ids [B] -> logits [B, vocabulary]."""
        return self(ids[:, None], state=state)[:, 0]

    def save(self, folder):
        """Writes config.json and model.safetensors, which `linnet generate` and linnet.runtime.load run; a tokenizer.json beside
        them makes it speak text."""
        folder = pathlib.Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_tensors(folder / "model.safetensors", self.state_dict())
        partial = folder / f"config.json.{os.getpid()}.partial"
        partial.write_text(json.dumps(self.config, indent=2) + "\n")
        partial.replace(folder / "config.json")

    @classmethod
    def load(cls, folder, *, device=None, dtype=None):
        """The model of a folder, in the type of its weights unless dtype says another."""
        tensors = read_checkpoint(folder)
        dtype = dtype or next((each.dtype for each in tensors.values() if each.dtype.is_floating_point), None)
        model = cls(folder, device="meta", dtype=dtype).to_empty(device=device or "cpu")
        return model.fill(tensors, f"linnet.nn.Model: {folder}")

    @torch.no_grad()
    def fill(self, tensors, source="linnet.nn.Model"):
        """Takes over tensors by their names, all of them. Dimensions of 1 ([C, 1, taps] of convolutions) and flattened heads may differ."""
        trained, fixed = dict(self.named_parameters()), dict(self.named_buffers())
        missing = [name for name in trained if name not in tensors]
        unknown = [name for name in tensors if name not in trained and name not in fixed]
        unknown = [name for name in unknown if not (name == "lm_head.weight" and self.lm_head is None)]
        if missing or unknown:
            raise ValueError(f"{source} " + (f"has no {missing[0]}" if missing else f"has {unknown[0]}, which the model has not"))
        for module in self.modules():  # fixed decays and draws, which files may leave out
            if hasattr(module, "reset_buffers"):
                module.reset_buffers()
        for name, tensor in {**trained, **fixed}.items():
            if name in tensors:
                given = tensors[name]
                theirs, ours = [size for size in given.shape if size != 1], [size for size in tensor.shape if size != 1]
                if theirs != ours and (given.numel() != tensor.numel() or min(len(theirs), len(ours)) > 1):
                    raise ValueError(f"{source}: {name} has shape {list(given.shape)}, expected {list(tensor.shape)}")
                tensor.copy_(given.reshape(tensor.shape))
        return self
