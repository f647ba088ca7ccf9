/*
 * Two models that differ: the part of a local shard that can be filled, and the requests that must be refused, with the
 * name that the detail must say.
 */
#ifndef KVF_PROPERTY_UNLIKE_H
#define KVF_PROPERTY_UNLIKE_H

#include <kvferry/status.h>

#include "world.h"

/* The request for a plan. */
typedef struct asked {
    bool groups[MAX_GROUPS];
    uint32_t layers_begin, layers_end; /* of the model; empty: all */
    uint32_t
        converts; /* 1: floating-point types into each other; not bool, since it is compared byte by byte */
} asked;

typedef struct layer_span {
    uint32_t begin, end; /* indices into the local group's layers */
} layer_span;

/** The recipe's request: every group of the local model. */
asked ask_all(const recipe *r, const world *w);

/** Layers of a group that a local rank holds and is asked to fill. */
layer_span wanted_layers(const world *w, const asked *ask, uint32_t local_rank, uint32_t group);

/** Whether a layer of a local rank's group is among these. */
static inline bool is_wanted(const world *w, const asked *ask, uint32_t local_rank, uint32_t group,
                             uint32_t layer) {
    layer_span span = wanted_layers(w, ask, local_rank, group);
    return layer >= span.begin && layer < span.end;
}

/* Why a plan must be refused. */
typedef struct refusal {
    kvf_status status;
    uint32_t group;
    char named[64];    /* a text that the detail must contain */
    layer_span common; /* if only layers are the reason: those that both have; else empty */
} refusal;

/** Whether a plan for a local rank must be refused because the remote model differs or lacks something. */
bool must_refuse(const world *w, const asked *ask, uint32_t local_rank, refusal *out);

/** Asks for less: leaves out what the plan was refused for. */
void ask_less(const world *w, const refusal *why, asked *ask);

#endif
