/*
 * The requests of one scheduler step, as vLLM's yield_req_data() gives them.
 *
 * Any thread may call; a call uses only its arguments.
 */
#ifndef KVFERRY_CONNECTOR_STEP_REQUESTS_H
#define KVFERRY_CONNECTOR_STEP_REQUESTS_H

#include <stdbool.h>

#include <kvferry/request.h>

#ifdef __cplusplus
extern "C" {
#endif

/** A request of one step, and the blocks it got in this step. */
typedef struct kvf_step_request {
    kvf_request_id id;
    const kvf_block_table *groups; /**< new blocks of each group; NULL: none */
    uint32_t group_count;
    /** Was preempted: `groups` replaces its earlier blocks. Set by kvf_step_requests(), ignored in a kvf_step */
    bool resumed;
} kvf_step_request;

/** The requests that a scheduler chose for one step. */
typedef struct kvf_step {
    const kvf_step_request *fresh; /**< requests that run for the first time */
    size_t fresh_count;
    const kvf_step_request *cached; /**< requests the workers know */
    size_t cached_count;
    const kvf_request_id *resumed; /**< which of the cached were preempted before */
    size_t resumed_count;
} kvf_step;

/**
 * Lists all requests of a step in order, the fresh ones first.
 *
 * @param items  receives fresh_count + cached_count entries; their pointers are the step's own
 * @return KVF_OK, KVF_E_INVALID, KVF_E_NOMEM
 */
KVF_API kvf_status kvf_step_requests(const kvf_step *step, kvf_step_request *items);

#ifdef __cplusplus
}
#endif

#endif
