#include "wire_samples.h"

#define A_KEY "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"

uint64_t sample_random(uint64_t *seed) {
    uint64_t x = *seed ? *seed : 0x9e3779b97f4a7c15u;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    return *seed = x;
}

static uint32_t below(uint64_t *seed, uint32_t bound) {
    return (uint32_t)((sample_random(seed) >> 16) % bound);
}

/* A number that may be small, large or in between. */
static uint64_t number(uint64_t *seed) {
    uint64_t n = sample_random(seed);
    return n >> below(seed, 64);
}

static const char *name(char *out, uint64_t *seed) {
    uint32_t length = 1 + below(seed, below(seed, 4) == 0 ? KVF_WIRE_MAX_NAME : 12);
    for (uint32_t i = 0; i < length; i++)
        out[i] = (char)(' ' + below(seed, 95));
    out[length] = '\0';
    return out;
}

static kvf_bytes bytes(uint8_t *out, uint64_t *seed) {
    uint32_t size = 1 + below(seed, SAMPLE_BYTES);
    for (uint32_t i = 0; i < size; i++)
        out[i] = (uint8_t)sample_random(seed);
    return (kvf_bytes){out, size};
}

static void fill_bytes(uint8_t *out, size_t size, uint64_t *seed) {
    for (size_t i = 0; i < size; i++)
        out[i] = (uint8_t)(sample_random(seed) >> 9);
}

static const char *detail(char *out, uint64_t *seed) {
    uint32_t length = below(seed, SAMPLE_BYTES);
    for (uint32_t i = 0; i < length; i++)
        out[i] = (char)(1 + below(seed, 255));
    out[length] = '\0';
    kvf_hide_controls(out); /* as they are read */
    return out;
}

/* Fills a table with runs of adjacent ids, single ids, and absent blocks. */
static void table(kvf_block_table *out, uint32_t *ids, uint64_t *seed) {
    out->ids = ids;
    out->first_block = (uint32_t)number(seed);
    uint32_t count = below(seed, SAMPLE_BLOCKS + 1);
    for (uint32_t i = 0; i < count;) {
        uint32_t first = (uint32_t)number(seed);
        uint32_t what = below(seed, 4);
        for (uint32_t n = 1 + below(seed, 40); n > 0 && i < count; n--, i++)
            ids[i] = what == 0 ? KVF_NO_BLOCK : what == 1 ? (uint32_t)number(seed) : first++;
    }
    out->count = count;
}

static const kvf_wire_group *groups(wire_sample *out, uint32_t *count, uint64_t *seed) {
    *count = below(seed, SAMPLE_GROUPS + 1);
    for (uint32_t i = 0; i < *count; i++) {
        table(&out->groups[i].table, out->ids[i], seed);
        out->groups[i].begin = number(seed) / 2;
        out->groups[i].end = out->groups[i].begin + number(seed) / 2;
    }
    return out->groups;
}

static const uint64_t *numbers(uint64_t *out, uint32_t *count, uint64_t *seed) {
    *count = below(seed, SAMPLE_NUMBERS + 1);
    for (uint32_t i = 0; i < 2 * *count; i++)
        out[i] = number(seed);
    return out;
}

static const kvf_record *records(wire_sample *out, uint32_t *count, uint64_t *seed) {
    *count = below(seed, SAMPLE_RECORDS + 1);
    const kvf_bytes data = bytes(out->bytes[2], seed);
    for (uint32_t i = 0; i < *count; i++) {
        kvf_record *record = &out->records[i];
        memset(out->record_names[i], 'a' + (int)i, 1 + below(seed, KVF_MAX_RECORD_NAME));
        *record = (kvf_record){.name = out->record_names[i], .begin = number(seed) / 2};
        record->end = record->begin + number(seed) / 2;
        record->data = data.data;
        record->size = below(seed, (uint32_t)data.size + 1);
    }
    return out->records;
}

static kvf_range range_of(uint64_t *seed) {
    uint32_t begin = (uint32_t)number(seed) / 2;
    return (kvf_range){begin, begin + (uint32_t)number(seed) / 2};
}

static kvf_status some_status(uint64_t *seed) {
    return (kvf_status)below(seed, KVF_E_TIMEOUT + 1);
}

/* ---- bodies ---------------------------------------------------------------------------------- */

