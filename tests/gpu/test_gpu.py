"""The torch operators on a GPU: results, gradients, torch's own checks, streams, graphs, compile, bits. Run by tools/gpu_run.sh
(arguments: the tests' names); pytest collects it too."""

import functools
import pathlib
import subprocess
import sys
import time

import torch

import linnet
from linnet._library import TOLERANCE

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "python"))
from cases import CASES, arguments, as_tuple, call, case_id, differentiable, every_output, keywords_of, make, on_request  # noqa: E402

# Sizes at which the kernels with matrix units run, and sizes at which they do not.
TILES = {"T": 150, "S": 150, "Tq": 150, "Tk": 150, "H": 8, "Hq": 8, "Hk": 8, "Hv": 8, "Hkv": 4, "K": 64, "V": 64, "E": 64}
LINES = [case for case in CASES if any(each["device"] == "cuda" for each in linnet.info(case[0])["implementations"])]


def inputs(dtype, B=2, T=200, H=4, D=64, grad=False):
    generator = torch.Generator(device="cuda").manual_seed(1)
    return [torch.randn(B, T, H, D, device="cuda", generator=generator).to(dtype).requires_grad_(grad) for _ in range(3)]


NAMES = {torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


def gate(name, dtype, backward=False, logit=0):
    """The RMS gate of the operator's CUDA kernels (src/core/tolerance.h, through the declaration)."""
    rows = [each["gates"][NAMES[dtype]][backward] for each in linnet.info(name)["implementations"] if each["device"] == "cuda"]
    grown = max(rows) * (1 + logit / TOLERANCE["logits"])  # which row of the GPU's table runs is not known here
    return min(grown, TOLERANCE["largest_rms"])


def largest_logit(q, k):
    """Of softmax weights with the usual scale."""
    scores = torch.einsum("bthk,bshk->bhts", q.detach().double().cpu(), k.detach().double().cpu())
    return scores.abs().max().item() / q.shape[-1] ** 0.5


def close(got, want, tolerance, scale=None):
    """Both metrics of src/check/compare.cc. A tensor that is small against the scale of its call is all cancellation: its errors
    are then relative to that scale."""
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    assert torch.equal(got.isfinite(), want.isfinite())
    if want.numel() == 0:
        return
    error, rms, largest = got - want, (got - want).square().mean().sqrt().item(), want.abs().max().item()
    limit = min(TOLERANCE["max_over_rms"] * tolerance, TOLERANCE["largest_max"])
    if rms <= tolerance * want.square().mean().sqrt().item() and error.abs().max().item() <= limit * largest:
        return
    small = scale is not None and largest < TOLERANCE["cancelled"] * scale
    assert small and error.abs().max().item() <= TOLERANCE["cancelled_most"] * scale, (
        f"rms {rms / max(want.square().mean().sqrt().item(), 1e-300):.2e} of {tolerance:.1e}, "
        f"max {error.abs().max().item() / max(largest, 1e-300):.2e} of {limit:.1e}"
    )


def scale_of(tensors, incoming=1.0):
    """The largest magnitude among the inputs of a call and the gradients that come in, at least 1."""
    sizes = [t.detach().abs().max().item() for t in tensors if t.is_floating_point() and t.numel()]
    return max([1.0, incoming, *(x for x in sizes if x < float("inf"))])


def refused(error):
    """Whether the library refused the call, with its sentence: a kernel that did not start, or failed, is no refusal."""
    return "the tensors are on a CUDA device; " in str(error)


def reference(function, tensors):
    return function(*(t.detach().double().cpu() for t in tensors))


def test_forward():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        q, k, v = inputs(dtype)
        close(linnet.linear(q, k, v), reference(linnet.linear, (q, k, v)), gate("linear", dtype))


def test_backward():
    for dtype in (torch.float32, torch.bfloat16):
        tensors = inputs(dtype, grad=True)
        out = linnet.linear(*tensors)
        gradient = torch.randn_like(out)
        out.backward(gradient)
        doubles = [t.detach().double().cpu().requires_grad_() for t in tensors]
        linnet.linear(*doubles).backward(gradient.double().cpu())
        for got, want in zip(tensors, doubles):
            close(got.grad, want.grad, gate("linear", dtype, True))


def test_monarch():
    for dtype, T in ((torch.float32, 300), (torch.float16, 256), (torch.float16, 2000)):
        tensors = inputs(dtype, T=T, grad=True)
        out = linnet.monarch(*tensors)
        gradient = torch.randn_like(out)
        out.backward(gradient)
        doubles = [t.detach().double().cpu().requires_grad_() for t in tensors]
        want = linnet.monarch(*doubles)
        want.backward(gradient.double().cpu())
        logit = largest_logit(*tensors[:2])
        close(out, want, gate("monarch", dtype, logit=logit))
        assert torch.equal(out, linnet.monarch(*tensors))
        for got, expected in zip(tensors, doubles):
            close(got.grad, expected.grad, gate("monarch", dtype, True, logit))


def test_monarch_in_clusters():
    for dtype in (torch.float16, torch.bfloat16):
        q, k, v = inputs(dtype, T=4096, H=12)  # more heads than clusters that run at a time
        out = linnet.monarch(q, k, v)
        close(out, reference(linnet.monarch, (q, k, v)), gate("monarch", dtype, logit=largest_logit(q[:1, :, :1], k[:1, :, :1])))
        assert all(torch.equal(out, linnet.monarch(q, k, v)) for _ in range(100))
        assert torch.equal(out[1:2], linnet.monarch(q[1:2], k[1:2], v[1:2]))
        q[1, 5 * 64 + 9, 3] = float("nan")  # reaches its slot, with 3 more that share a product, and no other head
        new = linnet.monarch(q, k, v)
        known = torch.ones_like(out[..., 0], dtype=torch.bool)
        known[1, :, 3] = torch.arange(4096, device=out.device) % 64 // 4 != 2
        assert torch.equal(new[known], out[known]) and new[1, 9::64, 3].isnan().all()


# What models are made of besides attention: a name, the call on three tensors [2, 200, 4, 64], whether it has gradients.
ELEMENTARY = [
    ("rms_norm", lambda x, y, z: linnet.rms_norm(x, weight=y[0, 0, 0]), True),
    ("layer_norm", lambda x, y, z: linnet.layer_norm(x, weight=y[0, 0, 0], bias=z[0, 0, 0]), True),
    ("rotary", lambda x, y, z: linnet.rotary(x, offset=1000), True),
    ("activation", lambda x, y, z: linnet.activation(x, act="gelu"), True),
    ("glu", lambda x, y, z: linnet.glu(x, y), True),
    ("add", lambda x, y, z: linnet.add(x, y, scale=0.5), True),
    ("dense", lambda x, y, z: linnet.dense(x[:, :, 0], y[0, :40, 0], bias=z[0, :40, 0, 0]), False),
    ("dense, one token", lambda x, y, z: linnet.dense(x[:, :1, 0], y[0, :40, 0]), False),
]


def test_elementary():
    for dtype, forward, backward in ((torch.float32, 1e-6, 1e-5), (torch.bfloat16, 2.5e-3, 8e-3), (torch.float16, 3e-4, 1.5e-3)):
        for _, function, differentiable in ELEMENTARY:
            tensors = inputs(dtype, grad=differentiable)
            close(function(*tensors).detach(), reference(function, tensors), forward)
            for got, want in gradients(function, tensors) if differentiable else ():
                if want is not None:
                    close(got, want, backward)


def gradients(function, tensors, seed=2):
    """Gradients of the tensors on the GPU and in double on the CPU, the same one coming in."""
    out = function(*tensors)
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed))
    out.backward(gradient.to(out))
    doubles = [t.detach().double().cpu().requires_grad_() for t in tensors]
    function(*doubles).backward(gradient.to(out.dtype).double())
    return [(t.grad, d.grad) for t, d in zip(tensors, doubles)]


