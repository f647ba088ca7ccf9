/*
 * The consumer's side of a transfer: batches are cut into requests of at most MESSAGES_CHUNK_BYTES, and a window of
 * them is under way. The owner answers them in order.
 */
#include "transport/messages/messages.h"

static void stir(kvf_messages_link *link) {
    link->stirs = true;
    kvf_wake_set(&link->endpoint->wake, true);
}

kvf_status kvf_messages_submit(void *self, kvf_batch *batch) {
    kvf_messages_link *link = self;
    kvf_slices_add(&link->slices, batch);
    stir(link);
    return KVF_OK;
}

void kvf_messages_cancel(void *self, kvf_batch *batch) {
    (void)batch;
    kvf_messages_link *link = self;
    kvf_slices_cancel(&link->slices);
    stir(link);
}

/* ---- asking ---------------------------------------------------------------------------------- */

static kvf_status make_read(kvf_messages_link *link, const kvf_slice *slice, uint32_t number,
                            zmq_msg_t *out) {
    kvf_messages_endpoint *endpoint = link->endpoint;
    size_t count;
    const kvf_run *runs = kvf_slice_runs(slice, &count);
    size_t list = kvf_messages_list_write(runs, count, endpoint->list);
    if (zmq_msg_init_size(out, MESSAGES_REQUEST_BYTES + list))
        return kvf_nomem("a message");
    unsigned char *at = zmq_msg_data(out);
    kvf_messages_request_write(MESSAGES_READ, number, (uint32_t)list, (uint32_t)slice->bytes, at);
    memcpy(at + MESSAGES_REQUEST_BYTES, endpoint->list, list);
    return KVF_OK;
}

/* KVF_E_AGAIN: there is no slot now. */
static kvf_status make_write(kvf_messages_link *link, const kvf_slice *slice, uint32_t number,
                             zmq_msg_t *out) {
    size_t count;
    const kvf_run *runs = kvf_slice_runs(slice, &count);
    kvf_messages_slot *slot = kvf_messages_pool_take(&link->endpoint->pool, link->writes);
    if (!slot)
        return KVF_E_AGAIN;
    size_t list = kvf_messages_list_write(runs, count, slot->memory + MESSAGES_REQUEST_BYTES);
    kvf_messages_request_write(MESSAGES_WRITE, number, (uint32_t)list, (uint32_t)slice->bytes, slot->memory);
    kvf_slice_pack(slice, kvf_transport_bases(link->endpoint->transport),
                   slot->memory + MESSAGES_REQUEST_BYTES + list);
    kvf_status status = kvf_messages_pool_message(slot, 0, MESSAGES_REQUEST_BYTES + list + slice->bytes, out);
    if (status)
        kvf_messages_pool_give(slot);
    return status;
}

/* Sends the request for the next slice. */
static kvf_status ask_one(kvf_messages_link *link, uint64_t *budget) {
    kvf_batch *batch = link->slices.current;
    kvf_slice slice;
    zmq_msg_t message;
    kvf_slices_peek(&link->slices, MESSAGES_CHUNK_BYTES, MESSAGES_CHUNK_RUNS, &slice);
    uint32_t number = link->number + 1;
    kvf_status status = batch->direction == KVF_READ ? make_read(link, &slice, number, &message)
                                                     : make_write(link, &slice, number, &message);
    if (status)
        return status;
    link->number = number;
    kvf_messages_say(link, &message);
    link->asked[(link->first + link->count++) % MESSAGES_WINDOW_MAX] =
        (kvf_messages_asked){batch, slice, number, batch->direction};
    link->writes += batch->direction == KVF_WRITE;
    batch->in_flight++;
    *budget -= kvf_min_u64(*budget, batch->direction == KVF_WRITE ? slice.bytes : slice.count + 1);
    (void)kvf_slices_advance(&link->slices, &slice);
    return KVF_OK;
}

bool kvf_messages_may_ask(const kvf_messages_link *link) {
    const kvf_batch *batch = link->slices.current;
    return link->welcome && !link->lost && batch && link->count < link->endpoint->window;
}

void kvf_messages_ask(kvf_messages_link *link, uint64_t *budget) {
    kvf_status status = KVF_OK;
    link->starved = false;
    while (!status && *budget > 0 && kvf_messages_may_ask(link))
        status = ask_one(link, budget);
    if (status == KVF_E_AGAIN || status == KVF_E_NOMEM) {
        link->starved = true;
        kvf_messages_await_slot(link->endpoint);
    }
}

/* ---- answers --------------------------------------------------------------------------------- */

/* Takes the printable part of the owner's sentence as the reason. */
static void fail_batch(kvf_batch *batch, const unsigned char *text, size_t bytes) {
    char reason[MESSAGES_TEXT_BYTES + 32];
    size_t length = (size_t)kvf_min_u64(bytes, MESSAGES_TEXT_BYTES), at = strlen("refused by the owner: ");
    memcpy(reason, "refused by the owner: ", at);
    for (size_t i = 0; i < length; i++)
        reason[at++] = (char)(text[i] >= ' ' && text[i] <= '~' ? text[i] : '?');
    reason[at] = '\0';
    kvf_batch_fail(batch, KVF_E_IO, reason);
}

static bool fits(const kvf_messages_asked *asked, kvf_messages_kind kind, uint32_t number, size_t bytes) {
    if (number != asked->number)
        return false;
    if (kind == MESSAGES_DATA)
        return asked->direction == KVF_READ && bytes == asked->slice.bytes;
    return kind == MESSAGES_FAILED || (asked->direction == KVF_WRITE && bytes == 0);
}

bool kvf_messages_answered(kvf_messages_link *link, kvf_messages_kind kind, const unsigned char *data,
                           size_t bytes, uint64_t *budget) {
    kvf_byte_reader from = {data, bytes, false};
    (void)kvf_take_number(&from, 4);
    uint32_t number = (uint32_t)kvf_take_number(&from, 4);
    kvf_messages_asked *asked = &link->asked[link->first % MESSAGES_WINDOW_MAX];
    if (from.cut_off || link->count == 0 || !fits(asked, kind, number, from.left))
        return false;
    kvf_batch *batch = asked->batch;
    kvf_slice slice = asked->slice;
    link->writes -= asked->direction == KVF_WRITE;
    link->first++;
    link->count--;
    if (!batch)
        return true;
    batch->in_flight--;
    if (kind == MESSAGES_FAILED)
        fail_batch(batch, from.at, from.left);
    if (kind == MESSAGES_DATA && !batch->failed && !batch->cancelled) {
        unsigned char *read_only;
        memcpy(&read_only, &from.at, sizeof read_only);
        kvf_slice_unpack(&slice, kvf_transport_bases(link->endpoint->transport), read_only);
        *budget -= kvf_min_u64(*budget, slice.bytes);
    }
    if (kvf_slices_is_over(&link->slices, batch))
        kvf_slices_end(batch);
    return true;
}

/* Cancelled reads need no answer: only we write to our memory. Writes do: the owner may still make them. */
void kvf_messages_forget(kvf_messages_link *link) {
    if (!link->slices.cancelled)
        return;
    for (uint32_t i = 0; i < link->count; i++) {
        kvf_messages_asked *asked = &link->asked[(link->first + i) % MESSAGES_WINDOW_MAX];
        kvf_batch *batch = asked->batch;
        if (!batch || !batch->cancelled || asked->direction != KVF_READ)
            continue;
        asked->batch = NULL;
        link->given_up_ns = link->endpoint->now;
        kvf_slices_forget(&link->slices, batch);
    }
    kvf_slices_reap(&link->slices);
}
