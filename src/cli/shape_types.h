/*
 * Element types of an engine whose cache has other types than the model says.
 */
#ifndef KVFERRY_CLI_SHAPE_TYPES_H
#define KVFERRY_CLI_SHAPE_TYPES_H

#include <kvferry/model.h>

/**
 * Makes a copy of a model with other element types. Only types that can be converted are replaced. A part with scales
 * ("indexer" beside "indexer_scale") stays as it is, and so do the scales, for neither means anything alone.
 *
 * @param types  of each group; KVF_DTYPE_INVALID: as the model says
 * @return as kvf_model_create()
 */
kvf_status shape_retype(const kvf_model *model, const kvf_dtype *types, kvf_model **out);

/** The types that can be converted into each other: a set, see KVF_DTYPE_BIT(). */
#define SHAPE_CONVERTED                                                                                      \
    (KVF_DTYPE_BIT(KVF_DTYPE_F32) | KVF_DTYPE_BIT(KVF_DTYPE_F16) | KVF_DTYPE_BIT(KVF_DTYPE_BF16) |           \
     KVF_DTYPE_BIT(KVF_DTYPE_F8_E4M3) | KVF_DTYPE_BIT(KVF_DTYPE_F8_E5M2))

#endif
