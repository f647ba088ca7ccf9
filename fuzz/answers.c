/*
 * An owner of memory that does not keep to the protocol of the fabric by messages. We have connected to it, and two
 * reads, a write and a notification are under way. The input is what it says, message by message:
 *
 *   kind 1 | number 1 | length 2 (little endian) | bytes
 *
 * Below 128, kind and number are those of an answer, and the bytes what follows them; otherwise the bytes are all of
 * the message. Requests have the numbers 1 to 3.
 */
#include "fuzz.h"

#include <poll.h>

#include "transport/messages/messages.h"

#define REGION_BYTES 256u
#define UNTOUCHED 0x5a
#define MESSAGES_MOST 64
#define WAIT_MS 200 /* for what was sent; nothing comes once the connection has ended */
#define OPERATIONS 3u

static const kvf_run first = {.local_offset = 10, .bytes = 40}, second = {.local_offset = 100, .bytes = 7},
                     written = {.local_offset = 200, .bytes = 8};

static kvf_transport *transport;
static unsigned char region[REGION_BYTES];
static void *owner; /* a raw ZMQ_ROUTER */
static kvf_messages_card part;
static uint32_t told[OPERATIONS];
static bool lost;

static void on_done(void *context, kvf_operation operation, kvf_status status, const char *detail) {
    (void)operation;
    FUZZ_MUST(status == KVF_OK || detail[0] != '\0');
    ++*(uint32_t *)context;
}

static void on_peer_lost(void *context, kvf_transport *of, kvf_peer *peer, const char *detail) {
    (void)context;
    (void)of;
    (void)peer;
    FUZZ_MUST(detail[0] != '\0');
    lost = true;
}

/* ---- once ------------------------------------------------------------------------------------ */

/* The owner's host and network, taken from our own card. */
static void take_own_part(void) {
    const void *data;
    size_t bytes;
    kvf_card card;
    FUZZ_MUST(kvf_transport_export(transport, &data, &bytes) == KVF_OK);
    FUZZ_MUST(kvf_card_read(data, bytes, &card) == KVF_OK);
    for (uint32_t i = 0; i < card.part_count; i++)
        if (strcmp(card.parts[i].kind, "messages") == 0)
            FUZZ_MUST(kvf_messages_card_read(card.parts[i].data, card.parts[i].bytes, &part) == KVF_OK);
    kvf_card_free(&card);
}

static void open_once(void) {
    if (transport)
        return;
    const kvf_setting setting = {"messages.listen", "tcp://127.0.0.1:*"};
    const kvf_transport_options options = {.struct_size = sizeof options,
                                           .settings = &setting,
                                           .setting_count = 1,
                                           .on_peer_lost = on_peer_lost};
    const kvf_memory memory = {.struct_size = sizeof memory, .address = region, .bytes = REGION_BYTES};
    char bound[MESSAGES_ADDRESS_BYTES];
    size_t length = sizeof bound;
    FUZZ_MUST(kvf_transport_open("messages", &options, &transport) == KVF_OK);
    FUZZ_MUST(kvf_transport_register(transport, &memory, 1) == KVF_OK);
    take_own_part();
    owner = zmq_socket(zmq_ctx_new(), ZMQ_ROUTER);
    FUZZ_MUST(owner && zmq_bind(owner, "tcp://127.0.0.1:*") == 0);
    FUZZ_MUST(zmq_getsockopt(owner, ZMQ_LAST_ENDPOINT, bound, &length) == 0);
    part.port = (uint16_t)strtoul(strrchr(bound, ':') + 1, NULL, 10);
}

/* ---- the two sides --------------------------------------------------------------------------- */

static void progress(void) {
    bool busy = true;
    for (int i = 0; i < 16 && busy; i++)
        FUZZ_MUST(kvf_transport_progress(transport, &busy) == KVF_OK);
}

