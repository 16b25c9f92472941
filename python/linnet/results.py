"""Repeats the papers' comparisons: several layers on one task, the same settings for each, best of a few learning rates.

    python -m linnet.results                               # what there is
    python -m linnet.results mqar                          # the small protocol, minutes on one core
    python -m linnet.results mqar --only deltanet mamba2   # rows of it
    python -m linnet.results zoology --jobs 4 --beside 6   # for a GPU: 24 runs at once
    python -m linnet.results zoology --full                # the task's full protocol

A cell of the table is a few runs of linnet.train below runs/results/NAME: a finished run is not repeated, a killed one goes on.
Learning rates are compared with seed 0, by the best validation score; the best one is run with seeds 1, 2 and so on, and these alone are
counted: the table has the mean of their test scores and, in brackets, the least and the greatest. A star is a cell whose only run is the
one that chose the rate. `linnet report` draws the runs.
Exit codes: 0 done, 2 bad input, 3 not possible here (a file of data is missing).
"""

import dataclasses
import json
import math
import pathlib
import statistics
import sys
import time
import types

from ._comparison import DATA
from ._comparisons import COMPARISONS
from ._results_runs import Request, alone, side_by_side
from ._train_settings import hint, read_settings
from .train import Parser, Settings, stop

# What a task reads, which the full protocol does not change.
DATA_OPTIONS = ("path", "labels", "protocol", "lookback", "horizon", "patch", "positions")


def settings_of(task, arm, rate, seed, full):
    """Settings of one run: the comparison's small ones, or the task's full protocol with the arm's own options."""
    name, words = task
    layer, own = arm
    if full:
        words = {key: value for key, value in words.items() if key.rpartition(".")[2] in DATA_OPTIONS}
    words = {**words, **own, "lr": rate, "seed": seed}
    given = [[f"{key}={value}" for key, value in words.items()]]
    return read_settings(Settings(), types.SimpleNamespace(task=name, layer=layer, set=given, config=None, full=full))


def value_of(result):
    return None if result["score"] is None else result["test"][result["score"]]


def cell(comparison, request, seeds):
    """The runs of one arm on one task, as a generator: it gives lists of runs and gets their results (None: not run). Returns
    {"rate", "results", "folders", "values", "chosen by it"}."""
    first = [request(rate, 0) for rate in comparison.rates]
    tried = dict(zip(comparison.rates, zip((yield first), first)))
    good = {rate: each for rate, each in tried.items() if each[0] is not None and each[0]["score"] is not None}
    if not good:
        return {"rate": None, "runs": [], "values": [], "own": False, "diverged": any(each[0] is not None for each in tried.values())}
    falls = next(iter(good.values()))[0]["score"] != "accuracy"

    def score(result):  # the validation's; of a run that a deadline ended before its first one, the test's
        return value_of(result) if result["best"] is None else result["best"]

    rate = min(good, key=lambda each: score(good[each][0]) * (1 if falls else -1))
    chosen = len(comparison.rates) > 1  # the seed that chose the rate is not counted: its score leans upwards
    more = [request(rate, seed) for seed in (range(1, seeds + 1) if chosen else range(1, seeds))]
    runs = list(zip((yield more), more))
    # A run that the deadline cut short does not stand beside one that was not.
    runs = [each for each in runs if each[0] is not None and each[0]["score"] is not None and "planned_steps" not in each[0]]
    runs = runs if chosen else [good[rate], *runs]
    own = chosen and not runs
    runs = runs or [good[rate]]
    return {"rate": rate, "runs": runs, "values": [value_of(each[0]) for each in runs], "own": own, "diverged": False}


