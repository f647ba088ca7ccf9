/*
 * Loading the library of a fabric when it is first needed: the first usable one of a list of files, opened so that its
 * names stay its own.
 */
#ifndef KVF_TRANSPORT_LIBRARIES_H
#define KVF_TRANSPORT_LIBRARIES_H

#include <limits.h>
#include <stdatomic.h>

#include "base/base.h"

/**
 * Tries files in order until one is loaded.
 *
 * @param what        the library, for messages, as "UCX"
 * @param setting     the setting that lists the candidates, for messages
 * @param candidates  files, separated by ':'; the system's loader finds those without a slash
 * @param load        loads one; KVF_E_UNSUPPORTED, with the reason: the next one is tried
 * @return KVF_OK, KVF_E_UNSUPPORTED (none can be used, each with the reason), KVF_E_INVALID (an empty name),
 *         KVF_E_NOMEM
 */
kvf_status kvf_library_load_first(const char *what, const char *setting, const char *candidates,
                                  kvf_status (*load)(const char *name, void *out), void *out);

/** Whether a name may be opened: KVF_E_UNSUPPORTED for all but plain files, which may block. */
kvf_status kvf_library_check_file(const char *name);

/** Opens a library with its own names. KVF_E_UNSUPPORTED, with the loader's reason. */
kvf_status kvf_library_open(const char *name, void **handle);

/** A function that is looked up in a library. */
typedef struct kvf_library_function {
    const char *name;
    size_t at;     /**< where its address is stored in the fabric's struct of functions */
    bool may_lack; /**< some versions do not have it: NULL is stored then */
} kvf_library_function;

/** Looks up functions and stores their addresses in `out`. KVF_E_UNSUPPORTED: one is missing; the detail names it. */
kvf_status kvf_library_find(void *handle, const kvf_library_function *functions, size_t count, void *out);

/** The file that an address is in, without links; "" if unknown. */
void kvf_library_file_of(void *address, char out[PATH_MAX]);

/** Keeps the library that contains kvferry's code loaded, because another one keeps a function of it. Does nothing for
 * a program, which stays anyway. */
void kvf_library_stay(void);

/** The process that has opened a library whose threads and descriptors do not survive fork(). All zeros at first. */
typedef struct kvf_library_owner {
    atomic_uint forks; /**< kvf_fork_count(), and 1, of the process that opens or has opened it; 0: none */
} kvf_library_owner;

/** To be called before opening: KVF_E_UNSUPPORTED in a child of a process that has opened it. Any thread. */
kvf_status kvf_library_claim(kvf_library_owner *owner, const char *what);

/** To be called afterwards, if the library was not opened: a child may open it then. */
void kvf_library_disclaim(kvf_library_owner *owner);

#endif
