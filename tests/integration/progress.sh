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
if [ "$code" -eq 0 ] && awk '$1 < step || $3 < share || $3 > 100 || $2 != 11 { bad = 1 } { step = $1; share = $3 }
        END { exit bad || step != 11 }' "$folder/numbers"; then
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

code=0
timeout 120 script -qec "$KVFERRY sweep --prefill tp=1/2,order=nhd/hnd --decode tp=1/2 --json $folder/sweep.json" \
    "$folder/terminal" >"$output" 2>"$errors" </dev/null || code=$?
tr '\r' '\n' <"$folder/terminal" | sed -n 's/.*comparing, pair \([0-9]*\) of 8, \([0-9]*\)% of all.*/\1 \2/p' >"$folder/numbers"
# Before the n-th pair, n - 1 of 8 are done.
if [ "$code" -eq 0 ] && awk '$1 != NR || $2 < 12.5 * (NR - 1) - 1 || $2 > 12.5 * (NR - 1) + 1 { bad = 1 }
        END { exit bad || NR != 8 }' "$folder/numbers"; then
    pass "a sweep shows each pair of all, and the share that is done"
else
    cp "$folder/terminal" "$output"
    fail "a sweep shows each pair of all, and the share that is done" "exit code $code"
fi
# Each line of progress is cleared, also before the text that follows the last.
if tail -n +2 "$folder/terminal" | grep -q $'\r\033\[Kprefill,decode,' && ! grep -q 'left"tp=' "$folder/terminal"; then
    pass "the line is cleared before other text"
else
    cp "$folder/terminal" "$output"
    fail "the line is cleared before other text" "it is not"
fi

run sweep --prefill tp=1/2 --decode tp=1
if [ "$code" -eq 0 ] && [ ! -s "$errors" ]; then pass "a file gets none of a sweep"; else fail "a file gets none of a sweep" "exit code $code"; fi
run demo --memory-limit 32m --tokens 20 --requests 2 --prefill tp=2 --decode tp=1
if [ "$code" -eq 0 ] && [ ! -s "$errors" ]; then pass "a file gets none"; else fail "a file gets none" "exit code $code"; fi

finish
