/*
 * Inside the model room: reading a config.json.
 *
 *   text --config_json--> fields --config_family--> family (a row of data)
 *     fields + family --config_layers, _blocks, _loops--> what each layer keeps
 *     fields + family --config_attention, _indexer, _latent, _overrides, _state--> the parts of each kind of layer
 *     all of it --config--> a kvf_model_desc
 *     fields + family --config_notes--> notes on fields that may decide sizes and were not read
 */
#ifndef KVF_MODEL_CONFIG_H
#define KVF_MODEL_CONFIG_H

#include <json-c/json.h>

#include "model/model.h"

/* Bounds on what a configuration may hold, far beyond any published one. */
#define KVF_CONFIG_MAX_BYTES (16u << 20)
#define KVF_CONFIG_MAX_DEPTH 32
#define KVF_CONFIG_MAX_HEADS 65536u
#define KVF_CONFIG_MAX_WIDTH (1u << 24) /**< hidden size, head sizes, ranks, channels */
#define KVF_CONFIG_MAX_WINDOW (1u << 31)

/* ---- fields ---------------------------------------------------------------------------------- */

/** One JSON object, and the prefix of its fields' names in messages: "text_config.". */
typedef struct kvf_fields {
    struct json_object *object; /**< borrowed from the tree */
    const char *family;         /**< the model_type, for messages; NULL while it is not known */
    char prefix[96];
} kvf_fields;

/**
 * Parses a text strictly: a single object, no field twice, bounded depth and size.
 *
 * @param tree  receives the tree; the caller gives it back with json_object_put()
 */
kvf_status kvf_config_parse(const char *json, size_t bytes, struct json_object **tree);

/*
 * Readers. `names` is one name, or several alternative names separated by '|': at most one may be given, or all with
 * the same value. A name after '>' counts only if none before it is given. A name with a '.' is the path to a field of
 * an inner object. A field that is null counts as not given. A field of another type, or out of bounds, is an error that
 * names the field, its value and the allowed values.
 */
#define KVF_NAME_ENDS "|>"

/** Whether a field with one of the names exists, even as null. */
bool kvf_field_exists(const kvf_fields *fields, const char *names);

/** The value, or NULL when not given; `name` (may be NULL) receives the name it was found under. */
kvf_status kvf_field_find(const kvf_fields *fields, const char *names, struct json_object **value,
                          const char **name);

/** A whole number. When not given: `given` is false and `out` stays as it was. */
kvf_status kvf_field_number(const kvf_fields *fields, const char *names, uint32_t least, uint32_t most,
                            bool *given, uint32_t *out);

/** A whole number that must be given, unless `fallback` is not 0. */
kvf_status kvf_field_need(const kvf_fields *fields, const char *names, uint32_t least, uint32_t most,
                          uint32_t fallback, uint32_t *out);

/** A flag. When not given, `out` stays as it was. */
kvf_status kvf_field_flag(const kvf_fields *fields, const char *names, bool *out);

/** A text, NULL when not given. It lives as long as the tree. */
kvf_status kvf_field_text(const kvf_fields *fields, const char *names, const char **out);

/** A list, NULL when not given. `name` as in kvf_field_find(). */
kvf_status kvf_field_list(const kvf_fields *fields, const char *names, struct json_object **out,
                          const char **name);

/** An object inside this one; `out->object` is NULL when not given. */
kvf_status kvf_field_object(const kvf_fields *fields, const char *name, kvf_fields *out);

/** Element `i` of the list `name` as a whole number. */
kvf_status kvf_element_number(const kvf_fields *fields, const char *name, struct json_object *list, size_t i,
                              uint32_t least, uint32_t most, uint32_t *out);

/** A value as it is written in the configuration, for a message, cut behind `most` bytes. */
kvf_excerpt kvf_value_written(struct json_object *value, size_t most);

/** The name of a field as text. */
typedef struct kvf_field_as_text {
    char text[64];
} kvf_field_as_text;

/** That of `names` under which the field is given; the first of them if it is not. */
kvf_field_as_text kvf_field_name(const kvf_fields *fields, const char *names);

/** Fails because a required field is missing: the detail names the field and the family, which has no default for
 * it. */
kvf_status kvf_field_missing(const kvf_fields *fields, const char *names);

/* ---- families -------------------------------------------------------------------------------- */

