/*
 * Element types of an engine whose cache has other types than the model says.
 */
#ifndef KVFERRY_CLI_SHAPE_TYPES_H
#define KVFERRY_CLI_SHAPE_TYPES_H

#include <kvferry/model.h>

/**
 * Makes a copy of a model with other element types. Only f32, f16 and bf16 are replaced; scales and the like stay.
 *
 * @param types  of each group; KVF_DTYPE_INVALID: as the model says
 * @return as kvf_model_create()
 */
kvf_status shape_retype(const kvf_model *model, const kvf_dtype *types, kvf_model **out);

/** The types that can be converted into each other: a set, see KVF_DTYPE_BIT(). */
#define SHAPE_CONVERTED                                                                                      \
    (KVF_DTYPE_BIT(KVF_DTYPE_F32) | KVF_DTYPE_BIT(KVF_DTYPE_F16) | KVF_DTYPE_BIT(KVF_DTYPE_BF16))

#endif
