#include <stdio.h>

#include "connector/connector.h"

static _Thread_local kvf_refusal last_refusal;

kvf_status(kvf_refuse)(kvf_refusal refusal, kvf_status status, const char *format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    last_refusal = refusal;
    return kvf_fail(status, "%s", text);
}

kvf_status kvf_take_struct(void *out, size_t out_bytes, const void *given, const char *name) {
    kvf_status status = kvf_take_options(out, out_bytes, given, name);
    if (status)
        last_refusal = KVF_REFUSAL_NONE;
    return status;
}

kvf_refusal kvf_topology_refusal(void) {
    return last_refusal;
}

const char *kvf_refusal_name(kvf_refusal refusal) {
    static const char *const names[] = {
        [KVF_REFUSAL_NONE] = "none",
        [KVF_REFUSAL_TP_NOT_DIVISIBLE] = "tp_not_divisible",
        [KVF_REFUSAL_BLOCK_SIZE_NOT_DIVISIBLE] = "block_size_not_divisible",
        [KVF_REFUSAL_HEADS_NOT_DIVISIBLE] = "heads_not_divisible",
        [KVF_REFUSAL_REGISTER_SELF] = "register_self",
        [KVF_REFUSAL_UNKNOWN_ENGINE] = "unknown_engine",
        [KVF_REFUSAL_MAMBA_WITH_TENSOR_SHAPE] = "mamba_with_tensor_shape",
        [KVF_REFUSAL_LENGTH_NOT_DIVISIBLE] = "length_not_divisible",
        [KVF_REFUSAL_DECODE_LONGER_THAN_PREFILL] = "decode_longer_than_prefill",
        [KVF_REFUSAL_UNPAIRABLE_STATE_SLOTS] = "unpairable_state_slots",
        [KVF_REFUSAL_PADDING_EXCEEDED] = "padding_exceeded",
        [KVF_REFUSAL_GROUP_WITHOUT_REGION] = "group_without_region",
        [KVF_REFUSAL_REMOTE_DOES_NOT_COVER] = "remote_does_not_cover",
        [KVF_REFUSAL_REPLICATED_HEADS_WITH_MORE_PREFILL_RANKS] = "replicated_heads_with_more_prefill_ranks",
        [KVF_REFUSAL_BLOCK_LEN_MISMATCH] = "block_len_mismatch",
        [KVF_REFUSAL_BLOCK_SIZE_WITH_SPLIT_READS] = "block_size_with_split_reads",
        [KVF_REFUSAL_BLOCK_SIZE_WITH_HYBRID] = "block_size_with_hybrid",
        [KVF_REFUSAL_STATE_TYPE_NOT_SUPPORTED] = "state_type_not_supported",
        [KVF_REFUSAL_CONV_NOT_DECOMPOSABLE] = "conv_not_decomposable",
        [KVF_REFUSAL_GROUP_NOT_SPLIT_PURELY] = "group_not_split_purely",
        [KVF_REFUSAL_DCP_NOT_LATENT] = "dcp_not_latent",
        [KVF_REFUSAL_NOT_HYBRID] = "not_hybrid",
        [KVF_REFUSAL_NO_LAYERS] = "no_layers",
    };
    size_t index = (size_t)refusal;
    return index < sizeof names / sizeof *names ? names[index] : "none";
}
