#!/usr/bin/env bash
# The output of kvferry bench. No case depends on the speed of the machine.
set -euo pipefail
# shellcheck source=cases.bash
. "$(dirname "$0")/cases.bash"

small=(--memory-limit 96m --tokens 40 --requests 2 --rounds 3)
file=$(mktemp)
trap 'rm -f "$output" "$errors" "$file"' EXIT

succeeds "planning, runs and moving are measured" '^make a run ' bench "${small[@]}" --json "$file"
if is_json "$file" && grep -q '"ns_per_run"' "$file"; then
    pass "the figures are in the file that was asked for"
else
    fail "the figures are in the file that was asked for" "not JSON"
fi
succeeds "the figures alone can be printed" '"copy_gb_per_s"' bench "${small[@]}" --json -
succeeds "memory that peers read is compared with reading it" '^process_vm_readv ' \
    bench "${small[@]}" --brought-memory
refuses "a file that cannot be written is refused" 1 '/nonexistent/x: No such file' \
    bench "${small[@]}" --json /nonexistent/x

finish
