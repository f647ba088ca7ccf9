#include "cuda_ends.h"

#include <stdio.h>
#include <unistd.h>

#include "transport/card.h"

test_end owner, writer;
kvf_peer *peer;

static void on_peer_lost(void *context, kvf_transport *transport, kvf_peer *gone, const char *detail) {
    test_end *end = context;
    (void)transport, (void)gone;
    end->lost++;
    (void)snprintf(end->lost_detail, sizeof end->lost_detail, "%s", detail);
}

unsigned char content(const test_end *end, uint32_t region, uint32_t i) {
    return (unsigned char)((i * 2654435761u >> 11) + (end == &owner) * 77u + region * 19u);
}

void device_end_open(test_end *end, uint32_t device) {
    device_end_open_with(end, device, NULL);
}

void device_end_open_with(test_end *end, uint32_t device, const kvf_setting *setting) {
    *end = (test_end){0};
    device = devices_number(device);
    const kvf_transport_options options = {.struct_size = sizeof options,
                                           .settings = setting,
                                           .setting_count = setting ? 1 : 0,
                                           .on_peer_lost = on_peer_lost,
                                           .context = end};
    assert_ok(kvf_transport_open("cuda", &options, &end->transport));
    for (uint32_t r = 0; r < 2; r++) {
        void *seen;
        end->memory[r] = device_memory(device, BYTES, &seen);
        end->memory[r].withheld = r == 1;
        end->seen[r] = seen;
        for (uint32_t i = 0; i < BYTES; i++)
            end->seen[r][i] = content(end, r, i);
        devices_put(end->seen[r]);
    }
    assert_ok(kvf_transport_register(end->transport, end->memory, 2));
}

static void card_of(const test_end *end, kvf_card *out) {
    const void *card;
    size_t bytes;
    assert_ok(kvf_transport_export(end->transport, &card, &bytes));
    assert_ok(kvf_card_read(card, bytes, out));
    assert_int_equal(out->part_count, 1);
}

/* The fabric's part in the card of an end. */
void part_of(const test_end *end, kvf_cuda_card *card, kvf_cuda_region regions[2]) {
    kvf_card all;
    card_of(end, &all);
    assert_int_equal(all.parts[0].bytes, sizeof *card + 2 * sizeof *regions);
    memcpy(card, all.parts[0].data, sizeof *card);
    memcpy(regions, (const char *)all.parts[0].data + sizeof *card, 2 * sizeof *regions);
    kvf_card_free(&all);
}

void run_rounds(void) {
    for (int i = 0; i < ROUNDS; i++) {
        assert_ok(kvf_transport_progress(writer.transport, NULL));
        assert_ok(kvf_transport_progress(owner.transport, NULL));
        if (devices_are_real())
            (void)usleep(1000);
    }
}

void connect_ends(void) {
    const void *card;
    size_t bytes;
    assert_ok(kvf_transport_export(owner.transport, &card, &bytes));
    assert_ok(kvf_transport_connect(writer.transport, card, bytes, &peer));
}

void both_open(void) {
    device_end_open(&owner, 0);
    device_end_open(&writer, 1);
    connect_ends();
}

void both_close(void) {
    kvf_transport_close(writer.transport);
    kvf_transport_close(owner.transport);
    devices_free();
}

/* Counts the bytes of the owner's region 0, in this range, that the writer has written. */
uint32_t written(uint32_t begin, uint32_t end) {
    uint32_t count = 0;
    devices_get(owner.seen[0]);
    for (uint32_t i = begin; i < end; i++) {
        assert_true(owner.seen[0][i] == content(&owner, 0, i) || owner.seen[0][i] == content(&writer, 0, i));
        count +=
            owner.seen[0][i] == content(&writer, 0, i) && content(&writer, 0, i) != content(&owner, 0, i);
    }
    return count;
}

static void note(void *context, kvf_operation operation, kvf_status status, const char *detail) {
    outcome *noted = context;
    (void)operation;
    noted->calls++;
    noted->status = status;
    (void)snprintf(noted->detail, sizeof noted->detail, "%s", detail);
}

