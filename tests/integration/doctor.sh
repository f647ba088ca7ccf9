#!/usr/bin/env bash
# kvferry doctor: what of this machine decides how well caches move.
set -euo pipefail
# shellcheck source=cases.bash
. "$(dirname "$0")/cases.bash"

succeeds "the machine is examined" '^(ok|look) +file descriptors +[0-9 ]+' doctor
succeeds "a kind of transport that does not work is looked at, with the reason" \
    '^look +transport ucx +.*/no/such/libucp.so: |^ok +transport shm' doctor --ucx-library /no/such/libucp.so
refuses "an option of another command" 2 '--tokens is no option of doctor' doctor --tokens 5

run doctor --json
if [ "$code" -eq 0 ] && is_json "$output" && grep -q '"what": *"locked memory"' "$output"; then
    pass "the findings can be had as JSON"
else
    fail "the findings can be had as JSON" "exit code $code, or not JSON"
fi

ulimit -S -n 200
succeeds "few descriptors are seen, with what to do" '^file descriptors: raise it' doctor
finish
