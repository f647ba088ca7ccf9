/* Hash tables whose keys are chosen by somebody who wants lookups to take long. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/tables.h"

#define KEYS 4096u
#define CHAIN_MOST 32u /* uthash aims at 10 in a bucket */

typedef struct entry {
    uint32_t key[6];
    UT_hash_handle hh;
} entry;

/* Keys of one hash by uthash's own function, which adds 12 bytes to its state, mixes it, and adds the next 12: these
 * bring it to the same state for every first half. */
static void make_key(uint32_t number, uint32_t key[6]) {
    uint32_t i = 0x9e3779b9u + number, j = 0x9e3779b9u, hash = 0xfeedbeefu;
    HASH_JEN_MIX(i, j, hash);
    key[0] = number;
    key[1] = key[2] = 0;
    key[3] = 0 - i;
    key[4] = 0 - j;
    key[5] = 0 - hash;
}

static uint32_t longest_chain(const entry *table) {
    uint32_t longest = 0;
    for (uint32_t i = 0; i < table->hh.tbl->num_buckets; i++)
        if (table->hh.tbl->buckets[i].count > longest)
            longest = table->hh.tbl->buckets[i].count;
    return longest;
}

static void keys_that_a_peer_has_chosen_do_not_share_a_bucket(void **state) {
    (void)state;
    static entry entries[KEYS];
    entry *table = NULL, *found, *next;
    unsigned first, hash;
    for (uint32_t n = 0; n < KEYS; n++) {
        make_key(n, entries[n].key);
        HASH_JEN(entries[0].key, sizeof entries[0].key, first);
        HASH_JEN(entries[n].key, sizeof entries[n].key, hash);
        assert_int_equal(hash, first); /* as a peer wants it */
        HASH_ADD(hh, table, key, sizeof entries[n].key, &entries[n]);
        assert_non_null(entries[n].hh.tbl);
    }
    assert_in_range(longest_chain(table), 1, CHAIN_MOST);
    for (uint32_t n = 0; n < KEYS; n++) {
        HASH_FIND(hh, table, entries[n].key, sizeof entries[n].key, found);
        assert_ptr_equal(found, &entries[n]);
    }
    HASH_ITER(hh, table, found, next) {
        HASH_DEL(table, found);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(keys_that_a_peer_has_chosen_do_not_share_a_bucket)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