void submit_of_writer(kvf_direction direction, uint32_t bytes, outcome *noted) {
    submit_of_region(0, direction, bytes, noted);
}

void submit_run(const kvf_run *run, kvf_direction direction, outcome *noted) {
    *noted = (outcome){0};
    assert_ok(kvf_transport_submit(peer, direction, run, 1, note, noted, &noted->operation));
}

void submit_of_region(uint32_t region, kvf_direction direction, uint32_t bytes, outcome *noted) {
    static kvf_run run; /* must last until the batch has ended; there is one batch at a time */
    run = (kvf_run){.local_region = region, .bytes = bytes};
    submit_run(&run, direction, noted);
}

void assert_written(uint32_t bytes) {
    devices_get(owner.seen[0]);
    assert_memory_equal(owner.seen[0], writer.seen[0], bytes);
}

/* The honest writer can still write. */
void write_well(void) {
    outcome noted;
    submit_of_writer(KVF_WRITE, BYTES, &noted);
    run_rounds();
    assert_int_equal(noted.calls, 1);
    assert_int_equal(noted.status, KVF_OK);
    assert_written(BYTES);
}

/* ---- guests of the owner ------------------------------------------------------------------------- */

int open_guest(void) {
    kvf_cuda_card card;
    kvf_cuda_region regions[2];
    int fd;
    part_of(&owner, &card, regions);
    assert_ok(kvf_cuda_wire_connect(card.name, &fd));
    return fd;
}

void say_as_guest(int fd, const void *message, size_t bytes) {
    assert_ok(kvf_cuda_wire_send(fd, message, bytes));
}

kvf_cuda_hello good_hello(void) {
    kvf_cuda_hello hello = {
        .header = {CUDA_HELLO, 0}, .version = CUDA_WIRE_VERSION, .generation = UINT64_MAX, .name = "a guest"};
    kvf_cuda_card card;
    kvf_cuda_region regions[2];
    part_of(&owner, &card, regions);
    memcpy(hello.key, card.key, CUDA_ID_BYTES);
    memset(hello.from, 0x33, sizeof hello.from);
    return hello;
}

/* A guest that has sent HELLO. */
int open_known_guest(void) {
    kvf_cuda_packet packet;
    const int fd = open_guest();
    const kvf_cuda_hello hello = good_hello();
    say_as_guest(fd, &hello, sizeof hello);
    run_rounds();
    assert_ok(kvf_cuda_wire_receive(fd, &packet));
    assert_int_equal(packet.as.header.kind, CUDA_READY);
    return fd;
}

/* The memory of an endpoint that does not exist. */
kvf_cuda_memory good_memory(void) {
    kvf_cuda_memory memory = {.header = {CUDA_MEMORY, 1}};
    kvf_cuda_region regions[2];
    part_of(&owner, &memory.card, regions);
    memset(memory.card.process, 0x44, CUDA_ID_BYTES);
    memset(memory.card.name, 0x55, CUDA_ID_BYTES);
    memory.card.region_count = 1;
    memory.regions[0] = regions[0];
    memory.regions[0].bytes = TOLD_BYTES;
    return memory;
}

size_t memory_bytes(const kvf_cuda_memory *memory) {
    return offsetof(kvf_cuda_memory, regions) + memory->header.count * sizeof *memory->regions;
}

size_t write_bytes(const kvf_cuda_write *write) {
    return offsetof(kvf_cuda_write, runs) + write->header.count * sizeof *write->runs;
}

uint32_t refusal_of(int fd) {
    kvf_cuda_packet packet;
    uint32_t refusal = NOBODY;
    run_rounds();
    while (refusal == NOBODY && kvf_cuda_wire_receive(fd, &packet) == KVF_OK)
        if (packet.as.header.kind == CUDA_REFUSED)
            refusal = packet.as.header.count;
    (void)close(fd);
    run_rounds();
    return refusal;
}
