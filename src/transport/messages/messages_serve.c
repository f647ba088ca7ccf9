/*
 * The owner's side. ZeroMQ gives each connection a number. A peer that sends the secret becomes a client; if it sends
 * anything else first, we hang up (messages_port.c). A client that is refused is told why and forgotten; we hang up
 * once it has had time to read that.
 *
 * Clients send a BYE. A client that could not is found when a message to it fails: the end of its connection is no
 * reason to drop it, for earlier messages of it may still be unread.
 */
#include <errno.h>

#include "transport/messages/messages.h"

#define CLIENTS_SWEPT 64u

/* ZeroMQ's name for a connection: a zero byte and a number. */
#define NAME_BYTES 5u

/* ---- sending --------------------------------------------------------------------------------- */

/* 0, or errno: EHOSTUNREACH, it is gone; EAGAIN, it does not read. Always takes the message over. */
static int send_to(kvf_messages_endpoint *endpoint, uint32_t number, zmq_msg_t *message) {
    unsigned char name[NAME_BYTES] = {0};
    int error = 0;
    memcpy(name + 1, &number, sizeof number);
    endpoint->router_stirs = true; /* sending can swallow the signal on the descriptor */
    while (zmq_send(endpoint->router, name, sizeof name, ZMQ_DONTWAIT | ZMQ_SNDMORE) < 0)
        if ((error = zmq_errno()) != EINTR)
            break;
        else
            error = 0;
    while (!error && zmq_msg_send(message, endpoint->router, ZMQ_DONTWAIT) < 0)
        if ((error = zmq_errno()) == EINTR)
            error = 0;
    if (error)
        (void)zmq_msg_close(message);
    return error;
}

static int send_bytes(kvf_messages_endpoint *endpoint, uint32_t number, const void *data, size_t bytes) {
    zmq_msg_t message;
    if (zmq_msg_init_size(&message, bytes))
        return ENOMEM;
    memcpy(zmq_msg_data(&message), data, bytes);
    return send_to(endpoint, number, &message);
}

static void send_refusal(kvf_messages_endpoint *endpoint, uint32_t number, kvf_messages_refusal why,
                         uint64_t detail) {
    unsigned char out[MESSAGES_ANSWER_BYTES + 8];
    kvf_messages_answer_write(MESSAGES_REFUSED, why, out);
    kvf_put_number(out + MESSAGES_ANSWER_BYTES, detail, 8);
    (void)send_bytes(endpoint, number, out, sizeof out);
}

/* ---- clients --------------------------------------------------------------------------------- */

static kvf_messages_client *find_client(const kvf_messages_endpoint *endpoint, uint32_t number) {
    kvf_messages_client *client;
    HASH_FIND(hh, endpoint->clients, &number, sizeof number, client);
    return client;
}

static bool is_new(const kvf_messages_endpoint *endpoint, const kvf_messages_client *client) {
    return endpoint->now - client->since_ns < MESSAGES_NEW_NS;
}

/* The client has something to do, and waits for its turn. All new clients share one party. */
static void set_ready(kvf_messages_endpoint *endpoint, kvf_messages_client *client) {
    kvf_turn_party *party = is_new(endpoint, client) ? &endpoint->newcomers : &client->own;
    if (!client->is_starved)
        kvf_turns_wait(&endpoint->turns, party, &client->seat);
}

static void drop_requests(kvf_messages_client *client) {
    for (; client->count > 0; client->count--)
        (void)zmq_msg_close(&client->pending[client->first++ % MESSAGES_WINDOW_MAX]);
}

static void set_starved(kvf_messages_endpoint *endpoint, kvf_messages_client *client, bool starved) {
    if (client->is_starved == starved)
        return;
    client->is_starved = starved;
    if (starved)
        KVF_QUEUE_ADD(endpoint->starved, endpoint->last_starved, client);
    else
        KVF_QUEUE_REMOVE(endpoint->starved, endpoint->last_starved, client);
}

/* Drops its unanswered requests too. */
static void forget_client(kvf_messages_endpoint *endpoint, kvf_messages_client *client) {
    set_starved(endpoint, client, false);
    kvf_turns_stop_waiting(&client->seat);
    kvf_turns_leave(&endpoint->turns, &client->own);
    drop_requests(client);
    /* The analyser does not know that a client is in its table. */
    /* NOLINTNEXTLINE(clang-analyzer-core.NullDereference) */
    HASH_DELETE(hh, endpoint->clients, client);
    kvf_free(client);
}

