# MetaLA as one writes it in PyTorch: chunks of 16 tokens with the decays counted inside the chunk (longer ones overflow f32), the
# state carried from chunk to chunk. [B, H, T, D] inside.


def _metala_read(q, g, v, length=16):
    k = -torch.expm1(g)
    q, k, v, g = (x.transpose(1, 2).float().unflatten(2, (-1, length)) for x in (q * q.shape[-1] ** -0.5, k, v, g))
    sums = g.cumsum(3)  # [B, H, chunks, length, K]
    mask = torch.ones(length, length, dtype=torch.bool, device=g.device).tril()
    last = sums[..., -1:, :]
    weights = ((q * sums.exp()) @ (k * (-sums).exp()).transpose(-1, -2)).masked_fill(~mask, 0)
    inner, states = weights @ v, (k * (last - sums).exp()).transpose(-1, -2) @ v
    state, before = torch.zeros_like(states[:, :, 0]), []
    for decay, increment in zip(last.exp().transpose(-1, -2).unbind(2), states.unbind(2)):  # indices would cost T^2 backward
        before.append(state)
        state = state * decay + increment
    carried = (q * sums.exp()) @ torch.stack(before, dim=2)
    return (inner + carried).flatten(2, 3).transpose(1, 2)


def metala_mixer(case):
    if case["T"] % 16 or case.options["aug"] != "sigmoid" or not case.default("scale"):
        return None
    functional = torch.nn.functional
    q, a, v, w = case.random("B T H K"), case.random("B T H K"), case.random("B T H V"), case.random("H K")

    def mix(q, a, v, w):
        g = functional.logsigmoid(a.float()) / 16
        u = (q.float() * w.float() * -torch.expm1(g)).sum(-1, keepdim=True)
        return (_metala_read(q.float(), g, v) + torch.sigmoid(u * v.float())).to(q.dtype)

    return "chunks of 16", case.work(mix, q, a, v, w)


def metala_core(case):
    if case["T"] % 16 or not case.default("scale"):
        return None
    q, g, v = case.random("B T H K"), -0.1 * case.random("B T H K", torch.float32).exp(), case.random("B T H V")
    return "chunks of 16", case.work(lambda q, g, v: _metala_read(q.float(), g, v).to(q.dtype), q, g, v)


def metala_mixer_decode(case):
    if case["T"] != 1 or case.options["aug"] != "sigmoid" or not case.default("scale"):
        return None
    functional = torch.nn.functional
    q, a, v, w = case.random("B H K"), case.random("B H K"), case.random("B H V"), case.random("H K")
    state, scale = case.random("B H K V", torch.float32), case["K"] ** -0.5

    def step(q, a, v, w):
        g = functional.logsigmoid(a.float()) / 16
        k = -torch.expm1(g)
        state.mul_(g.exp()[..., None]).addcmul_(k[..., None], v.float()[..., None, :])
        u = (q.float() * w.float() * k).sum(-1, keepdim=True)
        read = torch.einsum("bhk,bhkv->bhv", q.float() * scale, state)
        return (read + torch.sigmoid(u * v.float())).to(q.dtype)

    return "in-place operations", case.work(step, q, a, v, w)
