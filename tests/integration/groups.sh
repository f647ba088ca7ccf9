#!/usr/bin/env bash
# Models of groups that are described by hand, families, and what to do about an unknown family.
set -euo pipefail
# shellcheck source=cases.bash
. "$(dirname "$0")/cases.bash"

folder=$(mktemp -d)
trap 'rm -rf "$output" "$errors" "$folder"' EXIT

# The groups that the command writes for a model are read as that model again.
for model in llama-3.1-8b deepseek-v3.2 deepseek-v4-flash gemma-3-27b nemotron-3-nano-30b; do
    "$KVFERRY" models --model "$model" --json "$folder/$model.json" >"$folder/before"
    run models --groups "$folder/$model.json" --json "$folder/again.json"
    if [ "$code" -eq 0 ] && cmp -s "$output" "$folder/before" && cmp -s "$folder/$model.json" "$folder/again.json"; then
        pass "$model is what its groups say"
    else
        fail "$model is what its groups say" "exit code $code, or another model"
    fi
done
"$KVFERRY" plan --json 2>/dev/null | sed 's/"notes".*//' >"$folder/named"
"$KVFERRY" plan --json --groups "$folder/llama-3.1-8b.json" 2>/dev/null | sed 's/"notes".*//' >"$folder/described"
if cmp -s "$folder/named" "$folder/described"; then
    pass "a plan of described groups is that of the model"
else
    fail "a plan of described groups is that of the model" "they differ"
fi

file=$folder/toy.json
toy() { # toy GROUPS: a file of two layers
    echo "{\"name\": \"toy\", \"layers\": 2, \"groups\": [$1]}" >"$file"
}
k='{"name": "k", "dtype": "bf16", "units": 4, "cell_elements": 64}'
toy "{\"name\": \"full\", \"layers\": [0, 1], \"parts\": [$k]}"
succeeds "what may be left out is left out" '^toy +2 +1.0 KiB +full: 2 layers, k 4x64 bf16$' models --groups "$file"
succeeds "a demo moves it" 'Verified after each round' \
    demo --groups "$file" --prefill tp=2 --decode tp=1 --tokens 20 --requests 2 --rounds 1 --memory-limit 16m
toy "{\"name\": \"csa\", \"tokens_per_step\": 4, \"layers\": [0, 1], \"parts\": [$k]}"
succeeds "prompts that complete no entry are not compared with copying" '^first +0 B +0 +0 B +[^ ]+ [mu]?s +0\.00$' \
    demo --groups "$file" --prefill tp=2 --decode tp=1 --tokens 3 --requests 2 --rounds 1 --memory-limit 16m
refuses "nobody is killed in a request that moves nothing" 2 '--kill: nothing moves .* complete no entry' \
    demo --groups "$file" --prefill tp=2 --decode tp=1 --tokens 3 --requests 2 --memory-limit 16m --kill
toy "{\"name\": \"a\\\"b\", \"layers\": [0, 1], \"parts\": [$k]}"
succeeds "a quote in a group's name is doubled in CSV" '^"tp=1,a""b.block=16","tp=1",1,1,' \
    sweep --groups "$file" --prefill 'tp=1,a"b.block=16' --decode tp=1
deep=$folder/$(printf 'folder/%.0s' $(seq 30))
mkdir -p "$deep"
echo "{\"layers\": 1, \"groups\": [{\"name\": \"full\", \"layers\": [0], \"parts\": [$k]}]}" >"$deep/unnamed.json"
succeeds "a model without a name has that of its file, however deep it lies" '^unnamed.json +1 ' \
    models --groups "$deep/unnamed.json"
refuses "types that the file says already" 2 '--dtype has no effect: the file of --groups' \
    plan --groups "$file" --dtype fp8
toy "{\"name\": \"full\", \"layers\": [0, 1], \"part\": [$k]}"
refuses "a key with a letter left out" 2 'toy.json: group 0: there is no key "part"; allowed: .*do you mean parts\?' \
    plan --groups "$file"
for key in window-tokens Window_Tokens; do
    toy "{\"name\": \"swa\", \"$key\": 16, \"layers\": [0, 1], \"parts\": [$k]}"
    refuses "a key that is spelled otherwise is not passed over: $key" 2 \
        "group 0: there is no key \"$key\"; allowed: .*do you mean window_tokens\\?" plan --groups "$file"
