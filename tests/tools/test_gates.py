"""The scripts behind make test and make demo fail when they should."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PASSED = '<testcase name="a" classname="A" status="run" result="completed"/>'
FAILED = '<testcase name="b" classname="A" status="run"><failure message="no"/></testcase>'
NOT_RUN = '<testcase name="c" classname="A" status="notrun"/>'


def skipped(reason):
    return f'<testcase name="d" classname="A" status="run" result="skipped"><skipped message="{reason}"/></testcase>'


# what the C++ programs gave, what pytest gave, ctest's and pytest's exit codes, whether it may pass, a word of the text
CASES = [
    ([PASSED], PASSED, 0, 0, True, "all passed"),
    ([PASSED], PASSED + skipped("needs a GPU"), 0, 0, True, "1 skipped: needs a GPU"),
    ([PASSED], PASSED + skipped("transformers is not installed"), 0, 0, False, "no reason to skip"),
    ([PASSED + skipped("could not import 'numpy'")], PASSED, 0, 0, False, "no reason to skip"),
    ([PASSED], PASSED + FAILED, 0, 0, False, "failed: A.b"),
    ([PASSED], PASSED, 8, 0, False, "ctest exit code 8"),
    ([PASSED], PASSED, 0, 2, False, "pytest exit code 2"),
    ([], PASSED, 0, 0, False, "no C++ test ran"),
    ([PASSED], NOT_RUN, 0, 0, False, "no Python test ran"),
    ([PASSED, NOT_RUN], PASSED, 0, 0, False, "part1_test ran no test"),
]


@pytest.mark.parametrize("programs, python, ctest, pytest_exit, passes, word", CASES)
def test_summary(tmp_path, programs, python, ctest, pytest_exit, passes, word):
    results = {f"part{i}_test": cases for i, cases in enumerate(programs)} | {"pytest": python}
    for name, cases in results.items():
        (tmp_path / f"{name}.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    left_out = tmp_path / "left-out.txt"
    done = subprocess.run([sys.executable, ROOT / "tools/test_summary.py", tmp_path, "--ctest-exit", str(ctest), "--pytest-exit", str(pytest_exit)],
                          capture_output=True, text=True, env=os.environ | {"LINNET_LEFT_OUT": str(left_out)})  # fmt: skip
    assert (done.returncode == 0) == passes and word in done.stdout + done.stderr, done.stdout + done.stderr
    assert left_out.exists() == ("needs a GPU" in python)


COMMAND = """#!/usr/bin/env bash
case $1 in
  {broken}) exit 1 ;;
  *) exit 0 ;;
esac
"""


# The demo with a command of which one part fails, and with models that cannot be fetched (no registry, an empty cache).
@pytest.mark.parametrize("broken, fetched, passes", [("nothing", False, True), ("nothing", True, True), ("compare", False, False), ("generate", True, False),
                                                     ("generate", False, False), ("convert", False, False),
                                                     ("convert", True, False)])  # fmt: skip
def test_demo_fails_with_an_act(tmp_path, broken, fetched, passes):
    command = tmp_path / "build" / "linnet"
    command.parent.mkdir()
    command.write_text(COMMAND.format(broken=broken))
    command.chmod(0o755)
    python = tmp_path / "python"  # without torch, and with a fetch that prints a path or fails
    python.write_text(f"#!/bin/sh\ncase $* in *fetch.py*) {'echo file' if fetched else 'exit 3'} ;; *) exit 1 ;; esac\n")
    python.chmod(0o755)
    tools = tmp_path / "tree" / "tools"
    tools.mkdir(parents=True)
    for name in ("demo.sh", "demo_train.sh"):
        (tools / name).write_bytes((ROOT / "tools" / name).read_bytes())
        (tools / name).chmod(0o755)
    (tmp_path / "tree" / "docs").symlink_to(ROOT / "docs")  # the text where none can be fetched
    environment = os.environ | {"PYTHON": str(python), "LINNET_LEFT_OUT": ""}  # what it leaves out is no part of CI's list
    done = subprocess.run([tools / "demo.sh", tmp_path / "build", "out"], capture_output=True, text=True, env=environment)
    assert (done.returncode == 0) == passes, done.stdout + done.stderr
    assert ("3 of 4 acts ran" in done.stdout) == passes
