"""The papers' comparisons that one core does in minutes (linnet.results): tasks and rows. Those that want a GPU: _comparisons_gpu.py."""

from ._comparison import Comparison
from ._comparisons_gpu import GPU

SMALL = {"threads": 1, "log_every": 20}
MQAR = {**SMALL, "length": 32, "pairs": 8, "vocab": 64, "random_filler": 1, "width": 64, "heads": 2, "batch": 64, "steps": 600, "eval_every": 100,
        "checkpoint_every": 600, "examples": 40000, "eval_examples": 500, "weight_decay": 0, "stop_at": 0.99}  # fmt: skip
LISTOPS = {**SMALL, "layers": 3, "width": 64, "heads": 4, "positions": 64, "batch": 32, "steps": 800, "eval_every": 200, "checkpoint_every": 800}

# One head, keys of 16 and values of 64: every recurrent arm carries 16 x 64 numbers in a block, beside the inputs of its short convolutions.
NORMALISERS = {**SMALL, "length": 32, "vocab": 64, "width": 64, "heads": 1, "batch": 64, "steps": 1500, "eval_every": 250, "checkpoint_every": 1500,
               "examples": 100000, "eval_examples": 500, "weight_decay": 0, "stop_at": 0.99}  # fmt: skip


def normalised(**options):
    """An arm of the framework's experiment: the same projections and convolutions, another normaliser."""
    return "normalised_attention", {f"layer.{key}": value for key, value in {"taps": 4, "key": 16, "value": 64, **options}.items()}


def behind_conv(layer, **options):
    """The published harder mixture has a gated short convolution in front of each mixer."""
    return f"short_conv,{layer}", options


HERE = {
    "channel_max": Comparison(
        "the free energy mixer reads each channel's largest past value in one layer; averages cannot",
        {"mse": ("channel_max", {**SMALL, "steps": 1500, "eval_every": 250, "checkpoint_every": 1500, "weight_decay": 0})},
        {
            "softmax_attention": ("softmax_attention", {"rope": "none"}),
            "softmax_attention-16-heads": ("softmax_attention", {"rope": "none", "heads": 16}),
            "linear_attention": ("linear_attention", {}),
            "gated_deltanet": ("gated_deltanet", {}),
            "zeros_attention": ("zeros_attention", {"rope": "none"}),
            "free_energy_mixer": ("free_energy_mixer", {"conv": 0, "rope": "none"}),
            "free_energy_mixer-lse=0": ("free_energy_mixer", {"conv": 0, "rope": "none", "lse": 0}),
        },
    ),
    "mqar": Comparison(
        "recall against the size of the state (Zoology)",
        {"accuracy": ("mqar", MQAR)},
        {
            "softmax_attention": behind_conv("softmax_attention", rope="none"),
            "softmax_attention-window-8": behind_conv("softmax_attention", rope="none", window="7,0"),
            "softmax_attention-window-16": behind_conv("softmax_attention", rope="none", window="15,0"),
            "linear_attention": behind_conv("linear_attention"),
            "taylor_attention": behind_conv("taylor_attention", key=8),
            "retention": behind_conv("retention"),
            "gated_linear_attention": behind_conv("gated_linear_attention"),
            "deltanet": behind_conv("deltanet"),
            "deltanet-8-heads": behind_conv("deltanet", heads=8),
            "gated_deltanet": behind_conv("gated_deltanet"),
            "gated_deltanet-8-heads": behind_conv("gated_deltanet", heads=8),
            "kda": behind_conv("kda"),
            "mamba2": behind_conv("mamba2", head=32, state=32),
            "mamba2-long-memory": behind_conv("mamba2", head=32, state=32, step_low=0.1, step_high=1, rate_low=0.05, rate_high=0.5),
            "metala_attention": behind_conv("metala_attention"),
            "zeros_attention": behind_conv("zeros_attention"),
            "free_energy_mixer": behind_conv("free_energy_mixer"),
        },
        rates=(1e-3, 3e-3),
        seeds=2,
    ),
    "normalisers": Comparison(
        "a learned normaliser brings linear attention nearer to softmax's recall, at the same state (Dynamical Systems Framework)",
        {"4 pairs": ("mqar", {**NORMALISERS, "pairs": 4}), "8 pairs": ("mqar", {**NORMALISERS, "pairs": 8})},
        {
            "softmax": normalised(normaliser="softmax"),
            "elu1-sum": normalised(normaliser="sum", map="elu1"),
            "elu1-none": normalised(normaliser="none", map="elu1"),
            "elu1-exp": normalised(normaliser="exp", map="elu1"),
            "identity-none": normalised(normaliser="none"),
            "identity-exp": normalised(normaliser="exp"),
            "identity-exp-offset-4": normalised(normaliser="exp", offset=-4),
            "mamba2": ("mamba2", {"layer.inner": 64, "layer.head": 64, "layer.state": 16}),
            "mamba1": ("mamba1", {"layer.inner": 64, "layer.state": 16}),
        },
        rates=(3e-3, 1e-2),
    ),
    "listops": Comparison(
        "hierarchical attention on an expression's own tree ahead of flat softmax attention, with the same parameters",
        {"accuracy": ("listops", LISTOPS)},
        {
            "softmax_attention": ("softmax_attention", {"causal": 0, "rope": "none"}),
            "hierarchical_attention-windows": ("hierarchical_attention", {"causal": 0, "layer.tie": "block", "arity": 4}),
            "hierarchical_attention-tree": ("hierarchical_attention", {"causal": 0, "layer.tie": "block", "task.tree": 1}),
        },
        rates=(1e-3,),
        seeds=2,
    ),
}  # fmt: skip
COMPARISONS = {**HERE, **GPU}
