/*
 * Links of the UCX fabric: connecting, noticing that the peer is gone, notifications, closing.
 */
#include <stdio.h>
#include <time.h>

#include "cuda/over.h"
#include "transport/ucx/ucx.h"

#define MESSAGES_MAX 64u
#define LINGER_NS 200000000ll
#define IDLE_ROUNDS 100u /* in which nothing comes: nothing is left to come */

/* ---- peers that are gone --------------------------------------------------------------------- */

static void on_error(void *argument, ucp_ep_h ep, ucs_status_t status) {
    (void)ep;
    kvf_ucx_link *link = argument;
    (void)kvf_ucx_fail(link->ucx, status, "connection");
    kvf_post_lose(&link->queue, kvf_error_detail());
}

static void linger_done(void *request, ucs_status_t status, void *user_data) {
    kvf_ucx_link *link = user_data;
    link->lingering--;
    link->queue.answered = link->queue.answered || status == UCS_OK;
    link->ucx->ucp_request_free(request);
}

/* ---- closing --------------------------------------------------------------------------------- */

static int64_t now_ns(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/*
 * UCX before 1.14 aborts its process when a connection over TCP ends while its answer to the peer that asked for the
 * connection still waits to leave. So this side does not go before the connection is made. It cannot help a peer that
 * closes its endpoint in that moment, nor when this process dies.
 */
static bool harms_the_peer(const kvf_ucx_link *link) {
    return !link->queue.answered && link->ucx->major == 1 && link->ucx->minor < 14;
}

/* A forced close discards what UCX still has to send. This gives notifications a moment to leave, and a connection one
 * to be made. */
static void linger(kvf_ucx_link *link) {
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .cb.send = linger_done,
        .user_data = link,
    };
    if ((!link->notified && !harms_the_peer(link)) || link->queue.lost || link->queue.in_flight > 0)
        return;
    if (!UCS_PTR_IS_PTR(link->ucx->ucp_ep_flush_nbx(link->ep, &param)))
        return;
    link->lingering++;
    for (int64_t end = now_ns() + LINGER_NS; link->lingering > 0 && !link->queue.lost && now_ns() < end;)
        (void)link->ucx->ucp_worker_progress(link->endpoint->worker);
}

/* Whether UCX still has to call back. */
static bool is_busy(const kvf_ucx_link *link) {
    return link->queue.in_flight > 0 || link->messages > 0 || link->lingering > 0;
}

static bool is_closing(const kvf_ucx_link *link) {
    return UCS_PTR_IS_PTR(link->closing) &&
           link->ucx->ucp_request_check_status(link->closing) == UCS_INPROGRESS;
}

/* Closing an endpoint does not end UCX's copies by devices, and once the context of one has ended by an error, UCX takes
 * them for copies that are under way, and never calls back. */
static bool has_lost_device(const kvf_ucx_endpoint *endpoint) {
    return endpoint->device_context.needed && kvf_cuda_is_lost(endpoint->device_context.device);
}

static void begin_to_close(kvf_ucx_link *link) {
    const ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
                                       .flags = UCP_EP_CLOSE_FLAG_FORCE};
    link->closing = link->ucx->ucp_ep_close_nbx(link->ep, &param);
    link->ep = NULL;
    link->close_until_ns = now_ns() + LINGER_NS;
}

/*
 * Afterwards UCX accesses no memory for this link any more: all its operations have called back. Or the link stays
 * busy, in two cases. Over shared memory UCX never calls back for operations that a peer which has ended did not take;
 * of such a peer nothing more comes, once everything that it had sent has been taken. And a device may be lost.
 *
 * If the queue of a peer's shared memory is full, UCX gives up no operation before the peer takes some from it. As long as
 * the peer lives it may do so, and answer those that it has.
 *
 * @param waits  for such a peer. If not, false: it may still answer
 */
static bool close_ep(kvf_ucx_link *link, bool waits) {
    uint32_t idle = 0;
    if (link->ep)
        begin_to_close(link);
    for (int64_t look = link->close_until_ns; is_closing(link) || is_busy(link);) {
        idle = link->ucx->ucp_worker_progress(link->endpoint->worker) ? 0 : idle + 1;
        const int64_t now = now_ns();
        if (now >= look && has_lost_device(link->endpoint))
            break;
        look = now >= look ? now + LINGER_NS : look;
        if (idle == 0 || now < link->close_until_ns)
            continue;
        const bool ended = kvf_beacon_has_ended(&link->queue.watch);
        if (ended && idle >= IDLE_ROUNDS)
            break;
        if (!ended && !waits)
            return false;
    }
    if (UCS_PTR_IS_PTR(link->closing))
        link->ucx->ucp_request_free(link->closing);
    link->closing = NULL;
    kvf_wake_set(&link->endpoint->wake, true); /* messages for other links may have come in meanwhile */
    return true;
}

bool kvf_ucx_close_lost(kvf_post_queue *queue) {
    kvf_ucx_link *link = (kvf_ucx_link *)queue;
    if (!close_ep(link, false))
        return false;
    kvf_beacon_watch_close(link->endpoint->event_fd, &queue->watch);
    return true;
}

