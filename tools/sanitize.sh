#!/usr/bin/env bash
# Builds the library, the command and the C++ tests with sanitizers in a folder of their own and runs the tests.
#
#   tools/sanitize.sh address,undefined build-asan
#   tools/sanitize.sh thread build-tsan
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

sanitizers=$1
build=$2
jobs=${JOBS:-$(nproc)}

# The portable kernels, and the widest that this machine runs: wide loads and stores reach further behind a row's end, and
# masks hide what lies there. LINNET_ISAS=portable tools/sanitize.sh ... takes half the time.
widest=
if grep -qm1 avx512vl /proc/cpuinfo; then widest=';avx512'; elif grep -qm1 avx2 /proc/cpuinfo; then widest=';avx2'; fi
isas=${LINNET_ISAS:-portable$widest}
options=(-DLINNET_SANITIZE="$sanitizers" "-DLINNET_ISAS=$isas" -DLINNET_TESTS=ON -DLINNET_TORCH=OFF -DLINNET_CUDA=OFF)
if [[ ! -f $build/CMakeCache.txt ]]; then
  # -O1 and assertions: half the time to compile, and most of the speed.
  options+=(-DCMAKE_BUILD_TYPE=RelWithDebInfo "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -g1")
  if command -v ninja >/dev/null; then options+=(-G Ninja); fi
  if command -v ccache >/dev/null; then options+=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache); fi
fi
cmake --log-level=NOTICE -S . -B "$build" "${options[@]}"
# What threads share: the executor, the C interface, and random cases of every operator on up to 16 threads.
tests=()
if [[ $sanitizers == *thread* ]]; then tests=(check_test executor_test linnet_c_test recurrence_test softmax_test); fi
cmake --build "$build" -j "$jobs" ${tests:+--target "${tests[@]}"}

# The thread sanitizer of g++ 12 cannot map its shadow under the full address-space randomisation of newer kernels.
run=()
if [[ $sanitizers == *thread* ]] && setarch "$(uname -m)" -R true 2>/dev/null; then run=(setarch "$(uname -m)" -R); fi

# Not detect_stack_use_after_return: its fake frames of g++ 12 are aligned to 32 bytes, and 64-byte vectors on them fault.
export ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1:detect_stack_use_after_return=0
export UBSAN_OPTIONS=print_stacktrace=1
export TSAN_OPTIONS=halt_on_error=1
"${run[@]}" ctest --test-dir "$build" --output-on-failure --no-tests=error -j "$jobs" ${tests:+-R "^($(IFS='|' && echo "${tests[*]}"))\$"}
