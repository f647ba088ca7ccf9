/*
 * Loading UCX when it is first needed.
 *
 * kvferry is not linked against UCX: it looks up UCX's functions in a library that it opens at run time, so that
 * one build serves machines with any UCX, and with none. UCX keeps its interface from version to version:
 * structs say by a mask which of their fields are set, and fields are added at the end. So every UCX from
 * 1.13 on reads the same, whatever headers kvferry was compiled with.
 *
 * A process may have several: the system's, those of Python packages, one that another library brought. kvferry opens
 * them with RTLD_LOCAL, so that one does not call the functions of another. That is not enough in two cases:
 *
 *  - Files of the same name. If a library needs "libucs.so.0", the loader uses a file of that name that is loaded
 *    already, from any folder. A UCX that is mixed from two is refused. Wheels with their own UCX give their files
 *    unique names.
 *  - A UCX among the process's global names: the program is linked against one, or opened one with RTLD_GLOBAL. Its
 *    names come before those of any library opened later. Then only that one can be used; all others are refused before
 *    they are opened. RTLD_DEEPBIND is no help: UCX opens its modules without it, and they crash.
 *
 * A loaded UCX is never unloaded: it has patched the memory calls of libc by then, and its threads may run.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "transport/libraries.h"
#include "transport/ucx/ucx.h"

#define CANDIDATES_DEFAULT "libucp.so.0"
#define PART "ucs_status_string" /* a function of libucs, to find the libucs that a libucp uses */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static kvf_ucx_library *all_loaded;
static kvf_library_owner owner;

/* ---- functions of UCX ------------------------------------------------------------------------ */

static const kvf_library_function functions[] = {
#define NEEDED(function) {#function, offsetof(kvf_ucx_library, function), false},
#define USEFUL(function) {#function, offsetof(kvf_ucx_library, function), true},
    KVF_UCX_FUNCTIONS(NEEDED, USEFUL)
#undef NEEDED
#undef USEFUL
};

/* ---- whether it can be used ------------------------------------------------------------------ */

static kvf_status check_version(void *handle, kvf_ucx_library *out) {
    void (*get_version)(unsigned *, unsigned *, unsigned *);
    void *address = dlsym(handle, "ucp_get_version");
    if (!address)
        return kvf_fail(KVF_E_UNSUPPORTED, "it has no ucp_get_version(), so it is no UCX");
    memcpy(&get_version, &address, sizeof address);
    unsigned major = 0, minor = 0, release = 0;
    get_version(&major, &minor, &release);
    (void)snprintf(out->version, sizeof out->version, "%u.%u.%u", major, minor, release);
    out->major = major;
    out->minor = minor;
    if (major != KVF_UCX_MAJOR || minor < KVF_UCX_MINOR_MIN)
        return kvf_fail(KVF_E_UNSUPPORTED, "it is UCX %s; allowed: %d.%d and later versions of %d",
                        out->version, KVF_UCX_MAJOR, KVF_UCX_MINOR_MIN, KVF_UCX_MAJOR);
    return KVF_OK;
}

/* A UCX is three or more libraries, which must lie in one folder. */
static kvf_status check_parts(void *handle, kvf_ucx_library *out) {
    char path[PATH_MAX], part[PATH_MAX];
    kvf_library_file_of(dlsym(handle, "ucp_get_version"), path);
    kvf_library_file_of(dlsym(handle, PART), part);
    const char *name = strrchr(path, '/'), *part_name = strrchr(part, '/');
    if (!name || !part_name)
        return kvf_fail(KVF_E_UNSUPPORTED, "its path cannot be determined");
    if (name - path != part_name - part || strncmp(path, part, (size_t)(name - path)) != 0)
        return kvf_fail(KVF_E_UNSUPPORTED,
                        "this process has the %s of another UCX already (%s), and would mix the two",
                        part_name + 1, part);
    out->path = kvf_strdup(path);
    return out->path ? KVF_OK : kvf_nomem("a library's path");
}

static kvf_ucx_library *loaded_from(const char *path) {
    for (kvf_ucx_library *at = all_loaded; at; at = at->following)
        if (strcmp(at->path, path) == 0)
            return at;
    return NULL;
}

/* ---- loading --------------------------------------------------------------------------------- */

static void drop(kvf_ucx_library *library) {
    kvf_free(library->path);
    kvf_free(library);
}

static kvf_status examine(void *handle, const kvf_ucx_library **out) {
    kvf_ucx_library *made = kvf_alloc0(1, sizeof *made);
    if (!made)
        return kvf_nomem("a library's functions");
    kvf_status status = check_version(handle, made);
    if (!status)
        status = kvf_library_find(handle, functions, sizeof functions / sizeof *functions, made);
    if (!status)
        status = check_parts(handle, made);
    if (status) {
        drop(made);
        return status;
    }
    kvf_ucx_library *known = loaded_from(made->path);
    if (known) {
        drop(made);
    } else {
        known = made;
        made->following = all_loaded;
        all_loaded = made;
        kvf_ucx_catch_log(made);
        kvf_library_stay(); /* UCX keeps a function of ours */
    }
    *out = known;
    return KVF_OK;
}

