#!/usr/bin/env bash
# A producer is killed in the middle of a request: the ranks that wait for it are told and get their blocks back, and
# the next requests, over the same blocks, arrive from the process that replaces it.
set -euo pipefail
# shellcheck source=cases.bash
. "$(dirname "$0")/cases.bash"

small=(--memory-limit 128m --tokens 40 --requests 4)

# kills NAME SENTENCE ARGUMENTS...: the demo prints the sentence about the death, decode rank 0 lost its producer and
# must recompute all blocks of the request, and then everything is verified.
kills() {
    local name=$1 sentence=$2 line
    shift 2
    run demo "${small[@]}" --kill "$@"
    if [ "$code" -ne 0 ]; then
        fail "$name" "exit code $code"
        return
    fi
    for line in "$sentence" 'decode rank 0 +KVF_E_PEER_LOST +[0-9.]+ [mu]?s +[0-9.]+ [mu]?s +2 of 2$' \
        '^decode rank 0 was told: ' '^A new process took its place' '^Verified after each round'; do
        if ! grep -Eq -- "$line" "$output"; then
            fail "$name" "nothing printed is like '$line'"
            return
        fi
    done
    pass "$name"
}

wrote='^Prefill rank 0 was killed when it had written [1-9].* and 16 layers of it were ready'
read='^Prefill rank 0 was killed when decode rank 0 had read [1-9].* of the first request'
kills "a producer dies while it writes" "$wrote" --push
kills "a producer dies while it writes memory that it does not map" "$wrote" --push --brought-memory
kills "a producer dies while it writes packed" "$wrote" --push --move packed
kills "a producer dies while it writes by messages" "$wrote" --push --transport messages
kills "a producer dies while it is read" "$read"
kills "a producer dies while it is read by messages" "$read" --transport messages

succeeds "requests are written, too" 'Verified after each round' demo "${small[@]}" --push
succeeds "requests are written packed from brought memory" 'shm, packed, brought memory' \
    demo "${small[@]}" --push --move packed --brought-memory

run demo "${small[@]}" --push --kill --json
if [ "$code" -eq 0 ] && is_json "$output" && grep -q '"layers_ready": *16' "$output" &&
    [ "$(grep -c '"free_s"' "$output")" -eq 5 ]; then
    pass "all that live are in the JSON"
else
    fail "all that live are in the JSON" "exit code $code"
fi

refuses "a wrong element that the new process brings is named" 1 \
    'request 1, layer 5, part v, token 17, head 3, element 40: expected 0x[0-9a-f]{4}, found 0x[0-9a-f]{4}$' \
    demo "${small[@]}" --push --kill --corrupt 1,5,v,17,3,40
refuses "ranks of one process are not killed one by one" 2 '--kill ends a process, and with --transport inproc' \
    demo "${small[@]}" --kill --transport inproc
refuses "half of what is written as a whole is refused" 2 'tokens of fewer than two layers' \
    demo --memory-limit 256m --tokens 20 --requests 2 --push --kill --prefill pp=32 --decode tp=1

finish
