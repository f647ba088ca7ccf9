#!/bin/sh
# The files of the Debian packages work in a system that has nothing else of kvferry, and are removed with them. Run as
# root in a system of its own: scripts/check-deb makes one.
set -u
passed=0
failed=0
work=$(mktemp -d)
cd "$work" || exit 1

# is_so NAME COMMAND...
is_so() {
    name=$1
    shift
    if "$@" >"$work/said" 2>&1; then
        passed=$((passed + 1))
        echo "ok: $name"
    else
        failed=$((failed + 1))
        echo "FAILED: $name"
        sed 's/^/    /' "$work/said"
    fi
}

says() { # says PATTERN COMMAND...
    pattern=$1
    shift
    "$@" >"$work/words" 2>&1 || { cat "$work/words"; return 1; }
    grep -q -- "$pattern" "$work/words" || { cat "$work/words"; return 1; }
}

builds() { # builds PROGRAM SOURCE LIBRARY_FLAGS...
    program=$1
    source=$2
    shift 2
    # shellcheck disable=SC2046 # flags are words
    cc -std=c11 -D_GNU_SOURCE $(pkg-config --cflags kvferry) "$source" "$@" -o "$program"
}

is_away() {
    rest=$(find / -xdev -path '*kvferry*' ! -name '*.deb' -print)
    [ -z "$rest" ] || { echo "$rest"; return 1; }
}

examples=/usr/share/doc/libkvferry-dev/examples
is_so "the command is there" says '^kvferry ' kvferry --version
is_so "its manual page is there" test -f /usr/share/man/man1/kvferry-plan.1.gz
is_so "and the schema of its --groups" test -f /usr/share/doc/kvferry/groups.schema.json
is_so "and what shells complete it by" sh -c 'cd /usr/share && test -f bash-completion/completions/kvferry &&
    test -f zsh/vendor-completions/_kvferry && test -f fish/vendor_completions.d/kvferry.fish'
is_so "the command plans" says 'rank' kvferry plan
is_so "the command moves between processes, every byte verified" \
    says '^Verified' kvferry demo --memory-limit 64m --tokens 20 --requests 2 --rounds 1
is_so "a wrong byte is noticed" sh -c '! kvferry demo --memory-limit 64m --tokens 20 --requests 2 --corrupt 1,5,v,7,3,40'
# shellcheck disable=SC2046
is_so "an example builds with the shared library" builds shared "$examples/agents.c" $(pkg-config --libs kvferry)
is_so "and runs" says ' 0 of them wrong' ./shared
# shellcheck disable=SC2046
is_so "an example builds with the static library" \
    builds static "$examples/agents.c" $(pkg-config --static --libs kvferry | sed 's/-lkvferry/-l:libkvferry.a/')
is_so "and has no need of the shared one" sh -c '! ldd ./static | grep kvferry'
is_so "and runs" says ' 0 of them wrong' ./static
is_so "the Python package moves between two agents" python3 /usr/share/doc/python3-kvferry/examples/handover.py
is_so "and runs the command" says '^kvferry ' python3 -m kvferry --version
is_so "the packages go again" apt-get purge --yes --quiet libkvferry0.1 libkvferry-dev kvferry python3-kvferry
is_so "and nothing of them stays" is_away

echo "$passed passed, $failed failed"
