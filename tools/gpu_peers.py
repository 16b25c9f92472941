"""gpu_peers.py FOLDER LINE PART PARTS: calls the peers of `linnet bench --peers` once for each case of LINE (operators;case;case...), so
that what they compile is in their cache before it is measured. Of each kernel's configurations it compiles every PARTS-th, so that
several processes share them, and it chooses none: that is left to the measurement, when the GPU is quiet. FOLDER is what
gpu_build.sh made."""

import itertools
import json
import os
import subprocess
import sys

os.environ["FLA_CACHE_RESULTS"] = "0"
import triton.runtime.autotuner  # noqa: E402
import triton.testing  # noqa: E402

folder, line, part, parts = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
whole = triton.runtime.autotuner.Autotuner.__init__


def some(self, fn, names, configs, *rest, **more):
    whole(self, fn, names, configs, *rest, **more)
    self.configs = self.configs[part::parts] or self.configs[:1]


def once(function, **_):
    function()
    return [0.0, 0.0, 0.0]


triton.runtime.autotuner.Autotuner.__init__ = some
triton.testing.do_bench = once
with open(folder + "/peers.py") as file:
    exec(file.read())


def written(value):
    return "none" if value is None else str(int(value)) if isinstance(value, bool) else str(value)


def cases(operator, words):
    """The case as src/bench/peers.py reads it, for every choice of alternatives."""
    info = json.loads(subprocess.check_output([folder + "/linnet", "info", operator, "--json"]))
    defaults = {option["name"]: written(option["default"]) for option in info["options"]}
    names, values = zip(*(word.split("=") for word in words.split()))
    for choice in itertools.product(*(value.split("|") for value in values)):
        word = dict(zip(names, choice))
        letters = {name: int(value) for name, value in word.items() if name[0].isupper()}
        options = {name: word.get(name, value) for name, value in defaults.items()}
        message = {"op": operator, "letters": letters, "options": options, "lengths": {}, "device": "cuda"}
        yield {**message, "dtype": word["dtype"], "pass": word.get("pass", "fwd"), "other": word["other"].split(",") if "other" in word else []}


operators, *lines = line.split(";")
for operator, words in itertools.product(operators.split(), lines):
    for message in cases(operator, words):
        try:
            named = globals()[operator + "_gpu"](Case(message))  # noqa: F821
            if named is not None:
                named[1]()
        except Exception as error:
            print(f"{operator} {words}: {error}", file=sys.stderr)
