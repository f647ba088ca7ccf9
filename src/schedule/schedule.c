/* Making, finding and freeing a schedule and its records. */
#include "schedule/schedule.h"

#include "base/clock.h"

enum { DEFAULT_MAX_REQUESTS = 65536 };

/* ---- the schedule ---------------------------------------------------------------------------- */

static kvf_status check_options(const kvf_schedule_options *o) {
    if (!o->model || !o->tokens_per_block)
        return kvf_fail(KVF_E_INVALID, "kvf_schedule_options: model or tokens_per_block is NULL");
    for (uint32_t g = 0; g < kvf_model_group_count(o->model); g++) {
        const uint32_t step = kvf_model_group(o->model, g)->tokens_per_step, tokens = o->tokens_per_block[g];
        if (tokens == 0)
            return kvf_fail(KVF_E_RANGE, "tokens_per_block[%u] is 0; allowed: 1 and more", g);
        if (tokens % step != 0)
            return kvf_fail(KVF_E_INVALID,
                            "tokens_per_block[%u] is %u; allowed: multiples of tokens_per_step, %u", g,
                            tokens, step);
    }
    if (o->policy != KVF_LOAD_RECOMPUTE && o->policy != KVF_LOAD_FAIL)
        return kvf_fail(KVF_E_INVALID, "policy is %d; allowed: KVF_LOAD_RECOMPUTE, KVF_LOAD_FAIL",
                        (int)o->policy);
    return KVF_OK;
}

static void fill_defaults(kvf_schedule_options *o) {
    o->lease_ns = o->lease_ns ? o->lease_ns : 30 * KVF_SECOND;
    o->heartbeat_ns = o->heartbeat_ns ? o->heartbeat_ns : kvf_max_u64(o->lease_ns / 6, 1);
    o->margin_ns = o->margin_ns ? o->margin_ns : 5 * KVF_SECOND;
    o->deadline_ns = o->deadline_ns ? o->deadline_ns : 120 * KVF_SECOND;
    o->max_requests = o->max_requests ? o->max_requests : DEFAULT_MAX_REQUESTS;
}

/* Copies everything that the options point to. */
static bool own_options(kvf_schedule *s) {
    kvf_schedule_options *o = &s->options;
    uint32_t *tokens = kvf_copy(o->tokens_per_block, s->group_count, sizeof *tokens);
    o->tokens_per_block = tokens;
    o->engine = kvf_strdup(o->engine ? o->engine : "");
    o->endpoint = kvf_strdup(o->endpoint ? o->endpoint : "");
    o->public_key = kvf_strdup(o->public_key ? o->public_key : "");
    return tokens && o->engine && o->endpoint && o->public_key;
}

kvf_status kvf_schedule_create(const kvf_schedule_options *options, kvf_schedule **out) {
    kvf_schedule_options o;
    if (!options || !out)
        return kvf_fail(KVF_E_INVALID, "kvf_schedule_create: options or out is NULL");
    kvf_status status = kvf_take_options(&o, sizeof o, options, "kvf_schedule_options");
    if (!status)
        status = check_options(&o);
    if (status)
        return status;
    kvf_schedule *s = kvf_alloc0(1, sizeof *s);
    if (!s)
        return kvf_nomem("a schedule");
    fill_defaults(&o);
    s->options = o;
    s->model = kvf_model_retain(o.model);
    s->group_count = kvf_model_group_count(o.model);
    for (uint32_t g = 0; g < s->group_count; g++)
        s->has_state = s->has_state || kvf_model_group(o.model, g)->kind == KVF_GROUP_STATE;
    if (!own_options(s)) {
        kvf_schedule_free(s);
        return kvf_nomem("a schedule");
    }
    *out = s;
    return KVF_OK;
}

