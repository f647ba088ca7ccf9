/*
 * Writing: the writer tells the owner what to write, and the owner reads it, over a connection back to the writer. So
 * only kernels of readers and of the owner access memory, and anything that ends reading ends writing too.
 *
 * The writer keeps a part of a batch in a kvf_cuda_copy until the owner has answered. On the owner's side it is a batch
 * of the link back, with the two sides of its runs swapped.
 */
#include "transport/cuda/cuda.h"

#include <stdio.h>

#include "request/request.h"

#define BACK_PAUSE_NS (100 * KVF_MILLISECOND) /* between two attempts to connect back */

_Static_assert(CUDA_WRITES >= CUDA_COPIES, "an owner takes all that one link may have under way");

/* ---- the writer -------------------------------------------------------------------------------- */

void kvf_cuda_write_start(kvf_cuda_link *link, kvf_cuda_copy *copy) {
    *copy = (kvf_cuda_copy){.batch = link->slices.current, .number = ++link->last_number};
    kvf_slices_peek(&link->slices, CUDA_COPY_BYTES, CUDA_WRITE_RUNS, &copy->slice);
    copy->batch->in_flight++;
    link->endpoint->changed = true;
    (void)kvf_slices_advance(&link->slices, &copy->slice);
}

static bool is_asked(const kvf_cuda_link *link) {
    for (uint32_t i = 0; i < CUDA_COPIES; i++)
        if (link->copies[i].batch && link->copies[i].sent)
            return true;
    return false;
}

/* Tells the owner of our regions, as far as it reads; only while no request about older ones is unanswered. */
static kvf_status tell_memory(kvf_cuda_link *link) {
    const kvf_cuda_endpoint *endpoint = link->endpoint;
    kvf_status status = KVF_OK;
    if (link->told_version == endpoint->version)
        return KVF_OK;
    if (is_asked(link))
        return KVF_E_AGAIN;
    if (link->telling_version != endpoint->version)
        link->told_next = 0;
    link->telling_version = endpoint->version;
    while (!status && link->told_next < endpoint->region_count) {
        const uint32_t left = endpoint->region_count - link->told_next;
        kvf_cuda_memory part = {.header = {CUDA_MEMORY, left < CUDA_MEMORY_PART ? left : CUDA_MEMORY_PART},
                                .first = link->told_next,
                                .generation = kvf_transport_oldest(endpoint->transport),
                                .card = endpoint->card};
        part.card.region_count = endpoint->region_count;
        memcpy(part.regions, &endpoint->regions[part.first], part.header.count * sizeof *part.regions);
        status = kvf_cuda_wire_send(
            link->fd, &part, offsetof(kvf_cuda_memory, regions) + part.header.count * sizeof *part.regions);
        if (!status)
            link->told_next += part.header.count;
    }
    if (!status)
        link->told_version = endpoint->version;
    return status;
}

static kvf_status ask(const kvf_cuda_link *link, const kvf_cuda_copy *copy) {
    size_t count;
    const kvf_run *runs = kvf_slice_runs(&copy->slice, &count);
    kvf_cuda_write write = {.header = {CUDA_WRITE, (uint32_t)count}, .number = copy->number};
    if (copy->batch->shape)
        write.shape = *copy->batch->shape;
    memcpy(write.runs, runs, count * sizeof *runs);
    return kvf_cuda_wire_send(link->fd, &write, offsetof(kvf_cuda_write, runs) + count * sizeof *runs);
}

/* Sends one request. False: it cannot be sent now. */
static bool send_one(kvf_cuda_link *link, kvf_cuda_copy *copy) {
    kvf_status status = KVF_OK;
    if (copy->batch->cancelled)
        status = kvf_fail(KVF_E_CANCELLED, KVF_REASON_CANCELLED);
    else if (link->endpoint->region_count > CUDA_MEMORY_REGIONS)
        status = kvf_fail(KVF_E_LIMIT, "this side has %u regions; allowed for a writer: up to %u",
                          link->endpoint->region_count, CUDA_MEMORY_REGIONS);
    if (status) {
        kvf_cuda_copy_end(link, copy, status);
        return true;
    }
    status = tell_memory(link);
    if (!status)
        status = ask(link, copy);
    copy->sent = !status;
    if (status && status != KVF_E_AGAIN)
        kvf_cuda_link_lose(link, kvf_error_detail());
    return !status;
}

void kvf_cuda_write_send(kvf_cuda_link *link) {
    for (uint32_t i = 0; i < CUDA_COPIES && !link->lost; i++) {
        kvf_cuda_copy *copy = &link->copies[i];
        if (copy->batch && !copy->job && !copy->sent && !send_one(link, copy))
            return;
    }
}

static kvf_status answer_of(kvf_cuda_packet *packet) {
    kvf_cuda_written *written = &packet->as.written;
    written->reason[sizeof written->reason - 1] = '\0';
    switch (written->header.count) {
    case KVF_OK:
        return KVF_OK;
    case KVF_E_AGAIN:
        return KVF_E_AGAIN;
    case KVF_E_UNSUPPORTED:
        return kvf_fail(KVF_E_UNSUPPORTED, "the owner could not read the data: %s", written->reason);
    default:
        return kvf_fail(KVF_E_IO, "the owner could not read the data: %s", written->reason);
    }
}

