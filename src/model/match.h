/*
 * What two models have in common, group by group.
 *
 * Groups and parts are matched by name, layers by number. The fields that say what an element is are compared: the kind
 * of its group, the tokens that are seen, its row, unit and index in the cell, and its type. The fields that an engine
 * may choose are not: how it spreads units, shares tokens, cuts cells and orders groups, parts and layers.
 */
#ifndef KVF_MODEL_MATCH_H
#define KVF_MODEL_MATCH_H

#include "model/model.h"

#define KVF_NO_GROUP UINT32_MAX

/** The element types that this library converts between: a set, see KVF_DTYPE_BIT(). */
#define KVF_CONVERTED_DTYPES                                                                                 \
    (KVF_DTYPE_BIT(KVF_DTYPE_F32) | KVF_DTYPE_BIT(KVF_DTYPE_F16) | KVF_DTYPE_BIT(KVF_DTYPE_BF16) |           \
     KVF_DTYPE_BIT(KVF_DTYPE_F8_E4M3) | KVF_DTYPE_BIT(KVF_DTYPE_F8_E5M2))

/** One of our groups, or one that we lack, as in kvf_group_match. */
typedef struct kvf_match_group {
    const char *name; /* the model's */
    uint32_t ours, theirs;
    kvf_agreement agreement;
    bool only_types; /* only the types differ, and not both sides allow their conversion */
    uint32_t layers_both, layers_ours, layers_theirs;
    char *detail;
    kvf_range layers;      /* layers that both have, as indices into our group's layers */
    uint32_t first_theirs; /* index of the first of these in their group; the others follow it */
    uint32_t *parts;       /* [our part]: theirs */
} kvf_match_group;

typedef struct kvf_match {
    kvf_model *ours, *theirs;
    kvf_model *retyped;      /* our model, with the types of theirs in groups that are converted */
    kvf_match_group *groups; /* our groups, then those that we lack */
    uint32_t our_count;      /* of our groups */
    uint32_t count;
} kvf_match;

/**
 * Compares two models.
 *
 * @param our_convert  for each of our groups, the set of types that we allow to be converted into each other, see
 *                     KVF_DTYPE_BIT(). NULL: none
 * @param out          receives a match, see kvf_match_free()
 * @return KVF_OK (also when they have nothing in common) or KVF_E_NOMEM
 */
kvf_status kvf_match_build(const kvf_model *ours, const uint32_t *our_convert, const kvf_model *theirs,
                           const uint32_t *their_convert, kvf_match **out);

/** Makes an array with the same set for each group of a model, to be freed with kvf_free(); NULL: no memory. */
uint32_t *kvf_convert_sets(const kvf_model *model, uint32_t set);

/** Makes the match as seen from the other side, including the reasons given to kvf_match_differ(). */
kvf_status kvf_match_reverse(const kvf_match *match, kvf_match **out);

/** Frees a match; NULL is accepted. */
void kvf_match_free(kvf_match *match);

/** Marks a group as different, for a reason that is not in the models, and adds the reason to its detail. */
kvf_status kvf_match_differ(kvf_match *match, uint32_t group, const char *reason);

/**
 * Checks that layers of our group can be filled from theirs: that these have the same elements, of the same types or of
 * types that both sides allow to be converted, and that no layer is missing there.
 *
 * @param layers  indices into our group's layers
 * @return KVF_OK; KVF_E_MISMATCH; or KVF_E_UNSUPPORTED if types would have to be converted and not both sides allow it:
 *         the detail names the group and the difference
 */
kvf_status kvf_match_check(const kvf_match *match, uint32_t group, kvf_range layers);

/** Whether any group has elements in common. */
bool kvf_match_any(const kvf_match *match);

#endif
