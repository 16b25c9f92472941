"""What stands in the place of softmax(q k^T) v: one module per mechanism of docs/convert.md.

A mixer takes the teacher's q [B, T, H, D], k, v [B, T, Hkv, D] (after norms and rotary positions) and, by name, what else it `needs`: the
layer's input x [B, T, C], or q_raw, k_raw as projected. It returns [B, T, H, D]. Its parameters have the names of the checkpoint.
`log_weights` gives the logarithm of the weights of a few rows, for the cross entropy with the teacher's; mechanisms without such rows
have none.

Everything runs on Linnet's operators. On a GPU plain torch stands in for those of PLAIN_ON_GPU, and for one that has no CUDA kernels,
which a warning says once.
"""

import functools
import math
import warnings
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

import linnet

FLOOR = 1e-12  # of features, as in Hedgehog's code
WINDOW_FACTOR = -2.1972246  # sigmoid of it is 0.1
PLAIN_ON_GPU = ("distill", "distill_window")  # simple CUDA kernels in double, which have not been measured


@dataclass(frozen=True)
class Shape:
    """What a mixer has to know of its layer."""

    hidden: int
    heads: int
    kv_heads: int
    key: int
    value: int
    scale: float
    causal: bool
    softcap: float = 0.0  # of the scores; only windows know it


@functools.cache
def _on_gpu(operator):
    """Whether the operator has CUDA kernels; what runs instead is said once."""
    if any(row["name"].startswith("cuda") for row in linnet.info(operator)["implementations"]):
        return True
    warnings.warn(f"linnet.convert: {operator} has no CUDA kernels yet, plain torch runs in its place", RuntimeWarning, stacklevel=3)
    return False


def native(operator, tensor):
    """Whether the operator runs, and not plain torch, on the tensor's device."""
    return not tensor.is_cuda or (operator not in PLAIN_ON_GPU and _on_gpu(operator))