static void free_record(record *r) {
    kvf_free(r->load.engine);
    kvf_free(r->load.endpoint);
    kvf_free(r->load.public_key);
    kvf_free((void *)r->load.id.data);
    kvf_free(r->load.groups);
    kvf_free(r->load.invalid);
    kvf_free((void *)r->serve.id.data);
    kvf_free(r);
}

static void free_records(record **list) {
    while (*list) {
        record *r = *list;
        DL_DELETE(*list, r);
        free_record(r);
    }
}

void kvf_schedule_free(kvf_schedule *s) {
    if (!s)
        return;
    while (s->names) {
        name *n = s->names;
        HASH_DEL(s->names, n);
        kvf_free(n);
    }
    free_records(&s->records);
    free_records(&s->settled);
    kvf_free_orders(&s->queue);
    kvf_free_orders(&s->taken);
    kvf_free(s->instructions);
    kvf_free(s->loaded);
    kvf_free(s->freed);
    kvf_free(s->beats);
    kvf_free((void *)s->options.tokens_per_block);
    kvf_free((void *)s->options.engine);
    kvf_free((void *)s->options.endpoint);
    kvf_free((void *)s->options.public_key);
    kvf_model_free((kvf_model *)s->model);
    kvf_free(s);
}

void kvf_schedule_release_results(kvf_schedule *s) {
    free_records(&s->settled);
}

/* ---- names ----------------------------------------------------------------------------------- */

static name *find_name(const kvf_schedule *s, kvf_request_id id) {
    static const unsigned char nothing[1];
    name *found = NULL;
    if (id.size <= KVF_REQUEST_ID_BYTES && (id.data || id.size == 0))
        HASH_FIND(hh, s->names, id.size ? id.data : nothing, (unsigned)id.size, found);
    return found;
}

static name *make_name(kvf_schedule *s, kvf_request_id id) {
    name *n = kvf_alloc0(1, sizeof *n + id.size);
    if (!n)
        return NULL;
    n->size = id.size;
    memcpy(n->bytes, id.data, id.size);
    HASH_ADD_KEYPTR(hh, s->names, n->bytes, (unsigned)id.size, n);
    if (n->hh.tbl)
        return n;
    kvf_free(n);
    return NULL;
}

record *kvf_find_record(const kvf_schedule *s, const kvf_request_key *key) {
    name *n = find_name(s, key->id);
    record *r = n ? n->newest : NULL;
    while (r && key->generation && r->key.generation != key->generation)
        r = r->older;
    return r;
}

kvf_status kvf_unknown_request(const kvf_request_key *key, const record *r) {
    char text[KVF_ID_TEXT_BYTES];
    kvf_request_id_text(key->id, text);
    return kvf_fail(KVF_E_NOT_FOUND, "request %s, generation %llu, %s", text,
                    (unsigned long long)key->generation, r ? "has ended" : "is not known");
}

kvf_status kvf_live_record(kvf_schedule *s, const kvf_request_key *key, record **out) {
    if (!s || !key)
        return kvf_fail(KVF_E_INVALID, "the schedule or the request is NULL");
    kvf_schedule_release_results(s);
    record *r = kvf_find_record(s, key);
    *out = r;
    return r && !r->ended ? KVF_OK : kvf_unknown_request(key, r);
}

/* ---- records --------------------------------------------------------------------------------- */

void kvf_settle_record(kvf_schedule *s, record *r) {
    if (!r->ended || kvf_part_is_pending(r->load.state) || kvf_part_is_pending(r->serve.state))
        return;
    kvf_withdraw_order(s, &r->load.order);
    kvf_withdraw_order(s, &r->serve.order);
    record **link = &r->name->newest;
    while (*link != r) {
        KVF_ASSERT(*link); /* every record is in the list of its name */
        link = &(*link)->older;
    }
    *link = r->older;
    if (!r->name->newest) {
        HASH_DEL(s->names, r->name);
        kvf_free(r->name);
    }
    r->name = NULL;
    KVF_ASSERT(s->record_count > 0 && !r->load.order && !r->serve.order);
    DL_DELETE(s->records, r);
    DL_APPEND(s->settled, r);
    s->record_count--;
}

