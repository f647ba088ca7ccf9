#!/usr/bin/env bash
# The demo with models that cache different things.
set -euo pipefail
# shellcheck source=cases.bash
. "$(dirname "$0")/cases.bash"

moves() { # moves NAME ARGUMENTS...
    local name=$1
    shift
    succeeds "$name" 'Verified after each round' demo --requests 3 --rounds 1 "$@"
}

moves "a latent with an indexer key and its scale" \
    --memory-limit 256m --tokens 130 --model deepseek-v3.2 --prefill tp=4 --decode tp=2,block=64
moves "full and sliding-window layers with blocks of different size" --memory-limit 512m --tokens 90 \
    --model gemma-3-27b --prefill tp=3,pp-layers=20+42 --decode tp=2,block=24,swa.block=32,swa.order=hnd
moves "a window that a prompt leaves behind" --memory-limit 256m --tokens 700 \
    --model gpt-oss-120b --prefill tp=2 --decode tp=4,block=24,swa.block=8
moves "layers with different heads and head sizes" --memory-limit 512m --tokens 40 \
    --model gemma-4-26b-a4b --prefill tp=4 --decode tp=2,block=24,order=hnd
moves "keys wider than values, and more KV heads in layers with a window" --memory-limit 512m --tokens 150 \
    --model mimo-v2-flash --prefill tp=4,order=packed-nhd --decode tp=2,block=24,swa.block=8,order=hnd
moves "entries for 4 and for 128 tokens, their indexers, and what is yet to be compressed" \
    --memory-limit 1g --tokens 700 --model deepseek-v4-flash \
    --prefill tp=2,block=256,swa.block=64,csa.state.block=4,hca.state.block=8 \
    --decode tp=1,block=512,swa.block=64,csa.state.block=8,hca.state.block=16,order=hnd
moves "entries whose tokens are shared by ranks" --memory-limit 2g --tokens 700 --model deepseek-v4-flash \
    --prefill tp=2,dcp=2,dcp-width=128,csa.block=256 --decode tp=1,block=24
moves "chunked layers" --memory-limit 256m --tokens 100 \
    --model llama-4-scout --prefill tp=4 --decode tp=2,block=24
moves "fp8 with a scale for each token and head" --memory-limit 256m --tokens 100 \
    --dtype fp8 --scales f32/head --prefill tp=3,order=packed-nhd --decode tp=2,block=24,order=hnd
moves "fp8 with a scale for each token" --memory-limit 256m --tokens 100 \
    --dtype fp8 --scales f32 --prefill tp=4 --decode tp=2,block=24,order=hnd
moves "four-bit elements" --memory-limit 256m --tokens 100 \
    --dtype f4_e2m1 --prefill tp=4 --decode tp=2,block=24,order=hnd
moves "Mamba1 state beside attention" --memory-limit 512m --tokens 100 \
    --model jamba-1.5-mini --prefill tp=4 --decode tp=2,block=24
moves "Mamba2 state in another order" --memory-limit 1g --tokens 100 \
    --model nemotron-3-nano-30b --prefill tp=4 --decode tp=2,block=24,state.order=sd
moves "delta-rule state" --memory-limit 1g --tokens 100 \
    --model qwen3-next-80b-a3b --prefill tp=2,gdn.order=sd --decode tp=4,block=24

finish
