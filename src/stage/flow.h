/*
 * A flow: one stream on its way between this rank and a peer, through slots of both arenas.
 *
 * The mover opens it and its operations move the bytes; the lender lends slots of its arena (see message.h):
 *
 *     pull    lender: gather into a slot, lend it           mover: read it into a slot of its own, return it, scatter
 *     push    lender: lend an empty slot .. scatter it      mover: gather into a slot of its own, write it, return it
 *
 * Bytes go in the order of the stream. A side ends the flow with one END, which is the last that it says of it, and
 * which a mover says only when none of its operations is under way: so with the mover's END all lent slots are free, and
 * a flow of which both ENDs have been said is forgotten. Nothing that comes later speaks of it.
 *
 * What is to be said is a matter of state (which slots are to be lent or returned, whether the END was sent), so where a
 * peer takes no notification at the moment, nothing is queued and nothing is lost.
 *
 * Files call one way: stage.c and ways.c (what users call), lender.c and mover.c (what each side does), flow.c (what is
 * the same for both), workers.c, arena.c, shape.c, message.c, cost.c.
 */
#ifndef KVF_STAGE_FLOW_H
#define KVF_STAGE_FLOW_H

#include <kvferry/stage.h>

#include "base/clock.h"
#include "base/list.h"
#include "stage/arena.h"
#include "stage/cost.h"
#include "stage/device.h"
#include "stage/message.h"
#include "stage/shape.h"
#include "stage/stream.h"
#include "stage/ways.h"
#include "stage/workers.h"

#define KVF_WINDOW_MAX KVF_STAGE_SLOTS_MAX
#define KVF_STAGE_DETAIL_BYTES 512u

typedef struct kvf_stage_flow kvf_stage_flow;
typedef struct kvf_stage_peer kvf_stage_peer;

/** What becomes of one slot of the window. */
typedef enum kvf_credit_state {
    KVF_CREDIT_NONE = 0,
    /* at the lender */
    KVF_CREDIT_TO_LEND, /**< the slot is ready; to be said */
    KVF_CREDIT_LENT,    /**< the mover has it */
    KVF_CREDIT_BACK,    /**< push: it came back full */
    /* at the mover */
    KVF_CREDIT_HERE,      /**< the lender has lent a slot */
    KVF_CREDIT_MOVING,    /**< an operation is under way between it and a slot of our own */
    KVF_CREDIT_MOVED,     /**< pull: the bytes are in our own slot */
    KVF_CREDIT_TO_RETURN, /**< to be said */
    /* at either */
    KVF_CREDIT_COPYING, /**< a worker copies between the slot of ours and the shard's memory */
} kvf_credit_state;

typedef struct kvf_credit {
    kvf_stage_flow *flow;
    kvf_credit_state state;
    kvf_slot *own;      /**< of our arena: lent, or between the lender's and our memory; NULL: none */
    kvf_slot_note note; /**< the lender's slot and what is in it, as messages say it */
    kvf_run run;
    kvf_operation operation;
    kvf_job job;
} kvf_credit;

struct kvf_stage_flow {
    kvf_stage *stage;
    kvf_stage_peer *peer;
    uint64_t id;
    bool mover;              /**< we are; else the lender */
    kvf_direction direction; /**< KVF_READ: a pull. The mover reads */
    uint32_t priority, window;
    uint64_t permission; /**< by which it was opened */
    bool held;           /**< mover: operations begin only as far as `allowed` goes */
    uint64_t allowed;    /**< bytes */

    unsigned char *opening; /**< mover: to be sent; lender: as far as it has come. NULL: all of it was */
    uint32_t opening_bytes, opening_at;
    bool whole;    /**< lender: it has come and is to be read in a turn of the stage */
    bool open;     /**< lender: it has come and was accepted; mover: the lender has said so */
    bool accepted; /**< lender: that is said */

    kvf_stage_shape *shape;
    kvf_stream *stream;
    kvf_device_table table; /**< of the stream, where the shard's memory is a device's */
    uint64_t bytes;         /**< of the stream */
    uint64_t next;          /**< the first byte that is in no credit yet */
    uint64_t told;          /**< the first byte that no message of ours has named */
    uint64_t done;          /**< how many bytes have arrived where they belong, or came back read */
    kvf_credit credits[KVF_WINDOW_MAX];
    uint32_t region, slot_bytes, slot_count; /**< mover: of the lender's arena */
    uint32_t moving;                         /**< operations under way */
    uint64_t operations;                     /**< that have ended well */

