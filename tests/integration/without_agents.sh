#!/usr/bin/env bash
# A build without agents refuses the commands that need them, and says why.
set -euo pipefail
# shellcheck source=cases.bash
. "$(dirname "$0")/cases.bash"

for command in demo bench explain; do
    refuses "$command needs agents, and says how the build was made" 1 "$command needs agents, .*KVF_WITH_AGENT=OFF" \
        "$command"
    succeeds "what $command takes is said all the same" '^  --timeout SECONDS' help "$command"
done
succeeds "plans are made without agents" '2 plans, each verified' plan

finish