def test_decay_backward():
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = inputs(dtype, D=128, grad=True)
        g = (-torch.rand(2, 200, 4, device="cuda")).requires_grad_()
        for got, want in gradients(lambda q, k, v, g: linnet.decay(q, k, v, g=g), (q, k, v, g)):
            close(got, want, gate("decay", dtype, True))


def on_gpu(tensors):
    return {key: t.detach().cuda().requires_grad_(t.requires_grad) for key, t in tensors.items()}


def everywhere(test, dtypes=(torch.float32, torch.bfloat16)):
    """test(name, options, tensors, with gradients?) of every operator with CUDA kernels: f32 at small sizes, bf16 at those of
    the matrix units. What the kernels refuse (with a sentence that says so) is counted; an operator must take one of them."""
    ran, failures, passed, refusals = set(), [], 0, 0
    for case in LINES:
        name, given, options = case
        for dtype in dtypes:
            for wanted in (True, False) if linnet.info(name)["differentiable"] else (False,):
                tensors = make(name, given, dtype=dtype, sizes=None if dtype == torch.float32 else TILES, **options)
                if "beta" in tensors:  # longer keys overflow under the delta rule
                    tensors["k"] /= tensors["k"].norm(dim=-1, keepdim=True)
                tensors = on_gpu(differentiable(name, tensors) if wanted else tensors)
                try:
                    test(name, options, tensors, wanted)
                    torch.cuda.synchronize()
                    ran.add(name)
                    passed += 1
                    break
                except Exception as error:
                    if "CUDA error" in str(error):  # nothing runs behind it
                        raise RuntimeError(f"{case_id(case)} {dtype} {wanted}: {str(error).splitlines()[0]}") from error
                    if refused(error):
                        refusals += 1
                    else:
                        failures.append(f"{case_id(case)} {dtype} {wanted}: {type(error).__name__}: {str(error)[:300]}")
                        break
    missing = {case[0] for case in LINES} - ran
    assert not failures and not missing, "\n  ".join([f"{passed} passed, {refusals} refused; never ran: {missing}", *failures])
    print(f"  {passed} calls, {refusals} refused", flush=True)