    bool ended; /**< nothing more is done for it, but for what is under way; `status` is final */
    bool end_sent, end_heard;
    kvf_status status;
    char detail[KVF_STAGE_DETAIL_BYTES];
    bool counted;        /**< among the `flows` of its peer */
    bool owned;          /**< by a move, which lets go of it with kvf_stage_flow_leave() */
    uint64_t began_ns;   /**< mover: when its opening began to be sent; 0: it waits for its turn */
    uint64_t took_ns;    /**< mover: from then to the end */
    uint64_t heard_ns;   /**< when the peer last said something of it */
    uint64_t waits_ns;   /**< lender: since when it waits for the first slot of its peer; 0: it does not */
    uint64_t kept_ns;    /**< lender: when its first slot was lent, the last came back, or it ended */
    uint64_t doubt_ends; /**< lender, of a peer that has left: when its slots are free; 0: not begun */
    kvf_stage_flow *previous, *following; /**< all of the stage, in the order of turns */
};

struct kvf_stage_peer {
    kvf_peer *peer; /**< NULL: it has left */
    char *name;
    kvf_slot_share share;
    kvf_known_cost *known; /**< NULL: it has left */
    kvf_peer_cost *costs;  /**< by direction, of `known` */
    bool has_lists; /**< one operation takes many runs, and then they cost little: kvf_cost_may_pack() */
    kvf_stage_flow *outgoing; /**< whose opening is being sent; NULL: none */
    kvf_stage_flow *incoming; /**< whose opening is coming in */
    uint32_t flows[2];     /**< that are not over: [0] it has opened, [1] we have, without those that wait */
    uint32_t flows_most;   /**< [1] at once: one, until it has said with an ACCEPT how many it takes */
    uint64_t opened_bytes; /**< openings of those that it has opened: what it makes us keep */
    kvf_stage_peer *previous, *following;
};

struct kvf_stage {
    kvf_transport *transport;
    const kvf_shard *shard;
    kvf_stage_options options;
    uint32_t *convert; /**< options.convert, owned; NULL: none */
    const kvf_clock *clock;
    kvf_arena arena;
    kvf_workers *workers;     /**< NULL: copies are made in kvf_stage_progress() */
    bool uses_regions;        /**< the transport knows of our workers or device */
    kvf_stage_device *device; /**< where the shard's memory is; NULL: the host */
    uint32_t region;
    uint64_t model;
    kvf_shapes shapes;
    kvf_stage_peer *peers;
    kvf_known_cost *known_costs;  /**< of these */
    kvf_stage_flow *first, *last; /**< flows; those of higher priority first */
    uint64_t last_flow;           /**< number of ours */
    uint32_t waiting; /**< flows that wait for the first slot of their peer; perhaps some that do no more */
    uint32_t moving;  /**< operations under way, of all flows */
    uint32_t moves;   /**< that are not freed */
    bool closed;      /**< freed with the last of these */
    bool held_up;     /**< something is to be said: a peer takes nothing now, or a turn has come */
    kvf_stage_info counts;
};

/* ---- flow.c: what is the same for both sides ----------------------------------------------------- */

/** A flow in the list, without a stream. @return NULL: no memory */
kvf_stage_flow *kvf_stage_flow_new(kvf_stage *stage, kvf_stage_peer *peer, uint64_t id, bool mover);

/** Gives a flow its place among those of its priority: the last. */
void kvf_stage_flow_line_up(kvf_stage_flow *flow);

/** Its flow of that number, as mover or as lender; NULL: there is none. */
kvf_stage_flow *kvf_stage_flow_find(const kvf_stage *stage, const kvf_stage_peer *peer, uint64_t id,
                                    bool mover);

/** Ends our side, once; slots that nobody else touches are free. The detail of the thread is its sentence. */
void kvf_stage_flow_end(kvf_stage_flow *flow, kvf_status status);

/** The same, and an event: the peer broke the rules. */
void kvf_stage_flow_blame(kvf_stage_flow *flow, kvf_status status);

/** Counts what a peer must not have sent, and tells the user; the detail of the thread is the sentence. */
void kvf_stage_blame(kvf_stage *stage, const char *peer, kvf_status status);

/** Says a message of this flow. False where the peer takes none at the moment, or is lost. */
bool kvf_stage_flow_say(kvf_stage_flow *flow, kvf_stage_message *message);

/** Says what slots are in this state, in the order of the stream, and what becomes of them. */
void kvf_stage_flow_say_slots(kvf_stage_flow *flow, kvf_stage_word word, kvf_credit_state from,
                              kvf_credit_state to);

/** Says the END where it is due. */
void kvf_stage_flow_say_end(kvf_stage_flow *flow);

/** Says the lender's END of a flow that there is not, to a mover that waits for it, with the sentence of `status`. Where
 * it cannot be said now it is not: the mover's own END is answered so, too. */
void kvf_stage_flow_deny(const kvf_stage_peer *peer, uint64_t flow, kvf_status status);

