# The torch functions that Hugging Face transformers runs for the gated delta rule (Qwen3-Next) where no fused kernel is
# installed: torch_chunk_gated_delta_rule, and torch_recurrent_gated_delta_rule for one token. One decay per head; layout
# [B, T, H, D] as here. They need transformers beside torch; without it the case says so.


def _qwen3_next():
    from transformers.models.qwen3_next import modeling_qwen3_next
    return modeling_qwen3_next


def _gated_delta_inputs(case):
    unit = torch.nn.functional.normalize
    q, k, v = unit(case.random("B T Hq K"), dim=-1), unit(case.random("B T Hk K"), dim=-1), case.random("B T Hv V")
    return q, k, v, -0.1 * case.random("B T Hv").abs(), case.random("B T Hv").sigmoid()


def gated_delta(case):
    if "g" not in case.other or len({case["Hq"], case["Hk"], case["Hv"]}) != 1:  # a decay per channel has no torch function
        return None
    rule = _qwen3_next().torch_chunk_gated_delta_rule
    return "transformers chunk", case.work(lambda *inputs: rule(*inputs)[0], *_gated_delta_inputs(case))


def gated_delta_decode(case):
    if "g" not in case.other or len({case["Hq"], case["Hk"], case["Hv"]}) != 1:
        return None
    rule = _qwen3_next().torch_recurrent_gated_delta_rule
    inputs, state = _gated_delta_inputs(case), case.random("B Hv K V", torch.float32)
    return "transformers recurrent", case.work(
        lambda *tensors: rule(*tensors, initial_state=state, output_final_state=True)[0], *inputs)
