#!/usr/bin/env bash
# Runs every test of a build made by `make test`: the C++ programs through ctest, then pytest. Ends with the counts of both.
#
#   tools/test.sh [BUILD]    exit code 0 only if tests ran and all of them passed
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

build=${1:-build}
results=$PWD/$build/test-results
python=$PWD/.venv/bin/python
rm -rf "$results"
mkdir -p "$results"

# GoogleTest and pytest both write the same XML, one file per program, which the summary adds up.
GTEST_OUTPUT="xml:$results/" ctest --test-dir "$build" --output-on-failure --progress -j "${JOBS:-$(nproc)}"
ctest_exit=$?
LINNET_BUILD=$PWD/$build PYTHONPATH=$PWD/$build/python "$python" -m pytest -q tests --junitxml="$results/pytest.xml"
pytest_exit=$?

"$python" tools/test_summary.py "$results" --ctest-exit $ctest_exit --pytest-exit $pytest_exit
