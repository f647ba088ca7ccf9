/*
 * One output of each worker, added up to one of the engine.
 *
 * A step first makes an entry for each request that is named, which can fail and be undone, and then counts,
 * which cannot fail. Entries that are done leave their table at the end of the step and are freed with the
 * next one, because the results point to their names.
 */
#include <stdlib.h>

#include "schedule/keys.h"

enum { MAX_WORKERS = 1 << 20, DEFAULT_MAX_PENDING = 65536, PACKED_BYTES = 8 + KVF_REQUEST_ID_BYTES };

/* A request that a report has named. */
typedef struct entry {
    UT_hash_handle hh;
    struct entry *next;  /* among the fresh ones, later among the old */
    kvf_request_key key; /* data points behind the struct */
    uint32_t needed;     /* the expected number when it was first reported */
    uint32_t seen;       /* 0: not reported yet, or completed in this step */
    bool failed, done;   /* done: completed in this step */
    uint64_t workers[];  /* a bit for each worker that has reported it, followed by the packed key */
} entry;

struct kvf_aggregator {
    uint32_t worker_count, words, expected, max_pending;
    kvf_count_rule rule;
    bool drops_steps;
    entry *sent, *received; /* tables, in the order of arrival */
    entry *fresh;           /* made by this step */
    entry *old;             /* the results of the last step point to them */
    /* results */
    kvf_request_key *sent_keys, *received_keys, *failed_keys, *forgotten_keys;
    kvf_group_block *blocks;
    uint32_t *riders; /* three lists of worker_count */
};

/* The sizes of all lists of a step. */
typedef struct totals {
    uint64_t sent, received, failed, invalid;
} totals;

/* ---- making and freeing ---------------------------------------------------------------------- */

kvf_status kvf_aggregator_create(const kvf_aggregator_options *options, kvf_aggregator **out) {
    kvf_aggregator_options o;
    if (!options || !out)
        return kvf_fail(KVF_E_INVALID, "kvf_aggregator_create: options or out is NULL");
    kvf_status status = kvf_take_options(&o, sizeof o, options, "kvf_aggregator_options");
    if (status)
        return status;
    if (o.worker_count < 1 || o.worker_count > MAX_WORKERS)
        return kvf_fail(KVF_E_RANGE, "worker_count is %u; allowed: 1 to %d", o.worker_count, MAX_WORKERS);
    if (o.rule != KVF_COUNT_WORKERS && o.rule != KVF_COUNT_REPORTS)
        return kvf_fail(KVF_E_INVALID, "rule is %d; allowed: KVF_COUNT_WORKERS, KVF_COUNT_REPORTS",
                        (int)o.rule);
    if (o.rule == KVF_COUNT_WORKERS && o.expected > o.worker_count)
        return kvf_fail(KVF_E_RANGE, "expected is %u; allowed: up to worker_count, %u", o.expected,
                        o.worker_count);
    kvf_aggregator *a = kvf_alloc0(1, sizeof *a);
    uint32_t *riders = kvf_alloc(o.worker_count, 3 * sizeof *riders);
    if (!a || !riders) {
        kvf_free(a);
        kvf_free(riders);
        return kvf_nomem("an aggregator");
    }
    a->worker_count = o.worker_count;
    a->words = (o.worker_count + 63) / 64;
    a->expected = o.expected ? o.expected : o.worker_count;
    a->max_pending = o.max_pending ? o.max_pending : DEFAULT_MAX_PENDING;
    a->rule = o.rule;
    a->drops_steps = o.drops_steps;
    a->riders = riders;
    *out = a;
    return KVF_OK;
}

static void free_list(entry **list) {
    while (*list) {
        entry *next = (*list)->next;
        kvf_free(*list);
        *list = next;
    }
}

/* Takes an entry out of its table; it lives until the next step. */
static void retire(kvf_aggregator *a, entry **table, entry *e) {
    HASH_DEL(*table, e);
    e->next = a->old;
    a->old = e;
}

static void retire_all(kvf_aggregator *a, entry **table) {
    while (*table)
        retire(a, table, *table);
}

