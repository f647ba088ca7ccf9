#include "workload.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "pattern.h"
#include "text.h"

enum {
    MOST_REQUESTS = 64, /* unless the user wants more */
    ENOUGH_REQUESTS = 4,
};

/* One engine while requests are chosen for it. */
typedef struct side {
    engine_shape *shape;
    uint64_t *block_bytes; /* by pool: what one more block costs, over all ranks */
    uint64_t *needed;      /* by pool: blocks that the requests need */
    uint32_t *shuffled;    /* block ids of one pool in random order */
    uint32_t *next;        /* the first of `shuffled` that is in no table */
} side;

typedef struct chooser {
    const options *asked;
    engines *all;
    uint32_t groups;
    side prefill, decode;
    uint64_t tokens; /* of the longest prompt */
} chooser;

/* The pool from which a group takes its blocks: its own, with the group's number, or pool 0, which all share. */
static uint32_t pool_of(const side *of, uint32_t group) {
    return of->shape->share_pages ? 0 : group;
}

/* ---- one request ----------------------------------------------------------------------------- */

typedef struct prompt {
    uint64_t tokens;
    uint64_t hit; /* tokens that the decode side already has */
} prompt;

/* Lengths rarely end at a block's end. Every third request hits a prefix, which rarely ends at one either. */
static prompt prompt_of(const chooser *c, uint32_t request) {
    prompt out = {c->tokens, 0};
    uint64_t random = pattern_mix(c->asked->seed * 0x9e3779b97f4a7c15u + request);
    if (request)
        out.tokens -= random % (c->tokens / 4 + 1);
    if (request % 3 == 2)
        out.hit = (random >> 20) % (out.tokens / 2 + 1);
    return out;
}

static kvf_group_request steps_of(const kvf_group_desc *group, prompt of) {
    if (group->kind == KVF_GROUP_STATE)
        return (kvf_group_request){.begin = 0, .end = 1};
    return (kvf_group_request){.begin = kvf_group_step_count(group, of.hit),
                               .end = kvf_group_step_count(group, of.tokens)};
}

static bool is_here(const engine_shape *shape) {
    return shape->groups != NULL;
}

/* The blocks [begin, end) of the sequence that hold the steps [first, last) on every rank of a side; empty for a side
 * that is on another machine. */
typedef struct block_range {
    uint64_t begin, end;
} block_range;

static block_range blocks_of(const engine_shape *shape, const kvf_model *model, uint32_t group,
                             uint64_t first, uint64_t last) {
    if (!is_here(shape))
        return (block_range){0};
    const kvf_group_desc *desc = kvf_model_group(model, group);
    uint64_t count = desc->kind == KVF_GROUP_STATE ? 1 : shape->dcp;
    uint64_t width = count > 1 ? shape->dcp_width / desc->tokens_per_step : 1; /* in steps */
    uint64_t block = shape->groups[group].tokens_per_block / desc->tokens_per_step;
    /* The rank with the last share has the fewest steps before `first`, the rank with the first share the most. */
    uint64_t begin = first / (width * count) * width;
    uint64_t rest = last % (width * count);
    uint64_t end = last / (width * count) * width + (rest < width ? rest : width);
    return (block_range){begin / block, (end + block - 1) / block};
}

/* The blocks of a request: those that the prefill side has, and those that the decode side receives. */
static block_range prefill_blocks(const chooser *c, uint32_t g, const kvf_group_request *steps) {
    uint64_t first = kvf_group_first_needed(kvf_model_group(c->all->model, g), steps->end);
    return blocks_of(c->prefill.shape, c->all->model, g, first, steps->end);
}

static block_range decode_blocks(const chooser *c, uint32_t g, const kvf_group_request *steps) {
    uint64_t first = kvf_group_first_needed(kvf_model_group(c->all->model, g), steps->end);
    if (first < steps->begin)
        first = steps->begin;
    return blocks_of(c->decode.shape, c->all->model, g, first, steps->end);
}

/* ---- how many requests fit ------------------------------------------------------------------- */

