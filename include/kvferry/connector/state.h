/*
 * The recurrent state of a layer as vLLM keeps it: a conv state, stored dimension first so that each
 * projection is contiguous, then the state that the model carries from token to token.
 *
 *   state page:  | conv: x | conv: B | conv: C | recurrent (ssm) state |          (padding) |
 */
#ifndef KVFERRY_CONNECTOR_STATE_H
#define KVFERRY_CONNECTOR_STATE_H

#include <kvferry/connector/topology.h>

#ifdef __cplusplus
extern "C" {
#endif

/** Which projections a conv state holds. */
typedef enum kvf_state_type {
    KVF_STATE_MAMBA1 = 0, /**< x */
    KVF_STATE_MAMBA2 = 1, /**< x, B, C */
    KVF_STATE_GDN = 2,    /**< Q, K, V */
} kvf_state_type;

enum { KVF_MAX_PROJECTIONS = 3 };

/** Sizes of a whole model's state. Fields that the type does not use are 0. */
typedef struct kvf_state_model {
    size_t struct_size; /**< sizeof(kvf_state_model) */
    kvf_state_type type;
    uint32_t intermediate_size; /**< mamba: channels of x */
    uint32_t groups;            /**< mamba2: groups of B and C */
    uint32_t heads;             /**< mamba2: heads; gdn: value heads */
    uint32_t head_size;         /**< mamba2: head_dim; gdn: of a value head */
    uint32_t key_heads;         /**< gdn */
    uint32_t key_head_size;     /**< gdn */
    uint32_t state_size;        /**< mamba */
    uint32_t conv_kernel;       /**< taps; the conv state keeps one step fewer */
    uint32_t spec_steps;        /**< further steps, for speculative tokens that may be rejected */
} kvf_state_model;

/** The shapes of one rank's state tensors. */
typedef struct kvf_state_shape {
    uint64_t conv[2];     /**< channels, steps */
    uint64_t temporal[3]; /**< heads, head size, state size; mamba1: channels, state size */
    uint32_t temporal_dimensions;
} kvf_state_shape;

/**
 * The shapes of the state on each rank of an engine of `tp_size` ranks. Mamba2 groups that do not divide over the ranks
 * are replicated, so that each rank has one.
 *
 * @return KVF_OK, KVF_E_INVALID, KVF_E_RANGE, KVF_E_NOT_EXPRESSIBLE (heads or channels do not divide by tp_size)
 */
KVF_API kvf_status kvf_state_shape_of(const kvf_state_model *model, uint32_t tp_size, kvf_state_shape *out);

/** The bytes of one rank's state, projection by projection. */
typedef struct kvf_state_layout {
    uint32_t projection_count;
    uint64_t projection_dims[KVF_MAX_PROJECTIONS];  /**< channels */
    uint64_t projection_bytes[KVF_MAX_PROJECTIONS]; /**< of all steps */
    uint64_t conv_steps;
    uint64_t conv_bytes; /**< the projections together */
    uint64_t ssm_bytes;
} kvf_state_layout;

/**
 * Finds the projections of a conv state, using only the shapes of the two tensors.
 *
 * @return KVF_OK, KVF_E_INVALID, KVF_E_OVERFLOW, KVF_E_UNSUPPORTED (the type), KVF_E_NOT_EXPRESSIBLE (the channels
 *         cannot be split into the type's projections)
 */
KVF_API kvf_status kvf_conv_split(kvf_state_type type, const kvf_state_shape *shape, uint32_t conv_elem_bytes,
                                  uint32_t ssm_elem_bytes, kvf_state_layout *out);

/** A run of bytes. */
typedef struct kvf_byte_run {
    uint64_t offset;
    uint64_t bytes;
} kvf_byte_run;

/** Where each projection begins in the local conv state. `out` has room for KVF_MAX_PROJECTIONS. */
KVF_API void kvf_local_projection_runs(const kvf_state_layout *local, kvf_byte_run *out);

/**
 * Finds the bytes of the remote conv state that fill the local projections: our share of each remote projection.
 *
 * @param tp_ratio      as kvf_tp_ratio()
 * @param local_offset  which share of a remote rank is ours: tp_rank modulo tp_ratio; not used if tp_ratio is negative
 * @param out           room for KVF_MAX_PROJECTIONS
 * @return KVF_OK, KVF_E_INVALID, KVF_E_RANGE, KVF_E_OVERFLOW, KVF_E_NOT_EXPRESSIBLE (a projection does not
 *         divide by the ratio)
 */
KVF_API kvf_status kvf_remote_projection_runs(const kvf_state_layout *local, int64_t tp_ratio,
                                              uint64_t local_offset, kvf_byte_run *out);

/**
 * Kernel blocks that one state needs: its bytes divided by a block's, rounded up.
 *
 * @return KVF_OK, KVF_E_INVALID (block_bytes is 0), KVF_E_OVERFLOW
 */
KVF_API kvf_status kvf_physical_blocks_per_logical(uint64_t conv_bytes, uint64_t ssm_bytes,
                                                   uint64_t block_bytes, uint64_t *out);

#ifdef __cplusplus
}
#endif

#endif
