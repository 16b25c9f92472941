"""Python functions, fake kernels and autograd of every operator, made from the declarations."""

import inspect
import linecache
from collections.abc import Sequence  # noqa: F401, the signatures name it

import torch
from torch.autograd import forward_ad

from ._documentation import document
from ._library import DECLARATIONS
from ._names import as_index, as_window, explain_types, look_at_layout, refuse_names, watch_layout
from ._shapes import Shapes
from ._signature import argument, default_value, on_demand, parameters


def on_request(output):
    """Whether torch.ops.linnet computes this output only when return_<name> asks for it; the backward's are always computed."""
    return output["optional"] and not output["saved"]


def _check_device(declaration, tensors):
    name = declaration["name"]
    has_cuda = any(each["device"] == "cuda" for each in declaration["implementations"])
    for decl, tensor in zip(declaration["inputs"], tensors):
        if tensor is None or tensor.device.type in ("cpu", "meta") or (tensor.device.type == "cuda" and has_cuda):
            continue
        raise RuntimeError(f"{name}: {decl['name']} is on {tensor.device}; {name} has no CUDA kernels")
    # One tensor on the device "meta" brings a call here, which then returns shapes alone and leaves a state as it was.
    places = [(decl["name"], tensor.device) for decl, tensor in zip(declaration["inputs"], tensors) if tensor is not None]
    for other, device in places[1:]:
        if "meta" in (device.type, places[0][1].type) and device.type != places[0][1].type:
            raise RuntimeError(f"{name}: {other} is on {device}, expected {places[0][1]} (same as {places[0][0]})")


def torch_name(keyword):
    """The keyword of torch.ops.linnet: dispatchers of torch pass an argument of their own named mode."""
    return "mode_" if keyword == "mode" else keyword


def _options(declaration, keywords):
    return {option["name"]: keywords.get(torch_name(option["name"]), option["default"]) for option in declaration["options"]}


def _register_fake(declaration):
    name, inputs, outputs = declaration["name"], declaration["inputs"], declaration["outputs"]

    def fake(*tensors, **keywords):
        _check_device(declaration, tensors)
        tensors += (None,) * (len(inputs) - len(tensors))
        shapes = Shapes(declaration, tensors, _options(declaration, keywords))
        results = [
            shapes.nothing(shapes.dtype(decl))
            if on_request(decl) and not keywords.get("return_" + decl["name"])
            else shapes.output(decl)
            for decl in outputs
        ]
        return tuple(results) if len(results) > 1 else results[0]

    torch.library.register_fake(f"linnet::{name}", fake)


