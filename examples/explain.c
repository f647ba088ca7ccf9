/*
 * The README's example: what one rank of a decode engine with two ranks and larger HND blocks reads from each rank of a
 * prefill engine with four ranks and small NHD blocks. It compiles as C++20 too.
 */
#include <stdio.h>

#include <kvferry/request.h>

#define TRY(call)                                                                                            \
    if (call)                                                                                                \
    return fprintf(stderr, "%s\n", kvf_error_detail()), 1

int main(void) {
    kvf_model *model;
    kvf_engine *prefill, *decode;
    kvf_plan *plan;
    kvf_request *request;
    kvf_group_spec nhd = {.tokens_per_block = 16, .block_count = 64, .order = "L|BPNH"};
    kvf_group_spec hnd = {.tokens_per_block = 24, .block_count = 64, .order = "L|BPHN"};
    kvf_engine_spec p = {.struct_size = sizeof p, .name = "prefill", .tp_size = 4, .all = nhd};
    kvf_engine_spec d = {.struct_size = sizeof d, .name = "decode", .tp_size = 2, .all = hnd};
    TRY(kvf_model_load("llama-3.1-8b", NULL, &model));
    TRY(kvf_engine_build(model, &p, &prefill));
    TRY(kvf_engine_build(model, &d, &decode));
    TRY(kvf_plan_build(kvf_engine_shard(decode, 0), prefill, NULL, &plan));
    TRY(kvf_plan_verify(plan));
    TRY(kvf_request_create(plan, &request));
    uint32_t theirs[] = {7, 3, 9}, ours[] = {5, 1}; /* the blocks of 40 tokens there, and here */
    kvf_group_request wanted = {
        .local = {.ids = ours, .count = 2}, .remote = {.ids = theirs, .count = 3}, .end = 40};
    TRY(kvf_request_set(request, &wanted, 1));
    for (uint32_t s = 0; s < kvf_plan_source_count(plan); s++)
        printf("rank %u sends %llu bytes in %llu runs\n", kvf_plan_source_rank(plan, s),
               (unsigned long long)kvf_request_bytes(request, s),
               (unsigned long long)kvf_request_run_count(request, s));

    kvf_request_free(request);
    kvf_plan_free(plan);
    kvf_engine_free(decode);
    kvf_engine_free(prefill);
    kvf_model_free(model);
    return 0;
}
