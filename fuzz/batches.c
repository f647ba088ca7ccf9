/*
 * Bytes that the fabric "messages" reads from peers: its part of a card, greetings, and requests with their lists of
 * runs. Every input is read as each of them. A list that passes its check is used to copy, from and to memory that is
 * exactly as large as the check was told.
 */
#include "fuzz.h"

#include "transport/messages/messages.h"

#define REGIONS 3u
#define RUNS 64u

static const uint64_t region_bytes[REGIONS] = {5000, 0, 70};

static void read_card(const uint8_t *data, size_t size) {
    kvf_messages_card card, again;
    kvf_buffer bytes = {0};
    kvf_status status = kvf_messages_card_read(data, size, &card);
    if (status) {
        fuzz_check_refusal(status);
        return;
    }
    for (uint32_t i = 0; i < card.host_count; i++)
        FUZZ_MUST(kvf_messages_is_host(card.hosts[i]));
    FUZZ_MUST(kvf_messages_card_write(&card, &bytes) == KVF_OK);
    FUZZ_MUST(kvf_messages_card_read(bytes.data, bytes.length, &again) == KVF_OK);
    FUZZ_MUST(again.port == card.port && again.host_count == card.host_count &&
              memcmp(again.hosts, card.hosts, sizeof card.hosts) == 0);
    kvf_buffer_free(&bytes);
}

static void read_hello(const uint8_t *data, size_t size) {
    kvf_messages_hello hello;
    unsigned char again[MESSAGES_HELLO_BYTES_MAX];
    uint32_t version;
    if (!kvf_messages_hello_read(data, size, &hello, &version) || version != MESSAGES_VERSION)
        return;
    FUZZ_MUST(strlen(hello.name) <= KVF_SENDER_MAX);
    FUZZ_MUST(kvf_messages_hello_write(&hello, again) <= size);
}

/* Copies the runs of a list into a message and back, and writes the list again. */
static void copy_by(const kvf_messages_request *request, bool write, unsigned char *const *regions) {
    static unsigned char data[MESSAGES_CHUNK_BYTES], list[MESSAGES_LIST_BYTES];
    static kvf_run runs[MESSAGES_CHUNK_RUNS];
    unsigned char *at = data;
    kvf_messages_walk walk = {.from = {request->list, request->list_bytes, false}};
    size_t all = 0, count;
    uint64_t bytes = 0;
    while ((count = kvf_messages_walk_runs(
                &walk, runs + all, all + RUNS < MESSAGES_CHUNK_RUNS ? RUNS : MESSAGES_CHUNK_RUNS - all)) > 0)
        all += count;
    for (size_t i = 0; i < all; i++) {
        FUZZ_MUST(runs[i].local_offset == bytes && runs[i].remote_region < REGIONS);
        bytes += runs[i].bytes;
    }
    FUZZ_MUST(bytes == request->bytes);
    kvf_kernel_pack_runs(KVF_COPY_TO_LOCAL, (kvf_copy_bases){&at, regions}, runs, all);
    kvf_kernel_copy_runs(KVF_COPY_TO_REMOTE, (kvf_copy_bases){regions, &at}, runs, all, bytes);
    if (write) { /* the data is in the message */
        memcpy(&at, &request->data, sizeof at);
        kvf_kernel_copy_runs(KVF_COPY_TO_REMOTE, (kvf_copy_bases){regions, &at}, runs, all, bytes);
    }
    size_t list_bytes = kvf_messages_list_write(runs, all, list);
    kvf_memory memory[REGIONS];
    for (uint32_t i = 0; i < REGIONS; i++)
        memory[i] = (kvf_memory){.bytes = region_bytes[i]};
    FUZZ_MUST(kvf_messages_list_check(list, list_bytes, bytes, memory, REGIONS) == KVF_OK);
}

static void read_request(const uint8_t *data, size_t size) {
    kvf_messages_request request;
    unsigned char *regions[REGIONS];
    kvf_memory memory[REGIONS];
    if (!kvf_messages_request_read(data, size, &request))
        return;
    for (uint32_t i = 0; i < REGIONS; i++) {
        regions[i] = calloc(region_bytes[i] + 1, 1);
        FUZZ_MUST(regions[i]);
        regions[i] =
            realloc(regions[i], region_bytes[i] ? region_bytes[i] : 1); /* exact sizes, for the sanitizer */
        FUZZ_MUST(regions[i]);
        memory[i] = (kvf_memory){.bytes = region_bytes[i]};
    }
    kvf_status status =
        kvf_messages_list_check(request.list, request.list_bytes, request.bytes, memory, REGIONS);
    if (status)
        fuzz_check_refusal(status);
    else
        copy_by(&request, data[0] == MESSAGES_WRITE, regions);
    for (uint32_t i = 0; i < REGIONS; i++)
        free(regions[i]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    read_card(data, size);
    read_hello(data, size);
    read_request(data, size);
    return 0;
}
