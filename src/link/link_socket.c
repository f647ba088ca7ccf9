/* ZeroMQ sockets with a link's options, keys, and sending one message. */
#include <errno.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "link/link_inside.h"

/* Unread messages of one connection. A peer can make us keep this many times KVF_WIRE_MAX_BYTES. With a quarter as
 * many, a peer with a hundred requests under way is stopped and woken so often that a third fewer get through. */
#define RECEIVE_LIMIT 64
#define HANDSHAKE_MS 15000 /* a connection that is not shaken hands over by then is dropped */
#define RECONNECT_MS 20
#define RECONNECT_MAX_MS 500
#define BACKLOG 4096

/* TCP notices after 30 + 3 * 10 s that a host has vanished; a process that is only stopped stays connected. */
#define KEEPALIVE_IDLE_S 30
#define KEEPALIVE_INTERVAL_S 10
#define KEEPALIVE_COUNT 3
/* As long as keepalive takes; this option also limits keepalive. */
#define UNACKNOWLEDGED_MS 60000

/* ---- keys ------------------------------------------------------------------------------------ */

kvf_status kvf_link_read_key(const char *name, const char *text, uint8_t key[KVF_KEY_BYTES]) {
    size_t length = strnlen(text, KVF_KEY_CHARACTERS + 1);
    if (length != KVF_KEY_CHARACTERS)
        return kvf_fail(KVF_E_INVALID, "%s has %s%zu characters; a Z85 key has %u", name,
                        length > KVF_KEY_CHARACTERS ? "more than " : "",
                        length > KVF_KEY_CHARACTERS ? (size_t)KVF_KEY_CHARACTERS : length,
                        KVF_KEY_CHARACTERS);
    if (!zmq_z85_decode(key, text))
        return kvf_fail(KVF_E_INVALID, "%s is not Z85", name);
    return KVF_OK;
}

void kvf_link_write_key(const uint8_t key[KVF_KEY_BYTES], char text[KVF_KEY_CHARACTERS + 1]) {
    (void)zmq_z85_encode(text, key, KVF_KEY_BYTES);
}

kvf_status kvf_link_check_keys(const kvf_link_options *options) {
    uint8_t bytes[KVF_KEY_BYTES];
    char derived[KVF_KEY_CHARACTERS + 1];
    if (!options->public_key != !options->secret_key)
        return kvf_fail(KVF_E_INVALID, "%s without %s; give both or none",
                        options->public_key ? "public_key" : "secret_key",
                        options->public_key ? "secret_key" : "public_key");
    if (options->allowed_key_count > 0 && !options->allowed_keys)
        return kvf_fail(KVF_E_INVALID, "allowed_keys is NULL, allowed_key_count %u",
                        options->allowed_key_count);
    if (!options->public_key)
        return options->allowed_key_count == 0
                   ? KVF_OK
                   : kvf_fail(KVF_E_INVALID, "allowed_keys need public_key and secret_key");
    if (!zmq_has("curve"))
        return kvf_fail(KVF_E_UNSUPPORTED, "the ZeroMQ of this machine is built without CURVE: no keys");
    kvf_status status = kvf_link_read_key("public_key", options->public_key, bytes);
    if (!status)
        status = kvf_link_read_key("secret_key", options->secret_key, bytes);
    if (status)
        return status;
    if (zmq_curve_public(derived, options->secret_key))
        return kvf_zmq_fail("secret_key");
    if (strcmp(derived, options->public_key) != 0)
        return kvf_fail(KVF_E_INVALID, "public_key does not belong to secret_key");
    return KVF_OK;
}

kvf_status kvf_link_make_keys(char public_key[KVF_KEY_CHARACTERS + 1],
                              char secret_key[KVF_KEY_CHARACTERS + 1]) {
    if (zmq_curve_keypair(public_key, secret_key) == 0)
        return KVF_OK;
    if (zmq_errno() == ENOTSUP)
        return kvf_fail(KVF_E_UNSUPPORTED, "the ZeroMQ of this machine is built without CURVE: no keys");
    return kvf_zmq_fail("making keys");
}

/* ---- sockets --------------------------------------------------------------------------------- */

void kvf_link_linger(void *socket, int ms) {
    if (socket)
        (void)zmq_setsockopt(socket, ZMQ_LINGER, &ms, sizeof ms);
}

