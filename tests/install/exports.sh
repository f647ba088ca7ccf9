#!/usr/bin/env bash
# The shared library exports what the public headers declare, and nothing else:
# exports.sh LIBRARY INCLUDE_DIR [HEADER_TO_LEAVE_OUT...]
set -euo pipefail
library=$1
include=$2
shift 2

mapfile -t headers < <(find "$include/kvferry" -name '*.h' | while read -r header; do
    [[ " $* " == *" ${header#"$include/kvferry/"} "* ]] || echo "$header"
done)
exported=$(nm -D --defined-only "$library" | awk '{ print $NF }' | sort -u)
declared=$(perl -0777 -ne 's{/\*.*?\*/}{}gs; print "$1\n" while /\bKVF_API\b[^;{}]*?\b(kvf_\w+)\s*\(/g' \
    "${headers[@]}" | sort -u)
if [ -z "$declared" ]; then
    echo "no declarations found in $include/kvferry"
    exit 1
fi

bad=0
extra=$(comm -23 <(echo "$exported") <(echo "$declared"))
if [ -n "$extra" ]; then
    printf 'exported, but in no public header:\n%s\n' "$extra"
    bad=1
fi
absent=$(comm -13 <(echo "$exported") <(echo "$declared"))
if [ -n "$absent" ]; then
    printf 'declared in a public header, but not exported:\n%s\n' "$absent"
    bad=1
fi
exit "$bad"