done
toy "{\"name\": \"full\", \"layers\": [0, 1], \"parts\": [${k/64/0}]}"
refuses "an empty cell" 2 'toy.json: group full, part 0: cell_elements is 0; allowed: a whole number from 1' \
    plan --groups "$file"
toy "{\"name\": \"full\", \"layers\": [0, 1], \"parts\": [${k/bf16/bf17}]}"
refuses "an unknown type" 2 'group full, part 0: dtype is "bf17"; allowed: ' plan --groups "$file"
toy "{\"name\": \"full\", \"layers\": [0, 9], \"parts\": [$k]}"
refuses "a layer that the model has not" 2 'toy.json: .*layers' plan --groups "$file"
toy "{\"name\": \"full\", \"layers\": [0, -1], \"parts\": [$k]}"
refuses "no number of a layer" 2 'group full: layers has -1' plan --groups "$file"
toy "{\"name\": \"full\", \"kind\": \"token\", \"layers\": [0], \"parts\": [$k]}"
refuses "an unknown kind" 2 'kind is "token"; allowed: tokens and state' plan --groups "$file"
toy "{\"name\": \"full\", \"layers\": [0, 1], \"na\\u006de\": \"swa\", \"parts\": [$k]}"
refuses "a key that is given twice, however it is spelled" 2 \
    'toy.json: "name" is given twice in one object, at byte 41 and at byte 75$' plan --groups "$file"
toy "{\"name\": \"full\", \"layers\": [0, 1], \"parts\": [${k/\"units\": 4/\"units\": 8, \"units\": 4}]}"
refuses "a key of a part that is given twice" 2 'toy.json: "units" is given twice in one object' plan --groups "$file"
toy "{\"name\": \"a\\\"{\\\"b\\\": \", \"layers\": [0, 1], \"parts\": [$k, ${k/\"k\"/\"v\"}]}"
succeeds "a key that several objects have, and a name like JSON" '^toy +2 ' models --groups "$file"
echo '{"layers": 2, ' >"$file"
refuses "a file that ends too early" 2 'toy.json ends in the middle, at byte 15$' plan --groups "$file"
for text in null 'null\n' 17; do
    printf '%b' "$text" >"$file"
    refuses "a file of $text" 2 'toy.json: is not an object$' plan --groups "$file"
done
echo '{"layers": x}' >"$file"
refuses "a file that is not JSON" 2 'toy.json is not JSON, at byte' plan --groups "$file"
toy "{\"name\": \"full\", \"layers\": [0, 1], \"parts\": [$k]}"
echo '  ' >>"$file"
succeeds "space after the model" '^toy ' models --groups "$file"
echo 'and more' >>"$file"
refuses "text after the model" 2 'toy.json is not JSON, at byte 1[0-9][0-9]: unexpected character' plan --groups "$file"
refuses "no file" 1 '/nonexistent: No such file' plan --groups /nonexistent

succeeds "families are listed" '^llama .*granite' models --families
run models --families --json
if [ "$code" -eq 0 ] && is_json "$output" && grep -q '"nemotron_h"' "$output"; then
    pass "and in JSON"
else
    fail "and in JSON" "exit code $code, or not JSON"
fi
refuses "a type of families" 2 '--dtype has no effect: families are listed' models --families --dtype fp8
echo '{"model_type": "alexnet"}' >"$file"
refuses "an unknown family has a way out" 2 \
    'model_type is "alexnet", .*"kvferry models --families" lists .* --groups takes a model of groups made by hand' \
    plan --model "$file"

# Nothing that a file says begins another line, or moves the cursor of a terminal.
echo '{"model_type": "a\nb\u001b[31mc"}' >"$file"
refuses "an unknown family is named in one line" 2 'model_type is "a\?b\?\[31mc", an unknown' plan --model "$file"
echo '{"a\nb\u001b[31mc": 1}' >"$file"
refuses "and so is an unknown key of groups" 2 'there is no key "a\?b\?\[31mc"; allowed' plan --groups "$file"
: >"$file"
refuses "an empty file is called so" 2 'toy.json is empty; allowed: 1 byte to 1 MiB$' plan --groups "$file"

finish
