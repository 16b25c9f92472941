#!/usr/bin/env bash
# The last act of `make demo`: four layers learn MQAR (docs/tasks.md) side by side, and one page shows who recalls.
#
#   tools/demo_train.sh [BUILD] [OUT]     under two minutes on two cores; exit code 3 where there is no PyTorch
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${1:-build} out=${2:-out}

# Found, not imported: that takes seconds.
has_torch() { "$1" -I -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' 2>/dev/null; }
python=
for each in .venv/bin/python "${PYTHON:-python3}"; do
  if has_torch "$each"; then
    python=$(command -v "$each")
    break
  fi
done
[[ $python ]] || exit 3
[[ $python == /* ]] || python=$PWD/$python
if ! grep -q '^LINNET_TORCH:BOOL=ON' "$build/CMakeCache.txt"; then
  cmake --log-level=NOTICE -S . -B "$build" -DLINNET_TORCH=ON -DLINNET_PYTHON="$python" || exit 1
fi
cmake --build "$build" --target linnet_torch -j "${JOBS:-2}" >/dev/null || exit 1

echo "Four layers learn to recall: 4 keys with their values, then each key once more (300 steps each)"
runs="$out/mqar"
rm -rf "$runs"
settings=(length=32 pairs=4 vocab=64 width=64 heads=4 batch=64 steps=300 eval_every=25 lr=5e-3 threads=1 eval_examples=200)
learn() {
  OMP_NUM_THREADS=1 LINNET_THREADS=1 LINNET_PYTHON=$python "$build/linnet" train mqar --layer "$1" --out "$runs/$1" --set "${settings[@]}" |
    sed -n "s/^test: loss [^,]*, accuracy \([^;]*\);.*/  $1 recalls \1/p" | grep . || { echo "demo: $1 did not learn to its end" >&2; return 1; }
}
both() {  # a plain `wait` forgets who failed
  learn "$1" & local first=$!
  learn "$2" & local second=$!
  wait "$first" && wait "$second" || { wait; exit 1; }
}
# Two at a time, one thread each: models this small do not fill two cores.
both deltanet linear_attention
both gated_deltanet softmax_attention
echo "  (deltanet and gated_deltanet have a short convolution that shows them the token before; the others must learn to look there)"
"$build/linnet" report "$runs"/* --html "$out/mqar.html" >/dev/null || exit 1
echo "open $PWD/$out/mqar.html in a browser"