/* Of a peer on another machine UCX gives up all operations at once. */
bool kvf_ucx_is_quiet(const void *self) {
    const kvf_ucx_link *link = self;
    return link->queue.watch.socket < 0 || !is_busy(link);
}

static void free_keys(kvf_ucx_link *link) {
    for (uint32_t i = 0; i < link->target_count; i++)
        if (link->targets[i].key)
            link->ucx->ucp_rkey_destroy(link->targets[i].key);
    link->target_count = 0;
}

/* Its ep is closed, and UCX calls back no more. */
static void free_closed(kvf_ucx_link *link) {
    kvf_post_drop(&link->queue);
    for (kvf_ucx_message *message = link->spare, *following; message; message = following) {
        following = message->following;
        kvf_free(message);
    }
    kvf_free(link->targets);
    kvf_free(link);
}

static void free_link(kvf_ucx_link *link) {
    kvf_ucx_endpoint *endpoint = link->endpoint;
    const kvf_cuda *entered = kvf_ucx_enter(endpoint);
    const bool waits = !kvf_transport_is_closing(endpoint->transport); /* else the worker ends soon */
    if (!link->queue.lost_told)                                        /* else it was closed before */
        (void)close_ep(link, waits);
    if (!is_busy(link))
        free_keys(link);
    kvf_ucx_leave(entered);
    kvf_beacon_watch_close(endpoint->event_fd, &link->queue.watch);
    kvf_post_drop(&link->queue);
    if (is_busy(link))
        KVF_LIST_ADD(endpoint->stuck, link);
    else
        free_closed(link);
}

void kvf_ucx_end_worker(kvf_ucx_endpoint *endpoint) {
    for (kvf_ucx_link *link = endpoint->stuck; link; link = link->following)
        free_keys(link);
    if (endpoint->worker)
        endpoint->ucx->ucp_worker_destroy(endpoint->worker); /* may call back */
    for (kvf_ucx_link *link = endpoint->stuck, *following; link; link = following) {
        following = link->following;
        link->queue.in_flight = 0;
        free_closed(link);
    }
}

/* ---- connecting and disconnecting ------------------------------------------------------------ */

static kvf_status check_version(const kvf_ucx_card *card, const kvf_ucx_library *ucx) {
    bool alike = card->minor == ucx->minor ||
                 (card->minor >= KVF_UCX_MINOR_ALIKE && ucx->minor >= KVF_UCX_MINOR_ALIKE);
    if (card->major == ucx->major && alike)
        return KVF_OK;
    return kvf_fail(KVF_E_UNSUPPORTED,
                    "the peer has UCX %u.%u and this side %s, which do not understand each other: load the "
                    "same version on both sides (ucx.library)",
                    card->major, card->minor, ucx->version);
}

static kvf_status create_ep(kvf_ucx_link *link, const kvf_ucx_card *card) {
    void *address = kvf_ucx_card_blob(card->worker, card->worker_bytes);
    if (!address)
        return kvf_nomem("a peer's address");
    ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER,
        .address = address,
        .err_mode = UCP_ERR_HANDLING_MODE_PEER,
        .err_handler.cb = on_error,
        .err_handler.arg = link,
    };
    ucs_status_t status = link->ucx->ucp_ep_create(link->endpoint->worker, &params, &link->ep);
    kvf_free(address);
    if (status == UCS_OK)
        return KVF_OK;
    link->ep = NULL;
    kvf_status failed = kvf_ucx_fail(link->ucx, status, "connection");
    if (status == UCS_ERR_UNREACHABLE) {
        char words[KVF_REASON_BYTES];
        (void)snprintf(words, sizeof words, "%s", kvf_error_detail());
        failed = kvf_fail(failed, "%s; the setting ucx.devices says which interfaces to use", words);
    }
    /* The memory that connects shared memory transports has gone with its owner, or is another user's. */
    if (status == UCS_ERR_SHMEM_SEGMENT)
        return kvf_beacon_is_gone(&link->queue.watch) ? KVF_E_PEER_LOST : KVF_E_UNSUPPORTED;
    return failed;
}

static kvf_status unpack_keys(kvf_ucx_link *link, const kvf_ucx_card *card) {
    for (uint32_t i = 0; i < card->region_count; i++) {
        const kvf_ucx_card_region *region = &card->regions[i];
        link->target_count = i + 1;
        link->queue.withholds = link->queue.withholds || (region->bytes > 0 && !region->key);
        if (!region->key)
            continue;
        void *key = kvf_ucx_card_blob(region->key, region->key_bytes);
        if (!key)
            return kvf_nomem("a memory key");
        ucs_status_t status = link->ucx->ucp_ep_rkey_unpack(link->ep, key, &link->targets[i].key);
        kvf_free(key);
        if (status != UCS_OK)
            return kvf_ucx_fail(link->ucx, status, "memory key");
        link->targets[i].address = region->address;
    }
    return KVF_OK;
}

