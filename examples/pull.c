/*
 * Moving a request between two endpoints, here both in this process: the prefill side fills its memory, the
 * decode side pulls. The same calls work between processes and hosts; only the card must be sent there.
 */
#include <stdio.h>
#include <string.h>

#include <kvferry/transport.h>

static int fail(const char *what) {
    fprintf(stderr, "%s: %s\n", what, kvf_error_detail());
    return 1;
}

/* Opens an endpoint for one rank and registers as much memory as its shard needs; *first is its first region. */
static kvf_status open_rank(const kvf_shard *shard, kvf_transport **transport, unsigned char **first) {
    const kvf_shard_desc *desc = kvf_shard_get(shard);
    kvf_memory regions[128] = {0};
    if (desc->region_count < 1 || desc->region_count > 128)
        return KVF_E_RANGE;
    kvf_status status = kvf_transport_open("auto", NULL, transport);
    for (uint32_t i = 0; i < desc->region_count && !status; i++) {
        regions[i] = (kvf_memory){.struct_size = sizeof(kvf_memory), .bytes = desc->region_bytes[i]};
        status =
            kvf_transport_allocate(*transport, KVF_MEMORY_HOST, 0, regions[i].bytes, &regions[i].address);
    }
    *first = regions[0].address;
    return status ? status : kvf_transport_register(*transport, regions, desc->region_count);
}

int main(void) {
    kvf_model *model;
    kvf_engine *prefill, *decode;
    kvf_plan *plan;
    kvf_request *request;
    kvf_engine_spec p = {sizeof p, "prefill", .all = {16, .block_count = 16, .order = "L|BPNH"}};
    kvf_engine_spec d = {sizeof d, "decode", .all = {32, .block_count = 8, .order = "L|BPHN"}};
    if (kvf_model_load("llama-3.1-8b", NULL, &model) || kvf_engine_build(model, &p, &prefill) ||
        kvf_engine_build(model, &d, &decode) ||
        kvf_plan_build(kvf_engine_shard(decode, 0), prefill, NULL, &plan) ||
        kvf_request_create(plan, &request))
        return fail("planning");

    kvf_transport *there, *here;
    unsigned char *their_memory, *our_memory;
    const void *card;
    size_t card_bytes;
    kvf_peer *peer;
    if (open_rank(kvf_engine_shard(prefill, 0), &there, &their_memory) ||
        open_rank(kvf_engine_shard(decode, 0), &here, &our_memory) ||
        kvf_transport_export(there, &card, &card_bytes) ||
        kvf_transport_connect(here, card, card_bytes, &peer))
        return fail("connecting");

    /* Token 17, layer 0, K, head 3: in the prefill side's NHD block 4 (the second of its table), row 1. */
    kvf_cell_location from = {.struct_size = sizeof from}, to = from;
    uint32_t theirs[] = {9, 4, 11}, ours[] = {6, 2};
    if (kvf_shard_locate(kvf_engine_shard(prefill, 0), 0, 0, 0, theirs[1], 1, 3, &from) ||
        kvf_shard_locate(kvf_engine_shard(decode, 0), 0, 0, 0, ours[0], 17, 3, &to))
        return fail("locating");
    memset(their_memory + from.offset, 0x5a, from.bytes);

    kvf_transfer *transfer;
    kvf_group_request wanted = {.local = {ours, 2}, .remote = {theirs, 3}, .end = 40};
    if (kvf_request_set(request, &wanted, 1) || kvf_transfer_start(request, KVF_READ, &peer, &transfer))
        return fail("starting");
    while (kvf_transfer_status(transfer) == KVF_IN_PROGRESS)
        if (kvf_transport_progress(here, NULL))
            return fail("moving");
    if (kvf_transfer_status(transfer))
        return fail("moving");
    if (memcmp(our_memory + to.offset, their_memory + from.offset, from.bytes) != 0) {
        fprintf(stderr, "token 17 did not arrive\n");
        return 1;
    }
    uint64_t bytes, runs;
    kvf_transfer_counts(transfer, &bytes, &runs);
    printf("%llu bytes in %llu runs over %s\n", (unsigned long long)bytes, (unsigned long long)runs,
           kvf_peer_kind(peer));

    kvf_transfer_free(transfer);
    kvf_transport_close(here);
    kvf_transport_close(there);
    kvf_request_free(request);
    kvf_plan_free(plan);
    kvf_engine_free(decode);
    kvf_engine_free(prefill);
    kvf_model_free(model);
    return 0;
}
