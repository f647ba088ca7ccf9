#!/usr/bin/env bash
# Within these rooms files call in one direction: no file calls, directly or through others, a file that calls it. Calls
# through tables of functions do not count. calls.sh OBJECTS ROOM... where OBJECTS/ROOM has the object files of a room
set -euo pipefail
objects=$1
shift

bad=0
for room in "$@"; do
    cd "$objects/$room"
    edges=$(for object in *.o; do
        nm "$object" | sed "s/^/$object /"
    done | awk '
        NF == 4 && $3 ~ /[TDRB]/ { home[$4] = $1 }
        NF == 3 && $2 == "U"     { from[++n] = $1; to[n] = $3 }
        END { for (i = 1; i <= n; i++) if (to[i] in home && home[to[i]] != from[i]) print from[i], home[to[i]] }')
    if [ "$(wc -l <<<"$edges")" -lt 5 ]; then
        echo "$room: hardly any calls were found in $PWD"
        bad=1
    fi
    if ! tsort <<<"$edges" >/dev/null; then
        echo "$room: files that call each other in a circle, see above"
        bad=1
    fi
done
exit "$bad"
