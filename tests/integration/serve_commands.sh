#!/usr/bin/env bash
# kvferry serve: an operator drains and resumes it by kvferry ask, if that is allowed.
set -euo pipefail
# shellcheck source=cases.bash
. "$(dirname "$0")/cases.bash"
# shellcheck source=serving.bash
. "$(dirname "$0")/serving.bash"

serve plain
refuses "an engine takes commands only if it is told to" 1 'KVF_E_PERMISSION: takes no commands without keys' \
    ask "$met" drain

serve local --local-commands
local=$met
local_pid=$pid
refuses "what it cannot do is refused, with what it can" 1 \
    'ask: prefill, rank 0: KVF_E_UNSUPPORTED: kvferry serve does not hand over; it takes drain, resume and list$' \
    ask "$local" hand-over 0.0 --to "$local"
run ask "$local" list
if [ "$code" -eq 0 ] && [ "$(grep -c '^prefill, rank [0-3], keeps 6 requests$' "$output")" -eq 4 ] &&
    [ "$(grep -cE '^  [01]\.[0-2] +[0-9]+ +[0-9.]+ m?s +no limit +0 of 1 +no$' "$output")" -eq 24 ]; then
    pass "it lists what each rank holds"
else
    fail "it lists what each rank holds" "exit code $code"
fi
run ask "$local" list 1. --json
if [ "$code" -eq 0 ] && is_json "$output" && [ "$(grep -c '"name": *"kept"' "$output")" -eq 4 ] &&
    [ "$(grep -o '\\"count\\":3,' "$output" | wc -l)" -eq 4 ] && ! grep -q '\\"0\.' "$output"; then
    pass "or only what has such a name, as JSON"
else
    fail "or only what has such a name, as JSON" "exit code $code"
fi
succeeds "or nothing" '^prefill, rank 3, keeps 0 requests$' ask "$local" list nobody
succeeds "what it holds for nobody is no reason to wait" '^prefill has drained: 4 ranks$' ask "$local" drain
succeeds "and holds nothing any more" '^prefill, rank 0, keeps 0 requests$' ask "$local" list
refuses "a drained engine gives nothing out" 1 'the engine drains: it takes no new requests' \
    fetch "$local" --rounds 1 --timeout 20
succeeds "it has drained, whoever asks again" '^prefill has drained: 4 ranks$' ask "$local" drain
succeeds "it can be resumed" '^prefill serves again: 4 ranks$' ask "$local" resume
succeeds "and is fetched from again" '^Verified after each round: all ' fetch "$local"
succeeds "an engine that serves may be resumed, too" '^prefill serves again: 4 ranks$' ask "$local" resume

"$KVFERRY" fetch "$local" --rounds 1000 >"$folder/fetched" 2>&1 &
fetching=$!
sleep 1
succeeds "it drains while it is fetched from" '^prefill has drained: 4 ranks$' ask "$local" drain --deadline 30
code=0
wait "$fetching" || code=$?
if [ "$code" -eq 1 ] && grep -q 'the engine drains' "$folder/fetched"; then
    pass "and the one that fetches is told why"
else
    fail "and the one that fetches is told why" "exit code $code: $(cat "$folder/fetched")"
fi
succeeds "resumed after that, it serves" '^prefill serves again: 4 ranks$' ask "$local" resume
succeeds "everything that it held before" '^Verified after each round: all ' fetch "$local"
succeeds "and drains once more" '^prefill has drained: 4 ranks$' ask "$local" drain
kill "$local_pid"
code=0
wait "$local_pid" || code=$?
if [ "$code" -eq 0 ]; then pass "a drained engine ends well"; else fail "a drained engine ends well" "exit code $code"; fi

few=("${work[@]}")
work=(--tokens 4 --requests 130)
serve many --local-commands
work=("${few[@]}")
run ask "$met" list
if [ "$code" -eq 0 ] && [ "$(grep -c '^prefill, rank [0-3], keeps 260 requests$' "$output")" -eq 4 ] &&
    [ "$(grep -c ' 0 of 1 ' "$output")" -eq $((4 * 256)) ] &&
    [ "$(grep -c '^  and 4 more: give the beginning of a name to list fewer$' "$output")" -eq 4 ]; then
    pass "of many requests it lists 256, and says how many more there are"
else
    fail "of many requests it lists 256, and says how many more there are" "exit code $code"
fi

# ---- keys

for name in server client operator stranger; do
    "$KVFERRY" keys >"$folder/$name.json"
done
public_of() { sed -n 's/.*"public_key": *"\(.*\)".*/\1/p' "$folder/$1.json"; }
serve keyed --key-file "$folder/server.json" --allow "$(public_of client)" --command-key "$(public_of operator)"
keyed=$met
refuses "a key that may fetch may not command" 1 'KVF_E_PERMISSION: does not allow this key to give commands' \
    ask "$keyed" drain --key-file "$folder/client.json"
refuses "nor may a stranger" 1 'does not allow this end.s key' \
    ask "$keyed" drain --key-file "$folder/stranger.json" --timeout 3
refuses "or look" 1 'KVF_E_PERMISSION: does not allow this key to give commands' \
    ask "$keyed" list --key-file "$folder/client.json"
succeeds "a key that may command drains it" '^prefill has drained: 4 ranks$' \
    ask "$keyed" drain --key-file "$folder/operator.json"
succeeds "and resumes it" '^prefill serves again: 4 ranks$' ask "$keyed" resume --key-file "$folder/operator.json"
refuses "but may not fetch" 1 'does not allow this key to speak' \
    fetch "$keyed" --key-file "$folder/operator.json" --timeout 10
succeeds "the other key may" '^Verified' fetch "$keyed" --key-file "$folder/client.json"

# ---- what cannot be

refuses "operators without keys" 2 '--command-key has no effect: without --key-file nobody has a key' \
    serve --command-key "$(public_of operator)"
refuses "operators, and nobody who may fetch" 2 '--command-key needs --allow' \
    serve --key-file "$folder/server.json" --command-key "$(public_of operator)"
refuses "programs of this machine, where keys decide" 2 '--local-commands has no effect: with --key-file' \
    serve --key-file "$folder/server.json" --local-commands
refuses "programs of this machine, where others come too" 2 'local_commands is set together with insecure' \
    serve --insecure --listen 'tcp://10.255.255.1:*' --local-commands
refuses "an operator's key that is none" 2 '--command-key is "nonsense"; allowed: the public_key' serve --key-file "$folder/server.json" \
    --allow "$(public_of client)" --command-key nonsense

finish
