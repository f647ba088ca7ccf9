#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/base.h"

static _Thread_local char detail[KVF_DETAIL_BYTES];

/* The names are in parentheses because base.h makes them macros for static analysers. */
kvf_status(kvf_fail)(kvf_status status, const char *format, ...) {
    KVF_ASSERT(status != KVF_OK);
    va_list arguments;
    va_start(arguments, format);
    /* The arguments may themselves point into the detail text. */
    char fresh[KVF_DETAIL_BYTES];
    (void)vsnprintf(fresh, sizeof fresh, format, arguments);
    va_end(arguments);
    memcpy(detail, fresh, sizeof detail);
    return status;
}

kvf_status(kvf_fail_in)(kvf_status status, const char *format, ...) {
    char where[KVF_DETAIL_BYTES];
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(where, sizeof where, format, arguments);
    va_end(arguments);
    return kvf_fail(status, "%s%s", where, detail);
}

void kvf_assertion_failed(const char *condition, const char *file, int line, const char *function) {
    (void)fprintf(stderr, "%s:%d: %s(): assertion failed: %s\n", file, line, function, condition);
    abort();
}

void kvf_error_restore(const char *text) {
    (void)snprintf(detail, sizeof detail, "%s", text);
}

const char *kvf_error_detail(void) {
    return detail;
}

kvf_status(kvf_nomem)(const char *what) {
    return kvf_fail(KVF_E_NOMEM, "no memory for %s", what);
}

const char *kvf_status_name(kvf_status status) {
    switch (status) {
#define NAME(code)                                                                                           \
    case code:                                                                                               \
        return #code;
        NAME(KVF_OK)
        NAME(KVF_E_INVALID)
        NAME(KVF_E_RANGE)
        NAME(KVF_E_OVERFLOW)
        NAME(KVF_E_OVERLAP)
        NAME(KVF_E_MISMATCH)
        NAME(KVF_E_UNCOVERED)
        NAME(KVF_E_NOT_FOUND)
        NAME(KVF_E_EXISTS)
        NAME(KVF_E_NOT_EXPRESSIBLE)
        NAME(KVF_E_UNSUPPORTED)
        NAME(KVF_E_PARSE)
        NAME(KVF_E_NOMEM)
        NAME(KVF_E_IO)
        NAME(KVF_E_PERMISSION)
        NAME(KVF_E_NOT_REGISTERED)
        NAME(KVF_E_PEER_LOST)
        NAME(KVF_E_CANCELLED)
        NAME(KVF_E_AGAIN)
        NAME(KVF_E_TIMEOUT)
        NAME(KVF_E_EMPTY)
        NAME(KVF_E_LIMIT)
        NAME(KVF_IN_PROGRESS)
#undef NAME
    }
    return "unknown status";
}

kvf_status kvf_status_of_listening(int error) {
    if (error == EADDRINUSE)
        return KVF_E_EXISTS;
    if (error == EACCES || error == EPERM)
        return KVF_E_PERMISSION;
    return error == EINVAL || error == ENODEV || error == EADDRNOTAVAIL ? KVF_E_INVALID : KVF_E_IO;
}