/* A wheel's own UCX comes with its own libraries for InfiniBand, under names with a hash, but its module for EFA needs
 * libefa of the system, and so the system's copies of the same libraries. If that module opened them, they would call
 * into the wheel's, and the process would crash when it ends (nixl-cu13 1.5.1 on Debian 12, with or without kvferry).
 * If they are opened before, on their own, they do not. */
static void keep_apart(const char *name) {
    const char *file = strrchr(name, '/');
    if (file && strncmp(file, "/libucp.so", strlen("/libucp.so")) != 0)
        (void)dlopen("libefa.so.1", RTLD_NOW | RTLD_LOCAL);
}

static kvf_status check_global_names(const char *name) {
    char global[PATH_MAX], own[PATH_MAX] = "";
    void *address = dlsym(RTLD_DEFAULT, PART);
    if (!address)
        return KVF_OK;
    kvf_library_file_of(address, global);
    void *handle = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
    void *own_address = handle ? dlsym(handle, PART) : NULL;
    if (own_address)
        kvf_library_file_of(own_address, own);
    if (handle)
        (void)dlclose(handle); /* counted once more by dlopen() */
    if (strcmp(global, own) == 0)
        return KVF_OK;
    return kvf_fail(KVF_E_UNSUPPORTED,
                    "this process has another UCX among its global names (%s), and would mix the two",
                    global);
}

static kvf_status load_one(const char *name, void *out) {
    kvf_status status = kvf_library_check_file(name);
    if (!status)
        status = check_global_names(name);
    if (status)
        return status;
    keep_apart(name);
    void *handle;
    status = kvf_library_open(name, &handle);
    if (status)
        return status;
    status = examine(handle, out);
    if (status)
        (void)dlclose(handle); /* or the loader would use its files for the next one */
    return status;
}

/* In a child of a process that has opened UCX, opening it again hangs or aborts. */
kvf_status kvf_ucx_load(const char *candidates, const kvf_ucx_library **out) {
    kvf_status status = kvf_library_claim(&owner, "UCX");
    if (status)
        return status;
    const kvf_ucx_library *found = NULL;
    (void)pthread_mutex_lock(&lock);
    status = kvf_library_load_first("UCX", "ucx.library", candidates ? candidates : CANDIDATES_DEFAULT,
                                    load_one, &found);
    if (!all_loaded)
        kvf_library_disclaim(&owner);
    (void)pthread_mutex_unlock(&lock);
    *out = found;
    return status;
}

/* ---- resources ------------------------------------------------------------------------------- */

/* UCX prints its resources, "<transport>/<device>", one a line; there is no other way to get them. */
static void note_resource(const char *line, char *out, size_t bytes) {
    size_t used = strlen(out);
    const char *last = line + strlen(line);
    while (last > line && (last[-1] == ' ' || last[-1] == '\n'))
        last--;
    const char *first = last;
    while (first > line && first[-1] != ' ')
        first--;
    size_t length = (size_t)(last - first);
    if (length > 0 && memchr(first, '/', length) && used + length + 2 <= bytes)
        (void)snprintf(out + used, bytes - used, "%s%.*s", used ? " " : "", (int)length, first);
}

void kvf_ucx_resources(const kvf_ucx_library *ucx, ucp_context_h context, char *out, size_t bytes) {
    char *text = NULL, *rest, *line;
    size_t length = 0;
    FILE *memory = ucx->ucp_context_print_info ? open_memstream(&text, &length) : NULL;
    out[0] = '\0';
    if (!memory)
        return;
    ucx->ucp_context_print_info(context, memory);
    bool written = fclose(memory) == 0;
    rest = text;
    while (written && (line = strsep(&rest, "\n")) != NULL)
        if (strstr(line, " resource "))
            note_resource(line, out, bytes);
    free(text);
}

#define RESOURCES_BYTES (8u << 10) /* some hundreds of them */

bool kvf_ucx_has_rdma(const kvf_ucx_library *ucx, ucp_context_h context) {
    /* The beginnings of their names: InfiniBand and RoCE, EFA, Cray. UCX's datagrams, ud_*, exist only beside these. */
    static const char *const able[] = {"rc_", "dc_", "gga_", "srd/", "ugni_rdma"};
    char found[RESOURCES_BYTES];
    kvf_ucx_resources(ucx, context, found, sizeof found);
    for (const char *word = found; word; word = strchr(word, ' ')) {
        word += *word == ' ';
        for (size_t i = 0; i < sizeof able / sizeof *able; i++)
            if (strncmp(word, able[i], strlen(able[i])) == 0)
                return true;
    }
    return false;
}
