/*
 * Writes the binary seeds of the corpus, as hexadecimal text: seeds FOLDER, which has a folder for each target. Run it
 * again when the format of messages has changed.
 */
#include "seeds.h"

#include <errno.h>

#include "messages.h"

static const char *folder;

void seed_write(const char *target, const char *name, const void *data, size_t size) {
    char path[4096];
    FUZZ_MUST(snprintf(path, sizeof path, "%s/%s/%s.hex", folder, target, name) < (int)sizeof path);
    FILE *file = fopen(path, "w");
    if (!file) {
        (void)fprintf(stderr, "seeds: %s: %s\n", path, strerror(errno));
        exit(1);
    }
    for (size_t i = 0; i < size; i++)
        (void)fprintf(file, "%02x%s", ((const uint8_t *)data)[i], i % 50 == 49 || i + 1 == size ? "\n" : "");
    FUZZ_MUST(fclose(file) == 0);
}

static const uint32_t scattered[] = {17, 3, 99, 4, 1000000, KVF_NO_BLOCK}, one[] = {7};
static uint32_t neighbours[100];

static const kvf_wire_group groups[] = {
    {.table = {scattered, 6, 2}, .begin = 40, .end = 96},
    {.table = {neighbours, 100, 0}, .begin = 0, .end = 1600},
    {.table = {one, 1, 0}, .begin = 0, .end = 1},
    {.table = {NULL, 0, 0}},
};

#define GROUPS .groups = groups, .group_count = sizeof groups / sizeof *groups
static const kvf_record records[] = {
    {.name = "token", .begin = 50, .end = 51, .data = "\x2a\0\0\0", .size = 4},
    {.name = "routed", .begin = 0, .end = 50},
};

#define RECORDS .records = records, .record_count = sizeof records / sizeof *records
#define SESSION .session = "sixteen letters"
#define REQUEST .request = {"cmpl-7f\0\xff", 9}

/* Writes a whole message for the target `handshake`, and the body of a call for the target `calls`. */
static void write_message(const char *name, const kvf_message *message) {
    kvf_wire_buffer encoded = {0};
    kvf_message opened;
    FUZZ_MUST(kvf_wire_encode(message, &encoded) == KVF_OK);
    FUZZ_MUST(kvf_wire_open((kvf_bytes){encoded.data, encoded.size}, &opened) == KVF_OK);
    bool is_answer = message->kind == KVF_MESSAGE_ANSWER;
    if (is_answer || message->kind == KVF_MESSAGE_CALL) {
        uint8_t *body = malloc(opened.body.size + 1);
        FUZZ_MUST(body);
        body[0] = is_answer;
        memcpy(body + 1, opened.body.data, opened.body.size);
        seed_write("calls", name, body, opened.body.size + 1);
        free(body);
    } else
        seed_write("handshake", name, encoded.data, encoded.size);
    if (strcmp(name, "call_release") == 0) /* just one call with its envelope */
        seed_write("handshake", name, encoded.data, encoded.size);
    kvf_wire_buffer_free(&encoded);
}

static void write_call(const char *name, kvf_call_body call) {
    kvf_message message = {.kind = KVF_MESSAGE_CALL, .call = call};
    write_message(name, &message);
}

static void write_answer(const char *name, kvf_answer answer) {
    kvf_message message = {.kind = KVF_MESSAGE_ANSWER, .answer = answer};
    write_message(name, &message);
}

/* The shard of one rank; the caller owns the bytes. */
static kvf_wire_buffer make_shard(const char *name, const kvf_engine_spec *spec, uint32_t rank) {
    kvf_engine *engine = NULL;
    kvf_wire_buffer shard = {0};
    FUZZ_MUST(kvf_engine_build(fuzz_model(), spec, &engine) == KVF_OK);
    FUZZ_MUST(kvf_wire_encode_shard(kvf_engine_shard(engine, rank), NULL, &shard) == KVF_OK);
    seed_write("handshake", name, shard.data, shard.size);
    kvf_engine_free(engine);
    return shard;
}

