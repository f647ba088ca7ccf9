/*
 * Pairing the blocks that decode still lacks with the prefill blocks that fill them.
 *
 *   prefill  | 0 | 1 | 2 | 3 | 4 |        decode has 0 and 1 cached and lists three blocks:
 *   decode           | a | b | c |        the tail of the prefill list pairs with them
 */
#include "connector/connector.h"

/* A part of each list that pairs with the other one, entry by entry. */
typedef struct pairing {
    size_t decode_begin, prefill_begin, count;
} pairing;

static kvf_status pair_tails(size_t group, size_t decode, size_t prefill, pairing *out) {
    if (decode > prefill)
        return kvf_refuse(KVF_REFUSAL_DECODE_LONGER_THAN_PREFILL, KVF_E_RANGE,
                          "group %zu: decode lists %zu blocks, but prefill has %zu", group, decode, prefill);
    *out = (pairing){0, prefill - decode, decode};
    return KVF_OK;
}

/*
 * A longer prefill list begins with positions that decode has. A longer decode list ends with slots that prefill
 * has no state for: positions that decode computes again, and scratch slots of speculative decoding. If prefill
 * has no slot at all, decode may have only one, for the position that it computes itself.
 */
static kvf_status pair_states(size_t group, size_t decode, size_t prefill, pairing *out) {
    if (prefill == 0 && decode > 1)
        return kvf_refuse(KVF_REFUSAL_UNPAIRABLE_STATE_SLOTS, KVF_E_RANGE,
                          "group %zu: decode has %zu state slots, but prefill has none; allowed: 0 to 1",
                          group, decode);
    size_t count = decode < prefill ? decode : prefill;
    *out = (pairing){0, prefill - count, count};
    return KVF_OK;
}

/*
 * Each side rounds its list up to its own whole logical blocks, so that the lists may differ by the two paddings. The
 * longer list is cut to the shorter one.
 */
static kvf_status pair_fronts(size_t group, size_t decode, size_t prefill, uint64_t padding, pairing *out) {
    size_t count = decode < prefill ? decode : prefill;
    size_t difference = decode < prefill ? prefill - decode : decode - prefill;
    if (count && difference > padding)
        return kvf_refuse(KVF_REFUSAL_PADDING_EXCEEDED, KVF_E_RANGE,
                          "group %zu: %zu decode and %zu prefill blocks differ by more than %llu, which "
                          "padding explains",
                          group, decode, prefill, (unsigned long long)padding);
    *out = (pairing){0, 0, count};
    return KVF_OK;
}

/* Cuts one pair of lists by a pairing. */
static kvf_status cut(const pairing *pair, const kvf_ids *decode, const kvf_ids *prefill, kvf_ids *decode_out,
                      kvf_ids *prefill_out) {
    kvf_status status =
        kvf_ids_slice(decode_out, decode, pair->decode_begin, pair->decode_begin + pair->count);
    if (status)
        return status;
    return kvf_ids_slice(prefill_out, prefill, pair->prefill_begin, pair->prefill_begin + pair->count);
}

typedef struct trim_rule {
    const kvf_cache_kind *kinds; /* NULL: attention everywhere */
    bool from_front;
    uint64_t padding;
} trim_rule;

static kvf_status trim_group(const trim_rule *rule, size_t g, size_t decode, size_t prefill, pairing *out) {
    if (rule->kinds && rule->kinds[g] == KVF_CACHE_SSM)
        return pair_states(g, decode, prefill, out);
    if (rule->from_front)
        return pair_fronts(g, decode, prefill, rule->padding, out);
    return pair_tails(g, decode, prefill, out);
}

static kvf_status trim(const trim_rule *rule, const kvf_block_lists *decode, const kvf_block_lists *prefill,
                       kvf_block_lists *decode_out, kvf_block_lists *prefill_out) {
    if (decode->count != prefill->count)
        return kvf_plain_fail(KVF_E_INVALID, "%zu decode lists and %zu prefill lists", decode->count,
                              prefill->count);
    kvf_block_lists ours, theirs = {0};
    kvf_status status = kvf_block_lists_make(&ours, decode->count);
    if (!status)
        status = kvf_block_lists_make(&theirs, prefill->count);
    for (size_t g = 0; !status && g < decode->count; g++) {
        pairing pair = {0};
        status = trim_group(rule, g, decode->groups[g].count, prefill->groups[g].count, &pair);
        if (!status)
            status = cut(&pair, &decode->groups[g], &prefill->groups[g], &ours.groups[g], &theirs.groups[g]);
    }
    if (status) {
        kvf_block_lists_free(&ours);
        kvf_block_lists_free(&theirs);
        return status;
    }
    *decode_out = ours;
    *prefill_out = theirs;
    return KVF_OK;
}