@functools.lru_cache(maxsize=None)
def incoming(shape, dtype, device):
    """A gradient that comes in: numbers that every type has. Kept, since a graph cannot capture its making."""
    return (torch.randint(-64, 65, shape, generator=torch.Generator().manual_seed(3)) / 64).to(dtype).to(device)


def results_of(name, options, tensors, wanted):
    """Every result and every gradient."""
    outputs = as_tuple(call(name, tensors, **options, **every_output(name)))
    leaves = [t for t in tensors.values() if t.requires_grad]
    ends = [out for out in outputs if out.requires_grad]
    given = [incoming(out.shape, out.dtype, out.device) for out in ends]
    found = torch.autograd.grad(ends, leaves, given, allow_unused=True) if wanted else ()
    return [*outputs, *(grad for grad in found if grad is not None)]


def copies(tensors):
    return {key: t.detach().clone().requires_grad_(t.requires_grad) for key, t in tensors.items()}


def overwritten(name, tensors):
    names = [decl["name"] for decl in linnet.info(name)["inputs"] if decl["mutated"] and decl["name"] != "compensation"]
    return [tensors[each] for each in names if each in tensors]  # a compensation is all rounding


def test_every_operator_against_double():
    def test(name, options, tensors, wanted):
        dtype = next(iter(tensors.values())).dtype
        doubles = {
            key: (t.detach().double() if t.is_floating_point() else t).cpu().requires_grad_(t.requires_grad)
            for key, t in tensors.items()
        }
        got = results_of(name, options, tensors, wanted) + overwritten(name, tensors)
        want = results_of(name, options, doubles, wanted) + overwritten(name, doubles)
        outputs, states = len(linnet.info(name)["outputs"]), len(got) - len(overwritten(name, tensors))
        logit = largest_logit(tensors["q"], tensors["k"]) if name.startswith("monarch") else 0
        for i, (one, other) in enumerate(zip(got, want, strict=True)):
            if one.is_floating_point():
                close(one, other, gate(name, dtype, outputs <= i < states, logit), scale_of(tensors.values()))

    everywhere(test)