void kvf_messages_left(kvf_messages_endpoint *endpoint, uint32_t number) {
    kvf_messages_client *client = find_client(endpoint, number);
    if (!client)
        return;
    client->is_gone = true;
    drop_requests(client);
}

static void refuse(kvf_messages_endpoint *endpoint, kvf_messages_client *client, kvf_messages_refusal why,
                   uint64_t detail) {
    send_refusal(endpoint, client->number, why, detail);
    kvf_messages_part(endpoint, client->number);
    forget_client(endpoint, client);
}

/* Sends an answer; false: the client is gone, or does not read what it asked for, and is forgotten. */
static bool answer(kvf_messages_endpoint *endpoint, kvf_messages_client *client, zmq_msg_t *message) {
    if (send_to(endpoint, client->number, message) == 0)
        return true;
    forget_client(endpoint, client);
    return false;
}

static bool answer_bytes(kvf_messages_endpoint *endpoint, kvf_messages_client *client, const void *data,
                         size_t bytes) {
    if (send_bytes(endpoint, client->number, data, bytes) == 0)
        return true;
    forget_client(endpoint, client);
    return false;
}

/* Forgets the clients that are gone. */
static void sweep(kvf_messages_endpoint *endpoint) {
    unsigned char alive[MESSAGES_ANSWER_BYTES];
    kvf_messages_client *client, *next;
    kvf_messages_answer_write(MESSAGES_ALIVE, 0, alive);
    HASH_ITER(hh, endpoint->clients, client, next)
    (void)answer_bytes(endpoint, client, alive, sizeof alive);
    endpoint->sweep_at = 2 * HASH_COUNT(endpoint->clients) + CLIENTS_SWEPT;
}

void kvf_messages_refuse_old(kvf_messages_endpoint *endpoint, uint64_t oldest) {
    kvf_messages_client *client, *next;
    HASH_ITER(hh, endpoint->clients, client, next)
    if (client->generation < oldest)
        refuse(endpoint, client, MESSAGES_REFUSED_GENERATION, oldest);
}

void kvf_messages_close_clients(kvf_messages_endpoint *endpoint) {
    kvf_messages_client *client, *next;
    HASH_ITER(hh, endpoint->clients, client, next)
    refuse(endpoint, client, MESSAGES_REFUSED_CLOSED, 0);
    if (endpoint->greeting)
        (void)zmq_msg_close(&endpoint->hello);
}

/* ---- fences ---------------------------------------------------------------------------------- */

kvf_status kvf_messages_fence(void *self, const void *part, size_t bytes) {
    kvf_messages_endpoint *endpoint = self;
    kvf_messages_card card;
    kvf_status status = kvf_messages_card_read(part, bytes, &card);
    if (!status)
        status = kvf_fences_add(&endpoint->fences, card.id);
    if (status)
        return status == KVF_E_UNSUPPORTED ? KVF_E_PARSE : status;
    kvf_messages_client *client, *next;
    HASH_ITER(hh, endpoint->clients, client, next)
    if (memcmp(client->id, card.id, sizeof card.id) == 0)
        refuse(endpoint, client, MESSAGES_REFUSED_FENCED, 0);
    kvf_wake_set(&endpoint->wake, true);
    return kvf_fences_seen(&endpoint->fences, card.id) ? KVF_OK : KVF_E_NOT_FOUND;
}

kvf_status kvf_messages_admit(void *self, const void *part, size_t bytes) {
    kvf_messages_endpoint *endpoint = self;
    kvf_messages_card card;
    kvf_status status = kvf_messages_card_read(part, bytes, &card);
    if (!status)
        kvf_fences_remove(&endpoint->fences, card.id);
    return status == KVF_E_UNSUPPORTED ? KVF_E_PARSE : status;
}

/* ---- greetings ------------------------------------------------------------------------------- */

/* Takes equally long for any secret, so that the time does not tell how much of it is right. */
static bool is_secret(const unsigned char *said, const unsigned char *ours) {
    volatile unsigned char difference = 0;
    for (size_t i = 0; i < MESSAGES_SECRET_BYTES; i++)
        difference = (unsigned char)(difference | (said[i] ^ ours[i]));
    return difference == 0;
}

