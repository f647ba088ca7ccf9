#!/usr/bin/env bash
# The shared library exports what the public headers declare, and nothing else. The static one defines no global name
# without the prefix, none twice, and no writable variable. Loading the library does not need UCX: exports.sh
# SHARED_LIBRARY STATIC_LIBRARY INCLUDE_DIR [HEADER_TO_LEAVE_OUT...]
set -euo pipefail
shared=$1
static=$2
include=$3
shift 3

bad=0
# refuse WHAT NAMES: fails if there is any name; one name a line.
refuse() {
    [ -n "$2" ] || return 0
    printf '%s:\n%s\n' "$1" "$2"
    bad=1
}

mapfile -t headers < <(find "$include/kvferry" -name '*.h' | while read -r header; do
    [[ " $* " == *" ${header#"$include/kvferry/"} "* ]] || echo "$header"
done)
declared=$(perl -0777 -ne 's{/\*.*?\*/}{}gs; print "$1\n" while /\bKVF_API\b[^;{}]*?\b(kvf_\w+)\s*\(/g' \
    "${headers[@]}" | sort -u)
if [ -z "$declared" ]; then
    echo "no declarations found in $include/kvferry"
    exit 1
fi

# The version node is listed too, as an absolute symbol.
exported=$(nm -D --defined-only "$shared" | awk '$2 != "A" { sub(/@.*/, "", $NF); print $NF }' | sort -u)
refuse "exported, but in no public header" "$(comm -23 <(echo "$exported") <(echo "$declared"))"
refuse "declared in a public header, but not exported" "$(comm -13 <(echo "$exported") <(echo "$declared"))"
refuse "exported without a version" "$(nm -D --defined-only "$shared" | awk '$2 != "A" && $NF !~ /@@KVFERRY_/')"

# Of nm's sysv form the columns are: name, value, class, type, size, line, section. Read-only tables that hold
# pointers are in .data.rel.ro.
symbols=$(nm --extern-only --defined-only --format=sysv "$static" |
    awk -F'|' 'NF == 7 { gsub(/ /, ""); print $1, $7 }')
if [ "$(wc -l <<<"$symbols")" -lt "$(wc -l <<<"$declared")" ]; then
    echo "nm finds fewer names in $static than its headers declare"
    exit 1
fi
without=$(awk '$1 !~ /^kvf_/ { print $1 }' <<<"$symbols")
refuse "in the static library without the prefix kvf_" "$without"
refuse "in the static library twice" "$(awk '{ print $1 }' <<<"$symbols" | sort | uniq -d)"
refuse "in the static library, and may be changed by anybody" \
    "$(awk '$2 ~ /^(\.data|\.bss|\*COM\*|\.tbss|\.tdata)/ && $2 !~ /^\.data\.rel\.ro/ { print $1 }' <<<"$symbols")"
# Libraries that are loaded at run time must not be needed to start.
refuse "needed by the shared library" "$(readelf -d "$shared" | grep -E 'NEEDED.*\[libuc[mpst]')"
exit "$bad"