def test_nothing():
    """No batch rows, no tokens, no heads: the same results, gradients and states as in double on the CPU, in both types."""
    counts = dict.fromkeys(("B", "T", "H"), 0)
    for name, given, options in LINES:
        wanted = linnet.info(name)["differentiable"]
        for none in (("B",), ("T", "S", "Tq", "Tk"), ("H", "Hq", "Hk", "Hv", "Hkv", "G")):
            for dtype in (torch.float32, torch.bfloat16):
                tensors = make(name, given, dtype=dtype, sizes={**TILES, **dict.fromkeys(none, 0)}, **options)
                tensors = differentiable(name, tensors) if wanted else tensors
                doubles = {
                    key: (t.detach().double() if t.is_floating_point() else t.clone()).requires_grad_(t.requires_grad)
                    for key, t in tensors.items()
                }
                gpu = on_gpu(tensors)
                try:
                    want = results_of(name, options, doubles, wanted) + overwritten(name, doubles)
                except RuntimeError:  # the operator wants some of them
                    continue
                try:
                    got = results_of(name, options, gpu, wanted) + overwritten(name, gpu)
                except RuntimeError as error:
                    assert refused(error), f"{name} {given} {none}: {error}"
                    continue
                for one, other in zip(got, want, strict=True):
                    assert one.shape == other.shape, f"{name} {given} {none}: {one.shape}, expected {other.shape}"
                    assert torch.equal(one.isfinite().cpu(), other.isfinite()), f"{name} {given} {none}"
                    if one.is_floating_point():
                        close(one, other, gate(name, dtype, wanted), scale_of(tensors.values()))
                counts[none[0]] += 1
    torch.cuda.synchronize()
    assert all(counts.values()), counts
    print(f"  {counts}", flush=True)


def test_opcheck():
    def test(name, options, tensors, wanted):
        keywords = {**keywords_of(options), **on_request(name)}
        if wanted:  # is the backward refused?
            results_of(name, options, tensors, wanted)
        torch.library.opcheck(getattr(torch.ops.linnet, name).default, arguments(name, tensors), keywords)
        if not wanted:
            return
        plain = {key: t.detach() for key, t in tensors.items()}
        outputs = as_tuple(getattr(torch.ops.linnet, name)(*arguments(name, plain), **keywords))
        declaration = linnet.info(name)
        incoming = [torch.randn_like(out) for out, decl in zip(outputs, declaration["outputs"]) if decl["differentiable"]]
        saved = [out for out, decl in zip(outputs, declaration["outputs"]) if decl["saved"]]
        asked = [decl["name"] in tensors for decl in declaration["inputs"] if decl["differentiable"]]
        operator = getattr(torch.ops.linnet, name + "_backward").default
        torch.library.opcheck(
            operator, (*incoming, *arguments(name, plain), *saved), {**keywords_of(options), "wanted": asked}, test_utils="test_schema"
        )

    everywhere(test, (torch.bfloat16,))


def test_every_operator_in_a_graph():
    def test(name, options, tensors, wanted):
        fresh = {key: t.detach().clone() for key, t in tensors.items()}
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):  # autograd wants the capture's stream warm
            results_of(name, options, copies(tensors), wanted)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            captured = results_of(name, options, tensors, wanted) + overwritten(name, tensors)
        with torch.no_grad():
            for key, t in tensors.items():
                if t.is_floating_point():
                    fresh[key] *= 0.5
                t.copy_(fresh[key])
        graph.replay()
        torch.cuda.synchronize()
        for key, t in fresh.items():
            t.requires_grad_(tensors[key].requires_grad)
        want = results_of(name, options, fresh, wanted) + overwritten(name, fresh)
        assert all(torch.equal(one, other) for one, other in zip(captured, want, strict=True))

    everywhere(test)


