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
GTEST_OUTPUT="xml:$results/" ctest --test-dir "$build" --no-tests=error --output-on-failure --progress -j "${JOBS:-$(nproc)}"
ctest_exit=$?
LINNET_BUILD=$PWD/$build PYTHONPATH=$PWD/$build/python "$python" -m pytest -q tests -n "${JOBS:-$(nproc)}" --dist loadfile --junitxml="$results/pytest.xml"
pytest_exit=$?

# Tests that this build has not at all: launches_test compares launches with compiled CUDA images.
if ! grep -q '^LINNET_CUDA:BOOL=ON' "$build/CMakeCache.txt"; then
  echo 'C++ tests: without launches_test, which needs nvcc'
  [[ -z ${LINNET_LEFT_OUT-} ]] || echo 'C++ tests: launches_test, which needs nvcc' >>"$LINNET_LEFT_OUT"
fi

"$python" tools/test_summary.py "$results" --ctest-exit $ctest_exit --pytest-exit $pytest_exit
