#include "shared_pages.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_STEP = 1 << 30 };

uint64_t shared_page_bytes(const engine_shape *shape) {
    return shape->groups[0].page_bytes * shape->groups[0].kernel_blocks_per_block;
}

/* The largest stride of a kernel block, over all ranks, layers and parts. */
static uint64_t kernel_page(const kvf_engine *engine, uint32_t g) {
    const kvf_group_desc *group = kvf_model_group(kvf_engine_model(engine), g);
    uint64_t most = 0;
    for (uint32_t rank = 0; rank < kvf_engine_rank_count(engine); rank++) {
        const kvf_shard *shard = kvf_engine_shard(engine, rank);
        kvf_range layers = kvf_shard_group_layers(shard, g);
        for (uint32_t layer = layers.begin; layer < layers.end; layer++)
            for (uint32_t part = 0; part < group->part_count; part++) {
                uint64_t stride = kvf_shard_placement(shard, g, layer, part)->block_stride;
                most = stride > most ? stride : most;
            }
    }
    return most;
}

/* a and b must be at least 1. */
static uint64_t common_divisor(uint64_t a, uint64_t b) {
    while (b) {
        uint64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a ? a : 1;
}

/* Finds the number of which a page must be a multiple: each group cuts it into equal kernel blocks, with the group's
 * alignment. */
static int find_step(const engine_shape *shape, uint32_t groups, uint64_t *out) {
    *out = 1;
    for (uint32_t g = 0; g < groups; g++) {
        const kvf_group_spec *spec = &shape->groups[g];
        uint64_t align = spec->page_align ? spec->page_align : 1;
        if (align > MOST_STEP / spec->kernel_blocks_per_block)
            return usage_error("--%s: page-align %llu with %u kernel blocks is too large to share pages",
                               shape->side, (unsigned long long)align, spec->kernel_blocks_per_block);
        uint64_t pieces = align * spec->kernel_blocks_per_block;
        *out = *out / common_divisor(*out, pieces) * pieces; /* at most 2^30 x 2^30 */
        if (*out > MOST_STEP)
            return usage_error("--%s: no page up to %d bytes can be cut into the kernel blocks of all groups",
                               shape->side, MOST_STEP);
    }
    return EXIT_DONE;
}

/* The largest page of a logical block, over all groups. */
static int measure(const engine_shape *shape, const kvf_model *model, uint64_t *page) {
    uint32_t groups = kvf_model_group_count(model);
    engine_shape small = *shape;
    small.share_pages = false;
    small.groups = malloc(groups * sizeof *small.groups);
    if (!small.groups)
        return failure("not enough memory");
    memcpy(small.groups, shape->groups, groups * sizeof *small.groups);
    for (uint32_t g = 0; g < groups; g++)
        small.groups[g].block_count = 1;
    kvf_engine *engine = NULL;
    int result = shape_build(&small, model, &engine);
    *page = 0;
    for (uint32_t g = 0; g < groups && !result; g++) {
        uint64_t bytes = kernel_page(engine, g) * small.groups[g].kernel_blocks_per_block;
        *page = bytes > *page ? bytes : *page;
    }
    kvf_engine_free(engine);
    free(small.groups);
    return result;
}

static int share_block_count(engine_shape *shape, const kvf_model *model) {
    uint32_t groups = kvf_model_group_count(model), from = UINT32_MAX;
    for (uint32_t g = 0; g < groups; g++) {
        if (!shape->fixed_blocks[g])
            continue;
        if (from == UINT32_MAX)
            from = g;
        else if (shape->groups[g].block_count != shape->groups[from].block_count)
            return usage_error("--%s: groups %s and %s share pages, so blocks cannot be %llu and %llu",
                               shape->side, kvf_model_group(model, from)->name,
                               kvf_model_group(model, g)->name,
                               (unsigned long long)shape->groups[from].block_count,
                               (unsigned long long)shape->groups[g].block_count);
    }
    for (uint32_t g = 0; g < groups && from != UINT32_MAX; g++) {
        shape->groups[g].block_count = shape->groups[from].block_count;
        shape->fixed_blocks[g] = true;
    }
    return EXIT_DONE;
}

/* Gives all groups pages of `page` bytes. */
static int set_pages(engine_shape *shape, const kvf_model *model, uint64_t page) {
    for (uint32_t g = 0; g < kvf_model_group_count(model); g++) {
        kvf_group_spec *spec = &shape->groups[g];
        if (spec->page_bytes && spec->page_bytes * spec->kernel_blocks_per_block != page)
            return usage_error(
                "--%s: group %s has pages of %llu bytes in %u kernel blocks, but pages that all "
                "groups share need %llu bytes",
                shape->side, kvf_model_group(model, g)->name, (unsigned long long)spec->page_bytes,
                spec->kernel_blocks_per_block, (unsigned long long)page);
        spec->page_bytes = page / spec->kernel_blocks_per_block;
    }
    return EXIT_DONE;
}

int shared_pages_fit(engine_shape *shape, const kvf_model *model) {
    uint64_t step = 1, page = 0;
    int result = share_block_count(shape, model);
    if (!result)
        result = find_step(shape, kvf_model_group_count(model), &step);
    if (!result)
        result = measure(shape, model, &page);
    if (result)
        return result;
    uint64_t rest = step ? page % step : 0;
    if (rest && step - rest > UINT64_MAX - page)
        return usage_error("--%s: a page of %llu bytes is too large to share", shape->side,
                           (unsigned long long)page);
    return set_pages(shape, model, rest ? page + step - rest : page);
}
