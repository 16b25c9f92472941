"""torch's own checks of an operator, and every way torch can call one."""

import pytest
import torch
from cases import (
    CASES,
    DIFFERENTIABLE,
    OVERWRITING,
    arguments,
    as_tuple,
    call,
    case_id,
    differentiable,
    every_output,
    keywords_of,
    make,
    on_request,
)

import linnet


def assert_same(results, expected):
    for result, other in zip(as_tuple(results), as_tuple(expected), strict=True):
        assert torch.equal(result, other)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_opcheck(case):
    name, given, options = case
    tensors = make(name, given, **options)
    if linnet.info(name)["differentiable"]:
        tensors = differentiable(name, tensors)
    torch.library.opcheck(getattr(torch.ops.linnet, name).default, arguments(name, tensors), {**keywords_of(options), **on_request(name)})


@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=case_id)
def test_opcheck_backward(case):
    name, given, options = case
    tensors = make(name, given, **options)
    outputs = as_tuple(getattr(torch.ops.linnet, name)(*arguments(name, tensors), **keywords_of(options), **on_request(name)))
    declaration = linnet.info(name)
    incoming = [torch.randn_like(out) for out, decl in zip(outputs, declaration["outputs"]) if decl["differentiable"]]
    saved = [out for out, decl in zip(outputs, declaration["outputs"]) if decl["saved"]]
    wanted = [decl["name"] in tensors for decl in declaration["inputs"] if decl["differentiable"]]
    operator = getattr(torch.ops.linnet, name + "_backward").default
    torch.library.opcheck(operator, (*incoming, *arguments(name, tensors), *saved), {**keywords_of(options), "wanted": wanted})


# The function has an autograd node of its own; torch.ops.linnet has torch.library's, which torch.compile uses.
@pytest.mark.parametrize(
    "case,eager",
    [pytest.param(case, True, id=case_id(case)) for case in DIFFERENTIABLE]
    + [pytest.param(case, False, id="torch.ops " + case_id(case)) for case in DIFFERENTIABLE if not case[2]],
)
def test_gradcheck(case, eager):
    name, given, options = case
    tensors = differentiable(
        name, make(name, given, dtype=torch.float64, sizes={"K": 2, "V": 2, "Tk": 6, "H": 2, "Hkv": 1}, **options)
    )
    chosen = [key for key, tensor in tensors.items() if tensor.requires_grad]
    outputs = [decl["differentiable"] for decl in linnet.info(name)["outputs"]]

    def function(*values):
        inputs = {**tensors, **dict(zip(chosen, values))}
        if eager:
            results = as_tuple(call(name, inputs, **options, **every_output(name)))
        else:
            results = as_tuple(getattr(torch.ops.linnet, name)(*arguments(name, inputs), **keywords_of(options), **on_request(name)))
        return tuple(result for result, wanted in zip(results, outputs, strict=True) if wanted)

    assert torch.autograd.gradcheck(function, tuple(tensors[key] for key in chosen))


# Symbolic sizes in opcheck; here with gradients as a user would.
@pytest.mark.parametrize(
    "case,dynamic",
    [pytest.param(case, False, id=case_id(case)) for case in DIFFERENTIABLE]
    + [pytest.param(case, True, id="dynamic " + case_id(case)) for case in DIFFERENTIABLE if not case[2]],
)
def test_compiled_with_gradients(case, dynamic):
    name, given, options = case
    tensors = make(name, given, **options)
    results, keywords = [], {**options, **every_output(name)}
    for compiled in (False, True):
        inputs = differentiable(name, tensors)

        def function(**inputs):
            return call(name, {key: 2 * t if t.is_floating_point() else t for key, t in inputs.items()}, **keywords)

        torch.compiler.reset()
        function = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager") if compiled else function
        outputs = as_tuple(function(**inputs))
        sum(out.sin().sum() for out in outputs if out.requires_grad).backward()
        results.append(outputs + tuple(t.grad for t in inputs.values() if t.requires_grad))
    assert_same(*results)


@pytest.mark.parametrize("case", OVERWRITING, ids=case_id)
def test_compiled_overwrites_the_state(case):
    name, given, options = case
    states = [decl["name"] for decl in linnet.info(name)["inputs"] if decl["mutated"]]
    results = []
    for compiled in (False, True):
        tensors = make(name, given, **options)
        before = {key: tensors[key].clone() for key in states if key in tensors}

        def function(tensors):
            return call(name, tensors, **options)

        torch.compiler.reset()
        out = (torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function)(tensors)
        results.append(as_tuple(out) + tuple(tensors[key] for key in before))
        assert all(not torch.equal(tensors[key], old) for key, old in before.items())
    assert_same(*results)


