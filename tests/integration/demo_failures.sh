#!/usr/bin/env bash
# The demo must be able to fail: it names wrong bytes, and notices ranks that die or hang.
set -euo pipefail
# shellcheck source=cases.bash
. "$(dirname "$0")/cases.bash"

small=(--memory-limit 128m --tokens 40 --requests 4)

refuses "a wrong element is named by its coordinates" 1 \
    'request 1, layer 5, part v, token 17, head 3, element 40: expected 0x[0-9a-f]{4}, found 0x[0-9a-f]{4}$' \
    demo "${small[@]}" --corrupt 1,5,v,17,3,40
refuses "the last element of the last head is checked" 1 \
    'decode rank 1: request 3, layer 31, part k, token 0, head 7, element 127: ' \
    demo "${small[@]}" --corrupt 3,31,k,0,7,127
refuses "a wrong element is found within one process" 1 \
    'request 0, layer 0, part k, token 39, head 0, element 0: ' \
    demo "${small[@]}" --transport inproc --corrupt 0,0,k,39,0,0
refuses "a wrong element is found in brought memory" 1 \
    'request 0, layer 16, part v, token 16, head 4, element 64: ' \
    demo "${small[@]}" --brought-memory --corrupt 0,16,v,16,4,64
refuses "a wrong element of keys by channel is found" 1 \
    'request 1, layer 5, part k, token 17, head 3, element 40: expected 0x[0-9a-f]{4}, found 0x[0-9a-f]{4}$' \
    demo "${small[@]}" --prefill tp=4,order=hnd,keys=by-channel --corrupt 1,5,k,17,3,40
refuses "and where they arrive by channel" 1 'request 1, layer 5, part k, token 17, head 3, element 40: ' \
    demo "${small[@]}" --decode tp=2,order=hnd,keys=by-channel --corrupt 1,5,k,17,3,40
refuses "a wrong half of a byte is found" 1 \
    'request 1, layer 2, part v, token 3, head 1, element 7: expected 0x[0-9a-f], found 0x[0-9a-f]$' \
    demo "${small[@]}" --dtype f4_e2m1 --corrupt 1,2,v,3,1,7
refuses "a wrong scale is found" 1 'request 1, layer 2, part v_scale, token 3, head 1, element 0: ' \
    demo "${small[@]}" --dtype fp8 --scales f32/head --corrupt 1,2,v_scale,3,1,0
refuses "a wrong channel of a conv state is found" 1 'layer 0, part conv.x, row 1, channel 4095, element 0: ' \
    demo --memory-limit 256m --tokens 20 --requests 2 --model jamba-1.5-mini --corrupt 1,0,conv.x,1,4095,0
refuses "a wrong element is found after its conversion" 1 \
    'request 1, layer 5, part v, token 17, head 3, element 40: expected 0x[0-9a-f]{8}, found 0x[0-9a-f]{8}$' \
    demo "${small[@]}" --decode dtype=f32 --corrupt 1,5,v,17,3,40
refuses "what is converted does not go directly" 1 'way is direct; only packed transfers convert' \
    demo "${small[@]}" --decode dtype=f32 --move direct
refuses "a type that is not converted is refused" 2 'dtype is "i8"; allowed: f32, f16, bf16, fp8 and fp8_e5m2' \
    demo "${small[@]}" --decode dtype=i8
refuses "a coordinate that is not cached is refused" 2 '--corrupt is "9,5,v,17,3,40"' \
    demo "${small[@]}" --corrupt 9,5,v,17,3,40

# Mapped memory outlives its rank, so the decode ranks may have read everything before its death is noticed.
refuses "a prefill rank that dies is named" 1 'prefill rank 1 was ended by signal 9 while (moving|verifying)' \
    demo "${small[@]}" --die prefill:1
refuses "a decode rank that dies is named" 1 'decode rank 1 was ended by signal 9 while moving' \
    demo "${small[@]}" --die decode:1
refuses "ranks that die together are noticed" 1 'process of all ranks was ended by signal 9' \
    demo "${small[@]}" --transport inproc --die decode:0
refuses "a decode rank that hangs is named" 1 'decode rank 0 has sent nothing for 12 s while moving' \
    demo "${small[@]}" --hang decode:0 --timeout 12
# The decode rank that reads from it falls silent with it, unless it had finished connecting.
refuses "a prefill rank that hangs is noticed" 1 '(prefill rank 3|decode rank 1) has sent nothing for 12 s' \
    demo "${small[@]}" --hang prefill:3 --timeout 12

finish
