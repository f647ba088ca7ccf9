/*
 * The transport "cuda" and a process that does not keep to its protocol, over the stand-in for the driver. The first
 * byte, modulo 4, is what comes from that process:
 *
 *   0   its card: changes to this fabric's part of a good card, which is then connected to and read from
 *   1   packets of a reader and writer that has shown the key
 *   2   packets of an owner that we have connected to and read from
 *   3   the same of an owner whose memory is in segments
 *
 * A change is: offset 2 (little endian) | length 1 | bytes; an offset beyond the part cuts it off at offset modulo
 * its length. A packet is: length 2 (little endian) | bytes. In a packet that tells of memory, a card without a name
 * becomes a good one, and regions without a handle get good ones. With a packet of a segment comes the descriptor of
 * a good one; with a reason that begins with a byte above 0, another descriptor.
 *
 * Whatever comes, our kernels stay inside of memory that they may reach: the stand-in would fail every later call.
 */
#include "notices.h"

#include <dirent.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "cuda/device_image.h"
#include "fake_cuda.h"
#include "transport/card.h"
#include "transport/cuda/cuda_wire.h"

#define PREFIX "kvferry-cuda-"
#define REGIONS 2u
#define REGION_BYTES 4096u
#define PEER_BYTES 16384u /* of the peer's allocation */
#define PACKETS_MAX 64
#define ROUNDS_MAX 2000 /* far more than a read takes */

static kvf_transport *transport;
static kvf_cuda_card own;
static CUuuid device_id;
static CUipcMemHandle handle; /* of memory of another process */
static int good_segment = -1,
           no_segment = -1; /* descriptors, of FAKE_SEGMENT bytes of the device, and of something else */

static void on_done(void *context, kvf_operation operation, kvf_status status, const char *detail) {
    (void)operation;
    FUZZ_MUST(status == KVF_OK || detail[0] != '\0');
    *(int *)context += status == KVF_OK ? 1 : 100;
}

/* ---- once ---------------------------------------------------------------------------------------- */

/* A handle counts as another process's, for a process does not open its own: a child of ours keeps the memory. */
static void make_peer_memory(void) {
    const int file = memfd_create("fuzz", 0);
    FUZZ_MUST(file >= 0 && ftruncate(file, PEER_BYTES) == 0);
    const pid_t child = fork();
    FUZZ_MUST(child >= 0);
    if (child == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (;;)
            (void)pause();
    }
    fake_cuda_handle(child, file, PEER_BYTES, handle.bytes);
}

static void make_segments(void) {
    const CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                            .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                            .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    const kvf_cuda *cuda;
    CUmemGenericAllocationHandle made = 0;
    FUZZ_MUST(kvf_cuda_enter(0, &cuda) == KVF_OK);
    FUZZ_MUST(cuda->cuMemCreate(&made, FAKE_SEGMENT, &properties, 0) == 0);
    FUZZ_MUST(cuda->cuMemExportToShareableHandle(&good_segment, made,
                                                 CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) == 0);
    FUZZ_MUST(cuda->cuMemRelease(made) == 0); /* the descriptor keeps it */
    kvf_cuda_leave(cuda);
    no_segment = memfd_create("fuzz", 0);
    FUZZ_MUST(no_segment >= 0);
}

static void take_own_card(void) {
    const void *data;
    size_t bytes;
    kvf_card card;
    kvf_cuda_region region;
    FUZZ_MUST(kvf_transport_export(transport, &data, &bytes) == KVF_OK);
    FUZZ_MUST(kvf_card_read(data, bytes, &card) == KVF_OK);
    FUZZ_MUST(card.part_count == 1 && card.parts[0].bytes == sizeof own + REGIONS * sizeof region);
    memcpy(&own, card.parts[0].data, sizeof own);
    memcpy(&region, (const char *)card.parts[0].data + sizeof own, sizeof region);
    device_id = region.device;
    kvf_card_free(&card);
}

/* False: this build has no code for devices. */
static bool open_once(void) {
    if (transport || kvf_device_image_count == 0)
        return transport;
    const kvf_transport_options options = {.struct_size = sizeof options, .on_notify = fuzz_read_notice};
    make_peer_memory(); /* before there is a driver, which a child could not use */
    FUZZ_MUST(kvf_transport_open("cuda", &options, &transport) == KVF_OK);
    for (uint32_t i = 0; i < REGIONS; i++) {
        void *made = NULL;
        FUZZ_MUST(kvf_transport_allocate(transport, KVF_MEMORY_CUDA, 0, REGION_BYTES, &made) == KVF_OK);
        const kvf_memory memory = {
            .struct_size = sizeof memory, .address = made, .bytes = REGION_BYTES, .kind = KVF_MEMORY_CUDA};
        FUZZ_MUST(kvf_transport_register_region(transport, i, &memory) == KVF_OK);
    }
    make_segments();
    take_own_card();
    return true;
}

/* ---- the two sides ------------------------------------------------------------------------------- */

