/*
 * An owner of device memory and its writers: one writer that is shut out while the owner's kernels copy for it, and
 * others that know the protocol (cuda_wire.h) and violate it; and a writer whose owner violates it.
 *
 * Owner and writer are endpoints of this process; guests are sockets of this process.
 */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "cuda/device_image.h"
#include "cuda_ends.h"
#include "cuda_owner.h"
#include "transport/card.h"
#include "transport/cuda/cuda.h"
#include "transport/front.h"

/* ---- shutting out -------------------------------------------------------------------------------- */

static kvf_status fence_writer(kvf_status (*how)(kvf_transport *, const void *, size_t)) {
    const void *card;
    size_t bytes;
    assert_ok(kvf_transport_export(writer.transport, &card, &bytes));
    return how(owner.transport, card, bytes);
}

static void a_writer_is_shut_out_when_the_kernels_that_copy_for_it_are_over(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS();
    outcome noted;
    const size_t left = devices_left();
    both_open();
    run_rounds();
    devices_delay(HOUR_NS);
    submit_of_writer(KVF_WRITE, BYTES, &noted);
    run_rounds();
    for (int i = 0; i < 3; i++) { /* for as long as they run */
        assert_fails(fence_writer(kvf_transport_fence), KVF_E_AGAIN, "kernels of this process still copy",
                     "asked to write", "after it was shut out");
        run_rounds();
    }
    assert_int_equal(written(0, BYTES), 0);
    assert_int_equal(noted.status, KVF_E_PEER_LOST);
    assert_non_null(strstr(writer.lost_detail, "it has shut this endpoint out"));
    devices_delay(0);
    devices_hasten();
    run_rounds();
    assert_ok(fence_writer(kvf_transport_fence));
    const uint32_t then = written(0, BYTES);
    kvf_peer_close(peer);
    connect_ends();
    submit_of_writer(KVF_WRITE, BYTES, &noted);
    run_rounds();
    assert_int_equal(noted.status, KVF_E_PEER_LOST);
    assert_int_equal(written(0, BYTES), then);
    /* Once the writer is let in again, it can write. */
    assert_ok(fence_writer(kvf_transport_admit));
    kvf_peer_close(peer);
    connect_ends();
    for (uint32_t i = 0; i < BYTES; i++)
        owner.seen[0][i] = content(&owner, 0, i);
    devices_put(owner.seen[0]);
    write_well();
    both_close();
    assert_int_equal(devices_left(), left);
}

static void a_writer_for_whom_nothing_is_copied_is_shut_out_at_once(void **state) {
    (void)state;
    outcome noted;
    both_open();
    run_rounds();
    assert_ok(fence_writer(kvf_transport_fence));
    submit_of_writer(KVF_WRITE, BYTES, &noted);
    run_rounds();
    assert_int_equal(noted.status, KVF_E_PEER_LOST);
    assert_int_equal(written(0, BYTES), 0);
    both_close();
}

/* ---- giving up what was asked -------------------------------------------------------------------- */

#define ASKED 4096u

static bool stop_writing(uint32_t region, uint64_t offset, uint64_t bytes) {
    return kvf_transport_stop_writing(owner.transport, region, offset, bytes);
}

/* The owner has heard of the write, and is connecting to the writer. */
static void open_with_a_write_that_has_not_begun(outcome *noted) {
    both_open();
    run_rounds();
    submit_of_writer(KVF_WRITE, ASKED, noted);
    assert_ok(kvf_transport_progress(writer.transport, NULL));
    assert_ok(kvf_transport_progress(owner.transport, NULL));
}

static void a_write_that_has_not_begun_is_given_up(void **state) {
    (void)state;
    outcome noted;
    open_with_a_write_that_has_not_begun(&noted);
    assert_true(stop_writing(0, ASKED - 1, 1));
    run_rounds();
    assert_int_equal(noted.calls, 1);
    assert_int_equal(noted.status, KVF_E_IO);
    assert_non_null(strstr(noted.detail, "the memory that was to be written is no longer meant for it"));
    assert_int_equal(written(0, BYTES), 0);
    write_well();
    both_close();
}

