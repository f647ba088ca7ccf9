#!/usr/bin/env bash
# kvferry ask: engines of examples/commands.c are drained, and hand a request over.
set -euo pipefail
# shellcheck source=cases.bash
. "$(dirname "$0")/cases.bash"

engine=$KVF_BIN_DIR/examples/commands
folder=$(mktemp -d)
mkfifo "$folder/stay"
exec {stay}<>"$folder/stay" # engines run until it is closed
stop() {
    exec {stay}>&-
    wait
    rm -rf "$output" "$errors" "$folder"
}
trap stop EXIT

# start NAME FILE [spoiled]: starts an engine; its endpoint is the first line of the file.
start() {
    local name=$1 file=$2
    shift 2
    : >"$folder/$file"
    "$engine" "$name" "$@" <"$folder/stay" >"$folder/$file" {stay}>&- &
    for _ in $(seq 300); do
        [ ! -s "$folder/$file" ] || return 0
        sleep 0.1
    done
    return 1
}
at() { head -n 1 "$folder/$1"; }

start prefill first
start decode second
start other third
start prefill spoiled spoiled

succeeds "a request is handed over" '^prefill handed prompt over to decode$' ask "$(at first)" hand-over prompt --to "$(at second)"
if grep -q '^prompt: every element is right$' "$folder/second"; then
    pass "and every element has arrived"
else
    fail "and every element has arrived" "$(cat "$folder/second")"
fi
run ask "$(at second)" hand-over prompt --to "$(at third)" --json
if [ "$code" -eq 0 ] && is_json "$output" && [ "$(grep -c '"KVF_OK"' "$output")" -eq 2 ] &&
    grep -q '"hand over"' "$output" && grep -q '"take over"' "$output"; then
    pass "and again by the one that took it, told as JSON"
else
    fail "and again by the one that took it, told as JSON" "exit code $code"
fi
run ask "$(at second)" hand-over prompt
if [ "$code" -eq 0 ] && [ "$(cat "$output")" = $'decode holds prompt\ntokens 40' ]; then
    pass "held for whoever comes, with what one needs to know"
else
    fail "held for whoever comes, with what one needs to know" "exit code $code"
fi
refuses "an engine that keeps a request takes no other" 1 'ask: other, rank 0: KVF_E_EXISTS: .*no room' \
    ask "$(at first)" hand-over prompt --to "$(at third)" --deadline 600 # it stays held
refuses "an engine that does not list says so" 1 'KVF_E_UNSUPPORTED: this engine knows drain, resume, hand over' \
    ask "$(at first)" list
refuses "whoever takes over must be there before anything is held" 1 'ask: tcp://127.0.0.1:1: no answer within 1.0 s' \
    ask "$(at spoiled)" hand-over prompt --to tcp://127.0.0.1:1 --timeout 1
refuses "and at an endpoint" 2 'ask: endpoint "first" must begin with' ask "$(at spoiled)" hand-over prompt --to first
succeeds "so the request is not held" '^prefill has drained: 1 rank$' ask "$(at spoiled)" drain --deadline 1
succeeds "and is still there" '^prefill serves again: 1 rank$' ask "$(at spoiled)" resume
refuses "what is not kept is not handed over" 1 'ask: prefill, rank 0: KVF_E_NOT_FOUND: .*keeps no such request' \
    ask "$(at first)" hand-over poem --to "$(at third)"

start fourth fourth
refuses "a wrong element is noticed" 1 'ask: fourth, rank 0: KVF_E_MISMATCH: 1 elements are wrong' \
    ask "$(at spoiled)" hand-over prompt --to "$(at fourth)"
run ask "$(at spoiled)" hand-over prompt --json
if [ "$code" -eq 0 ] && is_json "$output" && grep -q '"text": *"40"' "$output"; then
    pass "JSON has what one needs to know, too"
else
    fail "JSON has what one needs to know, too" "exit code $code"
fi
succeeds "an engine drains" '^other has drained: 1 rank$' ask "$(at third)" drain
refuses "and then holds nothing more" 1 'ask: other, rank 0: KVF_E_CANCELLED' \
    ask "$(at third)" hand-over prompt --to "$(at fourth)"
succeeds "it can be resumed" '^other serves again: 1 rank$' ask "$(at third)" resume
succeeds "and then hands over again" '^other handed prompt over to fourth$' \
    ask "$(at third)" hand-over prompt --to "$(at fourth)"
refuses "what was not read in time is cancelled" 1 'ask: prefill, rank 0: KVF_E_TIMEOUT: 1 requests were cancelled' \
    ask "$(at first)" drain --deadline 1

# The others of an engine that takes no commands, and that is not there.
"$KVF_BIN_DIR/tests/integration/standing" standing llama-3.1-8b 1 16 'L|BPNH' <"$folder/stay" >"$folder/standing" {stay}>&- &
for _ in $(seq 300); do
    [ ! -s "$folder/standing" ] || break
    sleep 0.1
done
refuses "an engine takes commands only if it says so" 1 'KVF_E_PERMISSION: takes no commands without keys' \
    ask "$(at standing)" drain
refuses "nobody there to ask" 1 'ask: .*no answer within 1.0 s' ask tcp://127.0.0.1:1 drain --timeout 1

refuses "nothing to ask for" 2 'ask needs the endpoint of an engine and what to ask it for' ask tcp://127.0.0.1:1
refuses "what no engine is asked" 2 '"dance"; allowed: drain, resume, list, hand-over' ask tcp://127.0.0.1:1 dance
refuses "no request" 2 'hand-over needs the name' ask tcp://127.0.0.1:1 hand-over --to tcp://127.0.0.1:2
refuses "one name too many for list" 2 '"b" is not expected' ask tcp://127.0.0.1:1 list a b
for verb in drain resume; do
    refuses "one request too many for $verb" 2 "not expected after $verb" ask tcp://127.0.0.1:1 "$verb" prompt
done
for verb in drain resume list; do
    refuses "somebody to $verb to" 2 '--to has no effect: only hand-over is about another engine' \
        ask tcp://127.0.0.1:1 "$verb" --to tcp://127.0.0.1:2
done

finish
