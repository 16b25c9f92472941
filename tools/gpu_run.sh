#!/bin/bash
# gpu_run.sh [FOLDER] [PART ...]: on a machine with a GPU, checks and measures what gpu_build.sh made: every operator that has
# CUDA kernels. Parts: tests check torch sanitizer, beside each other, then bench and training, each alone; all of them when none is
# named. Ends with a summary; exit 0 only when everything passed. FOLDER/results.md then holds all of it as a page for docs/results
# (machine, commit, tables).
#
#   PEERS=1           measures the peers of `linnet bench --peers` too, as far as FOLDER/peers or PYTHONPATH has them; what those
#                     compile when first called is compiled beside the checks (gpu_peers.py)
#   PEERS_UNTIL=S     from then on without peers (480 s after the start)
#   RANDOM_CASES=N    random cases in all (2000)
#   BENCH_TIME=S      seconds of measurement for each case (0.1)
cd "$(dirname "$0")/.." || exit 2
folder=${1:-build-gpu}
shift
parts=${*:-tests check torch sanitizer bench training}
linnet=$folder/linnet
results=$folder/results.md
export PYTHONPATH="$folder/python:$folder/peers${PYTHONPATH:+:$PYTHONPATH}"
operators=$("$linnet" list | awk '/ cuda / {print $1}')
[ -n "$operators" ] || { echo "gpu_run.sh: no operator runs on a GPU here: $("$linnet" info linear | grep '^ *cuda')"; exit 2; }
rm -f "$folder"/*.md "$folder/summary"
{
  echo "# $(nvidia-smi --query-gpu=name --format=csv,noheader | head -1), $(date -u +%Y-%m-%d)"
  echo
  echo "Commit $(cat "$folder/commit"), driver $(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -1)," \
    "$(python3 -c 'import torch; print("PyTorch", torch.__version__)' 2> /dev/null || echo "no PyTorch"). Made by tools/gpu_run.sh."
} > "$results"
part() {  # name command...: runs it, and remembers how it went
  local name=$1 start=$SECONDS outcome=passed
  shift
  printf '\n## %s\n\n' "$name"
  "$@" 2>&1 || outcome="FAILED with $?"
  echo "- $name: $outcome ($((SECONDS - start)) s)" >> "$folder/summary"
}
indented() { "$@" 2>&1 | sed 's/^/    /'; return "${PIPESTATUS[0]}"; }

# A case of every kernel template, small: racecheck looks at each access.
cases=(
  'linear B=1 T=193 S=193 Hq=1 Hk=1 Hv=1 K=128 V=128 dtype=bf16 pass=bwd with=initial_state'
  'linear B=1 T=100 S=100 Hq=2 Hk=2 Hv=2 K=64 V=64 dtype=f16 pass=fwd with=cu_seqlens N=3'
  'linear B=1 T=70 S=70 Hq=1 Hk=1 Hv=1 K=24 V=33 map=elu1 normalize=1 dtype=f32 pass=bwd'
  'decay B=1 T=193 Hq=1 Hk=1 Hv=1 K=128 V=128 with=g,initial_state dtype=bf16 pass=bwd'
  'decay B=1 T=130 Hq=2 Hk=1 Hv=2 K=64 V=128 with=g dtype=f16 pass=bwd'
  'decay B=1 T=70 Hq=2 Hk=2 Hv=1 K=20 V=36 with=g_head dtype=f32 pass=bwd'
  'gla B=1 T=193 Hq=1 Hk=1 Hv=1 K=128 V=128 dtype=bf16 pass=bwd with=initial_state'
  'gla B=1 T=130 Hq=1 Hk=1 Hv=1 K=64 V=64 values=mixed dtype=bf16 pass=bwd'
  'gated_delta B=1 T=193 Hq=1 Hk=1 Hv=1 K=128 V=128 dtype=bf16 pass=fwd'
  'gated_delta B=1 T=130 Hq=1 Hk=1 Hv=1 K=64 V=64 values=mixed dtype=bf16 pass=fwd'
  'gated_delta B=1 T=193 Hq=1 Hk=1 Hv=1 K=128 V=128 dtype=bf16 pass=bwd with=initial_state'
  'metala_mixer B=1 T=100 H=2 K=64 V=64 with=w_aug dtype=bf16 pass=bwd'
  'gated_delta B=1 T=193 Hq=1 Hk=1 Hv=1 K=128 V=128 other=g dtype=bf16 pass=fwd'
  'gated_delta B=1 T=193 Hq=1 Hk=1 Hv=1 K=128 V=128 other=g dtype=bf16 pass=bwd with=initial_state'
  'gated_delta B=1 T=193 Hq=1 Hk=1 Hv=1 K=64 V=64 other=g dtype=bf16 pass=bwd with=initial_state'
  'delta B=1 T=200 Hq=2 Hk=1 Hv=2 K=64 V=64 dtype=bf16 pass=bwd with=cu_seqlens N=2'
  'delta B=1 T=193 Hq=1 Hk=1 Hv=1 K=128 V=128 dtype=bf16 pass=bwd'
  'delta B=1 T=8200 Hq=1 Hk=1 Hv=1 K=64 V=64 dtype=bf16 pass=bwd'
  'delta B=1 T=8200 Hq=1 Hk=1 Hv=1 K=128 V=128 dtype=bf16 pass=fwd'
  'delta_decode B=2 T=1 Hq=2 Hk=2 Hv=2 K=128 V=128 dtype=bf16'
  'mamba_ssd B=1 T=130 H=8 V=128 G=1 K=128 with=D,z,dt_bias,initial_state dtype=bf16 pass=bwd'
  'mamba_ssd B=1 T=70 H=2 V=40 G=1 K=24 with=D,z,dt_bias dtype=f32 pass=bwd'
  'mamba_ssd_decode B=2 T=1 H=2 V=64 G=1 K=128 with=D,z,dt_bias dtype=bf16'
  'mamba_ssd_decode B=17 T=1 H=32 V=128 G=1 K=128 with=D,z,dt_bias dtype=bf16'
  'gated_delta_decode B=33 T=1 Hq=32 Hk=32 Hv=32 K=128 V=64 dtype=bf16'
  'causal_conv B=2 T=70 E=64 W=4 with=bias,initial_state dtype=bf16 pass=bwd'
  'causal_conv B=1 T=70 E=33 W=3 with=cu_seqlens N=3 dtype=f32 pass=bwd'
  'causal_conv_decode B=2 T=2 E=33 W=4 dtype=f16'
  'rms_norm_gated B=2 T=33 H=3 V=128 with=z,weight dtype=bf16 pass=bwd'
  'rms_norm_gated B=2 T=33 H=3 V=128 with=z,weight norm_before_gate=1 dtype=bf16 pass=bwd'
  'rms_norm_gated B=1 T=3 H=1 V=2048 with=z,weight norm_before_gate=1 dtype=f32 pass=bwd'
  'l2_norm B=2 T=33 H=3 K=20 dtype=f16 pass=bwd'
  'monarch B=1 T=256 S=256 H=1 K=64 V=64 dtype=f16 pass=fwd'
  'monarch B=1 T=1000 S=1000 H=2 K=64 V=64 dtype=f16 pass=fwd'
  'monarch B=1 T=2112 S=2112 H=16 K=64 V=64 block=64 dtype=f16 pass=fwd'
  'monarch B=1 T=300 S=300 H=1 K=24 V=33 steps=2 pad=pre dtype=f32 pass=bwd with=mask'
  'monarch B=1 T=100 S=100 H=1 K=24 V=33 causal=1 dtype=bf16 pass=bwd'
  'monarch_decode B=2 T=2 H=2 K=40 V=24 block=8 M=4 dtype=bf16'
  'softmax B=1 Tq=200 Tk=200 H=2 Hkv=1 K=128 V=128 causal=1 dtype=bf16 pass=bwd'
  'softmax B=1 Tq=140 Tk=260 H=2 Hkv=2 K=64 V=64 window=100,30 prefix=7 with=sinks dtype=f16 pass=bwd'
  'softmax B=1 Tq=140 Tk=140 H=2 Hkv=1 K=200 V=256 causal=1 softcap=20 with=bias,sinks dtype=bf16 pass=bwd'
  'softmax B=1 Tq=150 Tk=150 H=2 Hkv=1 K=96 V=40 with=cu_seqlens_q,cu_seqlens_k N=5 causal=1 dtype=bf16 pass=bwd'
  'softmax B=2 Tq=70 Tk=100 H=4 Hkv=2 K=48 V=33 window=20,5 with=bias,sinks,key_len strided=1 dtype=f32 pass=bwd'
  'softmax_decode B=2 T=1 H=8 Hkv=2 K=128 V=128 capacity=1200 with=sinks dtype=bf16'
  'softmax_decode B=2 T=3 H=4 Hkv=4 K=40 V=24 capacity=600 dtype=f32'
  'softmax_paged B=2 Tq=3 H=8 Hkv=2 K=64 V=64 P=80 page=16 pages=40 causal=1 dtype=f16'
  'softmax_merge P=4 B=2 T=30 H=3 V=40 dtype=bf16 pass=bwd'
  'gated B=1 Tq=150 Tk=150 H=4 Hkv=2 K=64 V=64 position=G2 shared=1 causal=1 with=bias dtype=bf16 pass=bwd'
  'gated B=1 Tq=100 Tk=100 H=4 Hkv=2 K=64 V=64 position=G4 act=silu causal=1 dtype=bf16 pass=bwd'
  'gated_decode B=2 T=1 H=8 Hkv=2 K=128 V=128 capacity=600 shared=1 dtype=bf16'
  'fem_read B=1 S=150 H=2 K=128 V=64 with=q,k,g,key_mask dtype=bf16 pass=bwd'
  'fem_read_decode B=2 T=1 H=2 V=32 K=64 capacity=600 with=q,k,k_cache,v_cache,lengths dtype=f32'
  'zeros_softmax B=1 T=130 H=2 K=40 V=100 with=s0 dtype=f32 pass=bwd'
  'delta B=1 T=130 Hq=2 Hk=1 Hv=2 K=64 V=64 l2_norm=1 dtype=bf16 pass=bwd'
  'gated_delta B=1 T=130 Hq=1 Hk=1 Hv=1 K=64 V=64 l2_norm=1 dtype=bf16 pass=bwd'
  'linear B=1 T=130 S=130 Hq=2 Hk=1 Hv=2 K=40 V=96 map=elu1 dtype=bf16 pass=bwd with=key_mask,initial_state,initial_z'
  'gated_delta B=1 T=130 Hq=1 Hk=1 Hv=1 K=96 V=64 dtype=bf16 pass=bwd strided=1'
  'gla B=1 T=130 Hq=1 Hk=1 Hv=1 K=96 V=40 dtype=bf16 pass=bwd strided=1 with=initial_state'
)
# The general engine, which no tuned kernel stands before: each of its templates.
general=(
  'linear B=1 T=130 S=130 Hq=2 Hk=1 Hv=2 K=64 V=64 map=elu1 normalize=1 dtype=bf16 pass=bwd with=initial_state,initial_z'
  'linear B=1 T=130 S=130 Hq=1 Hk=1 Hv=1 K=40 V=33 map=softplus dtype=f16 pass=bwd with=key_mask'
  'linear B=2 T=70 S=90 Hq=1 Hk=1 Hv=1 K=64 V=64 causal=0 map=elu1 normalize=1 dtype=bf16 pass=bwd'
  'linear B=1 T=100 S=100 Hq=2 Hk=2 Hv=2 K=24 V=48 dtype=f32 pass=bwd with=cu_seqlens N=3'
  'linear B=1 T=100 S=100 Hq=1 Hk=1 Hv=1 K=200 V=150 dtype=bf16 pass=bwd'
  'decay B=1 T=130 Hq=2 Hk=2 Hv=1 K=64 V=128 with=g dtype=bf16 pass=bwd'
  'decay B=1 T=70 Hq=2 Hk=2 Hv=1 K=20 V=36 with=g_head dtype=f32 pass=bwd'
  'gla B=1 T=130 Hq=1 Hk=1 Hv=1 K=64 V=64 dtype=bf16 pass=bwd with=initial_state'
  'gla B=1 T=130 Hq=1 Hk=1 Hv=1 K=96 V=64 values=mixed dtype=f16 pass=bwd'
  'gla B=1 T=70 Hq=1 Hk=1 Hv=1 K=40 V=64 dtype=f32 pass=bwd'
  'delta B=1 T=130 Hq=1 Hk=1 Hv=1 K=96 V=96 dtype=bf16 pass=bwd with=initial_state'
  'delta B=1 T=130 Hq=2 Hk=1 Hv=2 K=64 V=64 l2_norm=1 double_beta=1 dtype=f16 pass=bwd with=cu_seqlens N=2'
  'delta B=1 T=70 Hq=1 Hk=1 Hv=1 K=32 V=64 l2_norm=1 dtype=f32 pass=bwd'
  'delta B=1 T=70 Hq=1 Hk=1 Hv=1 K=256 V=64 dtype=bf16 pass=bwd'
  'gated_delta B=1 T=130 Hq=1 Hk=1 Hv=1 K=96 V=64 other=g dtype=bf16 pass=bwd'
  'gated_delta B=1 T=130 Hq=1 Hk=1 Hv=1 K=64 V=64 dtype=bf16 pass=bwd with=initial_state'
  'gated_delta B=1 T=70 Hq=1 Hk=1 Hv=1 K=64 V=32 l2_norm=1 dtype=f16 pass=bwd'
  'gated_delta B=1 T=70 Hq=1 Hk=1 Hv=1 K=32 V=32 dtype=f32 pass=bwd'
  'metala_mixer B=1 T=100 H=2 K=64 V=64 with=w_aug dtype=f16 pass=bwd'
)
sanitize() {  # tool: quiet when clean
  local lines=() line log code
  for line in "${cases[@]}"; do lines+=(--case "$line impl=cuda"); done
  for line in "${general[@]}"; do lines+=(--case "$line impl=cuda.general"); done
  log=$(timeout 150 compute-sanitizer --tool "$1" --error-exitcode 9 "$linnet" check --device cuda "${lines[@]}" 2>&1)
  code=$?
  echo "    $1, $((${#cases[@]} + ${#general[@]})) cases: $(echo "$log" | grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' | tail -1 | sed 's/=* *//'), exit $code"
  [ $code -eq 0 ] || echo "$log" | grep -vE ' ok$|Frame|Saved|^check |^=* *$' | head -20 | sed 's/^/    /'
  return $code
}
sanitizer() {  # the tools at once
  local code=0 tool jobs=()
  for tool in memcheck racecheck initcheck synccheck; do
    sanitize $tool > "$folder/$tool.log" &
    jobs+=($!)
  done
  for tool in "${jobs[@]}"; do wait "$tool" || code=1; done
  for tool in memcheck racecheck initcheck synccheck; do cat "$folder/$tool.log"; done
  return $code
}
check() { indented "$linnet" check --device cuda "$@"; }
# Sequences that are cut in segments; repeated keys leave maps of the state that matter.
long_sequences() {  # the reference of each on a core of its own
  local all='B=1 Hq=1 Hk=1 Hv=1 K=128 V=128 dtype=bf16 impl=cuda' line jobs=() code=0
  for line in 'linear T=33000 S=33000' 'linear T=9000 S=9000 with=initial_state' 'decay T=33000 with=g' \
    'decay T=9000 with=g,initial_state' 'gla T=9000 with=initial_state' 'delta T=9000 with=initial_state' \
    'delta T=9000 with=initial_state values=repeated' 'gated_delta T=9000 with=initial_state other=g' \
    'gated_delta T=9000 with=initial_state other=g values=repeated' 'gated_delta T=9000 with=initial_state' \
    'gated_delta T=9000 with=initial_state values=repeated' 'delta T=9000 values=repeated' \
    'gated_delta T=9000 other=g values=repeated'; do
    (set -o pipefail
      check --case "$line $all pass=fwd" --case "$line $all pass=bwd" | grep -vE ' ok$|^ *check ' | sed "s/$/: $line/") &
    jobs+=($!)
  done
  for line in "${jobs[@]}"; do wait "$line" || code=1; done
  return $code
}
# Heads of Monarch that fill a cluster, which random cases are too short for; scales that other kernels take, too.
clusters() {
  local line cases=()
  for line in 'T=4096 S=4096 K=64 V=64 H=16 dtype=f16' 'T=4096 S=4096 K=64 V=64 H=16 dtype=bf16' \
    'T=3008 S=3008 K=40 V=24 H=16 dtype=bf16' 'T=2112 S=2112 K=64 V=64 H=30 scale=8 dtype=f16' \
    'T=2112 S=2112 K=64 V=64 H=2 scale=1e-6 dtype=f16' 'T=2112 S=2112 K=64 V=64 H=2 scale=1e-9 dtype=f16' \
    'T=4096 S=4096 K=64 V=64 H=2 scale=0 dtype=f16' 'T=4096 S=4096 K=64 V=64 H=2 scale=-0.5 dtype=bf16'; do
    cases+=(--case "monarch B=1 block=64 $line pass=fwd")
  done
  check "${cases[@]}" | grep -vE ' ok$|^ *check '
  return "${PIPESTATUS[0]}"
}
vectors() { check tests/vectors | grep -vE ' ok$|skipped: |not compared: '; return "${PIPESTATUS[0]}"; }

