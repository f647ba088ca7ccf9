/*
 * Takes in the reports of workers: loads that have ended, blocks that are free.
 *
 * First comes the work that needs memory: marking invalid blocks of loads. Repeating it changes nothing, so a call that
 * failed can be made again. Then parts change their state, which cannot fail.
 */
#include <stdlib.h>

#include "model/model.h"
#include "schedule/schedule.h"

/* ---- invalid blocks -------------------------------------------------------------------------- */

static bool is_listed(const kvf_aggregate *a, uint32_t group, uint32_t block) {
    kvf_group_block key = {group, block};
    return a->invalid_count &&
           bsearch(&key, a->invalid, a->invalid_count, sizeof key, kvf_compare_group_blocks) != NULL;
}

/* The entries of a group's table that the load fills: [first, end). None if the tokens complete no step of the group;
 * windows and chunks include at least the last token. */
static kvf_range loaded_entries(const kvf_schedule *s, const load_part *load, uint32_t group) {
    const kvf_group_desc *desc = kvf_model_group(s->model, group);
    const kvf_group_steps *g = &load->groups[group];
    KVF_ASSERT(g->begin < g->end || (g->begin == g->end && desc->tokens_per_step > 1));
    if (desc->kind == KVF_GROUP_STATE)
        return (kvf_range){0, 1};
    if (g->begin == g->end)
        return (kvf_range){0, 0};
    uint64_t tokens = s->options.tokens_per_block[group] / desc->tokens_per_step;
    /* kvf_make_groups() has checked that the table has these. */
    return (kvf_range){(uint32_t)(g->begin / tokens - g->table.first_block),
                       (uint32_t)((g->end - 1) / tokens + 1 - g->table.first_block)};
}

/* Adds blocks of a load to its list of invalid ones: those that workers name, or `all`. */
static kvf_status mark_invalid(const kvf_schedule *s, record *r, const kvf_aggregate *a, bool all) {
    load_part *load = &r->load;
    size_t most = load->invalid_count;
    for (uint32_t g = 0; g < s->group_count; g++) {
        kvf_range entries = loaded_entries(s, load, g);
        most += entries.end - entries.begin;
    }
    kvf_group_block *list = kvf_resize(load->invalid, most, sizeof *list);
    if (!list)
        return kvf_nomem("invalid blocks");
    load->invalid = list;
    for (uint32_t g = 0; g < s->group_count; g++) {
        kvf_range entries = loaded_entries(s, load, g);
        for (uint32_t i = entries.begin; i < entries.end; i++) {
            uint32_t block = load->groups[g].table.ids[i];
            if (all || is_listed(a, g, block))
                list[load->invalid_count++] = (kvf_group_block){g, block};
        }
    }
    load->invalid_count = kvf_sort_group_blocks(list, load->invalid_count);
    return KVF_OK;
}

static kvf_status mark_all_invalid(kvf_schedule *s, const kvf_aggregate *a) {
    kvf_status status = KVF_OK;
    for (record *r = a->invalid_count ? s->records : NULL; r && !status; r = r->next)
        if (r->load.state == PART_ACTIVE)
            status = mark_invalid(s, r, a, false);
    for (size_t i = 0; i < a->failed_count && !status; i++) {
        record *r = kvf_find_record(s, &a->failed[i]);
        if (r && r->load.state == PART_ACTIVE)
            status = mark_invalid(s, r, a, true);
    }
    return status;
}

/* How many leading tokens are valid, so that computing can continue after them. */
static uint64_t valid_tokens(const kvf_schedule *s, const load_part *load) {
    uint64_t valid = load->end;
    for (uint32_t g = 0; g < s->group_count; g++) {
        const kvf_group_steps *group = &load->groups[g];
        const kvf_group_desc *desc = kvf_model_group(s->model, g);
        /* Tokens before a window, and states before the last, exist nowhere, so computing must continue after the
         * tokens that were cached before. */
        if (desc->kind == KVF_GROUP_STATE || kvf_group_token_count(desc, group->begin) > load->computed)
            return load->computed;
        uint64_t tokens = s->options.tokens_per_block[g];
        kvf_range entries = loaded_entries(s, load, g);
        for (uint32_t i = entries.begin; i < entries.end; i++) {
            kvf_group_block key = {g, group->table.ids[i]};
            if (!bsearch(&key, load->invalid, load->invalid_count, sizeof key, kvf_compare_group_blocks))
                continue;
            uint64_t start = ((uint64_t)group->table.first_block + i) * tokens;
            valid = kvf_min_u64(valid, kvf_max_u64(start, load->computed));
            break;
        }
    }
    return valid;
}

