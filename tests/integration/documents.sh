#!/usr/bin/env bash
# What the documents say is so: lines that begin with "kvferry" exit with 0, and print what stands behind their "#",
# whatever the spaces; excerpts are in the example they are of; sentences of the library are the library's.
set -euo pipefail
# shellcheck source=cases.bash
. "$(dirname "$0")/cases.bash"

root=$(dirname "$0")/../..
folder=$root/docs

# Lines of the blocks of shell of one document.
commands_of() {
    sed -n '/^```sh$/,/^```$/p' "$1" | grep '^kvferry '
}

for name in choosing-shapes operating; do
    count=0
    while read -r _ line; do
        count=$((count + 1))
        words=$(sed 's/ *#.*//' <<<"$line")
        says=
        [[ $line == *#* ]] && says=$(sed 's/ \+$//; s/ \+/ +/g; s/.*/(^|[^[:alnum:]])&([^[:alnum:]]|$)/' <<<"${line#*# }")
        # shellcheck disable=SC2086 # the words of the line
        succeeds "$name: kvferry $words" "$says" $words
    done < <(commands_of "$folder/$name.md")
    # A document whose lines are not found would pass for nothing.
    if [ "$count" -ge 1 ]; then pass "$name has commands"; else fail "$name has commands" "none"; fi
done

# is_so NAME COMMAND...: a case that any command decides.
is_so() {
    local name=$1
    shift
    if "$@" >"$output" 2>"$errors"; then pass "$name"; else fail "$name" "it is not so"; fi
}

# Each block of C stands in the example, in one piece. Spaces are as they are there.
excerpts=0
excerpt=
inside=no
while IFS= read -r line; do
    if [ "$line" = '```c' ]; then
        inside=yes excerpt=
    elif [ "$line" = '```' ] && [ "$inside" = yes ]; then
        inside=no excerpts=$((excerpts + 1))
        example=$(<"$root/examples/agents.c")
        is_so "embedding: excerpt $excerpts is in examples/agents.c" test "${example/"$excerpt"/}" != "$example"
    elif [ "$inside" = yes ]; then
        excerpt+=$line$'\n'
    fi
done <"$folder/embedding.md"
is_so "embedding has excerpts" test "$excerpts" -ge 1

sentences=0
while IFS= read -r sentence; do
    sentences=$((sentences + 1))
    is_so "operating: \"$sentence\" is said by the library" grep -rqF "$sentence" "$root/src"
done < <(sed -n 's/^| "\([^"]*\)" |.*/\1/p' "$folder/operating.md")
is_so "operating has sentences" test "$sentences" -ge 1

finish
