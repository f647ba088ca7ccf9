/* Keeps one word for each block: its state in the high bits, its readers or its ticket in the low ones. */
#include "agent/ledger.h"

#define VALUE_BITS 62u
#define VALUE_MASK KVF_LEDGER_MAX_TICKET

typedef enum word_state { FREE = 0, HELD = 1, FILLING = 2, IN_DOUBT = 3 } word_state;

typedef struct ledger_group {
    uint64_t *words;      /* NULL until one of its blocks is taken */
    uint64_t block_count; /* that ids can name */
} ledger_group;

struct kvf_ledger {
    kvf_model *model; /* for the names of groups */
    ledger_group *groups;
    uint32_t group_count;
    kvf_ledger_counts counts;
};

static uint64_t word_of(word_state state, uint64_t value) {
    KVF_ASSERT(value <= VALUE_MASK && (state != FREE || value == 0));
    return (uint64_t)state << VALUE_BITS | value;
}

static word_state state_of(uint64_t word) {
    return (word_state)(word >> VALUE_BITS);
}

static uint64_t value_of(uint64_t word) {
    return word & VALUE_MASK;
}

kvf_status kvf_ledger_create(const kvf_shard *shard, kvf_ledger **out) {
    const kvf_model *model = kvf_shard_model(shard);
    uint32_t group_count = kvf_model_group_count(model);
    const kvf_group_shard_desc *groups = kvf_shard_get(shard)->groups;
    kvf_ledger *ledger = kvf_alloc0(1, sizeof *ledger);
    if (!ledger)
        return kvf_nomem("ledger");
    ledger->groups = kvf_alloc0(group_count, sizeof *ledger->groups);
    if (!ledger->groups) {
        kvf_free(ledger);
        return kvf_nomem("ledger");
    }
    ledger->model = kvf_model_retain(model);
    ledger->group_count = group_count;
    for (uint32_t g = 0; g < group_count; g++)
        ledger->groups[g].block_count = kvf_min_u64(groups[g].block_count, KVF_NO_BLOCK);
    *out = ledger;
    return KVF_OK;
}

void kvf_ledger_free(kvf_ledger *ledger) {
    if (!ledger)
        return;
    for (uint32_t g = 0; g < ledger->group_count; g++)
        kvf_free(ledger->groups[g].words);
    kvf_free(ledger->groups);
    kvf_model_free(ledger->model);
    kvf_free(ledger);
}

static const char *name_of(const kvf_ledger *ledger, uint32_t group) {
    return kvf_model_group(ledger->model, group)->name;
}

/* ---- checks ---------------------------------------------------------------------------------- */

static kvf_status refuse(const char *group, uint32_t block, uint64_t word) {
    unsigned long long value = value_of(word);
    switch (state_of(word)) {
    case HELD:
        return kvf_fail(KVF_E_EXISTS, "group %s: block %u is held by %llu requests that read it", group,
                        block, value);
    case FILLING:
        return kvf_fail(KVF_E_EXISTS, "group %s: block %u is being filled by the request of ticket %llu",
                        group, block, value);
    default:
        return kvf_fail(
            KVF_E_EXISTS,
            "group %s: block %u is in doubt: the request of ticket %llu may still be written to it", group,
            block, value);
    }
}

/* Checks ids and makes room. Changes nothing that callers can see. */
static kvf_status prepare(kvf_ledger *ledger, const kvf_block_table *tables, uint32_t group_count) {
    if (group_count != ledger->group_count)
        return kvf_fail(KVF_E_INVALID, "group_count is %u; the model has %u", group_count,
                        ledger->group_count);
    for (uint32_t g = 0; g < group_count; g++) {
        ledger_group *group = &ledger->groups[g];
        bool is_used = false;
        if (tables[g].count > 0 && !tables[g].ids)
            return kvf_fail(KVF_E_INVALID, "group %s: %u blocks, but ids is NULL", name_of(ledger, g),
                            tables[g].count);
        for (uint32_t i = 0; i < tables[g].count; i++) {
            uint32_t block = tables[g].ids[i];
            if (block == KVF_NO_BLOCK)
                continue;
            if (block >= group->block_count)
                return kvf_fail(KVF_E_RANGE, "group %s: block %u, but the cache has %llu", name_of(ledger, g),
                                block, (unsigned long long)group->block_count);
            is_used = true;
        }
        if (is_used && !group->words) {
            group->words = kvf_alloc0((size_t)group->block_count, sizeof *group->words);
            if (!group->words)
                return kvf_nomem("ledger");
        }
    }
    return KVF_OK;
}

/* The word of the i-th block of a table; NULL: no block, or none with a word. */
static uint64_t *word_at(const kvf_ledger *ledger, uint32_t g, const kvf_block_table *table, uint32_t i) {
    uint32_t block = table->ids[i];
    if (!ledger->groups[g].words || block >= ledger->groups[g].block_count)
        return NULL;
    return &ledger->groups[g].words[block];
}

/* ---- readers --------------------------------------------------------------------------------- */

kvf_status kvf_ledger_take_readers(kvf_ledger *ledger, const kvf_block_table *tables, uint32_t group_count) {
    kvf_status status = prepare(ledger, tables, group_count);
    if (status)
        return status;
    for (uint32_t g = 0; g < group_count; g++) {
        for (uint32_t i = 0; i < tables[g].count; i++) {
            const uint64_t *word = word_at(ledger, g, &tables[g], i);
            if (word && state_of(*word) != FREE && state_of(*word) != HELD)
                return refuse(name_of(ledger, g), tables[g].ids[i], *word);
        }
    }
    for (uint32_t g = 0; g < group_count; g++) {
        for (uint32_t i = 0; i < tables[g].count; i++) {
            uint64_t *word = word_at(ledger, g, &tables[g], i);
            if (!word)
                continue;
            ledger->counts.held += state_of(*word) == FREE;
            *word = word_of(HELD, value_of(*word) + 1);
        }
    }
    return KVF_OK;
}

