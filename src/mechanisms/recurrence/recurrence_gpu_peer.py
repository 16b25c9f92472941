# The recurrences on a GPU: flash-linear-attention, where it can be imported.


def _fla(case, module, name, *gates):
    try:
        function = getattr(__import__("fla.ops." + module, fromlist=[name]), name)
    except ImportError:
        return None
    if len({case["Hq"], case["Hk"], case["Hv"]}) != 1 or not case.default("scale"):
        return None
    q, k, v = case.random("B T Hq K"), case.random("B T Hk K"), case.random("B T Hv V")
    k = torch.nn.functional.normalize(k.float(), dim=-1).to(case.dtype)
    made = {
        "g": lambda: -0.1 * case.random("B T Hq", torch.float32).exp(),
        "channels": lambda: -0.1 * case.random("B T Hq K", torch.float32).exp(),
        "beta": lambda: case.random("B T Hq", torch.float32).sigmoid().to(case.dtype),
    }
    gates = [made[gate]() for gate in gates]
    try:  # it refuses some gradients
        work = case.work(lambda *tensors: function(*tensors)[0], q, k, v, *gates)
        work()
    except Exception as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        print(f"flash-linear-attention, {case.op}: {why}", file=sys.stderr)
        return None
    return "flash-linear-attention", work


def decay_gpu(case):
    return _fla(case, "simple_gla", "chunk_simple_gla", "g")


def gla_gpu(case):
    return _fla(case, "gla", "chunk_gla", "channels")


def delta_gpu(case):
    return _fla(case, "delta_rule", "chunk_delta_rule", "beta")


def gated_delta_gpu(case):
    if case.other:  # one decay per head
        return _fla(case, "gated_delta_rule", "chunk_gated_delta_rule", "g", "beta")
    return _fla(case, "kda", "chunk_kda", "channels", "beta")
