"""Modules with a memory: at once, in pieces, token by token, packed and padded give the same numbers, for every layer."""

import pytest
import torch
from test_nn import NAMES, options_of
from test_nn_models import CASES, VOCABULARY, ids_of, model_of

import linnet.nn
from linnet._records import LAYERS, record

# Layers with options under which they have a memory, beside their defaults.
LAYERS_WITH_STATE = {name: (name, {}) for name in NAMES if record(name, options_of(name))["decode"]} | {
    "softmax-window-sinks": ("softmax_attention", {"heads": 4, "kv_heads": 2, "window": (3, -1), "sinks": True, "prefix": 1}),
    "softmax-G1": ("softmax_attention", {"position": "G1", "qk_norm": "rms"}),
    "softmax-G2-headwise": ("softmax_attention", {"position": "G2", "granularity": "headwise", "rope": "interleaved"}),
    "retention-half": ("retention", {"rope": "half", "norm": True}),
    "gated_deltanet-grouped": ("gated_deltanet", {"heads": 2, "value_heads": 4, "double": True, "conv_bias": True}),
    "inline-causal": ("inline_attention", {"causal": True, "residual": False}),
    "monarch-causal": ("monarch_attention", {"causal": True, "block": 4}),
    "linear-relu": ("linear_attention", {"map": "relu"}),
    "linear-cosformer": ("linear_attention", {"map": "cosformer", "max_length": 32}),
    "fem-linear": ("free_energy_mixer", {"prior": "linear"}),
    "fem-gated": ("free_energy_mixer", {"prior": "gated"}),
    "fem-aft": ("free_energy_mixer", {"prior": "aft"}),
    "fem-ssm": ("free_energy_mixer", {"prior": "ssm"}),
    "linear-exp": ("linear_attention", {"map": "exp"}),
    "linear-favor": ("linear_attention", {"map": "favor", "features": 5}),
    "hybrid-narrow": ("hybrid_attention", {"window": 2}),
    "hybrid-terraced": ("hybrid_attention", {"window": 3, "form": "terraced"}),
    "short_conv-base": ("short_conv", {"form": "base", "bias": True}),
    "zeros-crossed": ("zeros_attention", {"rope": "half-crossed"}),
}
NAMES_WITH_STATE = sorted(LAYERS_WITH_STATE)
ANY_LENGTH = [*NAMES_WITH_STATE, *(name for name in NAMES if name not in NAMES_WITH_STATE and not record(name, options_of(name))["tokens"])]
RECURRENCES = ["retention", "simple_gla", "gated_linear_attention", "deltanet", "gated_deltanet", "kda", "mamba1", "mamba2", "metala_attention"]


def layer_of(name, dtype=torch.float64):
    layer, more = LAYERS_WITH_STATE[name]
    torch.manual_seed(0)
    options = {key: value for key, value in {**options_of(layer), **more}.items() if key not in ("height", "width") or not more}
    module = getattr(linnet.nn, LAYERS[layer]["module"])(**options, dtype=dtype)
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            if parameter.ndim > 1 and not key.startswith(("ssm", "shift")):
                parameter.copy_(torch.randn(parameter.shape, dtype=dtype) * parameter.shape[-1] ** -0.5)
    return module


def x_of(rows=2, tokens=13, dtype=torch.float64):
    return torch.randn(rows, tokens, 16, generator=torch.Generator().manual_seed(1), dtype=dtype)


def close(got, want, tolerance=1e-9):
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance * max(want.abs().max().item(), 1e-30))


@pytest.mark.parametrize("name", NAMES_WITH_STATE)
def test_pieces_and_tokens_equal_the_whole(name):
    module, x = layer_of(name), x_of()
    with torch.no_grad():
        whole = module(x)
        for cuts in ([13], [1] * 13, [5, 8], [7, 1, 1, 4], [2, 3, 8]):
            state = module.make_state(2, capacity=4)  # it grows
            pieces = [module(piece, state=state) for piece in x.split(cuts, 1)]
            close(torch.cat(pieces, 1), whole)
            assert state.lengths == [13, 13]
        state = module.make_state(2)
        module(x[:, :12], state=state)
        kept = state.copy()
        close(module.step(x[:, 12], state), whole[:, 12])
        swapped = kept.reorder([1, 0, 1])
        close(module.step(x[[1, 0, 1], 12], swapped), whole[[1, 0, 1], 12])


