#include "stage/message.h"

#include "base/bytes.h"
#include "model/model.h"

static const unsigned char magic[4] = {'k', 'v', 'f', 's'};

#define HEAD_BYTES (sizeof magic + 2 + 8) /* version, word, flow */
#define OPEN_BYTES 8u

/* ---- writing --------------------------------------------------------------------------------- */

typedef struct writer {
    unsigned char *at;
} writer;

static void put(writer *to, uint64_t number, size_t width) {
    kvf_put_number(to->at, number, width);
    to->at += width;
}

static void put_bytes(writer *to, const void *data, size_t bytes) {
    if (bytes > 0)
        memcpy(to->at, data, bytes);
    to->at += bytes;
}

size_t kvf_stage_part_max(void) {
    return KVF_STAGE_MESSAGE_MAX - HEAD_BYTES - OPEN_BYTES;
}

static void write_slots(writer *to, const kvf_stage_message *message) {
    KVF_ASSERT(message->slot_count_named <= KVF_STAGE_SLOTS_MAX);
    put(to, message->slot_count_named, 1);
    for (uint32_t i = 0; i < message->slot_count_named; i++) {
        const kvf_slot_note *note = &message->slots[i];
        put(to, note->slot, 4);
        put(to, note->generation, 4);
        put(to, note->bytes.begin, 8);
        put(to, note->bytes.end, 8);
    }
}

size_t kvf_stage_write_message(const kvf_stage_message *message, unsigned char out[KVF_STAGE_MESSAGE_MAX]) {
    writer to = {out};
    put_bytes(&to, magic, sizeof magic);
    put(&to, KVF_STAGE_VERSION, 1);
    put(&to, message->word, 1);
    put(&to, message->flow, 8);
    switch (message->word) {
    case KVF_STAGE_OPEN:
        put(&to, message->opening_bytes, 4);
        put(&to, message->at, 4);
        put_bytes(&to, message->part, kvf_min_u64(message->part_bytes, kvf_stage_part_max()));
        break;
    case KVF_STAGE_ACCEPT:
        put(&to, message->region, 4);
        put(&to, message->slot_bytes, 4);
        put(&to, message->slot_count, 4);
        put(&to, message->stream_bytes, 8);
        put(&to, message->flows, 4);
        break;
    case KVF_STAGE_LEND:
    case KVF_STAGE_RETURN:
        write_slots(&to, message);
        break;
    case KVF_STAGE_END:
        put(&to, message->by_lender, 1);
        put(&to, (uint64_t)message->status, 2);
        put_bytes(&to, message->sentence, strnlen(message->sentence, KVF_STAGE_SENTENCE_MAX - 1));
        break;
    }
    return (size_t)(to.at - out);
}

/* ---- reading --------------------------------------------------------------------------------- */

bool kvf_stage_is_message(const void *data, size_t bytes) {
    return bytes >= sizeof magic && memcmp(data, magic, sizeof magic) == 0;
}

static kvf_status read_slots(kvf_byte_reader *from, kvf_stage_message *out) {
    out->slot_count_named = (uint32_t)kvf_take_number(from, 1);
    if (out->slot_count_named < 1 || out->slot_count_named > KVF_STAGE_SLOTS_MAX)
        return kvf_fail(KVF_E_PARSE, "the message names %u slots; allowed: 1 to %u", out->slot_count_named,
                        KVF_STAGE_SLOTS_MAX);
    for (uint32_t i = 0; i < out->slot_count_named; i++) {
        kvf_slot_note *note = &out->slots[i];
        note->slot = (uint32_t)kvf_take_number(from, 4);
        note->generation = (uint32_t)kvf_take_number(from, 4);
        note->bytes.begin = kvf_take_number(from, 8);
        note->bytes.end = kvf_take_number(from, 8);
        if (note->bytes.begin > note->bytes.end)
            return kvf_fail(KVF_E_PARSE, "slot %u has bytes [%llu, %llu)", note->slot,
                            (unsigned long long)note->bytes.begin, (unsigned long long)note->bytes.end);
    }
    return KVF_OK;
}

