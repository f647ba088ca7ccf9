#include "base/base.h"

#include <errno.h>
#include <pthread.h>
#include <sys/random.h>

#define TEXT_OF(number) #number
#define VERSION_TEXT(major, minor, patch) TEXT_OF(major) "." TEXT_OF(minor) "." TEXT_OF(patch)

const char *kvf_version(void) {
    return VERSION_TEXT(KVF_VERSION_MAJOR, KVF_VERSION_MINOR, KVF_VERSION_PATCH);
}

uint64_t kvf_gcd(uint64_t a, uint64_t b) {
    while (b) {
        uint64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

kvf_status kvf_random(void *out, size_t bytes) {
    return getrandom(out, bytes, 0) == (ssize_t)bytes ? KVF_OK
                                                      : kvf_fail(KVF_E_IO, "getrandom: %s", strerror(errno));
}

static uint8_t process_secret[KVF_PROCESS_SECRET_BYTES];

/* A kernel without random numbers leaves zeros: hashes are then not secret, but right. */
static void choose_secret(void) {
    (void)kvf_random(process_secret, sizeof process_secret);
}

const uint8_t *kvf_process_secret(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, choose_secret);
    return process_secret;
}

void kvf_hide_controls(char *text) {
    for (; *text; text++)
        if (kvf_is_control(*text))
            *text = '?';
}

kvf_excerpt kvf_excerpt_of(const char *text, size_t most) {
    kvf_excerpt out;
    KVF_ASSERT(most + sizeof "..." <= sizeof out.text);
    size_t length = strnlen(text, most + 1);
    const bool cut = length > most;
    /* A character of UTF-8 goes on with bytes of the form 10xxxxxx. */
    for (length = cut ? most : length; cut && length > 0 && ((unsigned char)text[length] & 0xc0) == 0x80;)
        length--;
    memcpy(out.text, text, length);
    memcpy(out.text + length, cut ? "..." : "", cut ? sizeof "..." : 1);
    return out;
}

kvf_status kvf_take_options(void *out, size_t out_bytes, const void *options, const char *name) {
    memset(out, 0, out_bytes);
    if (!options)
        return KVF_OK;
    size_t given;
    memcpy(&given, options, sizeof given);
    if (given < sizeof given)
        return kvf_fail(KVF_E_INVALID, "%s.struct_size is %zu; set it to sizeof(%s)", name, given, name);
    for (size_t i = out_bytes; i < given; i++)
        if (((const unsigned char *)options)[i])
            return kvf_fail(KVF_E_INVALID,
                            "%s.struct_size is %zu and byte %zu is set, but this library knows %zu bytes",
                            name, given, i, out_bytes);
    memcpy(out, options, given < out_bytes ? given : out_bytes);
    return KVF_OK;
}

kvf_status kvf_check_out(const void *out, const char *name) {
    if (!out)
        return kvf_fail(KVF_E_INVALID, "%s is NULL", name);
    size_t given;
    memcpy(&given, out, sizeof given);
    if (given < sizeof given)
        return kvf_fail(KVF_E_INVALID, "%s.struct_size is %zu; set it to sizeof(%s)", name, given, name);
    return KVF_OK;
}

void kvf_fill_out(void *out, const void *found, size_t found_bytes) {
    size_t given;
    memcpy(&given, out, sizeof given);
    memset(out, 0, given);
    memcpy(out, found, given < found_bytes ? given : found_bytes);
    memcpy(out, &given, sizeof given);
}

void kvf_fill_element(void *array, size_t i, const void *found, size_t found_bytes) {
    size_t each;
    memcpy(&each, array, sizeof each);
    unsigned char *to = (unsigned char *)array + i * each;
    memcpy(to, &each, sizeof each);
    kvf_fill_out(to, found, found_bytes);
}

kvf_status kvf_check_reserved(const uint64_t *reserved, size_t count, const char *name) {
    for (size_t i = 0; i < count; i++)
        if (reserved[i])
            return kvf_fail(KVF_E_INVALID, "%s.reserved[%zu] is %llu; allowed: 0", name, i,
                            (unsigned long long)reserved[i]);
    return KVF_OK;
}
