# The selective scan and SSD as PyTorch users write them where no CUDA kernel runs: the scan as a loop over tokens (the reference
# function of the official package), SSD as the "minimal" chunked form of the paper. Layouts as the originals have them.


def mamba_selective_scan(case):
    if case["G"] != 1:
        return None
    functional = torch.nn.functional
    x, dt, z = case.random("B T E"), case.random("B T E"), case.random("B T E")
    B, C = case.random("B T K"), case.random("B T K")
    A, D, bias = -case.random("E K", torch.float32).exp(), case.random("E", torch.float32), case.random("E", torch.float32)

    def loop(x, dt, z, B, C):
        delta = functional.softplus(dt.float() + bias)
        u, inputs, outputs = x.float(), B.float(), C.float()
        h = torch.zeros(x.shape[0], x.shape[2], A.shape[1])
        ys = []
        for t in range(x.shape[1]):
            step = delta[:, t, :, None]
            h = torch.exp(step * A) * h + (step * inputs[:, t, None, :]) * u[:, t, :, None]
            ys.append(torch.einsum("ben,bn->be", h, outputs[:, t]))
        y = torch.stack(ys, dim=1) + D * u
        return (y * functional.silu(z.float())).to(x.dtype)

    return "loop over tokens", case.work(loop, x, dt, z, B, C)


def mamba_ssd(case):
    if case["T"] % 64 or case["G"] != 1:
        return None
    functional = torch.nn.functional
    x, dt = case.random("B T H V"), case.random("B T H")
    B, C = case.random("B T G K"), case.random("B T G K")
    A, D, bias = -case.random("H", torch.float32).exp(), case.random("H", torch.float32), case.random("H", torch.float32)
    length = 64

    def minimal(x, dt, B, C):
        delta = functional.softplus(dt.float() + bias)
        values = (x.float() * delta[..., None]).unflatten(1, (-1, length))
        inputs, outputs = B.float()[:, :, 0].unflatten(1, (-1, length)), C.float()[:, :, 0].unflatten(1, (-1, length))
        g = (delta * A).unflatten(1, (-1, length)).permute(0, 3, 1, 2)  # [B, H, chunks, length]
        sums = g.cumsum(-1)
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        decay = (sums[..., :, None] - sums[..., None, :]).masked_fill(~mask, float("-inf")).exp()
        inner = torch.einsum("bcln,bcsn,bhcls,bcshp->bclhp", outputs, inputs, decay, values)
        states = torch.einsum("bcln,bhcl,bclhp->bchpn", inputs, (sums[..., -1:] - sums).exp(), values)
        state, before = torch.zeros_like(states[:, 0]), []
        for i in range(states.shape[1]):
            before.append(state)
            state = state * sums[:, :, i, -1].exp()[..., None, None] + states[:, i]
        carried = torch.einsum("bcln,bchpn,bhcl->bclhp", outputs, torch.stack(before, dim=1), sums.exp())
        y = (inner + carried).flatten(1, 2) + D[:, None] * x.float()
        return y.to(x.dtype)

    return "minimal chunked form", case.work(minimal, x, dt, B, C)


def mamba_selective_scan_decode(case):
    if case["G"] != 1 or case["T"] != 1:
        return None
    functional = torch.nn.functional
    x, dt, z = case.random("B E"), case.random("B E"), case.random("B E")
    B, C, state = case.random("B K"), case.random("B K"), case.random("B E K", torch.float32)
    A, D, bias = -case.random("E K", torch.float32).exp(), case.random("E", torch.float32), case.random("E", torch.float32)

    def step(x, dt, z, B, C):
        delta, u = functional.softplus(dt.float() + bias), x.float()
        state.mul_(torch.exp(delta[..., None] * A)).addcmul_((delta * u)[..., None], B.float()[:, None, :])
        y = torch.einsum("ben,bn->be", state, C.float()) + D * u
        return (y * functional.silu(z.float())).to(x.dtype)

    return "in-place operations", case.work(step, x, dt, z, B, C)


def mamba_ssd_gpu(case):
    """mamba_ssm's kernel where it can be imported, else flash-linear-attention's for one decay per head: the recurrence alone."""
    functional = torch.nn.functional
    x, dt = case.random("B T H V"), case.random("B T H")
    B, C = case.random("B T G K"), case.random("B T G K")
    A, D, bias = -case.random("H", torch.float32).exp(), case.random("H", torch.float32), case.random("H", torch.float32)
    try:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
        z = case.random("B T H V") if case["V"] == 64 else None

        def combined(x, dt, B, C):
            return mamba_chunk_scan_combined(x, dt, A, B, C, 256, D=D, z=z, dt_bias=bias, dt_softplus=True)

        return "mamba_ssm", case.work(combined, x, dt, B, C)
    except ImportError:
        pass
    try:
        from fla.ops.simple_gla import chunk_simple_gla
    except ImportError:
        return None
    heads = case["H"] // case["G"]
    q, k = C.repeat_interleave(heads, dim=2), B.repeat_interleave(heads, dim=2)
    g = functional.softplus(dt.float() + bias) * A
    try:  # it refuses the gradients under some versions of Triton
        work = case.work(lambda *tensors: chunk_simple_gla(*tensors, scale=1.0)[0], q, k, x, g)
        work()
    except RuntimeError:
        return None
    return "flash-linear-attention, simple GLA", work
