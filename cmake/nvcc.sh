#!/bin/sh
# nvcc.sh NVCC ARGUMENTS...: runs nvcc and fails on what ptxas only mentions: wgmma instructions that it serialises (C7510 to
# C7518) or a setmaxnreg that it ignores (C7508). Either costs more than half of a kernel's speed.
mkdir -p "$(dirname "$(echo "$*" | sed 's/.* -o \([^ ]*\) .*/\1/')")"
log=$("$@" 2>&1)
status=$?
[ -n "$log" ] && echo "$log" >&2
case "$log" in
  *C7508*|*C751[0-8]*) echo "nvcc.sh: ptxas serialised wgmma or ignored setmaxnreg; see above" >&2; exit 1 ;;
esac
exit $status
