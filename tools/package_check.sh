#!/usr/bin/env bash
# Uses what a user would install, away from the checkout: the C++ package through find_package, and the wheel in an environment
# of its own. Needs a build made by `make test` and a wheel made by `make wheel`.
#
#   tools/package_check.sh [BUILD]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

root=$PWD
build=$root/${1:-build}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

echo "package: cmake --install, find_package(linnet), the C++ example, the installed command"
cmake --install "$build" --prefix "$work/prefix" >/dev/null
cmake --log-level=NOTICE -S examples/cpp -B "$work/example" -DCMAKE_PREFIX_PATH="$work/prefix" -DCMAKE_BUILD_TYPE=Release >/dev/null
cmake --build "$work/example" >/dev/null
cd "$work"
"$work/example/attention"
"$work/prefix/bin/linnet" list
"$work/prefix/bin/linnet" compare --quick --html "$work/page.html" >/dev/null
[[ -s $work/page.html ]]

wheels=("$root"/dist/linnet-*.whl)
megabytes=$(($(stat -c %s "${wheels[-1]}") / 1000000))
echo "package: ${wheels[-1]##*/}, $megabytes MB"
((megabytes < 40)) || { echo "package: the wheel is larger than 40 MB" >&2; exit 1; }  # with the general GPU images of every architecture
"$root/.venv/bin/python" -m venv "$work/venv"
# torch of the checkout's environment, rather than another gigabyte of it.
packages=$(cd "$work/venv"/lib/python*/site-packages && pwd)
(cd "$root"/.venv/lib/python*/site-packages && pwd) >"$packages/checkout.pth"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps "${wheels[-1]}"
"$work/venv/bin/linnet" list >/dev/null
"$work/venv/bin/linnet" check --random 20 softmax delta >/dev/null
[[ $(find "$packages/linnet" -name 'liblinnet.so*' | wc -l) == 1 ]] || { echo "package: liblinnet.so is not held once" >&2; exit 1; }
"$work/venv/bin/python" - <<'PYTHON'
import pathlib
import sys

import torch

import linnet

where = pathlib.Path(linnet.__file__)
assert where.is_relative_to(sys.prefix), f"{where} is not the installed package"
q, k, v = (torch.randn(2, 65, 4, 32, dtype=torch.float64, requires_grad=True) for _ in range(3))
ours = linnet.softmax(q, k, v, causal=True)
heads_first = [x.transpose(1, 2) for x in (q, k, v)]
theirs = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)
torch.testing.assert_close(ours, theirs)
torch.testing.assert_close(torch.autograd.grad(ours.sum(), q), torch.autograd.grad(theirs.sum(), q))
print(f"package: linnet {linnet.__version__} of {where.parent.name} agrees with torch {torch.__version__}, forward and backward")
PYTHON