static void progress(void) {
    bool busy = true;
    for (int i = 0; i < 8 && busy; i++)
        FUZZ_MUST(kvf_transport_progress(transport, &busy) == KVF_OK);
}

/* Lets what is under way go on, for some rounds; until `done`, if that is given. */
static void go_on(int rounds, const int *done) {
    for (int i = 0; i < rounds && !(done && *done); i++) {
        struct pollfd here = {kvf_transport_event_fd(transport), POLLIN, 0};
        (void)poll(&here, 1, 1);
        progress();
    }
}

static size_t open_descriptors(void) {
    size_t count = 0;
    DIR *all = opendir("/proc/self/fd");
    FUZZ_MUST(all != NULL);
    while (readdir(all))
        count++;
    (void)closedir(all);
    return count;
}

static void check_device(void) {
    const kvf_cuda *cuda;
    CUevent event = NULL;
    FUZZ_MUST(kvf_cuda_enter(0, &cuda) == KVF_OK);
    FUZZ_MUST(cuda->cuEventCreate(&event, CU_EVENT_DISABLE_TIMING) == 0);
    FUZZ_MUST(cuda->cuEventDestroy_v2(event) == 0);
    kvf_cuda_leave(cuda);
}

static const unsigned char peer_name[CUDA_ID_BYTES] = "a fuzzed peer of";

static int listen_once(void) {
    static int listening = -1;
    unsigned char name[CUDA_ID_BYTES];
    if (listening >= 0)
        return listening;
    memcpy(name, peer_name, sizeof name);
    memcpy(name, &(pid_t){getpid()}, sizeof(pid_t));
    FUZZ_MUST(kvf_neighbour_listen(PREFIX, name, 64, &listening) == KVF_OK);
    return listening;
}

static kvf_cuda_card good_card(void) {
    kvf_cuda_card card = own;
    memcpy(card.name, peer_name, sizeof card.name);
    memcpy(card.name, &(pid_t){getpid()}, sizeof(pid_t));
    card.process[0] ^= 1;
    return card;
}

static kvf_cuda_region good_region(uint32_t i) {
    return (kvf_cuda_region){.handle = handle,
                             .device = device_id,
                             .base = 1 << 20,
                             .allocation_bytes = PEER_BYTES,
                             .offset = 100 + i * REGION_BYTES,
                             .bytes = REGION_BYTES};
}

/* As good_region(), both in the same 2 segments. */
static kvf_cuda_region region_in_segments(uint32_t i) {
    return (kvf_cuda_region){.device = device_id,
                             .base = 1 << 20,
                             .allocation_bytes = UINT64_C(2) * FAKE_SEGMENT,
                             .offset = FAKE_SEGMENT - 100 - i,
                             .bytes = REGION_BYTES,
                             .segments = 2};
}

/* Reads the packets to the peer, so that the transport does not wait. */
static void drain(int fd) {
    static kvf_cuda_packet packet;
    while (fd >= 0 && kvf_cuda_wire_receive(fd, &packet) == KVF_OK)
        ;
}

