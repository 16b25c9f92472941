"""What the functions compute, and how they take their arguments: the operators themselves are checked by the C++ tests."""

import ast
import ctypes
import doctest
import inspect
import math
import re
import subprocess
import sys

import pytest
import torch
from cases import CASES, call, case_id, differentiable, every_output, make

import linnet
from linnet._library import PATH

F = torch.nn.functional


def attention(q, k, v, **options):
    """torch's scaled_dot_product_attention on [B, T, H, D]."""
    return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), enable_gqa=True, **options).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "sizes,options,torch_options",
    [
        ({"Tq": 33, "Tk": 33}, {"causal": True}, {"is_causal": True}),
        ({"Tq": 5, "Tk": 40}, {}, {}),
        ({"Tq": 20, "Tk": 20, "Hkv": 1, "K": 16, "V": 16}, {"scale": 0.1}, {"scale": 0.1}),
        ({"Tq": 64, "Tk": 64, "K": 32, "V": 32}, {"window": (10, 3)}, {"window": (10, 3)}),
    ],
    ids=["causal", "cross", "grouped", "window"],
)
def test_softmax_is_scaled_dot_product_attention(sizes, options, torch_options, dtype):
    tensors = make("softmax", dtype=dtype, sizes=sizes)
    if "window" in torch_options:
        left, right = torch_options["window"]
        distance = torch.arange(sizes["Tk"]) - torch.arange(sizes["Tq"])[:, None]
        torch_options = {"attn_mask": (distance >= -left) & (distance <= right)}

    def results(function, dtype):
        inputs = differentiable("softmax", {key: t.to(dtype) for key, t in tensors.items()})
        out = function(**inputs)
        (out.double() * weight).sum().backward()
        return [out.double(), *(t.grad.double() for t in inputs.values())]

    weight = make("softmax", dtype=torch.float64, sizes=sizes, seed=1)["q"][..., :1]
    ours = results(lambda **t: linnet.softmax(**t, **options), dtype)
    theirs = results(lambda **t: attention(**t, **torch_options), dtype)
    exact = results(lambda **t: attention(**t, **torch_options), torch.float64)
    for our, their, reference in zip(ours, theirs, exact, strict=True):
        error, expected = ((x - reference).norm() / reference.norm() for x in (our, their))
        assert error <= (2 * expected if dtype.itemsize == 2 else 16 * torch.finfo(dtype).eps)


def test_softmax_bias_is_the_additive_mask():
    tensors = make("softmax", ("bias",), dtype=torch.float64)
    bias = tensors.pop("bias")
    for mask in (bias, bias[:1], bias[:, :1], bias[0, 0], bias[..., :1]):
        torch.testing.assert_close(linnet.softmax(**tensors, bias=mask), attention(**tensors, attn_mask=mask))


def test_gradient_of_a_broadcast_bias_has_its_shape():
    tensors = make("softmax", ("bias",), dtype=torch.float64)
    bias = tensors.pop("bias")[0, :1].clone().requires_grad_()  # [1, Tq, Tk]
    linnet.softmax(**tensors, bias=bias).sin().sum().backward()
    other = bias.detach().clone().requires_grad_()
    attention(**tensors, attn_mask=other).sin().sum().backward()
    torch.testing.assert_close(bias.grad, other.grad)


STRIDES = {
    "slices of a fused projection": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]] if t.dim() else t,
    "heads first in memory": lambda t: t.transpose(-2, -3).contiguous().transpose(-2, -3) if t.dim() > 2 else t,
    "last dimension not contiguous": lambda t: t.transpose(-1, 0).contiguous().transpose(-1, 0),
    "every second element": lambda t: torch.stack([t, t], -1)[..., 0],
    "storage offset": lambda t: torch.cat([t.new_zeros(3), t.reshape(-1)])[3:].view(t.shape),
}


