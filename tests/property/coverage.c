#include "coverage.h"

#include <string.h>

#include "unlike.h"

static const char *const names[KIND_COUNT] = {
    [KIND_STATE] = "state groups",
    [KIND_MIXED] = "token and state groups together",
    [KIND_MIXED_DTYPES] = "states of another type than the tokens beside them",
    [KIND_SEVERAL_STATES] = "several states of one request",
    [KIND_CONV] = "states of several projections in one tensor",
    [KIND_REPLICATED_BESIDE_SPLIT] = "tokens replicated by rule, the state beside them split",
    [KIND_SHARED_BESIDE_SPLIT] = "heads shared by ranks, the state beside them split",
    [KIND_GRANULES] = "granules",
    [KIND_SHARED_LAYERS] = "groups that share layers",
    [KIND_WINDOW] = "sliding windows",
    [KIND_CHUNK] = "attention chunks",
    [KIND_COMPRESSED] = "entries of several tokens",
    [KIND_UNEVEN_TP] = "TP sizes that do not divide the units",
    [KIND_TP_ABOVE_UNITS] = "more TP ranks than granules",
    [KIND_REPLICATED] = "replicated parts",
    [KIND_PP] = "pipeline stages",
    [KIND_UNEVEN_PP] = "uneven pipeline stages",
    [KIND_DCP_LOCAL] = "local DCP",
    [KIND_DCP_REMOTE] = "remote DCP",
    [KIND_DCP_SAME] = "the same DCP on both sides",
    [KIND_DCP_DIFFERENT] = "different DCP on both sides",
    [KIND_UNEVEN_BLOCKS] = "block sizes that do not divide",
    [KIND_KERNEL_BLOCKS] = "kernel blocks",
    [KIND_KERNEL_BESIDE_STATE] = "kernel blocks beside a state",
    [KIND_KERNEL_RATIOS] = "different numbers of kernel blocks on the two sides",
    [KIND_GROUP_RATIOS] = "groups whose block sizes have different ratios",
    [KIND_OTHER_ORDER] = "different axis orders",
    [KIND_PAGE_BYTES] = "page_bytes",
    [KIND_PAGE_ALIGN] = "page_align",
    [KIND_SHARED_PAGES] = "groups on shared pages",
    [KIND_SHARED_PAGES_STATE] = "tokens and states on shared pages",
    [KIND_SHARED_PAGES_EVEN] = "the same, in pages of one size",
    [KIND_HAND_LOCAL] = "local shards by hand",
    [KIND_HAND_REMOTE] = "remote shards by hand",
    [KIND_CUT_ONE] = "cells in pieces on one side",
    [KIND_CUT_BOTH] = "cells in pieces on both sides",
    [KIND_CHANNEL_WISE] = "cells in pieces of one element beside whole ones",
    [KIND_UNLIKE_GROUP_ORDER] = "models with groups in another order",
    [KIND_UNLIKE_PART_ORDER] = "models with parts in another order",
    [KIND_UNLIKE_GROUPS] = "models of which one lacks a group",
    [KIND_UNLIKE_DRAFT_LOCAL] = "draft layers here and not there",
    [KIND_UNLIKE_DRAFT_REMOTE] = "draft layers there and not here",
    [KIND_UNLIKE_LAYERS] = "models of which one lacks layers of a group",
    [KIND_UNLIKE_CELLS] = "models with other cells in a group",
    [KIND_ASKED_LAYERS] = "plans for a range of layers",
    [KIND_ENGINE_REFUSED] = "engines refused",
    [KIND_SHARD_REFUSED] = "shards refused",
    [KIND_FIRST_REPLICA] = "first replica",
    [KIND_RANK] = "local ranks",
    [KIND_RANK_EMPTY] = "ranks that want nothing",
    [KIND_UNCOVERED] = "plans refused: uncovered",
    [KIND_UNLIKE_REFUSED] = "plans refused: what the other model is or lacks",
    [KIND_ASKED_LESS] = "the same, asked for less",
    [KIND_MOVED] = "transfers compared",
    [KIND_PREFIX_UNALIGNED] = "prefix hits inside a block",
    [KIND_CACHED_BESIDE] = "a cached group beside one to move",
    [KIND_TABLE_LATER] = "tables that begin later",
    [KIND_TABLE_HOLES] = "tables with KVF_NO_BLOCK",
    [KIND_REQUEST_REFUSED] = "requests refused",
    [KIND_FAULT_ELSEWHERE] = "faults that this rank does not touch",
    [KIND_PREDICTED] = "predictions",
    [KIND_COUNTED] = "counts of runs",
    [KIND_PACKED] = "packed streams",
    [KIND_PACKED_SIZED] = "packed streams of a size that was foretold",
    [KIND_CONVERTED] = "plans that convert",
    [KIND_PACKED_CONVERTED] = "items in another type on the way",
    [KIND_PACKED_MUTANT] = "readers with another selection",
    [KIND_DEVICE_GATHERED] = "ranges gathered by kernels of devices",
    [KIND_DEVICE_SCATTERED] = "ranges scattered by kernels of devices",
    [KIND_DEVICE_CONVERTED] = "boxes converted by kernels of devices",
    [KIND_DEVICE_PARTS] = "ranges that a device moves in parts",
    [KIND_DEVICE_MISALIGNED] = "conversions that a device refuses, for their place",
    [KIND_DEVICE_SPOILED] = "kernels with a wrong stride, and noticed",
    [KIND_NEST] = "boxes of nests, moved by kernels of devices",
    [KIND_NEST_MANY] = "boxes of several nests",
    [KIND_NEST_LOOPS] = "boxes of nests with two loops",
    [KIND_NEST_SPOILED] = "nests with a wrong stride, and noticed",
    [KIND_SUM] = "areas summed by the kernel of devices",
    [KIND_SUM_HOST] = "areas summed by the host, too",
    [KIND_SUM_SPLIT] = "areas with a sum for each unit",
    [KIND_SUM_CONVERTED] = "areas summed in another type",
    [KIND_SUM_MISALIGNED] = "areas that a device does not convert, for their place",
    [KIND_SUM_CHANGED] = "areas of which a bit is changed, and noticed",
    [KIND_SUM_SPOILED] = "sums with a wrong stride, and noticed",
    [KIND_FLOW_PULL] = "flows that are pulled",
    [KIND_FLOW_PUSH] = "flows that are pushed",
    [KIND_FLOW_LAYERS] = "transfers by flows in two ranges of layers",
    [KIND_FLOW_STEPS] = "transfers by flows in two ranges of steps",
    [KIND_FLOW_DIRECT] = "moves between stages that go direct",
    [KIND_FLOW_CHOSEN] = "moves between stages that choose their way",
    [KIND_FLOW_BEYOND_ARENA] = "flows of more bytes than their arenas",
    [KIND_FLOW_SHM] = "flows between transports of one host",
    [KIND_FLOW_SPOILED] = "flows of which a byte is spoiled, and noticed",
};

