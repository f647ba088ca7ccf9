/*
 * Seeds for batches as messages: one of each message that a consumer sends, a card, and what an owner may answer.
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

/* Adds a message as fuzz/answers.c reads it. */
static size_t add_answer(unsigned char *out, kvf_messages_kind kind, uint32_t number, size_t bytes) {
    const unsigned char head[] = {(unsigned char)kind, (unsigned char)number, (unsigned char)bytes, 0};
    memcpy(out, head, sizeof head);
    memset(out + sizeof head, 'a', bytes);
    return sizeof head + bytes;
}

/* Nothing is asked of an owner before it has let us in, so that all answers but `too_early` begin with that. */
static void seed_answers(void) {
    unsigned char out[256];
    const size_t let_in = add_answer(out, MESSAGES_ALIVE, 0, 0);
    size_t length = let_in + add_answer(out + let_in, MESSAGES_TAKEN, 1, 0);
    length += add_answer(out + length, MESSAGES_DATA, 1, 40);
    length += add_answer(out + length, MESSAGES_ALIVE, 0, 0);
    length += add_answer(out + length, MESSAGES_DATA, 2, 7);
    length += add_answer(out + length, MESSAGES_DONE, 3, 0);
    seed_write("answers", "all_is_well", out, length);
    length = let_in + add_answer(out + let_in, MESSAGES_FAILED, 1, 30);
    length += add_answer(out + length, MESSAGES_FAILED, 2, 0);
    length += add_answer(out + length, MESSAGES_FAILED, 3, 5);
    seed_write("answers", "all_fails", out, length);
    length = let_in + add_answer(out + let_in, MESSAGES_DATA, 1, 40);
    length += add_answer(out + length, MESSAGES_REFUSED, MESSAGES_REFUSED_GENERATION, 8);
    seed_write("answers", "refused", out, length);
    length = let_in + add_answer(out + let_in, MESSAGES_DATA, 1, 41);
    seed_write("answers", "too_long", out, length);
    length = let_in + add_answer(out + let_in, MESSAGES_DONE, 9, 0);
    seed_write("answers", "not_asked", out, length);
    length = let_in + add_answer(out + let_in, (kvf_messages_kind)200, 0, 3);
    seed_write("answers", "three_bytes", out, length);
    length = add_answer(out, MESSAGES_DATA, 1, 40);
    seed_write("answers", "too_early", out, length);
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
    seed_answers();
}