@pytest.mark.parametrize("stride", STRIDES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_strided_inputs_give_the_same_bits(case, stride):
    name, given, options = case
    tensors = make(name, given, **options)
    states = {decl["name"] for decl in linnet.info(name)["inputs"] if decl["mutated"]}
    strided = {key: t.clone() if key in states else STRIDES[stride](t) for key, t in tensors.items()}
    expected = call(name, tensors, **options, **every_output(name))
    result = call(name, strided, **options, **every_output(name))
    assert all(torch.equal(a, b) and a.is_contiguous() for a, b in zip(result, expected))


def test_strided_state_is_overwritten_in_place():
    tensors = make("softmax_decode")
    strided = {key: t.clone() for key, t in tensors.items()}
    for key in ("k_cache", "v_cache"):  # a cache kept as [B, H, capacity, D]
        strided[key] = tensors[key].transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(linnet.softmax_decode(**tensors), linnet.softmax_decode(**strided))
    for key in ("k_cache", "v_cache", "lengths"):
        assert torch.equal(tensors[key], strided[key])


@pytest.mark.parametrize("leading", [False, True], ids=["[total, H, D]", "[1, total, H, D]"])
@pytest.mark.parametrize("name,offsets", [("softmax", ("cu_seqlens_q", "cu_seqlens_k")), ("linear", ("cu_seqlens",))])
def test_packed_sequences_are_independent(name, offsets, leading):
    bounds = [0, 5, 5, 13]
    q, k, v = torch.randn(3, 1, 13, 2, 4)
    packed = [t if leading else t[0] for t in (q, k, v)]
    out = getattr(linnet, name)(*packed, **dict.fromkeys(offsets, torch.tensor(bounds, dtype=torch.int32)), causal=True)
    assert out.shape == packed[0].shape
    for begin, end in zip(bounds, bounds[1:]):
        alone = getattr(linnet, name)(*(t[:, begin:end] for t in (q, k, v)), causal=True)
        torch.testing.assert_close(out.view(q.shape)[:, begin:end], alone)


def test_decode_continues_the_sequence():
    q, k, v = torch.randn(3, 2, 9, 4, 8, dtype=torch.float64)
    whole = linnet.softmax(q, k, v, causal=True)
    caches = torch.zeros(2, 2, 16, 4, 8, dtype=torch.float64).unbind()
    lengths = torch.zeros(2, dtype=torch.int64)
    parts = [linnet.softmax_decode(q[:, i:j], k[:, i:j], v[:, i:j], *caches, lengths) for i, j in ((0, 4), (4, 5), (5, 9))]
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    assert lengths.tolist() == [9, 9]

    options = {"map": "elu1", "normalize": True}
    whole, final, final_z = linnet.linear(q, k, v, **options, return_final_state=True, return_final_z=True)
    _, state, z = linnet.linear(q[:, :4], k[:, :4], v[:, :4], **options, return_final_state=True, return_final_z=True)
    parts = [
        linnet.linear_decode(q[:, i : i + 1], k[:, i : i + 1], v[:, i : i + 1], state=state, z=z, **options)
        for i in range(4, 9)
    ]
    torch.testing.assert_close(torch.cat(parts, 1), whole[:, 4:])
    torch.testing.assert_close(state, final)
    torch.testing.assert_close(z, final_z)


def test_empty_tensors():
    q = torch.randn(1, 0, 2, 4, requires_grad=True)
    k = torch.randn(1, 3, 2, 4)
    out, lse = linnet.softmax(q, k, k, return_lse=True)
    assert out.shape == (1, 0, 2, 4) and lse.shape == (1, 0, 2)
    out.sum().backward()
    assert q.grad.shape == q.shape
    assert linnet.softmax(k, k[:, :0], k[:, :0]).abs().max() == 0
    assert linnet.linear(k[:, :0], k[:, :0], k[:, :0]).shape == (1, 0, 2, 4)


# What is wrong, the exception and its sentence.
q4 = torch.randn(2, 5, 4, 8)
WRONG = {
    "channels": (
        lambda: linnet.softmax(q4, q4[..., :6], q4),
        RuntimeError,
        "softmax: k has 6 channels in dimension 3 of [B, Tk, Hkv, K], expected 8",
    ),
    "no channels": (
        lambda: linnet.gla(q4[..., :0], q4[..., :0], q4, g=q4[..., :0]),
        RuntimeError,
        "gla: q has 0 channels in dimension 3 of [B, T, Hq, K], expected at least 1",
    ),
    "rank": (lambda: linnet.softmax(q4[0], q4, q4), RuntimeError, "softmax: q has shape [5, 4, 8], expected [B, Tq, H, K]"),
    "heads": (
        lambda: linnet.softmax(q4, q4[:, :, :3], q4[:, :, :3]),
        RuntimeError,
        "softmax: k has 3 heads, expected a divisor of 4",
    ),
    "type": (lambda: linnet.softmax(q4, q4, q4.double()), RuntimeError, "softmax: v is f64, expected f32 (same as q)"),
    "integers": (lambda: linnet.softmax(q4.long(), q4, q4), RuntimeError, "softmax: q is i64, expected f64, f32, bf16 or f16"),
    "complex": (
        lambda: linnet.softmax(q4.to(torch.complex64), q4, q4),
        RuntimeError,
        "softmax: q is ComplexFloat, expected float64, float32",
    ),
    "nine dimensions": (
        lambda: linnet.softmax(q4.view(1, 1, 1, 1, 1, 2, 5, 4, 8), q4, q4),
        RuntimeError,
        "softmax: q has 9 dimensions",
    ),
    "length": (
        lambda: linnet.softmax(q4, q4, q4, key_len=torch.tensor([5, 6])),
        RuntimeError,
        "softmax: key_len[1] is 6, expected 0 to 5",
    ),
    "offsets": (
        lambda: linnet.linear(q4[0], q4[0], q4[0], cu_seqlens=torch.tensor([0, 4])),
        RuntimeError,
        "linear: cu_seqlens ends at 4, expected 5",
    ),
    "window": (
        lambda: linnet.softmax(q4, q4, q4, window=(-2, 0)),
        RuntimeError,
        "softmax: window is (-2, 0), expected values of at least -1",
    ),
    "window length": (
        lambda: linnet.softmax(q4, q4, q4, window=(1, 2, 3)),
        RuntimeError,
        "softmax: window has 3 numbers, expected 2 (left, right)",
    ),
    "softcap": (lambda: linnet.softmax(q4, q4, q4, softcap=-1.0), RuntimeError, "softmax: softcap is -1, expected at least 0"),
    "scale": (
        lambda: linnet.softmax(q4, q4, q4, scale=math.nan),
        RuntimeError,
        "softmax: scale is nan, expected a finite number",
    ),
    "map": (lambda: linnet.linear(q4, q4, q4, map="elu"), RuntimeError, "linear: map is 'elu', expected one of identity, elu1"),
    "signed": (
        lambda: linnet.linear(q4, q4, q4, normalize=True),
        RuntimeError,
        "linear: normalize with map identity can divide by zero",
    ),
    "full cache": (
        lambda: linnet.softmax_decode(q4, q4, q4, torch.zeros(2, 8, 4, 8), torch.zeros(2, 8, 4, 8), torch.tensor([4, 0])),
        RuntimeError,
        "softmax_decode: the cache of item 0 holds 4 of 8 tokens, no room for 5 more",
    ),
    "state type": (
        lambda: linnet.linear_decode(q4, q4, q4, state=torch.zeros(2, 4, 8, 8, dtype=torch.float64)),
        RuntimeError,
        "linear_decode: state is f64, expected f32",
    ),
    "expanded state": (
        lambda: linnet.linear_decode(q4, q4, q4, state=torch.zeros(1, 4, 8, 8).expand(2, 4, 8, 8)),
        RuntimeError,
        "linear_decode: state has stride 0 in dimension 0",
    ),
    "state not contiguous": (
        lambda: linnet.linear_decode(q4, q4, q4, state=torch.zeros(2, 4, 8, 8).mT),
        RuntimeError,
        "linear_decode: state is not contiguous in its last dimension",
    ),
    "state missing": (
        lambda: linnet.linear_decode(q4, q4, q4),
        TypeError,
        "linear_decode() missing 1 required keyword-only argument: 'state'",
    ),
    "unknown option": (
        lambda: linnet.softmax(q4, q4, q4, casual=True),
        TypeError,
        "softmax: there is no argument 'casual'; did you mean 'causal'?",
    ),
    "not a tensor": (
        lambda: linnet.softmax(q4, q4, [1.0]),
        TypeError,
        "softmax: v is a list, expected a torch.Tensor",
    ),
    "block": (lambda: linnet.monarch(q4, q4, q4, block=0), RuntimeError, "monarch: block is 0, expected at least 1"),
    "boolean bias": (
        lambda: linnet.softmax(q4, q4, q4, bias=torch.ones(5, 5, dtype=torch.bool)),
        RuntimeError,
        "softmax: bias is bool, expected a floating-point type",
    ),
    "huge block": (
        lambda: linnet.monarch(q4, q4, q4, block=2**62),
        RuntimeError,
        "monarch: block is 4611686018427387904, expected at most 9007199254740992",
    ),
    "no memory": (
        lambda: linnet.softmax(q4[:1, :1].expand(1, 2**40, 4, 8), q4[:1], q4[:1]),
        RuntimeError,
        "softmax: out of memory: out takes 140737488355328 bytes",
    ),
    "steps": (lambda: linnet.monarch(q4, q4, q4, steps=0), RuntimeError, "monarch: steps is 0, expected 1 to 1000"),
    "pad": (lambda: linnet.monarch(q4, q4, q4, pad="left"), RuntimeError, "monarch: pad is 'left', expected one of post, pre"),
    "mask type": (lambda: linnet.monarch(q4, q4, q4, mask=torch.ones(2, 5)), RuntimeError, "monarch: mask is f32, expected u8"),
    "mask length": (
        lambda: linnet.hierarchical(q4, q4, q4, mask=torch.ones(2, 4, dtype=torch.bool)),
        RuntimeError,
        "hierarchical: mask has 4 tokens in dimension 1 of [B, T], expected 5 (same as q)",
    ),
    "tree type": (
        lambda: linnet.hierarchical(q4, q4, q4, parent=torch.zeros(8)),
        RuntimeError,
        "hierarchical: parent is f32, expected i32 or i64",
    ),
    "tree with a cycle": (
        lambda: linnet.hierarchical(q4, q4, q4, parent=torch.tensor([5, 5, 5, 6, 6, 7, 5, -1])),
        RuntimeError,
        "hierarchical: parent[6] is 5, expected a larger number than the node's own",
    ),
    "tree with an orphan": (
        lambda: linnet.hierarchical(q4, q4, q4, parent=torch.tensor([5, 5, 5, 6, 6, -1, -1])),
        RuntimeError,
        "hierarchical: parent[5] is -1, but only the last node, 6, may be the root: an orphan",
    ),
    "levels": (
        lambda: linnet.hierarchical(q4, q4, q4, level_starts=torch.tensor([0, 4, 2]), level_offsets=torch.tensor([0, 3])),
        RuntimeError,
        "hierarchical: level_starts[2] is 2, expected ascending starts below 5 in level 0",
    ),
    "beta": (
        lambda: linnet.fem_read(q4, torch.zeros(4, 8), torch.rand(2, 5, 4, 8), q=q4, k=q4),
        RuntimeError,
        "fem_read: beta[0][0] is 0, expected a number above 0",
    ),
    "unknown operator": (
        lambda: linnet.info("sofmax"),
        ValueError,
        "there is no operator 'sofmax'; did you mean 'softmax'?",
    ),
    "no operator at all": (
        lambda: linnet.info("zzzzzz"),
        ValueError,
        "there is no operator 'zzzzzz'; linnet.list_ops() has them all",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_input_is_told_in_a_sentence(wrong):
    function, exception, sentence = WRONG[wrong]
    with pytest.raises(exception, match="^" + re.escape(sentence)):
        function()


@pytest.mark.parametrize("wrong", ["channels", "rank"])
def test_wrong_shapes_are_told_when_compiling(wrong):
    function, _, sentence = WRONG[wrong]
    torch.compiler.reset()
    with pytest.raises(Exception, match=re.escape(sentence.split(" has ")[0])):
        torch.compile(function, fullgraph=True, backend="aot_eager")()


def test_failed_call_leaves_the_state_alone():
    tensors = make("softmax_decode")
    tensors["lengths"] = torch.tensor([1, 11])  # the second cache is too full for six more tokens
    before = {key: t.clone() for key, t in tensors.items()}
    with pytest.raises(RuntimeError, match="no room"):
        linnet.softmax_decode(**tensors)
    assert all(torch.equal(tensors[key], t) for key, t in before.items())


def test_cuda_tensors_are_answered_with_a_sentence():
    sentence = "^distill_alloc: dof is on (cuda:0|a CUDA device); distill_alloc has no CUDA kernels"

    def call():
        with pytest.raises(RuntimeError, match=sentence):
            linnet.distill_alloc(torch.empty(2, 3, device="cuda"))

    with torch._subclasses.fake_tensor.FakeTensorMode():
        call()
    if torch.cuda.is_available():
        call()


def test_meta_tensors_give_shapes():
    q = torch.empty(2, 5, 4, 8, device="meta")
    out, state = linnet.linear(q, q, q, map="taylor2", return_final_state=True)
    assert out.shape == (2, 5, 4, 8) and state.shape == (2, 4, 1 + 8 + 36, 8)

    with pytest.raises(RuntimeError, match="^linear: v is on cpu, expected meta \\(same as q\\)$"):
        linnet.linear(q, q, torch.zeros(2, 5, 4, 8))
    with pytest.raises(RuntimeError, match="^linear_decode: state is on meta, expected cpu"):
        linnet.linear_decode(*torch.zeros(3, 2, 1, 4, 8), state=torch.empty(2, 4, 8, 8, device="meta"))


# The same bits through the C header, called with ctypes.
class Tensor(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
    ]


class Option(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("text", ctypes.c_char_p)]


class Context(ctypes.Structure):
    _fields_ = [
        ("executor", ctypes.c_void_p),
        ("impl", ctypes.c_char_p),
        ("workspace", ctypes.c_void_p),
        ("bytes", ctypes.c_int64),
    ]


DTYPES = {
    torch.float64: 1,
    torch.float32: 2,
    torch.bfloat16: 3,
    torch.float16: 4,
    torch.int64: 5,
    torch.int32: 6,
    torch.uint8: 7,
    torch.bool: 7,
}


def call_c(library, name, tensors, options):
    library = ctypes.CDLL(str(library))
    integers = ctypes.c_int64 * 8
    views = (Tensor * len(tensors))(
        *(
            Tensor(key.encode(), t.data_ptr(), DTYPES[t.dtype], 0, t.dim(), integers(*t.shape), integers(*t.stride()))
            for key, t in tensors.items()
        )
    )
    texts = {
        key: ",".join(map(str, value)) if isinstance(value, tuple) else str(int(value) if isinstance(value, bool) else value)
        for key, value in options.items()
    }
    words = (Option * len(texts))(*(Option(key.encode(), text.encode()) for key, text in texts.items()))
    message = ctypes.create_string_buffer(512)
    arguments = (name.encode(), 0, views, len(views), words, len(words))
    size = ctypes.c_int64()
    code = library.linnet_workspace(*arguments, None, ctypes.byref(size), message, ctypes.c_size_t(512))
    assert code == 0, message.value
    memory = torch.empty(size.value, dtype=torch.uint8)
    context = Context(None, None, memory.data_ptr(), size.value)
    code = library.linnet_call(*arguments, ctypes.byref(context), message, ctypes.c_size_t(512))
    assert code == 0, message.value


@pytest.mark.parametrize("library", [PATH, PATH.parents[2] / "liblinnet.so"], ids=lambda path: path.name)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_same_bits_as_the_c_header(case, library):
    name, given, options = case
    tensors = make(name, given, **options)
    copies = {key: t.clone() for key, t in tensors.items()}
    expected = call(name, tensors, **options, **every_output(name))
    outputs = [decl["name"] for decl in linnet.info(name)["outputs"]]
    results = {key: torch.full_like(t, 7) for key, t in zip(outputs, expected if isinstance(expected, tuple) else (expected,))}
    call_c(library, name, {**copies, **results}, options)
    for key, t in zip(outputs, expected if isinstance(expected, tuple) else (expected,)):
        assert torch.equal(results[key], t)
    assert all(torch.equal(copies[key], t) for key, t in tensors.items())


# The package itself.
@pytest.mark.parametrize("name", linnet.list_ops())
def test_docstring_example_runs_and_names_everything(name):
    function, declaration = getattr(linnet, name), linnet.info(name)
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner()
    runner.run(parser.get_doctest(function.__doc__, {"torch": torch, "linnet": linnet}, name, None, None))
    assert runner.summarize(verbose=False) == (0, function.__doc__.count(">>>"))
    for decl in declaration["inputs"] + declaration["outputs"]:
        shapes = [f"[{', '.join(decl[key])}]" for key in ("shape", "other_shape") if key in decl]
        assert f"{decl['name']} {' or '.join(shapes)}: {decl['doc'].split()[0]}" in function.__doc__
    assert declaration["equation"] in function.__doc__
    assert all(f"{option['name']}: " in function.__doc__ for option in declaration["options"])


def test_signatures():
    parameters = inspect.signature(linnet.softmax).parameters
    assert list(parameters)[:3] == ["q", "k", "v"]
    assert parameters["q"].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert parameters["bias"].kind is inspect.Parameter.KEYWORD_ONLY and parameters["bias"].default is None
    assert parameters["window"].default == (-1, -1) and parameters["causal"].default is False
    assert parameters["return_lse"].default is False
    assert inspect.signature(linnet.linear_decode).parameters["state"].default is inspect.Parameter.empty
    assert inspect.getsource(linnet.softmax).startswith("def softmax(q: torch.Tensor")


def test_listing():
    assert linnet.list_ops() == list(linnet.list_ops()) and "softmax_paged" in linnet.list_ops()
    assert set(linnet.list_ops()) < set(linnet.__all__) and all(hasattr(linnet, name) for name in linnet.__all__)
    assert re.fullmatch(r"\d+\.\d+\.\d+", linnet.__version__)
    declaration = linnet.info(linnet.softmax)
    assert declaration == linnet.info("softmax") and declaration["implementations"][0]["name"] == "ref"
    declaration["inputs"].clear()
    assert linnet.info("softmax")["inputs"]  # a copy


def test_library_needs_only_the_stable_shim_of_torch():
    undefined = subprocess.run(["nm", "-D", "--undefined-only", PATH], capture_output=True, text=True, check=True).stdout
    symbols = [line.split()[-1] for line in undefined.splitlines()]
    foreign = [
        s
        for s in symbols
        if not re.search(r"@(GLIBC|GLIBCXX|CXXABI|GCC)_", s) and not s.startswith(("_ITM_", "_ZGTt", "__cxa_", "__gmon_start__"))
    ]
    assert len(foreign) > 20  # the shim itself
    ours = re.compile(r"_ZNK?6linnet|_ZT[VI]N6linnet|linnet_")
    assert [s for s in foreign if not re.fullmatch(r"(aoti_torch|torch)_\w+", s) and not ours.match(s)] == []
    needed = subprocess.run(["readelf", "-d", PATH], capture_output=True, text=True, check=True).stdout
    assert re.findall(r"R(?:UN)?PATH\).*\[(.*)\]", needed) == ["$ORIGIN"]
    assert {name for name in re.findall(r"\[(lib[a-z0-9_]+)\.so", needed) if "torch" in name or "c10" in name} == {
        "libtorch_cpu"
    }


def test_import_needs_nothing_but_torch():
    code = "import torch, sys; before = set(sys.modules); import linnet; "
    code += "print(*sorted(m for m in set(sys.modules) - before if '.' not in m))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": str(PATH.parents[1])}
    ).stdout
    assert loaded.split() == ["linnet"]


def test_editors_are_told_of_the_operators():
    """The stub that the build writes has the signature and the text of every function."""
    stub = ast.parse((PATH.parent / "__init__.pyi").read_text())
    functions = {}
    for node in stub.body:
        if isinstance(node, ast.FunctionDef):
            functions.setdefault(node.name, []).append(node)
    modules = {name.name for node in stub.body if isinstance(node, ast.ImportFrom) and node.level for name in node.names}
    assert set(functions) | modules >= set(linnet.__all__)
    for name in linnet.list_ops():
        known = inspect.signature(getattr(linnet, name)).parameters
        for node in functions[name]:
            arguments = node.args.args + node.args.kwonlyargs
            assert [each.arg for each in arguments] == list(known)
            assert [each.arg for each in node.args.kwonlyargs] == [n for n, p in known.items() if p.kind is p.KEYWORD_ONLY]
        assert inspect.cleandoc(ast.get_docstring(functions[name][0])) == inspect.cleandoc(getattr(linnet, name).__doc__)


def test_gate_on_any_read():
    generator = torch.Generator().manual_seed(4)
    q, k, v, g = (torch.randn(2, 20, 3, 8, generator=generator, dtype=torch.float64) for _ in range(4))
    decay = -torch.rand(2, 20, 3, 8, generator=generator, dtype=torch.float64)
    read = linnet.gla(q, k, v, decay)
    torch.testing.assert_close(linnet.with_gate(linnet.gla, g)(q, k, v, decay), read * g.sigmoid())
    torch.testing.assert_close(linnet.with_gate(linnet.gla, g, "G2")(q, k, v, decay), linnet.gla(q, k, v * g.sigmoid(), decay))
    out, state = linnet.with_gate(linnet.gla, g, act="silu", mode="add")(q, k, v, decay, return_final_state=True)
    torch.testing.assert_close(out, read + torch.nn.functional.silu(g))
    torch.testing.assert_close(state, linnet.gla(q, k, v, decay, return_final_state=True)[1])
    fused = linnet.with_gate(linnet.softmax, g, "G4")(q, k, v, causal=True)
    torch.testing.assert_close(fused, linnet.gated(q, k, v, g, position="G4", causal=True))
    with pytest.raises(ValueError, match="position is 'G5', expected G1, G2, G3 or G4"):
        linnet.with_gate(linnet.gla, g, "G5")
    with pytest.raises(ValueError, match="expected a function of linnet"):
        linnet.with_gate(torch.softmax, g)
    with pytest.raises(ValueError, match="rms_norm_gated has no input k to gate at G3"):
        linnet.with_gate(linnet.rms_norm_gated, g, "G3")
    with pytest.raises(TypeError, match="takes 4 positional arguments but 5 were given"):
        linnet.with_gate(linnet.gla, g)(q, k, v, decay, None)
    with pytest.raises(TypeError, match="multiple values for argument 'q'"):
        linnet.with_gate(linnet.gla, g)(q, k, v, decay, q=k)
    with pytest.raises(ValueError, match="with_gate: gla is called without v, which G2 gates"):
        linnet.with_gate(linnet.gla, g, "G2")(q, k)


def test_what_is_returned_alone_takes_the_gradient():
    assert all(info["outputs"][0]["differentiable"] for info in map(linnet.info, linnet.list_ops()) if info["differentiable"])


# Calls in the words of other libraries.
@pytest.mark.parametrize(
    "name,keywords,sentence",
    [
        ("softmax", {"is_causal": True}, "softmax: there is no argument 'is_causal'; it is called 'causal' here"),
        ("softmax", {"casual": True}, "softmax: there is no argument 'casual'; did you mean 'causal'?"),
        ("softmax", {"attn_mask": None}, "softmax: there is no argument 'attn_mask'; it is called 'bias' here"),
        ("softmax", {"dropout_p": 0.0}, "softmax: there is no argument 'dropout_p'; attention here has no dropout"),
        ("softmax", {"window_size": (3, 0)}, "softmax: there is no argument 'window_size'; it is called 'window' here"),
        ("delta", {"output_final_state": True}, "delta: there is no argument 'output_final_state'; it is called 'return_final_state' here"),
        ("delta", {"head_first": False}, "delta: there is no argument 'head_first'; tensors are"),
        ("linear", {"feature_map": "elu1"}, "linear: there is no argument 'feature_map'; it is called 'map' here"),
        ("linear", {"entirely_unknown_word": 1}, "linear: there is no argument 'entirely_unknown_word'; it takes q, k, v"),
    ],
)
def test_other_names_are_answered(name, keywords, sentence):
    q = torch.randn(1, 5, 2, 4)
    more = [torch.rand(1, 5, 2)] if name == "delta" else []
    with pytest.raises(TypeError, match="^" + re.escape(sentence)):
        getattr(linnet, name)(q, q, q, *more, **keywords)


def test_l2_norm_of_other_libraries():
    q = torch.randn(1, 5, 2, 4)
    with pytest.raises(TypeError, match="there is no argument 'use_qk_l2norm_in_kernel'; (it is called 'l2_norm' here|normalise q and k)"):
        linnet.delta(q, q, q, torch.rand(1, 5, 2), use_qk_l2norm_in_kernel=True)


def test_every_other_name_leads_somewhere():
    from linnet import _names

    known = set()
    for declaration in map(linnet.info, linnet.list_ops()):
        known |= {decl["name"] for decl in declaration["inputs"]} | {option["name"] for option in declaration["options"]}
        known |= {"return_" + decl["name"] for decl in declaration["outputs"]}
    assert not [(other, names) for other, names in _names.OTHER_NAMES.items() if not set(names) & known]


def test_values_of_other_types():
    numpy = pytest.importorskip("numpy")
    q = torch.randn(12, 2, 4)
    expected = linnet.softmax(q, q, q, cu_seqlens_q=torch.tensor([0, 5, 12]), cu_seqlens_k=torch.tensor([0, 5, 12]), causal=True)
    for offsets in ([0, 5, 12], (0, 5, 12), torch.tensor([0, 5, 12], dtype=torch.int16), numpy.array([0, 5, 12], dtype=numpy.int16)):
        out = linnet.softmax(q, q, q, cu_seqlens_q=offsets, cu_seqlens_k=offsets, causal=True)
        assert torch.equal(out, expected)
    assert torch.equal(linnet.softmax(q[None], q[None], q[None], window=None), linnet.softmax(q[None], q[None], q[None]))
    k = torch.randn(1, 5, 2, 4)
    for keywords, sentence in [
        ({"window": 3}, "softmax: window is 3, expected two whole numbers (left, right) such as (128, 0)"),
        ({"causal": "yes"}, "softmax: causal is 'yes', expected True or False"),
        ({"scale": "large"}, "softmax: scale is 'large', expected a number or None"),
        ({"cu_seqlens_q": [0.5, 2.0]}, "softmax: cu_seqlens_q holds torch.float32, expected whole numbers"),
        ({"cu_seqlens_q": "0,5"}, "softmax: cu_seqlens_q is '0,5', expected a tensor or a list of whole numbers"),
        ({"bias": [1.0]}, "softmax: bias is a list, expected a torch.Tensor"),
    ]:
        with pytest.raises(TypeError, match="^" + re.escape(sentence)):
            linnet.softmax(k, k, k, **keywords)
    with pytest.raises(TypeError, match="^softmax: q is a numpy.ndarray, expected a torch.Tensor \\(torch.from_numpy makes one\\)"):
        linnet.softmax(k.numpy(), k, k)
    with pytest.raises((TypeError, RuntimeError), match="^softmax: k is None, expected a tensor"):
        linnet.softmax(k, None, k)
    cache = torch.zeros(1, 8, 2, 4)
    with pytest.raises(TypeError, match="^softmax_decode: lengths is a list, expected an int64 or int32 tensor, which is overwritten"):
        linnet.softmax_decode(k[:, :1], k[:, :1], k[:, :1], k_cache=cache, v_cache=cache, lengths=[0])


def test_heads_before_tokens_are_hinted_at_once():
    code = """
import warnings, torch, linnet, linnet.nn
warnings.simplefilter("error")
q = torch.randn(2, 8, 64, 16)      # 8 tokens of 64 heads, or 8 heads of 64 tokens
linnet.softmax(*[torch.randn(2, 1, 64, 16)] * 3)   # decode: many heads of one token are no sign
linnet.softmax(*[torch.randn(2, 40, 64, 16)] * 3)  # nor are somewhat more heads than tokens
linnet.softmax(*[torch.randn(2, 8, 64, 2)] * 3)    # nor heads of two channels
linnet.nn.FreeEnergyMixer(hidden=256, heads=128)(torch.randn(1, 8, 256))
try:
    linnet.softmax(q, q, q)
    raise SystemExit("no hint")
except UserWarning as hint:
    assert "8 tokens of 64 heads" in str(hint) and "transpose(1, 2)" in str(hint), hint
linnet.softmax(q, q, q)
linnet.linear(q, q, q)
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(PATH.parents[1])})


def test_values_are_looked_at_when_asked(monkeypatch):
    q, k, v = (torch.randn(1, 8, 2, 16) for _ in range(3))
    beta, g = torch.rand(1, 8, 2), -torch.rand(1, 8, 2)
    unit = torch.nn.functional.normalize(k, dim=-1)
    monkeypatch.setenv("LINNET_CHECK", "1")
    assert linnet.gated_delta(q, unit, v, g, beta).isfinite().all()
    with pytest.raises(RuntimeError, match=r"gated_delta: k\[0\]\[0\]\[0\] has norm .*, expected at most 1"):
        linnet.gated_delta(q, k, v, g, beta)
    with pytest.raises(RuntimeError, match=r"gated_delta: g\[0\]\[0\]\[0\] is .*is it the decay itself\?"):
        linnet.gated_delta(q, unit, v, g.exp(), beta)
    with pytest.raises(RuntimeError, match=r"delta: beta\[0\]\[0\]\[0\] is .*expected a write strength in \[0, 2\]"):
        linnet.delta(q, unit, v, g)
    monkeypatch.delenv("LINNET_CHECK")
    linnet.gated_delta(q, k, v, g, beta)
