/* The description of a change of form: where each cell of a wanted page lies in the received page. */
#include "connector/postprocess.h"

/* One axis of the wanted page: the number of its entries, and the bytes between them in the received page. */
typedef struct axis {
    uint64_t count, from;
} axis;

/* Adds an axis inside the others. An axis that only continues the last one is merged into it. */
static void add_axis(axis *axes, size_t *used, uint64_t count, uint64_t from) {
    if (count == 1)
        return;
    axis *last = *used ? &axes[*used - 1] : NULL;
    if (last && last->from == count * from)
        *last = (axis){last->count * count, from};
    else
        axes[(*used)++] = (axis){count, from};
}

static kvf_status check_shape(const kvf_received_shape *shape, uint64_t *row_bytes) {
    if (shape->heads == 0 || shape->cell_bytes == 0)
        return kvf_fail(KVF_E_INVALID, "%s is 0; allowed: 1 and more", shape->heads ? "cell_bytes" : "heads");
    const kvf_page_form *forms[] = {&shape->received, &shape->wanted};
    for (size_t i = 0; i < 2; i++) {
        const char *name = i ? "wanted" : "received";
        if (forms[i]->order != KVF_PAGE_HND && forms[i]->order != KVF_PAGE_NHD)
            return kvf_fail(KVF_E_INVALID, "%s.order is %d; allowed: KVF_PAGE_HND, KVF_PAGE_NHD", name,
                            (int)forms[i]->order);
        if (forms[i]->tokens == 0)
            return kvf_fail(KVF_E_INVALID, "%s.tokens is 0; allowed: 1 and more", name);
    }
    uint64_t ours = shape->wanted.tokens, theirs = shape->received.tokens, most = kvf_max_u64(ours, theirs);
    if (most % kvf_min_u64(ours, theirs) != 0)
        return kvf_fail(KVF_E_NOT_EXPRESSIBLE,
                        "received pages have %llu tokens and blocks %llu; one number must divide the other",
                        (unsigned long long)theirs, (unsigned long long)ours);
    uint64_t page_bytes;
    if (!kvf_mul(shape->heads, shape->cell_bytes, row_bytes) || !kvf_mul(*row_bytes, most, &page_bytes) ||
        page_bytes > SIZE_MAX / 2)
        return kvf_fail(KVF_E_OVERFLOW, "a page of %llu heads, %llu tokens, %llu bytes does not fit",
                        (unsigned long long)shape->heads, (unsigned long long)most,
                        (unsigned long long)shape->cell_bytes);
    return KVF_OK;
}

/*
 * A received page has R tokens, and a cell lies in it at
 *
 *     HND: head*R*cell + token*cell        NHD: token*heads*cell + head*cell
 *
 * Pages follow one another. A block has T tokens. With T = ratio*R its token axis is (page, token of the page);
 * with R = n*T, block b of n takes the tokens from b*T on.
 */
kvf_status kvf_gather_of(const kvf_received_shape *shape, kvf_gather *out) {
    uint64_t row_bytes = 0; /* of one token of all heads */
    kvf_status status = check_shape(shape, &row_bytes);
    if (status)
        return status;
    uint64_t cell = shape->cell_bytes, ours = shape->wanted.tokens, theirs = shape->received.tokens;
    bool heads_apart = shape->received.order == KVF_PAGE_HND;
    axis page = {ours > theirs ? ours / theirs : 1, theirs * row_bytes};
    axis token = {kvf_min_u64(ours, theirs), heads_apart ? cell : row_bytes};
    axis head = {shape->heads, heads_apart ? theirs * cell : cell};
    axis axes[4];
    size_t used = 0;
    if (shape->wanted.order == KVF_PAGE_HND)
        add_axis(axes, &used, head.count, head.from);
    add_axis(axes, &used, page.count, page.from);
    add_axis(axes, &used, token.count, token.from);
    if (shape->wanted.order == KVF_PAGE_NHD)
        add_axis(axes, &used, head.count, head.from);
    if (used && axes[used - 1].from == cell)
        cell *= axes[--used].count; /* adjacent cells are one longer cell */
    *out = (kvf_gather){.count = {1, 1, 1},
                        .cell_bytes = cell,
                        .block_bytes = ours * row_bytes,
                        .block_from = ours * token.from};
    uint64_t blocks = theirs > ours ? theirs / ours : 1;
    if (blocks > UINT32_MAX)
        return kvf_fail(KVF_E_OVERFLOW, "a received page is %llu blocks long; allowed: up to %u",
                        (unsigned long long)blocks, UINT32_MAX);
    out->block_count = (uint32_t)blocks;
    for (size_t i = 0; i < used; i++) {
        out->count[3 - used + i] = axes[i].count;
        out->from[3 - used + i] = axes[i].from;
    }
    return KVF_OK;
}
