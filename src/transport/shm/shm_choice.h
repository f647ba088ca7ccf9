/*
 * Who copies what of memory that the owner's caller brought: this side alone, by process_vm_readv, which costs some
 * hundred nanoseconds a run; or the owner first, into a slot of a shared buffer, from which this side then copies.
 *
 * Nobody waits for the other: while the owner is at work, this side reads by itself, in pieces so short that an
 * answer does not lie long; where reading is much slower, only once an answer is late. So an owner that is slow, or
 * busy with something else, takes nothing from what this side does alone; it is asked for little until it has
 * answered. What the two manage together is measured, by length of runs, and where that is less than this side
 * manages alone, as on a machine with more to do than processors, the owner is left alone, but for a try now and
 * then.
 *
 * At the end, when all that is left is with the owner, it has as long as reading that would take. Then it is done
 * without, and not asked again before it has answered what it was asked.
 *
 * These functions know no clock and no process: costs, loads and times are given to them.
 */
#ifndef KVF_TRANSPORT_SHM_CHOICE_H
#define KVF_TRANSPORT_SHM_CHOICE_H

#include "transport/slices.h"

#define SHM_LENGTHS 16u           /* classes of length: up to 63 bytes, up to 127 ..., from 1 MiB */
#define SHM_SLOT_BYTES (1u << 20) /* of the shared buffer; an owner takes no larger ones */
#define SHM_MEASUREMENTS 5u       /* that are kept of a price */

typedef enum kvf_shm_way {
    SHM_WAY_SERVED = 0, /**< by the owner, and by this side meanwhile */
    SHM_WAY_DIRECT = 1, /**< by this side alone */
} kvf_shm_way;

/** What a byte takes, by the last measurements: their median, for a process that was set aside for some milliseconds
 * lengthens one of them by ten or a hundred times. */
typedef struct kvf_shm_price {
    float last[SHM_MEASUREMENTS]; /**< nanoseconds a byte */
    float median;                 /**< of these; 0: nothing was measured */
    uint32_t measured;
} kvf_shm_price;

/** Zeroed: nothing is known but the defaults. */
typedef struct kvf_shm_choice {
    struct {
        kvf_shm_price ways[2];
        kvf_shm_price reads;      /**< by this side, also while the owner is at work */
        uint64_t unused_bytes[2]; /**< moved since this way was measured */
        uint32_t tries[2];        /**< measurements of the try that goes on */
        kvf_shm_way better;       /**< stays until the other is clearly better */
    } lengths[SHM_LENGTHS];
    uint64_t begin_ns;    /**< of what is being measured; 0: nothing is */
    uint64_t bytes;       /**< moved since */
    uint32_t size_class;  /**< of its length */
    bool asked;           /**< the owner had part in it */
    bool together;        /**< it had in what was measured last, or was asked since */
    uint32_t window;      /**< slots it may be asked for at once, less one */
    uint64_t answered_ns; /**< when it answered last */
    uint64_t since_ns;    /**< since when it lets us wait: it was asked, or has answered */
} kvf_shm_choice;

/** What was asked of the owner and is not answered, in slots. */
typedef struct kvf_shm_load {
    uint32_t slots;     /**< of the buffer */
    uint32_t waiting;   /**< whose answers are waited for */
    uint32_t abandoned; /**< that were done without */
} kvf_shm_load;

/** What is to be done next: so many bytes at the most, of the first run at least a part; 0: nothing before an answer
 * or `until_ns`. */
typedef struct kvf_shm_step {
    kvf_shm_way way;
    uint64_t bytes;
    uint64_t until_ns;
} kvf_shm_step;

/** The next step, for a slice of which any part may be taken. */
kvf_shm_step kvf_shm_choice_make(const kvf_shm_choice *choice, const kvf_slice *slice,
                                 const kvf_shm_load *load, uint64_t now_ns);

/** This side has read a slice, which took so long. */
void kvf_shm_choice_read(kvf_shm_choice *choice, const kvf_slice *slice, uint64_t ns, uint64_t now_ns);

/** A slice that the owner had copied was taken. */
void kvf_shm_choice_taken(kvf_shm_choice *choice, const kvf_slice *slice, uint64_t now_ns);

/** There is nothing to be done but wait. */
void kvf_shm_choice_idle(kvf_shm_choice *choice);

/** What reading a slice without the owner would take. */
uint64_t kvf_shm_choice_direct_ns(const kvf_shm_choice *choice, const kvf_slice *slice);

/** The owner was asked; `waiting`: its answer to something else is waited for already. */
void kvf_shm_choice_asked(kvf_shm_choice *choice, bool waiting, uint64_t now_ns);

/** It has answered; `wanted`: what was still waited for. */
void kvf_shm_choice_answered(kvf_shm_choice *choice, bool wanted, uint64_t now_ns);

/** It was done without. */
void kvf_shm_choice_abandoned(kvf_shm_choice *choice);

#endif
