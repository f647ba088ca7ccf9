#!/usr/bin/env bash
# Invalid options are refused with one sentence that names the given value and the allowed ones.
set -euo pipefail
# shellcheck source=cases.bash
. "$(dirname "$0")/cases.bash"

refused() { # refused NAME PATTERN ARGUMENTS...
    local name=$1 pattern=$2
    shift 2
    refuses "$name" 2 "$pattern" "$@"
}

refused "no command" 'a command is needed'
refused "an unknown command" 'no command "ferry"' ferry
refused "help about an unknown command" 'no command "ferry"' help ferry
refused "an unknown option" '--bogus is not an option of plan' plan --bogus
refused "an option of another command" '--in-flight is not an option of plan' plan --in-flight 3
refused "an option without its value" '--tokens needs a value' plan --tokens
refused "an option that is given twice" '--tokens is given twice; give it once' plan --tokens 4 --fabrics --tokens=5
refused "a word too many for help" '"demo" is not expected after help' help plan demo
refused "a word too many for the version" '"plan" is not expected after --version' --version plan
refused "a word too many" '"extra" is not expected' plan extra
refused "zero tokens" '--tokens is "0"; allowed: a whole number from 1' plan --tokens 0
refused "negative tokens" '--tokens is "-1"' plan --tokens -1
refused "a number that is too large" '--requests is "99999999999999999999"' demo --requests 99999999999999999999
refused "a seed that is no number" '--seed is "-1"; allowed: a whole number from 0 to 18446744073709551615$' demo --seed -1
refused "an unknown transport" '--transport is "rdma"; allowed: auto' demo --transport rdma
refused "an unknown element type" '--dtype is "f99"' plan --dtype f99
refused "scales that are neither per token nor per head" '--scales is "f32/x"' plan --scales f32/x
refused "scales of a latent" 'a latent has no K and V' plan --model deepseek-v3 --scales f32
refused "an unknown model" '--model is "nope": there is no such file, and no such model; the models are .*llama-3.1-8b, ' plan --model nope
refused "a model file that is not JSON" 'not JSON' plan --model "$0"
refused "memory in no known unit" '--memory-limit is "4x"' demo --memory-limit 4x
refused "requests that do not fit" '100000 requests of up to [0-9]+ tokens need .* TiB of caches; ' demo --requests 100000
refused "memory for not one request" '1 request of up to 600 tokens needs 1[0-9][0-9]\.[0-9] MiB of caches; ' demo --memory-limit 1m
refused "blocks for not one request" 'group full has 1 blocks, but 1 requests? of up to 600 tokens need' \
    demo --tokens 600 --prefill blocks=1
refused "a rank that does not exist" '"prefill:9" is not a rank' demo --die prefill:9

refused "a shape that is not KEY=VALUE" '--prefill: "tp" is not KEY=VALUE' plan --prefill tp
refused "a shape with an empty piece" '--prefill: "" is not KEY=VALUE; a comma is only between two' plan --prefill tp=2,,pp=2
refused "a shape that ends with a comma" '--decode: "" is not KEY=VALUE' plan --decode tp=2,
refused "an empty piece among alternatives" '--prefill: "" is not KEY=VALUE' sweep --prefill tp=1/2,,pp=2
refused "an unknown key" '--decode: there is no key "foo"' plan --decode foo=1
refused "a key that is given twice" '--decode: tp is given twice, as "2" and "4"' plan --decode tp=2,block=8,TP=4
refused "a key of a group that is given twice" '--prefill: full.block is given twice' \
    plan --prefill full.block=8,block=16,full.block=8
refused "an unknown group" '--decode: there is no group "swa"; the model has full' plan --decode swa.block=8
refused "a key of the engine set for a group" 'tp is a key of the whole engine' plan --decode full.tp=2
refused "a size of zero" '--prefill: tp is "0"; allowed: a whole number from 1 to 65536' plan --prefill tp=0
refused "a size that is no number" '--prefill: block is "x"' plan --prefill block=x
refused "an unknown order" '--decode: order is "zzz"; allowed: nhd, hnd, .*, and axes such as L\|BPNH$' plan --decode order=zzz
refused "more stages than layers" '--prefill pp=99: pp_size is 99; allowed: 1 to 32' plan --prefill pp=99
refused "stages that do not sum to the layers" '--decode pp-layers=16\+17: pp_layers sums to 33; the model has 32' \
    plan --decode pp-layers=16+17
refused "token shares that do not divide the ranks" '--prefill tp=4,dcp=3: dcp_size is 3' plan --prefill tp=4,dcp=3
refused "kernel blocks that do not divide blocks" '--decode block=24,kernel=5: group full: kernel_blocks_per_block is 5, which does not divide' \
    plan --decode block=24,kernel=5
refused "pages smaller than their content" 'page_bytes is 16, but a page has' plan --prefill page=16
refused "keys that are kept in no known way" '--prefill: keys is "split"; allowed: whole and by-channel' \
    plan --prefill keys=split
refused "keys by channel whose tokens are apart" '--prefill: keys=by-channel needs an order in which .*, such as hnd' \
    plan --prefill keys=by-channel
refused "keys by channel where there are none" '--decode: keys=by-channel has no effect: no keys are cached' \
    plan --model deepseek-v3 --decode keys=by-channel
refused "pages that are shared or not" '--decode: share-pages is "maybe"; allowed: yes and no' \
    plan --decode share-pages=maybe
refused "one group that shares pages" 'share-pages is a key of the whole engine' plan --decode full.share-pages=yes
hybrid=(plan --model kimi-linear-48b-a3b)
refused "different numbers of pages that are shared" 'mla and kda share pages, so blocks cannot be 9 and 8' \
    "${hybrid[@]}" --decode share-pages=yes,blocks=9,state.blocks=8
refused "pages of different size that are shared" 'group mla has pages of 99999 bytes in 1 kernel blocks, but pages' \
    "${hybrid[@]}" --decode share-pages=yes,page=99999
refused "shared pages that are too few" 'groups share 1 blocks, but 2 requests of up to 40 tokens need [0-9]+' \
    demo --model kimi-linear-48b-a3b --requests 2 --tokens 40 --decode share-pages=yes,blocks=1
refused "an alignment that no shared page can have" 'page-align 99999999999 with 1 kernel blocks is too large' \
    "${hybrid[@]}" --decode share-pages=yes,page-align=99999999999

for words in help "help plan" "plan --help" --help --version plan "plan --json" "plan --html -" "sweep --html -" \
    "serve --json --memory-limit 16m --tokens 20 --requests 1" "serve --memory-limit 16m --tokens 20 --requests 1" \
    "closed serve --memory-limit 16m --tokens 20 --requests 1" "closed plan"; do
    name="\"$words\" to a full device fails"
    code=0
    # shellcheck disable=SC2086
    case $words in
        closed*) timeout 20 "$KVFERRY" ${words#closed } >&- 2>"$errors" || code=$? ;;
        *) timeout 20 "$KVFERRY" $words >/dev/full 2>"$errors" || code=$? ;;
    esac
    if [ "$code" -ne 1 ]; then
        fail "$name" "exit code $code, not 1"
    elif ! grep -q 'writing to standard output failed$' "$errors"; then
        fail "$name" "stderr does not say so"
    elif [ "$(grep -vc warning: "$errors")" -ne 1 ]; then
        fail "$name" "stderr says it in $(grep -vc warning: "$errors") sentences"
    else
        pass "$name"
    fi
done

finish
