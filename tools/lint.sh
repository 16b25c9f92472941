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

# A folder of its own that is configured and never built, for compile_commands.json alone.
build=build-lint
options=(-DLINNET_TESTS=ON -DLINNET_TORCH=OFF -DLINNET_ISAS=all)
if [[ ! -f $build/CMakeCache.txt ]] && command -v ninja >/dev/null; then options+=(-G Ninja); fi
cmake --log-level=NOTICE -S . -B "$build" "${options[@]}"
# clang-tidy reads a file once per entry. The last entry of each is kept: of a kernel that of the widest instruction set, of a
# test that of the program with all tests.
mkdir -p "$build/tidy"
awk '/^{/ { entry = "" } { entry = entry $0 "\n" } /^ *"file":/ { file = $2 }
  /^}/ { sub(/,\n$/, "\n", entry); last[file] = entry }
  END { printf "["; for (f in last) { printf "%s\n%s", comma, last[f]; comma = "," } print "]" }' \
  "$build/compile_commands.json" >"$build/tidy/compile_commands.json"
mapfile -t files < <(sed -n 's/^ *"file": "\(.*\)".*/\1/p' "$build/tidy/compile_commands.json" | grep -F "$PWD/src/" | sort)
mapfile -t plain < <(printf '%s\n' "${files[@]}" | grep -vE '(_cpu|/cpu/[^/]*|_test)\.cc$')
mapfile -t kernels < <(printf '%s\n' "${files[@]}" | grep -E '(_cpu|/cpu/[^/]*)\.cc$')
mapfile -t tests < <(printf '%s\n' "${files[@]}" | grep -E '_test\.cc$')

# tidy NAME CHECKS FILE...: CHECKS change those of .clang-tidy.
tidy() {
  echo "clang-tidy: $(($# - 2)) $1"
  printf '%s\0' "${@:3}" | xargs -0 -n 1 -P "$jobs" \
    clang-tidy -p "$build/tidy" --quiet --warnings-as-errors='*' --checks="$2" 2> >(grep -v 'warnings generated' >&2)
}
failed=0
tidy sources '' "${plain[@]}" || failed=1
# Branches are alike where two types of a template are one, and a type that a macro hands to templates takes no parentheses.
tidy kernels -bugprone-branch-clone,-bugprone-macro-parentheses "${kernels[@]}" || failed=1
# clang's own warnings and one check: all of them take three times as long on GoogleTest's macros, and found five trifles. A
# long case in a list of many is written as two literals.
tidy tests '-*,clang-diagnostic-*,-clang-diagnostic-string-concatenation,bugprone-use-after-move' "${tests[@]}" || failed=1
exit "$failed"