void kvf_aggregator_free(kvf_aggregator *a) {
    if (!a)
        return;
    retire_all(a, &a->sent);
    retire_all(a, &a->received);
    free_list(&a->old);
    kvf_free(a->sent_keys);
    kvf_free(a->received_keys);
    kvf_free(a->failed_keys);
    kvf_free(a->forgotten_keys);
    kvf_free(a->blocks);
    kvf_free(a->riders);
    kvf_free(a);
}

/* ---- entries --------------------------------------------------------------------------------- */

/* Generation and id as the bytes that the tables compare. */
static unsigned pack(const kvf_request_key *key, unsigned char *packed) {
    memcpy(packed, &key->generation, sizeof key->generation);
    if (key->id.size)
        memcpy(packed + sizeof key->generation, key->id.data, key->id.size);
    return (unsigned)(sizeof key->generation + key->id.size);
}

static entry *find(entry *table, const kvf_request_key *key) {
    unsigned char packed[PACKED_BYTES];
    unsigned size = pack(key, packed);
    entry *found = NULL;
    HASH_FIND(hh, table, packed, size, found);
    return found;
}

/* Makes sure that there is an entry; a new one is added to the list of fresh ones. */
static bool ensure(kvf_aggregator *a, entry **table, const kvf_request_key *key) {
    if (find(*table, key))
        return true;
    size_t bitmap_bytes = a->words * sizeof(uint64_t);
    entry *e = kvf_alloc0(1, sizeof *e + bitmap_bytes + sizeof key->generation + key->id.size);
    if (!e)
        return false;
    unsigned char *packed = (unsigned char *)e->workers + bitmap_bytes;
    unsigned size = pack(key, packed);
    e->key = (kvf_request_key){{packed + sizeof key->generation, key->id.size}, key->generation};
    HASH_ADD_KEYPTR(hh, *table, packed, size, e);
    if (!e->hh.tbl) {
        kvf_free(e);
        return false;
    }
    e->next = a->fresh;
    a->fresh = e;
    return true;
}

static bool ensure_all(kvf_aggregator *a, entry **table, const kvf_request_key *keys, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (!ensure(a, table, &keys[i]))
            return false;
    return true;
}

/* Undoes what ensure() did in this step. */
static void drop_fresh(kvf_aggregator *a) {
    while (a->fresh) {
        entry *e = a->fresh;
        a->fresh = e->next;
        if (a->sent && find(a->sent, &e->key) == e)
            HASH_DEL(a->sent, e);
        else if (a->received)
            HASH_DEL(a->received, e);
        kvf_free(e);
    }
}

/* ---- checking a step ------------------------------------------------------------------------- */

static kvf_status check_keys(const kvf_request_key *keys, size_t count, const char *what, uint64_t *total) {
    if (count && !keys)
        return kvf_fail(KVF_E_INVALID, "%s is NULL and has a count of %zu", what, count);
    for (size_t i = 0; i < count; i++) {
        kvf_status status = kvf_check_request_id(keys[i].id, what, i);
        if (status)
            return status;
    }
    return kvf_add(*total, count, total) ? KVF_OK : kvf_fail(KVF_E_OVERFLOW, "%s: too many requests", what);
}

static kvf_status check_output(const kvf_worker_output *given, kvf_worker_output *o, totals *t) {
    kvf_status status = kvf_take_options(o, sizeof *o, given, "kvf_worker_output");
    if (!status)
        status = check_keys(o->sent, o->sent_count, "sent", &t->sent);
    if (!status)
        status = check_keys(o->received, o->received_count, "received", &t->received);
    if (!status)
        status = check_keys(o->failed, o->failed_count, "failed", &t->failed);
    if (status)
        return status;
    if (o->invalid_count && !o->invalid)
        return kvf_fail(KVF_E_INVALID, "invalid is NULL and has a count of %zu", o->invalid_count);
    return kvf_add(t->invalid, o->invalid_count, &t->invalid)
               ? KVF_OK
               : kvf_fail(KVF_E_OVERFLOW, "invalid: too many blocks");
}

