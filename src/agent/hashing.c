#include "agent/hashing.h"

#include "agent/checksum.h"

/* Memory that is hashed at once: a tenth of a millisecond. */
#define SLICE_BYTES (1u << 18)

/* ---- slices ---------------------------------------------------------------------------------- */

typedef struct slice {
    uint64_t steps;
    kvf_range layers, units;
} slice;

static uint32_t some(uint64_t fit, uint32_t from, uint32_t end) {
    return (uint32_t)kvf_min_u64(end, from + kvf_max_u64(fit, 1));
}

/* As much as fits: whole steps; of a step that is too long, whole layers; and of such a layer, some units. The
 * ranges are inside the shard, and so no product overflows. */
static slice next_slice(const kvf_hashing *h) {
    const kvf_group_desc *group = kvf_model_group(kvf_engine_model(h->agent->engine), h->group);
    const kvf_part_desc *part = &group->parts[h->part];
    uint64_t unit = part->rows_per_step * kvf_part_cell_bytes(part);
    uint64_t layer = unit * (h->units.end - h->units.begin);
    uint64_t step = layer * (h->layers.end - h->layers.begin);
    slice next = {1, h->layers, h->units};
    if (step <= SLICE_BYTES) {
        next.steps = kvf_min_u64(h->end - h->step, step ? SLICE_BYTES / step : UINT64_MAX);
    } else if (layer <= SLICE_BYTES) {
        next.layers = (kvf_range){h->layer, some(SLICE_BYTES / layer, h->layer, h->layers.end)};
    } else {
        next.layers = (kvf_range){h->layer, h->layer + 1};
        next.units = (kvf_range){h->unit, some(SLICE_BYTES / unit, h->unit, h->units.end)};
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

kvf_status kvf_hashing_slice(kvf_hashing *h) {
    slice next = next_slice(h);
    bool whole = next.layers.begin == h->layers.begin && next.layers.end == h->layers.end &&
                 next.units.begin == h->units.begin && next.units.end == h->units.end;
    uint64_t part = 0, *sums = &h->sums[h->step - h->begin];
    kvf_status status =
        kvf_checksum_converted(h->agent->shard, h->agent->regions, h->group, h->part, next.layers, next.units,
                               h->blocks, h->step, h->step + next.steps, h->dtype, whole ? sums : &part);
    if (!whole) /* a step's checksum is the sum of those of its cells */
        *sums += part;
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

kvf_status kvf_hashing_start(kvf_hashing *h) {
    kvf_agent *agent = h->agent;
    kvf_hashing_queue *queue = queue_of(h);
    uint64_t none;
    /* For no step: checks all other arguments. */
    kvf_status status = kvf_checksum_steps(agent->shard, agent->regions, h->group, h->part, h->layers,
                                           h->units, &(kvf_block_table){0}, h->begin, h->begin, &none);
    if (status)
        return status;
    h->sums = NULL;
    h->step = h->begin;
    h->layer = h->layers.begin;
    h->unit = h->units.begin;
    if (!queue->first && is_of_peer(h))
        DL_APPEND(agent->hashing, queue);
    DL_APPEND(queue->first, h);
    queue->count++;
    agent->again = true;
    return KVF_OK;
}

static void unlist(kvf_hashing *h) {
    kvf_hashing_queue *queue = queue_of(h);
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
    return agent->hashing || agent->own_hashing.first;
}

/* One of ours, and after it one of a peer. */
static kvf_hashing *first_of(const kvf_agent *agent) {
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
    agent->hashed_for_peer = is_of_peer(h);
    if (is_of_peer(h)) { /* the next turn is another peer's */
        DL_DELETE(agent->hashing, h->queue);
        DL_APPEND(agent->hashing, h->queue);
    }
    if (status || h->step == h->end)
        end(h, status);
}
