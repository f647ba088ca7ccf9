/*
 * What the files of this room share. The room computes the quantities that vLLM's connectors name.
 *
 * No other room needs this header.
 */
#ifndef KVF_CONNECTOR_CONNECTOR_H
#define KVF_CONNECTOR_CONNECTOR_H

#include <kvferry/connector/descriptors.h>

#include "base/base.h"
#include "base/share.h"

/** Records the reason beside the detail text and returns `status`. */
kvf_status kvf_refuse(kvf_refusal refusal, kvf_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* As for kvf_fail(): tells a static analyser what a failure returns. */
#ifdef __clang_analyzer__
#define kvf_refuse(refusal, status, ...) kvf_returned(status, (kvf_refuse)(refusal, status, __VA_ARGS__))
#endif

/** kvf_refuse() for errors without a reason of their own. */
#define kvf_plain_fail(status, ...) kvf_refuse(KVF_REFUSAL_NONE, status, __VA_ARGS__)

/** kvf_take_options() for the structs of this room: its errors have no reason of their own. */
kvf_status kvf_take_struct(void *out, size_t out_bytes, const void *given, const char *name);

typedef struct kvf_known_engine {
    char *id;
    kvf_engine_transfer_info facts;
} kvf_known_engine;

struct kvf_topology {
    kvf_topology_desc local; /* dcp_size and engine_id filled in */
    char *engine_id;
    kvf_known_engine *known;
    size_t known_count, known_capacity;
};

/* ---- lists */

/** Room for `capacity` numbers; the list's count is 0. */
kvf_status kvf_ids_make(kvf_ids *list, uint64_t capacity);
kvf_status kvf_ids_copy(kvf_ids *list, const kvf_ids *from);
kvf_status kvf_ids_slice(kvf_ids *list, const kvf_ids *from, size_t begin, size_t end);
bool kvf_ids_have(const kvf_ids *list, uint64_t number);

/** Appends; the caller has made room. */
static inline void kvf_ids_add(kvf_ids *list, uint64_t number) {
    list->at[list->count++] = number;
}

/** `count` empty lists. */
kvf_status kvf_block_lists_make(kvf_block_lists *lists, size_t count);
kvf_status kvf_block_lists_copy(kvf_block_lists *lists, const kvf_block_lists *from);
bool kvf_block_lists_all_empty(const kvf_block_lists *lists);

/* ---- axes: the arithmetic behind every quantity */

/** Checks facts of a remote engine that may come from a peer, and fills in their zero defaults. */
kvf_status kvf_take_remote(const kvf_engine_transfer_info *remote, kvf_engine_transfer_info *out);

/* ---- one remote rank as a source */

/** The units of an axis (heads, or shares of a state) that a source rank and this rank both hold. */
typedef struct kvf_shared_units {
    uint32_t local_begin;  /**< where they begin, from the start of the local share */
    uint32_t remote_begin; /**< where they begin, from the start of the remote share */
    uint32_t units;        /**< how many; 0: none */
    uint32_t local_units;  /**< of the local share */
    uint32_t remote_units; /**< of the remote share */
} kvf_shared_units;

/** The heads, or the latent, that a source rank and this rank both hold. */
kvf_status kvf_shared_attention(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                                uint32_t remote_rank, kvf_shared_units *out);

/** The same for sharded state, on an axis of one unit for each rank of the larger side. */
kvf_status kvf_shared_state(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                            uint32_t remote_rank, kvf_shared_units *out);

/** Where a source keeps the state that is ours, and how much state it has altogether. */
typedef struct kvf_state_runs_out {
    kvf_byte_run projection[KVF_MAX_PROJECTIONS];
    kvf_byte_run ssm;
    uint64_t remote_conv_bytes;
    uint64_t remote_ssm_bytes;
} kvf_state_runs_out;

/** Scales the local projections to the remote share; offsets count from the start of the remote state. */
kvf_status kvf_state_runs(const kvf_state_layout *local, const kvf_shared_units *shared,
                          kvf_state_runs_out *out);

/** A block: its bytes, units (heads, or a latent) and tokens. */
typedef struct kvf_block_length {
    uint64_t bytes;
    uint32_t units, tokens;
} kvf_block_length;

/** Checks that one token of one unit has as many bytes on both sides. */
kvf_status kvf_check_block_lengths(const kvf_block_length *local, const kvf_block_length *remote);

/** The remote ranks that attention is read from, for dense models too. */
kvf_status kvf_attention_sources(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                                 kvf_ids *out);

/** `bytes` * `part` / `whole`, refusing a remainder. `what` names the bytes in the error. */
kvf_status kvf_exact_share(uint64_t bytes, uint64_t part, uint64_t whole, const char *what, uint64_t *out);

#endif
