/*
 * Which side copies memory that the owner's caller brought: this side alone, by process_vm_readv, which costs some
 * hundred nanoseconds a run; or the owner first, into a slot of a shared buffer, from which this side then copies.
 *
 * Neither side waits for the other: while the owner works, this side reads by itself, in pieces so short that it soon
 * sees an answer; if reading is much slower, only once an answer is late. So an owner that is slow, or busy with
 * something else, does not slow this side down; it is asked for little until it has answered. The speed of both
 * together is measured, by length of runs. Where it is below the speed of this side alone, as on a machine with too
 * few processors, the owner is not asked, except for a try now and then.
 *
 * At the end, when only the owner's part is left, the owner has as long as reading that part would take. Then this
 * side reads it, and asks the owner nothing more before it has answered its old requests.
 *
 * These functions know no clock and no process: the caller passes costs, loads and times.
 */
#ifndef KVF_TRANSPORT_SHM_CHOICE_H
#define KVF_TRANSPORT_SHM_CHOICE_H

#include "transport/slices.h"

#define SHM_LENGTHS 16u           /* classes of length: up to 63 bytes, up to 127 ..., from 1 MiB */
#define SHM_SLOT_BYTES (1u << 20) /* of the shared buffer; an owner takes no larger ones */
#define SHM_MEASUREMENTS 5u       /* kept for a price */

typedef enum kvf_shm_way {
    SHM_WAY_SERVED = 0, /**< by the owner, and by this side meanwhile */
    SHM_WAY_DIRECT = 1, /**< by this side alone */
} kvf_shm_way;

/** The time of a byte: the median of the last measurements, for if the kernel suspends the process for some
 * milliseconds, one of them is ten or a hundred times too long. */
typedef struct kvf_shm_price {
    float last[SHM_MEASUREMENTS]; /**< nanoseconds a byte */
    float median;                 /**< of these; 0: nothing was measured */
    uint32_t measured;
} kvf_shm_price;

/** Zeroed: only the defaults are known. */
typedef struct kvf_shm_choice {
    struct {
        kvf_shm_price ways[2];
        kvf_shm_price reads;      /**< by this side, also while the owner works */
        uint64_t unused_bytes[2]; /**< moved since this way was measured */
        uint32_t tries[2];        /**< measurements of the current try */
        kvf_shm_way better;       /**< stays until the other way is clearly better */
    } lengths[SHM_LENGTHS];
    uint64_t begin_ns;    /**< of the current measurement; 0: there is none */
    uint64_t bytes;       /**< moved since then */
    uint32_t size_class;  /**< of its runs */
    bool asked;           /**< the owner took part in it */
    bool together;        /**< the owner took part in the last measurement, or was asked since */
    uint32_t window;      /**< slots the owner may be asked for at once, less one */
    uint64_t answered_ns; /**< when the owner answered last */
    uint64_t since_ns;    /**< since when we wait for the owner: it was asked, or answered, then */
} kvf_shm_choice;

/** Requests that the owner has not answered, in slots. */
typedef struct kvf_shm_load {
    uint32_t slots;     /**< of the buffer */
    uint32_t waiting;   /**< slots whose answers we wait for */
    uint32_t abandoned; /**< slots that this side has read itself */
} kvf_shm_load;

/** The next step: move at most `bytes` bytes, at least a part of the first run; 0: nothing before an answer or
 * `until_ns`. */
typedef struct kvf_shm_step {
    kvf_shm_way way;
    uint64_t bytes;
    uint64_t until_ns;
} kvf_shm_step;

/** The next step, for a slice of which any part may be taken. */
kvf_shm_step kvf_shm_choice_make(const kvf_shm_choice *choice, const kvf_slice *slice,
                                 const kvf_shm_load *load, uint64_t now_ns);

/** This side has read a slice, in `ns` nanoseconds. */
void kvf_shm_choice_read(kvf_shm_choice *choice, const kvf_slice *slice, uint64_t ns, uint64_t now_ns);

/** This side has copied a slice out of its slot, after the owner. */
void kvf_shm_choice_taken(kvf_shm_choice *choice, const kvf_slice *slice, uint64_t now_ns);

/** This side can only wait. */
void kvf_shm_choice_idle(kvf_shm_choice *choice);

/** The time to read a slice without the owner. */
uint64_t kvf_shm_choice_direct_ns(const kvf_shm_choice *choice, const kvf_slice *slice);

/** The owner was asked; `waiting`: we wait for another answer of it already. */
void kvf_shm_choice_asked(kvf_shm_choice *choice, bool waiting, uint64_t now_ns);

/** The owner has answered; `wanted`: we still waited for that answer. */
void kvf_shm_choice_answered(kvf_shm_choice *choice, bool wanted, uint64_t now_ns);

/** This side has read what the owner was asked for. */
void kvf_shm_choice_abandoned(kvf_shm_choice *choice);

#endif
