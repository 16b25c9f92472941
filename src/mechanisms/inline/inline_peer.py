# InLine attention as its released code writes it in PyTorch: (s/N) q (k^T v) + (1 - s q.kbar) vbar, two batched products. The causal
# form is not in that code.


def inline(case):
    if case.options["causal"] == "1" or case.options["kernel"] != "identity" or not case.default("scale"):
        return None
    scale = case["K"] ** -0.5

    def attend(q, k, v):
        count = k.shape[-2]
        products = k.transpose(-1, -2) @ v
        rest = 1 - scale * (q * k.mean(-2, keepdim=True)).sum(-1, keepdim=True)
        return (scale / count) * (q @ products) + rest * v.mean(-2, keepdim=True)

    return "released form", case.work(attend, case.random("B H T K"), case.random("B H S K"), case.random("B H S V"))
