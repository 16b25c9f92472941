"""The layers as their pages describe them, read a second time: plain torch in double, one token or one pair at a time.

Nothing here uses the library. CASES is a table of vector files as an author of such files would write them: metadata, tensors, and the
function that gives `out`. files(folder) writes them with the gradients of sum(out * dout).
"""

import math

import torch
from safetensors.torch import save_file
from torch.nn.functional import gelu, logsigmoid, sigmoid, silu, softplus

DOUBLE = torch.float64


def split(x, heads):
    return x.unflatten(-1, (heads, -1))


def conv(x, w, bias=None):
    """Depthwise and causal, the last tap on the current token."""
    taps, T = w.shape[1], x.shape[1]
    padded = torch.cat([x.new_zeros(x.shape[0], taps - 1, x.shape[2]), x], 1)
    y = sum(padded[:, j : j + T] * w[:, j] for j in range(taps))
    return y if bias is None else y + bias


def rms(x, weight=None, eps=1e-5):
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return y if weight is None else y * weight


def layer_norm(x, eps, weight=None, bias=None):
    y = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + eps).sqrt()
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def l2(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def rotate(x, angles, half):
    """x [B, T, H, D], angles [T, D / 2]."""
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    D = x.shape[-1]
    a, b = (x[..., : D // 2], x[..., D // 2 :]) if half else (x[..., 0::2], x[..., 1::2])
    u, v = a * cos - b * sin, b * cos + a * sin
    return torch.cat([u, v], -1) if half else torch.stack([u, v], -1).flatten(-2)


def rotary(x, base=10000.0, half=True):
    T, D = x.shape[1], x.shape[3]
    frequencies = base ** (-2 * torch.arange(D // 2, dtype=DOUBLE) / D)
    return rotate(x, torch.arange(T, dtype=DOUBLE)[:, None] * frequencies, half)


def recurrence(q, k, v, g=None, beta=None, scale=None):
    """S_t = decay S, then + k v^T, or the delta rule with beta; o = scale S^T q. g [B, T, H] or [B, T, H, K]."""
    B, T, H, K = q.shape
    scale = K**-0.5 if scale is None else scale
    S, outs = q.new_zeros(B, H, K, v.shape[-1]), []
    for t in range(T):
        if g is not None:
            S = S * (g[:, t].exp()[..., None, None] if g.ndim == 3 else g[:, t].exp()[..., None])
        u = v[:, t]
        if beta is not None:
            u = beta[:, t, :, None] * (u - torch.einsum("bhkv,bhk->bhv", S, k[:, t]))
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], u)
        outs.append(scale * torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    return torch.stack(outs, 1)


def attention(q, k, v, causal=True, scale=None, window=(-1, -1), softcap=0.0, sinks=None):
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    s = torch.einsum("bthd,bshd->bhts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    i, j = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
    seen = (j <= i) if causal else torch.ones_like(j <= i)
    if window[0] >= 0:
        seen &= j >= i - window[0]
    if window[1] >= 0:
        seen &= j <= i + window[1]
    s = s.masked_fill(~seen, -math.inf)
    if sinks is not None:
        s = torch.cat([s, sinks[:, None, None].expand(*s.shape[:2], s.shape[2], 1)], -1)
    p = s.softmax(-1)[..., : k.shape[1]]
    return torch.einsum("bhts,bshd->bthd", p, v)


# ---- decay.md


def retention(m, t):
    H = m["heads"]
    q, k, v, g = (split(t["x"] @ t["w" + n], H) for n in "qkvg")
    D, T = q.shape[-1], q.shape[1]
    angles = torch.ones(1, dtype=DOUBLE) if D == 2 else 10000.0 ** (-torch.arange(D // 2, dtype=DOUBLE) / (D / 2 - 1))
    angles = torch.arange(T, dtype=DOUBLE)[:, None] * angles
    decay = torch.log(1 - 2.0 ** (-5 - torch.arange(H, dtype=DOUBLE)))
    o = recurrence(rotate(q, angles, False), rotate(k, angles, False), v, decay.expand(q.shape[0], T, H))
    return (silu(g) * rms(o, None, m["eps"])).flatten(-2) @ t["wo"]


def simple_gla(m, t):
    H = m["heads"]
    q, k, v = (split(silu(conv(t["x"] @ t["w" + n], t["c" + n])), H) for n in "qkv")
    g = logsigmoid(t["x"] @ t["wa"] + t["ba"]) / 16
    o = rms(recurrence(q, k, v, g), t["norm"]) * silu(split(t["x"] @ t["wg"], H))
    return o.flatten(-2) @ t["wo"]


# ---- gla.md, delta.md, gated_delta.md


def gla(m, t):
    H = m["heads"]
    x, kv = t["x"], m.get("kv_heads", m["heads"])
    q, k, v = (split(x @ t["w" + n], H if n == "q" else kv) for n in "qkv")
    g = split(logsigmoid(x @ t["wa1"] @ t["wa2"] + t["ba"]) / m["tau"], kv)
    k, v, g = (each.repeat_interleave(H // kv, 2) for each in (k, v, g))
    r = x @ t["wr"] + (t["br"] if "br" in t else 0)
    return (rms(recurrence(q, k, v, g), t["norm"], m["eps"]) * silu(split(r, H))).flatten(-2) @ t["wo"]


def branches(m, t):
    H = m["heads"]
    q, k, v = (split(silu(conv(t["x"] @ t["w" + n], t["c" + n])), H) for n in "qk"), None, None
    q, k = q
    v = silu(conv(t["x"] @ t["wv"], t["cv"]))
    return l2(q), l2(k), v


def delta(m, t):
    H = m["heads"]
    q, k, v = branches(m, t)
    beta = sigmoid(t["x"] @ t["wb"]) * (2 if m.get("double") else 1)
    o = rms(recurrence(q, k, split(v, H), None, beta), t["norm"], m.get("eps", 1e-5))
    if "wg" in t:
        o = o * silu(split(t["x"] @ t["wg"], H))
    return o.flatten(-2) @ t["wo"]


def gdn(m, t):
    q, k, v = branches(m, t)
    H = t["A_log"].shape[0]
    q, k = (each.repeat_interleave(H // m["heads"], 2) for each in (q, k))
    g = -t["A_log"].exp() * softplus(t["x"] @ t["wa"] + t["dt_bias"])
    beta = sigmoid(t["x"] @ t["wb"]) * (2 if m.get("double") else 1)
    o = rms(recurrence(q, k, split(v, H), g, beta), t["norm"], m["eps"])
    if "wg" in t:
        o = o * silu(split(t["x"] @ t["wg"], H))
    return o.flatten(-2) @ t["wo"]


def kda(m, t):
    H, x = m["heads"], t["x"]
    q, k, v = branches(m, t)
    a = split(x @ t["wf1"] @ t["wf2"], H) + t["dt_bias"]
    rate = t["A_log"].exp()[:, None]
    g = m["lower"] * sigmoid(rate * a) if "lower" in m else -rate * softplus(a)
    o = recurrence(q, k, split(v, H), g, sigmoid(x @ t["wb"]))
    return (rms(o, t["norm"], m["eps"]) * sigmoid(split(x @ t["wg1"] @ t["wg2"] + t["bg"], H))).flatten(-2) @ t["wo"]


# ---- gated.md, softmax.md


def activate(act, g):
    return {"sigmoid": sigmoid, "silu": silu, "identity": lambda x: x, "ns_sigmoid": lambda x: 0.5 + 0.5 * sigmoid(x)}[act](g)


def gate(m, t, y):
    """y [B, T, heads, D]."""
    s = activate(m.get("act", "sigmoid"), t["x"] @ t["wg"])
    s = s[..., None] if m.get("granularity") == "headwise" else split(s, y.shape[2])
    if m.get("shared"):
        s = s.mean(2, keepdim=True)
    return y + s if m.get("mode") == "add" else y * s


def gated(m, t):
    H, x, position = m["heads"], t["x"], m.get("position", "G1" if "wg" in t else "")
    kv = m.get("kv_heads", H)
    q, k, v = split(x @ t["wq"], H), split(x @ t["wk"], kv), split(x @ t["wv"], kv)
    if "bq" in t:
        q, k, v = q + split(t["bq"], H), k + split(t["bk"], kv), v + split(t["bv"], kv)
    v = gate(m, t, v) if position == "G2" else v
    k = gate(m, t, k) if position == "G3" else k
    q = gate(m, t, q) if position == "G4" else q
    if "q_norm" in t:
        q, k = rms(q, t["q_norm"], m.get("norm_eps", 1e-6)), rms(k, t["k_norm"], m.get("norm_eps", 1e-6))
    if m.get("use_rope", m.get("rope", "none") != "none" or "wg" in t):
        half = m.get("rope", "half") == "half"
        q, k = rotary(q, m.get("rope_base", 10000.0), half), rotary(k, m.get("rope_base", 10000.0), half)
    y = attention(q, k, v, m.get("causal", True), m.get("scale"), m.get("window", (-1, -1)), m.get("softcap", 0.0), t.get("sinks"))
    y = gate(m, t, y) if position == "G1" else y
    o = y.flatten(-2) @ t["wo"] + (t["bo"] if "bo" in t else 0)
    return gate(m, t, o[:, :, None])[:, :, 0] if position == "G5" else o


# ---- mamba.md


def s6(m, t):
    E, N = t["A_log"].shape
    R = t["w_dt"].shape[0]
    u, z = (t["x"] @ t["w_in"]).split(E, -1)
    u = silu(conv(u, t["conv_w"], t["conv_b"]))
    dt, B, C = (u @ t["w_x"]).split([R, N, N], -1)
    step = softplus(dt @ t["w_dt"] + t["b_dt"])
    A, h, ys = -t["A_log"].exp(), u.new_zeros(u.shape[0], E, N), []
    for i in range(u.shape[1]):
        h = (step[:, i, :, None] * A).exp() * h + step[:, i, :, None] * B[:, i, None] * u[:, i, :, None]
        ys.append((h * C[:, i, None]).sum(-1) + t["D"] * u[:, i])
    return (torch.stack(ys, 1) * silu(z)) @ t["w_out"]


def ssd(m, t):
    E, H, G, N = t["w_out"].shape[0], t["A_log"].shape[0], m["groups"], m["state"]
    P = E // H
    z, xbc, dt = (t["x"] @ t["w_in"]).split([E, E + 2 * G * N, H], -1)
    u, B, C = silu(conv(xbc, t["conv_w"], t["conv_b"])).split([E, G * N, G * N], -1)
    u, B, C = split(u, H), split(B, G).repeat_interleave(H // G, 2), split(C, G).repeat_interleave(H // G, 2)
    step = softplus(dt + t["dt_bias"])
    y = recurrence(C, B, step[..., None] * u, -t["A_log"].exp() * step, scale=1)
    D = t["D"] if t["D"].ndim == 2 else t["D"][:, None]
    y = (y + D * u).flatten(-2)
    by_group = lambda each: split(each, G)  # noqa: E731
    if m.get("norm_before_gate"):
        y = rms(by_group(y), None, m["eps"]).flatten(-2) * t["norm"] * silu(z)
    else:
        y = rms(by_group(y * silu(z)), None, m["eps"]).flatten(-2) * t["norm"]
    assert P * H == E
    return y @ t["w_out"]


# ---- metala.md, h3.md


def metala(m, t):
    H, tau = m["heads"], m.get("tau", 16.0)
    u = silu(conv(t["x"], t["conv"]))
    q, a, v = (split(u @ t["w" + n].T, H) for n in "qav")
    g = (logsigmoid(a) / tau).clamp(min=m.get("floor", -88.0))
    k = -torch.expm1(g)
    o = recurrence(q, k, v, g, scale=m.get("scale"))
    aug = m.get("aug", "sigmoid")
    if aug != "none":
        w = (q * t["w_aug"] * k).sum(-1, keepdim=True) * v
        o = o + (sigmoid(w) if aug == "sigmoid" else w)
    o = layer_norm(o, m.get("ln_eps", 1e-5)).flatten(-2)
    return (silu(u @ t["wg"].T + t["bg"]) * o) @ t["wo"].T


def h3(m, t):
    """The mixer on q, k, v from u; the outer products of slots and the slot-major order."""
    q, k, v = (t["u"] @ t["w" + n].T + t["b" + n] for n in "qkv")
    return h3_mixer(m, t, q, k, v) @ t["wo"].T + t["bo"]


def mixed(m, t):
    """The operator's part of a file of the whole layer: its own q, k, v and their result."""
    generator = torch.Generator().manual_seed(9)
    q, k, v = (torch.randn(t["u"].shape, generator=generator, dtype=DOUBLE) for _ in "qkv")
    return {"q": q, "k": k, "v": v, "out": h3_mixer(m, t, q, k, v)}


def h3_mixer(m, t, q, k, v):
    P, C, T = m["head_dim"], q.shape[-1], q.shape[1]
    H, N = C // P, t["sb"].shape[1]
    taps = torch.stack([(t["sb"][:, : N - i] * t["sc"][:, i:]).sum(-1) for i in range(N)])  # [N, C]
    kbar = torch.stack([sum(taps[i] * k[:, n - i] for i in range(min(n, N - 1) + 1)) + t["sd"] * k[:, n] for n in range(T)], 1)
    A = torch.complex(-t["log_neg_re"].exp(), t["imag"])
    dt = t["log_dt"].exp()[:, None]
    z, b, c = A * dt, torch.view_as_complex(t["b"].contiguous()), torch.view_as_complex(t["c"].contiguous())
    if m["disc"] == "bilinear":
        a, bd = (1 + z / 2) / (1 - z / 2), b * dt / (1 - z / 2)
    else:
        a, bd = z.exp(), b * (z.exp() - 1) / A
    kd = torch.stack([2 * (c * bd * a**i).sum(-1).real for i in range(T)])  # [T, H]
    q, kbar, v = split(q, H), split(kbar, H), split(v, H)
    kv = torch.einsum("bthp,bthr->bthpr", kbar, v)
    s = torch.stack([sum(kd[n - i][:, None, None] * kv[:, i] for i in range(n + 1)) + t["d"][:, None, None] * kv[:, n] for n in range(T)], 1)
    return torch.einsum("bthp,bthpr->bthr", q, s).transpose(2, 3).flatten(-2)


# ---- fem.md


def unit_mean_square(x):
    return x / x.norm(dim=-1, keepdim=True).clamp(min=1e-5) * x.shape[-1] ** 0.5


def fem(m, t):
    x, H, prior, causal = t["x"], m["heads"], m["prior"], m["causal"]
    B, T = x.shape[:2]
    E, K = t["wv"].shape[0], t["wq"].shape[0] if "wq" in t else 0
    linear = lambda n: x @ t["w" + n].T + t["b" + n]  # noqa: E731
    parts = {n: linear(n) for n in ("vqklg" if K else "vlg")}
    if m["conv"]:
        n = layer_norm(x, m["norm_eps"], t["norm_w"], t["norm_b"])
        s, y, a = (n @ t["w" + name].T + t["b" + name] for name in "sya")
        h, hs = torch.zeros_like(y[:, 0]), []
        for i in range(T):
            h = (-softplus(a[:, i])).exp() * h + y[:, i]
            hs.append(h)
        mixed = unit_mean_square(softplus(s) + 1e-8) * layer_norm(torch.stack(hs, 1), m["norm_eps"], t["mid_w"], t["mid_b"])
        c, begin = mixed @ t["wc"], 0
        for name in "vqklg":
            if name in parts:
                width = parts[name].shape[-1]
                parts[name] = parts[name] * (1 + c[..., begin : begin + width])
                begin += width
    v, lam = split(parts["v"], H), sigmoid(split(parts["l"], H))
    g = unit_mean_square(softplus(split(parts["g"], H)) + 1e-6)
    beta = split(softplus(t["beta"]) + 1e-6, H)
    if K:
        half = m.get("rope", "half") == "half"
        q, k = split(parts["q"], H), split(parts["k"], H)
        if m.get("rope", "half") != "none":
            q, k = rotary(q, m["rope_base"], half), rotary(k, m["rope_base"], half)
    if prior == "ssm":
        v = sigmoid(v)
    cap = m.get("cap", 40.0)
    vc = torch.minimum(torch.maximum(v, -cap / beta), cap / beta)
    X = (beta * vc).exp()
    seen = torch.ones(T, T, dtype=torch.bool)
    seen = seen.tril() if causal else seen
    # weights [B, H, T, T, Dv or 1] and what divides them
    phi = lambda z: z.relu() + 1e-6  # noqa: E731
    if prior == "softmax":
        w = (torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5).masked_fill(~seen, -math.inf).softmax(-1)[..., None]
    elif prior in ("linear", "gated"):
        w = torch.einsum("bthd,bshd->bhts", phi(q), phi(k))
        if prior == "gated":
            a = -(linear("d").relu() + 1e-6)
            total = a.cumsum(1).transpose(1, 2)
            w = w * (total[..., :, None] - total[..., None, :]).masked_fill(~seen, 0.0).exp()
        w = w.masked_fill(~seen, 0.0)
        den = w.sum(-1, keepdim=True)
        w = (w / (den.clamp(min=1e-6) if prior == "linear" else den + 1e-5))[..., None]
    elif prior == "aft":
        e = k.permute(0, 2, 1, 3)[:, :, None].expand(-1, -1, T, -1, -1).masked_fill(~seen[:, :, None], -math.inf)
        w = e.softmax(3) * unit_mean_square(softplus(q) + 1e-6).permute(0, 2, 1, 3)[:, :, :, None]
    else:
        R = (t["wp"].shape[0] - E) // 2
        p = linear("p")
        step, Bm, Cm = split((-softplus(p[..., :E])).exp(), H), softplus(p[..., E : E + R]) + 1e-6, softplus(p[..., E + R :]) + 1e-6
        A, D = -softplus(t["A_log"].reshape(H, E // H, R)), split(softplus(t["D_diag"]) + 1e-6, H)

        def scan(u):
            state, ys = u.new_zeros(B, H, E // H, R), []
            for i in range(T):
                d = step[:, i, ..., None]
                state = (d * A).exp() * state + d * Bm[:, i, None, None] * u[:, i, ..., None]
                ys.append((state * Cm[:, i, None, None]).sum(-1) + D * u[:, i])
            return torch.stack(ys, 1)

        den = scan(torch.ones_like(vc)).clamp(min=1e-6)
        mu, z = scan(vc) / den, scan(X) / den
    if prior != "ssm":
        mu, z = (torch.einsum("bhtsd,bshd->bthd", w.expand(-1, -1, -1, -1, vc.shape[-1]), each) for each in (vc, X))
    F = z.log() / beta
    return (g * ((1 - lam) * mu + lam * F)).flatten(-2) @ t["wo"].T + t["bo"]


# ---- zeros.md


def zeros(m, t):
    x, H, causal = t["x"], m["heads"], m["causal"]
    T = x.shape[1]
    linear = lambda n: x @ t["w" + n].T + t["b" + n]  # noqa: E731
    q, k, v = (split(linear(n), H) for n in "qkv")
    gates = linear("g").unflatten(-1, (H, 3))
    s1, sh, s0 = sigmoid(gates[..., 0]), sigmoid(gates[..., 1]), torch.tanh(gates[..., 2]) * (1 if m["zeroth"] else 0)
    d = q.shape[-1]
    if m["rope"] != "none":
        q, k = (rotary(each, m["rope_base"], m["rope"] == "half") for each in (q, k))
    n = torch.arange(1, T + 1, dtype=DOUBLE) if causal else torch.full((T,), float(T), dtype=DOUBLE)
    seen = torch.ones(T, T, dtype=torch.bool)
    seen = seen.tril() if causal else seen
    if "wu" in t:
        u = split(linear("u"), H)
        tau = t["log_tau"].clamp(-50, 30).exp()
        total = u.cumsum(1) if causal else u.sum(1, keepdim=True).expand_as(u)
        mean = (tau[:, None] * t["mu"] + total) / (tau + n[:, None])[..., None]
        s = (-(u * mean).sum(-1) / d**0.5).permute(0, 2, 1)[:, :, None].expand(-1, -1, T, -1)  # [B, H, T (row), T (key)]
        q, k = (each / each.norm(dim=-1, keepdim=True).clamp(min=1e-12) for each in (q, k))
        cosine = torch.einsum("bthd,bshd->bhts", q, k)
    else:
        s, cosine = torch.einsum("bthd,bshd->bhts", q, k) * d**-0.5, 1.0
    p = s.masked_fill(~seen, -math.inf).softmax(-1)
    dev = s - (s.masked_fill(~seen, 0.0).sum(-1) / n)[..., None]
    eps = p - 1 / n[:, None] - dev / n[:, None]
    by_row = lambda gate: gate.permute(0, 2, 1)[..., None]  # noqa: E731
    r = by_row(s1) * dev / n[:, None] + by_row(sh) * eps + by_row(s0) / n[:, None]
    o = torch.einsum("bhts,bshd->bthd", (r * cosine).masked_fill(~seen, 0.0), v)
    if m["norm"]:
        o = layer_norm(o, m["norm_eps"])
    return o.flatten(-2) @ t["wo"].T + t["bo"]


# ---- the pages whose files are read as their layer sections suggest: linear.md, features.md, taylor.md, monarch.md, inline.md, distill.md


def project(m, t):
    H = m["heads"]
    kv = m.get("kv_heads", H)
    heads = {"q": H, "k": kv, "v": kv}
    q, k, v = (split(t["x"] @ t["w" + n] + (t["b" + n] if "b" + n in t else 0), heads[n]) for n in "qkv")
    if m.get("rope", "none") != "none":
        q, k = (rotary(each, m.get("rope_base", 10000.0), m["rope"] == "half") for each in (q, k))
    return q, k.repeat_interleave(H // kv, 2), v.repeat_interleave(H // kv, 2)


def out_of(t, y):
    return y.flatten(-2) @ t["wo"] + (t["bo"] if "bo" in t else 0)


def weighed(w, v, causal, den):
    """w [B, H, T, T]; den of the row sums."""
    w = w.tril() if causal else w
    return torch.einsum("bhts,bshd->bthd", w, v) / den(w.sum(-1)).permute(0, 2, 1)[..., None]


MAPS = {
    "identity": lambda x: x,
    "elu1": lambda x: torch.where(x > 0, x + 1, x.clamp(max=0).exp()),
    "relu": torch.relu,
    "relu2": lambda x: x.relu().square(),
    "silu": silu,
    "softplus": softplus,
    "hedgehog": lambda x: torch.cat([x, -x], -1).softmax(-1),
}


def linear_layer(m, t):
    q, k, v = project(m, t)
    if m.get("map") == "product":
        q, k = (split((each.flatten(-2) @ t[f"m{n}1"]) * (each.flatten(-2) @ t[f"m{n}2"]), m["heads"]) for n, each in (("q", q), ("k", k)))
    else:
        q, k = MAPS[m.get("map", "identity")](q), MAPS[m.get("map", "identity")](k)
    normal, eps = m.get("normalize", False), m.get("eps", 1e-6)
    scale = m.get("scale", 1.0 if normal else t["wk"].shape[1] / m.get("kv_heads", m["heads"]))
    scale = scale if normal or "scale" in m else scale**-0.5
    y = weighed(scale * torch.einsum("bthd,bshd->bhts", q, k), v, m["causal"], (lambda d: d + eps) if normal else torch.ones_like)
    return out_of(t, rms(y, t["norm"], 1e-5) if "norm" in t else y)


def features_layer(m, t):
    q, k, v = project(m, t)
    if m["map"] == "hedgehog":
        phi = lambda x: torch.cat([torch.einsum("bthd,hdf->bthf", x, t["w"]).mul(sign).softmax(-1) for sign in (1, -1)], -1).clamp(min=1e-12)  # noqa: E731
        eps = 1e-12
    elif m["map"] == "t2r":
        phi, eps = lambda x: (torch.einsum("bthd,hdf->bthf", x, t["w"]) + t["b"]).relu(), 1e-6
    elif m["map"] == "favor_relu":
        phi, eps = lambda x: (x * x.shape[-1] ** -0.25 @ t["proj"].T).relu() + 1e-3, 1e-6
    else:
        phi, eps = MAPS[m["map"]], 1e-6
    y = weighed(torch.einsum("bthf,bshf->bhts", phi(q), phi(k)), v, m["causal"], lambda d: d + eps)
    return out_of(t, y)


def taylor_layer(m, t):
    q, k, v = project(m, t)
    s = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    mode, eps = m.get("mode", "exact"), m.get("eps", 1e-12)
    if mode == "compact":
        squares = torch.einsum("bthd,bshd->bhts", q.square(), k.square())
        w = (t["alpha"] ** 2 * squares + 2 * t["beta"] ** 2 * s + t["gamma"] ** 2) / 2 + 0.5
    else:
        w = 1 + s + s * s / 2
    return out_of(t, weighed(w, v, m.get("causal", True), lambda d: d + eps))


def qt_layer(m, t):
    """QT-ViT's module on a map [B, C, height, width], as the page counts its six steps."""
    height, width, (T, heads, dim) = m["height"], m["width"], t["ape"].shape
    functional = torch.nn.functional
    image = t["x"].transpose(1, 2).unflatten(-1, (height, width))
    qkv = functional.conv2d(image, t["wqkv"].T[:, :, None, None])
    if "wdw" in t:
        groups = qkv.shape[1] // dim  # a map of its own for each q, k and v
        near = functional.conv2d(qkv, t["wdw"][:, None], padding=t["wdw"].shape[-1] // 2, groups=qkv.shape[1])
        near = functional.conv2d(near, t["wpw"].transpose(1, 2).flatten(0, 1)[:, :, None, None], groups=groups)
        qkv = torch.cat([qkv, near], 1)
    q, k, v = qkv.flatten(2).unflatten(1, (heads, 3, dim)).transpose(-1, -2).unbind(2)  # [B, heads, T, dim]
    k = k + t["ape"].transpose(0, 1)
    unit = lambda x: x / (x.norm(dim=-1, keepdim=True) + 1e-15)  # noqa: E731
    w = unit(unit(q).square()) @ unit(unit(k).square()).transpose(-1, -2) + t["const"] ** 2
    o = (w @ v) / (w.sum(-1, keepdim=True) + 1e-15)
    bn = lambda x, n: (x - t[n + "mean"]) / (t[n + "var"] + 1e-5).sqrt() * t[n + "weight"] + t[n + "bias"]  # noqa: E731
    o = o + gelu(bn(v, "bn_"))
    return bn(o.transpose(1, 2).flatten(2) @ t["wo"], "proj_")


def inline_layer(m, t):
    H = m["heads"]
    qkv = t["x"] @ t["wqkv"] + t["bqkv"]
    q, k, v = (split(each, H) for each in qkv.chunk(3, -1))
    D = q.shape[-1]
    phi = {"identity": lambda x: x, "relu": torch.relu, "leakyrelu": lambda x: torch.where(x > 0, x, 0.01 * x), "exp": lambda x: (0.2 * x).exp()}[m.get("kernel", "identity")]
    q, k, N = phi(q), phi(k), q.shape[1]
    s = torch.einsum("bthd,bshd->bhts", q, k)
    w = (s - s.mean(-1, keepdim=True)) * D**-0.5 / N + 1 / N
    o = torch.einsum("bhts,bshd->bthd", w, v)
    if "w1" in t:
        height, width, prefix = m["height"], m["width"], m.get("prefix", 0)
        pooled = split(t["x"].mean(1), H)
        hidden = gelu(torch.einsum("hij,bhj->bhi", t["w1"], pooled) + t["b1"])
        r = (torch.einsum("hij,bhj->bhi", t["w2"], hidden) + t["b2"]).unflatten(-1, (D, 9))  # [B, H, channel, tap]
        grid = v[:, prefix:].unflatten(1, (height, width))
        more = torch.zeros_like(grid)
        padded = torch.nn.functional.pad(grid, (0, 0, 0, 0, 1, 1, 1, 1))
        for tap in range(9):
            dy, dx = tap // 3, tap % 3
            more = more + padded[:, dy : dy + height, dx : dx + width] * r[:, None, None, :, :, tap]
        o = o + torch.cat([torch.zeros_like(v[:, :prefix]), more.flatten(1, 2)], 1)
    return o.flatten(-2) @ t["wo"] + t["bo"]


def distill_layer(m, t):
    q, k, v = project(m, t)
    D, M = q.shape[-1], t["z"].shape[1]
    log = lambda x: (torch.einsum("bthd,hmd->bthm", x, t["z"]) * D**-0.25 - x.square().sum(-1, keepdim=True) / (2 * D**0.5)  # noqa: E731
                     + 0.5 * (t["log_alpha"] - math.log(M)))  # fmt: skip
    a = torch.logsumexp(log(q).permute(0, 2, 1, 3)[:, :, :, None] + log(k).permute(0, 2, 1, 3)[:, :, None], -1)
    seen = torch.ones(a.shape[-2:], dtype=torch.bool)
    a = a.masked_fill(~(seen.tril() if m["causal"] else seen), -math.inf).softmax(-1)
    return out_of(t, torch.einsum("bhts,bshd->bthd", a, v))


# ---- the table


def shapes_of_heads(C, H, K, V, kv=None, bias=False, out=None):
    kv = kv or H
    shapes = {"x": (2, 9, C), "wq": (C, H * K), "wk": (C, kv * K), "wv": (C, kv * V), "wo": (H * V, out or C)}
    if bias:
        shapes |= {"bq": (H * K,), "bk": (kv * K,), "bv": (kv * V,), "bo": (C,)}
    return shapes


def gated_case(position, C=8, H=4, kv=2, D=4, norm=True, **more):
    heads = {"G1": H, "G2": kv, "G3": kv, "G4": H, "G5": 1}[position]
    width = C if position == "G5" else heads if more.get("granularity") == "headwise" else heads * D
    shapes = {**shapes_of_heads(C, H, D, D, kv), "wg": (C, width)}
    if norm:
        shapes |= {"q_norm": (D,), "k_norm": (D,)}
    meta = {"heads": H, "kv_heads": kv, "position": position, "granularity": "elementwise", "shared": False, "act": "sigmoid",
            "mode": "multiply", "causal": True, "use_rope": True, "rope_base": 10000.0, "norm_eps": 1e-6}  # fmt: skip
    return "gated", "layer", gated, {**meta, **more}, shapes


def delta_case(C, H, D, taps=4, gate=False, **more):
    shapes = {**shapes_of_heads(C, H, D, D), "wb": (C, H), "norm": (D,), **{"c" + n: (H * D, taps) for n in "qkv"}}
    return "delta", "layer", delta, {"heads": H, "double": False, "eps": 1e-5, **more}, shapes | ({"wg": (C, H * D)} if gate else {})


def gdn_case(C, H, K, V, gate=True, taps=4, value_heads=None, **more):
    N = value_heads or H
    shapes = {"x": (2, 9, C), "wq": (C, H * K), "wk": (C, H * K), "wv": (C, N * V), "wo": (N * V, C), "wa": (C, N), "wb": (C, N), "A_log": (N,),
              "dt_bias": (N,), "norm": (V,), "cq": (H * K, taps), "ck": (H * K, taps), "cv": (N * V, taps)}  # fmt: skip
    return "gated_delta", "gdn_layer", gdn, {"heads": H, "eps": 1e-5, **more}, shapes | ({"wg": (C, N * V)} if gate else {})


def kda_case(C, H, K, V, taps=4, **more):
    shapes = {**shapes_of_heads(C, H, K, V), "wb": (C, H), "wf1": (C, V), "wf2": (V, H * K), "wg1": (C, V), "wg2": (V, H * V), "bg": (H * V,),
              "A_log": (H,), "dt_bias": (H, K), "norm": (V,), "cq": (H * K, taps), "ck": (H * K, taps), "cv": (H * V, taps)}  # fmt: skip
    return "gated_delta", "kda_layer", kda, {"heads": H, "eps": 1e-5, **more}, shapes


def gla_case(C, H, K, V, rank=3, kv=None, bias=False, **more):
    n = kv or H
    shapes = {**shapes_of_heads(C, H, K, V, kv), "wa1": (C, rank), "wa2": (rank, n * K), "ba": (n * K,), "wr": (C, H * V), "norm": (V,)}
    meta = {"heads": H, "tau": 16.0, "eps": 1e-5, **({"kv_heads": kv} if kv else {})}
    return "gla", "layer", gla, {**meta, **more}, shapes | ({"br": (H * V,)} if bias else {})


def retention_case(C, H, **more):
    shapes = shapes_of_heads(C, H, C // H, 2 * C // H) | {"wg": (C, 2 * C)}
    return "decay", "retention_layer", retention, {"heads": H, "eps": 1e-6, **more}, shapes


def s6_case(C, E, N, R, taps=4):
    shapes = {"x": (2, 9, C), "w_in": (C, 2 * E), "conv_w": (E, taps), "conv_b": (E,), "w_x": (E, R + 2 * N), "w_dt": (R, E), "b_dt": (E,),
              "A_log": (E, N), "D": (E,), "w_out": (E, C)}  # fmt: skip
    return "mamba", "s6_layer", s6, {}, shapes


def ssd_case(C, H, P, N, G, taps=4, per_channel=False, **more):
    E = H * P
    shapes = {"x": (2, 9, C), "w_in": (C, 2 * E + 2 * G * N + H), "conv_w": (E + 2 * G * N, taps), "conv_b": (E + 2 * G * N,), "dt_bias": (H,),
              "A_log": (H,), "D": (H, P) if per_channel else (H,), "norm": (E,), "w_out": (E, C)}  # fmt: skip
    return "mamba", "ssd_layer", ssd, {"groups": G, "state": N, "eps": 1e-5, **more}, shapes


def metala_case(C, H, taps=4, **more):
    shapes = {"x": (2, 11, C), "conv": (C, taps), "wq": (C // 2, C), "wa": (C // 2, C), "wv": (C, C), "wg": (C, C), "bg": (C,), "wo": (C, C),
              "w_aug": (H, C // 2 // H)}  # fmt: skip
    return "metala", "layer", metala, {"heads": H, "tau": 16.0, "ln_eps": 1e-5, **more}, shapes


def h3_case(C, P, N, M, disc):
    H = C // P
    shapes = {"u": (2, 10, C), "sb": (C, N), "sc": (C, N), "sd": (C,), "log_dt": (H,), "log_neg_re": (H, M), "imag": (H, M), "b": (H, M, 2),
              "c": (H, M, 2), "d": (H,), **{w + n: (C, C) if w == "w" else (C,) for w in "wb" for n in "qkvo"}}  # fmt: skip
    return "h3", "attention", h3, {"head_dim": P, "heads": H, "disc": disc}, shapes


def fem_case(prior, C=8, H=2, E=4, K=8, Hc=3, R=3, conv=True, causal=True, **more):
    K = 0 if prior == "ssm" else E if prior == "aft" else K
    shapes = {"x": (1, 9, C), "wv": (E, C), "wl": (E, C), "wg": (E, C), "wo": (C, E), "bv": (E,), "bl": (E,), "bg": (E,), "bo": (C,), "beta": (E,)}
    if K:
        shapes |= {"wq": (K, C), "wk": (K, C), "bq": (K,), "bk": (K,)}
    if conv:
        shapes |= {n: (Hc, C) for n in ("ws", "wy", "wa")} | {n: (Hc,) for n in ("bs", "by", "ba", "mid_w", "mid_b")}
        shapes |= {"norm_w": (C,), "norm_b": (C,), "wc": (Hc, 3 * E + 2 * K)}
    if prior == "gated":
        shapes |= {"wd": (H, C), "bd": (H,)}
    if prior == "ssm":
        shapes |= {"wp": (E + 2 * R, C), "bp": (E + 2 * R,), "A_log": (E, R), "D_diag": (E,)}
    meta = {"prior": prior, "heads": H, "rope": "none" if prior == "ssm" else "half", "causal": causal, "cap": 40.0, "conv": conv, "norm_eps": 1e-5,
            "rope_base": 10000.0}  # fmt: skip
    return "fem", "layer", fem, {**meta, **more}, shapes


def zeros_case(C=8, H=2, quadratic=False, **more):
    shapes = {"x": (1, 9, C), **{"w" + n: (C, C) for n in "qkvo"}, **{"b" + n: (C,) for n in "qkvo"}, "wg": (3 * H, C), "bg": (3 * H,)}
    if not quadratic:
        shapes |= {"wu": (C, C), "bu": (C,), "mu": (H, C // H), "log_tau": (H,)}
    meta = {"heads": H, "causal": True, "zeroth": False, "rope": "half", "rope_base": 10000.0, "norm": True, "norm_eps": 1e-5}
    return "zeros", "layer", zeros, {**meta, **more}, shapes


def plain_case(mechanism, function, C=8, H=2, K=4, V=4, kv=None, bias=False, more_shapes=None, **more):
    meta = {"heads": H, **({"kv_heads": kv} if kv else {})}
    return mechanism, "layer", function, {**meta, **more}, shapes_of_heads(C, H, K, V, kv, bias) | (more_shapes or {})


def inline_case(C=8, H=2, height=2, width=4, prefix=1, residual=True, **more):
    D = C // H
    T = prefix + height * width
    shapes = {"x": (2, T, C), "wqkv": (C, 3 * C), "bqkv": (3 * C,), "wo": (C, C), "bo": (C,)}
    if residual:
        shapes |= {"w1": (H, D, D), "b1": (H, D), "w2": (H, 9 * D, D), "b2": (H, 9 * D)}
        more |= {"height": height, "width": width, "prefix": prefix}
    return "inline", "layer", inline_layer, {"heads": H, **more}, shapes


def qt_case(C=8, dim=4, height=3, width=4, taps=5):
    T, H = height * width, C // dim * (2 if taps else 1)
    shapes = {"x": (2, T, C), "wqkv": (C, 3 * C), "ape": (T, H, dim), "const": (), "wo": (H * dim, C)}
    shapes |= {"bn_" + n: (dim,) for n in ("weight", "bias", "mean", "var")} | {"proj_" + n: (C,) for n in ("weight", "bias", "mean", "var")}
    if taps:
        shapes |= {"wdw": (3 * C, taps, taps), "wpw": (3 * C // dim, dim, dim)}
    return "taylor", "layer", qt_layer, {"height": height, "width": width}, shapes


CASES = {
    "decay-retention-one-head": retention_case(6, 1),
    "decay-retention-narrow": retention_case(6, 3, eps=1e-5),
    "decay-simple-gla": ("decay", "simple_gla_layer", simple_gla, {"heads": 2},
                         {**shapes_of_heads(8, 2, 4, 4), "cq": (8, 4), "ck": (8, 4), "cv": (8, 4), "wa": (8, 2), "ba": (2,), "wg": (8, 8), "norm": (4,)}),
    "delta-layer-double": delta_case(8, 2, 4, double=True),
    "delta-layer-narrow": delta_case(9, 3, 3, taps=2, eps=1e-6),
    "delta-layer-gated": delta_case(8, 2, 4, gate=True),
    "gdn-layer-wide": gdn_case(8, 2, 3, 6),
    "gdn-layer-no-gate": gdn_case(8, 2, 4, 8, gate=False, double=True),
    "gdn-layer-grouped": gdn_case(8, 2, 3, 4, value_heads=4, taps=3),
    "kda-layer-wide": kda_case(8, 2, 3, 5),
    "kda-layer-bounded": kda_case(8, 2, 4, 4, lower=-5.0),
    "gla-layer-tau": gla_case(8, 2, 2, 4, tau=4.0),
    "gla-layer-bias": gla_case(8, 4, 1, 2, bias=True),
    "gla-layer-grouped": gla_case(8, 4, 2, 3, kv=2),
    **{f"gated-layer-{p.lower()}": gated_case(p) for p in ("G1", "G2", "G3", "G4", "G5")},
    **{f"gated-layer-{p.lower()}-headwise": gated_case(p, granularity="headwise", norm=False) for p in ("G1", "G2", "G3", "G4")},
    **{f"gated-layer-{p.lower()}-shared": gated_case(p, shared=True) for p in ("G1", "G2")},
    **{f"gated-layer-add-{act}": gated_case("G1", mode="add", act=act, use_rope=False) for act in ("silu", "identity")},
    "gated-layer-silu-full": gated_case("G1", act="silu", causal=False, norm=False),
    "gated-layer-ns": gated_case("G1", act="ns_sigmoid", kv=1, rope_base=500.0),
    "gated-layer-headwise-shared": gated_case("G1", granularity="headwise", shared=True, norm_eps=1e-5),
    "gated-layer-g5-add": gated_case("G5", mode="add", act="silu"),
    "mamba-s6-layer-odd": s6_case(5, 7, 3, 1, taps=3),
    "mamba-ssd-layer-groups": ssd_case(6, 4, 3, 4, 2),
    "mamba-ssd-layer-before": ssd_case(6, 4, 2, 3, 2, norm_before_gate=True),
    "mamba-ssd-layer-channel": ssd_case(6, 2, 4, 3, 1, per_channel=True, eps=1e-6),
    "metala-layer-two-taps": metala_case(16, 2, taps=2),
    "metala-layer-linear": metala_case(16, 4, aug="linear", tau=8.0),
    "metala-layer-none": metala_case(8, 2, aug="none", scale=1.0, floor=-0.05),
    "h3-layer-zoh": h3_case(6, 2, 4, 3, "zoh"),
    "h3-layer-one": h3_case(4, 1, 3, 2, "bilinear"),
    "h3-layer-one-head": h3_case(4, 4, 3, 2, "bilinear"),
    **{f"fem-layer-{p}": fem_case(p) for p in ("softmax", "linear", "gated", "aft", "ssm")},
    **{f"fem-layer-{p}-bare": fem_case(p, conv=False, rope="interleaved", cap=3.0) for p in ("softmax", "linear", "gated", "aft")},
    **{f"fem-layer-{p}-full": fem_case(p, causal=False) for p in ("softmax", "linear", "aft")},
    "fem-layer-wide": fem_case("softmax", H=1, E=6, K=4, Hc=5),
    "fem-layer-ssm-bare": fem_case("ssm", conv=False, R=2),
    "zeros-layer-interleaved": zeros_case(rope="interleaved", H=1),
    "zeros-layer-zeroth": zeros_case(zeroth=True),
    "zeros-layer-full": zeros_case(causal=False),
    "zeros-layer-full-zeroth": zeros_case(causal=False, zeroth=True, norm=False),
    "zeros-layer-no-norm": zeros_case(norm=False, rope_base=100.0),
    "zeros-layer-quadratic": zeros_case(quadratic=True),
    "zeros-layer-quadratic-full": zeros_case(quadratic=True, causal=False, zeroth=True, rope="none"),
    "softmax-layer": plain_case("softmax", gated, causal=True),
    "softmax-layer-grouped": plain_case("softmax", gated, H=4, kv=2, bias=True, causal=False, use_rope=True, rope="interleaved"),
    "softmax-layer-window": plain_case("softmax", gated, causal=True, window=(3, -1), softcap=5.0, scale=0.7, use_rope=True,
                                       more_shapes={"q_norm": (4,), "k_norm": (4,), "sinks": (2,)}),  # fmt: skip
    "linear-layer": plain_case("linear", linear_layer, map="elu1", causal=True, normalize=True),
    "linear-layer-full": plain_case("linear", linear_layer, map="relu", causal=False, normalize=True, eps=1e-3, bias=True),
    "linear-layer-identity": plain_case("linear", linear_layer, map="identity", causal=True, normalize=False, more_shapes={"norm": (4,)}),
    "linear-layer-scale": plain_case("linear", linear_layer, map="elu1", causal=True, normalize=False, scale=0.25),
    "linear-layer-hedgehog": plain_case("linear", linear_layer, map="hedgehog", causal=True, normalize=True),
    "linear-layer-softplus": plain_case("linear", linear_layer, map="softplus", causal=True, normalize=True, kv=1),
    "linear-layer-product": plain_case("linear", linear_layer, map="product", causal=True, normalize=False,
                                       more_shapes={"norm": (4,), "mq1": (8, 8), "mq2": (8, 8), "mk1": (8, 8), "mk2": (8, 8)}),  # fmt: skip
    "features-layer-elu1": plain_case("features", features_layer, map="elu1", causal=True, bias=True),
    "features-layer-relu-rope": plain_case("features", features_layer, map="relu2", causal=True, rope="half"),
    "features-layer-hedgehog": plain_case("features", features_layer, map="hedgehog", causal=True, more_shapes={"w": (2, 4, 3)}),
    "features-layer-t2r": plain_case("features", features_layer, map="t2r", causal=False, more_shapes={"w": (2, 4, 3), "b": (2, 3)}),
    "features-layer-favor": plain_case("features", features_layer, map="favor_relu", causal=True, more_shapes={"proj": (5, 4)}),
    "taylor-layer": plain_case("taylor", taylor_layer, K=2, causal=True),
    "taylor-layer-full": plain_case("taylor", taylor_layer, causal=False, eps=1e-6),
    "taylor-layer-compact": plain_case("taylor", taylor_layer, mode="compact", causal=True, more_shapes={"alpha": (), "beta": (), "gamma": ()}),
    "taylor-layer-qt": qt_case(),
    "taylor-layer-qt-one-scale": qt_case(taps=0, height=2),
    "taylor-layer-qt-narrow": qt_case(dim=2, taps=3, height=1, width=7),
    "inline-layer-whole": inline_case(),
    "inline-layer-relu": inline_case(kernel="relu", prefix=0, height=3, width=3),
    "inline-layer-plain": inline_case(residual=False, kernel="leakyrelu"),
    "distill-layer": plain_case("distill", distill_layer, causal=True, more_shapes={"z": (2, 5, 4), "log_alpha": (2, 5)}),
    "distill-layer-full": plain_case("distill", distill_layer, causal=False, rope="half", kv=1, more_shapes={"z": (2, 5, 4), "log_alpha": (2, 5)}),
}  # fmt: skip

# What must keep a sign or a size, and tensors without a gradient in such files.
FIXED = {"proj", "bn_mean", "bn_var", "proj_mean", "proj_var"}


def tensors_of(name):
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    mechanism, _, _, _, shapes = CASES[name]
    made = {}
    for key, shape in shapes.items():
        value = torch.randn(shape, generator=generator, dtype=DOUBLE)
        if key in ("norm", "q_norm", "k_norm", "norm_w", "mid_w"):
            value = 1 + 0.2 * value
        elif key not in ("x", "u") and len(shape) >= 2 and key not in ("A_log", "b", "c", "z"):
            value = value * 0.5
        elif key in ("A_log", "log_dt", "log_neg_re", "log_tau", "log_alpha"):
            value = value * 0.5
        if key.endswith("_var"):
            value = 0.5 + value.abs()
        if key == "beta" and mechanism == "fem":
            value = 1.8 + 0.3 * value
        made[key] = value
    return made


def text(value):
    return {True: "1", False: "0"}[value] if isinstance(value, bool) else ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def write(name, folder):
    """The file of a case; its path."""
    mechanism, operator, function, metadata, _ = CASES[name]
    tensors = {key: value.requires_grad_(key not in FIXED) for key, value in tensors_of(name).items()}
    out = function(metadata, tensors)
    whole = operator.endswith("layer")  # gradients of files of h3 are those of the mixer inside
    result = {"out" if whole else "layer_out": out}
    if not whole:
        result |= mixed(metadata, tensors)
    if whole:
        result["dout"] = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=DOUBLE)
        (out * result["dout"]).sum().backward()
        result |= {"d" + key: value.grad for key, value in tensors.items() if value.grad is not None}
    saved = {key: value.detach().contiguous().clone() for key, value in {**tensors, **result}.items()}
    path = folder / f"{name}.safetensors"
    save_file(saved, path, {"mechanism": mechanism, "operator": operator, **{key: text(value) for key, value in metadata.items()}})
    return path
