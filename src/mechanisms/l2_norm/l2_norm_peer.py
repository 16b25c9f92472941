# Rows of length one as PyTorch users write them.


def l2_norm(case):
    x = case.random("B T H K")
    return "functional.normalize", case.work(lambda x: torch.nn.functional.normalize(x, dim=-1), x)


def l2_norm_gpu(case):
    calls = [l2_norm(case)]
    try:
        from fla.modules.l2norm import l2norm
        calls.append(("flash-linear-attention", case.work(l2norm, case.random("B T H K"))))
    except ImportError:
        pass
    return fastest(calls)
