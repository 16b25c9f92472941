# The gated norm as PyTorch users write it, with rms_norm and silu.


def rms_norm_gated(case):
    functional = torch.nn.functional
    x, z, weight = case.random("B T H V"), case.random("B T H V"), case.random("V")
    first = case.options["norm_before_gate"] == "1"

    def norm(x, z, weight):
        if first:
            return functional.rms_norm(x, weight.shape, weight, 1e-5) * functional.silu(z)
        return functional.rms_norm(x * functional.silu(z), weight.shape, weight, 1e-5)

    return "rms_norm, silu", case.work(norm, x, z, weight)


def rms_norm_gated_gpu(case):
    calls = [rms_norm_gated(case)]
    try:
        from fla.modules.fused_norm_gate import rms_norm_gated as fused
        if case.options["norm_before_gate"] == "1":
            x, z, weight = case.random("B T H V"), case.random("B T H V"), case.random("V")
            calls.append(("flash-linear-attention", case.work(lambda x, z, weight: fused(x, z, weight, None, eps=1e-5), x, z, weight)))
    except ImportError:
        pass
    return fastest(calls)
