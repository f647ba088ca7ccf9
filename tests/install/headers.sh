#!/usr/bin/env bash
# Every public header compiles alone, as C11 and as C++17, without a warning, and the README's example compiles as
# C++20: headers.sh INCLUDE_DIR CC
set -euo pipefail
include=$1
cc=$2

bad=0
mapfile -t names < <(cd "$include" && find kvferry -name '*.h' | LC_ALL=C sort)
[ ${#names[@]} -gt 0 ]
for name in "${names[@]}"; do
    for language in "c -std=c11 -Wstrict-prototypes" "c++ -std=c++17"; do
        # Twice, for the include guard.
        # shellcheck disable=SC2086
        if ! printf '#include <%s>\n#include <%s>\n' "$name" "$name" |
            "$cc" -x $language -Wall -Wextra -Werror -pedantic -fsyntax-only -I "$include" -; then
            echo "$name does not compile alone as ${language%% *}"
            bad=1
        fi
    done
done
if ! "$cc" -x c++ -std=c++20 -Wall -Werror -pedantic -fsyntax-only -I "$include" "$include/../examples/explain.c"; then
    echo "examples/explain.c does not compile as C++20"
    bad=1
fi
exit "$bad"