static uint64_t counts[KIND_COUNT];

void note(kind k) {
    counts[k]++;
}

void note_if(kind k, bool is_so) {
    counts[k] += is_so;
}

static bool any_part(const recipe *r, bool (*is)(const part_recipe *part, uint32_t tp), uint32_t tp) {
    for (uint32_t g = 0; g < r->group_count; g++)
        for (uint32_t p = 0; p < r->groups[g].part_count; p++)
            if (is(&r->groups[g].parts[p], tp))
                return true;
    return false;
}

static bool has_granules(const part_recipe *part, uint32_t tp) {
    (void)tp;
    return part->granule > 1;
}
static bool is_replicated(const part_recipe *part, uint32_t tp) {
    (void)tp;
    return part->replicate;
}
static bool is_uneven(const part_recipe *part, uint32_t tp) {
    return !part->replicate && part->units / part->granule > tp && part->units / part->granule % tp != 0;
}
static bool is_shared(const part_recipe *part, uint32_t tp) {
    return !part->replicate && part->units / part->granule < tp;
}

/* ---- models ---------------------------------------------------------------------------------- */

static void note_states(const recipe *r) {
    bool dtypes = false, several = false, conv = false;
    for (uint32_t g = 0; g < r->group_count; g++) {
        const group_recipe *group = &r->groups[g];
        several |= group->is_state && r->requests[g].end > 1;
        for (uint32_t p = 1; p < group->part_count; p++)
            conv |= group->is_state && !group->parts[p].new_tensor && group->parts[p].rows > 1;
        for (uint32_t other = 0; other < r->group_count; other++)
            dtypes |= group->is_state && !r->groups[other].is_state &&
                      group->parts[group->part_count - 1].dtype != r->groups[other].parts[0].dtype;
    }
    note_if(KIND_MIXED_DTYPES, dtypes);
    note_if(KIND_SEVERAL_STATES, several);
    note_if(KIND_CONV, conv);
}

