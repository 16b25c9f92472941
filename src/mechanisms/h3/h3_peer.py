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
