#!/usr/bin/env bash
# Builds the library and all C++ tests as one program with sanitizers, in a folder of its own, and runs them.
#
#   tools/sanitize.sh address,undefined build-asan          all suites
#   tools/sanitize.sh thread build-tsan                     the suites with threads
#   tools/sanitize.sh address,undefined build-asan few      what CI runs: where memory or threads are at stake
#   tools/sanitize.sh thread build-tsan 'Layers.*'          those of a GoogleTest filter
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

sanitizers=$1
build=$2
suites=${3-}
jobs=${JOBS:-$(nproc)}

# Files and what they hold; the runtime and its tokenisers; layers; calls, with every operator's random cases on up to 16 threads;
# and one suite for each way to walk over tokens that the CPU kernels have.
few='File.*:Json*.*:Safetensors*.*:ModelFolder.*:Gguf.*:Inflate.*:Chat.*:Words.*:Unicode.*:Sampler.*:Model.*:Session.*:Converted.*'
few+=':Layers.*:Map.*:CHeader*.*:Call.*:Remembered.*:Op*.*:Executor.*:Log.*:RandomCases.*:Poison.*'
few+=':RecurrenceProperties.*:SoftmaxBits.*:LinearEdges.*:Monarch.*:Hierarchical.*:Mamba.*:Dense*.*:Tile.*'
threads='Executor.*:CHeader*.*:Call.*:Remembered.*:Log.*:Layers.*:Map.*:Model.*:Session.*:Convert*.*:RandomCases.*:Dense*.*'
threads+=':Recurrence*.*:Softmax*.*:LinearBits.*'
few_threads='Executor.*:CHeader*.*:Call.*:Remembered.*:Log.*:Layers.*:Session.*:RandomCases.*:SoftmaxBits.*'
case $sanitizers,$suites in
  *thread*,few) suites=$few_threads ;;
  *thread*,) suites=$threads ;;
  *,few) suites=$few ;;
esac

# The widest kernels that this machine runs: wide loads and stores reach further behind a row's end, and masks hide what lies there.
# LINNET_ISAS='portable;avx512' tools/sanitize.sh ... takes several sets.
widest=portable
if grep -qm1 avx512vl /proc/cpuinfo; then widest=avx512; elif grep -qm1 avx2 /proc/cpuinfo; then widest=avx2; fi
isas=${LINNET_ISAS:-$widest}
options=(-DLINNET_SANITIZE="$sanitizers" "-DLINNET_ISAS=$isas" -DLINNET_TESTS=ON -DLINNET_TORCH=OFF -DLINNET_CUDA=OFF)
if [[ ! -f $build/CMakeCache.txt ]]; then
  # Assertions, and -O1 where the time goes (CMakeLists.txt): a third of the time to compile, and most of the speed.
  options+=(-DCMAKE_BUILD_TYPE=RelWithDebInfo "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O0 -g1")
  if command -v ninja >/dev/null; then options+=(-G Ninja); fi
  if command -v ccache >/dev/null; then options+=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache); fi
fi
cmake --log-level=NOTICE -S . -B "$build" "${options[@]}"
cmake --build "$build" -j "$jobs" --target linnet_tests

# The thread sanitizer of g++ 12 cannot map its shadow under the full address-space randomisation of newer kernels.
run=()
if [[ $sanitizers == *thread* ]] && setarch "$(uname -m)" -R true 2>/dev/null; then run=(setarch "$(uname -m)" -R); fi

# Not detect_stack_use_after_return: its fake frames of g++ 12 are aligned to 32 bytes, and 64-byte vectors on them fault.
export ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1:detect_stack_use_after_return=0
export UBSAN_OPTIONS=print_stacktrace=1
export TSAN_OPTIONS=halt_on_error=1
[[ -n $("${run[@]}" "$build/linnet_tests" --gtest_list_tests --gtest_filter="${suites:-*}" | grep '^  ') ]] || {
  echo "sanitize: no test matches $suites" >&2
  exit 2
}
# The tests dealt out to as many processes as there are cores, each with a folder for its files.
processes=()
for ((i = 0; i < jobs; ++i)); do
  mkdir -p "$build/files-$i"
  TMPDIR=$PWD/$build/files-$i TEST_TMPDIR=$PWD/$build/files-$i GTEST_TOTAL_SHARDS=$jobs GTEST_SHARD_INDEX=$i \
    "${run[@]}" "$build/linnet_tests" --gtest_brief=1 --gtest_filter="${suites:-*}" >"$build/tests-$i.txt" 2>&1 &
  processes+=($!)
done
failed=0
for i in "${!processes[@]}"; do
  wait "${processes[i]}" || failed=1
  cat "$build/tests-$i.txt"
done
exit "$failed"
