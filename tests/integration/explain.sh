#!/usr/bin/env bash
# kvferry explain: describes running engines, and which rank reads what from which.
set -euo pipefail
# shellcheck source=cases.bash
. "$(dirname "$0")/cases.bash"

standing=$KVF_BIN_DIR/tests/integration/standing
folder=$(mktemp -d)
LIMIT=30

# The engines run until their standard input ends, which is when this script ends.
mkfifo "$folder/stay"
exec {stay}<>"$folder/stay"
stop() {
    exec {stay}>&-
    wait
    rm -rf "$output" "$errors" "$folder"
}
trap stop EXIT

# stand NAME ARGUMENTS...: starts an engine; sets `met` to its endpoint.
stand() {
    mkfifo "$folder/$1"
    "$standing" "$@" <"$folder/stay" >"$folder/$1" {stay}>&- &
    read -r met <"$folder/$1"
}

stand prefill-a llama-3.1-8b 4 16 'L|BPNH'
prefill=$met
stand decode-b llama-3.1-8b 2 24 'L|BPHN'
decode=$met
stand hybrid nemotron-3-nano-30b 2 16 'L|BPHN'
hybrid=$met
stand locked llama-3.1-8b 1 16 'L|BPHN' keys
locked=$met

succeeds "an engine says who it is" '^prefill-a: 4 ranks, tp 4$' explain "$prefill"
succeeds "its shape is read off its introductions" \
    '^  full: layers 0-31; k v 8 heads x 128 bf16 \(2 a rank\); 2 blocks of 16 tokens; order L\|BPNH$' explain "$prefill"
succeeds "its ranks are listed" '^ +3  tcp://127.0.0.1:[0-9]+ +no +0-31 +full 6-7 +1.0 MiB$' explain "$prefill"
succeeds "the plan of a running pair is shown" \
    '^ +1 +2 +32.0 MiB +131 072 +256 B +12.06 ms +15.85 ms +direct$' explain "$prefill" "$decode"
succeeds "plans of a running pair are verified" '2 plans, each verified' explain "$prefill" "$decode"
succeeds "the plan is of the two as they stand" '^ +0 +0 +full +k v +0-31 +heads 0-1 ' explain "$decode" "$prefill"
succeeds "a shape can take the part of the decode engine" '^ +2 +2 +full +k v +0-31 +head 5 ' \
    explain "$prefill" --decode tp=3 --tokens 64
succeeds "a shape can take the part of the prefill engine" '^ +1 +1 +full +k v +0-31 +head 4 ' \
    explain "$decode" --prefill tp=3
succeeds "models with state are explained" '^  ssm.*: layers .*conv\.x [0-9]+ channels' explain "$hybrid"
succeeds "a shape of a model with state is laid out with its model" 'conv.x +.*channels 0-2047' \
    explain "$hybrid" --decode tp=1 --model nemotron-3-nano-30b
"$KVFERRY" models --model nemotron-3-nano-30b --json "$folder/groups.json" >/dev/null
succeeds "the model's groups do as well" 'conv\.x +.*channels 0-2047' \
    explain "$hybrid" --decode tp=1 --groups "$folder/groups.json"

run explain "$prefill" --json
if [ "$code" -eq 0 ] && is_json "$output" && grep -q '"engine": *"prefill-a"' "$output" &&
    [ "$(grep -c '"endpoint"' "$output")" -eq 4 ]; then
    pass "one engine can be had as JSON"
else
    fail "one engine can be had as JSON" "exit code $code, not JSON, or without its four ranks"
fi
run explain "$prefill" "$decode" --json
if [ "$code" -eq 0 ] && is_json "$output" && grep -Eq '"prefill_rank": *3' "$output" &&
    grep -q '"endpoint"' "$output"; then
    pass "all of it can be had as JSON"
else
    fail "all of it can be had as JSON" "exit code $code, not JSON, or without ranks"
fi

# The key pair of ZeroMQ's documentation, which is no secret.
printf '{"public_key": "%s", "secret_key": "%s"}\n' >"$folder/keys.json" \
    'Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID' 'D:)Q[IlAW!ahhC2ac:9*A}h:p?([4%wOTJ%JR%cs'
succeeds "an encrypted engine is visited with keys" '^ +0  tcp://127.0.0.1:[0-9]+ +yes ' \
    explain "$locked" --key-file "$folder/keys.json"
refuses "an encrypted engine does not answer without keys" 1 'explain: ' explain "${locked%%,*}" --timeout 2
refuses "a key without keys of one's own is refused" 1 'key' explain "$locked" --timeout 2

refuses "no endpoint" 2 'explain needs the endpoint of an agent' explain
refuses "three endpoints" 2 'is not expected' explain "$prefill" "$decode" "$hybrid"
refuses "two shapes" 2 'a pair has two sides' explain "$prefill" --decode tp=1 --prefill tp=1
refuses "what is no endpoint" 2 'nonsense' explain nonsense
refuses "nobody there" 1 'no answer within 1.0 s: .*127.0.0.1:1' explain tcp://127.0.0.1:1 --timeout 1
refuses "a pair of unlike models" 1 'full.k.units is' explain "$prefill" "$hybrid"
refuses "a model that is not the engine's" 2 '--model is not what prefill-a caches: ' \
    explain "$prefill" --decode tp=1 --model llama-3.1-70b
refuses "groups that are not the engine's" 2 '--groups is not what prefill-a caches: ' \
    explain "$prefill" --decode tp=1 --groups "$folder/groups.json"
refuses "a shape of a model with state without its model" 2 '--decode needs --model or --groups: hybrid keeps state' \
    explain "$hybrid" --decode tp=1
refuses "no file of keys" 1 '--key-file: /nonexistent: No such file' explain "$locked" --key-file /nonexistent
sed 's/}$/, "secret_key": ""}/' "$folder/keys.json" >"$folder/twice.json"
refuses "a file with a key twice" 2 'twice.json: "secret_key" is given twice in one object, ' \
    explain "$locked" --key-file "$folder/twice.json"
refuses "a file without keys" 2 '--key-file is' explain "$locked" --key-file /dev/null

finish
