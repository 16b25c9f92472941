"""How DTensor shards the operators: over the rows of a batch, and over heads. Made from the declarations' shapes."""

import functools

from ._library import DECLARATIONS
from ._ops import on_request

# Letters of declarations. Groups of heads are sharded with them; a single one is shared, and so whole everywhere.
BATCH, HEADS = {"B", "N"}, {"H", "Hq", "Hk", "Hv", "Hkv", "Hg", "G"}
MECHANISMS = {"softmax", "gated", "linear", "decay", "gla", "delta", "gated_delta", "recurrence", "mamba", "metala", "features", "taylor", "causal_conv",
              "zeros", "l2_norm", "rms_norm", "rms_norm_gated", "layer_norm", "rotary", "activation"}  # fmt: skip


def _letters(declared, dimensions):
    """The letters of a tensor of so many dimensions: norms and activations take [B, T, D], too."""
    for shape in (declared["shape"], declared.get("other_shape", ())):
        if len(shape) == dimensions:
            return list(shape)
    if declared["shape"][2:3] == ["H"] and dimensions == 3:
        return [*declared["shape"][:2], declared["shape"][3]]
    return [""] * dimensions


def _place(declared, tensor, letters, otherwise):
    """Shard where the tensor has one of the letters, else `otherwise`; a grouped size of 1 is whole."""
    from torch.distributed.tensor import Shard

    for dimension, letter in enumerate(_letters(declared, len(tensor.shape))):
        if letter.split("*")[0] in letters and (tensor.shape[dimension] > 1 or letters is BATCH):
            return Shard(dimension)
    return otherwise


def _shardings(declaration, is_backward, *arguments, **keywords):
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    inputs, outputs = declaration["inputs"], declaration["outputs"]
    received = [each for each in outputs if each["differentiable"]]
    declared = [*received, *inputs, *(each for each in outputs if each["saved"])] if is_backward else inputs
    given = [(each, tensor) for each, tensor in zip(declared, arguments)]
    mesh = next(tensor for _, tensor in given if isinstance(tensor, DTensorSpec)).mesh

    def rule(letters):
        """Placements of the results and of the arguments; None where the sizes do not allow it."""
        places = []
        for each, tensor in given:
            if not isinstance(tensor, DTensorSpec):
                places.append(None)
                continue
            place = _place(each, tensor, letters, Replicate())
            if isinstance(place, Shard) and any(tensor.shape[place.dim] % mesh.size(i) for i in range(mesh.ndim)):
                return None
            places.append(place)
        if not any(isinstance(place, Shard) for place in places):
            return None
        results = []
        if is_backward:  # a gradient of what every shard reads is a sum over the shards
            wanted = iter(keywords["wanted"])
            first = len(received)
            for i, each in enumerate(inputs):
                if each["differentiable"]:
                    tensor = arguments[first + i] if first + i < len(arguments) else None
                    is_there = next(wanted) and isinstance(tensor, DTensorSpec)
                    results.append(_place(each, tensor, letters, Partial()) if is_there else Replicate())
        else:
            for each in outputs:
                if on_request(each) and not keywords.get("return_" + each["name"]):
                    results.append(Replicate())  # empty
                elif places_of(each, letters) is None:
                    return None
                else:
                    results.append(Shard(places_of(each, letters)))
        return results, places

    def places_of(each, letters):
        return next((i for i, letter in enumerate(each["shape"]) if letter.split("*")[0] in letters), None)

    count = sum(each["differentiable"] for each in inputs) if is_backward else len(outputs)
    whole = [Replicate()] * count, [Replicate() if isinstance(tensor, DTensorSpec) else None for _, tensor in given]
    packed = any(each["name"].startswith("cu_seqlens") and tensor is not None for each, tensor in given)
    rules = [rule(HEADS)] if packed else [rule(BATCH), rule(HEADS)]
    return [whole, *(each for each in rules if each is not None)]


@functools.cache
def register_with_dtensor():
    """Tells torch.distributed.tensor how Linnet's operators are sharded: over the rows of a batch and over heads.

    DTensor inputs then stay sharded through linnet.softmax, linnet.gla, ...; other placements are gathered first.
    """
    import torch
    from torch.distributed.tensor.experimental import register_sharding

    for name, declaration in DECLARATIONS.items():
        if declaration["mechanism"] not in MECHANISMS or any(each["mutated"] for each in declaration["inputs"]):
            continue
        if len(declaration["outputs"]) == 0 or not declaration["differentiable"]:
            continue
        register_sharding(getattr(torch.ops.linnet, name).default)(functools.partial(_shardings, declaration, False))
        register_sharding(getattr(torch.ops.linnet, name + "_backward").default)(functools.partial(_shardings, declaration, True))
