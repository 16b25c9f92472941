# PyTorch's linear map. It has none with weights of 4 or 8 bits in groups that any CPU runs: the same map with weights of the
# call's type stands beside dense_quantised.


def dense(case):
    x, weight = case.random("B T I"), case.random("O I")
    return "functional.linear", case.work(torch.nn.functional.linear, x, weight)


def dense_quantised(case):
    x, weight = case.random("B T I"), torch.randn(16 * case["panels"], case["I"]).to(case.dtype)
    return "functional.linear (not quantised)", case.work(torch.nn.functional.linear, x, weight)