static kvf_peer *connect_to_owner(void) {
    static uint64_t sizes[] = {REGION_BYTES};
    kvf_buffer data = {0}, bytes = {0};
    kvf_peer *peer = NULL;
    FUZZ_MUST(kvf_messages_card_write(&part, &data) == KVF_OK);
    kvf_card card = {.name = "fuzz", .region_bytes = sizes, .region_count = 1, .part_count = 1};
    card.parts = &(kvf_card_part){"messages", data.data, data.length};
    FUZZ_MUST(kvf_card_write(&card, &bytes) == KVF_OK);
    FUZZ_MUST(kvf_transport_connect(transport, bytes.data, bytes.length, &peer) == KVF_OK);
    kvf_buffer_free(&bytes);
    kvf_buffer_free(&data);
    return peer;
}

/* Reads up to the HELLO of the new connection, past what earlier ones have left; receives ZeroMQ's name for it. False:
 * none came. */
static bool hear_hello(unsigned char name[MESSAGES_NAME_BYTES]) {
    unsigned char heard[MESSAGES_HELLO_BYTES_MAX];
    for (int i = 0; i < 1000; i++) {
        zmq_pollitem_t item = {.socket = owner, .events = ZMQ_POLLIN};
        progress();
        if (zmq_poll(&item, 1, 10) <= 0)
            continue;
        FUZZ_MUST(zmq_recv(owner, name, MESSAGES_NAME_BYTES, 0) == MESSAGES_NAME_BYTES);
        if (zmq_recv(owner, heard, sizeof heard, 0) > 0 && heard[0] == MESSAGES_HELLO)
            return true;
    }
    return false;
}

static void submit(kvf_peer *peer) {
    kvf_operation operation;
    FUZZ_MUST(kvf_transport_submit(peer, KVF_READ, &first, 1, on_done, &told[0], &operation) == KVF_OK);
    FUZZ_MUST(kvf_transport_submit(peer, KVF_READ, &second, 1, on_done, &told[1], &operation) == KVF_OK);
    FUZZ_MUST(kvf_transport_submit(peer, KVF_WRITE, &written, 1, on_done, &told[2], &operation) == KVF_OK);
    FUZZ_MUST(kvf_transport_notify(peer, "it", 2) == KVF_OK);
    progress();
}

/* Says one message, and waits until it is heard. Returns the bytes of the input that it took. */
static size_t say(const unsigned char name[MESSAGES_NAME_BYTES], const uint8_t *data, size_t size) {
    const size_t length = data[2] | (size_t)data[3] << 8, bytes = length < size - 4 ? length : size - 4;
    unsigned char head[MESSAGES_ANSWER_BYTES];
    const size_t before = data[0] < 128 ? sizeof head : 0;
    zmq_msg_t message;
    kvf_messages_answer_write((kvf_messages_kind)data[0], data[1], head);
    FUZZ_MUST(zmq_msg_init_size(&message, before + bytes) == 0);
    memcpy(zmq_msg_data(&message), head, before);
    memcpy((unsigned char *)zmq_msg_data(&message) + before, data + 4, bytes);
    FUZZ_MUST(zmq_send(owner, name, MESSAGES_NAME_BYTES, ZMQ_SNDMORE) == MESSAGES_NAME_BYTES);
    FUZZ_MUST(zmq_msg_send(&message, owner, 0) == (int)(before + bytes));
    struct pollfd here = {kvf_transport_event_fd(transport), POLLIN, 0};
    (void)poll(&here, 1, WAIT_MS);
    progress();
    return 4 + bytes;
}

static bool is_in(const kvf_run *run, uint32_t at) {
    return at >= run->local_offset && at - run->local_offset < run->bytes;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    unsigned char name[MESSAGES_NAME_BYTES];
    open_once();
    memset(region, UNTOUCHED, sizeof region);
    memset(told, 0, sizeof told);
    lost = false;
    kvf_peer *peer = connect_to_owner();
    FUZZ_MUST(hear_hello(name));
    submit(peer);
    for (int i = 0; i < MESSAGES_MOST && size >= 4 && !lost; i++) {
        const size_t taken = say(name, data, size);
        data += taken;
        size -= taken;
    }
    kvf_peer_close(peer);
    progress();
    for (uint32_t i = 0; i < OPERATIONS; i++)
        FUZZ_MUST(told[i] == 1); /* once, whatever happened */
    for (uint32_t at = 0; at < REGION_BYTES; at++)
        FUZZ_MUST(region[at] == UNTOUCHED || is_in(&first, at) || is_in(&second, at));
    return 0;
}
