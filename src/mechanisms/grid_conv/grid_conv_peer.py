#The convolution as PyTorch users write it : a padded depthwise conv2d on[B, E, height, width].

def grid_conv(case):
    height, width, taps = int(case.options["height"]), int(case.options["width"]), case["side"]
    x, weight = case.random("B E T").unflatten(-1, (height, width)).detach().requires_grad_(), case.random("E side side")

    def convolve(x, weight):
        return torch.nn.functional.conv2d(x, weight[:, None], padding=taps // 2, groups=weight.shape[0])

    return "conv2d", case.work(convolve, x, weight)
