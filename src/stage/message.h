/*
 * The messages of two stages, each the bytes of one notification. docs/protocol.md has them as tables.
 *
 * The rank that opens a flow is its *mover*: its operations move the bytes, by reading (a pull) or writing (a push).
 * The other rank is the *lender*: it lends slots of its arena. In a pull, slots are lent full and come back empty; in
 * a push, they are lent empty and come back full.
 *
 *     mover     OPEN (in parts)          RETURN ..               END
 *     lender                   ACCEPT            LEND ..               END
 */
#ifndef KVF_STAGE_MESSAGE_H
#define KVF_STAGE_MESSAGE_H

#include <kvferry/transport.h>

#include "stage/stream.h"

#define KVF_STAGE_VERSION 1u
#define KVF_STAGE_MESSAGE_MAX 4096u
#define KVF_STAGE_SLOTS_MAX 16u      /**< of one LEND or RETURN */
#define KVF_STAGE_SENTENCE_MAX 1024u /**< bytes of the sentence in an END */

typedef enum kvf_stage_word {
    KVF_STAGE_OPEN = 1,
    KVF_STAGE_ACCEPT = 2,
    KVF_STAGE_LEND = 3,
    KVF_STAGE_RETURN = 4,
    KVF_STAGE_END = 5,
} kvf_stage_word;

/** A slot of the lender, and the bytes of the stream in it; an empty slot has begin and end 0. */
typedef struct kvf_slot_note {
    uint32_t slot;
    uint32_t generation;
    kvf_byte_range bytes;
} kvf_slot_note;

typedef struct kvf_stage_message {
    kvf_stage_word word;
    uint64_t flow;
    /* OPEN: bytes [at, at + part_bytes) of an opening of `opening_bytes` */
    uint32_t opening_bytes, at;
    const unsigned char *part;
    size_t part_bytes;
    /* ACCEPT: where the slots are, the bytes of the stream, and how many flows the lender lets its peer open */
    uint32_t region, slot_bytes, slot_count;
    uint64_t stream_bytes;
    uint32_t flows;
    /* LEND, RETURN */
    uint32_t slot_count_named;
    kvf_slot_note slots[KVF_STAGE_SLOTS_MAX];
    /* END */
    bool by_lender;
    kvf_status status;
    char sentence[KVF_STAGE_SENTENCE_MAX];
} kvf_stage_message;

/** Whether a notification comes from a stage, of any version, well formed or not. */
bool kvf_stage_is_message(const void *data, size_t bytes);

/**
 * Reads a message. `out->part` points into the data.
 *
 * @return KVF_OK, KVF_E_UNSUPPORTED (another version), KVF_E_PARSE (the detail names what is wrong)
 */
kvf_status kvf_stage_read_message(const void *data, size_t bytes, kvf_stage_message *out);

/** Writes a message and returns its bytes. The part of an OPEN (see kvf_stage_part_max()) and the sentence of an END
 * are cut to fit. */
size_t kvf_stage_write_message(const kvf_stage_message *message, unsigned char out[KVF_STAGE_MESSAGE_MAX]);

/** The most bytes of an opening that fit in one OPEN. */
size_t kvf_stage_part_max(void);

/* ---- the opening ----------------------------------------------------------------------------- */

#define KVF_STAGE_OPENING_MAX (8u << 20) /**< bytes: two million blocks */

/** A mover's request for a flow. */
typedef struct kvf_opening {
    kvf_direction direction; /**< KVF_READ: the mover reads */
    bool on_device;          /**< the lender is to lend slots in memory of its device */
    uint32_t priority;
    uint32_t window;       /**< the most slots that it wants to have at once */
    uint32_t slot_bytes;   /**< the most bytes that it takes in one slot */
    uint64_t stream_bytes; /**< as the mover computes them */
    uint64_t model;        /**< kvf_stage_model_sum() of its model */
    uint64_t permission;   /**< a number that the lender gave; 0: none */
    const kvf_stream_item *items;
    uint32_t item_count;
    const kvf_group_steps *groups; /**< with the lender's blocks */
    uint32_t group_count;
    uint32_t *ids; /**< of all tables, in an opening that was read */
} kvf_opening;

/** A checksum of a model's groups, layers and parts; equal models have equal sums. */
uint64_t kvf_stage_model_sum(const kvf_model *model);

/** The bytes of an opening with so many items and groups, and so many entries in all tables together. */
uint64_t kvf_stage_opening_bytes(uint32_t items, uint32_t groups, uint64_t blocks);

/**
 * @param out  receives bytes owned by the caller, see kvf_free()
 * @return KVF_OK, KVF_E_LIMIT (more than KVF_STAGE_OPENING_MAX), KVF_E_NOMEM
 */
kvf_status kvf_stage_write_opening(const kvf_opening *opening, unsigned char **out, size_t *bytes);

/** @return KVF_OK, KVF_E_PARSE, KVF_E_NOMEM. After a failure `out` needs no freeing */
kvf_status kvf_stage_read_opening(const unsigned char *data, size_t bytes, kvf_opening *out);

/** Frees the contents of an opening that kvf_stage_read_opening() filled in. */
void kvf_stage_free_opening(kvf_opening *opening);

#endif