static void fill_hello(wire_sample *out, kvf_hello *hello, uint64_t *seed) {
    hello->engine = name(out->names[0], seed);
    hello->incarnation = number(seed);
    hello->rank_count = 1 + below(seed, KVF_WIRE_MAX_RANKS);
    hello->rank = below(seed, hello->rank_count);
    hello->wants_ranks = below(seed, 2);
    hello->wants_card = below(seed, 2);
    hello->first_rank = (uint32_t)number(seed);
    fill_bytes(hello->secret, sizeof hello->secret, seed);
    hello->clock_ns = number(seed);
}

static void fill_welcome(wire_sample *out, kvf_welcome *welcome, uint64_t *seed) {
    fill_bytes(welcome->session, sizeof welcome->session, seed);
    welcome->engine = name(out->names[0], seed);
    welcome->incarnation = number(seed);
    bool directory = below(seed, 4) == 0;
    welcome->rank_count = directory ? 0 : 1 + below(seed, KVF_WIRE_MAX_RANKS);
    welcome->rank = directory ? UINT32_MAX : below(seed, welcome->rank_count);
    welcome->clock_ns = number(seed);
    welcome->lease_ns = number(seed);
    welcome->first_rank = (uint32_t)number(seed);
    if (below(seed, 2))
        welcome->card = bytes(out->bytes[0], seed);
    welcome->introduction_count = below(seed, COUNT_OF(out->list) + 1);
    kvf_bytes all = bytes(out->bytes[1], seed);
    for (uint32_t i = 0; i < welcome->introduction_count; i++)
        out->list[i] = (kvf_bytes){all.data, 1 + below(seed, (uint32_t)all.size)};
    welcome->introductions = out->list;
    welcome->facts = below(seed, 2) ? "layer_count: 2\n" : "";
}

static void fill_call(wire_sample *out, kvf_call_body *call, uint64_t *seed) {
    bool has[KVF_CALL_LAST + 1] = {false};
    has[call->kind] = true;
    fill_bytes(call->session, sizeof call->session, seed);
    call->number = number(seed);
    if (has[KVF_CALL_JOIN]) {
        call->introduction = bytes(out->bytes[0], seed);
        call->card = bytes(out->bytes[1], seed);
        call->stage = (kvf_join_stage)below(seed, 3);
    } else if (has[KVF_CALL_BEAT]) {
        call->leases = numbers(out->numbers, &call->lease_count, seed);
        call->expectations = numbers(out->pairs, &call->expectation_count, seed);
        call->clock_ns = number(seed);
    } else if (has[KVF_CALL_CHECKSUM]) {
        call->generation = number(seed);
        call->group = below(seed, 256);
        call->part = below(seed, 64);
        call->layers = range_of(seed);
        call->units = range_of(seed);
        call->begin = number(seed) / 2;
        call->end = call->begin + number(seed) / 2;
    } else if (!has[KVF_CALL_PROBE])
        call->request = bytes(out->bytes[0], seed);
    if (has[KVF_CALL_JOIN] || has[KVF_CALL_RELEASE] || has[KVF_CALL_EXPECT] || has[KVF_CALL_WRITTEN] ||
        has[KVF_CALL_WITHDRAW])
        call->generation = number(seed);
    if (has[KVF_CALL_RELEASE] || has[KVF_CALL_WITHDRAW])
        call->earlier = call->number > 0 ? number(seed) % call->number : 0;
    if (has[KVF_CALL_ACQUIRE] || has[KVF_CALL_EXPECT])
        call->time_ns = number(seed);
    if (has[KVF_CALL_ACQUIRE] || has[KVF_CALL_EXPECT] || has[KVF_CALL_RELEASE])
        call->rank_count = 1 + below(seed, KVF_WIRE_MAX_RANKS);
    if (has[KVF_CALL_RELEASE] || has[KVF_CALL_WRITTEN])
        call->status = some_status(seed);
    if (has[KVF_CALL_WRITTEN]) {
        call->detail = detail(out->detail, seed);
        call->bytes = number(seed);
        call->records = records(out, &call->record_count, seed);
    }
    if (has[KVF_CALL_ACQUIRE] || has[KVF_CALL_EXPECT])
        call->first_id = below(seed, KVF_WIRE_MAX_TABLE_IDS + 1);
    if (has[KVF_CALL_EXPECT])
        call->more = below(seed, 2);
    if (has[KVF_CALL_EXPECT])
        call->packed = below(seed, 2);
    if (has[KVF_CALL_EXPECT])
        call->groups = groups(out, &call->group_count, seed);
}

