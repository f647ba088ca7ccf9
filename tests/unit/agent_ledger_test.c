/* The ledger: which requests may share a block, and the state after a refused claim. */
#include "agent/ledger.h"
#include "shapes.h"

#define NO KVF_NO_BLOCK

/** A ledger of a hybrid model: group 0 has 8 blocks, group 1 has 3. */
typedef struct world {
    kvf_model *model;
    kvf_engine *engine;
    kvf_ledger *ledger;
} world;

static int make_world(void **state) {
    static world made;
    made.model = hybrid(2);
    made.engine = engine_of(made.model, ENGINE(.all = {.block_count = 8}, .state = {.block_count = 3}));
    assert_ok(kvf_ledger_create(kvf_engine_shard(made.engine, 0), &made.ledger));
    *state = &made;
    return 0;
}

static int free_world(void **state) {
    world *made = *state;
    (void)stop_counting_memory(state); /* the ledger was made before counting began */
    kvf_ledger_free(made->ledger);
    kvf_engine_free(made->engine);
    kvf_model_free(made->model);
    return 0;
}

#define TABLES(...) ((const kvf_block_table[]){__VA_ARGS__})
#define NOTHING ((kvf_block_table){0})

static kvf_ledger_entry look(const kvf_ledger *ledger, uint32_t group, uint32_t block) {
    kvf_ledger_entry entry;
    assert_ok(kvf_ledger_look(ledger, group, block, &entry));
    return entry;
}

static void assert_counts(const kvf_ledger *ledger, uint64_t held, uint64_t filling, uint64_t in_doubt) {
    kvf_ledger_counts counts = kvf_ledger_count(ledger);
    assert_int_equal(counts.held, held);
    assert_int_equal(counts.filling, filling);
    assert_int_equal(counts.in_doubt, in_doubt);
}

static void assert_free(const kvf_ledger *ledger, uint32_t group, uint32_t block) {
    kvf_ledger_entry entry = look(ledger, group, block);
    assert_int_equal(entry.state, KVF_BLOCK_FREE);
    assert_int_equal(entry.readers, 0);
    assert_int_equal(entry.ticket, 0);
}

/* ---- readers --------------------------------------------------------------------------------- */

static void at_first_every_block_is_free(void **state) {
    const kvf_ledger *ledger = ((world *)*state)->ledger;
    for (uint32_t block = 0; block < 8; block++)
        assert_free(ledger, 0, block);
    for (uint32_t block = 0; block < 3; block++)
        assert_free(ledger, 1, block);
    assert_counts(ledger, 0, 0, 0);
}

static void several_readers_share_a_block_which_is_free_when_the_last_has_gone(void **state) {
    kvf_ledger *ledger = ((world *)*state)->ledger;
    assert_ok(kvf_ledger_take_readers(ledger, TABLES(TABLE(1, 2), TABLE(0)), 2));
    assert_ok(kvf_ledger_take_readers(ledger, TABLES(TABLE(2, 3), NOTHING), 2));

    assert_int_equal(look(ledger, 0, 2).state, KVF_BLOCK_HELD);
    assert_int_equal(look(ledger, 0, 2).readers, 2);
    assert_int_equal(look(ledger, 0, 2).ticket, 0); /* no request fills it */
    assert_int_equal(look(ledger, 0, 1).readers, 1);
    assert_int_equal(look(ledger, 1, 0).readers, 1);
    assert_counts(ledger, 4, 0, 0);
    kvf_ledger_drop_readers(ledger, TABLES(TABLE(1, 2), TABLE(0)), 2);
    assert_free(ledger, 0, 1);
    assert_int_equal(look(ledger, 0, 2).readers, 1);
    assert_counts(ledger, 2, 0, 0);
    kvf_ledger_drop_readers(ledger, TABLES(TABLE(2, 3), NOTHING), 2);
    assert_free(ledger, 0, 2);
    assert_counts(ledger, 0, 0, 0);
}