def test_inductor():
    tensors = make("softmax", sizes={"Tq": 16, "Tk": 16, "V": 4, "Hkv": 4})
    q, k, v = tensors.values()

    def function(q, k, v):
        return linnet.linear(linnet.softmax(q * 2, k, v, causal=True) + 1, q, q, map="elu1")

    results = []
    for compiled in (False, True):
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        out = (torch.compile(function, fullgraph=True) if compiled else function)(*inputs)
        out.sin().sum().backward()
        results.append((out, *(t.grad for t in inputs)))
    for eager, other in zip(*results):
        torch.testing.assert_close(eager, other)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_export(case, strict):
    name, given, options = case
    tensors = make(name, given, **options)

    class Module(torch.nn.Module):
        def forward(self, tensors):
            return call(name, tensors, **options)

    with torch.no_grad():
        program = torch.export.export(Module(), (tensors,), strict=strict)
        other = {key: t.clone() for key, t in make(name, given, seed=1, **options).items()}
        copies = {key: t.clone() for key, t in other.items()}
        assert_same(program.module()(other), call(name, copies, **options))
        assert_same(tuple(other.values()), tuple(copies.values()))


def test_export_with_dynamic_length():
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return linnet.linear(q, k, v, map="taylor2", return_final_state=True)

    q = torch.randn(1, 8, 2, 4)
    length = torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(Module(), (q, q, q), dynamic_shapes=({1: length},) * 3)
    longer = torch.randn(1, 33, 2, 4)
    assert_same(program.module()(longer, longer, longer), Module()(longer, longer, longer))


def test_only_needed_gradients_are_computed():
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.linnet.softmax_backward.default:
                seen.append(kwargs["wanted"])
            return func(*args, **(kwargs or {}))

    q, k, v = make("softmax").values()
    for needed in ([True, False, False], [False, True, True]):
        inputs = [t.clone().requires_grad_(need) for t, need in zip((q, k, v), needed)]
        with Watch():
            linnet.softmax(*inputs).sum().backward()
        assert seen.pop() == [*needed, False, False]
        assert [t.grad is not None for t in inputs] == needed


def test_gradient_through_one_output_of_many():
    tensors = differentiable("linear", make("linear", dtype=torch.float64))
    out, state = linnet.linear(**tensors, return_final_state=True)
    from_k, from_q = torch.autograd.grad(state.sum(), [tensors["k"], tensors["q"]])
    torch.testing.assert_close(from_k, tensors["v"].sum(-1, keepdim=True).expand_as(from_k))  # S = sum_t k_t v_t^T
    assert from_q.abs().max() == 0


def test_second_order_gradients_are_refused():
    tensors = differentiable("softmax", make("softmax"))
    (gradient,) = torch.autograd.grad(linnet.softmax(**tensors).sum(), tensors["q"], create_graph=True)
    with pytest.raises(NotImplementedError, match="^softmax: gradients of gradients are not available"):
        gradient.sum().backward()


@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=case_id)
def test_torch_func_gradients(case):
    """torch.func.grad is torch.autograd; under torch.vmap it gives the gradients of each sample."""
    name, given, options = case
    tensors = make(name, given, **options)
    inputs = differentiable(name, tensors)
    as_tuple(call(name, inputs, **options))[0].sum().backward()
    expected = {key: t.grad for key, t in inputs.items() if t.grad is not None}
    wanted, fixed = ({key: t for key, t in tensors.items() if (key in expected) == which} for which in (True, False))

    def gradients(wanted, fixed):
        return torch.func.grad(lambda x: as_tuple(call(name, {**fixed, **x}, **options))[0].sum())(wanted)

    stacked = [{key: torch.stack([t, t]) for key, t in some.items()} for some in (wanted, fixed)]
    samples = torch.vmap(gradients)(*stacked) if fixed else torch.vmap(lambda x: gradients(x, {}))(stacked[0])
    result = gradients(wanted, fixed)
    for key, gradient in expected.items():
        assert torch.equal(result[key], gradient) and torch.equal(samples[key][1], gradient)