/* Why a peer is not let in; 0: it is. */
static int check_hello(const kvf_messages_endpoint *endpoint, const kvf_messages_hello *hello,
                       uint32_t version, uint64_t *detail) {
    uint32_t region_count;
    (void)kvf_transport_regions(endpoint->transport, endpoint, &region_count);
    *detail = MESSAGES_VERSION;
    if (version != MESSAGES_VERSION)
        return MESSAGES_REFUSED_VERSION;
    *detail = kvf_transport_oldest(endpoint->transport);
    if (!is_secret(hello->secret, endpoint->card.secret))
        return MESSAGES_REFUSED_STRANGER;
    if (kvf_fences_has(&endpoint->fences, hello->id))
        return MESSAGES_REFUSED_FENCED;
    if (hello->generation < *detail)
        return MESSAGES_REFUSED_GENERATION;
    if (hello->region_count > region_count)
        return MESSAGES_REFUSED_PROTOCOL;
    return HASH_COUNT(endpoint->clients) >= MESSAGES_CLIENTS_MAX ? MESSAGES_REFUSED_FULL : 0;
}

/* False: there is no memory for it now. */
static bool let_in(kvf_messages_endpoint *endpoint, uint32_t number, const kvf_messages_hello *hello) {
    kvf_messages_client *client = kvf_alloc0(1, sizeof *client);
    if (!client)
        return false;
    client->number = number;
    client->since_ns = endpoint->now;
    client->own.turn_work = MESSAGES_TURN_WORK;
    client->generation = hello->generation;
    client->region_count = hello->region_count;
    memcpy(client->id, hello->id, sizeof hello->id);
    memcpy(client->name, hello->name, sizeof hello->name);
    HASH_ADD(hh, endpoint->clients, number, sizeof client->number, client);
    if (!client->hh.tbl) {
        kvf_free(client);
        return false;
    }
    kvf_fences_see(&endpoint->fences, client->id);
    return true;
}

/* False: try again later. */
static bool greet(kvf_messages_endpoint *endpoint, uint32_t number, const void *data, size_t bytes) {
    kvf_messages_hello hello;
    uint32_t version;
    uint64_t detail;
    if (!kvf_messages_hello_read(data, bytes, &hello, &version)) {
        kvf_messages_dismiss(endpoint, number);
        return true;
    }
    if (HASH_COUNT(endpoint->clients) >= kvf_max_u64(endpoint->sweep_at, CLIENTS_SWEPT))
        sweep(endpoint);
    int why = check_hello(endpoint, &hello, version, &detail);
    if (!why)
        return let_in(endpoint, number, &hello);
    send_refusal(endpoint, number, (kvf_messages_refusal)why, detail);
    kvf_messages_part(endpoint, number);
    return true;
}

/* ---- taking in ------------------------------------------------------------------------------- */

static void take_notice(kvf_messages_endpoint *endpoint, kvf_messages_client *client, const void *data,
                        size_t bytes) {
    if (bytes < 1 || bytes > KVF_NOTICE_MAX) {
        refuse(endpoint, client, MESSAGES_REFUSED_PROTOCOL, 0);
        return;
    }
    (void)kvf_deliver(endpoint->transport, client->name, data, bytes); /* there is room: see below */
    client->taken++;
    set_ready(endpoint, client);
}

static void take_request(kvf_messages_endpoint *endpoint, kvf_messages_client *client, zmq_msg_t *message) {
    if (client->count == MESSAGES_WINDOW_MAX) {
        refuse(endpoint, client, MESSAGES_REFUSED_PROTOCOL, 0);
        return;
    }
    if (client->is_gone)
        return;
    zmq_msg_t *place = &client->pending[(client->first + client->count++) % MESSAGES_WINDOW_MAX];
    (void)zmq_msg_init(place);
    (void)zmq_msg_move(place, message);
    set_ready(endpoint, client);
}

/* A HELLO for which there is no memory waits, and so do all messages after it. */
static void hear(kvf_messages_endpoint *endpoint, uint32_t number, zmq_msg_t *message) {
    if (greet(endpoint, number, zmq_msg_data(message), zmq_msg_size(message)))
        return;
    endpoint->greeting = true;
    endpoint->greeter = number;
    (void)zmq_msg_init(&endpoint->hello);
    (void)zmq_msg_move(&endpoint->hello, message);
}

