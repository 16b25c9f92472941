# Rotary positions as transformers applies them, cosines and sines made beforehand.


def rotary(case):
    x, width = case.random("B T H D"), case["D"]
    if case.options["pairs"] != "half" or int(case.options["dims"]) != 0:
        return None
    positions = torch.arange(case["T"], dtype=torch.float32)[:, None] + float(case.options["offset"])
    angles = positions * 10000.0 ** (-torch.arange(0, width, 2) / width)
    cos = torch.cat([angles.cos()] * 2, -1)[:, None].to(case.dtype)
    sin = torch.cat([angles.sin()] * 2, -1)[:, None].to(case.dtype)

    def turn(x):
        half = torch.cat([-x[..., width // 2:], x[..., : width // 2]], -1)
        return x * cos + half * sin

    return "transformers' apply_rotary_pos_emb", case.work(turn, x)
