#!/usr/bin/env bash
# The counts of the check are those of its tests, and a failure is told from a crash.
set -euo pipefail
# shellcheck source=cases.bash
. "$(dirname "$0")/cases.bash"

count=$(dirname "$0")/../../scripts/count-tests
folder=$(mktemp -d)
trap 'rm -rf "$output" "$errors" "$folder"' EXIT

# report FILE [NAME STATUS OUTPUT]...: a report as ctest writes it, of programs with their output.
report() {
    local file=$1
    shift
    {
        echo '<?xml version="1.0" encoding="UTF-8"?><testsuite>'
        while [ $# -gt 0 ]; do
            printf '<testcase name="%s" status="%s"><system-out>%b</system-out></testcase>\n' "$1" "$2" "$3"
            shift 3
        done
        echo '</testsuite>'
    } >"$file"
}

# counted NAME EXPECTED ARGUMENTS...: what the script prints, and its exit code, in one line.
counted() {
    local name=$1 expected=$2 code=0
    shift 2
    python3 "$count" "$@" >"$output" 2>"$errors" || code=$?
    if [ "$(paste -sd' ' "$output") $code" = "$expected" ]; then
        pass "$name"
    else
        fail "$name" "exit code $code, not: $expected"
    fi
}

good='[ RUN      ] a\n[       OK ] a\n[ RUN      ] b\n[       OK ] b\n'
bad='[ RUN      ] a\n[       OK ] a\n[ RUN      ] b\n[  ERROR   ] --- 1 != 2\n[  FAILED  ] b\n[  FAILED  ] 1 test(s)\n'
report "$folder/good" cases run "$good" script run 'well' off disabled '' part run "[  SKIPPED ] 2 test(s)\\n"
report "$folder/bad" cases fail "$bad" script run 'well'
report "$folder/again" cases run "$good"
report "$folder/crash" cases fail '[ RUN      ] a\n[       OK ] a\n[ RUN      ] b\n'
report "$folder/race" cases fail "WARNING: ThreadSanitizer: data race\\n$bad"
report "$folder/script" script fail 'one\ntwo\n'

counted "each case counts, a program without cases once, and what was skipped by itself" "3 0 3 0" "$folder/good"
counted "a case that failed counts as one" "2 1 0 0" "$folder/bad"
counted "a program that crashed counts as one that failed" "1 1 0 0" "$folder/crash"
counted "a program that ran again counts as the last report has it" "3 0 0 0" "$folder/bad" "$folder/again"
counted "the lines that tell of a failure are shown" \
    "cases     [  ERROR   ] --- 1 != 2     [  FAILED  ] b     [  FAILED  ] 1 test(s) 0" --failed "$folder/bad"
counted "without such lines the last ones are shown" "script     one     two 0" --failed "$folder/script"
counted "chance does not explain a crash" \
    "cases: did not come to its end     [ RUN      ] a     [       OK ] a     [ RUN      ] b 1" --failed "$folder/crash"
counted "chance does not explain what a sanitizer found" \
    "cases     WARNING: ThreadSanitizer: data race     [  ERROR   ] --- 1 != 2     [  FAILED  ] b     [  FAILED  ] 1 test(s) 1" \
    --failed "$folder/race"
finish
