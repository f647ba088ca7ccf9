#!/usr/bin/env bash
# Other spellings are understood; a wrong name is answered with the existing names and the nearest one; options without
# effect are refused.
set -euo pipefail
# shellcheck source=cases.bash
. "$(dirname "$0")/cases.bash"

folder=$(mktemp -d)
trap 'rm -rf "$output" "$errors" "$folder"' EXIT

# ---- the nearest name

refuses "a command with two letters swapped" 2 'no command "paln"; .* and help \(do you mean plan\?\)$' paln
refuses "a beginning of a command" 2 'do you mean transports\?' trans
refuses "a name that nothing is near" 2 'and help$' xylophone
refuses "an option with a letter left out" 2 '^kvferry: --tokns is not an option of plan \(do you mean tokens\?\)' \
    plan --tokns 5
refuses "an option of others says whose it is" 2 '--in-flight is not an option of plan, but of demo, fetch and bench$' \
    plan --in-flight 3
refuses "a value where none is taken" 2 '--fabrics takes no value' plan --fabrics=3
refuses "one dash" 2 '-x is not an option of plan: options begin with --' plan -x
refuses "a model with a letter left out" 2 'do you mean llama-3.1-8b\?' plan --model lama-3.1-8b
refuses "a transport with a letter too many" 2 '--transport is "shmm"; allowed: auto, .*do you mean shm\?' \
    demo --transport shmm
refuses "a key of a shape" 2 'no key "blokc"; allowed: tp, pp, .*do you mean block\?' plan --decode blokc=8
refuses "a group of a model" 2 'no group "fulll"; the model has full \(do you mean full\?\)' plan --decode fulll.block=8
refuses "an order with two letters swapped" 2 'allowed: nhd, hnd, .*do you mean hnd\?' plan --decode order=hdn

# ---- other spellings

like=$("$KVFERRY" plan --prefill order=hnd --decode order=blocks-first 2>/dev/null)
spelled() { # spelled NAME ARGUMENTS...: the same plan comes out
    local name=$1
    shift
    run plan "$@"
    if [ "$code" -eq 0 ] && [ "$(cat "$output")" = "$like" ]; then
        pass "$name"
    else
        fail "$name" "exit code $code, or another plan"
    fi
}
succeeds "a model in capitals" '^llama-3.1-8b +32 ' models --model Llama-3.1-8B
spelled "orders in capitals" --prefill order=HND --decode order=BLOCKS-FIRST
spelled "orders with underscores" --prefill order=hnd --decode order=Blocks_First
spelled "axes in small letters" --prefill 'order=l|bphn' --decode order=blphn
spelled "axes down to the elements of a cell" --prefill 'order=L|BPHND' --decode order=BLPHND
like=$("$KVFERRY" plan --tokens 2048 --transport shm --prefill blocks=1024 2>/dev/null)
spelled "k for 1024 in any number" --tokens 2k --transport SHM --prefill blocks=1K
spelled "a value behind an equals sign" --tokens=2048 --transport=shm --prefill=blocks=1024

# ---- options that contradict each other, or have no effect

refuses "stages that are counted otherwise" 2 'pp is 2, but pp-layers has 3 stages' plan --prefill pp=2,pp-layers=10+12+10
succeeds "stages that are counted alike" 'pp 3 \(10\+12\+10 layers\)' plan --prefill pp-layers=10+12+10,pp=3
succeeds "stages that cannot be even" 'pp 3 \([0-9]+\+[0-9]+\+[0-9]+ layers\)' plan --decode pp=3
succeeds "even stages need no word" 'tp 1, pp 2;' plan --decode pp=2
refuses "a model and groups" 2 '--model and --groups both say' plan --model llama-3.1-8b --groups x
refuses "a width of no shares" 2 'dcp-width has no effect' plan --prefill dcp-width=4
refuses "state of a model without" 2 'state.order has no effect: the model keeps no state' plan --prefill state.order=sd
refuses "a type of state of a model without" 2 '--state-dtype has no effect: llama-3.1-8b keeps no state' \
    plan --state-dtype f32
printf '{"model_type": "deepseek_v4", "num_hidden_layers": 1, "dtype": "bfloat16", "compress_ratios": [128]}' \
    >"$folder/compressed.json"
succeeds "a type of what compressors keep" 'compressor 1x1024 f16' \
    models --model "$folder/compressed.json" --state-dtype f16
refuses "UCX for a transport without" 2 '--ucx-tls has no effect' demo --transport shm --ucx-tls tcp
refuses "libfabric for a transport without" 2 '--libfabric-provider has no effect' \
    demo --transport ucx --libfabric-provider net
