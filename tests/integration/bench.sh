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
run bench "${small[@]}" --decode tp=2,dtype=f32 --json "$file"
if [ "$code" -eq 0 ] && grep -q '^move ' "$output" && ! grep -Eq '^(verify it|make a run|memcpy|of the limit) |inf' "$output" &&
    is_json "$file" && ! grep -Eq 'verify|per_run|copy' "$file"; then
    pass "what is converted has no runs to make, to prove or to copy"
else
    fail "what is converted has no runs to make, to prove or to copy" "exit code $code"
fi
refuses "a file that cannot be written is refused" 1 '/nonexistent/x: No such file' \
    bench "${small[@]}" --json /nonexistent/x

finish
