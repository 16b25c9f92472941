# Zero-sum attention as one writes it in PyTorch: the weights written out for short sequences, or linear attention with the
# three-fold feature map of the prefix form, chunk after chunk. Layout [B, H, T, D].


def zeros(case):
    q, k = (torch.nn.functional.normalize(case.random("B H T K").float(), dim=-1).to(case.dtype) for _ in range(2))
    v, s = case.random("B H T V"), case.random("B H T")
    s1, sh = torch.rand_like(s), torch.rand_like(s)
    causal, tokens = case.options["causal"] == "1", case["T"]
    n = torch.arange(1, tokens + 1, dtype=torch.float32) if causal else torch.full((tokens,), float(tokens))

    def features(q, k, s, s1, sh):
        shifted = (s - s.amax(dim=-1, keepdim=True)).float()
        e = shifted.exp()
        total, sums = (e.cumsum(-1), shifted.cumsum(-1)) if causal else (e.sum(-1, keepdim=True), shifted.sum(-1, keepdim=True))
        alpha, beta = sh / total, (s1 - sh) / n
        gamma = -(beta * sums + sh) / n
        weights = torch.stack([alpha, beta, gamma], dim=-1), torch.stack([e, shifted, torch.ones_like(e)], dim=-1)
        return [(w.to(x.dtype)[..., None] * x[..., None, :]).flatten(-2) for w, x in zip(weights, (q, k))]

    def chunked(length):
        def run(q, k, v, s, s1, sh):
            fq, fk = features(q, k, s, s1, sh)
            if not causal:
                return fq @ (fk.transpose(-1, -2) @ v)
            state, out = 0, []
            for a, b, c in zip(*(x.split(length, dim=-2) for x in (fq, fk, v))):
                inside = (a @ b.transpose(-1, -2)).tril() @ c
                out.append(inside if isinstance(state, int) else inside + a @ state)
                state = state + b.transpose(-1, -2) @ c
            return torch.cat(out, dim=-2)
        return run

    return fastest([(f"matmul, chunks of {length}", case.work(chunked(length), q, k, v, s, s1, sh)) for length in (64, 256)])