static void groups_number_their_blocks_each_for_itself(void **state) {
    kvf_ledger *ledger = ((world *)*state)->ledger;
    assert_ok(kvf_ledger_take_readers(ledger, TABLES(TABLE(1), NOTHING), 2));
    assert_ok(kvf_ledger_take_writer(ledger, TABLES(NOTHING, TABLE(1)), 2, 5));

    assert_int_equal(look(ledger, 0, 1).state, KVF_BLOCK_HELD);
    assert_int_equal(look(ledger, 1, 1).state, KVF_BLOCK_FILLING);
}

static void entries_without_a_block_are_skipped(void **state) {
    kvf_ledger *ledger = ((world *)*state)->ledger;
    assert_ok(kvf_ledger_take_readers(ledger, TABLES(TABLE(NO, 4, NO), TABLE(NO)), 2));
    assert_ok(kvf_ledger_take_writer(ledger, TABLES(TABLE(NO, NO, 5), TABLE(NO)), 2, 1));

    assert_counts(ledger, 1, 1, 0);
    kvf_ledger_doubt(ledger, TABLES(TABLE(NO, NO, 5), TABLE(NO)), 2, 1);
    kvf_ledger_drop_writer(ledger, TABLES(TABLE(NO, NO, 5), TABLE(NO)), 2, 1);
    kvf_ledger_drop_readers(ledger, TABLES(TABLE(NO, 4, NO), TABLE(NO)), 2);
    assert_counts(ledger, 0, 0, 0);
}

static void a_block_twice_among_those_read_counts_twice(void **state) {
    kvf_ledger *ledger = ((world *)*state)->ledger;
    assert_ok(kvf_ledger_take_readers(ledger, TABLES(TABLE(6, 6), NOTHING), 2));
    assert_int_equal(look(ledger, 0, 6).readers, 2);
    assert_counts(ledger, 1, 0, 0);
    kvf_ledger_drop_readers(ledger, TABLES(TABLE(6, 6), NOTHING), 2);
    assert_free(ledger, 0, 6);
}

/* ---- writers --------------------------------------------------------------------------------- */

static void a_writer_has_its_blocks_alone(void **state) {
    kvf_ledger *ledger = ((world *)*state)->ledger;
    assert_ok(kvf_ledger_take_writer(ledger, TABLES(TABLE(4, 5), TABLE(2)), 2, 77));

    assert_int_equal(look(ledger, 0, 4).state, KVF_BLOCK_FILLING);
    assert_int_equal(look(ledger, 0, 4).ticket, 77);
    assert_int_equal(look(ledger, 0, 4).readers, 0);
    assert_int_equal(look(ledger, 1, 2).ticket, 77);
    assert_counts(ledger, 0, 3, 0);
    kvf_ledger_drop_writer(ledger, TABLES(TABLE(4, 5), TABLE(2)), 2, 77);
    assert_free(ledger, 0, 4);
    assert_free(ledger, 1, 2);
    assert_counts(ledger, 0, 0, 0);
}

static void a_block_that_is_being_filled_is_not_given_to_another_writer(void **state) {
    kvf_ledger *ledger = ((world *)*state)->ledger;
    assert_ok(kvf_ledger_take_writer(ledger, TABLES(NOTHING, TABLE(2)), 2, 77));
    assert_fails(kvf_ledger_take_writer(ledger, TABLES(NOTHING, TABLE(2)), 2, 78), KVF_E_EXISTS, "group ssm",
                 "block 2", "being filled", "77");
    /* Nor twice for the same request. */
    assert_fails(kvf_ledger_take_writer(ledger, TABLES(NOTHING, TABLE(2)), 2, 77), KVF_E_EXISTS, "77");
    assert_int_equal(look(ledger, 1, 2).ticket, 77);
}

static void a_block_that_is_being_filled_is_not_read(void **state) {
    kvf_ledger *ledger = ((world *)*state)->ledger;
    assert_ok(kvf_ledger_take_writer(ledger, TABLES(TABLE(3), NOTHING), 2, 9));
    assert_fails(kvf_ledger_take_readers(ledger, TABLES(TABLE(3), NOTHING), 2), KVF_E_EXISTS, "group full",
                 "block 3", "being filled", "9");
}

