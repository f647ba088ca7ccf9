/*
 * Notifications of the libfabric fabric: messages of the sender's name, behind its length, and the bytes.
 */
#include "transport/libfabric/libfabric.h"

static void put_back(kvf_libfabric_messages *messages, kvf_libfabric_message *message) {
    message->following = messages->spare;
    messages->spare = message;
}

static kvf_libfabric_message *take_spare(kvf_libfabric_messages *messages) {
    kvf_libfabric_message *message = messages->spare;
    if (message)
        messages->spare = message->following;
    return message;
}

kvf_status kvf_libfabric_messages_open(kvf_libfabric_endpoint *endpoint, void *owner, uint32_t count,
                                       kvf_libfabric_messages *out) {
    kvf_libfabric_message *all = kvf_alloc0(count, sizeof *all);
    if (!all)
        return kvf_nomem("messages");
    if (endpoint->info->domain_attr->mr_mode & FI_MR_LOCAL) {
        const kvf_memory memory = {.address = all, .bytes = count * sizeof *all};
        kvf_status status = kvf_libfabric_map(endpoint, &memory, false, &out->memory);
        if (status) {
            kvf_free(all);
            return status;
        }
    }
    out->all = all;
    out->waiting_last = &out->waiting;
    for (uint32_t i = 0; i < count; i++) {
        all[i].owner = owner;
        put_back(out, &all[i]);
    }
    return KVF_OK;
}

void kvf_libfabric_messages_close(kvf_libfabric_messages *messages) {
    (void)kvf_libfabric_unmap(&messages->memory);
    kvf_free(messages->all);
    *messages = (kvf_libfabric_messages){0};
}

/* ---- coming in ------------------------------------------------------------------------------- */

/* Anything may come in. What has not the form of a notification is dropped. The endpoint has made room before. */
static void deliver(kvf_libfabric_endpoint *endpoint, const unsigned char *data, size_t bytes) {
    char sender[KVF_SENDER_MAX + 1];
    const size_t name_bytes = bytes > 0 ? data[0] : 0;
    const size_t header_bytes = 1 + name_bytes;
    if (bytes <= header_bytes || bytes - header_bytes > KVF_NOTICE_MAX)
        return;
    memcpy(sender, data + 1, name_bytes);
    sender[name_bytes] = '\0';
    kvf_status status = kvf_deliver(endpoint->transport, sender, data + header_bytes, bytes - header_bytes);
    KVF_ASSERT(!status);
    (void)status;
}

static void came_in(kvf_libfabric_operation *operation, size_t bytes, int error) {
    kvf_libfabric_message *message = (kvf_libfabric_message *)operation;
    kvf_libfabric_endpoint *endpoint = message->owner;
    endpoint->inbox.under_way--;
    if (!error)
        deliver(endpoint, message->data, bytes);
    put_back(&endpoint->inbox, message);
}

kvf_status kvf_libfabric_listen(kvf_libfabric_endpoint *endpoint) {
    kvf_libfabric_message *message;
    while ((message = take_spare(&endpoint->inbox)) != NULL) {
        message->operation.done = came_in;
        ssize_t failed =
            fi_recv(endpoint->port.ep, message->data, sizeof message->data,
                    kvf_libfabric_desc(&endpoint->inbox.memory), FI_ADDR_UNSPEC, &message->operation);
        if (!failed) {
            endpoint->inbox.under_way++;
            continue;
        }
        put_back(&endpoint->inbox, message);
        if (failed == -FI_EAGAIN) {
            /* The next message that comes in makes room. If none can, nothing but time shows when to try again. */
            endpoint->refused = endpoint->refused || endpoint->inbox.under_way == 0;
            return KVF_OK;
        }
        return kvf_libfabric_fail(endpoint->library, failed, "receiving");
    }
    return KVF_OK;
}

/* ---- going out ------------------------------------------------------------------------------- */

static void went_out(kvf_libfabric_operation *operation, size_t bytes, int error) {
    (void)bytes;
    kvf_libfabric_message *message = (kvf_libfabric_message *)operation;
    kvf_libfabric_link *link = message->owner;
    link->outbox.under_way--;
    put_back(&link->outbox, message);
    if (error)
        kvf_libfabric_fail_link(link, error, "notification");
    else
        kvf_libfabric_mark_answered(link);
}

bool kvf_libfabric_is_notifying(const kvf_libfabric_link *link) {
    return link->outbox.under_way > 0 || link->outbox.waiting;
}

void kvf_libfabric_send_waiting(kvf_libfabric_link *link) {
    kvf_libfabric_messages *outbox = &link->outbox;
    kvf_libfabric_message *message;
    void *desc = kvf_libfabric_desc(&outbox->memory);
    while ((message = outbox->waiting) != NULL && !link->queue.lost) {
        const struct iovec bytes = {message->data, message->bytes};
        const struct fi_msg out = {.msg_iov = &bytes,
                                   .desc = &desc,
                                   .iov_count = 1,
                                   .addr = link->address,
                                   .context = &message->operation};
        message->operation.done = went_out;
        ssize_t failed = fi_sendmsg(link->port.ep, &out, FI_COMPLETION | FI_DELIVERY_COMPLETE);
        if (failed == -FI_EAGAIN) {
            link->endpoint->refused = true;
            return;
        }
        outbox->waiting = message->following;
        if (!outbox->waiting)
            outbox->waiting_last = &outbox->waiting;
        outbox->under_way++;
        if (failed)
            went_out(&message->operation, 0, (int)-failed);
    }
}

static void write_message(const kvf_libfabric_link *link, const void *data, size_t bytes,
                          kvf_libfabric_message *out) {
    const char *name = kvf_transport_name(link->endpoint->transport);
    const size_t name_bytes = kvf_min_u64(strlen(name), KVF_SENDER_MAX);
    out->data[0] = (unsigned char)name_bytes;
    memcpy(out->data + 1, name, name_bytes);
    memcpy(out->data + 1 + name_bytes, data, bytes);
    out->bytes = (uint32_t)(1 + name_bytes + bytes);
}

static kvf_status notify(kvf_libfabric_link *link, const void *data, size_t bytes) {
    kvf_libfabric_messages *outbox = &link->outbox;
    kvf_status status = KVF_OK;
    if (link->queue.lost)
        return kvf_fail(KVF_E_PEER_LOST, "%s", link->queue.lost_why);
    if (!outbox->all)
        status = kvf_libfabric_messages_open(link->endpoint, link, KVF_LIBFABRIC_MESSAGES_OUT, outbox);
    if (status)
        return kvf_fail_in(status, "notification: ");
    kvf_libfabric_message *message = take_spare(outbox);
    if (!message)
        return kvf_fail(KVF_E_AGAIN, "%u notifications wait for the peer; allowed: %u",
                        KVF_LIBFABRIC_MESSAGES_OUT, KVF_LIBFABRIC_MESSAGES_OUT);
    write_message(link, data, bytes, message);
    message->following = NULL;
    *outbox->waiting_last = message;
    outbox->waiting_last = &message->following;
    kvf_libfabric_send_waiting(link);
    kvf_wake_set(&link->endpoint->wake, true);
    return KVF_OK;
}

kvf_status kvf_libfabric_notify(void *self, const void *data, size_t bytes) {
    kvf_libfabric_link *link = self;
    const kvf_cuda *entered = kvf_device_context_enter(&link->endpoint->device_context);
    kvf_status status = notify(link, data, bytes);
    kvf_device_context_leave(entered);
    return status;
}
