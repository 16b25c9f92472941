#!/bin/bash
# gpu_run.sh [FOLDER] [PART ...]: on a machine with a GPU, checks and measures what gpu_build.sh made. Parts: tests check torch
# sanitizer bench; all of them when none is named. Ends with a summary; exit 0 only when everything passed.
cd "$(dirname "$0")/.." || exit 2
folder=${1:-build-gpu}
shift
parts=${*:-tests check torch sanitizer bench}
linnet=$folder/linnet
export PYTHONPATH="$folder/python:$folder/peers${PYTHONPATH:+:$PYTHONPATH}"
operators="linear recurrence decay gla delta gated_delta monarch"  # mechanisms with CUDA kernels
summary=()
failed=0
part() {  # name command...: runs it, and remembers how it went
  local name=$1 start=$SECONDS
  shift
  echo "== $name"
  if "$@" 2>&1; then
    summary+=("$name: passed ($((SECONDS - start)) s)")
  else
    summary+=("$name: FAILED with $? ($((SECONDS - start)) s)")
    failed=1
  fi
}
sanitize() {  # tool case: quiet when clean
  local log
  log=$(timeout 120 compute-sanitizer --tool "$1" --error-exitcode 9 "$linnet" check --device cuda --case "$2" 2>&1)
  local code=$?
  echo "$1: $2: $(echo "$log" | grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' | tail -1)"
  [ $code -eq 0 ] || echo "$log" | grep -v '^linear' | head -20
  return $code
}
sanitizer() {
  local code=0 tool
  for tool in memcheck racecheck initcheck synccheck; do
    sanitize $tool 'linear B=1 T=193 S=193 Hq=1 Hk=1 Hv=1 K=128 V=128 dtype=bf16 pass=bwd with=initial_state impl=cuda' || code=1
    sanitize $tool 'linear B=1 T=100 S=100 Hq=2 Hk=2 Hv=2 K=64 V=64 dtype=f16 pass=fwd with=cu_seqlens N=3 impl=cuda' || code=1
    sanitize $tool 'gated_delta B=1 T=193 Hq=1 Hk=1 Hv=1 K=128 V=128 other=g dtype=bf16 pass=fwd impl=cuda' || code=1
    sanitize $tool 'gated_delta B=1 T=193 Hq=1 Hk=1 Hv=1 K=128 V=128 other=g dtype=bf16 pass=bwd with=initial_state impl=cuda' || code=1
    sanitize $tool 'delta B=1 T=200 Hq=2 Hk=1 Hv=2 K=64 V=64 dtype=bf16 pass=bwd with=cu_seqlens N=2 impl=cuda' || code=1
    sanitize $tool 'delta B=1 T=8200 Hq=1 Hk=1 Hv=1 K=64 V=64 dtype=bf16 pass=bwd impl=cuda' || code=1
    sanitize $tool 'delta_decode B=2 T=1 Hq=2 Hk=2 Hv=2 K=128 V=128 dtype=bf16 impl=cuda' || code=1
    sanitize $tool 'linear B=1 T=70 S=70 Hq=1 Hk=1 Hv=1 K=24 V=33 map=elu1 normalize=1 dtype=f32 pass=fwd impl=cuda' || code=1
    sanitize $tool 'monarch B=1 T=256 S=256 H=1 K=64 V=64 dtype=f16 pass=fwd impl=cuda' || code=1
    sanitize $tool 'monarch B=1 T=1000 S=1000 H=2 K=64 V=64 dtype=f16 pass=fwd impl=cuda' || code=1
    sanitize $tool 'monarch B=1 T=300 S=300 H=1 K=24 V=33 steps=2 pad=pre dtype=f32 pass=bwd with=mask impl=cuda' || code=1
    sanitize $tool 'monarch B=1 T=100 S=100 H=1 K=24 V=33 causal=1 dtype=bf16 pass=bwd impl=cuda' || code=1
    sanitize $tool 'monarch_decode B=2 T=2 H=2 K=40 V=24 block=8 M=4 lengths=7 dtype=bf16 impl=cuda' || code=1
  done
  return $code
}
for word in $parts; do
  case $word in
    tests) part "ptx_test" "$folder/ptx_test" --gtest_brief=1 ;;
    check)
      part "check vectors" "$linnet" check --device cuda tests/vectors
      part "check random" "$linnet" check --device cuda --random "${RANDOM_CASES:-2000}" $operators
      ;;
    torch) part "torch" python3 tests/gpu/test_gpu.py ;;
    sanitizer) part "sanitizer" sanitizer ;;
    bench) part "bench" "$linnet" bench $operators --device cuda --quick ${PEERS:+--peers} --python "$(command -v python3)" ;;
  esac
done
echo "== summary"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
printf '%s\n' "${summary[@]}"
exit $failed