# What is measured: operators;case;case... The number in front: how many processes compile their peers beforehand.
chunks='Hq=16 Hk=16 Hv=16 K=128 V=128 dtype=bf16 pass=fwd|fwd+bwd'
one='T=1 Hq=32 Hk=32 Hv=32 K=128 V=128 dtype=bf16'
ssd='H=16 V=128 G=1 K=128 with=D,dt_bias dtype=bf16 pass=fwd|fwd+bwd'
heads='H=12 K=64 V=64 dtype=f16 pass=fwd'
speeds=(
  "3 linear;B=16 T=2048 S=2048 $chunks;B=1 T=32768 S=32768 $chunks"
  "2 decay;B=16 T=2048 with=g $chunks;B=1 T=32768 with=g $chunks"
  "1 mamba_ssd;B=16 T=2048 $ssd;B=1 T=32768 $ssd"
  "3 gla;B=16 T=2048 $chunks;B=1 T=32768 $chunks"
  "2 delta;B=16 T=2048 $chunks;B=1 T=32768 $chunks"
  "2 gated_delta;B=16 T=2048 other=g $chunks;B=1 T=32768 other=g $chunks"
  "4 gated_delta;B=16 T=2048 $chunks;B=1 T=32768 $chunks"
  "0 linear_decode gla_decode delta_decode gated_delta_decode;B=16|64|256 $one"
  "0 gated_delta_decode;B=16|64|256 other=g $one"
  "0 decay_decode;B=16|64|256 with=g $one"
  "0 mamba_ssd_decode;B=16|64|256 T=1 H=32 V=128 G=1 K=128 with=D,z,dt_bias dtype=bf16"
  "1 causal_conv;B=16 T=2048 E=2048 W=4 dtype=bf16|f32 pass=fwd|fwd+bwd"
  "0 causal_conv_decode;B=16|256 T=1 E=6144 W=4 dtype=bf16"
  "1 rms_norm_gated;B=16 T=2048 H=16 V=128 with=z,weight norm_before_gate=1 dtype=bf16 pass=fwd|fwd+bwd"
  "1 l2_norm;B=16 T=2048 H=16 K=128 dtype=bf16 pass=fwd|fwd+bwd"
  "1 monarch;B=256 T=256 S=256 $heads;B=1|16 T=4096 S=4096 $heads;B=1|4 T=16384 S=16384 $heads;B=16 T=4096 S=4096 H=12 K=64 V=64 dtype=f16 pass=fwd+bwd"
)
compile_peers() {
  local line i
  for line in "${speeds[@]}"; do
    for ((i = 0; i < ${line%% *}; ++i)); do
      timeout 200 python3 tools/gpu_peers.py "$folder" "${line#* }" $i "${line%% *}" > /dev/null 2>> "$folder/peers.log" &
    done
  done
  wait
}
measure() { timeout "$1" "$linnet" bench --device cuda --time "${BENCH_TIME:-0.1}" --markdown "${@:2}" 2>&1; }
bench() {  # every case beside its peer; those behind the end of the time or of a peer without
  local until=${PEERS_UNTIL:-480} line words op each cases=() rest=() finished=0
  for line in "${speeds[@]}"; do
    IFS=';' read -ra words <<< "${line#* }"
    for op in ${words[0]}; do
      for each in "${words[@]:1}"; do cases+=(--case "$op $each"); done
    done
  done
  if [ -n "${PEERS:-}" ] && [ $SECONDS -lt "$until" ]; then
    measure $((until - SECONDS)) --peers --python "$(command -v python3)" "${cases[@]}" | tee "$folder/bench.log"
    finished=$(grep -cE '^\| +[0-9]' "$folder/bench.log")
    echo
  fi
  while read -r line; do rest+=(--case "$line"); done < <("$linnet" bench --list "${cases[@]}" | tail -n +$((finished + 1)))
  [ ${#rest[@]} -eq 0 ] || measure 240 "${rest[@]}"
}
if [ -n "${PEERS:-}" ] && [[ " $parts " == *" bench "* ]]; then
  compile_peers &
  compiling=$!
fi
begin() {
  case $1 in
    tests) part "All C++ tests, on this GPU too" indented "$folder/linnet_tests" --gtest_brief=1 ;;
    check)
      part "Vector files" vectors
      part "Long sequences" long_sequences
      part "Monarch in clusters" clusters
      # shellcheck disable=SC2086
      part "Random cases" check --random "${RANDOM_CASES:-2000}" $operators
      ;;
    torch) part "Torch operators" indented python3 tests/gpu/test_gpu.py ;;
    sanitizer) part "compute-sanitizer" sanitizer ;;
    bench) part "Speed" bench ;;
    training) part "First calls and memory of a training step" timeout 90 python3 tools/gpu_training.py ;;
    *) echo "gpu_run.sh: no part named $1"; exit 2 ;;
  esac
}
jobs=() checks=() timed=()
for word in $parts; do
  case $word in
    bench | training) timed+=("$word") ;;
    *)
      checks+=("$word")
      begin "$word" > "$folder/$word.md" &
      jobs+=($!)
      ;;
  esac
done
code=0
for job in "${jobs[@]}"; do wait "$job" || code=$?; done
for word in "${checks[@]}"; do cat "$folder/$word.md"; done | tee -a "$results"
[ $code -eq 0 ] || exit $code
[ -z "${compiling:-}" ] || wait "$compiling"
for word in "${timed[@]}"; do begin "$word" | tee -a "$results"; done
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
{
  printf '\n## Summary\n\n'
  cat "$folder/summary"
} | tee -a "$results"
! grep -q FAILED "$folder/summary"