static kvf_status check_source(const kvf_transfer_params *p) {
    if (!p->id.data || p->id.size == 0 || p->id.size > KVF_TRANSFER_ID_BYTES)
        return kvf_fail(KVF_E_RANGE, "source.id has %zu bytes; allowed: 1 to %u", p->id.data ? p->id.size : 0,
                        KVF_TRANSFER_ID_BYTES);
    if (!p->engine || !*p->engine)
        return kvf_fail(KVF_E_INVALID, "source.engine is empty; it must name the producer");
    return KVF_OK;
}

static kvf_status check_request(const kvf_schedule_request *q) {
    if (q->id.size == 0)
        return kvf_fail(KVF_E_RANGE, "the request's id is empty; allowed: 1 to %u bytes",
                        KVF_REQUEST_ID_BYTES);
    kvf_status status = kvf_check_request_id(q->id, "request", 0);
    if (!status && q->push_id.data && (q->push_id.size == 0 || q->push_id.size > KVF_TRANSFER_ID_BYTES))
        status = kvf_fail(KVF_E_RANGE, "push_id has %zu bytes; allowed: 1 to %u", q->push_id.size,
                          KVF_TRANSFER_ID_BYTES);
    return status;
}

/* How many tokens of a prompt can be loaded: at most those of the source, and few enough to leave the consumer its
 * part. */
static kvf_status loadable_tokens(const kvf_schedule *s, uint64_t prompt_tokens, uint64_t source_tokens,
                                  uint64_t *out) {
    uint64_t useful = kvf_prefill_token_count(prompt_tokens, s->has_state, s->options.lookahead_tokens);
    if (s->has_state && source_tokens > useful)
        return kvf_fail(
            KVF_E_RANGE,
            "source.tokens is %llu, and a state after these cannot be stepped back; allowed for a prompt of "
            "%llu tokens: up to %llu",
            (unsigned long long)source_tokens, (unsigned long long)prompt_tokens, (unsigned long long)useful);
    *out = source_tokens ? kvf_min_u64(source_tokens, useful) : useful;
    return KVF_OK;
}

static kvf_status take_source(const kvf_schedule *s, const kvf_schedule_request *q, load_part *load) {
    kvf_transfer_params p;
    if (!q->source)
        return KVF_OK;
    kvf_status status = kvf_take_options(&p, sizeof p, q->source, "kvf_transfer_params");
    if (!status)
        status = check_source(&p);
    if (!status)
        status = loadable_tokens(s, q->prompt_tokens, p.tokens, &load->tokens);
    if (status)
        return status;
    load->engine = kvf_strdup(p.engine);
    load->endpoint = kvf_strdup(p.endpoint ? p.endpoint : "");
    load->public_key = kvf_strdup(p.public_key ? p.public_key : "");
    load->id = (kvf_request_id){kvf_copy(p.id.data, p.id.size, 1), p.id.size};
    load->expiry_ns = p.expiry_ns;
    load->clock_offset_ns = q->clock_offset_ns;
    load->push = p.push;
    load->state = PART_WAITING;
    return load->engine && load->endpoint && load->public_key && load->id.data ? KVF_OK
                                                                               : kvf_nomem("a source");
}

/* A push has the name that both engines know: the id without the suffix that a front end added. */
static kvf_status take_serving(const kvf_schedule_request *q, serve_part *serve) {
    if (!q->serves)
        return KVF_OK;
    serve->state = PART_WAITING;
    serve->consumers = q->consumers ? q->consumers : 1;
    serve->push = q->push;
    if (!q->push)
        return KVF_OK;
    kvf_request_id called = q->push_id.data ? q->push_id : q->id;
    size_t base = q->push_id.data ? 0 : kvf_base_request_bytes(q->id);
    called.size = base ? base : called.size;
    serve->id = (kvf_request_id){kvf_copy(called.data, called.size, 1), called.size};
    return serve->id.data ? KVF_OK : kvf_nomem("the name of a push");
}

