#!/usr/bin/env bash
# The progress that is shown on a terminal only goes forward.
set -euo pipefail
# shellcheck source=cases.bash
. "$(dirname "$0")/cases.bash"

if ! command -v script >/dev/null; then
    echo "this machine has no script(1) that makes a terminal"
    finish
    exit
fi
folder=$(mktemp -d)
trap 'rm -rf "$output" "$errors" "$folder"' EXIT

code=0
timeout 120 script -qec "$KVFERRY demo --memory-limit 32m --tokens 20 --requests 2 --prefill tp=2 --decode tp=1" \
    "$folder/terminal" >"$output" 2>"$errors" </dev/null || code=$?
tr '\r' '\n' <"$folder/terminal" | grep -ao '[a-z ]*, step [0-9]* of [0-9]*, [0-9]*% of all.*' >"$folder/progress" || true
sed 's/.*, step \([0-9]*\) of \([0-9]*\), \([0-9]*\)%.*/\1 \2 \3/' "$folder/progress" >"$folder/numbers"
# Each step is shown at least when it begins. There are 5 steps, and 3 in each of the 2 rounds.
if [ "$code" -eq 0 ] && awk '$1 < step || $3 < share || $3 > 100 || $2 != 11 { exit 1 } { step = $1; share = $3 }
        END { exit step != 11 }' "$folder/numbers"; then
    pass "steps and their share only go forward, to the last of those that were told"
else
    cp "$folder/progress" "$output"
    fail "steps and their share only go forward, to the last of those that were told" "exit code $code"
fi
if grep -q 'about [0-9]* s left' "$folder/progress"; then
    pass "the time that is left is told"
else
    fail "the time that is left is told" "it is not"
fi
run demo --memory-limit 32m --tokens 20 --requests 2 --prefill tp=2 --decode tp=1
if [ "$code" -eq 0 ] && [ ! -s "$errors" ]; then pass "a file gets none"; else fail "a file gets none" "exit code $code"; fi

finish
