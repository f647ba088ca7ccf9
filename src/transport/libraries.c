#include "transport/libraries.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/fork.h"

void kvf_library_file_of(void *address, char out[PATH_MAX]) {
    Dl_info info;
    if (!dladdr(address, &info) || !info.dli_fname || !realpath(info.dli_fname, out))
        out[0] = '\0';
}

void kvf_library_stay(void) {
    static const char here;
    Dl_info info;
    if (dladdr(&here, &info) && info.dli_fname)
        (void)dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
}

/* The loader finds names without a slash. */
kvf_status kvf_library_check_file(const char *name) {
    struct stat file;
    if (!strchr(name, '/') || stat(name, &file) != 0 || S_ISREG(file.st_mode))
        return KVF_OK;
    return kvf_fail(KVF_E_UNSUPPORTED, "it is not a regular file");
}

kvf_status kvf_library_open(const char *name, void **handle) {
    *handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (*handle)
        return KVF_OK;
    const char *reason = dlerror();
    const size_t length = strlen(name);
    if (reason && strncmp(reason, name, length) == 0 && strncmp(reason + length, ": ", 2) == 0)
        reason += length + 2;
    return kvf_fail(KVF_E_UNSUPPORTED, "%s", reason ? reason : "it cannot be loaded");
}

kvf_status kvf_library_find(void *handle, const kvf_library_function *functions, size_t count, void *out) {
    for (size_t i = 0; i < count; i++) {
        void *address = dlsym(handle, functions[i].name);
        if (!address && !functions[i].may_lack)
            return kvf_fail(KVF_E_UNSUPPORTED, "it has no %s()", functions[i].name);
        memcpy((char *)out + functions[i].at, &address, sizeof address);
    }
    return KVF_OK;
}

kvf_status kvf_library_load_first(const char *what, const char *setting, const char *candidates,
                                  kvf_status (*load)(const char *name, void *out), void *out) {
    char *names = kvf_strdup(candidates), *rest = names;
    if (!names)
        return kvf_nomem("the libraries' names");
    kvf_text reasons = {0};
    kvf_status status = KVF_E_UNSUPPORTED;
    for (char *name; status == KVF_E_UNSUPPORTED && (name = strsep(&rest, ":")) != NULL;) {
        status = *name ? load(name, out)
                       : kvf_fail(KVF_E_INVALID, "%s is \"%s\"; allowed: files with ':' between them",
                                  setting, candidates);
        if (status == KVF_E_UNSUPPORTED)
            kvf_text_add(&reasons, "%s%s: %s", reasons.length ? "; " : "", name, kvf_error_detail());
    }
    if (status == KVF_E_UNSUPPORTED)
        status = kvf_fail(status, "no %s was loaded: %s", what, reasons.data ? reasons.data : candidates);
    kvf_text_free(&reasons);
    kvf_free(names);
    return status;
}

kvf_status kvf_library_claim(kvf_library_owner *owner, const char *what) {
    const unsigned now = kvf_fork_count() + 1;
    unsigned none = 0;
    if (atomic_compare_exchange_strong(&owner->forks, &none, now) || none == now)
        return KVF_OK;
    return kvf_fail(KVF_E_UNSUPPORTED, "this process was forked from one that had opened %s", what);
}

void kvf_library_disclaim(kvf_library_owner *owner) {
    atomic_store(&owner->forks, 0);
}