static void a_write_to_other_memory_is_not_given_up(void **state) {
    (void)state;
    outcome noted;
    open_with_a_write_that_has_not_begun(&noted);
    assert_true(stop_writing(0, ASKED, BYTES - ASKED));
    assert_true(stop_writing(1, 0, BYTES));
    run_rounds();
    assert_int_equal(noted.calls, 1);
    assert_int_equal(noted.status, KVF_OK);
    both_close();
}

static void a_write_that_kernels_make_is_waited_for(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS();
    outcome noted;
    both_open();
    run_rounds();
    devices_delay(HOUR_NS);
    submit_of_writer(KVF_WRITE, ASKED, &noted);
    run_rounds();
    for (int i = 0; i < 3; i++) {
        assert_true(stop_writing(0, ASKED, BYTES - ASKED));
        assert_false(stop_writing(0, 0, 1));
        run_rounds();
    }
    assert_int_equal(noted.calls, 0);
    devices_delay(0);
    devices_hasten();
    run_rounds();
    assert_true(stop_writing(0, 0, BYTES));
    assert_int_equal(noted.calls, 1);
    write_well();
    both_close();
}

/* ---- guests of the owner ------------------------------------------------------------------------- */

/* A message from a guest that has told `told` of its two regions before must be refused. */
static void refused_after(uint32_t told, const void *message, size_t bytes) {
    const int fd = open_known_guest();
    kvf_cuda_memory memory = good_memory();
    memory.card.region_count = 2;
    memory.header.count = told;
    memory.regions[1] = memory.regions[0];
    if (told)
        say_as_guest(fd, &memory, memory_bytes(&memory));
    say_as_guest(fd, message, bytes);
    assert_int_equal(refusal_of(fd), CUDA_REFUSED_PROTOCOL);
}

static void an_unknown_peer_and_one_that_makes_no_sense_are_refused(void **state) {
    (void)state;
    both_open();
    kvf_cuda_hello hello = good_hello();
    const kvf_cuda_memory memory = good_memory();
    const kvf_cuda_write write = {.header = {CUDA_WRITE, 1}, .runs = {{.bytes = 64}}};
    int fd = open_guest();
    say_as_guest(fd, &memory, memory_bytes(&memory));
    assert_int_equal(refusal_of(fd), CUDA_REFUSED_PROTOCOL);
    fd = open_guest();
    say_as_guest(fd, &write, write_bytes(&write));
    assert_int_equal(refusal_of(fd), CUDA_REFUSED_PROTOCOL);
    fd = open_guest();
    hello.key[0] ^= 1;
    say_as_guest(fd, &hello, sizeof hello);
    assert_int_equal(refusal_of(fd), CUDA_REFUSED_KEY);
    hello = good_hello();
    refused_after(0, &hello, sizeof hello);
    const kvf_cuda_header odd[] = {{CUDA_READY, 0}, {CUDA_WRITTEN, 0}, {CUDA_REFUSED, 0}, {99, 1}, {0, 0}};
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++)
        refused_after(2, &odd[i], sizeof odd[i]);
    refused_after(2, "abc", 3);
    write_well();
    both_close();
}

static void memory_that_is_told_wrongly_is_refused(void **state) {
    (void)state;
    both_open();
    const kvf_cuda_memory good = good_memory();
    kvf_cuda_memory bad = good;
    bad.header.count = 0;
    refused_after(0, &bad, memory_bytes(&bad));
    refused_after(0, &good, memory_bytes(&good) - 1);
    refused_after(0, &good, memory_bytes(&good) + 1);
    refused_after(0, &good, offsetof(kvf_cuda_memory, regions) - 1);
    refused_after(0, &good, sizeof good.header);
    struct {
        kvf_cuda_memory memory;
        kvf_cuda_region more;
    } long_one = {.memory = good};
    long_one.memory.header.count = long_one.memory.card.region_count = CUDA_MEMORY_PART + 1;
    refused_after(0, &long_one, sizeof long_one);
    bad = good;
    bad.card.region_count = 0;
    refused_after(0, &bad, memory_bytes(&bad));
    bad.card.region_count = CUDA_MEMORY_REGIONS + 1;
    refused_after(0, &bad, memory_bytes(&bad));
    bad.card.region_count = UINT32_MAX;
    refused_after(0, &bad, memory_bytes(&bad));
    bad = good;
    bad.first = 1;
    bad.card.region_count = 2;
    refused_after(0, &bad, memory_bytes(&bad)); /* region 0 is not told yet */
    bad.card.region_count = 3;
    refused_after(1, &bad, memory_bytes(&bad)); /* the guest said two before */
    bad.card.region_count = 2;
    bad.header.count = 2;
    refused_after(1, &bad, memory_bytes(&bad)); /* only one region is left to tell */
    bad.first = UINT32_MAX;
    refused_after(1, &bad, memory_bytes(&bad));
    write_well();
    both_close();
}

