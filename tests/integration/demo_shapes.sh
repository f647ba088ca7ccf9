#!/usr/bin/env bash
# The demo between engines that differ in every way that is allowed.
set -euo pipefail
# shellcheck source=cases.bash
. "$(dirname "$0")/cases.bash"

moves() { # moves NAME ARGUMENTS...
    local name=$1
    shift
    [[ " $* " == *" --requests "* ]] || set -- "$@" --memory-limit 256m --requests 3
    succeeds "$name" 'Verified after each round' demo --rounds 1 "$@"
}

moves "tensor parallel sizes need not divide each other" \
    --tokens 70 --prefill tp=3 --decode tp=2,block=24,order=hnd
moves "more ranks than heads share heads" --tokens 40 --prefill tp=16 --decode tp=2
moves "decode ranks that share heads spread over prefill ranks that do" \
    --tokens 20 --prefill tp=16,block=8 --decode tp=12,block=12,order=packed-hnd
moves "decode may have more ranks than prefill" --tokens 70 --prefill tp=2,order=hnd --decode tp=8
moves "uneven pipeline stages on both sides" --tokens 70 --prefill tp=2,pp-layers=5+20+7 --decode tp=1,pp=4
moves "blocks of one engine hold many of the other's" --tokens 150 --prefill tp=2,block=4 --decode tp=2,block=64
moves "blocks of one engine are inside the other's" --tokens 150 --prefill tp=2,block=128 --decode tp=2,block=3
moves "kernel blocks are smaller than logical ones, each side in its way" \
    --tokens 150 --prefill tp=2,block=48,kernel=3 --decode tp=2,block=40,kernel=5
moves "K and V packed on one side and in buffers of their own on the other" \
    --tokens 70 --prefill tp=2,order=packed-nhd --decode tp=1,order=kv-outer
moves "blocks first on one side and layers first on the other" \
    --tokens 70 --prefill tp=2,order=blocks-first --decode tp=2,block=24,order=layers-first
moves "padded pages" --tokens 70 --prefill tp=2,page=40000 --decode tp=4,block=24,page-align=4096,order=hnd
for types in "bf16 f32" "f32 bf16" "f16 bf16" "bf16 f16" "f32 f16" "f16 f32" \
    "bf16 fp8" "fp8 f16" "f32 fp8_e5m2" "fp8_e5m2 bf16" "fp8 fp8_e5m2"; do
    read -r from to <<<"$types"
    moves "elements of $from become $to" \
        --tokens 40 --prefill "tp=4,dtype=$from" --decode "tp=2,block=24,order=hnd,dtype=$to"
done
for way in auto packed direct; do
    moves "keys by channel become whole, $way" --tokens 70 --move "$way" \
        --prefill tp=4,order=hnd,keys=by-channel --decode tp=2,block=24,order=nhd
    moves "whole keys go by channel, $way" --tokens 70 --move "$way" \
        --prefill tp=2,order=nhd --decode tp=4,block=24,kernel=3,order=hnd,keys=by-channel
done
moves "keys by channel are in blocks of other lengths" \
    --tokens 70 --prefill tp=3,order=hnd,keys=by-channel --decode tp=2,block=24,order="LP|BHN",keys=by-channel
moves "keys by channel become f32" \
    --tokens 40 --prefill tp=2,order=hnd,keys=by-channel --decode tp=4,block=24,dtype=f32
moves "keys become f32 and states bf16" --model nemotron-3-nano-30b --tokens 20 --requests 2 --memory-limit 512m \
    --prefill tp=2 --decode tp=4,dtype=f32,state.dtype=bf16
moves "latents become FP8 beside an indexer's keys and scales, which stay" --model deepseek-v3.2 --tokens 40 \
    --memory-limit 512m --requests 2 --prefill tp=2 --decode tp=4,block=32,dtype=fp8
moves "equal shapes" --tokens 70 --prefill tp=2,block=16 --decode tp=2,block=16
moves "ranks that share heads serve fewer ranks" --tokens 20 --prefill tp=16 --decode tp=4
moves "a stage without a layer that is cached meets and parts like any other" \
    --model nemotron-3-nano-30b --tokens 20 --requests 2 --memory-limit 512m --prefill pp=52 --decode tp=2
moves "a single token" --tokens 1 --prefill tp=2 --decode tp=1,block=5
moves "tokens dealt out to ranks on the prefill side" \
    --model deepseek-v3 --tokens 200 --prefill tp=4,dcp=4 --decode tp=2,block=64
moves "tokens dealt out to ranks on the decode side" \
    --model deepseek-v3 --tokens 200 --prefill tp=2,block=64 --decode tp=4,dcp=2,dcp-width=8
moves "tokens dealt out differently on both sides" \
    --model deepseek-v3 --tokens 200 --prefill tp=6,dcp=3,dcp-width=4 --decode tp=4,dcp=4,dcp-width=1,block=24
moves "heads and tokens dealt out at once" --tokens 100 --prefill tp=16,dcp=2 --decode tp=2,block=24,order=hnd

# What they push may be over before they say that it is ready.
latent=$(mktemp)
trap 'rm -f "$output" "$errors" "$latent"' EXIT
echo '{"layers": 1, "groups": [{"name": "mla", "layers": [0],
    "parts": [{"name": "latent", "dtype": "bf16", "units": 1, "cell_elements": 8}]}]}' >"$latent"
succeeds "ranks of which nobody wants anything push as well" 'Verified after each round' demo --groups "$latent" \
    --push --prefill tp=16 --decode tp=1 --tokens 4 --requests 64 --in-flight 64 --rounds 6 --memory-limit 16m

finish
