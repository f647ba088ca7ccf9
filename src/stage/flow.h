/*
 * A flow: one stream that moves between this rank and a peer, through slots of both arenas.
 *
 * The mover opens it and its operations move the bytes; the lender lends slots of its arena (see message.h):
 *
 *     pull    lender: gather into a slot, lend it           mover: read it into a slot of its own, scatter, return it
 *     push    lender: lend an empty slot .. scatter it      mover: gather into a slot of its own, write it, return it
 *
 * Bytes go in the order of the stream. Each side ends the flow with one END, its last message about the flow. A mover
 * sends its END only when none of its operations is under way, so the mover's END frees all lent slots. After both ENDs
 * the flow is forgotten; no later message names it.
 *
 * A peer that has left and joined again has forgotten the flows from before, and a message that comes while it has not
 * joined is lost. So each side repeats its END until it has heard the other's, and a side that does not know the flow
 * answers with an END.
 *
 * Messages are derived from state (which slots to lend or return, whether the END was sent). So while a peer takes no
 * notification, nothing is queued and nothing is lost.
 *
 * Files call in one direction: stage.c and ways.c (public functions), lender.c and mover.c (the two sides), flow.c
 * (code of both sides), workers.c, arena.c, shape.c, message.c, cost.c.
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

/** Counts the bytes that one peer brings by a permission. */
typedef struct kvf_stage_tally {
    uint64_t permission;
    char *peer;         /**< its name */
    uint64_t *by_layer; /**< the caller's */
    struct kvf_stage_tally *next;
} kvf_stage_tally;

/** The state of one slot of the window. */
typedef enum kvf_credit_state {
    KVF_CREDIT_NONE = 0,
    /* at the lender */
    KVF_CREDIT_TO_LEND, /**< the slot is ready; its LEND is to be sent */
    KVF_CREDIT_LENT,    /**< the mover has it */
    KVF_CREDIT_BACK,    /**< push: it came back full */
    /* at the mover */
    KVF_CREDIT_HERE,      /**< the lender has lent a slot */
    KVF_CREDIT_MOVING,    /**< an operation is under way between it and our own slot */
    KVF_CREDIT_MOVED,     /**< pull: the bytes are in our own slot */
    KVF_CREDIT_TO_RETURN, /**< its RETURN is to be sent */
    /* at either */
    KVF_CREDIT_COPYING, /**< a worker or device copies between our slot and the shard's memory */
} kvf_credit_state;

typedef struct kvf_credit {
    kvf_stage_flow *flow;
    kvf_credit_state state;
    kvf_slot *own; /**< slot of our arena: lent, or between the lender's slot and our memory; NULL: none */
    kvf_slot_note note; /**< the lender's slot and its bytes, as in messages */
    kvf_run run;
    kvf_operation operation;
    kvf_job job;
} kvf_credit;

struct kvf_stage_flow {
    kvf_stage *stage;
    kvf_stage_peer *peer;
    kvf_arena *arena;      /**< ours, from which all its slots are */
    kvf_slot_share *share; /**< of the peer in it */
    uint64_t id;
    bool mover;              /**< we are the mover; else the lender */
    kvf_direction direction; /**< KVF_READ: a pull. The mover reads */
    uint32_t priority, window;
    uint64_t permission; /**< the permission with which it was opened */
    bool held;           /**< mover: operations may begin only for `allowed` bytes */
    uint64_t allowed;    /**< bytes */

    unsigned char *opening; /**< mover: to be sent; lender: as far as received. NULL: done */
    uint32_t opening_bytes, opening_at;
    bool whole;    /**< lender: it has come and will be read in a turn of the stage */
    bool open;     /**< lender: it was accepted; mover: the lender's ACCEPT has come */
    bool accepted; /**< lender: the ACCEPT was sent */

    kvf_stage_shape *shape;
    kvf_stream *stream;
    kvf_device_table table; /**< of the stream, if the shard's memory is a device's */
    uint64_t bytes;         /**< of the stream */
    uint64_t next;          /**< the first byte that is in no credit yet */
    uint64_t told;          /**< the first byte that none of our messages has named */
    uint64_t done;          /**< how many bytes are in place, or (lender of a pull) were read */
    uint64_t *
        by_layer; /**< lender of a push: where they are counted by layer, see kvf_stage_count(); NULL: nowhere */
    kvf_credit credits[KVF_WINDOW_MAX];
    bool theirs_on_device;                   /**< mover: the lender's arena is to be a device's */
    uint32_t region, slot_bytes, slot_count; /**< mover: of the lender's arena */
    uint32_t moving;                         /**< operations under way */
    uint64_t operations;                     /**< that have succeeded */