static kvf_status make_link(kvf_ucx_endpoint *endpoint, const kvf_ucx_card *card, kvf_peer *peer,
                            kvf_ucx_link **out) {
    kvf_ucx_link *link = kvf_alloc0(1, sizeof *link);
    kvf_ucx_target *targets = kvf_alloc0(card->region_count, sizeof *targets);
    if (!link || !targets) {
        kvf_free(link);
        kvf_free(targets);
        return kvf_nomem("a link");
    }
    link->endpoint = endpoint;
    link->ucx = endpoint->ucx;
    link->queue.poster = &endpoint->poster;
    link->queue.peer = peer;
    link->targets = targets;
    kvf_ucx_prepare(link);
    memcpy(link->queue.place, kvf_beacon_place(card->beacon), sizeof link->queue.place);
    const kvf_cuda *entered = kvf_ucx_enter(endpoint);
    kvf_status status = kvf_beacon_watch_open(card->beacon, endpoint->event_fd, link, &link->queue.watch);
    if (!status)
        status = create_ep(link, card);
    if (!status)
        status = unpack_keys(link, card);
    kvf_ucx_leave(entered);
    if (status)
        free_link(link);
    else
        *out = link;
    return status;
}

kvf_status kvf_ucx_connect(void *self, const void *data, size_t bytes, kvf_peer *peer, void **out) {
    kvf_ucx_endpoint *endpoint = self;
    kvf_ucx_card card;
    kvf_status status = kvf_ucx_card_read(data, bytes, &card);
    if (status)
        return status;
    kvf_ucx_link *link = NULL;
    status = check_version(&card, endpoint->ucx);
    if (!status)
        status = kvf_peer_check_regions(peer, card.region_count, &card.regions->bytes, sizeof *card.regions);
    if (!status)
        status = make_link(endpoint, &card, peer, &link);
    kvf_free(card.regions);
    if (status)
        return status;
    KVF_LIST_ADD(endpoint->links, link);
    kvf_post_queue_add(&link->queue);
    kvf_wake_set(&endpoint->wake, true);
    *out = link;
    return KVF_OK;
}

bool kvf_ucx_is_emulated(const void *self) {
    const kvf_ucx_link *link = self;
    return link->endpoint->emulates;
}

void kvf_ucx_disconnect(void *self) {
    kvf_ucx_link *link = self;
    kvf_ucx_endpoint *endpoint = link->endpoint;
    kvf_post_queue_remove(&link->queue);
    KVF_LIST_REMOVE(endpoint->links, link);
    const kvf_cuda *entered = kvf_ucx_enter(endpoint);
    linger(link);
    kvf_ucx_leave(entered);
    free_link(link);
}

/* ---- notifications that go out --------------------------------------------------------------- */

static void recycle(kvf_ucx_message *message) {
    message->following = message->link->spare;
    message->link->spare = message;
}

/* If it failed, the link is lost, and its reason says more. */
static void sent(void *request, ucs_status_t status, void *user_data) {
    kvf_ucx_message *message = user_data;
    kvf_ucx_link *link = message->link;
    link->messages--;
    link->queue.answered = link->queue.answered || status == UCS_OK;
    recycle(message);
    link->ucx->ucp_request_free(request);
}

static kvf_status send_message(kvf_ucx_link *link, kvf_ucx_message *message, size_t bytes) {
    const char *name = kvf_transport_name(link->endpoint->transport);
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS,
        .flags = UCP_AM_SEND_FLAG_EAGER, /* whole, and in order on one lane */
        .cb.send = sent,
        .user_data = message,
    };
    link->notified = true;
    ucs_status_ptr_t result = link->ucx->ucp_am_send_nbx(link->ep, KVF_UCX_NOTIFY_ID, name, strlen(name),
                                                         message->data, bytes, &param);
    if (UCS_PTR_IS_PTR(result)) {
        link->messages++;
        return KVF_OK;
    }
    recycle(message);
    return UCS_PTR_IS_ERR(result) ? kvf_ucx_fail(link->ucx, UCS_PTR_STATUS(result), "notification") : KVF_OK;
}

kvf_status kvf_ucx_notify(void *self, const void *data, size_t bytes) {
    kvf_ucx_link *link = self;
    if (link->queue.lost)
        return kvf_fail(KVF_E_PEER_LOST, "%s", link->queue.lost_why);
    if (link->messages >= MESSAGES_MAX)
        return kvf_fail(KVF_E_AGAIN, "%u notifications wait for the peer; allowed: %u", link->messages,
                        MESSAGES_MAX);
    kvf_ucx_message *message = link->spare;
    if (message)
        link->spare = message->following;
    else if (!(message = kvf_alloc(1, sizeof *message)))
        return kvf_nomem("a notification");
    message->link = link;
    memcpy(message->data, data, bytes);
    const kvf_cuda *entered = kvf_ucx_enter(link->endpoint);
    kvf_status status = send_message(link, message, bytes);
    kvf_ucx_leave(entered);
    kvf_wake_set(&link->endpoint->wake, true);
    return status;
}