static bool hear_again(kvf_messages_endpoint *endpoint) {
    zmq_msg_t *hello = &endpoint->hello;
    if (endpoint->greeting && !greet(endpoint, endpoint->greeter, zmq_msg_data(hello), zmq_msg_size(hello)))
        return false;
    if (endpoint->greeting)
        (void)zmq_msg_close(hello);
    endpoint->greeting = false;
    return true;
}

/* A peer that is not a client must send a HELLO, or we hang up. Messages of a refused peer are ignored until it goes:
 * if we hung up at once, it would not learn why. Only one that was a client may send long messages. */
static void take_strange(kvf_messages_endpoint *endpoint, uint32_t number, zmq_msg_t *message) {
    const unsigned char *data = zmq_msg_data(message);
    const size_t bytes = zmq_msg_size(message);
    if (kvf_messages_is_muted(endpoint, number))
        return;
    if (bytes > 0 && bytes <= MESSAGES_HELLO_BYTES_MAX && data[0] == MESSAGES_HELLO)
        hear(endpoint, number, message);
    else if (bytes > MESSAGES_STRANGE_BYTES && !kvf_messages_was_met(endpoint, number))
        kvf_messages_mute(endpoint, number);
    else if (bytes <= MESSAGES_STRANGE_BYTES && !kvf_messages_is_parting(endpoint, number))
        kvf_messages_dismiss(endpoint, number);
}

static void take_message(kvf_messages_endpoint *endpoint, uint32_t number, zmq_msg_t *message) {
    const unsigned char *data = zmq_msg_data(message);
    size_t bytes = zmq_msg_size(message);
    kvf_messages_client *client = find_client(endpoint, number);
    int kind = bytes > 0 ? data[0] : 0;
    kvf_messages_heard(endpoint, number, client != NULL, message);
    if (!client)
        take_strange(endpoint, number, message);
    else if (kind == MESSAGES_READ || kind == MESSAGES_WRITE)
        take_request(endpoint, client, message);
    else if (kind == MESSAGES_NOTICE)
        take_notice(endpoint, client, data + 1, bytes - 1);
    else if (kind == MESSAGES_BYE)
        forget_client(endpoint, client);
    else
        refuse(endpoint, client, MESSAGES_REFUSED_PROTOCOL, 0);
}

/* A message of several frames, which violates the protocol. */
static void take_foul(kvf_messages_endpoint *endpoint, uint32_t number, zmq_msg_t *first) {
    kvf_messages_client *client = find_client(endpoint, number);
    kvf_messages_heard(endpoint, number, client != NULL, first);
    if (client)
        refuse(endpoint, client, MESSAGES_REFUSED_PROTOCOL, 0);
    else
        kvf_messages_dismiss(endpoint, number);
}

/* One message; false: there is none. */
static bool receive_one(kvf_messages_endpoint *endpoint) {
    zmq_msg_t frames[3]; /* name; message; one too many */
    for (int i = 0; i < 3; i++)
        (void)zmq_msg_init(&frames[i]);
    const uint32_t count = kvf_zmq_receive(endpoint->router, frames, 3);
    const unsigned char *name = zmq_msg_data(&frames[0]);
    if (count > 1 && zmq_msg_size(&frames[0]) == NAME_BYTES && name[0] == 0) {
        uint32_t number;
        memcpy(&number, name + 1, sizeof number);
        (count == 2 ? take_message : take_foul)(endpoint, number, &frames[1]);
    }
    for (int i = 0; i < 3; i++)
        (void)zmq_msg_close(&frames[i]);
    return count > 0;
}

bool kvf_messages_is_client(const kvf_messages_endpoint *endpoint, uint32_t number) {
    return find_client(endpoint, number) != NULL;
}

bool kvf_messages_take(kvf_messages_endpoint *endpoint) {
    for (int i = 0; i < MESSAGES_A_TURN; i++) {
        /* The message may be a notification, which must not be lost for lack of memory. */
        if (!hear_again(endpoint) || kvf_deliver_room(endpoint->transport, KVF_NOTICE_ROOM_MAX))
            return true;
        if (!receive_one(endpoint))
            return false;
    }
    return true;
}

/* ---- serving --------------------------------------------------------------------------------- */

