/*
 * The gate between a writer and the memory it has mapped: a page that the owner shares with each writer.
 *
 * A writer says that it is inside before it checks whether the gate is shut, and the owner shuts it before it
 * checks whether the writer is inside. All processors see these steps in one order, so at least one of the two
 * sees the other: a writer that the owner does not see inside will see the gate shut before its next write.
 *
 *     writer                            owner
 *     inside = 1                        shut = 1
 *     shut? then inside = 0, no more    inside? then it may still write; wait
 *     writes a slice                    otherwise it never writes again
 *     inside = 0
 */
#ifndef KVF_TRANSPORT_SHM_GATE_H
#define KVF_TRANSPORT_SHM_GATE_H

#include <stdatomic.h>

#include "transport/shm/shm_wire.h"

typedef struct kvf_shm_gate {
    _Atomic uint32_t shut;   /**< by the owner */
    _Atomic uint32_t inside; /**< by the writer */
} kvf_shm_gate;

_Static_assert(ATOMIC_INT_LOCK_FREE == 2, "what two processes share has no lock in it");

/** Whether the writer may write a slice now; shm_gate_leave() follows then. NULL is always open. */
static inline bool shm_gate_enter(kvf_shm_gate *gate) {
    if (!gate)
        return true;
    atomic_store(&gate->inside, 1);
    if (!atomic_load(&gate->shut))
        return true;
    atomic_store(&gate->inside, 0);
    return false;
}

static inline void shm_gate_leave(kvf_shm_gate *gate) {
    if (gate)
        atomic_store(&gate->inside, 0);
}

/** Shuts the gate for ever; returns whether the writer is inside. NULL: it never was. */
static inline bool shm_gate_shut(kvf_shm_gate *gate) {
    if (!gate)
        return false;
    atomic_store(&gate->shut, 1);
    return atomic_load(&gate->inside) != 0;
}

/** Makes a gate, and the descriptor with which a writer can map it. */
kvf_status kvf_shm_gate_make(kvf_shm_gate **out, int *fd);

/** Maps a gate that an owner sent. */
kvf_status kvf_shm_gate_map(int fd, kvf_shm_gate **out);

/** NULL is accepted. */
void kvf_shm_gate_unmap(kvf_shm_gate *gate);

#endif