/** What a layer keeps. A set, because a layer may have both attention and state. */
typedef uint16_t kvf_keeps;
enum {
    KVF_KEEPS_NOTHING = 0,
    KVF_KEEPS_FULL = 1,
    KVF_KEEPS_WINDOW = 2,
    KVF_KEEPS_CHUNK = 4,
    KVF_KEEPS_STATE = 8,
    KVF_KEEPS_INDEXER = 16, /**< beside KVF_KEEPS_FULL: the keys of an indexer of its own */
    KVF_KEEPS_SPARSE =
        32, /**< beside KVF_KEEPS_WINDOW: an entry for KVF_SPARSE_TOKENS tokens, with an indexer */
    KVF_KEEPS_HEAVY = 64,    /**< beside KVF_KEEPS_WINDOW: an entry for KVF_HEAVY_TOKENS tokens */
    KVF_KEEPS_STREAMS = 128, /**< the last inputs of a convolution over the residual streams */
    KVF_KEEPS_EACH = 256,    /**< beside KVF_KEEPS_WINDOW: an entry for each token, with an indexer */
    KVF_KEEPS_PAIR =
        512, /**< beside KVF_KEEPS_WINDOW: an entry for KVF_PAIR_TOKENS tokens, with an indexer */
};
#define KVF_KEEPS_ATTENTION (KVF_KEEPS_FULL | KVF_KEEPS_WINDOW | KVF_KEEPS_CHUNK)
#define KVF_KEEPS_COMPRESSED (KVF_KEEPS_SPARSE | KVF_KEEPS_HEAVY | KVF_KEEPS_EACH | KVF_KEEPS_PAIR)

/* The compress ratios that engines know: each goes with a way of compressing, so no other can be assumed to work. */
#define KVF_PAIR_TOKENS 2u
#define KVF_SPARSE_TOKENS 4u
#define KVF_HEAVY_TOKENS 128u

/** How a configuration says what each layer keeps. The first rule that applies decides. */
typedef enum kvf_rule_kind {
    KVF_RULE_END = 0, /**< no rule applied: an error that names the first rule's field */
    KVF_RULE_ALL,     /**< every layer is `picked` */
    KVF_RULE_WINDOW,  /**< every layer is `picked`, when there is a window */
    KVF_RULE_WORDS,   /**< `field` lists a word for each layer */
    KVF_RULE_LETTERS, /**< `field` is a text with a letter for each layer */
    KVF_RULE_FLAGS,   /**< `field` lists 0 (`picked`) or 1 (`others`) for each layer */
    KVF_RULE_RATIOS,  /**< `field` lists how many tokens share an entry; `second`, words that must agree */
    KVF_RULE_SOURCES, /**< the same, but only the layers that `second` lists keep entries; others read theirs */
    KVF_RULE_PERIOD, /**< the last of every `field` layers is `picked`; with `second`, all from that one on */
    KVF_RULE_OFFSET, /**< layers with i % `field` == `second` are `picked`; the fallbacks when not given */
    KVF_RULE_BELOW,  /**< layers below `field` are `picked`, when there is a window */
    KVF_RULE_NUMBERS, /**< `field` lists the layers that are `picked`, `second` (may be absent) the others */
    KVF_RULE_BLOCKS,  /**< `field` lists an object for each layer, with its attention; see config_blocks.c */
} kvf_rule_kind;

typedef struct kvf_layer_rule {
    kvf_rule_kind kind;
    const char *field;
    const char *second;
    uint32_t fallback;        /**< 0: the rule does not apply without its field */
    uint32_t second_fallback; /**< for KVF_RULE_OFFSET and KVF_RULE_PERIOD */
    uint32_t first_number;    /**< for KVF_RULE_NUMBERS: the number of the first layer */
    bool whole;               /**< for KVF_RULE_PERIOD: the layers must make whole periods */
    kvf_keeps picked;
    kvf_keeps others;
} kvf_layer_rule;

typedef enum kvf_attention_kind {
    KVF_ATTENTION_NONE = 0,
    KVF_ATTENTION_HEADS,  /**< K and V of each KV head */
    KVF_ATTENTION_LATENT, /**< one latent for all heads, perhaps with an indexer key */
    KVF_ATTENTION_COMPRESSED, /**< one latent for all heads in a window, and in some layers one for several tokens */
} kvf_attention_kind;

typedef enum kvf_state_kind {
    KVF_STATE_NONE = 0,
    KVF_STATE_MAMBA1,
    KVF_STATE_MAMBA2,
    KVF_STATE_GDN,   /**< gated delta net */
    KVF_STATE_KDA,   /**< Kimi delta attention */
    KVF_STATE_CONV,  /**< a short convolution, and no recurrent state */
    KVF_STATE_CONVS, /**< one over keys, values, what the attention gives and what the MLP gives, each */
} kvf_state_kind;