    bool ended; /**< nothing new is begun for it; `status` is final */
    bool end_sent, end_heard;
    uint64_t end_sent_ns, end_pause_ns; /**< when the END was last sent; it is repeated after this pause */
    kvf_status status;
    char detail[KVF_STAGE_DETAIL_BYTES];
    bool counted;      /**< among the `flows` of its peer */
    bool owned;        /**< by a move, which releases it with kvf_stage_flow_leave() */
    uint64_t began_ns; /**< mover: when it began to send its opening; 0: it waits for its turn */
    uint64_t took_ns;  /**< mover: from then to the end */
    uint64_t heard_ns; /**< when it last made progress: a message, a completed operation, or bytes allowed */
    uint64_t waits_ns; /**< lender: since when it waits for a slot while its peer has none; 0: it does not */
    uint64_t kept_ns;  /**< lender: the latest of: first slot lent, a slot returned, the end */
    uint64_t doubt_ends; /**< lender: when the peer is shut out, which frees its slots; 0: not set */
    uint64_t kept_bytes; /**< lender: of memory, which count for its peer and for all of them */
    bool forgotten;      /**< lender: the peer has said that it does not know the flow */
    uint64_t late_ends;  /**< lender: what a peer that cannot be shut out has sent may arrive; 0: not known */
    void *card; /**< lender: of who has its slots, once another has joined by its name; NULL: the peer's */
    size_t card_bytes;
    uint64_t turn;                        /**< the number of its last turn */
    kvf_stage_flow *previous, *following; /**< all flows of the stage, in the order of turns */
};

struct kvf_stage_peer {
    kvf_peer *peer; /**< NULL: it has left */
    char *name;
    void *card; /**< of a peer that has left; NULL: none */
    size_t card_bytes;
    kvf_slot_share shares[KVF_ARENAS]; /**< by arena */
    kvf_known_cost *known;             /**< NULL: it has left */
    bool has_lists; /**< one operation takes many runs, which makes them cheap: kvf_cost_may_pack() */
    kvf_stage_flow *outgoing; /**< the flow whose opening is being sent; NULL: none */
    kvf_stage_flow *incoming; /**< the flow whose opening is being received */
    uint32_t flows[2];        /**< flows not over, [0] opened by it, [1] by us, without those that wait */
    uint32_t flows_most;      /**< limit of flows[1]: one, until its first ACCEPT says how many it takes */
    uint64_t opened_bytes;    /**< bytes of its openings whose flows are not over */
    uint64_t kept_bytes;      /**< of memory that its flows make us keep */
    kvf_stage_peer *previous, *following;
};

/** What kvf_stage_progress() has left to do at once. */
typedef enum kvf_stage_rest {
    KVF_REST_NOTHING = 0,
    KVF_REST_MESSAGES, /**< only messages that a peer does not take now, or for which there is no memory */
    KVF_REST_WORK,
} kvf_stage_rest;

struct kvf_stage {
    kvf_transport *transport;
    const kvf_shard *shard;
    kvf_stage_options options;
    uint32_t *convert; /**< options.convert, owned; NULL: none */
    const kvf_clock *clock;
    kvf_arena arenas[KVF_ARENAS]; /**< by the kind of their memory; one may be missing */
    char without_device
        [KVF_STAGE_DETAIL_BYTES]; /**< why there is no arena on the shard's device; "": none is needed */
    char why_host[KVF_STAGE_DETAIL_BYTES]; /**< why the device reaches nothing on the host, or less than the
                                              transport gave; "" */
    kvf_workers *workers;                  /**< NULL: kvf_stage_progress() makes the copies */
    bool uses_regions;                     /**< the transport knows of our workers or device */
    kvf_stage_device *device;              /**< the device with the shard's memory; NULL: it is the host's */
    uint64_t device_patience_ns;           /**< for the device's last copies, when the stage is closed */
    uint64_t model;
    kvf_shapes shapes;
    kvf_stage_peer *peers;
    kvf_known_cost *known_costs;  /**< of these peers */
    kvf_stage_flow *first, *last; /**< flows; those of higher priority first */
    kvf_stage_tally *tallies;     /**< of kvf_stage_count() */
    uint64_t turns;               /**< that flows have had */
    uint64_t last_flow;           /**< number of the last flow that we opened */
    uint32_t moving;              /**< operations under way, of all flows */
    uint32_t moves;               /**< moves that are not freed */
    uint64_t kept_bytes;          /**< of memory that the flows of all peers make us keep */
    kvf_status refusal;           /**< with which a flow ends that is not permitted */
    bool closed;                  /**< to be freed with the last flow, operation and move */
    kvf_stage_rest rest;          /**< of the last kvf_stage_progress() */
    kvf_stage_info counts;
};

