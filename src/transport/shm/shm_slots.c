/*
 * A buffer that we share with the owner, in slots, for use where the kernel forbids reading another process's memory,
 * or is slow at it. For a read the owner gathers into a slot and we scatter from it; for a write, the other way round.
 * While the owner works on one slot, we work on another.
 */
#include <sys/mman.h>

#include "transport/shm/shm.h"

static unsigned char *slot_address(const kvf_shm_link *link, uint32_t slot) {
    return link->buffer.address + slot * link->buffer.slot_bytes;
}

static kvf_status make_buffer(kvf_shm_link *link) {
    uint32_t slots = link->endpoint->slots;
    uint64_t bytes = (uint64_t)SHM_SLOT_BYTES * slots;
    unsigned char *address;
    kvf_status status = kvf_shm_make_memory(&bytes, &link->buffer_fd, &address);
    if (!status)
        link->buffer = (kvf_shm_buffer){address, bytes, SHM_SLOT_BYTES, slots};
    return status;
}

static kvf_status send_buffer(kvf_shm_link *link) {
    kvf_shm_buffer_message message = {{SHM_BUFFER, 0}, link->buffer.slot_bytes, link->buffer.slots, 0};
    kvf_status status = kvf_shm_send(link->fd, &message, sizeof message, link->buffer_fd);
    if (status)
        return status;
    kvf_fd_close(&link->buffer_fd);
    return KVF_OK;
}

static uint32_t free_slot(const kvf_shm_link *link) {
    uint32_t slot = 0;
    while (slot < link->buffer.slots && link->slots[slot].busy)
        slot++;
    return slot;
}

kvf_status kvf_shm_slots_free(kvf_shm_link *link) {
    kvf_status status = link->buffer.address ? KVF_OK : make_buffer(link);
    if (!status && link->buffer_fd >= 0)
        status = send_buffer(link);
    if (!status && (!link->buffer_taken || free_slot(link) == link->buffer.slots))
        status = KVF_E_AGAIN;
    link->blocked = status == KVF_E_AGAIN && link->buffer_fd >= 0;
    return status;
}

bool kvf_shm_slots_taken(kvf_shm_link *link, const kvf_shm_buffer_message *answer) {
    kvf_shm_buffer *buffer = &link->buffer;
    bool sent = buffer->address && link->buffer_fd < 0;
    if (!sent || link->buffer_taken || answer->slots == 0 || answer->slots > buffer->slots ||
        answer->slot_bytes == 0 || answer->slot_bytes > buffer->slot_bytes)
        return false;
    buffer->slots = answer->slots;
    buffer->slot_bytes = answer->slot_bytes;
    link->buffer_taken = true;
    return true;
}

void kvf_shm_cut(kvf_slice *slice, uint64_t bytes, size_t runs) {
    size_t count = 0;
    uint64_t fits = 0;
    while (count < slice->count && count < runs && slice->runs[count].bytes <= bytes - fits)
        fits += slice->runs[count++].bytes;
    if (count == 0) {
        slice->part = slice->count ? *slice->runs : slice->part;
        slice->part.bytes = fits = kvf_min_u64(slice->part.bytes, bytes);
    }
    slice->count = count;
    slice->bytes = fits;
}

kvf_status kvf_shm_slots_start(kvf_shm_link *link, const kvf_slice *next, kvf_slice *started) {
    kvf_batch *batch = link->slices.current;
    kvf_slice slice = *next;
    kvf_shm_cut(&slice, link->buffer.slot_bytes, SHM_PIECES_MAX);
    bool waiting = kvf_shm_slots_load(link).waiting > 0;
    uint32_t slot = free_slot(link);
    kvf_shm_move_message *move = &link->endpoint->packet.as.move;
    size_t count;
    const kvf_run *runs = kvf_slice_runs(&slice, &count);
    move->header = (kvf_shm_header){SHM_MOVE, (uint32_t)count};
    move->slot = slot;
    move->direction = batch->direction;
    for (size_t i = 0; i < count; i++)
        move->pieces[i] = (kvf_shm_piece){runs[i].remote_offset, runs[i].bytes, runs[i].remote_region, 0};
    if (batch->direction == KVF_WRITE)
        kvf_slice_pack(&slice, kvf_transport_bases(link->endpoint->transport), slot_address(link, slot));
    kvf_status status = kvf_shm_send(
        link->fd, move, offsetof(kvf_shm_move_message, pieces) + count * sizeof(kvf_shm_piece), -1);
    link->blocked = status == KVF_E_AGAIN;
    if (status)
        return status;
    link->slots[slot] = (kvf_shm_slot){true, batch, slice};
    kvf_shm_choice_asked(&link->choice, waiting, kvf_now(&kvf_monotonic));
    batch->in_flight++;
    *started = slice;
    return KVF_OK;
}

