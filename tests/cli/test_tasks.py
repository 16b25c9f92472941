"""linnet tasks: list, show, files that check again, exit codes and sentences."""

import json
import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
LINNET = pathlib.Path(os.environ.get("LINNET_BUILD", ROOT / "build")).resolve() / "linnet"


def linnet(*words, code=0):
    done = subprocess.run([LINNET, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == code, f"{words}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done


def test_list():
    names = [task["name"] for task in json.loads(linnet("tasks", "list", "--json").stdout)["tasks"]]
    assert {"mqar", "recall", "fuzzy_recall", "listops", "regbench", "pathfinder", "forecast", "images", "text"} <= set(names)
    text = linnet("tasks", "list").stdout
    assert all(name in text for name in names)


@pytest.mark.parametrize(
    "words",
    [
        ("mqar", "length=32", "vocab=64", "seed=7"),
        ("noisy_recall", "length=16"),
        ("fuzzy_recall", "length=24", "split=test"),
        ("memorisation", "vocab=64"),
        ("compression",),
        ("selective_copy", "length=40", "items=6"),
        ("listops", "min_length=5", "max_length=60", "max_depth=5", "max_args=5"),
        ("regbench", "words=3", "max_word=8"),
        ("pathfinder",),
        ("forecast", "rows=300", "lookback=20", "horizon=5", "channels=2"),
    ],
    ids=lambda words: words[0],
)
def test_what_is_written_checks_again(words, tmp_path):
    shown = linnet("tasks", "show", *words, "--rows", "1").stdout
    assert "option" in shown and "tensor" in shown
    described = json.loads(linnet("tasks", "show", *words, "--json").stdout)
    assert described["task"] == words[0] and described["tensors"][0]["values"]
    if words[0] == "forecast":
        return  # its file holds the series, not a seed
    path = str(tmp_path / "task.safetensors")
    linnet("tasks", "show", *words, "--out", path)
    assert "1 passed, 0 failed, 0 skipped" in linnet("check", path).stdout


def test_vectors_are_regenerated():
    done = linnet("check", *sorted(str(p) for p in (ROOT / "tests/vectors").glob("tasks-*.safetensors")))
    assert "0 failed, 0 skipped" in done.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("tasks", "shwo"), "there is no 'shwo', expected list or show"),
        (("tasks", "show"), "show needs the name of a task"),
        (("tasks", "show", "mqarr"), "there is no task 'mqarr'; did you mean 'mqar'?"),
        (("tasks", "show", "chess"), "there is no task 'chess'; linnet tasks list has them"),
        (("tasks", "show", "mqar", "lenght=32"), "mqar: there is no option 'lenght'; did you mean 'length'?"),
        (("tasks", "show", "mqar", "length"), "'length' is no option=value"),
        (("tasks", "show", "mqar", "length=33"), "mqar: length is 33, expected an even number"),
        (("tasks", "show", "text", "path=/nonexistent"), "/nonexistent"),
    ],
)
def test_bad_input(words, says):
    assert says in linnet(*words, code=2).stderr
