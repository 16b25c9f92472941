"""Which candidate of which layer: measured damage under a budget, as a knapsack; and the numbers before and after."""

import math

import torch

from . import attention


class OverBudget(ValueError):
    """No choice is cheap enough."""


def label(mechanism, options):
    """A text for a candidate: "window 256 + 4"."""
    names = [str(value) if name in ("window", "arity", "block") else f"{name}={value}" for name, value in options.items() if name != "sinks"]
    return " ".join([mechanism, *names]) + (f" + {options['sinks']}" if options.get("sinks") else "")


def knapsack(costs, damages, budget, steps=2000):
    """One option of every layer with the least sum of damages and a sum of costs of at most `budget`. costs, damages: a list for
    each layer. Costs are rounded up to budget / steps, so the budget holds; ties: the smaller cost, then the earlier option."""
    least = sum(min(layer) for layer in costs)
    if least > budget * (1 + 1e-12):
        raise OverBudget(f"the budget cannot be met: the cheapest choice costs {least / budget:.3f} times as much")
    unit = budget / steps
    size = [[min(math.ceil(cost / unit - 1e-9), steps + 1) for cost in layer] for layer in costs]
    if sum(min(layer) for layer in size) > steps:
        raise OverBudget("the budget leaves no room for the cheapest choice of every layer")
    infinite = (math.inf, math.inf)
    best, picks = [(0.0, 0.0)] + [infinite] * steps, []
    for weights, cost, damage in zip(size, costs, damages, strict=True):
        now, pick = [infinite] * (steps + 1), [-1] * (steps + 1)
        for option, weight in enumerate(weights):
            for room in range(weight, steps + 1):
                before = best[room - weight]
                value = (before[0] + damage[option], before[1] + cost[option])
                if value < now[room]:
                    now[room], pick[room] = value, option
        best, picks = now, [*picks, pick]
    room = min(range(steps + 1), key=lambda r: (best[r], r))
    chosen = []
    for weights, pick in zip(reversed(size), reversed(picks), strict=True):
        chosen.append(pick[room])
        room -= weights[pick[room]]
    return chosen[::-1]


@torch.no_grad()
def compare(fit, blocks, teacher_hidden=None, teacher_head=None):
    """Means over the tokens of blocks: KL(teacher || model) and both losses; encoders: 1 - cosine of hidden states as `kl`."""
    total = {"kl": 0.0, "loss": 0.0, "teacher_loss": 0.0, "agree": 0.0}
    count = scored = 0
    head = fit.model.get_output_embeddings() if hasattr(fit.model, "get_output_embeddings") else None
    teacher_head = teacher_head or head
    for number, block in enumerate(blocks):
        block = block[None]
        theirs = teacher_hidden[number] if teacher_hidden is not None else teacher_states(fit, block)[0]
        mine = fit.body(fit.model, block)
        if head is None:
            total["kl"] += float((1 - torch.nn.functional.cosine_similarity(mine.float(), theirs.float(), dim=-1)).sum())
            count += mine.shape[1]
            continue
        labels = block.to(fit.device)[0, 1:]
        for begin in range(0, block.shape[1], fit.settings.head_chunk):
            part = slice(begin, begin + fit.settings.head_chunk)
            with fit.cast():
                p, q = teacher_head(theirs[0, part]), head(mine[0, part])
            p, q = p.float().log_softmax(-1), q.float().log_softmax(-1)
            total["kl"] += float((p.exp() * (p - q)).sum())
            total["agree"] += float((p.argmax(-1) == q.argmax(-1)).sum())
            count += len(p)
            wanted = labels[part]
            rows = torch.arange(len(wanted), device=fit.device)
            total["teacher_loss"] -= float(p[rows, wanted].sum())
            total["loss"] -= float(q[rows, wanted].sum())
            scored += len(wanted)
    result = {"kl": total["kl"] / count}
    if head is not None:
        result |= {"loss": total["loss"] / scored, "teacher_loss": total["teacher_loss"] / scored, "agree": total["agree"] / count}
        result["perplexity_ratio"] = math.exp(result["loss"] - result["teacher_loss"])
    return result


@torch.no_grad()
def teacher_states(fit, blocks):
    """Final hidden states of the teacher, one tensor for each block."""

    def visit(module, query, key, value, scaling, options, teach, read):
        return teach()

    with attention.visiting(visit):
        return [fit.body(fit.model, block[None]) for block in blocks]


def measure(fit, blocks):
    """KL that each candidate does alone, {layer: {key: KL}}."""
    states = teacher_states(fit, blocks)
    damage = {}
    for site in fit.sites:
        damage[site.index] = {}
        for key, mixer in site.candidates.items():
            if mixer.mechanism == "softmax":
                damage[site.index][key] = 0.0
                continue
            site.mixer = mixer
            damage[site.index][key] = max(compare(fit, blocks, states)["kl"], 0.0)
            site.mixer = None
    return damage


def choose(fit, budget, length):
    """Leaves one candidate in every layer, and makes it the layer's mixer."""
    if not fit.facts.get("chosen"):
        damage = measure(fit, fit.parts["held_out"][: fit.settings.held_out])
        keys = [list(site.candidates) for site in fit.sites]
        costs = [[site.cost(m.mechanism, m.options, length) for m in site.candidates.values()] for site in fit.sites]
        whole = sum(site.cost("softmax", {}, length) for site in fit.sites)
        if budget >= 1 and all(any(m.mechanism == "softmax" for m in site.candidates.values()) for site in fit.sites):
            picks = [next(i for i, m in enumerate(site.candidates.values()) if m.mechanism == "softmax") for site in fit.sites]
        else:
            picks = knapsack(costs, [[damage[site.index][key] for key in each] for site, each in zip(fit.sites, keys, strict=True)],
                             budget * whole)  # fmt: skip
        for site, each, pick in zip(fit.sites, keys, picks, strict=True):
            site.candidates = {each[pick]: site.candidates[each[pick]]}
        fit.facts["chosen"] = True
        fit.facts["damage"] = {str(index): values for index, values in damage.items()}
        fit.facts["cost"] = sum(cost[pick] for cost, pick in zip(costs, picks, strict=True)) / whole
        fit.save("between", {})
    settle(fit)


def settle(fit):
    """The one candidate of every layer becomes its mixer; softmax needs none."""
    for site in fit.sites:
        (mixer,) = site.candidates.values()
        site.mixer = None if mixer.mechanism == "softmax" else mixer