def test_every_operator_compiled():
    def test(name, options, tensors, wanted):
        def function(inputs):
            return call(name, {key: 0.5 * t if t.is_floating_point() and t.requires_grad else t for key, t in inputs.items()}, **options)

        results = []
        for compiled in (False, True):
            inputs = copies(tensors)
            torch.compiler.reset()
            outputs = as_tuple((torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function)(inputs))
            leaves = [t for t in inputs.values() if t.requires_grad]
            found = torch.autograd.grad(outputs[0], leaves, outputs[0].detach(), allow_unused=True) if wanted else ()
            results.append([*outputs, *overwritten(name, inputs), *(grad for grad in found if grad is not None)])
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))

    everywhere(test, (torch.bfloat16,))


def bits(t):
    """What == compares bit by bit, NaN or not."""
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def test_a_hundred_equal_runs():
    def test(name, options, tensors, wanted):
        inputs = copies(tensors)
        first = results_of(name, options, inputs, wanted) + overwritten(name, inputs)
        different = torch.zeros((), dtype=torch.bool, device="cuda")

        def run(inputs):  # one run and its comparison, all of it enqueued
            with torch.no_grad():
                for key, t in inputs.items():
                    t.copy_(tensors[key])
            results = results_of(name, options, inputs, wanted) + overwritten(name, inputs)
            for one, other in zip(first, results, strict=True):
                different.logical_or_((bits(one) != bits(other)).any())

        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):  # autograd wants the capture's stream warm
            run(copies(tensors))
        torch.cuda.synchronize()
        inputs = copies(tensors)
        with torch.cuda.graph(graph, stream=side):
            run(inputs)
        for _ in range(99):
            graph.replay()
        assert not different.item()

    everywhere(test)


class Rounded(torch.autograd.Function):
    """A tensor of bf16 numbers in double, and so its gradient: what lies between two operators."""

    @staticmethod
    def forward(ctx, x):
        return x.bfloat16().double()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.bfloat16().double()


def test_layer_of_mamba():
    generator = torch.Generator(device="cuda").manual_seed(3)
    B, T, H, V, K = 2, 150, 8, 64, 64

    def random(*size, dtype=torch.bfloat16):
        return torch.randn(*size, device="cuda", generator=generator).to(dtype).requires_grad_()

    x, z, taps = random(B, T, H * V), random(B, T, H, V), random(H * V, 4)
    dt, A = random(B, T, H, dtype=torch.float32), random(H, dtype=torch.float32)
    b, c, weight = random(B, T, 1, K), random(B, T, 1, K), random(V)

    def layer(x, z, taps, dt, A, b, c, weight, between=lambda t: t):
        y = between(linnet.causal_conv(x, taps)).unflatten(-1, (H, V))
        y = between(linnet.mamba_ssd(y, dt, -A.exp(), between(linnet.l2_norm(b)), between(linnet.l2_norm(c))))
        return between(linnet.rms_norm_gated(y, z=z, weight=weight))

    # Four operators in a row. db and dc, which the norms behind and before them leave little of, move by 9 % in double when
    # nothing but the tensors between the operators is rounded: that is the yardstick.
    tensors = (x, z, taps, dt, A, b, c, weight)
    rounded = [t.detach().double().cpu().requires_grad_() for t in tensors]
    incoming = torch.randn(z.shape, generator=torch.Generator().manual_seed(2)).bfloat16().double()
    layer(*rounded, between=Rounded.apply).backward(incoming)
    each = sum(gate(name, torch.bfloat16, True) for name in ("causal_conv", "l2_norm", "mamba_ssd", "rms_norm_gated"))
    for (got, want), other in zip(gradients(layer, tensors), rounded, strict=True):
        close(got, want, max(each, 1.5 * ((other.grad - want).norm() / want.norm()).item()))


def test_decode_overwrites_the_state():
    q, k, v = inputs(torch.bfloat16, T=1)
    state = torch.zeros(2, 4, 64, 64, device="cuda")
    out = linnet.linear_decode(q, k, v, state=state)
    close(state, torch.einsum("bhk,bhv->bhkv", k[:, 0].double(), v[:, 0].double()), gate("linear_decode", torch.float32))
    close(out, reference(linnet.linear, (q, k, v)), gate("linear_decode", torch.bfloat16))


