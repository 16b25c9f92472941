# What attention over a tree replaces: PyTorch's fused attention, in the layout it likes best: [B, H, T, D], contiguous.


def hierarchical(case):
    if not case.default("scale") or case["T"] > 32768:  # 262,144 tokens would take a quarter of an hour
        return None
    q, k, v = case.random("B H T K"), case.random("B H T K"), case.random("B H T V")
    causal = case.options.get("causal") == "1"

    def attend(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return "scaled_dot_product_attention", case.work(attend, q, k, v)
