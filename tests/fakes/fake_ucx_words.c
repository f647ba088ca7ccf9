/*
 * The one function of a fake UCX that does something; in a file of its own, for it comes before the weak name of the
 * other file.
 */
#include <ucs/type/status.h>

__attribute__((visibility("default"))) const char *ucs_status_string(ucs_status_t status) {
    (void)status;
    return "this is a fake";
}
