#include "transport_ways.h"

#include <stdio.h>
#include <stdlib.h>

size_t ways_of_pairs(const pair_kind *kinds, size_t count, test_way *out) {
    assert_true(count <= MAX_WAYS);
    for (size_t i = 0; i < count; i++) {
        transport_variant_name(&kinds[i], out[i].name, sizeof out[i].name);
        out[i].state = (void *)(uintptr_t)&kinds[i];
    }
    return count;
}

size_t ways_of_kinds(test_way *out) {
    kvf_transport_kind kind = {.struct_size = sizeof kind};
    size_t count = 0;
    for (uint32_t i = 0; kvf_transport_describe(i, &kind) == KVF_OK; i++) {
        if (!(kind.memory_kinds & 1u << KVF_MEMORY_HOST))
            continue;
        (void)snprintf(out[count].name, sizeof out[count].name, "%s", kind.name);
        out[count++].state = (void *)(uintptr_t)kind.name;
    }
    return count;
}

int run_every_way(const char *suite, const way_test *tests, size_t count, const test_way *ways,
                  size_t way_count, const struct CMUnitTest *more, size_t more_count) {
    size_t total = count * way_count;
    struct CMUnitTest *all = calloc(total + more_count, sizeof *all);
    char(*names)[256] = calloc(total, sizeof *names);
    if (!all || !names)
        return 1;
    for (size_t i = 0; i < total; i++) {
        const test_way *way = &ways[i % way_count];
        (void)snprintf(names[i], sizeof names[i], "%s (%s)", tests[i / way_count].name, way->name);
        all[i] = (struct CMUnitTest){names[i], tests[i / way_count].run, NULL, NULL, way->state};
    }
    for (size_t i = 0; i < more_count; i++)
        all[total + i] = more[i];
    int failed = _cmocka_run_group_tests(suite, all, total + more_count, NULL, NULL);
    free(names);
    free(all);
    return failed;
}
