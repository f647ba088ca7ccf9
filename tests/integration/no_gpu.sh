#!/usr/bin/env bash
# scripts/check-cuda and scripts/bench-cuda without a GPU: only a caller that runs them by name may go on without one,
# by their line and exit code. The stand-in for a driver, which the loader finds before any other, has no device here.
set -euo pipefail
# shellcheck source=cases.bash
. "$(dirname "$0")/cases.bash"
scripts=$(cd "$(dirname "$0")/../../scripts" && pwd)

# without_gpu NAME CODE PATTERN SCRIPT [ENVIRONMENT...]
without_gpu() {
    local name=$1 wanted=$2 pattern=$3 script=$4
    shift 4
    code=0
    timeout "${LIMIT:-120}" env "LD_LIBRARY_PATH=$KVF_BIN_DIR/tests/fakes/cuda" "$@" \
        "$scripts/$script" "$KVF_BIN_DIR" >"$output" 2>"$errors" </dev/null || code=$?
    if [ "$code" -eq "$wanted" ] && tail -qn 1 "$output" "$errors" | grep -Eq -- "$pattern"; then
        pass "$name"
    else
        fail "$name" "exit code $code, or no last line like '$pattern'"
    fi
}

without_gpu "tests without a GPU say so and end with 0" 0 \
    '^skipped: no GPU \(there is no CUDA here: the driver knows no device\)$' check-cuda FAKE_CUDA_DEVICES=0
without_gpu "a stand-in for a driver does not count as a GPU" 1 '^check-cuda: the loader finds the stand-in' check-cuda
if [ -x "$KVF_BIN_DIR/bench/cuda" ]; then
    without_gpu "the benchmark without a GPU says so and ends with 0" 0 \
        '^skipped: no GPU \(there is no CUDA here: the driver knows no device\)$' bench-cuda FAKE_CUDA_DEVICES=0
fi

finish