def repeat(y, heads):
    """Grouped heads as full ones: head h is the group's head h / (H / Hkv)."""
    return y if y.shape[2] == heads else y.repeat_interleave(heads // y.shape[2], 2)


def sides(window, causal):
    """Keys to the left and right of the own one; -1: all."""
    if window == 0:
        return -1, -1
    return (window - 1, -1) if causal else (window // 2, (window - 1) // 2)


def visible(tokens, causal, window=0, sinks=0, device=None):
    """[T, T]: whether row i sees key j; window 0: no limit."""
    left, right = sides(window, causal)
    distance = torch.arange(tokens, device=device)[:, None] - torch.arange(tokens, device=device)
    near = (distance <= left) if left >= 0 else torch.ones_like(distance, dtype=torch.bool)
    near |= torch.arange(tokens, device=device) < sinks
    right = 0 if causal else right
    return near & (distance >= -right) if right >= 0 else near


def of_one_type(q, k, v):
    """q, k, v in the values' type: under autocast rotary positions leave queries and keys in float32."""
    return (q, k, v) if q.dtype == v.dtype else (q.to(v.dtype), k.to(v.dtype), v)


def softmax(q, k, v, shape, window=0, sinks=0, with_lse=False):
    """Exact attention, all of it or inside a window with sinks; with_lse: the rows' normalisers too."""
    q, k, v = of_one_type(q, k, v)
    if native("softmax", q):
        return linnet.softmax(q, k, v, causal=shape.causal, scale=shape.scale, window=sides(window, shape.causal), prefix=sinks,
                              softcap=shape.softcap, return_lse=with_lse)  # fmt: skip
    if shape.softcap:
        raise NotImplementedError("linnet.convert: a soft cap of the scores needs linnet's softmax, which does not run on this device")
    plain = window == 0 or (shape.causal and window >= q.shape[1])
    if with_lse:
        scores = torch.einsum("bihd,bjhd->bhij", q.float(), repeat(k, shape.heads).float()) * shape.scale
        seen = visible(q.shape[1], shape.causal, 0 if plain else window, sinks, q.device)
        scores = scores.masked_fill(~seen, -math.inf)
        lse = scores.logsumexp(-1)
        out = torch.einsum("bhij,bjhd->bihd", (scores - lse[..., None]).exp().to(v.dtype), repeat(v, shape.heads))
        return out, lse.transpose(1, 2)
    mask = None if plain else visible(q.shape[1], shape.causal, window, sinks, q.device)
    q, k, v = q.transpose(1, 2), repeat(k, shape.heads).transpose(1, 2), repeat(v, shape.heads).transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=plain and shape.causal, scale=shape.scale).transpose(1, 2)


def monarch(q, k, v, shape, block, steps):
    k, v = repeat(k, shape.heads).contiguous(), repeat(v, shape.heads).contiguous()
    return linnet.monarch(q.contiguous(), k, v, block=block, steps=1 if shape.causal else steps, scale=shape.scale, causal=shape.causal)


def row_scores(q, k, rows, shape):
    """The teacher's scores [B, H, R, T] of some rows, -inf where a key is not seen."""
    scores = torch.einsum("brhd,bjhd->bhrj", q[:, rows].float(), repeat(k, shape.heads).float()) * shape.scale
    if shape.causal:
        scores = scores.masked_fill(torch.arange(k.shape[1], device=k.device) > rows[:, None], -math.inf)
    return scores


def _normalised(log_weights, rows, causal):
    """log p of rows [B, H, R, T] from log weights of all keys."""
    if causal:
        keys = torch.arange(log_weights.shape[-1], device=log_weights.device)
        log_weights = log_weights.masked_fill(keys > rows[:, None], -math.inf)
    return log_weights.log_softmax(-1)


class Mixer(nn.Module):
    """What mixers share. `rates`: the learning rate of each parameter in the layerwise fit."""

    mechanism = ""
    option_names = ()
    rates = {}
    causal_only = False
    needs = ()  # of "x", "q_raw", "k_raw"
    has_window = False  # the window can be dropped while fitting

    def __init__(self, shape, **options):
        super().__init__()
        if self.causal_only and not shape.causal:
            raise ValueError(f"{self.mechanism} is causal, this model's attention is not")
        self.shape, self.options = shape, options

    def initialise(self, sample, generator):
        """Initial values from a sample: q, k, v, x and the teacher's out of calibration sequences."""

    def log_weights(self, q, k, rows):
        return None


class Softmax(Mixer):
    mechanism = "softmax"

    def forward(self, q, k, v, more=None):
        return softmax(q, k, v, self.shape)


class Window(Mixer):
    """Exact attention to the last keys and the first; `windows`: one window for each head of keys, 0 sees all keys. Heads whose entry in
    `blocks` is above 0 are Monarch with blocks of so many tokens and as many steps as `updates` says."""

    mechanism, option_names = "window", ("window", "windows", "blocks", "updates", "sinks")

    def __init__(self, shape, **options):
        super().__init__(shape, **options)
        windows = options.get("windows")
        if windows is not None and len(windows) != shape.kv_heads:
            raise ValueError(f"window: windows has {len(windows)} entries, expected one for each head of keys, {shape.kv_heads}")
        if "blocks" in options:
            if shape.causal:
                raise ValueError("window: blocks are of encoders, this model's attention is causal")
            if windows is None or not len(windows) == len(options["blocks"]) == len(options.get("updates", ())):
                raise ValueError("window: windows, blocks and updates are lists of one length")

    def forward(self, q, k, v, more=None):
        sinks = self.options["sinks"]
        if "windows" not in self.options:
            return softmax(q, k, v, self.shape, self.options["window"], sinks)
        groups = q.shape[2] // k.shape[2]
        part = replace(self.shape, heads=groups, kv_heads=1)
        blocks, updates = (self.options.get(name) or [0] * k.shape[2] for name in ("blocks", "updates"))
        outs = []
        for g, window in enumerate(self.options["windows"]):
            own = q[:, :, g * groups : (g + 1) * groups], k[:, :, g : g + 1], v[:, :, g : g + 1]
            outs.append(monarch(*own, part, blocks[g], updates[g]) if blocks[g] else softmax(*own, part, window, sinks))
        return torch.cat(outs, 2)


class FeatureMap(nn.Module):
    def __init__(self, heads, width, features, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, width, features))
        if bias:
            self.bias = nn.Parameter(torch.zeros(heads, features))

    def initialise(self, generator):
        _, width, features = self.weight.shape
        with torch.no_grad():
            if features == width and not hasattr(self, "bias"):
                self.weight.copy_(torch.eye(width).expand_as(self.weight))
            else:  # Kaiming uniform with a = sqrt 5, as torch.nn.Linear
                bound = width**-0.5
                self.weight.copy_((torch.rand(self.weight.shape, generator=generator) * 2 - 1) * bound)

    def forward(self, x):  # [B, T, H, D] -> [B, T, H, F]
        y = torch.einsum("bthd,hdf->bthf", x.float(), self.weight)
        return y + self.bias if hasattr(self, "bias") else y


