# Shared by the integration tests: each case is one run of the command, named by a sentence.
#
# KVFERRY is the path of the command. Results are printed as CMocka prints them.

: "${KVFERRY:?must be the path of the kvferry command}"
export COLUMNS=1000 # tables in whole lines
passed=0
failed=0
output=$(mktemp)
errors=$(mktemp)
trap 'rm -f "$output" "$errors"' EXIT

pass() {
    passed=$((passed + 1))
    echo "[       OK ] $1"
}

fail() {
    failed=$((failed + 1))
    echo "[  FAILED  ] $1: $2"
    sed 's/^/    /' "$output" "$errors"
}

# run ARGUMENTS...: runs the command; sets `code` to its exit code, and writes its output to $output and $errors.
run() {
    code=0
    timeout "${LIMIT:-120}" "$KVFERRY" "$@" >"$output" 2>"$errors" </dev/null || code=$?
}

# succeeds NAME PATTERN ARGUMENTS...: the command exits with 0 and prints a line that matches the pattern.
succeeds() {
    local name=$1 pattern=$2
    shift 2
    run "$@"
    if [ "$code" -ne 0 ]; then
        fail "$name" "exit code $code"
    elif ! grep -Eq -- "$pattern" "$output"; then
        fail "$name" "nothing printed is like '$pattern'"
    else
        pass "$name"
    fi
}

# refuses NAME CODE PATTERN ARGUMENTS...: the command exits with CODE and prints one line, matching the pattern, to
# stderr.
refuses() {
    local name=$1 expected=$2 pattern=$3
    shift 3
    run "$@"
    if [ "$code" -ne "$expected" ]; then
        fail "$name" "exit code $code, not $expected"
    elif [ "$(wc -l <"$errors")" -ne 1 ]; then
        fail "$name" "stderr has $(wc -l <"$errors") lines, not 1"
    elif ! grep -Eq -- "$pattern" "$errors"; then
        fail "$name" "stderr is not like '$pattern'"
    else
        pass "$name"
    fi
}

# warns NAME PATTERN ARGUMENTS...: the command exits with 0 and prints one line, matching the pattern, to stderr; none
# if the pattern is empty.
warns() {
    local name=$1 pattern=$2
    shift 2
    run "$@"
    if [ "$code" -ne 0 ]; then
        fail "$name" "exit code $code"
    elif [ "$(wc -l <"$errors")" -ne $((${#pattern} > 0)) ]; then
        fail "$name" "stderr has $(wc -l <"$errors") lines"
    elif ! grep -Eq -- "$pattern" "$errors" && [ -n "$pattern" ]; then
        fail "$name" "stderr is not like '$pattern'"
    else
        pass "$name"
    fi
}

# Whether a file is JSON, by a parser that this machine has; without any, whether it looks like JSON.
is_json() {
    if command -v python3 >/dev/null; then
        python3 -m json.tool "$1" >/dev/null
    elif command -v jq >/dev/null; then
        jq . "$1" >/dev/null
    else
        case $(head -c 1 "$1")$(tail -n 1 "$1") in
            "{}" | "[]") ;;
            *) return 1 ;;
        esac
    fi
}

# finish: prints the result; must be the script's last command.
finish() {
    if [ "$failed" -gt 0 ]; then
        echo "[  FAILED  ] $failed test(s)"
        return 1
    fi
    echo "[  PASSED  ] $passed test(s)"
}