static void
copy_listed(kvf_messages_endpoint *endpoint, const kvf_messages_request *request, bool write,
            unsigned char *data) { /* NOLINT(readability-non-const-parameter): through the bases */
    unsigned char *const *ours = kvf_transport_bases(endpoint->transport);
    kvf_messages_walk walk = {.from = {request->list, request->list_bytes, false}};
    size_t count;
    while ((count = kvf_messages_walk_runs(&walk, endpoint->runs, MESSAGES_RUNS)) > 0) {
        if (write)
            kvf_kernel_copy_runs(KVF_COPY_TO_REMOTE, (kvf_copy_bases){ours, &data}, endpoint->runs, count,
                                 request->bytes);
        else
            kvf_kernel_pack_runs(KVF_COPY_TO_LOCAL, (kvf_copy_bases){&data, ours}, endpoint->runs, count);
    }
}

/* Answers with the error detail. Refuses a client with too many failed requests; false: it is refused, or is gone. */
static bool fail_request(kvf_messages_endpoint *endpoint, kvf_messages_client *client, uint32_t number) {
    if (client->failed++ == MESSAGES_FAILED_MAX) {
        refuse(endpoint, client, MESSAGES_REFUSED_PROTOCOL, 0);
        return false;
    }
    unsigned char out[MESSAGES_ANSWER_BYTES + MESSAGES_TEXT_BYTES];
    size_t length = strnlen(kvf_error_detail(), MESSAGES_TEXT_BYTES);
    kvf_messages_answer_write(MESSAGES_FAILED, number, out);
    memcpy(out + MESSAGES_ANSWER_BYTES, kvf_error_detail(), length);
    return answer_bytes(endpoint, client, out, MESSAGES_ANSWER_BYTES + length);
}

/* KVF_E_AGAIN: there is no slot now. */
static kvf_status send_data(kvf_messages_endpoint *endpoint, kvf_messages_client *client,
                            const kvf_messages_request *request) {
    const size_t begin = MESSAGES_REQUEST_BYTES - MESSAGES_ANSWER_BYTES; /* the data at a multiple of 16 */
    zmq_msg_t message;
    const bool new = is_new(endpoint, client);
    kvf_messages_slot *slot = new && endpoint->new_slots >= MESSAGES_NEW_SLOTS
                                  ? NULL
                                  : kvf_messages_pool_take(&endpoint->pool, client->slots);
    if (!slot)
        return KVF_E_AGAIN;
    kvf_messages_answer_write(MESSAGES_DATA, request->number, slot->memory + begin);
    copy_listed(endpoint, request, false, slot->memory + MESSAGES_REQUEST_BYTES);
    if (kvf_messages_pool_message(slot, begin, MESSAGES_ANSWER_BYTES + request->bytes, &message)) {
        kvf_messages_pool_give(slot);
        return KVF_E_AGAIN;
    }
    slot->served = true;
    slot->client = client->number;
    slot->is_new = new;
    endpoint->new_slots += new;
    client->slots_ns = client->slots++ == 0 ? endpoint->now : client->slots_ns;
    return answer(endpoint, client, &message) ? KVF_OK : KVF_E_PEER_LOST;
}

static kvf_status write_data(kvf_messages_endpoint *endpoint, kvf_messages_client *client,
                             const kvf_messages_request *request) {
    unsigned char done[MESSAGES_ANSWER_BYTES], *data;
    memcpy(&data, &request->data, sizeof data); /* it is read only */
    copy_listed(endpoint, request, true, data);
    kvf_messages_answer_write(MESSAGES_DONE, request->number, done);
    return answer_bytes(endpoint, client, done, sizeof done) ? KVF_OK : KVF_E_PEER_LOST;
}

/* Serves a client's first request. KVF_E_AGAIN: later; KVF_E_PEER_LOST: the client was forgotten. */
static kvf_status serve_first(kvf_messages_endpoint *endpoint, kvf_messages_client *client, uint64_t *work) {
    zmq_msg_t *message = &client->pending[client->first % MESSAGES_WINDOW_MAX];
    kvf_messages_request request;
    const unsigned char *data = zmq_msg_data(message);
    uint32_t region_count;
    const kvf_memory *regions = kvf_transport_regions(endpoint->transport, endpoint, &region_count);
    if (!kvf_messages_request_read(data, zmq_msg_size(message), &request)) {
        refuse(endpoint, client, MESSAGES_REFUSED_PROTOCOL, 0);
        return KVF_E_PEER_LOST;
    }
    kvf_status status = kvf_messages_list_check(request.list, request.list_bytes, request.bytes, regions,
                                                (uint32_t)kvf_min_u64(region_count, client->region_count));
    /* A write's data was received, and counts even if the write fails. */
    *work += zmq_msg_size(message) + (status || data[0] == MESSAGES_WRITE ? 0 : request.bytes);
    if (status)
        status = fail_request(endpoint, client, request.number) ? KVF_OK : KVF_E_PEER_LOST;
    else if (data[0] == MESSAGES_READ)
        status = send_data(endpoint, client, &request);
    else
        status = write_data(endpoint, client, &request);
    if (status)
        return status;
    (void)zmq_msg_close(message);
    client->first++;
    client->count--;
    return KVF_OK;
}

