#include "cuda_owner.h"

#include <dirent.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#define LEAD 512u /* unused bytes of the allocation before the first region and between regions */
#define TOKENS 150u
#define HEADS 4u

void engines_open(device_engines *known) {
    const kvf_engine_spec here = {.struct_size = sizeof here,
                                  .tp_size = 2,
                                  .all = {.tokens_per_block = 8, .block_count = 40, .order = "L|BPNH"}},
                          there = {.struct_size = sizeof there,
                                   .tp_size = 1,
                                   .all = {.tokens_per_block = 16, .block_count = 20, .order = "L|BPHN"}};
    known->engines = pair_of(attention(3, HEADS, 24), &here, &there);
    sequence_open(&known->here, kvf_engine_shard(known->engines.local, 0), TOKENS, 1);
    sequence_open(&known->there, kvf_engine_shard(known->engines.remote, 0), TOKENS, 2);
}

void engines_close(device_engines *known) {
    sequence_close(&known->here);
    sequence_close(&known->there);
    free_pair(&known->engines);
}

/* ---- a cache ------------------------------------------------------------------------------------ */

static void *next_part(void *context, uint64_t bytes) {
    device_cache *cache = context;
    void *part = cache->seen + cache->used;
    cache->used += (bytes + LEAD - 1) / LEAD * LEAD + LEAD;
    return part;
}

void cache_open(device_cache *cache, const char *kind, const kvf_transport_options *options,
                const kvf_shard *shard, const cell_sequence *sequence, uint32_t device, int types) {
    const kvf_shard_desc *desc = kvf_shard_get(shard);
    uint64_t bytes = LEAD;
    *cache = (device_cache){.types = types, .used = LEAD};
    assert_true(desc->region_count <= CACHE_REGIONS_MAX);
    for (uint32_t i = 0; i < desc->region_count; i++)
        bytes += (desc->region_bytes[i] + LEAD - 1) / LEAD * LEAD + LEAD;
    cache->bytes = bytes;
    cache->base = types ? device_segments(device, bytes, types) : device_room(device, bytes);
    cache->seen = devices_look(cache->base);
    rank_open(&cache->cells, shard, sequence, next_part, cache);
    for (uint32_t i = 0; i < desc->region_count; i++) {
        const uint64_t at = (uint64_t)((unsigned char *)cache->cells.regions[i].address - cache->seen);
        cache->regions[i] = (kvf_memory){.struct_size = sizeof(kvf_memory),
                                         .address = (void *)(uintptr_t)(cache->base + at),
                                         .bytes = desc->region_bytes[i],
                                         .kind = KVF_MEMORY_CUDA,
                                         .device = devices_number(device)};
    }
    devices_put(cache->seen);
    assert_ok(kvf_transport_open(kind, options, &cache->transport));
    assert_ok(kvf_transport_register(cache->transport, cache->regions, desc->region_count));
}

void cache_free(device_cache *cache) {
    if (cache->base && cache->types)
        device_segments_free(cache->base, cache->bytes);
    else if (cache->base)
        device_room_free(cache->base);
    cache->base = 0;
}

void cache_close(device_cache *cache) {
    kvf_transport_close(cache->transport);
    rank_close(&cache->cells);
    cache_free(cache);
}

void cache_fill(const device_cache *cache, uint32_t seed) {
    devices_get(cache->seen);
    rank_fill(&cache->cells, all_layers(cache->cells.shard), seed);
    devices_put(cache->seen);
}

void cache_scribble(const device_cache *cache, uint32_t seed) {
    devices_get(cache->seen);
    rank_scribble(&cache->cells, seed);
    devices_put(cache->seen);
}

typedef struct comparison {
    uint32_t seed;
    uint64_t wrong, cells;
} comparison;

static void compare(void *context, const cell_rank *rank, cell_place at, kvf_cell_location where) {
    comparison *found = context;
    const unsigned char *cell = (const unsigned char *)rank->regions[where.region].address + where.offset;
    bool same = true;
    for (uint64_t i = 0; i < where.bytes; i++)
        same = same && cell[i] == cell_byte(found->seed, at, i);
    found->wrong += !same;
    found->cells++;
}

uint64_t cache_wrong_cells(const device_cache *cache, uint32_t seed) {
    comparison found = {.seed = seed};
    devices_get(cache->seen);
    each_cell(&cache->cells, all_layers(cache->cells.shard), compare, &found);
    assert_true(found.cells > 1000);
    return found.wrong;
}

/* ---- the other process -------------------------------------------------------------------------- */

static void read_all(int fd, void *to, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        const ssize_t got = read(fd, (char *)to + done, bytes - done);
        assert_true(got > 0);
        done += (size_t)got;
    }
}

static void hide_devices(void) {
    (void)setenv("FAKE_CUDA_DEVICES", "3", 1);
    (void)setenv("CUDA_VISIBLE_DEVICES", "2", 1);
}

