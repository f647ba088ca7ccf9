#!/usr/bin/env bash
# kvferry doctor: the properties of this machine that decide how well caches move.
set -euo pipefail
# shellcheck source=cases.bash
. "$(dirname "$0")/cases.bash"

succeeds "the machine is examined" '^(ok|look) +file descriptors +[0-9 ]+' doctor
succeeds "a kind of transport that does not work is looked at, with the reason" \
    '^look +transport ucx +.*/no/such/libucp.so: |^ok +transport shm' doctor --ucx-library /no/such/libucp.so
if "$KVFERRY" transports | grep -q '^libfabric '; then
    succeeds "libfabric is looked at, with the reason" '^look +transport libfabric +.*/no/such/libfabric.so: ' \
        doctor --libfabric-provider net --libfabric-library /no/such/libfabric.so
    succeeds "what libfabric is for is said" '^transport libfabric: nothing, unless .* EFA or Slingshot: .*libfabric 1.17' \
        doctor --libfabric-provider net --libfabric-library /no/such/libfabric.so
fi
refuses "an option of another command" 2 '--tokens is not an option of doctor' doctor --tokens 5

run doctor --json
if [ "$code" -eq 0 ] && is_json "$output" && grep -q '"what": *"locked memory"' "$output"; then
    pass "the findings can be had as JSON"
else
    fail "the findings can be had as JSON" "exit code $code, or not JSON"
fi

# With the stand-in for a CUDA driver, which the loader finds before any other.
doctor_with() { # doctor_with NAME PATTERN ENVIRONMENT...
    local name=$1 pattern=$2
    shift 2
    if env "LD_LIBRARY_PATH=$KVF_BIN_DIR/tests/fakes/cuda" "$@" "$KVFERRY" doctor >"$output" && grep -Eq -- "$pattern" "$output"; then
        pass "$name"
    else
        fail "$name" "nothing printed is like '$pattern'"
    fi
}
doctor_with "the driver and its devices are found" '^ok +CUDA +a driver for CUDA 12.8, devices: 2' FAKE_CUDA_DEVICES=2
doctor_with "a device is described" \
    '^(ok|look) +CUDA device 1 +stand-in 1, compute capability 9.0, 4 SMs, 1.0 GiB, (code for sm_90|this build has no)'
doctor_with "a device that no code is for is looked at" \
    '^look +CUDA device 0 +stand-in 0, compute capability 7.0.*this build has no' FAKE_CUDA_MAJOR=7
doctor_with "a driver that is too old is named" 'CUDA +there is no CUDA here: the driver is for CUDA 11.8' \
    FAKE_CUDA_VERSION=11080
if env "LD_LIBRARY_PATH=$KVF_BIN_DIR/tests/fakes/cuda" "$KVFERRY" doctor --json >"$output" && is_json "$output" &&
    grep -q '"compute_capability": *"9.0"' "$output"; then
    pass "devices are in the JSON"
else
    fail "devices are in the JSON" "not JSON, or no device in it"
fi

# UCX does not start without memory files, and 1.13 then keeps some memory. Only root may have a /dev/shm of its own.
if unshare -m mount -t tmpfs -o ro tmpfs /dev/shm 2>/dev/null; then
    without_files=$(mktemp)
    trap 'rm -f "$output" "$errors" "$without_files"' EXIT
    cat >"$without_files" <<END
#!/bin/sh
export ASAN_OPTIONS="\$ASAN_OPTIONS:detect_leaks=0"
exec unshare -m sh -c 'mount -t tmpfs -o ro tmpfs /dev/shm && exec "\$0" "\$@"' "$KVFERRY" "\$@"
END
    chmod +x "$without_files"
    KVFERRY=$without_files succeeds "a machine whose /dev/shm is read-only is examined" \
        '^look +/dev/shm +.* free, read-only$' doctor
    KVFERRY=$without_files succeeds "and its transports are listed" '^shm +host +host +yes' transports
fi

few=$(mktemp)
trap 'rm -f "$output" "$errors" ${without_files:+"$without_files"} "$few"' EXIT
printf '#!/bin/sh\nulimit -n 10\nexec "%s" "$@"\n' "$KVFERRY" >"$few"
chmod +x "$few"
KVFERRY=$few succeeds "too few descriptors for any transport are a finding" \
    '^look +transports +[a-z]+: .*: Too many open files$' doctor
KVFERRY=$few succeeds "and what to do about them is said" '^file descriptors: raise it' doctor
printf '#!/bin/sh\nulimit -n 24\nexec "%s" "$@"\n' "$KVFERRY" >"$few"
KVFERRY=$few succeeds "nothing slower takes the place of messages" \
    '^transport messages: without it machines reach each other by' doctor

ulimit -S -n 200
succeeds "few descriptors are seen, with what to do" '^file descriptors: raise it' doctor
finish
