#!/usr/bin/env bash
# The demo with every kind of hybrid model, to more ranks, to fewer, and to numbers that do not divide; with groups in
# their own memory, and in shared pages.
set -euo pipefail
# shellcheck source=cases.bash
. "$(dirname "$0")/cases.bash"

moves() { # moves MODEL PREFILL_RANKS DECODE_RANKS
    succeeds "$1 from TP $2 to TP $3" 'Verified after each round' demo --requests 2 --rounds 1 --tokens 70 \
        --memory-limit 1g --model "$1" --prefill "tp=$2" --decode "tp=$3,block=24,order=hnd"
}

for model in nemotron-3-nano-30b qwen3-next-80b-a3b granite-4.0-h-small jamba-1.5-mini kimi-linear-48b-a3b \
    gemma-4-26b-a4b deepseek-v3.2 deepseek-v4-flash; do
    moves "$model" 2 4
    moves "$model" 4 2
    moves "$model" 3 2
done

shares() { # shares MODEL PREFILL_RANKS PREFILL_PAGES DECODE_RANKS DECODE_PAGES
    succeeds "$1 from TP $2 to TP $4, attention and state in shared pages" 'Verified after each round' \
        demo --requests 2 --rounds 1 --tokens 70 --memory-limit 2g --model "$1" \
        --prefill "tp=$2,share-pages=yes,$3" --decode "tp=$4,share-pages=yes,$5"
}

# Each engine divides the pages that a state fills into as many kernel blocks as fit, a number of its own. If attention
# needs less than a state, attention is padded; if it needs more, the state is.
shares nemotron-3-nano-30b 4 block=2096,kernel=131 1 block=4176,kernel=261
shares nemotron-3-nano-30b 2 block=2096,kernel=131 4 block=1200,state.order=sd
shares nemotron-3-nano-30b 3 block=1600,kernel=10,order=kv-outer 2 block=24,order=hnd
shares granite-4.0-h-small 4 block=16 2 block=24,order=hnd
shares granite-4.0-h-small 2 block=400,kernel=25 4 block=24,order=hnd,state.order=sd
shares granite-4.0-h-small 3 block=400,page-align=4096 2 block=24,order=hnd
shares qwen3-next-80b-a3b 4 block=544,kernel=34 2 block=512,kernel=4,order=hnd
shares qwen3-next-80b-a3b 2 block=544,kernel=34,gdn.order=sd 4 block=512,order=kv-outer
shares qwen3-next-80b-a3b 3 block=544,kernel=34 2 block=24
shares jamba-1.5-mini 4 block=48,kernel=3 2 block=600
shares kimi-linear-48b-a3b 4 block=512 2 block=960,kernel=60
shares kimi-linear-48b-a3b 2 block=24 4 block=960,kda.order=sd
shares gemma-4-26b-a4b 2 block=16 4 block=24,order=hnd
shares gemma-4-26b-a4b 8 block=16,swa.block=32 3 block=24,order=layers-first

succeeds "shared pages on one side only" 'Verified after each round' demo --requests 2 --rounds 1 --tokens 70 \
    --memory-limit 2g --model kimi-linear-48b-a3b --prefill tp=4,share-pages=yes,block=512 --decode tp=2
succeeds "shared pages are said" '^prefill .* shared pages of 589824 bytes;' \
    plan --model kimi-linear-48b-a3b --prefill tp=4,share-pages=yes,block=512
refuses "a wrong state in a shared page is found" 1 'layer 0, part conv.x, row 1, channel 7, element 0: ' \
    demo --memory-limit 512m --tokens 20 --requests 2 --model jamba-1.5-mini --corrupt 1,0,conv.x,1,7,0 \
    --prefill tp=4,share-pages=yes --decode tp=2,share-pages=yes

finish
