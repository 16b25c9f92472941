"""One training step of layers and of a whole model of linnet.nn beside flash-linear-attention's of the same sizes, on a GPU in bf16.

    gpu_layers.py compile PART PARTS      # what the peers compile, shared by so many processes; beside other work
    gpu_layers.py time [NAME ...]         # alone on the GPU: prints Markdown

flash-linear-attention is to be importable (fla, einops); its Mamba-2 wants mamba_ssm.ops.triton. Both sides have the same weights, and
their outputs are compared. `time` chooses the peers' configurations from what `compile` left in Triton's cache, with short measurements."""

import importlib
import os
import sys
import time

os.environ.setdefault("FLA_CACHE_RESULTS", "0")
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import linnet.nn  # noqa: E402

B, T, C = 16, 2048, 2048
LAYERS = {  # ours: class and options; theirs: module of fla.layers, class, options
    "DeltaNet, 16 heads of 128": ("DeltaNet", {"heads": 16}, "delta_net", "DeltaNet", {"num_heads": 16}),
    "Gated DeltaNet, 16 heads of 128": ("GatedDeltaNet", {"heads": 16, "key": 128, "value": 128}, "gated_deltanet", "GatedDeltaNet",
                                        {"num_heads": 16, "head_dim": 128, "expand_v": 1.0}),
    "Gated DeltaNet, 6 heads of 256 and 512": ("GatedDeltaNet", {}, "gated_deltanet", "GatedDeltaNet", {"num_heads": 6, "head_dim": 256}),
    "GLA, 4 heads of 256 and 512": ("GatedLinearAttention", {}, "gla", "GatedLinearAttention", {"num_heads": 4}),
    "GLA, 16 heads of 64 and 128": ("GatedLinearAttention", {"heads": 16}, "gla", "GatedLinearAttention", {"num_heads": 16}),
    "KDA, 16 heads of 128": ("KimiDeltaAttention", {"heads": 16, "key": 128, "value": 128}, "kda", "KimiDeltaAttention", {}),
    "Mamba-2, 64 heads of 64, state 128": ("Mamba2", {"hidden": C}, "mamba2", "Mamba2", {"num_heads": 64, "head_dim": 64, "state_size": 128, "expand": 2}),
}  # fmt: skip
MODELS = {  # model_type of fla, its configuration: about 340 M parameters
    "DeltaNet, 340 M": ("delta_net", "DeltaNet", {"hidden_size": 1024, "num_heads": 8, "num_hidden_layers": 24}),
    "Gated DeltaNet, 340 M": ("gated_deltanet", "GatedDeltaNet", {"hidden_size": 1024, "num_heads": 8, "head_dim": 128, "expand_v": 1.0, "num_hidden_layers": 24}),
}  # fmt: skip


def allow_wrong_gradients():
    """Theirs refuses gradients of gated rules with this Triton, whose results would be wrong. The time of them is what counts here."""
    module = importlib.import_module("fla.ops.common.chunk_o")
    module.TRITON_ABOVE_3_7_1 = True


def theirs_of(name, batch):
    _, _, module, kind, options = LAYERS[name]
    layer = getattr(importlib.import_module("fla.layers." + module), kind)(hidden_size=C, layer_idx=0, **options)
    layer = layer.to("cuda", torch.bfloat16)
    if module == "mamba2":
        layer.eval()  # its training path wants another package
    return layer


def ours_of(name, theirs):
    kind, options, *_ = LAYERS[name]
    layer = getattr(linnet.nn, kind)(**{"hidden": C, **options}).to("cuda", torch.bfloat16)
    state = dict(theirs.state_dict())
    renamed = {"g_norm_swish_gate.weight": "g_norm.weight"}
    with torch.no_grad():
        for key, parameter in layer.named_parameters():
            given = state.get(key, state.get(renamed.get(key)))
            if given is None:
                raise KeyError(f"{name}: theirs has no {key}, but {', '.join(state)}")
            parameter.copy_(given.reshape(parameter.shape))
    return layer


def first(result):
    return result[0] if isinstance(result, tuple) else result


