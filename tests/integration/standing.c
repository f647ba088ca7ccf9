/*
 * An engine that waits to be visited: standing NAME MODEL TP BLOCK ORDER [keys]
 *
 * Every rank is an agent of this process. It prints the contact of rank 0, which knows the others: ENDPOINT or, with
 * keys, ENDPOINT,KEY. It ends when its standard input does.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <kvferry/agent.h>

#define MAX_RANKS 64u
#define MAX_REGIONS 256u
#define TRY(call)                                                                                            \
    if (call)                                                                                                \
    return fprintf(stderr, "%s\n", kvf_error_detail()), 1

static int open_rank(const kvf_engine *engine, uint32_t rank, const kvf_agent_options *options,
                     kvf_agent **out) {
    kvf_memory regions[MAX_REGIONS];
    const kvf_shard_desc *shard = kvf_shard_get(kvf_engine_shard(engine, rank));
    if (shard->region_count > MAX_REGIONS)
        return fprintf(stderr, "%u regions\n", shard->region_count), 1;
    TRY(kvf_agent_open(engine, rank, options, out));
    for (uint32_t i = 0; i < shard->region_count; i++) {
        regions[i] = (kvf_memory){.struct_size = sizeof(kvf_memory), .bytes = shard->region_bytes[i]};
        TRY(kvf_agent_allocate(*out, KVF_MEMORY_HOST, 0, regions[i].bytes, &regions[i].address));
    }
    TRY(kvf_agent_register(*out, regions, shard->region_count));
    return 0;
}

static int introduce(kvf_agent *rank, kvf_agent *to) {
    const void *bytes;
    size_t size;
    TRY(kvf_agent_introduction(rank, &bytes, &size));
    TRY(kvf_agent_introduce(to, bytes, size));
    return 0;
}

int main(int argc, char **argv) {
    if (argc < 6)
        return fprintf(stderr, "standing NAME MODEL TP BLOCK ORDER [keys]\n"), 2;
    bool secure = argc > 6 && strcmp(argv[6], "keys") == 0;
    char public_key[41], secret_key[41];
    kvf_model *model;
    kvf_engine *engine;
    kvf_agent *agents[MAX_RANKS] = {NULL};
    const kvf_engine_spec spec = {.struct_size = sizeof spec,
                                  .name = argv[1],
                                  .tp_size = (uint32_t)strtoul(argv[3], NULL, 10),
                                  .all = {.tokens_per_block = (uint32_t)strtoul(argv[4], NULL, 10),
                                          .block_count = 2,
                                          .order = argv[5]}};
    TRY(kvf_agent_make_keys(public_key, secret_key));
    TRY(kvf_model_load(argv[2], NULL, &model));
    TRY(kvf_engine_build(model, &spec, &engine));
    const kvf_agent_options options = {.struct_size = sizeof options,
                                       .transport = "inproc",
                                       .public_key = secure ? public_key : NULL,
                                       .secret_key = secure ? secret_key : NULL,
                                       .own_thread = true};
    int result = 0;
    uint32_t ranks = kvf_engine_rank_count(engine);
    for (uint32_t r = 0; r < ranks && r < MAX_RANKS && !result; r++) {
        result = open_rank(engine, r, &options, &agents[r]);
        if (!result && r > 0)
            result = introduce(agents[r], agents[0]);
    }
    if (!result) {
        printf("%s%s%s\n", kvf_agent_endpoint(agents[0]), secure ? "," : "", secure ? public_key : "");
        (void)fflush(stdout);
        char byte;
        while (read(STDIN_FILENO, &byte, 1) > 0)
            ;
    }
    for (uint32_t r = 0; r < MAX_RANKS; r++)
        kvf_agent_close(agents[r]);
    kvf_engine_free(engine);
    kvf_model_free(model);
    return result;
}
