# PyTorch's fused attention and the gate behind it, in the layout [B, H, T, D].


def gated(case):
    if not case.default("softcap", "prefix", "chunk", "scale", "window") or case["Tq"] != case["Tk"]:
        return None
    options = case.options
    if options["position"] != "G1" or options["granularity"] != "elementwise" or options["mode"] != "multiply":
        return None
    act = {"sigmoid": torch.sigmoid, "silu": torch.nn.functional.silu, "identity": lambda x: x}.get(options["act"])
    if act is None:
        return None
    q, k, v = case.random("B H Tq K"), case.random("B Hkv Tk K"), case.random("B Hkv Tk V")
    g = case.random("B H Tq V")
    shared = options["shared"] == "1"

    def attend(q, k, v, g):
        y = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=options["causal"] == "1", enable_gqa=case["H"] != case["Hkv"])
        gate = act(g)
        return y * (gate.mean(dim=1, keepdim=True) if shared else gate)

    return "scaled_dot_product_attention, gate", case.work(attend, q, k, v, g)


def gated_gate(case):
    if case.options["granularity"] != "elementwise" or case.options["shared"] == "1" or case.options["mode"] != "multiply":
        return None
    y, g = case.random("B T H V"), case.random("B T H V")
    return "y * sigmoid(g)", case.work(lambda y, g: y * torch.sigmoid(g), y, g)