static void seed_handshakes(void) {
    const kvf_engine_spec plain = {.struct_size = sizeof plain, .tp_size = 2, .all = {.block_count = 100}};
    const kvf_engine_spec packed = {.struct_size = sizeof packed,
                                    .pp_size = 2,
                                    .all = {.block_count = 7, .order = "BLHNP", .page_align = 4096},
                                    .state = {.order = "L|BTNPH"}};
    kvf_wire_buffer shard = make_shard("shard_plain", &plain, 1),
                    other = make_shard("shard_packed", &packed, 1);
    kvf_introduction introduction = {.engine = "prefill-0",
                                     .incarnation = 0x1122334455667788,
                                     .rank = 1,
                                     .rank_count = 2,
                                     .endpoint = "tcp://10.0.0.1:5555",
                                     .public_key = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7",
                                     .shard = {shard.data, shard.size}};
    kvf_wire_buffer introduced = {0};
    FUZZ_MUST(kvf_wire_encode_introduction(&introduction, &introduced) == KVF_OK);
    seed_write("handshake", "introduction", introduced.data, introduced.size);
    write_message("hello", &(kvf_message){.kind = KVF_MESSAGE_HELLO,
                                          .hello = {.engine = "decode-0",
                                                    .incarnation = 5,
                                                    .rank = 3,
                                                    .rank_count = 8,
                                                    .wants_ranks = true,
                                                    .clock_ns = 1000000007}});
    write_message("hello_card", &(kvf_message){.kind = KVF_MESSAGE_HELLO,
                                               .hello = {.engine = "decode-0",
                                                         .incarnation = 5,
                                                         .rank_count = 1,
                                                         .wants_card = true,
                                                         .secret = "sixteen secrets",
                                                         .clock_ns = 7}});
    const kvf_bytes all[] = {{introduced.data, introduced.size}};
    write_message("welcome",
                  &(kvf_message){.kind = KVF_MESSAGE_WELCOME,
                                 .welcome = {SESSION, .engine = "prefill-0", .incarnation = 5,
                                             .rank = UINT32_MAX, .card = {"card", 4}, .introductions = all,
                                             .introduction_count = 1, .facts = "layer_count: 3\n"}});
    write_message("refused", &(kvf_message){.kind = KVF_MESSAGE_REFUSED,
                                            .refused = {KVF_E_UNSUPPORTED, "speaks version 9"}});
    write_message("command",
                  &(kvf_message){.kind = KVF_MESSAGE_COMMAND,
                                 .command = {.id = "fifteen letters",
                                             .verb = "take over",
                                             REQUEST,
                                             .engine = "prefill-0",
                                             .endpoint = "tcp://10.0.0.1:5555",
                                             .public_key = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7",
                                             .time_ns = 5000000000,
                                             RECORDS}});
    write_message("reply", &(kvf_message){.kind = KVF_MESSAGE_REPLY,
                                          .reply = {.id = "fifteen letters",
                                                    .status = KVF_E_NOT_FOUND,
                                                    .detail = "holds no such request",
                                                    RECORDS}});
    write_call("call_join",
               (kvf_call_body){SESSION, .number = 1, .kind = KVF_CALL_JOIN, .generation = 1,
                               .introduction = {introduced.data, introduced.size}, .card = {"card", 4}});
    kvf_wire_buffer_free(&introduced);
    kvf_wire_buffer_free(&shard);
    kvf_wire_buffer_free(&other);
}

static void seed_calls(void) {
    static const uint64_t numbers[] = {1, 2, 3, 1ull << 40, 9, UINT64_MAX};
    write_call("call_acquire", (kvf_call_body){SESSION, .number = 2, .kind = KVF_CALL_ACQUIRE, REQUEST,
                                               .time_ns = 5000000000, .rank_count = 4});
    write_call("call_release",
               (kvf_call_body){SESSION, .number = 3, .kind = KVF_CALL_RELEASE, REQUEST, .generation = 77,
                               .earlier = 2, .rank_count = 4, .status = KVF_E_CANCELLED});
    write_call("call_beat", (kvf_call_body){SESSION, .number = 4, .kind = KVF_CALL_BEAT, .leases = numbers,
                                            .lease_count = 6, .expectations = numbers, .expectation_count = 3,
                                            .clock_ns = 123});
    write_call("call_expect",
               (kvf_call_body){SESSION, .number = 5, .kind = KVF_CALL_EXPECT, REQUEST, .generation = 78,
                               .time_ns = 1ull << 62, .rank_count = 1, GROUPS});
    write_call("call_written",
               (kvf_call_body){SESSION, .number = 6, .kind = KVF_CALL_WRITTEN, REQUEST, .generation = 78,
                               .status = KVF_E_PEER_LOST, .detail = "lost", .bytes = 65536});
    write_call("call_written_records", (kvf_call_body){SESSION, .number = 6, .kind = KVF_CALL_WRITTEN,
                                                       REQUEST, .generation = 78, .bytes = 65536, RECORDS});
    write_call("call_withdraw", (kvf_call_body){SESSION, .number = 7, .kind = KVF_CALL_WITHDRAW, REQUEST,
                                                .generation = 78, .earlier = 5});
    write_call("call_checksum",
               (kvf_call_body){SESSION, .number = 8, .kind = KVF_CALL_CHECKSUM, .generation = 77, .group = 1,
                               .part = 2, .layers = {0, 3}, .units = {4, 8}, .begin = 16, .end = 22});
    write_call("call_probe", (kvf_call_body){SESSION, .number = 9, .kind = KVF_CALL_PROBE});
    write_answer("answer_join", (kvf_answer){SESSION, .number = 1, .kind = KVF_CALL_JOIN});
    write_answer("answer_acquire", (kvf_answer){SESSION, .number = 2, .kind = KVF_CALL_ACQUIRE,
                                                .generation = 77, .time_ns = 30000000000, GROUPS});
    write_answer("answer_acquire_records",
                 (kvf_answer){SESSION, .number = 2, .kind = KVF_CALL_ACQUIRE, .generation = 77,
                              .time_ns = 30000000000, GROUPS, RECORDS});
    write_answer("answer_refused", (kvf_answer){SESSION, .number = 2, .kind = KVF_CALL_ACQUIRE,
                                                .status = KVF_E_NOT_FOUND, .detail = "no such request"});
    write_answer("answer_beat",
                 (kvf_answer){SESSION, .number = 4, .kind = KVF_CALL_BEAT, .time_ns = 30000000000,
                              .gone = numbers, .gone_count = 2, .clock_ns = 456});
    write_answer("answer_checksum", (kvf_answer){SESSION, .number = 8, .kind = KVF_CALL_CHECKSUM,
                                                 .sums = numbers, .sum_count = 6});
}

int main(int argc, char **argv) {
    if (argc != 2) {
        (void)fprintf(stderr, "usage: %s FOLDER\n", argv[0]);
        return 2;
    }
    folder = argv[1];
    for (uint32_t i = 0; i < 100; i++)
        neighbours[i] = 5000 + i;
    seed_handshakes();
    seed_calls();
    seed_agent();
    seed_cards();
    seed_cuda();
    seed_shm();
    seed_batches();
    return 0;
}
