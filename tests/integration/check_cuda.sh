#!/usr/bin/env bash
# What scripts/check-cuda does with its programs, some of which are replaced here: limits, logs and counts. Over the stand-in
# for a driver.
set -euo pipefail
# shellcheck source=cases.bash
. "$(dirname "$0")/cases.bash"
scripts=$(cd "$(dirname "$0")/../../scripts" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$output" "$errors" "$work"' EXIT
export KVF_CHECK_LOGS=$work/logs PATH=$work:$PATH

# checks PART [ENVIRONMENT...]: runs a part of check-cuda, whose logs are new.
checks() {
    local part=$1
    shift
    rm -rf "$work/logs"
    code=0
    timeout 120 env "LD_LIBRARY_PATH=$KVF_BIN_DIR/tests/fakes/cuda" KVF_CHECK_STAND_IN=1 "KVF_CHECK_PARTS=$part" "$@" \
        "$scripts/check-cuda" "$KVF_BIN_DIR" >"$output" 2>"$errors" </dev/null || code=$?
}

# says NAME CODE LAST-LINE LINE...: how the command ended; its last line; and lines that it printed, as patterns.
says() {
    local name=$1 wanted=$2 last=$3
    shift 3
    if [ "$code" -ne "$wanted" ] || ! tail -n 1 "$output" | grep -Eq -- "^$last, over a stand-in"; then
        fail "$name" "exit code $code, or no last line like '$last'"
        return
    fi
    for line in "$@"; do
        grep -Eq -- "$line" "$output" && continue
        fail "$name" "nothing printed is like '$line'"
        return
    done
    pass "$name"
}

# A program in place of another, which does what the lines say.
replace() {
    { echo '#!/usr/bin/env bash'; cat; } >"$work/$1"
    chmod +x "$work/$1"
}

if grep -q 'lib[at]san' <(ldd "$KVF_BIN_DIR/tests/fakes/cuda/libcuda.so.1"); then
    echo "[  SKIPPED ] the driver is asked what kvferry assumes: Python cannot load a stand-in with a sanitizer"
else
    checks probe FAKE_CUDA_STRICT=1000
    says "the driver is asked what kvferry assumes" 0 '1 passed, 0 failed, parts skipped: 0' \
        '^  cuIpcGetMemHandle of its memory \[an error\]: 1$' \
        '^  cuMemFree: waits; others wait, too$' '^  cuEventQuery: returns 0$' \
        '^  cuCtxSynchronize: \[900\]; the capture ends with 901$'
fi

# A path with all that is there but Python, as on a small machine.
mkdir "$work/without-python"
for program in bash cat date dirname env grep head mkdir sed sort tail timeout tr; do
    ln -s "$(command -v "$program")" "$work/without-python"
done
checks probe PATH="$work/without-python"
says "without Python the driver is not asked, and that is no failure" 1 '0 passed, 0 failed, parts skipped: 1' \
    '^skipped: what the driver does, since there is no python3'

replace python-that-hangs <<'END_OF_PROGRAM'
case $* in
    *torch*) exit 1 ;;
    *"-m pytest"*) echo begun; sleep 100 ;;
esac
END_OF_PROGRAM
checks python KVF_PYTHON=python-that-hangs KVF_CHECK_LIMIT=1
says "a program that takes too long is ended, and its log has what it said" 1 '0 passed, 3 failed, parts skipped: 1' \
    'took more than 1 s' '^begun$' "^== tensors of the Python package \($work/logs/tensors-of-the-Python-package.log\)"

# Ends check-cuda, whose child has started it, and does not end by itself.
replace python-that-stays <<'END_OF_PROGRAM'
case $* in
    *torch*) exit 1 ;;
    *"-m pytest"*)
        echo $$ >"$(dirname "$0")/stays"
        kill "$(sed -n 's/^PPid:[^0-9]*//p' "/proc/$PPID/status")"
        sleep 100
        ;;
