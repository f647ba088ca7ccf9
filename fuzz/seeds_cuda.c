/*
 * Seeds for the transport "cuda": changes to a good card, and packets of a peer that keeps to the protocol. See cuda.c
 * for their format.
 */
#include "seeds.h"

#include "transport/cuda/cuda_wire.h"

typedef struct script {
    uint8_t data[2048];
    size_t size;
} script;

static void add(script *to, const void *bytes, size_t count) {
    FUZZ_MUST(to->size + count <= sizeof to->data);
    memcpy(to->data + to->size, bytes, count);
    to->size += count;
}

static void add_packet(script *to, const void *packet, size_t bytes) {
    add(to, &(uint8_t[]){(uint8_t)bytes, (uint8_t)(bytes >> 8)}, 2);
    add(to, packet, bytes);
}

/* A card whose first region has another number somewhere. */
static void seed_card(const char *name, size_t field, uint64_t number) {
    const size_t at = sizeof(kvf_cuda_card) + field;
    script s = {{0}, 1};
    add(&s, &(uint8_t[]){(uint8_t)at, (uint8_t)(at >> 8), sizeof number}, 3);
    add(&s, &number, sizeof number);
    seed_write("cuda", name, s.data, s.size);
}

static void seed_writer(void) {
    script s = {{1}, 1};
    kvf_cuda_memory memory = {.header = {CUDA_MEMORY, 2}, .generation = 1, .card = {.region_count = 2}};
    kvf_cuda_write write = {.header = {CUDA_WRITE, 2}, .number = 7};
    const kvf_cuda_notice notice = {.header = {CUDA_NOTICE, 5}, .data = "hello"};
    write.runs[0] = (kvf_run){0, 0, 4096, 0, 1};
    write.runs[1] = (kvf_run){8, 16, 100, 1, 0};
    add_packet(&s, &notice, offsetof(kvf_cuda_notice, data) + 5);
    add_packet(&s, &memory, offsetof(kvf_cuda_memory, regions) + 2 * sizeof(kvf_cuda_region));
    for (write.number = 7; write.number < 9; write.number++)
        add_packet(&s, &write, offsetof(kvf_cuda_write, runs) + 2 * sizeof(kvf_run));
    seed_write("cuda", "writer", s.data, s.size);
}

static void seed_owner(const char *name, const void *packet, size_t bytes) {
    script s = {{2}, 1};
    add_packet(&s, &(const kvf_cuda_header){CUDA_READY, 0}, sizeof(kvf_cuda_header));
    if (bytes > 0)
        add_packet(&s, packet, bytes);
    seed_write("cuda", name, s.data, s.size);
}

/* Both regions are in the same 2 segments, of which the last may differ. */
static void seed_segments(const char *name, uint32_t number, uint64_t bytes, char reason) {
    script s = {{3}, 1};
    kvf_cuda_segment segment = {.header = {CUDA_SEGMENT, KVF_OK}, .bytes = 65536};
    add_packet(&s, &(const kvf_cuda_header){CUDA_READY, 0}, sizeof(kvf_cuda_header));
    add_packet(&s, &segment, sizeof segment);
    segment.number = number;
    segment.bytes = bytes;
    segment.reason[0] = reason;
    add_packet(&s, &segment, sizeof segment);
    seed_write("cuda", name, s.data, s.size);
}

static void seed_fetch(void) {
    script s = {{1}, 1};
    const kvf_cuda_fetch fetch = {.header = {CUDA_FETCH, 1}};
    add_packet(&s, &fetch, sizeof fetch);
    seed_write("cuda", "fetch", s.data, s.size);
}

void seed_cuda(void) {
    const kvf_cuda_refused refused = {{CUDA_REFUSED, CUDA_REFUSED_GENERATION}, 9};
    const kvf_cuda_written written = {{CUDA_WRITTEN, KVF_OK}, 1, ""};
    seed_write("cuda", "card", (const uint8_t[]){0}, 1);
    seed_write("cuda", "card_cut", (const uint8_t[]){0, 0xff, 0xff, 0}, 4);
    seed_card("card_last_bytes", offsetof(kvf_cuda_region, offset), 16384 - 4096);
    seed_card("card_beyond", offsetof(kvf_cuda_region, offset), UINT64_MAX - 4095);
    seed_card("card_allocation", offsetof(kvf_cuda_region, allocation_bytes), UINT64_C(1) << 40);
    seed_card("card_segments", offsetof(kvf_cuda_region, segments), 2);
    seed_writer();
    seed_fetch();
    seed_segments("segments", 1, 65536, 0);
    seed_segments("segments_again", 0, 65536, 0);
    seed_segments("segments_large", 1, UINT64_MAX, 0);
    seed_segments("segments_of_nothing", 1, 65536, 'x');
    seed_owner("owner", NULL, 0);
    seed_owner("owner_refuses", &refused, sizeof refused);
    seed_owner("owner_answers", &written, sizeof written);
}