kvf_status kvf_link_make_router(kvf_zmq_link *link, const kvf_link_options *options, int send_limit,
                                void **out) {
    const struct {
        int option, value;
    } numbers[] = {
        {ZMQ_LINGER, 0},
        {ZMQ_ROUTER_MANDATORY, 1}, /* sending then fails for routes that have ended */
        {ZMQ_RCVHWM, RECEIVE_LIMIT},
        {ZMQ_SNDHWM, send_limit},
        {ZMQ_BACKLOG, BACKLOG},
        {ZMQ_HANDSHAKE_IVL, HANDSHAKE_MS},
        {ZMQ_CONNECT_TIMEOUT, KVF_CONNECT_MS},
        {ZMQ_RECONNECT_IVL, RECONNECT_MS},
        {ZMQ_RECONNECT_IVL_MAX, RECONNECT_MAX_MS},
        {ZMQ_TCP_KEEPALIVE, 1},
        {ZMQ_TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S},
        {ZMQ_TCP_KEEPALIVE_INTVL, KEEPALIVE_INTERVAL_S},
        {ZMQ_TCP_KEEPALIVE_CNT, KEEPALIVE_COUNT},
        {ZMQ_TCP_MAXRT, UNACKNOWLEDGED_MS},
    };
    const int64_t longest = KVF_LINK_LONGEST;
    void *router = zmq_socket(link->zmq, ZMQ_ROUTER);
    if (!router)
        return kvf_zmq_fail("zmq_socket");
    bool good =
        kvf_zmq_refuse_old(router) && zmq_setsockopt(router, ZMQ_MAXMSGSIZE, &longest, sizeof longest) == 0;
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        good = good &&
               zmq_setsockopt(router, numbers[i].option, &numbers[i].value, sizeof numbers[i].value) == 0;
    if (good && options->public_key)
        good =
            zmq_setsockopt(router, ZMQ_CURVE_PUBLICKEY, options->public_key, KVF_KEY_CHARACTERS + 1) == 0 &&
            zmq_setsockopt(router, ZMQ_CURVE_SECRETKEY, options->secret_key, KVF_KEY_CHARACTERS + 1) == 0;
    if (!good) {
        kvf_status status = kvf_zmq_fail("zmq_setsockopt");
        (void)zmq_close(router);
        return status;
    }
    *out = router;
    return KVF_OK;
}

/* Before it binds, ZeroMQ removes any file at the path. Allows that only for a socket on which no process listens any
 * more. */
static kvf_status check_path(const char *path) {
    struct stat found;
    if (path[0] == '@' || lstat(path, &found) != 0)
        return KVF_OK;
    if (!S_ISSOCK(found.st_mode))
        return kvf_fail(KVF_E_EXISTS, "ipc://%s exists and is not a socket", path);
    int probe = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (probe < 0)
        return kvf_fail(KVF_E_IO, "socket: %s", zmq_strerror(errno));
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path, path, strlen(path) + 1); /* it fits: see read_ipc() in link_endpoint.c */
    /* Others than these two mean that it is served: by a process that does not accept, for another user, otherwise. */
    bool is_left = connect(probe, (const struct sockaddr *)&address, sizeof address) != 0 &&
                   (errno == ECONNREFUSED || errno == ENOENT);
    (void)close(probe);
    return !is_left ? kvf_fail(KVF_E_EXISTS, "ipc://%s is in use", path) : KVF_OK;
}

kvf_status kvf_link_bind(kvf_zmq_link *link, const kvf_endpoint *endpoint) {
    int ipv6 = endpoint->ipv6;
    size_t bytes = sizeof link->endpoint;
    if (endpoint->port_at == 0) {
        kvf_status status = check_path(endpoint->text + strlen("ipc://"));
        if (status)
            return status;
    }
    if (zmq_setsockopt(link->listener, ZMQ_IPV6, &ipv6, sizeof ipv6))
        return kvf_zmq_fail("ZMQ_IPV6");
    if (kvf_zmq_bind(link->listener, endpoint->text)) {
        int error = zmq_errno();
        return kvf_fail(kvf_status_of_listening(error), "cannot listen on %s: %s", endpoint->text,
                        zmq_strerror(error));
    }
    if (zmq_getsockopt(link->listener, ZMQ_LAST_ENDPOINT, link->endpoint, &bytes))
        return kvf_zmq_fail("ZMQ_LAST_ENDPOINT");
    return KVF_OK;
}

/* ---- messages -------------------------------------------------------------------------------- */

int kvf_link_transmit(const kvf_address *to, const void *data, size_t bytes) {
    /* After the first frame was accepted, the second cannot be refused, but its memory may be missing: so it is made
     * first. */
    zmq_msg_t payload;
    int error = kvf_post_write(to->post, to->route, data, bytes, &payload);
    if (error)
        return error;
    error = kvf_zmq_send(to->socket, to->id, to->id_bytes, ZMQ_SNDMORE);
    if (!error)
        return kvf_zmq_send_last(to->socket, &payload);
    (void)zmq_msg_close(&payload);
    return error;
}
