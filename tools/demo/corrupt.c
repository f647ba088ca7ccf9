#include "corrupt.h"

#include <stdlib.h>
#include <string.h>

#include "numbers.h"

enum { FIELDS = 6 };

/* Finds the group that has the model's layer and a part of the given name. */
static bool find_part(const kvf_model *model, uint64_t layer, const char *part, corruption *out) {
    for (uint32_t g = 0; g < kvf_model_group_count(model); g++) {
        const kvf_group_desc *group = kvf_model_group(model, g);
        for (uint32_t p = 0; p < group->part_count; p++)
            for (uint32_t i = 0; i < group->layer_count; i++)
                if (group->layers[i] == layer && strcmp(group->parts[p].name, part) == 0) {
                    out->group = g;
                    out->layer = i;
                    out->part = p;
                    return true;
                }
    }
    return false;
}

static bool find_holder(const engines *all, const workload *work, corruption *out) {
    const kvf_group_request *wanted = &workload_request(work, out->request)[out->group];
    static uint8_t nothing[1];
    for (out->rank = 0; out->rank < kvf_engine_rank_count(all->prefill); out->rank++) {
        const kvf_shard *shard = kvf_engine_shard(all->prefill, out->rank);
        uint32_t regions = kvf_shard_get(shard)->region_count;
        uint8_t **bases = calloc(regions + 1, sizeof *bases);
        if (!bases)
            return false;
        for (uint32_t i = 0; i < regions; i++)
            bases[i] = nothing; /* only whether there is an address matters here */
        cell_memory memory = {.shard = shard, .regions = bases};
        bool holds = cell_byte(&memory, &wanted->remote, out->group, out->layer, out->part, out->row,
                               out->unit, 0) != NULL;
        free(bases);
        if (holds)
            return true;
    }
    return false;
}

int corruption_parse(const char *text, const engines *all, const workload *work, corruption *out) {
    *out = (corruption){.wanted = true};
    char *copy = strdup(text);
    if (!copy)
        return failure("not enough memory");
    char *rest = copy, *part = NULL;
    uint64_t numbers[FIELDS] = {0};
    bool valid = true;
    for (size_t i = 0; i < FIELDS; i++) {
        char *piece = strsep(&rest, ",");
        if (i == 2)
            part = piece;
        else
            valid = valid && piece && parse_number(piece, &numbers[i]);
    }
    valid = valid && part && !rest && numbers[0] < work->request_count &&
            find_part(all->model, numbers[1], part, out);
    if (valid) {
        const kvf_part_desc *desc = &kvf_model_group(all->model, out->group)->parts[out->part];
        out->request = (uint32_t)numbers[0];
        out->row = numbers[3];
        out->unit = (uint32_t)numbers[4];
        out->element = (uint32_t)numbers[5];
        valid = numbers[3] < workload_request(work, out->request)[out->group].end * desc->rows_per_step &&
                numbers[4] < desc->units && numbers[5] < desc->cell_elements && find_holder(all, work, out);
    }
    free(copy);
    if (valid)
        return EXIT_DONE;
    return usage_error(
        "--corrupt is \"%s\"; allowed: REQUEST,LAYER,PART,TOKEN,HEAD,ELEMENT of a cell that is cached", text);
}

void corruption_apply(const corruption *what, const cell_memory *memory, const workload *work) {
    const kvf_group_desc *group = kvf_model_group(kvf_shard_model(memory->shard), what->group);
    const kvf_block_table *table = &workload_request(work, what->request)[what->group].remote;
    /* The first bit, of numbers the sign: rounding does not hide it. */
    uint64_t bit = (uint64_t)(what->element + 1) * kvf_dtype_bits(group->parts[what->part].dtype) - 1;
    uint8_t *byte =
        cell_byte(memory, table, what->group, what->layer, what->part, what->row, what->unit, bit / 8);
    if (byte)
        *byte ^= (uint8_t)(1u << bit % 8);
}
