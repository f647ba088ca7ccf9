/*
 * Which of two ways is the faster one to read memory that the owner's caller brought: by process_vm_readv, which
 * costs some hundred nanoseconds a run, or through a shared buffer that the owner fills meanwhile, where each byte is
 * copied twice, by two processors. It depends on the length of the runs, on the machine, and on what the owner does
 * besides; so what each way has taken lately is measured, by length, and the other one tried now and then.
 */
#ifndef KVF_TRANSPORT_SHM_CHOICE_H
#define KVF_TRANSPORT_SHM_CHOICE_H

#include "transport/slices.h"

#define SHM_LENGTHS 16u /* classes of length: up to 63 bytes, up to 127 ..., from 1 MiB */

typedef enum kvf_shm_way {
    SHM_WAY_DIRECT = 0,
    SHM_WAY_SERVED = 1,
} kvf_shm_way;

/** Zeroed: nothing is known but the defaults. */
typedef struct kvf_shm_choice {
    struct {
        float ns_per_byte[2]; /**< by way; 0: not measured */
        uint64_t bytes;       /**< moved since the other way was tried */
        uint32_t trying;      /**< slices of a try that are left */
    } lengths[SHM_LENGTHS];
    uint64_t served_after_ns; /**< the owner let us wait: not before */
    uint64_t pause_ns;        /**< how long it is left alone after the next time */
} kvf_shm_choice;

/** Nanoseconds of a clock that only goes forward. */
uint64_t kvf_shm_now_ns(void);

/** The way for the next slice. `waiting`: others are on their way through the buffer. */
kvf_shm_way kvf_shm_choice_make(kvf_shm_choice *choice, const kvf_slice *slice, bool waiting);

/** A slice has taken so long. */
void kvf_shm_choice_learn(kvf_shm_choice *choice, kvf_shm_way way, const kvf_slice *slice, uint64_t ns);

/** The owner has not answered in time: it is left alone for a while, longer each time. */
void kvf_shm_choice_stalled(kvf_shm_choice *choice);

/** It has. */
void kvf_shm_choice_answered(kvf_shm_choice *choice);

#endif
