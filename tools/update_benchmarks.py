"""Measures softmax and linear beside PyTorch and writes the tables of docs/benchmarks.md. Run it on a quiet machine:

    .venv/bin/python tools/update_benchmarks.py [--time SECONDS] [--threads N]

With a file of `linnet bench --peers --json` (--from FILE) it writes the tables of that run instead.
"""

import argparse
import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def significant(x, digits=3):
    text = f"{x:.{digits}g}"
    return f"{float(text):.0f}" if "e" in text else text


def time_text(seconds):
    for unit, name in ((1e-6, "us"), (1e-3, "ms"), (1.0, "s")):
        if seconds < 999.5 * unit or name == "s":
            return f"{significant(seconds / unit)} {name}"


def size_text(count):
    for name in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or name == "GiB":
            return f"{significant(count)} {name}"
        count /= 1024


def words(case):
    return dict(word.split("=") for word in case["case"].split())


def row(*cells):
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def operator_table(cases):
    yield row("case", "median", "min", "p90", "GFLOP/s", "GB/s", "of ceiling", "error", "extra", "peer", "ratio")
    yield row("---", *["---:"] * 10)
    for case in cases:
        seconds, ratio = case["seconds"], case.get("ratio")
        share = f"{100 * case['share_of_ceiling']:.0f} % {'mem' if case['nearer_ceiling'] == 'memory' else 'fma'}"
        error = f"{case['error']:.1e}" + ("" if case["error_case"] == case["case"] else "\\*")
        yield row(f"`{case['case']}`", time_text(seconds["median"]), time_text(seconds["min"]), time_text(seconds["p90"]),
                  significant(case["flops_per_second"] / 1e9), significant(case["bytes_per_second"] / 1e9), share, error,
                  size_text(case["workspace_bytes"]), time_text(case["peer_seconds"]["median"]) if ratio else "-",
                  f"{ratio:.2f}" if ratio else "-")


def growth_table(cases):
    """The cases of linear that differ in T alone: time per token, and memory beyond inputs and outputs."""
    groups = {}
    for case in cases:
        rest = tuple((name, value) for name, value in words(case).items() if name not in ("T", "S"))
        groups.setdefault(rest, []).append(case)
    for rest, group in groups.items():
        if len(group) < 3:
            continue
        group.sort(key=lambda case: int(words(case)["T"]))
        per_token = [case["seconds"]["median"] / int(words(case)["T"]) for case in group]
        yield "`" + " ".join(f"{name}={value}" for name, value in rest) + "`"
        yield ""
        yield row("T", *(words(case)["T"] for case in group))
        yield row("---", *["---:"] * len(group))
        yield row("ns per token", *(significant(1e9 * x) for x in per_token))
        yield row("extra memory", *(size_text(case["workspace_bytes"]) for case in group))
        yield ""


def page(result):
    machine = result["machine"]
    yield (f"{machine['cpu']}, {machine['cores']} cores ({machine['caches']}), {machine['isa']}, {result['threads']} threads; "
           f"{result['peers']}; {result['date']}, commit {result['commit']}. Other processes used "
           f"{100 * result['other_load']:.0f} % of the machine. `*`: error at shorter lengths.")
    for operator in dict.fromkeys(case["operator"] for case in result["cases"]):
        cases = [case for case in result["cases"] if case["operator"] == operator]
        yield f"\n## {operator}\n"
        yield from operator_table(cases)
        peers = sorted({case["peer"] for case in cases if "peer" in case})
        if peers:
            yield "\nPeers: " + "; ".join(f"`{peer}`" for peer in peers) + "."
        if operator == "linear":
            yield "\nTime grows with the length, memory does not:\n"
            yield from growth_table(cases)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", help="a file of linnet bench --peers --json")
    parser.add_argument("--time", default="1")
    parser.add_argument("--threads")
    args = parser.parse_args()
    if args.source:
        text = pathlib.Path(args.source).read_text()
    else:
        command = [ROOT / "build" / "linnet", "bench", "softmax", "linear", "--peers", "--json", "--python", sys.executable,
                   "--time", args.time, *(["--threads", args.threads] if args.threads else [])]
        text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(before + BEGIN + "\n\n" + "\n".join(page(json.loads(text))) + "\n" + END + after)


if __name__ == "__main__":
    main()
