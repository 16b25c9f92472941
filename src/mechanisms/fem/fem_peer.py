# The free energy mixer with the softmax prior as one writes it in PyTorch: fused attention over widened values. [B, H, T, D].


def fem_read(case):
    if case.options["prior"] != "softmax":
        return None
    letters = {**case.letters, "T": case["S"]}
    def tensor(shape):
        return torch.randn([letters[letter] for letter in shape.split()]).to(case.dtype)
    q, k, v = tensor("B H T K"), tensor("B H T K"), tensor("B H T V")
    beta, lam, g = tensor("H V").abs() + 0.5, torch.sigmoid(tensor("B H T V")), torch.rand_like(v)
    causal, V = case.options["causal"] == "1", case["V"]

    def read(q, k, v, beta, lam, g):
        b = beta[:, None]
        clipped = torch.minimum(torch.maximum(v, -40 / b), 40 / b)
        wide = torch.cat([clipped, (b * clipped).exp()], dim=-1)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, wide, is_causal=causal)
        mu, free = out[..., :V], out[..., V:].log() / b
        return g * torch.lerp(mu, free, lam)

    return "scaled_dot_product_attention, widened values", case.work(read, q, k, v, beta, lam, g)
