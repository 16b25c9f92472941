# The short convolution as PyTorch users write it: a padded depthwise conv1d, then silu. Layout [B, E, T], as conv1d wants it.


def causal_conv(case):
    functional = torch.nn.functional
    x, weight = case.random("B E T"), case.random("E W")
    taps = case["W"]

    def convolve(x, weight):
        y = functional.conv1d(functional.pad(x, (taps - 1, 0)), weight[:, None], groups=weight.shape[0])
        return functional.silu(y) if case.options["activation"] == "silu" else y

    return "conv1d, silu", case.work(convolve, x, weight)


def causal_conv_decode(case):
    if case["T"] != 1:
        return None
    functional = torch.nn.functional
    x, weight = case.random("B E"), case.random("E W")
    state = case.random("B E W")[:, :, 1:].contiguous()

    def step(x, weight):
        window = torch.cat([state, x[:, :, None]], dim=-1)
        state.copy_(window[:, :, 1:])
        y = (window * weight).sum(-1)
        return functional.silu(y) if case.options["activation"] == "silu" else y

    return "cat, sum of products", case.work(step, x, weight)


def causal_conv_gpu(case):
    calls = [causal_conv(case)]
    try:
        from fla.modules.convolution import causal_conv1d
        x, weight = case.random("B T E"), case.random("E W")
        activation = "silu" if case.options["activation"] == "silu" else None

        def convolve(x, weight):
            out = causal_conv1d(x, weight, activation=activation)
            return out[0] if isinstance(out, tuple) else out

        calls.append(("flash-linear-attention", case.work(convolve, x, weight)))
    except ImportError:
        pass
    return fastest(calls)
