/*
 * What is cached: groups of layers, and the parts each layer keeps.
 *
 * Every cache is a grid of cells, `row x unit`, inside each block:
 *
 *   part                                  a row is            a unit is         a cell is
 *   K or V of MHA, GQA, MQA               a token             a KV head         head_dim elements
 *   MLA latent, sparse-attention indexer  a token             the one latent    its width
 *   the same, compressed (DeepSeek V4)    several tokens      the one latent    its width
 *   quantisation scales                   a token             a KV head, or 1   one scale
 *   conv state, one part per projection   a step of the window  a channel       one element
 *   recurrent state (Mamba, delta rule)   one                 a head            head_dim x d_state elements
 *
 * So an element is identified by group name, layer number, part name, row, unit, and its index in the cell; engines
 * compare these before they exchange anything. How a rank cuts and spreads cells is described by its shard, not by the
 * model.
 *
 * A block table counts blocks, and a block holds *steps*. In a token group a step is one token, or one entry that
 * `tokens_per_step` neighbouring tokens were compressed into; in a state group it is one whole state (the only one of
 * the sequence, or one per checkpoint), and a block holds exactly one. A part has `rows_per_step` rows for each step,
 * so a token-paged part and a state differ in numbers only.
 *
 * A model is immutable once made: any thread may read it, and everything built from it keeps it alive.
 */
#ifndef KVFERRY_MODEL_H
#define KVFERRY_MODEL_H

#include <stdbool.h>

#include <kvferry/status.h>