@pytest.mark.parametrize("window", [0, 3, 20])
def test_caches_of_windows_are_bounded(window):
    torch.manual_seed(0)
    module = linnet.nn.SoftmaxAttention(hidden=16, heads=4, kv_heads=2, window=(window, -1), prefix=2, dtype=torch.float64)
    x, lengths = x_of(3, 150), [40, 7, 1]
    with torch.no_grad():
        whole = module(x)
        for cuts in ([1] * 150, [90, *[1] * 60], [30, 30, 1, 1, 30, 58], [3] * 50):
            state = module.make_state(3)
            close(torch.cat([module(piece, state=state) for piece in x.split(cuts, 1)], 1), whole)
            assert state.parts[0]["softmax.k_cache"].shape[1] <= 2 + window + 16
        # Rows of different lengths: a padded prompt, single tokens, then many at once.
        state = module.make_state(3)
        mask = torch.arange(40) < torch.tensor(lengths)[:, None]
        module(x[:, :40], state=state, mask=mask)
        for i in [*range(30), slice(30, 70)]:
            take = (lambda y, i=i: torch.stack([y[row, length + i] for row, length in enumerate(lengths)])) if isinstance(i, int) else (
                lambda y, i=i: torch.stack([y[row, length + i.start : length + i.stop] for row, length in enumerate(lengths)]))  # fmt: skip
            got = module.step(take(x), state) if isinstance(i, int) else module(take(x), state=state)
            close(got, take(whole))
    traced = module.make_state(3)
    pieces = [module(piece, state=traced) for piece in x.split([70, 30, 50], 1)]
    close(torch.cat(pieces, 1), module(x))
    close(module.step(x[:, 0], traced.detach()), module(torch.cat([x, x[:, :1]], 1))[:, -1])


@pytest.mark.parametrize("name", ANY_LENGTH)
def test_packed_and_padded_sequences_equal_each_alone(name):
    LAYERS_WITH_STATE.setdefault(name, (name, {}))
    module, lengths = layer_of(name), [5, 0, 1, 7]
    rows = x_of(4, 7)
    offsets = torch.tensor([0, 5, 5, 6, 13])
    packed = torch.cat([row[:length] for row, length in zip(rows, lengths)])[None]
    with torch.no_grad():
        alone = [module(row[None, :length]) if length else row[None, :0] for row, length in zip(rows, lengths)]
        close(module(packed, cu_seqlens=offsets), torch.cat(alone, 1))
        for side in ("right", "left"):
            mask = torch.zeros(4, 7, dtype=torch.bool)
            x = torch.full((4, 7, 16), torch.nan, dtype=torch.float64)
            for row, length in enumerate(lengths):
                place = slice(length) if side == "right" else slice(7 - length, 7)
                mask[row, place], x[row, place] = True, rows[row, :length]
            out = module(x, mask=mask)
            assert (out[~mask] == 0).all()
            close(out[mask][None], torch.cat(alone, 1))


@pytest.mark.parametrize("name", NAMES_WITH_STATE)
def test_rows_of_different_lengths_go_on(name):
    module, x, lengths = layer_of(name), x_of(3, 12), [4, 7, 1]
    mask = torch.arange(7) >= 7 - torch.tensor(lengths)[:, None]  # padding on the left
    prompt = torch.zeros(3, 7, 16, dtype=torch.float64)
    for row, length in enumerate(lengths):
        prompt[row, 7 - length :] = x[row, :length]
    with torch.no_grad():
        whole = module(x)
        state = module.make_state(3, capacity=2)
        module(prompt, state=state, mask=mask)
        assert state.lengths == lengths
        for i in range(3):
            token = torch.stack([x[row, length + i] for row, length in enumerate(lengths)])
            close(module.step(token, state), torch.stack([whole[row, length + i] for row, length in enumerate(lengths)]))


OTHERS = ("softmax_attention", "converted_attention", "normalised_attention", "h3_mixer", "short_conv")
CARRIES_GRADIENTS = [name for name in NAMES_WITH_STATE if LAYERS_WITH_STATE[name][0] in (*RECURRENCES, *OTHERS)]


@pytest.mark.parametrize("name", [name for name in NAMES_WITH_STATE if name not in CARRIES_GRADIENTS])
def test_a_state_without_gradients_is_told(name):
    """Their later pieces run the decode operators: a sentence, not gradients that miss what came before."""
    module, x = layer_of(name), x_of()
    state = module.make_state(2)
    module(x[:, :6], state=state)
    with pytest.raises(RuntimeError, match=r"which this operator has not; call it under torch.no_grad\(\)"):
        module(x[:, 6:], state=state)


@pytest.mark.parametrize("name", CARRIES_GRADIENTS)
def test_gradients_flow_through_the_state(name):
    module, x = layer_of(name), x_of()
    weight = torch.randn_like(x)
    (module(x) * weight).sum().backward()
    expected = {key: parameter.grad.clone() for key, parameter in module.named_parameters()}
    module.zero_grad()
    state = module.make_state(2)
    pieces = [module(piece, state=state) for piece in x.split([6, 2, 5], 1)]
    (torch.cat(pieces, 1) * weight).sum().backward()
    for key, parameter in module.named_parameters():
        close(parameter.grad, expected[key], 1e-8)


