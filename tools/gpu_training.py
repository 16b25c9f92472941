"""What a training step asks for beside its time: how long the first call of each operator takes in a fresh process (PyTorch's context is
there, the kernels are not loaded), and the memory of a step at 16,2048,16,128 and 1,32768,16,128 in bf16, beside flash-linear-attention
where it can be imported; of the operators that are named, or of all. Run by gpu_run.sh; prints Markdown."""

import sys
import time

import torch
import torch.nn.functional as F

import linnet

# Ours, the peer's module and function, and what each takes beside q, k, v.
RULES = {
    "linear": (linnet.linear, "linear_attn", "chunk_linear_attn", ""),
    "decay": (linnet.decay, "simple_gla", "chunk_simple_gla", "g"),
    "gla": (linnet.gla, "gla", "chunk_gla", "G"),
    "delta": (linnet.delta, "delta_rule", "chunk_delta_rule", "b"),
    "gated_delta": (linnet.gated_delta, "gated_delta_rule", "chunk_gated_delta_rule", "gb"),
    "kda": (linnet.gated_delta, "kda", "chunk_kda", "Gb"),
}
for name in sys.argv[1:]:
    if name not in RULES:
        sys.exit(f"gpu_training.py: no operator named {name}; there are {', '.join(RULES)}")
RULES = {name: RULES[name] for name in sys.argv[1:] or RULES}


def inputs(B, T, gates):
    q, k, v, dout = (torch.randn(B, T, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    given = {"q": q, "k": F.normalize(k.float(), dim=-1).bfloat16(), "v": v}
    if gates[:1] in ("g", "G"):
        given["g"] = F.logsigmoid(torch.randn(q.shape if gates[0] == "G" else q.shape[:3], device="cuda") + 2)
    if gates[-1:] == "b":
        given["beta"] = torch.rand(B, T, 16, device="cuda").bfloat16()  # as in the peers' benchmark, whose kernels are compiled
    return {name: tensor.requires_grad_() for name, tensor in given.items()}, dout


def step(function, given, dout):
    """Forward and backward; what the forward keeps, in bytes."""
    before = torch.cuda.memory_allocated()
    out = function(**given)
    out = out[0] if isinstance(out, tuple) else out
    kept = torch.cuda.memory_allocated() - before
    out.backward(dout)
    for tensor in given.values():
        tensor.grad = None
    return kept


def timed(call):
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start), result


def first_calls():
    print("First call of each in one process, forward and then backward, of 16,2048,16,128:\n")
    print("| operator | forward, ms | backward, ms |\n| --- | ---: | ---: |")
    # PyTorch's own first calls: a gradient handed to backward() makes it import its symbolic shapes, which takes seconds.
    torch.ones(1, device="cuda", requires_grad=True).exp().backward(torch.ones(1, device="cuda"))
    for name, (function, _, _, gates) in RULES.items():
        given, dout = inputs(16, 2048, gates)
        forward, out = timed(lambda: function(**given))
        backward, _ = timed(lambda: out.backward(dout))
        print(f"| {name} | {forward:.1f} | {backward:.1f} |", flush=True)


def peak(function, given, dout):
    """MiB that a step takes at most beyond its inputs, and that its forward keeps (its output with it)."""
    step(function, given, dout)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = step(function, given, dout)
    return f"{(torch.cuda.max_memory_allocated() - before) / 2**20:.0f}, {kept / 2**20:.0f}"


def memory():
    print("\nMemory of a step, MiB: the peak beyond inputs and incoming gradient, and what the forward keeps, its output with it:\n")
    print("| operator | B, T | ours | flash-linear-attention |\n| --- | --- | ---: | ---: |")
    for name, (function, module, peer, gates) in RULES.items():
        for B, T in ((16, 2048), (1, 32768)):
            given, dout = inputs(B, T, gates)
            ours, theirs = peak(function, given, dout), "-"
            try:
                other = getattr(__import__("fla.ops." + module, fromlist=[peer]), peer)
                extra = {"normalize": False} if name == "linear" else {}
                theirs = peak(lambda **tensors: other(**tensors, **extra), given, dout)
            except ImportError:
                pass
            except RuntimeError as error:
                theirs = "refuses" if "Triton" in str(error) else str(error).splitlines()[0]
            print(f"| {name} | {B}, {T} | {ours} | {theirs} |", flush=True)


first_calls()
memory()
