/*
 * The values that a field may have, for both writing and reading.
 */
#include "wire/fields.h"

kvf_status kvf_wire_field_check_number(const char *key, uint64_t value, uint64_t least, uint64_t most,
                                       kvf_status bad) {
    if (value >= least && value <= most)
        return KVF_OK;
    return kvf_fail(bad, "%s is %llu; allowed: %llu to %llu", key, (unsigned long long)value,
                    (unsigned long long)least, (unsigned long long)most);
}

kvf_status kvf_wire_field_check_size(const char *key, const char *unit, uint64_t size, uint64_t least,
                                     uint64_t most, kvf_status bad) {
    if (size >= least && size <= most)
        return KVF_OK;
    return kvf_fail(bad, "%s has %llu %s; allowed: %llu to %llu", key, (unsigned long long)size, unit,
                    (unsigned long long)least, (unsigned long long)most);
}

kvf_status kvf_wire_field_check_status(const char *key, uint64_t value, kvf_status bad) {
    if (value < KVF_IN_PROGRESS && strcmp(kvf_status_name((kvf_status)value), "unknown status") != 0)
        return KVF_OK;
    return kvf_fail(bad, "%s is %llu, which is not a kvf_status", key, (unsigned long long)value);
}

kvf_status kvf_wire_field_check_range(const char *key, uint64_t begin, uint64_t end, kvf_status bad) {
    if (begin <= end)
        return KVF_OK;
    return kvf_fail(bad, "%s is [%llu, %llu), which ends before it begins", key, (unsigned long long)begin,
                    (unsigned long long)end);
}

#define KEY_CHARACTERS 40

static kvf_status check_key(const char *key, const char *text, size_t bytes, kvf_status bad) {
    static const char z85[] =
        "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#";
    if (bytes != 0 && bytes != KEY_CHARACTERS)
        return kvf_fail(bad, "%s has %zu characters; allowed: 0 or %d", key, bytes, KEY_CHARACTERS);
    for (size_t i = 0; i < bytes; i++)
        if (!memchr(z85, text[i], sizeof z85 - 1))
            return kvf_fail(bad, "%s has 0x%02x at character %zu, which is not in Z85", key,
                            (unsigned)(uint8_t)text[i], i);
    return KVF_OK;
}

/* Names appear in log lines and on terminals, so control characters are refused. */
static kvf_status check_name(const char *key, const char *text, size_t bytes, kvf_status bad) {
    for (size_t i = 0; i < bytes; i++)
        if (kvf_is_control(text[i]))
            return kvf_fail(bad, "%s has the control character 0x%02x at byte %zu", key,
                            (unsigned)(uint8_t)text[i], i);
    return KVF_OK;
}

kvf_status kvf_wire_field_check_text(const kvf_wire_field *field, const char *text, size_t bytes,
                                     kvf_status bad) {
    if (field->type == KVF_FIELD_KEY)
        return check_key(field->key, text, bytes, bad);
    kvf_status status = kvf_wire_field_check_size(field->key, "bytes", bytes, field->least, field->most, bad);
    if (status)
        return status;
    if (field->type == KVF_FIELD_NAME)
        return check_name(field->key, text, bytes, bad);
    const char *zero = bytes ? memchr(text, '\0', bytes) : NULL;
    if (zero)
        return kvf_fail(bad, "%s has a zero byte at byte %zu", field->key, (size_t)(zero - text));
    return KVF_OK;
}
