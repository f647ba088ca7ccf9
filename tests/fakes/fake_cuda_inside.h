/*
 * Shared by the files of the stand-in for the CUDA driver: fake_cuda.c (devices, contexts, what tests set),
 * fake_cuda_memory.c, fake_cuda_virtual.c (memory of cuMemCreate()), fake_cuda_streams.c.
 */
#ifndef FAKE_CUDA_INSIDE_H
#define FAKE_CUDA_INSIDE_H

#include <pthread.h>

#include "cuda/driver.h"
#include "fake_cuda.h"

enum {
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    PEER_ACCESS_UNSUPPORTED = 217,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    ILLEGAL_ADDRESS = 700,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_UNJOINED = 904,
};

#define DEPTH 16u

/* Each driver function as kvferry declares it. */
#define DECLARE(name, arguments) __attribute__((visibility("default"))) CUresult name arguments;
KVF_CUDA_FUNCTIONS(DECLARE)
KVF_CUDA_LATER_FUNCTIONS(DECLARE)
#undef DECLARE

struct CUctx_st {
    int device;
};

/* State of the whole process; `lock` guards the fields that tests do not set. */
typedef struct fake_cuda {
    pthread_mutex_t lock;
    _Atomic size_t left;
    uint64_t delay_ns;
    int stuck;
    _Atomic bool started;     /* by cuInit() */
    bool strict;              /* it makes callers wait where the driver may */
    unsigned room;            /* actions that a stream has room for then */
    _Atomic unsigned waiting; /* calls that wait for streams, with the driver's lock */
    int running;              /* the device whose stream runs an action */
    bool peers[KVF_CUDA_DEVICES_MAX]
              [KVF_CUDA_DEVICES_MAX]; /* whether kernels of the first reach the second */
} fake_cuda;

extern fake_cuda fake;

/** Contexts that this thread has pushed. */
extern _Thread_local CUcontext fake_current[DEPTH];
extern _Thread_local unsigned fake_depth;

/** The result that a test wants a function to return; 0: the function's own. */
CUresult fake_told(const char *function);

/** The number in an environment variable, or `otherwise`. */
int fake_number(const char *name, int otherwise);

/** The machine's number of a device of this process; -1: this process has no such device. */
int fake_of_machine(int device);

/** The reverse: this process's number; -1: it does not see that device of the machine. */
int fake_of_process(int machines);

#define MEMORY_OF_DEVICE (1ull << 30) /* bytes of each device */

/** For a call that puts nothing on a stream: if a stream is being captured, and this thread's mode is not relaxed, the
 * capture is invalid from then on. With the driver this is so for some of these calls; it does not say which. */
CUresult fake_unsafe(void);

/** For a call that, with the driver, may wait until all streams have done their work: waits if that was asked for.
 * Meanwhile calls of other threads wait for this one, as the driver may have a lock of the context. */
void fake_wait_for_streams(void);

/** Waits until no other call waits for streams. */
void fake_take_turn(void);

/* The beginning of a call that needs a context and puts something on a stream. */
#define BEGIN_PUT                                                                                            \
    do {                                                                                                     \
        const CUresult told_result = fake_told(__func__);                                                    \
        if (told_result)                                                                                     \
            return told_result;                                                                              \
        if (fake.stuck)                                                                                      \
            return fake.stuck;                                                                               \
        fake_take_turn();                                                                                    \
        if (fake_depth == 0)                                                                                 \
            return INVALID_CONTEXT;                                                                          \
    } while (0)

/* The beginning of every other call that needs a context. */
#define BEGIN                                                                                                \
    do {                                                                                                     \
        BEGIN_PUT;                                                                                           \
        const CUresult unsafe_result = fake_unsafe();                                                        \
        if (unsafe_result)                                                                                   \
            return unsafe_result;                                                                            \
    } while (0)

/* ---- memory: needs the lock ---- */

typedef enum fake_kind { FREE, DEVICE, MAPPED, HOST, PINNED, VIRTUAL } fake_kind;

/** Memory that devices reach. */
typedef struct fake_range {
    fake_kind kind;
    uint64_t address;
    unsigned char *shadow; /**< where this library reads and writes it */
    size_t bytes;
    int file, device;
    bool pooled;      /**< it is of a pool, and has no handles */
    uint64_t inode;   /**< MAPPED: of the file that a handle has named */
    unsigned opened;  /**< MAPPED: how often it was opened and not closed */
    void *allocation; /**< VIRTUAL: what is mapped here */
    uint64_t access;  /**< VIRTUAL: a bit for each device that may use it */
    bool rdma;        /**< VIRTUAL: it was created for network cards */
} fake_range;

/** The range that contains an address, or NULL. */
fake_range *fake_range_at(uint64_t address);

/** A free entry for a range, or NULL. */
fake_range *fake_range_new(void);

/** For a kernel or a copy: where the host finds these bytes; an address outside all memory ends the context. */
void *fake_reach(uint64_t address, uint64_t bytes);

/** For one access of a kernel: it must also be aligned, and to memory that its device was let reach. */
void *fake_access(uint64_t address, uint64_t bytes);

/** Whether the driver knows the address. */
bool fake_knows(uint64_t address);

/** Frees memory of a device. */
CUresult fake_free(uint64_t address);

/** Allocates memory of the current device; needs the lock. */
CUresult fake_allocate(CUdeviceptr *address, size_t bytes);

/* ---- streams: needs the lock ---- */

/** Runs the due actions of all streams. */
void fake_advance(void);

#endif
