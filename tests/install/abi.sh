#!/usr/bin/env bash
# Compares the binary interface with the recorded one, or records it anew:
# abi.sh check|record INCLUDE_DIR RECORD CC
#
# It compiles the headers, not the library: every function they declare gets an empty body, so that types that are
# opaque to a user are opaque here too, and changes behind them do not count. exports.sh checks that the library exports
# just these functions. Any difference fails, additions too: the commit that changes the interface renews the record, by
# `make abi-record`.
set -euo pipefail
what=$1
include=$2
record=$3
cc=$4

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
(cd "$include" && find kvferry -name '*.h' | LC_ALL=C sort | sed 's/.*/#include <&>/') >"$work/headers.c"
"$cc" -std=c11 -E -P -I "$include" "$work/headers.c" |
    perl -0777 -pe 's{(__attribute__\(\(visibility\("default"\)\)\)[^;{}]*?\bkvf_\w+\s*\([^;{}]*\));}{$1 {
        __builtin_trap(); }}g' >"$work/interface.c"

# describe NAME: compiles NAME.c, and leaves NAME.so and its description NAME.abi, all in the work folder, which the
# description does not name.
describe() {
    (cd "$work" && "$cc" -std=c11 -g -w -fPIC -shared -fvisibility=hidden "$1.c" -o "$1.so")
    abidw --no-show-locs --no-corpus-path --no-comp-dir-path --no-elf-needed --no-architecture \
        --type-id-style hash --out-file "$work/$1.abi" "$work/$1.so"
}
same() {
    abidiff --harmless "$record" "$work/$1.abi" >"$work/difference"
}

describe interface
functions=$(grep -c "<elf-symbol name='kvf_" "$work/interface.abi")
declared=$(grep -o 'visibility("default")' "$work/interface.c" | wc -l)
if [ "$functions" -ne "$declared" ]; then
    echo "the headers declare $declared functions, but only $functions were described"
    exit 1
fi
if [ "$what" = record ]; then
    cp "$work/interface.abi" "$record"
    echo "$record: $functions functions, $(du -k "$record" | cut -f1) KB"
    exit
fi

if ! same interface; then
    cat "$work/difference"
    echo "The binary interface is not the recorded one. If this is meant: make abi-record"
    exit 1
fi
# Controls: the comparison must notice an added function, a changed constant, and a member that grew.
controls=('s{\z}{__attribute__((visibility("default"))) int kvf_one_more(void) { return 1; }}'
    's{\bKVF_OK = 0\b}{KVF_OK = 99}' 's{(struct kvf_range \{\s*)uint32_t}{$1uint64_t}')
for control in "${controls[@]}"; do
    perl -0777 -pe "$control" "$work/interface.c" >"$work/changed.c"
    describe changed
    if same changed; then
        echo "the comparison does not see this change of the interface: $control"
        exit 1
    fi
done
echo "ok: $functions functions as recorded"