esac
END_OF_PROGRAM
rm -f "$work/stays"
checks python KVF_PYTHON=python-that-stays
says "a command that is ended says how far it came" 143 \
    "ended from outside while $work/logs/tensors-of-the-Python-package.log was written: 0 passed, 0 failed, parts skipped: 0"
name="a command that is ended ends the program that runs"
if [ -s "$work/stays" ] && ! kill -0 "$(cat "$work/stays")" 2>/dev/null; then
    pass "$name"
else
    fail "$name" "it goes on, or was not started"
fi

# Writes how each pytest call loads kernels and what it runs; UCX crashes.
replace python-that-writes <<'END_OF_PROGRAM'
case $* in
    *"-m pytest"*) echo "$CUDA_MODULE_LOADING ${*: -1}" >>"$(dirname "$0")/calls" ;;
esac
case $* in
    *"-m pytest"*--deselect*) echo "=== 5 passed, 1 deselected in 0.1s ===" ;;
    *"-m pytest"*ucx*) kill -SEGV $$ ;;
    *"-m pytest"*) echo "=== 2 passed in 0.1s ===" ;;
esac
END_OF_PROGRAM
rm -f "$work/calls"
checks python KVF_PYTHON=python-that-writes
says "a UCX that crashes leaves the counts of the other tests" 1 '9 passed, 1 failed, parts skipped: 0' \
    'check-cuda: UCX with CUDA: failed with 139'
name="kernels are loaded at once, but for those of torch and of the last test, of streams that wait for layers"
if [ "$(cut -d ' ' -f 1 "$work/calls" | paste -sd ' ')" = "EAGER LAZY EAGER LAZY" ] &&
    tail -n 1 "$work/calls" | grep -q '::test_a_stream_passes_as_layers_arrive$'; then
    pass "$name"
else
    fail "$name" "$(cat "$work/calls")"
fi

checks faults KVF_CHECK_REQUESTS=100000 KVF_CHECK_LONG_LIMIT=1
if grep -q '^skipped: no device code' "$output"; then
    echo "[  SKIPPED ] this build has no device code"
else
    says "the fault harness has a limit of its own" 1 '0 passed, 1 failed, parts skipped: 0' '^faults: seed' 'has not ended in its time' \
        "^== agents under faults, 100000 requests \($work/logs/agents-under-faults-100000-requests.log\)"
fi

# In place of compute-sanitizer: writes which tool runs which program, and answers as it would.
sanitizer() {
    {
        echo 'tool=$(sed "s/.*--tool \([a-z]*\) .*/\1/" <<<"$*")'
        echo 'echo "$tool $(sed "s|.*/tests/unit/||" <<<"$*")" >>"$(dirname "$0")/calls"'
        cat
    } | replace compute-sanitizer
    rm -f "$work/calls"
}

sanitizer <<<'echo "========= Error: Device not supported. Please refer to its documentation"; "${@: -1}"; exit 9'
checks sanitizer
says "a device that compute-sanitizer does not take is skipped by name, whatever the program says" 1 \
    '0 passed, 0 failed, parts skipped: 1' '^skipped: compute-sanitizer does not take this device \(Device not supported\.'

sanitizer <<<'echo "========= Internal error"; exit 9'
checks sanitizer
says "any other failure of compute-sanitizer is one failure" 1 '0 passed, 1 failed, parts skipped: 0' 'Internal error'

sanitizer <<<'echo "[       OK ] a case"'
checks sanitizer
says "programs run under the tools of compute-sanitizer" 0 '14 passed, 0 failed, parts skipped: 0'
name="long runs and received blocks run under memcheck, kernels under all four tools"
if [ "$(grep -c '^memcheck ' "$work/calls")" -eq 6 ] && [ "$(grep -c ' cuda_kernel_test device$' "$work/calls")" -eq 4 ] &&
    grep -q '^memcheck cuda_long_runs_test$' "$work/calls" && grep -q '^memcheck postprocess_device_test$' "$work/calls"; then
    pass "$name"
else
    fail "$name" "$(cat "$work/calls")"
fi

finish
