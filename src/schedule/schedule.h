/*
 * The inside of a schedule. Each generation of a request is a *record* with two parts, the one it loads and the one it
 * serves; instructions for workers are a queue of *orders*. A part has at most one order that was not taken, and points
 * to it, so that it can be withdrawn.
 *
 * A record is settled, and removed from every list of live ones, as soon as none of its parts is pending. Results of
 * the call that settles it point to it, so it is freed with the next call (kvf_schedule_release_results).
 */
#ifndef KVF_SCHEDULE_SCHEDULE_H
#define KVF_SCHEDULE_SCHEDULE_H

#include "schedule/keys.h"

#define KVF_TRANSFER_ID_BYTES 1024u

/** The state of a part of a request. */
typedef enum part_state {
    PART_NONE = 0, /* nothing to do, or over */
    PART_WAITING,  /* load: a source is known. serve: until the request has finished */
    PART_PLANNED,  /* the order is not taken yet */
    PART_ACTIVE,   /* workers carry it out */
    PART_STOPPING, /* workers were told to stop */
    PART_DONE,     /* serve: pushed, but the request has not finished */
} part_state;

typedef struct record record;
typedef struct order order;

/** What a request loads, and from where. */
typedef struct load_part {
    part_state state;
    order *order;
    char *engine, *endpoint, *public_key; /* owned, never NULL while there is a source */
    kvf_request_id id;                    /* owned */
    uint64_t expiry_ns;
    int64_t clock_offset_ns;
    uint64_t tokens; /* leading tokens of the prompt that can be loaded */
    bool push;
    bool reserved; /* workers keep the source alive */
    bool alive;    /* a heartbeat has been sent, so expiry_ns is no longer valid */
    uint64_t next_beat_ns;
    uint64_t computed, end;   /* tokens cached before the load; and with the load */
    kvf_group_steps *groups;  /* steps to load, and their blocks; of kvf_copy_groups() */
    kvf_group_block *invalid; /* those of its blocks, sorted, without duplicates */
    size_t invalid_count;
} load_part;

/** What a request serves. */
typedef struct serve_part {
    part_state state;
    order *order;
    uint32_t consumers;
    bool push;
    kvf_request_id id; /* owned */
} serve_part;

/** All generations of one id, the newest first. */
typedef struct name {
    UT_hash_handle hh;
    record *newest;
    size_t size;
    unsigned char bytes[];
} name;

struct record {
    record *prev, *next; /* in the list of all records, or of settled ones */
    record *older;       /* of the same name */
    name *name;
    kvf_request_key key; /* data points behind the struct */
    load_part load;
    serve_part serve;
    bool ended; /* ended for the engine: only its blocks still matter */
    unsigned char id[];
};

struct order {
    order *prev, *next;
    record *record;              /* NULL: no record depends on it */
    kvf_instruction instruction; /* everything in it is owned; groups of kvf_copy_groups() */
    unsigned char bytes[];
};

struct kvf_schedule {
    kvf_schedule_options options; /* texts and tokens_per_block are owned */
    const kvf_model *model;
    uint32_t group_count;
    bool has_state;
    uint64_t last_generation;
    name *names;
    record *records, *settled;
    size_t record_count;
    order *queue, *taken;
    size_t queue_length;
    kvf_instruction *instructions; /* the instructions that were taken */
    kvf_transfer_params params;    /* of the request that finished last; its id is in params_id */
    unsigned char params_id[KVF_TRANSFER_ID_BYTES];
    /* results */
    kvf_loaded *loaded;
    kvf_freed *freed;
    kvf_heartbeat *beats;
};

/* ---- records (schedule.c) */

/** Frees the records that results of the last call may have pointed to. Every call begins with it. */
void kvf_schedule_release_results(kvf_schedule *s);

/** The record of a key: the newest for generation 0, ended or not. NULL: unknown. */
record *kvf_find_record(const kvf_schedule *s, const kvf_request_key *key);

/** Fails with KVF_E_NOT_FOUND; `r` is the record that has ended, or NULL. */
kvf_status kvf_unknown_request(const kvf_request_key *key, const record *r);

/** kvf_find_record() for a call of the engine: KVF_E_NOT_FOUND also when the request has ended. */
kvf_status kvf_live_record(kvf_schedule *s, const kvf_request_key *key, record **out);

/** Settles a record if it has ended and no part is pending. */
void kvf_settle_record(kvf_schedule *s, record *r);

static inline bool kvf_part_is_pending(part_state state) {
    return state == PART_PLANNED || state == PART_ACTIVE || state == PART_STOPPING;
}

/* ---- tables (groups.c) */

/** Copies groups and their tables into one piece of memory, free with kvf_free(). NULL: no memory. */
kvf_group_steps *kvf_copy_groups(const kvf_group_steps *groups, uint32_t count);

/**
 * Makes the groups of an instruction: of each token group the tokens [begin, end) as far as they are needed
 * after `end`, of each state group the state in the last block.
 */
kvf_status kvf_make_groups(const kvf_schedule *s, const kvf_block_table *tables, uint32_t count,
                           uint64_t begin, uint64_t end, kvf_group_steps **out);

/** Makes the groups of the first `tokens` tokens, without blocks. */
kvf_status kvf_make_steps(const kvf_schedule *s, uint64_t tokens, kvf_group_steps **out);

/* ---- orders (orders.c) */

/**
 * Makes an order about a record's load, or serve (HOLD, PUSH, and CANCEL of those). It is not queued yet, so that the
 * caller can still fail.
 *
 * @param groups  copied; NULL: none
 * @return NULL: no memory
 */
order *kvf_make_order(const kvf_schedule *s, const record *r, kvf_instruction_kind kind,
                      kvf_instruction_kind cancels, const kvf_group_steps *groups);

/** Queues an order; `slot` (of a part, may be NULL) then points to it until it is taken or withdrawn. */
void kvf_queue_order(kvf_schedule *s, order *o, record *r, order **slot);

/** Takes an order out of the queue and frees it; a NULL in the slot is accepted. */
void kvf_withdraw_order(kvf_schedule *s, order **slot);

/** Queues the cancellation of an active part, unless it is being cancelled already: KVF_OK or KVF_E_NOMEM. */
kvf_status kvf_cancel_part(kvf_schedule *s, const record *r, kvf_instruction_kind cancels, part_state *state);

void kvf_free_orders(order **list);

/* ---- ending a part (load.c, serve.c) */

/**
 * Stops a load, because the request is gone (`gone`), or will come again without blocks.
 *
 * @param kept  set if workers still use the blocks
 */
kvf_status kvf_stop_load(kvf_schedule *s, record *r, bool gone, bool *kept);

/** Queues a RESERVE for a waiting load, unless the engine sends heartbeats itself. */
kvf_status kvf_reserve_source(kvf_schedule *s, record *r);

/** Drops a source whose lease has ended; `over` receives whether it had. */
kvf_status kvf_check_lease(kvf_schedule *s, record *r, uint64_t now_ns, bool *over);

#endif
