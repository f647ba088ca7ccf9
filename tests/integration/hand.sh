#!/usr/bin/env bash
# kvferry serve, fetch, ping and keys: the demo by hand, as on two machines.
set -euo pipefail
# shellcheck source=cases.bash
. "$(dirname "$0")/cases.bash"
# shellcheck source=serving.bash
. "$(dirname "$0")/serving.bash"

serve plain
plain=$met
first=$pid
succeeds "an engine that answers says who it is, in one line" \
    '^tcp://127.0.0.1:[0-9]+: prefill, 4 ranks, protocol [0-9]+, not encrypted, round trip .*median of 5' ping "$plain"
for command in ping fetch explain; do
    refuses "a key that is empty does not pass for one, $command" 2 'ends with a comma; allowed: ENDPOINT' "$command" "$plain,"
done
COLUMNS=80 run fetch "$plain"
if [ "$code" -eq 0 ] && [ "$(wc -L <"$output")" -le 80 ]; then
    pass "what a fetch says fits the line"
else
    fail "what a fetch says fits the line" "exit code $code, or a longer line"
fi
succeeds "round trips can be counted" 'median of 3;' ping "$plain" --count 3
succeeds "what is served is fetched and verified" '^Verified after each round: all ' fetch "$plain"
succeeds "the way is told beside a plain stream" '^Medians: [0-9.]+ GB/s, plain stream [0-9.]+ GB/s, ' \
    fetch "$plain" --decode tp=3,block=8,order=packed-hnd --rounds 5
succeeds "it can be fetched again, by an engine of another shape" '^way +shm: ' fetch "$plain" --decode tp=1,pp=2
succeeds "the model may be named" '^Verified' fetch "$plain" --model llama-3.1-8b --rounds 1
run fetch "$plain" --json
if [ "$code" -eq 0 ] && is_json "$output" && grep -q '"of_stream"' "$output" && grep -q '"way"' "$output"; then
    pass "the figures of a fetch can be had as JSON"
else
    fail "the figures of a fetch can be had as JSON" "exit code $code, or not JSON"
fi
run ping "$plain" --json
if [ "$code" -eq 0 ] && is_json "$output" && grep -q '"round_trip_ns"' "$output" &&
    grep -qF "\"$plain\"" "$output"; then
    pass "and so can those of a ping"
else
    fail "and so can those of a ping" "exit code $code, or not JSON"
fi

# By another address the engine is there, and its plain stream is not.
if command -v python3 >/dev/null; then
    python3 - "${plain##*:}" >"$folder/other-address" <<'END' &
import socket, sys, threading

def pass_on(source, sink):
    while data := source.recv(65536):
        sink.sendall(data)

door = socket.create_server(("127.0.0.2", 0))
print(f"tcp://127.0.0.2:{door.getsockname()[1]}", flush=True)
while True:
    one, other = door.accept()[0], socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    for pair in (one, other), (other, one):
        threading.Thread(target=pass_on, args=pair, daemon=True).start()
END
    served+=("$!") # ends with the script
    for _ in $(seq 100); do
        [ ! -s "$folder/other-address" ] || break
        sleep 0.1
    done
    refuses "a plain stream that is not reached is told with the reason" 1 \
        '^kvferry: the plain stream from port [0-9]+: Connection refused$' fetch "$(cat "$folder/other-address")" --rounds 1
fi

# Two fetches at once: each is an engine with its own name.
"$KVFERRY" fetch "$plain" --rounds 10 >"$folder/other" 2>&1 &
other=$!
succeeds "two may fetch at once" '^Verified' fetch "$plain" --rounds 10
if wait "$other"; then pass "and the other one is done too"; else fail "and the other one is done too" "$(cat "$folder/other")"; fi

"$KVFERRY" fetch "$plain" --rounds 1000 >"$folder/killed" 2>&1 &
other=$!
sleep 1
kill -9 "$other"
wait "$other" 2>/dev/null || true
succeeds "one that was killed in the middle leaves everything to the next" '^Verified' fetch "$plain"

serve spoiled --corrupt 1,5,v,17,3,40
refuses "a wrong element is named by its coordinates" 1 \
    'request 1, layer 5, part v, token 17, head 3, element 40: expected 0x[0-9a-f]{4}, found 0x[0-9a-f]{4}$' \
    fetch "$met"

serve hybrid --model nemotron-3-nano-30b --prefill tp=2 --memory-limit 1g
succeeds "a model with state is fetched with its model" '^Verified' \
    fetch "$met" --model nemotron-3-nano-30b --decode tp=1,state.order=sd
refuses "a model with state needs its model" 2 '--decode needs --model or --groups: prefill keeps state' fetch "$met"

# ---- keys

"$KVFERRY" keys >"$folder/server.json"
"$KVFERRY" keys >"$folder/client.json"
"$KVFERRY" keys >"$folder/stranger.json"
allowed=$(sed -n 's/.*"public_key": *"\(.*\)".*/\1/p' "$folder/client.json") # as it stands there
serve locked --key-file "$folder/server.json" --allow "$allowed"
locked=$met
succeeds "an encrypted engine is pinged with keys" ', encrypted, round trip ' ping "$locked" --key-file "$folder/client.json"
succeeds "and fetched from" '^from .*sessions encrypted$' fetch "$locked" --key-file "$folder/client.json"
refuses "a key that is not allowed is told so" 1 'does not allow this end.s key' \
    fetch "$locked" --key-file "$folder/stranger.json" --timeout 3
