/* Keys of requests and blocks: allowed values, and order. */
#include <stdlib.h>

#include "schedule/keys.h"

kvf_status kvf_check_request_id(kvf_request_id id, const char *what, size_t index) {
    if (id.size > KVF_REQUEST_ID_BYTES)
        return kvf_fail(KVF_E_RANGE, "%s %zu: the id has %zu bytes; allowed: up to %u", what, index, id.size,
                        KVF_REQUEST_ID_BYTES);
    if (id.size && !id.data)
        return kvf_fail(KVF_E_INVALID, "%s %zu: the id is NULL and has %zu bytes", what, index, id.size);
    return KVF_OK;
}

int kvf_compare_request_keys(const void *a, const void *b) {
    const kvf_request_key *left = a, *right = b;
    size_t common = left->id.size < right->id.size ? left->id.size : right->id.size;
    int order = common ? memcmp(left->id.data, right->id.data, common) : 0;
    if (order)
        return order;
    if (left->id.size != right->id.size)
        return left->id.size < right->id.size ? -1 : 1;
    return (left->generation > right->generation) - (left->generation < right->generation);
}

int kvf_compare_group_blocks(const void *a, const void *b) {
    const kvf_group_block *left = a, *right = b;
    if (left->group != right->group)
        return left->group < right->group ? -1 : 1;
    return (left->block > right->block) - (left->block < right->block);
}

size_t kvf_sort_group_blocks(kvf_group_block *blocks, size_t count) {
    if (count == 0)
        return 0;
    qsort(blocks, count, sizeof *blocks, kvf_compare_group_blocks);
    size_t left = 1;
    for (size_t i = 1; i < count; i++)
        if (kvf_compare_group_blocks(&blocks[left - 1], &blocks[i]) != 0)
            blocks[left++] = blocks[i];
    return left;
}
