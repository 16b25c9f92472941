"""linnet.nn with the rest of torch: compile, autocast, checkpointing, saving, counting, FSDP2 and DTensor on two processes."""

import io
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
from test_nn import NAMES, module_of, x_of
from test_nn_models import CASES, ids_of, model_of
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import linnet.nn
from linnet._flops import cost

HERE = pathlib.Path(__file__).parent


def gradients(module, out):
    module.zero_grad()
    out.square().sum().backward()
    return {name: each.grad.clone() for name, each in module.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("name", NAMES)
def test_every_layer_compiles_as_one_graph(name):
    module = module_of(name)
    x = x_of(module)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    expected, got = module(x), compiled(x)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    want = gradients(module, expected)
    for key, each in gradients(module, got).items():
        torch.testing.assert_close(each, want[key], rtol=1e-3, atol=1e-5)


def test_a_model_compiles_as_one_graph():
    model, ids = model_of("hybrid"), ids_of(16, 2)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(ids), model(ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_autocast_and_checkpointing(name):
    module = module_of(name)
    x = x_of(module)
    expected = module(x)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x)
    assert (out.float() - expected).abs().max() < 0.05 * expected.abs().max() + 1e-3
    assert all(each.isfinite().all() for each in gradients(module, out.float()).values())
    want = gradients(module, expected)
    got = gradients(module, checkpoint(module, x, use_reentrant=False))
    assert want.keys() == got.keys()
    for key, each in got.items():
        torch.testing.assert_close(each, want[key])


@pytest.mark.parametrize("make", [lambda: module_of("kda"), lambda: model_of("hybrid")], ids=["layer", "model"])
def test_whole_modules_are_saved(make):
    module, buffer = make(), io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False)
    x = ids_of(9, 2) if isinstance(module, linnet.nn.Model) else x_of(module)
    assert torch.equal(again(x), module(x))
    state = again.make_state(2)
    torch.testing.assert_close(again(x, state=state), module(x), rtol=1e-4, atol=1e-5)


def test_decay_gate_and_its_initial_values():
    a, A_log, bias = torch.randn(2, 5, 3), torch.randn(3), torch.randn(3)
    torch.testing.assert_close(linnet.decay_gate(a, A_log, bias), -A_log.exp() * F.softplus(a + bias))
    wide, flat = torch.randn(2, 5, 3, 4), torch.randn(12)
    torch.testing.assert_close(linnet.decay_gate(wide, A_log, flat), -A_log.exp()[:, None] * F.softplus(wide + flat.reshape(3, 4)))
    bounded = linnet.decay_gate(wide, A_log, flat, lower=-5.0)
    assert (bounded > -5).all() and (bounded < 0).all()
    assert linnet.decay_gate(a.bfloat16(), A_log).dtype == torch.float32
    for options in ({"rate": (0.0, 16.0)}, {"key": 64}, {"key": 4, "lower": -5.0}):
        gate = linnet.nn.DecayGate(64, **options)
        step = F.softplus(gate.dt_bias)
        assert (step > 0.9e-4).all() and (step < 0.101).all() and (gate.A_log <= 2.78).all()
        g = gate(torch.zeros(1, 1, *gate.dt_bias.shape))
        assert (g < 0).all()
        g.sum().backward()
        assert gate.A_log.grad.abs().sum() > 0
    with pytest.raises(ValueError, match=r"decay_gate: a and A_log have shapes \[2, 5, 3\] and \[4\]"):
        linnet.decay_gate(a, torch.randn(4))


