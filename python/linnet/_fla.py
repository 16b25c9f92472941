"""Checkpoints of flash-linear-attention as models of linnet.nn: GLA, RetNet, DeltaNet, Gated DeltaNet, KDA and Mamba-2, with layers of
softmax attention among them. Mamba-2 in transformers' form is read, too."""

import math
import pathlib

from ._files import read_checkpoint
from ._model import Model, read_config

# What their models share that has no counterpart here, with the value that changes nothing.
PLAIN = {"feature_map": None, "attnres_block_size": None, "use_gv": False}


class _Fields:
    """The fields of a configuration, with the defaults of the model's own class."""

    def __init__(self, config, defaults):
        self.config, self.defaults = config, defaults

    def __getattr__(self, name):
        given = self.config.get(name)
        return self.defaults.get(name) if given is None else given

    def expect(self, **values):
        for name, value in values.items():
            given = self.config.get(name, value)
            if given != value and given is not None:
                raise ValueError(f"linnet.nn.from_fla: {name} is {given!r}, expected {value!r}: the layer here has nothing else")


def _heads(c, width):
    """Channels of a head when all of them together are `width` times those of the model."""
    return int(c.hidden_size * width) // c.num_heads


def _gla(c):
    c.expect(use_gk=True)
    return {"heads": c.num_heads, "kv_heads": c.num_kv_heads or 0, "key": _heads(c, c.expand_k), "value": _heads(c, c.expand_v),
            "taps": c.conv_size if c.use_short_conv else 0, "gate": c.use_output_gate, "norm": c.elementwise_affine,
            "clamp": "none" if c.clamp_min is None else c.clamp_min, "eps": c.norm_eps}  # fmt: skip


def _retnet(c):
    c.expect(use_short_conv=False)
    if c.num_kv_heads not in (None, c.num_heads):
        c.expect(num_kv_heads=c.num_heads)
    return {"heads": c.num_heads, "key": _heads(c, c.expand_k), "value": _heads(c, c.expand_v), "rope": "half", "norm": c.elementwise_affine,
            "gate": c.use_output_gate, "eps": c.norm_eps}  # fmt: skip


def _delta_net(c):
    return {"heads": c.num_heads, "key": _heads(c, c.expand_k), "value": _heads(c, c.expand_v), "taps": c.conv_size if c.use_short_conv else 0,
            "activation": "elu1" if c.qk_activation == "elu" else c.qk_activation, "norm": c.qk_norm, "use_beta": c.use_beta,
            "double": c.allow_neg_eigval, "gate": c.use_gate, "eps": c.norm_eps}  # fmt: skip


def _gated_deltanet(c):
    return {"heads": c.num_heads, "value_heads": c.num_v_heads or 0, "key": c.head_dim, "value": int(c.head_dim * c.expand_v),
            "taps": c.conv_size if c.use_short_conv else 0, "gate": c.use_gate, "double": c.allow_neg_eigval, "eps": c.norm_eps}  # fmt: skip


def _kda(c):
    if c.num_v_heads not in (None, c.num_heads):
        c.expect(num_v_heads=c.num_heads)
    return {"heads": c.num_heads, "key": c.head_dim, "value": int(c.head_dim * c.expand_v), "taps": c.conv_size if c.use_short_conv else 0,
            "double": c.allow_neg_eigval, "lower": "none" if c.lower_bound is None else c.lower_bound, "eps": c.norm_eps}  # fmt: skip


def _number(value):
    """A number of config.json, where transformers writes infinity as an object."""
    return float(value["__float__"] if isinstance(value, dict) else value)


def _mamba2(c):
    c.expect(hidden_act="silu")
    low, high = (_number(each) for each in c.dt_limit or c.time_step_limit or (0.0, math.inf))
    return {"inner": int(c.expand * c.hidden_size), "head": c.head_dim, "state": c.state_size, "groups": c.n_groups, "taps": c.conv_kernel,
            "conv_bias": c.use_conv_bias, "bias": c.use_bias, "skip_per_channel": c.D_has_hdim, "norm": c.rmsnorm,
            "norm_before_gate": c.norm_before_gate, "norm_all": bool(c.norm_all), "dt_min": low, "dt_max": "none" if math.isinf(high) else high,
            "eps": c.norm_eps}  # fmt: skip


_SHARED = {"hidden_size": 2048, "num_hidden_layers": 24, "vocab_size": 32000, "norm_eps": 1e-6, "hidden_ratio": 4, "conv_size": 4,
           "elementwise_affine": True, "use_output_gate": True, "use_gate": False, "use_short_conv": True, "allow_neg_eigval": False}  # fmt: skip
