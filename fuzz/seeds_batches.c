/*
 * Seeds for the target `batches`: one of each message that a consumer sends, and a card.
 */
#include "seeds.h"

#include "transport/messages/messages.h"

/* Runs that are far apart, at equal distances, or adjacent. */
static const kvf_run runs[] = {
    {.remote_offset = 17, .bytes = 100},
    {.remote_offset = 4000, .bytes = 100},
    {.remote_offset = 300, .bytes = 8},
    {.remote_offset = 332, .bytes = 8},
    {.remote_offset = 364, .bytes = 8},
    {.remote_offset = 396, .bytes = 8},
    {.remote_offset = 60, .bytes = 10, .remote_region = 2},
    {.remote_offset = 50, .bytes = 10, .remote_region = 2},
    {.remote_offset = 40, .bytes = 10, .remote_region = 2},
    {.remote_offset = 1000, .bytes = 64},
    {.remote_offset = 1064, .bytes = 64},
    {.remote_offset = 1128, .bytes = 64},
};
#define RUNS (sizeof runs / sizeof *runs)

static void write_request(const char *name, kvf_messages_kind kind) {
    static unsigned char out[4096];
    uint32_t bytes = 0;
    for (size_t i = 0; i < RUNS; i++)
        bytes += (uint32_t)runs[i].bytes;
    size_t list = kvf_messages_list_write(runs, RUNS, out + MESSAGES_REQUEST_BYTES);
    kvf_messages_request_write(kind, 1, (uint32_t)list, bytes, out);
    memset(out + MESSAGES_REQUEST_BYTES + list, 0xab, bytes);
    seed_write("batches", name, out, MESSAGES_REQUEST_BYTES + list + (kind == MESSAGES_WRITE ? bytes : 0));
}

void seed_batches(void) {
    static kvf_messages_card card = {
        .secret = "fifteen secrets", .id = "fifteen letters", .port = 4711, .encrypted = true};
    const kvf_messages_hello hello = {.secret = "fifteen secrets",
                                      .id = "another fifteen",
                                      .generation = 1,
                                      .region_count = 3,
                                      .name = "decode-0"};
    unsigned char greeting[MESSAGES_HELLO_BYTES_MAX];
    kvf_buffer bytes = {0};
    kvf_messages_add_host(&card, "10.0.0.1");
    kvf_messages_add_host(&card, "fd00::1");
    kvf_messages_add_host(&card, "127.0.0.1");
    FUZZ_MUST(kvf_messages_card_write(&card, &bytes) == KVF_OK);
    seed_write("batches", "card", bytes.data, bytes.length);
    kvf_buffer_free(&bytes);
    seed_write("batches", "hello", greeting, kvf_messages_hello_write(&hello, greeting));
    write_request("read", MESSAGES_READ);
    write_request("write", MESSAGES_WRITE);
}
