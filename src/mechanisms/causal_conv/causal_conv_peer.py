# The short convolution as PyTorch users write it: a padded depthwise conv1d, then silu. Layout [B, E, T], as conv1d wants it.


def causal_conv(case):
    functional = torch.nn.functional
    x, weight = case.random("B E T"), case.random("E W")
    taps = case["W"]

    def convolve(x, weight):
        y = functional.conv1d(functional.pad(x, (taps - 1, 0)), weight[:, None], groups=weight.shape[0])
        return functional.silu(y) if case.options["activation"] == "silu" else y

    return "conv1d, silu", case.work(convolve, x, weight)
