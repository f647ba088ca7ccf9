#!/usr/bin/env bash
# Shell completions and manual pages list the options that the parser accepts.
set -euo pipefail
# shellcheck source=cases.bash
. "$(dirname "$0")/cases.bash"

pages=$(dirname "$0")/../../docs/man
installed=$(cd "$(dirname "$0")/../../packaging/completion" && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$output" "$errors" "$folder"' EXIT

# options_of COMMAND: its options, as its help lists them.
options_of() {
    "$KVFERRY" help "$1" | sed -n 's/^  --\([a-z-]*\).*/\1/p'
}
commands=$("$KVFERRY" help | sed -n 's/^  \([a-z]\+\)  .*/\1/p' | grep -v '^help$')

# is_so NAME COMMAND...: passes if the command succeeds.
is_so() {
    local name=$1
    shift
    if "$@" >"$output" 2>"$errors"; then pass "$name"; else fail "$name" "it is not so"; fi
}

# ---- manual pages

for command in $commands; do
    page=$pages/kvferry-$command.1
    [ -e "$page" ] || page=$pages/kvferry.1
    options_of "$command" | sort >"$folder/taken"
    grep -o 'Fl -[a-z-]*' "$page" | sed 's/Fl -//' | sort -u >"$folder/told"
    is_so "the page of $command tells all of its options" test -z "$(comm -23 "$folder/taken" "$folder/told")"
    [ "$page" != "$pages/kvferry.1" ] || continue
    sed -n '/^\.Sh SYNOPSIS/,/^\.Sh DESC/s/^\.Op Fl -\([a-z-]*\).*/\1/p' "$page" | sort >"$folder/synopsis"
    is_so "the synopsis of $command has these and no others" diff "$folder/taken" "$folder/synopsis"
done
for command in $commands; do
    is_so "kvferry.1 names $command" grep -Eq "^\.It Cm .*\b$command\b" "$pages/kvferry.1"
done

# ---- bash, which runs these tests

# completes WORDS...: bash's completions of the last word, one a line.
completes() {
    "$KVFERRY" completion bash >"$folder/kvferry.bash"
    bash --norc -c '
        . "$1"; shift
        COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMP_LINE="$*" COMP_POINT=${#COMP_LINE}
        COMP_POINT=${#COMP_LINE}
        _kvferry
        printf "%s\n" "${COMPREPLY[@]}"' bash "$folder/kvferry.bash" "$@"
}
offers() { # offers NAME WORD WORDS...: the word is among what completes the words
    local name=$1 word=$2
    shift 2
    completes "$@" >"$output" 2>"$errors"
    if grep -qxF -- "$word" "$output"; then pass "$name"; else fail "$name" "no \"$word\""; fi
}
offers "commands are completed" transports kvferry tr
offers "options are completed" --tokens kvferry plan --to
offers "values are completed" packed kvferry demo --move pa
offers "models are completed" llama-3.1-70b kvferry plan --model llama-3.1-7
offers "keys of shapes are completed" order= kvferry plan --prefill or
offers "also after others" tp=4,order= kvferry plan --prefill tp=4,or
offers "shells are completed" fish kvferry completion f
for verb in drain resume list hand-over; do
    offers "what engines are asked is completed: $verb" "$verb" kvferry ask tcp://127.0.0.1:1 "$verb"
    run ask tcp://127.0.0.1:1 "$verb" --timeout 1
    if grep -q "cannot be asked" "$errors"; then
        fail "and engines can be asked to $verb" "$(cat "$errors")"
    else
        pass "and engines can be asked to $verb"
    fi
done
offers "commands are completed after help" doctor kvferry help do
cd "$folder" && touch config.json "my config.json"
offers "files are completed" config.json kvferry plan --model conf
offers "also with blanks in their names" "my config.json" kvferry plan --model my
for command in $commands; do
    completes kvferry "$command" -- | sed -n 's/^--//p' | grep -vx help | sort >"$folder/offered"
    options_of "$command" | sort >"$folder/taken"
    is_so "what bash offers for $command is what it takes" diff "$folder/taken" "$folder/offered"
done

# What is installed for each shell asks the command, so it cannot be older.
mkdir -p "$folder/bin" && ln -sf "$(realpath "$KVFERRY")" "$folder/bin/kvferry"
loads() { # loads SHELL SCRIPT: the shell is here, and the script succeeds
    if command -v "$1" >/dev/null; then
        is_so "$1 loads what is installed" env PATH="$folder/bin:$PATH" "$1" -c "$2"
    fi
}
loads bash ". '$installed/kvferry' && complete -p kvferry && declare -f _kvferry"
loads zsh "fpath=('$installed' \$fpath); autoload -Uz compinit && compinit -D -u && [[ \$_comps[kvferry] == _kvferry ]] &&
    { _kvferry 2>/dev/null; functions _kvferry | grep -q transports }"
loads fish "source '$installed/kvferry.fish'; complete -C 'kvferry trans' | grep -q transports"

# ---- the others: every option stands in them, and a shell that is here reads them

for shell in zsh fish; do
    "$KVFERRY" completion "$shell" >"$folder/$shell"
    for command in $commands; do
        for option in $(options_of "$command"); do
            grep -Eq -- "(--| -l )$option\b" "$folder/$shell" || echo "$command: $option"
        done
    done >"$folder/missing"
    is_so "$shell knows all options" test ! -s "$folder/missing"
    if command -v "$shell" >/dev/null; then is_so "$shell reads them" "$shell" -n "$folder/$shell"; fi
done
refuses "a shell that there is not" 2 'no completion for "fsh"; allowed: bash, zsh and fish \(do you mean' completion fsh
refuses "no shell" 2 'completion needs the name of a shell' completion

finish