static void a_block_that_is_read_is_not_written(void **state) {
    kvf_ledger *ledger = ((world *)*state)->ledger;
    assert_ok(kvf_ledger_take_readers(ledger, TABLES(TABLE(3), NOTHING), 2));
    assert_ok(kvf_ledger_take_readers(ledger, TABLES(TABLE(3), NOTHING), 2));
    assert_fails(kvf_ledger_take_writer(ledger, TABLES(TABLE(3), NOTHING), 2, 9), KVF_E_EXISTS, "group full",
                 "block 3", "held", "2 requests");
    assert_int_equal(look(ledger, 0, 3).readers, 2);
}

static void a_destination_that_names_a_block_twice_is_refused_whole(void **state) {
    kvf_ledger *ledger = ((world *)*state)->ledger;
    assert_fails(kvf_ledger_take_writer(ledger, TABLES(TABLE(1, 2, 7), TABLE(0, 1, 0)), 2, 9), KVF_E_OVERLAP,
                 "group ssm", "block 0", "entry 2");
    assert_counts(ledger, 0, 0, 0);
    assert_free(ledger, 0, 1);
    assert_free(ledger, 0, 7);
    assert_free(ledger, 1, 0);
    assert_free(ledger, 1, 1);
}

/* ---- doubt ----------------------------------------------------------------------------------- */

static void a_block_in_doubt_is_neither_read_nor_written_until_its_writer_lets_go(void **state) {
    kvf_ledger *ledger = ((world *)*state)->ledger;
    assert_ok(kvf_ledger_take_writer(ledger, TABLES(TABLE(0, 1), NOTHING), 2, 42));
    kvf_ledger_doubt(ledger, TABLES(TABLE(0, 1), NOTHING), 2, 42);

    assert_int_equal(look(ledger, 0, 1).state, KVF_BLOCK_IN_DOUBT);
    assert_int_equal(look(ledger, 0, 1).ticket, 42);
    assert_counts(ledger, 0, 0, 2);
    assert_fails(kvf_ledger_take_writer(ledger, TABLES(TABLE(1), NOTHING), 2, 43), KVF_E_EXISTS, "block 1",
                 "in doubt", "42");
    assert_fails(kvf_ledger_take_readers(ledger, TABLES(TABLE(1), NOTHING), 2), KVF_E_EXISTS, "block 1",
                 "in doubt", "42");
    kvf_ledger_drop_writer(ledger, TABLES(TABLE(0, 1), NOTHING), 2, 42);
    assert_counts(ledger, 0, 0, 0);
    assert_ok(kvf_ledger_take_writer(ledger, TABLES(TABLE(1), NOTHING), 2, 43));
}

static void blocks_of_all_groups_are_in_doubt(void **state) {
    kvf_ledger *ledger = ((world *)*state)->ledger;
    assert_ok(kvf_ledger_take_writer(ledger, TABLES(TABLE(0), TABLE(1)), 2, 42));
    kvf_ledger_doubt(ledger, TABLES(TABLE(0), TABLE(1)), 2, 42);

    assert_int_equal(look(ledger, 0, 0).state, KVF_BLOCK_IN_DOUBT);
    assert_int_equal(look(ledger, 1, 1).state, KVF_BLOCK_IN_DOUBT);
    assert_counts(ledger, 0, 0, 2);
    kvf_ledger_drop_writer(ledger, TABLES(TABLE(0), TABLE(1)), 2, 42);
    assert_counts(ledger, 0, 0, 0);
}

static void another_ticket_neither_doubts_nor_frees(void **state) {
    kvf_ledger *ledger = ((world *)*state)->ledger;
    assert_ok(kvf_ledger_take_writer(ledger, TABLES(TABLE(0), NOTHING), 2, 42));
    kvf_ledger_doubt(ledger, TABLES(TABLE(0), NOTHING), 2, 41);
    kvf_ledger_drop_writer(ledger, TABLES(TABLE(0), NOTHING), 2, 43);
    kvf_ledger_drop_readers(ledger, TABLES(TABLE(0), NOTHING), 2);

    assert_int_equal(look(ledger, 0, 0).state, KVF_BLOCK_FILLING);
    assert_int_equal(look(ledger, 0, 0).ticket, 42);
    assert_counts(ledger, 0, 1, 0);
}

