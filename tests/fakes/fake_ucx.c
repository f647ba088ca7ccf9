/*
 * A library that looks like UCX to a loader, but every function fails. Built several times, see cmake/tests.cmake: with
 * a version that is too old, with another major version, and without a required function.
 */
#include "transport/ucx/ucx.h"

#define SEEN __attribute__((visibility("default")))

SEEN ucs_status_t fake_failure(void);

SEEN ucs_status_t fake_failure(void) {
    return UCS_ERR_UNSUPPORTED;
}

SEEN void ucp_get_version(unsigned *major, unsigned *minor, unsigned *release) {
    *major = FAKE_MAJOR;
    *minor = FAKE_MINOR;
    *release = 7;
}

#define ALIAS(function) __asm__(".weak " #function "\n.set " #function ", fake_failure");
#define NONE(function)
KVF_UCX_FUNCTIONS(ALIAS, NONE)

#ifdef FAKE_LACKS
__asm__(".hidden " FAKE_LACKS);
#endif