static void fill_answer(wire_sample *out, kvf_answer *answer, uint64_t *seed) {
    fill_bytes(answer->session, sizeof answer->session, seed);
    answer->number = number(seed);
    answer->status = some_status(seed);
    answer->detail = detail(out->detail, seed);
    if (answer->kind == KVF_CALL_JOIN) {
        answer->stage = below(seed, 2);
    } else if (answer->kind == KVF_CALL_ACQUIRE) {
        answer->generation = number(seed);
        answer->time_ns = number(seed);
        answer->groups = groups(out, &answer->group_count, seed);
        answer->first_id = below(seed, KVF_WIRE_MAX_TABLE_IDS + 1);
        answer->more = below(seed, 2);
        answer->records = records(out, &answer->record_count, seed);
    } else if (answer->kind == KVF_CALL_BEAT) {
        answer->time_ns = number(seed);
        answer->gone = numbers(out->numbers, &answer->gone_count, seed);
        answer->clock_ns = number(seed);
    } else if (answer->kind == KVF_CALL_CHECKSUM)
        answer->sums = numbers(out->numbers, &answer->sum_count, seed);
}

static void fill_command(wire_sample *out, kvf_command_body *command, uint64_t *seed) {
    fill_bytes(command->id, sizeof command->id, seed);
    command->verb = "hand over";
    if (below(seed, 2))
        command->request = bytes(out->bytes[0], seed);
    command->engine = below(seed, 2) ? name(out->names[0], seed) : "";
    command->endpoint = below(seed, 2) ? name(out->names[1], seed) : "";
    command->public_key = below(seed, 2) ? A_KEY : "";
    command->time_ns = number(seed);
    command->records = records(out, &command->record_count, seed);
}

static void fill_reply(wire_sample *out, kvf_reply *reply, uint64_t *seed) {
    fill_bytes(reply->id, sizeof reply->id, seed);
    reply->status = some_status(seed);
    reply->detail = detail(out->detail, seed);
    reply->records = records(out, &reply->record_count, seed);
}

void sample_kind(uint32_t n, kvf_message_kind *kind, kvf_call_kind *call) {
    const uint32_t calls = SAMPLE_KINDS - 2;
    *call = KVF_CALL_JOIN;
    if (n >= calls) {
        *kind = n == calls ? KVF_MESSAGE_COMMAND : KVF_MESSAGE_REPLY;
        return;
    }
    *kind = n < 3 ? (kvf_message_kind)(n + 1) : (n - 3) % 2 ? KVF_MESSAGE_ANSWER : KVF_MESSAGE_CALL;
    *call = n < 3 ? KVF_CALL_JOIN : (kvf_call_kind)((n - 3) / 2 + 1);
}

void sample_message(wire_sample *out, kvf_message_kind kind, kvf_call_kind call, uint64_t seed) {
    *out = (wire_sample){.message.kind = kind};
    seed = seed * 0x9e3779b97f4a7c15u + 1;
    kvf_message *m = &out->message;
    if (kind <= KVF_MESSAGE_REFUSED)
        fill_bytes(m->digest, sizeof m->digest, &seed);
    if (kind == KVF_MESSAGE_HELLO)
        fill_hello(out, &m->hello, &seed);
    else if (kind == KVF_MESSAGE_WELCOME)
        fill_welcome(out, &m->welcome, &seed);
    else if (kind == KVF_MESSAGE_REFUSED)
        m->refused = (kvf_refused){some_status(&seed), detail(out->detail, &seed)};
    else if (kind == KVF_MESSAGE_COMMAND)
        fill_command(out, &m->command, &seed);
    else if (kind == KVF_MESSAGE_REPLY)
        fill_reply(out, &m->reply, &seed);
    else if (kind == KVF_MESSAGE_CALL) {
        m->call.kind = call;
        fill_call(out, &m->call, &seed);
    } else {
        m->answer.kind = call;
        fill_answer(out, &m->answer, &seed);
    }
}

void sample_introduction(wire_sample *out, uint64_t seed) {
    *out = (wire_sample){0};
    seed = seed * 0x9e3779b97f4a7c15u + 1;
    kvf_introduction *i = &out->introduction;
    i->engine = name(out->names[0], &seed);
    i->incarnation = number(&seed);
    i->rank_count = 1 + below(&seed, KVF_WIRE_MAX_RANKS);
    i->rank = below(&seed, i->rank_count);
    i->endpoint = name(out->names[1], &seed);
    i->public_key = below(&seed, 2) ? A_KEY : "";
    fill_bytes(i->digest, sizeof i->digest, &seed);
    i->shard = bytes(out->bytes[0], &seed);
    i->facts = below(&seed, 2) ? "layer_count: 3\n" : "";
}

