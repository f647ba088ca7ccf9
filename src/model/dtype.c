/*
 * Element types: their sizes and names.
 */
#include "model/model.h"

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

static const struct {
    const char *name;
    uint32_t bits;
} dtypes[] = {
    [KVF_DTYPE_INVALID] = {"invalid", 0}, [KVF_DTYPE_F64] = {"f64", 64},
    [KVF_DTYPE_F32] = {"f32", 32},        [KVF_DTYPE_F16] = {"f16", 16},
    [KVF_DTYPE_BF16] = {"bf16", 16},      [KVF_DTYPE_F8_E4M3] = {"f8_e4m3", 8},
    [KVF_DTYPE_F8_E5M2] = {"f8_e5m2", 8}, [KVF_DTYPE_I8] = {"i8", 8},
    [KVF_DTYPE_U8] = {"u8", 8},           [KVF_DTYPE_F4_E2M1] = {"f4_e2m1", 4},
    [KVF_DTYPE_I4] = {"i4", 4},
};

/* Names that other programs use for the same bits. "fp8" alone is e4m3, as in every engine. The "fnuz" forms have
 * another exponent bias and are not listed: mistaking one for the other would silently corrupt data. */
static const struct {
    const char *name;
    kvf_dtype dtype;
} aliases[] = {
    {"float64", KVF_DTYPE_F64},
    {"double", KVF_DTYPE_F64},
    {"fp64", KVF_DTYPE_F64},
    {"float32", KVF_DTYPE_F32},
    {"float", KVF_DTYPE_F32},
    {"fp32", KVF_DTYPE_F32},
    {"float16", KVF_DTYPE_F16},
    {"half", KVF_DTYPE_F16},
    {"fp16", KVF_DTYPE_F16},
    {"bfloat16", KVF_DTYPE_BF16},
    {"fp8", KVF_DTYPE_F8_E4M3},
    {"fp8_e4m3", KVF_DTYPE_F8_E4M3},
    {"float8_e4m3", KVF_DTYPE_F8_E4M3},
    {"float8_e4m3fn", KVF_DTYPE_F8_E4M3},
    {"fp8_e5m2", KVF_DTYPE_F8_E5M2},
    {"float8_e5m2", KVF_DTYPE_F8_E5M2},
    {"int8", KVF_DTYPE_I8},
    {"uint8", KVF_DTYPE_U8},
    {"fp4", KVF_DTYPE_F4_E2M1},
    {"fp4_e2m1", KVF_DTYPE_F4_E2M1},
    {"float4_e2m1", KVF_DTYPE_F4_E2M1},
    {"float4_e2m1fn", KVF_DTYPE_F4_E2M1},
    {"int4", KVF_DTYPE_I4},
};

uint32_t kvf_dtype_bits(kvf_dtype dtype) {
    return (size_t)dtype < COUNT(dtypes) ? dtypes[dtype].bits : 0;
}

const char *kvf_dtype_name(kvf_dtype dtype) {
    return (size_t)dtype < COUNT(dtypes) ? dtypes[dtype].name : dtypes[KVF_DTYPE_INVALID].name;
}

kvf_status kvf_dtype_by_name(const char *name, kvf_dtype *out) {
    if (!name || !out)
        return kvf_fail(KVF_E_INVALID, "dtype name or result is NULL");
    static const char prefix[] = "torch.";
    const char *bare = strncmp(name, prefix, sizeof prefix - 1) == 0 ? name + sizeof prefix - 1 : name;
    for (size_t i = KVF_DTYPE_INVALID + 1; i < COUNT(dtypes); i++)
        if (strcmp(bare, dtypes[i].name) == 0) {
            *out = (kvf_dtype)i;
            return KVF_OK;
        }
    for (size_t i = 0; i < COUNT(aliases); i++)
        if (strcmp(bare, aliases[i].name) == 0) {
            *out = aliases[i].dtype;
            return KVF_OK;
        }
    return kvf_fail(KVF_E_NOT_FOUND,
                    "\"%s\" is no element type; allowed: f64, f32, f16, bf16, f8_e4m3, f8_e5m2, i8, u8, "
                    "f4_e2m1, i4 and their usual names",
                    kvf_excerpt_of(name, 64).text);
}
