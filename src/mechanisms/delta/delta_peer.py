# The delta rule without decay is the gated rule of transformers (gated_delta_peer.py) with g = 0.


def delta(case):
    if len({case["Hq"], case["Hk"], case["Hv"]}) != 1:
        return None
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule as rule
    unit = torch.nn.functional.normalize
    q, k, v = unit(case.random("B T Hq K"), dim=-1), unit(case.random("B T Hk K"), dim=-1), case.random("B T Hv V")
    g, beta = torch.zeros_like(case.random("B T Hv")), case.random("B T Hv").sigmoid()
    return "transformers chunk", case.work(lambda q, k, v, beta: rule(q, k, v, g, beta)[0], q, k, v, beta)
