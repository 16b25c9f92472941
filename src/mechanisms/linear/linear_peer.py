# Linear attention as one writes it in PyTorch: batched matrix products over chunks, in the fastest of a few chunk lengths, and
# for one token the update of the state in place. Layout [B, H, T, D], contiguous.


def _feature_map(name):
    relu = torch.nn.functional.relu
    return {
        "identity": lambda x: x,
        "elu1": lambda x: torch.nn.functional.elu(x) + 1,
        "relu": relu,
        "relu2": lambda x: relu(x).square(),
        "silu": torch.nn.functional.silu,
        "softplus": torch.nn.functional.softplus,
        "exp": torch.exp,
        "hedgehog": lambda x: torch.softmax(torch.cat([x, -x], dim=-1), dim=-1),
    }.get(name)


def _with_ones(v):
    return torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)


def linear(case):
    phi = _feature_map(case.options["map"])
    if phi is None or len({case["Hq"], case["Hk"], case["Hv"]}) != 1 or not case.default("scale"):
        return None
    normalize, causal = case.options["normalize"] == "1", case.options["causal"] == "1"
    q, k, v = case.random("B Hq T K"), case.random("B Hk S K"), case.random("B Hv S V")
    scale = 1.0 if normalize else case["K"] ** -0.5

    def divided(out):
        return out[..., :-1] / (out[..., -1:] + 1e-6) if normalize else out

    def full(q, k, v):
        q, k, v = phi(q) * scale, phi(k), _with_ones(v) if normalize else v
        return divided(q @ (k.transpose(-1, -2) @ v))

    if not causal:
        return "matmul", case.work(full, q, k, v)

    def chunks(x, length):
        return x.unflatten(2, (-1, length))  # [B, H, n, C, D]

    def all_chunks(length):  # the states before all chunks at once
        def attend(q, k, v):
            q, k = chunks(phi(q) * scale, length), chunks(phi(k), length)
            v = chunks(_with_ones(v) if normalize else v, length)
            states = (k.transpose(-1, -2) @ v).cumsum(dim=2)
            states = torch.cat([torch.zeros_like(states[:, :, :1]), states[:, :, :-1]], dim=2)
            out = q @ states + (q @ k.transpose(-1, -2)).tril() @ v
            return divided(out.flatten(2, 3))
        return attend

    def one_by_one(length):  # the state carried along
        def attend(q, k, v):
            q, k, v = phi(q) * scale, phi(k), _with_ones(v) if normalize else v
            state, parts = 0, []
            for q_i, k_i, v_i in zip(q.split(length, 2), k.split(length, 2), v.split(length, 2)):
                scores = (q_i @ k_i.transpose(-1, -2)).tril()
                parts.append(scores @ v_i if isinstance(state, int) else q_i @ state + scores @ v_i)
                state = state + k_i.transpose(-1, -2) @ v_i
            return divided(torch.cat(parts, dim=2))
        return attend

    candidates = []
    for length in (64, 128, 256):
        if case["T"] % length == 0 and case["T"] // length * case["K"] * case["V"] * case["Hq"] * case["B"] < 2 ** 28:
            candidates.append((f"matmul, all chunks of {length}", case.work(all_chunks(length), q, k, v)))
        if length >= 128:
            candidates.append((f"matmul, chunk after chunk of {length}", case.work(one_by_one(length), q, k, v)))
    return fastest(candidates)


def linear_gpu(case):
    """flash-linear-attention, where it can be imported."""
    plain = case.options["map"] == "identity" and case.options["normalize"] == "0" and case.options["causal"] == "1"
    try:
        from fla.ops.linear_attn import chunk_linear_attn
    except ImportError:
        return linear(case)
    if not plain or case.dtype == torch.float32:
        return linear(case)

    def chunked(q, k, v):
        return chunk_linear_attn(q, k, v, normalize=False)[0]
    return "flash-linear-attention", case.work(chunked, case.random("B T Hq K"), case.random("B S Hk K"), case.random("B S Hv V"))


def linear_decode(case):
    phi = _feature_map(case.options["map"])
    if phi is None or len({case["Hq"], case["Hk"], case["Hv"]}) != 1 or case["T"] != 1 or not case.default("scale"):
        return None
    if case.options["normalize"] == "1":
        return None
    q, k, v = case.random("B Hq T K"), case.random("B Hk T K"), case.random("B Hv T V")
    state = case.random("B H F V", torch.float32)
    scale = case["K"] ** -0.5

    def elementwise(q, k, v):  # [B, H, 1, K] and [B, H, 1, V]
        state.addcmul_(phi(k).float().transpose(-1, -2), v.float())
        return torch.matmul(phi(q).float() * scale, state).to(q.dtype)

    flat = state.flatten(0, 1)

    def batched(q, k, v):
        flat.baddbmm_(phi(k).float().flatten(0, 1).transpose(-1, -2), v.float().flatten(0, 1))
        return torch.bmm((phi(q).float() * scale).flatten(0, 1), flat).to(q.dtype).unflatten(0, q.shape[:2])

    return fastest([("addcmul_, matmul", case.work(elementwise, q, k, v)), ("baddbmm_, bmm", case.work(batched, q, k, v))])
