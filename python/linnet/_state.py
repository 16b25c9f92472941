"""What layers remember of the tokens they have seen, and the calls that carry it on.

    state = model.make_state(rows=2)             # or layer.make_state
    logits = model(prompt, state=state)          # [2, T]: a prompt, or a piece of one
    logits = model.step(token, state)            # [2]: one more token of each row
    state.reorder([1, 1])                        # both rows continue the second one, as a beam search wants it

A state holds the states of convolutions and recurrences and the caches of keys and values, named <step>.<tensor> as in
`linnet info LAYER`, rows first. Rows may have seen different numbers of tokens. Tensors appear with the first call.
"""

import contextlib
import copy

import torch

from ._library import DECLARATIONS
from ._ops import FUNCTIONS, on_demand

DECODE_TOKENS = 4  # up to so many tokens at once, operators run in their decode form
TOKENS = {"T", "S", "Tq", "Tk", "Tg"}  # letters of declarations that count tokens
# Options of the forward alone: how it computes, or what a continuation is by itself (src/layers/state.cc).
IMPLIED = {"causal", "form", "block", "steps", "pad", "key_top", "position"}


class State:
    """The memory of a layer or a model for so many rows; caches have room for `capacity` tokens and grow when they are full."""

    def __init__(self, rows=1, capacity=64):
        self.rows, self.capacity = rows, max(capacity, 1)
        self.lengths = [0] * rows  # tokens that each row has seen
        self.parts = []  # tensors of each layer, by name

    @property
    def is_even(self):
        return all(length == self.lengths[0] for length in self.lengths)

    @property
    def nbytes(self):
        return sum(tensor.nbytes for part in self.parts for tensor in part.values())

    def copy(self):
        other = copy.copy(self)
        other.lengths = list(self.lengths)
        other.parts = [{name: tensor.clone() for name, tensor in part.items()} for part in self.parts]
        return other

    def reset(self):
        """As before the first token."""
        self.lengths, self.parts = [0] * self.rows, []

    def reorder(self, rows):
        """Row i continues what was row rows[i]; there may be more or fewer rows than before."""
        rows = [int(row) for row in rows]
        self.lengths, self.rows = [self.lengths[row] for row in rows], len(rows)
        for part in self.parts:
            for name, tensor in part.items():
                part[name] = tensor.index_select(0, torch.tensor(rows, device=tensor.device))
        return self

    def detach(self):
        """Cuts the graph behind the state: the next call's gradients end here."""
        for part in self.parts:
            part.update({name: tensor.detach() for name, tensor in part.items()})
        return self

    def to(self, *where):
        for part in self.parts:
            part.update({name: tensor if tensor.dtype == torch.int64 else tensor.to(*where) for name, tensor in part.items()})
        return self

    def __repr__(self):
        return f"State(rows={self.rows}, lengths={self.lengths}, {self.nbytes} bytes)"


