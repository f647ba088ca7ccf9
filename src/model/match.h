/*
 * What two models have in common, group by group.
 *
 * Groups and parts are the same when they have the same name, layers when they have the same number. What is
 * compared says what an element is: the kind of its group, which tokens are seen, which row, unit and element of
 * a cell it is, and its type. What an engine may choose is not: how it spreads units, shares tokens, cuts cells
 * and orders groups, parts and layers.
 */
#ifndef KVF_MODEL_MATCH_H
#define KVF_MODEL_MATCH_H

#include "model/model.h"

#define KVF_NO_GROUP UINT32_MAX

/** The element types that this library converts between: a set, see KVF_DTYPE_BIT(). */
#define KVF_CONVERTED_DTYPES                                                                                 \
    (KVF_DTYPE_BIT(KVF_DTYPE_F32) | KVF_DTYPE_BIT(KVF_DTYPE_F16) | KVF_DTYPE_BIT(KVF_DTYPE_BF16))

/** One of our groups, or one that we lack: as in kvf_group_match. */
typedef struct kvf_match_group {
    const char *name; /* the model's */
    uint32_t ours, theirs;
    kvf_agreement agreement;
    bool only_types; /* differ, and could be converted: not both sides allow it */
    uint32_t layers_both, layers_ours, layers_theirs;
    char *detail;
    kvf_range layers;      /* that both have: indices into our group's layers */
    uint32_t first_theirs; /* index of the first of them into their group's: the others follow it */
    uint32_t *parts;       /* [our part]: theirs */
} kvf_match_group;

typedef struct kvf_match {
    kvf_model *ours, *theirs;
    kvf_model *retyped;      /* ours, with the types that theirs has in groups that are converted */
    kvf_match_group *groups; /* by our groups, and then those that we lack */
    uint32_t our_count;      /* of our groups */
    uint32_t count;
} kvf_match;

/**
 * Compares two models.
 *
 * @param our_convert  for each of our groups, the types that we let be converted into each other: a set, see
 *                     KVF_DTYPE_BIT(). NULL: none
 * @param out          receives a match, see kvf_match_free()
 * @return KVF_OK (also when they have nothing in common) or KVF_E_NOMEM
 */
kvf_status kvf_match_build(const kvf_model *ours, const uint32_t *our_convert, const kvf_model *theirs,
                           const uint32_t *their_convert, kvf_match **out);

/** For each group of a model the same set, to be freed with kvf_free(); NULL: no memory. */
uint32_t *kvf_convert_sets(const kvf_model *model, uint32_t set);

/** The same seen from the other side. What was said by kvf_match_differ() is said there too. */
kvf_status kvf_match_reverse(const kvf_match *match, kvf_match **out);

/** Frees a match; NULL is accepted. */
void kvf_match_free(kvf_match *match);

/** Marks a group as different, for a reason that is not the model's. Adds to its detail. */
kvf_status kvf_match_differ(kvf_match *match, uint32_t group, const char *reason);

/**
 * Whether layers of our group can be filled from theirs: the same elements, of the same types or of types that both
 * sides let be converted, and none of these layers missing there.
 *
 * @param layers  indices into our group's layers
 * @return KVF_OK; KVF_E_MISMATCH or, where types would have to be converted, and not both sides allow it,
 *         KVF_E_UNSUPPORTED: the detail names the group and what differs
 */
kvf_status kvf_match_check(const kvf_match *match, uint32_t group, kvf_range layers);

/** Whether any group has elements in common. */
bool kvf_match_any(const kvf_match *match);

#endif
