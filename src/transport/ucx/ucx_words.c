/*
 * UCX's errors and log lines in our words.
 *
 * UCX logs all errors to the terminal, which a library must not do. Its log lines also say more than its status
 * codes ("no active messages transport to ..."), so they are caught and become part of the detail text. Lines
 * from UCX's own helper thread, and all lines if the user has set UCX_LOG_LEVEL, are left alone.
 */
#include <stdio.h>
#include <stdlib.h>

#include "transport/ucx/ucx.h"

static _Thread_local unsigned depth;
static _Thread_local char first_error[240];

static ucs_log_func_rc_t catch_line(const char *file, unsigned line, const char *function,
                                    ucs_log_level_t level, const ucs_log_component_config_t *component,
                                    const char *format, va_list arguments)
    __attribute__((format(printf, 6, 0)));

static ucs_log_func_rc_t catch_line(const char *file, unsigned line, const char *function,
                                    ucs_log_level_t level, const ucs_log_component_config_t *component,
                                    const char *format, va_list arguments) {
    (void)file;
    (void)line;
    (void)function;
    (void)component;
    if (depth == 0 || level == UCS_LOG_LEVEL_FATAL || level > UCS_LOG_LEVEL_DIAG)
        return UCS_LOG_FUNC_RC_CONTINUE;
    if (level == UCS_LOG_LEVEL_ERROR && !*first_error) {
        (void)vsnprintf(first_error, sizeof first_error, format, arguments);
    }
    return UCS_LOG_FUNC_RC_STOP;
}

void kvf_ucx_catch_log(const kvf_ucx_library *ucx) {
    if (ucx->ucs_log_push_handler && !getenv("UCX_LOG_LEVEL"))
        ucx->ucs_log_push_handler(catch_line);
}

const kvf_cuda *kvf_ucx_enter(const kvf_ucx_endpoint *endpoint) {
    if (depth++ == 0)
        *first_error = '\0';
    return kvf_device_context_enter(&endpoint->device_context);
}

void kvf_ucx_leave(const kvf_cuda *entered) {
    kvf_device_context_leave(entered);
    depth--;
}

/* Our status for UCX's. */
static kvf_status status_of(ucs_status_t status) {
    switch (status) {
    case UCS_OK:
        return KVF_OK;
    case UCS_ERR_NO_MEMORY:
        return KVF_E_NOMEM;
    case UCS_ERR_UNREACHABLE:
    case UCS_ERR_UNSUPPORTED:
    case UCS_ERR_NO_DEVICE:
    case UCS_ERR_NOT_IMPLEMENTED:
        return KVF_E_UNSUPPORTED;
    case UCS_ERR_CONNECTION_RESET:
    case UCS_ERR_ENDPOINT_TIMEOUT:
    case UCS_ERR_NOT_CONNECTED:
    case UCS_ERR_REJECTED:
    case UCS_ERR_CANCELED:
        return KVF_E_PEER_LOST;
    default:
        return KVF_E_IO;
    }
}

kvf_status kvf_ucx_fail(const kvf_ucx_library *ucx, ucs_status_t status, const char *what) {
    return kvf_fail(status_of(status), "UCX %s: %s%s%s", what, ucx->ucs_status_string(status),
                    *first_error ? ": " : "", first_error);
}
