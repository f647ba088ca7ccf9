/*
 * The owner's clients: peers that have sent the secret. They are let in, told why they are refused, shut out, and
 * forgotten. ZeroMQ gives each connection a number. If a peer sends anything else before the secret, we hang up
 * (messages_port.c). A client that is refused is told why and forgotten; we hang up once it has had time to read that.
 *
 * Clients send a BYE. A client that could not is found when a message to it fails: the end of its connection is no
 * reason to drop it, for earlier messages of it may still be unread.
 */
#include <errno.h>

#include "transport/messages/messages.h"

#define CLIENTS_SWEPT 64u

/* ---- sending --------------------------------------------------------------------------------- */

/* 0, or errno: EHOSTUNREACH, it is gone; EAGAIN, it does not read. Always takes the message over. */
static int send_to(kvf_messages_endpoint *endpoint, uint32_t number, zmq_msg_t *message) {
    unsigned char name[MESSAGES_NAME_BYTES] = {0};
    memcpy(name + 1, &number, sizeof number);
    endpoint->router_stirs = true; /* sending can swallow the signal on the descriptor */
    const int error = kvf_zmq_send(endpoint->router, name, sizeof name, ZMQ_SNDMORE);
    if (!error)
        return kvf_zmq_send_last(endpoint->router, message);
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

kvf_messages_client *kvf_messages_client_of(const kvf_messages_endpoint *endpoint, uint32_t number) {
    kvf_messages_client *client;
    HASH_FIND(hh, endpoint->clients, &number, sizeof number, client);
    return client;
}

bool kvf_messages_is_new(const kvf_messages_endpoint *endpoint, const kvf_messages_client *client) {
    return endpoint->now - client->since_ns < MESSAGES_NEW_NS;
}

/* All new clients share one party. */
void kvf_messages_set_ready(kvf_messages_endpoint *endpoint, kvf_messages_client *client) {
    const bool new = kvf_messages_is_new(endpoint, client);
    if (!client->is_starved)
        kvf_turns_wait(new ? &endpoint->new_turns : &endpoint->turns,
                       new ? &endpoint->newcomers : &client->own, &client->seat);
}

static void drop_requests(kvf_messages_client *client) {
    for (; client->count > 0; client->count--)
        (void)zmq_msg_close(&client->pending[client->first++ % MESSAGES_WINDOW_MAX]);
}

void kvf_messages_set_starved(kvf_messages_endpoint *endpoint, kvf_messages_client *client, bool starved) {
    if (client->is_starved == starved)
        return;
    client->is_starved = starved;
    if (starved)
        KVF_QUEUE_ADD(endpoint->starved, endpoint->last_starved, client);
    else
        KVF_QUEUE_REMOVE(endpoint->starved, endpoint->last_starved, client);
}

void kvf_messages_forget_client(kvf_messages_endpoint *endpoint, kvf_messages_client *client) {
    kvf_messages_set_starved(endpoint, client, false);
    kvf_turns_stop_waiting(&client->seat);
    kvf_turns_leave(&endpoint->turns, &client->own);
    drop_requests(client);
    /* The analyser does not know that a client is in its table. */
    /* NOLINTNEXTLINE(clang-analyzer-core.NullDereference) */
    HASH_DELETE(hh, endpoint->clients, client);
    kvf_free(client);
}

void kvf_messages_left(kvf_messages_endpoint *endpoint, uint32_t number) {
    kvf_messages_client *client = kvf_messages_client_of(endpoint, number);
    if (!client)
        return;
    client->is_gone = true;
    drop_requests(client);
}

void kvf_messages_refuse(kvf_messages_endpoint *endpoint, kvf_messages_client *client,
                         kvf_messages_refusal why, uint64_t detail) {
    send_refusal(endpoint, client->number, why, detail);
    kvf_messages_part(endpoint, client->number);
    kvf_messages_forget_client(endpoint, client);
}

bool kvf_messages_answer(kvf_messages_endpoint *endpoint, kvf_messages_client *client, zmq_msg_t *message) {
    if (send_to(endpoint, client->number, message) == 0)
        return true;
    kvf_messages_forget_client(endpoint, client);
    return false;
}

bool kvf_messages_answer_bytes(kvf_messages_endpoint *endpoint, kvf_messages_client *client, const void *data,
                               size_t bytes) {
    if (send_bytes(endpoint, client->number, data, bytes) == 0)
        return true;
    kvf_messages_forget_client(endpoint, client);
    return false;
}

/* Tells a client that it is one, or forgets it if it is gone. */
static void say_alive(kvf_messages_endpoint *endpoint, kvf_messages_client *client) {
    unsigned char alive[MESSAGES_ANSWER_BYTES];
    kvf_messages_answer_write(MESSAGES_ALIVE, 0, alive);
    (void)kvf_messages_answer_bytes(endpoint, client, alive, sizeof alive);
}

/* Forgets the clients that are gone. */
static void sweep(kvf_messages_endpoint *endpoint) {
    kvf_messages_client *client, *next;
    HASH_ITER(hh, endpoint->clients, client, next)
    say_alive(endpoint, client);
    endpoint->sweep_at = 2 * HASH_COUNT(endpoint->clients) + CLIENTS_SWEPT;
}

void kvf_messages_refuse_old(kvf_messages_endpoint *endpoint, uint64_t oldest) {
    kvf_messages_client *client, *next;
    HASH_ITER(hh, endpoint->clients, client, next)
    if (client->generation < oldest)
        kvf_messages_refuse(endpoint, client, MESSAGES_REFUSED_GENERATION, oldest);
}

void kvf_messages_close_clients(kvf_messages_endpoint *endpoint) {
    kvf_messages_client *client, *next;
    HASH_ITER(hh, endpoint->clients, client, next)
    kvf_messages_refuse(endpoint, client, MESSAGES_REFUSED_CLOSED, 0);
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
        kvf_messages_refuse(endpoint, client, MESSAGES_REFUSED_FENCED, 0);
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
    say_alive(endpoint, client);
    return true;
}

bool kvf_messages_greet(kvf_messages_endpoint *endpoint, uint32_t number, zmq_msg_t *message) {
    const void *data = zmq_msg_data(message);
    const size_t bytes = zmq_msg_size(message);
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
    if (!why) {
        if (!let_in(endpoint, number, &hello))
            return false;
        kvf_door_widen(&endpoint->door, message);
        return true;
    }
    send_refusal(endpoint, number, (kvf_messages_refusal)why, detail);
    kvf_messages_part(endpoint, number);
    return true;
}