static int layout_bytes(const engine_shape *shape, const kvf_model *model, uint64_t *out) {
    kvf_engine *engine = NULL;
    int result = shape_build(shape, model, &engine);
    if (!result)
        *out = engine_bytes(engine);
    kvf_engine_free(engine);
    return result;
}

/* A cache's bytes are linear in its number of blocks, so that two layouts give the bytes of one block. */
static int weigh_blocks(chooser *c, side *of) {
    engine_shape *shape = of->shape;
    if (!is_here(shape))
        return EXIT_DONE;
    kvf_group_spec *asked = malloc(c->groups * sizeof *asked);
    if (!asked)
        return failure("not enough memory");
    memcpy(asked, shape->groups, c->groups * sizeof *asked);
    for (uint32_t g = 0; g < c->groups; g++)
        shape->groups[g].block_count = 1;
    uint64_t one = 0, two = 0;
    int result = layout_bytes(shape, c->all->model, &one);
    for (uint32_t pool = 0; pool < c->groups && !result; pool++) {
        for (uint32_t g = 0; g < c->groups; g++)
            shape->groups[g].block_count = pool_of(of, g) == pool ? 2 : 1;
        result = layout_bytes(shape, c->all->model, &two);
        of->block_bytes[pool] = two - one; /* 0 if no group uses this pool */
    }
    memcpy(shape->groups, asked, c->groups * sizeof *asked);
    free(asked);
    return result;
}

/* Some blocks stay free, to see that nothing is written to them. */
static uint64_t with_spare(uint64_t needed) {
    return needed + (needed / 8 < 2 ? 2 : needed / 8);
}

static uint64_t pool_blocks(const side *of, uint32_t pool) {
    return of->shape->fixed_blocks[pool] ? of->shape->groups[pool].block_count : with_spare(of->needed[pool]);
}

static double side_bytes(const chooser *c, const side *of) {
    double bytes = 0; /* may pass 2^64 while requests are tried */
    for (uint32_t pool = 0; is_here(of->shape) && pool < c->groups; pool++)
        bytes += (double)pool_blocks(of, pool) * (double)of->block_bytes[pool];
    return bytes;
}

static void add_request(chooser *c, uint32_t request, int sign) {
    for (uint32_t g = 0; g < c->groups; g++) {
        kvf_group_request steps = steps_of(kvf_model_group(c->all->model, g), prompt_of(c, request));
        block_range prefill = prefill_blocks(c, g, &steps), decode = decode_blocks(c, g, &steps);
        c->prefill.needed[pool_of(&c->prefill, g)] += (uint64_t)sign * (prefill.end - prefill.begin);
        c->decode.needed[pool_of(&c->decode, g)] += (uint64_t)sign * (decode.end - decode.begin);
    }
}

static bool fits_fixed(const chooser *c, const side *of) {
    for (uint32_t g = 0; is_here(of->shape) && g < c->groups; g++)
        if (of->shape->fixed_blocks[g] && of->needed[g] > of->shape->groups[g].block_count)
            return false;
    return true;
}

/* A sixteenth of the limit is left for the processes themselves. */
static bool fits(const chooser *c) {
    uint64_t limit = c->asked->memory_limit - c->asked->memory_limit / 16;
    return side_bytes(c, &c->prefill) + side_bytes(c, &c->decode) <= (double)limit &&
           fits_fixed(c, &c->prefill) && fits_fixed(c, &c->decode);
}

/* Adds requests while they fit, up to the number that the user gave. */
static uint32_t fill(chooser *c, uint64_t tokens) {
    c->tokens = tokens;
    memset(c->prefill.needed, 0, c->groups * sizeof *c->prefill.needed);
    memset(c->decode.needed, 0, c->groups * sizeof *c->decode.needed);
    uint64_t most = c->asked->requests ? c->asked->requests : MOST_REQUESTS;
    for (uint32_t count = 0; count < most; count++) {
        add_request(c, count, 1);
        if (!fits(c)) {
            add_request(c, count, -1);
            return count;
        }
    }
    return (uint32_t)most;
}

