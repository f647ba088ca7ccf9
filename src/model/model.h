/*
 * What the rooms below may use of a model beyond its public header.
 */
#ifndef KVF_MODEL_MODEL_H
#define KVF_MODEL_MODEL_H

#include "base/base.h"

#include <kvferry/model.h>

/* Bounds on what a description may hold, far beyond any published model. With them, counts of layers times
 * parts and indices into such tables stay well inside 32 bits. */
#define KVF_MODEL_MAX_LAYERS 65536u
#define KVF_MODEL_MAX_GROUPS 256u
#define KVF_MODEL_MAX_PARTS 64u
#define KVF_MODEL_MAX_NAME_BYTES 127u

/** "tokens" or "state". */
const char *kvf_group_kind_name(kvf_group_kind kind);

/** "split" or "replicate". */
const char *kvf_tp_rule_name(kvf_tp_rule rule);

#endif
