#!/bin/sh
# gpu_build.sh [FOLDER]: builds, on a machine with nvcc but without a GPU, all that gpu_run.sh needs on a machine with one: the
# command, all C++ tests and the torch operators. Copy FOLDER (build-gpu) beside this checkout there and run tools/gpu_run.sh.
set -eu
cd "$(dirname "$0")/.."
folder=${1:-build-gpu}
python=${LINNET_PYTHON:-.venv/bin/python}
cmake --log-level=NOTICE -S . -B build-cuda -DCMAKE_BUILD_TYPE=Release -DLINNET_TESTS=ON -DLINNET_CUDA=ON -DLINNET_TORCH=ON \
  -DLINNET_PYTHON="$python" ${CMAKE_ARGS:-}
cmake --build build-cuda -j "${JOBS:-2}" --target linnet_command linnet_torch linnet_tests
rm -rf "$folder"
mkdir -p "$folder"
cp build-cuda/linnet build-cuda/liblinnet.so.? build-cuda/linnet_tests build-cuda/embed/peers.py "$folder"
cp -rL build-cuda/python "$folder/python"
strip "$folder"/linnet "$folder"/liblinnet.so.? "$folder/linnet_tests"
git describe --always --dirty > "$folder/commit"
