/*
 * The same-host transport and a process that does not keep to its protocol. The first byte is the role of that process:
 * even, a consumer that has shown the key; odd, the owner of memory that we have connected to and read from. The rest
 * of the input is what it sends, packet by packet:
 *
 *   length 2 (little endian) | with 1 | bytes
 *
 * `with` says what comes with the packet: 0 to 3 nothing, otherwise a descriptor of that many pages of shared memory,
 * sealed if the number is even.
 */
#include "notices.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "transport/card.h"
#include "transport/shm/shm_wire.h"

#define PAGE 4096u
#define REGION_BYTES 5000u
#define PEER_REGION_BYTES 4096u
#define PACKETS_MAX 64
#define CONNECT_TRIES 10000 /* a millisecond each */

static kvf_transport *transport;

static void on_done(void *context, kvf_operation operation, kvf_status status, const char *detail) {
    (void)operation;
    (void)detail;
    *(int *)context += status == KVF_OK ? 1 : 100;
}

static kvf_shm_card own_card(void) {
    const void *data;
    size_t bytes;
    kvf_card card;
    kvf_shm_card found = {0};
    FUZZ_MUST(kvf_transport_export(transport, &data, &bytes) == KVF_OK);
    FUZZ_MUST(kvf_card_read(data, bytes, &card) == KVF_OK);
    for (uint32_t i = 0; i < card.part_count; i++)
        if (strcmp(card.parts[i].kind, "shm") == 0)
            memcpy(&found, card.parts[i].data, sizeof found);
    kvf_card_free(&card);
    return found;
}

static void open_once(void) {
    if (transport)
        return;
    const kvf_setting setting = {"shm.direct", "off"};
    const kvf_transport_options options = {.struct_size = sizeof options,
                                           .settings = &setting,
                                           .setting_count = 1,
                                           .on_notify = fuzz_read_notice};
    void *allocated = NULL, *brought = calloc(REGION_BYTES, 1);
    FUZZ_MUST(kvf_transport_open("shm", &options, &transport) == KVF_OK);
    FUZZ_MUST(brought &&
              kvf_transport_allocate(transport, KVF_MEMORY_HOST, 0, REGION_BYTES, &allocated) == KVF_OK);
    const kvf_memory regions[] = {
        {.struct_size = sizeof(kvf_memory), .address = allocated, .bytes = REGION_BYTES},
        {.struct_size = sizeof(kvf_memory), .address = brought, .bytes = REGION_BYTES}};
    FUZZ_MUST(kvf_transport_register(transport, regions, 2) == KVF_OK);
}

static void progress(void) {
    bool busy = true;
    for (int i = 0; i < 8 && busy; i++)
        FUZZ_MUST(kvf_transport_progress(transport, &busy) == KVF_OK);
}

/* ---- the other process ----------------------------------------------------------------------- */

static int make_memory(uint32_t pages, bool sealed) {
    int fd = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    FUZZ_MUST(fd >= 0 && ftruncate(fd, (off_t)pages * PAGE) == 0);
    if (sealed)
        FUZZ_MUST(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0);
    return fd;
}

/* Reads the packets to the process, so that the transport does not wait. */
static void drain(int fd) {
    static kvf_shm_packet packet;
    while (kvf_shm_receive(fd, &packet) == KVF_OK)
        if (packet.fd >= 0)
            (void)close(packet.fd);
}

static void send_packets(int fd, const uint8_t *data, size_t size) {
    for (int i = 0; i < PACKETS_MAX && size >= 3; i++) {
        size_t bytes = data[0] | (size_t)data[1] << 8;
        uint32_t pages = data[2] < 4 ? 0 : data[2];
        data += 3;
        size -= 3;
        if (bytes > size)
            bytes = size;
        int with = pages ? make_memory(pages, pages % 2 == 0) : -1;
        kvf_status status = kvf_shm_send(fd, data, bytes, with);
        if (with >= 0)
            (void)close(with);
        if (status && status != KVF_E_AGAIN)
            return;
        data += bytes;
        size -= bytes;
        progress();
        drain(fd);
    }
}

/* The owner lets in so many connections in a time, which a fast machine exceeds: its queue is full then, for a moment. */
static int connect_to_owner(const kvf_shm_card *card) {
    struct sockaddr_un address;
    socklen_t length = kvf_shm_socket_address(card->name, &address);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    FUZZ_MUST(fd >= 0);
    for (int tries = 0; connect(fd, (const struct sockaddr *)&address, length) != 0; tries++) {
        FUZZ_MUST((errno == EAGAIN || errno == EINTR) && tries < CONNECT_TRIES);
        (void)usleep(1000);
        progress();
    }
    return fd;
}

static void play_consumer(const uint8_t *data, size_t size) {
    const kvf_shm_card card = own_card();
    const int fd = connect_to_owner(&card);
    kvf_shm_hello hello = {.header = {SHM_HELLO, 0}, .version = SHM_VERSION};
    memcpy(hello.key, card.key, sizeof hello.key);
    FUZZ_MUST(kvf_shm_send(fd, &hello, sizeof hello, -1) == KVF_OK);
    progress();
    drain(fd);
    send_packets(fd, data, size);
    (void)close(fd);
    progress();
}

static int listen_once(const kvf_shm_card *card) {
    static int listening = -1;
    if (listening >= 0)
        return listening;
    struct sockaddr_un address;
    socklen_t length = kvf_shm_socket_address(card->name, &address);
    listening = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    FUZZ_MUST(listening >= 0 && bind(listening, (const struct sockaddr *)&address, length) == 0);
    FUZZ_MUST(listen(listening, 4) == 0);
    return listening;
}

/* Plays an owner with two regions of one page each; a read of both is under way while it sends. */
static void play_owner(const uint8_t *data, size_t size) {
    static uint64_t sizes[] = {PEER_REGION_BYTES, PEER_REGION_BYTES};
    kvf_shm_card part = own_card(); /* a card of this host and process */
    part.name[0] ^= 0x55;
    int listening = listen_once(&part);
    kvf_card card = {.name = "fuzz", .region_bytes = sizes, .region_count = 2, .part_count = 1};
    card.parts = &(kvf_card_part){"shm", &part, sizeof part};
    kvf_buffer bytes = {0};
    kvf_peer *peer = NULL;
    FUZZ_MUST(kvf_card_write(&card, &bytes) == KVF_OK);
    FUZZ_MUST(kvf_transport_connect(transport, bytes.data, bytes.length, &peer) == KVF_OK);
    kvf_buffer_free(&bytes);
    int fd = accept4(listening, NULL, NULL, SOCK_CLOEXEC);
    FUZZ_MUST(fd >= 0);
    const kvf_run runs[] = {{0, 0, PEER_REGION_BYTES, 0, 1}, {100, 8, PEER_REGION_BYTES - 8, 1, 0}};
    int done = 0;
    kvf_operation operation;
    FUZZ_MUST(kvf_transport_submit(peer, KVF_READ, runs, 2, on_done, &done, &operation) == KVF_OK);
    drain(fd);
    send_packets(fd, data, size);
    (void)close(fd);
    progress();
    kvf_peer_close(peer);
    FUZZ_MUST(done == 1 || done == 100); /* the read ends exactly once, whatever happened */
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size == 0)
        return 0;
    open_once();
    if (data[0] % 2)
        play_owner(data + 1, size - 1);
    else
        play_consumer(data + 1, size - 1);
    return 0;
}
