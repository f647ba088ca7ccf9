/* Texts in the connector's words: the summary of a pair of engines, and a consumer's message that it is done. */
#include "connector/connector.h"

/* Hands a finished text over; `text` is empty afterwards. */
static kvf_status give_text(kvf_text *text, char **out) {
    if (text->failed || !text->data) {
        kvf_text_free(text);
        return kvf_plain_fail(KVF_E_NOMEM, "no memory for a text");
    }
    *out = text->data;
    return KVF_OK;
}

static void add_ranks(kvf_text *text, const char *name, const kvf_ids *ranks) {
    kvf_text_add(text, ", %s=[", name);
    for (size_t i = 0; i < ranks->count; i++)
        kvf_text_add(text, "%s%llu", i ? ", " : "", (unsigned long long)ranks->at[i]);
    kvf_text_add(text, "]");
}

/* As in the connector, 0 if a block length is not known. */
static kvf_status descriptor_bytes(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                                   uint64_t *out) {
    *out = 0;
    bool known = topology->local.block_bytes && remote->block_bytes;
    return known ? kvf_fa_descriptor_bytes(topology, remote, out) : KVF_OK;
}

static kvf_status describe_sources(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                                   kvf_text *text) {
    uint64_t bytes;
    kvf_ids attention = {0}, all = {0};
    kvf_status status = descriptor_bytes(topology, remote, &bytes);
    if (!status)
        status = kvf_fa_source_ranks(topology, remote, &attention);
    if (!status)
        status = kvf_all_source_ranks(topology, remote, &all);
    if (!status) {
        kvf_text_add(text, ", fa_reads=%zu, mamba_reads=%zu", attention.count, all.count);
        add_ranks(text, "fa_sources", &attention);
        add_ranks(text, "all_sources", &all);
        kvf_text_add(text, ", fa_desc_bytes=%llu", (unsigned long long)bytes);
    }
    kvf_ids_free(&attention);
    kvf_ids_free(&all);
    return status;
}

kvf_status kvf_topology_describe(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                                 char **out) {
    if (!topology || !out)
        return kvf_plain_fail(KVF_E_INVALID, "%s is NULL", topology ? "text" : "topology");
    kvf_engine_transfer_info other;
    int64_t ratio;
    kvf_status status = kvf_take_remote(remote, &other);
    if (!status)
        status = kvf_tp_ratio(topology, &other, &ratio);
    if (status)
        return status;
    const kvf_topology_desc *local = &topology->local;
    bool current = local->dialect == KVF_DIALECT_V0_32;
    uint32_t heads = current && local->is_mla ? 1 : local->total_kv_heads;
    kvf_text text = {0};
    kvf_text_add(&text, "TransferTopology%s(tp_ratio=%lld, %s=%u, local_tp=%u, remote_tp=%u",
                 local->is_mamba ? ".mamba" : "", (long long)ratio, current ? "num_kv_heads" : "K", heads,
                 local->tp_size, other.tp_size);
    if (current)
        kvf_text_add(&text, ", remote_pp=%u, local_dcp=%u, remote_dcp=%u", other.pp_rank, local->dcp_size,
                     other.dcp_size);
    kvf_text_add(&text, ", local_rank=%u, remote_block_len=%llu", local->tp_rank,
                 (unsigned long long)other.block_bytes);
    if (local->is_mamba)
        status = describe_sources(topology, &other, &text);
    kvf_text_add(&text, ")");
    if (status) {
        kvf_text_free(&text);
        return status;
    }
    return give_text(&text, out);
}

kvf_status kvf_completion_notice(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                                 const char *remote_request_id, char **out) {
    if (!topology || !remote_request_id || !out)
        return kvf_plain_fail(KVF_E_INVALID, "topology, remote_request_id and text must be given");
    uint32_t consumers;
    kvf_status status = kvf_consumers_per_source(topology, remote, &consumers);
    if (status)
        return status;
    if (topology->local.dialect == KVF_DIALECT_PR_40731)
        consumers = topology->local.tp_size;
    kvf_text text = {0};
    kvf_text_add(&text, "%s:%u", remote_request_id, consumers);
    return give_text(&text, out);
}
