/*
 * The shape of an engine as the user writes it: "tp=4,pp=2,block=16,order=nhd,state.order=sd".
 *
 * A key without a dot is for the engine or for all token groups; "state.KEY" for all state groups; and
 * "GROUP.KEY" for the group of that name. The more specific key wins.
 */
#ifndef KVFERRY_CLI_SHAPE_H
#define KVFERRY_CLI_SHAPE_H

#include <kvferry/shard.h>

#include "cli.h"

enum { SHAPE_MAX_SETTINGS = 64 };

/** A KEY=VALUE; its texts lie in engine_shape.text. */
typedef struct shape_setting {
    const char *group; /* before the dot; NULL: none */
    const char *key;
    char *value;
} shape_setting;

typedef struct engine_shape {
    const char *side; /* "prefill" or "decode": for messages, and the engine's name unless it has another */
    const char *name; /* owned by the caller; NULL: the name is that of the side */
    char *text;       /* owned, cut into the settings */
    char *written;    /* owned, as the user wrote it */
    shape_setting settings[SHAPE_MAX_SETTINGS];
    uint32_t setting_count;
    bool is_read; /* every key is understood: what is refused after that is impossible for the model */
    uint32_t tp, pp, dcp, dcp_width;
    bool pp_given;
    uint32_t *pp_layers;    /* owned; NULL: split as evenly as possible */
    uint32_t pp_stages;     /* entries of pp_layers */
    kvf_group_spec *groups; /* owned; one for each group of the model */
    bool share_pages;       /* all groups keep their blocks in the same memory, see shared_pages.h */
    bool *fixed_blocks;     /* owned; by group: whether the number of blocks was asked for */
    kvf_dtype *types;       /* owned; by group: of elements; KVF_DTYPE_INVALID: as the model says */
    bool retyped;           /* some are asked for: engines convert then */
    bool *turned_keys;      /* owned; by group: keys are kept channel by channel, see shape_keys.h */
    bool turns_keys;        /* some are */
} engine_shape;

/**
 * Reads a shape for a model. Returns EXIT_DONE, or prints what is wrong and returns EXIT_USAGE. Free it with
 * shape_free() in either case. The numbers of blocks are those that the user gave, or 0.
 */
int shape_parse(const char *side, const char *written, const kvf_model *model, engine_shape *out);

void shape_free(engine_shape *shape);

/** Chooses numbers of blocks if the user gave none: for plans, which do not depend on them. */
void shape_fill_blocks(engine_shape *shape, const kvf_model *model);

/** Lays out the engine with the block counts of shape->groups; prints what is wrong with it. */
int shape_build(const engine_shape *shape, const kvf_model *model, kvf_engine **out);

/** Writes how the groups' blocks and orders are, in short: "16 nhd", "16 nhd, ssm 1 sd". */
void shape_describe_groups(const engine_shape *shape, const kvf_model *model, char *out, size_t bytes);

/** Writes the layers of each pipeline stage, such as "20+12", or "" if all stages have equally many. */
void shape_describe_stages(const engine_shape *shape, const kvf_engine *engine, char *out, size_t bytes);

/** The number of layers of a pipeline stage. */
uint32_t shape_stage_layers(const engine_shape *shape, const kvf_engine *engine, uint32_t stage);

/** The i-th key: "tp", then "pp" ...; NULL past the last. */
const char *shape_key(uint32_t i);

/** The part of the help that says how shapes are written. */
void print_shape_help(void);

/** Whether any group of a model keeps states. */
bool shape_keeps_state(const kvf_model *model);

#endif