bool kvf_cuda_write_answered(kvf_cuda_link *link, kvf_cuda_packet *packet) {
    if (packet->bytes != sizeof packet->as.written)
        return false;
    for (uint32_t i = 0; i < CUDA_COPIES; i++) {
        kvf_cuda_copy *copy = &link->copies[i];
        if (!copy->batch || !copy->sent || copy->number != packet->as.written.number)
            continue;
        const kvf_status status = answer_of(packet);
        if (status == KVF_E_AGAIN) {
            copy->sent = false;
            link->told_version = 0; /* versions begin at 1 */
            link->told_next = 0;
        } else {
            kvf_cuda_copy_end(link, copy, status);
        }
        return true;
    }
    return false;
}

/* ---- the owner --------------------------------------------------------------------------------- */

/* A writer that cannot be read may write by another fabric. */
static void answer(kvf_cuda_client *client, uint64_t number, kvf_status status, const char *reason) {
    kvf_cuda_written written = {.header = {CUDA_WRITTEN, status}, .number = number};
    (void)snprintf(written.reason, sizeof written.reason, "%s", reason);
    KVF_ASSERT(client->asked > 0);
    client->asked--;
    if (status == KVF_E_UNSUPPORTED)
        kvf_fences_send_on(&client->endpoint->fences, client->from);
    if (!client->refused && !client->gone)
        (void)kvf_cuda_owner_tell(client, &written, sizeof written, -1);
}

/* If memory is no longer registered, the writer must tell of it anew. */
static void connect_back(kvf_cuda_client *client) {
    client->back_tried_ns = kvf_now(&kvf_monotonic);
    client->back_failed = kvf_cuda_link_back(client);
    (void)snprintf(client->back_why, sizeof client->back_why, "%s",
                   client->back_failed ? kvf_error_detail() : "");
    if (client->back_failed == KVF_E_NOT_REGISTERED)
        client->back_failed = KVF_OK;
}

/* A connection that failed because a descriptor, memory or a place at the writer was missing may succeed now. An attempt
 * may take time, so not every write makes one. */
static void connect_back_again(kvf_cuda_client *client) {
    const kvf_status failed = client->back_failed;
    if (failed && failed != KVF_E_UNSUPPORTED && failed != KVF_E_PARSE && !client->back &&
        kvf_now(&kvf_monotonic) - client->back_tried_ns >= BACK_PAUSE_NS)
        connect_back(client);
}

bool kvf_cuda_write_told(kvf_cuda_client *client, const kvf_cuda_packet *packet) {
    const kvf_cuda_memory *part = &packet->as.memory;
    const uint32_t count = part->header.count;
    if (packet->bytes < offsetof(kvf_cuda_memory, regions) || count < 1 || count > CUDA_MEMORY_PART ||
        packet->bytes != offsetof(kvf_cuda_memory, regions) + count * sizeof *part->regions || client->asked)
        return false;
    const uint32_t all = part->card.region_count;
    if (part->first == 0) {
        if (client->back)
            kvf_cuda_link_leave(client->back); /* nothing of it is under way */
        client->back = NULL;
        kvf_free(client->told);
        client->told_card = part->card;
        client->told_generation = part->generation;
        client->told_count = 0;
        client->told = all <= CUDA_MEMORY_REGIONS ? kvf_alloc(all, sizeof *client->told) : NULL;
    }
    if (!client->told || part->first != client->told_count || all != client->told_card.region_count ||
        count > all - client->told_count)
        return false;
    memcpy(&client->told[part->first], part->regions, count * sizeof *part->regions);
    client->told_count += count;
    if (client->told_count == all)
        connect_back(client);
    return true;
}

/* A batch of ours, followed by its runs. */
typedef struct asked_batch {
    kvf_batch batch; /* first, so that the two can be cast */
    uint64_t number;
    kvf_run_shape shape; /* of nests */
    kvf_run runs[];
} asked_batch;

/* Swaps the sides of the nests' shape, if there are any. False: it is invalid. */
static bool take_shape(const kvf_run_shape *shape, asked_batch *asked, kvf_nest_size *nest) {
    static const kvf_run_shape none = {0};
    if (memcmp(shape, &none, sizeof none) == 0)
        return true;
    asked->shape = kvf_run_shape_swapped(shape);
    asked->batch.shape = &asked->shape;
    return kvf_nest_measure(shape, nest);
}