void kvf_ledger_drop_readers(kvf_ledger *ledger, const kvf_block_table *tables, uint32_t group_count) {
    for (uint32_t g = 0; g < group_count; g++) {
        for (uint32_t i = 0; i < tables[g].count; i++) {
            uint64_t *word = word_at(ledger, g, &tables[g], i);
            if (!word || state_of(*word) != HELD)
                continue;
            KVF_ASSERT(value_of(*word) > 0 && ledger->counts.held > 0);
            bool is_last = value_of(*word) == 1;
            *word = is_last ? word_of(FREE, 0) : *word - 1;
            ledger->counts.held -= is_last;
        }
    }
}

/* ---- writers --------------------------------------------------------------------------------- */

void kvf_ledger_drop_writer(kvf_ledger *ledger, const kvf_block_table *tables, uint32_t group_count,
                            uint64_t ticket) {
    for (uint32_t g = 0; g < group_count; g++) {
        for (uint32_t i = 0; i < tables[g].count; i++) {
            uint64_t *word = word_at(ledger, g, &tables[g], i);
            if (!word)
                continue;
            KVF_ASSERT(state_of(*word) != FILLING || ledger->counts.filling > 0);
            KVF_ASSERT(state_of(*word) != IN_DOUBT || ledger->counts.in_doubt > 0);
            if (*word == word_of(FILLING, ticket))
                ledger->counts.filling--;
            else if (*word == word_of(IN_DOUBT, ticket))
                ledger->counts.in_doubt--;
            else
                continue;
            *word = word_of(FREE, 0);
        }
    }
}

kvf_status kvf_ledger_take_writer(kvf_ledger *ledger, const kvf_block_table *tables, uint32_t group_count,
                                  uint64_t ticket) {
    if (ticket > KVF_LEDGER_MAX_TICKET)
        return kvf_fail(KVF_E_RANGE, "ticket is %llu; allowed: 0 to %llu", (unsigned long long)ticket,
                        (unsigned long long)KVF_LEDGER_MAX_TICKET);
    kvf_status status = prepare(ledger, tables, group_count);
    if (status)
        return status;
    /* First the blocks of others: afterwards only blocks taken in this call are not free. */
    for (uint32_t g = 0; g < group_count; g++) {
        for (uint32_t i = 0; i < tables[g].count; i++) {
            const uint64_t *word = word_at(ledger, g, &tables[g], i);
            if (word && state_of(*word) != FREE)
                return refuse(name_of(ledger, g), tables[g].ids[i], *word);
        }
    }
    for (uint32_t g = 0; g < group_count; g++) {
        for (uint32_t i = 0; i < tables[g].count; i++) {
            uint64_t *word = word_at(ledger, g, &tables[g], i);
            if (!word)
                continue;
            if (state_of(*word) != FREE) {
                kvf_ledger_drop_writer(ledger, tables, group_count, ticket);
                return kvf_fail(KVF_E_OVERLAP,
                                "group %s: block %u is given twice, the second time as entry %u",
                                name_of(ledger, g), tables[g].ids[i], i);
            }
            *word = word_of(FILLING, ticket);
            ledger->counts.filling++;
        }
    }
    return KVF_OK;
}

void kvf_ledger_doubt(kvf_ledger *ledger, const kvf_block_table *tables, uint32_t group_count,
                      uint64_t ticket) {
    for (uint32_t g = 0; g < group_count; g++) {
        for (uint32_t i = 0; i < tables[g].count; i++) {
            uint64_t *word = word_at(ledger, g, &tables[g], i);
            if (!word || *word != word_of(FILLING, ticket))
                continue;
            KVF_ASSERT(ledger->counts.filling > 0);
            *word = word_of(IN_DOUBT, ticket);
            ledger->counts.filling--;
            ledger->counts.in_doubt++;
        }
    }
}

/* ---- looking --------------------------------------------------------------------------------- */

kvf_status kvf_ledger_look(const kvf_ledger *ledger, uint32_t group, uint32_t block, kvf_ledger_entry *out) {
    static const kvf_block_state states[] = {[FREE] = KVF_BLOCK_FREE,
                                             [HELD] = KVF_BLOCK_HELD,
                                             [FILLING] = KVF_BLOCK_FILLING,
                                             [IN_DOUBT] = KVF_BLOCK_IN_DOUBT};
    if (group >= ledger->group_count)
        return kvf_fail(KVF_E_RANGE, "group is %u; the model has %u", group, ledger->group_count);
    if (block >= ledger->groups[group].block_count)
        return kvf_fail(KVF_E_RANGE, "group %s: block %u, but the cache has %llu", name_of(ledger, group),
                        block, (unsigned long long)ledger->groups[group].block_count);
    uint64_t word = ledger->groups[group].words ? ledger->groups[group].words[block] : word_of(FREE, 0);
    *out = (kvf_ledger_entry){.state = states[state_of(word)],
                              .readers = state_of(word) == HELD ? value_of(word) : 0,
                              .ticket = state_of(word) > HELD ? value_of(word) : 0};
    return KVF_OK;
}

kvf_ledger_counts kvf_ledger_count(const kvf_ledger *ledger) {
    return ledger->counts;
}