def _register_backward(declaration):
    name, inputs, outputs = declaration["name"], declaration["inputs"], declaration["outputs"]
    differentiable = [i for i, decl in enumerate(inputs) if decl["differentiable"]]
    received = [i for i, decl in enumerate(outputs) if decl["differentiable"]]
    saved = [i for i, decl in enumerate(outputs) if decl["saved"]]
    constants = [not decl["differentiable"] for decl in outputs]
    requested = ["return_" + decl["name"] if on_request(decl) else None for decl in outputs]
    requests = frozenset(requested)
    missing = [(None,) * (len(inputs) - count) for count in range(len(inputs) + 1)]  # what a call left to its default
    forward_op, backward_op = OPERATORS[name], getattr(torch.ops.linnet, name + "_backward").default

    def fake(*tensors, wanted, **keywords):
        given = tensors[len(received) : len(received) + len(inputs)]
        _check_device(declaration, given)
        first = given[0]
        gradients = []
        for i, want in zip(differentiable, wanted):
            like = first if given[i] is None else given[i]
            size = like.shape if want and given[i] is not None else (0,)
            gradients.append(torch.empty(size, dtype=like.dtype, device=like.device))
        return tuple(gradients) if len(gradients) > 1 else gradients[0]

    def setup_context(ctx, inputs, output, keyword_only_inputs=None):
        results, keywords = output if isinstance(output, tuple) else (output,), keyword_only_inputs or {}
        ctx.save_for_backward(*inputs, *missing[len(inputs)], *[results[i] for i in saved])
        ctx.options = {name: value for name, value in keywords.items() if name not in requests}
        ctx.declined = [request is not None and not keywords.get(request) for request in requested]
        apart = [result for result, declined, plain in zip(results, ctx.declined, constants) if declined or plain]
        if apart:
            ctx.mark_non_differentiable(*apart)
        ctx.set_materialize_grads(False)

    def gradients_of_inputs(ctx, needed, gradients, operator=backward_op):
        # torch drops trailing arguments that were left to their default
        wanted = [i < len(needed) and needed[i] for i in differentiable]
        incoming = [None if ctx.declined[i] else gradients[i] for i in received]
        results = [None] * len(inputs)
        if any(wanted) and any(gradient is not None for gradient in incoming):
            if operator is backward_op and not torch.is_grad_enabled():  # no graph of this gradient is asked for
                with BelowAutograd():
                    computed = operator(*incoming, *ctx.saved_tensors, **ctx.options, wanted=wanted)
            else:
                computed = operator(*incoming, *ctx.saved_tensors, **ctx.options, wanted=wanted)
            computed = computed if isinstance(computed, tuple) else (computed,)
            for i, want, gradient in zip(differentiable, wanted, computed):
                results[i] = gradient if want else None
        return tuple(results)

    def backward(ctx, *gradients):
        return gradients_of_inputs(ctx, ctx.needs_input_grad, gradients)

    def refuse(ctx, *gradients):
        raise NotImplementedError(f"{name}: gradients of gradients are not available; the backward has no derivative")

    class Eager(torch.autograd.Function):
        """The same without torch.library's bookkeeping, which triples the cost of a small call."""

        @staticmethod
        def forward(ctx, keywords, *inputs):
            with BelowAutograd():
                output = forward_op(*inputs, **keywords)
            setup_context(ctx, inputs, output, keywords)
            return output

        @staticmethod
        def backward(ctx, *gradients):
            return None, *gradients_of_inputs(ctx, ctx.needs_input_grad[1:], gradients)

    # torch.func asks for functions whose forward has no context, which cost more; the gradient is one of them, too.
    class Functional(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(keywords, *inputs):
            return getattr(torch.ops.linnet, name).default(*inputs, **keywords)

        @staticmethod
        def setup_context(ctx, inputs, output):
            setup_context(ctx, inputs[1:], output, inputs[0])

        @staticmethod
        def backward(ctx, *gradients):
            def operator(*tensors, **keywords):
                return FunctionalBackward.apply(keywords, *tensors)

            return None, *gradients_of_inputs(ctx, ctx.needs_input_grad[1:], gradients, operator)

    class FunctionalBackward(torch.autograd.Function):
        generate_vmap_rule = True
        backward = staticmethod(refuse)

        @staticmethod
        def forward(keywords, *tensors):
            return backward_op(*tensors, **keywords)

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

    EAGER[name], FUNCTIONAL[name] = Eager, Functional
    torch.library.register_fake(f"linnet::{name}_backward", fake)
    torch.library.register_autograd(f"linnet::{name}", backward, setup_context=setup_context)
    torch.library.register_autograd(f"linnet::{name}_backward", refuse)


def _register_vmap(name, inputs):
    """torch.vmap calls the operator once per element of the mapped dimension and stacks the results."""
    operator = getattr(torch.ops.linnet, name).default
    states = [i for i, decl in enumerate(inputs) if decl["mutated"]]

    def vmap(info, in_dims, *tensors, **keywords):
        for i in states:
            if i < len(tensors) and tensors[i] is not None and in_dims[i] is None:
                raise RuntimeError(f"{name}: torch.vmap would overwrite {inputs[i]['name']} once per element; map over it too")
        if info.batch_size == 0:
            raise RuntimeError(f"{name}: torch.vmap maps over no element, expected at least 1")
        results = [
            operator(*(t if dim is None else t.select(dim, i) for t, dim in zip(tensors, in_dims)), **keywords)
            for i in range(info.batch_size)
        ]
        if isinstance(results[0], torch.Tensor):
            return torch.stack(results), 0
        return tuple(torch.stack(parts) for parts in zip(*results)), (0,) * len(results[0])

    torch.library.register_vmap(f"linnet::{name}", vmap)


def autocast(*tensors):
    """Under torch.autocast what the operator reads in the type of the call is cast, as for scaled_dot_product_attention."""
    device = next(t.device.type for t in tensors if t is not None)
    if not torch.is_autocast_enabled(device):
        return tensors
    target = torch.get_autocast_dtype(device)
    return [t.to(target) if t is not None and t.dtype in (torch.float32, torch.float16, torch.bfloat16) else t for t in tensors]


def refuse_tangents(name, tensors):
    """The operators would drop them, and the derivative would be 0."""
    if forward_ad._current_level < 0:
        return
    if any(isinstance(t, torch.Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise NotImplementedError(f"{name}: forward-mode derivatives (torch.func.jvp) are not available")


def requires_gradient(tensors):
    for t in tensors:  # not any(...): a generator takes three times as long
        if isinstance(t, torch.Tensor) and t.requires_grad:
            return True
    return False


def call(name, tensors, keywords):
    """Calls an operator."""
    if torch.compiler.is_compiling():
        refuse_tangents(name, tensors)
        return getattr(torch.ops.linnet, name).default(*tensors, **keywords)
    try:
        look_at_layout(name, tensors[0])
        refuse_tangents(name, tensors)
        wanted = torch.is_grad_enabled() and name in EAGER and requires_gradient(tensors)
        if torch._C._are_functorch_transforms_active():
            return FUNCTIONAL[name].apply(keywords, *tensors) if wanted else OPERATORS[name](*tensors, **keywords)
        if wanted:
            return EAGER[name].apply(keywords, *tensors)
        with BelowAutograd():
            return OPERATORS[name](*tensors, **keywords)
    except (RuntimeError, TypeError) as error:
        explain_types(DECLARATIONS[name], tensors, keywords, error)
        raise


def refuse_gradient(name, *tensors):
    refuse_tangents(name, tensors)
    if torch.is_grad_enabled() and requires_gradient(tensors):
        raise RuntimeError(f"{name}: an input requires a gradient, which this operator has not; call it under torch.no_grad()")


def overwritten(*tensors):
    """Tells autograd, so that a graph which still needs the old values of a state refuses to use the new ones."""
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version([t for t in tensors if t is not None and not t.is_inference()])


def _source(declaration):
    """The text of the Python function: a real signature, and nothing in its body that torch.compile could not follow."""
    name, inputs, outputs = declaration["name"], declaration["inputs"], declaration["outputs"]
    choosable = on_demand(declaration)
    signature = parameters(declaration) + [f"return_{output}: bool = False" for output in choosable] + ["**others"]
    if signature[-2] == "*":
        del signature[-2]

    names = [argument(decl) for decl in inputs]
    body = ["if others:", f"    refuse_names(DECLARATIONS[{name!r}], others)"]
    for decl in inputs:
        if decl["element"] == "index":
            key = argument(decl)
            read = f"{key} = as_index({name!r}, {key!r}, {key}, {names[0]}, {decl['mutated']})"
            body += [f"if {key} is not None:", f"    {read}"]
    for option in declaration["options"]:
        if option["kind"] == "window":
            key = option["name"]
            body += [f"if not isinstance({key}, (tuple, list)):", f"    {key} = as_window({name!r}, {key!r}, {key})"]
    if declaration["differentiable"]:
        cast = ", ".join(argument(decl) for decl in inputs if decl["element"] == "io" and not decl["mutated"])
        body += ['if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):', f"    {cast}, = autocast({cast})"]
    else:
        body.append(f"refuse_gradient({name!r}, {', '.join(names)})")
    # What a call leaves to its default torch fills in from the schema, at less cost than it reads a value from Python.
    always = "return_" + outputs[0]["name"] if on_request(outputs[0]) else None
    body.append(f"keywords = {{{always!r}: True}}" if always else "keywords = {}")
    for option in declaration["options"]:
        key, default = option["name"], default_value(option)
        differs = f"{key} is not {default}" if default is None or isinstance(default, bool) else f"{key} != {default!r}"
        body += [f"if {differs}:", f"    keywords[{torch_name(key)!r}] = {key}"]
    for key in ["return_" + decl["name"] for decl in outputs[1:] if on_request(decl)]:
        body += [f"if {key}:", f"    keywords[{key!r}] = True"]
    needed = len(inputs)
    while inputs[needed - 1]["optional"]:
        needed -= 1
    tensors = f"({', '.join(names)},)"
    if needed < len(names):
        nothing = " and ".join(f"{key} is None" for key in names[needed:])
        tensors = f"({', '.join(names[:needed])},) if {nothing} else {tensors}"
    results = ", ".join("_" + decl["name"] for decl in outputs)
    body += [f"tensors = {tensors}", f"{results} = call({name!r}, tensors, keywords)"]
    if states := [argument(decl) for decl in inputs if decl["mutated"]]:
        body.append(f"overwritten({', '.join(states)})")
    always = "".join(f"_{decl['name']}, " for decl in outputs if decl["name"] not in choosable)
    if choosable:
        body.append(f"if {' or '.join('return_' + output for output in choosable)}:")
        chosen = "".join(f" + ((_{output},) if return_{output} else ())" for output in choosable)
        body.append(f"    return ({always}){chosen}")
    body.append(f"return {always.rstrip(', ')}")
    returns = "torch.Tensor" if not choosable else "torch.Tensor | tuple[torch.Tensor, ...]"
    return f"def {name}({', '.join(signature)}) -> {returns}:\n" + "".join(f"    {line}\n" for line in body)


def _function(declaration):
    name = declaration["name"]
    source = _source(declaration)
    place = f"<linnet.{name}>"
    linecache.cache[place] = (len(source), None, source.splitlines(True), place)  # for tracebacks and inspect.getsource
    exec(compile(source, place, "exec"), globals())  # this module's own: torch.compile guards globals by module and name
    function = globals()[name]
    function.__module__ = "linnet"
    known = inspect.signature(function)  # without the catch-all, which is there for its sentence alone
    function.__signature__ = known.replace(parameters=[p for p in known.parameters.values() if p.name != "others"])
    function.__doc__ = document(declaration)
    return function


# Where no gradient is wanted, or autograd.Function keeps the graph itself: the autograd that torch.library adds to an operator is
# a Python function that every call would pass through.
BelowAutograd = torch._C._AutoDispatchBelowAutograd

EAGER, FUNCTIONAL, FUNCTIONS = {}, {}, {}
OPERATORS = {name: getattr(torch.ops.linnet, name).default for name in DECLARATIONS}
for _declaration in DECLARATIONS.values():
    _register_fake(_declaration)
    _register_vmap(_declaration["name"], _declaration["inputs"])
    if _declaration["differentiable"]:
        _register_backward(_declaration)
        _register_vmap(_declaration["name"] + "_backward", [])
    FUNCTIONS[_declaration["name"]] = _function(_declaration)
    watch_layout(_declaration)
