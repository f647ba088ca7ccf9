# Engines of `kvferry serve` for a script that has sourced cases.bash: they end with the script.
# shellcheck shell=bash disable=SC2034,SC2154

folder=$(mktemp -d)
LIMIT=60
served=()
stop() {
    for pid in "${served[@]}"; do
        kill "$pid" 2>/dev/null || true
    done
    wait
    rm -rf "$output" "$errors" "$folder"
}
trap stop EXIT

work=(--tokens 40 --requests 3)

# serve NAME ARGUMENTS...: serves `work` until the script ends; sets `met` to the endpoint and `pid` to the process.
serve() {
    local name=$1
    shift
    : >"$folder/$name" # it is there to read, however late the program begins
    "$KVFERRY" serve "${work[@]}" "$@" >"$folder/$name" 2>&1 &
    pid=$!
    served+=("$pid")
    for _ in $(seq 300); do
        met=$(sed -n 's/^met at  *//p' "$folder/$name")
        [ -z "$met" ] || return 0
        sleep 0.1
    done
    cat "$folder/$name"
    return 1
}
