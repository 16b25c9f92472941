# What Monarch attention replaces: PyTorch's fused attention, in the layout it likes best: [B, H, T, D], contiguous.


def monarch(case):
    if not case.default("scale"):
        return None
    q, k, v = case.random("B H T K"), case.random("B H S K"), case.random("B H S V")
    causal = case.options.get("causal") == "1"

    def attend(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return "scaled_dot_product_attention", case.work(attend, q, k, v)


def monarch_tiled(case):
    return monarch(case) if case.options.get("group", "0") == "0" else None


def monarch_decode(case):
    if not case.default("scale") or case["T"] != 1:
        return None
    length = case.lengths["lengths"]
    q, k, v = case.random("B H T K"), case.random("B H T K"), case.random("B H T V")
    k_cache = torch.randn(case["B"], case["H"], length + 1, case["K"]).to(case.dtype)
    v_cache = torch.randn(case["B"], case["H"], length + 1, case["V"]).to(case.dtype)

    def attend(q, k, v):
        k_cache[:, :, length:length + 1] = k
        v_cache[:, :, length:length + 1] = v
        return torch.nn.functional.scaled_dot_product_attention(q, k_cache, v_cache)

    return "scaled_dot_product_attention", case.work(attend, q, k, v)
