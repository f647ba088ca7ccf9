/*
 * Bodies of calls and answers, without their envelope, so that every change reaches the fields. The first byte is even
 * for a call, odd for an answer.
 */
#include "messages.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size == 0)
        return 0;
    kvf_message message = {.version = KVF_WIRE_VERSION,
                           .kind = data[0] % 2 ? KVF_MESSAGE_ANSWER : KVF_MESSAGE_CALL,
                           .body = {data + 1, size - 1}};
    fuzz_read(&message);
    return 0;
}