static void dropping_what_nobody_has_changes_nothing(void **state) {
    kvf_ledger *ledger = ((world *)*state)->ledger;
    kvf_ledger_drop_readers(ledger, TABLES(TABLE(0), TABLE(0)), 2);
    kvf_ledger_drop_writer(ledger, TABLES(TABLE(0), TABLE(0)), 2, 1);
    kvf_ledger_doubt(ledger, TABLES(TABLE(0), TABLE(0)), 2, 1);
    assert_ok(kvf_ledger_take_readers(ledger, TABLES(TABLE(1), NOTHING), 2));
    kvf_ledger_drop_readers(ledger, TABLES(TABLE(0, 99), TABLE(99)), 3 - 1);
    kvf_ledger_drop_writer(ledger, TABLES(TABLE(0, 1, 99), NOTHING), 2, 0);
    kvf_ledger_drop_writer(ledger, TABLES(TABLE(0, 1), NOTHING), 2, 1);

    assert_free(ledger, 0, 0);
    assert_int_equal(look(ledger, 0, 1).readers, 1);
    assert_counts(ledger, 1, 0, 0);
}

/* ---- all or nothing -------------------------------------------------------------------------- */

static void a_refused_reader_leaves_no_trace(void **state) {
    kvf_ledger *ledger = ((world *)*state)->ledger;
    assert_ok(kvf_ledger_take_writer(ledger, TABLES(NOTHING, TABLE(2)), 2, 9));
    assert_fails(kvf_ledger_take_readers(ledger, TABLES(TABLE(0, 1), TABLE(1, 2)), 2), KVF_E_EXISTS,
                 "group ssm", "block 2");
    assert_free(ledger, 0, 0);
    assert_free(ledger, 1, 1);
    assert_counts(ledger, 0, 1, 0);
}

static void a_refused_writer_leaves_no_trace(void **state) {
    kvf_ledger *ledger = ((world *)*state)->ledger;
    assert_ok(kvf_ledger_take_readers(ledger, TABLES(NOTHING, TABLE(2)), 2));
    assert_fails(kvf_ledger_take_writer(ledger, TABLES(TABLE(0, 1), TABLE(1, 2)), 2, 9), KVF_E_EXISTS,
                 "group ssm", "block 2");
    assert_free(ledger, 0, 0);
    assert_free(ledger, 1, 1);
    assert_counts(ledger, 1, 0, 0);
}

static void a_block_beyond_the_cache_is_refused_and_leaves_no_trace(void **state) {
    kvf_ledger *ledger = ((world *)*state)->ledger;
    kvf_ledger_entry entry;
    assert_fails(kvf_ledger_take_readers(ledger, TABLES(TABLE(0), TABLE(3)), 2), KVF_E_RANGE, "group ssm",
                 "block 3", "has 3");
    assert_fails(kvf_ledger_take_writer(ledger, TABLES(TABLE(7, 8), NOTHING), 2, 9), KVF_E_RANGE,
                 "group full", "block 8", "has 8");
    assert_fails(kvf_ledger_take_writer(ledger, TABLES(TABLE(NO - 1), NOTHING), 2, 9), KVF_E_RANGE,
                 "group full");
    assert_fails(kvf_ledger_look(ledger, 0, 8, &entry), KVF_E_RANGE, "block 8", "has 8");
    assert_fails(kvf_ledger_look(ledger, 2, 0, &entry), KVF_E_RANGE, "group is 2", "has 2");
    assert_counts(ledger, 0, 0, 0);
}

