#!/usr/bin/env bash
# kvferry transports: which kinds work on this machine, with which libraries, and why others do not.
set -euo pipefail
# shellcheck source=cases.bash
. "$(dirname "$0")/cases.bash"

fakes=$KVF_BIN_DIR/tests/fakes
export FAKE_CUDA_DEVICES=1

succeeds "the kinds of the build are listed" '^shm +host +host +yes' transports
succeeds "a library that is given in vain is no failure, and is named with the reason" \
    '^ucx does not work here: .*/no/such/libucp.so: .*No such file|^shm' transports --ucx-library /no/such/libucp.so
refuses "a word too many" 2 '"extra" is not expected' transports extra

if [[ "$("$KVFERRY" transports)" =~ (^|$'\n')cuda\ +host\ +host ]]; then
    fail "cuda moves memory of devices, not of the host" "host memory is listed"
else
    pass "cuda moves memory of devices, not of the host"
fi
run transports --json
if [ "$code" -eq 0 ] && is_json "$output" && grep -q '"kind": *"inproc"' "$output" && grep -q '"why_not": *""' "$output"; then
    pass "the kinds can be had as JSON"
else
    fail "the kinds can be had as JSON" "exit code $code, or not JSON"
fi

with_devices=(env "LD_LIBRARY_PATH=$fakes/cuda" "$KVFERRY")
if [[ "$("${with_devices[@]}" transports)" == *"CUDA device 0: stand-in 0, compute capability 9.0, 4 SMs, 1.0 GiB, "* ]]; then
    pass "devices are listed, with what their memory moves by"
else
    fail "devices are listed, with what their memory moves by" "no such line"
fi
if [[ "$(FAKE_CUDA_DEVICES=0 "${with_devices[@]}" transports)" == *"device memory does not move: "*"the driver knows no device"* ]]; then
    pass "why there are no devices is said"
else
    fail "why there are no devices is said" "no such line"
fi

run transports
if grep -q '^libfabric ' "$output"; then
    succeeds "libfabric is left alone where there is none of its network cards" \
        '^libfabric does not work here: this machine has no network card of EFA|^libfabric +network +host, CUDA +yes' transports
    succeeds "a libfabric that is given in vain is named with the reason" \
        '^libfabric does not work here: .*/no/such/libfabric.so: .*No such file' \
        transports --libfabric-provider net --libfabric-library /no/such/libfabric.so
    succeeds "a library that is no libfabric is refused" '^libfabric does not work here: .*libcuda.so.1: it has no fi_version' \
        transports --libfabric-provider net --libfabric-library "$fakes/cuda/libcuda.so.1"
    refuses "a libfabric without a name" 2 'libfabric.library is ""' transports --libfabric-provider net --libfabric-library ''
    refuses "two providers at once" 2 'libfabric.provider is "net,tcp"' transports --libfabric-provider net,tcp
else
    echo "libfabric is not in this build"
fi
for provider in tcp net; do # the name of TCP depends on the version of libfabric
    run transports --libfabric-provider "$provider"
    if ! grep -Eq '^libfabric +network +host, CUDA +yes' "$output"; then
        echo "this machine has no libfabric with $provider"
        continue
    fi
    here=(transports --libfabric-provider "$provider")
    succeeds "libfabric is listed with version and file, $provider" \
        '^libfabric +network +host, CUDA +yes +[0-9]+\.[0-9]+ +/.*/libfabric[^/]*$' "${here[@]}"
    succeeds "the interface that is asked for is taken, $provider" "^libfabric finds $provider/lo\$" \
        "${here[@]}" --libfabric-domain lo
    succeeds "an interface that there is not is named, $provider" \
        "^libfabric does not work here: .* provider \"$provider\" .*for the interface no-such" \
        "${here[@]}" --libfabric-domain no-such
    succeeds "of several libraries the first that is a libfabric is loaded, $provider" '^libfabric +network +host, CUDA +yes' \
        "${here[@]}" --libfabric-library "/no/such/file:$fakes/cuda/libcuda.so.1:libfabric.so.1"
    succeeds "requests move by the provider that is given, $provider" ' libfabric' demo --memory-limit 40m --tokens 12 \
        --requests 2 --rounds 1 --transport libfabric --libfabric-provider "$provider" --libfabric-domain lo
done

if [ ! -e "$fakes/libno_ucx.so" ]; then
    echo "UCX is not in this build"
    finish
    exit
fi
refuses "a library without a name" 2 'ucx.library is ""' transports --ucx-library ''
succeeds "a UCX that is too old is named with its version" 'ucx does not work here: .*libfake_ucx_old.so: it is UCX 1.12.7' \
    transports --ucx-library "$fakes/libfake_ucx_old.so"
run transports
if ! grep -Eq '^ucx +network +host, CUDA +yes' "$output"; then
    echo "this machine has no UCX"
else
    succeeds "UCX is listed with version and file" '^ucx +network +host, CUDA +yes +[0-9]+\.[0-9]+\.[0-9]+ +/.*/libucp[^/]*$' transports
    succeeds "what UCX finds is listed" '^ucx finds .*tcp/lo' transports
    succeeds "UCX finds no more than it may use" '^ucx finds self/[a-z0-9]+$' transports --ucx-tls self
    succeeds "of several libraries the first that works is loaded" '^ucx +network +host, CUDA +yes' \
        transports --ucx-library "/no/such/file:$fakes/libno_ucx.so:libucp.so.0"
    succeeds "requests move by the library that is given" ' ucx' demo --memory-limit 40m --tokens 12 --requests 2 \
        --rounds 1 --transport ucx --ucx-library "$fakes/libno_ucx.so:libucp.so.0"
fi
finish
