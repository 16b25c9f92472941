# PyTorch's fused attention, in the layout it likes best: [B, H, T, D], contiguous.


def softmax(case):
    if not case.default("softcap", "prefix", "chunk", "scale") or (case["Tq"] != case["Tk"] and case.options["causal"] == "1"):
        return None
    q, k, v = case.random("B H Tq K"), case.random("B Hkv Tk K"), case.random("B Hkv Tk V")
    causal, mask = case.options["causal"] == "1", None
    if not case.default("window"):  # torch has no windows: what its users do is a mask
        left, right = (int(word) for word in case.options["window"].split(","))
        distance = torch.arange(case["Tk"]) - torch.arange(case["Tq"])[:, None] - (case["Tk"] - case["Tq"])
        mask = torch.ones(case["Tq"], case["Tk"], dtype=torch.bool)
        if left >= 0:
            mask &= distance >= -left
        if causal or right >= 0:
            mask &= distance <= (0 if causal else right)
        causal = False

    def attend(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=case["H"] != case["Hkv"])

    return "scaled_dot_product_attention" + (" (mask)" if mask is not None else ""), case.work(attend, q, k, v)


def softmax_decode(case):
    if not case.default("window", "softcap", "prefix", "scale") or case["T"] != 1:
        return None
    q, k, v = case.random("B H T K"), case.random("B Hkv T K"), case.random("B Hkv T V")
    k_cache, v_cache = case.random("B Hkv capacity K"), case.random("B Hkv capacity V")
    length = case.lengths["lengths"]

    def attend(q, k, v):
        k_cache[:, :, length:length + 1] = k
        v_cache[:, :, length:length + 1] = v
        return torch.nn.functional.scaled_dot_product_attention(
            q, k_cache[:, :, :length + 1], v_cache[:, :, :length + 1], enable_gqa=case["H"] != case["Hkv"])

    return "scaled_dot_product_attention", case.work(attend, q, k, v)
