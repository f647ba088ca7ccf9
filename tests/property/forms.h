/*
 * A recipe as the structures that the library's functions take.
 */
#ifndef KVF_PROPERTY_FORMS_H
#define KVF_PROPERTY_FORMS_H

#include <kvferry/request.h>

#include "unlike.h"

typedef struct model_form {
    kvf_model_desc desc;
    kvf_group_desc groups[MAX_GROUPS];
    kvf_part_desc parts[MAX_GROUPS][MAX_PARTS];
} model_form;

typedef struct engine_form {
    kvf_engine_spec spec;
    kvf_group_spec groups[MAX_GROUPS];
    char orders[MAX_GROUPS][ORDER_TEXT];
} engine_form;

typedef struct shard_form {
    kvf_shard_desc desc;
    kvf_group_shard_desc groups[MAX_GROUPS];
    kvf_part_share shares[MAX_GROUPS][MAX_PARTS];
    kvf_placement placements[MAX_GROUPS][MAX_LAYERS * MAX_PARTS];
    uint64_t region_bytes[MAX_REGIONS];
} shard_form;

/** The forms point into themselves, the recipe and the world: do not copy them. Groups and parts are in the order of
 * the side's model. */
void fill_model_form(const world *w, uint32_t side, model_form *out);
void fill_engine_form(const recipe *r, const world *w, uint32_t side, engine_form *out);
void fill_shard_form(const world *w, uint32_t side, uint32_t rank, shard_form *out);
/** A request of the groups that are asked for; the others stay empty. */
void fill_request_form(const world *w, const asked *ask, kvf_group_request out[MAX_GROUPS]);

#endif
