/*
 * A library that looks like UCX to a loader, and is none: every function fails. Built several times, see
 * cmake/tests.cmake: of a version that is too old, of another major version, without a function that is needed.
 */
#include "transport/ucx/ucx.h"

#define SEEN __attribute__((visibility("default")))

SEEN int fake_minor(void);
SEEN ucs_status_t fake_failure(void);

/* Called through the loader, as the parts of a UCX call each other: one of the same name elsewhere may stand in. */
SEEN int fake_minor(void) {
    return FAKE_MINOR;
}

SEEN ucs_status_t fake_failure(void) {
    return UCS_ERR_UNSUPPORTED;
}

SEEN void ucp_get_version(unsigned *major, unsigned *minor, unsigned *release) {
    *major = FAKE_MAJOR;
    *minor = (unsigned)fake_minor();
    *release = 7;
}

#define ALIAS(function) __asm__(".weak " #function "\n.set " #function ", fake_failure");
#define NONE(function)
KVF_UCX_FUNCTIONS(ALIAS, NONE)

#ifdef FAKE_LACKS
__asm__(".hidden " FAKE_LACKS);
#endif
