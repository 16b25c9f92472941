# decay, gla and the general recurrence as one writes them in PyTorch: batched matrix products chunk after chunk, the state
# carried along, decays as exponentials of sums inside the chunk; with beta a triangular solve per chunk. For one token the
# update of the state in place. Layout [B, H, T, D], contiguous. (delta and gated_delta have transformers' functions.)


def _recurrence_chunks(q, k, v, g, beta, length):
    """g [B, H, T, 1 or K]: log decays; beta [B, H, T, 1] or None."""
    state, parts = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3]), []
    q = q * q.shape[-1] ** -0.5
    for at in range(0, q.shape[2], length):
        q_c, k_c, v_c, g_c = (x[:, :, at:at + length] for x in (q, k, v, g))
        sums = g_c.cumsum(dim=2)
        grown = sums.exp()
        read, key = q_c * grown, k_c * (-sums).exp()
        if beta is not None:
            beta_c, kept = beta[:, :, at:at + length], k_c * grown
            system = (beta_c * (kept @ key.transpose(-1, -2))).tril(-1)
            v_c = torch.linalg.solve_triangular(system, beta_c * (v_c - kept @ state), upper=False, unitriangular=True)
        parts.append(read @ state + (read @ key.transpose(-1, -2)).tril() @ v_c)
        last = sums[:, :, -1:]
        state = last.exp().transpose(-1, -2) * state + (k_c * (last - sums).exp()).transpose(-1, -2) @ v_c
    return torch.cat(parts, dim=2)


def _recurrence(case, gate, with_beta):
    if len({case["Hq"], case["Hk"], case["Hv"]}) != 1 or not case.default("scale"):
        return None
    q, k, v = case.random("B Hq T K"), case.random("B Hk T K"), case.random("B Hv T V")
    g = -0.1 * (case.random("B Hq T K") if gate == "channel" else case.random("B Hq T").unsqueeze(-1)).abs()
    inputs = [q, torch.nn.functional.normalize(k, dim=-1) if with_beta else k, v, g]
    if with_beta:
        inputs.append(case.random("B Hq T").sigmoid().unsqueeze(-1))

    def attend(length):
        return lambda q, k, v, g, beta=None: _recurrence_chunks(q, k, v, g, beta, length)
    return fastest([(f"matmul, chunk after chunk of {length}", case.work(attend(length), *inputs)) for length in (64, 128)])


def _recurrence_decode(case, gate, with_beta):
    if len({case["Hq"], case["Hk"], case["Hv"]}) != 1 or case["T"] != 1 or not case.default("scale"):
        return None
    q, k, v = case.random("B Hq T K"), case.random("B Hk T K"), case.random("B Hv T V")
    g = -0.1 * (case.random("B Hq K").unsqueeze(-1) if gate == "channel" else case.random("B Hq T").unsqueeze(-1)).abs()
    beta = case.random("B Hq T").sigmoid().unsqueeze(-1)
    state = case.random("B Hq K V", torch.float32)
    scale = case["K"] ** -0.5

    def step(q, k, v):
        state.mul_(g.float().exp())
        k, v = k.float(), v.float()
        if with_beta:
            v = beta * (v - k @ state)
        state.addcmul_(k.transpose(-1, -2), v)
        return torch.matmul(q.float() * scale, state).to(q.dtype)
    return "mul_, addcmul_, matmul", case.work(step, q, k, v)


def decay(case):
    return _recurrence(case, "head", False)


def gla(case):
    return _recurrence(case, "channel", False)


def recurrence(case):
    return _recurrence(case, "head" if "g" in case.other else "channel", True)


def decay_decode(case):
    return _recurrence_decode(case, "head", False)


def gla_decode(case):
    return _recurrence_decode(case, "channel", False)


def recurrence_decode(case):
    return _recurrence_decode(case, "head" if "g" in case.other else "channel", True)
