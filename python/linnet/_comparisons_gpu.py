"""The papers' comparisons at a size that a GPU does in minutes, many runs beside each other (linnet.results --jobs --beside).

Each takes the published setting and shortens it: fewer steps, two learning rates, few seeds, the same for every row. `--full` is the
published protocol.
"""

from ._comparison import DATA, Comparison, attention_sinks, nlinear, over_length, speed

FAST = {"dtype": "bf16", "log_every": 50, "checkpoint_every": 0, "warmup": 100, "final_lr": 0}

# Zoology's harder mixture: a convolution (BaseConv) and one layer, no MLP, no positions. Published: 32 epochs of 703 steps, four rates.
ZOOLOGY = {**FAST, "length": "64,128,256,256,256", "pairs": "4,8,16,32,64", "examples": "100000,20000,20000,20000,20000",
           "eval.length": "64,64,64,128,256,512,1024", "eval.pairs": "4,8,16,32,64,128,256", "vocab": 8192, "random_filler": 1, "heads": 2,
           "norm": "layer", "batch": 256, "steps": 3000, "eval_every": 1000, "eval_examples": 512, "stop_at": 0.99}  # fmt: skip
# MetaLA's hardest recall: two layers with channel mixers. The paper trains on 512 tokens alone, 6.4 million sequences; here shorter ones come
# along, which begin to be recalled much sooner.
METALA = {**FAST, "length": "64,128,256,512", "pairs": "8,20,40,80", "examples": 40000, "eval.length": 512, "eval.pairs": 80, "vocab": 8192,
          "eval_examples": 512, "width": 128, "heads": 2, "mlp": "glu", "batch": 64, "steps": 4000, "eval_every": 1000, "stop_at": 0.99}  # fmt: skip
MAD = {**FAST, "width": 128, "heads": 8, "layers": 2, "mlp": "glu", "expand": 3, "norm": "layer", "tie": 0, "init": "fan_in", "batch": 128,
       "examples": 12800, "eval_examples": 1280, "steps": 2000, "eval_every": 2000, "weight_decay": 0}  # fmt: skip
TEXT = {**FAST, "path": DATA / "enwik8/enwik8", "length": 1024, "layers": 8, "width": 512, "mlp": "glu", "expand": 8 / 3, "batch": 16, "steps": 600,
        "warmup": 60, "final_lr": 0.1, "eval_every": 600, "eval_examples": 256}  # fmt: skip
FORECAST = {**FAST, "dtype": "f32", "lookback": 96, "width": 64, "heads": 4, "layers": 2, "batch": 128, "steps": 2000, "eval_every": 250,
            "eval_examples": 20000, "best": 1}  # fmt: skip
IMAGES = {**FAST, "path": DATA / "mnist/train-images-idx3-ubyte.gz", "labels": DATA / "mnist/train-labels-idx1-ubyte.gz",
          "eval.path": DATA / "mnist/t10k-images-idx3-ubyte.gz", "eval.labels": DATA / "mnist/t10k-labels-idx1-ubyte.gz", "patch": 4, "positions": 49,
          "layers": 4, "width": 96, "heads": 3, "norm": "layer", "mlp": "plain", "expand": 4, "batch": 128, "steps": 3000, "eval_every": 3000,
          "examples": 60000, "eval_examples": 10000}  # fmt: skip


def behind_base_conv(layer, width, **options):
    """An arm of Zoology's: BaseConv in the first block, the layer in the second."""
    words = {"width": width, "short_conv.form": "base", "short_conv.bias": 1}
    return f"short_conv,{layer}", words | {key.replace("__", "."): value for key, value in options.items()}


def mad(task, **options):
    return (task, {**MAD, **options})


MAD_COLUMNS = {
    "compression": mad("compression"),
    "compression-V64": mad("compression", vocab=64),
    "compression-T64": mad("compression", length=64),
    "fuzzy": mad("fuzzy_recall"),
    "fuzzy-V32": mad("fuzzy_recall", vocab=32),
    "fuzzy-T256": mad("fuzzy_recall", length=256),
    "recall": mad("recall"),
    "recall-V128": mad("recall", vocab=128),
    "recall-N1600": mad("recall", examples=1600),
    "memorisation": mad("memorisation", examples=256),
    "memorisation-V1024": mad("memorisation", examples=256, vocab=1024),
    "memorisation-V4096": mad("memorisation", examples=256, vocab=4096),
    "noisy": mad("noisy_recall"),
    "noisy-V144": mad("noisy_recall", vocab=144),
    "noisy-80%": mad("noisy_recall", noise=0.8),
    "copy": mad("selective_copy"),
    "copy-V128": mad("selective_copy", vocab=128),
    "copy-64": mad("selective_copy", items=64),
}