def _shape(spec, specs, rows, capacity):
    block = next((each["shape"][1] for each in specs if each["name"] == spec["step"] + ".q_block"), 1)  # monarch counts blocks
    room = -(-capacity // block)
    return [{"B": rows, "capacity": room}.get(size, size) for size in spec["shape"]]


def _initial(op, name, tensor):
    """Running maxima of logarithms begin at -inf, all else at 0."""
    if (op, name) in {("distill_decode", "c"), ("distill_hybrid_decode", "c"), ("fem_read_decode", "shift"), ("features_decode", "top")}:
        tensor.fill_(-torch.inf)
    elif (op, name) == ("fem_read_decode", "sums"):
        tensor[..., -1, :] = -torch.inf
    return tensor


def _call(op, arguments, output, more=()):
    """The output of an operator by name, and others beside it."""
    declaration = DECLARATIONS[op]
    choosable = on_demand(declaration)
    always = [each["name"] for each in declaration["outputs"] if each["name"] not in choosable]
    chosen = [name for name in choosable if name in more or name == output]
    results = FUNCTIONS[op](**arguments, **{"return_" + name: True for name in chosen})
    results = dict(zip(always + chosen, results if isinstance(results, tuple) else (results,)))
    return results[output], [results[name] for name in more]


def _find(tensors, *names):
    known = {each["name"] for each in tensors}
    return next((name for name in names if name in known), None)


_trees = None  # of the calls inside `trees`


@contextlib.contextmanager
def trees(parents):
    """Inside, hierarchical attention sees each sequence of a masked or packed call as the tree that is given for it, not in windows:

        with linnet.nn.trees([parent, ...]):           # for each sequence, parent [nodes] as linnet.hierarchical takes it
            y = model(ids, mask=mask)
    """
    global _trees
    before, _trees = _trees, list(parents)
    try:
        yield
    finally:
        _trees = before


def has_kernel(op, device):
    return device.type in ("cpu", "meta") or any(each["device"] == device.type for each in DECLARATIONS[op]["implementations"])


class Run:
    """One call: x [B, T, ..] with a state of B rows, or x [1, total, ..] with the offsets of its sequences and a state of as many.

    Layers hand their operators that look at other tokens to it: run(step, operator, output, **arguments).
    """

    def __init__(self, x, state=None, offsets=None):
        self.state, self.offsets, self.index, self.tokens = state, offsets, -1, x.shape[1]
        self.cu_seqlens = None if offsets is None else torch.tensor(offsets, device=x.device)
        rows = x.shape[0] if offsets is None else len(offsets) - 1
        self.counts = [x.shape[1]] * rows if offsets is None else [end - begin for begin, end in zip(offsets, offsets[1:])]
        if state is not None and state.rows != rows:
            raise ValueError(f"linnet.nn: the state has {state.rows} rows, expected {rows} (the {'rows' if offsets is None else 'sequences'} of x)")
        seen = [0] * rows if state is None else state.lengths
        if offsets is None:
            starts = torch.tensor(seen[:1] if len(set(seen)) == 1 else seen, device=x.device)[:, None]
            self.positions = (starts + torch.arange(self.tokens, device=x.device)).expand(rows, -1)
        else:
            parts = [torch.arange(first, first + count, device=x.device) for first, count in zip(seen, self.counts)]
            self.positions = torch.cat(parts)[None] if parts else torch.zeros(1, 0, dtype=torch.int64, device=x.device)
        if state is not None:
            tokens = max((a + b for a, b in zip(seen, self.counts)), default=0)
            if tokens > state.capacity:  # caches double when they are full
                state.capacity = max(2 * state.capacity, tokens)

    def enter(self, layer):
        """The memory of the next layer."""
        self.index += 1
        self.specs = layer.states
        if self.state is not None:
            if layer.why_not:
                raise NotImplementedError(layer.why_not)
            while len(self.state.parts) <= self.index:
                self.state.parts.append({})
        return self

    def finish(self):
        if self.state is not None:
            self.state.lengths = [a + b for a, b in zip(self.state.lengths, self.counts)]

    def memory(self, step, decode, like):
        """The state tensors of a step by the names of the decode operator's inputs."""
        part, found = self.state.parts[self.index], {}
        elements = {each["name"]: each["element"] for each in DECLARATIONS[decode]["inputs"]}
        for spec in self.specs:
            if spec["step"] != step:
                continue
            key = spec["name"].removeprefix(step + ".")
            shape = _shape(spec, self.specs, self.state.rows, self.state.capacity)
            tensor = part.get(spec["name"])
            if tensor is None or any(size < wanted for size, wanted in zip(tensor.shape, shape)):
                acc = torch.float64 if like.dtype == torch.float64 else torch.float32
                dtype = {"index": torch.int64, "io": like.dtype}.get(elements[key], acc)
                fresh = _initial(decode, key, torch.zeros(shape, dtype=dtype, device=like.device))
                if tensor is not None:
                    fresh[tuple(slice(size) for size in tensor.shape)] = tensor
                tensor = fresh
            found[key] = tensor
        return found

    def __call__(self, step, op, output, /, **arguments):
        declaration = DECLARATIONS[op]
        known = {each["name"]: each for each in declaration["inputs"]}
        inputs = {name: value for name, value in arguments.items() if name in known and value is not None}
        options = {name: value for name, value in arguments.items() if name not in known}
        first = next(inputs[name] for name, each in known.items() if name in inputs and each["element"] == "io")
        if torch.is_autocast_enabled(first.device.type) and first.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(first.device.type)
            inputs = {name: value.to(dtype) if known[name]["element"] == "io" else value for name, value in inputs.items()}
            first = first.to(dtype)
        along = [name for name in inputs if len(known[name]["shape"]) > 1 and known[name]["shape"][1] in TOKENS]
        if self.state is None:
            return self.packed(op, output, inputs, options, along)
        memory = self.memory(step, declaration["decode"], first)
        result, memory = self.carry(op, output, inputs, options, along, memory)
        self.state.parts[self.index].update({f"{step}.{name}": tensor for name, tensor in memory.items()})
        return result

    def cut(self, inputs, along, row):
        """The inputs of one row or sequence."""
        if self.offsets is None:
            return {name: value[row : row + 1] if name in along else value for name, value in inputs.items()}
        begin, end = self.offsets[row], self.offsets[row + 1]
        return {name: value[:, begin:end] if name in along else value for name, value in inputs.items()}

    def packed(self, op, output, inputs, options, along):
        """Sequences end to end; those of operators that know no offsets run one after the other."""
        if self.offsets is None:
            if _trees is not None and op == "hierarchical":
                raise ValueError("linnet.nn: trees are for calls with mask or cu_seqlens")
            return _call(op, {**inputs, **options}, output)[0]
        given = [{}] * len(self.counts)
        if _trees is not None and op == "hierarchical":
            if len(_trees) != len(self.counts):
                raise ValueError(f"linnet.nn: there are {len(_trees)} trees, expected {len(self.counts)} (the sequences of x)")
            given = [{"parent": torch.as_tensor(tree)} for tree in _trees]
        declared = DECLARATIONS[op]["inputs"]
        names = [name for name in ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k") if _find(declared, name)]
        if names:
            return _call(op, {**inputs, **options, **dict.fromkeys(names, self.cu_seqlens)}, output)[0]
        rows = [row for row, count in enumerate(self.counts) if count > 0]
        return torch.cat([_call(op, {**self.cut(inputs, along, row), **options, **given[row]}, output)[0] for row in rows], 1)

    def carry(self, op, output, inputs, options, along, memory):
        """The operator over the new tokens of every row, its memory before and after."""
        declaration = DECLARATIONS[op]
        initial = [_find(declaration["inputs"], "initial_" + name, name) for name in memory]
        final = [_find(declaration["outputs"], "final_" + name, name) for name in memory]
        lengths = self.state.lengths
        if self.offsets is not None:
            if all(initial) and all(final) and _find(declaration["inputs"], "cu_seqlens"):
                carried = {**inputs, **options, **dict(zip(initial, memory.values())), "cu_seqlens": self.cu_seqlens}
                result, after = _call(op, carried, output, final)
                return result, dict(zip(memory, after))
            if _find(declaration["inputs"], "cu_seqlens_q") and not any(lengths):
                kept = [_still_seen(options, count) for count in self.counts]
                for row, begin in enumerate(self.offsets[:-1]):
                    for name in memory:
                        if name != "lengths":
                            fresh = inputs[name.removesuffix("_cache")][0, begin : self.offsets[row + 1]]
                            memory[name] = _written(memory[name], row, _kept(fresh[None], *kept[row])[0])
                memory["lengths"] = torch.tensor([first + last for first, last in kept], device=memory["lengths"].device)
                offsets = {"cu_seqlens_q": self.cu_seqlens, "cu_seqlens_k": self.cu_seqlens}
                return _call(op, {**inputs, **options, **offsets}, output)[0], memory
        decode = declaration["decode"]
        placed = any(each["name"] == "position" and each["kind"] == "integer" for each in DECLARATIONS[decode]["options"])
        if self.offsets is None and (self.state.is_even or not placed):
            position = lengths[0] if self.state.is_even else None
            return _advance(op, output, inputs, options, along, memory, initial, final, position, self.tokens)
        results, rows = [], []
        for row, count in enumerate(self.counts):
            own = {name: tensor[row : row + 1] for name, tensor in memory.items()}
            if count > 0:
                given = self.cut(inputs, along, row)
                result, own = _advance(op, output, given, options, along, own, initial, final, lengths[row], count)
                results.append(result)
            rows.append(own)
        return torch.cat(results, 0 if self.offsets is None else 1), {name: torch.cat([own[name] for own in rows]) for name in memory}


def _still_seen(options, tokens):
    """Of so many cached tokens, how many of the first and of the last ones a later query may still see."""
    left = (options.get("window") or (-1, -1))[0]
    if left < 0:
        return 0, tokens
    first = min(tokens, options.get("prefix", 0))
    return first, min(tokens - first, left)


def _kept(cache, first, last):
    """The first and the last tokens of a cache [B, T, ..]."""
    whole = first + last == cache.shape[1]
    return cache if whole else torch.cat([cache[:, :first], cache[:, cache.shape[1] - last :]], 1)


def _written(cache, row, values):
    """The cache with these values at the beginning of a row; a new tensor where gradients flow."""
    if torch.is_grad_enabled() and (cache.requires_grad or values.requires_grad):
        cache = cache.clone()
    cache[row, : values.shape[0]] = values
    return cache


def _compact(memory, options, tokens):
    """Where a cache that keeps a window has no room for the new tokens, the keys that are still seen move up."""
    lengths = memory["lengths"]
    size = min(cache.shape[1] for name, cache in memory.items() if name != "lengths")
    if int(lengths.max()) + tokens <= size:
        return memory
    first, last = _still_seen(options, size)
    place = torch.arange(first + last, device=lengths.device)
    moved = torch.where((place >= first) & (lengths[:, None] > first + last), lengths[:, None] - first - last + place, place)
    made = {"lengths": lengths.clamp(max=first + last)}
    for name, cache in memory.items():
        if name != "lengths":
            made[name] = torch.zeros_like(cache)
            index = moved[..., None, None].expand(-1, -1, *cache.shape[2:])
            made[name][:, : first + last] = cache.gather(1, index)
    return {name: made[name] for name in memory}


def _advance(op, output, inputs, options, along, memory, initial, final, position, tokens):
    """An operator over tokens of rows that have all seen `position` tokens (None: different numbers), as src/layers/plan.cc does:
    in its decode form for few tokens, else itself with states in and out or with its caches."""
    declaration, decode = DECLARATIONS[op], DECLARATIONS[op]["decode"]
    device = next(iter(inputs.values())).device
    traced = torch.is_grad_enabled() and any(each.requires_grad for each in (*inputs.values(), *memory.values()))
    few = tokens <= DECODE_TOKENS and not traced and has_kernel(decode, device)
    if not few and all(initial) and all(final):
        result, after = _call(op, {**inputs, **options, **dict(zip(initial, memory.values()))}, output, final)
        return result, dict(zip(memory, after))
    caches = {name: name.removesuffix("_cache") for name in memory if name != "lengths"}
    is_cached = all(name.endswith("_cache") and value in inputs for name, value in caches.items())
    q = next((each for each in declaration["inputs"] if each["name"] == "q"), {"shape": []})
    has_window = "lengths" in memory and (options.get("window") or (-1, -1))[0] >= 0
    held = 0 if position == 0 else position
    if has_window and position:
        held = int(memory["lengths"][0]) if bool((memory["lengths"] == memory["lengths"][0]).all()) else None
    if not few and is_cached and held is not None and (position == 0 or "Tq" in q["shape"]):
        given, kept = dict(inputs), _still_seen(options, held + tokens)
        for name, value in caches.items():
            if traced or has_window:
                given[value] = torch.cat([memory[name][:, :held], inputs[value]], 1)
                rest = _kept(given[value], *kept)
                memory[name] = rest if traced else torch.cat([rest, memory[name][:, rest.shape[1] :]], 1)
            else:
                memory[name][:, held : held + tokens] = inputs[value]
                given[value] = memory[name][:, : held + tokens]
        memory["lengths"] = torch.full_like(memory["lengths"], sum(kept))
        return _call(op, {**given, **options}, output)[0], memory
    if not few and all(final) and position == 0:
        result, after = _call(op, {**inputs, **options}, output, final)
        return result, dict(zip(memory, after))
    if traced and position == 0:  # the first tokens have their gradients; what is remembered of them carries none
        with torch.no_grad():
            plain = {name: value.detach() for name, value in inputs.items()}
            _, memory = _advance(op, output, plain, options, along, memory, initial, final, position, tokens)
        return _call(op, {**inputs, **options}, output)[0], memory
    known = {each["name"]: each for each in DECLARATIONS[decode]["options"]}
    settings = {name: value for name, value in options.items() if name in known}
    if "mode" in known and "mode" not in {each["name"] for each in declaration["options"]}:
        settings["mode"] = op[len(declaration["mechanism"]) + 1 :]
    if "form" in known and output.startswith("out_"):  # out_sliding, out_terraced: results of their own of the forward
        settings["form"] = output.removeprefix("out_")
    if "position" in known:
        settings["position"] = position
    memory = {name: tensor.contiguous() for name, tensor in memory.items()}
    if not has_window:
        return FUNCTIONS[decode](**inputs, **settings, **memory), memory
    results = []
    for begin in range(0, tokens, DECODE_TOKENS):  # a cache that keeps a window has room for a few tokens
        part = {name: value[:, begin : begin + DECODE_TOKENS] if name in along else value for name, value in inputs.items()}
        memory = _compact(memory, options, DECODE_TOKENS)
        results.append(FUNCTIONS[decode](**part, **settings, **memory))
    return torch.cat(results, 1), memory


def offsets_of(cu_seqlens, tokens):
    """Offsets as a list of numbers, checked."""
    offsets = [int(each) for each in cu_seqlens]
    if not offsets or offsets[0] != 0 or offsets[-1] != tokens or offsets != sorted(offsets):
        raise ValueError(f"linnet.nn: cu_seqlens are {offsets}, expected ascending numbers from 0 to {tokens}")
    return offsets


def pack(x, mask):
    """x [B, T, ..] and a mask [B, T] of its tokens -> them end to end [1, total, ..], their offsets, their places in x."""
    if mask.shape != x.shape[:2]:
        raise ValueError(f"linnet.nn: mask has shape {list(mask.shape)}, expected {list(x.shape[:2])} (the rows and tokens of x)")
    places = mask.to(torch.bool).flatten().nonzero().flatten()
    counts = mask.to(torch.bool).sum(1).tolist()
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + count)
    return x.flatten(0, 1)[places][None], offsets, places


def unpack(y, places, rows, tokens):
    """The opposite: [1, total, ..] -> [rows, tokens, ..], zeros at padding."""
    return y.new_zeros(rows * tokens, *y.shape[2:]).index_copy(0, places, y[0]).unflatten(0, (rows, tokens))


def call(function, x, state=None, cu_seqlens=None, mask=None):
    """function(x, run) over the tokens that there are; the state is carried on."""
    rows, tokens = x.shape[:2]
    if mask is not None and _trees is None and bool(mask.all()):
        mask = None
    if mask is not None:
        if cu_seqlens is not None:
            raise ValueError("linnet.nn: mask and cu_seqlens are both given, expected one of them")
        packed, offsets, places = pack(x, mask)
        run = Run(packed, state, offsets)
        y = unpack(function(packed, run), places, rows, tokens)
    elif cu_seqlens is not None:
        if rows != 1:
            raise ValueError(f"linnet.nn: x has {rows} rows, expected 1 with cu_seqlens")
        run = Run(x, state, offsets_of(cu_seqlens, tokens))
        y = function(x, run)
    else:
        run = Run(x, state)
        y = function(x, run)
    run.finish()
    return y