static void refused_run(kvf_run run) {
    kvf_cuda_write write = {.header = {CUDA_WRITE, 2}, .runs = {{.bytes = 64}, {0}}};
    write.runs[1] = run; /* behind a valid run */
    refused_after(2, &write, write_bytes(&write));
}

static void writes_that_are_asked_wrongly_are_refused(void **state) {
    (void)state;
    both_open();
    const kvf_cuda_write good = {.header = {CUDA_WRITE, 1}, .runs = {{.bytes = 64}}};
    kvf_cuda_write *bad = calloc(2, sizeof *bad);
    assert_non_null(bad);
    refused_after(0, &good, write_bytes(&good)); /* no memory was told */
    refused_after(1, &good, write_bytes(&good)); /* the memory is told in part only */
    refused_after(2, &good, write_bytes(&good) - 1);
    refused_after(2, &good, write_bytes(&good) + 1);
    *bad = good;
    bad->header.count = 0;
    refused_after(2, bad, write_bytes(bad));
    bad->header.count = CUDA_WRITE_RUNS + 1;
    refused_after(2, bad, write_bytes(bad));
    refused_run((kvf_run){.remote_region = 1, .bytes = 64}); /* the owner withholds this region */
    refused_run((kvf_run){.remote_region = 2, .bytes = 64});
    refused_run((kvf_run){.remote_region = UINT32_MAX, .bytes = 64});
    refused_run((kvf_run){.local_region = 2, .bytes = 64});
    refused_run((kvf_run){.remote_offset = BYTES - 63, .bytes = 64});
    refused_run((kvf_run){.remote_offset = UINT64_MAX - 31, .bytes = 64});
    refused_run((kvf_run){.local_offset = TOLD_BYTES - 63, .bytes = 64});
    refused_run((kvf_run){.local_offset = UINT64_MAX - 31, .bytes = 64});
    refused_run((kvf_run){.bytes = UINT64_MAX});
    assert_int_equal(written(0, BYTES), 0);
    devices_get(owner.seen[1]);
    for (uint32_t i = 0; i < BYTES; i++)
        assert_int_equal(owner.seen[1][i], content(&owner, 1, i));
    write_well();
    free(bad);
    both_close();
}

/* The answer that a guest gets to a valid write, with number 7, from the memory that it has told. */
static kvf_status answer_to(const kvf_cuda_write *write, const kvf_cuda_memory *memory,
                            char reason[CUDA_REASON_BYTES]) {
    kvf_cuda_packet packet;
    const int fd = open_known_guest();
    say_as_guest(fd, memory, memory_bytes(memory));
    say_as_guest(fd, write, write_bytes(write));
    run_rounds();
    assert_ok(kvf_cuda_wire_receive(fd, &packet));
    assert_int_equal(packet.as.header.kind, CUDA_WRITTEN);
    assert_int_equal(packet.as.written.number, 7);
    (void)snprintf(reason, CUDA_REASON_BYTES, "%s", packet.as.written.reason);
    (void)close(fd);
    run_rounds();
    return (kvf_status)packet.as.header.count;
}

static kvf_status answer_after(const kvf_cuda_memory *memory, char reason[CUDA_REASON_BYTES]) {
    const kvf_cuda_write write = {.header = {CUDA_WRITE, 1}, .number = 7, .runs = {{.bytes = 64}}};
    return answer_to(&write, memory, reason);
}

/* The writer's memory, as the writer tells it. */
static kvf_cuda_memory true_memory(void) {
    kvf_cuda_memory memory = good_memory();
    kvf_cuda_region regions[2];
    part_of(&writer, &memory.card, regions);
    memory.card.region_count = 1;
    memory.regions[0] = regions[0];
    memory.generation = UINT64_MAX;
    return memory;
}