/** Names of the fields that decide the size of a recurrent state. Those that a kind does not use are NULL. */
typedef struct kvf_state_fields {
    kvf_state_kind kind;
    const char *conv;       /**< taps of the convolution; the state keeps one fewer */
    const char *expand;     /**< inner width as a multiple of the hidden size */
    const char *inner;      /**< inner width; if it is null, `expand` gives it */
    uint32_t inner_or;      /**< the default of `inner` if it is missing; 0: it is required */
    const char *heads;      /**< value heads */
    const char *head_dim;   /**< of a value head; may be the text "auto" */
    const char *groups;     /**< Mamba 2: groups of B and C; delta rule: key heads */
    const char *state_size; /**< Mamba: of each channel; delta rule: of a key head */
    kvf_dtype dtype;        /**< of the recurrent state, unless a field gives it; 0: the model's */
} kvf_state_fields;

/** A convolution over the residual streams of some layers, beside what else they keep. Every rank keeps all of it. */
typedef struct kvf_stream_conv_fields {
    const char *layers;   /**< lists these layers, the first one as 1; missing or empty: there are none */
    const char *taps;     /**< the state keeps (taps - 1) x dilation inputs */
    const char *dilation; /**< tokens between two taps */
    const char *streams;  /**< each as wide as the hidden size */
    uint32_t taps_or, dilation_or, streams_or; /**< the defaults */
} kvf_stream_conv_fields;

#define KVF_INDEXER_SCALE_ELEMENTS 128u

/**
 * The indexer of layers with full attention: keys of its own, by which such a layer picks the tokens that it attends to.
 */
typedef struct kvf_indexer_fields {
    const char *width;     /**< elements of a key */
    uint32_t width_or;     /**< the default of `width`; 0: without it, the model has no indexers */
    const char *enabled;   /**< a flag without which there are none; NULL: there is no such field */
    const char *no_values; /**< a list with 1 for each layer that keeps no value beside its key; all must */
    const char *tokens;    /**< neighbouring tokens that share a key; NULL: each has its own */
    uint32_t tokens_or;    /**< the default of `tokens` */
    bool gated;      /**< the tokens of a key weigh differently: each keeps its weights beside its own key */
    uint32_t every;  /**< of so many layers one has an indexer, unless a field says it; 0: all */
    bool by_layer;   /**< the rules say which layers have an indexer */
    kvf_dtype dtype; /**< of a key, whatever the cache's is; 0: the model's */
    bool scaled;     /**< KVF_INDEXER_SCALE_ELEMENTS elements of a key share a scale */
} kvf_indexer_fields;

#define KVF_AS_MANY_AS_HEADS UINT32_MAX

/** Names of the fields that every configuration with heads has in some form. */
typedef struct kvf_size_names {
    const char *layers;
    const char *hidden;
    const char *heads;
    const char *kv_heads;
    const char *kv_heads_if; /**< `kv_heads` counts only where this flag is true, and else those of queries */
    const char *head_dim;    /**< NULL: "head_dim|attention_head_dim" */
} kvf_size_names;

/** The heads of some layers of a family, where they differ from those of the rest. Names are NULL if nothing differs. */
typedef struct kvf_other_heads {
    kvf_keeps keeps;         /**< the layers: those that keep this */
    const char *keeps_field; /**< a field with a word that says instead which layers; it may be missing */
    const char *query_heads;
    const char *kv_heads;    /**< not NULL */
    const char *kv_heads_if; /**< `kv_heads` counts only where this flag is true */
    const char *head_dim;
    const char *v_head_dim;
    uint32_t head_dim_or;    /**< the default of `head_dim`; 0: as in the other layers */
    uint32_t kv_heads_times; /**< KV heads by default, in those of the other layers; 0: as many */
} kvf_other_heads;

/** The latents of layers with a window, where other layers have latents of other sizes. */
typedef struct kvf_window_latent {
    const char *rank; /**< elements that are not rotated */
    const char *rope; /**< elements that are */
} kvf_window_latent;