/* Swaps the sides of the runs: local becomes ours. False: a run is outside of the regions that this fabric has. */
static bool take_runs(const kvf_cuda_client *client, const kvf_cuda_write *write, asked_batch *asked) {
    const kvf_cuda_endpoint *own = client->endpoint;
    kvf_nest_size nest = {0};
    if (!take_shape(&write->shape, asked, &nest))
        return false;
    for (uint32_t i = 0; i < write->header.count; i++) {
        const kvf_run *run = &write->runs[i];
        const bool nests = asked->batch.shape != NULL;
        if ((nests && run->bytes != nest.bytes) || run->remote_region >= own->region_count ||
            run->local_region >= client->told_count ||
            !kvf_lies_inside(run->remote_offset, nests ? nest.remote : run->bytes,
                             own->regions[run->remote_region].bytes) ||
            !kvf_lies_inside(run->local_offset, nests ? nest.local : run->bytes,
                             client->told[run->local_region].bytes))
            return false;
        asked->runs[i] = kvf_run_swapped(run);
        asked->batch.bytes += run->bytes;
    }
    return true;
}

bool kvf_cuda_write_asked(kvf_cuda_client *client, const kvf_cuda_packet *packet) {
    const kvf_cuda_write *write = &packet->as.write;
    const uint32_t count = write->header.count;
    if (count < 1 || count > CUDA_WRITE_RUNS || client->asked == CUDA_WRITES || client->told_count == 0 ||
        client->told_count != client->told_card.region_count ||
        packet->bytes != offsetof(kvf_cuda_write, runs) + count * sizeof *write->runs)
        return false;
    asked_batch *asked = kvf_alloc0(1, sizeof *asked + count * sizeof *asked->runs);
    if (asked && !take_runs(client, write, asked)) {
        kvf_free(asked);
        return false;
    }
    client->asked++;
    connect_back_again(client);
    if (!asked || !client->back || client->back->lost) {
        kvf_free(asked);
        answer(client, write->number,
               !asked                ? KVF_E_NOMEM
               : client->back_failed ? client->back_failed
                                     : KVF_E_AGAIN,
               asked ? client->back_why : "no memory for the write");
        return true;
    }
    asked->number = write->number;
    asked->batch.direction = KVF_READ;
    asked->batch.runs = asked->runs;
    asked->batch.count = count;
    KVF_QUEUE_ADD(client->back->asked_first, client->back->asked_last, &asked->batch);
    kvf_slices_add(&client->back->slices, &asked->batch);
    return true;
}

void kvf_cuda_write_ended(kvf_cuda_link *back, kvf_batch *batch) {
    KVF_QUEUE_REMOVE(back->asked_first, back->asked_last, batch);
    answer(back->client, ((asked_batch *)batch)->number, batch->failed, batch->reason);
    kvf_free(batch);
}

static bool reaches(const kvf_batch *asked, uint32_t region, uint64_t offset, uint64_t bytes) {
    kvf_nest_size nest = {0};
    if (asked->shape)
        (void)kvf_nest_measure(asked->shape, &nest); /* it was valid when it came */
    for (size_t i = 0; i < asked->count; i++) {
        const kvf_run *run = &asked->runs[i];
        const uint64_t length = asked->shape ? nest.local : run->bytes;
        if (run->local_region == region && run->local_offset < offset + bytes &&
            offset < run->local_offset + length)
            return true;
    }
    return false;
}

/* Begins no more of a write. False: kernels still make a part of it. */
static bool give_up(kvf_cuda_link *back, kvf_batch *asked) {
    kvf_batch_fail(asked, KVF_E_CANCELLED, "the memory that was to be written is no longer meant for it");
    if (asked == back->slices.current)
        (void)kvf_slices_drop_current(&back->slices);
    if (asked->in_flight > 0)
        return false;
    kvf_cuda_write_ended(back, asked);
    return true;
}

bool kvf_cuda_write_stop(void *self, uint32_t region, uint64_t offset, uint64_t bytes) {
    const kvf_cuda_endpoint *endpoint = self;
    bool quiet = true;
    for (const kvf_cuda_client *client = endpoint->clients; client; client = client->following) {
        kvf_batch *following;
        for (kvf_batch *asked = client->back ? client->back->asked_first : NULL; asked; asked = following) {
            following = asked->following;
            if (reaches(asked, region, offset, bytes))
                quiet = give_up(client->back, asked) && quiet;
        }
    }
    return quiet;
}

void kvf_cuda_write_forget(kvf_cuda_link *back) {
    while (back->asked_first) {
        kvf_batch *batch = back->asked_first;
        KVF_QUEUE_REMOVE(back->asked_first, back->asked_last, batch);
        kvf_free(batch);
    }
}

void kvf_cuda_write_lost(kvf_cuda_link *back) {
    kvf_cuda_client *client = back->client;
    client->back = NULL;
    client->back_failed = back->stale ? KVF_OK : KVF_E_PEER_LOST;
    (void)snprintf(client->back_why, sizeof client->back_why, "%s", back->why);
    while (back->asked_first) {
        kvf_batch *batch = back->asked_first;
        batch->failed = KVF_OK; /* its own failure no longer matters */
        kvf_batch_fail(batch, back->stale ? KVF_E_AGAIN : KVF_E_PEER_LOST, back->why);
        kvf_cuda_write_ended(back, batch);
    }
    if (client->gone)
        kvf_cuda_owner_drop(client);
}
