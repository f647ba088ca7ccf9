/*
 * What the owner's port receives, and what it answers: messages are read and sorted, and the requests of clients wait
 * for their turn to be served.
 */
#include "transport/messages/messages.h"

/* ---- taking in ------------------------------------------------------------------------------- */

static void take_notice(kvf_messages_endpoint *endpoint, kvf_messages_client *client, const void *data,
                        size_t bytes) {
    if (bytes < 1 || bytes > KVF_NOTICE_MAX) {
        kvf_messages_refuse(endpoint, client, MESSAGES_REFUSED_PROTOCOL, 0);
        return;
    }
    (void)kvf_deliver(endpoint->transport, client->name, data, bytes); /* there is room: see below */
    client->taken++;
    kvf_messages_set_ready(endpoint, client);
}

static void take_request(kvf_messages_endpoint *endpoint, kvf_messages_client *client, zmq_msg_t *message) {
    if (client->count == MESSAGES_WINDOW_MAX) {
        kvf_messages_refuse(endpoint, client, MESSAGES_REFUSED_PROTOCOL, 0);
        return;
    }
    if (client->is_gone)
        return;
    zmq_msg_t *place = &client->pending[(client->first + client->count++) % MESSAGES_WINDOW_MAX];
    (void)zmq_msg_init(place);
    (void)zmq_msg_move(place, message);
    kvf_messages_set_ready(endpoint, client);
}

/* A HELLO for which there is no memory waits, and so do all messages after it. */
static void hear(kvf_messages_endpoint *endpoint, uint32_t number, zmq_msg_t *message) {
    if (kvf_messages_greet(endpoint, number, message))
        return;
    endpoint->greeting = true;
    endpoint->greeter = number;
    (void)zmq_msg_init(&endpoint->hello);
    (void)zmq_msg_move(&endpoint->hello, message);
}

static bool hear_again(kvf_messages_endpoint *endpoint) {
    zmq_msg_t *hello = &endpoint->hello;
    if (endpoint->greeting && !kvf_messages_greet(endpoint, endpoint->greeter, hello))
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
    kvf_messages_client *client = kvf_messages_client_of(endpoint, number);
    int kind = bytes > 0 ? data[0] : 0;
    kvf_messages_heard(endpoint, number, client != NULL, message);
    if (!client)
        take_strange(endpoint, number, message);
    else if (kind == MESSAGES_READ || kind == MESSAGES_WRITE)
        take_request(endpoint, client, message);
    else if (kind == MESSAGES_NOTICE)
        take_notice(endpoint, client, data + 1, bytes - 1);
    else if (kind == MESSAGES_BYE)
        kvf_messages_forget_client(endpoint, client);
    else
        kvf_messages_refuse(endpoint, client, MESSAGES_REFUSED_PROTOCOL, 0);
}

/* A message of several frames, which violates the protocol. */
static void take_foul(kvf_messages_endpoint *endpoint, uint32_t number, zmq_msg_t *first) {
    kvf_messages_client *client = kvf_messages_client_of(endpoint, number);
    kvf_messages_heard(endpoint, number, client != NULL, first);
    if (client)
        kvf_messages_refuse(endpoint, client, MESSAGES_REFUSED_PROTOCOL, 0);
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
    if (count > 1 && zmq_msg_size(&frames[0]) == MESSAGES_NAME_BYTES && name[0] == 0) {
        uint32_t number;
        memcpy(&number, name + 1, sizeof number);
        (count == 2 ? take_message : take_foul)(endpoint, number, &frames[1]);
    }
    for (int i = 0; i < 3; i++)
        (void)zmq_msg_close(&frames[i]);
    return count > 0;
}

/* False: there are none. */
static bool take_some(kvf_messages_endpoint *endpoint, uint32_t *taken) {
    for (; *taken < MESSAGES_A_TURN; (*taken)++) {
        /* The message may be a notification, which must not be lost for lack of memory. */
        if (!hear_again(endpoint) || kvf_deliver_room(endpoint->transport, KVF_NOTICE_ROOM_MAX))
            return true;
        if (!receive_one(endpoint))
            return false;
    }
    return true;
}

bool kvf_messages_take(kvf_messages_endpoint *endpoint) {
    uint32_t taken = 0;
    const bool more = take_some(endpoint, &taken);
    kvf_guests_took(&endpoint->door.guests, taken, false);
    return more;
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
        kvf_messages_refuse(endpoint, client, MESSAGES_REFUSED_PROTOCOL, 0);
        return false;
    }
    unsigned char out[MESSAGES_ANSWER_BYTES + MESSAGES_TEXT_BYTES];
    size_t length = strnlen(kvf_error_detail(), MESSAGES_TEXT_BYTES);
    kvf_messages_answer_write(MESSAGES_FAILED, number, out);
    memcpy(out + MESSAGES_ANSWER_BYTES, kvf_error_detail(), length);
    return kvf_messages_answer_bytes(endpoint, client, out, MESSAGES_ANSWER_BYTES + length);
}

/* KVF_E_AGAIN: there is no slot now. */
static kvf_status send_data(kvf_messages_endpoint *endpoint, kvf_messages_client *client,
                            const kvf_messages_request *request) {
    const size_t begin = MESSAGES_REQUEST_BYTES - MESSAGES_ANSWER_BYTES; /* the data at a multiple of 16 */
    zmq_msg_t message;
    const bool new = kvf_messages_is_new(endpoint, client);
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
    return kvf_messages_answer(endpoint, client, &message) ? KVF_OK : KVF_E_PEER_LOST;
}

