# Degrees of freedom in PyTorch: the spectrum of the Gram matrix in double.


def distill_dof(case):
    if case["N"] != 1 or case["T"] > 4096:
        return None
    x = case.random("T D").double()

    def estimate():
        distances = torch.cdist(x, x).square()
        gram = torch.exp(-distances / (2 * case["D"] ** 0.5)) / case["T"]
        e = torch.linalg.eigvalsh(gram).clamp(min=0)
        return (e / (e + 0.1)).sum()

    return "eigvalsh", estimate
