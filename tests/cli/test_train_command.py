"""linnet train: the command finds Python, passes on what it was given, and says what is missing."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
LINNET = pathlib.Path(os.environ.get("LINNET_BUILD", ROOT / "build")).resolve() / "linnet"
SMALL = "width=16 layers=1 heads=1 batch=8 steps=4 eval_every=2 eval_examples=16 examples=64 length=16 vocab=32 pairs=2".split()


def linnet(*words, code=0, **environment):
    done = subprocess.run([LINNET, *words], capture_output=True, text=True, timeout=300, env=os.environ | environment)
    assert done.returncode == code, f"{words}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done


@pytest.fixture(scope="module")
def python():
    return {"LINNET_PYTHON": sys.executable}


def test_a_run(tmp_path, python):
    done = linnet("train", "mqar", "--layer", "linear_attention", "--out", str(tmp_path / "run"), "--json", "--set", *SMALL, **python)
    result = json.loads(done.stdout)
    assert (tmp_path / "run" / "report.html").read_text().count("<svg") == 2
    assert result["steps"] == 4 and result["layer"] == "linear_attention" and result["state_bytes"] > 0
    assert "from step 4" in linnet("train", "mqar", "--layer", "linear_attention", "--out", str(tmp_path / "run"), *SMALL, **python).stdout


def test_settings_are_listed(python):
    text = linnet("train", "--settings", **python).stdout
    assert "weight_decay" in text and "tasks: mqar" in text and "of matrices; vectors have none" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("mqar", "--layr", "x"), "train: there is no option --layr; did you mean --layer?"),
        (("mqar", "recall"), "'recall' is one word too many"),
        (("mqar", "witdh=3"), "there is no setting 'witdh'; did you mean 'width'?"),
        (("mqar", "--set", "steps=-1"), "steps is -1, expected at least 1"),
    ],
)
def test_bad_input(words, says, python):
    assert says in linnet("train", *words, code=2, **python).stderr


def test_without_torch_or_python(tmp_path):
    assert "'/nonexistent' cannot be started" in linnet("train", "mqar", "--python", "/nonexistent", code=3).stderr
    bare = tmp_path / "bare"  # a Python that finds no packages
    bare.write_text(f'#!/bin/sh\nunset PYTHONPATH\nexec {os.path.realpath(sys.executable)} -I -S "$@"\n')
    bare.chmod(0o755)
    assert "this needs PyTorch, and" in linnet("train", "mqar", "--python", str(bare), code=3).stderr