/** How the latents of some layers differ from those of the rest, or are those of a layer before them. */
typedef struct kvf_latent_layers {
    const char
        *rope_flags; /**< a list with 0 for each layer whose latents have no rotated elements, else 1 */
    const char *rope_every; /**< without the list, the last of so many layers has none */
    uint32_t rope_every_or; /**< the default of `rope_every` */
    const char *sources; /**< a list with the layer whose latents each layer reads, itself or one before it */
} kvf_latent_layers;

/** Some layers in a row, through which tokens pass several times. Each time leaves a cache. */
typedef struct kvf_repeated_layers {
    const char *passes;
    const char *begin; /**< the first of these layers */
    const char *end;   /**< the layer after the last of them; NULL: `count` says it */
    const char *count; /**< how many they are */
    const char
        *which; /**< a word that says which passes leave a cache; NULL: all do, or there is no such field */
    const char *which_last;               /**< the word that says that only the last one does */
    uint32_t passes_or, begin_or, end_or; /**< the defaults; 0: the field is required */
} kvf_repeated_layers;

/**
 * Two stacks of layers that take turns: in each of `outer` cycles, the first stack has `inner` turns and the second one
 * turn. Each turn leaves a cache. The number of layers is that of a stack; or of all turns, if `stack` is given.
 */
typedef struct kvf_cycles {
    const char *outer;
    const char *inner;
    const char *stack;           /**< the number of layers of a stack */
    uint32_t outer_or, inner_or; /**< the defaults */
} kvf_cycles;

/** A field that must be given, or must have one of some values, because engines keep something else or disagree. */
typedef struct kvf_supported_field {
    const char *field;     /**< NULL: the end of a list of these */
    const char *values;    /**< separated by spaces, as JSON writes them but for quotes; NULL: all */
    const char *otherwise; /**< what a model without the field is; NULL: the field may be missing */
} kvf_supported_field;

/**
 * A family of models as data. Numbers are the family's defaults of fields that its published configurations leave out;
 * 0: the field is required.
 */
typedef struct kvf_family {
    const char *model_types;                   /**< separated by spaces */
    const kvf_layer_rule *layers;              /**< tried in order */
    const kvf_state_fields *state;             /**< NULL: none */
    const kvf_indexer_fields *indexer;         /**< NULL: none */
    const kvf_stream_conv_fields *stream_conv; /**< NULL: none */
    const kvf_size_names *names;               /**< NULL: those of most families */
    const kvf_other_heads *other;              /**< NULL: all layers have the same heads */
    const char *window_names;                  /**< NULL: "sliding_window" */
    const char *window_switch;                 /**< the window counts only where this flag is true */
    const kvf_window_latent *window_latent;    /**< NULL: no layer has a latent and a window */
    const kvf_latent_layers
        *latent_layers;          /**< NULL: all layers without a window have latents of the same size */
    const char *v_head_dim;      /**< size of a value head, if it differs from that of a key head */
    const char *one_kv_head;     /**< true, as it is by default: all query heads share one KV head */
    const char *one_kv_head_not; /**< unless this flag is true */
    const char *blocks;          /**< a list of a block for each layer, which says its KV heads */
    const char *shared_layers;   /**< number of last layers that use the cache of another layer */
    const char *draft_layers;    /**< by so many layers, which predict further tokens, lists may be longer */
    const char *unused;          /**< fields that seem to decide a size, and do not in this family */
    const char *latents_if;      /**< latents only if this flag is true, as it is by default */
    const struct kvf_family *without_latents; /**< what the family is otherwise */
    const char *loops; /**< tokens pass so many times through all layers, and leave a cache each time */
    const kvf_cycles *cycles;             /**< NULL: tokens pass through one stack of layers */
    const kvf_repeated_layers *repeated;  /**< NULL: tokens do not pass several times through some layers */
    const kvf_supported_field *supported; /**< NULL: nothing is refused beforehand */
    bool window_switch_or;                /**< the default of `window_switch` */
    bool last_is_full;                    /**< the last layer has full attention, whatever the rules say */
    bool null_kv_heads;                   /**< null as the number of KV heads means as many as heads */

    kvf_attention_kind attention;
    kvf_dtype dtype;
    uint32_t heads;
    uint32_t kv_heads; /**< KVF_AS_MANY_AS_HEADS: as many as there are heads */
    uint32_t head_dim; /**< 0: when not given, the hidden size divided by the heads */
    uint32_t
        head_dim_disputed; /**< the default of some engines, where others divide: both must be the same */
    uint32_t window, chunk;
    uint32_t shared_layers_or; /**< the default of `shared_layers` */
    uint32_t caches;           /**< of attention in each layer, which count as layers of their own; 0: one */
} kvf_family;