#ifdef __cplusplus
extern "C" {
#endif

/** Half open: begin <= i < end. This struct stays as it is. */
typedef struct kvf_range {
    uint32_t begin;
    uint32_t end;
} kvf_range;

/** How an element is stored. */
typedef enum kvf_dtype {
    KVF_DTYPE_INVALID = 0,
    KVF_DTYPE_F64,
    KVF_DTYPE_F32,
    KVF_DTYPE_F16,
    KVF_DTYPE_BF16,
    KVF_DTYPE_F8_E4M3,
    KVF_DTYPE_F8_E5M2,
    KVF_DTYPE_I8,
    KVF_DTYPE_U8,
    KVF_DTYPE_F4_E2M1, /**< two elements a byte */
    KVF_DTYPE_I4,      /**< two elements a byte */
} kvf_dtype;

/** Bits of one element; 0 for a number that is not a kvf_dtype. */
KVF_API uint32_t kvf_dtype_bits(kvf_dtype dtype);

/** The name of a dtype: "f32", "bf16", "f8_e4m3" ...; "invalid" for a number that is not a kvf_dtype. */
KVF_API const char *kvf_dtype_name(kvf_dtype dtype);

/**
 * Finds a dtype by kvferry's name or by the names configuration files use: "bfloat16", "torch.float16",
 * "fp8", "fp8_e4m3", "float8_e4m3fn", "int8" ...
 *
 * @return KVF_OK or KVF_E_NOT_FOUND (`out` is then unchanged)
 */
KVF_API kvf_status kvf_dtype_by_name(const char *name, kvf_dtype *out);

/** What one entry of a group's block table holds. */
typedef enum kvf_group_kind {
    KVF_GROUP_TOKENS = 0, /**< a block of tokens, trimmed and clipped by token */
    KVF_GROUP_STATE = 1,  /**< one whole state, always copied whole */
} kvf_group_kind;

/** How a part's units are spread over tensor-parallel ranks. */
typedef enum kvf_tp_rule {
    KVF_TP_SPLIT = 0,     /**< contiguous shares; replicated where there are more ranks than granules */
    KVF_TP_REPLICATE = 1, /**< every rank keeps all units (a latent) */
} kvf_tp_rule;

/** One part of a layer's cache. The comment of a field says what zero means; names are copied with the model. */
typedef struct kvf_part_desc {
    const char *name;       /**< unique in its group: "k", "v", "latent", "indexer", "conv.x", "ssm" ... */
    kvf_dtype dtype;        /**< of one element */
    uint32_t units;         /**< units of the whole model, over all ranks; at least 1 */
    uint32_t granule_units; /**< units that tensor parallelism never separates (0 means 1); divides `units` */
    uint32_t cell_elements; /**< elements of one cell; must fill whole bytes; at least 1 */
    uint32_t rows_per_step; /**< rows for each token or state (0 means 1) */
    /** Parts with the same number share a buffer (conv.x, conv.B, conv.C); see kvf_group_spec */
    uint32_t tensor;
    kvf_tp_rule tp_rule;
    uint64_t reserved[2]; /**< 0 */
} kvf_part_desc;

/** A set of layers that share one block table. */
typedef struct kvf_group_desc {
    const char *name; /**< "full", "swa", "mla", "chunked", "ssm" ...; unique in the model */
    kvf_group_kind kind;
    uint32_t window_tokens; /**< sliding window: tokens a query can see, including itself; 0: all */
    uint32_t chunk_tokens;  /**< chunked attention: tokens before the current chunk are never read; 0: all */
    /** Neighbouring tokens that share an entry of the cache (0 means 1): entry e is that of the tokens from e *
     * tokens_per_step on, and is there once the last of them is computed. 1 with a window or chunks, and for states */
    uint32_t tokens_per_step;
    const uint32_t *layers; /**< model layer indices, ascending */
    uint32_t layer_count;
    const kvf_part_desc *parts;
    uint32_t part_count;
    uint64_t reserved[4]; /**< 0 */
} kvf_group_desc;

typedef struct kvf_model_desc {
    size_t struct_size;   /**< sizeof(kvf_model_desc) */
    const char *name;     /**< for messages; NULL means "model" */
    uint32_t layer_count; /**< layers of the model, cached or not */
    const kvf_group_desc *groups;
    uint32_t group_count;
} kvf_model_desc;

typedef struct kvf_model kvf_model;

/**
 * Makes a model from a description, which is copied.
 *
 * @param out  receives a model owned by the caller, see kvf_model_free()
 * @return KVF_OK, KVF_E_INVALID, KVF_E_RANGE, KVF_E_OVERFLOW or KVF_E_NOMEM; the detail names the group, the
 *         part and the field
 */
KVF_API kvf_status kvf_model_create(const kvf_model_desc *desc, kvf_model **out);

/** How to read a config.json. A zeroed struct means: cache in the model's own dtype, no scales. */
typedef struct kvf_config_options {
    size_t struct_size;    /**< sizeof(kvf_config_options) */
    const char *name;      /**< for messages; NULL: the configuration's model_type */
    kvf_dtype cache_dtype; /**< attention cache; KVF_DTYPE_INVALID: as the configuration says */
    kvf_dtype state_dtype; /**< state, also of compressors; KVF_DTYPE_INVALID: as the configuration says */
    kvf_dtype scale_dtype; /**< quantisation scales beside K and V; KVF_DTYPE_INVALID: none */
    bool scale_per_head;   /**< one scale per token and head; otherwise one per token */
} kvf_config_options;

/**
 * Makes a model from the text of a Hugging Face `config.json`.
 *
 * Reads multi-head, grouped and multi-query attention, latent attention (with or without a sparse indexer, also with
 * latents that several tokens share), sliding-window and chunked layers, and models whose layers, or keys and values,
 * differ in heads and head size. A family that is not known, a field that is missing and has no default in its family,
 * and fields that contradict each other are errors that name the field. A field that is not read for this family but
 * may, judging by its name, decide a size is not an error: kvf_model_note() names it.
 *
 * @param json     the text; need not end in a zero byte
 * @param options  NULL for the defaults
 * @param out      receives a model owned by the caller
 * @return KVF_OK, KVF_E_PARSE (not JSON; the detail names the offset), KVF_E_INVALID, KVF_E_RANGE,
 *         KVF_E_UNSUPPORTED (the family, or what no model of it had so far), KVF_E_NOMEM
 */
KVF_API kvf_status kvf_model_from_config(const char *json, size_t bytes, const kvf_config_options *options,
                                         kvf_model **out);

/**
 * The same from a file (at most 16 MiB), or, where `path_or_name` is not a file, from the models that come
 * with the library: kvf_builtin_model_name() lists them.
 *
 * @return as kvf_model_from_config(), or KVF_E_NOT_FOUND, KVF_E_IO
 */
KVF_API kvf_status kvf_model_load(const char *path_or_name, const kvf_config_options *options,
                                  kvf_model **out);

/** The name of the i-th model that comes with the library, such as "llama-3.1-8b"; NULL past the last. */
KVF_API const char *kvf_builtin_model_name(uint32_t i);

/**
 * The values of `model_type` of the i-th family whose configurations can be read, separated by spaces; NULL past the
 * last. Other models can be described by hand, see kvf_model_create().
 */
KVF_API const char *kvf_config_family(uint32_t i);

/** Adds an owner. Each owner must call kvf_model_free() once. Any thread. */
KVF_API kvf_model *kvf_model_retain(const kvf_model *model);

/** Gives up one ownership; NULL is accepted. Any thread. */
KVF_API void kvf_model_free(kvf_model *model);

/* The functions below read a model. The descriptions they return have their zero defaults filled in (granule_units,
 * rows_per_step, tokens_per_step), are owned by the model, and live as long as it does. */

KVF_API const char *kvf_model_name(const kvf_model *model);

/**
 * The i-th note about how the model was read, a sentence without its full stop; NULL past the last. Each names a field
 * of the configuration that may decide a size and was not read: the model may then differ from the one that the engines
 * run. There are at most 16. A model made from a description has none.
 */
KVF_API const char *kvf_model_note(const kvf_model *model, uint32_t i);

KVF_API uint32_t kvf_model_layer_count(const kvf_model *model);
KVF_API uint32_t kvf_model_group_count(const kvf_model *model);

/** The description of group `group`; NULL when there is no such group. */
KVF_API const kvf_group_desc *kvf_model_group(const kvf_model *model, uint32_t group);

/** Bytes of one cell of a part. */
KVF_API uint64_t kvf_part_cell_bytes(const kvf_part_desc *part);

/** Cache bytes of one step (a token, a compressed entry, a state) of one layer of a group, over the whole model. */
KVF_API uint64_t kvf_group_step_bytes(const kvf_group_desc *group);

/**
 * How many steps the first `tokens` tokens of a sequence make in a group: as many, or as many whole entries where
 * several tokens share one. Requests count steps, so the tokens [begin, end) are the steps from the count of `begin` to
 * that of `end`. Always 1 in state groups, where a request has the steps [0, 1).
 */
KVF_API uint64_t kvf_group_step_count(const kvf_group_desc *group, uint64_t tokens);

/**
 * The first of `end` cached tokens that a later query of this group can still read: 0 for full attention,
 * `end - window_tokens` for a sliding window (one more than the next query sees, so that the last token can
 * be computed again), the start of the last token's chunk for chunked attention. 0 for state groups.
 *
 * Requests leave out earlier tokens. So of the block that this token lies in, only the end may be filled: an engine that
 * keeps blocks for later prompts must not keep this one, unless the token is the first of it.
 */
KVF_API uint64_t kvf_group_first_needed(const kvf_group_desc *group, uint64_t end);

/** Whether two models agree on the groups that have the same name. */
typedef enum kvf_agreement {
    KVF_AGREE_SAME = 0,    /**< what both have of the group are the same elements of the same types */
    KVF_AGREE_CONVERT = 1, /**< the same elements of other types, which both sides allow to be converted */
    KVF_AGREE_DIFFER = 2,  /**< other elements: never moved */
    KVF_AGREE_MISSING = 3, /**< only one side has the group */
} kvf_agreement;

/**
 * The bit of one element type, for sets of them. The types that can be converted on the way are f32, f16, bf16,
 * f8_e4m3 and f8_e5m2. An element stands for the value that its bits say: engines that multiply their elements by a scale say so
 * in their facts (see `facts` of kvf_agent_options), so that engines with another scale, or none, are refused.
 */
#define KVF_DTYPE_BIT(dtype) (1u << (dtype))

/** What two models have in common in one group, as seen from one of them. */
typedef struct kvf_group_match {
    size_t struct_size;    /**< sizeof(kvf_group_match) */
    uint32_t ours, theirs; /**< the group's number in either model; UINT32_MAX: that model lacks it */
    kvf_agreement agreement;
    uint32_t layers_both;   /**< how many layers both models have in the group */
    uint32_t layers_ours;   /**< how many only ours has */
    uint32_t layers_theirs; /**< how many only theirs has */
    char name[128];         /**< of the group */
    char detail[512];       /**< what differs or is missing, with both values, cut to fit; "" if nothing */
} kvf_group_match;

/**
 * Checks that two models cache the same cells: same layers, groups, parts and dtypes, in the same order. The names of
 * the models are not compared, nor are the fields that an engine may choose: granule_units, tensor and tp_rule.
 *
 * Models that are not the same may still have groups in common: see kvf_plan_build().
 *
 * @return KVF_OK, or KVF_E_MISMATCH, whose detail names the first field that differs and both values
 */
KVF_API kvf_status kvf_model_compare(const kvf_model *a, const kvf_model *b);

#ifdef __cplusplus
}
#endif

#endif