def test_decode_bits():
    """Many heads take another kernel than few: a sequence has the same bits alone and in a batch."""
    generator = torch.Generator(device="cuda").manual_seed(1)

    def random(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, device="cuda", generator=generator).to(dtype)

    B, H = 29, 32
    for K in (64, 128):
        for V in (64, 128):
            q, k, v, z = (random(B, 1, H, width) for width in (K, K, V, V))
            beta, g = random(B, 1, H).sigmoid(), -random(B, 1, H, K).abs()
            A, D = -random(H, dtype=torch.float32).abs(), random(H, V)
            k /= k.norm(dim=-1, keepdim=True)
            state = random(B, H, K, V, dtype=torch.float32)
            for decode in (
                lambda rows, S: linnet.gated_delta_decode(q[rows], k[rows], v[rows], g[rows], beta[rows], state=S),
                lambda rows, S: linnet.mamba_ssd_decode(v[rows], g[rows][..., 0], A, k[rows], q[rows], D=D, z=z[rows], state=S),
            ):
                whole, alone = state.clone(), state.clone()
                out = decode(slice(None), whole)
                for b in (0, 7, B - 1):
                    rows = slice(b, b + 1)
                    assert torch.equal(decode(rows, alone[rows]), out[rows]), (K, V, b)
                    assert torch.equal(alone[rows], whole[rows]), (K, V, b)


def test_current_stream():
    q, k, v = inputs(torch.bfloat16, T=4096)
    want = linnet.linear(q, k, v)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # what follows must wait for it, so `doubled` is not seen half made
        doubled = q * 2
        out = linnet.linear(doubled, k, v)
    stream.synchronize()
    assert torch.equal(out, want * 2)


def test_graph():
    q, k, v = inputs(torch.bfloat16, T=300)
    linnet.linear(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = linnet.linear(q, k, v)
    q.mul_(2)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, linnet.linear(q, k, v))


def test_compile():
    q, k, v = inputs(torch.bfloat16)
    compiled = torch.compile(lambda q, k, v: linnet.linear(q, k, v) + 1, fullgraph=True)
    close(compiled(q, k, v), reference(linnet.linear, (q, k, v)) + 1, gate("linear", torch.bfloat16))


def test_bits():
    q, k, v = inputs(torch.bfloat16, B=3, T=1000, D=128)
    first = linnet.linear(q, k, v)
    assert all(torch.equal(first, linnet.linear(q, k, v)) for _ in range(100))
    assert torch.equal(first[1:2], linnet.linear(q[1:2], k[1:2], v[1:2]))


def test_refusals():
    q, k, v = inputs(torch.float64)
    for call, sentence in (
        (lambda: linnet.linear(q, k, v), "the CUDA kernels have no f64"),
        (lambda: linnet.linear(q.float(), k.float().cpu(), v.float()), "k is on the CPU, expected a CUDA device"),
        (lambda: linnet.softmax(q, k, v), "softmax has no CUDA kernels"),
    ):
        try:
            call()
        except RuntimeError as error:
            assert sentence in str(error), str(error)
        else:
            raise AssertionError(sentence)


# Tests that Python holds up, not the GPU: without arguments each runs in a process of its own, beside the others.
APART = ("test_opcheck", "test_every_operator_compiled", "test_every_operator_against_double")

if __name__ == "__main__":
    failures, apart = 0, []
    if not sys.argv[1:]:
        apart = [subprocess.Popen([sys.executable, __file__, name], stdout=subprocess.PIPE, text=True) for name in APART]
    for name, test in list(globals().items()):
        if not name.startswith("test_") or (name not in sys.argv[1:] if sys.argv[1:] else name in APART):
            continue
        start = time.time()
        try:
            test()
            print(f"{name}: passed ({time.time() - start:.1f} s)", flush=True)
        except Exception as error:
            failures += 1
            print(f"{name}: FAILED: {type(error).__name__}: {error}", flush=True)
    for process in apart:
        print(process.communicate()[0], end="", flush=True)
        failures += process.returncode != 0
    raise SystemExit(failures > 0)
