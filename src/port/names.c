#include "port/names.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/socket.h>

#include "base/thread.h"

/* The one who has asked, and the thread, which nobody waits for: the last of them frees it. So its memory is the C
 * library's, and not of the caller's allocator, which may be gone by then. */
struct kvf_lookup {
    _Atomic uint32_t users;
    _Atomic bool over;
    char address[INET_ADDRSTRLEN]; /* "": there is none */
    char host[];
};

static _Atomic uint32_t under_way;

static void leave(kvf_lookup *lookup) {
    if (lookup && atomic_fetch_sub(&lookup->users, 1) == 1)
        free(lookup);
}

void kvf_lookup_drop(kvf_lookup **lookup) {
    leave(*lookup);
    *lookup = NULL;
}

static void *look_up(void *context) {
    const struct addrinfo hints = {.ai_family = AF_INET, .ai_socktype = SOCK_STREAM};
    kvf_lookup *lookup = context;
    struct addrinfo *found = NULL;
    if (getaddrinfo(lookup->host, NULL, &hints, &found) == 0) {
        const struct sockaddr_in *first = (const struct sockaddr_in *)(const void *)found->ai_addr;
        (void)inet_ntop(AF_INET, &first->sin_addr, lookup->address, sizeof lookup->address);
        freeaddrinfo(found);
    }
    atomic_store(&lookup->over, true);
    atomic_fetch_sub(&under_way, 1);
    leave(lookup);
    return NULL;
}

/* KVF_IN_PROGRESS: there are too many, or no thread; it is tried again. */
static kvf_status start(const char *host, size_t bytes, kvf_lookup **out) {
    pthread_t thread;
    if (atomic_fetch_add(&under_way, 1) >= KVF_LOOKUPS) {
        atomic_fetch_sub(&under_way, 1);
        return KVF_IN_PROGRESS;
    }
    kvf_lookup *lookup = calloc(1, sizeof *lookup + bytes + 1);
    kvf_status status = lookup ? KVF_OK : kvf_nomem("a host name");
    if (!status) {
        lookup->users = 2;
        memcpy(lookup->host, host, bytes);
        status = kvf_thread_start(&thread, look_up, lookup) ? KVF_IN_PROGRESS : KVF_OK;
    }
    if (status) {
        free(lookup);
        atomic_fetch_sub(&under_way, 1);
        return status;
    }
    (void)pthread_detach(thread);
    *out = lookup;
    return KVF_OK;
}

kvf_status kvf_look_up(const char *host, size_t bytes, kvf_lookup **lookup, char address[INET_ADDRSTRLEN]) {
    kvf_status status = *lookup ? KVF_OK : start(host, bytes, lookup);
    if (status)
        return status;
    if (!atomic_load(&(*lookup)->over))
        return KVF_IN_PROGRESS;
    memcpy(address, (*lookup)->address, INET_ADDRSTRLEN);
    kvf_lookup_drop(lookup);
    return address[0] ? KVF_OK : KVF_E_IO;
}