static kvf_status read_end(kvf_byte_reader *from, kvf_stage_message *out) {
    uint64_t by = kvf_take_number(from, 1), status = kvf_take_number(from, 2);
    if (by > 1 || status > KVF_E_LIMIT)
        return kvf_fail(KVF_E_PARSE, "an END has side %llu and status %llu; allowed: 0 and 1, 0 to %d",
                        (unsigned long long)by, (unsigned long long)status, KVF_E_LIMIT);
    out->by_lender = by == 1;
    out->status = (kvf_status)status;
    if (from->left >= KVF_STAGE_SENTENCE_MAX)
        return kvf_fail(KVF_E_PARSE, "an END has a sentence of %zu bytes; allowed: 0 to %u", from->left,
                        KVF_STAGE_SENTENCE_MAX - 1);
    size_t length = from->left;
    if (length > 0)
        memcpy(out->sentence, kvf_take_bytes(from, length), length);
    out->sentence[length] = '\0';
    kvf_hide_controls(out->sentence);
    return KVF_OK;
}

static kvf_status read_open(kvf_byte_reader *from, kvf_stage_message *out) {
    out->opening_bytes = (uint32_t)kvf_take_number(from, 4);
    out->at = (uint32_t)kvf_take_number(from, 4);
    out->part_bytes = from->left;
    out->part = kvf_take_bytes(from, from->left);
    if (out->opening_bytes > KVF_STAGE_OPENING_MAX)
        return kvf_fail(KVF_E_PARSE, "an opening has %u bytes; allowed: 0 to %u", out->opening_bytes,
                        KVF_STAGE_OPENING_MAX);
    if (out->part_bytes == 0 || out->at > out->opening_bytes ||
        out->part_bytes > out->opening_bytes - out->at)
        return kvf_fail(KVF_E_PARSE, "part of an opening: %zu bytes at %u of %u", out->part_bytes, out->at,
                        out->opening_bytes);
    return KVF_OK;
}

static void read_accept(kvf_byte_reader *from, kvf_stage_message *out) {
    out->region = (uint32_t)kvf_take_number(from, 4);
    out->slot_bytes = (uint32_t)kvf_take_number(from, 4);
    out->slot_count = (uint32_t)kvf_take_number(from, 4);
    out->stream_bytes = kvf_take_number(from, 8);
    out->flows = (uint32_t)kvf_take_number(from, 4);
}

kvf_status kvf_stage_read_message(const void *data, size_t bytes, kvf_stage_message *out) {
    kvf_byte_reader from = {data, bytes, false};
    out->word = (kvf_stage_word)0;
    (void)kvf_take_bytes(&from, sizeof magic);
    uint64_t version = kvf_take_number(&from, 1);
    if (version != KVF_STAGE_VERSION)
        return kvf_fail(KVF_E_UNSUPPORTED, "a message has version %llu; this library speaks version %u",
                        (unsigned long long)version, KVF_STAGE_VERSION);
    out->word = (kvf_stage_word)kvf_take_number(&from, 1);
    out->flow = kvf_take_number(&from, 8);
    kvf_status status = KVF_OK;
    switch (out->word) {
    case KVF_STAGE_OPEN:
        status = read_open(&from, out);
        break;
    case KVF_STAGE_ACCEPT:
        read_accept(&from, out);
        break;
    case KVF_STAGE_LEND:
    case KVF_STAGE_RETURN:
        status = read_slots(&from, out);
        break;
    case KVF_STAGE_END:
        status = read_end(&from, out);
        break;
    default:
        return kvf_fail(KVF_E_PARSE, "a message has kind %d; allowed: 1 to 5", (int)out->word);
    }
    if (from.cut_off || (!status && from.left > 0))
        return kvf_fail(KVF_E_PARSE, "a message of kind %d has %zu bytes: %s", (int)out->word, bytes,
                        from.cut_off ? "some are missing" : "some are left over");
    return status;
}

/* ---- the opening ----------------------------------------------------------------------------- */

#define FIXED_BYTES (1 + 1 + 2 + 4 + 8 + 8 + 8 + 4 + 4)
#define ITEM_BYTES ((size_t)52)
#define GROUP_BYTES ((size_t)24)
#define FLAG_WRITES 1u
#define FLAG_ON_DEVICE 2u