/* Answers one request. KVF_OK, KVF_E_AGAIN and KVF_E_PEER_LOST as above. */
static kvf_status serve_client(kvf_messages_endpoint *endpoint, kvf_messages_client *client, uint64_t *work) {
    if (client->taken > 0) {
        unsigned char taken[MESSAGES_ANSWER_BYTES];
        kvf_messages_answer_write(MESSAGES_TAKEN, client->taken, taken);
        client->taken = 0;
        if (!answer_bytes(endpoint, client, taken, sizeof taken))
            return KVF_E_PEER_LOST;
    }
    return client->count > 0 ? serve_first(endpoint, client, work) : KVF_OK;
}

/* Slots or memory may be available again. */
static void wake_starved(kvf_messages_endpoint *endpoint) {
    while (endpoint->starved) {
        kvf_messages_client *client = endpoint->starved;
        set_starved(endpoint, client, false);
        set_ready(endpoint, client);
    }
}

/* Clients wait, and all slots are on their way: hangs up on clients that read nothing for long, to get slots back. */
static void unstick(kvf_messages_endpoint *endpoint) {
    kvf_messages_client *client, *next;
    if (endpoint->now - endpoint->unstuck_ns < MESSAGES_STUCK_NS / 8)
        return;
    endpoint->unstuck_ns = endpoint->now;
    HASH_ITER(hh, endpoint->clients, client, next) {
        if (client->slots == 0 || endpoint->now - client->slots_ns < MESSAGES_STUCK_NS)
            continue;
        kvf_messages_dismiss(endpoint, client->number);
        forget_client(endpoint, client);
    }
}

/* Serves at most one request of the client whose turn it is; false: no client has something to do. */
static bool serve_next(kvf_messages_endpoint *endpoint, uint64_t *budget) {
    kvf_turn_party *party = NULL;
    kvf_messages_client *client = (kvf_messages_client *)kvf_turns_next(&endpoint->turns, &party);
    if (!client)
        return false;
    const bool shared = party == &endpoint->newcomers;
    uint64_t work = MESSAGES_REQUEST_WORK;
    const kvf_status status = serve_client(endpoint, client, &work);
    if (status == KVF_E_AGAIN) {
        set_starved(endpoint, client, true);
        return true;
    }
    if (shared || !status) /* else the party has gone with its client */
        kvf_turns_spend(party, work);
    if (!status && client->count > 0)
        set_ready(endpoint, client);
    *budget -= kvf_min_u64(*budget, work);
    return true;
}

bool kvf_messages_serve(kvf_messages_endpoint *endpoint, uint64_t *budget) {
    bool more = true;
    wake_starved(endpoint);
    while (more && *budget > 0) {
        more = serve_next(endpoint, budget);
        if (kvf_transport_hurried(endpoint->transport))
            break;
    }
    if (!endpoint->starved)
        return more;
    kvf_messages_pool_want(&endpoint->pool);
    if (endpoint->pool.taken == MESSAGES_SLOTS_MAX)
        unstick(endpoint);
    return more;
}

void kvf_messages_slots_back(kvf_messages_endpoint *endpoint) {
    kvf_messages_slot *slot = kvf_messages_pool_returned(&endpoint->pool), *next;
    for (; slot; slot = next) {
        next = slot->following;
        kvf_messages_client *client = slot->served ? find_client(endpoint, slot->client) : NULL;
        if (client && client->slots > 0) {
            client->slots--;
            client->slots_ns = endpoint->now;
        }
        endpoint->new_slots -= slot->served && slot->is_new;
        slot->served = slot->is_new = false;
        kvf_messages_pool_give(slot);
    }
}