/* 2 times 3 runs of 64 bytes: 1024 + 2 * 128 + 64 bytes of the writer, 4096 + 2 * 256 + 64 of the owner. */
static const kvf_run_shape nest_shape = {64, 2, 1024, 4096, 3, 128, 256};
enum { NEST_BYTES = 384, NEST_LOCAL = 1344, NEST_REMOTE = 4672 };

static void refused_nest(kvf_run_shape shape, kvf_run nest) {
    kvf_cuda_write write = {.header = {CUDA_WRITE, 1}, .shape = shape, .runs = {nest}};
    refused_after(2, &write, write_bytes(&write));
}

/* With the bytes that such a nest would have, modulo 2^64. */
static void refused_shape(kvf_run_shape shape) {
    refused_nest(shape, (kvf_run){.bytes = shape.bytes * shape.outer_count * shape.inner_count});
}

static void nests_that_are_asked_wrongly_are_refused(void **state) {
    (void)state;
    both_open();
    refused_shape((kvf_run_shape){.bytes = 64});
    refused_shape((kvf_run_shape){.inner_remote = 1});
    refused_shape((kvf_run_shape){0, 2, 1024, 4096, 3, 128, 256});
    refused_shape((kvf_run_shape){64, 0, 0, 0, 3, 128, 256});
    refused_shape((kvf_run_shape){64, 2, 1024, 4096, 0, 0, 0});
    refused_shape((kvf_run_shape){64, UINT64_C(1) << 63, 0, 0, 2, 0, 0});
    refused_shape((kvf_run_shape){64, UINT64_C(1) << 59, 0, 0, 1, 0, 0});
    refused_shape((kvf_run_shape){64, 2, UINT64_MAX - 63, 4096, 1, 0, 0});
    refused_shape((kvf_run_shape){64, 2, 1024, UINT64_MAX - 63, 1, 0, 0});
    refused_shape((kvf_run_shape){64, 1, 0, 0, 2, UINT64_MAX - 63, 256});
    refused_shape((kvf_run_shape){64, 1, 0, 0, 2, 128, UINT64_MAX - 63});
    /* Runs that lie on each other: a small region would keep a kernel busy for hours. */
    refused_shape((kvf_run_shape){64, 1u << 20, 0, 0, 1, 0, 0});
    refused_shape((kvf_run_shape){64, 1, 0, 0, 1u << 20, 0, 0});
    refused_nest(nest_shape, (kvf_run){.bytes = NEST_BYTES - 1});
    refused_nest(nest_shape, (kvf_run){.bytes = NEST_BYTES + 1});
    refused_nest(nest_shape, (kvf_run){.bytes = 64});
    refused_nest(nest_shape, (kvf_run){.bytes = NEST_BYTES, .remote_region = 1}); /* it is withheld */
    refused_nest(nest_shape, (kvf_run){.bytes = NEST_BYTES, .remote_region = 2});
    refused_nest(nest_shape, (kvf_run){.bytes = NEST_BYTES, .local_region = 2});
    refused_nest(nest_shape, (kvf_run){.bytes = NEST_BYTES, .local_offset = TOLD_BYTES - NEST_LOCAL + 1});
    refused_nest(nest_shape, (kvf_run){.bytes = NEST_BYTES, .remote_offset = BYTES - NEST_REMOTE + 1});
    refused_nest(nest_shape, (kvf_run){.bytes = NEST_BYTES, .local_offset = UINT64_MAX - 31});
    refused_nest(nest_shape, (kvf_run){.bytes = NEST_BYTES, .remote_offset = UINT64_MAX - 31});
    assert_int_equal(written(0, BYTES), 0);
    write_well();
    both_close();
}

static void a_nest_up_to_the_end_of_both_regions_is_written_run_by_run(void **state) {
    (void)state;
    enum { LOCAL = BYTES - NEST_LOCAL, REMOTE = BYTES - NEST_REMOTE };
    char reason[CUDA_REASON_BYTES];
    static unsigned char expected[BYTES];
    both_open();
    const kvf_cuda_memory memory = true_memory();
    const kvf_cuda_write write = {
        .header = {CUDA_WRITE, 1},
        .number = 7,
        .shape = nest_shape,
        .runs = {{.bytes = NEST_BYTES, .local_offset = LOCAL, .remote_offset = REMOTE}}};
    memcpy(expected, owner.seen[0], BYTES);
    for (uint32_t outer = 0; outer < 2; outer++)
        for (uint32_t inner = 0; inner < 3; inner++)
            memcpy(expected + REMOTE + outer * 4096 + inner * 256,
                   writer.seen[0] + LOCAL + outer * 1024 + inner * 128, 64);
    assert_int_equal(answer_to(&write, &memory, reason), KVF_OK);
    devices_get(owner.seen[0]);
    assert_memory_equal(owner.seen[0], expected, BYTES);
    write_well();
    both_close();
}