static kvf_status make_record(kvf_schedule *s, const kvf_schedule_request *q, record **out) {
    record *r = kvf_alloc0(1, sizeof *r + q->id.size);
    if (!r)
        return kvf_nomem("a request");
    memcpy(r->id, q->id.data, q->id.size);
    r->key = (kvf_request_key){{r->id, q->id.size}, s->last_generation + 1};
    kvf_status status = take_source(s, q, &r->load);
    if (!status)
        status = take_serving(q, &r->serve);
    if (status) {
        free_record(r);
        return status;
    }
    *out = r;
    return KVF_OK;
}

kvf_status kvf_schedule_add(kvf_schedule *s, const kvf_schedule_request *request, uint64_t now_ns,
                            uint64_t *generation) {
    kvf_schedule_request q;
    record *r = NULL;
    if (!s || !request)
        return kvf_fail(KVF_E_INVALID, "kvf_schedule_add: schedule or request is NULL");
    kvf_schedule_release_results(s);
    kvf_status status = kvf_take_options(&q, sizeof q, request, "kvf_schedule_request");
    if (!status)
        status = check_request(&q);
    if (status)
        return status;
    if (q.serves && !*s->options.engine)
        return kvf_fail(KVF_E_INVALID, "the request serves, but kvf_schedule_options.engine is empty");
    name *n = find_name(s, q.id);
    if (n && !n->newest->ended) {
        char text[KVF_ID_TEXT_BYTES];
        kvf_request_id_text(q.id, text);
        return kvf_fail(KVF_E_EXISTS, "request %s has not ended", text);
    }
    if (s->record_count >= s->options.max_requests)
        return kvf_fail(KVF_E_LIMIT, "there are %zu requests; allowed: %u", s->record_count,
                        s->options.max_requests);
    bool is_new_name = !n;
    status = make_record(s, &q, &r);
    if (!status && is_new_name && !(n = make_name(s, q.id)))
        status = kvf_nomem("a request");
    bool over;
    if (!status)
        status = kvf_check_lease(s, r, now_ns, &over);
    if (!status)
        status = kvf_reserve_source(s, r);
    if (status) {
        if (is_new_name && n) {
            HASH_DEL(s->names, n);
            kvf_free(n);
        }
        if (r)
            free_record(r);
        return status;
    }
    KVF_ASSERT(!n->newest || n->newest->key.generation < r->key.generation);
    r->name = n;
    r->older = n->newest;
    n->newest = r;
    DL_APPEND(s->records, r);
    s->record_count++;
    s->last_generation++;
    if (generation)
        *generation = r->key.generation;
    return KVF_OK;
}

/* ---- counts ---------------------------------------------------------------------------------- */

kvf_status kvf_schedule_count(const kvf_schedule *s, kvf_schedule_counts *out) {
    if (!s)
        return kvf_fail(KVF_E_INVALID, "kvf_schedule_count: schedule is NULL");
    kvf_status status = kvf_check_out(out, "kvf_schedule_counts");
    if (status)
        return status;
    kvf_schedule_counts counts = {.requests = s->record_count, .instructions = s->queue_length};
    for (const record *r = s->records; r; r = r->next) {
        part_state load = r->load.state, serve = r->serve.state;
        counts.waiting += load == PART_WAITING;
        counts.loading += load == PART_PLANNED || load == PART_ACTIVE;
        counts.serving += serve == PART_PLANNED || serve == PART_ACTIVE;
        counts.stopping += (load == PART_STOPPING) + (size_t)(serve == PART_STOPPING);
    }
    kvf_fill_out(out, &counts, sizeof counts);
    return KVF_OK;
}
