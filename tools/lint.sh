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

# A folder of its own that is configured and never built: it only holds compile_commands.json. Files compiled once per instruction
# set are left out: clang would read the same file once per set, with flags meant for g++. Tests are checked by running them.
build=build-lint
options=(-DLINNET_TESTS=OFF -DLINNET_TORCH=OFF)
if [[ ! -f $build/CMakeCache.txt ]] && command -v ninja >/dev/null; then options+=(-G Ninja); fi
cmake --log-level=NOTICE -S . -B "$build" "${options[@]}"
mapfile -t tidied < <(sed -n 's/^ *"file": "\(.*\)".*/\1/p' "$build/compile_commands.json" | grep -F "$PWD/src/" | grep -vE '(_cpu|/cpu/[^/]*)\.cc$' | sort -u)
echo "clang-tidy: ${#tidied[@]} files"
printf '%s\0' "${tidied[@]}" | xargs -0 -n 1 -P "$jobs" clang-tidy -p "$build" --quiet --warnings-as-errors='*' 2> >(grep -v 'warnings generated' >&2)
