/*
 * The runner of recorded vectors. A case has a question (`op`), its inputs and the recorded answer.
 *
 * A set is one file, `<set>_set.c`, with a table of ops. An op's function asks the library and returns an answer in the
 * shape of the recorded one, or a refusal, or says that it does not cover the case. Comparing, counting and suspects
 * are the same for all ops. A new set is a new file and one line in main.c.
 */
#ifndef KVF_TESTS_VECTORS_H
#define KVF_TESTS_VECTORS_H

#include <json-c/json.h>

#include <kvferry/connector/descriptors.h>

typedef struct memory_node memory_node;

/** One case. Everything in it lives until the case is done. */
typedef struct vector_case {
    const char *id;
    const char *op;
    bool is_seed; /* recorded from the two pull requests, not from 0.32 */
    json_object *in;
    json_object *out;       /* the recorded answer, or NULL and ... */
    const char *error_kind; /* ... the recorded refusal */
    const char *suspect;    /* why the recorded answer is wrong; NULL: it is right */
    char malformed[128];    /* set by the readers below: what is wrong with the case itself */
    memory_node *memory;
} vector_case;

/** The answer of an op. */
typedef struct answer {
    json_object *out;        /* owned */
    const char *refusal;     /* NULL, or the kind of the error */
    char detail[256];        /* its text */
    const char *not_covered; /* NULL, or why the op does not answer this case */
} answer;

answer answer_with(json_object *out);

/** A refusal with the library's last error on this thread. */
answer answer_refused(void);

/** `reason` must outlive the runner, so it is a literal. */
answer answer_not_covered(const char *reason);

/** One op of a set. */
typedef struct vector_op {
    const char *name;
    answer (*run)(vector_case *c);
    bool
        defect_elsewhere; /* a suspect's defect is not in this op's answer, which may equal the recorded one */
} vector_op;

/** The ops of a set; the last one's name is NULL. */
extern const vector_op topology_ops[];
extern const vector_op tp_mapping_ops[];
extern const vector_op desc_ids_ops[];
extern const vector_op reads_ops[];
extern const vector_op gemma_ops[];
extern const vector_op mamba_ops[];
extern const vector_op postprocess_ops[];
extern const vector_op aggregator_ops[];
extern const vector_op handshake_ops[];

/* ---- reading a case: a field that is missing or of another type marks the case as malformed and reads as 0,
 * false, an empty list or an empty text */

/** Memory that lives as long as the case. */
void *case_memory(vector_case *c, size_t count, size_t element_bytes);
void case_release(vector_case *c);

/** A field that must be there. */
json_object *read_field(vector_case *c, json_object *object, const char *key);

/** Whether a field is there and not null. */
bool has_field(json_object *object, const char *key);

uint64_t read_u64(vector_case *c, json_object *object, const char *key);
uint32_t read_u32(vector_case *c, json_object *object, const char *key);
int64_t read_i64(vector_case *c, json_object *object, const char *key);
bool read_bool(vector_case *c, json_object *object, const char *key);
const char *read_text(vector_case *c, json_object *object, const char *key);

/** The number, or `otherwise` when the field is missing or null. */
uint32_t read_u32_or(vector_case *c, json_object *object, const char *key, uint32_t otherwise);

size_t read_length(vector_case *c, json_object *array);
kvf_ids read_ids(vector_case *c, json_object *array);
kvf_block_lists read_lists(vector_case *c, json_object *array);

/* Lists that must have `count` entries, as many as another list; their memory always has room for that many. */
uint32_t *read_u32s(vector_case *c, json_object *array, size_t count, uint32_t null_means);
int32_t *read_i32s(vector_case *c, json_object *array, size_t count);
bool *read_bools(vector_case *c, json_object *array, size_t count);
kvf_cache_kind *read_kinds(vector_case *c, json_object *array, size_t count);

kvf_descriptor_table read_table(vector_case *c, json_object *array, size_t attention_count);
kvf_state_type read_state_type(vector_case *c, json_object *object);

/** The sizes of a state, from the fields that its type uses. */
kvf_state_model read_state_model(vector_case *c, kvf_state_type type, json_object *object);

/** A topology from the fields tp_size, total_kv_heads, is_mla, dcp_size; block sizes are set to 16. */
kvf_topology_desc read_topology(vector_case *c, uint32_t tp_rank);

/** A remote engine from the fields remote_tp_size, remote_dcp_size; block sizes are set to 16. */
kvf_engine_transfer_info read_remote(vector_case *c);

/* ---- writing an answer */

json_object *json_u64(uint64_t number);
json_object *json_ids(const kvf_ids *list);
json_object *json_lists(const kvf_block_lists *lists);
json_object *json_table(const kvf_descriptor_table *table);

/** Adds a field to an object and returns the object. */
json_object *with(json_object *object, const char *key, json_object *value);

/** The same as json_ids() and so on, and frees the library's object. */
json_object *take_ids(kvf_ids *list);
json_object *take_lists(kvf_block_lists *lists);
json_object *take_table(kvf_descriptor_table *table);

/* ---- comparing */

/** Describes the first place where two values differ; false if they are equal. */
bool first_difference(json_object *expected, json_object *actual, char *text, size_t text_bytes);

#endif
