#!/usr/bin/env bash
# The output of kvferry simulate, and the traces that it reads.
set -euo pipefail
# shellcheck source=cases.bash
. "$(dirname "$0")/cases.bash"

work=$(mktemp -d)
trap 'rm -rf "$output" "$errors" "$work"' EXIT

succeeds "a deployment is simulated" '^ends +200 done, 0 failed, 0 lost; 0 engines were killed, 0 cut off' simulate --requests 200
succeeds "nothing is left, and no run is of another request" \
    '^checks +0 runs to or from blocks of another request; 0 requests, leases and' simulate --requests 200 --killed 3
succeeds "the fleet is said" '^fleet +3 prefill and 5 decode engines, 22 ranks; ' \
    simulate --requests 50 --prefill-engines 3 --decode-engines 5
succeeds "states are handed over" '^ends +50 done, ' simulate --requests 50 --model jamba-1.5-mini
succeeds "so are groups that share pages" '^ends +50 done, ' \
    simulate --requests 50 --model gpt-oss-120b --prefill share-pages=yes,tp=2 --decode share-pages=yes,tp=1

# One line of Mooncake's trace (FAST25-release/traces, Apache-2.0), and others in its form.
cat >"$work/mooncake.jsonl" <<'END'
{"timestamp": 27482, "input_length": 2500, "output_length": 5}
{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]}

{"timestamp": 3052, "input_length": 700, "output_length": 0}
END
# Three lines in the form of Azure's traces (Azure Public Dataset, CC-BY 4.0), with their line ends.
printf 'TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03.9799600,4808,10\r\n%s\r\n%s\r\n' \
    '2023-11-16 18:17:04.0319600,3180,8' '2023-11-16 18:18:03,110,27' >"$work/azure.csv"
one=(--prefill tp=1 --decode tp=1 --json)
counts() { # counts NAME EXPRESSION ARGUMENTS...: what is true of the JSON object `out`
    local name=$1 expression=$2
    shift 2
    run simulate "${one[@]}" "$@"
    if python3 -c "import json, sys; out = json.load(open(sys.argv[1])); assert $expression, out" "$output" 2>"$errors"; then
        pass "$name"
    else
        fail "$name" "$(tail -n 3 "$errors")"
    fi
}
token=131072
counts "a trace of Mooncake is read" "out['requests'] == 3 and out['bytes'] == (2500 + 6758 + 700) * $token" \
    --trace "$work/mooncake.jsonl"
counts "its times count, whatever their order" "27.48e9 < out['simulated_ns'] < 28e9" --trace "$work/mooncake.jsonl"
counts "a trace of Azure is read" "out['requests'] == 3 and out['bytes'] == (4808 + 3180 + 110) * $token" \
    --trace "$work/azure.csv"
counts "fractions of its seconds count" "59.02e9 < out['simulated_ns'] < 60.6e9" --trace "$work/azure.csv"
printf '%s\n' 'TIMESTAMP,ContextTokens,GeneratedTokens' '2024-05-10 00:00:00.009930+00:00,2162,5' \
    '2024-05-10 02:00:07.5+02:00,100,6' '2024-05-09 19:00:59-05:00,200,7' >"$work/zones.csv"
counts "so is one whose times have a zone" \
    "out['bytes'] == (2162 + 100 + 200) * $token and 58.98e9 < out['simulated_ns'] < 60.6e9" --trace "$work/zones.csv"
counts "a trace is repeated" "out['bytes'] == (2 * (2500 + 6758 + 700) + 6758) * $token" --trace "$work/mooncake.jsonl" \
    --requests 7
counts "a trace is cut" "out['requests'] == 2 and out['bytes'] == (6758 + 700) * $token" --trace "$work/mooncake.jsonl" \
    --requests 2
counts "a trace is played at another rate" "out['simulated_ns'] < 20e9" --trace "$work/mooncake.jsonl" --rate 1
counts "each time is in the object" "out['hand_over']['p50_ns'] >= out['alone']['p50_ns'] > 0 and out['left'] == 0"
counts "killed engines are counted" "out['killed'] == 2 and out['done'] + out['failed'] + out['lost'] == 1000" --killed 2
counts "so are those that are cut off" "out['cut_off'] == 3 and out['done'] > 900 and out['left'] == 0" --cut-off 3

refuses "a file that is no trace is refused" 2 'line 1 is no request; allowed: an object with timestamp' \
    simulate --trace "$0"
echo '{"timestamp": 5, "input_length": 4294967296, "output_length": 1}' >"$work/long.jsonl"
refuses "numbers that are too large are refused" 2 'line 1 is no request' simulate --trace "$work/long.jsonl"
printf '2023-11-16 18:17:03.97,1,2,3\n' >"$work/wide.csv"
printf '2023-11-16 18:17:03+2x:00,1,2\n' >"$work/zone.csv"
refuses "a zone that is none is refused" 2 'line 1 is no request' simulate --trace "$work/zone.csv"
refuses "lines with more are refused" 2 'line 1 is no request' simulate --trace "$work/wide.csv"
: >"$work/empty"
refuses "a trace without requests is refused" 2 'empty has no requests' simulate --trace "$work/empty"
refuses "a trace that is not there is said" 1 'No such file' simulate --trace "$work/nothing"
refuses "prompts that no cache holds are refused" 2 'tokens, [0-9]+ blocks of group full in a decode engine; it has 9' \
    simulate --decode blocks=9
refuses "types that differ are refused" 2 'dtype is ' simulate --prefill dtype=f32
refuses "shared tokens are refused" 2 'decode.shape has ranks that share tokens' simulate --decode tp=16,dcp=2
refuses "tokens beside a trace have no effect" 2 '--tokens has no effect: prompts are those of the trace' \
    simulate --trace "$work/azure.csv" --tokens 7
finish