static kvf_status check_outputs(const kvf_aggregator *a, const kvf_worker_output *const *outputs,
                                uint32_t count, uint32_t selected, totals *t) {
    if (!outputs || count != a->worker_count)
        return kvf_fail(KVF_E_INVALID, "outputs of %u workers; there are %u", outputs ? count : 0,
                        a->worker_count);
    if (selected >= count)
        return kvf_fail(KVF_E_RANGE, "selected is %u; allowed: 0 to %u", selected, count - 1);
    for (uint32_t w = 0; w < count; w++) {
        kvf_worker_output o;
        if (!outputs[w] && outputs[selected])
            return kvf_fail(KVF_E_INVALID, "worker %u has no output, though worker %u has one", w, selected);
        kvf_status status = outputs[w] ? check_output(outputs[w], &o, t) : KVF_OK;
        if (status)
            return kvf_fail_in(status, "output of worker %u: ", w);
    }
    return KVF_OK;
}

/* ---- counting -------------------------------------------------------------------------------- */

/* Makes room for `count` elements; the old content may be lost. */
static bool make_room(void *list, uint64_t count, size_t element_bytes) {
    void *old, *bigger;
    memcpy(&old, list, sizeof old);
    if (count > SIZE_MAX || !(bigger = kvf_resize(old, (size_t)count, element_bytes)))
        return false;
    memcpy(list, &bigger, sizeof bigger);
    return true;
}

static kvf_status prepare(kvf_aggregator *a, const kvf_worker_output *const *outputs, const totals *t) {
    uint64_t named;
    bool fits = kvf_add(t->sent, t->received, &named) && kvf_add(named, t->failed, &named) &&
                make_room(&a->sent_keys, t->sent, sizeof *a->sent_keys) &&
                make_room(&a->received_keys, t->received, sizeof *a->received_keys) &&
                make_room(&a->failed_keys, t->received, sizeof *a->failed_keys) &&
                make_room(&a->forgotten_keys, named, sizeof *a->forgotten_keys) &&
                make_room(&a->blocks, t->invalid, sizeof *a->blocks);
    for (uint32_t w = 0; w < a->worker_count && fits; w++) {
        kvf_worker_output o;
        if (!outputs[w])
            continue;
        fits = kvf_take_options(&o, sizeof o, outputs[w], "kvf_worker_output") == KVF_OK &&
               ensure_all(a, &a->sent, o.sent, o.sent_count) &&
               ensure_all(a, &a->received, o.received, o.received_count) &&
               ensure_all(a, &a->received, o.failed, o.failed_count);
    }
    if (fits) {
        a->fresh = NULL;
        return KVF_OK;
    }
    drop_fresh(a);
    return kvf_nomem("the requests of a step");
}

/* Worker `w` has reported a request; when it is the last one needed, its key joins `keys` (once in a step).
 */
static void report(kvf_aggregator *a, entry *table, const kvf_request_key *key, uint32_t w,
                   kvf_request_key *keys, size_t *count) {
    entry *e = find(table, key);
    uint64_t bit = UINT64_C(1) << (w % 64);
    if (e->seen == 0) {
        bool capped = a->rule == KVF_COUNT_WORKERS && a->expected > a->worker_count;
        e->needed = capped ? a->worker_count : a->expected;
        memset(e->workers, 0, a->words * sizeof *e->workers);
    }
    if (a->rule == KVF_COUNT_REPORTS || !(e->workers[w / 64] & bit))
        e->seen++;
    e->workers[w / 64] |= bit;
    if (e->seen < e->needed)
        return;
    e->seen = 0;
    if (!e->done)
        keys[(*count)++] = e->key;
    e->done = true;
}

static void count_output(kvf_aggregator *a, const kvf_worker_output *o, uint32_t w, kvf_aggregate *out) {
    static const uint32_t riders[] = {KVF_RIDER_STATS, KVF_RIDER_META, KVF_RIDER_EVENTS};
    uint32_t *counts[] = {&out->with_stats_count, &out->with_meta_count, &out->with_events_count};
    if (o->expected)
        a->expected = o->expected;
    for (size_t i = 0; i < o->sent_count; i++)
        report(a, a->sent, &o->sent[i], w, a->sent_keys, &out->sent_count);
    for (size_t i = 0; i < o->received_count; i++)
        report(a, a->received, &o->received[i], w, a->received_keys, &out->received_count);
    for (size_t i = 0; i < o->failed_count; i++)
        find(a->received, &o->failed[i])->failed = true;
    if (o->invalid_count)
        memcpy(a->blocks + out->invalid_count, o->invalid, o->invalid_count * sizeof *o->invalid);
    out->invalid_count += o->invalid_count;
    for (unsigned i = 0; i < 3; i++)
        if (o->riders & riders[i])
            a->riders[i * a->worker_count + (*counts[i])++] = w;
}