# model_type: the layer, its options, the defaults of the configuration.
KINDS = {
    "gla": ("gated_linear_attention", _gla, {"expand_k": 0.5, "expand_v": 1.0, "num_heads": 4, "use_short_conv": False}),
    "retnet": ("retention", _retnet, {"expand_k": 1.0, "expand_v": 2.0, "num_heads": 8, "hidden_ratio": 2, "use_short_conv": False}),
    "delta_net": ("deltanet", _delta_net, {"expand_k": 1.0, "expand_v": 1.0, "num_heads": 16, "qk_activation": "silu", "qk_norm": "l2", "use_beta": True}),
    "gated_deltanet": ("gated_deltanet", _gated_deltanet, {"num_heads": 6, "head_dim": 256, "expand_v": 2.0, "use_gate": True, "num_hidden_layers": 21}),
    "kda": ("kda", _kda, {"num_heads": 16, "head_dim": 128, "expand_v": 1.0}),
    "mamba2": ("mamba2", _mamba2, {"head_dim": 64, "state_size": 128, "expand": 2, "n_groups": 1, "conv_kernel": 4, "use_conv_bias": True, "use_bias": False,
                                   "D_has_hdim": False, "rmsnorm": True, "norm_before_gate": False, "num_hidden_layers": 48, "norm_eps": 1e-5}),
}  # fmt: skip


def _attention(c, spec):
    """A block of softmax attention: window_size counts the token itself."""
    window = spec.get("window_size")
    return {"heads": spec["num_heads"], "kv_heads": spec.get("num_kv_heads") or 0, "bias": spec.get("qkv_bias", False),
            "rope_base": spec.get("rope_theta", 10000.0), "window": [window - 1 if window else -1, -1]}  # fmt: skip


def translate(config):
    """A configuration of flash-linear-attention as one of linnet.nn.Model."""
    kind = config.get("model_type")
    if kind not in KINDS:
        raise ValueError(f"linnet.nn.from_fla: model_type is {kind!r}, expected {', '.join(KINDS)}")
    mixer, options_of, defaults = KINDS[kind]
    if "layer_norm_epsilon" in config:  # transformers' Mamba-2, whose norm spans all groups
        config = {"norm_eps": config["layer_norm_epsilon"], "norm_before_gate": False, "norm_all": True, **config}
    c = _Fields(config, _SHARED | defaults)
    c.expect(**PLAIN)
    options = options_of(c)
    inner = c.intermediate_size or 256 * ((int(c.hidden_size * c.hidden_ratio * 2 / 3) + 255) // 256)
    block = {"mixer": mixer, "options": options, "mlp": "none"}
    if kind != "mamba2":
        c.expect(hidden_act="swish")
        block |= {"mlp": "glu", "act": "silu", "intermediate_size": inner}
    blocks = [block] * c.num_hidden_layers
    for spec in [c.attn] if isinstance(c.attn, dict) else c.attn or []:
        for index in spec["layers"]:
            blocks[index] = {**block, "mixer": "softmax_attention", "options": _attention(c, spec)}
    made = {"model_type": "linnet", "vocab_size": c.vocab_size, "hidden_size": c.hidden_size,
            "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
            "linnet": {"order": "pre", "norm": "rms", "norm_eps": c.norm_eps, "layers": blocks}}  # fmt: skip
    return made | {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(name) is not None}


def name_of(theirs, mixer):
    """Our name of one of their tensors."""
    name = theirs.removeprefix("model.").removeprefix("backbone.")
    if name.startswith(("embeddings.", "embedding.")):
        return "embed_tokens.weight"
    if name == "norm_f.weight":
        return "norm.weight"
    parts = name.split(".")
    if parts[0] == "layers":
        renamed = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "norm": "input_layernorm", "attn": "self_attn", "mixer": "self_attn"}
        parts[2] = renamed.get(parts[2], parts[2])
        # One norm under two names, with the gate inside or behind it.
        norms = {"gated_linear_attention": {"g_norm": "g_norm_swish_gate"}, "retention": {"g_norm_swish_gate": "g_norm"}}.get(mixer, {})
        if parts[2] == "self_attn":
            parts[3] = norms.get(parts[3], parts[3])
    return ".".join(parts)


def from_fla(source, tensors=None, *, device=None, dtype=None):
    """A model of flash-linear-attention as a linnet.nn.Model.

        model = linnet.nn.from_fla("folder")                # config.json and safetensors
        model = linnet.nn.from_fla(config, state_dict)      # their configuration as a dictionary, their tensors by name
        model.save("other")                                 # for `linnet generate`

    GLA, RetNet, DeltaNet, Gated DeltaNet, KDA and Mamba-2 (also transformers'), with layers of softmax attention (`attn`). What a layer here
    has not is refused with its field's name.
    """
    config = read_config(source)
    if tensors is None:
        if isinstance(source, dict):
            raise ValueError("linnet.nn.from_fla: a configuration without tensors; give them, or the path of a folder")
        folder = pathlib.Path(source)
        tensors = read_checkpoint(folder if folder.is_dir() else folder.parent)
    made = translate(config)
    mixer = KINDS[config["model_type"]][0]
    named = {name_of(name, mixer): tensor for name, tensor in tensors.items() if not name.endswith("rotary.inv_freq")}
    dtype = dtype or named["embed_tokens.weight"].dtype
    model = Model(made, device="meta", dtype=dtype).to_empty(device=device or "cpu")
    return model.fill(named, "linnet.nn.from_fla: the checkpoint")