GPU = {
    "zoology": Comparison(
        "recall against the size of the state, Zoology's harder mixture",
        {"accuracy": ("mqar", ZOOLOGY)},
        {
            "softmax_attention-64": behind_base_conv("softmax_attention", 64, rope="none"),
            "softmax_attention-window-32": behind_base_conv("softmax_attention", 128, heads=1, rope="none", window="32,0"),
            "softmax_attention-window-128": behind_base_conv("softmax_attention", 128, heads=1, rope="none", window="128,0"),
            "linear_attention-64": behind_base_conv("linear_attention", 64),
            "linear_attention-128": behind_base_conv("linear_attention", 128),
            "gated_linear_attention-64": behind_base_conv("gated_linear_attention", 64),
            "gated_linear_attention-128": behind_base_conv("gated_linear_attention", 128),
            "deltanet-64": behind_base_conv("deltanet", 64),
            "deltanet-128": behind_base_conv("deltanet", 128),
            "gated_deltanet-64": behind_base_conv("gated_deltanet", 64, gate=0, layer__key=32, layer__value=64),
            "gated_deltanet-128": behind_base_conv("gated_deltanet", 128, gate=0, layer__key=64, layer__value=128),
            "mamba2-64": ("mamba2", {"width": 64, "layer.state": 16, "norm": "rms"}),
            "mamba2-128": ("mamba2", {"width": 128, "layer.state": 16, "norm": "rms"}),
            "metala_attention-64": behind_base_conv("metala_attention", 64, decay_init=0.5),
            "metala_attention-128": behind_base_conv("metala_attention", 128, decay_init=0.35),
            "zeros_attention-64": behind_base_conv("zeros_attention", 64),
            "zeros_attention-128": behind_base_conv("zeros_attention", 128),
            "free_energy_mixer-64": behind_base_conv("free_energy_mixer", 64),
        },
        rates=(3e-3, 1e-2),
        seeds=1,
        published={"softmax_attention-64": 1.00, "softmax_attention-window-32": 0.31, "softmax_attention-window-128": 0.66,
                   "gated_linear_attention-64": 0.53, "gated_linear_attention-128": 0.77, "deltanet-64": 0.79, "deltanet-128": 0.96,
                   "gated_deltanet-64": 0.89, "gated_deltanet-128": 0.99, "mamba2-64": 0.69, "mamba2-128": 0.79},
    ),
    "metala": Comparison(
        "MetaLA recalls 80 pairs in 512 tokens at width 128, where Mamba recalls none",
        {"512 tokens, 80 pairs": ("mqar", METALA)},
        {
            "metala_attention": ("metala_attention", {"taps": 2}),
            "metala_attention-decay_init=0.35": ("metala_attention", {"taps": 2, "decay_init": 0.35}),
            "mamba1": ("mamba1", {}),
        },
        rates=(1e-3, 3e-3),
        seeds=1,
        published={"metala_attention": 0.904, "mamba1": 0.0},
    ),
    "mad": Comparison(
        "FEM ahead of the Transformer, ZeroS ahead of linear attention (MAD): each task and two changes of it",
        MAD_COLUMNS,
        {
            "softmax_attention": ("softmax_attention", {}),
            "linear_attention": ("linear_attention", {}),
            "deltanet": ("deltanet", {}),
            "gated_deltanet": ("gated_deltanet", {}),
            "metala_attention": ("metala_attention", {}),
            "zeros_attention": ("zeros_attention", {}),
            "zeros_attention-zeroth=1": ("zeros_attention", {"zeroth": 1}),
            "zeros_attention-quadratic": ("zeros_attention", {"order": "quadratic"}),
            "free_energy_mixer": ("free_energy_mixer", {}),
            "free_energy_mixer-gated": ("free_energy_mixer", {"prior": "gated"}),
            "free_energy_mixer-C": ("free_energy_mixer", {"lse": 0, "temperature": 0, "gate": 0}),
            "free_energy_mixer-C,L": ("free_energy_mixer", {"temperature": 0, "gate": 0}),
            "free_energy_mixer-C,L,T": ("free_energy_mixer", {"gate": 0}),
        },
        rates=(1e-3,),
        seeds=1,
        mean=True,
    ),
    "images": Comparison(
        "InLine: linear < softmax ~ InLine without its residual < InLine; the order of QT-ViT's kernels",
        {"MNIST": ("images", IMAGES)},
        {
            "softmax_attention": ("softmax_attention", {"causal": 0, "rope": "none"}),
            "linear_attention-relu": ("linear_attention", {"causal": 0, "map": "relu"}),
            "inline_attention-residual=0": ("inline_attention", {"causal": 0, "residual": 0}),
            "inline_attention": ("inline_attention", {"causal": 0, "layer.height": 7, "layer.width": 7}),
            "qt_attention": ("qt_attention", {"dim": 32, "tokens": 49}),
            "taylor_attention": ("taylor_attention", {"causal": 0}),
        },
        rates=(1e-3, 3e-3),
        seeds=2,
        data=("mnist/train-images-idx3-ubyte.gz",),
    ),
    "forecast": Comparison(
        "FEM and ZeroS ahead of softmax attention on ETT, beside NLinear",
        {
            f"{name}-{horizon}": ("forecast", {**FORECAST, "path": DATA / f"ett/{name}.csv", "protocol": protocol, "horizon": horizon})
            for name, protocol in (("ETTh1", "ett_hour"), ("ETTm1", "ett_minute"))
            for horizon in (96, 336)
        },
        {
            "softmax_attention": ("softmax_attention", {}),
            "zeros_attention": ("zeros_attention", {}),
            "free_energy_mixer": ("free_energy_mixer", {}),
        },
        rates=(1e-3, 3e-3),
        seeds=2,
        data=("ett/ETTh1.csv", "ett/ETTm1.csv"),
        reference=nlinear,
    ),
    "gated": Comparison(
        "a gate on the read (G1) lowers the loss, the first token's attention and the largest activation",
        {"bits-per-byte": ("text", TEXT)},
        {
            "softmax_attention": ("softmax_attention", {"qk_norm": "rms"}),
            "softmax_attention-G1": ("softmax_attention", {"qk_norm": "rms", "position": "G1", "expand": 7 / 3}),
        },
        rates=(1e-3,),
        seeds=1,
        data=("enwik8/enwik8",),
        measure=attention_sinks,
    ),
    "length": Comparison(
        "DeltaNet in parallel over length: time for a token flat, the same loss as token by token",
        {"bits-per-byte": ("text", {**TEXT, "layers": 2, "mlp": "none", "steps": 10, "warmup": 2, "eval_every": 10, "eval_examples": 2})},
        {
            f"{layer}-{length}": (layer, {"task.length": length, "batch": 65536 // length, "heads": 4})
            for layer in ("deltanet", "softmax_attention")
            for length in (2048, 8192, 32768, 65536)
        },
        rates=(1e-3,),
        seeds=1,
        data=("enwik8/enwik8",),
        measure=over_length,
    ),
    "text": Comparison(
        "bits per byte of every layer and the papers' hybrids on enwik8",
        {"bits-per-byte": ("text", TEXT)},
        {
            "softmax_attention": ("softmax_attention", {}),
            "linear_attention": ("linear_attention", {}),
            "retention": ("retention", {}),
            "gated_linear_attention": ("gated_linear_attention", {"heads": 4}),
            "deltanet": ("deltanet", {"heads": 4}),
            "gated_deltanet": ("gated_deltanet", {"heads": 4}),
            "kda": ("kda", {"heads": 4}),
            "mamba2": ("mamba2", {}),
            "metala_attention": ("metala_attention", {"heads": 4}),
            "zeros_attention": ("zeros_attention", {}),
            "free_energy_mixer": ("free_energy_mixer", {}),
            # Hybrids: Gated DeltaNet and a window (H1); three of KDA and one of full attention without positions (Kimi Linear).
            "gated_deltanet,softmax_attention": ("gated_deltanet,softmax_attention", {"heads": 4, "window": "255,0"}),
            "kda,kda,kda,softmax_attention": ("kda,kda,kda,softmax_attention", {"heads": 4, "rope": "none"}),
        },
        rates=(1e-3,),
        seeds=1,
        data=("enwik8/enwik8",),
        measure=speed,
    ),
}  # fmt: skip
