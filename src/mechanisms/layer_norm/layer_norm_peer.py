# PyTorch's layer norm.


def layer_norm(case):
    x, weight, bias = case.random("B T H D"), case.random("D"), case.random("D")
    return "functional.layer_norm", case.work(
        lambda x, w, b: torch.nn.functional.layer_norm(x, (case["D"],), w, b), x, weight, bias)