def test_flops_are_counted():
    q, k, v = torch.randn(3, 2, 64, 4, 32, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        linnet.softmax(q, k, v).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    forward, backward = counts[torch.ops.linnet.softmax], counts[torch.ops.linnet.softmax_backward]
    products = 2 * 2 * (2 * 4 * 64 * 64 * 32)
    assert products <= forward <= 1.2 * products and 2 * products <= backward <= 4 * products
    offsets = torch.tensor([0, 16, 64])
    packed = cost("softmax", {"q": q[0], "k": k[0], "v": v[0], "cu_seqlens_q": offsets, "cu_seqlens_k": offsets}, {})[0]
    assert packed < forward / 2
    model, ids = model_of("hybrid"), ids_of(32, 2)
    with FlopCounterMode(display=False) as counter:
        model(ids).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    assert all(counts[op] > 0 for op in (torch.ops.linnet.gated_delta, torch.ops.linnet.gated_delta_backward, torch.ops.linnet.mamba_ssd))
    assert counts[torch.ops.aten.addmm] + counts.get(torch.ops.aten.mm, 0) > 0
    with torch.device("meta"):
        model = linnet.nn.Model(CASES["hybrid"])
        with FlopCounterMode(display=False) as on_nothing:
            model(torch.zeros(2, 32, dtype=torch.int64)).sum().backward()
    assert on_nothing.get_total_flops() == counter.get_total_flops()


def two_processes(program, folder):
    """Runs a program on two gloo ranks, which meet in a file of the folder; both must end well."""
    heading = f"""
        import sys
        sys.path[:0] = {[*sys.path[:1], str(HERE)]!r} + {[p for p in sys.path if p.endswith("build/python")]!r}
        import os, torch, torch.distributed as dist
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method="file://{folder}/meeting", rank=int(sys.argv[1]), world_size=2)
        import linnet, linnet.nn, linnet.parallel
    """
    text = textwrap.dedent(heading) + textwrap.dedent(program) + "\nlinnet.parallel.leave()\n"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen([sys.executable, "-c", text, str(rank)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
             for rank in range(2)]  # fmt: skip
    outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)[-4000:]


def test_fsdp2_on_two_processes(tmp_path):
    two_processes("""
        from test_nn_models import ids_of, model_of
        from torch.distributed.fsdp import fully_shard
        ids = ids_of(16, 4)
        plain = model_of("hybrid")
        model = model_of("hybrid")
        for block in model.layers:
            fully_shard(block)
        fully_shard(model)
        other = torch.optim.AdamW(plain.parameters(), 1e-3)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        def loss(model, ids):
            return torch.nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        for _ in range(3):
            a = loss(plain, ids)
            a.backward(); other.step(); other.zero_grad()
            b = loss(model, ids[2 * dist.get_rank():][:2])
            b.backward(); optimizer.step(); optimizer.zero_grad()
            b = b.detach(); dist.all_reduce(b)
            assert abs(b / 2 - a) < 1e-4 * a, (a, b / 2)
        for (name, want), got in zip(plain.named_parameters(), model.parameters()):
            torch.testing.assert_close(got.full_tensor(), want, rtol=1e-3, atol=1e-4)
    """, tmp_path)


def test_every_layer_under_fsdp2(tmp_path):
    """A batch in two halves: the mean of their gradients is the whole's, whatever the layer."""
    two_processes("""
        from test_nn import NAMES, module_of, x_of
        from torch.distributed.fsdp import fully_shard
        for name in NAMES:
            plain, layer = module_of(name), module_of(name)
            x = x_of(plain)
            fully_shard(layer)
            want, got = plain(x), layer(x[dist.get_rank():][:1])
            torch.testing.assert_close(got, want[dist.get_rank():][:1], rtol=1e-4, atol=1e-5, msg=name)
            (want.square().sum() / 2).backward(); got.square().sum().backward()
            for (key, one), other in zip(plain.named_parameters(), layer.parameters()):
                torch.testing.assert_close(other.grad.full_tensor(), one.grad, rtol=1e-4, atol=1e-5, msg=f"{name} {key}")
    """, tmp_path)


def test_dtensor_shards_rows_and_heads(tmp_path):
    two_processes("""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
        linnet.register_with_dtensor()
        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(0)
        def t(*shape):
            return torch.randn(*shape, dtype=torch.float64)
        B, T, H, K = 2, 9, 4, 8
        wide = {"q": t(B, T, H, K), "k": t(B, T, H, K), "v": t(B, T, H, K)}
        cases = [
            (linnet.softmax, dict(q=t(B, T, H, K), k=t(B, T, 2, K), v=t(B, T, 2, K), sinks=t(H)), {"causal": True}, {"sinks": 0}),
            (linnet.gla, {**wide, "g": -t(B, T, H, K).abs()}, {}, {}),
            (linnet.decay, {**wide, "g_head": -t(H).abs()}, {}, {"g_head": 0}),
            (linnet.delta, {**wide, "beta": t(B, T, H).sigmoid()}, {"l2_norm": True}, {}),
            (linnet.gated_delta, {**wide, "g": -t(B, T, H).abs(), "beta": t(B, T, H).sigmoid()}, {"l2_norm": True}, {}),
            (linnet.linear, wide, {"map": "elu1", "normalize": True}, {}),
            (linnet.mamba_ssd, dict(x=t(B, T, H, K), dt=t(B, T, H), A=-t(H).abs(), B=t(B, T, 1, 4), C=t(B, T, 1, 4), D=t(H, K)), {},
             {"A": 0, "D": 0, "B": None, "C": None}),
            (linnet.rms_norm_gated, dict(x=t(B, T, H, K), z=t(B, T, H, K), weight=t(H, K)), {}, {"weight": 0}),
            (linnet.rotary, dict(x=t(B, T, H, K)), {}, {}),
        ]
        for function, tensors, options, heads in cases:
            plain = {name: each.clone().requires_grad_() for name, each in tensors.items()}
            want = function(**plain, **options)
            want.square().sum().backward()
            for kind in ("rows", "heads"):
                sharded = {}
                for name, each in tensors.items():
                    if kind == "rows":
                        place = Shard(0) if each.dim() > 2 else Replicate()
                    else:
                        dimension = heads.get(name, 2)
                        place = Replicate() if dimension is None else Shard(dimension)
                    sharded[name] = distribute_tensor(each, mesh, [place]).requires_grad_()
                got = function(**sharded, **options)
                assert got.placements == (Shard(0 if kind == "rows" else 2),), (function, kind, got.placements)
                torch.testing.assert_close(got.full_tensor(), want)
                got.square().sum().backward()
                for name, each in sharded.items():
                    torch.testing.assert_close(each.grad.full_tensor(), plain[name].grad, msg=lambda m: f"{function} {kind} {name}: {m}")
    """, tmp_path)
