#!/bin/sh
# timed.sh NAME COMMAND...: runs the command and, when it succeeds, keeps its time in build/times for `make help`.
#
#   timed.sh --help MAKEFILE    prints the targets of a Makefile that have a text after ##, with their last time
times=build/times
if [ "$1" = --help ]; then
  [ -f $times ] || times=/dev/null
  awk -F ':.*## ' -v times=$times '
    BEGIN { while ((getline line < times) > 0) { split(line, word, "\t"); last[word[1]] = word[2] } }
    /^[a-z-]+:.*## / {
      took = ""
      if ($1 in last) took = sprintf(" (last time: %d min %02d s)", last[$1] / 60, last[$1] % 60)
      printf "  make %-13s %s%s\n", $1, $2, took
    }' "$2"
  exit
fi
name=$1
shift
begin=$(date +%s)
"$@" || exit
mkdir -p build
{ [ -f $times ] && grep -v "^$name	" $times; printf '%s\t%d\n' "$name" $(($(date +%s) - begin)); } > $times.new
mv $times.new $times
