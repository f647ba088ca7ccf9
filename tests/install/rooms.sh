#!/usr/bin/env bash
# A room includes only itself and the rooms before it; a folder inside a room, such as a fabric, is included only by
# itself; and the command includes public headers only. The connector uses the kernels and devices, and no room uses
# the connector: rooms.sh SOURCE
set -euo pipefail
cd "$1/src"

# In the order of docs/architecture.md.
rooms=(base model shard plan request kernel cuda port transport stage wire link agent schedule simulate)
bad=0
# check ROOM ALLOWED: checks the other rooms that the files of a room include.
check() {
    [ -d "$1" ] || return 0
    if grep -nE '^ *# *include *"' -r "$1" --include='*.[ch]' |
        grep -vE "^[^:]*:[0-9]+: *# *include *\"($2)/[^/\"]+\"" |
        grep -vE "^($1/[^/]+)/[^/:]+:[0-9]+: *# *include *\"\\1/[^/\"]+\""; then
        echo "$1 may include \"$2\" headers, by room/name.h, and a folder in it its own, by room/folder/name.h"
        bad=1
    fi
}
allowed=""
for room in "${rooms[@]}"; do
    allowed+="${allowed:+|}$room"
    check "$room" "$allowed"
done
check connector "base|kernel|cuda|connector"
if grep -nE '^ *# *include *<kvferry/connector/' -r "${rooms[@]}" cli ../tools --include='*.[ch]'; then
    echo "only connector may include <kvferry/connector/...>"
    bad=1
fi
if [ -d cli ] && grep -nE '^ *# *include *"[^"]*/' -r cli ../tools --include='*.[ch]'; then
    echo "the command and its demo may include their own headers and public ones only"
    bad=1
fi
exit "$bad"