def step(layer, x, dout):
    """Milliseconds of a forward and a backward, and the output."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    for parameter in layer.parameters():
        parameter.grad = None
    x.grad = None
    events[0].record()
    out = first(layer(x))
    events[1].record()
    out.backward(dout)
    events[2].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]), events[0].elapsed_time(events[2]), out.detach()


def median(values):
    return sorted(values)[len(values) // 2]


def time_layers(names):
    print(f"\nA layer, {B} x {T} tokens, hidden {C}; ms, medians of 12 steps, in turn. First step: forward and backward in this process, the context is there.\n")
    print("| layer | ours fwd | theirs | ours fwd+bwd | theirs | ratio | first step, s | outputs differ by |\n|---|---|---|---|---|---|---|---|")
    x = torch.randn(B, T, C, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dout = torch.randn_like(x)
    for name in names:
        try:
            theirs = theirs_of(name, B)
            ours = ours_of(name, theirs)
            start = time.perf_counter()
            step(ours, x, dout)
            begin = time.perf_counter() - start
        except Exception as problem:
            print(f"| {name} | {type(problem).__name__}: {str(problem)[:200]} |", flush=True)
            continue
        times, outs = {"ours": [], "theirs": []}, {}
        for label, layer in (("ours", ours), ("theirs", theirs)):
            try:
                for _ in range(2):
                    outs[label] = step(layer, x, dout)[2]
                for _ in range(12):
                    times[label].append(step(layer, x, dout)[:2])
            except Exception as problem:
                print(f"{name}, {label}: {type(problem).__name__}: {str(problem)[:300]}", flush=True)
        got = {label: [median(each) for each in zip(*values)] if values else [float("nan")] * 2 for label, values in times.items()}
        differ = float((outs["ours"].float() - outs["theirs"].float()).norm() / outs["theirs"].float().norm()) if len(outs) == 2 else float("nan")
        (a, b), (c, d) = got["ours"], got["theirs"]
        print(f"| {name} | {a:.2f} | {c:.2f} | {b:.2f} | {d:.2f} | {d / b:.2f} | {begin:.2f} | {differ:.1e} |", flush=True)
        del theirs, ours, outs
        torch.cuda.empty_cache()


def their_model(name):
    kind, prefix, fields = MODELS[name]
    models = importlib.import_module("fla.models")
    config = getattr(models, prefix + "Config")(**fields)
    return getattr(models, prefix + "ForCausalLM")(config).cuda(), {**config.to_dict(), "model_type": kind}


def model_step(call, optimizer, ids):
    """Milliseconds of a whole step."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    with torch.autocast("cuda", torch.bfloat16):
        loss = call(ids)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end), float(loss)


def time_models(names, batch=8):
    print(f"\nA model, {batch} x {T} tokens, vocabulary 32,000: forward, backward, fused AdamW; f32 weights, autocast to bf16; ms, medians of 8 steps.\n")
    print("| model | parameters | ours | theirs | ratio | first step, s | losses at the start |\n|---|---|---|---|---|---|---|")
    ids = torch.randint(0, 32000, (batch, T), device="cuda")
    for name in names:
        theirs, config = their_model(name)
        ours = linnet.nn.from_fla(config, theirs.state_dict(), device="cuda")
        calls = {"ours": (ours, lambda x: F.cross_entropy(ours(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())),
                 "theirs": (theirs, lambda x: theirs(input_ids=x, labels=x).loss)}  # fmt: skip
        times, losses, begin = {}, {}, 0.0
        for label, (model, call) in calls.items():
            optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)
            try:
                start = time.perf_counter()
                losses[label] = model_step(call, optimizer, ids)[1]
                begin = begin or time.perf_counter() - start
                model_step(call, optimizer, ids)
                times[label] = median([model_step(call, optimizer, ids)[0] for _ in range(8)])
            except Exception as problem:
                print(f"{name}, {label}: {type(problem).__name__}: {str(problem)[:300]}", flush=True)
                times.setdefault(label, float("nan")), losses.setdefault(label, float("nan"))
        count = sum(p.numel() for p in ours.parameters())
        print(f"| {name} | {count / 1e6:.0f} M | {times['ours']:.1f} | {times['theirs']:.1f} | {times['theirs'] / times['ours']:.2f} | {begin:.2f} | "
              f"{losses['ours']:.4f}, {losses['theirs']:.4f} |", flush=True)  # fmt: skip
        del theirs, ours, calls
        torch.cuda.empty_cache()


def compile_peers(part, parts):
    """Every kernel's configurations are compiled once, this process's share of them; none is chosen."""
    import triton.runtime.autotuner
    import triton.testing

    whole = triton.runtime.autotuner.Autotuner.__init__

    def some(self, fn, names, configs, *rest, **more):
        whole(self, fn, names, configs, *rest, **more)
        self.configs = self.configs[part::parts] or self.configs[:1]

    def once(function, **_):
        function()
        return [0.0, 0.0, 0.0]

    triton.runtime.autotuner.Autotuner.__init__ = some
    triton.testing.do_bench = once
    allow_wrong_gradients()
    for name in LAYERS:
        try:
            x = torch.randn(B, 256, C, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            step(theirs_of(name, B), x, torch.randn_like(x))
        except Exception as problem:
            print(f"{name}: {type(problem).__name__}: {str(problem)[:300]}", flush=True)
        torch.cuda.empty_cache()
    for name in MODELS:
        try:
            model = their_model(name)[0]
            model.model.layers = model.model.layers[:1]
            ids = torch.randint(0, 32000, (8, 256), device="cuda")
            model_step(lambda x, model=model: model(input_ids=x, labels=x).loss, torch.optim.AdamW(model.parameters(), 1e-5, fused=True), ids)
        except Exception as problem:
            print(f"{name}: {type(problem).__name__}: {str(problem)[:300]}", flush=True)


def quick(function, **_):
    """Short measurements choose a configuration."""
    function()
    torch.cuda.synchronize()
    best = float("inf")
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end))
    return [best] * 3


def main(words):
    if words[:1] == ["compile"]:
        compile_peers(int(words[1]), int(words[2]))
        return
    import triton.testing

    triton.testing.do_bench = quick
    allow_wrong_gradients()
    torch.zeros(1, device="cuda")
    names = words[1:]
    time_layers([name for name in LAYERS if not names or name in names])
    time_models([name for name in MODELS if not names or name in names])


if __name__ == "__main__":
    main(sys.argv[1:])