static void note_model(const recipe *r) {
    uint32_t states = 0, layers = 0;
    bool window = false, chunk = false, compressed = false, shared = false;
    for (uint32_t g = 0; g < r->group_count; g++) {
        states += r->groups[g].is_state != 0;
        window |= r->groups[g].window != 0;
        chunk |= r->groups[g].chunk != 0;
        compressed |= r->groups[g].step_tokens > 1;
        shared |= (layers & r->groups[g].layer_mask) != 0;
        layers |= r->groups[g].layer_mask;
    }
    note_if(KIND_STATE, states > 0);
    note_if(KIND_MIXED, states > 0 && states < r->group_count);
    note_if(KIND_WINDOW, window);
    note_if(KIND_CHUNK, chunk);
    note_if(KIND_COMPRESSED, compressed);
    note_if(KIND_SHARED_LAYERS, shared);
    note_if(KIND_GRANULES, any_part(r, has_granules, 0));
    note_if(KIND_REPLICATED, any_part(r, is_replicated, 0));
    note_states(r);
}

/* ---- engines --------------------------------------------------------------------------------- */

/* Whether `is` holds for every part of some group of the given kind. */
static bool all_parts(const recipe *r, bool is_state, bool (*is)(const part_recipe *part, uint32_t tp),
                      uint32_t tp) {
    bool any = false;
    for (uint32_t g = 0; g < r->group_count; g++) {
        bool all = (r->groups[g].is_state != 0) == is_state;
        for (uint32_t p = 0; p < r->groups[g].part_count && all; p++)
            all = is(&r->groups[g].parts[p], tp);
        any |= all;
    }
    return any;
}

static bool is_split(const part_recipe *part, uint32_t tp) {
    return !part->replicate && tp > 1 && part->units / part->granule >= tp;
}

static void note_spread(const recipe *r) {
    bool replicated = false, shared = false;
    for (uint32_t side = 0; side < SIDES; side++) {
        const engine_recipe *engine = &r->engines[side];
        if (engine->by_hand || !all_parts(r, true, is_split, engine->tp))
            continue;
        replicated |= all_parts(r, false, is_replicated, engine->tp);
        shared |= all_parts(r, false, is_shared, engine->tp);
    }
    note_if(KIND_REPLICATED_BESIDE_SPLIT, replicated);
    note_if(KIND_SHARED_BESIDE_SPLIT, shared);
}

static bool is_mixed(const recipe *r) {
    uint32_t states = 0;
    for (uint32_t g = 0; g < r->group_count; g++)
        states += r->groups[g].is_state != 0;
    return states && states < r->group_count;
}

/* Whether tokens and states of a built engine share memory. */
static bool shares_with_states(const recipe *r, uint32_t side) {
    return is_mixed(r) && !r->engines[side].by_hand && r->engines[side].share_pages;
}

/* Whether they also have pages of one size, so that different ids are different bytes. */
static bool shares_even_pages(const world *w, uint32_t side) {
    const engine_world *e = &w->engines[side];
    bool even = shares_with_states(w->recipe, side) && e->page_bytes[0] && !e->illegal;
    for (uint32_t g = 1; g < w->recipe->group_count && even; g++)
        even = e->page_bytes[g] * e->kernel_blocks[g] == e->page_bytes[0] * e->kernel_blocks[0];
    return even;
}

