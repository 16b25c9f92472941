#!/usr/bin/env bash
# Checks the format of all C++ sources (clang-format) and the sources themselves (clang-tidy, see .clang-tidy).
#
#   tools/lint.sh                  both checks
#   tools/lint.sh --format         only the format
#   tools/lint.sh --fix-format     formats in place, checks nothing
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mapfile -t sources < <(git ls-files --cached --others --exclude-standard -- '*.h' '*.hpp' '*.c' '*.cc' '*.cpp' '*.cu' '*.cuh')
jobs=${JOBS:-$(nproc)}
((${#sources[@]})) || {
  echo "lint: git lists no sources here" >&2
  exit 2
}

if [[ ${1-} == --fix-format ]]; then
  clang-format -i "${sources[@]}"
  exit
fi
echo "format: ${#sources[@]} files"
clang-format --dry-run -Werror "${sources[@]}" || {
  echo "format: run make format" >&2
  exit 1
}
[[ ${1-} != --format ]] || exit 0

# A folder of its own that is configured and never built: it only holds compile_commands.json. Kernels for the CPU are read once, as
# portable ones: the other instruction sets are the same text with flags meant for g++. Of CUDA the host's part is read here; nvcc
# compiles the rest with every warning an error (cmake/cuda.cmake), which a clang-tidy of this age cannot parse.
build=build-lint
options=(-DLINNET_TESTS=ON -DLINNET_TORCH=OFF -DLINNET_ISAS=portable -DLINNET_CUDA=OFF)
if [[ ! -f $build/CMakeCache.txt ]] && command -v ninja >/dev/null; then options+=(-G Ninja); fi
cmake --log-level=NOTICE -S . -B "$build" "${options[@]}"
# One command per file: a test is also part of the program that holds all of them.
python3 - "$build/compile_commands.json" <<'END'
import json, sys
commands = {entry["file"]: entry for entry in reversed(json.load(open(sys.argv[1])))}
json.dump(list(commands.values()), open(sys.argv[1], "w"), indent=1)
END
mapfile -t tidied < <(sed -n 's/^ *"file": "\(.*\)".*/\1/p' "$build/compile_commands.json" | grep -F "$PWD/src/" | sort -u)
echo "clang-tidy: ${#tidied[@]} files"
printf '%s\0' "${tidied[@]}" | xargs -0 -n 1 -P "$jobs" clang-tidy -p "$build" --quiet --warnings-as-errors='*' 2> >(grep -v 'warnings generated' >&2)
