# H3 as PyTorch users write it: both filters by FFT (the form of the official package), powers of a in complex64.


def h3(case):
    if case["C"] != case["H"]:
        return None
    q, k, v = case.random("B C T"), case.random("B C T"), case.random("B C T")
    sc, sd, d = case.random("C R", torch.float32) / case["R"], case.random("C", torch.float32), case.random("H", torch.float32)
    dt = torch.exp(torch.rand(case["H"]) * 4.6 - 6.9)
    A = torch.complex(torch.full((case["H"], case["M"]), -0.5), torch.arange(case["M"]) * torch.pi + torch.zeros(case["H"], 1))
    half = dt[:, None] * A / 2
    a, bd = (1 + half) / (1 - half), dt[:, None] / (1 - half)
    c = torch.randn(case["H"], case["M"], dtype=torch.complex64)
    T = case["T"]

    def convolve(x, taps):
        return torch.fft.irfft(torch.fft.rfft(x, 2 * T) * torch.fft.rfft(taps, 2 * T), 2 * T)[..., :T]

    def mix(q, k, v):
        powers = torch.exp(torch.log(a)[:, :, None] * torch.arange(T))
        taps = 2 * torch.einsum("hm,hml->hl", c * bd, powers).real
        keys, kv = k.float(), None
        kv = (convolve(keys, sc) + sd[:, None] * keys) * v.float()
        return (q.float() * (convolve(kv, taps) + d[:, None] * kv)).to(q.dtype)

    return "FFT", case.work(mix, q, k, v)


def h3_decode(case):
    if case["H"] != case["C"] or case["T"] != 1:
        return None
    q, k, v = case.random("B C"), case.random("B C"), case.random("B C")
    sb, sc, sd, d = (case.random(shape, torch.float32) for shape in ("C R", "C R", "C", "C"))
    log_dt, log_neg_re, imag = (case.random(shape, torch.float32) for shape in ("H", "H M", "H M"))
    b, c = (torch.randn(case["H"], case["M"], dtype=torch.complex64) for _ in range(2))
    x = torch.randn(case["B"], case["C"], case["R"])
    X = torch.randn(case["B"], case["C"], case["M"], dtype=torch.complex64)

    def step(q, k, v):  # discretised in every call, as ours
        dt = log_dt.exp()
        half = dt[:, None] * torch.complex(-log_neg_re.exp(), imag) / 2
        a, bd = (1 + half) / (1 - half), dt[:, None] * b / (1 - half)
        keys = k.float()
        x.copy_(torch.nn.functional.pad(x[:, :, :-1], (1, 0)) + sb * keys[:, :, None])
        kv = ((x * sc).sum(-1) + sd * keys) * v.float()
        X.mul_(a).add_(bd * kv[:, :, None])
        return (q.float() * (2 * (X * c).sum(-1).real + d * kv)).to(q.dtype)

    return "in-place operations", case.work(step, q, k, v)
