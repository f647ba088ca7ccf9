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


# Small models whose configurations have what the built-in ones have not.
model=$(mktemp)
trap 'rm -f "$output" "$errors" "$model"' EXIT

described() { # described NAME FIELDS ARGUMENTS...
    local name=$1
    echo "{\"dtype\": \"bfloat16\", \"num_hidden_layers\": 8, \"hidden_size\": 1024, $2}" >"$model"
    shift 2
    moves "$name" --memory-limit 1g --tokens 203 --model "$model" "$@"
}

described "an indexer's key for 16 tokens beside latents, and what waits to become one" \
    '"model_type": "glm5_next_text", "kv_lora_rank": 512, "qk_rope_head_dim": 0, "index_kpool": 16,
    "linear_num_heads": 16, "linear_head_dim": 64, "linear_conv_kernel_dim": 4' \
    --prefill tp=4 --decode tp=2,block=48
described "an indexer's key for 4 tokens beside heads, and two states in a layer, one of them on every rank" \
    '"model_type": "qwen4_exp_text", "num_attention_heads": 16, "num_key_value_heads": 2, "indexer_head_dim": 128,
    "indexer_compress_ratio": 4, "ple_layer_ids": [1, 6], "linear_num_key_heads": 8, "linear_num_value_heads": 16,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4' \
    --prefill tp=2,order=hnd --decode tp=4,block=24
described "four convolutions beside attention, by the heads of windows and of other layers" \
    '"model_type": "inkling_text", "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
    "swa_num_key_value_heads": 8, "swa_head_dim": 64, "sliding_window_size": 64, "local_layer_ids": [0, 1, 2, 4],
    "sconv_kernel_size": 4' \
    --prefill tp=4 --decode tp=2,block=24,pp=2
described "latents of another size in a window" \
    '"model_type": "dots3_note", "kv_lora_rank": 512, "qk_rope_head_dim": 64, "swa_kv_lora_rank": 768,
    "swa_qk_rope_head_dim": 32, "sliding_window_size": 64, "layer_types": ["full_attention", "sliding_attention",
    "sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "sliding_attention",
    "full_attention"]' \
    --prefill tp=2 --decode tp=1,block=32
described "entries that the layers behind read" \
    '"model_type": "deepseek_v41", "head_dim": 512, "index_head_dim": 128, "sliding_window": 128,
    "compress_ratios": [0, 2, 2, 2, 1, 1, 1, 0], "kv_source_layer_ids": [1, 4], "index_source_layer_ids": [1, 4]' \
    --prefill tp=2 --decode tp=1,block=24
described "latents without rotated elements, latents that other layers read, and an indexer's key without a latent" \
    '"model_type": "mistral_large4_text", "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "kv_source_layers": [0, 1, 1, 3, 0, 5, 3, 7], "indexer_types": ["full", "full", "shared", "full", "full", "shared",
    "shared", "shared"]' \
    --prefill tp=2 --decode tp=1,block=48
described "layers that tokens pass through three times, whose copies are on other pipeline stages" \
    '"model_type": "inkling2_loop_text", "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
    "swa_num_key_value_heads": 8, "swa_head_dim": 64, "sliding_window_size": 64, "conv_kernel_size": 4,
    "loop_layer_index_start": 2, "loop_layer_index_end": 6' \
    --prefill tp=4 --decode tp=2,block=24,pp=2

finish
