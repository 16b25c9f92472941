"""Repeats the papers' comparisons: several layers on one task, the same settings for each, best of a few learning rates.

    python -m linnet.results                               # what there is
    python -m linnet.results mqar                          # the small protocol, minutes on one core
    python -m linnet.results mqar --only deltanet mamba2   # rows of it
    python -m linnet.results mqar --full                   # the task's full protocol, for a GPU

A cell of the table is a few runs of linnet.train below runs/results/NAME: a finished run is not repeated, a killed one goes on.
Learning rates are compared with seed 0, by the best validation score; the best one is run with seeds 1, 2 and so on, and these alone are
counted: the table has the mean of their test scores and, in brackets, the least and the greatest. `linnet report` draws the runs.
Exit codes: 0 done, 2 bad input, 3 not possible here (a file of data is missing).
"""

import dataclasses
import json
import pathlib
import statistics
import sys
import types

from ._comparisons import COMPARISONS, DATA
from ._train_settings import hint, read_settings
from .train import Parser, Run, Settings, stop, train

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


def run_once(settings, folder, measure, say):
    """The result of a run, trained or found finished in its folder. A run whose loss is no number any more has no score."""
    path, kept = folder / "result.json", folder / "settings.json"
    if path.exists() and json.loads(kept.read_text()) == dataclasses.asdict(settings):
        result = json.loads(path.read_text())
        if measure is None or "beside" in result:
            return result
    try:
        run = Run(settings, folder)
        result = train(run, say)
        if measure:
            result["beside"] = measure(run)
    except ArithmeticError as problem:
        say(str(problem))
        result = {"score": None, "diverged": str(problem)}
        folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    return result


def value_of(result):
    return None if result["score"] is None else result["test"][result["score"]]


def cell(comparison, name, column, label, seeds, full, out, say):
    """The runs of one arm on one task: {"rate", "runs", "values"}."""
    task, arm = comparison.columns[column], comparison.arms[label]

    def at(rate, seed):
        folder = out / name / ("full" if full else "small") / column / label.replace(",", "+") / f"lr-{rate:g}-seed-{seed}"
        say(f"{column}, {label}, lr {rate:g}, seed {seed}")
        return run_once(settings_of(task, arm, rate, seed, full), folder, comparison.measure, say), folder

    tried = {rate: at(rate, 0) for rate in comparison.rates}
    good = {rate: each for rate, each in tried.items() if each[0]["score"] is not None}
    if not good:
        return {"rate": None, "results": [], "folders": [], "values": []}
    falls = next(iter(good.values()))[0]["score"] != "accuracy"
    rate = min(good, key=lambda each: good[each][0]["best"] * (1 if falls else -1))
    chosen = len(comparison.rates) > 1  # the seed that chose the rate is not counted: its score leans upwards
    runs = [at(rate, seed) for seed in range(1, seeds + 1)] if chosen else [good[rate], *(at(rate, seed) for seed in range(1, seeds))]
    runs = [each for each in runs if each[0]["score"] is not None]
    return {"rate": rate, "results": [each[0] for each in runs], "folders": [str(each[1]) for each in runs], "values": [value_of(each[0]) for each in runs]}


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
    measures = list(next((each["results"][0]["beside"] for row in cells.values() for each in row.values() if each["results"] and comparison.measure), {}))
    heading = ["layer", "parameters", "state, KiB", *comparison.columns, "lr", *measures, "s a run"]
    lines = ["| " + " | ".join(heading) + " |", "|" + "---|" * len(heading)]
    for label, row in cells.items():
        results = [result for each in row.values() for result in each["results"]]
        if not results:
            lines.append(f"| {label} | diverged |" + " |" * (len(heading) - 2))
            continue
        bytes_ = results[0]["state_bytes"]
        beside = [spread([result["beside"][name] for result in results]) for name in measures]
        rates = ", ".join("-" if each["rate"] is None else f"{each['rate']:g}" for each in row.values())
        lines.append("| " + " | ".join([label, str(results[0]["parameters"]), "-" if bytes_ is None else f"{bytes_ / 1024:.1f}",
                                        *(spread(each["values"]) for each in row.values()), rates, *beside,
                                        f"{statistics.mean(result['seconds'] for result in results):.0f}"]) + " |")  # fmt: skip
    for label, values in references.items():
        lines.append(f"| {label} | | | " + " | ".join(number(value) for value in values) + " |" + " |" * (len(heading) - 3 - len(values)))
    return "\n".join(lines)


def main(arguments=None):
    parser = Parser("linnet.results", usage="python -m linnet.results [NAME] [--only LAYER ...] [--full] [--out FOLDER]", description=__doc__.split("\n")[0])
    parser.add_argument("name", nargs="?", help="the comparison; without it they are listed")
    parser.add_argument("--only", nargs="+", metavar="ROW", help="these rows alone")
    parser.add_argument("--columns", nargs="+", metavar="COLUMN", help="these tasks alone")
    parser.add_argument("--seeds", type=int, help="instead of the comparison's own number")
    parser.add_argument("--full", action="store_true", help="the tasks' full protocols instead of the small ones")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of every run, such as device=cuda or threads=1")
    parser.add_argument("--out", metavar="FOLDER", default="runs/results", help="where the runs go")
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
    cells = {}
    try:
        for label in args.only or comparison.arms:
            cells[label] = {column: cell(comparison, args.name, column, label, args.seeds or comparison.seeds, args.full, pathlib.Path(args.out), say)
                            for column in columns}  # fmt: skip
    except (ValueError, TypeError) as problem:
        return stop(2, problem)
    except OSError as problem:
        return stop(3, f"{problem.filename or args.out}: {problem.strerror}")
    except RuntimeError as problem:
        return stop(3, problem)
    references = comparison.reference(columns) if comparison.reference and not args.only else {}
    print(table(comparison, cells, references))
    folders = [folder for row in cells.values() for each in row.values() for folder in each["folders"][:1]]
    if folders:
        say("\nlinnet report " + " ".join(folders))
    return 0


if __name__ == "__main__":
    sys.exit(main())
