/* Lists of ids, made with enough room for all their entries, so that filling them cannot fail. */
#include "connector/connector.h"

kvf_status kvf_ids_make(kvf_ids *list, uint64_t capacity) {
    list->count = 0;
    list->at = capacity > SIZE_MAX ? NULL : kvf_alloc((size_t)capacity, sizeof *list->at);
    return list->at ? KVF_OK
                    : kvf_plain_fail(KVF_E_NOMEM, "no memory for a list of %llu ids",
                                     (unsigned long long)capacity);
}

kvf_status kvf_ids_slice(kvf_ids *list, const kvf_ids *from, size_t begin, size_t end) {
    kvf_status status = kvf_ids_make(list, end - begin);
    if (status)
        return status;
    if (end > begin)
        memcpy(list->at, from->at + begin, (end - begin) * sizeof *list->at);
    list->count = end - begin;
    return KVF_OK;
}

kvf_status kvf_ids_copy(kvf_ids *list, const kvf_ids *from) {
    return kvf_ids_slice(list, from, 0, from->count);
}

bool kvf_ids_have(const kvf_ids *list, uint64_t number) {
    for (size_t i = 0; i < list->count; i++)
        if (list->at[i] == number)
            return true;
    return false;
}

void kvf_ids_free(kvf_ids *list) {
    if (!list)
        return;
    kvf_free(list->at);
    *list = (kvf_ids){0};
}

kvf_status kvf_block_lists_make(kvf_block_lists *lists, size_t count) {
    lists->count = 0;
    lists->groups = kvf_alloc0(count, sizeof *lists->groups);
    if (!lists->groups)
        return kvf_plain_fail(KVF_E_NOMEM, "no memory for %zu block lists", count);
    lists->count = count;
    return KVF_OK;
}

kvf_status kvf_block_lists_copy(kvf_block_lists *lists, const kvf_block_lists *from) {
    kvf_block_lists copy;
    kvf_status status = kvf_block_lists_make(&copy, from->count);
    for (size_t g = 0; !status && g < from->count; g++)
        status = kvf_ids_copy(&copy.groups[g], &from->groups[g]);
    if (status) {
        kvf_block_lists_free(&copy);
        return status;
    }
    *lists = copy;
    return KVF_OK;
}

bool kvf_block_lists_all_empty(const kvf_block_lists *lists) {
    for (size_t g = 0; g < lists->count; g++)
        if (lists->groups[g].count)
            return false;
    return true;
}

void kvf_block_lists_free(kvf_block_lists *lists) {
    if (!lists)
        return;
    for (size_t g = 0; g < lists->count; g++)
        kvf_ids_free(&lists->groups[g]);
    kvf_free(lists->groups);
    *lists = (kvf_block_lists){0};
}

void kvf_topology_free_text(char *text) {
    kvf_free(text);
}
