#!/usr/bin/env bash
# kvferry transports: which kinds work here, with what, and why others do not.
set -euo pipefail
# shellcheck source=cases.bash
. "$(dirname "$0")/cases.bash"

fakes=$KVF_BIN_DIR/tests/fakes

succeeds "the kinds of the build are listed" '^shm +host +yes' transports
succeeds "a library that is given in vain is no failure, and is named with the reason" \
    '^ucx does not work here: .*/no/such/libucp.so: .*No such file|^shm' transports --ucx-library /no/such/libucp.so
refuses "a word too many" 2 '"extra" is not expected' transports extra

run transports --json
if [ "$code" -eq 0 ] && is_json "$output" && grep -q '"kind": *"inproc"' "$output" && grep -q '"why_not": *""' "$output"; then
    pass "the kinds can be had as JSON"
else
    fail "the kinds can be had as JSON" "exit code $code, or not JSON"
fi

if [ ! -d "$fakes" ]; then
    echo "UCX is not in this build"
    finish
    exit
fi
refuses "a library without a name" 2 'ucx.library is ""' transports --ucx-library ''
succeeds "a UCX that is too old is named with its version" 'ucx does not work here: .*libfake_ucx_old.so: it is UCX 1.12.7' \
    transports --ucx-library "$fakes/libfake_ucx_old.so"
run transports
if ! grep -Eq '^ucx +network +yes' "$output"; then
    echo "this machine has no UCX"
else
    succeeds "UCX is listed with version and file" '^ucx +network +yes +[0-9]+\.[0-9]+\.[0-9]+ +/.*/libucp[^/]*$' transports
    succeeds "what UCX finds is listed" '^ucx finds .*tcp/lo' transports
    succeeds "UCX finds no more than it may use" '^ucx finds self/[a-z0-9]+$' transports --ucx-tls self
    succeeds "of several libraries the first that works is loaded" '^ucx +network +yes' \
        transports --ucx-library "/no/such/file:$fakes/libno_ucx.so:libucp.so.0"
    succeeds "requests move by the library that is given" ' ucx' demo --memory-limit 40m --tokens 12 --requests 2 \
        --rounds 1 --transport ucx --ucx-library "$fakes/libno_ucx.so:libucp.so.0"
fi
finish