/* ---- parts move on --------------------------------------------------------------------------- */

static void received(kvf_schedule *s, const kvf_request_key *key, kvf_schedule_news *news) {
    record *r = kvf_find_record(s, key);
    if (!r)
        return;
    load_part *load = &r->load;
    if (load->state == PART_STOPPING) {
        load->state = PART_NONE;
        s->freed[news->freed_count++] = (kvf_freed){.request = r->key, .of_load = true};
    } else if (load->state == PART_ACTIVE) {
        bool failed = load->invalid_count > 0;
        kvf_load_outcome bad = s->options.policy == KVF_LOAD_FAIL ? KVF_LOAD_FAILED : KVF_LOADED_IN_PART;
        load->state = PART_NONE;
        s->loaded[news->loaded_count++] = (kvf_loaded){.request = r->key,
                                                       .outcome = failed ? bad : KVF_LOADED,
                                                       .tokens = failed ? valid_tokens(s, load) : load->end,
                                                       .invalid = load->invalid,
                                                       .invalid_count = load->invalid_count};
    }
    kvf_settle_record(s, r);
}

static void sent(kvf_schedule *s, const kvf_request_key *key, kvf_schedule_news *news) {
    record *r = kvf_find_record(s, key);
    if (!r || (r->serve.state != PART_ACTIVE && r->serve.state != PART_STOPPING))
        return;
    bool stopped = r->serve.state == PART_STOPPING;
    r->serve.state = r->ended || stopped ? PART_NONE : PART_DONE;
    if (r->ended || stopped)
        s->freed[news->freed_count++] = (kvf_freed){.request = r->key, .of_load = false};
    kvf_settle_record(s, r);
}

static kvf_status check_aggregate(const kvf_aggregate *a) {
    bool complete = (a->received || !a->received_count) && (a->sent || !a->sent_count) &&
                    (a->failed || !a->failed_count) && (a->invalid || !a->invalid_count);
    return complete ? KVF_OK : kvf_fail(KVF_E_INVALID, "a list of the aggregate is NULL and has a count");
}

static bool make_room(kvf_schedule *s, const kvf_aggregate *a) {
    kvf_loaded *loaded = kvf_resize(s->loaded, a->received_count, sizeof *loaded);
    if (loaded)
        s->loaded = loaded;
    kvf_freed *freed = loaded ? kvf_resize(s->freed, a->received_count + a->sent_count, sizeof *freed) : NULL;
    if (freed)
        s->freed = freed;
    return freed != NULL;
}

kvf_status kvf_schedule_update(kvf_schedule *s, const kvf_aggregate *aggregate, kvf_schedule_news *out) {
    kvf_aggregate sum;
    if (!s || !aggregate)
        return kvf_fail(KVF_E_INVALID, "kvf_schedule_update: schedule or aggregate is NULL");
    kvf_status status = kvf_check_out(out, "kvf_schedule_news");
    if (!status)
        status = kvf_take_options(&sum, sizeof sum, aggregate, "kvf_aggregate");
    if (status)
        return status;
    kvf_schedule_release_results(s);
    status = check_aggregate(&sum);
    if (!status)
        status = make_room(s, &sum) ? mark_all_invalid(s, &sum) : kvf_nomem("news");
    if (status)
        return status;
    kvf_schedule_news news = {.struct_size = sizeof news};
    for (size_t i = 0; i < sum.received_count; i++)
        received(s, &sum.received[i], &news);
    for (size_t i = 0; i < sum.sent_count; i++)
        sent(s, &sum.sent[i], &news);
    news.loaded = s->loaded;
    news.freed = s->freed;
    kvf_fill_out(out, &news, sizeof news);
    return KVF_OK;
}