@pytest.mark.parametrize("name", NAMES_WITH_STATE)
def test_a_first_piece_under_autograd(name):
    """What a call without torch.no_grad() does: the same numbers and gradients as without a state, and a state to go on from."""
    module, x = layer_of(name), x_of().requires_grad_()
    want = module(x)
    want.square().sum().backward()
    gradient, x.grad = x.grad, None
    for mask in (None, torch.ones(2, 13, dtype=torch.bool)):
        state = module.make_state(2, capacity=4)
        got = module(x, state=state, mask=mask)
        got.square().sum().backward()
        close(got.detach(), want.detach())
        close(x.grad, gradient, 1e-8)
        x.grad = None
    with torch.no_grad():
        more = torch.cat([x, x[:, :1]], 1)
        close(module.step(more[:, -1], state), module(more)[:, -1])


@pytest.mark.parametrize("name", ANY_LENGTH)
def test_gradients_of_packed_sequences(name):
    LAYERS_WITH_STATE.setdefault(name, (name, {}))
    module, rows = layer_of(name), x_of(2, 7)
    (module(rows[:1, :4]).square().sum() + module(rows[1:]).square().sum()).backward()
    expected = {key: parameter.grad.clone() for key, parameter in module.named_parameters()}
    module.zero_grad()
    module(rows, mask=torch.tensor([[1, 1, 1, 1, 0, 0, 0], [1] * 7])).square().sum().backward()
    for key, parameter in module.named_parameters():
        close(parameter.grad, expected[key], 1e-8)


@pytest.mark.parametrize("name", CASES)
def test_models_step_by_step(name):
    model, ids = model_of(name, torch.float64), ids_of(20, 2)
    with torch.no_grad():
        whole = model(ids)
        state = model.make_state(2)
        close(model(ids[:, :9], state=state), whole[:, :9])
        for i in range(9, 20):
            close(model.step(ids[:, i], state), whole[:, i])
        # Padding on the left, then decoding.
        state, mask = model.make_state(2), torch.ones(2, 9, dtype=torch.bool)
        mask[0, :4] = False
        padded = ids[:, :9].clone()
        padded[0, 4:] = ids[0, :5]
        logits = model(padded, state=state, mask=mask)
        close(logits[:, -1], torch.stack([whole[0, 4], whole[1, 8]]))
        close(model.step(torch.stack([ids[0, 5], ids[1, 9]]), state), torch.stack([whole[0, 5], whole[1, 9]]))
        packed = torch.cat([ids[0, :5], ids[1, :9]])[None]
        close(model(packed, cu_seqlens=[0, 5, 14]), torch.cat([whole[:1, :5], whole[1:, :9]], 1))
    assert state.nbytes > 0 and "lengths=[6, 10]" in repr(state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_states_in_low_precision_and_under_autocast(dtype):
    model, ids = model_of("hybrid", dtype), ids_of(20, 2)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        whole, state = model(ids), model.make_state(2)
        steps = [model(ids[:, :10], state=state), *(model.step(ids[:, i], state)[:, None] for i in range(10, 20))]
        error = (torch.cat(steps, 1) - whole).float().square().mean().sqrt() / whole.float().square().mean().sqrt()
    assert error < 0.05


def test_wrong_calls_get_a_sentence():
    model, ids = model_of("hybrid"), ids_of(6, 2)
    with pytest.raises(ValueError, match="the state has 3 rows, expected 2"):
        model(ids, state=model.make_state(3))
    with pytest.raises(ValueError, match="x has 2 rows, expected 1 with cu_seqlens"):
        model(ids, cu_seqlens=[0, 6])
    with pytest.raises(ValueError, match=r"cu_seqlens are \[0, 5\], expected ascending numbers from 0 to 6"):
        model(ids[:1], cu_seqlens=[0, 5])
    with pytest.raises(ValueError, match=r"mask has shape \[2, 5\], expected \[2, 6\]"):
        model(ids, mask=torch.zeros(2, 5))
    with pytest.raises(ValueError, match="both given"):
        model(ids, mask=torch.tensor([[1] * 5 + [0]] * 2), cu_seqlens=[0, 6])
    with pytest.raises(NotImplementedError, match="monarch_attention: monarch cannot be continued token by token"):
        linnet.nn.MonarchAttention(hidden=16, heads=2).make_state()
    assert VOCABULARY == model.config["vocab_size"]


@pytest.mark.parametrize("name", [*RECURRENCES, "softmax_attention", "softmax-window-sinks", "softmax-G1", "softmax-G2-headwise", "retention-half"])
def test_devices_without_decode_operators(name, monkeypatch):
    """Where the decode operator has no kernel, the operator itself goes on from the state."""
    module, x = layer_of(name), x_of(3, 40)
    with torch.no_grad():
        whole = module(x)
    monkeypatch.setattr("linnet._state.has_kernel", lambda op, device: False)
    close(module(x), whole)
    with torch.no_grad():
        state = module.make_state(3)
        pieces = [module(piece, state=state) for piece in x.split([20, *[1] * 10, 10], 1)]
        close(torch.cat(pieces, 1), whole)
        packed = module(x.reshape(1, 120, 16), cu_seqlens=[0, 40, 80, 120])
        close(packed.reshape(3, 40, 16), whole)
