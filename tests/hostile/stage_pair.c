#include "stage_pair.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define CARD_WORD "card"
#define BLOCKS 64u

static kvf_engine *make_engine(const kvf_model *model, bool owner) {
    const kvf_engine_spec spec = {.struct_size = sizeof spec,
                                  .name = owner ? "owner" : "reader",
                                  .tp_size = 1,
                                  .all = {.tokens_per_block = owner ? 8 : 16,
                                          .block_count = BLOCKS,
                                          .order = owner ? "BLHNP" : "L|BPHN"}};
    kvf_engine *engine = NULL;
    if (kvf_engine_build(model, &spec, &engine)) {
        (void)fprintf(stderr, "stage_pair: %s\n", kvf_error_detail());
        exit(1);
    }
    return engine;
}

void stage_pair_open(stage_pair *pair) {
    pair->model = content_model(1);
    pair->owner = make_engine(pair->model, true);
    pair->reader = make_engine(pair->model, false);
}

void stage_pair_close(stage_pair *pair) {
    kvf_engine_free(pair->owner);
    kvf_engine_free(pair->reader);
    kvf_model_free(pair->model);
}

void stage_pair_table(const kvf_shard *shard, uint32_t nth, content_table *out) {
    const uint32_t per_block = kvf_shard_get(shard)->groups[0].tokens_per_block;
    *out = (content_table){.count = STAGE_PAIR_TOKENS / per_block, .end = STAGE_PAIR_TOKENS};
    for (uint32_t i = 0; i < out->count; i++)
        out->ids[i] = nth * out->count + (i * 7 + 3) % out->count; /* out of order; 7 divides neither count */
}

kvf_status stage_pair_transport(const char *name, const char *secret_key, void *context, kvf_transport **out,
                                void (*on_notify)(void *context, kvf_transport *transport, const char *sender,
                                                  const void *data, size_t bytes),
                                void (*on_peer_lost)(void *context, kvf_transport *transport, kvf_peer *peer,
                                                     const char *detail)) {
    const kvf_setting settings[] = {{"messages.listen", "tcp://127.0.0.1:*"},
                                    {"messages.max_connections", STAGE_PAIR_CONNECTIONS},
                                    {"messages.max_connections_per_address", STAGE_PAIR_CONNECTIONS},
                                    {"messages.secret_key", secret_key}};
    const kvf_transport_options options = {.struct_size = sizeof options,
                                           .name = name,
                                           .settings = settings,
                                           .setting_count = secret_key ? 4 : 3,
                                           .on_notify = on_notify,
                                           .on_peer_lost = on_peer_lost,
                                           .context = context};
    return kvf_transport_open("messages", &options, out);
}

kvf_status stage_pair_register(kvf_transport *transport, const kvf_shard *shard, content_rank *out) {
    const kvf_shard_desc *desc = kvf_shard_get(shard);
    kvf_status status = KVF_OK;
    out->shard = shard;
    for (uint32_t i = 0; i < desc->region_count && !status; i++) {
        out->regions[i] = (kvf_memory){.struct_size = sizeof(kvf_memory), .bytes = desc->region_bytes[i]};
        status = kvf_transport_allocate(transport, KVF_MEMORY_HOST, 0, desc->region_bytes[i],
                                        &out->regions[i].address);
    }
    return status ? status : kvf_transport_register(transport, out->regions, desc->region_count);
}

kvf_status stage_pair_introduce(kvf_transport *transport, kvf_peer *peer) {
    unsigned char notice[4096];
    const size_t word = sizeof CARD_WORD - 1;
    const void *card;
    size_t bytes;
    kvf_status status = kvf_transport_export(transport, &card, &bytes);
    if (!status && bytes > sizeof notice - word)
        status = KVF_E_LIMIT;
    if (status)
        return status;
    memcpy(notice, CARD_WORD, word);
    memcpy(notice + word, card, bytes);
    return kvf_transport_notify(peer, notice, word + bytes);
}

size_t stage_pair_read_card(const char *text, unsigned char *out, size_t room) {
    size_t bytes = strspn(text, "0123456789abcdef") / 2;
    for (size_t i = 0; i < bytes && i < room; i++) {
        const char two[3] = {text[2 * i], text[2 * i + 1], '\0'};
        out[i] = (unsigned char)strtoul(two, NULL, 16);
    }
    return bytes < room ? bytes : room;
}

uint64_t stage_pair_now(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}
