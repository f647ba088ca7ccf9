/*
 * The one function of a fake UCX that does something. It is in a file of its own because it replaces the weak symbol of
 * the other file.
 */
#include <ucs/type/status.h>

__attribute__((visibility("default"))) const char *ucs_status_string(ucs_status_t status) {
    (void)status;
    return "this is a fake";
}