/* A guest that has told the writer's memory and has asked for `writes` writes, which wait for the device. */
static int open_busy_guest(uint32_t writes) {
    const kvf_cuda_memory memory = true_memory();
    const int fd = open_known_guest();
    devices_delay(HOUR_NS);
    say_as_guest(fd, &memory, memory_bytes(&memory));
    for (uint32_t i = 0; i < writes; i++) {
        const kvf_cuda_write write = {
            .header = {CUDA_WRITE, 1},
            .number = i,
            .runs = {{.local_offset = i * 64, .remote_offset = i * 64, .bytes = 64}}};
        say_as_guest(fd, &write, write_bytes(&write));
    }
    run_rounds();
    return fd;
}

static void a_nest_reaches_to_its_last_run(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS();
    both_open();
    const int fd = open_busy_guest(0);
    const kvf_cuda_write write = {
        .header = {CUDA_WRITE, 1}, .shape = nest_shape, .runs = {{.bytes = NEST_BYTES}}};
    say_as_guest(fd, &write, write_bytes(&write));
    run_rounds();
    assert_true(stop_writing(0, NEST_REMOTE, BYTES - NEST_REMOTE));
    assert_false(stop_writing(0, NEST_REMOTE - 1, 1));
    devices_delay(0);
    devices_hasten();
    run_rounds();
    assert_true(stop_writing(0, 0, BYTES));
    (void)close(fd);
    both_close();
}

static void memory_that_a_guest_cannot_have_is_not_read(void **state) {
    (void)state;
    char reason[CUDA_REASON_BYTES];
    both_open();
    const kvf_cuda_memory good = good_memory();
    kvf_cuda_memory bad = good;
    assert_int_equal(answer_after(&good, reason), KVF_E_PEER_LOST);
    assert_non_null(strstr(reason, "the endpoint that exported the card is gone"));
    memset(bad.card.place.host, 0x11, CUDA_ID_BYTES);
    assert_int_equal(answer_after(&bad, reason), KVF_E_UNSUPPORTED);
    assert_string_equal(reason, "the peer is on another host");
    bad = good;
    bad.card.place.network++;
    assert_int_equal(answer_after(&bad, reason), KVF_E_UNSUPPORTED);
    /* The guest claims to be the writer, which is in this process, but with another address: that of the region which
     * the owner withholds. */
    kvf_cuda_region regions[2];
    bad = good;
    part_of(&writer, &bad.card, regions);
    bad.card.region_count = 1;
    bad.regions[0] = regions[0];
    bad.regions[0].base = (uint64_t)(uintptr_t)owner.memory[1].address;
    assert_int_equal(answer_after(&bad, reason), KVF_E_AGAIN);
    assert_non_null(strstr(reason, "region 0 has changed since generation"));
    part_of(&owner, &bad.card, regions); /* as the owner itself */
    bad.card.region_count = 1;
    assert_int_equal(answer_after(&bad, reason), KVF_E_AGAIN);
    assert_int_equal(written(0, BYTES), 0);
    /* The control: with the writer's true data the write succeeds. */
    bad = true_memory();
    assert_int_equal(answer_after(&bad, reason), KVF_OK);
    assert_int_not_equal(written(0, 64), 0);
    write_well();
    both_close();
}

/* The fabric's own answer when it is to shut guests out. */
static kvf_status fence_guests(void) {
    const kvf_front_fabric *front = &owner.transport->fabrics[0];
    kvf_cuda_card card = {.region_count = 0};
    memcpy(card.name, good_hello().from, CUDA_ID_BYTES);
    kvf_status status = front->fabric->fence(front->endpoint, &card, sizeof card);
    assert_ok(front->fabric->admit(front->endpoint, &card, sizeof card));
    return status;
}

/* It writes by another fabric then, which may be one that shuts nobody out: that it was here no longer says that it is
 * out. */