def hedgehog(y):
    return torch.cat([y.softmax(-1), (-y).softmax(-1)], -1).clamp_min(FLOOR)


class Hedgehog(Mixer):
    mechanism, option_names = "hedgehog", ("features",)
    rates = {"feature_map_q.weight": 1e-2, "feature_map_k.weight": 1e-2}
    bias = False

    def __init__(self, shape, **options):
        super().__init__(shape, **options)
        self.feature_map_q = FeatureMap(shape.heads, shape.key, options["features"], self.bias)
        self.feature_map_k = FeatureMap(shape.heads, shape.key, options["features"], self.bias)

    def initialise(self, sample, generator):
        self.feature_map_q.initialise(generator)
        self.feature_map_k.initialise(generator)

    def activate(self, y):
        return hedgehog(y)

    def features(self, q, k):
        return self.activate(self.feature_map_q(q)), self.activate(self.feature_map_k(repeat(k, self.shape.heads)))

    def linear(self, q, k, v):
        """Linear attention on the features alone, over all keys."""
        fq, fk = self.features(q, k)
        v = repeat(v, self.shape.heads)
        if v.is_cuda:  # the chunked kernels there do not divide: the sum of weights is one more channel of the values
            both = torch.cat([v, torch.ones_like(v[..., :1])], -1).float()
            out = linnet.linear(fq, fk, both, map="identity", scale=1.0, causal=self.shape.causal)
            out = out[..., :-1] / out[..., -1:]
        else:
            out = linnet.linear(fq, fk, v.float(), map="identity", normalize=True, eps=0.0, scale=1.0, causal=self.shape.causal,
                                allow_signed=True)  # fmt: skip
        return out.to(v.dtype)

    def forward(self, q, k, v, more=None):
        return self.linear(q, k, v)

    def log_weights(self, q, k, rows):
        fq, fk = self.features(q[:, rows], k)
        return _normalised(torch.einsum("brhf,bjhf->bhrj", fq, fk).log(), rows, self.shape.causal)


class T2R(Hedgehog):
    mechanism = "t2r"
    rates = {f"feature_map_{n}.{part}": 1e-2 for n in "qk" for part in ("weight", "bias")}
    bias = True

    def activate(self, y):
        return y.clamp_min(FLOOR)


def hybrid_in_blocks(q, k, v, fq, fk, share, window):
    """The sliding hybrid in plain torch and linear time: blocks of `window` queries see their own block and the one before
    (near keys by softmax, the rest of the one before by features), older blocks through summed states. All [B, T, H, *]."""
    batch, tokens, heads, width = q.shape
    fill = -tokens % window
    ones = torch.ones_like(v[..., :1])

    def blocks(y):  # [B, H, n, window, *]
        return F.pad(y.float(), (0, 0, 0, 0, 0, fill)).unflatten(1, (-1, window)).permute(0, 3, 1, 2, 4)

    def both(y):  # the block before and the own one: [B, H, n, 2 window, *]
        return torch.cat([F.pad(y, (0, 0, 0, 0, 1, 0))[:, :, :-1], y], 3)

    q, fq, k, fk, v = blocks(q), blocks(fq), blocks(k), blocks(fk), blocks(torch.cat([v, ones], -1))
    rows, keys = torch.arange(window, device=q.device)[:, None], torch.arange(2 * window, device=q.device)
    first = (torch.arange(q.shape[2], device=q.device) == 0)[:, None, None]
    near = (keys > rows) & (keys <= rows + window) & ~(first & (keys < window))
    far = (keys <= rows) & ~first
    scores = (q @ both(k).mT * width**-0.5).masked_fill(~near, -math.inf)
    scores = scores - scores.amax(-1, keepdim=True).detach()
    weights = share[:, None, None, None] * scores.exp() + (fq @ both(fk).mT).masked_fill(~far, 0)
    sums = (fk.mT @ v).cumsum(2)  # up to and including a block
    older = F.pad(sums, (0, 0, 0, 0, 2, 0))[:, :, :-2]
    out = weights @ both(v) + fq @ older
    out = out[..., :-1] / out[..., -1:]
    return out.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :tokens]


