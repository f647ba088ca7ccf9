#!/usr/bin/env bash
# A room includes itself and the rooms before it; a folder inside a room, such as a fabric, belongs to that folder
# alone; and the command includes public headers only: rooms.sh SOURCE
set -euo pipefail
cd "$1/src"

# In the order of docs/architecture.md.
rooms=(base model shard plan topology request kernel transport wire link agent engine)
bad=0
allowed=""
for room in "${rooms[@]}"; do
    allowed+="${allowed:+|}$room"
    [ -d "$room" ] || continue
    if grep -nE '^ *# *include *"' -r "$room" --include='*.[ch]' |
        grep -vE "^[^:]*:[0-9]+: *# *include *\"($allowed)/[^/\"]+\"" |
        grep -vE "^($room/[^/]+)/[^/:]+:[0-9]+: *# *include *\"\1/[^/\"]+\""; then
        echo "$room may include \"$allowed\" headers, by room/name.h, and a folder in it its own, by room/folder/name.h"
        bad=1
    fi
done
if [ -d cli ] && grep -nE '^ *# *include *"[^"]*/' -r cli --include='*.[ch]'; then
    echo "the command may include its own headers and public ones only"
    bad=1
fi
exit "$bad"
