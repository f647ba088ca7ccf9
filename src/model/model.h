/*
 * What the rooms below may use of a model beyond its public header.
 */
#ifndef KVF_MODEL_MODEL_H
#define KVF_MODEL_MODEL_H

#include "base/base.h"

#include <kvferry/model.h>

/* Bounds on a description, far beyond any published model. They keep layers times parts, and indices into such tables,
 * well inside 32 bits. */
#define KVF_MODEL_MAX_LAYERS 65536u
#define KVF_MODEL_MAX_GROUPS 256u
#define KVF_MODEL_MAX_PARTS 64u
#define KVF_MODEL_MAX_NAME_BYTES 127u

/* Bounds on the notes of a model. */
#define KVF_MODEL_MAX_NOTES 16u
#define KVF_MODEL_NOTE_BYTES 256u

/** Notes for kvf_model_note(), each a text that ends in a zero byte. */
typedef struct kvf_notes {
    uint32_t count;
    char text[KVF_MODEL_MAX_NOTES][KVF_MODEL_NOTE_BYTES];
} kvf_notes;

/** kvf_model_create() with notes, which are copied; NULL: none. */
kvf_status kvf_model_create_noted(const kvf_model_desc *given, const kvf_notes *notes, kvf_model **out);

/**
 * Makes the same model with elements of other types.
 *
 * @param types  of each part of each group, in order
 * @return KVF_OK, or an error of kvf_model_create()
 */
kvf_status kvf_model_retype(const kvf_model *model, const kvf_dtype *types, kvf_model **out);

/** How many parts all groups have. */
uint32_t kvf_model_part_count(const kvf_model *model);

/** The first of the steps [begin, end) of a request that moves: steps before the group's window are left out. `end` if
 * none moves. */
uint64_t kvf_first_moved(const kvf_group_desc *group, uint64_t begin, uint64_t end);

/** How many tokens `steps` steps of a group stand for, or states in a state group; UINT64_MAX: more than that. */
static inline uint64_t kvf_group_token_count(const kvf_group_desc *group, uint64_t steps) {
    uint64_t tokens;
    return kvf_mul(steps, group->tokens_per_step, &tokens) ? tokens : UINT64_MAX;
}

/** The word for a step of a group: "token", "entry" or "state". */
const char *kvf_group_step_word(const kvf_group_desc *group);

/** "tokens" or "state". */
const char *kvf_group_kind_name(kvf_group_kind kind);

#endif