def test_what_torch_func_cannot_have_is_refused():
    q, k, v = torch.randn(3, 1, 5, 2, 4)

    def read(q):
        return linnet.softmax(q, k, v).sum()

    with pytest.raises(NotImplementedError, match="^softmax: gradients of gradients are not available"):
        torch.func.grad(lambda q: torch.func.grad(read)(q).sum())(q)
    with pytest.raises(NotImplementedError, match="^softmax: forward-mode derivatives .* are not available"):
        torch.func.jvp(read, (q,), (q,))  # the tangent would be dropped
    torch.compiler.reset()
    with pytest.raises(NotImplementedError, match="^softmax: forward-mode derivatives .* are not available"):
        torch.compile(lambda q: torch.func.jvp(read, (q,), (q,)), backend="aot_eager")(q)
    with pytest.raises(NotImplementedError, match="^linear_decode: forward-mode derivatives"):
        torch.func.jvp(lambda k: linnet.linear_decode(q, k, v, state=torch.zeros(1, 2, 4, 4)), (k,), (k,))
    assert torch.func.jvp(lambda x: x * read(q), (k,), (k,))[1].shape == k.shape  # tangents of other tensors go on


@pytest.mark.parametrize("case", OVERWRITING, ids=case_id)
def test_operator_without_gradient_says_so(case):
    name, given, options = case
    tensors = make(name, given, **options)
    next(iter(tensors.values())).requires_grad_()
    with pytest.raises(RuntimeError, match=f"^{name}: an input requires a gradient"):
        call(name, tensors, **options)
    with torch.no_grad():
        call(name, tensors, **options)


def test_overwritten_states_are_seen_by_autograd():
    tensors = make("linear_decode")
    weight = torch.ones_like(tensors["state"], requires_grad=True)
    product = (weight * tensors["state"]).sum()
    linnet.linear_decode(**tensors)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_no_grad_and_inference_mode():
    tensors = differentiable("softmax", make("softmax"))
    expected = linnet.softmax(**tensors)
    with torch.no_grad():
        assert not linnet.softmax(**tensors).requires_grad
    with torch.inference_mode():
        result = linnet.softmax(**{key: t.detach() for key, t in tensors.items()})
        assert result.is_inference()
        linnet.linear_decode(**make("linear_decode"))
    assert torch.equal(result, expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast(compiled):
    tensors = differentiable("linear", make("linear", ("initial_state",)))

    def function(**tensors):
        return linnet.linear(**tensors, return_final_state=True)

    torch.compiler.reset()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, state = (torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function)(**tensors)
    assert (out.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    rounded = {key: t.detach().to(torch.bfloat16) for key, t in tensors.items() if key != "initial_state"}
    assert torch.equal(out, linnet.linear(**rounded, initial_state=tensors["initial_state"].detach()))
    out.float().sum().backward()
    assert tensors["q"].grad.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):  # float64 is left alone, as everywhere in torch
        assert linnet.softmax(*make("softmax", dtype=torch.float64).values()).dtype == torch.float64


def test_vmap():
    q, k, v = (torch.stack([make("softmax", seed=seed)[key] for seed in range(3)]) for key in "qkv")
    expected = torch.stack([linnet.softmax(q[i], k[i], v[0]) for i in range(3)])
    assert torch.equal(torch.vmap(linnet.softmax, in_dims=(0, 0, None))(q, k, v[0]), expected)
    mapped = torch.vmap(lambda q, k: linnet.softmax(q, k, v[0], return_lse=True), in_dims=(1, 0))(q.transpose(0, 1), k)
    assert torch.equal(mapped[0], expected)


def test_vmap_over_nothing_is_told():
    with pytest.raises(RuntimeError, match="^softmax: torch.vmap maps over no element"):
        torch.vmap(linnet.softmax)(*torch.randn(3, 0, 2, 5, 4, 4))


def test_vmap_overwrites_mapped_states_only():
    def step(q, k, v, state):
        return linnet.linear_decode(q, k, v, state=state)

    many = [make("linear_decode", seed=seed) for seed in range(3)]
    stacked = {key: torch.stack([one[key] for one in many]) for key in many[0]}
    out = torch.vmap(step)(*stacked.values())
    for i, one in enumerate(many):
        assert torch.equal(out[i], linnet.linear_decode(**one))
        assert torch.equal(stacked["state"][i], one["state"])
    with pytest.raises(RuntimeError, match="^linear_decode: torch.vmap would overwrite state once per element"):
        torch.vmap(step, in_dims=(0, 0, 0, None))(stacked["q"], stacked["k"], stacked["v"], many[0]["state"])


@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=case_id)
def test_same_bits_on_any_number_of_threads(case):
    name, given, options = case
    threads = torch.get_num_threads()
    tensors = make(name, given, sizes={"T": 150, "S": 150, "Tq": 150, "Tk": 150, "K": 16, "V": 16}, **options)
    results = []
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            inputs = differentiable(name, tensors)
            outputs = as_tuple(call(name, inputs, **options))
            sum(out.sum() for out in outputs if out.requires_grad).backward()
            results.append((*outputs, *(t.grad for t in inputs.values() if t.requires_grad)))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert_same(results[0], other)