refuses "how memory is read that is mapped" 2 '--no-direct-read has no effect' demo --no-direct-read
refuses "a plan of one engine" 2 '--tokens has no effect: one engine is explained' explain tcp://127.0.0.1:1 --tokens 5
refuses "leave to listen where no keys are needed" 2 '--insecure has no effect: --listen is on loopback' serve --insecure
refuses "a type of a model that is not named" 2 "--dtype has no effect: the engine's own model" \
    fetch tcp://127.0.0.1:1 --dtype fp8

for option in json html groups; do
    refuses "a file without a name for --$option" 2 "^kvferry: --$option is \"\"; allowed: the name of a file\$" \
        plan --$option ''
done

# ---- short runs, by their predicted cost

warns "runs that are short are warned of" 'warning: runs are short for shm, 256 B on average: .* long runs would take' plan
warns "long ones are not" '' plan --prefill tp=2,order=hnd --decode tp=2,order=hnd
warns "what is short for one transport" 'warning: runs are short for ucx,' \
    plan --transport ucx --prefill tp=4,order=nhd --decode tp=2,order=nhd
warns "is not for another" '' plan --transport shm --prefill tp=4,order=nhd --decode tp=2,order=nhd

# ---- JSON, the same everywhere

# writes_json NAME COMMAND...: instead of its text, or beside it into a file.
writes_json() {
    local name=$1
    shift
    run "$@" --json
    cp "$output" "$folder/alone"
    rm -f "$folder/beside.json"
    run "$@" --json "$folder/beside.json"
    if [ "$code" -eq 0 ] && is_json "$folder/alone" && is_json "$folder/beside.json" && ! is_json "$output" &&
        [ -s "$output" ]; then
        pass "$name"
    else
        fail "$name" "exit code $code"
    fi
}
small=(--memory-limit 32m --tokens 20 --requests 2 --rounds 1)
for command in plan models "models --families" transports doctor "sweep --prefill tp=1/2 --decode tp=1" \
    "simulate --requests 20"; do
    # shellcheck disable=SC2086 # the words of the command
    writes_json "$command writes JSON instead of its text, or beside it into a file" $command
done
writes_json "so does a demo" demo "${small[@]}"
writes_json "and a bench" bench "${small[@]}"
succeeds "numbers of 64 bits are whole in JSON" '"seed": *18446744073709551615,' \
    demo "${small[@]}" --seed 18446744073709551615 --json
succeeds "also those of a cache that no machine has" '"bytes": *18446744065119617024,' \
    plan --json --prefill blocks=4294967294,page=4294967296
run keys --json "$folder/keys.json"
if [ "$code" -eq 0 ] && is_json "$folder/keys.json" && [ "$(stat -c %a "$folder/keys.json")" = 600 ]; then
    pass "a file of keys is its owner's alone"
else
    fail "a file of keys is its owner's alone" "$(ls -l "$folder")"
fi
chmod 644 "$folder/keys.json"
run keys --json "$folder/keys.json"
if [ "$code" -eq 0 ] && is_json "$folder/keys.json" && [ "$(stat -c %a "$folder/keys.json")" = 600 ]; then
    pass "also a file that others could read before"
else
    fail "also a file that others could read before" "$(ls -l "$folder")"
fi
mkfifo "$folder/pipe"
cat "$folder/pipe" >"$folder/piped.json" &
LIMIT=20 run plan --json "$folder/pipe"
if [ "$code" -eq 0 ] && wait $! && is_json "$folder/piped.json" && [ -s "$folder/piped.json" ]; then
    pass "the JSON may go into a pipe"
else
    fail "the JSON may go into a pipe" "exit code $code"
fi
refuses "a file that cannot be written" 1 '/nonexistent/x: No such file' plan --json /nonexistent/x
refuses "groups that cannot be read" 1 '/nonexistent/g: No such file' plan --groups /nonexistent/g \
    --json "$folder/failed.json"
if [ ! -e "$folder/failed.json" ]; then
    pass "a command that fails leaves no file for its JSON"
else
    fail "a command that fails leaves no file for its JSON" "$(ls -l "$folder/failed.json")"
fi
run plan --json --decode pp-layers=20+12
if grep -q '"pp_layers": *\[ *$' "$output" || grep -Eq '"pp_layers": *\[ *20, *12 *\]' "$output"; then
    pass "stages are in the JSON"
else
    fail "stages are in the JSON" "no pp_layers"
fi

finish
