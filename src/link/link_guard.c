/*
 * The allow-list. For each connection that has proved to hold a key, ZeroMQ asks whether to accept it, by a request of
 * the ZeroMQ Authentication Protocol (RFC 27) on an address inside our context:
 *
 *   asked     version | request id | domain | address | routing id | mechanism | public key
 *   answered  version | request id | status | its text | user | metadata
 *
 * The user is the key as text. ZeroMQ attaches it to every message of the connection, so that we know the sender's key
 * and can check whether it is still on the list. Without a list we accept every connection, but ZeroMQ still asks.
 */
#include "link/link_inside.h"

#define ASKED_FRAMES 7u
#define ANSWER_FRAMES 6u

/* The index of a key in the list; `allowed_count` if it is not there. */
static uint32_t place_of(const kvf_zmq_link *link, const void *key) {
    uint32_t place = 0;
    while (place < link->allowed_count && memcmp(key, link->allowed[place], KVF_KEY_BYTES) != 0)
        place++;
    return place;
}

/* Adds a key, for which there is room. A key that is given again is there once: it can be withdrawn. */
static kvf_status take_key(kvf_zmq_link *link, const char *public_key) {
    uint8_t *key = link->allowed[link->allowed_count];
    kvf_status status =
        public_key ? kvf_link_read_key("key", public_key, key) : kvf_fail(KVF_E_INVALID, "it is NULL");
    if (!status && place_of(link, key) == link->allowed_count)
        link->allowed_count++;
    return status;
}

kvf_status kvf_guard_open(kvf_zmq_link *link, const kvf_link_options *options) {
    const int linger = 0;
    if (!options->public_key)
        return KVF_OK;
    link->open_to_all = options->allowed_key_count == 0;
    link->allowed = kvf_alloc(options->allowed_key_count, sizeof *link->allowed);
    if (!link->allowed)
        return kvf_nomem("allowed_keys");
    for (uint32_t i = 0; i < options->allowed_key_count; i++) {
        kvf_status status = take_key(link, options->allowed_keys[i]);
        if (status)
            return kvf_fail_in(status, "allowed_keys[%u]: ", i);
    }
    link->guard = zmq_socket(link->zmq, ZMQ_REP);
    if (!link->guard || zmq_setsockopt(link->guard, ZMQ_LINGER, &linger, sizeof linger) ||
        kvf_zmq_bind(link->guard, "inproc://zeromq.zap.01"))
        return kvf_zmq_fail("opening the allow-list");
    return KVF_OK;
}

static bool holds(const zmq_msg_t *frame, const char *text) {
    return zmq_msg_size(frame) == strlen(text) &&
           memcmp(zmq_msg_data((zmq_msg_t *)frame), text, strlen(text)) == 0;
}

static bool is_allowed(const kvf_zmq_link *link, const zmq_msg_t *frames, uint32_t count) {
    const zmq_msg_t *key = &frames[6];
    if (count != ASKED_FRAMES || !holds(&frames[0], "1.0") || !holds(&frames[5], "CURVE") ||
        zmq_msg_size(key) != KVF_KEY_BYTES)
        return false;
    return link->open_to_all || place_of(link, zmq_msg_data((zmq_msg_t *)key)) < link->allowed_count;
}

bool kvf_guard_passes(const kvf_zmq_link *link, zmq_msg_t *message, uint8_t key[KVF_KEY_BYTES]) {
    const char *user = zmq_msg_gets(message, "User-Id");
    if (!user || !zmq_z85_decode(key, user))
        return false;
    return kvf_guard_knows(link, key);
}

bool kvf_guard_knows(const kvf_zmq_link *link, const uint8_t key[KVF_KEY_BYTES]) {
    return !link->withdrawn || place_of(link, key) < link->allowed_count;
}

kvf_status kvf_guard_allow(kvf_zmq_link *link, const char *public_key, bool allowed) {
    uint8_t key[KVF_KEY_BYTES];
    kvf_status status = kvf_link_read_key("public_key", public_key, key);
    if (status)
        return status;
    if (!link->guard || link->open_to_all)
        return kvf_fail(KVF_E_INVALID,
                        "no allowed_keys were given: everyone who knows this link's public key may connect");
    uint32_t place = place_of(link, key);
    if (!allowed) {
        if (place == link->allowed_count)
            return kvf_fail(KVF_E_NOT_FOUND, "public_key %s is not among the %u that are allowed", public_key,
                            link->allowed_count);
        memcpy(link->allowed[place], link->allowed[--link->allowed_count], KVF_KEY_BYTES);
        link->withdrawn = true;
        return KVF_OK;
    }
    if (place < link->allowed_count)
        return KVF_OK;
    void *grown = kvf_resize(link->allowed, (size_t)link->allowed_count + 1, sizeof *link->allowed);
    if (!grown)
        return kvf_nomem("allowed_keys");
    link->allowed = grown;
    memcpy(link->allowed[link->allowed_count++], key, KVF_KEY_BYTES);
    return KVF_OK;
}

/* Answers a request. `key` is the connection's; NULL refuses the connection. */
static void answer(const kvf_zmq_link *link, const zmq_msg_t *request_id, const zmq_msg_t *key) {
    char user[KVF_KEY_CHARACTERS + 1] = "";
    bool allowed = key != NULL;
    if (key)
        (void)zmq_z85_encode(user, zmq_msg_data((zmq_msg_t *)key), KVF_KEY_BYTES);
    const struct {
        const void *data;
        size_t bytes;
    } frames[ANSWER_FRAMES] = {
        {"1.0", 3},
        {zmq_msg_data((zmq_msg_t *)request_id), zmq_msg_size(request_id)},
        {allowed ? "200" : "400", 3},
        {allowed ? "OK" : "not in the allow-list", allowed ? 2 : strlen("not in the allow-list")},
        {user, strlen(user)},
        {"", 0},
    };
    for (uint32_t i = 0; i < ANSWER_FRAMES; i++) {
        /* If there is no memory for an answer, the handshake times out and the connection is not accepted. */
        if (kvf_zmq_send(link->guard, frames[i].data, frames[i].bytes,
                         i + 1 < ANSWER_FRAMES ? ZMQ_SNDMORE : 0))
            return;
    }
}

void kvf_guard_answer(kvf_zmq_link *link) {
    for (uint32_t i = 0; i < KVF_LINK_BATCH && kvf_link_is_unread(link, link->guard); i++) {
        zmq_msg_t frames[ASKED_FRAMES];
        for (uint32_t f = 0; f < ASKED_FRAMES; f++)
            (void)zmq_msg_init(&frames[f]);
        uint32_t count = kvf_zmq_receive(link->guard, frames, ASKED_FRAMES);
        if (count > 0)
            answer(link, &frames[1], is_allowed(link, frames, count) ? &frames[6] : NULL);
        for (uint32_t f = 0; f < ASKED_FRAMES; f++)
            (void)zmq_msg_close(&frames[f]);
        kvf_link_note(link, link->guard, count > 0);
    }
}
