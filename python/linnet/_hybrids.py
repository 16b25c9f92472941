"""Kernels for the recurrent layers of Hugging Face transformers: gated delta rules, short convolutions, Mamba.

Qwen3-Next, Qwen3.5, Kimi Linear, Mamba, Mamba-2 and their kin call plain functions that transformers fills with a GPU package
when one is installed and with a torch loop otherwise. `install()` puts Linnet's kernels there, on the CPU and on CUDA, forward
and backward. A call that Linnet cannot serve (an option it does not have, a device without a kernel) runs the torch code as before.

The functions below keep the signatures of the packages (flash-linear-attention, causal-conv1d, mamba-ssm).
"""

import functools
import inspect
import sys

import torch

from ._library import DECLARATIONS
from ._ops import FUNCTIONS


class Unserved(Exception):
    """This call belongs to the torch code."""


def serve(holds):
    if not holds:
        raise Unserved


def runs_on(op, tensor):
    device = tensor.device.type
    serve(device == "cpu" or any(each["name"].startswith(device) for each in DECLARATIONS[op]["implementations"]))


def activated(activation):
    serve(activation in (None, "silu", "swish"))
    return "none" if activation is None else "silu"


def offsets(seq_idx):
    """cu_seqlens of one row of sequence numbers."""
    if seq_idx is None:
        return None
    serve(seq_idx.shape[0] == 1)
    ends = (seq_idx[0, 1:] != seq_idx[0, :-1]).nonzero().flatten() + 1
    return torch.cat([ends.new_zeros(1), ends, ends.new_full((1,), seq_idx.shape[1])])


def _delta(query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens):
    runs_on("gated_delta", query)
    state = None if initial_state is None else initial_state.float()
    step = query.shape[1] == 1 and state is not None and cu_seqlens is None
    if step and not (torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value, g, beta, state))):
        state = state.clone() if state is initial_state else state
        arguments = (query, key, value, g.float(), beta.to(query.dtype))
        out = FUNCTIONS["gated_delta_decode"](*arguments, state=state, l2_norm=use_qk_l2norm_in_kernel)
        return out, state if output_final_state else None
    results = FUNCTIONS["gated_delta"](
        query,
        key,
        value,
        g=g.float(),
        beta=beta.to(query.dtype),
        initial_state=state,
        cu_seqlens=cu_seqlens,
        l2_norm=use_qk_l2norm_in_kernel,
        return_final_state=output_final_state,
    )
    return results if output_final_state else (results, None)


def chunk_gated_delta_rule(
    query,
    key,
    value,
    g,
    beta,
    chunk_size=64,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
):
    """q, k [B, T, H, K], v [B, T, H, V], g [B, T, H] (or [B, T, H, K]), beta [B, T, H], states [B, H, K, V]."""
    return _delta(query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)


def fused_recurrent_gated_delta_rule(
    query, key, value, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None
):
    return _delta(query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)


def causal_conv1d_fn(hidden_states, weight, bias=None, activation=None, seq_idx=None):
    """hidden_states [B, E, T], weight [E, W]; the same shape out."""
    runs_on("causal_conv", hidden_states)
    out = FUNCTIONS["causal_conv"](
        hidden_states.transpose(1, 2).contiguous(),
        weight.to(hidden_states.dtype),
        bias=None if bias is None else bias.to(hidden_states.dtype),
        cu_seqlens=offsets(seq_idx),
        activation=activated(activation),
    )
    return out.transpose(1, 2)


def causal_conv1d_update(hidden_states, conv_state, weight, bias=None, activation=None):
    """The new tokens hidden_states [B, E, T] after the inputs of conv_state [B, E, S], S >= W - 1, which is overwritten."""
    runs_on("causal_conv", hidden_states)
    before, taps = conv_state.shape[-1], weight.shape[-1]
    serve(before >= taps - 1)
    x = hidden_states.transpose(1, 2).contiguous()
    out = FUNCTIONS["causal_conv"](
        x,
        weight.to(x.dtype),
        bias=None if bias is None else bias.to(x.dtype),
        initial_state=conv_state[:, :, before - taps + 1 :].to(x.dtype).contiguous(),
        activation=activated(activation),
    )
    conv_state.copy_(torch.cat([conv_state, hidden_states.to(conv_state.dtype)], -1)[:, :, -before:])
    return out.transpose(1, 2)


def mamba_chunk_scan_combined(
    hidden_states,
    dt,
    A,
    B,
    C,
    chunk_size,
    D=None,
    z=None,
    dt_bias=None,
    initial_states=None,
    dt_softplus=False,
    dt_limit=(0.0, float("inf")),
    return_final_states=False,
    seq_idx=None,
    cu_seqlens=None,
):
    """x [B, T, H, P], dt [B, T, H], A [H], B and C [B, T, G, N], D [H]; states [B, H, P, N]."""
    runs_on("mamba_ssd", hidden_states)
    serve(dt_softplus)
    low, high = dt_limit
    results = FUNCTIONS["mamba_ssd"](
        hidden_states,
        dt.to(hidden_states.dtype),
        A.float(),
        B,
        C,
        D=None if D is None else D.to(hidden_states.dtype),
        z=z,
        dt_bias=None if dt_bias is None else dt_bias.to(hidden_states.dtype),
        initial_state=None if initial_states is None else initial_states.float().transpose(2, 3).contiguous(),
        cu_seqlens=offsets(seq_idx) if cu_seqlens is None else cu_seqlens,
        dt_min=float(low),
        dt_max=None if high == float("inf") else float(high),
        return_final_state=return_final_states,
    )
    if not return_final_states:
        return results
    out, state = results
    return out, state.transpose(2, 3)


