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
without_gpu "a driver that is too old is no sign that there is no GPU" 1 \
    '^check-cuda: .*the driver is for CUDA 11\.0.*no sign that there is no GPU$' check-cuda FAKE_CUDA_VERSION=11000
without_gpu "tests of which none ran are no success" 1 '^0 passed, 0 failed, parts skipped: 1, over a stand-in' check-cuda \
    KVF_CHECK_STAND_IN=1 KVF_CHECK_PARTS=vllm KVF_PYTHON=
without_gpu "a Python that is not there is named before anything runs" 2 \
    'KVF_PYTHON is "/no/such/python", and no such program is found$' check-cuda KVF_CHECK_STAND_IN=1 \
    KVF_PYTHON=/no/such/python
without_gpu "a part that is unknown is refused" 2 'has "fault"; allowed: probe,programs,faults,' check-cuda \
    KVF_CHECK_PARTS=programs,fault
written=$(mktemp -d)
trap 'rm -rf "$output" "$errors" "$written"' EXIT
if [ -x "$KVF_BIN_DIR/bench/cuda" ]; then
    without_gpu "the benchmark without a GPU says so and ends with 0" 0 \
        '^skipped: no GPU \(there is no CUDA here: the driver knows no device\)$' bench-cuda FAKE_CUDA_DEVICES=0
    without_gpu "the benchmark with a driver that is too old fails" 1 'no sign that there is no GPU$' bench-cuda \
        FAKE_CUDA_VERSION=11000
    without_gpu "figures of a stand-in for a driver are refused" 1 'these figures mean nothing$' bench-cuda \
        KVF_BENCH_PARTS=checksums KVF_BENCH_BYTES=65536 KVF_BENCH_ROUNDS=1 "KVF_BENCH_FIGURES=$written"
    name="what the benchmark prints is in a file that its parts name"
    if [ -s "$written/cuda-checksums.log" ]; then
        pass "$name"
    else
        fail "$name" "there is no $written/cuda-checksums.log"
    fi

    # The second part lasts twenty times as long as the first; the file is there before it ends.
    name="a benchmark that is killed leaves the figures of the parts before"
    figures=$written/figures.json
    LD_LIBRARY_PATH=$KVF_BIN_DIR/tests/fakes/cuda KVF_BENCH_PARTS=checksums,peers KVF_BENCH_BYTES=262144 \
        KVF_BENCH_ROUNDS=64 "$KVF_BIN_DIR/bench/cuda" --json "$figures" >"$output" 2>"$errors" </dev/null &
    for ((i = 0; i < 1000; i++)); do
        if [ -s "$figures" ] || ! kill -0 $! 2>/dev/null; then
            break
        fi
        sleep 0.1
    done
    code=0
    kill -KILL $! 2>/dev/null || true
    wait $! 2>/dev/null || code=$?
    if [ "$code" -eq 137 ] && is_json "$figures" && [ "$(grep -c '"title"' "$figures")" -eq 1 ]; then
        pass "$name"
    elif [ "$code" -eq 77 ] && grep -q '^skipped: this build has no device code' "$output"; then
        echo "[  SKIPPED ] $name"
    else
        fail "$name" "exit code $code, or no figures of one part"
    fi
fi

# What carry-cuda packs runs from its own folder, with nothing of the source tree and nearly no environment.
if [ -x "$KVF_BIN_DIR/bench/cuda" ] && [ -x "$KVF_BIN_DIR/tests/faults/faults" ]; then
    carried=$(mktemp -d)
    trap 'rm -rf "$output" "$errors" "$written" "$carried"' EXIT
    # from_archive NAME CODE PATTERN COMMAND...
    from_archive() {
        local name=$1 wanted=$2 pattern=$3
        shift 3
        code=0
        timeout "${LIMIT:-120}" env -i "PATH=/usr/bin:/bin" "LD_LIBRARY_PATH=$KVF_BIN_DIR/tests/fakes/cuda" FAKE_CUDA_DEVICES=0 \
            "$carried/kvferry-cuda/run" "$@" >"$output" 2>"$errors" </dev/null || code=$?
        if [ "$code" -eq "$wanted" ] && tail -qn 1 "$output" "$errors" | grep -Eq -- "$pattern"; then
            pass "$name"
        else
            fail "$name" "exit code $code, or no last line like '$pattern'"
        fi
    }
    if KVF_CARRY_PYTHON=0 "$scripts/carry-cuda" --built "$KVF_BIN_DIR" "$carried/all.tar.gz" >"$output" 2>"$errors" &&
        tar -C "$carried" -xzf "$carried/all.tar.gz"; then
        from_archive "a carried check-cuda says that there is no GPU" 0 '^skipped: no GPU ' check-cuda
        from_archive "a carried bench-cuda says that there is no GPU" 0 '^skipped: no GPU ' bench-cuda
        from_archive "the recorded answers are packed, with their program" 0 '^[1-9][0-9]* passed, 0 failed, 0 skipped$' \
            bash -c 'cd "${0%/run}" && build/release/tests/vectors/vectors tests/vectors' "$carried/kvferry-cuda/run"
        rm "$carried/kvferry-cuda/build/release/tests/unit/stage_arenas_test"
        from_archive "a program that was not carried is a failure" 1 'stage_arenas_test is not built$' check-cuda
    else
        fail "what check-cuda needs is packed" "carry-cuda failed"
    fi
fi

finish