/* -1: there is none. */
static int take_connection(void) {
    return accept4(listen_once(), NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
}

static void drop_connections(void) {
    for (int fd; (fd = take_connection()) >= 0;)
        (void)close(fd);
}

static const kvf_cuda_header ready = {CUDA_READY, 0};

/* ---- packets ------------------------------------------------------------------------------------- */

/* Puts good ones where a packet has no card or handles. */
static void complete(kvf_cuda_packet *packet, size_t bytes) {
    kvf_cuda_memory *memory = &packet->as.memory;
    static const kvf_cuda_region none;
    if (bytes < offsetof(kvf_cuda_memory, regions) || memory->header.kind != CUDA_MEMORY)
        return;
    const uint32_t all = memory->card.region_count;
    if (memory->card.name[0] == 0)
        memory->card = good_card();
    memory->card.region_count = all;
    for (uint32_t i = 0; i < (bytes - offsetof(kvf_cuda_memory, regions)) / sizeof none; i++)
        if (memcmp(&memory->regions[i], &none, sizeof none) == 0)
            memory->regions[i] = good_region(i % REGIONS);
}

static int descriptor_for(const kvf_cuda_packet *packet, size_t bytes) {
    const kvf_cuda_segment *segment = &packet->as.segment;
    if (bytes < sizeof segment->header || segment->header.kind != CUDA_SEGMENT || segment->header.count)
        return -1;
    return bytes > offsetof(kvf_cuda_segment, reason) && segment->reason[0] ? no_segment : good_segment;
}

static void send_packets(int fd, const uint8_t *data, size_t size) {
    static kvf_cuda_packet packet;
    for (int i = 0; i < PACKETS_MAX && size >= 2; i++) {
        size_t bytes = data[0] | (size_t)data[1] << 8;
        data += 2;
        size -= 2;
        bytes = bytes < size ? bytes : size;
        bytes = bytes < sizeof packet.as ? bytes : sizeof packet.as;
        memcpy(&packet.as, data, bytes);
        complete(&packet, bytes);
        const kvf_status status =
            kvf_cuda_wire_send_with(fd, &packet.as, bytes, descriptor_for(&packet, bytes));
        if (status && status != KVF_E_AGAIN)
            return;
        data += bytes;
        size -= bytes;
        progress();
        drain(fd);
    }
}

/* Reads from both regions of a peer; the packets are what it says meanwhile. */
static void read_from(kvf_peer *peer, int fd, const uint8_t *packets, size_t size) {
    const kvf_run runs[] = {{0, 0, REGION_BYTES, 0, 1}, {100, 8, REGION_BYTES - 100, 1, 0}};
    int done = 0;
    kvf_operation operation;
    FUZZ_MUST(kvf_transport_submit(peer, KVF_READ, runs, 2, on_done, &done, &operation) == KVF_OK);
    progress();
    if (fd >= 0) {
        drain(fd);
        send_packets(fd, packets, size);
        go_on(4, &done);
        (void)close(fd);
        go_on(ROUNDS_MAX, &done);
    }
    kvf_peer_close(peer);
    FUZZ_MUST(done == 1 || done == 100); /* the read ends exactly once, whatever happened */
}

/* ---- a card -------------------------------------------------------------------------------------- */

typedef struct part {
    kvf_cuda_card card;
    kvf_cuda_region regions[REGIONS];
} part;

static size_t change(unsigned char *of, size_t bytes, const uint8_t *data, size_t size) {
    const size_t all = bytes;
    while (size >= 3) {
        const size_t offset = data[0] | (size_t)data[1] << 8;
        size_t length = data[2];
        data += 3;
        size -= 3;
        length = length < size ? length : size;
        if (offset >= all)
            bytes = offset % all;
        else
            memcpy(of + offset, data, length < all - offset ? length : all - offset);
        data += length;
        size -= length;
    }
    return bytes;
}

static kvf_status connect_to(const void *data, size_t bytes, kvf_peer **peer) {
    static uint64_t sizes[REGIONS] = {REGION_BYTES, REGION_BYTES};
    static bool on_device[REGIONS] = {true, true};
    kvf_card card = {.name = "fuzz",
                     .region_bytes = sizes,
                     .region_on_device = on_device,
                     .region_count = REGIONS,
                     .part_count = 1};
    kvf_buffer written = {0};
    card.parts = &(kvf_card_part){"cuda", data, bytes};
    FUZZ_MUST(kvf_card_write(&card, &written) == KVF_OK);
    const kvf_status status = kvf_transport_connect(transport, written.data, written.length, peer);
    kvf_buffer_free(&written);
    return status;
}

static void play_card(const uint8_t *data, size_t size) {
    part given = {.card = good_card(), .regions = {good_region(0), good_region(1)}};
    kvf_peer *peer = NULL;
    uint8_t packet[2 + sizeof ready] = {sizeof ready, 0};
    const size_t bytes = change((unsigned char *)&given, sizeof given, data, size);
    memcpy(packet + 2, &ready, sizeof ready);
    const kvf_status status = connect_to(&given, bytes, &peer);
    if (status)
        fuzz_check_refusal(status);
    else
        read_from(peer, take_connection(), packet, sizeof packet);
}

/* ---- a writer, an owner ---------------------------------------------------------------------------- */

static void play_consumer(const uint8_t *data, size_t size) {
    int fd = -1;
    kvf_cuda_hello hello = {.header = {CUDA_HELLO, 0}, .version = CUDA_WIRE_VERSION, .name = "fuzz"};
    memcpy(hello.key, own.key, sizeof hello.key);
    hello.generation = UINT64_MAX;
    FUZZ_MUST(kvf_cuda_wire_connect(own.name, &fd) == KVF_OK);
    FUZZ_MUST(kvf_cuda_wire_send(fd, &hello, sizeof hello) == KVF_OK);
    progress();
    drain(fd);
    send_packets(fd, data, size);
    const int back = take_connection(); /* by which it is read, if it has told of memory */
    if (back >= 0)
        (void)kvf_cuda_wire_send(back, &ready, sizeof ready);
    go_on(4, NULL); /* what it asked for may be under way */
    drain(fd);
    (void)close(fd);
    if (back >= 0)
        (void)close(back);
    progress();
}

static void play_owner(kvf_cuda_region (*region)(uint32_t i), const uint8_t *data, size_t size) {
    const part given = {.card = good_card(), .regions = {region(0), region(1)}};
    kvf_peer *peer = NULL;
    FUZZ_MUST(connect_to(&given, sizeof given, &peer) == KVF_OK);
    read_from(peer, take_connection(), data, size);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size == 0 || !open_once())
        return 0;
    (void)listen_once();
    const size_t descriptors = open_descriptors();
    if (data[0] % 4 == 0)
        play_card(data + 1, size - 1);
    else if (data[0] % 4 == 1)
        play_consumer(data + 1, size - 1);
    else
        play_owner(data[0] % 4 == 2 ? good_region : region_in_segments, data + 1, size - 1);
    drop_connections();
    progress();
    FUZZ_MUST(open_descriptors() == descriptors);
    check_device();
    return 0;
}