/* ---- comparing ------------------------------------------------------------------------------- */

static void same_text(const char *a, const char *b) {
    assert_string_equal(a ? a : "", b ? b : "");
}

static void same_bytes(kvf_bytes a, kvf_bytes b) {
    assert_int_equal(a.size, b.size);
    if (a.size)
        assert_memory_equal(a.data, b.data, a.size);
}

static void same_numbers(const uint64_t *a, uint32_t a_count, const uint64_t *b, uint32_t b_count,
                         uint32_t width) {
    assert_int_equal(a_count, b_count);
    if (a_count)
        assert_memory_equal(a, b, sizeof *a * a_count * width);
}

static void same_groups(const kvf_wire_group *a, uint32_t a_count, const kvf_wire_group *b,
                        uint32_t b_count) {
    assert_int_equal(a_count, b_count);
    for (uint32_t i = 0; i < a_count; i++) {
        assert_int_equal(a[i].table.first_block, b[i].table.first_block);
        assert_int_equal(a[i].table.count, b[i].table.count);
        if (a[i].table.count)
            assert_memory_equal(a[i].table.ids, b[i].table.ids, sizeof(uint32_t) * a[i].table.count);
        assert_int_equal(a[i].begin, b[i].begin);
        assert_int_equal(a[i].end, b[i].end);
    }
}

static void same_records(const kvf_record *a, uint32_t a_count, const kvf_record *b, uint32_t b_count) {
    assert_int_equal(a_count, b_count);
    for (uint32_t i = 0; i < a_count; i++) {
        same_text(a[i].name, b[i].name);
        assert_int_equal(a[i].begin, b[i].begin);
        assert_int_equal(a[i].end, b[i].end);
        same_bytes((kvf_bytes){a[i].data, a[i].size}, (kvf_bytes){b[i].data, b[i].size});
        assert_int_equal(a[i].rank, b[i].rank);
    }
}

static void same_range(kvf_range a, kvf_range b) {
    assert_range(a, b.begin, b.end);
}

static void same_hello(const kvf_hello *a, const kvf_hello *b) {
    same_text(a->engine, b->engine);
    assert_int_equal(a->incarnation, b->incarnation);
    assert_int_equal(a->rank, b->rank);
    assert_int_equal(a->rank_count, b->rank_count);
    assert_int_equal(a->wants_ranks, b->wants_ranks);
    assert_int_equal(a->wants_card, b->wants_card);
    assert_int_equal(a->first_rank, b->first_rank);
    assert_memory_equal(a->secret, b->secret, sizeof a->secret);
    assert_int_equal(a->clock_ns, b->clock_ns);
}

static void same_welcome(const kvf_welcome *a, const kvf_welcome *b) {
    assert_memory_equal(a->session, b->session, sizeof a->session);
    same_text(a->engine, b->engine);
    assert_int_equal(a->incarnation, b->incarnation);
    assert_int_equal(a->rank, b->rank);
    assert_int_equal(a->rank_count, b->rank_count);
    assert_int_equal(a->clock_ns, b->clock_ns);
    assert_int_equal(a->lease_ns, b->lease_ns);
    assert_int_equal(a->first_rank, b->first_rank);
    same_bytes(a->card, b->card);
    assert_int_equal(a->introduction_count, b->introduction_count);
    for (uint32_t i = 0; i < a->introduction_count; i++)
        same_bytes(a->introductions[i], b->introductions[i]);
    same_text(a->facts, b->facts);
}

static void same_call(const kvf_call_body *a, const kvf_call_body *b) {
    assert_memory_equal(a->session, b->session, sizeof a->session);
    assert_int_equal(a->number, b->number);
    assert_int_equal(a->kind, b->kind);
    same_bytes(a->request, b->request);
    assert_int_equal(a->generation, b->generation);
    assert_int_equal(a->time_ns, b->time_ns);
    assert_int_equal(a->earlier, b->earlier);
    assert_int_equal(a->rank_count, b->rank_count);
    assert_int_equal(a->status, b->status);
    same_text(a->detail, b->detail);
    assert_int_equal(a->bytes, b->bytes);
    same_records(a->records, a->record_count, b->records, b->record_count);
    same_groups(a->groups, a->group_count, b->groups, b->group_count);
    assert_int_equal(a->first_id, b->first_id);
    assert_int_equal(a->more, b->more);
    same_bytes(a->introduction, b->introduction);
    same_bytes(a->card, b->card);
    assert_int_equal(a->stage, b->stage);
    assert_int_equal(a->packed, b->packed);
    same_numbers(a->leases, a->lease_count, b->leases, b->lease_count, 1);
    same_numbers(a->expectations, a->expectation_count, b->expectations, b->expectation_count, 2);
    assert_int_equal(a->clock_ns, b->clock_ns);
    assert_int_equal(a->group, b->group);
    assert_int_equal(a->part, b->part);
    same_range(a->layers, b->layers);
    same_range(a->units, b->units);
    assert_int_equal(a->begin, b->begin);
    assert_int_equal(a->end, b->end);
}