def run_cells(cells, execute):
    """Lets all cells run: `execute` takes the requests that are ready and gives (request, result) as they end."""
    done, waiting, got = {}, {}, {}

    def go_on(key, answer):
        try:
            asked = cells[key].send(answer)
        except StopIteration as end:
            done[key] = end.value
            return []
        waiting[key], got[key] = list(asked), {}
        return asked if asked else go_on(key, [])

    owner, first = {}, []
    for key in cells:
        first.append(go_on(key, None))
        owner.update(dict.fromkeys(first[-1], key))
    # Every cell's first run, then every cell's second one: a deadline takes from all cells alike.
    ready = [each[i] for i in range(max(map(len, first))) for each in first if i < len(each)]
    execute.send(None)
    finished = execute.send(ready)
    while finished is not None:
        request, result = finished
        key, ready = owner[request], []
        got[key][request] = result
        if len(got[key]) == len(waiting[key]):
            for other in go_on(key, [got[key][each] for each in waiting[key]]):
                owner[other] = key
                ready.append(other)
        try:
            finished = execute.send(ready)
        except StopIteration:
            finished = None
    return done


def number(x):
    if 0 < abs(x) < 1e-3:
        return f"{x:.0e}"
    return f"{x:.4f}" if abs(x) < 0.1 else f"{x:.3f}"


def spread(values):
    if not values:
        return "diverged"
    return number(statistics.mean(values)) + (f" ({number(min(values))} to {number(max(values))})" if len(values) > 1 else "")


def table(comparison, cells, references):
    """Markdown: a row for each arm, a column for each task."""
    every = [each for row in cells.values() for each in row.values()]
    measures = list(next((each["runs"][0][0]["beside"] for each in every if each["runs"] and comparison.measure), {}))
    heading = ["layer", "parameters", "state, KiB", *comparison.columns, *(["mean"] if comparison.mean else []), *(["published"] if comparison.published else []), "lr", *measures, "steps", "s a run"]
    lines = ["| " + " | ".join(heading) + " |", "|" + "---|" * len(heading)]
    for label, row in cells.items():
        results = [result for each in row.values() for result, _ in each["runs"]]
        if not results:
            why = "diverged" if any(each["diverged"] for each in row.values()) else "not run"
            lines.append(f"| {label} | {why} |" + " |" * (len(heading) - 2))
            continue
        bytes_ = results[0]["state_bytes"]
        beside = [spread([result["beside"][name] for result in results if "beside" in result]) for name in measures]
        rates = ["-" if each["rate"] is None else f"{each['rate']:g}" for each in row.values()]
        rates = rates[0] if len(set(rates)) == 1 else ", ".join(rates)
        means = [statistics.mean(each["values"]) for each in row.values() if each["values"]]
        complete = number(statistics.mean(means)) if len(means) == len(row) else "-"
        steps = sorted({result["steps"] for result in results})
        lines.append("| " + " | ".join([label, str(results[0]["parameters"]), "-" if bytes_ is None else f"{bytes_ / 1024:.1f}",
                                        *(spread(each["values"]) + "*" * each["own"] for each in row.values()), *([complete] if comparison.mean else []),
                                        *([f"{comparison.published.get(label, '')}"] if comparison.published else []),
                                        rates, *beside, str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}",
                                        f"{statistics.mean(result['seconds'] for result in results):.0f}"]) + " |")  # fmt: skip
    for label, values in references.items():
        lines.append(f"| {label} | | | " + " | ".join(number(value) for value in values) + " |" + " |" * (len(heading) - 3 - len(values)))
    return "\n".join(lines)


def written(execute, path):
    """Passes requests and results on, and keeps all results in a file, whole after each."""
    rows, finished = [], next(execute)
    while True:
        ready = yield finished
        try:
            finished = execute.send(ready)
        except StopIteration:
            return
        if path:
            asked, result = finished
            rows.append({"comparison": asked.comparison, "column": asked.column, "row": asked.label, "lr": asked.rate, "seed": asked.seed, "result": result})
            pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
            pathlib.Path(path).write_text(json.dumps(rows) + "\n")


