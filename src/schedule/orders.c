/* The queue of orders for workers, from which those not yet taken can be withdrawn. */
#include "schedule/schedule.h"

/* Copies bytes to the end of an order, followed by a zero byte. */
static const void *append(order *o, size_t *used, const void *bytes, size_t size) {
    unsigned char *at = o->bytes + *used;
    if (size)
        memcpy(at, bytes, size);
    at[size] = '\0';
    *used += size + 1;
    return at;
}

static kvf_request_id append_id(order *o, size_t *used, kvf_request_id id) {
    return (kvf_request_id){append(o, used, id.data, id.size), id.size};
}

static uint64_t deadline_of(const kvf_schedule *s, kvf_instruction_kind kind) {
    switch (kind) {
    case KVF_INSTRUCT_HOLD:
        return s->options.lease_ns;
    case KVF_INSTRUCT_PUSH:
    case KVF_INSTRUCT_PULL:
    case KVF_INSTRUCT_EXPECT:
    case KVF_INSTRUCT_RESERVE:
        return s->options.deadline_ns;
    default:
        return 0;
    }
}

static bool is_about_serving(kvf_instruction_kind kind, kvf_instruction_kind cancels) {
    kvf_instruction_kind about = kind == KVF_INSTRUCT_CANCEL ? cancels : kind;
    return about == KVF_INSTRUCT_HOLD || about == KVF_INSTRUCT_PUSH;
}

order *kvf_make_order(const kvf_schedule *s, const record *r, kvf_instruction_kind kind,
                      kvf_instruction_kind cancels, const kvf_group_steps *groups) {
    bool serves = is_about_serving(kind, cancels);
    kvf_request_id id = serves ? r->serve.id : r->load.id;
    const char *texts[] = {serves ? "" : r->load.engine, serves ? "" : r->load.endpoint,
                           serves ? "" : r->load.public_key};
    size_t bytes = r->key.id.size + 1 + id.size + 1,
           used = 0; /* cannot overflow: ids are short, and texts are in
                                                                  memory */
    for (unsigned i = 0; i < 3; i++)
        bytes += strlen(texts[i]) + 1;
    order *o = kvf_alloc0(1, sizeof *o + bytes);
    kvf_group_steps *copy = groups ? kvf_copy_groups(groups, s->group_count) : NULL;
    if (!o || (groups && !copy)) {
        kvf_free(o);
        kvf_free(copy);
        return NULL;
    }
    bool consumes = !serves && kind != KVF_INSTRUCT_CANCEL;
    o->instruction =
        (kvf_instruction){.kind = kind,
                          .cancels = cancels,
                          .request = {append_id(o, &used, r->key.id), r->key.generation},
                          .transfer_id = append_id(o, &used, id),
                          .groups = copy,
                          .group_count = groups ? s->group_count : 0,
                          .engine = append(o, &used, texts[0], strlen(texts[0])),
                          .endpoint = append(o, &used, texts[1], strlen(texts[1])),
                          .public_key = append(o, &used, texts[2], strlen(texts[2])),
                          .deadline_ns = deadline_of(s, kind),
                          .consumers = serves && kind != KVF_INSTRUCT_CANCEL ? r->serve.consumers : 0,
                          .reserved = consumes && kind != KVF_INSTRUCT_RESERVE && r->load.reserved,
                          .push = serves ? r->serve.push : r->load.push};
    return o;
}

void kvf_queue_order(kvf_schedule *s, order *o, record *r, order **slot) {
    KVF_ASSERT(!slot || !*slot); /* a part has at most one order that was not taken */
    o->record = slot ? r : NULL;
    if (slot)
        *slot = o;
    DL_APPEND(s->queue, o);
    s->queue_length++;
}

static void free_order(order *o) {
    kvf_free((void *)o->instruction.groups);
    kvf_free(o);
}

void kvf_withdraw_order(kvf_schedule *s, order **slot) {
    if (!*slot)
        return;
    KVF_ASSERT(s->queue_length > 0);
    DL_DELETE(s->queue, *slot);
    s->queue_length--;
    free_order(*slot);
    *slot = NULL;
}

kvf_status kvf_cancel_part(kvf_schedule *s, const record *r, kvf_instruction_kind cancels,
                           part_state *state) {
    if (*state == PART_STOPPING)
        return KVF_OK;
    order *o = kvf_make_order(s, r, KVF_INSTRUCT_CANCEL, cancels, NULL);
    if (!o)
        return kvf_nomem("an instruction");
    kvf_queue_order(s, o, NULL, NULL);
    *state = PART_STOPPING;
    return KVF_OK;
}

void kvf_free_orders(order **list) {
    while (*list) {
        order *o = *list;
        DL_DELETE(*list, o);
        free_order(o);
    }
}

/* The part of the record that waited for this order becomes active. */
static void begin(order *o) {
    record *r = o->record;
    if (!r)
        return;
    KVF_ASSERT(r->load.order == o || r->serve.order == o);
    bool serves = is_about_serving(o->instruction.kind, o->instruction.cancels);
    if (serves) {
        r->serve.order = NULL;
        r->serve.state = PART_ACTIVE;
        return;
    }
    r->load.order = NULL;
    if (o->instruction.kind == KVF_INSTRUCT_RESERVE)
        r->load.reserved = r->load.alive = true;
    else
        r->load.state = PART_ACTIVE;
}

kvf_status kvf_schedule_take(kvf_schedule *s, const kvf_instruction **instructions, size_t *count) {
    if (!s || !instructions || !count)
        return kvf_fail(KVF_E_INVALID, "kvf_schedule_take: schedule, instructions or count is NULL");
    kvf_schedule_release_results(s);
    kvf_instruction *list = kvf_alloc(s->queue_length, sizeof *list);
    if (!list)
        return kvf_nomem("instructions");
    kvf_free(s->instructions);
    kvf_free_orders(&s->taken);
    size_t n = 0;
    for (order *o = s->queue; o; o = o->next) {
        begin(o);
        list[n++] = o->instruction;
    }
    KVF_ASSERT(n == s->queue_length);
    s->taken = s->queue;
    s->queue = NULL;
    s->queue_length = 0;
    s->instructions = list;
    *instructions = list;
    *count = n;
    return KVF_OK;
}
