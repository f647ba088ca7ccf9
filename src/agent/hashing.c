#include "agent/hashing.h"

#include "agent/summing.h"
#include "base/watch.h"
#include "cuda/word.h"

/* Memory that is hashed at once: a tenth of a millisecond. Devices take more, as a slice costs a launch and a look. */
#define SLICE_BYTES (1u << 18)
#define DEVICE_SLICE_BYTES (1u << 26)

/* ---- slices ---------------------------------------------------------------------------------- */

typedef struct slice {
    uint64_t steps;
    kvf_range layers, units;
} slice;

static uint32_t some(uint64_t fit, uint32_t from, uint32_t end) {
    return (uint32_t)kvf_min_u64(end, from + kvf_max_u64(fit, 1));
}

static kvf_area area_of(const kvf_hashing *h, const slice *of) {
    return (kvf_area){.shard = h->agent->shard,
                      .regions = h->agent->regions,
                      .group = h->group,
                      .part = h->part,
                      .layers = of->layers,
                      .units = of->units,
                      .table = h->blocks,
                      .begin = h->step,
                      .end = h->step + of->steps,
                      .dtype = h->dtype};
}

/* As much as fits: whole steps; of a step that is too long, whole layers; and of such a layer, some units. The
 * ranges are inside the shard, and so no product overflows. */
static slice next_slice(const kvf_hashing *h) {
    const kvf_group_desc *group = kvf_model_group(kvf_engine_model(h->agent->engine), h->group);
    const kvf_part_desc *part = &group->parts[h->part];
    const uint64_t most = h->uses_device ? DEVICE_SLICE_BYTES : SLICE_BYTES;
    const uint64_t unit = part->rows_per_step * kvf_part_cell_bytes(part);
    const uint64_t layer = unit * (h->units.end - h->units.begin);
    const uint64_t step = layer * (h->layers.end - h->layers.begin);
    slice next = {1, h->layers, h->units};
    if (step <= most) {
        next.steps = kvf_min_u64(h->end - h->step, step ? most / step : UINT64_MAX);
        next.steps = kvf_min_u64(next.steps, KVF_SUMMING_STEPS);
    } else if (layer <= most) {
        next.layers = (kvf_range){h->layer, some(most / layer, h->layer, h->layers.end)};
    } else {
        next.layers = (kvf_range){h->layer, h->layer + 1};
        next.units = (kvf_range){h->unit, some(most / unit, h->unit, h->units.end)};
    }
    return next;
}

static void advance(kvf_hashing *h, const slice *done) {
    h->unit = done->units.end < h->units.end ? done->units.end : h->units.begin;
    if (h->unit != h->units.begin)
        return;
    h->layer = done->layers.end < h->layers.end ? done->layers.end : h->layers.begin;
    if (h->layer == h->layers.begin)
        h->step += done->steps;
}

static kvf_status start_slice(kvf_hashing *h, const slice *next, const kvf_sum_places *places) {
    kvf_agent *agent = h->agent;
    kvf_area area = area_of(h, next);
    area.regions_stay = true; /* as kvf_hashing_start() found them: blocks of them are claimed */
    kvf_status status = kvf_area_check(&area);
    if (!status && !h->uses_device)
        return kvf_area_sum_on_host(&area, area.layers, places);
    if (!status)
        status = kvf_summing_make(&agent->summing);
    /* Opening it may wait for streams that wait for requests of this process. */
    if (!status && kvf_summing_must_open(agent->summing, &area) && kvf_cuda_words_awaited())
        return KVF_IN_PROGRESS;
    if (!status)
        status = kvf_summing_start(agent->summing, &area, places);
    h->on_device = status == KVF_IN_PROGRESS;
    return status == KVF_E_AGAIN ? KVF_IN_PROGRESS : status;
}

/* A step's checksum is the sum of those of its cells, so slices of one step add to the same sum. */
kvf_status kvf_hashing_slice(kvf_hashing *h) {
    const slice next = next_slice(h);
    const kvf_sum_places places = {.sums = &h->sums[h->step - h->begin], .step = 1};
    const kvf_status status =
        h->on_device ? kvf_summing_poll(h->agent->summing) : start_slice(h, &next, &places);
    if (status == KVF_IN_PROGRESS)
        return status;
    h->on_device = false;
    advance(h, &next);
    return status;
}

/* ---- turns ----------------------------------------------------------------------------------- */

/* The most that end in a round because their blocks must not be read any more. */
#define ENDED_AT_ONCE 64u

static kvf_hashing_queue *queue_of(const kvf_hashing *h) {
    return h->queue ? h->queue : &h->agent->own_hashing;
}