class Hybrid(Hedgehog):
    """LoLCATs: near keys by softmax, older ones by Hedgehog features."""

    mechanism, option_names = "hybrid", ("window", "features", "sinks", "form")
    rates = {**Hedgehog.rates, "window_factor": 1e-2}
    causal_only = has_window = True

    def __init__(self, shape, **options):
        super().__init__(shape, **options)
        if options.get("sinks", 0):
            raise ValueError("hybrid has no sinks, hybrid-exact has")
        self.window_factor = nn.Parameter(torch.full((shape.heads,), WINDOW_FACTOR))

    def initialise(self, sample, generator):
        super().initialise(sample, generator)
        with torch.no_grad():
            self.window_factor.fill_(WINDOW_FACTOR)

    def scaled(self, q):
        """q whose scores have the scale D^-1/2."""
        factor = self.shape.scale * math.sqrt(self.shape.key)
        return q if abs(factor - 1) < 1e-9 else q * factor

    def near(self, rows, tokens, device):
        keys, window = torch.arange(tokens, device=device), self.options["window"]
        if self.options.get("form", "sliding") == "terraced":
            first = (rows // window - 1) * window
        else:
            first = rows - window + 1
        return (keys >= first[:, None]) & (keys <= rows[:, None])

    def dense(self, q, k, rows):
        """Log weights [B, H, R, T] of rows, not normalised; -inf: not seen."""
        scores = row_scores(q, k, rows, self.shape)
        near = self.near(rows, k.shape[1], k.device)
        local = scores.masked_fill(~near, -math.inf)
        fq, fk = self.features(self.scaled(q[:, rows]), k)
        far = torch.einsum("brhf,bjhf->bhrj", fq, fk).log()
        share = F.logsigmoid(self.window_factor)[:, None, None]
        logs = torch.where(near, local - local.amax(-1, keepdim=True).detach() + share, far)
        return logs.masked_fill(scores == -math.inf, -math.inf)

    def forward(self, q, k, v, more=None, drop_window=False):
        if drop_window:
            return self.linear(self.scaled(q), k, v)
        if native("distill_window", q):
            form = self.options.get("form", "sliding")
            k, v = repeat(k, self.shape.heads), repeat(v, self.shape.heads)
            maps = self.feature_map_q.weight, self.feature_map_k.weight
            wanted = {"return_out_terraced": True} if form == "terraced" else {}
            results = linnet.distill_window(self.scaled(q), k, v, *maps, self.window_factor, window=self.options["window"], **wanted)
            return results[1] if wanted else results
        if self.options.get("form", "sliding") == "terraced":
            weights = self.dense(q, k, torch.arange(q.shape[1], device=q.device)).softmax(-1)
            return torch.einsum("bhij,bjhd->bihd", weights.to(v.dtype), repeat(v, self.shape.heads))
        q, k, v = self.scaled(q).float(), repeat(k, self.shape.heads).float(), repeat(v, self.shape.heads)
        fq, fk = hedgehog(self.feature_map_q(q)), hedgehog(self.feature_map_k(k))
        return hybrid_in_blocks(q, k, v, fq, fk, self.window_factor.sigmoid(), self.options["window"]).to(v.dtype)

    def log_weights(self, q, k, rows):
        return self.dense(q, k, rows).log_softmax(-1)


class Distill(Mixer):
    """Positive features of balanced queries and keys; the balance is a number for each channel, which runs everywhere."""

    mechanism, option_names = "distill", ("features",)
    rates = {"z": 2e-2, "log_alpha": 0.2}

    def __init__(self, shape, **options):
        super().__init__(shape, **options)
        heads, width, features = shape.heads, shape.key, options["features"]
        self.z = nn.Parameter(torch.empty(heads, features, width))
        self.log_alpha = nn.Parameter(torch.zeros(heads, features))
        self.register_buffer("q_mean", torch.zeros(heads, width))
        self.register_buffer("k_mean", torch.zeros(heads, width))
        self.make_balance()

    def make_balance(self):
        self.register_buffer("balance", torch.ones(self.shape.heads, self.shape.key))

    def set_balance(self, q, k, v):
        """A S_q A = A^-1 S_k A^-1 with a diagonal A."""
        second = [(y - y.mean((0, 1))).double().square().mean((0, 1)) for y in (q, k)]
        second = [y + 1e-6 * y.mean(-1, keepdim=True) + 1e-30 for y in second]
        self.q_mean.copy_(q.double().mean((0, 1)))
        self.k_mean.copy_(k.double().mean((0, 1)))
        self.balance.copy_((second[1] / second[0]) ** 0.25)

    def initialise(self, sample, generator):
        with torch.no_grad():
            self.z.copy_(torch.randn(self.z.shape, generator=generator))
            self.log_alpha.zero_()
            samples = (sample["q"].float() * self.factor(), sample["k"].float(), sample["v"].float())
            self.set_balance(*(repeat(y, self.shape.heads) for y in samples))

    def factor(self):  # q times this has scores of scale D^-1/2
        factor = self.shape.scale * math.sqrt(self.shape.key)
        return 1.0 if abs(factor - 1) < 1e-9 else factor

    def balance_both(self, q, k):
        return q * self.balance, k / self.balance

    def balanced(self, q, k):
        """A (q - q0), A^-1 (k - k0), the log weights of keys [B, T, H], and q - q0 at scale D^-1/2."""
        q, k = q.float() * self.factor(), repeat(k, self.shape.heads).float()
        centred = q - self.q_mean
        logw = (k * self.q_mean).sum(-1) * self.shape.key**-0.5
        return (*self.balance_both(centred, k - self.k_mean), logw, centred)

    def log_features(self, x):  # balanced [B, T, H, D] -> [B, T, H, M]
        width, features = self.shape.key, self.log_alpha.shape[1]
        turned = torch.einsum("bthd,hmd->bthm", x, self.z) * width**-0.25
        return turned - (x.square().sum(-1) / (2 * math.sqrt(width)))[..., None] + 0.5 * (self.log_alpha - math.log(features))

    def sums(self, lq, lk, v, causal):
        """sum_j exp(lq_i + lk_j) [v_j, 1] as [B, T, H, V + 1] in units of exp(peak), and peak [B, T, H]."""
        top = lk.detach().amax(1, keepdim=True)
        top = torch.where(top == -math.inf, torch.zeros_like(top), top)
        peak = (lq.detach() + top).amax(-1, keepdim=True)
        both = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        # In bf16 the weights, which lie between 0 and 1, are rounded like the values; their exponents are not.
        kind = v.dtype if v.is_cuda and v.dtype == torch.bfloat16 else torch.float32
        out = linnet.linear((lq + top - peak).exp().to(kind), (lk - top).exp().to(kind), both.to(kind), map="identity", scale=1.0,
                            causal=causal)  # fmt: skip
        return out.float(), peak[..., 0]

    def features_alone(self, q, k, v):
        bq, bk, logw, _ = self.balanced(q, k)
        v = repeat(v, self.shape.heads)
        if native("distill", q):
            out = linnet.distill(bq, bk, v.float(), self.z, self.log_alpha.exp(), key_logw=logw, causal=self.shape.causal)
        else:
            out, _ = self.sums(self.log_features(bq), self.log_features(bk) + logw[..., None], v, self.shape.causal)
            out = out[..., :-1] / out[..., -1:].clamp_min(1e-30)
        return out.to(v.dtype)

    def forward(self, q, k, v, more=None):
        return self.features_alone(q, k, v)

    def log_weights(self, q, k, rows):
        bq, bk, logw, _ = self.balanced(q, k)
        return _normalised(self.dense(bq[:, rows], bk, logw), rows, self.shape.causal)

    def dense(self, bq, bk, logw):
        lq, lk = self.log_features(bq), self.log_features(bk) + logw[..., None]
        top = lk.detach().amax(1, keepdim=True)
        peak = (lq.detach() + top).amax(-1, keepdim=True)
        products = torch.einsum("brhm,bjhm->bhrj", (lq + top - peak).exp(), (lk - top).exp())
        return products.clamp_min(1e-38).log() + peak[..., 0].transpose(1, 2)[..., None]


class HybridExact(Distill):
    """A window and sinks with their exact scores, older keys by balanced features in the same scale: one normaliser."""

    mechanism, option_names = "hybrid-exact", ("window", "features", "sinks")
    causal_only = True  # its window is never left out: in one scale the far part learns what the window does not see

    def make_balance(self):
        self.register_buffer("A", torch.eye(self.shape.key).repeat(self.shape.heads, 1, 1))
        self.register_buffer("A_inverse", self.A.clone())

    def set_balance(self, q, k, v):
        one = torch.zeros(self.shape.heads, 1, self.shape.key), torch.ones(self.shape.heads, 1)
        means = linnet.distill_balance(q.cpu(), k.cpu(), v.cpu(), *one, return_k_mean=True, return_A=True)
        self.q_mean.copy_(means[0])
        self.k_mean.copy_(means[1])
        self.A.copy_(means[2])
        self.A_inverse.copy_(torch.linalg.inv(self.A.double()))

    def balance_both(self, q, k):
        return torch.einsum("bthd,hde->bthe", q, self.A), torch.einsum("bthd,hde->bthe", k, self.A_inverse)

    def true_scale(self, centred):
        """What the balanced query lacks of the true score: eta (q - q0).k0, [B, T, H]."""
        return (centred * self.k_mean).sum(-1) * self.shape.key**-0.5

    def forward(self, q, k, v, more=None):
        window, sinks = self.options["window"], self.options["sinks"]
        near, near_lse = softmax(q, k, v, self.shape, window, sinks, with_lse=True)
        if q.shape[1] <= max(window, sinks):
            return near
        far = q.shape[1] - window  # row i reads keys up to i - window: queries begin there, keys end there
        bq, bk, logw, centred = self.balanced(q[:, window:], k[:, :far])
        lq = self.log_features(bq) + self.true_scale(centred)[..., None]
        lk = self.log_features(bk) + logw[..., None]
        if sinks:
            hidden = torch.arange(far, device=q.device) < sinks
            lk = lk.masked_fill(hidden[:, None, None], -math.inf)
        sums, peak = self.sums(lq, lk, repeat(v[:, :far], self.shape.heads), True)
        near_lse = near_lse.float()
        tail = near_lse[:, window:]
        top = torch.maximum(tail, peak).detach()
        weight, other = (tail - top).exp(), (peak - top).exp()
        merged = (weight[..., None] * near[:, window:].float() + other[..., None] * sums[..., :-1]) / (
            weight + other * sums[..., -1])[..., None]  # fmt: skip
        return torch.cat([near[:, :window], merged.to(near.dtype)], 1)

    def log_weights(self, q, k, rows):
        scores = row_scores(q, k, rows, self.shape)
        bq, bk, logw, centred = self.balanced(q, k)
        far = self.dense(bq[:, rows], bk, logw) + self.true_scale(centred[:, rows]).transpose(1, 2)[..., None]
        keys = torch.arange(k.shape[1], device=k.device)
        near = (keys > rows[:, None] - self.options["window"]) | (keys < self.options["sinks"])
        return torch.where(near, scores, far).masked_fill(scores == -math.inf, -math.inf).log_softmax(-1)


class Beside(Mixer):
    """A recurrent read beside a window (0: none): y + sigmoid(window_factor) (window - y)."""

    causal_only = True
    share = {"window_factor": 1e-3}

    def __init__(self, shape, **options):
        super().__init__(shape, **options)
        if options["window"]:
            self.window_factor = nn.Parameter(torch.zeros(shape.heads))

    def initialise(self, sample, generator):
        if self.options["window"]:
            with torch.no_grad():
                self.window_factor.zero_()

    def forward(self, q, k, v, more):
        out = self.read(q, k, v, more)
        if self.options["window"]:
            near = softmax(q, k, v, self.shape, self.options["window"], self.options["sinks"])
            out = out + (self.window_factor.sigmoid()[:, None] * (near.float() - out.float())).to(out.dtype)
        return out


class GatedDelta(Beside):
    mechanism, option_names = "gdn", ("window", "sinks")
    rates = {**dict.fromkeys(("A_log", "dt_bias", "a_proj.weight", "b_proj.weight", "b_proj.bias", "v_scale"), 1e-3), **Beside.share}
    needs = ("x",)

    def __init__(self, shape, **options):
        super().__init__(shape, **options)
        self.A_log = nn.Parameter(torch.zeros(shape.heads))
        self.dt_bias = nn.Parameter(torch.zeros(shape.heads))
        self.v_scale = nn.Parameter(torch.ones(shape.heads))
        self.a_proj = nn.Linear(shape.hidden, shape.heads, bias=False)
        self.b_proj = nn.Linear(shape.hidden, shape.heads)

    def initialise(self, sample, generator):
        """Gates from the heads' distance and entropy; beside a window half of what is kept is gone after four windows at the
        earliest. The values' scale, and the window's share, from the teacher's output by least squares."""
        shape, window = self.shape, self.options["window"]
        with torch.no_grad():
            self.A_log.zero_()
            self.a_proj.weight.zero_()
            self.b_proj.weight.zero_()
            q, k, v = (repeat(y, shape.heads).float().cpu() for y in (sample["q"], sample["k"], sample["v"]))
            q = q * (shape.scale * math.sqrt(shape.key))
            none = torch.zeros(shape.heads, shape.key, 1)
            results = linnet.distill_window(q, k, v, none, none, torch.zeros(shape.heads), return_gate_dt_bias=True,
                                            return_gate_beta_logit=True)  # fmt: skip
            decay = F.softplus(results[-2])
            if window:
                decay = decay.clamp_max(math.log(2) / (4 * window))
            self.dt_bias.copy_(decay + (-torch.expm1(-decay)).log())
            self.b_proj.bias.copy_(results[-1])
            self.v_scale.fill_(1)
            mine, teacher = self.read(sample["q"], sample["k"], sample["v"], sample).float(), sample["out"].float()

            def product(x, y):
                return (x * y).sum((0, 1, 3)).double()

            if not window:
                ratio = product(teacher, mine) / product(mine, mine).clamp_min(1e-30)
                self.v_scale.copy_(ratio.clamp(0.1, 10))
                return
            near = softmax(sample["q"], sample["k"], sample["v"], shape, window, self.options["sinks"]).float()
            own, other, both = product(near, near), product(mine, mine), product(near, mine)
            rest = (own * other - both.square()).clamp_min(1e-30)
            share = ((product(teacher, near) * other - product(teacher, mine) * both) / rest).clamp(0.5, 0.95)
            scale = (product(teacher, mine) - share * both) / other.clamp_min(1e-30) / (1 - share)
            self.window_factor.copy_(share.logit())
            self.v_scale.copy_(scale.clamp(0.1, 10))

    def read(self, q, k, v, more):
        heads, x = self.shape.heads, more["x"].float()
        g = -self.A_log.exp() * F.softplus(F.linear(x, self.a_proj.weight) + self.dt_bias)
        beta = F.linear(x, self.b_proj.weight, self.b_proj.bias).sigmoid()
        q, k, v = of_one_type(q, k, v)
        out = linnet.gated_delta(q, repeat(k, heads), repeat(v, heads), g, beta, l2_norm=True)
        return (out.float() * self.v_scale[:, None]).to(q.dtype)


class Gla(Beside):
    """Liger: the decay is the key as projected; keys and queries without rotary positions become weights over channels."""

    mechanism, option_names = "gla", ("window", "sinks")
    rates = Beside.share
    needs = ("q_raw", "k_raw")

    def read(self, q, k, v, more):
        heads, raw_q, raw_k = self.shape.heads, more["q_raw"].float(), more["k_raw"].float()
        g = F.logsigmoid(raw_k) / 16
        keys = repeat(raw_k.softmax(-1).to(v.dtype), heads)
        return linnet.gla(raw_q.softmax(-1).to(v.dtype), keys, repeat(v, heads), repeat(g, heads))


class Monarch(Mixer):
    mechanism, option_names = "monarch", ("block", "steps")

    def forward(self, q, k, v, more=None):
        return monarch(q, k, v, self.shape, self.options["block"], self.options["steps"])


class Hierarchical(Mixer):
    mechanism, option_names = "hierarchical", ("arity", "tie")

    def forward(self, q, k, v, more=None):
        heads = self.shape.heads
        return linnet.hierarchical(q, repeat(k, heads), repeat(v, heads), tie=self.options["tie"], include_self=True,
                                   arity=self.options["arity"], scale=self.shape.scale, causal=self.shape.causal)  # fmt: skip


MIXERS = {made.mechanism: made for made in (Softmax, Window, Hybrid, HybridExact, Distill, Hedgehog, T2R, GatedDelta, Gla, Monarch,
                                            Hierarchical)}  # fmt: skip
DEFAULTS = {
    "window": {"window": 256, "sinks": 4},
    "hybrid": {"window": 64, "features": None, "sinks": 0, "form": "sliding"},
    "hybrid-exact": {"window": 64, "features": None, "sinks": 4},
    "distill": {"features": None},
    "hedgehog": {"features": None},
    "t2r": {"features": None},
    "gdn": {"window": 0, "sinks": 0},
    "gla": {"window": 64, "sinks": 0},
    "monarch": {"block": 8, "steps": 2},
    "hierarchical": {"arity": 16, "tie": "row"},
}


def make(shape, mechanism, **options):
    """The mixer of an entry of the plan; options left out have their defaults."""
    if mechanism not in MIXERS:
        raise ValueError(f"there is no mechanism {mechanism!r}; there are {', '.join(MIXERS)}")
    values = dict(DEFAULTS.get(mechanism, {}))
    if "windows" in options:
        values.pop("window", None)
    for name, value in options.items():
        if name not in MIXERS[mechanism].option_names:
            known = ", ".join(MIXERS[mechanism].option_names) or "none"
            raise ValueError(f"{mechanism} has no option {name!r}; it has {known}")
        values[name] = value
    if values.get("features", 0) is None:
        values["features"] = shape.key if mechanism in ("distill", "hybrid-exact", "t2r") else max(shape.key // 2, 1)
    for name, least in {"window": 0 if mechanism in ("gdn", "gla") else 1, "features": 1, "sinks": 0, "block": 1, "steps": 1, "arity": 2}.items():
        if name in values and not (isinstance(values[name], int) and values[name] >= least):
            raise ValueError(f"{mechanism}: {name} is {values[name]!r}, expected a whole number of at least {least}")
    return MIXERS[mechanism](shape, **values)


def cost(shape, mechanism, options, tokens):
    """FLOPs of one forward over so many tokens: the table of stage 5."""
    heads, wide, chunk = shape.heads, shape.key + shape.value, 64
    if mechanism == "softmax":
        return (1 if shape.causal else 2) * heads * tokens**2 * wide
    if mechanism == "window" and "windows" in options:
        part = replace(shape, heads=heads // shape.kv_heads, kv_heads=1)
        return sum(cost(part, "window", {"window": each, "sinks": options["sinks"]}, tokens) if each else cost(part, "softmax", {}, tokens)
                   for each in options["windows"])  # fmt: skip
    local = min(2 * heads * tokens * (options.get("window", 0) + options.get("sinks", 0)) * wide, cost(shape, "softmax", {}, tokens))
    features = options.get("features", 0) * (2 if mechanism in ("hybrid", "hedgehog") else 1)
    linear = heads * tokens * (4 * features * wide + chunk * (features + shape.value)) if features else 0
    match mechanism:
        case "gdn":
            return local + heads * tokens * (6 * shape.key * shape.value + 2 * chunk * wide)
        case "gla":
            return local + heads * tokens * (4 * shape.key * shape.value + chunk * wide)
        case "monarch":
            block = options["block"]
            return 2 * heads * tokens * (block + math.ceil(tokens / block)) * wide * (1 if shape.causal else options["steps"])
        case "hierarchical":
            levels = max(math.ceil(math.log(max(tokens, 2), options["arity"])), 1)
            return 2 * heads * tokens * options["arity"] * levels * wide
    return local + linear
