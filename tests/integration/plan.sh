#!/usr/bin/env bash
# The output of kvferry plan, models and help.
set -euo pipefail
# shellcheck source=cases.bash
. "$(dirname "$0")/cases.bash"

unread=$(mktemp)
many=$(mktemp)
trap 'rm -f "$output" "$errors" "$unread" "$many"' EXIT

succeeds "each head range is read from its holder" '^ +1 +2 +full +k v +0-31 +heads 4-5 +all$' plan
succeeds "on one host short runs go directly" ' direct$' plan --transport shm
succeeds "UCX without RDMA goes packed" ' packed$' plan --transport ucx/emulated
run plan --fabrics
if grep -q '^libfabric ' "$output"; then
    succeeds "libfabric over TCP goes packed" ' packed$' plan --transport libfabric/emulated
    succeeds "libfabric over TCP has its prediction" '^libfabric/emulated +[0-9.]+ [mu]?s +[0-9.]+ [mu]?s ' plan --fabrics
fi
succeeds "memory that was brought goes packed in short runs" ' packed$' \
    plan --transport shm/brought --prefill order=hnd,tp=1 --decode order=nhd,tp=1
succeeds "cells that the two sides cut unlike go packed on one host, too" ' packed$' \
    plan --transport shm --prefill tp=1,order=hnd,keys=by-channel --decode tp=1
succeeds "keys by channel are said" '^prefill .* 16 hnd with keys by channel$' plan --prefill order=hnd,keys=by-channel
sed 's/"num_hidden_layers": *[0-9]*/"num_hidden_layers": 65536/' "$(dirname "$0")/../../models/llama-3.1-8b.json" >"$many"
LIMIT=60 succeeds "as many layers as there may be are planned in no time" '^2 plans, each verified' plan --model "$many"
succeeds "every transport has its prediction" '^shm/brought +[0-9.]+ [mu]?s +[0-9.]+ [mu]?s ' plan --fabrics
succeeds "what copies cost is measured" 'time as calibrated for shm: ' plan --calibrate
succeeds "memory of devices goes packed" '^ +0 +0 .* packed$' plan --transport shm --cuda-memory both
succeeds "which costs of devices were measured is said" \
    '^Memory: prefill cuda, decode host. Measured on one NVIDIA H100 .* Assumed: ' plan --cuda-memory prefill
succeeds "the costs of cuda were measured, whatever is calibrated" \
    'time as measured on one H100 for cuda: 0.3 ns a run, 368 GB/s, ' plan --transport cuda --calibrate
succeeds "each transport is predicted for memory of devices, which cuda moves directly" \
    '^cuda +[0-9.]+ us +[0-9.]+ ms +[0-9.]+ us +direct +0.3 ns ' plan --fabrics --cuda-memory both
succeeds "bytes of devices cost something beside memory that was brought, too" \
    '^shm/brought +[0-9.]+ ms +[0-9.]+ ms +packed ' plan --fabrics --cuda-memory both
refuses "a side that there is not is refused" 2 '--cuda-memory is "gpu"; allowed: prefill, decode and both' \
    plan --cuda-memory gpu
succeeds "plans are verified" '2 plans, each verified' plan
succeeds "sizes that do not divide are cut" 'heads 2-3 ' plan --prefill tp=3 --decode tp=2
succeeds "pipeline stages are cut" ' 20-31 ' plan --prefill pp-layers=20+12 --decode tp=2
succeeds "token shares are shown" ' 3 mod 4$' plan --model deepseek-v3 --prefill tp=4,dcp=4 --decode tp=1
succeeds "projections of a state are cut each by itself" 'conv.x +.*channels 0-4095' \
    plan --model jamba-1.5-mini --prefill tp=2 --decode tp=1
succeeds "a config.json is read" '^model +llama-3.1-8b.json, 32 layers' \
    plan --model "$(dirname "$0")/../../models/llama-3.1-8b.json"
sed '0,/{/s//{ "new_head_dim": 8,/' "$(dirname "$0")/../../models/llama-3.1-8b.json" >"$unread"
long_runs=(--prefill tp=2,order=nhd --decode tp=2,order=nhd)
warns "a size that was not read is warned of" 'warning: .*: new_head_dim is 8: it may decide a size' \
    plan --model "$unread" "${long_runs[@]}"
warns "models that come with the library are read without a warning" '' models
succeeds "what regions hold is shown" '^prefill +0-31 .* full +0-31 +k v +BPNHD ' plan
succeeds "a region that is cut unevenly has a line for each part" ' conv.x ' \
    plan --model jamba-1.5-mini --prefill tp=2 --decode tp=1
succeeds "the models are listed" '^llama-3.1-70b +80 ' models
succeeds "a command's options are explained" '--memory-limit BYTES' help demo
succeeds "orders are explained" 'packed-nhd +L\|BNHP' plan --help
succeeds "the commands are listed" '^  bench ' --help
succeeds "help tells of itself, too" '^Usage: kvferry COMMAND ' help help
succeeds "and has help" '^Usage: kvferry COMMAND ' help --help
succeeds "the version is said" '^kvferry [0-9]+\.[0-9]+\.[0-9]+$' --version

prints_json() { # prints_json NAME PATTERN ARGUMENTS...
    local name=$1 pattern=$2
    shift 2
    run "$@"
    if [ "$code" -eq 0 ] && is_json "$output" && grep -Eq -- "$pattern" "$output"; then
        pass "$name"
    else
        fail "$name" "exit code $code, or not JSON, or nothing like '$pattern'"
    fi
}

prints_json "plans can be had as JSON" '"prefill_rank": *3' plan --json
prints_json "predictions by transport can be had as JSON" '"packed_sources": *[0-9]' plan --json --fabrics
prints_json "where caches are is in the JSON" '"decode_memory": *"cuda"' plan --json --cuda-memory decode
prints_json "plans of state can be had as JSON" '"part": *"conv.B"' \
    plan --json --model nemotron-3-nano-30b --decode tp=2,state.order=sd
prints_json "regions have their strides in the JSON" '"stride": *[0-9]+' plan --json
prints_json "a size that was not read is in the JSON" '^ *"new_head_dim is 8' plan --json --model "$unread"
prints_json "the models can be had as JSON" '"name": *"deepseek-v3"' models --json

finish
