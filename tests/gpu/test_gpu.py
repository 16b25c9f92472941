"""The torch operators on a GPU: results, gradients, streams, graphs, compile. Run by tools/gpu_run.sh; pytest collects it too."""

import torch

import linnet


def inputs(dtype, B=2, T=200, H=4, D=64, grad=False):
    generator = torch.Generator(device="cuda").manual_seed(1)
    return [torch.randn(B, T, H, D, device="cuda", generator=generator).to(dtype).requires_grad_(grad) for _ in range(3)]


def close(got, want, tolerance):
    error = ((got.double().cpu() - want.double().cpu()).norm() / want.double().norm()).item()
    assert error <= tolerance, error
    return error


def reference(function, tensors):
    return function(*(t.detach().double().cpu() for t in tensors))


def test_forward():
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)):
        q, k, v = inputs(dtype)
        close(linnet.linear(q, k, v), reference(linnet.linear, (q, k, v)), tolerance)


def test_backward():
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 8e-3)):
        tensors = inputs(dtype, grad=True)
        out = linnet.linear(*tensors)
        gradient = torch.randn_like(out)
        out.backward(gradient)
        doubles = [t.detach().double().cpu().requires_grad_() for t in tensors]
        linnet.linear(*doubles).backward(gradient.double().cpu())
        for got, want in zip(tensors, doubles):
            close(got.grad, want.grad, tolerance)


def test_monarch():
    for dtype, T, tolerance in ((torch.float32, 300, 2e-6), (torch.float16, 256, 7e-4), (torch.float16, 2000, 7e-4)):
        tensors = inputs(dtype, T=T, grad=True)
        out = linnet.monarch(*tensors)
        gradient = torch.randn_like(out)
        out.backward(gradient)
        doubles = [t.detach().double().cpu().requires_grad_() for t in tensors]
        want = linnet.monarch(*doubles)
        want.backward(gradient.double().cpu())
        close(out, want.detach(), tolerance)
        assert torch.equal(out, linnet.monarch(*tensors))
        for got, expected in zip(tensors, doubles):
            close(got.grad, expected.grad, 3 * tolerance)


def gradients(function, tensors, seed=2):
    """Gradients of the tensors on the GPU and in double on the CPU, the same one coming in."""
    out = function(*tensors)
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed))
    out.backward(gradient.to(out))
    doubles = [t.detach().double().cpu().requires_grad_() for t in tensors]
    function(*doubles).backward(gradient.to(out.dtype).double())
    return [(t.grad, d.grad) for t, d in zip(tensors, doubles)]


def test_decay_backward():
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 8e-3)):
        q, k, v = inputs(dtype, D=128, grad=True)
        g = (-torch.rand(2, 200, 4, device="cuda")).requires_grad_()
        for got, want in gradients(lambda q, k, v, g: linnet.decay(q, k, v, g=g), (q, k, v, g)):
            close(got, want, tolerance)


def test_layer_of_mamba():
    generator = torch.Generator(device="cuda").manual_seed(3)
    B, T, H, V, K = 2, 150, 4, 64, 64

    def random(*size, dtype=torch.bfloat16):
        return torch.randn(*size, device="cuda", generator=generator).to(dtype).requires_grad_()

    x, z, taps = random(B, T, H * V), random(B, T, H, V), random(H * V, 4)
    dt, A = random(B, T, H, dtype=torch.float32), random(H, dtype=torch.float32)
    b, c, weight = random(B, T, 1, K), random(B, T, 1, K), random(V)

    def layer(x, z, taps, dt, A, b, c, weight):
        y = linnet.causal_conv(x, taps).unflatten(-1, (H, V))
        y = linnet.mamba_ssd(y, dt, -A.exp(), linnet.l2_norm(b), linnet.l2_norm(c))
        return linnet.rms_norm_gated(y, z=z, weight=weight)

    for got, want in gradients(layer, (x, z, taps, dt, A, b, c, weight)):
        close(got, want, 2e-2)  # four operators in a row, each rounded to bf16


def test_decode_overwrites_the_state():
    q, k, v = inputs(torch.bfloat16, T=1)
    state = torch.zeros(2, 4, 64, 64, device="cuda")
    out = linnet.linear_decode(q, k, v, state=state)
    close(state, torch.einsum("bhk,bhv->bhkv", k[:, 0].float(), v[:, 0].float()), 1e-6)
    close(out, linnet.linear(q, k, v), 4e-3)


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
    close(compiled(q, k, v), linnet.linear(q, k, v) + 1, 4e-3)


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


if __name__ == "__main__":
    failures = 0
    for name, test in list(globals().items()):
        if not name.startswith("test_"):
            continue
        try:
            test()
            print(f"{name}: passed", flush=True)
        except Exception as error:
            failures += 1
            print(f"{name}: FAILED: {type(error).__name__}: {error}", flush=True)
    raise SystemExit(failures > 0)