static void tables_must_be_those_of_the_model_and_tickets_fit(void **state) {
    kvf_ledger *ledger = ((world *)*state)->ledger;
    const kvf_block_table broken[] = {{NULL, 1, 0}, NOTHING};
    assert_fails(kvf_ledger_take_readers(ledger, TABLES(TABLE(0)), 1), KVF_E_INVALID, "group_count is 1",
                 "has 2");
    assert_fails(kvf_ledger_take_writer(ledger, TABLES(TABLE(0), NOTHING, NOTHING), 3, 1), KVF_E_INVALID,
                 "group_count is 3");
    assert_fails(kvf_ledger_take_readers(ledger, broken, 2), KVF_E_INVALID, "ids is NULL");
    assert_fails(kvf_ledger_take_writer(ledger, TABLES(TABLE(0), NOTHING), 2, KVF_LEDGER_MAX_TICKET + 1),
                 KVF_E_RANGE, "ticket");
    assert_ok(kvf_ledger_take_writer(ledger, TABLES(TABLE(0), NOTHING), 2, KVF_LEDGER_MAX_TICKET));
    assert_true(look(ledger, 0, 0).ticket == KVF_LEDGER_MAX_TICKET);
}

/* ---- memory ---------------------------------------------------------------------------------- */

static void a_group_takes_memory_once_one_of_its_blocks_is_taken(void **state) {
    kvf_ledger *ledger = NULL;
    memory_count memory;
    count_memory(&memory);
    assert_ok(kvf_ledger_create(kvf_engine_shard(((world *)*state)->engine, 0), &ledger));
    const size_t unused = memory.live;
    assert_ok(kvf_ledger_take_readers(ledger, TABLES(TABLE(NO), NOTHING), 2));
    assert_int_equal(memory.live, unused);
    for (uint32_t block = 0; block < 2; block++) {
        assert_ok(kvf_ledger_take_writer(ledger, TABLES(NOTHING, TABLE(block)), 2, 5));
        assert_int_equal(memory.live, unused + 1);
    }
    kvf_ledger_free(ledger);
    assert_int_equal(memory.live, 0);
}

static kvf_status create_and_take(void *subject) {
    kvf_ledger *ledger = NULL;
    const world *made = subject;
    kvf_status status = kvf_ledger_create(kvf_engine_shard(made->engine, 0), &ledger);
    if (!status)
        status = kvf_ledger_take_readers(ledger, TABLES(TABLE(1), TABLE(1)), 2);
    if (status == KVF_E_NOMEM && ledger)
        assert_counts(ledger, 0, 0, 0);
    kvf_ledger_free(ledger);
    return status;
}

static void without_memory_nothing_is_taken_and_nothing_leaks(void **state) {
    memory_count memory;
    count_memory(&memory);
    survive_every_refusal(&memory, create_and_take, *state);
}

#define RULE(name) cmocka_unit_test_setup_teardown(name, make_world, free_world)

int main(void) {
    const struct CMUnitTest tests[] = {
        RULE(at_first_every_block_is_free),
        RULE(several_readers_share_a_block_which_is_free_when_the_last_has_gone),
        RULE(groups_number_their_blocks_each_for_itself),
        RULE(entries_without_a_block_are_skipped),
        RULE(a_block_twice_among_those_read_counts_twice),
        RULE(a_writer_has_its_blocks_alone),
        RULE(a_block_that_is_being_filled_is_not_given_to_another_writer),
        RULE(a_block_that_is_being_filled_is_not_read),
        RULE(a_block_that_is_read_is_not_written),
        RULE(a_destination_that_names_a_block_twice_is_refused_whole),
        RULE(a_block_in_doubt_is_neither_read_nor_written_until_its_writer_lets_go),
        RULE(blocks_of_all_groups_are_in_doubt),
        RULE(another_ticket_neither_doubts_nor_frees),
        RULE(dropping_what_nobody_has_changes_nothing),
        RULE(a_refused_reader_leaves_no_trace),
        RULE(a_refused_writer_leaves_no_trace),
        RULE(a_block_beyond_the_cache_is_refused_and_leaves_no_trace),
        RULE(tables_must_be_those_of_the_model_and_tickets_fit),
        RULE(a_group_takes_memory_once_one_of_its_blocks_is_taken),
        RULE(without_memory_nothing_is_taken_and_nothing_leaks),
    };
    return cmocka_run_group_tests_name("the ledger", tests, NULL, NULL);
}
