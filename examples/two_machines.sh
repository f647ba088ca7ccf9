#!/bin/sh
# The commands to type on each of two machines. Run as a script, it plays both on this one: two_machines.sh [ADDRESS]
set -eu

address=${1:-127.0.0.1} # of the machine that has the cache, as the other one reaches it
kvferry=${KVFERRY:-kvferry}
case $kvferry in /*) ;; */*) kvferry=$PWD/$kvferry ;; esac
folder=$(mktemp -d)
serving=
trap '[ -z "$serving" ] || kill "$serving" 2>/dev/null; rm -rf "$folder"' EXIT
cd "$folder"

# On each machine, make a pair of keys, and give the public one to the other side.
"$kvferry" keys >prefill.json
"$kvferry" keys >decode.json
public_of() { sed -n 's/.*"public_key": *"\(.*\)".*/\1/p' "$1"; }

# On the machine that has the cache: hold a pattern of that shape until it is stopped.
"$kvferry" serve --listen "tcp://$address:*" --key-file prefill.json --allow "$(public_of decode.json)" \
    --model llama-3.1-8b --prefill tp=2,block=16,order=nhd --tokens 100 --requests 4 >served &
serving=$!
until grep -q '^met at' served 2>/dev/null; do
    kill -0 "$serving" 2>/dev/null # it has ended, and said why, if this fails
    sleep 0.1
done
place=$(sed -n 's/^met at *//p' served) # tcp://ADDRESS:PORT,KEY: this is what the other side is told

# On the machine that needs it: measure the round trip, then fetch, verify, and compare with a plain TCP stream.
"$kvferry" ping "$place" --key-file decode.json
"$kvferry" fetch "$place" --key-file decode.json --decode tp=1,block=24,order=hnd