static void same_answer(const kvf_answer *a, const kvf_answer *b) {
    assert_memory_equal(a->session, b->session, sizeof a->session);
    assert_int_equal(a->number, b->number);
    assert_int_equal(a->kind, b->kind);
    assert_int_equal(a->status, b->status);
    same_text(a->detail, b->detail);
    assert_int_equal(a->generation, b->generation);
    assert_int_equal(a->stage, b->stage);
    assert_int_equal(a->time_ns, b->time_ns);
    same_groups(a->groups, a->group_count, b->groups, b->group_count);
    assert_int_equal(a->first_id, b->first_id);
    assert_int_equal(a->more, b->more);
    same_records(a->records, a->record_count, b->records, b->record_count);
    same_numbers(a->gone, a->gone_count, b->gone, b->gone_count, 1);
    same_numbers(a->sums, a->sum_count, b->sums, b->sum_count, 1);
    assert_int_equal(a->clock_ns, b->clock_ns);
}

static void same_command(const kvf_command_body *a, const kvf_command_body *b) {
    assert_memory_equal(a->id, b->id, sizeof a->id);
    same_text(a->verb, b->verb);
    same_bytes(a->request, b->request);
    same_text(a->engine, b->engine);
    same_text(a->endpoint, b->endpoint);
    same_text(a->public_key, b->public_key);
    assert_int_equal(a->time_ns, b->time_ns);
    same_records(a->records, a->record_count, b->records, b->record_count);
}

void assert_same_message(const kvf_message *a, const kvf_message *b) {
    assert_int_equal(a->kind, b->kind);
    assert_memory_equal(a->digest, b->digest, sizeof a->digest);
    if (a->kind == KVF_MESSAGE_HELLO)
        same_hello(&a->hello, &b->hello);
    else if (a->kind == KVF_MESSAGE_WELCOME)
        same_welcome(&a->welcome, &b->welcome);
    else if (a->kind == KVF_MESSAGE_CALL)
        same_call(&a->call, &b->call);
    else if (a->kind == KVF_MESSAGE_ANSWER)
        same_answer(&a->answer, &b->answer);
    else if (a->kind == KVF_MESSAGE_COMMAND)
        same_command(&a->command, &b->command);
    else if (a->kind == KVF_MESSAGE_REPLY) {
        assert_memory_equal(a->reply.id, b->reply.id, sizeof a->reply.id);
        assert_int_equal(a->reply.status, b->reply.status);
        same_text(a->reply.detail, b->reply.detail);
        same_records(a->reply.records, a->reply.record_count, b->reply.records, b->reply.record_count);
    } else {
        assert_int_equal(a->refused.status, b->refused.status);
        same_text(a->refused.detail, b->refused.detail);
    }
}

void assert_same_introduction(const kvf_introduction *a, const kvf_introduction *b) {
    same_text(a->engine, b->engine);
    assert_int_equal(a->incarnation, b->incarnation);
    assert_int_equal(a->rank, b->rank);
    assert_int_equal(a->rank_count, b->rank_count);
    same_text(a->endpoint, b->endpoint);
    same_text(a->public_key, b->public_key);
    assert_memory_equal(a->digest, b->digest, sizeof a->digest);
    same_bytes(a->shard, b->shard);
    same_text(a->facts, b->facts);
}

/* ---- bytes ----------------------------------------------------------------------------------- */

kvf_wire_buffer sample_encoded(const kvf_message *message) {
    kvf_wire_buffer out = {0};
    assert_ok(kvf_wire_encode(message, &out));
    return out;
}

kvf_bytes sample_exact(const void *data, size_t size) {
    void *copy = malloc(size ? size : 1);
    assert_non_null(copy);
    if (size)
        memcpy(copy, data, size);
    return (kvf_bytes){copy, size};
}
