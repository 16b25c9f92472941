# Monarch attention on a GPU: the fastest of PyTorch's fused attention (FlashAttention-2, cuDNN) and the authors' Triton kernels,
# where those can be imported (packages `ma` and `perfbench` of their repository). All of them in the layout that they like best.


def monarch_gpu(case):
    if not case.default("scale") or case.options.get("causal") == "1":
        return None
    q, k, v = case.random("B H T K"), case.random("B H S K"), case.random("B H S V")
    block = int(case.options.get("block", "-1"))
    block = block if block > 0 else int(case["T"] ** 0.5)
    steps = int(case.options.get("steps", "1"))
    calls = []

    def attention(backend):
        def attend(q, k, v):
            with torch.nn.attention.sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return attend

    backends = torch.nn.attention.SDPBackend
    offers = [("FlashAttention-2", attention(backends.FLASH_ATTENTION)), ("cuDNN", attention(backends.CUDNN_ATTENTION))]
    if not case.backward and case.options.get("pad", "post") == "post":
        try:
            from ma.ma_triton import monarch_attention_triton
            offers.append(("authors", lambda q, k, v: monarch_attention_triton(q, k, v, None, steps, block, False)))
        except ImportError:
            pass
        try:
            from perfbench.fused_flash_monarch_attention import fused_flash_monarch_attention
            if case["T"] <= 256 and block * block == case["T"] and steps <= 2:
                offers.append(("authors, fused", lambda q, k, v: fused_flash_monarch_attention(q, k, v, block, steps)))
        except ImportError:
            pass
    for name, function in offers:
        try:
            call = case.work(function, q, k, v)
            call()
            calls.append((name, call))
        except Exception:  # a back end that does not take this case
            continue
    return fastest(calls) if calls else None
