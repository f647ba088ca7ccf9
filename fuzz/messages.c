#include "messages.h"

const kvf_model *fuzz_model(void) {
    static kvf_model *model;
    if (!model)
        FUZZ_MUST(kvf_model_load("nemotron-3-nano-30b", NULL, &model) == KVF_OK);
    return model;
}

void fuzz_shard(kvf_bytes bytes) {
    kvf_shard *shard = NULL, *again = NULL;
    kvf_status status = kvf_wire_decode_shard(fuzz_model(), NULL, bytes, NULL, &shard);
    if (status) {
        fuzz_check_refusal(status);
        return;
    }
    kvf_wire_buffer first = {0}, second = {0};
    FUZZ_MUST(kvf_wire_encode_shard(shard, NULL, &first) == KVF_OK);
    FUZZ_MUST(kvf_wire_decode_shard(fuzz_model(), NULL, (kvf_bytes){first.data, first.size}, NULL, &again) ==
              KVF_OK);
    FUZZ_MUST(kvf_wire_encode_shard(again, NULL, &second) == KVF_OK);
    FUZZ_MUST(first.size == second.size && memcmp(first.data, second.data, first.size) == 0);
    kvf_wire_buffer_free(&first);
    kvf_wire_buffer_free(&second);
    kvf_shard_free(shard);
    kvf_shard_free(again);
}

void fuzz_introduction(kvf_bytes bytes) {
    kvf_introduction introduction;
    void *storage;
    kvf_status status = kvf_wire_decode_introduction(bytes, &introduction, &storage);
    if (status) {
        fuzz_check_refusal(status);
        return;
    }
    kvf_wire_buffer encoded = {0};
    FUZZ_MUST(kvf_wire_encode_introduction(&introduction, &encoded) == KVF_OK);
    kvf_wire_buffer_free(&encoded);
    fuzz_shard(introduction.shard);
    kvf_free(storage);
}

/* Writes a message, reads it and writes it again; both texts must be equal. */
static void check_again(const kvf_message *message) {
    kvf_wire_buffer first = {0}, second = {0};
    kvf_message again;
    FUZZ_MUST(kvf_wire_encode(message, &first) == KVF_OK);
    FUZZ_MUST(kvf_wire_open((kvf_bytes){first.data, first.size}, &again) == KVF_OK);
    FUZZ_MUST(kvf_wire_read(&again) == KVF_OK);
    FUZZ_MUST(kvf_wire_encode(&again, &second) == KVF_OK);
    FUZZ_MUST(first.size == second.size && memcmp(first.data, second.data, first.size) == 0);
    kvf_message_free(&again);
    kvf_wire_buffer_free(&first);
    kvf_wire_buffer_free(&second);
}

void fuzz_read(kvf_message *message) {
    kvf_status status = kvf_wire_read(message);
    if (status) {
        fuzz_check_refusal(status);
        kvf_message_free(message);
        return;
    }
    check_again(message);
    if (message->kind == KVF_MESSAGE_WELCOME)
        for (uint32_t i = 0; i < message->welcome.introduction_count; i++)
            fuzz_introduction(message->welcome.introductions[i]);
    if (message->kind == KVF_MESSAGE_CALL && message->call.kind == KVF_CALL_JOIN)
        fuzz_introduction(message->call.introduction);
    kvf_message_free(message);
}
