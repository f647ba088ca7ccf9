#!/usr/bin/env bash
# The output of kvferry plan --html and kvferry sweep. tests/pages/pages.py compares the cells of the pictures.
set -euo pipefail
# shellcheck source=cases.bash
. "$(dirname "$0")/cases.bash"

folder=$(mktemp -d)
trap 'rm -rf "$output" "$errors" "$folder"' EXIT

succeeds "a page is written beside the text" '^In all 128\.0 MiB' plan --html "$folder/plan.html"
succeeds "a page can be the output, and is all of it" '^<!DOCTYPE html>' plan --html -
succeeds "a page has what each transport would take" '<h2>The slowest rank, by transport</h2>' plan --fabrics --html -
refuses "JSON and a page do not share the output" 2 '^kvferry: --json and --html - would both write to the standard output' plan --json --html -
refuses "nor a file" 2 "^kvferry: --json and --html would both write to $folder/both; give them two files\$" \
    plan --json "$folder/both" --html "$folder/both"
refuses "nor one by two names" 2 '--json and --html would both write' plan --json "$folder/./both" --html "$folder/both"
ln -s both "$folder/link"
touch "$folder/both"
refuses "nor one that a link names" 2 '--json and --html would both write' plan --json "$folder/link" --html "$folder/both"
if [ -s "$folder/both" ]; then
    fail "and nothing was written" "there is something"
else
    pass "and nothing was written"
fi
rm "$folder/both" "$folder/link"
succeeds "two outputs may be thrown away" '^In all ' plan --json /dev/null --html /dev/null
refuses "a page that cannot be written is named" 1 "$folder/none/plan.html: No such file" \
    plan --html "$folder/none/plan.html"
limited=$folder/limited # the command, with files of 8 KiB at most
printf '#!/usr/bin/env bash\ntrap "" XFSZ\nulimit -f 8\nexec "%s" "$@"\n' "$KVFERRY" >"$limited"
chmod +x "$limited"
for option in html json; do
    KVFERRY=$limited refuses "a file that cannot be written to its end is named, with the reason: $option" 1 \
        "$folder/long.$option: File too large$" plan --prefill tp=8 "--$option=$folder/long.$option"
    if [ ! -e "$folder/long.$option" ]; then
        pass "and no part of it stays: $option"
    else
        fail "and no part of it stays: $option" "$(wc -c <"$folder/long.$option") bytes are there"
    fi
done
cp "$(dirname "$0")/../../models/llama-3.1-8b.json" "$folder/a<b>&\"c.json"
succeeds "names are escaped" '<h1>kvferry plan: a&lt;b&gt;&amp;&quot;c.json</h1>' \
    plan --html - --model "$folder/a<b>&\"c.json"

cp "$folder/a<b>&\"c.json" "$folder/"$'\xff\xc3\xa9\xed\xa0\x80.json'
succeeds "what is no character has a mark in its place" '<h1>kvferry plan: \?é\?\?\?\.json</h1>' \
    plan --html - --model "$folder/"$'\xff\xc3\xa9\xed\xa0\x80.json'
run plan --json --model "$folder/"$'\xff\xc3\xa9\xed\xa0\x80.json'
if [ "$code" -eq 0 ] && is_json "$output" && grep -Eq '"model": *"\?é\?\?\?\.json"' "$output"; then
    pass "and in JSON"
else
    fail "and in JSON" "exit code $code, or not JSON"
fi

succeeds "a sweep has a line for each pair" '^"tp=2,order=nhd","tp=1,block=16",2,1,134217728,131072,1024,' \
    sweep --prefill tp=1/2,order=nhd/hnd --decode tp=1,block=16/64
succeeds "alternatives stand for all of their combinations" '^"pp-layers=20\+12,tp=4","tp=1"' \
    sweep --prefill pp-layers=16+16/20+12,tp=2/4 --decode tp=1
succeeds "bytes of a run are not rounded as times are" '"bytes_per_run": *65536,' \
    sweep --prefill tp=1 --decode tp=1 --json
run sweep --prefill tp=1/2,order=nhd/hnd --decode tp=1,block=16/64
if [ "$(wc -l <"$output")" -eq 9 ]; then
    pass "every pair is there once"
else
    fail "every pair is there once" "not 8 lines and the titles"
fi
pairs=(--prefill tp=1/2,order=nhd/hnd --decode tp=1/16,dcp=2)
if command -v python3 >/dev/null; then
    "$KVFERRY" sweep "${pairs[@]}" --json "$folder/sweep.json" >"$folder/sweep.csv" 2>"$errors"
    run sweep "${pairs[@]}" --json
    if cmp -s "$output" "$folder/sweep.json" && python3 - "$folder/sweep.csv" "$folder/sweep.json" <<'END'; then
import csv, json, sys
lines = list(csv.DictReader(open(sys.argv[1])))
pairs = json.load(open(sys.argv[2]))["pairs"]
assert len(lines) == 8 and {line["way"] for line in lines} > {"refused"}
for line, pair in zip(lines, pairs, strict=True):
    assert line["way"] == pair["way"] and line["prefill"] == pair["prefill"] and line["decode"] == pair["decode"]
    for name in set(line) - {"way", "prefill", "decode"}:
        assert (line[name] == "") == (name not in pair)
        assert line[name] == "" or abs(float(line[name]) - pair[name]) <= 0.001 * pair[name] + 0.5
END
        pass "the JSON of a sweep has what its CSV has"
    else
        fail "the JSON of a sweep has what its CSV has" "it has not, or is another one in a file"
    fi
fi
succeeds "a shape that is impossible for the model is refused by itself" '^"tp=1,dcp=2","tp=1",,,,,,,refused$' \
    sweep --prefill tp=1/16,dcp=2 --decode tp=1
succeeds "also one whose groups share pages" '^"tp=1,dcp=2,share-pages=yes","tp=1",,,,,,,refused$' \
    sweep --model kimi-linear-48b-a3b --prefill tp=1/2,dcp=2,share-pages=yes --decode tp=1
refuses "an empty alternative is refused" 2 '--prefill is "tp=1//2"; an alternative is empty' sweep --prefill tp=1//2
refuses "too many shapes are refused" 2 'which is more than 256 shapes' \
    sweep --prefill tp=1/2/3/4/5/6/7/8,block=1/2/3/4/5/6/7/8,pp=1/2/3/4/5
refuses "a key that there is not is refused" 2 'there is no key "blox"' sweep --prefill blox=1/2

# Checks cells, lines and times of the pictures with an XML parser.
if command -v python3 >/dev/null; then
    while IFS= read -r line; do
        case $line in
            "[       OK ] "*) pass "${line#*\] }" ;;
            "[  FAILED  ] "*" test(s)") ;;
            "[  FAILED  ] "*) fail "${line#*\] }" "see its own words" ;;
        esac
    done < <(python3 "$(dirname "$0")/../pages/pages.py" "$KVFERRY" 2>"$errors" ||
        echo "[  FAILED  ] pages.py ended badly")
else
    echo "[  SKIPPED ] the cells of the pictures: there is no python3 here"
fi

finish
