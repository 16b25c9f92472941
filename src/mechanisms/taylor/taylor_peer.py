# Second-order Taylor attention in PyTorch: not causal by its features in one batched product, causal by pairs (what is left without a
# kernel: the whole matrix of weights).


def taylor_exact(case):
    scale = case["K"] ** -0.5
    if not case.default("scale"):
        return None
    if case.options["causal"] == "1":
        if case["T"] > 4096:
            return None

        def pairs(q, k, v):
            s = scale * (q @ k.transpose(-1, -2))
            w = (1 + s + s * s / 2).tril()
            return (w @ v) / w.sum(-1, keepdim=True)

        return "all pairs", case.work(pairs, case.random("B H T K"), case.random("B H S K"), case.random("B H S V"))

    def features(x):
        x = x * scale ** 0.5
        square = (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2) * 0.5 ** 0.5
        return torch.cat([torch.ones_like(x[..., :1]), x, square], dim=-1)

    def attend(q, k, v):
        f = features(k).transpose(-1, -2)
        g = features(q)
        return (g @ (f @ v)) / (g @ f.sum(-1, keepdim=True))

    return "features, unpacked", case.work(attend, case.random("B H T K"), case.random("B H S K"), case.random("B H S V"))
