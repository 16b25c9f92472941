# PyTorch's activations; a gated unit as models write it.
ACTIVATIONS = {
    "relu": lambda x: torch.relu(x),
    "silu": lambda x: torch.nn.functional.silu(x),
    "gelu": lambda x: torch.nn.functional.gelu(x),
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "sigmoid": lambda x: torch.sigmoid(x),
    "tanh": lambda x: torch.tanh(x),
    "softplus": lambda x: torch.nn.functional.softplus(x),
}


def activation(case):
    act = ACTIVATIONS.get(case.options["act"])
    return act and ("functional." + case.options["act"], case.work(act, case.random("B T H D")))


def glu(case):
    act = ACTIVATIONS[case.options["act"]]
    return f"{case.options['act']}(gate) * up", case.work(lambda g, u: act(g) * u, case.random("B T H D"), case.random("B T H D"))


def add(case):
    return "torch.add", case.work(torch.add, case.random("B T H D"), case.random("B T H D"))