static void settle(kvf_shm_link *link, kvf_batch *batch) {
    if (kvf_slices_is_over(&link->slices, batch) && !kvf_shm_link_lose_if_gone(link))
        kvf_slices_end(batch);
}

/* Names the first of the runs that the owner was asked for. */
static void fail_slice(kvf_batch *batch, const kvf_slice *slice, uint32_t answer) {
    size_t count;
    const kvf_run *runs = kvf_slice_runs(slice, &count);
    kvf_status status = answer <= KVF_E_TIMEOUT ? (kvf_status)answer : KVF_E_IO;
    (void)kvf_fail(status, "the peer refused %zu runs, the first at offset %llu of its region %u: %s", count,
                   (unsigned long long)runs->remote_offset, runs->remote_region, kvf_status_name(status));
    kvf_batch_fail(batch, status, kvf_error_detail());
}

kvf_shm_load kvf_shm_slots_load(const kvf_shm_link *link) {
    kvf_shm_load load = {.slots = link->buffer_taken ? link->buffer.slots : link->endpoint->slots};
    for (uint32_t i = 0; i < link->buffer.slots; i++) {
        load.waiting += link->slots[i].busy && link->slots[i].batch;
        load.abandoned += link->slots[i].busy && !link->slots[i].batch;
    }
    return load;
}

uint64_t kvf_shm_slots_alone_ns(const kvf_shm_link *link) {
    uint64_t alone_ns = 0;
    for (uint32_t i = 0; i < link->buffer.slots; i++)
        if (link->slots[i].busy && link->slots[i].batch && link->slots[i].batch->direction == KVF_READ)
            alone_ns += kvf_shm_choice_direct_ns(&link->choice, &link->slots[i].slice);
    return alone_ns;
}

/* The answers to these requests may still come later, and are ignored. */
void kvf_shm_slots_rescue(kvf_shm_link *link) {
    kvf_shm_choice_abandoned(&link->choice);
    for (uint32_t i = 0; i < link->buffer.slots && !link->lost; i++) {
        kvf_shm_slot *slot = &link->slots[i];
        kvf_batch *batch = slot->busy ? slot->batch : NULL;
        if (!batch || batch->direction != KVF_READ)
            continue;
        bool wanted = !batch->failed && !batch->cancelled;
        kvf_status status = wanted ? kvf_shm_direct(link, KVF_READ, &slot->slice) : KVF_OK;
        if (status == KVF_E_UNSUPPORTED) { /* we must wait for the owner */
            link->no_direct = SHM_FORBIDDEN;
            return;
        }
        if (status == KVF_E_PEER_LOST)
            kvf_shm_link_lose(link, kvf_error_detail());
        else if (status)
            kvf_batch_fail(batch, status, kvf_error_detail());
        slot->batch = NULL;
        batch->in_flight--;
        if (!link->lost)
            settle(link, batch);
    }
}

bool kvf_shm_slots_moved(kvf_shm_link *link, const kvf_shm_moved_message *answer) {
    if (answer->slot >= link->buffer.slots || !link->slots[answer->slot].busy)
        return false;
    kvf_shm_slot *slot = &link->slots[answer->slot];
    kvf_batch *batch = slot->batch;
    slot->busy = false;
    kvf_shm_choice_answered(&link->choice, batch != NULL, kvf_now(&kvf_monotonic));
    if (!batch)
        return true;
    batch->in_flight--;
    if (answer->status != KVF_OK)
        fail_slice(batch, &slot->slice, answer->status);
    if (!batch->failed && !batch->cancelled && batch->direction == KVF_READ) {
        kvf_slice_unpack(&slot->slice, kvf_transport_bases(link->endpoint->transport),
                         slot_address(link, answer->slot));
        kvf_shm_choice_taken(&link->choice, &slot->slice, kvf_now(&kvf_monotonic));
    }
    settle(link, batch);
    return true;
}

/* Cancelled reads need no answer: the owner writes only to our slot. Writes do: the owner may still make them. */
void kvf_shm_slots_forget(kvf_shm_link *link) {
    if (!link->slices.cancelled)
        return;
    for (uint32_t i = 0; i < link->buffer.slots; i++) {
        kvf_batch *batch = link->slots[i].busy ? link->slots[i].batch : NULL;
        if (!batch || !batch->cancelled || batch->direction != KVF_READ)
            continue;
        link->slots[i].batch = NULL;
        kvf_slices_forget(&link->slices, batch);
    }
}

void kvf_shm_slots_close(kvf_shm_link *link) {
    if (link->buffer.address)
        (void)munmap(link->buffer.address, link->buffer.bytes);
    kvf_fd_close(&link->buffer_fd);
    link->buffer = (kvf_shm_buffer){0};
    link->buffer_taken = false;
    memset(link->slots, 0, sizeof link->slots);
}