kvf_status kvf_prefix_trim(const kvf_cache_kind *kinds, const kvf_block_lists *decode,
                           const kvf_block_lists *prefill, uint32_t decode_ppl, uint32_t prefill_ppl,
                           kvf_block_lists *decode_out, kvf_block_lists *prefill_out) {
    if (!kinds || !decode || !prefill || !decode_out || !prefill_out)
        return kvf_plain_fail(KVF_E_INVALID, "no argument may be NULL");
    if (!decode_ppl || !prefill_ppl)
        return kvf_plain_fail(KVF_E_INVALID, "%s_ppl is 0; allowed: 1 and more",
                              decode_ppl ? "prefill" : "decode");
    bool has_state = false;
    for (size_t g = 0; g < decode->count; g++)
        has_state |= kinds[g] == KVF_CACHE_SSM;
    trim_rule rule = {.kinds = kinds,
                      .from_front = has_state && decode_ppl != prefill_ppl,
                      .padding = (uint64_t)decode_ppl + prefill_ppl};
    return trim(&rule, decode, prefill, decode_out, prefill_out);
}

kvf_status kvf_prefix_trim_by_region(const kvf_block_lists *decode, const kvf_block_lists *prefill,
                                     kvf_block_lists *decode_out, kvf_block_lists *prefill_out) {
    if (!decode || !prefill || !decode_out || !prefill_out)
        return kvf_plain_fail(KVF_E_INVALID, "no argument may be NULL");
    trim_rule rule = {0};
    return trim(&rule, decode, prefill, decode_out, prefill_out);
}

/* Checks a pair of shares and gives their ranks within the share count. */
static kvf_status take_dcp_pair(const kvf_dcp_pair *pair, kvf_dcp_pair *out) {
    kvf_status status = kvf_take_struct(out, sizeof *out, pair, "kvf_dcp_pair");
    if (status)
        return status;
    if (!out->local_dcp_size || !out->remote_dcp_size)
        return kvf_plain_fail(KVF_E_INVALID, "%s_dcp_size is 0; allowed: 1 and more",
                              out->local_dcp_size ? "remote" : "local");
    if (out->local_dcp_rank >= out->local_dcp_size)
        return kvf_plain_fail(KVF_E_RANGE, "local_dcp_rank is %u; allowed: 0 to %u", out->local_dcp_rank,
                              out->local_dcp_size - 1);
    out->remote_rank %= out->remote_dcp_size;
    return KVF_OK;
}

kvf_status kvf_dcp_prefix_trim(const kvf_dcp_pair *given, const kvf_ids *local, const kvf_ids *remote,
                               kvf_ids *local_out, kvf_ids *remote_out) {
    if (!given || !local || !remote || !local_out || !remote_out)
        return kvf_plain_fail(KVF_E_INVALID, "no argument may be NULL");
    kvf_dcp_pair pair;
    kvf_status status = take_dcp_pair(given, &pair);
    if (status)
        return status;
    uint64_t last;
    if (!kvf_add(pair.num_computed, local->count, &last) ||
        !kvf_mul_add(last, pair.local_dcp_size, pair.local_dcp_rank, &last))
        return kvf_plain_fail(KVF_E_OVERFLOW, "num_computed is %llu; too large for %zu more blocks",
                              (unsigned long long)pair.num_computed, local->count);
    kvf_ids ours, theirs = {0};
    status = kvf_ids_make(&ours, local->count);
    if (!status)
        status = kvf_ids_make(&theirs, local->count);
    for (size_t i = 0; !status && i < local->count; i++) {
        /* The block's index in the whole sequence, which is the same on both sides. */
        uint64_t global = (pair.num_computed + i) * pair.local_dcp_size + pair.local_dcp_rank;
        uint64_t entry = global / pair.remote_dcp_size;
        if (global % pair.remote_dcp_size != pair.remote_rank ||
            (pair.has_num_remote_blocks && global >= pair.num_remote_blocks))
            continue;
        if (entry >= remote->count) {
            status = kvf_refuse(KVF_REFUSAL_REMOTE_DOES_NOT_COVER, KVF_E_RANGE,
                                "block %llu of the sequence is entry %llu of remote rank %u, which lists %zu",
                                (unsigned long long)global, (unsigned long long)entry, pair.remote_rank,
                                remote->count);
            break;
        }
        kvf_ids_add(&ours, local->at[i]);
        kvf_ids_add(&theirs, remote->at[entry]);
    }
    if (status) {
        kvf_ids_free(&ours);
        kvf_ids_free(&theirs);
        return status;
    }
    *local_out = ours;
    *remote_out = theirs;
    return KVF_OK;
}
