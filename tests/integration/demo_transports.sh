#!/usr/bin/env bash
# The demo over each transport and each kind of memory.
set -euo pipefail
# shellcheck source=cases.bash
. "$(dirname "$0")/cases.bash"

small=(--memory-limit 160m --tokens 75 --requests 5)
verified='Verified after each round'

succeeds "the transport that is chosen on one host is shm" ' shm ' demo "${small[@]}"
succeeds "requests move within one process" ' inproc ' demo "${small[@]}" --transport inproc
succeeds "requests move from brought memory within one process" 'inproc, brought' \
    demo "${small[@]}" --transport inproc --brought-memory
succeeds "requests move from memory that peers map" "$verified" demo "${small[@]}" --transport shm
succeeds "requests move from brought memory that peers read" 'shm, .*brought memory' \
    demo "${small[@]}" --transport shm --brought-memory
succeeds "requests move from brought memory that peers may not read" 'brought memory, no direct read' \
    demo "${small[@]}" --transport shm --brought-memory --no-direct-read
succeeds "one request at a time moves as well" "$verified" demo "${small[@]}" --in-flight 1
succeeds "more requests in flight than there are move as well" "$verified" demo "${small[@]}" --in-flight 64

# The way is named where bytes went packed.
for kind in inproc shm messages; do
    for push in "" --push; do
        for way in auto direct packed; do
            said=" $kind  "
            [ "$way" != packed ] || said=" $kind, packed  "
            succeeds "requests move over $kind, $way${push:+, written}" "$said" \
                demo "${small[@]}" --transport "$kind" --move "$way" ${push:+"$push"}
        done
    done
done
succeeds "requests move packed from brought memory" 'shm, packed, brought memory' \
    demo "${small[@]}" --move packed --brought-memory

run demo "${small[@]}" --transport ucx
if [ "$code" -eq 1 ] && grep -q 'KVF_E_UNSUPPORTED' "$errors"; then
    echo "UCX is not in this build"
else
    succeeds "requests move over UCX" ' ucx' demo "${small[@]}" --transport ucx
    succeeds "requests move over UCX from brought memory" 'ucx, .*brought memory' \
        demo "${small[@]}" --transport ucx --brought-memory
    far=(--memory-limit 40m --tokens 12 --requests 2 --rounds 1 --transport ucx --ucx-tls tcp,self)
    succeeds "requests move packed over UCX and TCP, as is chosen" 'packed' demo "${far[@]}"
    succeeds "requests move direct over UCX and TCP" ' ucx ' demo "${far[@]}" --move direct
fi

run demo "${small[@]}" --transport libfabric
if [ "$code" -ne 0 ] && grep -Eq 'KVF_E_UNSUPPORTED|--transport is "libfabric"' "$errors"; then
    echo "libfabric is not in this build, or not on this machine"
else
    for push in "" --push; do
        for way in auto direct packed; do
            said=' libfabric'
            [ "$way" != packed ] || said=' libfabric, packed  '
            succeeds "requests move over libfabric, $way${push:+, written}" "$said" \
                demo "${small[@]}" --transport libfabric --move "$way" ${push:+"$push"}
        done
    done
    succeeds "requests move over libfabric from brought memory" 'libfabric, .*brought memory' \
        demo "${small[@]}" --transport libfabric --brought-memory
fi

run demo "${small[@]}" --json
if [ "$code" -eq 0 ] && is_json "$output" && grep -q '"verified_bytes"' "$output"; then
    pass "the figures of a demo can be had as JSON"
else
    fail "the figures of a demo can be had as JSON" "exit code $code, or not JSON"
fi

finish