static kvf_status write_data(kvf_messages_endpoint *endpoint, kvf_messages_client *client,
                             const kvf_messages_request *request) {
    unsigned char done[MESSAGES_ANSWER_BYTES], *data;
    memcpy(&data, &request->data, sizeof data); /* it is read only */
    copy_listed(endpoint, request, true, data);
    kvf_messages_answer_write(MESSAGES_DONE, request->number, done);
    return kvf_messages_answer_bytes(endpoint, client, done, sizeof done) ? KVF_OK : KVF_E_PEER_LOST;
}

/* Serves a client's first request. KVF_E_AGAIN: later; KVF_E_PEER_LOST: the client was forgotten. */
static kvf_status serve_first(kvf_messages_endpoint *endpoint, kvf_messages_client *client, uint64_t *work) {
    zmq_msg_t *message = &client->pending[client->first % MESSAGES_WINDOW_MAX];
    kvf_messages_request request;
    const unsigned char *data = zmq_msg_data(message);
    uint32_t region_count;
    const kvf_memory *regions = kvf_transport_regions(endpoint->transport, endpoint, &region_count);
    if (!kvf_messages_request_read(data, zmq_msg_size(message), &request)) {
        kvf_messages_refuse(endpoint, client, MESSAGES_REFUSED_PROTOCOL, 0);
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
        if (!kvf_messages_answer_bytes(endpoint, client, taken, sizeof taken))
            return KVF_E_PEER_LOST;
    }
    return client->count > 0 ? serve_first(endpoint, client, work) : KVF_OK;
}

/* Slots or memory may be available again. */
static void wake_starved(kvf_messages_endpoint *endpoint) {
    while (endpoint->starved) {
        kvf_messages_client *client = endpoint->starved;
        kvf_messages_set_starved(endpoint, client, false);
        kvf_messages_set_ready(endpoint, client);
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
        kvf_messages_forget_client(endpoint, client);
    }
}

/* ---- whose turn it is ------------------------------------------------------------------------ */

/* Newcomers save up no more than one share. */
static void pay_newcomers(kvf_messages_endpoint *endpoint) {
    const uint64_t shares = (endpoint->now - endpoint->new_work_ns) / MESSAGES_NEWCOMERS_NS;
    const int64_t most = MESSAGES_NEWCOMERS_WORK;
    if (shares == 0)
        return;
    endpoint->new_work_ns += shares * MESSAGES_NEWCOMERS_NS;
    endpoint->new_work += (int64_t)kvf_min_u64(shares, MESSAGES_SHARES_MAX) * most;
    if (endpoint->new_work > most)
        endpoint->new_work = most;
}

static bool others_are_served(const kvf_messages_endpoint *endpoint) {
    return endpoint->now - endpoint->others_ns < MESSAGES_OTHERS_NS;
}

/* NULL: nobody has something to do now. */
static kvf_turn_seat *next_seat(kvf_messages_endpoint *endpoint, kvf_turn_party **party) {
    kvf_turn_seat *seat = NULL;
    if (endpoint->new_work > 0)
        seat = kvf_turns_next(&endpoint->new_turns, party);
    if (!seat)
        seat = kvf_turns_next(&endpoint->turns, party);
    if (!seat && !others_are_served(endpoint))
        seat = kvf_turns_next(&endpoint->new_turns, party);
    return seat;
}

static void spend(kvf_messages_endpoint *endpoint, kvf_turn_party *party, uint64_t work) {
    kvf_turns_spend(party, work);
    if (party != &endpoint->newcomers)
        endpoint->others_ns = endpoint->now;
    else if (others_are_served(endpoint))
        endpoint->new_work -= (int64_t)work;
}

/* Serves at most one request of the client whose turn it is; false: no client has something to do. */
static bool serve_next(kvf_messages_endpoint *endpoint, uint64_t *budget) {
    kvf_turn_party *party = NULL;
    kvf_messages_client *client = (kvf_messages_client *)next_seat(endpoint, &party);
    if (!client)
        return false;
    const bool shared = party == &endpoint->newcomers;
    uint64_t work = MESSAGES_REQUEST_WORK;
    const kvf_status status = serve_client(endpoint, client, &work);
    if (status == KVF_E_AGAIN) {
        kvf_messages_set_starved(endpoint, client, true);
        return true;
    }
    if (shared || !status) /* else the party has gone with its client */
        spend(endpoint, party, work);
    if (!status && client->count > 0)
        kvf_messages_set_ready(endpoint, client);
    *budget -= kvf_min_u64(*budget, work);
    return true;
}

bool kvf_messages_serve(kvf_messages_endpoint *endpoint, uint64_t *budget) {
    bool more = true;
    wake_starved(endpoint);
    pay_newcomers(endpoint);
    while (more && *budget > 0) {
        more = serve_next(endpoint, budget);
        if (kvf_transport_hurried(endpoint->transport))
            break;
    }
    if (endpoint->newcomers.first && !more) /* they are served later */
        kvf_timer_by(&endpoint->timer, endpoint->new_work_ns + MESSAGES_NEWCOMERS_NS);
    if (!endpoint->starved)
        return more;
    kvf_messages_await_slot(endpoint);
    if (endpoint->pool.taken == MESSAGES_SLOTS_MAX)
        unstick(endpoint);
    return more;
}

void kvf_messages_slots_back(kvf_messages_endpoint *endpoint) {
    kvf_messages_slot *slot = kvf_messages_pool_returned(&endpoint->pool), *next;
    for (; slot; slot = next) {
        next = slot->following;
        kvf_messages_client *client = slot->served ? kvf_messages_client_of(endpoint, slot->client) : NULL;
        if (client && client->slots > 0) {
            client->slots--;
            client->slots_ns = endpoint->now;
        }
        endpoint->new_slots -= slot->served && slot->is_new;
        slot->served = slot->is_new = false;
        kvf_messages_pool_give(slot);
    }
}
