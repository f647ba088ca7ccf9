/*
 * Two endpoints of this process with memory of devices: an owner, and a writer that is connected to it. Guests are
 * sockets of this process, by which a test speaks the protocol (cuda_wire.h) to the owner.
 */
#ifndef CUDA_ENDS_H
#define CUDA_ENDS_H

#include "devices.h"
#include "shapes.h"
#include "transport/cuda/cuda_wire.h"

#define BYTES 65536u     /* of each region */
#define TOLD_BYTES 4096u /* the size of the region that a guest claims to have */
#define HOUR_NS 3600000000000ull
#define ROUNDS 30 /* enough for everything that does not wait for a device */
#define NOBODY UINT32_MAX

/** Peers may use region 0; region 1 is withheld. */
typedef struct test_end {
    kvf_transport *transport;
    unsigned char *seen[2];
    kvf_memory memory[2];
    uint32_t lost;
    char lost_detail[256];
} test_end;

/** The owner is on device 0, the writer on device 1, or where there is one device on that. */
extern test_end owner, writer;
extern kvf_peer *peer; /**< the owner, as the writer's peer */

/** The initial content of a byte of a region. */
unsigned char content(const test_end *end, uint32_t region, uint32_t i);

void device_end_open(test_end *end, uint32_t device);
/** @param setting  NULL: none */
void device_end_open_with(test_end *end, uint32_t device, const kvf_setting *setting);
void both_open(void); /**< and connects them */
void both_close(void);
void connect_ends(void);

/** The fabric's part in the card of an end. */
void part_of(const test_end *end, kvf_cuda_card *card, kvf_cuda_region regions[2]);

/** Progress of both. Real devices have some time, too, for what was put on their streams. */
void run_rounds(void);

/** Counts the bytes of the owner's region 0, in this range, that the writer has written. */
uint32_t written(uint32_t begin, uint32_t end);

/** The first bytes of the owner's region 0 are those of the writer's. */
void assert_written(uint32_t bytes);

typedef struct outcome {
    kvf_operation operation; /**< as it was submitted */
    uint32_t calls;
    kvf_status status;
    char detail[512];
} outcome;

/** Submits a batch of the writer, of one run, which must stay until it has ended. */
void submit_run(const kvf_run *run, kvf_direction direction, outcome *noted);
/** The same, of a run at the beginning of region 0. There is one such batch at a time. */
void submit_of_writer(kvf_direction direction, uint32_t bytes, outcome *noted);
/** The same between the owner's region 0 and another region of the writer. */
void submit_of_region(uint32_t region, kvf_direction direction, uint32_t bytes, outcome *noted);

/** The writer can write. */
void write_well(void);

int open_guest(void);
void say_as_guest(int fd, const void *message, size_t bytes);
kvf_cuda_hello good_hello(void);
/** A guest that has sent HELLO. */
int open_known_guest(void);
/** The memory of an endpoint that does not exist. */
kvf_cuda_memory good_memory(void);
size_t memory_bytes(const kvf_cuda_memory *memory);
size_t write_bytes(const kvf_cuda_write *write);
/** The reason for which the owner refused a guest, whose socket is then closed; NOBODY: the owner has not refused it. */
uint32_t refusal_of(int fd);

#endif