static bool is_of_peer(const kvf_hashing *h) {
    return h->queue != NULL;
}

/* Opens the timer with the first checksums of a device. */
static kvf_status open_looks(kvf_agent *agent) {
    if (agent->hashing_looks.fd >= 0)
        return KVF_OK;
    kvf_status status = kvf_looks_open(&agent->hashing_looks);
    if (!status)
        status = kvf_watch_add(agent->poll_fd, agent->hashing_looks.fd, NULL);
    if (status)
        kvf_looks_close(&agent->hashing_looks);
    return status;
}

kvf_status kvf_hashing_start(kvf_hashing *h) {
    kvf_agent *agent = h->agent;
    kvf_hashing_queue *queue = queue_of(h);
    /* For no step: checks all other arguments. */
    kvf_area area = area_of(h, &(slice){0, h->layers, h->units});
    area.table = &(kvf_block_table){0};
    area.begin = area.end = h->begin;
    kvf_status status = kvf_area_check(&area);
    h->uses_device = !status && kvf_area_uses_devices(&area);
    if (h->uses_device)
        status = open_looks(agent);
    if (status)
        return status;
    h->sums = NULL;
    h->step = h->begin;
    h->layer = h->layers.begin;
    h->unit = h->units.begin;
    h->on_device = false;
    if (!queue->first && is_of_peer(h))
        DL_APPEND(agent->hashing, queue);
    DL_APPEND(queue->first, h);
    queue->count++;
    agent->again = true;
    return KVF_OK;
}

/* Whether the slice whose turn it was waits for a device; then the timer says when to look again. */
static void await_device(kvf_agent *agent, bool awaits) {
    if (agent->hashing_looks.fd >= 0)
        kvf_looks_set(&agent->hashing_looks, awaits, awaits != agent->awaits_device);
    agent->awaits_device = awaits;
}

static void unlist(kvf_hashing *h) {
    kvf_hashing_queue *queue = queue_of(h);
    if (h->agent->on_device == h) {
        h->agent->on_device = NULL;
        await_device(h->agent, false);
    }
    DL_DELETE(queue->first, h);
    queue->count--;
    if (!queue->first && is_of_peer(h))
        /* The analyser does not know that a list's first element always has a last one before it. */
        /* NOLINTNEXTLINE(clang-analyzer-core.NullDereference) */
        DL_DELETE(h->agent->hashing, queue);
}

void kvf_hashing_stop(kvf_hashing *h) {
    KVF_ASSERT(kvf_work_is_ours(h->agent));
    unlist(h);
    kvf_free(h->sums);
    h->sums = NULL;
}

static void end(kvf_hashing *h, kvf_status status) {
    uint64_t *sums = h->sums;
    unlist(h);
    h->done(h, status); /* may free it */
    kvf_free(sums);
}

bool kvf_hashing_waits(const kvf_agent *agent) {
    return !agent->awaits_device && (agent->hashing || agent->own_hashing.first);
}

/* The one whose slice is not over; otherwise one of ours, and after it one of a peer. */
static kvf_hashing *first_of(const kvf_agent *agent) {
    if (agent->on_device)
        return agent->on_device;
    if (agent->own_hashing.first && (agent->hashed_for_peer || !agent->hashing))
        return agent->own_hashing.first;
    return agent->hashing ? agent->hashing->first : NULL;
}

kvf_hashing *kvf_hashing_next(kvf_agent *agent) {
    kvf_hashing *h;
    for (uint32_t i = 0; i < ENDED_AT_ONCE && (h = first_of(agent)); i++) {
        kvf_status status = KVF_OK;
        h->blocks = h->table(h);
        if (!h->blocks)
            status = KVF_E_NOT_FOUND;
        else if (!h->sums && !(h->sums = kvf_alloc0(h->end - h->begin, sizeof *h->sums)))
            status = kvf_nomem("checksums");
        if (!status)
            return h;
        end(h, status);
    }
    return NULL;
}

void kvf_hashing_sliced(kvf_hashing *h, kvf_status status) {
    kvf_agent *agent = h->agent;
    const bool awaits = status == KVF_IN_PROGRESS;
    await_device(agent, awaits);
    agent->on_device = awaits ? h : NULL;
    if (awaits)
        return;
    agent->hashed_for_peer = is_of_peer(h);
    if (is_of_peer(h)) { /* the next turn is another peer's */
        DL_DELETE(agent->hashing, h->queue);
        DL_APPEND(agent->hashing, h->queue);
    }
    if (status || h->step == h->end)
        end(h, status);
}