/** Whether `word` is one of `words`, which are separated by spaces, '|' or '>'. */
bool kvf_config_is_among(const char *word, const char *words);

/** The family of a model_type; NULL when it is not known. */
const kvf_family *kvf_family_find(const char *model_type);

/** The names of a family's fields. */
const kvf_size_names *kvf_family_names(const kvf_family *family);
const char *kvf_family_window_names(const kvf_family *family);
const char *kvf_family_head_dim_names(const kvf_family *family);

/* ---- building -------------------------------------------------------------------------------- */

#define KVF_CONFIG_MAX_HEAD_GROUPS 15u /**< of layers with heads: one for each kind in each of its shapes */
#define KVF_CONFIG_MAX_GROUPS (KVF_CONFIG_MAX_HEAD_GROUPS + 4u) /**< with those of indexers and states */
#define KVF_CONFIG_MAX_PARTS 4u
#define KVF_CONFIG_GROUP_NAME_BYTES 16u

/** The heads of an attention layer. */
typedef struct kvf_heads {
    uint32_t query_heads; /**< the KV heads must divide them */
    uint32_t kv_heads;
    uint32_t head_dim;   /**< of a key head */
    uint32_t v_head_dim; /**< of a value head */
} kvf_heads;

/** The latent of an attention layer. */
typedef struct kvf_latent {
    uint32_t rank; /**< elements that are not rotated */
    uint32_t rope; /**< elements that are */
} kvf_latent;

/** The indexers of a model. */
typedef struct kvf_indexer {
    uint32_t width;  /**< elements of a key; 0: there are none */
    uint32_t tokens; /**< neighbouring tokens that share a key */
} kvf_indexer;

/** What is known about a model while its description is built. */
typedef struct kvf_config {
    kvf_fields fields;
    struct json_object *root; /**< the whole configuration; `fields` may be an object inside it */
    const kvf_family *family;
    kvf_config_options options;
    kvf_dtype dtype;                      /**< the model's own */
    uint32_t window_tokens, chunk_tokens; /**< 0: none */
    uint32_t layer_count;
    kvf_keeps *keeps;    /**< [layer] */
    kvf_heads *heads;    /**< [layer], where it has attention with heads */
    kvf_latent *latents; /**< [layer], where it has attention with latents */
    kvf_indexer indexer;
    uint32_t *layers; /**< room for the layer lists of all groups: [KVF_CONFIG_MAX_GROUPS][layer_count] */
    uint32_t group_count;
    char group_names[KVF_CONFIG_MAX_GROUPS][KVF_CONFIG_GROUP_NAME_BYTES];
    kvf_group_desc groups[KVF_CONFIG_MAX_GROUPS];
    kvf_part_desc parts[KVF_CONFIG_MAX_GROUPS][KVF_CONFIG_MAX_PARTS];
    kvf_notes notes;
} kvf_config;

/** Sets window_tokens, chunk_tokens, layer_count and keeps (the caller frees it, also after a failure). */
kvf_status kvf_config_read_layers(kvf_config *config);

/**
 * Reads how many layers of the description each layer of the model is. If `count`, the number of layers that the
 * configuration says (0: it does not), counts some of them more than once, it becomes that of the model's.
 */
kvf_status kvf_config_read_times(const kvf_config *config, uint32_t *count, uint32_t *times);

/** Adds layers for each further pass through the family's repeated layers. All layers are known. */
kvf_status kvf_config_repeat_layers(kvf_config *config);

/** Finds what a layer keeps that a configuration describes by this word. Returns false if the word is not known. */
bool kvf_config_word_keeps(const char *word, kvf_keeps *keeps);

/**
 * Adds a group without layers, of which there are at most KVF_CONFIG_MAX_GROUPS. Its layers, in their order, and
 * its parts are then added one by one.
 */
kvf_group_desc *kvf_config_add_group(kvf_config *config, const char *name, kvf_group_kind kind);

/** Adds a layer to the group that was added last. */
void kvf_config_add_layer(kvf_config *config, uint32_t layer);

/** Adds all layers that keep `what` to the group that was added last. */
void kvf_config_add_layers(kvf_config *config, kvf_keeps what);

/** Adds a zeroed part to the group that was added last. */
kvf_part_desc *kvf_config_add_part(kvf_config *config, const char *name, kvf_dtype dtype);