/* Whether some rank keeps a part element by element, and a rank of the other side keeps it as whole cells. */
static bool is_channel_wise(const world *w) {
    bool one[SIDES] = {false}, whole[SIDES] = {false};
    for (uint32_t g = 0; g < w->recipe->group_count && has_group(w, LOCAL, g) && has_group(w, REMOTE, g);
         g++) {
        for (uint32_t side = 0; side < SIDES; side++) {
            for (uint32_t i = 0; i < w->engines[side].rank_count; i++) {
                const rank_group *held = &w->engines[side].ranks[i].groups[g];
                if (layers_of(held) == 0)
                    continue;
                uint32_t elements = w->models[side].groups[g].parts[0].cell_elements;
                one[side] |= elements > 1 && held->parts[0].pieces == elements;
                whole[side] |= elements > 1 && held->parts[0].pieces == 1;
            }
        }
        if ((one[LOCAL] && whole[REMOTE]) || (one[REMOTE] && whole[LOCAL]))
            return true;
    }
    return false;
}

static bool in_order(const uint32_t *values, uint32_t count) {
    for (uint32_t i = 1; i < count; i++)
        if (values[i] < values[i - 1])
            return false;
    return true;
}

static void note_models(const world *w) {
    const model_world *local = &w->models[LOCAL], *remote = &w->models[REMOTE];
    const recipe *r = w->recipe;
    bool groups = false, parts = false, layers = false;
    for (uint32_t g = 0; g < r->group_count; g++) {
        bool both = has_group(w, LOCAL, g) && has_group(w, REMOTE, g);
        groups |= has_group(w, LOCAL, g) != has_group(w, REMOTE, g);
        layers |= both && memcmp(local->layers[g], remote->layers[g], sizeof local->layers[g]) != 0;
        parts |= both && in_order(local->part_order[g], local->groups[g].part_count) !=
                             in_order(remote->part_order[g], remote->groups[g].part_count);
    }
    note_if(KIND_UNLIKE_GROUP_ORDER, in_order(local->group_order, local->group_count) !=
                                         in_order(remote->group_order, remote->group_count));
    note_if(KIND_UNLIKE_PART_ORDER, parts);
    note_if(KIND_UNLIKE_GROUPS, groups);
    note_if(KIND_UNLIKE_LAYERS, layers);
    note_if(KIND_UNLIKE_DRAFT_LOCAL, local->layer_count > remote->layer_count);
    note_if(KIND_UNLIKE_DRAFT_REMOTE, local->layer_count < remote->layer_count);
    note_if(KIND_UNLIKE_CELLS, r->engines[LOCAL].unlike.differs || r->engines[REMOTE].unlike.differs);
    asked all = ask_all(r, w);
    note_if(KIND_ASKED_LAYERS, all.layers_begin < all.layers_end);
}

void note_world(const world *w) {
    note_models(w);
    note_if(KIND_CHANNEL_WISE, is_channel_wise(w));
    note_if(KIND_SHARED_PAGES_EVEN, shares_even_pages(w, LOCAL) || shares_even_pages(w, REMOTE));
}

