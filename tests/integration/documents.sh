#!/usr/bin/env bash
# What the documents say is so: lines that begin with "kvferry" exit with 0, and print what stands behind their "#",
# whatever the spaces; excerpts are in the example they are of; the README is one screen, and its chart that of the
# measured table; links lead somewhere; sentences of the library are the library's.
set -euo pipefail
# shellcheck source=cases.bash
. "$(dirname "$0")/cases.bash"

root=$(dirname "$0")/../..
folder=$root/docs

# The kvferry commands in the shell blocks of a document.
commands_of() {
    sed -n '/^```sh$/,/^```$/p' "$1" | grep '^kvferry '
}

for name in choosing-shapes operating simulation; do
    count=0
    while read -r _ line; do
        count=$((count + 1))
        words=$(sed 's/ *#.*//' <<<"$line")
        says=
        [[ $line == *#* ]] && says=$(sed 's/ \+$//; s/ \+/ +/g; s/.*/(^|[^[:alnum:]])&([^[:alnum:]]|$)/' <<<"${line#*# }")
        # shellcheck disable=SC2086 # the words of the line
        succeeds "$name: kvferry $words" "$says" $words
    done < <(commands_of "$folder/$name.md")
    # Without this, a document whose lines are not found would pass.
    if [ "$count" -ge 1 ]; then pass "$name has commands"; else fail "$name has commands" "none"; fi
done

# The examples of a manual page, each in one line. hand.sh and explain.sh run those that talk to an engine.
examples_of() {
    sed -e ':join' -e '/\\e$/{N;s/ *\\e\n */ /;b join' -e '}' "$1" | sed -n 's/^\(\.Dl \)\?\(kvferry [a-z].*\)/\2/p' |
        grep -Ev 'tcp://|^kvferry serve'
}

work=$(mktemp -d)
trap 'rm -rf "$output" "$errors" "$work"' EXIT
count=0
run transports --json
has_ucx=$(grep -A8 '"kind": *"ucx"' "$output" | grep -c '"works": *true' || true)
for page in "$folder"/man/*.1; do
    while read -r _ line; do
        read -ra words <<<"${line//figures.json/$work/figures.json}"
        case $line in
            *ucx*) [ "$has_ucx" -gt 0 ] || continue ;;
        esac
        case $line in
            *--memory-limit*) ;;
            *--tokens*) words+=(--requests 1 --rounds 1) ;; # of the same shapes, and not for as long
            demo* | bench*) words+=(--tokens 20 --requests 1 --rounds 1) ;;
        esac
        count=$((count + 1))
        succeeds "${page##*/}: kvferry $line" . "${words[@]}"
    done < <(examples_of "$page")
done
if [ "$count" -ge 10 ]; then pass "manual pages have examples"; else fail "manual pages have examples" "$count"; fi

# is_so NAME COMMAND...: passes if the command succeeds.
is_so() {
    local name=$1
    shift
    if "$@" >"$output" 2>"$errors"; then pass "$name"; else fail "$name" "it is not so"; fi
}

# excerpts_of NAME DOCUMENT EXAMPLE: each C block of the document is in the example, in one piece.
excerpts_of() {
    local name=$1 document=$2 example excerpts=0 excerpt='' inside=no
    example=$(<"$3")
    while IFS= read -r line; do
        if [ "$line" = '```c' ]; then
            inside=yes excerpt=
        elif [ "$line" = '```' ] && [ "$inside" = yes ]; then
            inside=no excerpts=$((excerpts + 1))
            is_so "$name: excerpt $excerpts is in ${3##*/}" test "${example/"$excerpt"/}" != "$example"
        elif [ "$inside" = yes ]; then
            excerpt+=$line$'\n'
        fi
    done <"$document"
    is_so "$name has excerpts" test "$excerpts" -ge 1
}
excerpts_of embedding "$folder/embedding.md" "$root/examples/agents.c"
agents_alone() { # the prefill process cannot open its agent
    local code=0
    (ulimit -n 6 && timeout 20 "$KVF_BIN_DIR/examples/agents") || code=$?
    [ "$code" -eq 1 ]
}
is_so "embedding: examples/agents.c ends where one of its processes has failed" agents_alone
excerpts_of README "$root/README.md" "$root/examples/explain.c"

# The README's chart is drawn from the table of performance.md, and its links lead somewhere.
chart_is_true() {
    local chart readme
    readme=$(<"$root/README.md")
    chart=$("$root/scripts/handover-chart") && [ "${readme/"$chart"/}" != "$readme" ]
}
# A case of each answer, as `make bench-vllm` writes them: median of two times, one time less than it, and bytes.
cat >"$work/vllm.json" <<'END'
{"cases": [
  {"shape": "llama-64-64", "connector": "kvferry", "outcome": "ok", "equal": 2, "asked": 2, "bytes_read": 4000,
   "through": [0.030, 0.018], "least": [0.010, 0.012], "alone": [0.050, 0.070]},
  {"shape": "llama-64-64", "connector": "nixl", "outcome": "wrong tokens", "equal": 0, "asked": 2, "bytes_read": 0,
   "through": [0.012, 0.012], "least": [0.010, 0.012], "alone": [0.050, 0.070]},
  {"shape": "gemma3-64-32", "connector": "nixl", "outcome": "refused", "equal": 0, "asked": 3, "bytes_read": 0,
   "through": [null, null, null], "least": [0.010, 0.012, 0.014], "alone": [0.060, 0.060, 0.060]}]}
END
charts_json() {
    diff - <("$root/scripts/handover-chart" "$work/vllm.json") <<'END'
prefill → decode          kvferry                 NixlConnector
Llama, blocks 64→64       right   24 ms ████      WRONG   12 ms ██
Gemma 3, blocks 64→32                             refused
END
}
tables_json() {
    diff - <("$root/scripts/handover-chart" --table "$work/vllm.json" | tail -n +3) <<'END'
| Llama, blocks 64→64 | kvferry | 2 of 2 | 30 | 24 | 30 | 11 | 13 | 60 | 2 |
| Llama, blocks 64→64 | NixlConnector | **0 of 2** | 12 | 12 | 12 | 11 | 1 | 60 | - |
| Gemma 3, blocks 64→32 | NixlConnector | refused | - | - | - | 12 | - | 60 | - |
END
}
if command -v python3 >/dev/null; then
    is_so "README: the chart is that of the table in performance" chart_is_true
    is_so "the chart is drawn from the JSON of the benchmark, too" charts_json
    is_so "and so is the table" tables_json
fi
is_so "README: one screen of 70 lines" test "$(wc -l <"$root/README.md")" -le 70
links=0
for document in "$root/README.md" "$folder"/*.md; do
    while IFS= read -r link; do
        links=$((links + 1))
        [ -e "$(dirname "$document")/$link" ] || fail "${document##*/} has a link to $link" "there is nothing"
    done < <(grep -oE '\]\([^)#]+' "$document" | cut -c3- | grep -v '://')
done
is_so "documents have links, and all lead somewhere" test "$links" -ge 30

sentences=0
while IFS= read -r sentence; do
    sentences=$((sentences + 1))
    is_so "operating: \"$sentence\" is said by the library" grep -rqF "$sentence" "$root/src"
done < <(sed -n 's/^| "\([^"]*\)" |.*/\1/p' "$folder/operating.md")
is_so "operating has sentences" test "$sentences" -ge 1

finish
