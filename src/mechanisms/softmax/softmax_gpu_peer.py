# Softmax attention on a GPU: the faster of PyTorch's fused kernels (FlashAttention-2, cuDNN), in the layout they like best.


def fastest_attention(case, call, *tensors):
    backends = torch.nn.attention.SDPBackend
    calls = []
    for name, backend in (("FlashAttention-2", backends.FLASH_ATTENTION), ("cuDNN", backends.CUDNN_ATTENTION)):
        def attend(*tensors, backend=backend):
            with torch.nn.attention.sdpa_kernel(backend):
                return call(*tensors)
        try:
            work = case.work(attend, *tensors)
            work()
            calls.append((name, work))
        except Exception:  # a back end that does not take this case
            continue
    return fastest(calls) if calls else None


def softmax_gpu(case):
    if not case.default("softcap", "prefix", "chunk", "scale", "window"):
        return None
    if case["Tq"] != case["Tk"] and case.options["causal"] == "1":
        return None
    q, k, v = case.random("B H Tq K"), case.random("B Hkv Tk K"), case.random("B Hkv Tk V")
    causal, grouped = case.options["causal"] == "1", case["H"] != case["Hkv"]
    function = torch.nn.functional.scaled_dot_product_attention
    return fastest_attention(case, lambda q, k, v: function(q, k, v, is_causal=causal, enable_gqa=grouped), q, k, v)


def softmax_decode_gpu(case):
    if not case.default("window", "softcap", "prefix", "scale") or case["T"] != 1:
        return None
    q, k, v = case.random("B H T K"), case.random("B Hkv T K"), case.random("B Hkv T V")
    k_cache, v_cache = case.random("B Hkv capacity K"), case.random("B Hkv capacity V")
    length, grouped = case.lengths["lengths"], case["H"] != case["Hkv"]

    def attend(q, k, v):
        k_cache[:, :, length:length + 1] = k
        v_cache[:, :, length:length + 1] = v
        return torch.nn.functional.scaled_dot_product_attention(
            q, k_cache[:, :, :length + 1], v_cache[:, :, :length + 1], enable_gqa=grouped)

    return fastest_attention(case, attend, q, k, v)
