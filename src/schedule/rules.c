/* Small rules that both sides of a hand-over must agree on: ids, token counts, clocks. */
#include "schedule/keys.h"

static bool is_hexadecimal(unsigned char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
}

size_t kvf_base_request_bytes(kvf_request_id id) {
    enum { DIGITS = 8 };
    const unsigned char *bytes = id.data;
    if (!bytes || id.size < DIGITS + 1 || bytes[id.size - DIGITS - 1] != '-')
        return id.size;
    for (size_t i = id.size - DIGITS; i < id.size; i++)
        if (!is_hexadecimal(bytes[i]))
            return id.size;
    return id.size - DIGITS - 1;
}

uint64_t kvf_prefill_token_count(uint64_t prompt_tokens, bool has_state, uint32_t lookahead_tokens) {
    uint64_t left_out = lookahead_tokens ? lookahead_tokens - 1 : 0;
    if (has_state && left_out == 0)
        left_out = 1;
    return prompt_tokens > left_out ? prompt_tokens - left_out : prompt_tokens;
}

bool kvf_lease_expired(uint64_t now_ns, uint64_t expiry_ns, int64_t clock_offset_ns, uint64_t margin_ns) {
    /* Three numbers of 64 bits: their sum needs more. */
    __extension__ typedef __int128 wide;
    return expiry_ns != 0 && (wide)now_ns + clock_offset_ns + (wide)margin_ns >= (wide)expiry_ns;
}

kvf_status kvf_clock_offset(const kvf_clock_probe *probes, size_t count, int64_t *offset_ns,
                            uint64_t *error_ns) {
    if (!probes || count == 0 || !offset_ns)
        return kvf_fail(KVF_E_INVALID, "kvf_clock_offset: probes or offset_ns is NULL, or count is 0");
    size_t best = 0;
    uint64_t shortest = UINT64_MAX;
    for (size_t i = 0; i < count; i++) {
        if (probes[i].received_ns < probes[i].sent_ns)
            return kvf_fail(KVF_E_INVALID, "probe %zu was received at %lld, before it was sent at %lld", i,
                            (long long)probes[i].received_ns, (long long)probes[i].sent_ns);
        uint64_t trip = (uint64_t)probes[i].received_ns - (uint64_t)probes[i].sent_ns;
        if (trip < shortest) {
            shortest = trip;
            best = i;
        }
    }
    int64_t offset, middle = probes[best].sent_ns + (int64_t)(shortest / 2);
    if (__builtin_sub_overflow(probes[best].remote_ns, middle, &offset))
        return kvf_fail(KVF_E_OVERFLOW, "probe %zu: the clocks are more than 2^63 ns apart", best);
    *offset_ns = offset;
    if (error_ns)
        *error_ns = shortest - shortest / 2;
    return KVF_OK;
}