static int say_what_does_not_fit(chooser *c, uint32_t count) {
    uint32_t asked = c->asked->requests ? (uint32_t)c->asked->requests : 1;
    for (uint32_t i = count; i < asked; i++)
        add_request(c, i, 1);
    const side *sides[] = {&c->prefill, &c->decode};
    for (size_t s = 0; s < 2; s++)
        for (uint32_t g = 0; is_here(sides[s]->shape) && g < c->groups; g++)
            if (sides[s]->shape->fixed_blocks[g] &&
                sides[s]->needed[g] > sides[s]->shape->groups[g].block_count)
                return usage_error(
                    "--%s: group%s %s %llu blocks, but %u requests of up to %llu tokens need %llu",
                    sides[s]->shape->side, sides[s]->shape->share_pages ? "s" : "",
                    sides[s]->shape->share_pages
                        ? "share"
                        : text_format("%s has", kvf_model_group(c->all->model, g)->name).text,
                    (unsigned long long)sides[s]->shape->groups[g].block_count, asked,
                    (unsigned long long)c->tokens, (unsigned long long)sides[s]->needed[g]);
    const double needed = fmin(side_bytes(c, &c->prefill) + side_bytes(c, &c->decode), 0x1p63);
    return usage_error(
        "%u request%s of up to %llu tokens need%s %s of caches; --memory-limit is %s, of which "
        "15/16 are for caches",
        asked, asked == 1 ? "" : "s", (unsigned long long)c->tokens, asked == 1 ? "s" : "",
        text_bytes((uint64_t)needed).text, text_bytes(c->asked->memory_limit).text);
}

static int choose(chooser *c, uint32_t *count) {
    static const uint64_t lengths[] = {600, 150, 40};
    if (c->asked->tokens) {
        *count = fill(c, c->asked->tokens);
    } else {
        uint64_t enough = c->asked->requests ? c->asked->requests : ENOUGH_REQUESTS;
        uint64_t best = lengths[0];
        *count = fill(c, best);
        for (size_t i = 1; i < sizeof lengths / sizeof *lengths && *count < enough; i++) {
            uint32_t more = fill(c, lengths[i]);
            if (more > *count) {
                *count = more;
                best = lengths[i];
            }
        }
        *count = fill(c, best);
    }
    if (*count == 0 || (c->asked->requests && *count < c->asked->requests))
        return say_what_does_not_fit(c, *count);
    for (uint32_t g = 0; g < c->groups; g++) {
        side *sides[] = {&c->prefill, &c->decode};
        for (size_t s = 0; s < 2; s++)
            if (is_here(sides[s]->shape))
                sides[s]->shape->groups[g].block_count = pool_blocks(sides[s], pool_of(sides[s], g));
    }
    return EXIT_DONE;
}

/* ---- block tables ---------------------------------------------------------------------------- */

static bool shuffle(side *of, uint64_t count, uint64_t seed) {
    free(of->shuffled);
    uint32_t *ids = of->shuffled = of->next = calloc((size_t)count, sizeof *ids);
    if (!ids)
        return false;
    for (uint64_t i = 0; i < count; i++)
        ids[i] = (uint32_t)i;
    for (uint64_t i = count; i > 1; i--) {
        seed = pattern_mix(seed + 0x9e3779b97f4a7c15u);
        uint64_t j = seed % i;
        uint32_t id = ids[i - 1];
        ids[i - 1] = ids[j];
        ids[j] = id;
    }
    return true;
}

/* Shuffles a pool at its first group; the next group of the pool gets the blocks that are left. */
static bool open_pool(side *of, uint32_t group, uint64_t seed) {
    return !is_here(of->shape) || pool_of(of, group) != group ||
           shuffle(of, of->shape->groups[group].block_count, seed);
}

/* The first block of a decode table: the one at the end of the prefix hit. Blocks before a window have no memory. */
static uint64_t decode_table_begin(const chooser *c, uint32_t g, const kvf_group_request *steps) {
    return blocks_of(c->decode.shape, c->all->model, g, steps->begin, steps->end).begin;
}