uint64_t kvf_stage_model_sum(const kvf_model *model) {
    uint64_t sum = KVF_BYTE_SUM_START;
    for (uint32_t g = 0; g < kvf_model_group_count(model); g++) {
        const kvf_group_desc *group = kvf_model_group(model, g);
        sum = kvf_byte_sum(sum, group->name, strlen(group->name) + 1);
        const uint64_t facts[] = {group->kind,        group->window_tokens, group->chunk_tokens,
                                  group->layer_count, group->part_count,    group->tokens_per_step};
        sum = kvf_byte_sum(sum, facts, sizeof facts);
        sum = kvf_byte_sum(sum, group->layers, group->layer_count * sizeof *group->layers);
        for (uint32_t p = 0; p < group->part_count; p++) {
            const kvf_part_desc *part = &group->parts[p];
            sum = kvf_byte_sum(sum, part->name, strlen(part->name) + 1);
            /* Without the type: each item names its type in the stream. */
            const uint64_t sizes[] = {part->units, part->cell_elements, part->rows_per_step};
            sum = kvf_byte_sum(sum, sizes, sizeof sizes);
        }
    }
    return sum;
}

static void write_item(writer *to, const kvf_stream_item *item) {
    put(to, item->group, 4);
    put(to, item->part, 4);
    put(to, item->layers.begin, 4);
    put(to, item->layers.end, 4);
    put(to, item->units.begin, 4);
    put(to, item->units.end, 4);
    for (int i = 0; i < 2; i++) {
        put(to, item->tokens[i].index, 4);
        put(to, item->tokens[i].count, 4);
        put(to, item->tokens[i].width, 4);
    }
    put(to, item->dtype, 4);
}

static void read_item(kvf_byte_reader *from, kvf_stream_item *item) {
    uint32_t numbers[13];
    for (size_t i = 0; i < 13; i++)
        numbers[i] = (uint32_t)kvf_take_number(from, 4);
    *item = (kvf_stream_item){
        .group = numbers[0],
        .part = numbers[1],
        .layers = {numbers[2], numbers[3]},
        .units = {numbers[4], numbers[5]},
        .tokens = {{numbers[6], numbers[7], numbers[8]}, {numbers[9], numbers[10], numbers[11]}},
        .dtype = (kvf_dtype)numbers[12]};
}

uint64_t kvf_stage_opening_bytes(uint32_t items, uint32_t groups, uint64_t blocks) {
    return FIXED_BYTES + items * ITEM_BYTES + groups * GROUP_BYTES + blocks * 4;
}

kvf_status kvf_stage_write_opening(const kvf_opening *opening, unsigned char **out, size_t *bytes) {
    uint64_t blocks = 0;
    for (uint32_t g = 0; g < opening->group_count; g++)
        blocks += opening->groups[g].table.count;
    const uint64_t all = kvf_stage_opening_bytes(opening->item_count, opening->group_count, blocks);
    if (all > KVF_STAGE_OPENING_MAX)
        return kvf_fail(KVF_E_LIMIT, "the opening of a flow would have %llu bytes; allowed: up to %u",
                        (unsigned long long)all, KVF_STAGE_OPENING_MAX);
    unsigned char *data = kvf_alloc(all, 1);
    if (!data)
        return kvf_nomem("the opening of a flow");
    writer to = {data};
    put(&to,
        (opening->direction == KVF_WRITE ? FLAG_WRITES : 0u) | (opening->on_device ? FLAG_ON_DEVICE : 0u), 1);
    put(&to, opening->priority, 1);
    put(&to, opening->window, 2);
    put(&to, opening->slot_bytes, 4);
    put(&to, opening->stream_bytes, 8);
    put(&to, opening->model, 8);
    put(&to, opening->permission, 8);
    put(&to, opening->item_count, 4);
    put(&to, opening->group_count, 4);
    for (uint32_t i = 0; i < opening->item_count; i++)
        write_item(&to, &opening->items[i]);
    for (uint32_t g = 0; g < opening->group_count; g++) {
        const kvf_group_steps *group = &opening->groups[g];
        put(&to, group->begin, 8);
        put(&to, group->end, 8);
        put(&to, group->table.first_block, 4);
        put(&to, group->table.count, 4);
        for (uint32_t i = 0; i < group->table.count; i++)
            put(&to, group->table.ids[i], 4);
    }
    KVF_ASSERT(to.at == data + all);
    *out = data;
    *bytes = all;
    return KVF_OK;
}