static void a_writer_that_the_owner_cannot_read_is_out_only_of_this_fabric(void **state) {
    (void)state;
    char reason[CUDA_REASON_BYTES];
    both_open();
    kvf_cuda_memory memory = true_memory();
    assert_int_equal(fence_guests(), KVF_E_NOT_FOUND);
    assert_int_equal(answer_after(&memory, reason), KVF_OK);
    assert_ok(fence_guests());
    kvf_cuda_memory far = memory;
    memset(far.card.place.host, 0x11, CUDA_ID_BYTES);
    assert_int_equal(answer_after(&far, reason), KVF_E_UNSUPPORTED);
    assert_int_equal(fence_guests(), KVF_E_NOT_FOUND);
    assert_int_equal(answer_after(&memory, reason), KVF_OK);
    assert_int_equal(fence_guests(), KVF_E_NOT_FOUND); /* what it wrote meanwhile may be under way */
    both_close();
}

/* A guest that claims to be in this process, with a name that no endpoint here has, is asked for handles like any other
 * process. */
static void a_guest_that_claims_to_be_of_this_process_is_asked_like_any_other(void **state) {
    (void)state;
    const kvf_cuda_write write = {.header = {CUDA_WRITE, 1}, .number = 7, .runs = {{.bytes = 64}}};
    const kvf_cuda_header ready = {CUDA_READY, 0};
    kvf_cuda_packet packet;
    kvf_cuda_region regions[2];
    int listening;
    both_open();
    kvf_cuda_memory memory = good_memory();
    part_of(&owner, &memory.card, regions);
    memset(memory.card.name, 0x66, CUDA_ID_BYTES);
    assert_int_equal(getrandom(memory.card.name, CUDA_ID_BYTES / 2, 0), CUDA_ID_BYTES / 2);
    memory.card.region_count = 1;
    memory.regions[0].base = (uint64_t)(uintptr_t)owner.memory[1].address;
    assert_ok(kvf_cuda_wire_listen(memory.card.name, &listening));
    const int fd = open_known_guest();
    say_as_guest(fd, &memory, memory_bytes(&memory));
    say_as_guest(fd, &write, write_bytes(&write));
    run_rounds();
    const int back = accept4(listening, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    assert_true(back >= 0);
    say_as_guest(back, &ready, sizeof ready);
    run_rounds();
    assert_ok(kvf_cuda_wire_receive(fd, &packet));
    assert_int_equal(packet.as.header.kind, CUDA_WRITTEN);
    assert_int_equal(packet.as.header.count, KVF_E_UNSUPPORTED);
    assert_non_null(strstr(packet.as.written.reason, "this process may not map it"));
    assert_int_equal(written(0, BYTES), 0);
    (void)close(fd);
    (void)close(back);
    (void)close(listening);
    run_rounds();
    write_well();
    both_close();
}

/* Another thread may take the descriptor that the owner gives up for a moment to refuse a connection with. */
static void an_owner_without_any_descriptor_sleeps_until_it_has_one(void **state) {
    (void)state;
    both_open();
    run_rounds();
    kvf_cuda_endpoint *endpoint = owner.transport->fabrics[0].endpoint;
    const int fd = open_guest();
    const kvf_cuda_hello hello = good_hello();
    say_as_guest(fd, &hello, sizeof hello);
    kvf_fd_close(&endpoint->spare_fd);
    struct rlimit before, few;
    const int next = dup(STDIN_FILENO); /* all lower numbers are open */
    assert_true(next >= 0);
    (void)close(next);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    few = (struct rlimit){(rlim_t)next, before.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
    uint32_t slept = 0;
    for (int i = 0; i < 200; i++) {
        struct pollfd wakes = {kvf_transport_event_fd(owner.transport), POLLIN, 0};
        assert_ok(kvf_transport_progress(owner.transport, NULL));
        slept += poll(&wakes, 1, 0) == 0;
    }
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    assert_true(slept > 100);
    assert_null(endpoint->clients->following); /* the writer's only */
    struct pollfd wakes = {kvf_transport_event_fd(owner.transport), POLLIN, 0};
    assert_int_equal(poll(&wakes, 1, 10000), 1);
    run_rounds();
    assert_non_null(endpoint->clients->following);
    assert_true(endpoint->spare_fd >= 0);
    (void)close(fd);
    run_rounds();
    write_well();
    both_close();
}

/* The guest is refused for a message while its writes are under way; the writes still succeed. */
static void refused_while_busy(uint32_t writes, const void *message, size_t bytes) {
    const int fd = open_busy_guest(writes);
    say_as_guest(fd, message, bytes);
    assert_int_equal(refusal_of(fd), CUDA_REFUSED_PROTOCOL);
    devices_delay(0);
    devices_hasten();
    run_rounds();
}

static void guests_ask_for_no_more_at_once_than_they_may(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS();
    const size_t left = devices_left();
    both_open();
    const kvf_cuda_memory memory = good_memory();
    const kvf_cuda_write write = {.header = {CUDA_WRITE, 1}, .runs = {{.bytes = 64}}};
    refused_while_busy(CUDA_WRITES, &write, write_bytes(&write));
    refused_while_busy(1, &memory, memory_bytes(&memory)); /* the memory may not change while it is read */
    /* The control: as many writes as are allowed succeed. */
    const int fd = open_busy_guest(CUDA_WRITES);
    devices_delay(0);
    devices_hasten();
    run_rounds();
    for (uint32_t i = 0; i < CUDA_WRITES; i++) {
        kvf_cuda_packet packet;
        assert_ok(kvf_cuda_wire_receive(fd, &packet));
        assert_int_equal(packet.as.header.kind, CUDA_WRITTEN);
        assert_int_equal(packet.as.header.count, KVF_OK);
    }
    assert_written(64 * CUDA_WRITES);
    (void)close(fd);
    run_rounds();
    write_well();
    both_close();
    assert_int_equal(devices_left(), left);
}

/* ---- an owner that lies -------------------------------------------------------------------------- */

/* An owner for which this test speaks, and whose memory is another process's. */
typedef struct voice {
    owner_process memory;
    int listening, fd;
    kvf_buffer card;
} voice;

static void voice_open(voice *v) {
    kvf_card card;
    *v = (voice){0};
    owner_start(&v->memory, "cuda", 0, false);
    assert_ok(kvf_card_read(v->memory.card, v->memory.card_bytes, &card));
    unsigned char *part = malloc(card.parts[0].bytes);
    assert_non_null(part);
    memcpy(part, card.parts[0].data, card.parts[0].bytes);
    unsigned char *name = part + offsetof(kvf_cuda_card, name);
    assert_int_equal(getrandom(name, CUDA_ID_BYTES, 0), CUDA_ID_BYTES);
    assert_ok(kvf_cuda_wire_listen(name, &v->listening));
    card.parts[0].data = part;
    assert_ok(kvf_card_write(&card, &v->card));
    kvf_card_free(&card);
    free(part);
}

static void voice_close(voice *v) {
    (void)close(v->listening);
    kvf_buffer_free(&v->card);
    owner_end(&v->memory, false);
}

static void writer_rounds(void) {
    for (int i = 0; i < ROUNDS; i++)
        assert_ok(kvf_transport_progress(writer.transport, NULL));
}

/* A writer that has asked for one write, with number 1. */
static void writer_open(voice *v, outcome *noted) {
    kvf_cuda_packet packet;
    const kvf_cuda_header ready = {CUDA_READY, 0};
    device_end_open(&writer, 1);
    assert_ok(kvf_transport_connect(writer.transport, v->card.data, v->card.length, &peer));
    v->fd = accept4(v->listening, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    assert_true(v->fd >= 0);
    assert_ok(kvf_cuda_wire_send(v->fd, &ready, sizeof ready));
    submit_of_writer(KVF_WRITE, 64, noted);
    writer_rounds();
    assert_ok(kvf_cuda_wire_receive(v->fd, &packet));
    assert_int_equal(packet.as.header.kind, CUDA_HELLO);
    assert_ok(kvf_cuda_wire_receive(v->fd, &packet));
    assert_int_equal(packet.as.header.kind, CUDA_MEMORY);
    assert_ok(kvf_cuda_wire_receive(v->fd, &packet));
    assert_int_equal(packet.as.header.kind, CUDA_WRITE);
    assert_int_equal(packet.as.write.number, 1);
}

static void writer_close(voice *v) {
    kvf_transport_close(writer.transport);
    (void)close(v->fd);
    devices_free();
}

static void lost_after(voice *v, const void *message, size_t bytes, const char *word) {
    outcome noted;
    writer_open(v, &noted);
    say_as_guest(v->fd, message, bytes);
    writer_rounds();
    assert_int_equal(writer.lost, 1);
    assert_non_null(strstr(writer.lost_detail, word));
    assert_int_equal(noted.status, KVF_E_PEER_LOST);
    writer_close(v);
}

static void an_owner_that_answers_what_was_not_asked_is_lost(void **state) {
    (void)state;
    voice v;
    outcome noted;
    const char *const senseless = "a message of the peer makes no sense";
    const size_t left = devices_left();
    voice_open(&v);
    kvf_cuda_written written_well = {.header = {CUDA_WRITTEN, KVF_OK}, .number = 1}, wrong = written_well;
    wrong.number = 2;
    lost_after(&v, &wrong, sizeof wrong, senseless);
    wrong.number = 0; /* the number of a read */
    lost_after(&v, &wrong, sizeof wrong, senseless);
    lost_after(&v, &written_well, sizeof written_well - 1, senseless);
    lost_after(&v, &written_well, sizeof written_well.header, senseless);
    const kvf_cuda_header odd[] = {{CUDA_HELLO, 0}, {CUDA_NOTICE, 1}, {CUDA_MEMORY, 1},
                                   {CUDA_WRITE, 1}, {0, 0},           {99, 0}};
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++)
        lost_after(&v, &odd[i], sizeof odd[i], senseless);
    lost_after(&v, "abc", 3, "a message of 3 bytes");
    /* An unknown status is a failure, with as much of the reason as was sent; then everything goes on. */
    writer_open(&v, &noted);
    wrong = (kvf_cuda_written){.header = {CUDA_WRITTEN, 12345}, .number = 1};
    memset(wrong.reason, 'x', sizeof wrong.reason);
    say_as_guest(v.fd, &wrong, sizeof wrong);
    writer_rounds();
    assert_int_equal(noted.status, KVF_E_IO);
    assert_non_null(strstr(noted.detail, "the owner could not read the data: xxx"));
    submit_of_writer(KVF_WRITE, 64, &noted);
    writer_rounds();
    written_well.number = 2;
    say_as_guest(v.fd, &written_well, sizeof written_well);
    writer_rounds();
    assert_int_equal(noted.status, KVF_OK);
    assert_int_equal(noted.calls, 1);
    say_as_guest(v.fd, &written_well, sizeof written_well); /* a second time */
    writer_rounds();
    assert_int_equal(writer.lost, 1);
    writer_close(&v);
    voice_close(&v);
    assert_int_equal(devices_left(), left);
}

int main(int argument_count, char **arguments) {
    if (argument_count == 5)
        return owner_main(arguments);
    if (kvf_device_image_count == 0) {
        (void)printf("skipped: this build has no device code (scripts/device-compiler)\n");
        return 77;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_writer_is_shut_out_when_the_kernels_that_copy_for_it_are_over),
        cmocka_unit_test(a_writer_for_whom_nothing_is_copied_is_shut_out_at_once),
        cmocka_unit_test(a_write_that_has_not_begun_is_given_up),
        cmocka_unit_test(a_write_to_other_memory_is_not_given_up),
        cmocka_unit_test(a_write_that_kernels_make_is_waited_for),
        cmocka_unit_test(an_unknown_peer_and_one_that_makes_no_sense_are_refused),
        cmocka_unit_test(memory_that_is_told_wrongly_is_refused),
        cmocka_unit_test(writes_that_are_asked_wrongly_are_refused),
        cmocka_unit_test(nests_that_are_asked_wrongly_are_refused),
        cmocka_unit_test(a_nest_up_to_the_end_of_both_regions_is_written_run_by_run),
        cmocka_unit_test(a_nest_reaches_to_its_last_run),
        cmocka_unit_test(memory_that_a_guest_cannot_have_is_not_read),
        cmocka_unit_test(a_writer_that_the_owner_cannot_read_is_out_only_of_this_fabric),
        cmocka_unit_test(a_guest_that_claims_to_be_of_this_process_is_asked_like_any_other),
        cmocka_unit_test(an_owner_without_any_descriptor_sleeps_until_it_has_one),
        cmocka_unit_test(guests_ask_for_no_more_at_once_than_they_may),
        cmocka_unit_test(an_owner_that_answers_what_was_not_asked_is_lost),
    };
    devices_open();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