static uint64_t count_entries(const chooser *c, uint32_t count) {
    uint64_t entries = 0;
    for (uint32_t r = 0; r < count; r++)
        for (uint32_t g = 0; g < c->groups; g++) {
            kvf_group_request steps = steps_of(kvf_model_group(c->all->model, g), prompt_of(c, r));
            block_range prefill = prefill_blocks(c, g, &steps);
            entries += prefill.end - prefill.begin;
            entries += decode_blocks(c, g, &steps).end - decode_table_begin(c, g, &steps);
        }
    return entries;
}

static void fill_tables(chooser *c, uint32_t g, uint32_t **free_ids, workload *out) {
    uint32_t *ids = *free_ids;
    for (uint32_t r = 0; r < out->request_count; r++) {
        kvf_group_request request = steps_of(kvf_model_group(c->all->model, g), prompt_of(c, r));
        block_range prefill = prefill_blocks(c, g, &request), decode = decode_blocks(c, g, &request);
        uint32_t count = (uint32_t)(prefill.end - prefill.begin);
        request.remote = (kvf_block_table){ids, count, (uint32_t)prefill.begin};
        for (uint32_t i = 0; c->prefill.next && i < count; i++)
            *ids++ = *c->prefill.next++;
        uint64_t begin = decode_table_begin(c, g, &request);
        request.local = (kvf_block_table){ids, (uint32_t)(decode.end - begin), (uint32_t)begin};
        for (uint64_t i = begin; c->decode.next && i < decode.end; i++)
            *ids++ = i < decode.begin ? KVF_NO_BLOCK : *c->decode.next++;
        out->groups[(size_t)r * c->groups + g] = request;
    }
    *free_ids = ids;
}

static int make_tables(chooser *c, uint32_t count, workload *out) {
    *out = (workload){.request_count = count, .group_count = c->groups, .longest_tokens = c->tokens};
    out->groups = calloc((size_t)count * c->groups + 1, sizeof *out->groups);
    out->ids = malloc((size_t)count_entries(c, count) * sizeof *out->ids + 1);
    if (!out->groups || !out->ids)
        return failure("not enough memory");
    uint32_t *ids = out->ids;
    for (uint32_t g = 0; g < c->groups; g++) {
        uint64_t seed = c->asked->seed + g;
        if (!open_pool(&c->prefill, g, pattern_mix(seed)) || !open_pool(&c->decode, g, pattern_mix(~seed)))
            return failure("not enough memory");
        fill_tables(c, g, &ids, out);
    }
    for (uint32_t r = 0; r < count; r++) {
        prompt of = prompt_of(c, r);
        out->tokens += of.tokens;
        out->hit_count += of.hit > 0;
    }
    out->cache_bytes = engine_bytes(c->all->prefill) + engine_bytes(c->all->decode);
    return EXIT_DONE;
}

int workload_make(const options *asked, engines *all, workload *out) {
    *out = (workload){0};
    chooser c = {.asked = asked,
                 .all = all,
                 .groups = kvf_model_group_count(all->model),
                 .prefill = {.shape = &all->prefill_shape},
                 .decode = {.shape = &all->decode_shape}};
    uint64_t *numbers = calloc(4 * (size_t)c.groups, sizeof *numbers);
    int result = EXIT_DONE;
    uint32_t count = 0;
    if (!numbers) {
        result = failure("not enough memory");
        goto done;
    }
    c.prefill.block_bytes = numbers;
    c.prefill.needed = numbers + c.groups;
    c.decode.block_bytes = numbers + 2 * (size_t)c.groups;
    c.decode.needed = numbers + 3 * (size_t)c.groups;
    result = weigh_blocks(&c, &c.prefill);
    if (!result)
        result = weigh_blocks(&c, &c.decode);
    if (!result)
        result = choose(&c, &count);
    if (!result)
        result = engines_build(all);
    if (!result)
        result = make_tables(&c, count, out);
done:
    free(c.prefill.shuffled);
    free(c.decode.shuffled);
    free(numbers);
    return result;
}

void workload_free(workload *work) {
    free(work->groups);
    free(work->ids);
    *work = (workload){0};
}
