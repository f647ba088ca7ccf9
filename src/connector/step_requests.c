/* The requests of one scheduler step, one by one, as yield_req_data of vLLM's connectors gives them. */
#include <stdlib.h>

#include <kvferry/connector/step_requests.h>

#include "base/base.h"

static int compare_ids(const void *a, const void *b) {
    const kvf_request_id *left = a, *right = b;
    if (left->size != right->size)
        return left->size < right->size ? -1 : 1;
    return left->size ? memcmp(left->data, right->data, left->size) : 0;
}

static kvf_status check_id(kvf_request_id id, const char *what, size_t i) {
    if (id.size && !id.data)
        return kvf_fail(KVF_E_INVALID, "%s %zu: the id is NULL and has %zu bytes", what, i, id.size);
    return KVF_OK;
}

static kvf_status check_requests(const kvf_step_request *requests, size_t count, const char *what) {
    if (count && !requests)
        return kvf_fail(KVF_E_INVALID, "%s is NULL and has a count of %zu", what, count);
    kvf_status status = KVF_OK;
    for (size_t i = 0; i < count && !status; i++)
        status = check_id(requests[i].id, what, i);
    return status;
}

static kvf_status check_step(const kvf_step *step) {
    kvf_status status = check_requests(step->fresh, step->fresh_count, "fresh");
    if (!status)
        status = check_requests(step->cached, step->cached_count, "cached");
    if (status)
        return status;
    if (step->resumed_count && !step->resumed)
        return kvf_fail(KVF_E_INVALID, "resumed is NULL and has a count of %zu", step->resumed_count);
    for (size_t i = 0; i < step->resumed_count && !status; i++)
        status = check_id(step->resumed[i], "resumed", i);
    return status;
}

kvf_status kvf_step_requests(const kvf_step *step, kvf_step_request *items) {
    if (!step || (!items && (step->fresh_count || step->cached_count)))
        return kvf_fail(KVF_E_INVALID, "kvf_step_requests: step or items is NULL");
    kvf_status status = check_step(step);
    if (status)
        return status;
    kvf_request_id *resumed = kvf_copy(step->resumed, step->resumed_count, sizeof *resumed);
    if (!resumed)
        return kvf_nomem("the resumed requests of a step");
    qsort(resumed, step->resumed_count, sizeof *resumed, compare_ids);
    for (size_t i = 0; i < step->fresh_count; i++) {
        items[i] = step->fresh[i];
        items[i].resumed = false;
    }
    for (size_t i = 0; i < step->cached_count; i++) {
        kvf_step_request *item = &items[step->fresh_count + i];
        *item = step->cached[i];
        item->resumed =
            bsearch(&item->id, resumed, step->resumed_count, sizeof item->id, compare_ids) != NULL;
    }
    kvf_free(resumed);
    return KVF_OK;
}