/* ---- flow.c: code of both sides ------------------------------------------------------------------ */

/** Notes that this much is left to do; a smaller rest that was noted before is part of it. */
void kvf_stage_note_rest(kvf_stage *stage, kvf_stage_rest rest);

/** Makes a flow without a stream, and adds it to the list. @return NULL: no memory */
kvf_stage_flow *kvf_stage_flow_new(kvf_stage *stage, kvf_stage_peer *peer, uint64_t id, bool mover);

/** Sets the arena from which a flow takes slots; it has none yet. At first it is the host's. */
void kvf_stage_flow_use_arena(kvf_stage_flow *flow, kvf_memory_kind kind);

/** Puts a flow behind the others of its priority. */
void kvf_stage_flow_line_up(kvf_stage_flow *flow);

/** The peer's flow of that number in which we are the mover or the lender; NULL: there is none. */
kvf_stage_flow *kvf_stage_flow_find(const kvf_stage *stage, const kvf_stage_peer *peer, uint64_t id,
                                    bool mover);

/** Ends our side, once, and frees the slots that neither the peer nor a device uses. The thread's error detail is the
 * reason. */
void kvf_stage_flow_end(kvf_stage_flow *flow, kvf_status status);

/** The same, and reports an event: the peer broke the rules. */
void kvf_stage_flow_blame(kvf_stage_flow *flow, kvf_status status);

/** Counts a message that the peer must not send, and tells the user; the text is the thread's error detail. */
void kvf_stage_blame(kvf_stage *stage, const char *peer, kvf_status status);

/** Sends a message of this flow. False: the peer takes none at the moment, or is lost. */
bool kvf_stage_flow_say(kvf_stage_flow *flow, kvf_stage_message *message);

/** Sends one message that names all slots in state `from`, in the stream's order; their state is then `to`. */
void kvf_stage_flow_say_slots(kvf_stage_flow *flow, kvf_stage_word word, kvf_credit_state from,
                              kvf_credit_state to);

/** Sends the END if it is due, or due again. */
void kvf_stage_flow_say_end(kvf_stage_flow *flow);

/** Sends our END of a flow that does not exist here, with the thread's error detail. If the peer takes no message now,
 * nothing is sent: the peer repeats its END until it gets this answer.
 *
 * @param by_lender  the peer is the mover
 */
void kvf_stage_flow_deny(const kvf_stage_peer *peer, uint64_t flow, bool by_lender, kvf_status status);

/** Whether a credit of the flow is in this state. */
bool kvf_stage_flow_has(const kvf_stage_flow *flow, kvf_credit_state state);

/** Frees the flow's lent slots: the peer no longer uses them, because it has sent its END or is gone for good. */
void kvf_stage_flow_hear_end(kvf_stage_flow *flow);

/** Shuts the peer out, unless it has forgotten the flow, and frees these slots once neither the peer writes to one of
 * them, nor this process itself, as the mover has asked it to: a device may be late, however long ago the mover has gone.
 * If one still may, or what the peer has sent may still arrive, the caller tries again. */
void kvf_stage_flow_end_doubt(kvf_stage_flow *flow);

/** The credit in this state whose bytes come first; NULL: none. */
kvf_credit *kvf_stage_flow_credit(kvf_stage_flow *flow, kvf_credit_state state);

/** Counts the bytes of a credit as done, gives it back with `next` as its state, and ends a flow whose bytes are done. */
void kvf_credit_done(kvf_credit *credit, kvf_credit_state next);

/** Gives a credit's own slot, if any, back to our arena; the credit is then in state `next`. */
void kvf_credit_give(kvf_credit *credit, kvf_credit_state next);

/** Whether the shard's memory is registered: regions come and go, and unregistered memory is not touched.
 * @return KVF_OK, KVF_E_NOT_REGISTERED */
kvf_status kvf_stage_check_memory(const kvf_stage *stage);

/**
 * Copy a credit's bytes between the shard's memory and the credit's own slot: at once, or by a worker or device, during
 * which the credit is KVF_CREDIT_COPYING. If the shard's memory is not registered, the flow ends.
 *
 * @return whether they are copied; otherwise kvf_lender_copied() or kvf_mover_copied() is called after the copy, unless
 *         the flow ends first
 */
bool kvf_stage_flow_gather(kvf_credit *credit);
bool kvf_stage_flow_scatter(kvf_credit *credit);

