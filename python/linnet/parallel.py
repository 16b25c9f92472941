"""Sequences split over processes: each holds T / N tokens of every sequence, and recurrences pass their states on.

    linnet.parallel.split_sequence(model)              # a linnet.nn.Model, in every process
    loss = loss_of(model(my_tokens))                   # rank r holds tokens r T / N .. (r + 1) T / N
    loss.backward()                                    # then sum the gradients of the parameters over the processes

A run of tokens acts on the state that it finds as S -> A S + B (linnet.recurrence_segments; number by number for Mamba and MetaLA). Each
process computes A and B of its own tokens, one all-gather brings everybody's, and each folds those before it into the state that it starts from. Backward, the gradient
of the state goes the other way: dS -> A^T dS + D. What is exchanged does not grow with T. Short convolutions get the last inputs of
the process before; rotary positions are shifted.
"""

import os
import sys
import types

import torch
import torch.distributed as dist

import linnet

from . import nn
from ._ops import FUNCTIONS
from ._records import positions

RECURRENCES = ("decay", "gla", "delta", "gated_delta", "recurrence")
# Recurrences whose state decays number by number: the input that is written into it, and the state's name.
SCANS = {"mamba_ssd": ("x", "initial_state"), "mamba_selective_scan": ("x", "initial_state"), "metala_mixer": ("v", "state")}
TOKENWISE = ("dense", "add", "rms_norm", "rms_norm_gated", "layer_norm", "l2_norm", "activation", "glu", "rotary")


def leave(code=0):
    """Ends a process of several at once, after the others have come as far.

    The interpreter's own end is no place for gloo: modules and tensors outlive the group, and its threads are sometimes destroyed while
    they run ("terminate called without an active exception"), which makes a failure of work that had ended well."""
    if code == 0 and dist.is_available() and dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _gather(tensor, group):
    """Everybody's tensor, by rank."""
    everybody = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everybody, tensor.contiguous(), group=group)
    return everybody


def _matrices(given, options):
    """A [.., K, K] and B [.., K, V] of S -> A S + B, for the recurrences with keys."""
    q, k, v = (given[each].float() for each in "qkv")
    heads = max(each.shape[2] for each in (q, k, v))
    g, beta = given.get("g"), given.get("beta")
    if "g_head" in given:
        g = given["g_head"].expand(*k.shape[:2], heads)
    if options.get("l2_norm"):
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    if options.get("double_beta"):
        beta = 2 * beta
    moved = {"g": g, "beta": beta}
    moved = {key: value.float().contiguous() for key, value in moved.items() if value is not None}
    _, B, A = linnet.recurrence_segments(q, k, v, segment=max(k.shape[1], 1), return_final_state=True, return_A=True, **moved)
    return A, B


def _factors(name, given, options):
    """A and B of S -> A * S + B: what stays of ones where nothing is written, and what is written where nothing was."""
    written, state = SCANS[name]
    scan = getattr(linnet, name)
    B = scan(**given, **options, return_final_state=True)[1]
    silent = {**given, written: torch.zeros_like(given[written]), state: torch.ones_like(B)}
    return scan(**silent, **options, return_final_state=True)[1], B


