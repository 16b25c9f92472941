# Attention through a feature map as one writes it in PyTorch, not causal: two batched products over the features. (Causal: see the
# peers of `linear`, which differ in the map alone.)


def features(case):
    relu = torch.nn.functional.relu
    tensors = case.random("B H T K"), case.random("B H S K"), case.random("B H S V")
    if case.options["map"] == "efficient" and case.options["causal"] == "0":

        def efficient(q, k, v):
            return q.softmax(-1) @ (k.softmax(-2).transpose(-1, -2) @ v)

        return "batched products", case.work(efficient, *tensors)
    phi = {
        "elu1": lambda x: torch.nn.functional.elu(x) + 1,
        "relu": relu,
        "relu2": lambda x: relu(x).square(),
    }.get(case.options["map"])
    if phi is None or case.options["causal"] == "1":
        return None

    def attend(q, k, v):
        q, k = phi(q), phi(k).transpose(-1, -2)
        return (q @ (k @ v)) / (q @ k.sum(-1, keepdim=True) + 1e-6)

    return "batched products", case.work(attend, *tensors)
