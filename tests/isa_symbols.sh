#!/usr/bin/env bash
# Every symbol that the objects of one instruction set offer to the linker must carry that set's namespace in its name. A shared
# one (an inline function of a header, a template of the standard library) would be taken from any object: a machine without
# AVX-512 would then run AVX-512 code, or a fast kernel the slow copy.
#
#   tests/isa_symbols.sh avx2 a.o b.o ...     exit code 0 only if there are objects and all their symbols are their own
set -euo pipefail

isa=$1
shift
[[ $# -gt 0 ]] || {
  echo "no objects of $isa were given" >&2
  exit 1
}
# 6linnet4avx2: linnet::avx2 as the compiler writes it; 6linnet11avx512_bf16 belongs to avx512 too. DW.ref.__gxx_personality_v0 is a pointer, the same in every object.
mangled="6linnet[0-9]+${isa}"
shared=$(nm --defined-only --extern-only "$@" | awk -v own="$mangled" 'NF == 3 && $3 !~ own && $3 != "DW.ref.__gxx_personality_v0" { print $2, $3 }' | c++filt | sort | uniq -c | sort -rn)
if [[ -n $shared ]]; then
  echo "symbols of the $isa objects outside of namespace linnet::$isa (count, kind, name):" >&2
  head -20 <<<"$shared" >&2
  exit 1
fi
echo "$isa: $(nm --defined-only --extern-only "$@" | awk 'NF == 3' | wc -l) symbols in $# objects, all in linnet::$isa"