/* Removes completed entries from a table, unless they were reported again in the same step. */
static void settle(kvf_aggregator *a, entry **table, const kvf_request_key *keys, size_t count) {
    for (size_t i = 0; i < count; i++) {
        entry *e = find(*table, &keys[i]);
        e->done = e->failed = false;
        if (e->seen == 0)
            retire(a, table, e);
    }
}

static void forget_oldest(kvf_aggregator *a, entry **table, kvf_aggregate *out) {
    while (HASH_COUNT(*table) > a->max_pending) {
        entry *oldest = *table; /* tables keep the order of arrival */
        a->forgotten_keys[out->forgotten_count++] = oldest->key;
        retire(a, table, oldest);
    }
}

static void sort_keys(kvf_request_key *keys, size_t count) {
    if (count > 1)
        qsort(keys, count, sizeof *keys, kvf_compare_request_keys);
}

static void finish(kvf_aggregator *a, kvf_aggregate *out) {
    sort_keys(a->sent_keys, out->sent_count);
    sort_keys(a->received_keys, out->received_count);
    for (size_t i = 0; i < out->received_count; i++)
        if (find(a->received, &a->received_keys[i])->failed)
            a->failed_keys[out->failed_count++] = a->received_keys[i];
    settle(a, &a->sent, a->sent_keys, out->sent_count);
    settle(a, &a->received, a->received_keys, out->received_count);
    forget_oldest(a, &a->sent, out);
    forget_oldest(a, &a->received, out);
    sort_keys(a->forgotten_keys, out->forgotten_count);
    out->invalid_count = kvf_sort_group_blocks(a->blocks, out->invalid_count);
    out->expected = a->expected;
    out->sent = a->sent_keys;
    out->received = a->received_keys;
    out->failed = a->failed_keys;
    out->forgotten = a->forgotten_keys;
    out->invalid = a->blocks;
    out->with_stats = a->riders;
    out->with_meta = a->riders + a->worker_count;
    out->with_events = a->riders + (size_t)2 * a->worker_count;
}

kvf_status kvf_aggregator_step(kvf_aggregator *a, const kvf_worker_output *const *outputs, uint32_t count,
                               uint32_t selected, kvf_aggregate *out) {
    totals t = {0};
    if (!a)
        return kvf_fail(KVF_E_INVALID, "kvf_aggregator_step: aggregator is NULL");
    kvf_status status = kvf_check_out(out, "kvf_aggregate");
    if (!status)
        status = check_outputs(a, outputs, count, selected, &t);
    if (status)
        return status;
    kvf_aggregate sum = {.struct_size = sizeof sum, .output = outputs[selected] ? selected : KVF_NO_WORKER};
    bool dropped = a->drops_steps && !outputs[selected];
    free_list(&a->old);
    if (!dropped) {
        status = prepare(a, outputs, &t);
        for (uint32_t w = 0; w < count && !status; w++) {
            kvf_worker_output o;
            if (outputs[w] && kvf_take_options(&o, sizeof o, outputs[w], "kvf_worker_output") == KVF_OK)
                count_output(a, &o, w, &sum);
        }
    }
    if (status)
        return status;
    finish(a, &sum);
    kvf_fill_out(out, &sum, sizeof sum);
    return KVF_OK;
}

void kvf_aggregator_forget(kvf_aggregator *a, const kvf_request_key *request) {
    if (!a || !request || request->id.size > KVF_REQUEST_ID_BYTES || (request->id.size && !request->id.data))
        return;
    entry *e = find(a->sent, request);
    if (e)
        retire(a, &a->sent, e);
    e = find(a->received, request);
    if (e)
        retire(a, &a->received, e);
}

size_t kvf_aggregator_pending(const kvf_aggregator *a) {
    return a ? HASH_COUNT(a->sent) + (size_t)HASH_COUNT(a->received) : 0;
}