def selective_state_update(state, hidden_states, dt, A, B, C, D=None, dt_bias=None, dt_softplus=False, z=None):
    """One token: Mamba's state [B, E, N] with x [B, E], or Mamba-2's [B, H, P, N] with x [B, H, P]; it is overwritten."""
    serve(dt_softplus)
    if state.dim() == 3:
        runs_on("mamba_selective_scan", hidden_states)
        carried = state.float().contiguous()
        carried = carried.clone() if carried is state else carried
        out = FUNCTIONS["mamba_selective_scan_decode"](
            hidden_states[:, None].contiguous(),
            dt[:, None].to(hidden_states.dtype).contiguous(),
            A.float(),
            B[:, None].to(hidden_states.dtype).contiguous(),
            C[:, None].to(hidden_states.dtype).contiguous(),
            D=None if D is None else D.to(hidden_states.dtype),
            z=None if z is None else z[:, None].contiguous(),
            dt_bias=None if dt_bias is None else dt_bias.to(hidden_states.dtype),
            state=carried,
        )
        state.copy_(carried)
        return out[:, 0]
    runs_on("mamba_ssd", hidden_states)
    # One rate, step and bias for each head, repeated over its channels; anything else is not Mamba-2.
    serve(A.stride(1) == 0 and A.stride(2) == 0 and dt.stride(2) == 0 and (dt_bias is None or dt_bias.stride(1) == 0))
    carried = state.float().transpose(2, 3).contiguous()
    out = FUNCTIONS["mamba_ssd_decode"](
        hidden_states[:, None],
        dt[:, None, :, 0].to(hidden_states.dtype).contiguous(),
        A[:, 0, 0].float().contiguous(),
        B[:, None],
        C[:, None],
        D=None if D is None else D.to(hidden_states.dtype).contiguous(),
        z=None if z is None else z[:, None],
        dt_bias=None if dt_bias is None else dt_bias[:, 0].to(hidden_states.dtype).contiguous(),
        state=carried,
    )
    state.copy_(carried.transpose(2, 3))
    return out[:, 0]


def selective_scan_fn(
    hidden_states, dt, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False
):
    """x, dt, z [B, E, T], A [E, N], B and C [B, N, T], D [E]; the same shape out, the state [B, E, N]."""
    runs_on("mamba_selective_scan", hidden_states)
    serve(delta_softplus and B.dim() == 3)
    dtype = hidden_states.dtype
    results = FUNCTIONS["mamba_selective_scan"](
        hidden_states.transpose(1, 2).contiguous(),
        dt.transpose(1, 2).to(dtype).contiguous(),
        A.float(),
        B.transpose(1, 2).to(dtype).contiguous(),
        C.transpose(1, 2).to(dtype).contiguous(),
        D=None if D is None else D.to(dtype),
        z=None if z is None else z.transpose(1, 2).contiguous(),
        dt_bias=None if delta_bias is None else delta_bias.to(dtype),
        return_final_state=return_last_state,
    )
    if not return_last_state:
        return results.transpose(1, 2)
    return results[0].transpose(1, 2), results[1]


SERVED = {
    each.__name__: each
    for each in (
        chunk_gated_delta_rule,
        fused_recurrent_gated_delta_rule,
        causal_conv1d_fn,
        causal_conv1d_update,
        mamba_chunk_scan_combined,
        selective_state_update,
        selective_scan_fn,
    )
}
SERVED["chunk_kda"] = chunk_gated_delta_rule  # the same rule, its gate for each channel
SERVED["fused_recurrent_kda"] = fused_recurrent_gated_delta_rule


def _put(function):
    """Puts Linnet's kernel behind a function that transformers' decorator made; others stay as they are."""
    code = getattr(function, "__code__", None)
    if code is None or function.__closure__ is None:
        return
    cells = dict(zip(code.co_freevars, function.__closure__))
    if not {"func_name", "implementation", "torch_function", "applicable_params", "is_new_implementation"} <= set(cells):
        return
    name = cells["func_name"].cell_contents
    if name not in SERVED or getattr(cells["implementation"].cell_contents, "linnet", False):
        return
    fallback = cells["torch_function"].cell_contents
    known, taken = (tuple(inspect.signature(each).parameters) for each in (SERVED[name], fallback))

    @functools.wraps(fallback)
    def kernel(*args, **keywords):
        try:
            return SERVED[name](*args, **{key: value for key, value in keywords.items() if key in known})
        except Unserved:
            return fallback(*args, **{key: value for key, value in keywords.items() if key in taken or "kwargs" in taken})

    kernel.linnet = True
    cells["implementation"].cell_contents = kernel
    cells["applicable_params"].cell_contents = known + taken
    cells["is_new_implementation"].cell_contents = True


def install():
    """Serves the recurrent functions of every model of transformers, of those imported already and of those to come."""
    from transformers import integrations
    from transformers.integrations import hub_kernels

    original = hub_kernels.use_kernel_func_from_hub_with_fallback
    if not getattr(original, "linnet", False):

        @functools.wraps(original)
        def decorate(*names, **keywords):
            decorator = original(*names, **keywords)

            def put(function):
                decorated = decorator(function)
                _put(decorated)
                return decorated

            return put

        decorate.linnet = True
        hub_kernels.use_kernel_func_from_hub_with_fallback = decorate
        integrations.use_kernel_func_from_hub_with_fallback = decorate
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.models.") and module is not None:
            for function in list(vars(module).values()):
                _put(function)