/** The peer touches no slot of this flow any more: it has said its END, or is gone for good. */
void kvf_stage_flow_hear_end(kvf_stage_flow *flow);

/** The credit in this state whose bytes are the first; NULL: none. */
kvf_credit *kvf_stage_flow_credit(kvf_stage_flow *flow, kvf_credit_state state);

/** Gives the slot of our arena that a credit has, if any. */
void kvf_credit_give(kvf_credit *credit, kvf_credit_state next);

/** Whether the shard's memory is registered: regions come and go, and what is not there is not touched.
 * @return KVF_OK, KVF_E_NOT_REGISTERED */
kvf_status kvf_stage_check_memory(const kvf_stage *stage);

/**
 * Copy a credit's bytes between the shard's memory and the credit's own slot: at once, or by a worker, until when the
 * credit is KVF_CREDIT_COPYING. Where the shard's memory is not registered the flow ends.
 *
 * @return whether they are copied; otherwise kvf_lender_copied() or kvf_mover_copied() is called when they are, unless
 *         the flow ends before
 */
bool kvf_stage_flow_gather(kvf_credit *credit);
bool kvf_stage_flow_scatter(kvf_credit *credit);

/** Whether bytes that a peer names are the next of the stream and end at an element: KVF_OK, KVF_E_RANGE. */
kvf_status kvf_stage_flow_check_bytes(const kvf_stage_flow *flow, kvf_byte_range bytes, uint64_t most);

/** Counts it among those of its peer, and no longer: both once at most. */
void kvf_stage_flow_count(kvf_stage_flow *flow);
void kvf_stage_flow_uncount(kvf_stage_flow *flow);

/** Whether nothing more is to be done or said. What is over and not `owned` can be freed. */
bool kvf_stage_flow_is_over(const kvf_stage_flow *flow);

void kvf_stage_flow_free(kvf_stage_flow *flow);

/* ---- lender.c, mover.c ---------------------------------------------------------------------------
 *
 * step: one slot's worth of work, copying at most; false where there is nothing to do now.
 * copied: what becomes of a slot whose bytes have been gathered or scattered.
 * talk: says what is to be said. hear: takes a message.
 */

bool kvf_lender_step(kvf_stage_flow *flow);
void kvf_lender_copied(kvf_credit *credit);
void kvf_lender_talk(kvf_stage_flow *flow);
void kvf_lender_hear(kvf_stage_flow *flow, const kvf_stage_message *message);
/** Whether it waits for a slot, and its peer has none. */
bool kvf_lender_waits(const kvf_stage_flow *flow);
/** Whether the peer has slots of it, and has given none back since then, not even where it has ended. */
bool kvf_lender_keeps(const kvf_stage_flow *flow, uint64_t before_ns);
/** A part of an opening: the first makes the flow. */
void kvf_lender_hear_open(kvf_stage *stage, kvf_stage_peer *peer, const kvf_stage_message *message);
/** Reads one opening of those that have come and are long; whether there are more. */
bool kvf_lender_read_one(kvf_stage *stage);

bool kvf_mover_step(kvf_stage_flow *flow);
void kvf_mover_copied(kvf_credit *credit);
void kvf_mover_talk(kvf_stage_flow *flow);
void kvf_mover_hear(kvf_stage_flow *flow, const kvf_stage_message *message);

/** What a mover wants. */
typedef struct kvf_flow_wish {
    kvf_direction direction;
    kvf_stage_shape *shape;        /**< taken over, whatever becomes of the flow */
    const kvf_group_steps *ours;   /**< steps and blocks of this rank */
    const kvf_group_steps *theirs; /**< the same steps, with the peer's blocks */
    uint32_t group_count;
    uint32_t priority;
    uint64_t permission;
    bool held;
} kvf_flow_wish;

/**
 * Begins a flow; nothing is said before kvf_stage_progress().
 *
 * @param wish  read during the call
 * @param out   receives a flow that is `owned`, see kvf_stage_flow_leave()
 */
kvf_status kvf_mover_begin(kvf_stage *stage, kvf_stage_peer *peer, const kvf_flow_wish *wish,
                           kvf_stage_flow **out);

/** Lets a flow that is held begin so many bytes more. Nothing is saved up: no more than the slots need that the
 * lender has lent. Returns how many were of use. */
uint64_t kvf_mover_allow(kvf_stage_flow *flow, uint64_t bytes);

/** Ends it where it is not over, and lets go of it. */
void kvf_stage_flow_leave(kvf_stage_flow *flow);

/* ---- stage.c ------------------------------------------------------------------------------------- */

/** Frees a stage that was closed, with its last operation. */
void kvf_stage_release(kvf_stage *stage);

kvf_stage_peer *kvf_stage_find_peer(const kvf_stage *stage, const kvf_peer *peer);

#endif