/* Reads a table, puts its ids at `ids`, and returns the place behind them; NULL: the data is cut off. */
static uint32_t *read_table(kvf_byte_reader *from, uint32_t *ids, kvf_block_table *table) {
    table->first_block = (uint32_t)kvf_take_number(from, 4);
    table->count = (uint32_t)kvf_take_number(from, 4);
    table->ids = ids;
    if (from->cut_off || table->count > from->left / 4)
        return NULL;
    const unsigned char *at = kvf_take_bytes(from, (size_t)table->count * 4);
    for (uint32_t i = 0; i < table->count; i++, at += 4) /* there may be millions */
        ids[i] = at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
    return ids + table->count;
}

static kvf_status read_parts(kvf_byte_reader *from, kvf_stream_item *items, kvf_group_steps *groups,
                             const kvf_opening *sizes) {
    uint32_t *ids = sizes->ids;
    for (uint32_t i = 0; i < sizes->item_count; i++)
        read_item(from, &items[i]);
    for (uint32_t g = 0; g < sizes->group_count; g++) {
        groups[g].begin = kvf_take_number(from, 8);
        groups[g].end = kvf_take_number(from, 8);
        if (!(ids = read_table(from, ids, &groups[g].table)))
            return kvf_fail(KVF_E_PARSE, "the opening ends in the table of group %u", g);
    }
    if (from->cut_off || from->left > 0)
        return kvf_fail(KVF_E_PARSE, "the opening has bytes behind its last group, or too few");
    return KVF_OK;
}

kvf_status kvf_stage_read_opening(const unsigned char *data, size_t bytes, kvf_opening *out) {
    kvf_byte_reader from = {data, bytes, false};
    const uint64_t flags = kvf_take_number(&from, 1);
    *out = (kvf_opening){.direction = flags & FLAG_WRITES ? KVF_WRITE : KVF_READ,
                         .on_device = flags & FLAG_ON_DEVICE};
    out->priority = (uint32_t)kvf_take_number(&from, 1);
    out->window = (uint32_t)kvf_take_number(&from, 2);
    out->slot_bytes = (uint32_t)kvf_take_number(&from, 4);
    out->stream_bytes = kvf_take_number(&from, 8);
    out->model = kvf_take_number(&from, 8);
    out->permission = kvf_take_number(&from, 8);
    out->item_count = (uint32_t)kvf_take_number(&from, 4);
    out->group_count = (uint32_t)kvf_take_number(&from, 4);
    if (from.cut_off || flags > (FLAG_WRITES | FLAG_ON_DEVICE) || out->window == 0)
        return kvf_fail(KVF_E_PARSE, "an opening of %zu bytes: flags %llu, window %u", bytes,
                        (unsigned long long)flags, out->window);
    if (out->item_count > from.left / ITEM_BYTES ||
        out->group_count > (from.left - out->item_count * ITEM_BYTES) / GROUP_BYTES)
        return kvf_fail(KVF_E_PARSE, "an opening of %zu bytes cannot have %u items and %u groups", bytes,
                        out->item_count, out->group_count);
    kvf_stream_item *items = kvf_alloc0(out->item_count, sizeof *items);
    kvf_group_steps *groups = kvf_alloc0(out->group_count, sizeof *groups);
    out->items = items;
    out->groups = groups;
    out->ids = kvf_alloc(from.left / 4, sizeof *out->ids); /* the data has no more */
    kvf_status status = items && groups && out->ids ? read_parts(&from, items, groups, out)
                                                    : kvf_nomem("the opening of a flow");
    if (status)
        kvf_stage_free_opening(out);
    return status;
}

void kvf_stage_free_opening(kvf_opening *opening) {
    kvf_free((void *)opening->items);
    kvf_free((void *)opening->groups);
    kvf_free(opening->ids);
    opening->items = NULL;
    opening->groups = NULL;
    opening->ids = NULL;
}