/** Checks that bytes named by a peer are the next of the stream and end at an element: KVF_OK, KVF_E_RANGE. */
kvf_status kvf_stage_flow_check_bytes(const kvf_stage_flow *flow, kvf_byte_range bytes, uint64_t most);

/** Count a flow among its peer's, and stop counting it; each at most once. */
void kvf_stage_flow_count(kvf_stage_flow *flow);
void kvf_stage_flow_uncount(kvf_stage_flow *flow);

/** Gives back some of the memory that counts for the flow. */
void kvf_stage_flow_give(kvf_stage_flow *flow, uint64_t bytes);

/** Whether a worker or device copies between a slot of the flow and the shard's memory. One that has ended may still
 * have such copies: of a device that cannot be stopped. */
bool kvf_stage_flow_is_copied(const kvf_stage_flow *flow);

/** Reader: how many of the first bytes of the stream are in place. */
uint64_t kvf_stage_flow_in_place(const kvf_stage_flow *flow);

/** Whether nothing is left to do or to send. A flow that is over and not `owned` can be freed. */
bool kvf_stage_flow_is_over(const kvf_stage_flow *flow);

void kvf_stage_flow_free(kvf_stage_flow *flow);

/* ---- lender.c, mover.c ---------------------------------------------------------------------------
 *
 * step: at most one slot's worth of copying; false if there is nothing to do now.
 * copied: goes on with a slot whose bytes have been gathered or scattered.
 * talk: sends the messages that are due. hear: takes a message.
 */

bool kvf_lender_step(kvf_stage_flow *flow);
void kvf_lender_copied(kvf_credit *credit);
void kvf_lender_talk(kvf_stage_flow *flow);
void kvf_lender_hear(kvf_stage_flow *flow, const kvf_stage_message *message);
/** Whether it waits for a slot while its peer has none. */
bool kvf_lender_waits(const kvf_stage_flow *flow);
/** Whether the peer has slots of this flow, or slots wait for it of which it cannot be told: it may take no message. */
bool kvf_lender_awaits_slots(const kvf_stage_flow *flow);
/** Whether there are such slots of this flow, ended or not, and the peer has given none back since `before_ns`. */
bool kvf_lender_keeps(const kvf_stage_flow *flow, uint64_t before_ns);
/** Takes a part of an opening; the first part makes the flow. */
void kvf_lender_hear_open(kvf_stage *stage, kvf_stage_peer *peer, const kvf_stage_message *message);
/** Reads one of the long openings that have arrived. @return whether there are more */
bool kvf_lender_read_one(kvf_stage *stage);

bool kvf_mover_step(kvf_stage_flow *flow);
void kvf_mover_copied(kvf_credit *credit);
void kvf_mover_talk(kvf_stage_flow *flow);
void kvf_mover_hear(kvf_stage_flow *flow, const kvf_stage_message *message);

/** In which memory the two arenas of a flow are. */
typedef struct kvf_arena_choice {
    kvf_memory_kind ours, theirs;
} kvf_arena_choice;

/** A mover's request. */
typedef struct kvf_flow_wish {
    kvf_direction direction;
    kvf_stage_shape *shape;        /**< taken over, whatever becomes of the flow */
    const kvf_group_steps *ours;   /**< steps and blocks of this rank */
    const kvf_group_steps *theirs; /**< the same steps, with the peer's blocks */
    uint32_t group_count;
    uint32_t priority;
    uint64_t permission;
    bool held;
    kvf_arena_choice arenas;
} kvf_flow_wish;

/**
 * Begins a flow; nothing is sent before kvf_stage_progress().
 *
 * @param wish  read during the call
 * @param out   receives a flow that is `owned`, see kvf_stage_flow_leave()
 */
kvf_status kvf_mover_begin(kvf_stage *stage, kvf_stage_peer *peer, const kvf_flow_wish *wish,
                           kvf_stage_flow **out);

/** Lets a held flow begin `bytes` more bytes, but no more than the slots that the lender has lent can use: nothing is
 * saved up. Returns how many were used. */
uint64_t kvf_mover_allow(kvf_stage_flow *flow, uint64_t bytes);

/** Ends an owned flow if it has not ended, and gives up its ownership. */
void kvf_stage_flow_leave(kvf_stage_flow *flow);

/* ---- stage.c ------------------------------------------------------------------------------------- */

/** Frees a closed stage, once its last flow, operation and move are gone. */
void kvf_stage_release(kvf_stage *stage);

kvf_stage_peer *kvf_stage_find_peer(const kvf_stage *stage, const kvf_peer *peer);

#endif