def main(arguments=None):
    parser = Parser("linnet.results", usage="python -m linnet.results [NAME] [--only LAYER ...] [--full] [--out FOLDER]", description=__doc__.split("\n")[0])
    parser.add_argument("name", nargs="?", help="the comparison; without it they are listed")
    parser.add_argument("--only", nargs="+", metavar="ROW", help="these rows alone")
    parser.add_argument("--columns", nargs="+", metavar="COLUMN", help="these tasks alone")
    parser.add_argument("--seeds", type=int, help="instead of the comparison's own number")
    parser.add_argument("--full", action="store_true", help="the tasks' full protocols instead of the small ones")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of every run, such as device=cuda or threads=1")
    parser.add_argument("--out", metavar="FOLDER", default="runs/results", help="where the runs go")
    parser.add_argument("--jobs", type=int, default=1, help="processes that train")
    parser.add_argument("--beside", type=int, default=1, help="runs that share a GPU in each of them")
    parser.add_argument("--deadline", type=float, default=math.inf, metavar="S", help="after so many seconds runs stop where they are, and the table is made of what there is")
    parser.add_argument("--json", metavar="FILE", help="write all results there, after each run")
    parser.add_argument("--quiet", action="store_true", help="print the table alone")
    args = parser.parse_args(arguments)
    if not args.name:
        for name, each in COMPARISONS.items():
            print(f"{name:14}{each.claim}\n{'':14}rows: {', '.join(each.arms)}\n{'':14}tasks: {', '.join(each.columns)}")
        return 0
    if args.name not in COMPARISONS:
        return stop(2, f"there is no comparison {args.name!r}{hint(args.name, list(COMPARISONS))}")
    comparison = COMPARISONS[args.name]
    for what, chosen, known in (("row", args.only, comparison.arms), ("task", args.columns, comparison.columns)):
        for each in chosen or []:
            if each not in known:
                return stop(2, f"{args.name} has no {what} {each!r}{hint(each, list(known))}")
    for file in comparison.data:
        if not (DATA / file).exists():
            return stop(3, f"{DATA / file} is not there: tools/fetch.py {file.split('/')[0]} brings it")
    extra = dict(word.partition("=")[::2] for word in args.set)
    columns = {key: (task, {**words, **extra}) for key, (task, words) in comparison.columns.items() if key in (args.columns or comparison.columns)}
    comparison = dataclasses.replace(comparison, columns=columns)
    say = (lambda _: None) if args.quiet else lambda text: print(text, file=sys.stderr, flush=True)
    place = pathlib.Path(args.out) / args.name / ("full" if args.full else "small")
    deadline = time.monotonic() + args.deadline

    def request(column, label):
        def at(rate, seed):
            settings = settings_of(comparison.columns[column], comparison.arms[label], rate, seed, args.full)
            folder = place / column / label.replace(",", "+") / f"lr-{rate:g}-seed-{seed}"
            return Request(args.name, column, label, rate, seed, str(folder), settings)

        return at

    try:
        labels = args.only or list(comparison.arms)
        keys = [(label, column) for column in columns for label in labels]
        made = {key: cell(comparison, request(key[1], key[0]), comparison.seeds if args.seeds is None else args.seeds) for key in keys}
        execute = alone(say, deadline) if args.jobs == 1 and args.beside == 1 else side_by_side(args.jobs, args.beside, say, deadline)
        done = run_cells(made, written(execute, args.json))
    except (ValueError, TypeError) as problem:
        return stop(2, problem)
    except OSError as problem:
        return stop(3, f"{problem.filename or args.out}: {problem.strerror}")
    except RuntimeError as problem:
        return stop(3, problem)
    cells = {label: {column: done[label, column] for column in columns} for label in labels}
    references = comparison.reference(columns) if comparison.reference and not args.only else {}
    print(table(comparison, cells, references))
    folders = [asked.folder for row in cells.values() for each in row.values() for _, asked in each["runs"][:1]]
    if folders:
        say("\nlinnet report " + " ".join(folders))
    return 0


if __name__ == "__main__":
    sys.exit(main())
