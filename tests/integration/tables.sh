#!/usr/bin/env bash
# Tables fit into the reader's lines, without loss.
set -euo pipefail
# shellcheck source=cases.bash
. "$(dirname "$0")/cases.bash"

# fits NAME ARGUMENTS...: no line is longer than 80 characters, and the words are the same as in wide lines.
fits() {
    local name=$1 wide
    shift
    COLUMNS=1000 run "$@"
    wide=$(tr -s ' \n' '\n\n' <"$output" | sort)
    COLUMNS=80 run "$@"
    if [ "$code" -ne 0 ]; then
        fail "$name" "exit code $code"
    elif [ "$(wc -L <"$output")" -gt 80 ]; then
        fail "$name" "a line has $(wc -L <"$output") characters"
    elif [ "$(tr -s ' \n' '\n\n' <"$output" | sort)" != "$wide" ]; then
        fail "$name" "other words than in wide lines"
    else
        pass "$name"
    fi
}

fits "a plan" plan
fits "one with many parts" plan --model nemotron-3-nano-30b --decode tp=2,state.order=sd
fits "and by transport" plan --fabrics
fits "the models" models
fits "the families" models --families
fits "the kinds of transport" transports
for command in plan sweep simulate demo serve fetch ping ask bench models transports doctor explain completion keys; do
    fits "help about $command" help "$command"
done
fits "the commands" help

# narrow NAME ARGUMENTS...: no line is longer than 80; figures are others in each run.
narrow() {
    local name=$1
    shift
    COLUMNS=80 run "$@"
    if [ "$code" -eq 0 ] && [ "$(wc -L <"$output")" -le 80 ]; then
        pass "$name"
    else
        fail "$name" "exit code $code, or a line of more than 80 characters"
    fi
}
small=(--memory-limit 32m --tokens 20 --requests 2 --rounds 1)
narrow "what the doctor finds" doctor
narrow "a demo" demo "${small[@]}"
narrow "a producer that dies" demo --memory-limit 64m --tokens 40 --requests 2 --push --kill
narrow "a bench" bench "${small[@]}"
narrow "a simulation" simulate --requests 20 --killed 1

finish
