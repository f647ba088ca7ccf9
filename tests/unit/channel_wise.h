/*
 * An engine that keeps its keys channel by channel, as vLLM does on CPUs.
 */
#ifndef KVF_TEST_CHANNEL_WISE_H
#define KVF_TEST_CHANNEL_WISE_H

#include "shapes.h"

#define LAYERS 3u
#define HEADS 4u
#define CHANNELS 8u
#define BLOCKS 40u

/*
 * A rank of `tp_size` of attention(LAYERS, HEADS, CHANNELS). Each layer has a buffer of pages, and in a page each
 * head has all its keys, channel by channel, and then all its values, token by token:
 *
 *   page: | h0: c0 t0 t1 .. | c1 t0 t1 .. | ... | t0 c0 c1 .. | t1 c0 c1 .. | ... || h1: ...
 */
static inline kvf_shard *channel_wise_shard(const kvf_model *model, uint32_t tp_rank, uint32_t tp_size,
                                            uint32_t tokens, uint32_t key_pieces) {
    const uint64_t item = 2, heads = HEADS / tp_size, half = item * CHANNELS * tokens,
                   page = heads * 2 * half;
    const uint64_t piece = item * CHANNELS / key_pieces;
    kvf_placement places[LAYERS][2];
    uint64_t region_bytes[LAYERS];
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        places[layer][0] = (kvf_placement){.region = layer,
                                           .block_stride = page,
                                           .row_stride = piece,
                                           .unit_stride = 2 * half,
                                           .piece_stride = tokens * piece,
                                           .pieces = key_pieces};
        places[layer][1] = PLACED(layer, half, page, item * CHANNELS, 2 * half);
        region_bytes[layer] = BLOCKS * page;
    }
    const uint32_t begin = tp_rank * (uint32_t)heads;
    const kvf_part_share shares[2] = {{.units = {begin, begin + (uint32_t)heads}},
                                      {.units = {begin, begin + (uint32_t)heads}}};
    const kvf_group_shard_desc group = {
        .tokens_per_block = tokens, .block_count = BLOCKS, .parts = shares, .placements = places[0]};
    const kvf_shard_desc desc = {.struct_size = sizeof desc,
                                 .rank = tp_rank,
                                 .layers = {0, LAYERS},
                                 .region_bytes = region_bytes,
                                 .region_count = LAYERS,
                                 .groups = &group};
    kvf_shard *shard = NULL;
    assert_ok(kvf_shard_create(model, &desc, &shard));
    return shard;
}

static inline kvf_engine *channel_wise(const kvf_model *model, uint32_t tp_size, uint32_t tokens,
                                       uint32_t pieces, const char *name) {
    kvf_shard *shards[HEADS];
    for (uint32_t i = 0; i < tp_size; i++)
        shards[i] = channel_wise_shard(model, i, tp_size, tokens, pieces);
    kvf_engine *engine = NULL;
    assert_ok(kvf_engine_from_shards(model, name, shards, tp_size, &engine));
    return engine;
}

#endif
