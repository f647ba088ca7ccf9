/*
 * Seeds for the same-host transport: packets of a peer that keeps to the protocol. See shm.c for their format.
 */
#include "seeds.h"

#include "transport/shm/shm_wire.h"

typedef struct script {
    uint8_t data[2048];
    size_t size;
} script;

static void add(script *to, const void *packet, size_t bytes, uint8_t with) {
    FUZZ_MUST(to->size + 3 + bytes <= sizeof to->data);
    to->data[to->size++] = (uint8_t)bytes;
    to->data[to->size++] = (uint8_t)(bytes >> 8);
    to->data[to->size++] = with;
    memcpy(to->data + to->size, packet, bytes);
    to->size += bytes;
}

static void seed_consumer(void) {
    script s = {{0}, 1};
    const kvf_shm_buffer_message buffer = {{SHM_BUFFER, 0}, 4096, 4, 0};
    kvf_shm_move_message move = {.header = {SHM_MOVE, 2}, .slot = 1, .direction = 0};
    move.pieces[0] = (kvf_shm_piece){100, 2000, 0, 0};
    move.pieces[1] = (kvf_shm_piece){4000, 1000, 1, 0};
    add(&s, &buffer, sizeof buffer, 4);
    add(&s, &move, offsetof(kvf_shm_move_message, pieces) + 2 * sizeof(kvf_shm_piece), 0);
    move.direction = 1;
    move.slot = 3;
    add(&s, &move, offsetof(kvf_shm_move_message, pieces) + 2 * sizeof(kvf_shm_piece), 0);
    struct {
        kvf_shm_header header;
        char text[5];
    } notice = {{SHM_NOTICE, 5}, "hello"};
    add(&s, &notice, sizeof(kvf_shm_header) + 5, 0);
    seed_write("shm", "consumer", s.data, s.size);
}

/* An owner with both regions in one arena of four pages, or only the first one in it. */
static void seed_owner(const char *name, uint32_t second_arena) {
    script s = {{1}, 1};
    const kvf_shm_arena_message arena = {{SHM_ARENA, 0}, 16384};
    kvf_shm_regions_message regions = {.header = {SHM_REGIONS, 2}, .first = 0};
    regions.regions[0] = (kvf_shm_region){0x10000, 4096, 0, 0, 0};
    regions.regions[1] = (kvf_shm_region){0x20000, 4096, 4096, second_arena, 0};
    const kvf_shm_header gate = {SHM_GATE, 0}, ready = {SHM_READY, 0};
    const kvf_shm_buffer_message taken = {{SHM_BUFFER, 0}, 65536, 2, 0};
    const kvf_shm_moved_message moved = {{SHM_MOVED, 0}, 0, 0};
    add(&s, &arena, sizeof arena, 4);
    add(&s, &regions, offsetof(kvf_shm_regions_message, regions) + 2 * sizeof(kvf_shm_region), 0);
    add(&s, &gate, sizeof gate, 4);
    add(&s, &ready, sizeof ready, 0);
    if (second_arena) {
        add(&s, &taken, sizeof taken, 0);
        add(&s, &moved, sizeof moved, 0);
    }
    seed_write("shm", name, s.data, s.size);
}

/* An owner whose memory is no longer that of its card. */
static void seed_refusal(void) {
    script s = {{1}, 1};
    const kvf_shm_refused_message refused = {{SHM_REFUSED, SHM_REFUSED_GENERATION}, 7};
    add(&s, &refused, sizeof refused, 0);
    seed_write("shm", "owner_refuses", s.data, s.size);
}

void seed_shm(void) {
    seed_refusal();
    seed_consumer();
    seed_owner("owner_mapped", 0);
    seed_owner("owner_helps", SHM_NO_ARENA);
}
