#!/usr/bin/env bash
# The demo with every kind of model whose groups differ, to more ranks, to fewer, and to numbers that do not divide.
set -euo pipefail
# shellcheck source=cases.bash
. "$(dirname "$0")/cases.bash"

moves() { # moves MODEL PREFILL_RANKS DECODE_RANKS
    succeeds "$1 from TP $2 to TP $3" 'Verified after each round' demo --requests 2 --rounds 1 --tokens 70 \
        --memory-limit 1g --model "$1" --prefill "tp=$2" --decode "tp=$3,block=24,order=hnd"
}

for model in nemotron-3-nano-30b qwen3-next-80b-a3b granite-4.0-h-small jamba-1.5-mini kimi-linear-48b-a3b \
    gemma-4-26b-a4b deepseek-v3.2; do
    moves "$model" 2 4
    moves "$model" 4 2
    moves "$model" 3 2
done

finish