static void note_layouts(const recipe *r) {
    bool kernel = false, page = false, align = false, order = false, uneven = false;
    bool state = false, kernel_tokens = false, kernel_ratios = false, group_ratios = false;
    uint32_t first[SIDES] = {0};
    for (uint32_t g = 0; g < r->group_count; g++) {
        const layout_recipe *of[SIDES];
        uint32_t tokens[SIDES];
        for (uint32_t side = 0; side < SIDES; side++) {
            const engine_recipe *engine = &r->engines[side];
            of[side] = &engine->layouts[engine->per_group ? g : r->groups[g].is_state];
            kernel |= of[side]->kernel_blocks > 1;
            page |= !engine->by_hand && of[side]->page_extra > 1;
            align |= !engine->by_hand && of[side]->page_align > 1;
            tokens[side] = of[side]->tokens ? of[side]->tokens : 16;
        }
        order |= of[LOCAL]->order != of[REMOTE]->order && !r->engines[LOCAL].by_hand &&
                 !r->engines[REMOTE].by_hand;
        state |= r->groups[g].is_state != 0;
        if (!r->groups[g].is_state) {
            uint32_t kernels[SIDES];
            for (uint32_t side = 0; side < SIDES; side++)
                kernels[side] = of[side]->kernel_blocks ? of[side]->kernel_blocks : 1;
            kernel_tokens |= kernels[LOCAL] > 1 || kernels[REMOTE] > 1;
            kernel_ratios |= kernels[LOCAL] != kernels[REMOTE];
            if (first[LOCAL])
                group_ratios |= first[LOCAL] * tokens[REMOTE] != first[REMOTE] * tokens[LOCAL];
            else
                memcpy(first, tokens, sizeof first);
        }
        uneven |= !r->groups[g].is_state && tokens[LOCAL] % tokens[REMOTE] && tokens[REMOTE] % tokens[LOCAL];
    }
    note_if(KIND_KERNEL_BLOCKS, kernel);
    note_if(KIND_KERNEL_BESIDE_STATE, kernel_tokens && state);
    note_if(KIND_KERNEL_RATIOS, kernel_ratios);
    note_if(KIND_GROUP_RATIOS, group_ratios);
    note_if(KIND_PAGE_BYTES, page);
    note_if(KIND_PAGE_ALIGN, align);
    note_if(KIND_OTHER_ORDER, order);
    note_if(KIND_UNEVEN_BLOCKS, uneven);
}

static bool cuts_cells(const engine_recipe *engine) {
    for (uint32_t i = 0; i < engine->hand_count && engine->by_hand; i++)
        if (engine->hands[i].cut)
            return true;
    return false;
}

void note_recipe(const recipe *r) {
    const engine_recipe *local = &r->engines[LOCAL], *remote = &r->engines[REMOTE];
    bool uneven = false, above = false, pp = false, stages = false;
    for (uint32_t side = 0; side < SIDES; side++) {
        const engine_recipe *engine = &r->engines[side];
        if (engine->by_hand)
            continue;
        uneven |= any_part(r, is_uneven, engine->tp);
        above |= any_part(r, is_shared, engine->tp);
        pp |= engine->pp > 1;
        stages |= engine->pp > 1 && engine->uneven;
    }
    note_model(r);
    note_layouts(r);
    note_spread(r);
    note_if(KIND_SHARED_PAGES_STATE, shares_with_states(r, LOCAL) || shares_with_states(r, REMOTE));
    note_if(KIND_UNEVEN_TP, uneven);
    note_if(KIND_TP_ABOVE_UNITS, above);
    note_if(KIND_PP, pp);
    note_if(KIND_UNEVEN_PP, stages);
    note_if(KIND_DCP_LOCAL, local->dcp > 1);
    note_if(KIND_DCP_REMOTE, remote->dcp > 1);
    note_if(KIND_DCP_SAME, local->dcp > 1 && local->dcp == remote->dcp && local->width == remote->width);
    note_if(KIND_DCP_DIFFERENT, local->dcp > 1 && remote->dcp > 1 &&
                                    (local->dcp != remote->dcp || local->width != remote->width));
    note_if(KIND_SHARED_PAGES, (local->share_pages || remote->share_pages) && r->group_count > 1);
    note_if(KIND_HAND_LOCAL, local->by_hand);
    note_if(KIND_HAND_REMOTE, remote->by_hand);
    note_if(KIND_CUT_ONE, cuts_cells(local) != cuts_cells(remote));
    note_if(KIND_CUT_BOTH, cuts_cells(local) && cuts_cells(remote));
    note_if(KIND_FIRST_REPLICA, r->first_replica);
}

/* Checksums are part of builds with agents. */
static bool is_left_out(uint32_t k) {
#ifdef KVF_HAVE_MESSAGES
    (void)k;
    return false;
#else
    return k >= KIND_SUM && k <= KIND_SUM_SPOILED;
#endif
}

uint32_t print_coverage(FILE *to) {
    uint32_t none = 0;
    for (uint32_t k = 0; k < KIND_COUNT; k++) {
        if (is_left_out(k))
            continue;
        fprintf(to, "%12llu  %s%s\n", (unsigned long long)counts[k], names[k], counts[k] ? "" : "  <- NONE");
        none += counts[k] == 0;
    }
    return none;
}