refuses "and by a ping" 1 'does not allow this end.s key' ping "$locked" --key-file "$folder/stranger.json" --timeout 3
refuses "another key than the engine's own is not answered" 1 'fetch: ' \
    fetch "${locked%%,*},$allowed" --key-file "$folder/client.json" --timeout 2
refuses "without keys an encrypted engine does not answer" 1 'ping: ' ping "${locked%%,*}" --timeout 2

example=$(cd "$(dirname "$0")/../../examples" && pwd)/two_machines.sh
if timeout 60 sh "$example" >"$output" 2>"$errors" </dev/null && grep -q '^Verified after each round' "$output"; then
    pass "the example does what it says"
else
    fail "the example does what it says" "it failed, or verified nothing"
fi

code=0
timeout 60 sh "$example" 192.0.2.1 >"$output" 2>"$errors" </dev/null || code=$?
if [ "$code" -ne 0 ] && [ "$code" -ne 124 ] && grep -q '192.0.2.1' "$errors"; then
    pass "and ends, with the reason, at an address that is not this machine's"
else
    fail "and ends, with the reason, at an address that is not this machine's" "exit code $code"
fi
near=$(cd "$(dirname "$KVFERRY")" && KVFERRY=./$(basename "$KVFERRY") TMPDIR=$folder timeout 60 sh "$example" 2>&1 </dev/null || true)
if grep -q '^Verified after each round' <<<"$near"; then
    pass "and takes a command that is named from the folder that it is called in"
else
    fail "and takes a command that is named from the folder that it is called in" "$near"
fi
mkdir "$folder/empty"
KVFERRY=/nonexistent/kvferry TMPDIR=$folder/empty sh "$example" >"$output" 2>"$errors" </dev/null || true
if grep -q nonexistent "$errors" && ! grep -q serving "$errors" && rmdir "$folder/empty"; then
    pass "and leaves nothing behind where there is no command"
else
    fail "and leaves nothing behind where there is no command" "$(ls "$folder/empty")"
fi

# ---- the lines of docs/README.md, here on loopback

document=$(dirname "$0")/../../docs/README.md
line_of() { # line_of COMMAND: the words behind it, without what is said of them
    sed -n "s/^kvferry $1 \(.*[^ ]\) *#.*/\1/p" "$document"
}
read -ra words < <(line_of serve | sed 's|--insecure ||; s|tcp://[^ ]*|tcp://127.0.0.1:*|')
serve written "${words[@]}"
for command in ping fetch; do
    read -ra words < <(line_of "$command" | sed "s|tcp://[^ ]*|$met|")
    succeeds "what the documents say to $command is so" '(round trip|^Verified)' "$command" "${words[@]}"
done

# ---- what cannot be

refuses "another model" 2 '--model is not what prefill caches: ' fetch "$plain" --model llama-3.1-70b
refuses "no endpoint" 2 'fetch needs the endpoint' fetch
refuses "no endpoint to ping" 2 'ping needs the endpoint' ping
refuses "what is no endpoint" 2 'nonsense' ping nonsense
refuses "nobody there" 1 'fetch: .*no answer within 1.0 s: .*127.0.0.1:1' fetch tcp://127.0.0.1:1 --timeout 1
refuses "nobody there to ping" 1 'ping: .*no answer within 1.0 s: .*127.0.0.1:1' ping tcp://127.0.0.1:1 --timeout 1
refuses "all interfaces" 2 'all interfaces; give the address' serve --listen 'tcp://0.0.0.0:5000'
refuses "a port with too few after it" 2 'has port 65531, and the 5 ports after it are needed' \
    serve --listen 'tcp://127.0.0.1:65531'
serve last --listen tcp://127.0.0.1:65530
succeeds "the last port that has enough after it" '^Verified' fetch "$met" --rounds 1
refuses "beyond loopback without keys" 2 "insecure" serve --listen 'tcp://10.255.255.1:*' --tokens 40 --requests 1
refuses "a key that is none" 2 '--allow is "nonsense"; allowed: the public_key of "kvferry keys", 40 characters of Z85$' \
    serve --key-file "$folder/server.json" --allow nonsense
refuses "a key to command that is none" 2 '--command-key is "~{40}"; allowed: ' \
    serve --key-file "$folder/server.json" --allow "$allowed" --command-key "$(printf '~%.0s' {1..40})"
refuses "keys to allow without own ones" 2 '--allow has no effect: without --key-file' serve --allow "$allowed"
refuses "too little memory" 2 '15/16 are for caches' fetch "$plain" --memory-limit 1m
mkfifo "$folder/stay"
exec {stay}<>"$folder/stay"
"$KVF_BIN_DIR/tests/integration/standing" prefill-a llama-3.1-8b 1 16 'L|BPNH' <"$folder/stay" >"$folder/standing" {stay}>&- &
for _ in $(seq 100); do
    [ -s "$folder/standing" ] && break
    sleep 0.1
done
refuses "an engine that serves no pattern" 1 'prefill-a holds no pattern' fetch "$(cat "$folder/standing")"
exec {stay}>&-

kill "$first"
code=0
wait "$first" || code=$?
if [ "$code" -eq 0 ]; then pass "it ends well when it is told to"; else fail "it ends well when it is told to" "exit code $code"; fi
refuses "then nobody answers any more" 1 'no answer within 1.0 s' ping "$plain" --timeout 1

finish