class _Recurrence(torch.autograd.Function):
    """A recurrence over tokens of which this process holds its part."""

    @staticmethod
    def forward(ctx, name, options, group, names, *tensors):
        given = dict(zip(names, tensors))
        A, B = _factors(name, given, options) if name in SCANS else _matrices(given, options)
        ctx.times = torch.mul if name in SCANS else torch.matmul
        pairs = [pair.split((A.shape[-1], B.shape[-1]), -1) for pair in _gather(torch.cat([A, B], -1), group)]
        rank, state = dist.get_rank(group), torch.zeros_like(B)
        for A, B in pairs[:rank]:
            state = ctx.times(A, state) + B
        ctx.name, ctx.options, ctx.group, ctx.names = name, options, group, names
        ctx.later = [A for A, _ in pairs[rank + 1 :]]
        ctx.initial = SCANS[name][1] if name in SCANS else "initial_state"
        ctx.save_for_backward(state, *tensors)
        return getattr(linnet, name)(**given, **options, **{ctx.initial: state})

    @staticmethod
    def backward(ctx, dout):
        state, *tensors = ctx.saved_tensors
        with torch.enable_grad():
            state = state.detach().requires_grad_()
            inputs = [tensor.detach().requires_grad_() for tensor in tensors]
            given = {**dict(zip(ctx.names, inputs)), **ctx.options, ctx.initial: state}
            out, final = getattr(linnet, ctx.name)(**given, return_final_state=True)
        (own,) = torch.autograd.grad(out, state, dout, retain_graph=True)  # D: what this part alone asks of the state before it
        rank, dfinal = dist.get_rank(ctx.group), torch.zeros_like(final)
        for A, D in reversed(list(zip(ctx.later, _gather(own, ctx.group)[rank + 1 :]))):
            dfinal = ctx.times(A if ctx.name in SCANS else A.transpose(-1, -2), dfinal) + D
        return None, None, None, None, *torch.autograd.grad([out, final], inputs, [dout, dfinal])


class _Before(torch.autograd.Function):
    """x [B, T, E] -> the last `count` tokens of the process before, zeros in the first."""

    @staticmethod
    def forward(ctx, x, count, group):
        ctx.count, ctx.group, ctx.shape = count, group, x.shape
        everybody, rank = _gather(x[:, x.shape[1] - count :], group), dist.get_rank(group)
        return everybody[rank - 1] if rank else torch.zeros_like(everybody[0])

    @staticmethod
    def backward(ctx, dbefore):
        everybody, rank = _gather(dbefore, ctx.group), dist.get_rank(ctx.group)
        dx = dbefore.new_zeros(ctx.shape)
        if rank + 1 < len(everybody):
            dx[:, ctx.shape[1] - ctx.count :] = everybody[rank + 1]
        return dx, None, None


def _functions(group):
    """What a layer's forward finds under the names of the operators."""

    def recurrence(name):
        def call(**arguments):
            tensors = {key: value for key, value in arguments.items() if isinstance(value, torch.Tensor)}
            options = {key: value for key, value in arguments.items() if value is not None and key not in tensors}
            return _Recurrence.apply(name, options, group, tuple(tensors), *tensors.values())

        return call

    def causal_conv(x, weight, **rest):
        count = weight.shape[-1] - 1
        if count > x.shape[1]:
            raise ValueError(f"linnet.parallel: {x.shape[1]} tokens for each process are fewer than the {count} that a convolution looks back")
        before = _Before.apply(x, count, group)
        return linnet.causal_conv(x=torch.cat([before, x], 1), weight=weight, **rest)[:, count:]

    def first(x):
        return dist.get_rank(group) * x.shape[1]

    def rotary(x, **rest):
        return linnet.rotary(x=x, **{**rest, "offset": rest.get("offset", 0) + first(x)})

    return {
        "linnet": types.SimpleNamespace(
            **{**FUNCTIONS, "causal_conv": causal_conv, "rotary": rotary, **{name: recurrence(name) for name in (*RECURRENCES, *SCANS)}}
        ),
        "positions": lambda x: positions(x) + first(x),
    }


def split_sequence(model, group=None):
    """Makes the layers of a model see one sequence over all processes of the group. Layers that pass no state on are refused."""
    if getattr(model, "embed_positions", None) is not None:
        raise ValueError("linnet.parallel: a table of learned positions cannot be split over processes: take positions=0")
    layers = [module for module in model.modules() if isinstance(module, nn.Layer)]
    for layer in layers:
        for step in layer._record()["steps"]:
            op = step.get("op", "")
            if (op and op not in (*RECURRENCES, *SCANS, "causal_conv", *TOKENWISE)) or step.get("view") in ("last", "drop_token"):
                raise ValueError(
                    f"linnet.parallel: {layer.layer} has the step {op or step['view']}, which cannot be split over processes; "
                    f"those that can are {', '.join((*RECURRENCES, *SCANS))}, convolutions and what treats each token alone"
                )
    functions = _functions(group)
    for layer in layers:
        layer.forward = nn._compiled(type(layer).__name__, layer.code, functions).__get__(layer)
    return model