/** Adds a part of one row of `elements`, which all ranks have, to the group that was added last; `tensor` is its place. */
void kvf_config_add_row(kvf_config *config, const char *name, kvf_dtype dtype, uint32_t elements,
                        uint32_t tensor);

/** What layers keep of a kind: which of them keep the same, and the parts of those. */
typedef struct kvf_kept_rows {
    const char *of; /**< for a message: "heads" */
    bool (*same)(const kvf_config *config, uint32_t layer, uint32_t other);
    kvf_status (*add)(kvf_config *config, uint32_t layer); /**< adds parts to the group that was added last */
} kvf_kept_rows;

/**
 * Adds a group, with its layers and parts, for each kind of rows that layers have that keep `what`: `name`, and if they
 * differ `name`.2 ...
 */
kvf_status kvf_config_add_alike(kvf_config *config, const char *name, kvf_group_kind kind, kvf_keeps what,
                                const kvf_kept_rows *rows);

/** Whether two layers have the same KV heads. */
bool kvf_config_same_heads(const kvf_config *config, uint32_t layer, uint32_t other);

/** Whether some layer keeps `what`. */
bool kvf_config_has(const kvf_config *config, kvf_keeps what);

/**
 * Applies `per_layer_config`, which overrides fields for single layers, to the heads or the latents of `config`. Without
 * both, no field that decides a size may differ.
 */
kvf_status kvf_config_override_layers(kvf_config *config);

/** Fails because `field` says `said` of all layers of a kind, but per_layer_config `is` of this one. */
kvf_status kvf_config_layer_differs(const kvf_config *config, const char *field, uint32_t said,
                                    uint32_t layer, uint32_t is);

/** Reads block `i` of the list `name`: it keeps full attention, or nothing if it has no attention. */
kvf_status kvf_config_block_keeps(const kvf_config *config, const char *name, struct json_object *list,
                                  size_t i, kvf_keeps *keeps);

/** Sets the KV heads of each layer with attention, as the blocks of the list `name` say. */
kvf_status kvf_config_block_heads(kvf_config *config, const char *name);

/** Checks that `kv_heads` divide the query heads. `prefix`, `kv_names` and `query_names` are for the message. */
kvf_status kvf_config_check_kv_heads(const kvf_config *config, const char *prefix, const char *kv_names,
                                     const char *query_names, const kvf_heads *heads);

/** Reads the indexers and marks the layers that have one of their own. */
kvf_status kvf_config_read_indexer(kvf_config *config);

/** Adds an indexer's key, with the scales of a quantised one, to the group that was added last, as a tensor of it. */
void kvf_config_add_indexer_key(kvf_config *config, uint32_t tensor);

/** Adds the groups of the indexers' keys and of what becomes one. The model has indexers. */
void kvf_config_add_indexer(kvf_config *config);

/** Add the groups of all attention layers, of all state layers, and of those with a convolution over streams. */
kvf_status kvf_config_add_attention(kvf_config *config);
kvf_status kvf_config_add_state(kvf_config *config);
kvf_status kvf_config_add_stream_conv(kvf_config *config);

/** Add the groups of attention layers with latents, or, after kvf_config_override_layers(), with compressed ones. */
kvf_status kvf_config_add_latents(kvf_config *config);
kvf_status kvf_config_add_compressed(kvf_config *config);

/* ---- what was not read ----------------------------------------------------------------------- */

/** What this reader does with a field, judged by its name. */
typedef enum kvf_field_use {
    KVF_FIELD_NO_SIZE = 0, /**< it decides no size of a cache */
    KVF_FIELD_READ,        /**< it may decide a size, and is read for this family */
    KVF_FIELD_UNREAD,      /**< it may decide a size, and is not read for this family */
} kvf_field_use;

/** `name` is the name of a field, or a path with '.' to a field of an inner object. */
kvf_field_use kvf_config_field_use(const kvf_config *config, const char *name);

/** Notes that a field is not read. More notes than there is room for are left out. */
void kvf_config_note_unread(kvf_config *config, const char *prefix, const char *name,
                            struct json_object *value);

/** Notes every field that may decide a size and is not read for this family. Call it after all layers have been
 * read. */
void kvf_config_note_unread_fields(kvf_config *config);

/* ---- the models that come with the library --------------------------------------------------- */

typedef struct kvf_builtin_model {
    const char *name;
    const unsigned char *text;
    size_t bytes;
} kvf_builtin_model;

/** Generated at build time from models/, by name; ends with a row without a name. */
extern const kvf_builtin_model kvf_builtin_models[];

#endif