void owner_start(owner_process *owner, const char *kind, int types, bool unseen) {
    int down[2], up[2];
    char numbers[3][16];
    assert_int_equal(pipe(down), 0);
    assert_int_equal(pipe(up), 0);
    (void)fflush(stdout);
    owner->process = fork();
    assert_true(owner->process >= 0);
    if (owner->process == 0) {
        (void)close(down[1]);
        (void)close(up[0]);
        (void)snprintf(numbers[0], sizeof numbers[0], "%d", down[0]);
        (void)snprintf(numbers[1], sizeof numbers[1], "%d", up[1]);
        (void)snprintf(numbers[2], sizeof numbers[2], "%d", types);
        if (unseen)
            hide_devices();
        (void)execl("/proc/self/exe", "owner", numbers[2], kind, numbers[0], numbers[1], (char *)NULL);
        _exit(1);
    }
    (void)close(down[0]);
    (void)close(up[1]);
    owner->control = down[1];
    owner->answers = up[0];
    read_all(owner->answers, &owner->card_bytes, sizeof owner->card_bytes);
    assert_true(owner->card_bytes <= sizeof owner->card);
    read_all(owner->answers, owner->card, owner->card_bytes);
}

uint64_t owner_tell(const owner_process *owner, char what) {
    uint64_t answer = UINT64_MAX;
    assert_int_equal(write(owner->control, &what, 1), 1);
    read_all(owner->answers, &answer, sizeof answer);
    return answer;
}

void owner_end(owner_process *owner, bool killed) {
    int how;
    if (killed)
        assert_int_equal(kill(owner->process, SIGKILL), 0);
    (void)close(owner->control);
    (void)close(owner->answers);
    assert_int_equal(waitpid(owner->process, &how, 0), owner->process);
    assert_true(killed ? WIFSIGNALED(how) : WIFEXITED(how) && WEXITSTATUS(how) == 0);
}

static void spoil(void *context, const cell_rank *rank, cell_place at, kvf_cell_location where) {
    (void)context;
    if (at.layer == 1 && at.part == 1 && at.unit == 1 && at.step == 77)
        ((unsigned char *)rank->regions[where.region].address)[where.offset + 5] ^= 0x10;
}

/* Rank 0 of 2 has the first half of the heads. */
static void compare_pushed(void *context, const cell_rank *rank, cell_place at, kvf_cell_location where) {
    comparison *found = context;
    found->seed = at.unit < HEADS / 2 ? 2 : 1;
    compare(context, rank, at, where);
}

uint64_t open_descriptors(void) {
    uint64_t count = 0;
    DIR *all = opendir("/proc/self/fd");
    assert_non_null(all);
    while (readdir(all))
        count++;
    (void)closedir(all);
    return count;
}

/* Forks a child that has all descriptors of this process until the test no longer reads answers. */
static void leave_a_child(int answers) {
    struct pollfd end = {answers, 0, 0};
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child > 0)
        return;
    (void)poll(&end, 1, 60000);
    _exit(0);
}

static uint64_t obey(device_cache *cache, char what, int answers) {
    comparison found = {0};
    if (what == 'k')
        leave_a_child(answers);
    if (what == 's' || what == 'c')
        devices_get(cache->seen);
    if (what == 's') {
        each_cell(&cache->cells, all_layers(cache->cells.shard), spoil, NULL);
        devices_put(cache->seen);
    }
    if (what == 'f')
        cache_free(cache);
    if (what == 'u')
        return (uint64_t)kvf_transport_unregister_region(cache->transport, 0);
    if (what == 'd')
        return open_descriptors();
    if (what == 'c')
        each_cell(&cache->cells, all_layers(cache->cells.shard), compare_pushed, &found);
    return found.wrong;
}

static void serve(device_cache *cache, int control, int answers) {
    struct pollfd fds[2] = {{kvf_transport_event_fd(cache->transport), POLLIN, 0}, {control, POLLIN, 0}};
    char what;
    while (poll(fds, 2, 60000) > 0) {
        if (fds[0].revents && kvf_transport_progress(cache->transport, NULL) != KVF_OK)
            return;
        if (!fds[1].revents)
            continue;
        if (read(control, &what, 1) != 1)
            return;
        const uint64_t answer = obey(cache, what, answers);
        (void)!write(answers, &answer, sizeof answer);
    }
}

int owner_main(char **arguments) {
    const int control = (int)strtol(arguments[3], NULL, 10), answers = (int)strtol(arguments[4], NULL, 10);
    device_engines known;
    device_cache cache;
    const void *card;
    size_t bytes;
    devices_open();
    engines_open(&known);
    cache_open(&cache, arguments[2], NULL, kvf_engine_shard(known.engines.remote, 0), &known.there, 0,
               (int)strtol(arguments[1], NULL, 10));
    cache_fill(&cache, 1);
    assert_ok(kvf_transport_export(cache.transport, &card, &bytes));
    if (write(answers, &bytes, sizeof bytes) != sizeof bytes || write(answers, card, bytes) != (ssize_t)bytes)
        return 1;
    serve(&cache, control, answers);
    cache_close(&cache);
    engines_close(&known);
    return 0;
}
