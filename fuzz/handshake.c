/*
 * Bytes that arrive at an agent: whole messages, introductions, shards. The input is read as each of them.
 */
#include "messages.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    kvf_bytes bytes = {data, size};
    kvf_message message;
    kvf_status status = kvf_wire_open(bytes, &message);
    if (status)
        fuzz_check_refusal(status);
    else
        fuzz_read(&message);
    fuzz_introduction(bytes);
    fuzz_shard(bytes);
    return 0;
}
